//! A core, the table its effects build, and engines that use both; every event is checked against what the
//! table and the engines know.
//!
//! The reference is the table: a block may be found exactly while its row is ready, under the key it was
//! committed with. What engines hold is theirs until they give it back or are gone, across restarts.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::hints::HintId;
use forebay_core::key::BlockHash;
use forebay_core::layout::Attention;
use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_MISS, STATE_NOT_YET, STATE_READY};
use forebay_core::miss::MissReason;
use forebay_core::recover::{Recovered, Recovery, Resumption};
use forebay_core::report::ReadyBlock;
use forebay_core::stats::Finder;
use forebay_core::stats::Stats;
use forebay_core::store::CommitOutcome;
use forebay_core::tiers::TRANSFERS;
use forebay_core::{BlockKey, Config, Core, Generation, Instance, NamespaceId, NamespaceIndex, SlotId};

use crate::event::{End, Event, Fault, Loading, Prompt, Setup};
use crate::prompts::{NAMESPACES, UNIT_BYTES, hash, hash_bytes, layout};
use crate::table::{Key, Moving, Row, Table, Trust};
use crate::tiers::Tiers;

const ENGINES: u8 = 3;
/// The daemon with its own copies, beside the engines: it maps nothing, and nobody's end is its end.
const DAEMON: u8 = ENGINES;
const HOLDERS: u8 = ENGINES + 1;

type At = (SlotId, Generation);

struct Leased {
    id: LeaseId,
    blocks: Vec<At>,
}

#[derive(Clone, Copy, Debug)]
struct Filling {
    at: At,
    slot_bytes: u64,
    /// The engine's workers know the offset.
    maps: bool,
}

/// A commit that was answered, to be sent again.
#[derive(Clone, Copy)]
struct Committed {
    key: Key,
    predecessor: Option<BlockHash>,
    at: At,
}

#[derive(Default)]
struct Engine {
    is_alive: bool,
    /// The daemon was restarted; until it resumes, what it holds is known by the table alone.
    must_resume: bool,
    leases: Vec<Leased>,
    filling: Vec<Filling>,
    released: Vec<LeaseId>,
    committed: Vec<Committed>,
    /// What it will ask for; nothing once it has.
    hinted: Vec<(HintId, Vec<Key>)>,
}

/// A lookup between two of its pieces.
struct Open {
    engine: Option<u8>,
    namespace: u8,
    short: NamespaceIndex,
    lookup: Lookup,
    group: Option<u16>,
    keys: Vec<Key>,
    answer: Answer,
    found: Vec<At>,
    /// Keys asked for and found, in all groups.
    counted: (u64, u64),
}

pub struct World {
    setup: Setup,
    core: Core,
    /// As the pool counts them.
    epoch: u32,
    table: Table,
    engines: Vec<Engine>,
    shorts: Vec<Option<NamespaceIndex>>,
    /// Short names that no namespace has any more.
    retired: Vec<(u8, NamespaceIndex)>,
    open: Vec<Open>,
    populated: BTreeSet<u32>,
    tiers: Tiers,
}

impl World {
    pub fn new(setup: Setup) -> World {
        let core = Core::new(config(&setup, 1, 1));
        let mut world = World {
            core,
            table: Table::new(UNIT_BYTES),
            engines: (0..HOLDERS).map(|holder| Engine { is_alive: holder == DAEMON, ..Engine::default() }).collect(),
            shorts: vec![None; NAMESPACES as usize],
            retired: Vec::new(),
            open: Vec::new(),
            epoch: 1,
            populated: BTreeSet::new(),
            tiers: Tiers::default(),
            setup,
        };
        world.tiers.open(&mut world.core, world.setup.tier);
        (0..world.setup.populated).for_each(|unit| world.populate(unit));
        world
    }

    pub fn run(&mut self, event: Event) {
        match event {
            Event::Populate(unit) => self.populate(u32::from(unit) % self.setup.units),
            Event::Start { engine } => self.start(engine % ENGINES),
            Event::Lookup { engine, prompt, piece, end } => {
                let engine = engine.map(|engine| engine % HOLDERS);
                if engine.is_none_or(|engine| self.is_serving(engine)) {
                    self.lookup(engine, prompt, piece, end);
                }
            }
            Event::Begin { engine, prompt } => {
                if self.is_serving(engine % HOLDERS) && self.open.len() < 8 {
                    let open = self.begin(Some(engine % HOLDERS), prompt.namespace % NAMESPACES);
                    self.open.push(open);
                }
            }
            Event::Look { which, group, from, blocks } => self.look_once(which, group, from, blocks),
            Event::End { which, end } => {
                if let Some(at) = pick(&self.open, which) {
                    let open = self.open.remove(at);
                    self.end(open, end);
                }
            }
            Event::Release { engine, which } => self.release(engine % HOLDERS, which),
            Event::ReleaseAgain { engine, which } => {
                let released = &self.engines[(engine % HOLDERS) as usize].released;
                if let Some(at) = pick(released, which) {
                    self.core.release(instance(engine % HOLDERS), released[at]);
                }
            }
            Event::ReleaseForeign { engine, which } => {
                let leases = &self.engines[(engine % HOLDERS) as usize].leases;
                if let Some(at) = pick(leases, which) {
                    self.core.release(instance((engine % HOLDERS + 1) % HOLDERS), leases[at].id);
                }
            }
            Event::Reserve { engine, namespace, group, count, maps } => {
                if self.is_serving(engine % HOLDERS) {
                    self.reserve(engine % HOLDERS, namespace % NAMESPACES, group, count.into(), maps);
                }
            }
            Event::Commit { engine, which, chain, position, fault } => {
                self.commit_any(engine % HOLDERS, which, chain, position % 14, fault);
            }
            Event::Abort { engine, which, is_foreign } => self.abort(engine % HOLDERS, which, is_foreign),
            Event::Store { engine, prompt, at_once } => {
                if self.is_serving(engine % HOLDERS) {
                    self.store(engine % HOLDERS, prompt, at_once);
                }
            }
            Event::Purge { namespace } => self.purge(namespace % NAMESPACES),
            Event::Close { namespace } => self.close(namespace % NAMESPACES),
            Event::Hint { engine, prompt, group } => self.hint(engine % ENGINES, prompt, group),
            Event::HintOnTier { engine, which } => self.hint_on_tier(engine % ENGINES, which),
            Event::WithdrawHint { engine, which } => {
                let expected = &mut self.engines[(engine % ENGINES) as usize].hinted;
                if let Some(at) = pick(expected, which) {
                    expected[at].1.clear();
                    self.core.withdraw_hint(Instance(engine % ENGINES), expected[at].0);
                }
            }
            Event::Step => _ = self.step(),
            Event::Verified { which } => self.verified(which),
            Event::Moved { which, is_copied } => self.moved(which, is_copied),
            Event::Corrupt { which } => {
                let mut rows = self.table.rows.values_mut().filter(|row| row.trust == Trust::Unverified);
                if let Some(row) = rows.nth(which as usize) {
                    row.is_corrupt = true;
                }
            }
            Event::Audit { from, records } => self.audit(from, records),
            Event::Audited { which, is_whole } => self.audited(which, is_whole),
            Event::Scrub => self.scrub(),
            Event::Scrubbed { which, is_whole } => self.scrubbed(which, is_whole),
            Event::Suspect { which, is_stale, is_right } => self.suspect(which, is_stale, is_right),
            Event::DropCorrupt { which, is_stale } => self.drop_corrupt(which, is_stale),
            Event::Restart { loses } => self.restart(loses),
            Event::Resume { engine, keep, lies } => self.resume(engine % ENGINES, keep, lies),
            Event::Gone { engine } => self.gone(engine % ENGINES),
            Event::Loaded { which, how } => self.loaded(which, how),
            Event::GiveUp { which } => self.tiers.give_up(&mut self.core, which),
            Event::Stored { which, is_written } => self.stored(which, is_written),
            Event::TierEvicts { which } => self.tiers.evict(&mut self.core, which),
            Event::TierRemoves => self.tiers.remove(&mut self.core),
            Event::TierHealth { is_healthy } => self.tiers.set_healthy(&mut self.core, is_healthy),
            Event::ExpireSkips => self.tiers.expire_skips(&mut self.core),
            Event::TransfersOver => self.transfers_over(),
        }
        self.check();
    }

