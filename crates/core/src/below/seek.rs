//! Asking stores whose truth is elsewhere whether they have a block.
//!
//! Lookup → [`Find`] for each key that is nowhere here, to every shared tier at once → [`Core::answered`] → whoever asks
//! next is told: a block that is there is promoted like any other, one that is nowhere is a miss at once.
//!
//! Invariants: what is known here is believed for two periods of [`Core::forgive`] at most, since others store and
//! evict without telling; entries have a limit, over it keys are not asked for; one event asks for a bounded number.

use std::collections::HashMap;

use super::{Place, Standing, TierId, residence};
use crate::block::NamespaceIndex;
use crate::core::Core;
use crate::index::Fingerprint;
use crate::key::{BlockHash, BlockKey};
use crate::miss::MissReason;
use crate::tier::{Location, Outcome};

/// Keys that are known of in one period: a few prompts of a million tokens. Half of them may be asked for ahead.
const MAX_KNOWN: usize = 1 << 17;

/// A question to a shared tier; its answer goes to [`Core::answered`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Find {
    pub tier: TierId,
    pub key: BlockKey,
    pub length_bytes: u64,
}

/// What is known of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// So many tiers have not answered yet.
    Asked(u8),
    There(TierId, Standing),
    Nowhere,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Sought {
    recent: HashMap<Fingerprint, Known>,
    /// Of the period before; nothing is added.
    older: HashMap<Fingerprint, Known>,
    /// Not taken by the driver yet.
    finds: Vec<Find>,
    /// Keys that a tier has not answered for yet.
    unanswered: usize,
}

impl Sought {
    fn get(&self, key: Fingerprint) -> Option<Known> {
        self.recent.get(&key).or_else(|| self.older.get(&key)).copied()
    }

    /// Where the key is, if it is known to be somewhere.
    pub fn place(&self, key: Fingerprint) -> Option<(Place, Standing)> {
        match self.get(key)? {
            Known::There(tier, standing) => Some((Place { tier, at: Location::default() }, standing)),
            Known::Asked(_) | Known::Nowhere => None,
        }
    }

    pub fn stand(&mut self, key: Fingerprint, standing: Standing) {
        if let Some(Known::There(tier, _)) = self.get(key) {
            self.set(key, Known::There(tier, standing));
        }
    }

    pub fn leave(&mut self, key: Fingerprint, tier: TierId) {
        if self.place(key).is_some_and(|(place, _)| place.tier == tier) {
            self.set(key, Known::Nowhere);
        }
    }

    pub fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Whether so much is known already that the rest is left to lookups.
    pub fn is_half_full(&self) -> bool {
        self.recent.len() >= MAX_KNOWN / 2
    }

    fn set(&mut self, key: Fingerprint, known: Known) {
        self.unanswered -= usize::from(matches!(self.get(key), Some(Known::Asked(_))));
        self.unanswered += usize::from(matches!(known, Known::Asked(_)));
        self.recent.insert(key, known);
    }

    /// A period is over. What was asked for meanwhile is still waited for.
    pub fn forget(&mut self) {
        let asked = std::mem::take(&mut self.older).into_iter().filter(|(_, known)| matches!(known, Known::Asked(_)));
        self.older = std::mem::take(&mut self.recent);
        for (key, known) in asked {
            self.older.entry(key).or_insert(known);
        }
    }
}

impl Core {
    /// Asks the shared tiers for a key, once; `None` if there is nobody to ask, or nobody has it.
    pub(super) fn seek(
        &mut self,
        namespace: NamespaceIndex,
        group: u16,
        hash: &[u8],
        finds_left: &mut usize,
    ) -> Option<MissReason> {
        let id = self.names.get(namespace).id;
        let key = residence::key(self.config.seed, id, group, hash);
        match self.below.sought.get(key) {
            Some(Known::Asked(_)) => return Some(MissReason::PromotionUnfinished),
            Some(_) => return None,
            None => {}
        }
        let asked = (0..self.below.tiers.len() as u8).map(TierId).filter(|tier| self.is_asked(*tier));
        let asked: Vec<TierId> = asked.collect();
        if asked.is_empty() || self.is_purging_below(id) || self.below.sought.recent.len() >= MAX_KNOWN {
            return None;
        }
        if *finds_left == 0 {
            return Some(MissReason::PromotionUnfinished);
        }
        *finds_left -= 1;
        let hash = BlockHash::new(hash).ok()?;
        let length_bytes = self.names.get(namespace).layout.group(group).map_or(0, |layout| layout.block_bytes());
        let find = |tier: &TierId| Find { tier: *tier, key: BlockKey { namespace: id, group, hash }, length_bytes };
        self.below.sought.finds.extend(asked.iter().map(find));
        self.below.sought.set(key, Known::Asked(asked.len() as u8));
        Some(MissReason::PromotionUnfinished)
    }

    /// A tier's answer to a [`Find`], or that it gave none in time; the nearest tier that has the block counts.
    /// A late answer is welcome.
    pub fn answered(&mut self, find: &Find, outcome: Outcome) {
        let key = self.below_key(&find.key);
        let known = self.below.sought.get(key);
        let nearer = |other: TierId| other.min(find.tier);
        let now = match (outcome, known) {
            (Outcome::Found(_), Some(Known::There(other, standing))) => Known::There(nearer(other), standing),
            (Outcome::Found(_), _) => Known::There(find.tier, Standing::Good),
            (_, Some(Known::Asked(1))) => Known::Nowhere,
            (_, Some(Known::Asked(left))) => Known::Asked(left - 1),
            _ => return,
        };
        self.below.sought.set(key, now);
    }

    /// Appends the questions that came up since the last call.
    pub fn take_finds(&mut self, finds: &mut Vec<Find>) {
        finds.append(&mut self.below.sought.finds);
    }

    fn is_asked(&self, tier: TierId) -> bool {
        self.below.tiers[tier.0 as usize].limits.is_shared && self.is_open(tier)
    }
}
