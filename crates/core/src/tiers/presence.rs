//! The presence cache: which shared tiers have a key, by their own answers.
//!
//! Invariants: an answer is used for at most two periods of [`crate::Core::expire_skips`], because other hosts store
//! and evict at any time; the number of entries is limited; an entry whose answer is still awaited is not forgotten.

use std::collections::HashMap;

use super::locations::LoadHealth;
use crate::key::{BlockKey, Fingerprint, TierId};

/// Keys that are known of in one period: a few prompts of a million tokens. Half of them may be probed for prefetch.
const MAX_KNOWN: usize = 1 << 17;

/// A question to a shared tier; its answer goes to [`crate::Core::probe_done`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probe {
    /// The tier to ask.
    pub tier: TierId,
    /// The block to ask for.
    pub key: BlockKey,
    /// Bytes of the block, should it be loaded then.
    pub length_bytes: u64,
}

/// What is known of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Presence {
    /// So many tiers have not answered yet; whether one has said that it lacks the key.
    Pending(u8, bool),
    Present(TierId, LoadHealth),
    Absent,
    /// No tier could say whether it has the key.
    Unknown,
}

/// See the module's head.
#[derive(Default)]
pub(crate) struct PresenceCache {
    recent: HashMap<Fingerprint, Presence>,
    /// Of the period before; nothing is added.
    older: HashMap<Fingerprint, Presence>,
    /// Not taken by the driver yet.
    probes: Vec<Probe>,
    /// Keys that a tier has not answered for yet.
    pending: usize,
}

impl PresenceCache {
    pub fn get(&self, key: Fingerprint) -> Option<Presence> {
        self.recent.get(&key).or_else(|| self.older.get(&key)).copied()
    }

    /// Which tier has the key, if one is known to.
    pub fn location(&self, key: Fingerprint) -> Option<(TierId, LoadHealth)> {
        match self.get(key)? {
            Presence::Present(tier, health) => Some((tier, health)),
            Presence::Pending(..) | Presence::Absent | Presence::Unknown => None,
        }
    }

    pub fn set_health(&mut self, key: Fingerprint, health: LoadHealth) {
        if let Some(Presence::Present(tier, _)) = self.get(key) {
            self.set(key, Presence::Present(tier, health));
        }
    }

    pub fn leave(&mut self, key: Fingerprint, tier: TierId) {
        if self.location(key).is_some_and(|(known, _)| known == tier) {
            self.set(key, Presence::Absent);
        }
    }

    /// This host has stored the block there. What a tier said before is no longer so; of a key that nobody has asked
    /// for, nothing is noted.
    pub fn stored(&mut self, key: Fingerprint, tier: TierId) {
        if let Some(Presence::Absent | Presence::Unknown) = self.get(key) {
            self.set(key, Presence::Present(tier, LoadHealth::Good));
        }
    }

    /// A key is asked for: one probe for each tier that may have it.
    pub fn ask(&mut self, key: Fingerprint, probes: impl ExactSizeIterator<Item = Probe>) {
        self.set(key, Presence::Pending(probes.len() as u8, false));
        self.probes.extend(probes);
    }

    /// A tier's answer; `None` if the tier could not tell, or not in time. The nearest tier that has the block counts.
    /// A late answer is taken.
    pub fn answer(&mut self, key: Fingerprint, tier: TierId, is_found: Option<bool>) {
        let now = match (is_found, self.get(key)) {
            (Some(true), Some(Presence::Present(other, health))) => Presence::Present(other.min(tier), health),
            (Some(true), _) => Presence::Present(tier, LoadHealth::Good),
            // Each block goes to all shared tiers that are written: one that lacks the key speaks for the silent ones.
            (_, Some(Presence::Pending(left, is_lacked))) => match (left - 1, is_lacked || is_found.is_some()) {
                (0, true) => Presence::Absent,
                (0, false) => Presence::Unknown,
                (left, is_lacked) => Presence::Pending(left, is_lacked),
            },
            _ => return,
        };
        self.set(key, now);
    }

    /// Appends the probes that nobody took yet.
    pub fn take_probes(&mut self, probes: &mut Vec<Probe>) {
        probes.append(&mut self.probes);
    }

    /// Keys that a tier has not answered for yet.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Whether so much is known already that no more is asked for.
    pub fn is_full(&self) -> bool {
        self.recent.len() >= MAX_KNOWN
    }

    /// Whether so much is known already that the rest is left to lookups.
    pub fn is_half_full(&self) -> bool {
        self.recent.len() >= MAX_KNOWN / 2
    }

    fn set(&mut self, key: Fingerprint, known: Presence) {
        self.pending -= usize::from(matches!(self.get(key), Some(Presence::Pending(..))));
        self.pending += usize::from(matches!(known, Presence::Pending(..)));
        self.recent.insert(key, known);
    }

    /// A period is over. What was asked for meanwhile is still waited for.
    pub fn forget(&mut self) {
        let asked =
            std::mem::take(&mut self.older).into_iter().filter(|(_, known)| matches!(known, Presence::Pending(..)));
        self.older = std::mem::take(&mut self.recent);
        for (key, known) in asked {
            self.older.entry(key).or_insert(known);
        }
    }
}
