//! Purges that reach the stores which hosts share, by the shipped command and daemon: what goes, what stays, and stores
//! that hang, refuse, or are still being written to.

mod command;
#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod servers;
mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use command::{Answer, forebay, run};
use forebay_core::namespace::Descriptor;
use fuse::hanging::{Hung, each_kind, mount};
use rustix::process::Signal;
use servers::{BOTH, Kind, Server};
use support::tiers::*;
use support::*;

fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn words<'a>(place: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["purge", "--socket.directory", place.to_str().expect("a path in UTF-8"), "--shared-stores"], more].concat()
}

fn purge(place: &Place, more: &[&str]) -> Answer {
    run(&words(&place.sockets(), more))
}

/// The id of a namespace of the tests' clients.
fn id_of(tenant: &str) -> String {
    let fields = [("model", "test"), ("tenant", tenant)].map(|(name, value)| (name.to_owned(), value.to_owned()));
    Descriptor::new(fields).expect("a descriptor").id().to_string()
}

/// Files of blocks of a tenant.
fn files(directory: &Path, tenant: &str) -> usize {
    let (mut count, mut folders) = (0, vec![directory.join(id_of(tenant))]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type().expect("a kind").is_dir() {
                true => folders.push(entry.path()),
                false => count += 1,
            }
        }
    }
    count
}

/// Fails, with something removed or not, and says what to do.
fn assert_incomplete(answer: &Answer, says: &str) {
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(answer.out.contains(says) && answer.out.contains("\n  hint: "), "{answer:?}");
    assert!(answer.err.contains("error: the purge is not complete") && answer.err.contains("\nhint: "), "{answer:?}");
}

#[test]
fn a_dry_run_counts_and_removes_nothing_and_a_short_id_is_enough() {
    let place = Place::new();
    let (_daemon, client, worker) = serving(&place, &[]);
    let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).expect("a namespace"));
    store(&client, &worker, blue, 0..20);
    store(&client, &worker, red, 0..10);
    let (sockets, id) = (place.sockets(), id_of("blue"));
    let purge = |more: &[&str]| {
        run(&[&["purge", "--socket.directory", sockets.to_str().expect("a path in UTF-8")], more].concat())
    };

    let would = format!("a purge would remove 20 blocks, 400.0 KiB, from the pool\n  {id}\n");
    for what in [["--tenant", "blue"], ["--namespace", &id], ["--namespace", &id[..8]]] {
        let answer = purge(&[&what[..], &["--dry-run"]].concat());
        assert_eq!((answer.code, &answer.out), (0, &would), "{what:?}: {}", answer.err);
    }
    let json = purge(&["--tenant", "blue", "--dry-run", "--json"]).json();
    assert_eq!((&json["blocks"], &json["is_dry_run"]), (&20.into(), &true.into()));
    let nobody = purge(&["--tenant", "nobody", "--dry-run"]);
    assert!(nobody.code == 1 && nobody.err.contains("knows no namespace of the tenant"), "{nobody:?}");
    let unseen = purge(&["--namespace", &"0".repeat(32), "--dry-run"]);
    assert!(unseen.code == 0 && unseen.out.contains("has not seen this namespace"), "{unseen:?}");
    is_served(&client, &worker, blue, 0..20);

    purge(&["--namespace", "0000000"]).assert_refused(1, "no namespace id begins with `0000000`");
    purge(&["--namespace", &id[..3]]).assert_refused(2, "is not a namespace id");
    let answer = purge(&["--namespace", &id[..8]]);
    assert_eq!(
        (answer.code, answer.out.as_str()),
        (0, "20 blocks, 400.0 KiB, were removed from the pool\n"),
        "{}",
        answer.err
    );
    is_served(&client, &worker, red, 0..10);
}

