//! Tests of the parts together, which need what the crate does not show.

mod fuzz;
mod nodes;
mod simulation;
