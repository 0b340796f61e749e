//! The signature of a daemon in a superblock: `watch` looks at it again and again.

use std::time::Duration;

use forebay_core::{Error, ErrorKind};

use super::layout::{Geometry, Page, is_of_other_version};

/// How often the superblock is read: one page.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// What a disk knows of its signature.
pub(super) struct Watch {
    pub owner: Owner,
    /// When the last look began.
    began_at: Duration,
    is_looking: bool,
    /// When the last look began that saw the superblock.
    seen_at: Duration,
    /// When the first of the looks began that have seen nothing since, if the last one has failed.
    failing_since: Option<Duration>,
    pub is_taken: bool,
}

impl Watch {
    /// Of a disk that was opened, and so looked at, just now.
    pub fn new(owner: Owner, now: Duration) -> Watch {
        Watch { owner, began_at: now, is_looking: false, seen_at: now, failing_since: None, is_taken: false }
    }

    pub fn is_looking(&self) -> bool {
        self.is_looking
    }

    /// Whether a look is due, which has begun then.
    pub fn begin_look(&mut self, now: Duration) -> bool {
        let is_due = !self.is_looking && !self.is_taken && now.saturating_sub(self.began_at) >= LOOK_INTERVAL;
        if is_due {
            (self.is_looking, self.began_at) = (true, now);
        }
        is_due
    }

    /// A look that failed permits no write: another may have signed meanwhile.
    pub fn end_look(&mut self, has_seen: bool) {
        self.is_looking = false;
        if has_seen {
            (self.seen_at, self.failing_since) = (self.began_at, None);
        } else {
            self.failing_since.get_or_insert(self.began_at);
        }
    }

    /// Whether the last look is so new that writes may begin. One is due before that, so a disk that answers holds no
    /// write up.
    pub fn may_write(&self, now: Duration) -> bool {
        !self.is_taken && now.saturating_sub(self.seen_at) < 2 * LOOK_INTERVAL
    }

    /// Whether looks have failed, or one has had no answer, for so long.
    pub fn is_blind_for(&self, limit: Duration, now: Duration) -> bool {
        let since = self.failing_since.or(self.is_looking.then_some(self.began_at));
        since.is_some_and(|since| now.saturating_sub(since) >= limit)
    }
}

/// The signature that a daemon expects on its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    Is(u128),
    /// Its own, or the one before: the write may have failed, or was lost without a word.
    OwnOrEarlier(u128, u128),
    /// The superblock could not be read. What is found first counts.
    Unknown,
}

impl Owner {
    /// Whether another has signed this superblock, or has made the disk anew. A damaged one says nothing.
    pub fn is_of_another(self, page: &Page, geometry: &Geometry) -> bool {
        let Some(found) = Geometry::decode_superblock(page) else { return is_of_other_version(page) };
        let owner = Geometry::owner_in(page);
        let is_expected = match self {
            Owner::Is(expected) => owner == expected,
            Owner::OwnOrEarlier(own, earlier) => owner == own || owner == earlier,
            Owner::Unknown => true,
        };
        found != *geometry || !is_expected
    }
}

pub(super) fn taken_by_another() -> Error {
    let message = "another daemon, or another path of this host, writes to this disk";
    Error::new(ErrorKind::Unavailable, message).hint(
        "give each disk to one daemon and name it once, under one path, in `tier.ssd.disks`; then restart the daemon",
    )
}
