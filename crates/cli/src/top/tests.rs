//! The screen of constructed frames, at three sizes and in its worst hours. The busy one is also the golden
//! `frame.json`, which the tests of the page and the pictures of the README show.

use forebay_rpc::proto::{
    AlarmInfo, CurvePoint, FrameEngine, FrameEstimates, FrameLookups, FrameMiss, FrameNamespace, FramePool, FrameSaved,
    FrameTenant, FrameTier, FrameWindow, HealthCheck,
};

mod history;

use super::look::{View, Who};
use super::*;
use crate::golden::assert_golden;

const GIB: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 192 << 10;
/// Of the busy daemon's frame: a Tuesday, 17:02:31 UTC.
const AT_MS: u64 = 1_795_539_751_220;

fn check(name: &str, finding: &str, why: &str) -> HealthCheck {
    HealthCheck { name: name.to_owned(), finding: finding.to_owned(), why: why.to_owned() }
}

fn engine(id: &str, state: &str, (ranks, attached_ranks): (u32, u32), keys_per_second: f64) -> FrameEngine {
    // Of two days with half of this load.
    let keys = (keys_per_second * 86_400.0) as u64;
    FrameEngine {
        session: 7,
        engine_id: id.to_owned(),
        state: state.to_owned(),
        ranks,
        attached_ranks,
        keys,
        hits: keys / 100 * 61,
        keys_per_second,
        hit_ratio: (keys_per_second > 0.0).then_some(0.47),
        leases: 12,
        leased_blocks: 2100,
        reserved_blocks: 64,
        waiting_lookups: 3,
        saved_tokens: keys / 100 * 61 * 16,
        saved_prefill_seconds: keys as f64 * 0.61 * 16.0 / 91_000.0,
    }
}

