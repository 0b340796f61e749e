//! What a block in a shared store costs one core: its checksum alone, and with a secret its MAC too.
//!
//! `cargo bench -p forebay-bench --bench seal_speed`
//!
//! `buffer`: bytes of the tier's own, as a directory or a bucket loads them. `copy`: from the pool into such a buffer,
//! as they are stored there. `pool`: in place, as Redis has them. Blocks of 1 MiB in 256 MiB, so that none is in a
//! cache. The best of five rounds, checksum and MAC in turn.

use std::time::Instant;

use forebay_core::{BlockHash, BlockKey, NamespaceId};
use forebay_io::header::{BlockSum, Sealing};
use forebay_io::uring::Region;

const BLOCK_BYTES: usize = 1 << 20;
const ALL_BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;

fn main() {
    let hash = BlockHash::new(&[1; 32]).expect("32 bytes are a hash");
    let key = BlockKey { namespace: NamespaceId(1), group: 0, hash };
    let bytes: Vec<u8> = (0..ALL_BYTES).map(|at| (at * 31) as u8).collect();
    let pool = Region::anonymous(ALL_BYTES).expect("there is memory");
    pool.write(0, &bytes);
    let sealings = [Sealing::default(), Sealing::with(&[7; 32]).expect("it is long enough")];
    let mut target = vec![0; BLOCK_BYTES];
    let row = |op: &str, add: &mut dyn FnMut(&mut BlockSum, usize)| {
        let mut best = [0.0f64; 2];
        for _ in 0..ROUNDS {
            for (sealing, best) in sealings.iter().zip(&mut best) {
                let begun = Instant::now();
                for at in (0..ALL_BYTES).step_by(BLOCK_BYTES) {
                    let mut sum = sealing.sum(&key, BLOCK_BYTES as u64);
                    add(&mut sum, at);
                    std::hint::black_box(sum.header());
                }
                *best = best.max(ALL_BYTES as f64 / 1e9 / begun.elapsed().as_secs_f64());
            }
        }
        let [checksum, mac] = best;
        println!(r#"{{"op":"{op}","checksum_gb_per_s":{checksum:.2},"with_mac_gb_per_s":{mac:.2}}}"#);
    };
    row("buffer", &mut |sum, at| sum.update(&bytes[at..at + BLOCK_BYTES]));
    row("copy", &mut |sum, at| sum.copy_from(&pool, at as u64, &mut target));
    row("pool", &mut |sum, at| sum.update_from(&pool, at as u64, BLOCK_BYTES));
}
