//! The owner of all state behind decisions: the core, the table that mirrors it, and the users of both.
//!
//! Invariant: a decision of the core is in the table before the lock is released, so before any answer leaves.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use forebay_core::layout::Layout;
use forebay_core::lookup::{LeaseId, Lookup};
use forebay_core::namespace::Descriptor;
use forebay_core::purge::Purged;
use forebay_core::report::ClassReport;
use forebay_core::stats::Finder;
use forebay_core::tier::Lineage;
use forebay_core::tiers::TierId;
use forebay_core::{BlockId, Core, Effect, Error, Generation, Instance, NamespaceId, NamespaceIndex, Result, SlotId};
use forebay_insight::curve::Rules;
use forebay_io::Seldom;
use forebay_io::pool::{Entry, Extent, InstanceRecord, Pool, PurgePlaces};
use tokio::sync::{Notify, mpsc, watch};

use crate::config::{Admission, Config};
use crate::frame::{Frames, Steps};
use crate::insight::{History, Insight, Present, Seen, Watch};
use crate::instances::{Identity, Instances, Member, Session, Share};
use crate::listen;
use crate::metrics::{Histogram, Rpc, Saved};
use crate::namespaces::{GivenUp, Namespaces};
use crate::nodes::Wishes;
use crate::own_files::OwnFiles;
use crate::precedence::Precedence;
use crate::purges::Purges;
use crate::table::Table;
use crate::tiers::Tiers;
use crate::turns::{self, Turns};

pub struct State {
    pub config: Config,
    pub core: Core,
    pub table: Table,
    pub tiers: Tiers,
    pub instances: Instances,
    /// Who may connect.
    pub users: Vec<u32>,
    pub boot_id: u64,
    /// The commit that the program was built from; empty if it is not known.
    pub revision: &'static str,
    pub namespaces: Namespaces,
    pub purges: Purges,
    /// Namespaces that were purged while a disk was away, and are to be purged again.
    void: BTreeSet<NamespaceId>,
    void_failures: Seldom,
    /// The descriptors of the namespaces of trials.
    trials: BTreeMap<NamespaceId, Descriptor>,
    pub next_session: u64,
    pub next_connection: u64,
    pub is_recovered: bool,
    pub is_draining: bool,
    /// Units at the pool's start that have memory.
    pub populated_units: u32,
    /// For the thread that populates the pool.
    pub wishes: Arc<Wishes>,
    /// Why the rest of the pool is not populated, and what to do; nothing while memory is being populated or is whole.
    pub lacks_memory: Option<String>,
    pub own_files: OwnFiles,
    pub started: Instant,
    pub last_tick: Instant,
    pub lookup_time: Histogram,
    pub rpc: Rpc,
    /// Warnings of connections that were refused.
    pub refusals: Seldom,
    /// Warnings of namespaces that were refused.
    refused_namespaces: Seldom,
    pub saved: Saved,
    pub insight: Insight,
    pub history: History,
    pub watch: Watch,
    pub steps: Steps,
    pub frames: Frames,
    /// Blocks for the verifying thread.
    pub to_verify: mpsc::UnboundedSender<ToVerify>,
    /// Blocks for the moving thread.
    to_move: mpsc::UnboundedSender<ToMove>,
    /// What [`Core::ends`] says, for lookups that wait for it to change.
    pub ends: watch::Sender<u64>,
    effects: Vec<Effect>,
}

/// A block that is to be compared with its checksum.
pub struct ToVerify {
    pub block: BlockId,
    pub slot: SlotId,
    pub generation: Generation,
    /// Why it is.
    pub finder: Finder,
    /// Bytes of each rank's slice.
    pub slices: Vec<u64>,
}

/// A block that leaves its slot. Everything about it was read under the lock when the move was decided.
pub struct ToMove {
    pub from: BlockId,
    pub slot: SlotId,
    pub generation: Generation,
    pub to: BlockId,
    pub to_slot: SlotId,
    pub to_generation: Generation,
    /// Of the block in this generation, no longer than the slot it goes to; nothing if the table's entry is damaged.
    pub entry: Option<Entry>,
}