    /// All give back what they hold; then nothing is held, and the pool can be filled to its last slot.
    pub fn finish(&mut self) {
        while let Some(open) = self.open.pop() {
            self.end(open, End::Cancel);
        }
        for engine in 0..ENGINES {
            self.release_all(engine);
            self.gone(engine);
        }
        self.release_all(DAEMON);
        while !self.engines[DAEMON as usize].filling.is_empty() {
            self.abort(DAEMON, 0, false);
        }
        while !self.table.verifying.is_empty() {
            self.verified(0);
        }
        while !self.table.audited.is_empty() {
            self.audited(0, true);
        }
        self.move_all();
        self.transfers_over();
        // No more is written, or an end would never come.
        self.tiers.set_healthy(&mut self.core, false);
        while !self.tiers.loads.is_empty() {
            self.loaded(0, Loading::Whole);
        }
        while !self.tiers.stores.is_empty() {
            self.stored(0, true);
        }
        // What came up for several ranks is compared as well.
        while !self.table.verifying.is_empty() {
            self.verified(0);
        }
        self.step_to_the_end();
        let held = self.core.held();
        assert_eq!(held, Default::default(), "all is released and all are gone");
        let held = self.table.rows.values().filter(|row| row.key.is_none() || row.is_fenced).count();
        assert_eq!(held, 0, "slots are in use that nobody holds");
        assert!(self.table.excluded.is_empty(), "units are out of use that nobody touches");
        (0..self.setup.units).for_each(|unit| self.populate(unit));
        (0..NAMESPACES).for_each(|namespace| self.hoard(namespace));
        if self.setup.reserve_permille == 1000 {
            (0..NAMESPACES).for_each(|namespace| self.fill(namespace));
        }
    }

    fn release_all(&mut self, engine: u8) {
        while self.is_serving(engine) && !self.engines[engine as usize].leases.is_empty() {
            self.release(engine, 0);
        }
    }

    // Engines come and go.

    fn start(&mut self, engine: u8) {
        let state = &mut self.engines[engine as usize];
        if !state.is_alive {
            *state = Engine { is_alive: true, ..Engine::default() };
            let resumption = self.core.begin_resume(Instance(engine));
            let (lease, lost) = self.core.resume(resumption, &[]);
            assert_eq!((lease, lost), (LeaseId(0), Vec::new()));
            self.settle();
        }
    }

    fn gone(&mut self, engine: u8) {
        self.cancel_lookups(engine);
        self.engines[engine as usize] = Engine::default();
        self.table.let_go(Instance(engine));
        self.core.instance_gone(Instance(engine));
        self.settle();
    }

    /// The engine says what it still holds: of each lease and reservation what `keep` says, and with `lies`
    /// some things that were never its own.
    fn resume(&mut self, engine: u8, keep: u32, lies: bool) {
        if !self.engines[engine as usize].is_alive {
            return;
        }
        self.cancel_lookups(engine);
        let state = &mut self.engines[engine as usize];
        let mut nth = 0;
        let mut is_kept = || {
            nth += 1;
            keep >> (nth % 32) & 1 == 1
        };
        let mut leases: Vec<At> = state.leases.iter().flat_map(|lease| lease.blocks.clone()).collect();
        leases.retain(|_| is_kept());
        state.filling.retain(|filling| is_kept() && filling.maps);
        state.must_resume = false;
        state.hinted.clear();
        state.leases = vec![Leased { id: LeaseId(0), blocks: leases.clone() }];
        let mut filling: Vec<At> = state.filling.iter().map(|filling| filling.at).collect();
        let mut expected = if lies { self.lies(engine) } else { BTreeSet::new() };
        filling.extend(&expected);
        let resumption = if keep & 4 == 0 { self.hold(engine, &leases) } else { self.hold_again(engine, &leases) };
        // What lay in a unit that cannot be read is lost too.
        let is_lost = |at: &At| self.table.is_excluded(at.0);
        expected.extend(leases.iter().chain(&filling).copied().filter(is_lost));
        let (id, lost) = self.core.resume(resumption, &filling);
        assert_eq!(BTreeSet::from_iter(lost), expected, "what engine {engine} named and does not have");
        let state = &mut self.engines[engine as usize];
        state.filling.retain(|filling| !is_lost(&filling.at));
        state.leases[0].id = id;
        state.leases[0].blocks.retain(|at| !is_lost(at));
        assert_eq!(id == LeaseId(0), state.leases[0].blocks.is_empty());
        state.leases.retain(|lease| lease.id != LeaseId(0));
        self.settle();
    }

    fn hold(&mut self, engine: u8, leases: &[At]) -> Resumption {
        let mut resumption = self.core.begin_resume(Instance(engine));
        leases.chunks(3).for_each(|piece| self.core.hold(&mut resumption, piece));
        resumption
    }

    /// The connection breaks half-way through, and the engine says it all once more.
    fn hold_again(&mut self, engine: u8, leases: &[At]) -> Resumption {
        let cut_off = self.hold(engine, &leases[..leases.len() / 2]);
        self.settle();
        self.core.cancel_resume(cut_off);
        self.settle();
        self.hold(engine, leases)
    }

