//! How long one call of the SSD tier, and one event of the core about the tier's blocks, keeps the thread that decides,
//! with very many small blocks.
//!
//! `cargo bench -p forebay-bench --bench ssd_events -- [BLOCKS] [NAMESPACES_OF_WHICH_ONE_IS_PURGED_FIRST] [RUNS]`: a
//! disk with room for so many blocks of 4 KiB (a million by default) is filled, an eighth of the blocks are loaded, and
//! a quarter of the disk is stored anew, so that segments are reclaimed. Then come reports and a walk through all
//! blocks. At last one namespace of two (or of the given number) is removed, and all others, as a purge does it. The
//! core hears of as many blocks, and forgets them.
//!
//! The disk keeps its format and the lists of its segments, in a file without a name, and forgets the blocks, so that a
//! disk of terabytes fits. Transfers are made between the calls that are measured. Prints the thread's CPU time by
//! call, and the process's memory by block.
//!
//! A virtual machine adds times of its own to single calls. A loop that touches no memory shows them. So all is done
//! RUNS times (three by default), with the same calls in the same order, and each call counts with its least time also:
//! what the code does is in all runs, and what the machine adds is not.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::{Limits, TierHasher};
use forebay_core::{BlockHash, BlockKey, Config, Core, Generation, NamespaceId, PAGE_BYTES, SlotId};
use forebay_io::ssd::{Medium, STAGING_BYTES, Ssd, SsdConfig, Walked};
use forebay_io::uring::{Done, Engine, Memory, Place, Region, Request, Work};
use rustix::time::{ClockId, clock_gettime};

const BLOCK_BYTES: u64 = PAGE_BYTES;
const IN_FLIGHT: u64 = 128;
const SEGMENT_BYTES: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = forebay_bench::arguments();
    let blocks: u64 = arguments.next().map_or(Ok(1 << 20), |count| count.parse())?;
    let namespaces: u64 = arguments.next().map_or(Ok(2), |count| count.parse())?;
    let runs: usize = arguments.next().map_or(Ok(3), |count| count.parse())?;
    // Before all others: later nothing fresh from the machine is left to see.
    println!("memory below the pool without the core's: {:.0} bytes a block", memory_by_block(blocks, namespaces)?);
    let mut least: Vec<Series> = Vec::new();
    for run in 1..=runs {
        println!("run {run}");
        let series = [tier(blocks, namespaces)?, core(blocks), vec![control()]].concat();
        series.iter().for_each(Series::print);
        if run == 1 {
            least = series;
        } else {
            least.iter_mut().zip(&series).for_each(|(least, series)| least.lower(series));
        }
    }
    println!("least of {runs} runs");
    least.iter().for_each(Series::print);
    Ok(())
}

/// The times of one kind of call, in the order of the calls.
#[derive(Clone)]
struct Series {
    what: String,
    times_us: Vec<f32>,
}

impl Series {
    fn new(what: impl Into<String>) -> Series {
        Series { what: what.into(), times_us: Vec::new() }
    }

    /// Times `call` in CPU time of this thread.
    fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let now = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
        };
        let begun = now();
        let result = call();
        self.times_us.push((now() - begun) as f32);
        result
    }

    /// Takes the lower time of each call.
    fn lower(&mut self, other: &Series) {
        let same = (&self.what, self.times_us.len()) == (&other.what, other.times_us.len());
        assert!(same, "two runs have other calls: {} and {}", self.what, other.what);
        self.times_us.iter_mut().zip(&other.times_us).for_each(|(time, other)| *time = time.min(*other));
    }

    fn print(&self) {
        let mut times = self.times_us.clone();
        times.sort_by(f32::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "{}: {} calls, p50 {:.1} us, p99 {:.1} us, p99.99 {:.1} us, longest {:.1} us",
            self.what,
            times.len(),
            at(0.5),
            at(0.99),
            at(0.9999),
            at(1.0)
        );
        std::io::stdout().flush().expect("standard output is there");
    }
}

fn memory_by_block(blocks: u64, namespaces: u64) -> Result<f64, Box<dyn Error>> {
    let mut bench = Bench::open(blocks, namespaces)?;
    let before = resident_bytes();
    bench.run("store", OpKind::Store, (0..blocks).map(|number| bench_key(number, namespaces)));
    Ok((resident_bytes() - before) as f64 / bench.ssd.report()[0].blocks as f64)
}

