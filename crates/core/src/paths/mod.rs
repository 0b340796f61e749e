//! What happens to the parts of the core, one event each: the only files beside `core` that see all parts at once.
//!
//! In the order data passes: `store` (reserve, commit, abort), `lookup` (hits and leases), `probe` (whether shared
//! tiers have it), `promote` (from a tier, because somebody asked), `hint` and `prefetch` (before anybody asks),
//! `write_back` (to a tier), `evict` (slots for all of these), `rebalance` and `relocate` (units from class to class),
//! `purge` (a namespace), `recover` (what outlives a process), `verify` and `scrub` (blocks whose bytes are wrong),
//! `tier_events` (what the driver of the tiers says), `report` (what people see, and the audit).

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
pub mod verify;
mod write_back;
