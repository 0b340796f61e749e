//! Comparing recovered blocks with their checksums, on a thread of its own, when they are first asked for.

use tokio::sync::mpsc;

use crate::state::{Shared, ToVerify};

/// Starts the thread; it ends with the daemon's state.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToVerify>) {
    let (pool, shared) = (shared.lock().pool.clone(), shared.clone());
    let run = move || {
        while let Some(ToVerify { block, slot, generation }) = queue.blocking_recv() {
            let entry = pool.entry(slot);
            let is_whole =
                entry.as_ref().is_some_and(|entry| pool.checksum(slot.offset(), entry.length) == entry.checksum);
            if !is_whole {
                tracing::warn!(slot = slot.0, "a recovered block is not what was stored; it is dropped");
            }
            shared.event(|state| state.core.verified(block, generation, is_whole));
        }
    };
    std::thread::Builder::new().name("verify".into()).spawn(run).expect("the system starts a thread");
}
