//! The filesystem tier on real directories: the suite for all tiers, hosts that share one, kills, damage, limits,
//! hanging mounts, the sweeper.

mod bed;
mod conform;
mod damage;
mod full;
mod fuse;
mod hang;
mod limits;
mod links;
mod missing;
mod mounts;
mod purge;
mod share;
mod sweep;
mod volume;
