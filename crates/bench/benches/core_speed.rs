//! How fast and how small the core is with millions of resident blocks, and how long its longest event is.
//!
//! `cargo bench -p forebay-bench --bench core_speed -- [Mi blocks, 8] [runs, 3] [policy, the default one]`
//!
//! Each run builds the same core and sends it the same events. The core is deterministic, so an event does the
//! same work in every run, and the shortest of its times is what the core takes; what is above that in one run
//! alone (`max_seen_us`) is the machine's doing. Blocks are stored position by position across all prompts, so
//! that neighbours in a prompt lie far apart in every table: the worst case for caches.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_bench::blocks::{hash, layout, scramble};
use forebay_core::key::BlockHash;
use forebay_core::lookup::{Answer, LeaseId};
use forebay_core::policy::{self, Make};
use forebay_core::{BlockId, Config, Core, Effect, Generation, Instance, NamespaceId, NamespaceIndex, SlotId};

const SLOT_BYTES: u64 = 16 << 10;
const UNIT_BYTES: u64 = 256 << 20;
const PROMPT: usize = 1024;
const ENGINE: Instance = Instance(0);
const LOOKUPS: usize = 8192;
/// Blocks stored at a full pool, as a share of all: each evicts one.
const TURNOVER: usize = 8;
/// As many as the daemon puts into one event.
const COMMITS_PER_EVENT: usize = 128;

fn main() {
    let mut arguments = forebay_bench::arguments();
    let mut number = |default| arguments.next().map_or(default, |argument| argument.parse().expect("a number"));
    let (blocks, runs) = (number(8) << 20, number(3));
    let policy = arguments.next().unwrap_or(policy::ALL[0].0.to_owned());
    let make = policy::by_name(&policy).expect("the name of a policy");
    let mut times = Times::default();
    let mut sizes = Vec::new();
    for run in 0..runs {
        let rss = resident_bytes();
        let mut bench = Bench::new(blocks, make);
        bench.fill();
        if run == 0 {
            // Later runs reuse the memory of the first.
            sizes = bench.sizes(rss);
        }
        bench.look_up(false);
        bench.look_up(true);
        bench.turn_over();
        if run == 0 {
            sizes.push(("ghost_bytes_per_block", bench.core.ghost_bytes() as f64 / blocks as f64));
        }
        bench.come_and_go();
        bench.change_sizes();
        bench.purge();
        bench.core.audit().expect("the core's books are right");
        times.merge(bench.times, run == 0);
    }
    print(blocks, &policy, &sizes, &times);
}

struct Bench {
    core: Core,
    namespace: NamespaceIndex,
    prompts: usize,
    /// Blocks of the prompt numbered `prompts + n` and above are stored during the turnover.
    random: u64,
    effects: Vec<Effect>,
    /// Copies that were asked for.
    moves: Vec<(BlockId, Generation, BlockId)>,
    times: Times,
}

impl Bench {
    fn new(blocks: usize, policy: Make) -> Bench {
        let units = (blocks as u64 * SLOT_BYTES / UNIT_BYTES) as u32;
        let mut core = Core::new(Config { policy, promise_permille: 900, ..Config::new(UNIT_BYTES, units) });
        (0..units).for_each(|unit| core.populate(unit));
        let namespace = core.open_namespace(NamespaceId(1), &layout(SLOT_BYTES)).expect("the layout is right");
        let resumption = core.begin_resume(ENGINE);
        core.resume(resumption, &[]);
        Bench {
            core,
            namespace,
            prompts: blocks / PROMPT,
            random: 1,
            effects: Vec::new(),
            moves: Vec::new(),
            times: Times::default(),
        }
    }

    /// Position by position, 256 prompts a reservation.
    fn fill(&mut self) {
        for position in 0..PROMPT {
            for first in (0..self.prompts).step_by(Core::MAX_RESERVE_PER_EVENT) {
                let prompts: Vec<usize> = (first..(first + Core::MAX_RESERVE_PER_EVENT).min(self.prompts)).collect();
                self.store(["fill_reserve", "fill_commit"], prompts.into_iter().map(|prompt| (prompt, position)));
            }
        }
        assert_eq!(self.core.resident_blocks() as usize, self.prompts * PROMPT);
    }

