//! What an operator asks, in one place: the frame that `forebay top` and the HTTP pages show.
//!
//! `sample` (counters at one moment) → `steps` (an hour and a day of them) → `make` (a frame) → `answer` (with as much
//! of the history as its reader lacks).
//!
//! Invariants: a frame is made at most once in [`PERIOD`], and only for somebody who asks; all who ask meanwhile get the
//! same one. The state is locked once for it, to copy counters; the rest happens on other threads. The deciding thread
//! samples its counters every 5 s by itself, so that there is a history when somebody looks.

mod answer;
mod make;
mod sample;
mod steps;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_rpc::proto::{FrameReply, FrameRequest};
use tokio::sync::{Mutex, Semaphore};

use crate::service;
use crate::state::Shared;
use crate::turns::{self, one_at_a_time};

use answer::Made;
use make::Maker;

pub use sample::Sample;
pub use steps::Steps;

/// Between two frames.
pub const PERIOD: Duration = Duration::from_secs(1);

/// An answer that is being written.
static WRITING: Semaphore = Semaphore::const_new(1);

/// The newest frame, locked while another is made.
#[derive(Clone, Default)]
pub struct Frames(Arc<Mutex<Maker>>);

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
    let mut maker = frames.0.lock_owned().await;
    if let Some(made) = maker.newest(Instant::now()) {
        return made;
    }
    let estimates = insight.recent_estimates().await;
    // To count huge pages may take as long as a walk over all pages, which no frame waits for.
    let huge_bytes =
        if pool.is_counted() { pool.huge_page_report().ok().map(|report| report.huge_bytes) } else { None };
    if huge_bytes.is_none() && maker.walk.as_ref().is_none_or(|walk| walk.is_finished()) {
        let shared = shared.clone();
        maker.walk = Some(turns::spawn(async move {
            let _ = service::huge_bytes(&shared).await;
        }));
    }
    let shared = shared.clone();
    // Goes on when its caller has gone, and serves the next.
    let make = move || maker.make(&shared, &estimates, huge_bytes);
    tokio::task::spawn_blocking(make).await.expect("making a frame does not panic")
}
