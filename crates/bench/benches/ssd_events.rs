//! How long one call of the SSD tier keeps the thread that decides, with many small blocks.
//!
//! `cargo bench -p forebay-bench --bench ssd_events -- FILE [BLOCKS]`: stores so many blocks of 4 KiB in FILE (a
//! million by default; the file takes 5 KiB a block), then reports, walks through all blocks as a purge does, and
//! removes them all. Prints the thread's CPU time by call. Nothing waits in a call, so the processor's time is the
//! call's.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use forebay_core::checksum::checksum;
use forebay_core::tier::{Location, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, SlotId};
use forebay_io::ssd::{DiskClaim, DiskConfig, Ssd, SsdConfig};
use forebay_io::uring::{EngineChoice, Region};
use rustix::time::{ClockId, clock_gettime};

const BLOCK_BYTES: u64 = 4096;
const IN_FLIGHT: u64 = 128;
/// As a purge goes through the index.
const PLACES: u32 = 2048;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = forebay_bench::arguments();
    let path = PathBuf::from(arguments.next().ok_or("FILE [BLOCKS]")?);
    let blocks: u64 = arguments.next().map_or(Ok(1 << 20), |count| count.parse())?;
    let disk = DiskConfig { path, capacity_bytes: Some(blocks * 5120 + (4 << 30)), create: true };
    // With threads the calls contain no system call that copies bytes, as they do on a file in memory.
    let engine = EngineChoice::Threads;
    let config = SsdConfig { engine, segment_bytes: Some(64 << 20), ..SsdConfig::new(vec![disk.clone()]) };
    let pool = Region::anonymous((IN_FLIGHT * BLOCK_BYTES) as usize)?;
    pool.write(0, &vec![1; (IN_FLIGHT * BLOCK_BYTES) as usize]);
    let mut ssd = Ssd::open(vec![DiskClaim::new(&disk)?], &config, &pool)?;
    let sum = checksum(&vec![1; BLOCK_BYTES as usize]);

    run(&mut ssd, "store", blocks, OpKind::Store, sum)?;
    let mut reports = Vec::new();
    (0..100).for_each(|_| _ = timed(&mut reports, || ssd.report()));
    print("report", &mut reports);
    let (mut pieces, mut at, mut met) = (Vec::new(), Some(0), 0);
    while let Some(from) = at {
        let (keys, next) = timed(&mut pieces, || ssd.piece(from, PLACES, |key| key.namespace == NamespaceId(1)));
        (met, at) = (met + keys.len(), next);
    }
    print("piece of a walk", &mut pieces);
    println!("the walk met {met} of {blocks} blocks");
    run(&mut ssd, "remove", blocks, OpKind::Remove { at: Location::default() }, 0)?;
    Ok(())
}

/// All blocks, so many at a time.
fn run(ssd: &mut Ssd, what: &str, blocks: u64, kind: OpKind, sum: u64) -> Result<(), Box<dyn Error>> {
    let (mut submits, mut polls, mut completions) = (Vec::new(), Vec::new(), Vec::new());
    let mut free: Vec<u32> = (0..IN_FLIGHT as u32).collect();
    let (begun, mut next, mut done) = (Instant::now(), 0, 0);
    let mut slot_of = std::collections::HashMap::new();
    while done < blocks {
        let mut batch = Vec::new();
        while next < blocks
            && let Some(slot) = free.pop()
        {
            slot_of.insert(OpId(next), slot);
            let at = Some((SlotId(slot), Generation(1)));
            batch.push(Operation {
                id: OpId(next),
                kind,
                key: key(next),
                slot: at,
                length_bytes: BLOCK_BYTES,
                checksum: sum,
            });
            next += 1;
        }
        let taken = timed(&mut submits, || ssd.submit(&batch));
        for op in &batch[taken..] {
            free.extend(slot_of.remove(&op.id));
            next -= 1;
        }
        ssd.tick(begun.elapsed());
        timed(&mut polls, || ssd.poll(&mut completions));
        for completion in completions.drain(..) {
            assert!(matches!(completion.outcome, Outcome::Stored(_) | Outcome::Removed), "{completion:?}");
            free.extend(slot_of.remove(&completion.id));
            done += 1;
        }
    }
    println!("{what}: {blocks} blocks in {:.1} s", begun.elapsed().as_secs_f64());
    print(&format!("{what}, submit"), &mut submits);
    print(&format!("{what}, poll"), &mut polls);
    Ok(())
}

fn key(number: u64) -> BlockKey {
    // Hashes are spread, as those of prompts are.
    let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&hash).expect("8 bytes") }
}

fn timed<T>(times: &mut Vec<f64>, call: impl FnOnce() -> T) -> T {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
    };
    let begun = now();
    let result = call();
    times.push(now() - begun);
    result
}

fn print(what: &str, times: &mut [f64]) {
    times.sort_by(f64::total_cmp);
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