    fn sizes(&self, rss_before: u64) -> Vec<(&'static str, f64)> {
        let blocks = self.core.resident_blocks() as f64;
        let heap = self.core.heap_bytes() as f64 / blocks;
        vec![
            ("heap_bytes_per_block", heap),
            ("process_bytes_per_block", resident_bytes().saturating_sub(rss_before) as f64 / blocks),
        ]
    }

    /// Prompts in random order, each looked up, leased and released; then its touches, as after the reply.
    fn look_up(&mut self, is_warm: bool) {
        let name = |cold, warm| if is_warm { warm } else { cold };
        let mut answer = Answer::default();
        for _ in 0..LOOKUPS {
            // Warm: few enough prompts to stay in the processor's caches.
            let prompt = self.next_random() as usize % if is_warm { 16 } else { self.prompts };
            let hashes: Vec<u8> = (0..PROMPT).flat_map(|position| hash(prompt, position)).collect();
            answer.states.clear();
            answer.slots.clear();
            answer.generations.clear();
            let lease = self.time(name("lookup", "lookup_warm"), PROMPT, |core, namespace| {
                let mut lookup = core.begin_lookup(Some(ENGINE), namespace);
                core.look(&mut lookup, 0, &hashes, hashes.len() / PROMPT, &mut answer);
                core.finish_lookup(lookup)
            });
            assert_eq!(answer.slots.len(), PROMPT, "every block is resident");
            self.time(name("release", "release_warm"), PROMPT, |core, _| core.release(ENGINE, lease));
            self.time(name("touch", "touch_warm"), PROMPT, |core, _| core.step());
        }
    }

    /// A full pool: each reservation evicts. Prompt by prompt, as engines store: first while the policy's ghosts
    /// get their memory from the system, then as it goes on for ever. Then the worst case, position by position
    /// across prompts, so that no block is near its parent.
    fn turn_over(&mut self) {
        let before = self.core.stats().evicted;
        let count = self.prompts / TURNOVER;
        for (nth, names) in
            [["first_reserve", "first_commit"], ["cycle_reserve", "cycle_commit"]].into_iter().enumerate()
        {
            let first = self.prompts + nth * count;
            let starts = || (0..PROMPT).step_by(Core::MAX_RESERVE_PER_EVENT);
            for (prompt, start) in (first..first + count).flat_map(|prompt| starts().map(move |start| (prompt, start)))
            {
                let positions = start..start + Core::MAX_RESERVE_PER_EVENT;
                self.store(names, positions.map(|position| (prompt, position)));
            }
        }
        let first = self.prompts + 2 * count;
        for position in 0..PROMPT {
            for start in (first..first + count).step_by(Core::MAX_RESERVE_PER_EVENT) {
                let prompts = start..(start + Core::MAX_RESERVE_PER_EVENT).min(first + count);
                self.store(["scattered_reserve", "scattered_commit"], prompts.map(|prompt| (prompt, position)));
            }
        }
        assert_eq!((self.core.stats().evicted - before) as usize, 3 * count * PROMPT, "each store evicts one");
    }

