//! Advise and record: what `insight` knows, on its way out.

use forebay_core::ceiling::Estimate;
use forebay_core::miss::MissReason;
use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::proto::{AdviseReply, AlarmInfo, CurvePoint, MissCount, Recorded, WindowInfo};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::insight::{Alarm, Recording, alarms};
use crate::state::Shared;

/// Recorded lookups that wait for the client to take them.
const MAX_RECORDED: usize = 256;

pub async fn advise(shared: &Shared) -> Result<AdviseReply> {
    let insight = shared.lock().insight.clone();
    let estimates = tokio::task::spawn_blocking(move || insight.estimates()).await.expect("an estimate does not panic");
    let state = shared.lock();
    let stats = state.core.stats();
    let miss =
        |reason: &MissReason| MissCount { reason: reason.name().to_owned(), count: stats.misses[*reason as usize] };
    Ok(AdviseReply {
        capacity_bytes: state.core.capacity_bytes(),
        keys: stats.keys,
        hits: stats.hits,
        misses: MissReason::ALL.iter().map(miss).collect(),
        stored_blocks: stats.stored,
        evicted_blocks: stats.evicted,
        windows: estimates.windows.iter().flatten().map(window).collect(),
        sampled_keys: estimates.sampled.asked,
        sampled_again: estimates.sampled.again,
        sampled_hits: estimates.sampled.hits,
        sampled_optimum_hits: estimates.sampled.optimum_hits,
        curve: estimates.curve.iter().map(|(bytes, ratio)| point(*bytes, *ratio)).collect(),
        alarms: alarms(stats, &state.history, &estimates).into_iter().map(alarm).collect(),
        left_out: estimates.left_out,
    })
}

/// Lookups from now on, until the client is gone.
pub fn record(shared: &Shared) -> Result<ReceiverStream<Result<Recorded, Status>>> {
    let (sender, receiver) = mpsc::channel(MAX_RECORDED);
    let insight = shared.lock().insight.clone();
    if !insight.record(Recording::new(crate::serve::random()?, sender)) {
        return Err(Error::new(ErrorKind::Full, "lookups are being recorded already").hint("one recording at a time"));
    }
    Ok(ReceiverStream::new(receiver))
}

fn window(estimate: &Estimate) -> WindowInfo {
    WindowInfo { window_us: estimate.window_us, keys: estimate.asked, different_keys: estimate.different }
}

fn point(capacity_bytes: u64, hit_ratio: f64) -> CurvePoint {
    CurvePoint { capacity_bytes, hit_ratio }
}

fn alarm(alarm: Alarm) -> AlarmInfo {
    AlarmInfo { name: alarm.name.to_owned(), cause: alarm.cause.to_owned(), hint: alarm.hint.to_owned() }
}