/// A busy daemon whose hit rate fell, with a sick tier.
fn busy() -> FrameReply {
    let window = |name: &str, seconds: f64, keys: u64, hit: f64, ceiling: f64| FrameWindow {
        name: name.to_owned(),
        seconds,
        keys,
        hit_ratio: Some(hit),
        ceiling_ratio: Some(ceiling),
    };
    let miss = |reason: &str, keys: u64, share: f64| FrameMiss {
        reason: reason.to_owned(),
        keys,
        keys_per_second: share * 6585.6,
        share_ratio: Some(share),
    };
    let point = |gib: u64, hit_ratio: f64| CurvePoint { capacity_bytes: gib * GIB, hit_ratio };
    let pool = FrameTier {
        name: "pool".to_owned(),
        state: "serving".to_owned(),
        hits: 1_971_000_000,
        hits_per_second: 3600.0,
        share_ratio: Some(0.782),
        held_bytes: Some(171 * GIB),
        capacity_bytes: Some(200 * GIB),
        held_blocks: 171 * GIB / BLOCK_BYTES,
        up_bytes_per_second: 0.71e9,
        down_bytes_per_second: 1.15e9,
        p50_seconds: Some(0.000_09),
        p99_seconds: Some(0.000_31),
        ..FrameTier::default()
    };
    let ssd = FrameTier {
        name: "ssd".to_owned(),
        hits: 441_000_000,
        hits_per_second: 807.0,
        share_ratio: Some(0.175),
        held_bytes: Some(3 << 40),
        capacity_bytes: Some(4 << 40),
        held_blocks: (3 << 40) / BLOCK_BYTES,
        up_bytes_per_second: 0.16e9,
        down_bytes_per_second: 0.41e9,
        p50_seconds: Some(0.0014),
        p99_seconds: Some(0.0062),
        waiting_blocks: 212,
        ..pool.clone()
    };
    let redis = FrameTier {
        name: "redis".to_owned(),
        state: "sick".to_owned(),
        trouble: "unavailable: cache.internal:6379: connection refused".to_owned(),
        hits: 108_000_000,
        hits_per_second: 0.0,
        share_ratio: Some(0.043),
        held_bytes: None,
        capacity_bytes: None,
        held_blocks: 0,
        waiting_operations: 1024,
        is_shared: true,
        up_bytes_per_second: 0.0,
        down_bytes_per_second: 0.0,
        p50_seconds: None,
        p99_seconds: None,
        ..pool.clone()
    };
    FrameReply {
        boot: "feed".to_owned(),
        version: "0.1.0".to_owned(),
        host: "gpu-07".to_owned(),
        at_ms: AT_MS,
        uptime_seconds: 6 * 86_400 + 4 * 3600,
        now_seconds: 1.0,
        is_live: true,
        is_ready: true,
        checks: vec![check("core", "ok", "ticked 3 ms ago"), check("redis", "warn", "sick: connection refused")],
        alarms: vec![AlarmInfo {
            name: "hit rate fell".to_owned(),
            cause: "the working set outgrew the pool".to_owned(),
            hint: "raise `pool.capacity_bytes`; `forebay advise` shows the hit rate with more memory".to_owned(),
        }],
        pool: Some(FramePool {
            capacity_bytes: 200 * GIB,
            populated_bytes: 200 * GIB,
            huge_bytes: Some(200 * GIB),
            ready_bytes: 171 * GIB,
            pinned_bytes: 10 * GIB,
            reserved_bytes: 8 * GIB,
            promoting_bytes: 4 * GIB,
            fenced_bytes: GIB,
            used_bytes: 184 * GIB,
            stored_bytes_per_second: 1.15e9,
            evicted_bytes_per_second: 1.1e9,
            stored_blocks: 1_300_000_000,
            evicted_blocks: 1_298_000_000,
            is_draining: false,
        }),
        lookups: Some(FrameLookups {
            lookups: 14_900_000,
            keys: 4_160_000_000,
            hits: 2_520_000_000,
            lookups_per_second: 40.0,
            keys_per_second: 11_200.0,
            hit_ratio: Some(0.412),
            hit_bytes_per_second: 0.907e9,
            p50_seconds: Some(0.000_09),
            p99_seconds: Some(0.000_31),
        }),
        windows: vec![
            window("15m", 900.0, 10_005_000, 0.435, 0.72),
            window("1h", 3600.0, 41_377_000, 0.582, 0.74),
            window("1d", 86_400.0, 644_826_000, 0.639, 0.8),
        ],
        estimates: Some(FrameEstimates {
            age_seconds: 3.0,
            sampled_keys: 65_536,
            hit_ratio: Some(0.41),
            ceiling_ratio: Some(0.72),
            optimum_ratio: Some(0.66),
            tiers_optimum_ratio: Some(0.7),
            memory_curve: vec![point(100, 0.31), point(200, 0.41), point(400, 0.52), point(800, 0.58)],
            disk_curve: vec![point(0, 0.33), point(4096, 0.41), point(8192, 0.44)],
            disk_bytes: 4 << 40,
            left_out: 0,
        }),
        misses: vec![
            miss("never_seen", 1_169_000_000, 0.713),
            miss("evicted", 292_000_000, 0.178),
            miss("refused", 51_000_000, 0.031),
            miss("too_slow", 95_000_000, 0.058),
            miss("promotion_unfinished", 33_000_000, 0.02),
            miss("other_namespace", 0, 0.0),
        ],
        tiers: vec![pool, ssd, redis],
        engines: vec![
            engine("qwen-32b", "gone", (2, 0), 0.0),
            engine("llama-70b-a", "ready", (4, 4), 6204.0),
            engine("llama-70b-b", "attaching", (4, 3), 3910.0),
            FrameEngine { hit_ratio: Some(0.9), ..engine("warm-up", "client", (0, 0), 12.0) },
        ],
        namespaces: vec![FrameNamespace {
            namespace_id: "0123456789abcdef0123456789abcdef".to_owned(),
            model: "llama-70b".to_owned(),
            tenant: "blue".to_owned(),
            ready_blocks: 101 * GIB / BLOCK_BYTES,
            ready_bytes: 101 * GIB,
            sampled_keys: 40_000,
            hit_ratio: Some(0.55),
            optimum_ratio: Some(0.7),
        }],
        tenants: vec![
            FrameTenant { tenant: "blue".to_owned(), namespaces: 3, ready_bytes: 101 * GIB },
            FrameTenant { tenant: String::new(), namespaces: 1, ready_bytes: 70 * GIB },
        ],
        left_out: 0,
        saved: Some(FrameSaved {
            tokens: 38_200_000_000,
            prefill_seconds: 419_800.0,
            tokens_per_second: 73_000.0,
            prefill_seconds_per_second: 0.8,
        }),
        hour: Some(history::hour(AT_MS)),
        day: Some(history::day(AT_MS)),
    }
}

fn shown(frame: &FrameReply, look: &Look, width: usize, height: usize) -> String {
    let lines = draw(frame, look, width, height);
    assert!(lines.len() <= height && lines.iter().all(|line| line.len() <= width), "{width} x {height}");
    lines.iter().map(|line| line.to_text() + "\n").collect()
}

