//! The paths of the core, one event each. Beside `core`, these are the only files that see all parts.
//!
//! In the order in which data passes: `store` (reserve, commit, abort), `lookup` (hits and leases), `window` (which
//! blocks of a windowed group are needed), `probe` (does a shared tier have the block?), `promote` (from a tier, for a
//! lookup), `hint` and `prefetch` (from a tier, before a lookup), `write_back` and `backfill` (to a tier), `touch` (of
//! a block on a shared tier), `evict` (slots for all of these), `rebalance` and `relocate` (units from class to class),
//! `purge` (a namespace), `recover` (after the end of a process), `verify` and `scrub` (blocks whose bytes are wrong),
//! `tier_events` (reports of the tiers' driver), `report` (figures for people, and the audit).

mod backfill;
mod evict;
mod hint;
pub mod lookup;
mod prefetch;
mod probe;
mod promote;
pub mod purge;
mod rebalance;
pub mod recover;
mod relocate;
pub mod report;
mod scrub;
pub mod store;
mod tier_events;
mod touch;
pub mod verify;
mod window;
mod write_back;
