//! Kinds of traffic in turn, in one pool: `cargo run --release -p forebay-sim --example turns -- --traces TRACES
//! [--policy lhd,lru] [--random 100] [--seed 1]`. TRACES is a directory of recorded traces.
//!
//! Each line is a row: hits of each policy. A policy that takes the traffic of one turn for that of all loses here what
//! it wins where traffic changes once.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;
use forebay_core::tiers::Admission;
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Setup, Ssd, store_batch};
use forebay_sim::rounds::{Order, Rounds};
use forebay_sim::trace::{ASSUMED_BLOCK_BYTES, Shape, Trace, in_turns, mix};
use forebay_sim::{policy, replay};

#[derive(Parser)]
struct Arguments {
    #[arg(long, value_delimiter = ',', default_value = "lhd,lru")]
    policy: Vec<String>,
    /// A directory; every trace in it is traffic that may have a turn
    #[arg(long)]
    traces: PathBuf,
    /// So many random rows instead of the named ones
    #[arg(long)]
    random: Option<u64>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Hits are the mean over so many salts, from `--salt` on
    #[arg(long, default_value_t = 1)]
    salts: u64,
    #[arg(long, default_value_t = 0)]
    salt: u64,
}

/// One kind of traffic. Sizes are in pools.
#[derive(Clone, Copy, Debug)]
enum Traffic {
    Same(f64),
    Shuffled(f64),
    Drawn(f64),
    OneTime,
    /// Each prompt is asked twice, so many pools apart.
    Twice(f64),
    /// So many conversations at a time, each of up to twelve turns.
    Conversations(usize),
    /// The nth recorded trace, from a request on.
    Recorded(usize, usize),
}

/// A case: what has a turn and for how many turnovers of the pool, how often all have one.
#[derive(Clone, Debug)]
struct Case {
    pool: u64,
    turns: Vec<(Traffic, f64)>,
    cycles: usize,
    blocks: usize,
    lookahead: usize,
    disk: Option<f64>,
    seed: u64,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        let drawn = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        drawn
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn of<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.below(some.len())]
    }
}

fn main() {
    let arguments = Arguments::parse();
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&arguments.traces)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.to_string_lossy().contains(".jsonl"))
        .collect();
    paths.sort();
    let recorded: Vec<Trace> = paths.iter().map(|path: &PathBuf| recorded(path)).collect();
    let cases = match arguments.random {
        None => named(recorded.len()),
        Some(count) => (0..count).map(|nth| Case::drawn(arguments.seed << 32 | nth, recorded.len())).collect(),
    };
    let (next, lines) = (AtomicUsize::new(0), Mutex::new(vec![None; cases.len()]));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((at, case)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(at).map(|c| (at, c))
                } {
                    let trace = case.trace(&recorded);
                    let hits: Vec<u64> = arguments
                        .policy
                        .iter()
                        .map(|name| {
                            let salts = arguments.salt..arguments.salt + arguments.salts;
                            salts.map(|salt| case.hits(&trace, name, salt)).sum::<u64>() / arguments.salts
                        })
                        .collect();
                    lines.lock().expect("no panic")[at] = Some(hits);
                }
            });
        }
    });
    for (case, hits) in cases.iter().zip(lines.into_inner().expect("no panic")) {
        println!("{:?}\t{case:?}", hits.expect("every case ran"));
    }
}

fn recorded(path: &Path) -> Trace {
    read(path, Hints::default()).expect("a trace")
}

impl Case {
    fn new(pool: u64, turns: &[(Traffic, f64)]) -> Case {
        Case { pool, turns: turns.to_vec(), cycles: 5, blocks: 40, lookahead: 0, disk: None, seed: 1 }
    }

