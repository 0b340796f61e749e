//! What an operator asks, in one place: the history, and the frame that was made last.
//!
//! `sample` (counters at one moment) → `steps` (an hour and a day of them) → `answer` (a frame, with as much of the
//! history as its reader lacks). `service/frame` reads the state, and makes frames.
//!
//! Invariants: a frame is made at most once in [`PERIOD`], and only for somebody who asks. The deciding thread samples
//! its counters every 5 s by itself, so that there is a history when somebody looks.

pub mod answer;
pub mod sample;
pub mod steps;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use answer::Made;
use sample::Sample;

pub use steps::Steps;

/// Between two frames.
pub const PERIOD: Duration = Duration::from_secs(1);

/// The newest frame, locked while another is made.
pub type Frames = Arc<Mutex<Newest>>;

#[derive(Default)]
pub struct Newest {
    pub made: Option<(Instant, Arc<Made>)>,
    /// What the frame was made of.
    pub before: Option<Sample>,
    /// The count of huge pages.
    pub walk: Option<JoinHandle<()>>,
}

impl Newest {
    /// The frame, if it is not time for another.
    pub fn frame(&self, now: Instant) -> Option<Arc<Made>> {
        let (_, made) = self.made.as_ref().filter(|(at, _)| now.saturating_duration_since(*at) < PERIOD)?;
        Some(made.clone())
    }
}
