//! Copying blocks out of extents that another slot size is to have, on a thread of its own.
//!
//! Holds true: the new slot is ready in the table before the old one is free, so that a crash between leaves the block
//! twice, and recovery drops one. What is copied may be overwritten meanwhile; then the core wants none of it.

use tokio::sync::mpsc;

use crate::state::{Shared, ToMove};

/// Starts the thread; it ends with the daemon's state.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToMove>) {
    let (pool, shared) = (shared.lock().pool.clone(), shared.clone());
    let run = move || {
        while let Some(ToMove { from, slot, generation, to, to_slot }) = queue.blocking_recv() {
            let entry = pool.entry(slot);
            if let Some(entry) = &entry {
                pool.copy(slot.offset(), to_slot.offset(), entry.length);
                pool.move_births((slot, generation), (to_slot, pool.generation(to_slot)));
            }
            shared.event(|state| {
                let is_moved = state.core.moved(from, generation, to, entry.is_some());
                if let (true, Some(entry)) = (is_moved, &entry) {
                    state.pool.ready(to_slot, entry);
                }
            });
        }
    };
    std::thread::Builder::new().name("relocate".into()).spawn(run).expect("the system starts a thread");
}