    /// Reservations that `engine` does not have: others', stale ones, and such that cannot be.
    fn lies(&self, engine: u8) -> BTreeSet<At> {
        let others = self.engines.iter().enumerate().filter(|(at, _)| *at != engine as usize);
        let mut lies: BTreeSet<At> =
            others.flat_map(|(_, other)| other.filling.iter().map(|filling| filling.at)).collect();
        lies.insert((SlotId(u32::MAX), Generation(1)));
        lies.insert((SlotId(1), Generation(self.table.last_generation + 1)));
        let stale = self.table.rows.iter().map(|(slot, row)| (*slot, Generation(row.generation.0 + 1_000_000)));
        lies.extend(stale.take(3));
        lies
    }

    fn is_serving(&self, engine: u8) -> bool {
        let state = &self.engines[engine as usize];
        state.is_alive && !state.must_resume
    }

    fn populate(&mut self, unit: u32) {
        self.populated.insert(unit);
        self.core.populate(unit);
    }

    /// The namespace's short name, opened if it was not.
    fn short(&mut self, namespace: u8) -> NamespaceIndex {
        let opened = self.core.open_namespace(NamespaceId(namespace.into()), &layout(namespace));
        let opened = opened.unwrap_or_else(|error| panic!("namespace {namespace} cannot be opened: {error}"));
        let known = *self.shorts[namespace as usize].get_or_insert(opened);
        assert_eq!(opened, known, "the short name of namespace {namespace} changed");
        known
    }

    // The load path.

    fn begin(&mut self, engine: Option<u8>, namespace: u8) -> Open {
        let short = self.short(namespace);
        let lookup = self.core.begin_lookup(engine.map(instance), short);
        let (keys, answer, found) = (Vec::new(), Answer::default(), Vec::new());
        Open { engine, namespace, short, lookup, group: None, keys, answer, found, counted: (0, 0) }
    }

    fn look_once(&mut self, which: u8, group: u8, from: u8, blocks: u8) {
        let Some(at) = pick(&self.open, which) else { return };
        let mut open = self.open.remove(at);
        let groups = groups(open.namespace);
        // One more than there are: a group the layout does not have.
        let group = groups.get(group as usize % (groups.len() + 1)).map_or(9, |(group, _)| *group);
        self.look(&mut open, group, (from..from + blocks).map(|position| (which, position)));
        self.open.push(open);
        self.settle();
    }

    /// Asks for the next keys of `group` and checks each answer.
    fn look(&mut self, open: &mut Open, group: u16, blocks: impl Iterator<Item = (u8, u8)>) {
        if open.group != Some(group) {
            open.group = Some(group);
            open.keys.clear();
            open.answer = Answer::default();
        }
        let before = (open.keys.len(), open.answer.slots.len(), self.core.stats().clone());
        let (pinned, prefetch) = (self.core.held().pinned_bytes, self.tiers.prefetch_bytes());
        let mut packed = Vec::new();
        for (chain, position) in blocks {
            let hash = hash(open.namespace, chain, position);
            packed.extend_from_slice(&hash);
            let hash = BlockHash::new(&hash).unwrap();
            open.keys.push(Key { short: open.short, namespace: open.namespace, group, hash });
        }
        self.core.look(&mut open.lookup, group, &packed, hash_bytes(open.namespace), &mut open.answer);
        self.apply(open);
        self.check_answer(open, before);
        if open.engine.is_some() {
            let told = open.keys.iter().zip(&open.answer.states).filter(|(_, state)| **state == STATE_NOT_YET);
            told.for_each(|(key, _)| self.tiers.ask(key));
        }
        self.check_share(pinned - prefetch, prefetch);
    }

    /// A look pins no more than the share of promises, or a single block.
    fn check_share(&self, before: u64, prefetch: u64) {
        // What is being written, and what came up unasked until now, is pinned too, within shares of their own.
        let others = self.tiers.storing_bytes(&self.core) + prefetch;
        let now = self.core.held().pinned_bytes.saturating_sub(others);
        let share = u64::from(self.setup.units) * UNIT_BYTES * u64::from(self.setup.promise_permille) / 1000;
        let is_one_block = before == 0 && self.core.classes().iter().any(|class| class.slot_bytes == now);
        assert!(now <= before.max(share) || is_one_block, "{now} bytes are pinned, the share is {share}");
    }

    fn check_answer(&self, open: &mut Open, (keys, found, stats): (usize, usize, Stats)) {
        let answer = &open.answer;
        assert!(answer.states.len() <= open.keys.len(), "more answers than questions");
        assert_ne!(answer.states.last(), Some(&STATE_MISS), "trailing misses are cut off");
        let is_ready = |state: &&u8| **state == STATE_READY;
        assert_eq!(answer.states.iter().filter(is_ready).count(), answer.slots.len());
        assert_eq!(answer.slots.len(), answer.generations.len());
        let now = self.core.stats();
        let counts = |stats: &Stats| (stats.lookups, stats.keys, stats.hits, stats.misses);
        assert_eq!(counts(now), counts(&stats), "a lookup counts when it ends");
        open.counted.0 += (open.keys.len() - keys) as u64;
        open.counted.1 += (answer.slots.len() - found) as u64;
        let ready = open.keys.iter().zip(&answer.states).filter(|(_, state)| **state == STATE_READY).skip(found);
        let slots = answer.slots.iter().zip(&answer.generations).skip(found);
        for ((key, _), (slot, generation)) in ready.zip(slots) {
            let (slot, generation) = (SlotId(*slot), Generation(*generation));
            let row = self.table.rows.get(&slot).unwrap_or_else(|| panic!("a hit in {slot:?}, which is free"));
            assert_eq!((row.key, row.generation), (Some(*key), generation), "a wrong block for {key:?}");
            assert!(row.trust == Trust::Verified && !row.is_corrupt, "{slot:?} is handed out unverified: {row:?}");
            let bit = open.engine.map_or(0, table_bit);
            assert_eq!(row.holders & bit, bit, "{slot:?} is not written down as held by {:?}", open.engine);
            if open.engine.is_some() {
                open.found.push((slot, generation));
            }
        }
    }

    fn end(&mut self, open: Open, end: End) -> Option<LeaseId> {
        let before = self.core.stats().clone();
        let lease = match end {
            End::Finish => self.core.finish_lookup(open.lookup),
            End::Cancel => {
                self.core.cancel_lookup(open.lookup);
                LeaseId(0)
            }
        };
        let now = self.core.stats();
        let counted = (now.lookups - before.lookups, now.keys - before.keys, now.hits - before.hits);
        match end {
            End::Cancel => assert_eq!(counted, (0, 0, 0), "who got no answer is not counted"),
            End::Finish => assert_eq!(counted, (1, open.counted.0, open.counted.1)),
        }
        assert_eq!(now.miss_count() + now.hits, now.keys, "hits and misses add up to keys");
        let expects_lease = matches!(end, End::Finish) && !open.found.is_empty();
        assert_eq!(lease != LeaseId(0), expects_lease, "a lease exactly if something was found for somebody");
        if let (Some(engine), true) = (open.engine, expects_lease) {
            self.engines[engine as usize].leases.push(Leased { id: lease, blocks: open.found });
        }
        self.settle();
        expects_lease.then_some(lease)
    }

