//! The filesystem tier beside plain files: the same bytes, threads and directory, in turns.
//!
//! `cargo bench -p forebay-bench --bench fs_speed -- DIRECTORY SIZES THREADS PAIRS RUN_MIB [direct]`
//!
//! The baseline is what a script would do: each thread writes a file of its own under a temporary name and renames it,
//! or opens and reads one into a buffer that stays in the cache; no header, no checksum, no check whether it is there.
//! Loads have a second baseline, which reads each file straight to a place of its own, as a slot is: no tier moves
//! bytes for less. Ratios are medians over the pairs.

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};
use forebay_io::fs::{Fs, FsConfig};
use forebay_io::uring::Region;
use rustix::time::{ClockId, clock_gettime};

const PATIENCE: Duration = Duration::from_secs(60);

/// GB/s and CPU milliseconds per GB.
#[derive(Clone, Copy)]
struct Sample {
    gb_per_s: f64,
    cpu_ms_per_gb: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = forebay_bench::arguments().collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [directory, sizes, threads, pairs, run_mib, ref rest @ ..] = arguments[..] else {
        return Err("DIRECTORY SIZES THREADS PAIRS RUN_MIB [direct]".into());
    };
    let (threads, pairs, run_bytes) = (threads.parse()?, pairs.parse()?, run_mib.parse::<u64>()? << 20);
    for size in sizes.split(',') {
        let size_bytes: u64 = size.parse()?;
        let home = Path::new(directory).join(format!("fs-bench-{size_bytes}"));
        bench(&home, size_bytes, run_bytes / size_bytes, threads, pairs, rest == ["direct"])?;
        fs::remove_dir_all(&home)?;
    }
    Ok(())
}

fn bench(
    home: &Path,
    size_bytes: u64,
    blocks: u64,
    threads: u32,
    pairs: usize,
    io_direct: bool,
) -> Result<(), Box<dyn Error>> {
    let pool = Region::anonymous((size_bytes * blocks) as usize)?;
    pool.want_huge_pages();
    let block: Vec<u8> = (0..size_bytes).map(|at| ((at * 7) >> 3) as u8).collect();
    (0..blocks).for_each(|number| pool.write(number * size_bytes, &block));
    let sum = checksum(&block);
    let mut slots = vec![1; (size_bytes * blocks) as usize];
    let (mut stores, mut loads, mut slot_loads) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        let (tier_home, plain_home) = (home.join(format!("tier-{pair}")), home.join(format!("plain-{pair}")));
        fs::create_dir_all(&tier_home)?;
        fs::create_dir_all(&plain_home)?;
        let config =
            FsConfig { streams: threads, buffers: threads, io_direct, ..FsConfig::new(vec![tier_home.clone()]) };
        let mut tier = Fs::open(&config, pool.clone())?;
        let store = |id| operation(id, OpKind::Store, size_bytes, sum);
        let load = |id| operation(id, OpKind::Load, size_bytes, sum);
        let bytes = size_bytes * blocks;
        let tier_store = sample(bytes, || run(&mut tier, (0..blocks).map(store).collect()));
        let plain_store = sample(bytes, || each(threads, blocks, |number| plain_write(&plain_home, number, &block)));
        let tier_load = sample(bytes, || run(&mut tier, (0..blocks).map(|at| load(blocks + at)).collect()));
        let plain_load = sample(bytes, || each(threads, blocks, |number| plain_read(&plain_home, number, size_bytes)));
        let slot_load = sample(bytes, || slot_reads(threads, &plain_home, &mut slots, size_bytes));
        stores.push((tier_store, plain_store));
        loads.push((tier_load, plain_load));
        slot_loads.push((tier_load, slot_load));
        drop(tier);
        fs::remove_dir_all(&tier_home)?;
        fs::remove_dir_all(&plain_home)?;
    }
    print("store", size_bytes, &stores);
    print("load", size_bytes, &loads);
    print("load, plain to slots", size_bytes, &slot_loads);
    Ok(())
}

