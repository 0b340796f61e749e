//! The driver of one tier: effects of the core become operations, and completions become events.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use forebay_core::decorate::{self, Attempts, Rules, Stack, Timed};
use forebay_core::tier::{Completion, Health, Lineage, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::{Limits, Probe, TierId, Touching};
use forebay_core::{BlockId, BlockKey, Core, ErrorKind, Generation, NamespaceId, SlotId};
use forebay_io::Seldom;
use forebay_io::pool::{Pool, Slice};
use tokio::time::Instant;

use super::purge::Purges;
use super::spec::{Driven, Found, TICK, TierSpec};
use super::submissions::Submissions;

/// A tier that is sick for less is not worth a line: a server takes a moment to be connected to.
const SICK_AFTER: Duration = Duration::from_secs(1);

/// A stop does not wait longer for a shared store that has done nothing meanwhile. A loaded server does an operation in
/// milliseconds.
const SILENCE: Duration = Duration::from_secs(1);

/// In each turn the touches of so many parts of a second are handed to the tier: so few that no lookup waits behind
/// them, and enough, since there are a hundred turns a second or more.
const TOUCHING_TURNS: u32 = 64;
/// Records of the pool that are looked at in one turn for blocks that the tier has lost: at most 100 us.
const RECORDS_PER_TURN: u32 = 512;

/// A tier could not be opened.
pub struct Failure {
    pub why: String,
    /// Whether it is tried again, without a restart.
    pub is_tried_again: bool,
}

/// A configured tier, from before it is open until the end.
pub struct Driver {
    pub(super) id: TierId,
    pub name: &'static str,
    /// Other hosts store and evict there too.
    pub is_shared: bool,
    pub deadline: Duration,
    rates: decorate::Limits,
    has_breaker: bool,
    pub(super) tier: Option<Stack<Box<dyn Driven>>>,
    /// Why it is not open, if it could not be opened.
    pub failure: Option<Failure>,
    start: Instant,
    next_op: u64,
    pub(super) under_way: HashMap<OpId, Under>,
    /// In the order in which the tier is offered them.
    probes: Submissions,
    loads: Submissions,
    /// Loads that nobody asked for yet. Those that are asked for go over to `loads`.
    prefetches: Submissions,
    others: Submissions,
    /// Before the stores among `others`, which may wait for a disk's write budget.
    removals: Submissions,
    /// Handed over a few at a time.
    touches: Submissions,
    touches_at_once: usize,
    pub(super) purges: Purges,
    /// As the core was told.
    pub(super) was_healthy: bool,
    changed_at: Instant,
    /// What the log says of it.
    logged_healthy: Option<bool>,
    /// Warnings of damaged blocks, and of those that are too long.
    damaged: Seldom,
    too_long: Seldom,
    /// The daemon is going away.
    pub(super) is_closed: bool,
    /// Whether it was sick then.
    was_closed_sick: bool,
    /// When it was closed, or has last done an operation.
    last_done: Instant,
    registered_bytes: u64,
    /// Whether the core knows that an earlier daemon's transfers are over.
    are_transfers_over: bool,
    /// Whether the core knows that it was told of all blocks.
    has_told_all: bool,
    /// Where the look through the pool goes on for blocks that the tier has lost.
    looks_for_lost: Option<u32>,
    /// More was lost while it was under way.
    looks_again: bool,
}

/// What an operation is for.
#[derive(Clone, Copy)]
pub enum Under {
    Exists { probe: Probe, is_late: bool },
    Load { block: BlockId, slot: SlotId, generation: Generation },
    Store { block: BlockId, key: BlockKey, length_bytes: u64 },
    Remove { key: BlockKey },
    Touch { block: BlockId, generation: Generation, age: u8 },
}

impl Driver {
    /// Tells the core of the tier.
    pub(super) fn new(spec: &dyn TierSpec, core: &mut Core) -> Driver {
        let (options, is_shared) = (spec.options(), spec.capabilities().is_shared);
        let parts = spec.disks().unwrap_or(1);
        let touches = spec.touching();
        let per_second = touches.as_ref().map_or(0, |touches| touches.per_second + touches.asks_per_second);
        let touches_at_once = per_second.div_ceil(TOUCHING_TURNS) as usize;
        let touching = touches.map(|touches| {
            let ticks = |time: Duration| (time.as_secs() / TICK.as_secs()).max(1) as u32;
            let in_a_tick = |per_second| per_second * TICK.as_secs() as u32;
            Touching {
                per_tick: in_a_tick(touches.per_second),
                least_ticks: ticks(touches.least),
                most_ticks: ticks(touches.most),
                asks_per_tick: in_a_tick(touches.asks_per_second),
            }
        });
        let limits = Limits { admission: options.admission, is_shared, parts, touching, ..Limits::default() };
        Driver {
            id: core.open_tier(limits),
            name: spec.name(),
            is_shared,
            deadline: options.load_deadline,
            rates: options.rates,
            has_breaker: !spec.has_own_breakers(),
            tier: None,
            failure: None,
            start: Instant::now(),
            next_op: 1,
            under_way: HashMap::new(),
            probes: Submissions::default(),
            loads: Submissions::default(),
            prefetches: Submissions::default(),
            others: Submissions::default(),
            removals: Submissions::default(),
            touches: Submissions::default(),
            touches_at_once,
            purges: Purges::default(),
            was_healthy: false,
            changed_at: Instant::now(),
            logged_healthy: None,
            damaged: Seldom::default(),
            too_long: Seldom::default(),
            is_closed: false,
            was_closed_sick: false,
            last_done: Instant::now(),
            registered_bytes: 0,
            are_transfers_over: false,
            has_told_all: false,
            looks_for_lost: None,
            looks_again: false,
        }
    }

    /// From now on operations reach the tier.
    pub fn attach(&mut self, tier: Box<dyn Driven>, seed: u64) {
        // A disk's errors do not pass; a connection's do.
        let attempts = if self.is_shared { Attempts::default() } else { Attempts { most: 1, ..Attempts::default() } };
        let rules =
            Rules { limits: self.rates, attempts, seed, deadline: self.deadline, has_breaker: self.has_breaker };
        self.tier = Some(Stack::new(tier, rules));
    }

    pub fn failed(&mut self, failure: Failure) {
        self.failure = Some(failure);
    }

    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Nothing new goes to the tier, or comes up from it.
    pub(super) fn close(&mut self, core: &mut Core) {
        (self.is_closed, self.was_closed_sick, self.last_done) = (true, !self.was_healthy, Instant::now());
        self.note_health(false, core);
    }

    /// Whether a stop would wait in vain: what a shared store leaves undone is in the pool, and no transfer of it
    /// outlives the process. A disk of this host may still write to slots, so a stop waits for it all the same.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_shared && (self.was_closed_sick || self.last_done.elapsed() >= SILENCE)
    }

    /// Operations that have not ended.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Operations not taken by the tier yet.
    pub fn waiting(&self) -> usize {
        let queues = [&self.probes, &self.loads, &self.prefetches, &self.others, &self.removals, &self.touches];
        queues.into_iter().map(Submissions::len).sum()
    }

    /// For the core's questions.
    pub(super) fn probe(&mut self, probe: Probe) {
        let op = Operation {
            length_bytes: probe.length_bytes,
            ..self.operation(Under::Exists { probe, is_late: false }, OpKind::Exists, probe.key)
        };
        self.probes.push(op, self.now());
    }

    /// For `Effect::Promote`; the slot is written down as being filled.
    pub fn load(&mut self, core: &Core, block: BlockId, slot: SlotId, generation: Generation) {
        let key = core.block_key(block);
        let under = Under::Load { block, slot, generation };
        let op = Operation {
            slot: Some((slot, generation)),
            length_bytes: core.block_length_bytes(block),
            ..self.operation(under, OpKind::Load, key)
        };
        let now = self.now();
        let queue = if core.is_prefetch(block) { &mut self.prefetches } else { &mut self.loads };
        queue.push(op, now);
    }

    /// For `Effect::WriteBack`; what is to be written is what the pool's table says of the slot.
    pub fn store(
        &mut self,
        core: &Core,
        pool: &Pool,
        block: BlockId,
        (slot, generation): (SlotId, Generation),
        lineage: Lineage,
    ) {
        let key = core.block_key(block);
        let entry = pool.entry(slot, generation).filter(|entry| entry.key == key);
        // Without an entry nothing is known to be whole; a length of zero is refused by every tier.
        let (length_bytes, checksum) = entry.map_or((0, 0), |entry| (entry.length, entry.checksum));
        let op = Operation {
            slot: Some((slot, generation)),
            length_bytes,
            checksum,
            lineage: Some(lineage),
            ..self.operation(Under::Store { block, key, length_bytes }, OpKind::Store, key)
        };
        self.others.push(op, self.now());
    }

    /// For `Effect::Touch`, unless the block has left the pool since. At most a tick's worth of touches waits here, and
    /// less than a tick.
    pub fn touch(&mut self, core: &Core, block: BlockId, generation: Generation, age: u8) {
        let Some(key) = core.resident_key(block, generation) else { return };
        // Half a period: a use that another host told of is as good.
        let fresh_seconds = core.tier_report(self.id).touch_ticks * TICK.as_secs() as u32 / 2;
        let op = Operation {
            length_bytes: core.block_length_bytes(block),
            ..self.operation(Under::Touch { block, generation, age }, OpKind::Touch { fresh_seconds }, key)
        };
        self.touches.push(op, self.now());
    }

    /// A tier that cuts blocks removes all parts of one whose length it is told; 0 if it is not known.
    pub(super) fn remove(&mut self, key: BlockKey, length_bytes: u64) {
        self.purges.removing += 1;
        let kind = OpKind::Remove;
        let op = Operation { length_bytes, ..self.operation(Under::Remove { key }, kind, key) };
        self.removals.push(op, self.now());
    }

    /// Takes back the stores of these namespaces that the tier has not taken, with the blocks they were of.
    pub fn withdraw_stores(&mut self, namespaces: &BTreeSet<NamespaceId>) -> Vec<BlockId> {
        let is_theirs = |op: &Operation| op.kind == OpKind::Store && namespaces.contains(&op.key.namespace);
        let withdrawn = self.others.take(is_theirs);
        let unders = withdrawn.into_iter().filter_map(|op| self.under_way.remove(&op.id));
        unders.filter_map(|under| if let Under::Store { block, .. } = under { Some(block) } else { None }).collect()
    }

    /// Whether the tier is at work on a store of these namespaces.
    pub fn is_storing(&self, namespaces: &BTreeSet<NamespaceId>) -> bool {
        let is_theirs =
            |under: &Under| matches!(under, Under::Store { key, .. } if namespaces.contains(&key.namespace));
        self.under_way.values().any(is_theirs)
    }

    /// Hands the tier what it takes; the rest waits for its next completion.
    pub(super) fn submit(&mut self, core: &Core) {
        let (now, waiting) = (self.now(), self.waiting());
        let Some(tier) = self.tier.as_mut().filter(|_| waiting > 0) else { return };
        let under_way = &self.under_way;
        let is_asked = |op: &Operation| match under_way[&op.id] {
            Under::Load { block, .. } => !core.is_prefetch(block),
            _ => false,
        };
        self.prefetches.take(is_asked).into_iter().for_each(|op| self.loads.push(op, now));
        tier.advance(now);
        let queues = [&mut self.probes, &mut self.loads, &mut self.prefetches, &mut self.removals, &mut self.others];
        queues.into_iter().for_each(|submissions| submissions.submit(tier));
    }

    /// Whether the tier is open with all its parts, and has told of all blocks that they had.
    pub(super) fn is_whole(&self) -> bool {
        let tier = self.tier.as_ref().map(Stack::tier);
        tier.is_some_and(|tier| tier.missing_parts() == 0 && !tier.has_more_found())
    }

    /// Says how much of the pool is there, so that it can be pinned for the disks' engines.
    fn register(&mut self, populated_bytes: u64) {
        if populated_bytes > self.registered_bytes
            && let Some(tier) = self.driven()
        {
            tier.register(populated_bytes);
            self.registered_bytes = populated_bytes;
        }
    }

    pub(super) fn driven(&mut self) -> Option<&mut (dyn Driven + 'static)> {
        self.tier.as_mut().map(|tier| &mut **tier.tier_mut())
    }

    /// One line for each change that lasts.
    fn log_health(&mut self) {
        let is_over_soon = !self.was_healthy && self.changed_at.elapsed() < SICK_AFTER;
        if self.logged_healthy == Some(self.was_healthy) || is_over_soon || self.is_closed {
            return;
        }
        self.logged_healthy = Some(self.was_healthy);
        let (tier, standing) = (self.name, self.standing());
        match standing.told() {
            (_, why) if !self.was_healthy => {
                tracing::warn!(tier, why, "the tier is sick; its blocks are misses until it recovers");
            }
            _ => tracing::info!(tier, "the tier serves"),
        }
    }

    fn warn_of_damage(&self) {
        let Some(blocks) = self.damaged.add(Instant::now().into_std()) else { return };
        let hint = match self.is_shared {
            true => {
                "if most blocks of other hosts are damaged, the hosts have different secrets: give all the same \
                 `tier.secret_file`; else look for programs that write there, and for errors of the store's machine"
            }
            false => "look for errors of the disk in the kernel's log; `forebay_disk_corrupt_blocks_total` names it",
        };
        tracing::warn!(tier = self.name, blocks, hint, "the tier gave damaged blocks; they are misses");
    }

    /// A tier takes no block of this length.
    fn warn_of_length(&self, length_bytes: u64) {
        let Some(blocks) = self.too_long.add(Instant::now().into_std()) else { return };
        let hint = match self.is_shared {
            true => "give the engines a smaller `--block-size`",
            false => {
                "a block must fit into a segment, which by default has a 64th of the disk: empty the disk, and set a larger \
                 `tier.ssd.capacity_bytes` or `tier.ssd.segment_bytes`"
            }
        };
        tracing::warn!(tier = self.name, length_bytes, blocks, hint, "blocks are too long for the tier");
    }

    /// What came into an own tier since the last turn: parts that were missing, with their blocks.
    fn hear_of_parts(&mut self, core: &mut Core) {
        let is_told = self.are_transfers_over || self.is_shared;
        let Some(tier) = self.driven() else { return };
        let mut found = Found::default();
        tier.take_found(&mut found);
        let is_over = is_told || tier.are_earlier_transfers_over();
        self.found(found, core);
        if is_over && !is_told {
            self.are_transfers_over = true;
            core.transfers_over();
        }
        if !self.has_told_all && !self.is_shared && self.is_whole() {
            self.has_told_all = true;
            core.tier_is_whole(self.id);
        }
    }

    /// Blocks that the tier, or a part of it, had from the start.
    pub fn found(&mut self, found: Found, core: &mut Core) {
        self.purges.note_found(found.namespaces);
        found.blocks.into_iter().for_each(|block| core.tier_found(self.id, block));
    }

    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn operation(&mut self, under: Under, kind: OpKind, key: BlockKey) -> Operation {
        let id = OpId(self.next_op);
        self.next_op += 1;
        self.under_way.insert(id, under);
        Operation { id, kind, key, slot: None, length_bytes: 0, checksum: 0, lineage: None }
    }

    /// What waited here for longer than anybody waits for it. What nobody waits for stays as long as the tier is well.
    fn take_stale(&mut self, is_healthy: bool, ended: &mut Vec<Completion>) {
        let ended_by = |kind| move |id| Completion { id, outcome: Outcome::Failed(kind) };
        if !is_healthy {
            let given_up =
                [&mut self.prefetches, &mut self.touches].map(|queue| queue.take(|_| true)).into_iter().flatten();
            ended.extend(given_up.map(|op| op.id).map(ended_by(ErrorKind::Unavailable)));
        }
        let mut stale = Vec::new();
        let since = self.now().saturating_sub(self.deadline);
        self.probes.take_stale(since, &mut stale);
        self.loads.take_stale(since, &mut stale);
        ended.extend(stale.into_iter().map(ended_by(ErrorKind::Timeout)));
    }
}

