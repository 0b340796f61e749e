//! Commands and pages of the shipped daemon: what it holds, what purging drops, and starts that must be refused.

mod command;
mod support;

use std::collections::BTreeMap;
use std::net::TcpListener;

use command::{Answer, forebay, run};
use forebay_core::namespace::Descriptor;
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::proto::{AttachRequest, Block, CommitOutcome};
use serde_json::Value;
use support::{DEADLINE, Daemon, Place, Worker, runtime, wait_until};

const CAPACITY: &[&str] = &["--pool.capacity_bytes", "64MiB"];
const BLOCK_BYTES: u64 = 16 << 10;

/// A command to the daemon of this place.
fn ask(place: &Place, command: &str, more: &[&str]) -> Answer {
    let mut command = forebay(&[command, "--socket.directory"]);
    Answer::of(command.arg(place.sockets()).args(more).output().unwrap())
}

fn start(place: &Place, more: &[&str]) -> Daemon {
    Daemon::start(place, &[CAPACITY, more].concat())
}

fn fields(tenant: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("model".to_string(), "tiny".to_string()), ("tenant".to_string(), tenant.to_string())])
}

fn id_of(tenant: &str) -> String {
    Descriptor::new(fields(tenant)).unwrap().id().to_string()
}

/// Stores `count` blocks for `tenant`, and says goodbye.
fn store(place: &Place, tenant: &str, count: u8) {
    runtime().block_on(async {
        let mut client = Client::new(place.sockets(), format!("test-{tenant}"), DEADLINE);
        let groups = [GroupBytes { group: 0, bytes: BLOCK_BYTES }];
        let namespace = client.open_namespace(fields(tenant), groups).await.unwrap();
        let block = |number: u8| Block { hash: vec![number; 8], data: vec![number; BLOCK_BYTES as usize] };
        let outcomes = client.put(namespace, 0, &[], (1..=count).map(block).collect()).await.unwrap();
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
    });
}

/// Ready blocks by namespace, where there are any.
fn ready(place: &Place) -> BTreeMap<String, u64> {
    let entry = |namespace: &Value| {
        let groups = namespace["groups"].as_array().unwrap();
        let ready = groups.iter().map(|group| group["ready_blocks"].as_u64().unwrap()).sum();
        (namespace["namespace_id"].as_str().unwrap().to_string(), ready)
    };
    let json = ask(place, "inspect", &["--json"]).json();
    json["namespaces"].as_array().unwrap().iter().map(entry).filter(|(_, ready)| *ready > 0).collect()
}

#[test]
fn inspect_shows_what_was_stored_and_purge_drops_it() {
    let place = Place::new();
    let _daemon = start(&place, &[]);
    for (tenant, count) in [("red", 3), ("blue", 5), ("", 7)] {
        store(&place, tenant, count);
    }
    assert_eq!(ready(&place), BTreeMap::from([(id_of("red"), 3), (id_of("blue"), 5), (id_of(""), 7)]));
    let text = ask(&place, "inspect", &[]).out;
    assert!(text.contains(&format!("namespace {}\n  model=tiny\n  tenant=blue\n", &id_of("blue")[..8])), "{text}");
    assert!(text.contains("    0  16.0 KiB      5  80.0 KiB\n"), "{text}");
    assert!(text.contains("capacity    64.0 MiB\npopulated   64.0 MiB\n"), "{text}");

    let purged = ask(&place, "purge", &["--tenant", "blue"]);
    assert_eq!(
        (purged.code, purged.out.as_str()),
        (0, "5 blocks, 80.0 KiB, were removed from the pool\n"),
        "{purged:?}"
    );
    assert_eq!(ready(&place), BTreeMap::from([(id_of("red"), 3), (id_of(""), 7)]));
    let typo = ask(&place, "purge", &["--tenant", "bleu"]);
    assert!(typo.code == 1 && typo.err.contains("knows no namespace of the tenant"), "{typo:?}");
    let purged = ask(&place, "purge", &["--namespace", &id_of("red"), "--json"]).json();
    assert_eq!((&purged["purged_blocks"], &purged["held_blocks"]), (&3.into(), &0.into()));
    assert_eq!(purged["purged_bytes"], 3 * BLOCK_BYTES);
    // An empty name means the blocks without a tenant, not all blocks.
    store(&place, "red", 3);
    assert_eq!(ask(&place, "purge", &["--tenant", "", "--json"]).json()["purged_blocks"], 7);
    assert_eq!(ready(&place), BTreeMap::from([(id_of("red"), 3)]));
}

#[test]
fn without_a_daemon_commands_say_how_to_get_one() {
    let place = Place::new();
    for (command, more) in [("inspect", &[][..]), ("purge", &["--tenant", "red"])] {
        ask(&place, command, more).assert_refused(1, "cannot reach the daemon");
    }
}

#[test]
fn the_pages_tell_what_the_daemon_did() {
    let place = Place::new();
    let daemon = start(&place, &["--http.address", "127.0.0.1:0"]);
    for page in ["/livez", "/readyz"] {
        assert!(daemon.page(page).starts_with("HTTP/1.1 200 OK"), "{page}");
    }
    store(&place, "red", 4);
    let metrics = daemon.page("/metrics");
    for line in [
        "forebay_pool_capacity_bytes 67108864",
        "forebay_pool_populated_bytes 67108864",
        "forebay_pool_slots{slot_bytes=\"16384\",state=\"ready\"} 4",
        "forebay_stored_blocks_total 4",
        "forebay_stored_bytes_total 65536",
        "forebay_put_bytes_total 65536",
        "forebay_namespaces 1",
        "forebay_pool_pinned_bytes 0",
    ] {
        assert!(metrics.lines().any(|other| other == line), "{line} is not in\n{metrics}");
    }
}

