//! Pauses after purges of shared stores: for a while, this host neither reads blocks of what was purged from a tier nor
//! writes them to one.
//!
//! A host that is not purged yet writes blocks of its pool to a shared store again, and a purged host would take them
//! from there. If all hosts pause from their own purge until the last host's purge has ended, nothing comes back: the
//! last purge empties the stores when no host reads or writes them any more.
//!
//! Invariants: a pause of a tenant covers namespaces that are opened during the pause, too. A namespace pauses from
//! within the event that begins its purge. A namespace whose purge has ended waits here and costs the tiers' turns
//! nothing. Pauses end with the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

/// Pauses at a time. Each end of a purge looks at all of them.
const MOST: usize = 64;

/// What was purged, as it was named.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Paused {
    Tenant(String),
    Namespace(NamespaceId),
}

#[derive(Default)]
pub(super) struct Pauses {
    all: BTreeMap<Paused, Pause>,
    /// Namespaces that nothing but a pause keeps off the tiers.
    waiting: BTreeSet<NamespaceId>,
}

struct Pause {
    end: Instant,
    namespaces: BTreeSet<NamespaceId>,
}

impl Pauses {
    /// Errors with `Full` if there is no room for another pause.
    pub fn check(&self, paused: &Paused) -> Result<()> {
        if self.all.contains_key(paused) || self.all.len() < MOST {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Full, "too many purged tenants and namespaces pause at a time")
            .with("limit", MOST)
            .hint("purge again when a pause has ended: `forebay inspect` lists them"))
    }

    /// Begins a pause, or gives the one that there is another end.
    pub fn begin(&mut self, paused: Paused, namespaces: &[NamespaceId], end: Instant) {
        let pause = self.all.entry(paused).or_insert_with(|| Pause { end, namespaces: BTreeSet::new() });
        pause.end = end;
        pause.namespaces.extend(namespaces);
    }

    /// True if the namespace pauses with its tenant from now on, and did not before.
    pub fn join(&mut self, namespace: NamespaceId, tenant: &str) -> bool {
        let is_of = |paused: &Paused| matches!(paused, Paused::Tenant(name) if name == tenant);
        let pause = self.all.iter_mut().find(|(paused, _)| is_of(paused));
        pause.is_some_and(|(_, pause)| pause.namespaces.insert(namespace))
    }

    fn is_paused(&self, namespace: NamespaceId) -> bool {
        self.all.values().any(|pause| pause.namespaces.contains(&namespace))
    }

    /// The namespace's purge is over. True if a pause keeps it off the tiers still.
    pub fn keep(&mut self, namespace: NamespaceId) -> bool {
        let is_kept = self.is_paused(namespace);
        if is_kept {
            self.waiting.insert(namespace);
        }
        is_kept
    }

    pub fn is_waiting(&self, namespace: NamespaceId) -> bool {
        self.waiting.contains(&namespace)
    }

    /// Ends the pauses whose time has come. Returns the namespaces that may be used again.
    pub fn end(&mut self, now: Instant) -> Vec<NamespaceId> {
        if self.all.values().all(|pause| pause.end > now) {
            return Vec::new();
        }
        self.all.retain(|paused, pause| {
            let is_over = pause.end <= now;
            if is_over {
                tracing::info!(%paused, namespaces = pause.namespaces.len(), "the pause after a purge has ended");
            }
            !is_over
        });
        let free = self.waiting.iter().copied().filter(|namespace| !self.is_paused(*namespace));
        let free: Vec<NamespaceId> = free.collect();
        free.iter().for_each(|namespace| _ = self.waiting.remove(namespace));
        free
    }

    /// With the time that each has left.
    pub fn all(&self, now: Instant) -> impl Iterator<Item = (&Paused, Duration)> {
        self.all.iter().map(move |(paused, pause)| (paused, pause.end.saturating_duration_since(now)))
    }
}

impl std::fmt::Display for Paused {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Paused::Tenant(name) => write!(to, "tenant {name}"),
            Paused::Namespace(id) => write!(to, "namespace {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_free_when_its_last_pause_and_its_purge_have_ended() {
        let (mut pauses, begun) = (Pauses::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let [one, two, late] = [1, 2, 3].map(NamespaceId);
        pauses.begin(Paused::Tenant("blue".to_owned()), &[one, two], at(10));
        pauses.begin(Paused::Namespace(one), &[one], at(20));
        assert!(pauses.keep(one) && pauses.keep(two) && !pauses.keep(late));
        assert!(pauses.join(late, "blue") && !pauses.join(late, "blue") && !pauses.join(NamespaceId(4), "red"));
        assert!(pauses.keep(late));
        assert_eq!(pauses.end(at(9)), []);
        assert_eq!(pauses.end(at(10)), [two, late]);
        assert!(pauses.is_waiting(one) && !pauses.is_waiting(two));
        // Another purge of the same namespace is under way when its pause ends, and moves the end.
        pauses.begin(Paused::Namespace(one), &[one], at(12));
        assert_eq!(pauses.end(at(12)), [one]);
        assert!(!pauses.keep(one));
    }

    #[test]
    fn pauses_are_limited_and_one_that_there_is_can_be_moved() {
        let (mut pauses, end) = (Pauses::default(), Instant::now() + Duration::from_secs(10));
        let of = |id: usize| Paused::Namespace(NamespaceId(id as u128));
        for id in 0..MOST {
            pauses.check(&of(id)).unwrap();
            pauses.begin(of(id), &[NamespaceId(id as u128)], end);
        }
        let full = pauses.check(&of(MOST)).unwrap_err();
        assert!(full.kind() == ErrorKind::Full && full.hint_text().is_some());
        pauses.check(&of(0)).unwrap();
        assert_eq!(pauses.all(end).count(), MOST);
    }
}
