//! The core's estimates beside exact figures, on a whole trace.

use forebay_core::ceiling::Ceiling;
use forebay_core::curve::{Curve, OWNERS};
use forebay_core::rehearsal::Shape;

use crate::trace::Trace;

/// Tells both estimates what a daemon would see: each request's keys. Each namespace is an owner of its own.
pub fn note(trace: &Trace, salt: u64, ceiling: &mut Ceiling, curve: &mut Curve) {
    for request in trace.requests() {
        let key = |block: &u32| u64::from_le_bytes(*Trace::hash(*block, salt).first_chunk().expect("16 bytes hold 8"));
        let keys: Vec<u64> = request.blocks.iter().map(key).collect();
        ceiling.note(request.at_us, keys.iter().copied());
        let shape = Shape::of_prompts(trace.bytes_in(request.namespace));
        curve.note(usize::from(request.namespace).min(OWNERS - 1), shape, &keys);
    }
}