fn operation(id: u64, kind: OpKind, length_bytes: u64, checksum: u64) -> Operation {
    // A load's id follows those of the stores: both count the same blocks.
    Operation { id: OpId(id), kind, key: key(0), slot: None, length_bytes, checksum, lineage: None }
}

fn key(number: u64) -> BlockKey {
    let hash = BlockHash::new(&number.to_le_bytes()).expect("eight bytes");
    BlockKey { namespace: NamespaceId(1), group: 0, hash }
}

/// Runs the operations, one for each block in its own slot.
fn run(tier: &mut Fs, mut ops: Vec<Operation>) {
    let (mut taken, mut done, mut completions, begun) = (0, 0, Vec::<Completion>::new(), Instant::now());
    for (number, op) in (0..).zip(&mut ops) {
        op.key = key(number);
        op.slot = Some((SlotId((number * op.length_bytes / 4096) as u32), Generation(0)));
    }
    while done < ops.len() {
        taken += tier.submit(&ops[taken..]);
        let mut watched = [rustix::event::PollFd::from_borrowed_fd(tier.wake_fd(), rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut watched, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        tier.poll(&mut completions);
        let is_good = |done: &Completion| matches!(done.outcome, Outcome::Stored | Outcome::Loaded { .. });
        assert!(completions.iter().all(is_good), "{completions:?}");
        done += completions.drain(..).count();
        assert!(begun.elapsed() < PATIENCE, "{done} of {} done", ops.len());
    }
}

/// Calls `work` for each block, on so many threads.
fn each(threads: u32, blocks: u64, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= blocks {
                        break;
                    }
                    work(number);
                }
            });
        }
    });
}

fn plain_path(home: &Path, number: u64) -> PathBuf {
    home.join(format!("{number:016x}"))
}

fn plain_write(home: &Path, number: u64, block: &[u8]) {
    let path = plain_path(home, number);
    let temporary = path.with_extension("tmp");
    File::create(&temporary).and_then(|mut file| file.write_all(block)).expect("the file is written");
    fs::rename(temporary, path).expect("the file is renamed");
}

fn plain_read(home: &Path, number: u64, size_bytes: u64) {
    thread_local!(static BUFFER: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) });
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(size_bytes as usize, 0);
        File::open(plain_path(home, number)).and_then(|mut file| file.read_exact(buffer)).expect("the file is read");
    });
}

/// Each file to its own place in `slots`.
fn slot_reads(threads: u32, home: &Path, slots: &mut [u8], size_bytes: u64) {
    let places = Mutex::new((0..).zip(slots.chunks_mut(size_bytes as usize)));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((number, place)) = places.lock().expect("no thread panics").next() else { break };
                    let read = File::open(plain_path(home, number)).and_then(|mut file| file.read_exact(place));
                    read.expect("the file is read");
                }
            });
        }
    });
}

fn sample(bytes: u64, work: impl FnOnce()) -> Sample {
    let cpu = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let (begun, cpu_begun, gb) = (Instant::now(), cpu(), bytes as f64 / 1e9);
    work();
    Sample { gb_per_s: gb / begun.elapsed().as_secs_f64(), cpu_ms_per_gb: (cpu() - cpu_begun) * 1e3 / gb }
}

fn print(direction: &str, size_bytes: u64, pairs: &[(Sample, Sample)]) {
    let of = |value: &dyn Fn(&(Sample, Sample)) -> f64| {
        let mut values: Vec<f64> = pairs.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    println!(
        "{direction} {:5} KiB: tier {:.2} GB/s, plain {:.2} GB/s, ratio {:.2}; cpu {:.0} ms/GB, plain {:.0}",
        size_bytes >> 10,
        of(&|pair| pair.0.gb_per_s),
        of(&|pair| pair.1.gb_per_s),
        of(&|pair| pair.0.gb_per_s / pair.1.gb_per_s),
        of(&|pair| pair.0.cpu_ms_per_gb),
        of(&|pair| pair.1.cpu_ms_per_gb),
    );
}