#[test]
fn the_answer_is_the_golden_one_at_three_sizes_and_as_text() {
    let (frame, look) = (busy(), Look::default());
    for (width, height) in [(80, 24), (120, 40), (200, 60)] {
        let text = shown(&frame, &look, width, height);
        assert_golden(&format!("tests/golden/top-{width}x{height}.txt"), &text);
        let told = ["ALARM", "gpu-07", "never seen", "redis", "llama-70b-a", "MEMORY", "q quit"];
        told.iter().for_each(|part| assert!(text.contains(part), "{part} at {width} x {height}:\n{text}"));
    }
    assert_golden("tests/golden/top-once.txt", &to_text(&frame, false));
}

/// A line for each field, so that a change of one is a change of one line.
#[test]
fn the_frame_that_the_page_is_tested_with_is_of_this_host() {
    let frame = serde_json::to_string(&busy()).unwrap();
    assert_golden("tests/golden/frame.json", &(frame.replace(",\"", ",\n\"") + "\n"));
}

#[test]
fn the_readme_shows_the_screen_as_it_is() {
    let screen = include_str!("../../tests/golden/top-80x24.txt").trim_end();
    assert!(include_str!("../../../../README.md").contains(screen), "the README shows another screen");
}

#[test]
fn the_other_views_are_the_golden_ones() {
    let frame = busy();
    let views = [View::Misses, View::Curves, View::Engines, View::Tiers, View::Help];
    let text = views.map(|view| shown(&frame, &Look { view, ..Look::default() }, 100, 32)).concat();
    assert_golden("tests/golden/top-views.txt", &text);
}

#[test]
fn no_line_of_a_view_is_cut_on_a_terminal_of_80_columns() {
    let mut frame = busy();
    let no_sample = FrameReply { estimates: None, ..frame.clone() };
    let estimates = frame.estimates.as_mut().unwrap();
    // As many as a daemon tells about.
    estimates.memory_curve = (1..=8).map(|at| CurvePoint { capacity_bytes: at * 100 * GIB, hit_ratio: 0.3 }).collect();
    estimates.disk_curve = estimates.memory_curve.clone();
    for frame in [&frame, &no_sample] {
        for view in [View::Misses, View::Curves, View::Engines, View::Tiers, View::Help, View::Answer] {
            for sort in [look::Sort::Keys, look::Sort::Leased] {
                let look = Look { view, sort, ..Look::default() };
                // As text, of which nothing is cut.
                let whole: String =
                    draw(frame, &look, 80, usize::MAX).iter().map(|line| line.to_text() + "\n").collect();
                let long: Vec<&str> = whole.lines().filter(|line| line.chars().count() > 80).collect();
                assert!(long.is_empty(), "{view:?}: {long:?}");
            }
        }
    }
    let help = shown(&frame, &Look { view: View::Help, ..Look::default() }, 80, 24);
    assert!(help.contains("else the pool's\n") && help.contains("promotions and writes\n"), "{help}");
}

#[test]
fn text_that_no_terminal_shows_is_not_cut() {
    let mut frame = busy();
    frame.tiers[2].trouble = format!("unavailable: {}", "x".repeat(200));
    let text = to_text(&frame, false);
    assert!(text.contains(&frame.tiers[2].trouble), "{text}");
}

#[test]
fn who_reads_of_the_optimum_is_told_what_it_leaves_out() {
    let note = "hits include those from redis; the optimum";
    let frame = busy();
    assert!(to_text(&frame, false).contains(note));
    let curves = Look { view: View::Curves, ..Look::default() };
    assert!(shown(&frame, &curves, 80, 40).contains(note));
    let alone = FrameReply { tiers: frame.tiers[..2].to_vec(), ..frame };
    assert!(
        !to_text(&alone, false).contains("hits include") && !shown(&alone, &curves, 80, 40).contains("hits include")
    );
}

#[test]
fn blocks_that_no_index_counts_are_not_told_as_none() {
    let tiers = shown(&busy(), &Look { view: View::Tiers, ..Look::default() }, 100, 40);
    assert!(tiers.contains("  holds unknown, - blocks\n"), "{tiers}");
}

