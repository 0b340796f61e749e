//! Tests of the parts together, which need what the crate does not show.

mod backlog;
mod fuzz;
mod nodes;
mod simulation;
