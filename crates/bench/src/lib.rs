//! Measurements of the product: what `forebay bench` runs, and, in `benches/`, what reports are made with.
//!
//! Everything here uses the public face of the other crates. Three measurements need more and stay where they are:
//! `forebay_device::bench` compares the bytes of both sides of a copy, `forebay_io::ssd::bench` reads and writes the
//! device past the tier, and `forebay_io::redis::bench` opens a connection of its own as the tier does.

#![forbid(unsafe_code)]

pub mod blocks;
pub mod lookup;
pub mod private;
pub mod transfer;

/// The arguments of a benchmark, without the one that `cargo bench` adds.
pub fn arguments() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|argument| argument != "--bench")
}
