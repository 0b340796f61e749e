//! Ten hosts on one shared store, with and without touches, against a store that sees every use:
//! `cargo run --release -p forebay-sim --example fleet`.

use forebay_core::tiers::Touching;
use forebay_sim::fleet::{Fleet, Told, run};

/// As the daemon touches stores that evict by use.
const TOUCHES: Told = Told::Touches(Touching { per_tick: 512, least_ticks: 1, most_ticks: 128, asks_per_tick: 0 });

fn main() {
    let base = Fleet {
        hosts: 10,
        pool_blocks: 4096,
        store_blocks: 20_000,
        prompts: 2000,
        prompt_blocks: 20,
        once_permille: 500,
        requests: 40_000,
        requests_per_second: 10,
        restart_every: 500,
        emptied_at: None,
        fresh_ms: 1000,
        seed: 1,
    };
    println!("case,seed,told,hit_rate,of_oracle,touches,lost,stored,noted,period_s");
    let few_hot = Fleet { prompts: 150, once_permille: 800, ..base };
    let cases = [
        ("few hot", few_hot),
        ("few hot / emptied", Fleet { emptied_at: Some(25_000), ..few_hot }),
        ("few hot / small store", Fleet { store_blocks: 8000, ..few_hot }),
        ("base", base),
        ("base / emptied", Fleet { emptied_at: Some(25_000), ..base }),
        ("base / small store", Fleet { store_blocks: 8000, ..base }),
        ("base / notes of a minute", Fleet { fresh_ms: 60_000, ..base }),
    ];
    for (name, case) in cases {
        for seed in 1..=2 {
            let fleet = Fleet { seed, ..case };
            let oracle = run(&fleet, Told::All);
            for (told, found) in
                [("nothing", run(&fleet, Told::Nothing)), ("touches", run(&fleet, TOUCHES)), ("all", oracle)]
            {
                println!(
                    "{name},{seed},{told},{:.4},{:.4},{},{},{},{},{}",
                    found.hit_rate(),
                    found.hit_rate() / oracle.hit_rate(),
                    found.touches,
                    found.lost_blocks,
                    found.stored_blocks,
                    found.noted_touches,
                    found.longest_period_seconds,
                );
            }
        }
    }
}
