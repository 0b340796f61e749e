//! How long one call of the SSD tier, and one event of the core about the tier's blocks, keeps the thread that decides,
//! with very many small blocks.
//!
//! `cargo bench -p forebay-bench --bench ssd_events -- [BLOCKS] [NAMESPACES_OF_WHICH_ONE_IS_PURGED_FIRST]`: a disk with
//! room for so many blocks of 4 KiB (a million by default) is filled, an eighth of the blocks are loaded, and a quarter
//! of the disk is stored anew, so that segments are reclaimed. Then come reports and a walk through all blocks. At last
//! one namespace of two (or of the given number) is removed, and all others, as a purge does it. The core hears of as
//! many blocks, and forgets them.
//!
//! The disk keeps its format and forgets what is written later, so that no call waits for anything, no page of a file
//! is copied, and a disk of terabytes fits. Prints the thread's CPU time by call, and the process's memory by block.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::Limits;
use forebay_core::{BlockHash, BlockKey, Config, Core, Generation, NamespaceId, PAGE_BYTES, SlotId};
use forebay_io::ssd::{Medium, STAGING_BYTES, Ssd, SsdConfig};
use forebay_io::uring::{Done, Engine, Memory, Region, Request, Work};
use rustix::time::{ClockId, clock_gettime};

const BLOCK_BYTES: u64 = PAGE_BYTES;
const IN_FLIGHT: u64 = 128;
const SEGMENT_BYTES: u64 = 64 << 20;
/// As a purge goes through the index.
const PLACES: u32 = 2048;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = forebay_bench::arguments();
    let blocks: u64 = arguments.next().map_or(Ok(1 << 20), |count| count.parse())?;
    let namespaces: u64 = arguments.next().map_or(Ok(2), |count| count.parse())?;
    tier(blocks, namespaces)?;
    core(blocks)
}

fn tier(blocks: u64, namespaces: u64) -> Result<(), Box<dyn Error>> {
    let mut bench = Bench::open(blocks, namespaces)?;
    let before = resident_bytes();
    bench.run("store", OpKind::Store, (0..blocks).map(|number| bench_key(number, namespaces)));
    let each = (resident_bytes() - before) as f64 / bench.ssd.report()[0].blocks as f64;
    println!("memory below the pool without the core's: {each:.0} bytes a block");
    let load = OpKind::Load;
    bench.run("load", load, (0..blocks / 8).map(|number| bench_key(number * 8, namespaces)));
    bench.run("store over old", OpKind::Store, (blocks..blocks / 4 * 5).map(|number| bench_key(number, namespaces)));

    let mut reports = Vec::new();
    (0..100).for_each(|_| _ = timed(&mut reports, || bench.ssd.report()));
    print("report", &mut reports);
    let there = bench.ssd.report()[0].blocks;
    for (what, is_wanted) in [("one namespace", 0..1), ("all others", 1..namespaces as u128)] {
        let begun = Instant::now();
        let keys = bench.walk(|key| is_wanted.contains(&key.namespace.0));
        let count = keys.len();
        bench.run(&format!("remove {what}"), OpKind::Remove, keys.into_iter());
        assert!(bench.walk(|key| is_wanted.contains(&key.namespace.0)).is_empty(), "some blocks stayed");
        let seconds = begun.elapsed().as_secs_f64();
        println!("purge of {what}: {count} of {there} blocks in {seconds:.2} s");
    }
    Ok(())
}

fn core(blocks: u64) -> Result<(), Box<dyn Error>> {
    let mut core = Core::new(Config::new(2 << 20, 512));
    let tier = core.open_tier(Limits::default());
    let (mut found, mut gone) = (Vec::new(), Vec::new());
    for number in 0..blocks {
        let key = bench_key(number, 1);
        timed(&mut found, || core.tier_found(tier, &key));
    }
    println!(
        "memory of the core for blocks on tiers: {:.0} bytes a block",
        core.tier_heap_bytes() as f64 / blocks as f64
    );
    for number in 0..blocks {
        let key = bench_key(number, 1);
        timed(&mut gone, || core.tier_evicted(tier, &key));
    }
    print("core, a block was found", &mut found);
    print("core, a block was evicted", &mut gone);
    Ok(())
}

struct Bench {
    ssd: Ssd,
    now: Duration,
    next_id: u64,
    sum: u64,
}

