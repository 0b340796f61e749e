//! The calls for advice and recordings: they return the results of `insight`.

use std::pin::Pin;
use std::sync::Arc;

use forebay_core::miss::MissReason;
use forebay_core::{Error, ErrorKind, Result};
use forebay_insight::ceiling::Estimate;
use forebay_insight::optimum::Sampled;
use forebay_rpc::proto::{AdviseReply, AlarmInfo, CurvePoint, MissCount, Recorded, SampledInfo, ShareInfo, WindowInfo};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use crate::clients::Place;
use crate::insight::{Alarm, Recording, Share, alarms};
use crate::state::Shared;
use crate::turns::one_at_a_time;

/// A recording that begins.
static BEGINNING: Semaphore = Semaphore::const_new(1);

/// Recorded lookups that wait for the client to take them.
const MAX_RECORDED: usize = 256;

pub async fn advise(shared: &Shared) -> Result<AdviseReply> {
    let insight = shared.lock().insight.clone();
    let estimates = insight.estimates().await;
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
        sampled_keys: estimates.all.sampled.asked,
        sampled_again: estimates.all.sampled.again,
        sampled_hits: estimates.all.sampled.hits,
        sampled_optimum_hits: estimates.all.sampled.optimum_hits,
        curve: points(&estimates.all.curve),
        alarms: alarms(stats, &state.history, &estimates).into_iter().map(alarm).collect(),
        left_out: estimates.left_out,
        all: Some(share(&estimates.all)),
        namespaces: estimates.namespaces.iter().map(share).collect(),
        disk_bytes: state.disk_bytes().unwrap_or(0),
        saved_tokens: state.saved.tokens,
        saved_prefill_us: state.saved.prefill_us,
        shared_stores: state.tiers.shared_stores().map(str::to_owned).collect(),
    })
}

pub type Recordings = Pin<Box<dyn Stream<Item = Result<Recorded, Status>> + Send>>;

/// Lookups from now on, until the client is gone.
pub async fn record(shared: &Shared, place: &Arc<Place>) -> Result<Recordings> {
    let hold = place.hold()?;
    let (sender, receiver) = mpsc::channel(MAX_RECORDED);
    let insight = shared.lock().insight.clone();
    let recording = Recording::new(crate::random::number(), sender);
    // Waits for the thread of the estimates, which has low priority.
    let is_free = one_at_a_time(&BEGINNING, move || insight.record(recording)).await;
    if !is_free {
        return Err(
            Error::new(ErrorKind::Full, "a recording of lookups is already running").hint("end that recording first")
        );
    }
    // Nothing is looked up for as long as the engines have nothing to do; the connection is in use all the same.
    Ok(Box::pin(ReceiverStream::new(receiver).map(move |recorded| {
        let _hold = &hold;
        recorded
    })))
}

fn window(estimate: &Estimate) -> WindowInfo {
    WindowInfo { window_us: estimate.window_us, keys: estimate.asked, different_keys: estimate.different }
}

fn share(share: &Share) -> ShareInfo {
    ShareInfo {
        name: share.name.clone(),
        sampled: Some(sampled(&share.sampled)),
        sampled_tiers: share.sampled_tiers.as_ref().map(sampled),
        curve: points(&share.curve),
        disk_curve: points(&share.disk_curve),
    }
}

fn sampled(Sampled { asked, again, hits, optimum_hits }: &Sampled) -> SampledInfo {
    SampledInfo { keys: *asked, again: *again, hits: *hits, optimum_hits: *optimum_hits }
}

fn points(curve: &[(u64, f64)]) -> Vec<CurvePoint> {
    curve
        .iter()
        .map(|(capacity_bytes, hit_ratio)| CurvePoint { capacity_bytes: *capacity_bytes, hit_ratio: *hit_ratio })
        .collect()
}

pub fn alarm(alarm: Alarm) -> AlarmInfo {
    AlarmInfo { name: alarm.name.to_owned(), cause: alarm.cause.to_owned(), hint: alarm.hint.to_owned() }
}