impl Driver {
    /// One turn of a tier: what is late, what has ended, what was given up, how it is.
    pub fn drive(&mut self, core: &mut Core, pool: &Pool) {
        let populated_bytes = core.populated_bytes();
        let now = self.now();
        let Some(tier) = &mut self.tier else { return };
        let (mut late, mut ended, mut evicted, mut lost) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        tier.advance(now);
        tier.poll(&mut ended);
        tier.take_late(&mut late);
        self.touches.submit_some(self.touches_at_once, tier);
        let is_healthy = tier.health() == Health::Healthy && !self.is_closed;
        self.take_stale(is_healthy, &mut ended);
        self.hear_of_parts(core);
        self.driven().into_iter().for_each(|tier| tier.take_evicted(&mut evicted, &mut lost));
        self.register(populated_bytes);
        late.into_iter().for_each(|op| self.late(op, core));
        ended.into_iter().for_each(|completion| self.ended(completion, core, pool));
        evicted.iter().for_each(|key| core.tier_evicted(self.id, key));
        if !lost.is_empty() {
            lost.into_iter().for_each(|block| core.tier_lost(self.id, block));
            self.looks_again = self.looks_for_lost.is_some();
            self.looks_for_lost.get_or_insert(0);
        }
        if let Some(from) = self.looks_for_lost {
            self.looks_for_lost = core.look_for_lost(self.id, from, RECORDS_PER_TURN);
            if self.looks_for_lost.is_none() && std::mem::take(&mut self.looks_again) {
                self.looks_for_lost = Some(0);
            }
        }
        self.note_health(is_healthy, core);
    }