fn tier(blocks: u64, namespaces: u64) -> Result<Vec<Series>, Box<dyn Error>> {
    let mut bench = Bench::open(blocks, namespaces)?;
    let key = |number| bench_key(number, namespaces);
    let mut all = Vec::new();
    all.extend(bench.run("store", OpKind::Store, (0..blocks).map(key)));
    all.extend(bench.run("load", OpKind::Load, (0..blocks / 8).map(|number| key(number * 8))));
    all.extend(bench.run("store over old", OpKind::Store, (blocks..blocks / 4 * 5).map(key)));

    let mut reports = Series::new("report");
    (0..100).for_each(|_| _ = reports.time(|| bench.ssd.report()));
    all.push(reports);
    let there = bench.ssd.report()[0].blocks;
    for (what, wanted) in [("one namespace", 0..1), ("all others", 1..namespaces as u128)] {
        let begun = Instant::now();
        let wanted: BTreeSet<NamespaceId> = wanted.map(NamespaceId).collect();
        let (keys, pieces) = bench.walk(&wanted);
        all.push(pieces);
        let count = keys.len();
        all.extend(bench.run(&format!("remove {what}"), OpKind::Remove, keys.into_iter()));
        let (left, pieces) = bench.walk(&wanted);
        all.push(pieces);
        assert!(left.is_empty(), "some blocks stayed");
        let seconds = begun.elapsed().as_secs_f64();
        println!("purge of {what}: {count} of {there} blocks in {seconds:.2} s");
    }
    Ok(all)
}

fn core(blocks: u64) -> Vec<Series> {
    let mut core = Core::new(Config::new(2 << 20, 512));
    let tier = core.open_tier(Limits::default());
    let (mut found, mut gone) = (Series::new("core, a block was found"), Series::new("core, a block was evicted"));
    for number in 0..blocks {
        let key = bench_key(number, 1);
        let hasher = core.tier_hasher();
        found.time(|| core.tier_found(tier, hasher.hash(&key)));
    }
    let each = core.tier_heap_bytes() as f64 / blocks as f64;
    println!("memory of the core for blocks on tiers: {each:.0} bytes a block");
    for number in 0..blocks {
        let key = bench_key(number, 1);
        gone.time(|| core.tier_evicted(tier, &key));
    }
    vec![found, gone]
}

/// What the machine alone takes: so much work in registers as a call of the core takes time.
fn control() -> Series {
    let (mut series, mut state) = (Series::new("control, a loop in registers"), 1u64);
    for _ in 0..10_000_000 {
        series.time(|| {
            for _ in 0..300 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
            }
        });
    }
    std::hint::black_box(state);
    series
}

struct Bench {
    ssd: Ssd,
    now: Duration,
    next_id: u64,
    sum: u64,
    medium: Arc<Mutex<Forgetting>>,
}

