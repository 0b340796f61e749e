//! Rounds over documents at several pools, against the optimum: `cargo run --release -p forebay-sim --example rounds --
//! [--policy lhd,lru] [--pools 0.5,0.95] [--what same,sizes] [--with TRACE]`.

use std::path::PathBuf;

use clap::Parser;
use forebay_insight::rehearsal::Scale;
use forebay_sim::bounds::{NextUses, opt_hit_bytes};
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Setup, Ssd, store_batch};
use forebay_sim::rounds::{Order, Rounds};
use forebay_sim::simulate::SsdAdmission;
use forebay_sim::trace::{ASSUMED_BLOCK_BYTES, Shape, Trace, followed_by, merge};
use forebay_sim::{policy, replay};

#[derive(Parser)]
struct Arguments {
    #[arg(long, value_delimiter = ',', default_value = "lhd,lru,s3fifo,tinylfu")]
    policy: Vec<String>,
    /// Shares of the working set
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.667,0.833,0.95")]
    pools: Vec<f64>,
    /// `same`, `shuffled` or `random` order; `tenants` and `sizes`, three each, with `_same` for that order; with
    /// another trace `mix`, `mix_shuffled`, `end`, `end_shuffled`; `endrounds`; `chain_same`, `chain_shuffled`,
    /// `chain_random`: rounds after rounds over `--sets`; `pause_same`, `pause_shuffled`: rounds that pause for
    /// one-time blocks
    #[arg(long, value_delimiter = ',', default_value = "same,shuffled,random,tenants,sizes")]
    what: Vec<String>,
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    #[arg(long, default_value_t = 60)]
    documents: usize,
    #[arg(long, default_value_t = 40)]
    blocks: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A trace for what is half rounds (`mix`), or comes after them (`end`)
    #[arg(long)]
    with: Option<PathBuf>,
    /// Working sets of `chain`, each of documents of its own, as shares of the pool, which has room for `--documents`
    #[arg(long, value_delimiter = ',', default_value = "0.9,1.1,1.5")]
    sets: Vec<f64>,
    #[arg(long)]
    store_batch: Option<usize>,
    #[arg(long, default_value_t = 0)]
    salt: u64,
    /// A disk under the pool, as a share of all different blocks; the pool's own hits count
    #[arg(long)]
    ssd: Option<f64>,
    #[arg(long, value_enum, default_value = "all")]
    ssd_admission: SsdAdmission,
    /// Requests that wait behind the one that is served
    #[arg(long, default_value_t = 0)]
    lookahead: usize,
}

/// Requests of the other trace that come after the rounds.
const AFTER: usize = 2400;
const TURNOVERS: u64 = 6;
/// One-time blocks between rounds, in turnovers.
const PAUSES: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];

fn main() {
    let arguments = Arguments::parse();
    let other = arguments.with.as_ref().map(|path| read(path, Hints::default()).expect("a trace"));
    let other = || other.as_ref().expect("`--with` names a trace");
    for what in &arguments.what {
        let rounds = arguments.rounds_of(what);
        if what.starts_with("chain") {
            arguments.print_chain(what, &rounds);
            continue;
        }
        for share in &arguments.pools {
            let blocks = (rounds.working_set() as f64 * share).round() as u64;
            match what.as_str() {
                "mix" | "mix_shuffled" => arguments.print_mix(what, &rounds, other(), blocks),
                _ if what.starts_with("pause") => arguments.print_pauses(what, &rounds, blocks),
                "end" | "end_shuffled" => arguments.print_end(what, &rounds, &head(other(), AFTER), blocks),
                "endrounds" => {
                    let others = Rounds { seed: rounds.seed + 76, rounds: 10, ..rounds.clone() };
                    arguments.print_end(what, &rounds, &others.trace(), blocks);
                }
                _ => arguments.print_rounds(what, &rounds, blocks),
            }
        }
    }
}

impl Arguments {
    fn rounds_of(&self, what: &str) -> Rounds {
        let order = match what {
            _ if what.ends_with("random") => Order::Random,
            "same" | "mix" | "end" | "endrounds" => Order::Same,
            _ if what.ends_with("_same") => Order::Same,
            _ => Order::Shuffled,
        };
        let sizes = match what {
            _ if what.starts_with("tenants") => vec![1; 3],
            _ if what.starts_with("sizes") => vec![1, 2, 3],
            _ => vec![1],
        };
        let shape = |pages: u64| Shape { block_tokens: 16, block_bytes: Some(pages * ASSUMED_BLOCK_BYTES) };
        let Arguments { documents, blocks, rounds, seed, .. } = *self;
        Rounds { documents, blocks, rounds, order, shapes: sizes.into_iter().map(shape).collect(), seed }
    }

