//! The Redis tier's promises: on real servers, Redis and Valkey, that are killed, stopped, filled up and moved; and on
//! a server of our own that misbehaves as told, or by a seed.
//!
//! The servers come from the environment (`REDIS_SERVER`, `VALKEY_SERVER`), from the wheels that
//! `make test` installs into `.venv`, or from the machine. Ones that are not found fail the tests with a hint.

mod access;
mod bed;
mod bench;
mod cluster;
mod conform;
mod cut;
mod fake;
mod faults;
mod hanging;
mod misbehaviour;
mod purge;
mod sentinel;
mod servers;
mod tls;