    /// A whole lookup. Returns its lease and, by group, the states of its keys.
    fn lookup(&mut self, engine: Option<u8>, prompt: Prompt, piece: u8, end: End) -> (Option<LeaseId>, Vec<Vec<u8>>) {
        let mut open = self.begin(engine, prompt.namespace % NAMESPACES);
        let mut states = Vec::new();
        for (group, attention) in groups(open.namespace) {
            let over_limit = open.lookup.missed(MissReason::OverLimit);
            let evicted = self.core.stats().evicted;
            let expected = self.expected(&open, group, attention, prompt);
            let positions: Vec<u8> = (0..prompt.blocks).collect();
            for piece in positions.chunks(piece as usize) {
                self.look(&mut open, group, piece.iter().map(|position| (prompt.chain, *position)));
            }
            let is_over = open.lookup.missed(MissReason::OverLimit) > over_limit;
            let is_verifying = expected.contains(&STATE_NOT_YET);
            assert!(!is_over || engine.is_some() || is_verifying, "who takes no lease cannot be over a limit");
            if self.core.stats().evicted > evicted {
                check_promoting(&open.answer.states, &expected);
            } else if is_over {
                check_shorter(&open.answer.states, &expected);
            } else {
                assert_eq!(open.answer.states, expected, "group {group} of {prompt:?}");
            }
            states.push(open.answer.states.clone());
        }
        (self.end(open, end), states)
    }

    /// What a lookup has to find, by the table, when no limit is in its way.
    fn expected(&self, open: &Open, group: u16, attention: Attention, prompt: Prompt) -> Vec<u8> {
        let mut has_gap = false;
        let mut states = Vec::new();
        for position in 0..prompt.blocks {
            let hash = BlockHash::new(&hash(open.namespace, prompt.chain, position)).unwrap();
            let key = Key { short: open.short, namespace: open.namespace, group, hash };
            let state = match self.table.resident(&key) {
                None if self.tiers.is_promoting(&key) => STATE_NOT_YET,
                None if open.engine.is_some() && self.tiers.would_promote(&self.core, &key) => STATE_NOT_YET,
                None if attention == Attention::Full => break,
                None => STATE_MISS,
                Some((_, row)) if row.trust != Trust::Verified => STATE_NOT_YET,
                Some(_) if has_gap => STATE_NOT_YET,
                Some(_) => STATE_READY,
            };
            has_gap |= attention == Attention::Full && state == STATE_NOT_YET;
            states.push(state);
        }
        states.truncate(states.iter().rposition(|state| *state != STATE_MISS).map_or(0, |last| last + 1));
        states
    }

    fn release(&mut self, engine: u8, which: u8) {
        let state = &mut self.engines[engine as usize];
        let Some(at) = pick(&state.leases, which).filter(|_| !state.must_resume) else { return };
        let lease = state.leases.remove(at);
        state.released.push(lease.id);
        self.core.release(instance(engine), lease.id);
        self.settle();
    }

    fn cancel_lookups(&mut self, engine: u8) {
        while let Some(at) = self.open.iter().position(|open| open.engine == Some(engine)) {
            let open = self.open.remove(at);
            self.end(open, End::Cancel);
        }
    }

    // The store path.

    fn reserve(&mut self, engine: u8, namespace: u8, group: u8, count: usize, maps: bool) -> usize {
        let short = self.short(namespace);
        let groups = groups(namespace);
        let group = groups.get(group as usize % (groups.len() + 1)).map_or(9, |(group, _)| *group);
        let mut slots = Vec::new();
        let maps = maps && engine != DAEMON;
        self.core.reserve(instance(engine), short, group, count, maps, &mut slots);
        assert!(slots.len() <= count);
        let slot_bytes = layout(namespace).group(group).map_or(0, |group| group.slot_bytes());
        let had_none = self.engines[engine as usize].filling.iter().all(|filling| filling.slot_bytes != slot_bytes);
        for at in &slots {
            self.engines[engine as usize].filling.push(Filling { at: *at, slot_bytes, maps });
        }
        if slots.len() > usize::from(had_none) {
            self.check_part(engine);
        }
        self.settle();
        slots.len()
    }

    /// An engine that was given more than its one slot of a size has found them in the share of all, or has no more
    /// than an equal part of it, and of half as much beyond it no more than it leaves to the others.
    fn check_part(&self, engine: u8) {
        let bytes = |engine: &Engine| engine.filling.iter().map(|filling| filling.slot_bytes).sum::<u64>();
        let all: Vec<u64> = self.engines.iter().filter(|engine| !engine.must_resume).map(bytes).collect();
        let (own, sum) = (bytes(&self.engines[engine as usize]), all.iter().sum::<u64>());
        let share = u64::from(self.setup.units) * UNIT_BYTES * u64::from(self.setup.reserve_permille) / 1000;
        let engines = all.iter().filter(|bytes| **bytes > 0).count() as u64;
        let is_part = own * engines <= share && own + sum <= share + share / 2;
        assert!(sum <= share || is_part, "engine {engine} has {own} of {sum} bytes, the share is {share}");
    }

    fn store(&mut self, engine: u8, prompt: Prompt, at_once: u8) {
        let namespace = prompt.namespace % NAMESPACES;
        let (_, states) = self.lookup(Some(engine), prompt, 7, End::Finish);
        for (nth, ((group, _), states)) in groups(namespace).into_iter().zip(states).enumerate() {
            let missing: Vec<u8> =
                (0..prompt.blocks).filter(|at| states.get(*at as usize) != Some(&STATE_READY)).collect();
            for positions in missing.chunks(at_once as usize) {
                let first = self.engines[engine as usize].filling.len();
                let count = self.reserve(engine, namespace, nth as u8, positions.len(), true);
                for position in &positions[..count] {
                    self.commit(engine, first, namespace, group, prompt.chain, *position, Fault::None);
                }
            }
        }
        if at_once.is_multiple_of(2) {
            self.release(engine, u8::MAX);
        }
    }

    fn commit_any(&mut self, engine: u8, which: u8, chain: u8, position: u8, fault: Fault) {
        if !self.is_serving(engine) {
            return;
        }
        // The daemon commits what it has, once.
        let fault = match fault {
            Fault::WrongGeneration | Fault::Foreign | Fault::Again if engine == DAEMON => Fault::None,
            _ => fault,
        };
        let state = &self.engines[engine as usize];
        if let (Fault::Again, Some(at)) = (fault, pick(&state.committed, which)) {
            let again = state.committed[at];
            return self.commit_again(engine, again);
        }
        let Some(at) = pick(&state.filling, which) else { return };
        let slot_bytes = state.filling[at].slot_bytes;
        // The namespace and group of this size, or any other where that is the fault.
        let all = (0..NAMESPACES)
            .flat_map(|namespace| groups(namespace).into_iter().map(move |(group, _)| (namespace, group)));
        let fits =
            |(namespace, group): &(u8, u16)| layout(*namespace).group(*group).unwrap().slot_bytes() == slot_bytes;
        let wants_fit = !matches!(fault, Fault::OtherGroup);
        let fitting: Vec<(u8, u16)> = all.filter(|target| fits(target) == wants_fit).collect();
        let (namespace, group) = fitting[chain as usize % fitting.len()];
        self.commit(engine, at, namespace, group, chain, position, fault);
    }

