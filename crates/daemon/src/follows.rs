//! The lookups of one session that the daemon looks at again, because some of their keys were "not yet".
//!
//! Invariants: each has a place among `limits.lookups_in_flight`. One that is taken out of here ends at once: when its
//! lease is released, or when it is given up. All end with the session, and when the daemon drains.
//!
//! Looks take at most a quarter of the deciding thread's time, whatever clients do. A session's lookups pause so long
//! that one look at each of them takes its share of that quarter, and each session of an engine has the same share. So
//! what a session has looked at slows down its own lookups, and no others. Promotions that a look starts are not part
//! of this: a tier's speed bounds them.
//!
//! A look takes time for those of a lookup's keys that are "not yet", but for those that are put off until the end of
//! the prefix is known; and for those that were found, which are touched again with each answer.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// What one look takes the deciding thread at most, without its keys: to wake the lookup, an event, an answer.
const LOOK_NS: u64 = 10_000;
/// What a key takes more: 0.1 us if its block is in the pool or nowhere, and as much again if a tier has it.
const KEY_NS: u64 = 200;
/// One in so many parts of the deciding thread's time is for looks.
const PARTS: u64 = 4;
/// Keys of a session's lookups in here: as many as an engine has under way. They take 64 MiB.
const MOST_KEYS: u64 = 1 << 20;

#[derive(Default)]
pub struct Follows {
    /// By lease, and so by age.
    all: BTreeMap<u64, Follow>,
    /// Of all of them.
    keys: Keys,
}

struct Follow {
    place: OwnedSemaphorePermit,
    keys: Keys,
    _alive: oneshot::Sender<Infallible>,
}

/// Of lookups.
#[derive(Clone, Copy, Default)]
pub struct Keys {
    /// Those that take memory: "not yet", or found.
    pub all: u64,
    /// Those of them that each look takes time for.
    pub looked_at: u64,
}

/// Fails when the lookup is to end.
pub type Alive = oneshot::Receiver<Infallible>;

impl Follows {
    /// Ends older ones if there are too many keys.
    pub fn begin(&mut self, lease: u64, place: OwnedSemaphorePermit, keys: Keys) -> Alive {
        while self.keys.all + keys.all > MOST_KEYS && self.end_oldest().is_some() {}
        let (sender, alive) = oneshot::channel();
        self.keys.add(keys);
        self.all.insert(lease, Follow { place, keys, _alive: sender });
        alive
    }

    /// It has so many keys from now on.
    pub fn set_keys(&mut self, lease: u64, keys: Keys) {
        if let Some(follow) = self.all.get_mut(&lease) {
            self.keys.take_off(std::mem::replace(&mut follow.keys, keys));
            self.keys.add(keys);
        }
    }

    pub fn end(&mut self, lease: u64) {
        let ended = self.all.remove(&lease);
        self.keys.take_off(ended.map_or_else(Keys::default, |follow| follow.keys));
    }

    /// Its place, for another lookup.
    pub fn end_oldest(&mut self) -> Option<OwnedSemaphorePermit> {
        let (_, follow) = self.all.pop_first()?;
        self.keys.take_off(follow.keys);
        Some(follow.place)
    }

    pub fn end_all(&mut self) {
        (self.all, self.keys) = Default::default();
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The least pause between two looks at a lookup in here, while so many sessions have a share.
    pub fn pause(&self, sessions: usize) -> Duration {
        let round = LOOK_NS * self.all.len() as u64 + KEY_NS * self.keys.looked_at;
        Duration::from_nanos(round * PARTS * sessions as u64)
    }
}

impl Keys {
    fn add(&mut self, other: Keys) {
        self.all += other.all;
        self.looked_at += other.looked_at;
    }

    fn take_off(&mut self, other: Keys) {
        self.all -= other.all;
        self.looked_at -= other.looked_at;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    fn keys(count: u64) -> Keys {
        Keys { all: count, looked_at: count }
    }

    fn is_over(alive: &mut Alive) -> bool {
        alive.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_lookup_keeps_its_place_until_it_ends() {
        let places = Arc::new(Semaphore::new(4));
        let mut follows = Follows::default();
        let place = || places.clone().try_acquire_owned().unwrap();
        let mut all: Vec<Alive> = (0..4).map(|lease| follows.begin(lease, place(), keys(10))).collect();
        assert!(places.try_acquire().is_err());
        follows.end(1);
        follows.end(1);
        assert_eq!((places.available_permits(), follows.len()), (1, 3));
        drop(follows.end_oldest().unwrap());
        assert_eq!(all.iter_mut().map(is_over).collect::<Vec<_>>(), [true, true, false, false]);
        follows.end_all();
        assert_eq!((places.available_permits(), follows.pause(1)), (4, Duration::ZERO));
        assert!(follows.end_oldest().is_none() && is_over(&mut all[3]));
    }

    #[test]
    fn a_session_has_so_many_keys_looked_at_and_no_more() {
        let places = Arc::new(Semaphore::new(3));
        let mut follows = Follows::default();
        let mut begin = |lease, count| follows.begin(lease, places.clone().try_acquire_owned().unwrap(), keys(count));
        let mut all = [begin(0, MOST_KEYS / 2), begin(1, MOST_KEYS / 2), begin(2, 1)];
        assert_eq!(all.each_mut().map(is_over), [true, false, false]);
        assert_eq!(places.available_permits(), 1);
        assert!(!is_over(&mut follows.begin(3, places.try_acquire_owned().unwrap(), keys(2 * MOST_KEYS))));
    }

    #[test]
    fn looks_of_all_sessions_take_a_quarter_of_the_time_at_most() {
        let places = Arc::new(Semaphore::new(1024));
        let sessions = [(1, 1_000_000), (1000, 1), (20, 8000)].map(|(lookups, count)| {
            let mut follows = Follows::default();
            let place = || places.clone().try_acquire_owned().unwrap();
            (0..lookups).for_each(|lease| drop(follows.begin(lease, place(), keys(count))));
            (follows, Duration::from_nanos(lookups * (LOOK_NS + KEY_NS * count)))
        });
        let busy = |(follows, round): &(Follows, Duration)| round.as_secs_f64() / follows.pause(3).as_secs_f64();
        assert!(sessions.iter().map(busy).sum::<f64>() <= 0.25 + 1e-9);
    }

    #[test]
    fn fewer_keys_are_looked_at_more_often() {
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let mut follows = Follows::default();
        let _alive = follows.begin(7, place, keys(1_000_000));
        let long = follows.pause(1);
        follows.set_keys(7, Keys { all: 1_000_000, looked_at: 10 });
        assert!(follows.pause(1) < Duration::from_millis(1) && long > Duration::from_millis(500));
        follows.end(7);
        follows.set_keys(7, keys(5));
        assert_eq!(follows.pause(1), Duration::ZERO);
    }
}
