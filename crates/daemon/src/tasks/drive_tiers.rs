//! Calls a tier's driver: whenever the tier has completed something, and at regular times.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use forebay_core::tiers::TierId;

use super::open_tiers::Openings;
use crate::state::{Shared, State};
use crate::tiers::TICK;
use crate::vital;

/// Deadlines, write budgets and flushes are as exact as this.
const PERIOD: Duration = Duration::from_millis(10);

/// Opens the tiers, and drives them from then on.
pub fn start(openings: Openings, shared: &Shared) {
    if openings.is_empty() {
        return;
    }
    openings.into_iter().for_each(|opening| opening.spawn(shared));
    vital::task(expire_skips(shared.clone()));
}

pub(super) async fn run(shared: Shared, tier: TierId, wake: OwnedFd) -> Infallible {
    // Without it, asking every 10 ms costs latency and no blocks.
    let wake = waiter(wake).inspect_err(|error| tracing::warn!(%error, "cannot wait for a tier")).ok();
    let mut ticks = interval(PERIOD);
    loop {
        tokio::select! {
            () = woken(wake.as_ref()) => {}
            _ = ticks.tick() => {}
        }
        let is_more = shared.event(|state| {
            let State { tiers, core, table, .. } = state;
            tiers.drive(tier, core, table.pool());
            state.purge_void(tier) || state.core.has_prefetches() || state.core.has_backfill()
        });
        // Not done here: it may be long, and may wait for what only this tier can end.
        if is_more {
            shared.make_work_due();
        }
        walk(&shared, tier).await;
    }
}

/// A purge's walk through a tier's blocks, in events between which others have their turn, until the tier is due again.
async fn walk(shared: &Shared, tier: TierId) {
    let until = Instant::now() + PERIOD;
    let step = |state: &mut State| state.tiers.walk(tier, &mut state.core);
    while shared.event(step) && Instant::now() < until {
        tokio::task::yield_now().await;
    }
}

async fn expire_skips(shared: Shared) -> Infallible {
    let mut ticks = interval(TICK);
    loop {
        ticks.tick().await;
        shared.event(|state| state.core.expire_skips());
        // There is room for touches again.
        shared.make_work_due();
    }
}

fn interval(period: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    ticks
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
