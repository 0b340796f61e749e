//! Effects to operations, completions to events.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_core::below::TierId;
use forebay_core::block::BlockId;
use forebay_core::decorate::{Breaker, Deadline, Stats, Timed};
use forebay_core::tier::{Completion, Health, Location, OpId, OpKind, Operation, Outcome, Priority, Tier};
use forebay_core::{BlockKey, Core, ErrorKind, Generation, SlotId};
use forebay_io::arena::Pool;
use forebay_io::ssd::Ssd;

use super::purge::Purges;
use crate::config::TierSsd;
use crate::service::make_ready;
use crate::state::State;

pub(super) type Stack = Stats<Breaker<Deadline<Ssd>>>;

/// The configured tier, from before it is open until the end.
pub struct Driver {
    id: Option<TierId>,
    pub(super) tier: Option<Stack>,
    /// Why it will never be open, if so.
    pub(super) failure: Option<String>,
    deadline: Duration,
    start: Instant,
    next_op: u64,
    pub(super) under_way: HashMap<OpId, Under>,
    /// Not taken by the tier yet, loads before the others.
    loads: VecDeque<(Operation, Duration)>,
    others: VecDeque<Operation>,
    pub(super) purges: Purges,
    /// As the core was told.
    pub(super) was_healthy: bool,
    /// The daemon is going away.
    is_closed: bool,
    registered_bytes: u64,
    completions: Vec<Completion>,
}

/// What an operation is for.
#[derive(Clone, Copy)]
pub(super) enum Under {
    Load { block: BlockId, slot: SlotId, generation: Generation },
    Store { block: BlockId, key: BlockKey },
    Remove { key: BlockKey },
}

impl Driver {
    /// Tells the core of the tier if one is configured; it is opened later.
    pub fn new(config: &TierSsd, core: &mut Core) -> Driver {
        let id = (!config.disks.is_empty()).then(|| core.open_tier(Driver::limits(config)));
        id.into_iter().for_each(|id| core.set_healthy(id, false));
        Driver {
            id,
            tier: None,
            failure: None,
            deadline: Duration::MAX,
            start: Instant::now(),
            next_op: 1,
            under_way: HashMap::new(),
            loads: VecDeque::new(),
            others: VecDeque::new(),
            purges: Purges::default(),
            was_healthy: false,
            is_closed: false,
            registered_bytes: 0,
            completions: Vec::new(),
        }
    }

    pub fn is_configured(&self) -> bool {
        self.id.is_some()
    }

    /// The tier's number in the core. Panics if none is configured.
    pub fn id(&self) -> TierId {
        self.id.expect("a tier is configured")
    }

    /// From now on operations reach the tier.
    pub fn attach(&mut self, ssd: Ssd, deadline: Duration) {
        self.deadline = deadline;
        self.tier = Some(Stats::new(Breaker::new(Deadline::new(ssd, deadline))));
        self.purges.find_all(self.tier.as_ref().expect("just set"));
    }