/// As engines leave many that often reset their caches.
#[test]
fn a_tenant_whose_namespace_gave_its_record_to_others_is_gone_from_the_disk() {
    let (place, home) = (Place::new(), home());
    let disk = home.path().join("disk");
    let disks = format!("{:?}", [&disk]);
    let arguments = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB"];
    let more = ["--tier.ssd.create", "true", "--tier.ssd.admission", "all"];
    let (_daemon, client, worker) = serving(&place, &[&arguments[..], &more].concat());
    let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).expect("a namespace"));
    store(&client, &worker, blue, 0..50);
    // More than the pool holds.
    store(&client, &worker, red, 1000..3000);
    drop(client);
    for first in (0..1100).step_by(100) {
        let client = Client::open(&place, "b", 0);
        for number in first..first + 100 {
            let group = forebay_rpc::proto::Group { rank_bytes: vec![BYTES], ..group() };
            client.namespace(&format!("other {number}"), vec![group]).expect("a namespace");
        }
    }

    let sockets = place.sockets();
    let answer = run(&["purge", "--socket.directory", sockets.to_str().expect("a path in UTF-8"), "--tenant", "blue"]);
    assert_eq!(
        (answer.code, answer.out.as_str()),
        (0, "0 blocks, 0 B, were removed from the pool\n50 blocks were removed from this host's disks\n"),
        "{}",
        answer.err
    );
    let (client, _worker) = engine(&place, "c", BYTES);
    let blue = client.namespace("blue", vec![group()]).expect("a namespace");
    is_missed(&client, blue, 0..50);
}

#[test]
fn a_tenant_is_gone_from_every_store_and_the_others_stay() {
    for kind in BOTH {
        let (server, directory, one, other) = (Server::start(kind), home(), Place::new(), Place::new());
        let (url, path) = (server.url(), directory.path().to_str().expect("a path in UTF-8"));
        let arguments = ["--tier.fs.directories", path, "--tier.redis.urls", &url, "--tier.redis.value_bytes", "8KiB"];
        let (daemon, client, worker) = serving(&one, &arguments);
        let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).expect("a namespace"));
        store(&client, &worker, blue, 0..100);
        store(&client, &worker, red, 0..50);
        server.admin().must(&["SET", &format!("forebay:{{{}:0:x}}", id_of("blue")), "somebody's"]);

        let answer = purge(&one, &["--tenant", "blue"]);
        let expected = format!(
            "100 blocks, 2.0 MiB, were removed from the pool\n\
             fs {path}: 100 blocks, 100 values, were removed\n\
             redis {}: 100 blocks, 300 values, were removed\n\
             this daemon knows these namespaces of the tenant; purge others with `--namespace`:\n  {}\n",
            server.socket().display(),
            id_of("blue")
        );
        assert_eq!((answer.code, answer.out), (0, expected), "{}", answer.err);
        assert_eq!((files(directory.path(), "blue"), files(directory.path(), "red")), (0, 50));
        assert_eq!(server.admin().must(&["DBSIZE"]), "151");
        is_missed(&client, blue, 0..50);

        let json = purge(&one, &["--namespace", &id_of("red"), "--json"]).json();
        assert_eq!((&json["is_complete"], &json["namespaces"][0]), (&true.into(), &id_of("red").into()));
        let redis = &json["places"][1];
        assert_eq!(
            (&redis["tier"], &redis["removed_blocks"], &redis["removed_values"]),
            (&"redis".into(), &50.into(), &150.into())
        );
        // They are used again.
        store(&client, &worker, blue, 0..50);
        let sockets = one.sockets();
        let alone = ["purge", "--socket.directory", sockets.to_str().expect("a path in UTF-8"), "--namespace"];
        let answer = run(&[&alone[..], &[&"0".repeat(32)]].concat());
        let keep = "\nshared stores keep their blocks: `--shared-stores` removes them\n";
        assert!(answer.code == 0 && answer.out.ends_with(keep), "{answer:?}");
        assert_eq!(files(directory.path(), "blue"), 50);
        lose_pool(&one, daemon, (client, worker));
        // A daemon that never saw the tenant.
        let (_daemon, client, worker) = serving(&other, &arguments);
        let answer = purge(&other, &["--tenant", "blue"]);
        answer.assert_refused(1, "knows no namespace of the tenant");
        assert!(answer.err.contains("`--namespace`"), "{}", answer.err);
        assert_eq!(files(directory.path(), "blue"), 50);
        let blue = client.namespace("blue", vec![group()]).expect("a namespace");
        is_served(&client, &worker, blue, 0..50);
    }
}

