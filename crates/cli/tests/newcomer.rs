//! One word for one thing, whole keys, and nothing that is passed over in silence: what a new user stumbles over.

mod command;
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use command::{Answer, forebay};
use forebay_rpc::client::GroupBytes;
use forebay_rpc::proto::{Block, CommitOutcome};
use serde_json::Value;
use support::{Client, Daemon, Place, Worker, engine, group, hashes, runtime, wait_until};

const CAPACITY: &[&str] = &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"];
const BYTES: u64 = 4096;

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("checks");
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no `{name}` in {report:#}"))
}

fn store(client: &Client, worker: &Worker, blocks: u64) {
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    let slots = client.reserve(namespace, blocks as u32);
    slots.iter().zip(0..).for_each(|(held, seed)| worker.fill(held, seed));
    let outcomes = client.commit(namespace, &hashes(0..blocks), &slots);
    assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::CommitStored), "{outcomes:?}");
}

#[test]
fn a_size_is_written_alike_in_every_flag() {
    let config = command::run(&["config", "--json", "--pool.capacity_bytes", "1.5GiB"]);
    assert_eq!(config.code, 0, "{config:?}");
    assert!(config.out.contains("1536MiB"), "{}", config.out);
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/tests/data/conv.jsonl.zst");
    for capacity in ["1.5GiB", "0.5 TiB"] {
        let arguments = ["simulate", trace, "--no-opt", "--policy", "lru", "--block-bytes", "1.5MiB", "--capacity"];
        let answer = command::run(&[&arguments[..], &[capacity]].concat());
        assert_eq!(answer.code, 0, "{answer:?}");
    }
}

#[test]
fn a_value_that_a_tier_cannot_have_is_refused_by_its_whole_key() {
    for (key, value, must) in [
        ("tier.redis.ttl_seconds", "0", "from 1 to"),
        ("tier.redis.connections", "100000", "from 1 to 1024"),
        ("tier.redis.threads", "0", "from 1 to 64"),
        ("tier.redis.value_bytes", "1", "from 4KiB to 511MiB"),
        ("tier.redis.operation_timeout_ms", "0", "from 1 to 86400000"),
        ("tier.redis.connect_timeout_ms", "86400001", "from 1 to 86400000"),
        ("tier.redis.key_prefix", "{a}", "no braces"),
        ("tier.redis.urls", "[\"redis://a\", \"redis://b\"]", "`tier.redis.mode`"),
        ("tier.fs.streams", "0", "from 1 to 1024"),
        ("tier.fs.buffers", "0", "at least 1"),
        ("tier.fs.timeout_ms", "0", "from 1 to 86400000"),
        ("tier.fs.capacity_bytes", "1", "at least 1 MiB"),
        ("tier.fs.max_age_seconds", "0", "at least 1"),
    ] {
        let flags = ["--tier.redis.urls", "redis://cache", "--tier.fs.directories", "/mnt"];
        let answer = command::run(&[&["config"], &flags[..], &[&format!("--{key}"), value]].concat());
        answer.assert_refused(2, &format!("`{key}` cannot be `{value}` (from=`flag`)"));
        assert!(answer.err.contains(must), "{}", answer.err);
    }
    let answer = command::run(&["config", "--tier.redis.urls", "redis://cache", "--tier.redis.sentinel_master", "a"]);
    answer.assert_refused(2, "`tier.redis.mode` cannot be `single`");
}

