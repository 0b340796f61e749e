//! What a scrape says, line by line.

mod golden;

use std::collections::HashSet;

use forebay_core::ceiling::Estimate;
use forebay_core::optimum::Sampled;
use forebay_core::report::{ClassReport, Held};
use forebay_core::stats::Stats;
use forebay_daemon::metrics::{Clients, Estimates, Pool, Rpc, RpcErrors, Snapshot, page, render};
use golden::assert_golden;

fn class(slot_bytes: u64, slots: u64, [ready, reserved, fenced]: [u64; 3]) -> ClassReport {
    ClassReport { slot_bytes, slots, used: ready + reserved + fenced, ready, pinned: 7, reserved, fenced }
}

/// Every number is another one, so that two that are swapped show.
fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot {
        core: Stats {
            lookups: 1,
            keys: 2,
            hits: 3,
            hit_bytes: 4,
            misses: [10, 11, 12, 13, 14, 15, 16, 17],
            reserved: 20,
            reserve_refused: 21,
            stored: 22,
            stored_bytes: 23,
            duplicates: 24,
            orphans: 25,
            incomplete: 26,
            lost: 27,
            aborted: 28,
            evicted: 29,
            evicted_bytes: 30,
            purged: 31,
            recovered: 32,
            verified: 33,
            corrupt: 34,
            extents_moved: 35,
        },
        classes: vec![class(4096, 500, [101, 102, 103]), class(65536, 600, [104, 105, 106])],
        held: Held { pinned_bytes: 50, reserved_bytes: 51, fenced_bytes: 52, fenced_blocks: 53, leases: 54 },
        pool: Pool { capacity_bytes: 60, populated_bytes: 61, huge_bytes: 62 },
        clients: Clients { sessions: 70, attached_workers: 71, namespaces: 72 },
        rpc: Rpc {
            put_bytes: 80,
            get_bytes: 81,
            refused_peers: 82,
            errors: vec![RpcErrors { method: "Lookup", code: "invalid_argument", count: 83 }],
        },
        estimates: Estimates {
            windows: [
                None,
                Some(Estimate { window_us: 3_600_000_000, asked: 1000, different: 250.0 }),
                Some(Estimate { window_us: 86_400_000_000, asked: 1000, different: 125.0 }),
            ],
            sampled: Sampled { asked: 190, again: 191, hits: 192, optimum_hits: 193 },
            curve: vec![(1 << 30, 0.25), (2 << 30, 0.5)],
            left_out: 194,
        },
        start_time_seconds: 90,
        ..Snapshot::default()
    };
    snapshot.lookup_time.record(150);
    snapshot.event_time.record(3);
    snapshot
}

#[test]
fn every_number_is_written_under_its_own_name() {
    let text = render(snapshot());
    assert_golden("tests/golden/metrics.txt", &text);
    // The golden file cannot hide a number that was forgotten.
    let values: HashSet<&str> = text.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    let counts = (1..=4).chain(10..=17).chain(20..=35).chain(50..=54).chain(60..=62).chain(70..=72).chain(80..=83);
    for count in counts.chain(101..=106).chain([190, 192, 193, 194]).chain([500 - 306, 600 - 315, 90]) {
        assert!(values.contains(count.to_string().as_str()), "{count} is nowhere in\n{text}");
    }
}

#[test]
fn names_carry_their_units_and_counters_their_suffix() {
    let text = render(snapshot());
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        assert!(name.starts_with("forebay_"), "{name}");
        let shown = if kind == "counter" { format!("`{name}_total`") } else { format!("`{name}`") };
        assert_eq!(page().matches(&shown).count(), 1, "{shown} on the page");
        if kind == "histogram" {
            assert!(name.ends_with("_seconds"), "{name}");
        }
        for unit in ["_us", "_ms", "_mib", "_gib", "_percent"] {
            assert!(!name.ends_with(unit), "{name} is not in a base unit");
        }
    }
    assert!(text.ends_with("# EOF\n"));
}
