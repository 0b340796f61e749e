//! The frame for those who ask: over the socket, and as JSON for the HTTP pages.
//!
//! Invariants: the state is locked once for a frame, to copy counters; the rest happens on other threads. All who ask
//! while a frame is new, or is being made, get the same one.

mod make;

use std::sync::Arc;
use std::time::Instant;

use forebay_rpc::proto::{FrameReply, FrameRequest};
use tokio::sync::Semaphore;

use super::report;
use crate::frame::answer::Made;
use crate::state::Shared;
use crate::turns::{self, one_at_a_time};

pub use make::sample;

/// An answer that is being written.
static WRITING: Semaphore = Semaphore::const_new(1);

/// The present frame, with the steps of its history that `request` lacks.
pub async fn frame(shared: &Shared, request: FrameRequest) -> FrameReply {
    let made = newest(shared).await;
    one_at_a_time(&WRITING, move || made.answer(&request)).await
}

/// The same as JSON, with the names of the protocol.
pub async fn json(shared: &Shared, request: FrameRequest) -> String {
    let made = newest(shared).await;
    let write = move || serde_json::to_string(&made.answer(&request)).expect("every message of a frame can be written");
    one_at_a_time(&WRITING, write).await
}

async fn newest(shared: &Shared) -> Arc<Made> {
    let (frames, insight, pool) = {
        let state = shared.lock();
        (state.frames.clone(), state.insight.clone(), state.table.pool().clone())
    };
    let mut newest = frames.lock_owned().await;
    if let Some(made) = newest.frame(Instant::now()) {
        return made;
    }
    let estimates = insight.recent_estimates().await;
    // To count huge pages may take as long as a walk over all pages, which no frame waits for.
    let huge_bytes =
        if pool.is_counted() { pool.huge_page_report().ok().map(|report| report.huge_bytes) } else { None };
    if huge_bytes.is_none() && newest.walk.as_ref().is_none_or(|walk| walk.is_finished()) {
        let shared = shared.clone();
        newest.walk = Some(turns::spawn(async move {
            let _ = report::huge_bytes(&shared).await;
        }));
    }
    let shared = shared.clone();
    // Goes on when its caller has gone, and serves the next.
    let make = move || make::make(&mut newest, &shared, &estimates, huge_bytes);
    tokio::task::spawn_blocking(make).await.expect("making a frame does not panic")
}
