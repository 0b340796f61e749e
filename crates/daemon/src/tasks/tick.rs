//! Regular work: alarms, and a check for instances that are gone. Nobody reports the end of a killed process; only its
//! kernel lock disappears. Nor does a client say that it pauses: memory that it has lent is given back. Sizes of blocks
//! that found no memory may search again. Nor does anybody say that a pause after a purge is over.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use crate::insight::alarms;
use crate::service::frame;
use crate::state::Shared;
use crate::turns;

/// Often enough that a killed engine's slots are free before its successor has started, and seldom enough that an idle
/// daemon takes less than a thousandth of a core: each tick wakes the thread twice, for some 50 us each.
const PERIOD: Duration = Duration::from_millis(250);

pub async fn run(shared: Shared) -> Infallible {
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        interval.tick().await;
        let is_step = shared.event(|state| {
            state.last_tick = Instant::now();
            if state.steps.is_due(state.last_tick) {
                let sample = frame::sample(state, state.last_tick);
                state.steps.add(sample);
            }
            state.instances.give_back_idle(Duration::from_secs(state.config.limits.idle_seconds));
            state.instances.idle().into_iter().for_each(|instance| state.settle_instance(instance));
            state.tiers.end_pauses(state.last_tick, &mut state.core);
            state.core.retry_drains();
            state.history.tick(state.last_tick, state.core.stats())
        });
        if is_step {
            turns::spawn(watch(shared.clone()));
        }
        shared.make_work_due();
    }
}

/// Logs which alarms begin and end.
async fn watch(shared: Shared) {
    let insight = shared.lock().insight.clone();
    let estimates = insight.estimates().await;
    let mut state = shared.lock();
    let now = alarms(state.core.stats(), &state.history, &estimates);
    state.watch.tell(&now);
    state.steps.note(Instant::now(), &estimates);
}