    fn drawn(seed: u64, recorded: usize) -> Case {
        let mut random = Random(seed);
        let turns = (0..2 + random.below(3)).map(|_| {
            let share = random.of(&[0.3, 0.6, 0.8, 1.1, 1.3, 1.5, 2.0, 3.0]);
            let traffic = match random.below(9) {
                0 | 1 => Traffic::Same(share),
                2 | 3 => Traffic::Shuffled(share),
                4 => Traffic::Drawn(share),
                5 => Traffic::OneTime,
                6 => Traffic::Twice(random.of(&[0.2, 0.5, 1.2])),
                7 => Traffic::Conversations(random.of(&[10, 40, 160])),
                _ => Traffic::Recorded(random.below(recorded), random.below(4000)),
            };
            (traffic, random.of(&[0.5, 1.0, 2.0, 4.0, 6.0, 10.0]))
        });
        let turns: Vec<(Traffic, f64)> = turns.collect();
        Case {
            pool: random.of(&[600, 1200, 2000]),
            turns,
            cycles: 3 + random.below(4),
            blocks: random.of(&[8, 15, 40, 61]),
            lookahead: random.of(&[0, 0, 0, 16]),
            disk: random.of(&[None, None, None, Some(1.0)]),
            seed: random.next(),
        }
    }

    fn trace(&self, recorded: &[Trace]) -> Trace {
        let blocks = |turnovers: f64| (turnovers * self.pool as f64) as u64;
        let sources: Vec<Trace> = (self.turns.iter().enumerate())
            .map(|(at, (traffic, turnovers))| {
                let needed = blocks(*turnovers) * self.cycles as u64 + self.pool;
                self.source(*traffic, needed as usize, self.seed.wrapping_add(at as u64), recorded)
            })
            .collect();
        let cycle = self.turns.iter().enumerate().map(|(at, (_, turnovers))| (at, blocks(*turnovers)));
        let turns: Vec<(usize, u64)> = std::iter::repeat_n(cycle, self.cycles).flatten().collect();
        in_turns(&sources, &turns)
    }

    fn source(&self, traffic: Traffic, needed: usize, seed: u64, recorded: &[Trace]) -> Trace {
        let rounds = |order, share: f64| {
            let documents = ((share * self.pool as f64) as usize / self.blocks).max(2);
            let shapes = vec![Shape { block_tokens: 16, block_bytes: None }];
            let rounds = needed / (documents * self.blocks) + 1;
            Rounds { documents, blocks: self.blocks, rounds, order, shapes, seed }.trace()
        };
        match traffic {
            Traffic::Same(share) => rounds(Order::Same, share),
            Traffic::Shuffled(share) => rounds(Order::Shuffled, share),
            Traffic::Drawn(share) => rounds(Order::Random, share),
            Traffic::OneTime => self.one_time(needed),
            Traffic::Twice(apart) => self.twice(apart, needed),
            Traffic::Conversations(count) => self.conversations(count, needed, seed),
            Traffic::Recorded(nth, from) => self.part(&recorded[nth], from, needed),
        }
    }

    fn one_time(&self, needed: usize) -> Trace {
        let mut trace = Trace::new("one-time", vec![Shape { block_tokens: 16, block_bytes: None }]);
        for at in 0..needed.div_ceil(self.blocks) {
            let first = (at * self.blocks) as u32;
            trace.push(at as u64, 0, &(first..first + self.blocks as u32).collect::<Vec<_>>());
        }
        trace
    }

    fn twice(&self, apart: f64, needed: usize) -> Trace {
        let mut trace = Trace::new("twice", vec![Shape { block_tokens: 16, block_bytes: None }]);
        let group = ((apart * self.pool as f64) as usize / self.blocks).max(1);
        let mut first = Vec::new();
        for at in 0..needed.div_ceil(self.blocks) {
            let is_return = at % (2 * group) >= group;
            let next = trace.unique() as u32;
            let start = if is_return { first[at - group] } else { next };
            first.push(start);
            trace.push(at as u64, 0, &(start..start + self.blocks as u32).collect::<Vec<_>>());
        }
        trace
    }

    fn conversations(&self, count: usize, needed: usize, seed: u64) -> Trace {
        let mut trace = Trace::new("conversations", vec![Shape { block_tokens: 16, block_bytes: None }]);
        let mut random = Random(seed);
        let mut open: Vec<(Vec<u32>, usize)> = vec![(Vec::new(), 0); count];
        while trace.accesses() < needed {
            let (prompt, turns) = &mut open[random.below(count)];
            if *turns == 0 {
                (*prompt, *turns) = (Vec::new(), 1 + random.below(12));
            }
            *turns -= 1;
            let first = trace.unique() as u32;
            prompt.extend(first..first + 1 + random.below(self.blocks / 4 + 1) as u32);
            let blocks = prompt.clone();
            trace.push(trace.len() as u64, 0, &blocks);
        }
        trace
    }