#[test]
fn nothing_that_others_chose_reaches_the_terminal_as_a_command() {
    let mut frame = busy();
    frame.engines[0].engine_id += "\x1b[2J";
    frame.tiers[2].trouble += "\x1b[31m";
    for view in [View::Answer, View::Engines, View::Tiers] {
        let text = shown(&frame, &Look { view, ..Look::default() }, 120, 40);
        assert!(!text.contains('\x1b'), "{text:?}");
    }
    assert!(shown(&frame, &Look::default(), 120, 40).contains("qwen-32b\\u{1b}[2J"), "it is told, as text");
    let coloured = to_text(&frame, true);
    assert!(coloured.contains("\x1b[31mALARM") && !coloured.contains("\x1b[2J"), "{coloured:?}");
}

#[test]
fn every_size_is_filled_and_no_line_is_too_long() {
    let frame = busy();
    let many = FrameReply { engines: vec![engine(&"x".repeat(64), "ready", (4, 4), 1.0); 128], ..frame.clone() };
    for frame in [&frame, &many, &FrameReply::default()] {
        for width in [40, 79, 80, 81, 100, 131, 300] {
            for height in [8, 9, 23, 24, 25, 33, 40, 100] {
                for view in [View::Answer, View::Misses, View::Curves, View::Engines, View::Tiers, View::Help] {
                    let look = Look { view, ..Look::default() };
                    assert_eq!(shown(frame, &look, width, height).lines().count(), height);
                }
            }
        }
    }
    let text = shown(&many, &Look::default(), 80, 24);
    assert!(text.contains(" more\n") && text.contains("MEMORY %"), "those who do not fit are counted:\n{text}");
}

#[test]
fn a_daemon_that_nobody_uses_is_well_and_says_what_it_does_not_know() {
    let pool = FramePool { capacity_bytes: 200 * GIB, ..FramePool::default() };
    let frame = FrameReply { is_live: true, is_ready: true, pool: Some(pool), ..FrameReply::default() };
    let text = shown(&frame, &Look::default(), 80, 24);
    for part in ["OK  ", "no key has missed", "no sample yet", "no engine is connected", "too little traffic"] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}

#[test]
fn a_daemon_that_is_gone_is_said_first_and_its_figures_stay() {
    let look = Look { gone: Some("cannot reach the daemon; for 12 s".to_owned()), is_paused: true, ..Look::default() };
    let text = shown(&busy(), &look, 80, 24);
    let second = text.lines().nth(1).unwrap();
    assert!(second.starts_with("NO DAEMON  cannot reach") && text.contains("PAUSED") && text.contains("71.3 %"));
}

#[test]
fn a_stuck_or_draining_daemon_is_not_called_well() {
    for (is_live, head) in [(false, "STUCK  core"), (true, "NOT READY  core")] {
        let checks = vec![check("core", "fail", "ticked 5000 ms ago")];
        let frame = FrameReply { is_live, checks, ..FrameReply::default() };
        let text = shown(&frame, &Look::default(), 80, 24);
        assert!(text.contains(head) && !text.contains("OK  "), "{text}");
    }
}

#[test]
fn a_filter_leaves_the_names_that_have_it_and_the_order_is_the_chosen_one() {
    let frame = busy();
    let engines = |look: &Look| {
        let text = shown(&frame, look, 120, 40);
        let places = ["llama-70b-a", "llama-70b-b", "warm-up"].map(|id| text.find(id));
        (places.map(|place| place.is_some()), places)
    };
    let filtered = Look { filter: "70B-a".to_owned(), ..Look::default() };
    assert_eq!(engines(&filtered).0, [true, false, false]);
    let nobody = Look { filter: "zzz".to_owned(), ..Look::default() };
    assert!(shown(&frame, &nobody, 120, 40).contains("no name has `zzz`"));
    let by_rate = Look { sort: look::Sort::HitRate, view: View::Engines, ..Look::default() };
    assert!(engines(&by_rate).1[2] < engines(&by_rate).1[0], "the one with 90 % comes first");
    let tenants = shown(&frame, &Look { who: Who::Tenants, ..Look::default() }, 120, 40);
    assert!(tenants.contains("blue") && tenants.contains("(none)") && !tenants.contains("llama-70b-a"));
    let namespaces = shown(&frame, &Look { who: Who::Namespaces, ..Look::default() }, 120, 40);
    assert!(namespaces.contains("01234567   llama-70b "), "{namespaces}");
}

#[test]
fn a_line_a_second_stands_under_its_heading() {
    let (head, line) = (heads(&LINES).to_text(), one_line(&busy()));
    assert!(line.ends_with("hit rate fell; warn: redis") && line.contains("11.2 k   41.2 %   43.5 %"), "{line}");
    assert_eq!(head.find("NOTE"), line.find("hit rate fell"), "{head}\n{line}");
}