    fn commit(&mut self, engine: u8, which: usize, namespace: u8, group: u16, chain: u8, position: u8, fault: Fault) {
        let retired = self.retired.iter().rev().find(|(of, _)| *of == namespace);
        let (short, fault) = match (fault, retired) {
            (Fault::Retired, Some((_, short))) => (*short, Fault::Retired),
            (Fault::Retired, None) => (self.short(namespace), Fault::None),
            _ => (self.short(namespace), fault),
        };
        let key_at = |position| {
            let hash = BlockHash::new(&hash(namespace, chain, position)).unwrap();
            Key { short, namespace, group, hash }
        };
        let (key, predecessor) = (key_at(position), position.checked_sub(1).map(key_at));
        let filling = self.engines[engine as usize].filling[which];
        let (mut by, mut at) = (engine, filling.at);
        match fault {
            Fault::WrongGeneration => at.1.0 += 1,
            Fault::Foreign => by = (engine + 1) % ENGINES,
            _ => {}
        }
        let is_full = layout(namespace).group(group).unwrap().attention == Attention::Full;
        let is_here = |key: &Key| self.table.resident(key).is_some() || self.tiers.is_promoting(key);
        let is_orphan = predecessor.is_some_and(|key| !is_here(&key) && !self.tiers.is_known(&key));
        let expected = match fault {
            Fault::WrongGeneration | Fault::Foreign => CommitOutcome::Lost,
            Fault::Incomplete | Fault::OtherGroup | Fault::Retired => CommitOutcome::Incomplete,
            _ if is_here(&key) => CommitOutcome::Duplicate,
            _ if is_full && is_orphan => CommitOutcome::Orphan,
            _ => CommitOutcome::Stored,
        };
        if expected != CommitOutcome::Lost {
            self.engines[engine as usize].filling.remove(which);
        }
        let predecessor = predecessor.map(|key| key.hash);
        let is_whole = !matches!(fault, Fault::Incomplete);
        let outcome = self.core.commit(instance(by), short, group, key.hash, predecessor, at, is_whole.then_some(0));
        assert_eq!(outcome, expected, "commit of {key:?} at {at:?} with {fault:?}");
        if outcome == CommitOutcome::Stored {
            let row = self.table.row(at.0);
            assert_eq!((row.key, row.generation), (None, at.1), "{key:?} is stored over something");
            (row.key, row.trust, row.is_fenced) = (Some(key), Trust::Verified, false);
            self.engines[engine as usize].committed.push(Committed { key, predecessor, at });
        }
        self.settle();
        if outcome == CommitOutcome::Stored {
            let holders = self.table.rows[&at.0].holders & !self.core.earlier();
            assert_eq!(holders, 0, "{at:?} is written down as held, though its filler is done");
        }
    }

    /// Repeated, a commit changes nothing; it is `Stored` exactly as long as its block is still there.
    fn commit_again(&mut self, engine: u8, Committed { key, predecessor, at }: Committed) {
        if self.shorts[key.namespace as usize] != Some(key.short) {
            // Purged since; the daemon tells sessions the new short name.
            return;
        }
        let is_there = self.table.resident(&key).is_some_and(|(slot, row)| (slot, row.generation) == at);
        let expected = if is_there { CommitOutcome::Stored } else { CommitOutcome::Lost };
        let outcome = self.core.commit(instance(engine), key.short, key.group, key.hash, predecessor, at, Some(0));
        assert_eq!(outcome, expected, "repeated commit of {key:?} at {at:?}");
        self.settle();
    }

    fn abort(&mut self, engine: u8, which: u8, is_foreign: bool) {
        if !self.is_serving(engine) {
            return;
        }
        let filling = &mut self.engines[engine as usize].filling;
        let Some(which) = pick(filling, which) else { return };
        let at = filling[which].at;
        let by = if is_foreign { (engine + 1) % ENGINES } else { engine };
        if !is_foreign {
            filling.remove(which);
        }
        self.core.abort(instance(by), at);
        self.settle();
    }

    // What outlives whom.

    fn purge(&mut self, namespace: u8) {
        let id = NamespaceId(namespace.into());
        let Some(short) = self.shorts[namespace as usize] else {
            return assert!(self.core.purge(id).is_none(), "purged what was never opened");
        };
        let is_its = |row: &&Row| row.key.is_some_and(|key| key.short == short) && !row.is_fenced;
        let (blocks, bytes) = {
            let loading = self.tiers.promoting(short).map(|slot| &self.table.rows[&slot]);
            let rows = self.table.rows.values().filter(is_its).chain(loading);
            rows.fold((0, 0), |(blocks, bytes), row| (blocks + 1, bytes + row.slot_bytes))
        };
        let (purged, old, new) = self.core.purge(id).expect("the namespace is open");
        assert_eq!((purged.blocks, purged.bytes, old), (blocks, bytes, short));
        self.shorts[namespace as usize] = Some(new);
        self.retired.push((namespace, short));
        self.settle();
    }

    fn close(&mut self, namespace: u8) {
        let short = self.shorts[namespace as usize];
        let is_loading = short.is_some_and(|short| self.tiers.promoting(short).next().is_some());
        let is_its = |row: &Row| row.key.is_some_and(|key| Some(key.short) == short) && !row.is_fenced;
        let holds_blocks = is_loading || self.table.rows.values().any(is_its);
        let is_closed = self.core.close_namespace(NamespaceId(namespace.into()));
        assert_eq!(is_closed, short.is_some() && !holds_blocks, "closing namespace {namespace}");
        if let (true, Some(short)) = (is_closed, short) {
            self.shorts[namespace as usize] = None;
            self.retired.push((namespace, short));
        }
    }

    fn hint(&mut self, engine: u8, prompt: Prompt, group: u8) {
        if !self.is_serving(engine) {
            return;
        }
        let namespace = prompt.namespace % NAMESPACES;
        let short = self.short(namespace);
        let (group, _) = groups(namespace)[group as usize % groups(namespace).len()];
        let hash = |at| BlockHash::new(&hash(namespace, prompt.chain, at)).unwrap();
        let keys = (0..prompt.blocks).map(|at| Key { short, namespace, group, hash: hash(at) });
        self.hint_all(engine, keys.collect());
    }

