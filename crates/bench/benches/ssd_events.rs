//! How long one call of the SSD tier, and one event of the core about the tier's blocks, keeps the thread that decides,
//! with very many small blocks.
//!
//! `cargo bench -p forebay-bench --bench ssd_events -- [BLOCKS] [NAMESPACES_OF_WHICH_ONE_IS_PURGED_FIRST]`: a disk with
//! room for so many blocks of 4 KiB (a million by default) is filled, an eighth of the blocks are loaded, and a quarter
//! of the disk is stored anew, so that segments are reclaimed. Then come reports and a walk through all blocks. At last
//! one namespace of two (or of the given number) is removed, and all others, as a purge does it. The core hears of as
//! many blocks, and forgets them.
//!
//! The disk keeps its format and the lists of its segments, in a file without a name, and forgets the blocks, so that a
//! disk of terabytes fits. Transfers are made between the calls that are measured. Prints the thread's CPU time by
//! call, and the process's memory by block.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::tiers::Limits;
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
    for (what, wanted) in [("one namespace", 0..1), ("all others", 1..namespaces as u128)] {
        let begun = Instant::now();
        let wanted: BTreeSet<NamespaceId> = wanted.map(NamespaceId).collect();
        let keys = bench.walk(&wanted);
        let count = keys.len();
        bench.run(&format!("remove {what}"), OpKind::Remove, keys.into_iter());
        assert!(bench.walk(&wanted).is_empty(), "some blocks stayed");
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
        let hasher = core.tier_hasher();
        timed(&mut found, || core.tier_found(tier, hasher.hash(&key)));
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
        let config = SsdConfig { segment_bytes: Some(SEGMENT_BYTES), ..SsdConfig::new(Vec::new()) };
        Ok(Bench { ssd: Ssd::on(vec![medium], &config)?, now: Duration::ZERO, next_id: 0, sum, medium: state })
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
            self.medium.lock().expect("nobody panics").work();
            timed(&mut polls, || self.ssd.poll(&mut completions));
            self.ssd.take_evicted(&mut evicted, &mut Vec::new());
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

    fn walk(&mut self, namespaces: &BTreeSet<NamespaceId>) -> Vec<BlockKey> {
        let (mut pieces, mut is_new, mut all, mut completions) = (Vec::new(), true, Vec::new(), Vec::new());
        loop {
            match timed(&mut pieces, || self.ssd.walk(std::mem::take(&mut is_new), namespaces)) {
                Walked::Blocks(blocks) => all.extend(blocks.iter().map(|block| block.key)),
                Walked::Waits => {
                    self.now += Duration::from_millis(1);
                    self.ssd.tick(self.now);
                    self.medium.lock().expect("nobody panics").work();
                    timed(&mut pieces, || self.ssd.poll(&mut completions));
                }
                Walked::End => break,
            }
        }
        print("piece of a walk", &mut pieces);
        all
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
