//! Compares the core's estimates with exact figures, on a whole trace.

use forebay_insight::ceiling::Ceiling;
use forebay_insight::curve::{Curve, OWNERS};
use forebay_insight::rehearsal::Shape;

use crate::trace::Trace;

/// Feeds both estimates with the keys of each request, as a daemon would. Each namespace is a separate owner.
pub fn note(trace: &Trace, salt: u64, ceiling: &mut Ceiling, curve: &mut Curve) {
    for request in trace.requests() {
        let key = |block: &u32| u64::from_le_bytes(*Trace::hash(*block, salt).first_chunk().expect("16 bytes hold 8"));
        let keys: Vec<u64> = request.blocks.iter().map(key).collect();
        ceiling.note(request.at_us, &keys, 0);
        let shape = Shape::of_prompts(trace.bytes_in(request.namespace));
        curve.note(usize::from(request.namespace).min(OWNERS - 1), shape, &keys);
    }
}
