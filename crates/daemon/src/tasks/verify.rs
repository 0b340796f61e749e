//! Compares blocks with their checksums, on a thread of its own: recovered blocks when they are first looked up, blocks
//! that a worker suspects, blocks with several slices that a tier promoted, and blocks that a tier refused to write.
//!
//! The thread has low priority, so it only reads: a task of the deciding thread takes its verdicts.
//!
//! Invariants: a block that is whole is published under its generation and has the birth records of all its slices, so
//! workers can compare what they load. Only what this thread reads drops a block. What others report does not.

use forebay_core::stats::Finder;
use forebay_io::pool::{Pool, Slice};
use tokio::sync::mpsc;

use crate::state::{Shared, State, ToVerify};
use crate::vital;

/// Starts the thread.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToVerify>) {
    let (pool, shared) = (shared.lock().table.pool().clone(), shared.clone());
    // As many as blocks are being verified, which the core bounds.
    let (verified, mut verdicts) = mpsc::unbounded_channel();
    vital::low_thread("verify", move || {
        loop {
            let Some(asked) = queue.blocking_recv() else { vital::end_with_process() };
            let verdict = verify(&pool, &asked);
            let _ = verified.send((asked, verdict));
        }
    });
    let decide = async move {
        loop {
            let (asked, verdict) = verdicts.recv().await.expect("the thread has the other end");
            let is_dropped = shared.event(|state| end(state, &asked, verdict));
            let ToVerify { slot, finder, .. } = asked;
            match (verdict, finder) {
                (Verdict::Rotten, _) if is_dropped => {
                    let found_by = finder.name();
                    tracing::warn!(
                        slot = slot.0,
                        found_by,
                        "dropped a corrupt block: its bytes do not match its checksum"
                    );
                }
                (Verdict::Whole, Finder::Load) => {
                    tracing::warn!(slot = slot.0, "kept a block that a worker suspected: its bytes match its checksum");
                }
                _ => {}
            }
        }
    };
    vital::task(decide);
}

/// True if the block is dropped.
pub fn end(state: &mut State, asked: &ToVerify, verdict: Verdict) -> bool {
    if verdict == Verdict::Unloadable {
        state.core.drop_unloadable(asked.block);
    }
    state.core.verified(asked.block, asked.generation, verdict != Verdict::Rotten, asked.finder)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Whole,
    Rotten,
    /// Whole, but no worker could compare what it loads.
    Unloadable,
}

pub fn verify(pool: &Pool, asked: &ToVerify) -> Verdict {
    // The block is pinned, so the number is still the slot's.
    let Some(entry) = pool.entry(asked.slot, asked.generation) else { return Verdict::Rotten };
    // Of several slices the sums come in the same pass.
    let is_as_long = entry.length == asked.slices.iter().sum::<u64>();
    let slices = if is_as_long { pool.slices(asked.slot.offset(), &asked.slices) } else { Vec::new() };
    if Slice::combine(&slices) != Some(entry.checksum) {
        return Verdict::Rotten;
    }
    match pool.set_births(asked.slot, asked.generation, &slices) {
        true => Verdict::Whole,
        false => Verdict::Unloadable,
    }
}
