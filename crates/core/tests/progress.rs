//! Nothing stands still: tiny pools, sizes that crowd each other out, engines that hold on; and in the long run
//! what is kept can be used, since prompts stay whole from their beginning.

mod common;

use common::{At, ENGINE, LARGE, Rig, SMALL, UNIT_BYTES, hash, layout};
use forebay_core::lookup::{Answer, LeaseId};
use forebay_core::policy::{self, Make};
use forebay_core::store::CommitOutcome;
use forebay_core::tiers::{Admission, Limits};
use forebay_core::{Config, Core, Effect, Instance, NamespaceId, NamespaceIndex};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// Conversations that begin with one of a few system prompts and grow by a turn each time they come back.
struct Chats {
    random: Random,
    chats: Vec<(u64, usize)>,
}

impl Chats {
    fn next(&mut self) -> Vec<u64> {
        let at = self.random.below(1 + self.chats.len() as u64 / 2) as usize;
        if at == 0 || self.chats.len() < 4 {
            self.chats.push((self.chats.len() as u64, 8));
        }
        // The younger a chat, the likelier it goes on.
        let at = self.chats.len() - 1 - at.min(self.chats.len() - 1);
        let (chat, blocks) = &mut self.chats[at];
        *blocks += 1 + self.random.below(12) as usize;
        let system = *chat % 5;
        let key = |at: usize| if at < 6 { system << 32 | at as u64 } else { (1 + *chat) << 40 | at as u64 };
        (0..*blocks).map(key).collect()
    }
}

/// A request that is being computed: its blocks up to `stored` are in the pool.
struct Running {
    prompt: Vec<u64>,
    lease: LeaseId,
    stored: usize,
}

/// Serves `requests` chats, four at a time, from a pool of `units`; counts (prefix hits, object hits) in blocks.
fn serve(policy: Make, units: u32, requests: usize, seed: u64) -> (u64, u64) {
    // No limit cuts a prefix short: what is missed is not there.
    let mut rig = Rig::with(Config { policy, promise_permille: 1000, ..Config::new(UNIT_BYTES, units) });
    let ns = rig.open(1, &layout(SMALL));
    let mut chats = Chats { random: Random(seed), chats: Vec::new() };
    let mut running: Vec<Running> = Vec::new();
    let (mut prefix_hits, mut object_hits, mut begun) = (0, 0, 0);
    while begun < requests || !running.is_empty() {
        if begun < requests && running.len() < 4 {
            begun += 1;
            let prompt = chats.next();
            object_hits += prompt.iter().filter(|key| rig.is_resident(ns, **key)).count() as u64;
            let (stored, lease) = rig.lease(ns, &prompt);
            prefix_hits += stored as u64;
            rig.step_to_the_end();
            running.push(Running { prompt, lease, stored });
        }
        // Stored as it is computed: a few blocks of one request, then a few of another.
        let at = chats.random.below(running.len() as u64) as usize;
        let Running { prompt, lease, stored } = &mut running[at];
        let end = prompt.len().min(*stored + 1 + chats.random.below(7) as usize);
        let count = rig.store(ns, stored.checked_sub(1).map(|at| prompt[at]), &prompt[*stored..end]);
        *stored += count;
        // After an empty answer the rest of a prompt is not stored: children without a parent are dead weight.
        if count == 0 || *stored == prompt.len() {
            rig.core.release(ENGINE, *lease);
            running.swap_remove(at);
        }
    }
    rig.audit();
    (prefix_hits, object_hits)
}

#[test]
fn of_the_blocks_that_are_kept_99_of_100_can_be_used() {
    for name in ["lhd", "lru"] {
        let policy = policy::by_name(name).unwrap();
        for (units, seed) in [(8, 1), (32, 2), (64, 3)] {
            let (prefix_hits, object_hits) = serve(policy, units, 3000, seed);
            println!("{name}, {units} units, seed {seed}: {prefix_hits} prefix hits of {object_hits} object hits");
            assert!(object_hits > 3000, "{name}: the workload hits nothing ({object_hits})");
            assert!(prefix_hits * 100 >= object_hits * 99, "{name}, seed {seed}: {prefix_hits} of {object_hits}");
        }
    }
}