#[test]
fn a_namespace_that_the_daemon_never_saw_goes_by_its_id() {
    let (directory, one, other) = (home(), Place::new(), Place::new());
    let path = directory.path().to_str().expect("a path in UTF-8");
    let (_daemon, client, worker) = serving(&one, &["--tier.fs.directories", path]);
    let namespace = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    let _daemon = serving(&other, &["--tier.fs.directories", path]);
    let answer = purge(&other, &["--namespace", &id_of("blue")]);
    assert_eq!((answer.code, files(directory.path(), "blue")), (0, 0), "{answer:?}");
    let told = "0 blocks, 0 B, were removed from the pool\n\
                this daemon has not seen this namespace; the pool and disks of this host have no block of it now\n";
    assert!(answer.out.starts_with(told), "{answer:?}");
}

/// As an operator purges one host after the other, while requests go on.
#[test]
fn hosts_that_pause_bring_nothing_back_while_others_are_purged() {
    let (directory, one, other) = (home(), Place::new(), Place::new());
    let arguments = ["--tier.fs.directories", directory.path().to_str().expect("a path in UTF-8")];
    let (_one, client, worker) = serving(&one, &arguments);
    let blue = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, blue, 0..50);
    let (_other, late, late_worker) = serving(&other, &arguments);
    let answer = purge(&other, &["--tenant", "blue", "--pause-seconds", "600"]);
    answer.assert_refused(1, "knows no namespace of the tenant");
    // The engine comes between the two purges.
    let late_blue = late.namespace("blue", vec![group()]).expect("a namespace");
    is_missed(&late, late_blue, 0..50);
    let answer = purge(&other, &["--tenant", "blue", "--pause-seconds", "600"]);
    assert_eq!((answer.code, files(directory.path(), "blue")), (0, 0), "{answer:?}");
    assert!(
        answer.out.contains("\nfor 600 s this host reads none of this from a tier and writes none to one\n"),
        "{answer:?}"
    );

    // The other host is not purged yet: it has what it had, and shares what it stores.
    is_served(&client, &worker, blue, 0..50);
    store(&client, &worker, blue, 100..150);
    assert_eq!(files(directory.path(), "blue"), 50);
    is_missed(&late, late_blue, 100..150);
    let seen = run(&["inspect", "--json", "--socket.directory", other.sockets().to_str().expect("a path")]).json();
    assert_eq!((&seen["pauses"][0]["tenant"], seen["pauses"].as_array().map(Vec::len)), (&"blue".into(), Some(1)));
    let seen = run(&["inspect", "--socket.directory", other.sockets().to_str().expect("a path")]).out;
    assert!(seen.contains("\npauses after purges\n") && seen.contains("  tenant=blue "), "{seen}");
    // What pauses serves from the pool alone, and writes nothing down.
    let slots = late.reserve(late_blue, 50);
    (200..250).zip(&slots).for_each(|(seed, held)| late_worker.fill(held, seed));
    late.commit(late_blue, &hashes(200..250), &slots);
    is_served(&late, &late_worker, late_blue, 200..250);
    assert_eq!(files(directory.path(), "blue"), 50);

    let answer = purge(&one, &["--tenant", "blue", "--pause-seconds", "1", "--json"]);
    assert_eq!((&answer.json()["is_complete"], &answer.json()["pause_seconds"]), (&true.into(), &1.into()));
    assert_eq!(files(directory.path(), "blue"), 0);
    // Another purge moves the end of a pause.
    assert_eq!(purge(&other, &["--tenant", "blue", "--pause-seconds", "1"]).code, 0);
    let is_over = |client: &Client| client.inspect().pauses.is_empty();
    wait_until("the pauses end", || is_over(&client) && is_over(&late));
    is_missed(&late, late_blue, 0..250);
    is_missed(&client, blue, 0..250);
    // The hosts share again.
    store(&client, &worker, blue, 300..350);
    is_served(&late, &late_worker, late_blue, 300..350);
}