    fn hint_on_tier(&mut self, engine: u8, which: u8) {
        let short = |key: &BlockKey| self.shorts[key.namespace.0 as usize];
        let keys = self.tiers.known().filter_map(|key| {
            let (namespace, group, hash) = (key.namespace.0 as u8, key.group, key.hash);
            Some(Key { short: short(key)?, namespace, group, hash })
        });
        let absent: Vec<Key> = keys.filter(|key| self.table.resident(key).is_none()).collect();
        let Some(first) = pick(&absent, which).filter(|_| self.is_serving(engine)) else { return };
        let is_alike = |key: &&Key| (key.short, key.group) == (absent[first].short, absent[first].group);
        let keys = absent[first..].iter().filter(is_alike).take(4).copied().collect();
        self.hint_all(engine, keys);
        self.step();
        self.step();
    }

    /// All of one group.
    fn hint_all(&mut self, engine: u8, keys: Vec<Key>) {
        let Key { short, namespace, group, .. } = keys[0];
        let hashes: Vec<u8> = keys.iter().flat_map(|key| key.hash.as_bytes().to_vec()).collect();
        let id = self.core.hint(Instance(engine), short, group, &hashes, hash_bytes(namespace));
        self.engines[engine as usize].hinted.push((id, keys));
        self.settle();
    }

    fn audit(&mut self, from: u8, records: u8) {
        let (piece, _) = self.core.audit_piece(from.into(), records.into());
        for ReadyBlock { block, slot, .. } in self.check_read(piece, &[Trust::Verified, Trust::Unverified]) {
            self.table.audited.push((block, slot));
        }
        self.settle();
    }

    /// What is given out to be read is what the table says.
    fn check_read(&mut self, piece: Vec<ReadyBlock>, trusts: &[Trust]) -> Vec<ReadyBlock> {
        for ReadyBlock { slot, generation, key, .. } in &piece {
            let row = self.table.row(*slot);
            assert_eq!(row.key.map(|row| (row.group, row.hash)), Some((key.group, key.hash)), "{slot:?} to be read");
            assert!(trusts.contains(&row.trust), "{slot:?} to be read is {:?}", row.trust);
            assert_eq!(row.generation, *generation, "{slot:?} to be read");
        }
        piece
    }

    fn scrub(&mut self) {
        let held = self.core.held();
        let piece = self.core.scrub_piece();
        let piece = self.check_read(piece, &[Trust::Verified]);
        self.table.scrubbed.extend(piece.iter().map(|block| (block.slot, block.generation)));
        assert_eq!(self.core.held(), held, "the scrub holds nothing");
        self.settle();
    }

    /// What was read and is still there may be dropped for its bytes, nothing else.
    fn scrubbed(&mut self, which: u8, is_whole: bool) {
        let Some(at) = pick(&self.table.scrubbed, which) else { return };
        let (slot, generation) = self.table.scrubbed.swap_remove(at);
        if !is_whole {
            let row = self.table.rows.get_mut(&slot).filter(|row| row.generation == generation);
            let is_there = row.map(|row| !std::mem::replace(&mut row.is_fenced, true));
            let is_dropped = self.core.drop_corrupt(slot, generation, Finder::Scrub);
            assert!(is_there == Some(true) || !is_dropped, "{slot:?} of {generation:?} was scrubbed");
        }
        self.settle();
    }

    fn audited(&mut self, which: u8, is_whole: bool) {
        let Some(at) = pick(&self.table.audited, which) else { return };
        let (block, slot) = self.table.audited.remove(at);
        self.table.row(slot).is_fenced |= !is_whole;
        self.core.audited(block, is_whole);
        self.settle();
    }

    fn drop_corrupt(&mut self, which: u8, is_stale: bool) {
        let slots: Vec<SlotId> = self.table.rows.keys().copied().collect();
        let Some(at) = pick(&slots, which) else { return };
        let row = self.table.row(slots[at]);
        let is_block = row.key.is_some() && !is_stale;
        // The core may still have to forget what was purged.
        let is_purged = row.key.is_some_and(|key| self.shorts[key.namespace as usize] != Some(key.short));
        let is_open = is_block && (is_purged || row.is_fenced);
        let generation = Generation(row.generation.0 - u32::from(is_stale));
        row.is_fenced |= is_block;
        let is_dropped = self.core.drop_corrupt(slots[at], generation, Finder::Scrub);
        assert!(is_open || is_dropped == is_block, "{:?} of {generation:?} was found corrupt", slots[at]);
        self.settle();
    }

    /// A worker says that a block is not what was stored, and may be right.
    fn suspect(&mut self, which: u8, is_stale: bool, is_right: bool) {
        let slots: Vec<SlotId> = self.table.rows.keys().copied().collect();
        let Some(at) = pick(&slots, which) else { return };
        let row = self.table.row(slots[at]);
        let generation = Generation(row.generation.0 - u32::from(is_stale));
        let is_ready = row.key.is_some() && row.trust == Trust::Verified && !row.is_fenced && !is_stale;
        if self.core.suspect(slots[at], generation) {
            assert!(is_ready, "{:?} of {generation:?} is suspected", slots[at]);
            self.table.row(slots[at]).is_corrupt |= is_right;
        }
        self.settle();
    }

    fn verified(&mut self, which: u8) {
        let Some(at) = pick(&self.table.verifying, which) else { return };
        let (block, slot, generation, finder) = self.table.verifying.remove(at);
        let row = self.table.row(slot);
        let is_whole = !row.is_corrupt;
        row.trust = Trust::Verified;
        row.is_fenced |= !is_whole;
        self.core.verified(block, generation, is_whole, finder);
        self.settle();
    }

    /// The new row is written before the effects are followed, which free the old one.
    fn moved(&mut self, which: u8, is_copied: bool) {
        let Some(at) = pick(&self.table.moving, which) else { return };
        let Moving { from, at, to, to_slot } = self.table.moving.swap_remove(at);
        let is_moved = self.core.moved(from, at.1, to, is_copied);
        if let Some(row) = self.table.rows.get(&at.0).filter(|row| row.generation == at.1).cloned() {
            assert!(!is_moved || row.key.is_some() && !row.is_fenced, "{at:?} is moved: {row:?}");
            if is_moved {
                let target = self.table.row(to_slot);
                (target.key, target.trust, target.is_corrupt) = (row.key, row.trust, row.is_corrupt);
                self.table.row(at.0).is_fenced = true;
            }
        } else {
            assert!(!is_moved, "{at:?} is moved and was gone");
        }
        self.settle();
    }

    fn move_all(&mut self) {
        while !self.table.moving.is_empty() {
            self.moved(0, true);
        }
    }

    // The tier below.

    fn loaded(&mut self, which: u8, how: Loading) {
        let Some((at, load, is_ready)) = self.tiers.end_load(&mut self.core, which, how) else { return };
        if is_ready {
            let row = self.table.row(at.0);
            assert_eq!((row.generation, row.key), (at.1, None), "{load:?} is ready over something");
            row.key = Some(load);
        }
        self.settle();
        let row = self.table.rows.get(&at.0).filter(|row| row.generation == at.1);
        let is_held = row.is_some_and(|row| row.holders & TRANSFERS.bit() != 0);
        assert!(!is_held, "{load:?} has ended, and {:?} is still in a disk's hands", at.0);
    }