impl Bench {
    fn open(blocks: u64, namespaces: u64) -> Result<Bench, Box<dyn Error>> {
        assert!(namespaces > 0, "blocks belong to a namespace");
        let pool = Region::anonymous((IN_FLIGHT * BLOCK_BYTES) as usize)?;
        let memory = Arc::new(Memory::new(pool, Region::anonymous(STAGING_BYTES)?));
        let sum = checksum(&vec![0; BLOCK_BYTES as usize]);
        let file = tempfile::tempfile()?;
        let state = Forgetting { memory: memory.clone(), sum, file, requests: VecDeque::new(), done: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let engine = Forgetful(state.clone());
        let medium = Medium {
            name: "forgetful".to_owned(),
            engine: Box::new(engine),
            engine_why: "a measurement asks for it".to_owned(),
            memory,
            // A page of records for 39 blocks, and each segment's footer.
            bytes: blocks * (BLOCK_BYTES + 250) + 6 * SEGMENT_BYTES,
            is_direct: true,
            can_trim: false,
            new_id: 1,
        };
        let config =
            SsdConfig { segment_bytes: Some(SEGMENT_BYTES), hasher: TierHasher::new(1), ..SsdConfig::new(Vec::new()) };
        Ok(Bench { ssd: Ssd::on(vec![medium], &config)?, now: Duration::ZERO, next_id: 0, sum, medium: state })
    }

    /// All of them, so many at a time. Returns the times of `submit` and of `poll`.
    fn run(&mut self, what: &str, kind: OpKind, keys: impl Iterator<Item = BlockKey>) -> [Series; 2] {
        let series = |call: &str| Series::new(format!("{what}, {call}"));
        let (mut submits, mut polls, mut completions) = (series("submit"), series("poll"), Vec::new());
        let (begun, mut blocks, mut keys) = (Instant::now(), 0u64, keys.peekable());
        let (mut free, mut waiting): (Vec<u32>, VecDeque<Operation>) =
            ((0..IN_FLIGHT as u32).collect(), VecDeque::new());
        let (mut slots, mut evicted) = (HashMap::new(), Vec::new());
        while keys.peek().is_some() || !slots.is_empty() {
            while keys.peek().is_some()
                && let Some(slot) = free.pop()
            {
                let (id, key) = (OpId(self.next_id), keys.next().expect("just looked at"));
                self.next_id += 1;
                slots.insert(id, slot);
                let at = Some((SlotId(slot), Generation(1)));
                waiting.push_back(Operation {
                    id,
                    kind,
                    key,
                    slot: at,
                    length_bytes: BLOCK_BYTES,
                    checksum: self.sum,
                    lineage: None,
                });
            }
            let batch = waiting.make_contiguous();
            let taken = submits.time(|| self.ssd.submit(batch));
            waiting.drain(..taken);
            self.now += Duration::from_millis(1);
            self.ssd.tick(self.now);
            self.medium.lock().expect("nobody panics").work();
            polls.time(|| self.ssd.poll(&mut completions));
            self.ssd.take_evicted(&mut evicted, &mut Vec::new());
            evicted.clear();
            for Completion { id, outcome } in completions.drain(..) {
                assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
                free.extend(slots.remove(&id));
                blocks += 1;
            }
        }
        println!("{what}: {blocks} blocks in {:.1} s", begun.elapsed().as_secs_f64());
        [submits, polls]
    }

    fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>) -> (Vec<BlockKey>, Series) {
        let mut pieces = Series::new("piece of a walk");
        let (mut is_new, mut all, mut completions) = (true, Vec::new(), Vec::new());
        loop {
            match pieces.time(|| self.ssd.walk(std::mem::take(&mut is_new), namespaces)) {
                Walked::Blocks(blocks) => all.extend(blocks.iter().map(|block| block.key)),
                Walked::Waits => {
                    self.now += Duration::from_millis(1);
                    self.ssd.tick(self.now);
                    self.medium.lock().expect("nobody panics").work();
                    pieces.time(|| self.ssd.poll(&mut completions));
                }
                Walked::End => break,
            }
        }
        (all, pieces)
    }
}

/// All blocks are zeros.
struct Forgetful(Arc<Mutex<Forgetting>>);

struct Forgetting {
    memory: Arc<Memory>,
    /// Of a block.
    sum: u64,
    /// Pages that segments begin with, and lists that they end with.
    file: File,
    requests: VecDeque<Request>,
    done: Vec<Done>,
}

impl Forgetting {
    fn work(&mut self) {
        for Request { tag, work } in std::mem::take(&mut self.requests) {
            let (bytes, checksum) = match work {
                Work::Read { span, .. } if span.place == Place::Pool => (span.len, self.sum),
                Work::Read { at, span, checksum: wanted } => {
                    let mut bytes = vec![0; span.len as usize];
                    let read = self.file.read_at(&mut bytes, at).expect("the file is read");
                    self.memory.write(span, &bytes);
                    assert!(read <= bytes.len());
                    (span.len, wanted.map_or(0, |wanted| checksum(&bytes[..wanted.len as usize])))
                }
                Work::Write { at, spans } => {
                    let in_segment = at.saturating_sub(1 << 20) % SEGMENT_BYTES;
                    let is_kept = at < 1 << 20 || in_segment == 0 || in_segment + spans.len_bytes() == SEGMENT_BYTES;
                    let span = *spans.iter().next().expect("something is written");
                    if is_kept && span.place == Place::Staging {
                        let mut bytes = vec![0; span.len as usize];
                        self.memory.read(span, &mut bytes);
                        self.file.write_all_at(&bytes, at).expect("the file is written");
                    }
                    (spans.len_bytes() as u32, 0)
                }
                Work::Sync | Work::Trim { .. } => (0, 0),
            };
            self.done.push(Done { tag, result: Ok(bytes), checksum });
        }
    }
}

impl Engine for Forgetful {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        self.0.lock().expect("nobody panics").requests.append(requests);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.0.lock().expect("nobody panics").done);
    }

    /// While the disk is opened.
    fn wait(&mut self, _: Duration) {
        self.0.lock().expect("nobody panics").work();
    }
}

fn bench_key(number: u64, namespaces: u64) -> BlockKey {
    // Hashes are spread, as those of prompts are.
    let mut hash = [0x5a; 32];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    let namespace = NamespaceId(u128::from(number % namespaces));
    BlockKey { namespace, group: 0, hash: BlockHash::new(&hash).expect("32 bytes") }
}

/// Of the process.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("the kernel says it");
    let pages: u64 = status.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("its second number");
    pages * 4096
}
