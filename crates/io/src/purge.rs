//! Emptying stores that hosts share of some namespaces, beside serving: what all kinds of them have in common.
//!
//! A tier names its [`Place`]s. Each is emptied by one call that blocks, on a thread that is its caller's, past the
//! tier's own queues, threads and connections. It gives way: after each step it rests as long as the step took, so it
//! has half of a store's time at most, and less of a store that is busy with others.
//!
//! Invariants: only what is named exactly as a block of one of the namespaces is removed; what was removed is counted
//! as it goes, so that whoever gives up waiting knows it; what is there when a call begins is gone when it succeeds; a
//! call ends with the first step after its deadline or after [`Purging::stop`].

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

/// A step that took longer is one of a store that is in trouble, and is not worth a longer rest.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// A server, directory or bucket of a tier.
pub struct Place {
    /// As its operator knows it, without passwords.
    pub name: String,
    /// No step takes longer, unless the store hangs.
    pub patience: Duration,
    pub empty: Empty,
}

/// Removes what is there of the namespaces. An error says why not all is gone, and what to do.
pub type Empty = Box<dyn FnOnce(&Purging) -> Result<()> + Send>;

/// One place being emptied: what of, until when, and how far it is.
pub struct Purging {
    namespaces: BTreeSet<NamespaceId>,
    deadline: Instant,
    is_stopped: AtomicBool,
    blocks: AtomicU64,
    values: AtomicU64,
    last_step: Mutex<Instant>,
}

impl Purging {
    pub fn new(namespaces: BTreeSet<NamespaceId>, deadline: Instant) -> Purging {
        Purging {
            namespaces,
            deadline,
            is_stopped: AtomicBool::new(false),
            blocks: AtomicU64::new(0),
            values: AtomicU64::new(0),
            last_step: Mutex::new(Instant::now()),
        }
    }

    /// Nobody waits for it any more.
    pub fn stop(&self) {
        self.is_stopped.store(true, Relaxed);
    }

    /// Removed so far.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    /// Removed so far: what the store counts, of which a block may be several.
    pub fn values(&self) -> u64 {
        self.values.load(Relaxed)
    }

    /// Since the last step has ended.
    pub fn silent_for(&self) -> Duration {
        self.last_step.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    pub(crate) fn namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        self.namespaces.iter().copied()
    }

    pub(crate) fn is_of(&self, namespace: NamespaceId) -> bool {
        self.namespaces.contains(&namespace)
    }

    pub(crate) fn removed(&self, blocks: u64, values: u64) {
        self.blocks.fetch_add(blocks, Relaxed);
        self.values.fetch_add(values, Relaxed);
    }

    /// A step that began at `begun` has ended: rests as long as it took. An error if it was the last.
    pub(crate) fn rest(&self, begun: Instant) -> Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        thread::sleep(begun.elapsed().min(LONGEST_REST).min(left));
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if self.is_stopped.load(Relaxed) || Instant::now() >= self.deadline {
            return Err(Error::new(ErrorKind::Timeout, "the time was up before all was removed")
                .hint("purge again and give it longer: what was removed stays removed"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_followed_by_a_rest_as_long_as_it_took_and_the_last_by_an_error() {
        let purging = Purging::new(BTreeSet::new(), Instant::now() + Duration::from_secs(600));
        let begun = Instant::now();
        thread::sleep(Duration::from_millis(30));
        purging.rest(begun).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(60), "{:?}", begun.elapsed());
        purging.stop();
        assert!(purging.rest(Instant::now()).is_err());
        let late = Purging::new(BTreeSet::new(), Instant::now());
        assert!(late.rest(begun).unwrap_err().hint_text().is_some());
    }
}