    fn stored(&mut self, which: u8, is_written: bool) {
        self.tiers.end_store(&mut self.core, which, is_written, &self.shorts);
        self.settle();
    }

    fn transfers_over(&mut self) {
        self.table.let_go(Instance::DAEMON);
        self.tiers.transfers_over(&mut self.core);
        self.settle();
    }

    fn restart(&mut self, loses: Option<u8>) {
        self.open.clear();
        self.retired.clear();
        self.table.verifying.clear();
        self.table.moving.clear();
        self.table.audited.clear();
        self.table.scrubbed.clear();
        for engine in &mut self.engines {
            // Offsets that no worker knows died with the daemon, like all lease ids.
            engine.filling.retain(|filling| filling.maps);
            engine.released.extend(engine.leases.iter().map(|lease| lease.id));
            engine.committed.clear();
            engine.hinted.clear();
        }
        for engine in &mut self.engines[..ENGINES as usize] {
            engine.must_resume = engine.is_alive;
        }
        // The daemon's own copies ended with it.
        self.engines[DAEMON as usize].leases.clear();
        let alive = (0..ENGINES).filter(|engine| self.engines[*engine as usize].is_alive);
        let alive = alive.fold(self.tiers.restart(), |mask, engine| mask | Instance(engine).bit());
        self.table.excluded.retain(|_, mask| *mask & alive != 0);
        if let Some(which) = loses {
            self.lose_extent(which, alive);
        }
        self.epoch += 1;
        self.core = Core::new(config(&self.setup, self.epoch, self.table.last_generation + 1));
        self.tiers.open(&mut self.core, self.setup.tier);
        for namespace in 0..NAMESPACES {
            if self.shorts[namespace as usize].take().is_some() {
                self.short(namespace);
            }
        }
        self.core.set_earlier(alive);
        self.table.excluded.keys().for_each(|unit| self.core.exclude(*unit));
        for (first, extent) in &self.table.extents {
            assert!(self.core.restore_extent(extent.slot_bytes, *first, extent.units), "{first}: {extent:?}");
        }
        self.restore_rows(alive);
        self.core.finish_restore();
        self.tiers.told_all(&mut self.core);
        self.populated.iter().for_each(|unit| self.core.populate(*unit));
        self.settle();
    }

    /// An extent cannot be read any more. If somebody may touch what lies there, its units are not used.
    fn lose_extent(&mut self, which: u8, alive: u64) {
        let extents: Vec<_> = self.table.extents.iter().map(|(first, extent)| (*first, *extent)).collect();
        let Some(at) = pick(&extents, which) else { return };
        let (first, extent) = extents[at];
        let rows = self.table.rows_of(first, extent);
        let (slots, holders): (Vec<SlotId>, Vec<u64>) = rows.map(|(slot, row)| (*slot, row.holders)).unzip();
        self.table.rows.retain(|slot, _| !slots.contains(slot));
        self.table.extents.remove(&first);
        let holders = holders.into_iter().fold(0, |all, holders| all | holders) & alive;
        if holders != 0 {
            self.table.excluded.extend((first..first + extent.units).map(|unit| (unit, holders)));
        }
    }

    fn restore_rows(&mut self, alive: u64) {
        let mut rows = std::mem::take(&mut self.table.rows).into_iter().collect::<Vec<_>>();
        if self.setup.seed % 2 == 1 {
            rows.reverse();
        }
        let mut restored: BTreeMap<SlotId, Row> = BTreeMap::new();
        let touched = self.touched();
        for (slot, mut row) in rows {
            let renamed = |key: Key| Some(Key { short: self.shorts[key.namespace as usize]?, ..key });
            row.key = row.key.and_then(renamed);
            let is_held = row.holders & alive != 0;
            let is_resident = |other: &Row| other.key == row.key && !other.is_fenced;
            let expected = match row.key {
                Some(_) if !row.is_fenced && !restored.values().any(is_resident) => Recovery::Block,
                _ if is_held => Recovery::Fenced,
                _ => Recovery::Dropped,
            };
            let key = row.key.map(|key| (key.short, key.group, key.hash));
            let (generation, holders) = (row.generation, row.holders);
            let recovery = self.core.restore(Recovered { slot, generation, holders, key });
            assert_eq!(recovery, expected, "{slot:?}: {row:?}");
            row.trust = Trust::Unverified;
            row.is_fenced = recovery == Recovery::Fenced;
            if recovery == Recovery::Dropped {
                assert!(!touched.contains(&(slot, generation)), "{slot:?} is dropped under somebody: {row:?}");
            } else {
                restored.insert(slot, row);
            }
        }
        self.table.rows = restored;
    }

    // Checks.

    fn settle(&mut self) {
        let touched = self.touched();
        self.drain_effects(touched);
    }

    /// As `settle`, while `open` is out of the list.
    fn apply(&mut self, open: &Open) {
        let mut touched = self.touched();
        touched.extend(&open.found);
        self.drain_effects(touched);
    }

    fn drain_effects(&mut self, touched: BTreeSet<At>) {
        let mut effects = Vec::new();
        self.core.take_effects(&mut effects);
        for effect in effects {
            // What effects before this one began is touched as well.
            let is_touched = |at: &At| touched.contains(at) || self.tiers.touched().any(|moved| moved == *at);
            self.table.apply(effect, |slot, generation| is_touched(&(slot, generation)));
            self.tiers.apply(&self.core, effect, &self.table.rows, &self.shorts);
        }
    }

    /// What some engine may touch, or was promised.
    fn touched(&self) -> BTreeSet<At> {
        let leased = self.engines.iter().flat_map(|engine| engine.leases.iter().flat_map(|lease| &lease.blocks));
        let filled = self.engines.iter().flat_map(|engine| engine.filling.iter().map(|filling| &filling.at));
        let promised = self.open.iter().flat_map(|open| &open.found);
        leased.chain(filled).chain(promised).copied().collect()
    }

    /// What must hold between any two events.
    fn check(&mut self) {
        self.settle();
        self.core.audit().unwrap_or_else(|error| panic!("audit: {error}"));
        for (number, engine) in self.engines.iter().enumerate() {
            let bit = table_bit(number as u8);
            for (slot, generation) in engine.leases.iter().flat_map(|lease| &lease.blocks) {
                if self.table.is_excluded(*slot) {
                    continue;
                }
                let row = &self.table.rows[slot];
                assert_eq!(row.generation, *generation, "engine {number} lost {slot:?}: {row:?}");
                assert_eq!(row.holders & bit, bit, "{slot:?} is not written down as read by engine {number}");
            }
            for Filling { at: (slot, generation), maps, .. } in &engine.filling {
                if self.table.is_excluded(*slot) {
                    continue;
                }
                let row = &self.table.rows[slot];
                assert!(row.generation == *generation && row.key.is_none(), "engine {number} lost {slot:?}: {row:?}");
                assert!(!maps || row.holders & bit != 0, "{slot:?} is not written down as filled by engine {number}");
            }
        }
        self.check_sums();
    }

