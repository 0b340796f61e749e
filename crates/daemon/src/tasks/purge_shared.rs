//! Removes namespaces from shared stores, when a client asks for it.
//!
//! [`Emptying::begin`] (no block of the namespaces is written to a tier or read from one any more) → this daemon's own
//! stores under way end → one thread for each place removes the blocks. The deciding thread checks on these threads
//! from time to time; the tiers' queues, threads and connections are not used.
//!
//! Invariants: there is at most one purge at a time. A place where an earlier thread still hangs gets no second thread,
//! so there are never more threads than places. A purge whose client is gone is stopped. However it ends, the
//! namespaces are then used on tiers again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use forebay_core::tiers::TierId;
use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_io::purge::{Place, Purging};

use crate::state::{Shared, State};
use crate::tiers::Busy;

/// How long stores are waited for that a tier had taken before: as long as tiers give an operation, and once more.
const OWN_STORES: Duration = Duration::from_secs(60);
/// How often stores and threads are looked after.
const LOOK: Duration = Duration::from_millis(20);
/// The time that a step, its rest included, may take beyond its place's timeout before it counts as hanging.
const GRACE: Duration = Duration::from_secs(2);

/// What became of one place.
pub struct Emptied {
    pub tier: &'static str,
    pub place: String,
    pub blocks: u64,
    /// What the store counts, of which a block may be several.
    pub values: u64,
    /// Whether all that was there when it began is gone.
    pub outcome: Result<()>,
}

/// See the module's head. Ends when it is dropped.
pub struct Emptying {
    shared: Shared,
    namespaces: BTreeSet<NamespaceId>,
    deadline: Instant,
    started: Vec<Arc<Purging>>,
}

/// A place whose thread has begun.
struct Started {
    purging: Arc<Purging>,
    patience: Duration,
    outcome: Receiver<Result<()>>,
}

impl Emptying {
    /// Within one event, and not to be dropped in it. An error if another one is under way.
    pub fn begin(
        state: &mut State,
        shared: &Shared,
        namespaces: BTreeSet<NamespaceId>,
        deadline: Instant,
    ) -> Result<Emptying> {
        state.tiers.begin_emptying(&namespaces, &mut state.core)?;
        Ok(Emptying { shared: shared.clone(), namespaces, deadline, started: Vec::new() })
    }

    /// Takes until the deadline and a little more, at most.
    pub async fn run(mut self) -> Vec<Emptied> {
        let begun = Instant::now();
        let limit = self.deadline.min(begun + OWN_STORES);
        while self.shared.lock().tiers.is_storing(&self.namespaces) && Instant::now() < limit {
            tokio::time::sleep(LOOK).await;
        }
        // Those of a purge whose client has gone end after their step.
        let limit = self.deadline.min(Instant::now() + GRACE);
        while self.shared.lock().tiers.has_thread() && Instant::now() < limit {
            tokio::time::sleep(LOOK).await;
        }
        let mut started = Vec::new();
        for (tier, places) in self.shared.event(|state| state.tiers.places()) {
            match places {
                Ok(places) => started.extend(places.into_iter().map(|place| self.start(tier, place))),
                Err(error) => started.push((tier, String::new(), Err(error))),
            }
        }
        let mut emptied = Vec::new();
        for (tier, place, started) in started {
            let (purging, outcome) = match started {
                Ok(started) => (Some(started.purging.clone()), self.end_of(started).await),
                Err(error) => (None, Err(error)),
            };
            let outcome = outcome.and_then(|()| self.stores_ended(tier));
            let tier = self.shared.lock().tiers.of(tier).name;
            let [blocks, values] = purging.map_or([0; 2], |purging| [purging.blocks(), purging.values()]);
            match &outcome {
                Ok(()) => tracing::info!(tier, place, blocks, values, "purged a shared store"),
                Err(error) => tracing::warn!(tier, place, blocks, values, %error, "a shared store could not be purged"),
            }
            emptied.push(Emptied { tier, place, blocks, values, outcome });
        }
        emptied
    }

    fn start(&mut self, tier: TierId, place: Place) -> (TierId, String, Result<Started>) {
        let (name, patience) = (place.name.clone(), place.patience);
        let purging = Arc::new(Purging::new(self.namespaces.clone(), self.deadline));
        let busy = Busy { tier, place: name.clone(), purging: purging.clone() };
        if !self.shared.lock().tiers.enter(busy) {
            let error = Error::new(ErrorKind::Unavailable, "an earlier purge of the shared store hangs");
            return (tier, name, Err(error.hint("check the shared store, and purge again when it answers")));
        }
        // A thread of a directory has no descriptor with which it could wake a task.
        let (tell, outcome) = sync_channel(1);
        // Nobody may listen any more when it ends.
        let spawned = place.spawn(purging.clone(), move |outcome| drop(tell.send(outcome)));
        self.started.push(purging.clone());
        let no_thread = |error| Error::new(ErrorKind::Unavailable, "cannot start a thread").source(error);
        let started = spawned.map(|()| Started { purging, patience, outcome });
        (tier, name, started.map_err(|error| no_thread(error).hint("purge again")))
    }

    /// Waits for a thread, unless its store hangs.
    async fn end_of(&self, Started { purging, patience, outcome }: Started) -> Result<()> {
        loop {
            match outcome.try_recv() {
                Ok(outcome) => return outcome,
                Err(TryRecvError::Disconnected) => {
                    let error = Error::new(ErrorKind::Io, "the purge of the shared store ended early");
                    return Err(error.hint("report this with the daemon's log, and purge again"));
                }
                Err(TryRecvError::Empty)
                    if purging.silent_for() > patience + GRACE || Instant::now() > self.deadline + GRACE =>
                {
                    purging.stop();
                    return Err(Error::new(ErrorKind::Timeout, "the shared store does not answer")
                        .with("seconds", purging.silent_for().as_secs())
                        .hint("check the shared store, and purge again when it answers"));
                }
                Err(TryRecvError::Empty) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    fn stores_ended(&self, tier: TierId) -> Result<()> {
        if !self.shared.lock().tiers.of(tier).is_storing(&self.namespaces) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Timeout, "blocks that this daemon was storing are still being written")
            .hint("check the shared store, and purge again"))
    }
}

impl Drop for Emptying {
    fn drop(&mut self) {
        self.started.iter().for_each(|purging| purging.stop());
        self.shared.event(|state| {
            let State { tiers, core, .. } = state;
            tiers.end_emptying(core);
        });
    }
}