    fn late(&mut self, op: OpId, core: &mut Core) {
        match self.under_way.get_mut(&op) {
            Some(Under::Load { block, generation, .. }) => core.give_up(*block, *generation),
            Some(Under::Exists { probe, is_late }) => {
                *is_late = true;
                core.probe_done(probe, Outcome::Failed(ErrorKind::Timeout));
            }
            _ => {}
        }
    }

    fn ended(&mut self, completion: Completion, core: &mut Core, pool: &Pool) {
        let Completion { id: op, outcome } = completion;
        let under = self.under_way.remove(&op).expect("a tier completes what it was given, once");
        if !matches!(outcome, Outcome::Failed(_)) {
            self.last_done = Instant::now();
        }
        match under {
            // A late one was answered for already, but is welcome all the same.
            Under::Exists { is_late: true, .. } if !matches!(outcome, Outcome::Found) => {}
            Under::Exists { probe, .. } => core.probe_done(&probe, outcome),
            Under::Load { block, slot, generation } => {
                if outcome == Outcome::Failed(ErrorKind::Corrupt) {
                    self.warn_of_damage();
                }
                promoted(block, (slot, generation), outcome, core, pool);
            }
            Under::Store { block, key, length_bytes } => {
                if outcome == Outcome::Failed(ErrorKind::Invalid) {
                    self.warn_of_length(length_bytes);
                }
                if !core.written_back(self.id, block, outcome) {
                    self.remove(key, length_bytes);
                }
            }
            Under::Touch { block, generation, age } => core.touched(self.id, block, generation, age, outcome),
            Under::Remove { key } => match outcome {
                Outcome::Removed | Outcome::Absent => {
                    core.tier_evicted(self.id, &key);
                    self.purges.removed(key, outcome);
                }
                // A block that other hosts may have stored as well is left to a purge of the shared stores.
                _ if self.is_shared => self.purges.given_up(),
                _ => self.purges.put_back(key),
            },
        }
    }

    pub(super) fn note_health(&mut self, is_healthy: bool, core: &mut Core) {
        if is_healthy != self.was_healthy {
            (self.was_healthy, self.changed_at) = (is_healthy, Instant::now());
            core.set_healthy(self.id, is_healthy);
        }
        self.log_health();
    }
}

/// The block is a hit from now on, if the core takes it.
fn promoted(block: BlockId, at: (SlotId, Generation), outcome: Outcome, core: &mut Core, pool: &Pool) {
    let is_one_slice = core.slices(block).len() == 1;
    // Of several slices the core has the births made before the block is a hit.
    let has_births = match outcome {
        Outcome::Loaded { length_bytes, checksum }
            if is_one_slice && length_bytes == core.block_length_bytes(block) =>
        {
            pool.set_births(at.0, at.1, &[Slice { length: length_bytes, checksum }])
        }
        _ => true,
    };
    core.promoted(block, at.1, if has_births { outcome } else { Outcome::Failed(ErrorKind::Full) });
}