impl Bench {
    fn open(blocks: u64, namespaces: u64) -> Result<Bench, Box<dyn Error>> {
        assert!(namespaces > 0, "blocks belong to a namespace");
        let pool = Region::anonymous((IN_FLIGHT * BLOCK_BYTES) as usize)?;
        let memory = Arc::new(Memory::new(pool, Region::anonymous(STAGING_BYTES)?));
        let sum = checksum(&vec![0; BLOCK_BYTES as usize]);
        let engine = Forgetful { memory: memory.clone(), sum, pages: HashMap::new(), done: Vec::new() };
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
        let config = SsdConfig { segment_bytes: Some(SEGMENT_BYTES), ..SsdConfig::new(Vec::new()) };
        Ok(Bench { ssd: Ssd::on(vec![medium], &config)?, now: Duration::ZERO, next_id: 0, sum })
    }

    /// All of them, so many at a time.
    fn run(&mut self, what: &str, kind: OpKind, keys: impl Iterator<Item = BlockKey>) {
        let (mut submits, mut polls, mut completions) = (Vec::new(), Vec::new(), Vec::new());
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
            let taken = timed(&mut submits, || self.ssd.submit(batch));
            waiting.drain(..taken);
            self.now += Duration::from_millis(1);
            self.ssd.tick(self.now);
            timed(&mut polls, || self.ssd.poll(&mut completions));
            self.ssd.take_evicted(&mut evicted);
            evicted.clear();
            for Completion { id, outcome } in completions.drain(..) {
                assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
                free.extend(slots.remove(&id));
                blocks += 1;
            }
        }
        println!("{what}: {blocks} blocks in {:.1} s", begun.elapsed().as_secs_f64());
        print(&format!("{what}, submit"), &mut submits);
        print(&format!("{what}, poll"), &mut polls);
    }

    fn walk(&self, is_wanted: impl Fn(&BlockKey) -> bool) -> Vec<BlockKey> {
        let (mut pieces, mut at, mut all) = (Vec::new(), Some(0), Vec::new());
        while let Some(from) = at {
            let (keys, next) = timed(&mut pieces, || self.ssd.piece(from, PLACES, &is_wanted));
            all.extend(keys);
            at = next;
        }
        print("piece of a walk", &mut pieces);
        all
    }
}

/// Keeps what opening a disk writes, and nothing of what comes later. All blocks are zeros.
struct Forgetful {
    memory: Arc<Memory>,
    sum: u64,
    pages: HashMap<u64, Vec<u8>>,
    done: Vec<Done>,
}

impl Engine for Forgetful {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        for Request { tag, work } in requests.drain(..) {
            let bytes = match work {
                Work::Read { at, span, .. } => {
                    if let Some(page) = self.pages.get(&at) {
                        self.memory.write(span, page);
                    } else if span.len == PAGE_BYTES as u32 {
                        self.memory.write(span, &[0; PAGE_BYTES as usize]);
                    }
                    span.len
                }
                Work::Write { at, spans } => {
                    // Opening writes single pages at the starts of segments and of the disk.
                    if spans.len_bytes() == PAGE_BYTES
                        && (at < 1 << 20 || (at - (1 << 20)).is_multiple_of(SEGMENT_BYTES))
                    {
                        let mut page = vec![0; PAGE_BYTES as usize];
                        self.memory.read(*spans.iter().next().expect("a page"), &mut page);
                        self.pages.insert(at, page);
                    }
                    spans.len_bytes() as u32
                }
                Work::Sync | Work::Trim { .. } => 0,
            };
            self.done.push(Done { tag, result: Ok(bytes), checksum: self.sum });
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.done);
    }

    fn wait(&mut self, _: Duration) {}
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

fn timed<T>(times: &mut Vec<f32>, call: impl FnOnce() -> T) -> T {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
    };
    let begun = now();
    let result = call();
    times.push((now() - begun) as f32);
    result
}

fn print(what: &str, times: &mut [f32]) {
    times.sort_by(f32::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!(
        "{what}: {} calls, p50 {:.1} us, p99 {:.1} us, p99.99 {:.1} us, longest {:.1} us",
        times.len(),
        at(0.5),
        at(0.99),
        at(0.9999),
        at(1.0)
    );
    std::io::stdout().flush().expect("standard output is there");
}