/// One request of one engine in a pool that has no room for all.
struct Request {
    /// What is left of it, and the block before that.
    prompt: Vec<u64>,
    before: Option<u64>,
    lease: Option<LeaseId>,
    reserved: Vec<At>,
    steps: u32,
}

#[test]
fn a_tiny_pool_serves_many_requests_one_after_another() {
    let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, 1) });
    let ns = rig.open(1, &layout(SMALL));
    let mut random = Random(7);
    let mut requests: Vec<Option<Request>> = (0..8).map(|_| None).collect();
    let (mut stored, mut longest) = (0, 0);
    for _ in 0..20_000 {
        let engine = random.below(8);
        let instance = Instance(engine as u8);
        let Some(mut request) = requests[engine as usize].take() else {
            let first = random.below(40) << 8;
            let prompt: Vec<u64> = (first..first + 1 + random.below(6)).collect();
            requests[engine as usize] =
                Some(Request { prompt, lease: None, before: None, reserved: Vec::new(), steps: 0 });
            continue;
        };
        request.steps += 1;
        longest = longest.max(request.steps);
        assert!(request.steps < 400, "a request makes no progress");
        let count = request.prompt.len();
        match request.lease {
            None => request.lease = Some(rig.look(Some(instance), ns, 0, &request.prompt).1),
            // An engine that gets no more slots for long stores what it has slots for.
            Some(_) if request.reserved.len() < count && request.steps % 20 != 0 => {
                let missing = count - request.reserved.len();
                rig.core.reserve(instance, ns, 0, missing, true, &mut request.reserved);
            }
            Some(lease) => {
                let (mut is_cut, was_short) = (false, request.before.is_some());
                for at in request.reserved.drain(..) {
                    let (key, before) = (request.prompt.remove(0), request.before.map(hash));
                    let outcome = rig.core.commit(instance, ns, 0, hash(key), before, at, Some(0));
                    // What was stored before may be evicted by now.
                    is_cut |= was_short && outcome == CommitOutcome::Orphan;
                    let is_there = matches!(outcome, CommitOutcome::Stored | CommitOutcome::Duplicate);
                    assert!(is_there || is_cut, "{outcome:?}");
                    stored += u64::from(outcome == CommitOutcome::Stored);
                    request.before = Some(key);
                }
                rig.core.release(instance, lease);
                request.lease = None;
                if is_cut || request.prompt.is_empty() {
                    continue;
                }
            }
        }
        requests[engine as usize] = Some(request);
        rig.core.step();
    }
    println!("{stored} blocks stored, at most {longest} steps a request");
    assert!(stored > 1000, "{stored} blocks were stored");
    (0..8).for_each(|engine| rig.core.instance_gone(Instance(engine)));
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

/// Stores one block of `ns`, however often it takes up to `tries`, while `others` go on.
fn store_at_last(rig: &mut Rig, ns: NamespaceIndex, key: u64, tries: u32, mut others: impl FnMut(&mut Rig)) -> u32 {
    for attempt in 1..=tries {
        if rig.store(ns, None, &[key]) == 1 {
            return attempt;
        }
        others(rig);
        rig.core.step();
        rig.audit();
    }
    panic!("block {key} is not stored after {tries} tries");
}

#[test]
fn a_size_that_comes_late_gets_room_from_one_that_is_busy() {
    // The busy one stores without end; every unit set free for the other would be its own next, if it could.
    for late_bytes in [LARGE, UNIT_BYTES, 3 * UNIT_BYTES] {
        let mut rig = Rig::new(16);
        let busy = rig.open(1, &layout(SMALL));
        let late = rig.open(2, &layout(late_bytes));
        let mut next = 1 << 32;
        let mut store_busy = |rig: &mut Rig| {
            for _ in 0..64 {
                rig.store(busy, None, &[next]);
                next += 1;
            }
        };
        (0..8).for_each(|_| store_busy(&mut rig));
        let tries: u32 = (0..3).map(|key| store_at_last(&mut rig, late, key, 50, &mut store_busy)).sum();
        println!("blocks of {late_bytes} bytes: {tries} tries for 3");
        assert!(rig.core.stats().extents_moved > 0);
        rig.audit();
    }
}