#[test]
fn a_key_of_a_tier_that_is_off_is_warned_of() {
    let answer = command::run(&["config", "--tier.ssd.capacity_bytes", "1TiB", "--tier.redis.ttl_seconds", "60"]);
    assert_eq!(answer.code, 0, "{answer:?}");
    for (key, switch) in [("tier.ssd.capacity_bytes", "tier.ssd.disks"), ("tier.redis.ttl_seconds", "tier.redis.urls")]
    {
        assert!(answer.err.contains(&format!("`{key}` has no effect: `{switch}` is not set")), "{}", answer.err);
    }
    // Not even where its keys contradict each other: the tier is off.
    for (keys, switch) in [
        (
            &["tier.redis.sentinel_master", "tier.redis.sentinel_user", "tier.redis.certificate_file"][..],
            "tier.redis.urls",
        ),
        (&["tier.object.access_key_id_file"], "tier.object.bucket"),
    ] {
        let flags: Vec<String> = keys.iter().flat_map(|key| [format!("--{key}"), "/some".to_owned()]).collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let answer = command::run(&[&["config"], &flags[..]].concat());
        let have = if keys.len() == 1 { "has" } else { "have" };
        let keys = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        let told = format!("warning: {keys} {have} no effect: `{switch}` is not set\n");
        assert_eq!((answer.code, answer.err), (0, told));
    }
    assert_eq!(command::run(&["config"]).err, "");
}

#[test]
fn a_wrong_argument_leads_to_the_help_of_its_command() {
    for (words, hint) in [
        (&["serve", "200GiB"][..], "`forebay serve --help` lists its arguments"),
        (&["purge"], "`forebay purge --help` lists its arguments"),
        (&["purge", "--tenant"], "`forebay purge --help` lists its arguments"),
        (&["bench", "ssd"], "`forebay bench ssd --help` lists its arguments"),
        (&["completions", "fosh"], "`forebay completions --help` lists its arguments"),
        (&["start"], "`forebay --help` lists the commands, and `forebay COMMAND --help` lists their arguments"),
    ] {
        let answer = command::run(words);
        assert!(answer.code == 2 && answer.err.ends_with(&format!("\nhint: {hint}\n")), "{words:?}: {answer:?}");
    }
    // Nothing is announced that does not come.
    command::run(&["bench", "redis", "localhost"]).assert_refused(2, "it has no scheme (url=`localhost`)");
    assert!(!command::run(&["bench", "redis", "localhost"]).err.contains("rows"));
}

#[test]
fn a_block_that_does_not_fit_its_namespace_is_refused_with_a_hint() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, CAPACITY);
    let mut client = forebay_rpc::client::Client::new(place.sockets(), "plain", Duration::from_secs(10));
    let runtime = runtime();
    let group = GroupBytes { group: 0, bytes: BYTES };
    let fields = [("model".to_string(), "plain".to_string())];
    let namespace = runtime.block_on(client.open_namespace(fields, [group])).expect("a namespace");
    let keys = forebay_rpc::pack([&b"key"[..]]).expect("a key");
    let mut put = |group: u32, bytes: u64| {
        let block = Block { hash: b"key".to_vec(), data: vec![0; bytes as usize] };
        runtime.block_on(client.put(namespace, group, &[], vec![block])).expect_err("it does not fit")
    };
    let mut refused = vec![put(0, BYTES - 1), put(1, BYTES)];
    refused.push(runtime.block_on(client.get(namespace, 1, &keys)).expect_err("no group"));
    refused.push(runtime.block_on(client.get(namespace + 1, 0, &keys)).expect_err("no namespace"));
    for error in refused {
        assert!(error.hint_text().is_some(), "{error}");
    }
}