/// The state, shared by the tasks of one thread and the helpers that bring events.
#[derive(Clone)]
pub struct Shared {
    state: Arc<Precedence<State>>,
    turns: Turns,
    /// Told when the core's long work is to be done: at each tick, or earlier if much waits.
    is_due: Arc<Notify>,
}

/// The state, for one event.
pub struct Locked<'a> {
    state: MutexGuard<'a, State>,
    turns: &'a Turns,
    /// Since when another thread than the deciding one has it.
    since: Option<Instant>,
}

impl Shared {
    pub fn new(state: State) -> Shared {
        Shared { state: Arc::new(Precedence::new(state)), turns: Turns::default(), is_due: Arc::default() }
    }

    /// For one event; the guard is never held across an await.
    pub fn lock(&self) -> Locked<'_> {
        let state = self.state.lock();
        Locked { state, turns: &self.turns, since: (!turns::is_deciding()).then(Instant::now) }
    }

    /// Runs one event, and writes what it decided to the table.
    pub fn event<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let value = run(&mut state);
        state.apply();
        if state.core.has_backlog() {
            self.make_work_due();
        }
        value
    }

    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Has the core's long work done soon.
    pub fn make_work_due(&self) {
        self.is_due.notify_one();
    }

    /// Returns when it is to be done.
    pub async fn work_is_due(&self) {
        self.is_due.notified().await;
    }

    /// Does all work that the core cut up, letting other events in between the pieces.
    pub async fn work_off(&self) {
        while self.event(|state| state.core.step()) {
            tokio::task::yield_now().await;
        }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.since.iter().for_each(|since| self.turns.record(since.elapsed()));
    }
}

impl State {
    /// Purges that may begin in one event because of a disk that has come: each writes to the pool.
    const VOID_AT_A_TIME: usize = 16;

    pub fn new(
        config: Config,
        mut core: Core,
        pool: Arc<Pool>,
        boot_id: u64,
        insight: Insight,
        (to_verify, to_move): (mpsc::UnboundedSender<ToVerify>, mpsc::UnboundedSender<ToMove>),
    ) -> State {
        let history_step = Duration::from_secs(config.alarm.step_seconds);
        let table = Arc::clone(&pool);
        core.ask_before_growing(move |first_unit, units, slot_bytes| {
            table.has_room(&Extent { first_unit, units, slot_bytes })
        });
        State {
            tiers: Tiers::new(config.configured_tiers(), &mut core),
            users: listen::users(&config),
            config,
            core,
            table: Table::new(pool),
            instances: Instances::default(),
            boot_id,
            revision: "",
            namespaces: Namespaces::default(),
            purges: Purges::default(),
            void: BTreeSet::new(),
            void_failures: Seldom::default(),
            trials: BTreeMap::new(),
            next_session: 1,
            next_connection: 1,
            is_recovered: false,
            is_draining: false,
            populated_units: 0,
            wishes: Arc::default(),
            lacks_memory: None,
            own_files: OwnFiles::default(),
            started: Instant::now(),
            last_tick: Instant::now(),
            lookup_time: Histogram::default(),
            rpc: Rpc::default(),
            refusals: Seldom::default(),
            refused_namespaces: Seldom::default(),
            saved: Saved::default(),
            insight,
            history: History::new(history_step),
            watch: Watch::default(),
            steps: Steps::default(),
            frames: Frames::default(),
            to_verify,
            to_move,
            ends: watch::Sender::new(0),
            effects: Vec::new(),
        }
    }

    /// Of the disk under the pool, if there is one of configured size.
    pub fn disk_bytes(&self) -> Option<u64> {
        disk_bytes(&self.config)
    }

