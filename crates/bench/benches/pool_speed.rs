//! What the pool costs: opening, populating and recovering a pool, a slot's life in the table, birth records,
//! and checksums of payloads against checksums of plain memory.
//!
//! `cargo bench -p forebay-bench --bench pool_speed -- [GiB, default 2] [auto | off]`
//!
//! The pool lies in `/dev/shm` and is removed at the end. Blocks are of 16 KiB, the smallest that engines have,
//! so that the table is as large as it gets.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::{BlockHash, BlockKey, Generation, Instance, NamespaceId, SlotId};
use forebay_io::pool::{
    BirthRecord, Entry, Extent, HugePages, Mapping, Pool, PoolConfig, RecoveryCursor, SlotState, remove,
};

const SLOT_BYTES: u64 = 16 << 10;
const CHECKSUM_BYTES: u64 = 1 << 20;
const PAIRS: usize = 5;

fn main() {
    let mut arguments = forebay_bench::arguments();
    let gib: u64 = arguments.next().map_or(2, |gib| gib.parse().expect("a number of GiB"));
    let huge_pages = match arguments.next().as_deref() {
        None | Some("auto") => HugePages::Auto,
        Some("off") => HugePages::Off,
        Some(other) => panic!("`auto` or `off`, not `{other}`"),
    };
    let directory = Path::new("/dev/shm").join(format!("forebay-pool-speed-{}", std::process::id()));
    let config = PoolConfig { directory: directory.clone(), capacity_bytes: gib << 30, unit_bytes: None, huge_pages };
    let mut rows = Vec::new();
    fill(&config, &mut rows);
    recover(&config, &mut rows);
    remove(&directory).expect("nobody else uses the pool");
    std::fs::remove_dir(&directory).expect("the directory is empty");
    let (version, command) = (env!("CARGO_PKG_VERSION"), "cargo bench -p forebay-bench --bench pool_speed");
    println!(r#"{{"bench":"pool","version":"{version}","command":"{command}","machine":"{}","rows":["#, machine());
    println!("{}\n]}}", rows.join(",\n"));
}

/// A new pool, all its units, and a block in every slot.
fn fill(config: &PoolConfig, rows: &mut Vec<String>) {
    let start = Instant::now();
    let pool = Pool::open(config).expect("the pool is made").pool;
    rows.push(row("make the pool", 1, start.elapsed()));
    let geometry = pool.geometry();
    let start = Instant::now();
    (0..geometry.units).for_each(|unit| pool.populate_unit(unit).expect("there is memory"));
    let elapsed = start.elapsed();
    let start = Instant::now();
    let report = pool.huge_page_report().expect("the kernel tells");
    rows.push(row("report huge pages", 1, start.elapsed()));
    rows.push(format!(
        r#"{{"op":"populate","bytes":{},"huge_bytes":{},"backing":"{:?}","ms":{:.1}}}"#,
        report.mapped_bytes,
        report.huge_bytes,
        report.backing,
        elapsed.as_secs_f64() * 1e3
    ));
    let start = Instant::now();
    for unit in 0..geometry.units {
        pool.set_extent(&Extent { first_unit: unit, units: 1, slot_bytes: SLOT_BYTES }).expect("there is memory");
    }
    rows.push(row("make an extent", u64::from(geometry.units), start.elapsed()));
    let slots: Vec<SlotId> = (0..geometry.pages).step_by((SLOT_BYTES / 4096) as usize).map(SlotId).collect();
    births(&pool, &slots, rows);
    for (round, name) in [(1, "reserve, hold, ready, release; fresh slots"), (2, "the same after free; used slots")] {
        let start = Instant::now();
        for (number, slot) in slots.iter().enumerate() {
            if round == 2 {
                pool.free(*slot, Generation(2 << 30 | number as u32));
            }
            pool.reserve(*slot, Generation(round << 28 | number as u32));
            pool.set_holders(*slot, 1);
            pool.ready(*slot, Generation(round << 28 | number as u32), &entry(number as u64));
            pool.set_holders(*slot, 0);
        }
        rows.push(row(name, slots.len() as u64, start.elapsed()));
    }
    checksums(&pool, rows);
}

fn births(pool: &Pool, slots: &[SlotId], rows: &mut Vec<String>) {
    let fds = pool.mapper_fds(Instance(0), 0).expect("nobody has this lock");
    let mapping = Mapping::new(fds, &pool.description()).expect("the files are right");
    let record = BirthRecord { generation: Generation(1), length: SLOT_BYTES, checksum: 7 };
    for name in ["write a birth record, first time", "write a birth record, again"] {
        let start = Instant::now();
        slots.iter().for_each(|slot| mapping.write_birth(*slot, 0, &record).expect("there is room"));
        rows.push(row(name, slots.len() as u64, start.elapsed()));
    }
    let start = Instant::now();
    assert!(slots.iter().all(|slot| pool.birth(*slot, 0) == Some(record)));
    rows.push(row("read a birth record", slots.len() as u64, start.elapsed()));
}

/// Median of pairs: the pool's checksum and that of as much plain memory, block by block in turn.
fn checksums(pool: &Pool, rows: &mut Vec<String>) {
    let bytes = pool.geometry().data_bytes().min(1 << 30);
    let plain: Vec<u8> = (0..bytes).map(|i| (i * 31) as u8).collect();
    plain.chunks(CHECKSUM_BYTES as usize).zip(0..).for_each(|(piece, at)| pool.write(at * CHECKSUM_BYTES, piece));
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    for _ in 0..PAIRS {
        let (mut pooled, mut baseline) = (Duration::ZERO, Duration::ZERO);
        for (piece, at) in plain.chunks(CHECKSUM_BYTES as usize).zip(0..) {
            let start = Instant::now();
            let ours = pool.checksum(at * CHECKSUM_BYTES, CHECKSUM_BYTES);
            let middle = Instant::now();
            let theirs = checksum(piece);
            baseline += middle.elapsed();
            pooled += middle - start;
            assert_eq!(ours, theirs);
        }
        let gb_per_s = |time: Duration| bytes as f64 / 1e9 / time.as_secs_f64();
        pairs.push((gb_per_s(pooled), gb_per_s(baseline)));
    }
    pairs.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let (ours, theirs) = pairs[PAIRS / 2];
    rows.push(format!(
        r#"{{"op":"checksum","size_bytes":{CHECKSUM_BYTES},"gb_per_s":{ours:.2},"baseline":"checksum of plain memory","baseline_gb_per_s":{theirs:.2},"ratio":{:.3}}}"#,
        ours / theirs
    ));
}

/// The full pool again, as after a restart.
fn recover(config: &PoolConfig, rows: &mut Vec<String>) {
    let start = Instant::now();
    let pool = Pool::open(config).expect("the pool is there").pool;
    rows.push(row("open the full pool", 1, start.elapsed()));
    let (mut slots, mut ready) = (0, 0);
    let start = Instant::now();
    pool.recover(&mut RecoveryCursor::default(), usize::MAX, |slot| {
        slots += 1;
        ready += u64::from(matches!(slot.state, SlotState::Ready(_)));
    });
    rows.push(row("recover a slot", slots, start.elapsed()));
    assert_eq!((slots, ready), (pool.geometry().data_bytes() / SLOT_BYTES, slots));
}

fn entry(number: u64) -> Entry {
    let hash = BlockHash::new(&[number.to_le_bytes(), [7; 8], [8; 8], [9; 8]].concat()).expect("32 bytes are a hash");
    let key = BlockKey { namespace: NamespaceId(5), group: 0, hash };
    Entry { key, length: SLOT_BYTES, checksum: number, sequence: number, tokens: 16 }
}

fn row(op: &str, count: u64, elapsed: Duration) -> String {
    let each_us = elapsed.as_secs_f64() * 1e6 / count as f64;
    format!(r#"{{"op":"{op}","count":{count},"ms":{:.2},"us_each":{each_us:.3}}}"#, elapsed.as_secs_f64() * 1e3)
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).unwrap_or(("", "?")).1;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{model}, {cores} cores, Linux {}", read("/proc/sys/kernel/osrelease").trim())
}
