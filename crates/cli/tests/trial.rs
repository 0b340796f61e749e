//! `bench lookup` and `doctor` beside a daemon in use, with a Redis and a shared directory below: nothing stays behind.

mod command;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod servers;
mod support;

use std::path::Path;
use std::process::Stdio;

use command::{forebay, run};
use serde_json::Value;
use servers::{Kind, Server};
use support::tiers::*;
use support::*;

fn sockets(place: &Place) -> String {
    place.sockets().to_str().expect("a path in UTF-8").to_owned()
}

fn ask(command: &str, place: &Place) -> Value {
    run(&[command, "--json", "--socket.directory", &sockets(place)]).json()
}

/// What an operator could find of a client afterwards.
fn traces(place: &Place, server: &Server, directory: &Path, daemon: &Daemon) -> Vec<String> {
    let inspect = ask("inspect", place);
    let mut seen: Vec<String> =
        ["namespaces", "sessions", "classes", "pinned_bytes"].map(|part| inspect[part].to_string()).into();
    seen.push(ask("advise", place).to_string());
    seen.push(server.admin().must(&["DBSIZE"]));
    seen.push(format!("{:?}", entries(directory)));
    seen.push(daemon.log());
    let parts =
        ["lookup", "stored", "pool_slots", "sampled", "put_bytes", "get_bytes", "evicted", "reserved", "unstored"];
    let counted = parts.map(|part| format!("forebay_{part}"));
    let metrics = daemon.page("/metrics");
    seen.extend(
        metrics.lines().filter(|line| counted.iter().any(|name| line.starts_with(name.as_str()))).map(str::to_owned),
    );
    seen
}

fn entries(directory: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![directory.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
            found.push(entry.path().display().to_string());
            folders.extend(entry.file_type().expect("a kind").is_dir().then(|| entry.path()));
        }
    }
    found.sort();
    found
}

#[test]
fn diagnostics_leave_nothing_in_the_pool_the_tiers_the_counts_and_the_log() {
    let (server, place) = (Server::start(Kind::Redis), Place::new());
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (url, path) = (server.url(), home.path().to_str().expect("a path in UTF-8"));
    let arguments = ["--tier.fs.directories", path, "--tier.redis.urls", &url, "--http.address", "127.0.0.1:0"];
    let (daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..20);
    is_served(&client, &worker, namespace, 0..20);
    // A thread of low priority counts lookups: at rest is a daemon that has counted the one above.
    wait_until("the lookup is counted", || daemon.page("/metrics").contains("\nforebay_sampled_keys 20\n"));
    let mut before = traces(&place, &server, home.path(), &daemon);
    wait_until("the daemon is at rest", || {
        let earlier = std::mem::replace(&mut before, traces(&place, &server, home.path(), &daemon));
        earlier == before
    });
    let directory = sockets(&place);
    let bench = ["bench", "lookup", "--keys", "3000", "--rounds", "10", "--socket.directory", &directory];
    let answer = run(&bench);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert_eq!(traces(&place, &server, home.path(), &daemon), before, "after bench lookup");
    let pool = place.pool().display().to_string();
    let answer = run(&["doctor", "--socket.directory", &directory, "--pool.directory", &pool]);
    assert!(answer.out.contains("; nothing of it is left\n"), "{answer:?}");
    assert_eq!(traces(&place, &server, home.path(), &daemon), before, "after doctor");
    is_served(&client, &worker, namespace, 0..20);
}

/// As the pool of a host that has served for a while is.
#[test]
fn diagnostics_evict_no_block_of_a_full_pool() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"]);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..1500);
    let evicted = || {
        let metrics = daemon.page("/metrics");
        let line = metrics.lines().find(|line| line.starts_with("forebay_evicted_blocks_total ")).map(str::to_owned);
        line.expect("it is counted")
    };
    let before = evicted();
    assert_ne!(before, "forebay_evicted_blocks_total 0", "the pool is full");
    let directory = sockets(&place);
    let answer = run(&["doctor", "--socket.directory", &directory]);
    assert!(answer.out.contains("ok    self-test") && answer.out.contains("no block is evicted"), "{answer:?}");
    let answer = run(&["bench", "lookup", "--socket.directory", &directory]);
    answer.assert_refused(1, "too little free memory");
    assert_eq!(evicted(), before);
}

/// The one who measures is killed: the daemon itself removes what it stored.
#[test]
fn a_measurement_that_is_killed_leaves_nothing_either() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "64MiB"]);
    let directory = sockets(&place);
    let bench = ["bench", "lookup", "--rounds", "100000000", "--keys", "100", "--socket.directory", &directory];
    let mut child = forebay(&bench).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let ready = |inspect: &Value| inspect["namespaces"][0]["groups"][0]["ready_blocks"] == 100;
    wait_until("the blocks are stored", || ready(&ask("inspect", &place)));
    let fields = ask("inspect", &place)["namespaces"][0]["fields"].clone();
    assert_eq!(fields["purpose"], "bench lookup", "{fields}");
    child.kill().expect("it is ours");
    child.wait().expect("it ends");
    let is_gone = || {
        let inspect = ask("inspect", &place);
        ["namespaces", "sessions", "classes"].iter().all(|part| inspect[*part] == Value::Array(Vec::new()))
    };
    wait_until("the daemon has removed it", is_gone);
}

/// A daemon that is killed meanwhile drops the blocks when it starts again.
#[test]
fn the_blocks_of_a_trial_do_not_survive_the_daemon() {
    let place = Place::new();
    let arguments = ["--pool.capacity_bytes", "64MiB"];
    let daemon = Daemon::start(&place, &arguments);
    let directory = sockets(&place);
    let bench = ["bench", "lookup", "--rounds", "100000000", "--keys", "100", "--socket.directory", &directory];
    let mut child = forebay(&bench).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let ready = |inspect: &Value| inspect["namespaces"][0]["groups"][0]["ready_blocks"] == 100;
    wait_until("the blocks are stored", || ready(&ask("inspect", &place)));
    daemon.kill();
    assert!(!child.wait().expect("it ends").success());
    let _daemon = Daemon::start(&place, &arguments);
    let inspect = ask("inspect", &place);
    assert_eq!(inspect["namespaces"], Value::Array(Vec::new()), "{inspect:#}");
    assert!(inspect["classes"].as_array().into_iter().flatten().all(|class| class["ready"] == 0), "{inspect:#}");
}
