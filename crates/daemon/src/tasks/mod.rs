//! Work beside the calls of clients: each task or thread waits for its own cause and then runs events.
//!
//! Parts own their state and do not know the tasks; tasks know the shared state and call the parts.

pub mod attach;
pub mod drive_tiers;
pub mod lend;
pub mod open_tiers;
pub mod populate_memory;
pub mod purge_shared;
pub mod relocate;
pub mod scrub;
pub mod tick;
pub mod verify;
pub mod watch_files;
pub mod work_off;
