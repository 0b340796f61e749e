//! What explains the hit rate: how good it could be, and what more room would buy.
//!
//! Invariants: this crate sees the core from outside, through the same public face as the daemon; like the core it
//! reads no clock, starts no thread, opens no file and has no `unsafe`; its memory is bounded, whatever is asked for.
//!
//! Reading order: `ceiling` (hits of a cache of endless size), `optimum` (hits of the best possible policy, on a
//! sample), `rehearsal` (a core without payloads), `curve` (many small rehearsals, one for each capacity).

#![forbid(unsafe_code)]

pub mod ceiling;
pub mod curve;
#[cfg(test)]
mod mix;
pub mod optimum;
pub mod rehearsal;
