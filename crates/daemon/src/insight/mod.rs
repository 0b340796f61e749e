//! What could have been: ceiling, optimum and capacity curve of the lookups seen, and who records them.
//!
//! Holds true: a lookup costs its reply one hand-over of the request's own bytes; all else happens on a thread of
//! this module. What waits for that thread is bounded by [`MAX_QUEUED_BYTES`]; over it lookups are left out and
//! counted. Memory is fixed, about 5 MiB. Nothing here keeps a key as the engine named it: keys are hashed with a
//! seed of this start of the daemon, recorded ones with a salt of the recording.

mod alarm;
mod history;
mod record;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forebay_core::block::NamespaceIndex;
use forebay_core::ceiling::{Ceiling, Estimate, WINDOWS_US};
use forebay_core::curve::Curve;
use forebay_core::index::Fingerprint;
use forebay_core::optimum::{Optimum, Sampled};

pub use alarm::{Alarm, alarms};
pub use history::History;
pub use record::Recording;

/// Lookups are looked at some at a time: to wake the thread for each took 30 to 70 us of its answer on two cores.
const GATHER: Duration = Duration::from_millis(20);
/// Lookups and bytes that may wait: 800 prompts of 20 KiB of hashes each, more than come while some are gathered.
const MAX_QUEUED: usize = 4096;
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// The curve follows the load of about the last eight turnovers of the pool: what it saw counts half after so many.
const FADE_TURNOVERS: u64 = 8;

/// One group of one lookup, as it was answered.
pub struct Seen {
    pub at: Instant,
    pub namespace: NamespaceIndex,
    pub group: u16,
    pub block_tokens: u32,
    pub block_bytes: u64,
    /// Packed, `hash_bytes` each, in prefix order.
    pub hashes: Vec<u8>,
    pub hash_bytes: usize,
    /// Ready ones from the first on.
    pub hits: usize,
}

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
}

/// All that is estimated, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    pub windows: [Option<Estimate>; WINDOWS_US.len()],
    pub sampled: Sampled,
    /// (capacity, hit ratio) of leaf-first LRU with a half of the pool's bytes, all of them, and more.
    pub curve: Vec<(u64, f64)>,
    /// Groups of lookups that were not looked at, because too many waited.
    pub left_out: u64,
}

impl Insight {
    /// Starts the thread; it ends with the last clone.
    pub fn start(seed: u64, capacity_bytes: u64) -> Insight {
        let (queue, receiver) = sync_channel(MAX_QUEUED);
        let shared = Arc::new(Shared {
            queued_bytes: AtomicUsize::new(0),
            left_out: AtomicU64::new(0),
            analysis: Mutex::new(Analysis::new(seed, capacity_bytes)),
        });
        let run = {
            let shared = shared.clone();
            move || work(&receiver, &shared)
        };
        std::thread::Builder::new().name("insight".into()).spawn(run).expect("the system starts a thread");
        Insight { queue, shared }
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

    /// Takes some milliseconds: not for the thread that answers lookups.
    pub fn estimates(&self) -> Estimates {
        let (windows, optimum, curve) = {
            let mut analysis = self.analysis();
            let now_us = analysis.start.elapsed().as_micros() as u64;
            (analysis.ceiling.estimates(now_us), analysis.optimum.clone(), analysis.points())
        };
        let left_out = self.shared.left_out.load(Ordering::Relaxed);
        let sampled = optimum.map_or(Sampled::default(), |optimum| optimum.sampled());
        Estimates { windows: windows.map(Some), sampled, curve, left_out }
    }

    /// Sends every lookup from now on to `recording` as well. False if one is under way already.
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
    while let Ok(first) = queue.recv() {
        std::thread::sleep(GATHER);
        for seen in std::iter::once(first).chain(queue.try_iter()) {
            shared.queued_bytes.fetch_sub(seen.hashes.len(), Ordering::Relaxed);
            shared.analysis.lock().expect("the analysis does not panic").see(&seen);
        }
    }
}

struct Analysis {
    start: Instant,
    seed: u64,
    capacity_bytes: u64,
    ceiling: Ceiling,
    curve: Curve,
    /// Made when the first lookup tells how large blocks are.
    optimum: Option<Optimum>,
    asked: u64,
    asked_bytes: f64,
    asked_since_fade: u64,
    recording: Option<Recording>,
}

impl Analysis {
    fn new(seed: u64, capacity_bytes: u64) -> Analysis {
        Analysis {
            start: Instant::now(),
            seed,
            capacity_bytes,
            ceiling: Ceiling::default(),
            curve: Curve::new(Curve::SAMPLES),
            optimum: None,
            asked: 0,
            asked_bytes: 0.0,
            asked_since_fade: 0,
            recording: None,
        }
    }

