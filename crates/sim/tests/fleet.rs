//! Ten hosts on one store: what they use most stays there nearly as if the store saw every use.

use forebay_core::tiers::Touching;
use forebay_sim::fleet::{Fleet, Found, Told, run};

/// As the daemon touches stores that evict by use.
const TOUCHES: Told = Told::Touches(Touching { per_tick: 512, least_ticks: 1, most_ticks: 128, asks_per_tick: 0 });

fn fleet(seed: u64) -> Fleet {
    Fleet {
        hosts: 10,
        pool_blocks: 1024,
        store_blocks: 2000,
        prompts: 75,
        prompt_blocks: 10,
        once_permille: 800,
        requests: 15_000,
        requests_per_second: 5,
        restart_every: 200,
        emptied_at: Some(9000),
        fresh_ms: 1000,
        seed,
    }
}

#[test]
fn ten_hosts_hit_nearly_what_they_would_with_a_store_that_sees_every_use() {
    let [untold, touched, oracle]: [Found; 3] = [Told::Nothing, TOUCHES, Told::All].map(|told| run(&fleet(1), told));
    let shares = [untold, touched].map(|found| found.hit_rate() / oracle.hit_rate());
    assert!(shares[1] >= 0.95, "{shares:?} of {oracle:?}: {touched:?}");
    assert!(shares[0] < shares[1] - 0.02, "without touches there is something to gain: {shares:?}");
    assert!(touched.lost_blocks > 0 && touched.touches < 256 * 10 * 3000, "{touched:?}");
}
