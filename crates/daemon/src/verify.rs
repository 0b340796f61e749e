//! Comparing blocks with their checksums, on a thread of its own: recovered ones when they are first asked for, those
//! that a worker says are not what was stored, and those that came up from a tier for several ranks.
//!
//! Holds true: a block that passes is published under its generation, and has the births of all its slices, so workers can compare what they load. Nobody is
//! believed who says that a block is rotten: it is dropped for what this thread reads, and for nothing else.

use forebay_core::corrupt::Finder;
use forebay_io::arena::{Pool, Slice};
use tokio::sync::mpsc;

use crate::state::{Shared, ToVerify};
use crate::vital;

/// Starts the thread.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToVerify>) {
    let (pool, shared) = (shared.lock().pool.clone(), shared.clone());
    let run = move || loop {
        let asked = queue.blocking_recv().expect("the state, which `shared` keeps, has the other end");
        let is_whole = verify(&pool, &asked);
        let ToVerify { block, slot, generation, finder, .. } = asked;
        let is_dropped = shared.event(|state| state.core.verified(block, generation, is_whole, finder));
        match finder {
            _ if is_dropped => {
                let found_by = finder.name();
                tracing::warn!(slot = slot.0, found_by, "a block is not what was stored; it is dropped");
            }
            Finder::Load if is_whole => {
                tracing::warn!(slot = slot.0, "a worker could not load a block that is whole; it stays");
            }
            _ => {}
        }
    };
    vital::thread("verify", run);
}

fn verify(pool: &Pool, asked: &ToVerify) -> bool {
    // The block is pinned, so the number is still the slot's.
    if pool.publish_again(asked.slot, asked.generation) {
        let (slot, generation) = (asked.slot.0, asked.generation.0);
        tracing::warn!(slot, generation, "the generation that workers read of a slot was damaged; it is put right");
    }
    let Some(entry) = pool.entry(asked.slot) else { return false };
    // Of several slices the sums come in the same pass.
    let is_as_long = entry.length == asked.slices.iter().sum::<u64>();
    let slices = if is_as_long { pool.slices(asked.slot.offset(), &asked.slices) } else { Vec::new() };
    let is_whole = Slice::combine(&slices) == Some(entry.checksum);
    if is_whole {
        pool.set_births(asked.slot, asked.generation, &slices);
    }
    is_whole
}