    /// Mirrors the core's decisions in the table, in order.
    pub fn apply(&mut self) {
        let pool = &Arc::clone(self.table.pool());
        self.core.take_effects(&mut self.effects);
        for effect in self.effects.drain(..) {
            match effect {
                Effect::Reserved { slot, generation, holders } => {
                    pool.reserve(slot, generation);
                    pool.set_holders(slot, holders);
                }
                Effect::Freed { slot, next } => {
                    pool.free(slot, next);
                    pool.set_holders(slot, 0);
                }
                Effect::Held { slot, holders } => pool.set_holders(slot, holders),
                Effect::Fenced { slot } => pool.fence(slot),
                Effect::Ready { block, slot, generation, checksum } => {
                    self.table.make_ready(&self.core, block, (slot, generation), checksum);
                }
                Effect::ExtentMade { first_unit, units, slot_bytes } => {
                    let made = pool.set_extent(&Extent { first_unit, units, slot_bytes });
                    made.expect("the core asked for the table's pages before it made the extent");
                }
                Effect::ExtentCleared { first_unit, .. } => {
                    // If the extent stays in the table, a restart loses these blocks, and nothing else.
                    if let Err(error) = pool.clear_extent(first_unit) {
                        tracing::warn!(first_unit, %error, "cannot clear an extent in the table");
                    }
                }
                Effect::Promote { tier, block, slot, generation } => {
                    self.tiers.of(tier).load(&self.core, block, slot, generation);
                }
                Effect::WriteBack { tier, block, slot, generation, parent } => {
                    let lineage = Lineage { own: self.core.position(block), parent };
                    self.tiers.of(tier).store(&self.core, pool, block, (slot, generation), lineage);
                }
                Effect::Touch { tier, age, block, generation } => {
                    self.tiers.of(tier).touch(&self.core, block, generation, age);
                }
                Effect::PurgeTiers { namespace } => self.tiers.purge(self.core.namespace_id(namespace)),
                Effect::PoolPurged { namespace } => {
                    let namespace = self.core.namespace_id(namespace);
                    self.purges.off_pool(pool, namespace, self.tiers.has_own_disks());
                }
                Effect::Move { from, slot, generation, to, to_slot } => {
                    let entry = pool.entry(slot, generation);
                    let entry = entry.filter(|entry| entry.length <= self.core.slot_bytes(to));
                    let to_generation = self.core.block_generation(to);
                    // As below: without the thread the extent just stays where it is.
                    let _ = self.to_move.send(ToMove { from, slot, generation, to, to_slot, to_generation, entry });
                }
                Effect::Verify { block, slot, generation, finder } => {
                    let slices = self.core.slices(block).to_vec();
                    // The thread lives as long as the daemon; without it the block just stays unverified.
                    let _ = self.to_verify.send(ToVerify { block, slot, generation, finder, slices });
                }
            }
        }
        for namespace in self.tiers.take_purged() {
            self.purges.off_disks(pool, namespace, self.tiers.purge_time(namespace));
        }
        self.tiers.submit(&mut self.core);
        let ends = self.core.ends();
        self.ends.send_if_modified(|known| std::mem::replace(known, ends) != ends);
    }

    /// Written down before anything is removed. Returns what was in the pool, and the short name that it has there.
    pub fn begin_purge(&mut self, namespace: NamespaceId) -> Result<Option<(Purged, NamespaceIndex)>> {
        // The next start drops a trial's blocks anyway.
        if !self.trials.contains_key(&namespace) {
            let is_known = self.knows(namespace);
            let places = PurgePlaces { pool: self.core.knows_namespace(namespace), disks: self.tiers.has_own_disks() };
            self.purges.begin(self.table.pool(), namespace, places, is_known)?;
        }
        let Some((gone, old, new)) = self.core.purge(namespace) else {
            // Nobody has opened it since the pool was made. Its blocks may be on the disks all the same.
            self.purge_disks(namespace);
            if !self.tiers.has_own_disks() {
                self.purges.end_without_disks(self.table.pool(), namespace)?;
            }
            return Ok(None);
        };
        self.instances.rename(old, new);
        Ok(Some((gone, old)))
    }

