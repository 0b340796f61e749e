//! The pool's named files, as the daemon owns them and as workers map them.
//!
//! Daemon:
//! - [`Pool::open`] → [`Opened`] { pool, outcome: Created | Recovered | Replaced }. It refuses a second daemon, a
//!   pool larger than memory, a directory that is not memory or has files that no pool made, and a new shape while
//!   workers map the old one.
//! - [`Pool::populate_unit`] from a thread of its own, unit by unit; then [`Pool::set_extent`] there.
//! - A slot's life: [`Pool::reserve`] → [`Pool::set_holders`] → offsets leave → [`Pool::birth`] → [`Pool::ready`] → …
//!   → [`Pool::free`]; [`Pool::entry`] reads a ready one back.
//! - After a restart: [`Pool::first_generation`], [`Pool::recovered_extents`], [`Pool::unreadable_units`],
//!   [`Pool::recover`], [`Pool::instances`], [`Pool::namespaces`], [`Pool::lock_held`].
//! - For a worker: [`Pool::mapper_fds`] and [`Pool::description`], sent with [`send_fds`].
//! - [`Pool::set_births`], [`Pool::move_births`]: slice checksum records (births) of blocks that no worker stored.
//! - For a client that lends memory: [`Lent`], [`Pool::copy_in`], [`Pool::copy_out`].
//! - [`Pool::checksum`], [`Pool::read`], [`Pool::write`], [`Pool::data_ptr`]; [`Pool::huge_page_report`],
//!   [`Pool::retire`], [`remove`], [`Room`].
//!
//! Worker: [`recv_fds`] → [`MapperFds::from_received`] → [`Mapping::new`]; then [`Mapping::generation`],
//! [`Mapping::is_still`], [`Mapping::birth`], [`Mapping::write_birth`], [`Mapping::is_retired`],
//! [`Mapping::data_ptr`].
//!
//! Invariants, each with tests: a crash at any instruction leaves every slot whole or visibly not. The record of who
//! may touch a slot is written before offsets leave. A worker counts as alive exactly as long as it can touch the
//! pool. Files are never truncated. Every byte that another process wrote is treated as untrusted.
//! `docs/formats/pool.md` draws the files.

mod cgroup;
mod config;
mod credentials;
mod directory;
mod fds;
mod fence;
mod files;
mod format;
mod found;
mod generations;
mod geometry;
mod huge;
mod lent;
mod lock;
mod map;
mod mapping;
mod mounts;
mod open;
mod order;
mod ours;
mod owner;
mod records;
mod room;
mod site;
mod table;
#[cfg(test)]
mod tests;

pub use cgroup::core_quota;
pub use config::{HugePages, PoolConfig};
pub use credentials::peer_uid;
pub use directory::check_mount;
pub use fds::{MAX_FDS, MAX_MESSAGE_BYTES, recv_fds, send_fds};
pub use format::VERSION as FORMAT_VERSION;
pub use format::{
    Backing, BirthRecord, ENDED_PURGES, EndedPurge, Entry, InstanceRecord, MAX_ENGINE_ID_BYTES, NAMESPACES,
    NamespaceRecord, PURGES, PurgePlaces, PurgeRecord, Slice,
};
pub use geometry::{Extent, Geometry, MAX_RANKS, MAX_UNIT_BYTES, MIN_UNIT_BYTES};
pub use huge::HugePageReport;
pub use lent::{Lending, Lent, MAX_LENT_BYTES};
pub use mapping::{GeometryDescription, MapperFds, Mapping};
pub use open::{Opened, Outcome, remove};
pub use owner::{Pool, RecoveryCursor};
pub use room::Room;
pub use table::{RecoveredSlot, SlotState};