    /// An engine with 64 leased prompts and 1,024 reservations is gone; another declares as much after a restart.
    fn come_and_go(&mut self) {
        for _ in 0..64 {
            let mut held: Vec<(SlotId, Generation)> = Vec::new();
            for nth in 0..64 {
                let prompt = self.prompts + (nth * 31) % (self.prompts / TURNOVER);
                let hashes: Vec<u8> = (0..PROMPT).flat_map(|position| hash(prompt, position)).collect();
                let mut answer = Answer::default();
                let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespace);
                self.core.look(&mut lookup, 0, &hashes, hashes.len() / PROMPT, &mut answer);
                assert_ne!(self.core.finish_lookup(lookup), LeaseId(0));
                held.extend(
                    answer.slots.iter().map(|s| SlotId(*s)).zip(answer.generations.iter().map(|g| Generation(*g))),
                );
            }
            let mut filling = Vec::new();
            for _ in 0..4 {
                self.core.reserve(ENGINE, self.namespace, 0, 256, true, &mut filling);
            }
            self.work_off("step_lookups");
            let mut resumption = self.core.begin_resume(ENGINE);
            for piece in held.chunks(Core::MAX_HELD_PER_EVENT) {
                self.time("resume_hold", piece.len(), |core, _| core.hold(&mut resumption, piece));
            }
            self.time("resume_64k_leased", held.len(), |core, _| core.resume(resumption, &filling));
            self.work_off("step_resumed");
            self.time("gone_64k_leased", held.len(), |core, _| core.instance_gone(ENGINE));
            self.work_off("step_gone");
        }
        assert_eq!(self.core.held(), Default::default());
    }

    /// Blocks of another size push extents from one class to another.
    fn change_sizes(&mut self) {
        let layout = layout(40 << 20);
        let namespace = self.time("open_namespace", 1, |core, _| core.open_namespace(NamespaceId(2), &layout));
        let namespace = namespace.expect("the layout is right");
        let before = self.core.stats().extents_moved;
        for nth in 0..2000 {
            let mut slots = Vec::new();
            self.time("reserve_other_size", 1, |core, _| core.reserve(ENGINE, namespace, 0, 1, true, &mut slots));
            for at in slots {
                let hash = BlockHash::new(&hash(nth, usize::MAX)).expect("32 bytes");
                self.time("commit_other_size", 1, |core, _| core.commit(ENGINE, namespace, 0, hash, None, at, Some(0)));
            }
            self.work_off("step_drain");
        }
        assert!(self.core.stats().extents_moved > before, "no extent changed its class");
    }

    fn purge(&mut self) {
        self.time("purge", 1, |core, _| core.purge(NamespaceId(1)).expect("it is open").0.blocks);
        self.work_off("step_purge");
    }

    /// One reservation for all of `blocks`, then commits as many an event as the daemon does.
    fn store(&mut self, [reserve, commit]: [&'static str; 2], blocks: impl Iterator<Item = (usize, usize)>) {
        let named = |(prompt, position)| BlockHash::new(&hash(prompt, position)).expect("32 bytes");
        let blocks: Vec<(usize, usize)> = blocks.collect();
        let hashes: Vec<BlockHash> = blocks.iter().map(|block| named(*block)).collect();
        let before = |&(prompt, position): &(usize, usize)| Some((prompt, position.checked_sub(1)?));
        let predecessors: Vec<Option<BlockHash>> = blocks.iter().map(|block| before(block).map(named)).collect();
        let mut slots = Vec::with_capacity(blocks.len());
        self.time(reserve, blocks.len(), |core, namespace| {
            core.reserve(ENGINE, namespace, 0, hashes.len(), true, &mut slots);
        });
        assert_eq!(slots.len(), blocks.len(), "nothing is held, so there is room");
        for from in (0..blocks.len()).step_by(COMMITS_PER_EVENT) {
            let piece = from..(from + COMMITS_PER_EVENT).min(blocks.len());
            self.time(commit, piece.len(), |core, namespace| {
                core.prepare_commits(namespace, 0, &hashes[piece.clone()]);
                for at in piece {
                    core.commit(ENGINE, namespace, 0, hashes[at], predecessors[at], slots[at], Some(0));
                }
            });
        }
    }

    fn work_off(&mut self, name: &'static str) {
        while self.time(name, 1, |core, _| core.step()) || self.move_all() {}
    }

    /// Ends the copies that were asked for. False if there were none.
    fn move_all(&mut self) -> bool {
        let moves = std::mem::take(&mut self.moves);
        for (from, generation, to) in &moves {
            self.time("moved", 1, |core, _| core.moved(*from, *generation, *to, true));
        }
        !moves.is_empty()
    }

    /// Times one event with its effects, `keys` of something.
    fn time<T>(&mut self, name: &'static str, keys: usize, event: impl FnOnce(&mut Core, NamespaceIndex) -> T) -> T {
        let start = Instant::now();
        let value = event(&mut self.core, self.namespace);
        self.core.take_effects(&mut self.effects);
        for effect in self.effects.drain(..) {
            if let Effect::Move { from, generation, to, .. } = effect {
                self.moves.push((from, generation, to));
            }
        }
        self.times.add(name, keys, start.elapsed());
        value
    }

    fn next_random(&mut self) -> u64 {
        self.random = scramble(self.random);
        self.random
    }
}

