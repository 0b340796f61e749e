//! `forebay doctor` on this machine: without a daemon, beside the leavings of one, and with one.

mod rig;

use rig::{Answer, Daemon, forebay};
use serde_json::Value;

fn doctor(daemon: &Daemon, more: &[&str]) -> Answer {
    let mut command = forebay(&["doctor"]);
    Answer::of(command.args(daemon.flags()).args(more).output().unwrap())
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no `{name}` in {report:#}"))
}

#[test]
fn without_a_daemon_the_machine_is_judged_and_nothing_is_left_behind() {
    let daemon = Daemon::absent();
    let report = doctor(&daemon, &["--json"]).json();
    assert_eq!(check(&report, "memory")["verdict"], "ok");
    let pages = check(&report, "huge pages");
    assert!(pages["finding"].as_str().unwrap().starts_with("the pool would lie on"), "{pages}");
    let socket = check(&report, "socket");
    assert_eq!(socket["verdict"], "warn");
    assert!(socket["hint"].as_str().unwrap().contains("forebay serve"));
    for directory in [daemon.pool_directory(), daemon.socket_directory()] {
        assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0, "{directory}");
    }
    let text = doctor(&daemon, &[]).out;
    assert!(text.contains("\nwarn  socket      no daemon at `"), "{text}");
}

#[test]
fn the_socket_of_a_killed_daemon_is_told_from_a_living_one() {
    let mut daemon = Daemon::start();
    daemon.kill();
    let report = doctor(&daemon, &["--json"]).json();
    assert!(check(&report, "socket")["finding"].as_str().unwrap().ends_with("left behind by a daemon that is gone"));
    // What the dead daemon's pool holds is not asked for a second time.
    let memory = check(&report, "memory")["finding"].as_str().unwrap();
    assert!(memory.ends_with("of the pool's 64.0 MiB there are 64.0 MiB"), "{memory}");
}

#[test]
fn a_running_daemon_is_tested_with_a_block_of_its_own_that_is_purged() {
    let daemon = Daemon::start();
    let answer = doctor(&daemon, &[]);
    assert_eq!(answer.code, 0, "{answer:?}");
    for line in [
        "ok    socket      a daemon listens at `",
        "ok    versions    this program and the daemon speak",
        "ok    self-test",
    ] {
        assert!(answer.out.contains(line), "{line} is not in {}", answer.out);
    }
    let report = doctor(&daemon, &["--json"]).json();
    let pages = check(&report, "huge pages")["finding"].as_str().unwrap();
    assert!(pages.ends_with(" of 64 MiB are on huge pages"), "{pages}");
    let inspect = daemon.ask("inspect", &["--json"]).json();
    let namespaces = inspect["namespaces"].as_array().unwrap();
    let ready = |namespace: &Value| namespace["groups"][0]["ready_blocks"].as_u64().unwrap_or(0);
    assert_eq!(namespaces.iter().map(ready).sum::<u64>(), 0, "{inspect:#}");
    assert_eq!(inspect["pinned_bytes"], 0);
}

#[test]
fn a_pool_that_cannot_be_is_a_failure_and_the_exit_code_says_so() {
    let daemon = Daemon::absent();
    let too_large = doctor(&daemon, &["--pool.capacity_bytes", "1TiB", "--json"]);
    assert_eq!(too_large.code, 2, "a flag given twice is refused: {too_large:?}");
    let sockets = daemon.socket_directory();
    let run = |flags: &[&str]| rig::run(&[&["doctor", "--socket.directory", sockets, "--json"], flags].concat());
    let too_large = run(&["--pool.directory", daemon.pool_directory(), "--pool.capacity_bytes", "1TiB"]);
    assert_eq!(too_large.code, 1);
    let report: Value = serde_json::from_str(&too_large.out).unwrap();
    assert_eq!((&report["verdict"], &check(&report, "memory")["verdict"]), (&"fail".into(), &"fail".into()));
    let nowhere = run(&["--pool.directory", "/proc/forebay", "--pool.capacity_bytes", "64MiB"]);
    let report: Value = serde_json::from_str(&nowhere.out).unwrap();
    assert_eq!((nowhere.code, &check(&report, "huge pages")["verdict"]), (1, &"fail".into()), "{report:#}");
}
