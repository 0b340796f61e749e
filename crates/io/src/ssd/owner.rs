//! The signature of a daemon in a superblock: `watch` looks at it again and again.

use std::time::Duration;

use forebay_core::{Error, ErrorKind};

use super::layout::{Geometry, Page, is_of_other_version};

/// What a disk knows of its signature.
pub(super) struct Watch {
    pub owner: Owner,
    pub next_look: Duration,
    pub is_looking: bool,
    pub is_taken: bool,
}

impl Watch {
    pub fn new(owner: Owner) -> Watch {
        Watch { owner, next_look: Duration::ZERO, is_looking: false, is_taken: false }
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
