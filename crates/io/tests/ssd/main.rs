//! The SSD tier's promises: on a simulated disk that fails, tears and loses power as told, and on real files with
//! both engines and real processes.
//!
//! Simulated runs repeat from their seed, which a failure prints.

mod away;
mod bed;
mod bench;
mod conform;
mod crash;
mod damage;
mod faults;
mod files;
mod fixture;
mod fuzz;
mod kill;
mod limits;
mod lists;
mod model;
mod placement;
mod purges;
mod soak;
mod taken;
mod trim;