    /// Requests over blocks that the part sees for the first time have numbers of its own.
    fn part(&self, of: &Trace, from: usize, needed: usize) -> Trace {
        let mut part = Trace::new(&of.name, of.shapes.clone());
        let mut numbers = vec![u32::MAX; of.unique()];
        let from = from % of.len();
        for request in of.requests().skip(from) {
            if part.accesses() >= needed {
                break;
            }
            let mut next = part.unique() as u32;
            let number = |block: &u32| {
                let number = &mut numbers[*block as usize];
                if *number == u32::MAX {
                    *number = next;
                    next += 1;
                }
                *number
            };
            let blocks: Vec<u32> = request.blocks.iter().map(number).collect();
            part.push(part.len() as u64, request.namespace, &blocks);
        }
        part
    }

    fn hits(&self, trace: &Trace, name: &str, salt: u64) -> u64 {
        let disk = self.disk.map(|pools| {
            let capacity_bytes = (pools * self.pool as f64) as u64 * ASSUMED_BLOCK_BYTES;
            Ssd { capacity_bytes, admission: Admission::All }
        });
        let setup = Setup {
            policy: policy::by_name(name).expect("the name of a policy"),
            capacity_bytes: self.pool * ASSUMED_BLOCK_BYTES,
            ssd: disk,
            lookahead: self.lookahead,
            store_batch: store_batch(self.pool, trace.sizes()),
            salt,
        };
        let mut same = trace.clone();
        same.set_bytes(ASSUMED_BLOCK_BYTES);
        replay(&same, setup, |_| {}).expect("a pool of some blocks").prefix_hits
    }
}

/// Rows on which an earlier attempt to follow change lost (bench/reports/2026-11-30-rounds.md), and ones like them.
fn named(recorded: usize) -> Vec<Case> {
    use Traffic::{Conversations, Drawn, OneTime, Recorded, Same, Shuffled, Twice};
    let mut rows: Vec<Vec<(Traffic, f64)>> = Vec::new();
    for share in [1.3, 2.0] {
        for nth in 0..recorded {
            rows.push(vec![(Same(share), 6.0 * share), (Recorded(nth, 0), 4.0)]);
            rows.push(vec![(Shuffled(share), 6.0 * share), (Recorded(nth, 0), 4.0)]);
            rows.push(vec![(Same(share), 6.0 * share), (Recorded(nth, 0), 2.0)]);
        }
        rows.push(vec![(Conversations(40), 4.0), (Same(share), 6.0 * share)]);
        rows.push(vec![(Conversations(160), 4.0), (Shuffled(share), 6.0 * share)]);
        rows.push(vec![(Twice(0.5), 4.0), (Shuffled(share), 6.0 * share)]);
        rows.push(vec![(Same(share), 6.0 * share), (OneTime, 4.0)]);
        rows.push(vec![(Shuffled(share), 6.0 * share), (OneTime, 2.0)]);
        rows.push(vec![(Same(share), 6.0 * share), (Same(share), 6.0 * share)]);
        rows.push(vec![(Shuffled(share), 6.0 * share), (Shuffled(0.6), 4.0)]);
        rows.push(vec![(Same(share), 6.0 * share), (Drawn(1.5), 4.0)]);
    }
    rows.push(vec![(Shuffled(0.6), 3.0), (OneTime, 4.0), (Shuffled(1.5), 7.5)]);
    rows.push(vec![(Same(0.6), 3.0), (OneTime, 4.0), (Same(1.5), 7.5)]);
    let cases = rows.iter().flat_map(|turns| {
        let case = Case::new(1200, turns);
        [case.clone(), Case { lookahead: 16, ..case.clone() }, Case { disk: Some(1.0), ..case }]
    });
    cases.collect()
}
