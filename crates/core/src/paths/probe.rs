//! Asking shared tiers whether they have a block; the core keeps no index of them.
//!
//! Lookup → [`Probe`] for each key that neither the pool nor an own tier has, to every shared tier at once →
//! [`Core::probe_done`] → the next lookup uses the answer in the presence cache: a block that a tier has is promoted
//! like any other; a block that no tier has, or of which no tier can tell, is a miss at once. One event probes a
//! bounded number of keys.

use crate::core::Core;
use crate::key::{BlockHash, BlockKey, NamespaceIndex, TierId};
use crate::miss::MissReason;
use crate::tier::Outcome;
use crate::tiers::{Presence, Probe};

impl Core {
    /// Asks the shared tiers for a key, once; `None` if there is nobody to ask, or nobody has it. A key has failed if
    /// shared tiers are there and none of them can tell.
    pub(super) fn probe(
        &mut self,
        namespace: NamespaceIndex,
        group: u16,
        hash: &[u8],
        probes_left: &mut usize,
    ) -> Option<MissReason> {
        let id = self.cache.namespace(namespace).id;
        let key = self.tiers.key(id, group, hash);
        match self.tiers.presence().get(key) {
            Some(Presence::Pending(..)) => return Some(MissReason::PromotionUnfinished),
            Some(Presence::Unknown) => return Some(MissReason::Failed),
            Some(Presence::Present(..) | Presence::Absent) => return None,
            None => {}
        }
        let asked = self.tiers.to_probe();
        if self.is_purging_tiers(id) || self.tiers.presence().is_full() {
            return None;
        }
        if asked.is_empty() {
            return self.tiers.is_any_shared().then_some(MissReason::Failed);
        }
        if *probes_left == 0 {
            return Some(MissReason::PromotionUnfinished);
        }
        *probes_left -= 1;
        let hash = BlockHash::new(hash).ok()?;
        let length_bytes = self.cache.namespace(namespace).layout.group(group).map_or(0, |layout| layout.block_bytes());
        let probe = |tier: &TierId| Probe { tier: *tier, key: BlockKey { namespace: id, group, hash }, length_bytes };
        self.tiers.presence_mut().ask(key, asked.iter().map(probe));
        Some(MissReason::PromotionUnfinished)
    }

    /// A tier's answer to a [`Probe`], or that it gave none in time; the nearest tier that has the block counts.
    /// A late answer is welcome.
    pub fn probe_done(&mut self, probe: &Probe, outcome: Outcome) {
        let key = self.tiers.key_of(&probe.key);
        let is_found = match outcome {
            Outcome::Found => Some(true),
            Outcome::Failed(_) => None,
            _ => Some(false),
        };
        self.tiers.presence_mut().answer(key, probe.tier, is_found);
        self.journal.note_end();
    }

    /// Appends the questions that came up since the last call.
    pub fn take_probes(&mut self, probes: &mut Vec<Probe>) {
        self.tiers.presence_mut().take_probes(probes);
    }
}
