//! Ceiling and capacity curve as the daemon would estimate them, beside what is exact:
//! `cargo run --release -p forebay-sim --example estimate -- SAMPLES TRACE..`

use forebay_core::ceiling::Ceiling;
use forebay_core::curve::Curve;
use forebay_sim::estimate::note;
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::STORE_BATCH;
use forebay_sim::{Setup, replay};

fn main() -> forebay_core::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let samples = arguments.next().and_then(|samples| samples.parse().ok()).unwrap_or(Curve::SAMPLES);
    for path in arguments {
        let trace = read(path.as_ref(), Hints::default())?;
        let (mut ceiling, mut curve) = (Ceiling::default(), Curve::new(samples));
        note(&trace, 0, &mut ceiling, &mut curve);
        let end = trace.request(trace.len() - 1).at_us;
        let day = ceiling.estimates(end)[2];
        let exact = trace.infinite_hits() as f64 / trace.accesses() as f64;
        println!("{}: ceiling {:.4}, exactly {exact:.4}", trace.name, day.ceiling().unwrap_or(0.0));
        let shares = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
        for capacity_blocks in shares.map(|share| (share * trace.unique() as f64) as u64) {
            let policy = forebay_core::policy::by_name("lru").expect("there is an lru");
            let capacity_bytes = capacity_blocks * trace.bytes_in(0);
            let setup = Setup { policy, capacity_bytes, ssd: None, lookahead: 0, store_batch: STORE_BATCH, salt: 0 };
            let outcome = replay(&trace, setup, |_| {})?;
            let exact = outcome.prefix_hits as f64 / outcome.blocks as f64;
            let estimate = curve.hit_ratio(capacity_blocks as f64);
            let points = 100.0 * (estimate - exact);
            println!("  {capacity_blocks:7} blocks: {estimate:.4}, replay {exact:.4}, {points:+.2} points");
        }
    }
    Ok(())
}
