//! When the tier gets its turn: whenever it has completed something, and as time passes.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Opening;
use crate::state::Shared;

/// Deadlines, write budgets and flushes are as exact as this.
const PERIOD: Duration = Duration::from_millis(10);
/// Blocks that failed or were late are asked for again this often: long enough that a request does not wait for
/// the same block twice.
const FORGIVE: Duration = Duration::from_secs(2);

/// Opens the tier, if there is one, and drives it from then on.
pub fn start(opening: Option<Opening>, shared: &Shared) {
    opening.into_iter().for_each(|opening| opening.spawn(shared));
}

pub(super) async fn run(shared: Shared, wake: OwnedFd) {
    // Without it, asking every 10 ms costs latency and no blocks.
    let wake = waiter(wake).inspect_err(|error| tracing::warn!(%error, "cannot wait for the disks")).ok();
    let mut ticks = tokio::time::interval(PERIOD);
    let mut forgive = tokio::time::interval(FORGIVE);
    for interval in [&mut ticks, &mut forgive] {
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    }
    loop {
        tokio::select! {
            () = woken(wake.as_ref()) => {}
            _ = ticks.tick() => {}
            _ = forgive.tick() => shared.event(|state| state.core.forgive()),
        }
        shared.event(|state| {
            state.drive_tiers();
            state.step_purges();
        });
    }
}

#[allow(
    deprecated,
    reason = "its successor is unsafe for the sake of types that may close their descriptor; this one does not"
)]
fn waiter(wake: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(wake, Interest::READABLE)
}

/// The descriptor stays readable until the tier is polled, which clears it.
async fn woken(wake: Option<&AsyncFd<OwnedFd>>) {
    match wake {
        Some(wake) => match wake.readable().await {
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}
