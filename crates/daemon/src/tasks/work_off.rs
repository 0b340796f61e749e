//! The pieces into which the core cut its long work: regularly, and at once where much waits. What lookups leave behind
//! is done after their answers, not before later ones.

use std::convert::Infallible;
use std::time::Duration;

use crate::state::Shared;

const PERIOD: Duration = Duration::from_millis(250);

pub async fn run(shared: Shared) -> Infallible {
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = shared.has_backlog() => {}
        }
        // Answers that are ready are sent first.
        tokio::task::yield_now().await;
        shared.work_off().await;
    }
}