    /// Carries out again, some at a time, what was purged while a disk was away that has come now: this daemon, or one
    /// before, may have served some of it from that disk, into the pool and to other disks. A purge that is under way
    /// looks through the tiers once more: it may have passed that disk over. True if any began.
    pub fn purge_void(&mut self, tier: TierId) -> bool {
        if let Some(heard) = self.tiers.take_heard(tier) {
            self.purges.hear(self.table.pool(), heard);
        }
        self.void.append(&mut self.tiers.take_void(tier));
        let mut has_begun = false;
        for _ in 0..State::VOID_AT_A_TIME {
            let Some(namespace) = self.void.pop_first() else { break };
            if self.tiers.is_purging(namespace) {
                self.tiers.purge(namespace);
                continue;
            }
            if let Err(error) = self.begin_purge(namespace) {
                // There may be a place later.
                self.void.insert(namespace);
                if self.void_failures.add(Instant::now()).is_some() {
                    let hint = error.hint_text().unwrap_or("it is tried again").to_owned();
                    tracing::warn!(%namespace, %error, hint, "cannot purge again yet what a disk had that was away");
                }
                break;
            }
            has_begun = true;
        }
        has_begun
    }

    /// From this host's disks, whether or not the core knows the namespace.
    pub fn purge_disks(&mut self, namespace: NamespaceId) {
        if self.tiers.has_own_disks() {
            self.core.begin_tier_purge(namespace);
            self.tiers.purge(namespace);
        }
    }

    /// The short name of a namespace of this user, remembered in the pool so that its blocks survive a restart.
    pub fn open_namespace(&mut self, descriptor: Descriptor, layout: &Layout, uid: u32) -> Result<NamespaceIndex> {
        let id = descriptor.id();
        if self.namespaces.note_opened(id, uid) {
            self.tiers.note_opened(id, descriptor.tenant(), &mut self.core);
            return self.core.open_namespace(id, layout);
        }
        let number = self.vacant_record(uid)?;
        self.take_name(id, uid)?;
        let index = self.core.open_namespace(id, layout)?;
        let recorded =
            self.table.pool().set_namespace(number, id, &descriptor.to_text(), Some(uid), &layout.to_bytes());
        if let Err(error) = recorded {
            self.core.close_namespace(id);
            return Err(error);
        }
        // Only what is opened: many may ask.
        self.tiers.note_opened(id, descriptor.tenant(), &mut self.core);
        self.namespaces.record(number, id, descriptor, uid);
        Ok(index)
    }

    /// Counts the short name that the id is about to get.
    fn take_name(&mut self, id: NamespaceId, uid: u32) -> Result<()> {
        if self.core.knows_namespace(id) { Ok(()) } else { self.namespaces.take_name(uid, &self.users) }
    }

    /// Hands the keys of an answered request to those who look at them later, but for those of a trial. `hits` are
    /// those that were ready, from the first on; the hashes are packed.
    pub fn note_seen(
        &self,
        at: Instant,
        (namespace, group): (NamespaceIndex, u16),
        (hashes, hash_bytes): (Vec<u8>, usize),
        hits: usize,
    ) {
        let is_counted = !hashes.is_empty() && !self.core.is_trial(namespace);
        let Some(layout) = self.core.layout(namespace).group(group).filter(|_| is_counted) else { return };
        self.insight.note(Seen {
            at,
            namespace,
            id: self.core.namespace_id(namespace),
            group,
            block_tokens: layout.tokens_per_block,
            block_bytes: layout.slot_bytes(),
            attention: layout.attention,
            hashes,
            hash_bytes,
            hits,
        });
    }

    /// Ends a lookup, which counts for its session too.
    pub fn finish_lookup(&mut self, session: u64, lookup: Lookup) -> LeaseId {
        self.count_for(session, &lookup);
        self.core.finish_lookup(lookup)
    }

