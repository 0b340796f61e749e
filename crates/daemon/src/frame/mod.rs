//! What an operator asks, in one place: the history, and the frame that was made last.
//!
//! `sample` (counters at one moment) → `steps` (an hour and a day of them) → `windows` (their sums) and `answer` (a
//! frame, with as much of the history as its reader lacks). `service/frame` reads the state, makes frames and hands
//! them out.
//!
//! Invariants: a frame is made at most once in [`PERIOD`], and only for somebody who asks. The deciding thread samples
//! its counters every 5 s by itself, so that there is a history when somebody looks.

pub mod answer;
pub mod sample;
pub mod steps;
pub mod windows;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use forebay_rpc::proto::FrameReply;
use sample::Sample;
use steps::Past;

pub use steps::Steps;

/// Between two frames.
pub const PERIOD: Duration = Duration::from_secs(1);

/// The newest frame, locked while another is made or somebody's answer is.
pub type Frames = Arc<Mutex<Newest>>;

#[derive(Default)]
pub struct Newest {
    /// When it was made, and the frame without its history.
    pub made: Option<(Instant, FrameReply)>,
    pub past: Past,
    /// What the frame was made of.
    pub before: Option<Sample>,
    /// The count of huge pages.
    pub walk: Option<JoinHandle<()>>,
}

impl Newest {
    /// Whether it is time for another frame.
    pub fn is_due(&self, now: Instant) -> bool {
        self.made.as_ref().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= PERIOD)
    }
}
