//! The frame for those who ask: over the socket, and as JSON for the HTTP pages.
//!
//! Invariants: the state is locked once for a frame, to copy counters; the rest happens on other threads. All who ask
//! while a frame is new, or is being made, get the same one. One answer is written at a time, and goes on when its
//! reader has gone: so readers who come and go leave no queue of work behind.

mod make;

use std::time::Instant;

use forebay_rpc::proto::{FrameReply, FrameRequest};

use super::report;
use crate::frame::answer::answer;
use crate::state::Shared;
use crate::turns;

pub use make::sample;

/// The present frame, with the steps of its history that `request` lacks.
pub async fn frame(shared: &Shared, request: FrameRequest) -> FrameReply {
    written(shared, request, |answer| answer).await
}

/// The same as JSON, with the names of the protocol.
pub async fn json(shared: &Shared, request: FrameRequest) -> String {
    let write = |answer| serde_json::to_string(&answer).expect("every message of a frame can be written");
    written(shared, request, write).await
}

async fn written<T: Send + 'static>(shared: &Shared, request: FrameRequest, write: fn(FrameReply) -> T) -> T {
    let (frames, insight, pool) = {
        let state = shared.lock();
        (state.frames.clone(), state.insight.clone(), state.table.pool().clone())
    };
    let mut newest = frames.lock_owned().await;
    let parts = if newest.is_due(Instant::now()) {
        let estimates = insight.recent_estimates().await;
        // To count huge pages may take as long as a walk over all pages, which no frame waits for.
        let huge_bytes =
            if pool.is_counted() { pool.huge_page_report().ok().map(|report| report.huge_bytes) } else { None };
        if huge_bytes.is_none() && newest.walk.as_ref().is_none_or(|walk| walk.is_finished()) {
            let shared = shared.clone();
            newest.walk = Some(turns::spawn(async move {
                let _ = report::pages(&shared).await;
            }));
        }
        Some((estimates, huge_bytes))
    } else {
        None
    };
    let shared = shared.clone();
    let work = move || {
        if let Some((estimates, huge_bytes)) = parts {
            make::make(&mut newest, &shared, &estimates, huge_bytes);
        }
        let (_, frame) = newest.made.as_ref().expect("one is made if there is none");
        write(answer(frame, &newest.past, &request))
    };
    tokio::task::spawn_blocking(work).await.expect("making a frame does not panic")
}