    pub fn failed(&mut self, why: String) {
        self.failure = Some(why);
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Operations not taken by the tier yet.
    pub fn waiting(&self) -> usize {
        self.loads.len() + self.others.len()
    }

    /// For `Effect::Load`; the slot is written down as being filled.
    pub fn load(&mut self, core: &Core, block: BlockId, slot: SlotId, generation: Generation) {
        let key = core.key_below(block);
        let at = core.place_below(&key).map_or(Location::default(), |place| place.at);
        let op = Operation {
            id: self.next_id(Under::Load { block, slot, generation }),
            kind: OpKind::Load { at },
            priority: Priority::Load,
            key,
            slot: Some((slot, generation)),
            length_bytes: core.length_below(block),
            checksum: 0,
        };
        self.loads.push_back((op, self.now()));
    }

    /// For `Effect::Store`; what is to be written is what the pool's table says of the slot.
    pub fn store(&mut self, core: &Core, pool: &Pool, block: BlockId, slot: SlotId, generation: Generation) {
        let key = core.key_below(block);
        let entry = pool.entry(slot).filter(|entry| entry.key == key);
        // Without an entry nothing is known to be whole; a length of zero is refused by every tier.
        let (length_bytes, checksum) = entry.map_or((0, 0), |entry| (entry.length, entry.checksum));
        let op = Operation {
            id: self.next_id(Under::Store { block, key }),
            kind: OpKind::Store,
            priority: Priority::Store,
            key,
            slot: Some((slot, generation)),
            length_bytes,
            checksum,
        };
        self.others.push_back(op);
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        self.purges.removing += 1;
        let op = Operation {
            id: self.next_id(Under::Remove { key }),
            kind: OpKind::Remove { at: Location::default() },
            priority: Priority::Store,
            key,
            slot: None,
            length_bytes: 0,
            checksum: 0,
        };
        self.others.push_back(op);
    }

    /// Hands the tier what it takes; the rest waits for its next completion.
    pub fn submit(&mut self) {
        let Some(tier) = &mut self.tier else { return };
        let now = self.start.elapsed();
        if self.loads.is_empty() && self.others.is_empty() {
            return;
        }
        tier.advance(now);
        let loads: Vec<Operation> = self.loads.iter().map(|(op, _)| *op).collect();
        let taken = tier.submit(&loads);
        self.loads.drain(..taken);
        let taken = tier.submit(self.others.make_contiguous());
        self.others.drain(..taken);
    }

    /// Says how much of the pool is there, so that it can be pinned for the disks' engines.
    pub(super) fn register(&mut self, populated_bytes: u64) {
        if populated_bytes > self.registered_bytes
            && let Some(tier) = &mut self.tier
        {
            self.registered_bytes = populated_bytes;
            tier.inner_mut().inner_mut().inner_mut().register(populated_bytes);
        }
    }

    pub(super) fn ssd(&mut self) -> Option<&mut Ssd> {
        self.tier.as_mut().map(|tier| tier.inner_mut().inner_mut().inner_mut())
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn next_id(&mut self, under: Under) -> OpId {
        let id = OpId(self.next_op);
        self.next_op += 1;
        self.under_way.insert(id, under);
        id
    }

    /// Loads that waited here for longer than anybody waits for them.
    fn take_stale(&mut self, late: &mut Vec<Completion>) {
        let now = self.now();
        let is_stale = |(_, since): &mut (Operation, Duration)| now.saturating_sub(*since) > self.deadline;
        while let Some((op, _)) = self.loads.pop_front_if(is_stale) {
            late.push(Completion { id: op.id, outcome: Outcome::Failed(ErrorKind::Timeout) });
        }
    }
}

impl State {
    /// One turn of the tier: what is late, what has ended, what was given up, how it is.
    pub fn drive_tiers(&mut self) {
        let driver = &mut self.tiers;
        let now = driver.now();
        let Some(tier) = &mut driver.tier else { return };
        let (mut late, mut ended, mut evicted) = (Vec::new(), std::mem::take(&mut driver.completions), Vec::new());
        tier.advance(now);
        tier.poll(&mut ended);
        tier.take_late(&mut late);
        let is_healthy = tier.health() == Health::Healthy && !driver.is_closed;
        driver.take_stale(&mut ended);
        driver.ssd().into_iter().for_each(|ssd| ssd.take_evicted(&mut evicted));
        late.into_iter().for_each(|id| self.late(id));
        ended.drain(..).for_each(|completion| self.ended(completion));
        self.tiers.completions = ended;
        evicted.iter().for_each(|key| self.core.tier_evicted(self.tiers.id(), key));
        self.note_health(is_healthy);
        self.tiers.register(self.core.populated_bytes());
    }

    /// Nothing new goes to a tier, or comes up from it.
    pub fn close_tiers(&mut self) {
        if self.tiers.is_configured() {
            self.tiers.is_closed = true;
            self.note_health(false);
        }
    }

    fn late(&mut self, id: OpId) {
        if let Some(Under::Load { block, generation, .. }) = self.tiers.under_way.get(&id) {
            self.core.give_up(*block, *generation);
        }
    }

    fn ended(&mut self, Completion { id, outcome }: Completion) {
        let under = self.tiers.under_way.remove(&id).expect("a tier completes what it was given, once");
        match under {
            Under::Load { block, slot, generation } => self.loaded(block, (slot, generation), outcome),
            Under::Store { block, key } => {
                if !self.core.stored(self.tiers.id(), block, outcome) {
                    self.tiers.remove(key);
                }
            }
            Under::Remove { key } => match outcome {
                Outcome::Removed | Outcome::Absent => {
                    self.core.tier_evicted(self.tiers.id(), &key);
                    self.tiers.purges.removed();
                }
                _ => self.tiers.purges.put_back(key),
            },
        }
    }

    fn loaded(&mut self, block: BlockId, at: (SlotId, Generation), outcome: Outcome) {
        let key = self.core.key_below(block);
        let tokens = self.core.tokens_below(block);
        let is_ready = self.core.loaded(block, at.1, outcome);
        if let (true, Outcome::Loaded { length_bytes, checksum }) = (is_ready, outcome) {
            make_ready(self, key, at, length_bytes, checksum, tokens);
        }
    }

    fn note_health(&mut self, is_healthy: bool) {
        if is_healthy != self.tiers.was_healthy {
            self.tiers.was_healthy = is_healthy;
            self.core.set_healthy(self.tiers.id(), is_healthy);
            if self.tiers.is_closed {
                return;
            }
            if is_healthy {
                tracing::info!(tier = "ssd", "the tier is well");
            } else {
                tracing::warn!(tier = "ssd", "the tier is sick; its blocks are misses until it recovers");
            }
        }
    }
}
