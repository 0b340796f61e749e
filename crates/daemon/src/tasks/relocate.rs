//! Copies blocks out of extents that move to another slot size, on a thread of its own.
//!
//! The thread has low priority, so it only copies: a task of the deciding thread ends the moves.
//!
//! Invariants: the new slot is ready in the table before the old one is free. After a crash between the two, the block
//! is there twice, and recovery drops one. Until the copy has ended, the new slot belongs to it. The old slot is not
//! held: it may be overwritten during the copy; then the core rejects the copy. So the source and the length are
//! decided together with the move, and not read again.

use forebay_io::pool::Pool;
use tokio::sync::mpsc;

use crate::state::{Shared, State, ToMove};
use crate::vital;

/// Starts the thread.
pub fn start(shared: &Shared, mut queue: mpsc::UnboundedReceiver<ToMove>) {
    let (pool, shared) = (shared.lock().table.pool().clone(), shared.clone());
    // As many as copies that the core has started, which it bounds.
    let (copied, mut copies) = mpsc::unbounded_channel();
    vital::low_thread("relocate", move || {
        loop {
            let Some(to_move) = queue.blocking_recv() else { vital::end_with_process() };
            let is_copied = copy(&pool, &to_move);
            let _ = copied.send((to_move, is_copied));
        }
    });
    vital::task(async move {
        loop {
            let (to_move, is_copied) = copies.recv().await.expect("the thread has the other end");
            shared.event(|state| end(state, &to_move, is_copied));
        }
    });
}

/// False if the block cannot be read, or its births cannot be written.
pub fn copy(pool: &Pool, ToMove { slot, generation, to_slot, to_generation, entry, .. }: &ToMove) -> bool {
    entry.as_ref().is_some_and(|entry| {
        pool.copy(slot.offset(), to_slot.offset(), entry.length);
        pool.move_births((*slot, *generation), (*to_slot, *to_generation))
    })
}

pub fn end(state: &mut State, to_move: &ToMove, is_copied: bool) {
    let ToMove { from, generation, to, to_slot, to_generation, entry, .. } = to_move;
    let is_moved = state.core.moved(*from, *generation, *to, is_copied);
    if let (true, Some(entry)) = (is_moved, entry) {
        state.table.pool().ready(*to_slot, *to_generation, entry);
    }
}