/// A purge may take longer than the pause that it asks for.
#[test]
fn a_pause_lasts_as_long_as_its_purge_and_then_its_time() {
    let Some(mut mount) = mount() else { return };
    let (place, other, home) = (Place::new(), Place::new(), home());
    let path = mount.path().to_str().expect("a path in UTF-8").to_owned();
    let [disk, second, away] = ["disk", "second", "away"].map(|name| home.path().join(name));
    let disks = format!("{:?}", [&disk, &second]);
    let ssd = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB", "--tier.fs.directories", &path];
    drop(Daemon::start(&place, &ssd).listening(&place));
    std::fs::rename(&second, &away).expect("ours");
    let (daemon, client, worker) = serving(&place, &[&ssd[..], &["--tier.ssd.create", "false"]].concat());
    let (_other, late, late_worker) = serving(&other, &["--tier.fs.directories", &path]);
    let blue = client.namespace("blue", vec![group()]).expect("a namespace");
    let late_blue = late.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, blue, 0..50);
    is_served(&late, &late_worker, late_blue, 0..50);

    mount.harm("remove", "slow 20");
    let child = forebay(&words(&place.sockets(), &["--tenant", "blue", "--pause-seconds", "2"]));
    let child = { child }.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    wait_until("it pauses", || !client.inspect().pauses.is_empty());
    assert_eq!(client.inspect().pauses[0].seconds, None, "its time has not begun");
    wait_until("the directory is empty", || files(&mount.backing(), "blue") == 0);
    mount.calm();
    // The purge waits for the disk for longer than the pause is to last.
    std::thread::sleep(Duration::from_millis(3000));
    assert_eq!(client.inspect().pauses.len(), 1);
    std::fs::rename(&away, &second).expect("ours");
    let answer = Answer::of(child.wait_with_output().expect("it ends"));
    assert_eq!(answer.code, 0, "{answer:?}");
    let pauses = client.inspect().pauses;
    assert!(pauses[0].seconds.is_some_and(|seconds| seconds <= 2), "{pauses:?}");
    // The host that is not purged writes its blocks again, and none of them comes here.
    store(&late, &late_worker, late_blue, 100..150);
    is_missed(&client, blue, 0..150);
    daemon.says("the pause after a purge has ended", 1);
}

/// Many may ask for namespaces of a tenant that pauses.
#[test]
fn a_namespace_that_is_refused_does_not_pause() {
    let place = Place::new();
    let (daemon, ..) = serving(&place, &[]);
    purge(&place, &["--tenant", "blue", "--pause-seconds", "2"]).assert_refused(1, "knows no namespace");
    // Each keeps 256 open, and the pool has records of 1,024.
    let clients = ["a", "b", "c", "d", "e"].map(|id| Client::open(&place, id, 0));
    let open = |number: usize| {
        let client = &clients[number / 256];
        let group = forebay_rpc::proto::Group { rank_bytes: vec![BYTES], ..group() };
        let fields = [("model", number.to_string()), ("tenant", "blue".to_owned())];
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let (session, groups) = (client.welcome.session, vec![group]);
        call!(client, open_namespace, forebay_rpc::proto::OpenNamespaceRequest { session, fields, groups }).is_ok()
    };
    let opened = (0..5 * 256).filter(|number| open(*number)).count();
    assert_eq!(opened, 1024, "the others are refused");
    daemon.says("the pause after a purge has ended", 1);
    let said = format!("namespaces={opened}");
    assert!(daemon.log().contains(&said), "{said}: {}", daemon.log());
}

