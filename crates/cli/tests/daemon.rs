//! Commands against the shipped daemon: what it holds, purging, its end, and starts that must be refused.

mod rig;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use forebay_core::namespace::Descriptor;
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::proto::{Block, CommitOutcome};
use rig::{Answer, CAPACITY_BYTES, Daemon, run};

const BLOCK_BYTES: u64 = 16 << 10;

fn fields(tenant: &str) -> BTreeMap<String, String> {
    [("model", "tiny"), ("tenant", tenant)]
        .into_iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

fn id_of(tenant: &str) -> String {
    Descriptor::new(fields(tenant)).unwrap().id().to_string()
}

/// Stores `count` blocks for `tenant`, and says goodbye.
fn store(daemon: &Daemon, tenant: &str, count: u8) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::new(daemon.socket_directory(), format!("test-{tenant}"), Duration::from_secs(10));
        let groups = [GroupBytes { group: 0, bytes: BLOCK_BYTES }];
        let namespace = client.open_namespace(fields(tenant), groups).await.unwrap();
        let block = |number: u8| Block { hash: vec![number; 8], data: vec![number; BLOCK_BYTES as usize] };
        let outcomes = client.put(namespace, 0, &[], (1..=count).map(block).collect()).await.unwrap();
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
    });
}

/// Ready blocks by namespace id, as `inspect` tells.
fn ready(daemon: &Daemon) -> BTreeMap<String, u64> {
    let json = daemon.ask("inspect", &["--json"]).json();
    let entry = |namespace: &serde_json::Value| {
        let groups = namespace["groups"].as_array().unwrap();
        let ready = groups.iter().map(|group| group["ready_blocks"].as_u64().unwrap()).sum();
        (namespace["namespace_id"].as_str().unwrap().to_string(), ready)
    };
    json["namespaces"].as_array().unwrap().iter().map(entry).filter(|(_, ready)| *ready > 0).collect()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn inspect_shows_what_was_stored_and_purge_drops_it() {
    let daemon = Daemon::start();
    store(&daemon, "red", 3);
    store(&daemon, "blue", 5);
    store(&daemon, "", 7);
    let all = BTreeMap::from([(id_of("red"), 3), (id_of("blue"), 5), (id_of(""), 7)]);
    assert_eq!(ready(&daemon), all);
    let text = daemon.ask("inspect", &[]).out;
    assert!(text.contains(&format!("namespace {}\n  model=tiny\n  tenant=blue\n", id_of("blue"))), "{text}");
    assert!(text.contains("0  16.0 KiB      5  80.0 KiB\n"), "{text}");
    assert!(text.contains("capacity    64.0 MiB\npopulated   64.0 MiB\n"), "{text}");

    let purged = daemon.ask("purge", &["--tenant", "blue"]);
    assert_eq!((purged.code, purged.out.as_str()), (0, "purged 5 blocks, 80.0 KiB\n"), "{purged:?}");
    assert_eq!(ready(&daemon), BTreeMap::from([(id_of("red"), 3), (id_of(""), 7)]));
    let purged = daemon.ask("purge", &["--namespace", &id_of("red"), "--json"]).json();
    assert_eq!((purged["purged_blocks"].as_u64(), purged["held_blocks"].as_u64()), (Some(3), Some(0)));
    assert_eq!(purged["purged_bytes"], 3 * BLOCK_BYTES);
    // An empty name means the blocks without a tenant, not all blocks.
    store(&daemon, "red", 3);
    assert_eq!(daemon.ask("purge", &["--tenant", "", "--json"]).json()["purged_blocks"], 7);
    assert_eq!(ready(&daemon), BTreeMap::from([(id_of("red"), 3)]));
}

#[test]
fn blocks_are_there_again_after_the_daemon_was_killed() {
    let mut daemon = Daemon::start();
    store(&daemon, "red", 9);
    daemon.kill();
    daemon.ask("inspect", &[]).assert_refused(1, "cannot reach the daemon");
    // The socket it left behind is no obstacle.
    daemon.launch(&[]);
    daemon.wait_until_populated();
    assert_eq!(ready(&daemon), BTreeMap::from([(id_of("red"), 9)]));
}

#[test]
fn sigterm_drains_and_leaves_no_socket_but_the_pool() {
    let mut daemon = Daemon::start();
    let http = daemon.http_address();
    assert!(get(&http, "/readyz").contains(" 200 OK"));
    let metrics = get(&http, "/metrics");
    assert!(metrics.contains(&format!("forebay_pool_capacity_bytes {CAPACITY_BYTES}\n")), "{metrics}");
    store(&daemon, "red", 4);
    assert!(get(&http, "/metrics").contains("forebay_stored_blocks_total 4\n"));
    assert!(daemon.terminate().success());
    let left: Vec<_> =
        std::fs::read_dir(daemon.socket_directory()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["log"]);
    daemon.launch(&[]);
    daemon.wait_until_populated();
    assert_eq!(ready(&daemon), BTreeMap::from([(id_of("red"), 4)]));
}

#[test]
fn the_log_is_one_line_an_event() {
    let mut daemon = Daemon::start();
    daemon.terminate();
    for line in daemon.log().lines() {
        assert!(line.starts_with("20") && line.contains(" INFO forebay_"), "{line}");
        assert!(!line.contains('\u{1b}'), "colour in {line:?}");
    }
}

/// What `serve` says when it must not start.
fn refusal(daemon: &Daemon, more: &[&str]) -> Answer {
    Answer::of(daemon.serve(more).output().unwrap())
}

#[test]
fn two_daemons_never_share_sockets_or_a_pool() {
    let first = Daemon::start();
    let second = Daemon::absent();
    refusal(&first, &[]).assert_refused(1, "");
    let other_sockets = ["--socket.directory", second.socket_directory(), "--pool.directory", first.pool_directory()];
    let serve =
        |flags: &[&str]| run(&[&["serve", "--pool.capacity_bytes", "64MiB", "--http.address", "off"], flags].concat());
    serve(&other_sockets).assert_refused(1, "");
    // The first one did not notice.
    store(&first, "red", 1);
    assert_eq!(ready(&first), BTreeMap::from([(id_of("red"), 1)]));
}

#[test]
fn a_machine_that_cannot_hold_the_pool_is_an_error_with_a_hint() {
    let daemon = Daemon::absent();
    let serve = |flags: &[&str]| {
        let all =
            [&["serve", "--socket.directory", daemon.socket_directory(), "--http.address", "off"], flags].concat();
        run(&all)
    };
    serve(&["--pool.directory", daemon.pool_directory(), "--pool.capacity_bytes", "8TiB"]).assert_refused(1, "");
    serve(&["--pool.directory", "/proc/forebay", "--pool.capacity_bytes", "64MiB"]).assert_refused(1, "/proc/forebay");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let flags =
        ["--pool.directory", daemon.pool_directory(), "--pool.capacity_bytes", "64MiB", "--http.address", &address];
    let all = [&["serve", "--socket.directory", daemon.socket_directory()][..], &flags].concat();
    run(&all).assert_refused(1, &address);
}

#[test]
fn a_socket_directory_that_cannot_be_used_is_an_error_with_a_hint() {
    let daemon = Daemon::absent();
    let with = |directory: &str| {
        let pool =
            ["--pool.directory", daemon.pool_directory(), "--pool.capacity_bytes", "64MiB", "--http.address", "off"];
        run(&[&["serve", "--socket.directory", directory][..], &pool].concat())
    };
    with("/proc/forebay").assert_refused(1, "/proc/forebay");
    let file = tempfile::NamedTempFile::new().unwrap();
    with(file.path().to_str().unwrap()).assert_refused(1, file.path().to_str().unwrap());
    with(&format!("/tmp/{}", "x".repeat(100))).assert_refused(2, "`socket.directory` cannot be");
}

#[test]
fn a_file_that_is_no_socket_is_never_removed() {
    let daemon = Daemon::absent();
    let path = format!("{}/forebay.sock", daemon.socket_directory());
    std::fs::write(&path, "precious").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    refusal(&daemon, &[]).assert_refused(1, &path);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}
