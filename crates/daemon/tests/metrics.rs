//! What a scrape says, line by line.

mod golden;

use std::collections::HashSet;
use std::sync::Arc;

use forebay_core::ErrorKind;
use forebay_core::decorate::Counts;
use forebay_core::report::{ClassReport, Held};
use forebay_core::stats::Stats;
use forebay_core::tier::Health;
use forebay_core::tiers::{TierReport, TierStats};
use forebay_daemon::metrics::{
    Alarm, Clients, Estimates, Pool, PurgeReport, Rpc, RpcErrors, Saved, Share, Snapshot, Standing, Tier, User, page,
    render,
};
use forebay_insight::ceiling::Estimate;
use forebay_insight::optimum::Sampled;
use forebay_io::StoreReport;
use forebay_io::ssd::{Counters, DiskReport, Geometry, Recovery};
use golden::assert_golden;

fn class(slot_bytes: u64, slots: u64, [ready, reserved, promoting, fenced]: [u64; 4]) -> ClassReport {
    let used = ready + reserved + promoting + fenced;
    ClassReport { slot_bytes, slots, draining: 0, used, ready, pinned: 7, reserved, promoting, fenced }
}

fn tier() -> Tier {
    let counts = |from: u64| {
        let time = Default::default();
        let [taken, refused, done, done_bytes, absent, failed] = std::array::from_fn(|at| from + at as u64);
        let mut counts = Counts { taken, refused, done, done_bytes, absent, failed, time };
        counts.time.record(from * 100);
        counts
    };
    let stats = TierStats {
        promotions: 200,
        prefetches: 214,
        prefetch_hits: 215,
        promoted: 201,
        promoted_bytes: 202,
        hits: 218,
        absent: 203,
        corrupt: 204,
        failed_loads: 205,
        late: 206,
        queued: 207,
        stored: 208,
        stored_bytes: 209,
        failed_stores: 210,
        dropped_full: 211,
        dropped_gone: 212,
        evicted: 213,
        touches: 216,
        lost: 217,
    };
    let core = TierReport {
        stats,
        is_open: false,
        blocks: 220,
        loading_blocks: 221,
        loading_bytes: 222,
        late_bytes: 223,
        waiting_blocks: 224,
        storing_blocks: 225,
        storing_bytes: 226,
        touch_ticks: 229,
    };
    let kinds = [("load", counts(230)), ("store", counts(240))];
    Tier {
        name: "ssd",
        is_shared: false,
        standing: Standing::Sick("io".to_string()),
        core,
        counts: kinds.to_vec(),
        waiting: 227,
        breaker_opened: 228,
        purge: PurgeReport { namespaces: 270, removed_blocks: 271, removed_of_these: 272, walked_ratio: Some(0.273) },
        disks: vec![disk()],
        stores: vec![store()],
    }
}

fn store() -> StoreReport {
    StoreReport {
        name: "127.0.0.1:6379".to_string(),
        health: Health::Healthy,
        trouble: Some("is not a figure".to_string()),
        trouble_age: None,
        refuses_writes: Some("is not a figure either".to_string()),
        refuses_reads: None,
        hint: Some("is not one either".to_string()),
        is_read_only: false,
        connections: Some(260),
        used_bytes: Some(261),
        capacity_bytes: Some(262),
        hanging_threads: Some(263),
        is_sweeper: Some(true),
        events: vec![("lost_steps", 264), ("redirects", 265)],
    }
}

fn disk() -> DiskReport {
    let counters = Counters {
        written_bytes: 250,
        stored_bytes: 251,
        carried_bytes: 252,
        corrupt_blocks: 253,
        ..Counters::default()
    };
    DiskReport {
        name: "/mnt/forebay".to_string(),
        engine: "threads",
        engine_why: String::new(),
        is_direct: true,
        geometry: Geometry { id: 1, segment_bytes: 1 << 20, segments: 64 },
        health: Health::Healthy,
        health_of_writes: Health::Sick(ErrorKind::Io),
        missing: None,
        hint: None,
        breaker_opened: 0,
        blocks: 220,
        index_room_blocks: 1024,
        live_bytes: 254,
        waiting_loads: 0,
        waiting_stores: 0,
        transfers_in_flight: 0,
        lifetime_written_bytes: 255,
        lifetime_stored_bytes: 256,
        counters,
        recovery: Recovery::default(),
    }
}

