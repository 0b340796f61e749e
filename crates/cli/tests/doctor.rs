//! `forebay doctor` on this machine: without a daemon, beside the leavings of one, and with one.

mod command;
mod support;

use std::io::{Read, Write};
use std::net::TcpListener;

use command::{Answer, forebay};
use serde_json::Value;
use support::{Daemon, Place, wait_until};

const CAPACITY: &[&str] = &["--pool.capacity_bytes", "64MiB"];

fn doctor(place: &Place, more: &[&str]) -> Answer {
    let mut command = forebay(&["doctor", "--socket.directory"]);
    command.arg(place.sockets()).arg("--pool.directory").arg(place.pool());
    Answer::of(command.args(CAPACITY).args(more).output().unwrap())
}

fn start(place: &Place) -> Daemon {
    Daemon::start(place, CAPACITY)
}

fn report(answer: &Answer) -> Value {
    serde_json::from_str(&answer.out).unwrap_or_else(|error| panic!("{error} in {answer:?}"))
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no `{name}` in {report:#}"))
}

fn finding<'a>(report: &'a Value, name: &str) -> &'a str {
    check(report, name)["finding"].as_str().unwrap()
}

#[test]
fn without_a_daemon_the_machine_is_judged_and_nothing_is_left_behind() {
    let place = Place::new();
    let json = doctor(&place, &["--json"]).json();
    assert_eq!(check(&json, "memory")["verdict"], "ok");
    assert!(finding(&json, "huge pages").starts_with("the pool would be on"), "{json:#}");
    assert_eq!(check(&json, "socket")["verdict"], "warn");
    assert!(check(&json, "socket")["hint"].as_str().unwrap().contains("forebay serve"));
    assert!(!place.pool().exists() && !place.sockets().exists());
    let beside = std::fs::read_dir(place.pool().parent().unwrap()).unwrap().count();
    assert_eq!(beside, 0, "the trial pool is still there");
    let text = doctor(&place, &[]).out;
    assert!(text.contains("\nwarn  socket      no daemon at `"), "{text}");
}

#[test]
fn the_socket_of_a_killed_daemon_is_told_from_a_living_one() {
    let place = Place::new();
    start(&place).kill();
    let json = doctor(&place, &["--json"]).json();
    assert!(finding(&json, "socket").ends_with("left behind by a daemon that has ended"), "{json:#}");
    // What the dead daemon's pool holds is not asked of the machine a second time.
    assert!(finding(&json, "memory").ends_with("64.0 MiB of the pool's 64.0 MiB are there already"), "{json:#}");
}

#[test]
fn a_running_daemon_is_tested_with_a_block_of_its_own_that_is_purged() {
    let place = Place::new();
    let _daemon = start(&place);
    let answer = doctor(&place, &[]);
    assert_eq!(answer.code, 0, "{answer:?}");
    for line in
        ["ok    socket      a daemon listens at `", "ok    versions    this program and the daemon", "ok    self-test"]
    {
        assert!(answer.out.contains(line), "{line} is not in {}", answer.out);
    }
    let json = doctor(&place, &["--json"]).json();
    assert!(finding(&json, "huge pages").ends_with(" of 64 MiB are on huge pages"), "{json:#}");
    let mut inspect = forebay(&["inspect", "--json", "--socket.directory"]);
    let inspect = Answer::of(inspect.arg(place.sockets()).output().unwrap()).json();
    let ready = |namespace: &Value| namespace["groups"][0]["ready_blocks"].as_u64().unwrap_or(0);
    assert_eq!(inspect["namespaces"].as_array().unwrap().iter().map(ready).sum::<u64>(), 0, "{inspect:#}");
    assert_eq!(inspect["pinned_bytes"], 0);
}

#[test]
fn a_pool_that_cannot_be_is_a_failure_and_the_exit_code_says_so() {
    let place = Place::new();
    let too_large = doctor(&place, &["--pool.capacity_bytes", "8TiB", "--json"]);
    assert_eq!((too_large.code, &report(&too_large)["verdict"]), (1, &"fail".into()));
    assert_eq!(check(&report(&too_large), "memory")["verdict"], "fail");
    let nowhere = doctor(&place, &["--pool.directory", "/proc/forebay", "--json"]);
    assert_eq!((nowhere.code, &check(&report(&nowhere), "huge pages")["verdict"]), (1, &"fail".into()), "{nowhere:?}");
}

/// A server that is absent, then refuses: every place where an operator looks names it, and says what is wrong.
#[test]
fn a_store_in_trouble_is_named_with_its_trouble() {
    let place = Place::new();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("redis://{address}");
    let daemon =
        Daemon::start(&place, &[CAPACITY, &["--tier.redis.urls", &url, "--http.address", "127.0.0.1:0"]].concat());
    let trouble = || {
        let mut command = forebay(&["inspect", "--json", "--socket.directory"]);
        let tier = Answer::of(command.arg(place.sockets()).output().unwrap()).json()["tiers"][0].clone();
        (tier["why"].to_string(), tier["stores"][0]["trouble"].to_string())
    };
    let is_told = |what: &str| {
        wait_until(what, || {
            let (why, trouble) = trouble();
            why.contains(what) && trouble.contains(what)
        });
        let report = report(&doctor(&place, &["--json", "--tier.redis.urls", &url]));
        assert_eq!(check(&report, "redis")["verdict"], "warn", "{report:#}");
        assert!(finding(&report, "redis").contains(what), "{report:#}");
        assert!(daemon.page("/readyz").contains(what));
    };
    is_told("Connection refused");
    wait_until("the log says so", || daemon.log().contains("the tier is sick"));
    assert!(daemon.log().contains("Connection refused"), "{}", daemon.log());
    let metrics = daemon.page("/metrics");
    assert!(
        metrics.contains(&format!("forebay_shared_store_healthy{{tier=\"redis\",store=\"{address}\"}} 0")),
        "{metrics}"
    );

    let listener = TcpListener::bind(address).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                // Each command is refused, until the other side has had enough.
                while stream.read(&mut [0; 512]).is_ok_and(|count| count > 0)
                    && stream.write_all(b"-WRONGPASS invalid password\r\n").is_ok()
                {}
            });
        }
    });
    is_told("WRONGPASS");
}