/// Times of all events by name, in their order.
#[derive(Default)]
struct Times {
    by_name: BTreeMap<&'static str, Series>,
}

#[derive(Default)]
struct Series {
    keys: usize,
    nanos: Vec<u32>,
    max_seen: u32,
}

impl Times {
    fn add(&mut self, name: &'static str, keys: usize, time: Duration) {
        let nanos = time.as_nanos().min(u32::MAX.into()) as u32;
        let series = self.by_name.entry(name).or_default();
        series.keys += keys;
        series.nanos.push(nanos);
        series.max_seen = series.max_seen.max(nanos);
    }

    /// Keeps the shortest time of each event.
    fn merge(&mut self, other: Times, is_first: bool) {
        if is_first {
            return *self = other;
        }
        for (name, other) in other.by_name {
            let series = self.by_name.get_mut(name).expect("all runs have the same events");
            assert_eq!(
                (series.keys, series.nanos.len()),
                (other.keys, other.nanos.len()),
                "{name} differs between runs"
            );
            series.max_seen = series.max_seen.max(other.max_seen);
            series.nanos.iter_mut().zip(other.nanos).for_each(|(best, time)| *best = time.min(*best));
        }
    }

    /// Million keys a second over the events named.
    fn rate(&self, names: &[&str]) -> f64 {
        let nanos: u64 = names.iter().flat_map(|name| &self.by_name[name].nanos).map(|nanos| u64::from(*nanos)).sum();
        self.by_name[names[0]].keys as f64 * 1e3 / nanos as f64
    }
}

fn print(blocks: usize, policy: &str, sizes: &[(&str, f64)], times: &Times) {
    let mut rows: Vec<String> = Vec::new();
    let rates = [
        ("lookup and release", &["lookup", "release"][..]),
        ("lookup, release and touch", &["lookup", "release", "touch"]),
        ("lookup and release, in cache", &["lookup_warm", "release_warm"]),
        ("reserve and commit, empty pool", &["fill_commit", "fill_reserve"]),
        ("reserve, commit and evict, full pool", &["cycle_commit", "cycle_reserve"]),
        ("the same, first turnover", &["first_commit", "first_reserve"]),
        ("the same, scattered", &["scattered_commit", "scattered_reserve"]),
    ];
    for (op, names) in rates {
        rows.push(format!(
            r#"{{"op":"{op}","policy":"{policy}","blocks":{blocks},"million_per_s":{:.2}}}"#,
            times.rate(names)
        ));
    }
    rows.extend(
        sizes.iter().map(|(name, bytes)| {
            format!(r#"{{"op":"size","policy":"{policy}","blocks":{blocks},"{name}":{bytes:.1}}}"#)
        }),
    );
    for (name, series) in &times.by_name {
        let mut sorted = series.nanos.clone();
        sorted.sort_unstable();
        let at = |permille: usize| f64::from(sorted[(sorted.len() - 1) * permille / 1000]) / 1e3;
        rows.push(format!(
            r#"{{"op":"event","event":"{name}","events":{},"keys":{},"p50_us":{:.1},"p99_us":{:.1},"p999_us":{:.1},"max_us":{:.1},"max_seen_us":{:.1}}}"#,
            sorted.len(), series.keys, at(500), at(990), at(999), at(1000), f64::from(series.max_seen) / 1e3
        ));
    }
    let version = env!("CARGO_PKG_VERSION");
    let command = "cargo bench -p forebay-bench --bench core_speed";
    println!(r#"{{"bench":"core","version":"{version}","command":"{command}","machine":"{}","rows":["#, machine());
    println!("{}\n]}}", rows.join(",\n"));
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or(": unknown");
        line.split(':').nth(1).unwrap_or("").trim().to_owned()
    };
    let cpus = read("/proc/cpuinfo").lines().filter(|line| line.starts_with("processor")).count();
    format!(
        "{}, {cpus} CPUs, memory {}",
        field(&read("/proc/cpuinfo"), "model name"),
        field(&read("/proc/meminfo"), "MemTotal")
    )
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}