/// Engines keep a few slots of each size for their next stores, also those that are idle. A drain waits for these.
#[test]
fn a_size_gets_its_own_memory_back_while_a_drain_waits_for_somebody() {
    const IDLE: Instance = Instance(1);
    let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, 2) });
    let sizes = [SMALL, 4 * SMALL];
    let own = [0, 1].map(|at| rig.open(1 + at as u128, &layout(sizes[at])));
    let late = rig.open(3, &layout(8 * SMALL));
    for ns in own {
        let mut slots = Vec::new();
        rig.core.reserve(IDLE, ns, 0, 1, true, &mut slots);
        assert_eq!(slots.len(), 1);
        assert_eq!(rig.store(ns, None, &[1, 2]), 2);
    }
    // The third size has nothing, so both units are drained for it, and wait.
    for _ in 0..20 {
        assert_eq!(rig.store(late, None, &[1]), 0);
        rig.step_to_the_end();
    }
    let slots = |rig: &Rig| rig.core.classes().iter().map(|class| class.slots).collect::<Vec<_>>();
    assert_eq!(slots(&rig), [0, 0, 0], "nobody has anything");
    let draining = |rig: &Rig| rig.core.classes().iter().map(|class| class.draining).collect::<Vec<_>>();
    assert_eq!(draining(&rig), [16, 4, 0]);
    for (key, ns) in (10..).step_by(10).zip(own) {
        store_at_last(&mut rig, ns, key, 5, |_| {});
    }
    assert_eq!(slots(&rig), [16, 4, 0]);
    assert_eq!(draining(&rig), [0, 0, 0]);
    // When the engine is gone, the third size has its turn.
    rig.core.instance_gone(IDLE);
    store_at_last(&mut rig, late, 1, 20, |_| {});
    assert_eq!(draining(&rig), [0, 0, 0]);
    rig.audit();
}

/// A disk that hangs keeps the slots that it was filling, and a reader that is stopped those of purged blocks.
#[test]
fn a_size_gets_its_own_memory_back_while_a_drain_waits_for_fenced_slots() {
    let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, 2) });
    let own = [(1, SMALL), (2, 4 * SMALL)].map(|(id, bytes)| {
        let (purged, ns) = (rig.open(id, &layout(bytes)), rig.open(10 + id, &layout(bytes)));
        assert_eq!((rig.store(purged, None, &[1]), rig.store(ns, None, &[1, 2])), (1, 2));
        let (hits, lease) = rig.lease(purged, &[1]);
        assert_eq!(hits, 1);
        rig.core.purge(NamespaceId(id)).unwrap();
        (ns, lease)
    });
    let late = rig.open(3, &layout(8 * SMALL));
    for _ in 0..20 {
        assert_eq!(rig.store(late, None, &[1]), 0);
        rig.step_to_the_end();
    }
    assert!(rig.core.classes().iter().all(|class| class.slots == 0), "{:?}", rig.core.classes());
    for (key, (ns, _)) in (10..).step_by(10).zip(own) {
        store_at_last(&mut rig, ns, key, 5, |_| {});
    }
    // When the readers have ended, the third size has its turn.
    for (_, lease) in own {
        rig.core.release(ENGINE, lease);
    }
    store_at_last(&mut rig, late, 1, 20, |_| {});
    rig.audit();
}

/// Of the coldest units, each has a slot of an idle engine, which keeps it.
#[test]
fn a_size_gets_memory_of_which_nobody_holds_a_slot() {
    for (idle, units) in [(6, 16), (15, 16)] {
        let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, units) });
        let [old, late] = [(1, SMALL), (2, 8 * SMALL)].map(|(id, bytes)| rig.open(id, &layout(bytes)));
        for at in 0..u64::from(units) {
            let mut slots = Vec::new();
            if at < idle {
                rig.core.reserve(Instance(1 + at as u8), old, 0, 1, true, &mut slots);
            }
            let keys: Vec<u64> = (16 * at..16 * (at + 1) - slots.len() as u64).collect();
            assert_eq!(rig.store(old, None, &keys), keys.len());
        }
        store_at_last(&mut rig, late, 1, 20, |_| {});
        let classes = rig.core.classes();
        assert_eq!(classes.iter().map(|class| class.draining).collect::<Vec<_>>(), [0, 0], "nothing waits");
        rig.audit();
    }
}

