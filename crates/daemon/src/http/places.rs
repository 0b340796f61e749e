//! Who is connected, the oldest first, and who has to go when another comes.
//!
//! Invariants: there are at most [`MAX_CONNECTIONS`]. A connection that waits for its answer keeps its place, and one
//! that has just come has time to ask.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::MAX_CONNECTIONS;

/// A probe asks within a millisecond of connecting, on a busy host within a few. So 2,560 connections a second may come
/// that ask for nothing, twice as many as wait in the kernel's queue.
const TIME_TO_ASK: Duration = Duration::from_millis(50);
/// How often a full house is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// See the module's head.
#[derive(Default)]
pub(super) struct Places(VecDeque<Place>);

struct Place {
    since: Instant,
    talk: JoinHandle<()>,
    is_answering: Arc<AtomicBool>,
}

impl Places {
    /// Waits until there is a place. The oldest connection that has asked for nothing, or does not read its answer,
    /// loses its own.
    pub(super) async fn make_room(&mut self) {
        loop {
            self.0.retain(|place| !place.talk.is_finished());
            if self.0.len() < MAX_CONNECTIONS {
                return;
            }
            let is_idle = |place: &Place| !place.is_answering.load(Relaxed) && place.since.elapsed() >= TIME_TO_ASK;
            match self.0.iter().position(is_idle).and_then(|oldest| self.0.remove(oldest)) {
                Some(oldest) => oldest.talk.abort(),
                None => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    pub(super) fn take(&mut self, talk: JoinHandle<()>, is_answering: Arc<AtomicBool>) {
        self.0.push_back(Place { since: Instant::now(), talk, is_answering });
    }
}
