//! The pieces into which the core cut its long work: after each tick, and at once where much waits. What lookups leave
//! behind is done after their answers, not before later ones.

use std::convert::Infallible;

use crate::state::Shared;

pub async fn run(shared: Shared) -> Infallible {
    loop {
        shared.work_is_due().await;
        // Answers that are ready are sent first.
        tokio::task::yield_now().await;
        shared.work_off().await;
    }
}
