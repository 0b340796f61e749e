//! Benchmarks print what they promise: one object, with every row, and no private daemon afterwards.
//!
//! Small rounds: the figures themselves are not judged here.

mod rig;

use rig::{Daemon, run};
use serde_json::Value;

fn rows(report: &Value, bench: &str) -> Vec<Value> {
    assert_eq!(report["bench"], bench);
    assert!(report["version"].as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION")));
    assert!(report["command"].as_str().unwrap().starts_with(&format!("forebay bench {bench} ")));
    assert!(report["machine"]["memory_bytes"].as_u64().unwrap() > 0);
    report["rows"].as_array().unwrap().clone()
}

fn leavings() -> usize {
    let ours = |directory| {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("forebay-bench-")).count()
    };
    ours("/dev/shm") + ours("/tmp")
}

#[test]
fn lookups_are_measured_on_a_private_daemon_that_is_gone_afterwards() {
    let before = leavings();
    let report = run(&["bench", "lookup", "--rounds", "20", "--keys", "16", "--keys", "64", "--json"]).json();
    let rows = rows(&report, "lookup");
    let varied: Vec<_> = rows.iter().map(|row| (row["op"].as_str().unwrap(), row["keys"].as_u64().unwrap())).collect();
    assert_eq!(varied, [("hit", 16), ("hit", 64), ("miss", 16), ("miss", 64)]);
    for row in &rows {
        assert_eq!(row["errors"], 0, "{row}");
        let [p50, p99] = ["p50_us", "p99_us"].map(|name| row[name].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99, "{row}");
    }
    assert_eq!(leavings(), before);
}

#[test]
fn lookups_can_be_measured_on_a_running_daemon_which_keeps_nothing() {
    let daemon = Daemon::start();
    let flags = ["bench", "lookup", "--rounds", "5", "--keys", "100", "--socket.directory", daemon.socket_directory()];
    let answer = run(&flags);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(
        answer.out.starts_with("op    keys  lookups  p50 us  p99 us  max us  errors\nhit    100        5 "),
        "{}",
        answer.out
    );
    let inspect = daemon.ask("inspect", &["--json"]).json();
    assert_eq!(inspect["namespaces"][0]["groups"][0]["ready_blocks"], 0, "{inspect:#}");
    assert_eq!((&inspect["pinned_bytes"], inspect["sessions"].as_array().unwrap().len()), (&0.into(), 0));
}

#[test]
fn copies_are_measured_both_ways_for_each_shape() {
    let flags = ["bench", "copy", "--pairs", "1", "--threads", "1", "--working-set-bytes", "33554432", "--json"];
    let report = run(&flags).json();
    let rows = rows(&report, "copy");
    let stores = rows.iter().filter(|row| row["direction"] == "store").count();
    assert!(stores > 0 && 2 * stores == rows.len(), "{report:#}");
    for row in &rows {
        assert!(row["ratio"].as_f64().unwrap() > 0.0 && row["threads"] == 1, "{row}");
    }
}