    /// The pool's hits by bytes, by namespace.
    fn hits(&self, trace: &Trace, name: &str, capacity_bytes: u64, blocks: u64) -> Vec<u64> {
        let policy = policy::by_name(name).expect("the name of a policy");
        let store_batch = self.store_batch.unwrap_or_else(|| store_batch(blocks, trace.sizes()));
        let Arguments { lookahead, salt, .. } = *self;
        let disk_bytes = |share: f64| (share * trace.unique_bytes() as f64) as u64;
        let disk = |share| Ssd { capacity_bytes: disk_bytes(share), admission: self.ssd_admission.into() };
        let setup = Setup { policy, capacity_bytes, ssd: self.ssd.map(disk), lookahead, store_batch, salt };
        let tallies = replay(trace, setup, |_| {}).expect("a pool of some blocks").namespaces;
        tallies.iter().enumerate().map(|(at, tally)| tally.pool_hits * trace.bytes_in(at as u16)).collect()
    }

    fn hits_of_all(&self, trace: &Trace, name: &str, capacity_bytes: u64, blocks: u64) -> u64 {
        self.hits(trace, name, capacity_bytes, blocks).iter().sum()
    }

    /// The hit rate, and relative to the optimum the hits of all rounds and of those from the sixth on. Then the same
    /// relative to the optimum of the pool that there is, where blocks of several sizes share whole units.
    fn print_rounds(&self, what: &str, rounds: &Rounds, blocks: u64) {
        let traces = [self.rounds, self.rounds.min(5)].map(|count| Rounds { rounds: count, ..rounds.clone() }.trace());
        let sizes: Vec<u64> = rounds.shapes.iter().filter_map(|shape| shape.block_bytes).collect();
        let bytes = blocks * sizes.iter().sum::<u64>() / sizes.len() as u64;
        let scale = Scale::of(&sizes);
        let filled = scale.bytes_of(scale.pool_pages(bytes));
        let best_of = |bytes| traces.each_ref().map(|trace| opt_hit_bytes(trace, &NextUses::of(trace), bytes) as f64);
        let (best, best_of_filled) = (best_of(bytes), best_of(filled));
        let asked: u64 = traces[0].requests().map(|r| r.blocks.len() as u64 * traces[0].bytes_in(r.namespace)).sum();
        print!("{what:9} {blocks}: opt {:.3}", best[0] / asked as f64);
        for name in &self.policy {
            let own = traces.each_ref().map(|trace| self.hits_of_all(trace, name, bytes, blocks) as f64);
            let of = |best: [f64; 2]| (own[0] / best[0], (own[0] - own[1]) / (best[0] - best[1]));
            let (all, later) = of(best);
            print!("  {name} {:.3} ({all:.3}, {later:.3})", own[0] / asked as f64);
            if filled != bytes {
                let (all, later) = of(best_of_filled);
                print!(" of {:.1} % ({all:.3}, {later:.3})", 100.0 * filled as f64 / bytes as f64);
            }
        }
        println!();
    }

    /// A request of each in turn in a pool of twice the size: hits of both, and of each alone in half of it.
    fn print_mix(&self, what: &str, rounds: &Rounds, other: &Trace, blocks: u64) {
        let alone = [head(other, rounds.trace().len()), rounds.trace()];
        let mixed = merge(&alone);
        let bytes = blocks * ASSUMED_BLOCK_BYTES;
        print!("{what} 2 x {blocks}:");
        for name in &self.policy {
            let both =
                self.hits(&mixed, name, 2 * bytes, 2 * blocks).into_iter().map(|hits| hits / ASSUMED_BLOCK_BYTES);
            let apart = alone.each_ref().map(|one| self.hits_of_all(one, name, bytes, blocks) / ASSUMED_BLOCK_BYTES);
            let both: Vec<u64> = both.collect();
            let ratio = both.iter().sum::<u64>() as f64 / apart.iter().sum::<u64>() as f64;
            print!("  {name} {both:?} apart {apart:?} = {ratio:.3}");
        }
        println!();
    }

