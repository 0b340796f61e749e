//! Pauses after purges of shared stores: for a while, this host neither reads blocks of what was purged from a tier nor
//! writes them to one.
//!
//! A host that is not purged yet writes blocks of its pool to a shared store again, and a purged host would take them
//! from there. If all hosts pause from their own purge until the last host's purge has ended, nothing comes back: the
//! last purge empties the stores when no host reads or writes them any more.
//!
//! Invariants: a pause of a tenant covers namespaces that are opened during the pause, too. A namespace pauses from
//! within the event that begins its purge. No pause ends while a purge of it is under way, and its time counts from the
//! end of the last one. A namespace whose purge has ended waits here and costs the tiers' turns nothing. Pauses end
//! with the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, NamespaceId, Result};

/// Pauses at a time. Each end of a purge looks at all of them.
const MOST: usize = 64;
/// Namespaces whose pause ends in one event, at about 1 µs each.
const ENDED_AT_ONCE: usize = 128;

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
    /// Namespaces for which it has ended.
    ended: usize,
    /// Purges of it that have not ended.
    under_way: usize,
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

    /// A purge begins. It lasts until [`Pauses::end_purge`].
    pub fn begin_purge(&mut self, paused: Paused, namespaces: &[NamespaceId], now: Instant) {
        let new = || Pause { ended: 0, under_way: 0, end: now, namespaces: BTreeSet::new() };
        let pause = self.all.entry(paused).or_insert_with(new);
        pause.under_way += 1;
        pause.namespaces.extend(namespaces);
    }

    /// The pause lasts until `end` now.
    pub fn end_purge(&mut self, paused: &Paused, end: Instant) {
        if let Some(pause) = self.all.get_mut(paused) {
            pause.under_way = pause.under_way.saturating_sub(1);
            pause.end = end;
        }
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

    /// Ends pauses whose time has come, a piece at a time. Returns the namespaces that may be used again.
    pub fn end(&mut self, now: Instant) -> Vec<NamespaceId> {
        let mut free = Vec::new();
        for _ in 0..ENDED_AT_ONCE {
            let is_over = |pause: &Pause| pause.under_way == 0 && pause.end <= now;
            let Some((paused, pause)) = self.all.iter_mut().find(|(_, pause)| is_over(pause)) else { break };
            // The core keeps them in order, so that the last is forgotten soonest.
            let Some(namespace) = pause.namespaces.pop_last() else {
                let paused = paused.clone();
                tracing::info!(%paused, namespaces = pause.ended, "the pause after a purge has ended");
                self.all.remove(&paused);
                continue;
            };
            pause.ended += 1;
            free.extend((!self.is_paused(namespace) && self.waiting.remove(&namespace)).then_some(namespace));
        }
        free
    }

    /// With the time that each has left; none while a purge of it is under way.
    pub fn all(&self, now: Instant) -> impl Iterator<Item = (&Paused, Option<Duration>)> {
        let left = move |pause: &Pause| (pause.under_way == 0).then(|| pause.end.saturating_duration_since(now));
        self.all.iter().map(move |(paused, pause)| (paused, left(pause)))
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
        let [blue, alone] = [Paused::Tenant("blue".to_owned()), Paused::Namespace(one)];
        pauses.begin_purge(blue.clone(), &[one, two], begun);
        pauses.begin_purge(alone.clone(), &[one], begun);
        assert!(pauses.keep(one) && pauses.keep(two) && !pauses.keep(late));
        assert!(pauses.join(late, "blue") && !pauses.join(late, "blue") && !pauses.join(NamespaceId(4), "red"));
        assert!(pauses.keep(late));
        assert_eq!(pauses.end(at(9)), [], "a purge may take long");
        pauses.end_purge(&blue, at(20));
        pauses.end_purge(&alone, at(30));
        assert_eq!(pauses.end(at(19)), []);
        assert_eq!(pauses.end(at(20)), [late, two]);
        assert!(pauses.is_waiting(one) && !pauses.is_waiting(two));
        // Another purge of the same namespace, which moves the end.
        pauses.begin_purge(alone.clone(), &[one], at(25));
        assert_eq!(pauses.end(at(31)), []);
        pauses.end_purge(&alone, at(22));
        assert_eq!(pauses.end(at(31)), [one]);
        assert!(!pauses.keep(one) && pauses.all(at(31)).count() == 0);
    }

    #[test]
    fn a_pause_of_two_purges_lasts_until_both_have_ended() {
        let (mut pauses, begun, one) = (Pauses::default(), Instant::now(), NamespaceId(1));
        let blue = Paused::Tenant("blue".to_owned());
        (0..2).for_each(|_| pauses.begin_purge(blue.clone(), &[one], begun));
        assert!(pauses.keep(one));
        pauses.end_purge(&blue, begun);
        assert_eq!(pauses.end(begun), []);
        pauses.end_purge(&blue, begun);
        assert_eq!(pauses.end(begun), [one]);
    }

    #[test]
    fn many_namespaces_are_freed_in_pieces() {
        let (mut pauses, now) = (Pauses::default(), Instant::now());
        let blue = Paused::Tenant("blue".to_owned());
        let all: Vec<NamespaceId> = (0..300).map(NamespaceId).collect();
        pauses.begin_purge(blue.clone(), &all, now);
        assert!(all.iter().all(|namespace| pauses.keep(*namespace)));
        pauses.end_purge(&blue, now);
        let pieces: Vec<usize> = (0..4).map(|_| pauses.end(now).len()).collect();
        assert_eq!(pieces, [ENDED_AT_ONCE, ENDED_AT_ONCE, 300 - 2 * ENDED_AT_ONCE, 0]);
    }

    #[test]
    fn pauses_are_limited_and_one_that_there_is_can_be_moved() {
        let (mut pauses, now) = (Pauses::default(), Instant::now());
        let of = |id: usize| Paused::Namespace(NamespaceId(id as u128));
        for id in 0..MOST {
            pauses.check(&of(id)).unwrap();
            pauses.begin_purge(of(id), &[NamespaceId(id as u128)], now);
        }
        let full = pauses.check(&of(MOST)).unwrap_err();
        assert!(full.kind() == ErrorKind::Full && full.hint_text().is_some());
        pauses.check(&of(0)).unwrap();
        assert_eq!(pauses.all(now).count(), MOST);
    }
}