#[test]
fn the_log_is_one_line_an_event_without_colour() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    store(&place, "red", 1);
    let log = daemon.log();
    let (first, rest) = log.split_once('\n').expect("lines");
    assert!(!rest.is_empty());
    // It tells which build runs.
    let version = command::run(&["version"]).out;
    let version = version.lines().next().and_then(|line| line.strip_prefix("forebay ")).expect("the program's own");
    let of_build = format!(" INFO forebay::serve: starting version=\"{version}\"");
    for (line, begins) in
        std::iter::once((first, &of_build[..])).chain(rest.lines().map(|line| (line, " INFO forebay_")))
    {
        assert!(line.starts_with("20") && line.contains(begins) && !line.contains('\u{1b}'), "{line:?}");
    }
}

/// What `serve` says when it must not start. The last flag of a name counts.
fn refusal(place: &Place, more: &[&str]) -> Answer {
    let mut command = forebay(&["serve", "--http.address", "off"]);
    command.arg("--socket.directory").arg(place.sockets()).arg("--pool.directory").arg(place.pool());
    Answer::of(command.args(CAPACITY).args(more).output().unwrap())
}

#[test]
fn a_pool_that_cannot_be_is_refused_with_a_hint() {
    let place = Place::new();
    refusal(&place, &["--pool.capacity_bytes", "8TiB"]).assert_refused(1, "TiB for the pool");
    refusal(&place, &["--pool.directory", "/proc/forebay"]).assert_refused(1, "/proc/forebay");
    let file = tempfile::NamedTempFile::new().unwrap();
    refusal(&place, &["--pool.directory", file.path().to_str().unwrap()])
        .assert_refused(1, file.path().to_str().unwrap());
}

#[test]
fn an_address_that_cannot_be_had_is_refused_with_a_hint() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    refusal(&place, &["--http.address", &address]).assert_refused(1, &address);
    refusal(&place, &["--socket.directory", "/proc/forebay"]).assert_refused(1, "/proc/forebay");
    let file = tempfile::NamedTempFile::new().unwrap();
    refusal(&place, &["--socket.directory", file.path().to_str().unwrap()])
        .assert_refused(1, file.path().to_str().unwrap());
    let long = format!("/tmp/{}", "x".repeat(100));
    refusal(&place, &["--socket.directory", &long]).assert_refused(2, "`socket.directory` cannot be");
    // None of them left a daemon, or something that looks like one.
    run(&["inspect", "--socket.directory", place.sockets().to_str().unwrap()]).assert_refused(1, "cannot reach");
}

#[test]
fn a_worker_is_told_how_much_of_the_pool_has_memory_until_all_of_it_has() {
    let place = Place::new();
    let _daemon = Daemon::spawn(&place, &["--pool.capacity_bytes", "1GiB"]).listening(&place);
    let request = AttachRequest { hears_population: true, ..Worker::request("early", 0, 2, 4096) };
    let worker = Worker::attach(&place, request, None);
    let (mut told, units) = (worker.reply.populated_units, worker.reply.units);
    while told < units {
        let news = worker.hear().populated_units.expect("the other rank is not there, so nothing else is told");
        assert!(told < news && news <= units, "{told} units, then {news} of {units}");
        told = news;
    }
    let late = Worker::attach(&place, Worker::request("late", 0, 2, 4096), None);
    assert_eq!(late.reply.populated_units, units);
}

/// A worker of an earlier build would take such news for the places of its slices.
#[test]
fn a_worker_that_does_not_hear_of_memory_is_told_nothing_but_its_slices() {
    let place = Place::new();
    let _daemon = Daemon::spawn(&place, &["--pool.capacity_bytes", "1GiB"]).listening(&place);
    let early = Worker::attach(&place, Worker::request("early", 0, 2, 4096), None);
    wait_until("all of the pool has memory", || {
        let late = Worker::attach(&place, Worker::request("late", 0, 2, 4096), None);
        late.reply.populated_units == late.reply.units
    });
    let _other = Worker::attach(&place, Worker::request("early", 1, 2, 4096), None);
    assert_eq!(early.hear().populated_units, None, "its slices are the first that it hears of");
}

/// What `inspect` shows of the engine's registered memory.
fn registered(place: &Place) -> Value {
    ask(place, "inspect", &["--json"]).json()["sessions"][0]["registered_bytes"].clone()
}

#[test]
fn what_the_workers_have_registered_with_the_driver_is_shown_while_they_are_attached() {
    let place = Place::new();
    let daemon = start(&place, &["--http.address", "127.0.0.1:0"]);
    let [first, second] = [0, 1].map(|rank| Worker::attach(&place, Worker::request("gpu", rank, 2, 4096), None));
    assert!(first.reply.hears_registered);
    assert_eq!(registered(&place), Value::Null, "no worker has said that it copies from and to a GPU");
    first.register(64 << 20);
    wait_until("the first worker is counted", || registered(&place) == 64 << 20);
    second.register(0);
    wait_until("the least counts", || registered(&place) == 0);
    let told = ask(&place, "doctor", &["--json"]).json();
    let checks = told["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "registered").expect("a check");
    assert_eq!((&check["verdict"], check["hint"].is_string()), (&"warn".into(), true), "{check}");
    second.register(32 << 20);
    wait_until("it has registered more", || registered(&place) == 32 << 20);
    let metrics = daemon.page("/metrics");
    for line in ["forebay_gpu_workers 2", "forebay_registered_bytes 100663296"] {
        assert!(metrics.lines().any(|other| other == line), "{line} is not in\n{metrics}");
    }
    drop(second);
    wait_until("it is forgotten with its connection", || registered(&place) == 64 << 20);
    first.register(1 << 40);
    wait_until("more than the pool has is not believed", || registered(&place) == Value::Null);
}