/// Units had holders when their drains began, and one has none any more.
#[test]
fn a_size_gets_memory_beside_drains_that_wait() {
    let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, 8) });
    let [old, late] = [(1, SMALL), (2, 8 * SMALL)].map(|(id, bytes)| rig.open(id, &layout(bytes)));
    for at in 0..8u64 {
        let mut slots = Vec::new();
        rig.core.reserve(Instance(1 + at as u8), old, 0, 1, true, &mut slots);
        let keys: Vec<u64> = (16 * at..16 * at + 15).collect();
        assert_eq!(rig.store(old, None, &keys), keys.len());
    }
    for _ in 0..20 {
        assert_eq!(rig.store(late, None, &[1]), 0);
        rig.step_to_the_end();
    }
    let draining = |rig: &Rig| rig.core.classes()[0].draining;
    assert_eq!(draining(&rig), 4 * 16);
    rig.core.instance_gone(Instance(8));
    assert_eq!(draining(&rig), 4 * 16, "its unit, the youngest, does not drain");
    rig.core.retry_drains();
    store_at_last(&mut rig, late, 1, 20, |_| {});
    assert_eq!(draining(&rig), 4 * 16);
    rig.audit();
}

/// One search looks at few of many units, and the next one at others.
#[test]
fn a_size_gets_memory_wherever_nobody_holds_a_slot() {
    let mut rig = Rig::with(Config { reserve_permille: 500, ..Config::new(UNIT_BYTES, 64) });
    let [old, late] = [(1, SMALL), (2, 8 * SMALL)].map(|(id, bytes)| rig.open(id, &layout(bytes)));
    for unit in 0..64 {
        assert_eq!(rig.store(old, None, &(16 * unit..16 * (unit + 1)).collect::<Vec<_>>()), 16);
    }
    let leases: Vec<LeaseId> = (0..64).map(|unit| rig.lease(old, &[16 * unit + 8]).1).collect();
    for _ in 0..20 {
        assert_eq!(rig.store(late, None, &[1]), 0);
        rig.core.retry_drains();
        rig.step_to_the_end();
    }
    assert_eq!(rig.core.classes()[0].draining, 4 * 16);
    for (unit, lease) in leases.into_iter().enumerate() {
        if unit > 4 && unit % 4 != 0 {
            rig.core.release(ENGINE, lease);
        }
    }
    store_at_last(&mut rig, late, 1, 20, |rig| rig.core.retry_drains());
    rig.audit();
}

/// Two sizes give their units to a third one, whose blocks are larger than a unit. The small one's unit is empty while
/// the pass stands in its middle, and the next unit has fewer slots than that.
#[test]
fn a_pass_goes_on_behind_an_extent_that_is_empty_by_now() {
    let bytes = 256 << 10;
    let mut rig = Rig::with(Config::new(bytes, 2));
    let sizes = [(1, SMALL), (2, bytes / 2), (3, bytes + SMALL)];
    let [small, half, late] = sizes.map(|(id, bytes)| rig.open(id, &layout(bytes)));
    assert_eq!(rig.store(small, None, &(0..20).collect::<Vec<_>>()), 20);
    assert_eq!(rig.store(half, None, &[1]), 1);
    store_at_last(&mut rig, late, 1, 20, |_| {});
    rig.audit();
}

