//! The tiers' part of a purge of shared stores. The work itself is `tasks::purge_shared`.
//!
//! Invariants: there is one purge of shared stores at a time. A place where an earlier thread still hangs gets no
//! second thread, so there are no more threads than places.

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay_core::tier::Outcome;
use forebay_core::tiers::TierId;
use forebay_core::{Core, Error, ErrorKind, NamespaceId, Result};
use forebay_io::purge::{Place, Purging};

use super::Tiers;
use super::driver::Driver;

/// A place with a thread, which has a share in `purging` as long as it lives.
pub struct Busy {
    pub tier: TierId,
    pub place: String,
    pub purging: Arc<Purging>,
}

impl Tiers {
    /// From now on no block of the namespaces is written to a tier or promoted from one. An error if another purge of
    /// the shared stores is under way.
    pub fn begin_emptying(&mut self, namespaces: &BTreeSet<NamespaceId>, core: &mut Core) -> Result<()> {
        if !self.emptying.is_empty() {
            return Err(Error::new(ErrorKind::Unavailable, "another purge of the shared stores is running")
                .hint("purge again when that one has ended"));
        }
        for namespace in namespaces {
            core.begin_tier_purge(*namespace);
            self.purging.insert(*namespace);
        }
        for tier in self.shared() {
            let withdrawn = self.of(tier).withdraw_stores(namespaces);
            withdrawn.into_iter().for_each(|block| {
                core.written_back(tier, block, Outcome::Failed(ErrorKind::Unavailable));
            });
        }
        self.emptying = namespaces.clone();
        Ok(())
    }

    /// The namespaces are used again.
    pub fn end_emptying(&mut self, core: &mut Core) {
        self.emptying.clear();
        self.step_purges(core);
    }

    fn shared(&self) -> Vec<TierId> {
        self.drivers.iter().filter(|driver| driver.is_shared).map(|driver| driver.id).collect()
    }

    pub fn is_storing(&self, namespaces: &BTreeSet<NamespaceId>) -> bool {
        self.drivers.iter().any(|driver| driver.is_shared && driver.is_storing(namespaces))
    }

    pub fn places(&mut self) -> Vec<(TierId, Result<Vec<Place>>)> {
        let shared = self.drivers.iter_mut().filter(|driver| driver.is_shared);
        shared.map(|driver| (driver.id, driver.places())).collect()
    }

    /// Whether a thread of a purge has not ended.
    pub fn has_thread(&mut self) -> bool {
        self.forget_ended();
        !self.busy.is_empty()
    }

    fn forget_ended(&mut self) {
        self.busy.retain(|busy| Arc::strong_count(&busy.purging) > 1);
    }

    /// False if a thread is there already.
    pub fn enter(&mut self, busy: Busy) -> bool {
        self.forget_ended();
        let is_free = !self.busy.iter().any(|other| (other.tier, &other.place) == (busy.tier, &busy.place));
        if is_free {
            self.busy.push(busy);
        }
        is_free
    }
}

impl Driver {
    fn places(&mut self) -> Result<Vec<Place>> {
        let why = self.failure.as_ref().map(|failure| failure.why.clone());
        let why = why.unwrap_or_else(|| "it is still being opened".to_owned());
        self.driven().map(|tier| tier.places()).ok_or_else(|| {
            let error = Error::new(ErrorKind::Unavailable, "the shared store is not open").source(why);
            error.hint("see the daemon's log, and purge again when `forebay inspect` shows the tier as serving")
        })
    }
}