/// Every number is another one, so that two that are swapped show.
fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot {
        core: Stats {
            lookups: 1,
            keys: 2,
            hits: 1_003,
            hit_bytes: 4,
            misses: [10, 11, 12, 13, 14, 15, 16, 17, 18],
            reserved: 20,
            short_reservations: 21,
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
            suspected: 41,
            corrupt: [34, 37, 38, 39, 40, 44],
            scrubbed_bytes: 42,
            scrubs: 43,
            extents_moved: 35,
            moved: 36,
        },
        classes: vec![class(4096, 500, [101, 102, 107, 103]), class(65536, 600, [104, 105, 108, 106])],
        held: Held {
            pinned_bytes: 50,
            reserved_bytes: 51,
            fenced_bytes: 52,
            fenced_blocks: 53,
            leases: 54,
            hinted_groups: 55,
            protected_bytes: 56,
        },
        pool: Pool { capacity_bytes: 60, populated_bytes: 61, huge_bytes: 62, nodes: vec![(0, 63), (1, 64)] },
        tiers: vec![tier()],
        clients: Clients {
            sessions: 70,
            attached_workers: 71,
            gpu_workers: 75,
            registered_bytes: 76,
            namespaces: 72,
            users: vec![User {
                uid: 1000,
                connections: 200,
                sessions: 201,
                calls: 202,
                bytes: 203,
                lent_bytes: 206,
                refused: vec![("connections_per_user", 204), ("engines", 205)],
            }],
        },
        saved: Saved { tokens: 73, prefill_us: 74_500_000 },
        rpc: Rpc {
            put_bytes: 80,
            get_bytes: 81,
            refused_peers: 82,
            errors: vec![RpcErrors { method: "Lookup", code: "invalid_argument", count: 83 }],
        },
        estimates: Arc::new(Estimates {
            windows: [
                None,
                Some(Estimate { window_us: 3_600_000_000, asked: 1000, different: 250.0 }),
                Some(Estimate { window_us: 86_400_000_000, asked: 1000, different: 125.0 }),
            ],
            all: Share {
                name: "all".to_string(),
                sampled: Sampled { asked: 190, again: 191, hits: 192, optimum_hits: 193 },
                sampled_tiers: Some(Sampled { asked: 1000, again: 195, hits: 196, optimum_hits: 625 }),
                curve: vec![(1 << 30, 0.25), (2 << 30, 0.5)],
                disk_curve: vec![(3 << 30, 0.375)],
            },
            namespaces: vec![Share {
                name: "0000000000000000000000000000002a".to_string(),
                sampled: Sampled { asked: 180, again: 181, hits: 182, optimum_hits: 183 },
                sampled_tiers: None,
                curve: vec![(1 << 30, 0.75)],
                disk_curve: vec![(3 << 30, 0.875)],
            }],
            left_out: 194,
        }),
        alarms: vec![Alarm { name: "hit rate fell", cause: "said by advise", hint: "and there alone" }],
        start_time_seconds: 90,
        revision: "0123456789ab",
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
    let counts = [1, 2, 4, 218, 785, 1_003]
        .into_iter()
        .chain(10..=18)
        .chain(20..=43)
        .chain(50..=54)
        .chain(60..=62)
        .chain(70..=72)
        .chain(80..=83);
    let below = [201, 202]
        .into_iter()
        .chain(203..=206)
        .chain([208, 210, 211, 212, 213, 214, 215, 220, 222, 223, 224, 226, 227, 228]);
    // Of those that were taken, what became of each is told.
    let operations = [231, 232, 233, 234, 235, 241, 242, 243, 244, 245];
    let counts = counts.chain(below).chain(operations).chain(250..=255).chain([63, 64, 75, 76, 270, 271]);
    for count in
        counts.chain(101..=108).chain([180, 182, 183, 190, 192, 193, 194]).chain([500 - 413, 600 - 423, 90, 73])
    {
        assert!(values.contains(count.to_string().as_str()), "{count} is nowhere in\n{text}");
    }
    assert!(values.contains("74.5"), "the seconds saved are nowhere in\n{text}");
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
