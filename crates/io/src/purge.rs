//! Removing namespaces from shared stores while serving continues: what all kinds of shared stores have in common.
//!
//! A tier lists its [`Place`]s. One blocking call empties each, on a thread of its caller, bypassing the tier's own
//! queues, threads and connections. After each step the purge rests as long as the step took. So it takes at most
//! half of a shared store's time, and less if the store is busy with others.
//!
//! Invariants: only objects named exactly as a block of one of the namespaces are removed. Removed objects are
//! counted during the call, so that a caller that stops waiting knows the count. Everything present when a call
//! begins is gone when it succeeds. A call ends with the first step after its deadline or after [`Purging::stop`].

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

use crate::descriptors;

/// A step that took longer means that the shared store is in trouble; a longer rest would not help.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// A server, directory or bucket of a tier.
pub struct Place {
    /// The operator's name for it, without passwords.
    pub name: String,
    /// No step takes longer, unless the shared store hangs.
    pub patience: Duration,
    /// Does the work, on a thread that may wait for the store.
    pub empty: Empty,
    /// The kernel may hold the thread for as long as the store hangs. Then it opens all that it needs itself.
    pub is_mount: bool,
}

impl Place {
    /// Starts the thread, which calls `tell` with its outcome. `tell` must use no descriptor.
    pub fn spawn(self, purging: Arc<Purging>, tell: impl FnOnce(Result<()>) + Send + 'static) -> io::Result<()> {
        let run = move || {
            if self.is_mount {
                descriptors::own_but(None);
            }
            tell((self.empty)(&purging));
        };
        thread::Builder::new().name("forebay-purge".to_owned()).spawn(run).map(drop)
    }
}

/// Removes all blocks of the namespaces. An error says why some are left, and what to do.
pub type Empty = Box<dyn FnOnce(&Purging) -> Result<()> + Send>;

/// The purge of one place: its namespaces, its deadline and its progress.
pub struct Purging {
    namespaces: BTreeSet<NamespaceId>,
    deadline: Instant,
    is_stopped: AtomicBool,
    blocks: AtomicU64,
    values: AtomicU64,
    last_step: Mutex<Instant>,
}

impl Purging {
    /// A purge that has removed nothing yet. After `deadline` it stops and says what is left.
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

    /// Called when nobody waits for the purge any more.
    pub fn stop(&self) {
        self.is_stopped.store(true, Relaxed);
    }

    /// Blocks removed so far.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    /// Removed so far, as the shared store counts; a block may be several values.
    pub fn values(&self) -> u64 {
        self.values.load(Relaxed)
    }

    /// Time since the last step ended.
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

    /// Ends a step that began at `begun`: rests as long as the step took. An error if it was the last step.
    pub(crate) fn rest(&self, begun: Instant) -> Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        thread::sleep(begun.elapsed().min(LONGEST_REST).min(left));
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if self.is_stopped.load(Relaxed) || Instant::now() >= self.deadline {
            return Err(Error::new(ErrorKind::Timeout, "the purge timed out before everything was removed")
                .hint("purge again with a longer timeout; what was removed stays removed"));
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
