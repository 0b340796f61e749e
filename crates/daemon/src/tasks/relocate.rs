//! Copying blocks out of extents that another slot size is to have, on a thread of its own.
//!
//! Holds true: the new slot is ready in the table before the old one is free, so that a crash between leaves the block
//! twice, and recovery drops one. The new slot is the copy's until it has ended. The old one is not held: what is copied
//! may be overwritten meanwhile; then the core wants none of it. So what is copied, and how much, is decided with the
//! move and never read again.

use tokio::sync::mpsc;

use crate::state::{Shared, ToMove};
use crate::vital;

/// Starts the thread.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToMove>) {
    let (pool, shared) = (shared.lock().table.pool().clone(), shared.clone());
    let run = move || loop {
        let to_move = queue.blocking_recv().expect("the state, which `shared` keeps, has the other end");
        let ToMove { from, slot, generation, to, to_slot, to_generation, entry } = to_move;
        let entry = entry.filter(|entry| {
            pool.copy(slot.offset(), to_slot.offset(), entry.length);
            pool.move_births((slot, generation), (to_slot, to_generation))
        });
        shared.event(|state| {
            let is_moved = state.core.moved(from, generation, to, entry.is_some());
            if let (true, Some(entry)) = (is_moved, &entry) {
                state.table.pool().ready(to_slot, to_generation, entry);
            }
        });
    };
    vital::thread("relocate", run);
}