#[test]
fn a_setting_without_effect_is_warned_of() {
    let redis = ["--tier.redis.urls", "redis://cache"];
    let fs = ["--tier.fs.directories", "/mnt", "--tier.fs.timeout_ms", "500"];
    for (flags, told) in [
        (
            &["--http.address", "off", "--http.hosts", "[\"a\"]"][..],
            "`http.hosts` has no effect: `http.address` is `off`",
        ),
        (
            &["--http.address", "off", "--http.allow_remote", "true"],
            "`http.allow_remote` has no effect: `http.address` is `off`",
        ),
        (
            &["--limits.sessions_per_user", "257"],
            "`limits.sessions_per_user` has no effect: each session takes a connection, and `limits.connections_per_user` is less",
        ),
        (
            &["--limits.calls_per_connection", "8193"],
            "`limits.calls_per_connection` has no effect: `limits.calls_per_user` counts the same calls, and is less",
        ),
        (
            &[&redis[..], &["--tier.redis.ca_file", "/ca", "--tier.redis.server_name", "a"]].concat(),
            "`tier.redis.ca_file`, `tier.redis.server_name` have no effect: no URL of `tier.redis.urls` begins with `rediss://`",
        ),
        (
            &[&redis[..], &["--tier.redis.load_deadline_ms", "5001"]].concat(),
            "`tier.redis.load_deadline_ms` has no effect: operations fail after `tier.redis.operation_timeout_ms`, which is less",
        ),
        (
            &[&fs[..], &["--tier.fs.load_deadline_ms", "501"]].concat(),
            "`tier.fs.load_deadline_ms` has no effect: operations fail after `tier.fs.timeout_ms`, which is less",
        ),
        // What nobody set is nobody's mistake.
        (&fs, ""),
        (&["--limits.connections_per_user", "10", "--limits.calls_per_user", "10"], ""),
        (&["--tier.redis.urls", "rediss://cache", "--tier.redis.server_name", "a"], ""),
    ] {
        let answer = command::run(&[&["config"], flags].concat());
        let told = if told.is_empty() { String::new() } else { format!("warning: {told}\n") };
        assert_eq!((answer.code, answer.err), (0, told), "{flags:?}");
    }
}

#[test]
fn a_pool_that_is_replaced_is_one_line_of_the_log() {
    let place = Place::new();
    let arguments = [CAPACITY, &["--pool.huge_pages", "off"]].concat();
    Daemon::start(&place, &arguments).kill();
    let table = File::options().write(true).open(place.pool().join("table")).expect("a table");
    table.write_all_at(b"?", 0).expect("it is damaged");
    let daemon = Daemon::start(&place, &arguments);
    let told = daemon.log().lines().filter(|line| line.contains("its blocks are lost")).count();
    assert_eq!(told, 1, "{}", daemon.log());
}

#[test]
fn doctor_knows_the_daemon_that_has_the_port() {
    let place = Place::new();
    let daemon = Daemon::start(&place, CAPACITY);
    let address = daemon.address();
    let other = Place::new();
    let doctor = |sockets: &std::path::Path, uid: Option<u32>| {
        use std::os::unix::process::CommandExt;
        let mut command = forebay(&["doctor", "--json", "--http.address", &address, "--socket.directory"]);
        command.arg(sockets).arg("--pool.directory").arg(other.pool()).args(["--pool.capacity_bytes", "16MiB"]);
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let answer = Answer::of(command.output().expect("the binary runs"));
        serde_json::from_str::<Value>(&answer.out).unwrap_or_else(|error| panic!("{error} in {answer:?}"))
    };
    let second = doctor(&other.sockets(), None);
    assert_eq!(check(&second, "http")["verdict"], "fail", "{second:#}");
    assert!(check(&second, "http")["finding"].as_str().is_some_and(|text| text.contains("a daemon of Forebay")));
    if rustix::process::geteuid().is_root() {
        let theirs = doctor(&place.sockets(), Some(65_534));
        assert_eq!(check(&theirs, "socket")["verdict"], "fail", "{theirs:#}");
        assert_eq!(check(&theirs, "http")["verdict"], "ok", "{theirs:#}");
    }
}

#[test]
fn a_drain_says_what_it_waits_for_and_a_second_signal_ends_it() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[CAPACITY, &["--drain.deadline_seconds", "60"]].concat());
    let (client, _worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    assert!(!client.reserve(namespace, 4).is_empty());
    daemon.terminate();
    wait_until("it drains", || daemon.log().contains("draining"));
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("draining")).expect("a line");
    for part in ["seconds=60", "reservations: 16.0 KiB", "a second signal ends the daemon at once"] {
        assert!(line.contains(part), "`{part}` is not in {line}");
    }
    let begun = Instant::now();
    daemon.terminate();
    let (is_success, log) = daemon.finish();
    assert!(is_success && begun.elapsed() < Duration::from_secs(20), "{log}");
    assert!(log.contains("a second signal ends the drain"), "{log}");
}