    fn check_sums(&self) {
        let serving = || self.engines.iter().filter(|engine| !engine.must_resume);
        let leased = serving().flat_map(|engine| engine.leases.iter().flat_map(|lease| &lease.blocks));
        let promised = self.open.iter().flat_map(|open| &open.found);
        let verifying = self.table.verifying.iter().map(|(_, slot, ..)| *slot);
        let audited = self.table.audited.iter().map(|(_, slot)| *slot);
        let moving = self.tiers.pinned();
        let promised = leased.chain(promised).map(|(slot, _)| *slot);
        let pinned: BTreeSet<SlotId> = promised.chain(verifying).chain(audited).chain(moving).collect();
        let pinned_bytes: u64 = pinned.iter().map(|slot| self.table.rows[slot].slot_bytes).sum();
        let reserved_bytes: u64 = serving().flat_map(|engine| engine.filling.iter().map(|f| f.slot_bytes)).sum();
        let held = self.core.held();
        assert_eq!((held.pinned_bytes, held.reserved_bytes), (pinned_bytes, reserved_bytes), "pinned, reserved");
        let used: u64 = self.core.classes().iter().map(|class| class.used).sum();
        assert_eq!(used, self.table.rows.len() as u64, "slots in use");
        self.tiers.check(&self.core, &self.table.rows);
    }

    /// True if there is more to do.
    fn step(&mut self) -> bool {
        let begun = self.tiers.loads.len();
        self.tiers.is_stepping = true;
        let has_more = self.core.step();
        self.settle();
        self.tiers.is_stepping = false;
        let expected = || self.engines.iter().flat_map(|engine| engine.hinted.iter().flat_map(|(_, keys)| keys));
        for load in &self.tiers.loads[begun..] {
            assert!(expected().any(|key| *key == load.key), "nobody waits for {load:?}");
        }
        let is_current = |key: &Key| self.shorts[key.namespace as usize] == Some(key.short);
        let mut keys = self.table.rows.iter().filter_map(|(slot, row)| Some((slot, row.key?)));
        let purged = keys.find(|(_, key)| !has_more && !is_current(key));
        assert!(purged.is_none(), "a restart would bring back what was purged: {purged:?}");
        has_more
    }

    fn step_to_the_end(&mut self) {
        for _ in 0..10_000 {
            let has_more = self.step();
            if !has_more && self.table.moving.is_empty() {
                return;
            }
            self.move_all();
        }
        panic!("steps never end");
    }

    /// With nothing else held, one engine takes all that it gets and fills nothing: each of the others has a slot too,
    /// while there are some.
    fn hoard(&mut self, namespace: u8) {
        (0..ENGINES).for_each(|engine| self.start(engine));
        let (_, possible) = self.possible(namespace);
        let given = std::iter::from_fn(|| Some(self.reserve_at_last(0, namespace, 256)).filter(|given| *given > 0));
        let mut held = given.sum::<usize>() as u64;
        for holder in 1..HOLDERS {
            let given = self.reserve_at_last(holder, namespace, 1) as u64;
            assert!(given == 1 || held >= possible, "engine {holder} has no slot; {held} of {possible} are held");
            held += given;
        }
        self.check();
        (0..ENGINES).for_each(|engine| self.gone(engine));
        while !self.engines[DAEMON as usize].filling.is_empty() {
            self.abort(DAEMON, 0, false);
        }
        self.check();
    }

    /// Reserves while room is made, until something is given.
    fn reserve_at_last(&mut self, holder: u8, namespace: u8, count: usize) -> usize {
        let mut given = (0..100).map(|_| {
            let given = self.reserve(holder, namespace, 0, count, true);
            self.step();
            self.move_all();
            given
        });
        given.find(|given| *given > 0).unwrap_or_default()
    }

    /// The slot size of `namespace`'s first group, and how many slots the whole pool has room for.
    fn possible(&self, namespace: u8) -> (u64, u64) {
        let slot_bytes = layout(namespace).group(0).unwrap().slot_bytes();
        let run = slot_bytes.div_ceil(UNIT_BYTES).next_power_of_two() as u32;
        (slot_bytes, u64::from(self.setup.units / run) * (u64::from(run) * UNIT_BYTES / slot_bytes))
    }

    /// With nothing held, every unit that can serve `namespace`'s first group does, to its last slot.
    fn fill(&mut self, namespace: u8) {
        self.start(0);
        let (slot_bytes, possible) = self.possible(namespace);
        let mut refusals = 0;
        while refusals < 100 {
            refusals += usize::from(self.reserve(0, namespace, 0, 256, true) == 0);
            self.step();
            self.move_all();
        }
        let filled = self.engines[0].filling.len() as u64;
        assert!(filled >= possible, "{filled} of {possible} slots of {slot_bytes} bytes can be reserved");
        self.check();
        self.gone(0);
        self.check();
    }
}

fn config(setup: &Setup, epoch: u32, first_generation: u32) -> Config {
    let (promise_permille, reserve_permille) = (setup.promise_permille, setup.reserve_permille);
    Config {
        seed: setup.seed,
        promise_permille,
        reserve_permille,
        // Few, so that keys forget each other.
        memory_entries: 64,
        policy: forebay_core::policy::ALL[setup.policy].1,
        epoch,
        first_generation,
        ..Config::new(UNIT_BYTES, setup.units)
    }
}

fn groups(namespace: u8) -> Vec<(u16, Attention)> {
    layout(namespace).groups().map(|(group, layout)| (group, layout.attention)).collect()
}

/// Over its share an engine gets less, and nothing else.
fn check_shorter(states: &[u8], expected: &[u8]) {
    assert!(states.len() <= expected.len());
    for (state, expected) in states.iter().zip(expected) {
        assert!(*state == STATE_MISS || state == expected, "{states:?} where {expected:?} is there");
    }
}

/// Promotions of a lookup may evict what it would have found later on.
fn check_promoting(states: &[u8], expected: &[u8]) {
    assert!(states.len() <= expected.len());
    for (state, expected) in states.iter().zip(expected) {
        let is_weaker = [STATE_MISS, STATE_NOT_YET].contains(state);
        assert!(state == expected || is_weaker, "{states:?} where {expected:?} was there");
    }
}

fn instance(holder: u8) -> Instance {
    if holder == DAEMON { Instance::DAEMON } else { Instance(holder) }
}

/// By what the table knows that a slot is in this hand.
fn table_bit(holder: u8) -> u64 {
    if holder == DAEMON { 0 } else { Instance(holder).bit() }
}

fn pick<T>(of: &[T], which: u8) -> Option<usize> {
    (!of.is_empty()).then(|| which as usize % of.len())
}