    /// The same, as [`Core::finish_part`] does.
    pub fn finish_part(&mut self, session: u64, lookup: Lookup) -> (LeaseId, Vec<BlockId>) {
        self.count_for(session, &lookup);
        self.core.finish_part(lookup)
    }

    /// As [`Core::cancel_lookup`] of one that was answered before.
    pub fn cancel_lookup(&mut self, session: u64, lookup: Lookup) {
        self.count_for(session, &lookup);
        self.core.cancel_lookup(lookup);
    }

    fn count_for(&mut self, session: u64, lookup: &Lookup) {
        let (keys, hits) = lookup.counted();
        if let Ok((_, member)) = self.instances.of_session(session)
            && !member.session.as_ref().is_some_and(|session| session.is_trial)
        {
            member.looked.keys += keys;
            member.looked.hits += hits;
        }
    }

    /// Whether somebody opened the namespace since the pool was made, or blocks of it were found on this host's disks.
    pub fn knows(&self, id: NamespaceId) -> bool {
        self.namespaces.knows(id) || self.tiers.namespaces_found().contains(&id)
    }

    /// The short name of a trial's namespace, which is in no record: a restart drops its blocks.
    pub fn open_trial(&mut self, descriptor: Descriptor, layout: &Layout, uid: u32) -> Result<NamespaceIndex> {
        let id = descriptor.id();
        self.take_name(id, uid)?;
        let index = self.core.open_trial(id, layout)?;
        self.trials.insert(id, descriptor);
        Ok(index)
    }

    /// The session has ended, and its trials with it.
    pub fn end_trials(&mut self, session: &Session) {
        for namespace in session.namespaces.values().filter(|_| session.is_trial) {
            self.trials.remove(&self.core.namespace_id(*namespace));
            self.core.end_trial(*namespace);
        }
    }

    /// The sizes that have memory. A size without memory is one of a trial that has ended, or of blocks still to come.
    pub fn classes(&self) -> Vec<ClassReport> {
        self.core.classes().into_iter().filter(|class| class.slots + class.used > 0).collect()
    }

    /// The descriptor of a namespace id.
    pub fn descriptor(&self, id: NamespaceId) -> Option<&Descriptor> {
        self.namespaces.descriptor(id).or_else(|| self.trials.get(&id))
    }

    /// A record for one more namespace of this user. Before it is refused, namespaces that have no block in the pool,
    /// and that no session has open, give up theirs.
    fn vacant_record(&mut self, uid: u32) -> Result<u32> {
        loop {
            let vacant = self.namespaces.vacant(uid, &self.users);
            if vacant.is_ok() || !self.give_up_namespaces()? {
                return vacant.inspect_err(|error| self.warn_of_namespaces(error));
            }
        }
    }

    /// The engine hears it too, but its operator may be somebody else.
    fn warn_of_namespaces(&self, error: &Error) {
        if let Some(times) = self.refused_namespaces.add(Instant::now()) {
            tracing::warn!(%error, hint = error.hint_text(), times, "refused to open a namespace");
        }
    }

    /// False if there is none.
    fn give_up_namespaces(&mut self) -> Result<bool> {
        let open = self.instances.namespaces().map(|namespace| self.core.namespace_id(namespace));
        let open: HashSet<NamespaceId> = open.collect();
        let idlest = self.namespaces.idlest(|id| !open.contains(&id) && !self.core.has_blocks(id));
        for GivenUp { number, id } in &idlest {
            self.table.pool().clear_namespace(*number)?;
            self.core.close_namespace(*id);
            self.namespaces.give_up(*number, self.tiers.is_any());
        }
        Ok(!idlest.is_empty())
    }

    /// The instance of this identity, which a worker of this user is about to join; see [`Instances::enter`].
    pub fn enter_instance(&mut self, identity: Identity, ranks: u32, uid: u32) -> Result<Instance> {
        let State { core, table, instances, users, config, .. } = self;
        let share = Share { uid, users, limit: config.limits.engines as usize };
        instances.enter(identity, ranks, is_in_use(core, table), &share)
    }