/// As after a restart of the host: nobody knows whose the blocks are.
#[test]
fn a_tenant_that_is_not_known_is_told_of_disks_with_blocks_of_somebody() {
    let (place, home) = (Place::new(), home());
    let (disk, shared) = (home.path().join("disk"), home.path().join("shared"));
    std::fs::create_dir(&shared).expect("a directory");
    let disks = format!("{:?}", [&disk]);
    let arguments = ["--tier.ssd.disks", &disks, "--tier.ssd.capacity_bytes", "64MiB", "--tier.ssd.admission", "all"];
    let arguments = [&arguments[..], &["--tier.fs.directories", shared.to_str().expect("a path in UTF-8")]].concat();
    let (daemon, client, worker) = serving(&place, &arguments);
    let blue = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, blue, 0..50);
    lose_pool(&place, daemon, (client, worker));
    let (_daemon, _client, _worker) = serving(&place, &arguments);
    let answer = purge(&place, &["--tenant", "blue"]);
    answer.assert_refused(1, &id_of("blue"));
    assert!(answer.err.contains("start the tenant's engines once"), "{answer:?}");
}

#[test]
fn a_tenant_with_a_name_that_none_can_have_is_refused() {
    let place = Place::new();
    let _daemon = serving(&place, &[]);
    let name = "x".repeat(70_000);
    purge(&place, &["--tenant", &name, "--pause-seconds", "9"]).assert_refused(1, "no tenant has a name that long");
    let sockets = place.sockets();
    let seen = run(&["inspect", "--json", "--socket.directory", sockets.to_str().expect("a path")]).json();
    assert_eq!(seen["pauses"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_pause_is_a_day_at_most_and_only_of_shared_stores() {
    let place = Place::new();
    let (_daemon, client, _worker) = serving(&place, &[]);
    client.namespace("blue", vec![group()]).expect("a namespace");
    let sockets = place.sockets();
    let alone = ["purge", "--socket.directory", sockets.to_str().expect("a path"), "--tenant", "blue"];
    run(&[&alone[..], &["--pause-seconds", "9"]].concat()).assert_refused(2, "--shared-stores");
    purge(&place, &["--tenant", "blue", "--pause-seconds", "86401"]).assert_refused(2, "86400");
    for request in [(true, 86_401), (false, 1)] {
        let (shared_stores, pause_seconds) = request;
        let request = forebay_rpc::proto::PurgeRequest {
            tenant: "blue".to_owned(),
            shared_stores,
            timeout_seconds: 1,
            pause_seconds,
            ..Default::default()
        };
        let mut rpc = forebay_rpc::client::Client::new(&sockets, "", DEADLINE);
        let error = runtime().block_on(rpc.purge(request)).expect_err("it is refused");
        assert!(error.hint_text().is_some(), "{error}");
    }
}

#[test]
fn without_shared_stores_it_says_so() {
    let place = Place::new();
    let (_daemon, client, _worker) = serving(&place, &[]);
    client.namespace("blue", vec![group()]).expect("a namespace");
    let answer = purge(&place, &["--tenant", "blue"]);
    assert!(answer.code == 0 && answer.out.contains("this daemon has no shared store\n"), "{answer:?}");
}

#[test]
fn a_server_that_stands_still_keeps_nobody_and_the_other_store_is_purged() {
    let (server, directory, place) = (Server::start(Kind::Valkey), home(), Place::new());
    let (url, path) = (server.url(), directory.path().to_str().expect("a path in UTF-8"));
    let mut arguments = vec!["--tier.fs.directories", path, "--tier.redis.urls", &url];
    arguments.extend(["--tier.redis.operation_timeout_ms", "1000"]);
    let (_daemon, client, worker) = serving(&place, &arguments);
    let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).expect("a namespace"));
    store(&client, &worker, blue, 0..50);
    store(&client, &worker, red, 0..50);
    server.signal(Signal::STOP);
    let begun = Instant::now();
    let answer = purge(&place, &["--tenant", "blue"]);
    assert_incomplete(&answer, "cannot connect to the server");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(answer.out.starts_with("50 blocks, ") && answer.out.contains(": 50 blocks, "), "{answer:?}");
    assert_eq!(files(directory.path(), "blue"), 0);
    server.signal(Signal::CONT);
    let answer = purge(&place, &["--tenant", "blue"]);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert_eq!(server.admin().must(&["DBSIZE"]), "50");
    client.release(client.lookup_settled(red, &hashes(0..50)).lease);
}

#[test]
fn a_server_that_refuses_is_told_with_what_to_allow() {
    let (server, place) = (Server::on_port(Kind::Redis, &[]), Place::new());
    server.admin().must(&["ACL", "SETUSER", "cache", "on", ">pw", "~*", "+@all", "-scan"]);
    let url = server.tcp_url().replace("redis://", "redis://cache:pw@");
    let (_daemon, client, worker) = serving(&place, &["--tier.redis.urls", &url]);
    let namespace = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    let answer = purge(&place, &["--tenant", "blue"]);
    assert_incomplete(&answer, "NOPERM");
    assert!(answer.out.contains("SCAN") && !answer.out.contains("pw@"), "{answer:?}");
    assert_eq!(server.admin().must(&["DBSIZE"]), "50");
}

#[test]
fn a_mount_that_hangs_is_given_up_and_gets_no_second_thread() {
    each_kind(|mount| {
        // FIFOs hang whoever opens them, which a purge does not.
        if !mount.hangs_whole() {
            return;
        }
        let (server, place) = (Server::start(Kind::Valkey), Place::new());
        let (url, path) = (server.url(), mount.path().to_str().expect("a path in UTF-8").to_owned());
        let mut arguments = vec!["--tier.fs.directories", &path, "--tier.fs.timeout_ms", "1000"];
        arguments.extend(["--tier.redis.urls", &url]);
        let (daemon, client, worker) = serving(&place, &arguments);
        let [blue, red] = ["blue", "red"].map(|tenant| client.namespace(tenant, vec![group()]).expect("a namespace"));
        store(&client, &worker, blue, 0..50);
        store(&client, &worker, red, 0..50);
        let threads = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("its threads");
            let name =
                |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
            tasks.filter_map(name).filter(|name| name.trim() == "forebay-purge").count()
        };
        let hung = Hung::new(mount);
        let begun = Instant::now();
        let child = forebay(&words(&place.sockets(), &["--tenant", "blue"]));
        let child = { child }.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        // Who asks meanwhile is answered.
        let mut longest = Duration::ZERO;
        for _ in 0..50 {
            let begun = Instant::now();
            let reply = client.lookup(red, &hashes(0..50));
            longest = longest.max(begun.elapsed());
            assert_eq!(reply.groups[0].states, [1; 50], "they are in the pool");
            client.release(reply.lease);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(longest < Duration::from_millis(500), "a lookup took {longest:?}");
        let answer = Answer::of(child.wait_with_output().expect("it ends"));
        assert_incomplete(&answer, "the shared store does not answer");
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        assert!(answer.out.contains(": 50 blocks, "), "{answer:?}");
        assert_eq!(server.admin().must(&["DBSIZE"]), "50");
        wait_until("one thread hangs", || threads() == 1);
        assert_incomplete(&purge(&place, &["--tenant", "blue"]), "an earlier purge of the shared store hangs");
        wait_until("there is no second one", || threads() == 1);
        drop(hung);
        wait_until("the thread ends", || threads() == 0);
        assert_eq!(purge(&place, &["--tenant", "blue"]).code, 0);
        assert_eq!((files(mount.path(), "blue"), files(mount.path(), "red")), (0, 50));

        // The thread of a purge that was interrupted needs a moment to end.
        let hung = Hung::new(mount);
        let mut interrupted = forebay(&words(&place.sockets(), &["--tenant", "red"])).spawn().expect("the binary runs");
        wait_until("the thread hangs", || threads() == 1);
        interrupted.kill().and_then(|()| interrupted.wait()).expect("it can be killed");
        let next = forebay(&words(&place.sockets(), &["--tenant", "red"]));
        let next = { next }.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        std::thread::sleep(Duration::from_millis(300));
        drop(hung);
        let answer = Answer::of(next.wait_with_output().expect("it ends"));
        assert_eq!(answer.code, 0, "{answer:?}");
        assert_eq!(files(mount.path(), "red"), 0);
    });
}

#[test]
fn what_was_about_to_be_stored_does_not_come_back() {
    let (directory, place) = (home(), Place::new());
    let path = directory.path().to_str().expect("a path in UTF-8");
    // The first block may overdraw the budget; then it takes hours until there is something again.
    let mut arguments = vec!["--tier.fs.directories", path, "--tier.fs.store_bytes_per_second", "1"];
    arguments.extend(["--drain.deadline_seconds", "1"]);
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("blue", vec![group()]).expect("a namespace");
    let slots = client.reserve(namespace, 50);
    (0..50).zip(&slots).for_each(|(seed, held)| worker.fill(held, seed));
    client.commit(namespace, &hashes(0..50), &slots);
    wait_until("the first block is written", || tier(&client, "fs").stored_blocks == 1);
    let report = tier(&client, "fs");
    assert!(report.storing_blocks > 0, "the rest is on its way: {report:?}");
    let begun = Instant::now();
    let answer = purge(&place, &["--tenant", "blue"]);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(answer.out.contains(": 1 block, ") && begun.elapsed() < Duration::from_secs(20), "{answer:?}");
    let report = tier(&client, "fs");
    assert_eq!((report.waiting_blocks, report.storing_blocks), (0, 0));
    assert_eq!(client.inspect().pinned_bytes, 0);
    assert_eq!(files(directory.path(), "blue"), 0);
}

#[test]
fn one_purge_at_a_time_and_one_whose_command_ends_stops() {
    let Some(mut mount) = mount() else { return };
    let place = Place::new();
    let path = mount.path().to_str().expect("a path in UTF-8").to_owned();
    let (_daemon, client, worker) = serving(&place, &["--tier.fs.directories", &path]);
    let namespace = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..300);
    mount.harm("remove", "slow 20");
    let backing = mount.backing();
    let mut first = forebay(&words(&place.sockets(), &["--tenant", "blue"]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary runs");
    wait_until("it is at work", || files(&backing, "blue") < 300);
    purge(&place, &["--tenant", "blue"]).assert_refused(1, "another purge of the shared stores is running");
    // What is there still does not come up any more.
    let before = tier(&client, "fs").promoted_blocks;
    is_missed(&client, namespace, 0..50);
    assert_eq!(tier(&client, "fs").promoted_blocks, before);
    assert!(files(&backing, "blue") > 50, "the purge was still at work");
    first.kill().and_then(|()| first.wait()).expect("it is ours");
    let mut left = 0;
    wait_until("it has stopped", || {
        let before = std::mem::replace(&mut left, files(&backing, "blue"));
        std::thread::sleep(Duration::from_millis(500));
        before == left
    });
    assert!(left > 0);
    mount.calm();
    let answer = purge(&place, &["--tenant", "blue"]);
    assert!(answer.code == 0 && answer.out.contains(&format!(": {left} blocks, ")), "{left}: {answer:?}");
}

#[test]
fn a_purge_ends_at_its_timeout_and_the_next_one_goes_on_after_a_killed_daemon_too() {
    let Some(mut mount) = mount() else { return };
    let place = Place::new();
    let path = mount.path().to_str().expect("a path in UTF-8").to_owned();
    let (daemon, client, worker) = serving(&place, &["--tier.fs.directories", &path]);
    let namespace = client.namespace("blue", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..400);
    mount.harm("remove", "slow 20");
    let answer = purge(&place, &["--tenant", "blue", "--timeout-seconds", "1"]);
    assert_incomplete(&answer, "the purge timed out");
    let backing = mount.backing();
    let left = files(&backing, "blue");
    assert!((1..400).contains(&left), "{left} are left");
    let mut child = forebay(&words(&place.sockets(), &["--tenant", "blue"]));
    let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    wait_until("it is at work", || files(&backing, "blue") < left);
    drop((client, worker));
    daemon.kill();
    let answer = Answer::of(child.wait_with_output().expect("it ends"));
    assert!(answer.code == 1 && answer.err.contains("hint: "), "{answer:?}");
    mount.calm();
    let _daemon = serving(&place, &["--tier.fs.directories", &path]);
    let answer = purge(&place, &["--tenant", "blue"]);
    assert_eq!((answer.code, files(&backing, "blue")), (0, 0), "{answer:?}");
}