/// Leases on the blocks of the other overlap, so some of its slots are always in use. They end, unlike a stock.
#[test]
fn a_size_gets_the_only_unit_from_one_that_is_always_busy() {
    let mut rig = Rig::new(1);
    let [busy, late] = [(1, SMALL), (2, 4 * SMALL)].map(|(id, bytes)| rig.open(id, &layout(bytes)));
    let (mut stored, mut leases) = ([0; 2], std::collections::VecDeque::new());
    for round in 0..400 {
        stored[0] += rig.store(busy, None, &[1000 + round]);
        let (hits, lease) = rig.lease(busy, &[1000 + round]);
        if hits == 0 || leases.len() == 3 {
            leases.pop_front().into_iter().for_each(|lease| rig.core.release(ENGINE, lease));
        }
        leases.push_back(lease);
        stored[1] += rig.store(late, None, &[round]);
        rig.step_to_the_end();
    }
    assert!(stored[1] >= 20, "it starves: {stored:?}");
    rig.audit();
}

#[test]
fn a_prompt_in_use_stays_whole_while_extents_change_their_size() {
    let mut rig = Rig::new(16);
    let small = rig.open(1, &layout(SMALL));
    let large = rig.open(2, &layout(LARGE));
    // The prompt's blocks lie among those of prompts that come once.
    let prompt: Vec<u64> = (0..64).collect();
    for at in 0..64 {
        assert_eq!(rig.store(small, (at as u64).checked_sub(1), &prompt[at..=at]), 1);
        let others: Vec<u64> = (0..3).map(|nth| 1000 + 3 * at as u64 + nth).collect();
        rig.store(small, None, &others);
    }
    for key in 0..400 {
        let (hits, lease) = rig.lease(small, &prompt);
        assert_eq!(hits, prompt.len(), "{key} large blocks were stored");
        rig.core.release(ENGINE, lease);
        rig.store(large, None, &[10_000 + key]);
        while rig.core.step() {}
        rig.move_all();
        rig.audit();
    }
    assert!(rig.core.stats().extents_moved >= 8 && rig.core.stats().moved > 0, "{:?}", rig.core.stats());
}

/// Nothing that was freed since the last call is under one of these leases.
fn check_freed(rig: &mut Rig, held: &[(LeaseId, Vec<u32>)]) {
    for effect in rig.effects() {
        if let Effect::Freed { slot, .. } = effect {
            assert!(held.iter().all(|(_, slots)| !slots.contains(&slot.0)), "{slot:?} is freed under a lease");
        }
    }
}

#[test]
fn sizes_take_turns_under_leases_and_nothing_held_is_lost() {
    let mut rig = Rig::with(Config { promise_permille: 300, ..Config::new(UNIT_BYTES, 12) });
    let small = rig.open(1, &layout(SMALL));
    let large = rig.open(2, &layout(LARGE));
    let mut random = Random(11);
    let mut held: Vec<(LeaseId, Vec<u32>)> = Vec::new();
    let (mut next, mut stored) = (0u64, [0; 2]);
    for round in 0..4000 {
        // The mix turns over completely, again and again.
        let wants_large = (round / 400) % 2 == 1;
        let (ns, which) = if wants_large { (large, 1) } else { (small, 0) };
        let keys: Vec<u64> = (next..next + if wants_large { 1 } else { 8 }).collect();
        next += 8;
        stored[which] += rig.store(ns, None, &keys);
        check_freed(&mut rig, &held);
        if random.below(3) == 0 {
            let (answer, lease) = rig.look(Some(ENGINE), ns, 0, &keys);
            held.push((lease, answer.slots));
        }
        if held.len() > 6 {
            let (lease, _) = held.remove(random.below(6) as usize);
            rig.core.release(ENGINE, lease);
        }
        rig.core.step();
        check_freed(&mut rig, &held);
        if round % 50 == 0 {
            rig.audit();
        }
    }
    println!("stored {} small, {} large, moved {} extents", stored[0], stored[1], rig.core.stats().extents_moved);
    assert!(stored[0] > 10_000 && stored[1] > 1_000, "one size starves: {stored:?}");
    assert!(rig.core.stats().extents_moved > 10, "extents stay where they were");
    assert!(rig.core.stats().moved > 0, "blocks of drained extents were all evicted");
    held.into_iter().for_each(|(lease, _)| rig.core.release(ENGINE, lease));
    assert_eq!(rig.core.held(), Default::default());
    rig.audit();
}