    fn see(&mut self, seen: &Seen) {
        let key = |hash: &[u8]| Fingerprint::new(self.seed, seen.namespace, seen.group, hash).0.max(1);
        let mut keys: Vec<u64> = seen.hashes.chunks_exact(seen.hash_bytes).map(key).collect();
        self.asked += keys.len() as u64;
        self.asked_bytes += keys.len() as f64 * seen.block_bytes as f64;
        let capacity = self.blocks(self.capacity_bytes);
        self.optimum.get_or_insert_with(|| Optimum::new(capacity as u64)).note(&keys, seen.hits);
        keys.reverse();
        let at_us = seen.at.saturating_duration_since(self.start).as_micros() as u64;
        self.ceiling.note(at_us, keys.iter().copied());
        self.curve.note(&keys);
        self.fade(keys.len() as u64, capacity);
        if let Some(recording) = &mut self.recording {
            recording.see(seen);
            if recording.is_over() {
                self.recording = None;
            }
        }
    }

    fn fade(&mut self, asked: u64, capacity: f64) {
        self.asked_since_fade += asked;
        if self.asked_since_fade > FADE_TURNOVERS * (capacity as u64).max(1000) {
            self.asked_since_fade = 0;
            self.curve.fade(0.5);
        }
    }

    /// Capacities are told in blocks of the mean size asked for, so that models of several sizes share one curve.
    fn blocks(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.asked_bytes / self.asked.max(1) as f64).max(1.0)
    }

    fn points(&self) -> Vec<(u64, f64)> {
        const HALVES: [u64; 7] = [1, 2, 3, 4, 8, 16, 32];
        let capacity = |halves: &u64| self.capacity_bytes / 2 * halves;
        HALVES.iter().map(capacity).map(|bytes| (bytes, self.curve.hit_ratio(self.blocks(bytes)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(first: u64, count: u64, hits: usize) -> Seen {
        let hashes = (first..first + count).flat_map(|n| n.to_le_bytes()).collect();
        Seen {
            at: Instant::now(),
            namespace: NamespaceIndex(0),
            group: 0,
            block_tokens: 16,
            block_bytes: 4096,
            hashes,
            hash_bytes: 8,
            hits,
        }
    }

    #[test]
    fn what_was_asked_for_twice_could_have_been_hit() {
        let mut analysis = Analysis::new(7, 1000 * 4096);
        for round in 0..2 {
            (0..50).for_each(|n| analysis.see(&seen(n * 10, 10, 10 * round)));
        }
        let [short, ..] = analysis.ceiling.estimates(analysis.start.elapsed().as_micros() as u64);
        assert_eq!(short.asked, 1000);
        assert!((short.ceiling().unwrap() - 0.5).abs() < 0.01);
        let sampled = analysis.optimum.as_ref().unwrap().sampled();
        assert_eq!(sampled, Sampled { asked: 1000, again: 500, hits: 500, optimum_hits: 500 });
        let points = analysis.points();
        assert!(points[1].1 > 0.49, "all 500 fit: {points:?}");
    }

    #[test]
    fn what_waits_is_bounded_and_what_is_left_out_is_counted() {
        let insight = Insight::start(7, 1 << 20);
        // The thread waits for the analysis, so nothing is taken from the queue but the first.
        let held = insight.analysis();
        for _ in 0..MAX_QUEUED + 100 {
            insight.note(seen(0, 1, 0));
        }
        let left_out = insight.shared.left_out.load(Ordering::Relaxed);
        assert!((99..=100).contains(&left_out), "{left_out} were left out");
        drop(held);
    }
}