/// Another host has stored them: the tier takes them and writes nothing.
#[test]
fn usual_values_of_a_tier_that_is_off_are_no_warning() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("all.toml");
    std::fs::write(&file, command::run(&["config"]).out).expect("it is written");
    let answer = command::run(&["config", "--config", file.to_str().expect("UTF-8")]);
    assert!(answer.code == 0 && !answer.err.contains("no effect"), "{answer:?}");
    let answer = command::run(&["config", "--tier.fs.directories", "[]"]);
    assert!(!answer.err.contains("no effect"), "{answer:?}");
}

#[test]
fn blocks_that_a_store_has_already_are_not_counted_as_stored() {
    let shared = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let flags = ["--tier.fs.directories", shared.path().to_str().expect("UTF-8")];
    for (place, stored) in [(Place::new(), 5), (Place::new(), 0)] {
        let _daemon = Daemon::start(&place, &[CAPACITY, &flags].concat());
        let (client, worker) = engine(&place, "a", BYTES);
        let tier = || client.inspect().tiers.first().cloned().expect("a tier");
        wait_until("the tier serves", || tier().state == "serving");
        store(&client, &worker, 5);
        let repeated = || tier().stores[0].events.get("repeated_stores").copied().unwrap_or(0);
        wait_until("they are stored or found", || tier().stored_blocks + repeated() == 5);
        wait_until("none is under way", || tier().storing_blocks == 0);
        assert_eq!(tier().stored_blocks, stored, "{:?}", tier());
    }
}

#[test]
fn a_purge_says_in_json_whether_shared_stores_keep_their_blocks() {
    let shared = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let flags = ["--tier.fs.directories", shared.path().to_str().expect("UTF-8")];
    for (more, kept) in [(&flags[..], true), (&[], false)] {
        let place = Place::new();
        let _daemon = Daemon::start(&place, &[CAPACITY, more].concat());
        let (client, worker) = engine(&place, "a", BYTES);
        store(&client, &worker, 1);
        let mut purge = forebay(&["purge", "--tenant", "t", "--json", "--socket.directory"]);
        let answer = Answer::of(purge.arg(place.sockets()).output().expect("the binary runs")).json();
        assert_eq!(answer["shared_stores_keep_blocks"], kept, "{answer:#}");
        assert_eq!(answer["is_complete"], true, "{answer:#}");
    }
}

#[test]
fn a_purge_that_fails_says_so_in_json_too() {
    let place = Place::new();
    let sockets = place.sockets().display().to_string();
    let purge = |what: &[&str]| command::run(&[&["purge", "--json", "--socket.directory", &sockets], what].concat());
    let nobody = purge(&["--tenant", "t"]);
    let _daemon = Daemon::start(&place, CAPACITY);
    for (answer, says) in [
        (nobody, "forebay.sock"),
        (purge(&["--namespace", "0000000"]), "no namespace id begins with `0000000`"),
        (purge(&["--tenant", "t", "--shared-stores"]), "knows no namespace of the tenant"),
    ] {
        let told: Value = serde_json::from_str(&answer.out).unwrap_or_else(|error| panic!("{error} in {answer:?}"));
        assert_eq!((answer.code, &told["is_complete"]), (1, &Value::from(false)), "{answer:?}");
        let [error, hint] = ["error", "hint"].map(|part| told[part].as_str().unwrap_or_default());
        assert!(error.contains(says), "{answer:?}");
        assert_eq!(answer.err, format!("error: {error}\nhint: {hint}\n"));
    }
    // The daemon's answer is in it, too.
    let answer = purge(&["--tenant", "t"]);
    let told: Value = serde_json::from_str(&answer.out).unwrap_or_else(|error| panic!("{error} in {answer:?}"));
    assert_eq!((answer.code, &told["is_complete"], &told["purged_blocks"]), (1, &false.into(), &0.into()), "{told:#}");
    assert!(told["error"].as_str().is_some_and(|error| error.contains("no namespace of the tenant")), "{told:#}");
}