    /// A line for each working set and policy: relative to the optimum, the hits of all rounds but the first and those
    /// from the sixth on; then the hit rate of each round, by blocks of documents.
    fn print_chain(&self, what: &str, of: &Rounds) {
        let pool = of.working_set() as u64;
        for name in &self.policy {
            let mut before = Trace::new("chain", of.shapes.clone());
            for (nth, set) in self.sets.iter().enumerate() {
                let documents = (of.documents as f64 * set).round() as usize;
                let rounds = Rounds { documents, seed: of.seed + nth as u64, ..of.clone() };
                let asked = rounds.working_set() as f64;
                let hits_until = |count| {
                    let joined = followed_by(&before, &Rounds { rounds: count, ..rounds.clone() }.trace());
                    self.hits_of_all(&joined, name, pool * ASSUMED_BLOCK_BYTES, pool) / ASSUMED_BLOCK_BYTES
                };
                let until: Vec<u64> = (0..=self.rounds).map(hits_until).collect();
                let rates: Vec<f64> = until.windows(2).map(|at| (at[1] - at[0]) as f64 / asked).collect();
                let best = (pool as f64 / asked).min(1.0);
                let of_best = |from: usize| rates[from..].iter().sum::<f64>() / (rates.len() - from) as f64 / best;
                let each: String = rates.iter().map(|rate| format!(" {rate:.2}")).collect();
                println!("{what} {name} x {set}: {:.3} {:.3} {each}", of_best(1), of_best(5));
                before = followed_by(&before, &rounds.trace());
            }
        }
    }

    /// One line for each pause, in turnovers of the pool: the hit rates of rounds before and after it, over the same
    /// documents.
    fn print_pauses(&self, what: &str, rounds: &Rounds, pool: u64) {
        let (trace, middle) = (rounds.trace(), self.rounds / 2);
        for name in &self.policy {
            for pause in PAUSES {
                let mut paused = head(&trace, middle * rounds.documents);
                let first_later = paused.unique() as u32;
                let end = first_later + (pause * pool as f64).round() as u32;
                let one_time: Vec<u32> = (first_later..end).collect();
                one_time.chunks(rounds.blocks).for_each(|blocks| paused.push(paused.len() as u64, 0, blocks));
                let before = paused.len();
                for request in trace.requests().skip(middle * rounds.documents) {
                    let later = |block: &u32| if *block < first_later { *block } else { block + end - first_later };
                    let blocks: Vec<u32> = request.blocks.iter().map(later).collect();
                    paused.push(paused.len() as u64, 0, &blocks);
                }
                let hits_until = |requests| {
                    let part = head(&paused, requests);
                    self.hits_of_all(&part, name, pool * ASSUMED_BLOCK_BYTES, pool) / ASSUMED_BLOCK_BYTES
                };
                let ends = |first: usize| (0..=middle).map(move |round| first + round * rounds.documents);
                let rates = |first: usize| {
                    let until: Vec<u64> = ends(first).map(hits_until).collect();
                    let asked = rounds.working_set() as f64;
                    let each = |at: &[u64]| format!(" {:.2}", (at[1] - at[0]) as f64 / asked);
                    until.windows(2).map(each).collect::<String>()
                };
                println!("{what} {pool} {name} pause {pause}: {} |{}", rates(0), rates(before));
            }
        }
    }

    /// Hits in each turnover after the rounds, and in that of a pool that begins there.
    fn print_end(&self, what: &str, rounds: &Rounds, then: &Trace, blocks: u64) {
        let (first, bytes) = (rounds.trace(), blocks * ASSUMED_BLOCK_BYTES);
        print!("{what} {blocks}:");
        for name in &self.policy {
            print!("  {name}");
            let mut before = (0, 0);
            for turnover in 1..=TURNOVERS {
                let part = head(then, requests_until(then, turnover * blocks));
                let joined = self.hits(&after(&first, &part), name, bytes, blocks);
                let now = (joined[first.shapes.len()], self.hits_of_all(&part, name, bytes, blocks));
                print!(" {}/{}", (now.0 - before.0) / ASSUMED_BLOCK_BYTES, (now.1 - before.1) / ASSUMED_BLOCK_BYTES);
                before = now;
            }
        }
        println!();
    }
}

/// The first requests, one a microsecond.
fn head(trace: &Trace, requests: usize) -> Trace {
    let mut head = Trace::new(&trace.name, trace.shapes.clone());
    let some = trace.requests().take(requests).enumerate();
    some.for_each(|(at, request)| head.push(at as u64, request.namespace, request.blocks));
    head
}

/// How many requests ask for so many blocks.
fn requests_until(trace: &Trace, blocks: u64) -> usize {
    let mut asked = 0;
    let is_before = |request: &forebay_sim::Request<'_>| {
        let is_before = asked < blocks;
        asked += request.blocks.len() as u64;
        is_before
    };
    trace.requests().take_while(is_before).count()
}

fn after(first: &Trace, then: &Trace) -> Trace {
    let mut later = Trace::new(&then.name, then.shapes.clone());
    let start = first.len() as u64 + 1;
    then.requests().enumerate().for_each(|(at, r)| later.push(start + at as u64, r.namespace, r.blocks));
    merge(&[first.clone(), later])
}