    /// Whether an engine of this identity and user has a number or would get one now.
    pub fn check_instance(&self, identity: &Identity, uid: u32) -> Result<()> {
        if self.instances.number_of(identity).is_some() {
            return Ok(());
        }
        let share = Share { uid, users: &self.users, limit: self.config.limits.engines as usize };
        self.instances.check_vacant(is_in_use(&self.core, &self.table), &share)
    }

    /// Written down before the instance learns any offset.
    pub fn record_instance(&mut self, instance: Instance) -> Result<()> {
        let Some(Member { identity, ranks, owner, .. }) = self.instances.get(instance) else { return Ok(()) };
        let Identity { engine_id, incarnation } = identity;
        let engine_id = engine_id.as_bytes().to_vec();
        let record = InstanceRecord { engine_id, ranks: *ranks, incarnation: *incarnation, owner: *owner };
        self.table.pool().set_instance(instance, &record)
    }

    pub fn end_session(&mut self, session: u64) {
        let Some((instance, ended)) = self.instances.close(session) else { return };
        match ended.is_of_engine {
            true => {
                tracing::info!(session, instance = instance.map(|i| i.0), engine_id = ended.engine_id, "session ended")
            }
            false => tracing::debug!(session, engine_id = ended.engine_id, is_trial = ended.is_trial, "session ended"),
        }
        self.end_trials(&ended);
        if let Some(instance) = instance {
            self.core.session_ended(instance);
            self.settle_instance(instance);
        }
    }

    /// Tells the thread that populates the pool near which nodes workers copy.
    pub fn note_nodes(&self) {
        let workers = self.instances.iter().flat_map(|(_, member)| member.workers.values());
        self.wishes.note(workers.filter_map(|worker| worker.numa_node));
    }

    /// Frees an instance that has neither session nor connection, nor a process that maps the pool.
    pub fn settle_instance(&mut self, instance: Instance) {
        let is_idle = self.instances.get(instance).is_some_and(|member| member.is_idle());
        if is_idle && !self.is_mapping(instance) {
            self.core.instance_gone(instance);
            self.apply();
            if let Err(error) = self.table.pool().clear_instance(instance) {
                tracing::warn!(instance = instance.0, %error, "cannot clear an instance in the table");
            }
            self.instances.remove(instance);
            tracing::info!(instance = instance.0, "instance is gone");
        }
    }

    /// Whether a process of the instance maps the pool.
    pub fn is_mapping(&self, instance: Instance) -> bool {
        is_mapping(self.table.pool(), instance)
    }
}

/// Whether processes or slots of the pool still use a number.
fn is_in_use(core: &Core, table: &Table) -> impl Fn(Instance) -> bool {
    move |instance| core.earlier() & instance.bit() != 0 || is_mapping(table.pool(), instance)
}

/// Yes if the kernel does not say, so that nothing is freed.
fn is_mapping(pool: &Pool, instance: Instance) -> bool {
    pool.lock_held(instance).unwrap_or_else(|error| {
        tracing::warn!(instance = instance.0, %error, "cannot find out which workers map the pool");
        true
    })
}

/// Of all disks, if their sizes are configured.
fn disk_bytes(config: &Config) -> Option<u64> {
    config.configured_tiers().find_map(|tier| tier.capacity_bytes())
}

/// Which blocks this host's own disks get, or would get.
fn disk_admission(config: &Config) -> Admission {
    let own = config.tiers.iter().find(|tier| !tier.capabilities().is_shared);
    own.map_or(Admission::SecondSighting, |tier| tier.options().admission)
}

/// What the estimates of the hit rate go by.
pub fn present(config: &Config, core: &Core, pool: &Pool) -> Present {
    Present {
        pool_bytes: core.capacity_bytes().max(pool.geometry().data_bytes()),
        disk_bytes: disk_bytes(config),
        rules: Rules::of(core, disk_admission(config)),
    }
}