#[test]
fn a_paused_engine_does_not_keep_a_size_from_growing() {
    // It holds one block in each of two units, and never lets go.
    let mut rig = Rig::new(8);
    let small = rig.open(1, &layout(SMALL));
    let large = rig.open(2, &layout(LARGE));
    (0..128).for_each(|key| assert_eq!(rig.store(small, None, &[key]), 1));
    let paused = Instance(3);
    for key in [0, 16] {
        let mut answer = Answer::default();
        let mut lookup = rig.core.begin_lookup(Some(paused), small);
        rig.core.look(&mut lookup, 0, &u64::to_le_bytes(key), 8, &mut answer);
        assert_ne!(rig.core.finish_lookup(lookup), LeaseId(0), "block {key} is there");
    }
    for key in 0..5 {
        // One block fits into a unit; since all are held, each takes one more.
        store_at_last(&mut rig, large, key, 50, |_| {});
        assert_eq!(rig.lease(large, &[key]).0, 1);
    }
    assert_eq!(rig.core.held().pinned_bytes, 2 * SMALL + 5 * LARGE);
    rig.core.instance_gone(ENGINE);
    rig.core.instance_gone(paused);
    rig.step_to_the_end();
    rig.audit();
}

#[test]
fn units_of_a_purged_namespace_serve_other_sizes_at_once() {
    let mut rig = Rig::new(4);
    let small = rig.open(1, &layout(SMALL));
    let large = rig.open(2, &layout(LARGE));
    (0..64).for_each(|key| assert_eq!(rig.store(small, None, &[key]), 1));
    rig.core.purge(NamespaceId(1)).unwrap();
    rig.step_to_the_end();
    for key in 0..4 {
        assert_eq!(rig.store(large, None, &[key]), 1, "block {key}");
    }
    assert_eq!(rig.core.stats().evicted, 0, "nothing but empty units was needed");
    rig.audit();
}

#[test]
fn blocks_held_at_the_cold_end_do_not_hide_those_that_are_not() {
    let mut rig = Rig::with(Config { promise_permille: 900, ..Config::new(UNIT_BYTES, 64) });
    let ns = rig.open(1, &layout(SMALL));
    let keys: Vec<u64> = (0..64 * 16).collect();
    for keys in keys.chunks(Core::MAX_RESERVE_PER_EVENT) {
        assert_eq!(rig.store(ns, keys[0].checked_sub(1), keys), keys.len());
    }
    let (held, others) = keys.split_at(900);
    assert_eq!(rig.lease(ns, held).0, 900);
    rig.step_to_the_end();
    // Used later than those that are held.
    assert_eq!(rig.look(None, ns, 0, others).0.slots.len(), others.len());
    rig.step_to_the_end();
    let tries = store_at_last(&mut rig, ns, 1 << 40, 10, |_| {});
    assert!(tries <= 2, "{tries} tries");
    rig.audit();
}

/// Blocks that are being written are held until the tier has written them. Steps that went on for so long would keep
/// the tier from being heard.
#[test]
fn steps_end_while_a_size_gives_room_and_many_of_its_blocks_are_being_written() {
    for (name, policy) in policy::ALL {
        let mut rig = Rig::with(Config { policy, ..Config::new(UNIT_BYTES, 32) });
        let (small, large) = (rig.open(1, &layout(SMALL)), rig.open(2, &layout(LARGE)));
        let keys: Vec<u64> = (0..32 * 16).collect();
        keys.chunks(16).for_each(|keys| assert_eq!(rig.store(small, None, keys), 16));
        let (used, new) = keys.split_at(300);
        for _ in 0..3 {
            used.chunks(50).for_each(|keys| _ = rig.look(None, small, 0, keys));
            rig.step_to_the_end();
        }
        rig.core.open_tier(Limits { admission: Admission::All, store_permille: 900, ..Limits::default() });
        new.chunks(50).for_each(|keys| _ = rig.look(None, small, 0, keys));
        assert_eq!(rig.core.held().pinned_bytes, new.len() as u64 * SMALL, "{name}");
        for key in 0..40 {
            rig.store(large, None, &[key]);
            rig.step_to_the_end();
        }
        assert!(rig.core.stats().extents_moved > 0, "{name}");
        rig.audit();
    }
}
