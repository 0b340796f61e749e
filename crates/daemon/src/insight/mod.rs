//! Estimates beside the real hit rate: ceiling, optimum and capacity curves of the lookups; and recordings of lookups.
//!
//! Invariants: for a lookup, the reply waits only for one hand-over of the request's own bytes; everything else runs on
//! a thread of this module, which has low priority and takes a fiftieth of a core at most. The lookups that wait for
//! that thread are bounded by [`MAX_QUEUED_BYTES`]; further lookups are left out and counted. Memory is fixed, at most
//! about 20 MiB: [`OWNERS`] namespaces are distinguished, the last of which stands for all later ones. No key is kept
//! as the engine sent it: keys are hashed with a seed of this start of the daemon, and recorded keys with a salt of the
//! recording.

mod alarm;
mod analysis;
mod budget;
mod estimates;
mod history;
mod record;
mod seen;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use analysis::Analysis;
use budget::Budget;
use forebay_io::thread_time;

pub use alarm::{Alarm, NAMES as ALARMS, Watch, alarms};
pub use analysis::Present;
pub use estimates::{Estimates, Share};
pub use history::History;
pub use record::Recording;
pub use seen::Seen;

use crate::vital;

/// The thread takes several lookups at a time: to wake it for each took 30 to 70 us of the lookup's answer on two
/// cores.
const GATHER: Duration = Duration::from_millis(20);
/// How old estimates may be for somebody who watches.
const WATCHED: Duration = Duration::from_secs(5);
/// Lookups and bytes that may wait: 800 prompts of 20 KiB of hashes each, more than come while some are gathered.
const MAX_QUEUED: usize = 4096;
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// The daemon's end of it.
#[derive(Clone)]
pub struct Insight {
    queue: SyncSender<Seen>,
    shared: Arc<Shared>,
}

struct Shared {
    queued_bytes: AtomicUsize,
    left_out: AtomicU64,
    analysis: Mutex<Analysis>,
    newest: Newest,
}

/// The newest estimates. Locked while new ones are made.
type Newest = Arc<tokio::sync::Mutex<Option<Arc<Estimated>>>>;

/// Estimates, and what it took to make them.
struct Estimated {
    begun: Instant,
    took: Duration,
    estimates: Arc<Estimates>,
}

impl Insight {
    /// Starts the thread; it ends with the last clone.
    pub fn start(seed: u64, present: Present) -> Insight {
        let (insight, run) = Insight::new(seed, present);
        std::thread::Builder::new().name("insight".into()).spawn(run).expect("the system starts a thread");
        insight
    }

    /// The daemon's end, and the thread's work. Without it all lookups are left out.
    pub fn new(seed: u64, present: Present) -> (Insight, impl FnOnce() + Send) {
        let (queue, receiver) = sync_channel(MAX_QUEUED);
        let shared = Arc::new(Shared {
            queued_bytes: AtomicUsize::new(0),
            left_out: AtomicU64::new(0),
            analysis: Mutex::new(Analysis::new(seed, present)),
            newest: Newest::default(),
        });
        let run = {
            let shared = shared.clone();
            move || {
                vital::lower();
                work(&receiver, &shared)
            }
        };
        (Insight { queue, shared }, run)
    }

    /// Hands a lookup over, if there is room.
    pub fn note(&self, seen: Seen) {
        let bytes = seen.hashes.len();
        let queued = self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        if queued + bytes > MAX_QUEUED_BYTES || self.queue.try_send(seen).is_err() {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Not older than this call. However many ask at a time, two are made: those of callers who have gone go on, and
    /// serve the next.
    pub async fn estimates(&self) -> Arc<Estimates> {
        let asked = Instant::now();
        self.estimates_if(|newest| newest.begun < asked).await.estimates.clone()
    }

    /// As old as they may be for somebody who watches: [`WATCHED`], or as long as makes them one two-thousandth of a
    /// core. And when they were begun.
    pub async fn recent_estimates(&self) -> (Instant, Arc<Estimates>) {
        let is_old = |newest: &Estimated| newest.begun.elapsed() > WATCHED.max(2000 * newest.took);
        let newest = self.estimates_if(is_old).await;
        (newest.begun, newest.estimates.clone())
    }

    /// Makes new ones if there are none or `is_old` says so.
    async fn estimates_if(&self, is_old: impl FnOnce(&Estimated) -> bool) -> Arc<Estimated> {
        let mut newest = self.shared.newest.clone().lock_owned().await;
        if let Some(there) = newest.clone()
            && !is_old(&there)
        {
            return there;
        }
        let insight = self.clone();
        let make = move || {
            let begun = Instant::now();
            let estimates = Arc::new(insight.estimate());
            newest.insert(Arc::new(Estimated { begun, took: begun.elapsed(), estimates })).clone()
        };
        tokio::task::spawn_blocking(make).await.expect("an estimate does not panic")
    }

    /// Takes some milliseconds: not for the thread that answers lookups.
    fn estimate(&self) -> Estimates {
        // The optimum is computed on a copy, so that lookups need not wait.
        let (mut estimates, optimums) = self.analysis().estimates();
        let sampled = optimums.map(|optimum| optimum.map(|optimum| optimum.sampled()));
        analysis::fill(&mut estimates, sampled);
        estimates.left_out = self.shared.left_out.load(Ordering::Relaxed);
        estimates
    }

    /// Sends every lookup from now on to `recording` as well. False if one is under way already. Waits for the thread,
    /// as [`Insight::estimate`] does: not for the thread that answers lookups.
    pub fn record(&self, recording: Recording) -> bool {
        let mut analysis = self.analysis();
        let is_free = analysis.recording.as_ref().is_none_or(Recording::is_over);
        if is_free {
            analysis.recording = Some(recording);
        }
        is_free
    }

    fn analysis(&self) -> MutexGuard<'_, Analysis> {
        self.shared.analysis.lock().expect("the analysis does not panic")
    }
}

fn work(queue: &Receiver<Seen>, shared: &Shared) {
    let mut budget = Budget::new(Instant::now(), thread_time());
    while let Ok(first) = queue.recv() {
        std::thread::sleep(GATHER);
        for seen in std::iter::once(first).chain(queue.try_iter()) {
            shared.queued_bytes.fetch_sub(seen.hashes.len(), Ordering::Relaxed);
            shared.analysis.lock().expect("the analysis does not panic").see(&seen);
            let rest = budget.rest(Instant::now(), thread_time());
            // Short rests become one.
            if rest >= GATHER {
                std::thread::sleep(rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_bounded_and_what_is_left_out_is_counted() {
        let insight = Insight::start(7, Present::of_pool(1 << 20));
        // The thread waits for the analysis, so nothing is taken from the queue but the first.
        let held = insight.analysis();
        for _ in 0..MAX_QUEUED + 100 {
            insight.note(analysis::seen(0, 0, 1, 0));
        }
        let left_out = insight.shared.left_out.load(Ordering::Relaxed);
        assert!((99..=100).contains(&left_out), "{left_out} were left out");
        drop(held);
    }
}
