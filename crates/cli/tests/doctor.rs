//! `forebay doctor` on this machine: without a daemon, beside the leavings of one, and with one.

mod command;
mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use command::{Answer, forebay};
use serde_json::Value;
use support::{Daemon, Place, engine, wait_until};

const CAPACITY: &[&str] = &["--pool.capacity_bytes", "64MiB"];

fn doctor(place: &Place, more: &[&str]) -> Answer {
    let mut command = forebay(&["doctor", "--socket.directory"]);
    // A daemon of this host may have the usual port.
    command.arg(place.sockets()).arg("--pool.directory").arg(place.pool()).args(["--http.address", "127.0.0.1:0"]);
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
    assert!(text.contains("\nwarn  socket      no daemon listens at `"), "{text}");
}

/// `serve` of a user listens in the user's own directory where the host's belongs to somebody else and is empty.
#[test]
fn without_a_daemon_doctor_judges_the_directory_in_which_serve_would_listen() {
    let place = Place::new();
    let own = place.sockets();
    std::fs::create_dir_all(&own).unwrap();
    let mut command = forebay(&["doctor", "--json", "--pool.directory"]);
    command.arg(place.pool()).args(["--http.address", "127.0.0.1:0"]).args(CAPACITY);
    command.env("XDG_RUNTIME_DIR", &own).env("FOREBAY_CONFIG", "");
    let answer = match rustix::process::geteuid().is_root() {
        true => {
            for directory in own.ancestors().take(2).chain([place.pool().parent().unwrap()]) {
                std::os::unix::fs::chown(directory, Some(65_534), Some(65_534)).unwrap();
            }
            as_user(65_534, &mut command)
        }
        false => Answer::of(command.output().unwrap()),
    };
    let doctor = report(&answer);
    let daemon_of_host = std::path::Path::new("/run/forebay/forebay.sock").exists();
    let expected = own.join("forebay").display().to_string();
    assert!(daemon_of_host || finding(&doctor, "socket").contains(&expected), "{doctor:#}");
}

#[test]
fn flags_that_a_running_daemon_hides_are_named() {
    let place = Place::new();
    let _daemon = start(&place);
    let same = doctor(&place, &["--json"]).json();
    assert!(same["checks"].as_array().unwrap().iter().all(|check| check["name"] != "flags"), "{same:#}");
    let more = doctor(&place, &["--json", "--pool.unit_bytes", "4MiB", "--tier.ssd.capacity_bytes", "100TiB"]).json();
    let finding = finding(&more, "flags");
    assert!(finding.ends_with("not checked: `--pool.unit_bytes`, `--tier.ssd.capacity_bytes`"), "{more:#}");
    assert_eq!(check(&more, "flags")["verdict"], "warn");
}

#[test]
fn the_socket_of_a_killed_daemon_is_told_from_a_living_one() {
    let place = Place::new();
    start(&place).kill();
    let json = doctor(&place, &["--json"]).json();
    assert!(finding(&json, "socket").ends_with("left behind by a daemon that has ended"), "{json:#}");
    // What the dead daemon's pool holds is not asked of the machine a second time.
    assert!(finding(&json, "memory").ends_with("the pool has 64.0 MiB of its 64.0 MiB already"), "{json:#}");
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
    assert!(finding(&json, "huge pages").ends_with(" of 64.0 MiB are on huge pages"), "{json:#}");
    let mut inspect = forebay(&["inspect", "--json", "--socket.directory"]);
    let inspect = Answer::of(inspect.arg(place.sockets()).output().unwrap()).json();
    let ready = |namespace: &Value| namespace["groups"][0]["ready_blocks"].as_u64().unwrap_or(0);
    assert_eq!(inspect["namespaces"].as_array().unwrap().iter().map(ready).sum::<u64>(), 0, "{inspect:#}");
    assert_eq!(inspect["pinned_bytes"], 0);
}

/// Its disk is in use by the very daemon that the doctor is asked about.
#[test]
fn a_daemon_that_stands_still_is_said_first_and_its_disk_is_not_blamed() {
    let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let disk = home.path().join("disk");
    let disk = ["--tier.ssd.disks", disk.to_str().unwrap(), "--tier.ssd.capacity_bytes", "64MiB"];
    let disk = [&disk[..], &["--tier.ssd.create", "true"]].concat();
    let daemon = Daemon::start(&place, &[CAPACITY, &disk].concat());
    wait_until("the tier serves", || finding(&report(&doctor(&place, &["--json"])), "ssd").contains("it is serving"));
    let pid = rustix::process::Pid::from_raw(daemon.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let answer = doctor(&place, &[&disk[..], &["--json"]].concat());
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    let json = report(&answer);
    let first = json["checks"].as_array().unwrap().iter().find(|check| check["verdict"] != "ok").unwrap();
    assert_eq!((answer.code, &first["name"]), (1, &"daemon".into()), "{json:#}");
    assert!(first["finding"].as_str().unwrap().contains("did not answer in time"), "{json:#}");
    assert_eq!(check(&json, "ssd")["verdict"], "warn", "{json:#}");
    assert!(finding(&json, "ssd").starts_with("not examined"), "{json:#}");
}

#[test]
fn a_pool_that_cannot_be_is_a_failure_and_the_exit_code_says_so() {
    let place = Place::new();
    let too_large = doctor(&place, &["--pool.capacity_bytes", "8TiB", "--json"]);
    assert_eq!((too_large.code, &report(&too_large)["verdict"]), (1, &"fail".into()));
    assert_eq!(check(&report(&too_large), "memory")["verdict"], "fail");
    let nowhere = doctor(&place, &["--pool.directory", "/proc/forebay", "--json"]);
    let json = report(&nowhere);
    assert_eq!((nowhere.code, &check(&json, "pool")["verdict"]), (1, &"fail".into()), "{nowhere:?}");
    assert!(!nowhere.out.contains("can be used"), "{nowhere:?}");
}

#[test]
fn a_pool_that_serve_would_not_open_is_a_failure_in_its_words() {
    let place = Place::new();
    let daemon = start(&place);
    let (client, worker) = engine(&place, "a", 4096);
    drop(client);
    daemon.kill();
    // The worker still maps it.
    let smaller = ["--pool.capacity_bytes", "32MiB"];
    let doctor = report(&doctor(&place, &[&["--json"][..], &smaller].concat()));
    assert_eq!(check(&doctor, "pool")["verdict"], "fail", "{doctor:#}");
    let mut serve = forebay(&["serve", "--pool.directory"]);
    serve.arg(place.pool()).args([&smaller[..], &["--socket.directory"]].concat()).arg(place.sockets());
    let refused = Answer::of(serve.output().unwrap());
    assert!(refused.err.contains(finding(&doctor, "pool")), "{doctor:#}\n{}", refused.err);
    drop(worker);
}

/// `serve` refuses it with the same words.
#[test]
fn what_has_the_place_of_the_pools_mount_is_a_failure_beforehand() {
    let place = Place::new();
    let point = place.pool().join("mnt");
    std::fs::create_dir_all(&point).unwrap();
    std::fs::set_permissions(place.pool(), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::set_permissions(&point, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::write(point.join("report"), b"precious").unwrap();
    let doctor = report(&doctor(&place, &["--json"]));
    assert_eq!(check(&doctor, "pool")["verdict"], "fail", "{doctor:#}");
    let mut serve = forebay(&["serve", "--pool.directory"]);
    serve.arg(place.pool()).args([CAPACITY, &["--socket.directory"]].concat()).arg(place.sockets());
    let refused = Answer::of(serve.output().unwrap());
    let (cause, _) = finding(&doctor, "pool").split_once(" (").unwrap();
    assert!(refused.err.contains(cause), "{cause} is not in {}", refused.err);
}

#[test]
fn what_keeps_a_daemon_from_working_as_configured_is_said_before_the_start() {
    let place = Place::new();
    let (taken, closed) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let redis = format!("redis://{}", closed.local_addr().unwrap());
    drop(closed);
    let folder = tempfile::tempdir().unwrap();
    let (empty, foreign) = (folder.path().join("empty"), folder.path().join("foreign"));
    std::fs::create_dir(&empty).unwrap();
    std::fs::create_dir_all(foreign.join("what")).unwrap();
    let directories = format!("{:?}", [&empty, &foreign, &folder.path().join("missing")]);
    let http = taken.local_addr().unwrap().to_string();
    let fs = ["--tier.fs.directories", &directories, "--tier.fs.capacity_bytes", "1024TiB"];
    let wrong = [&["--tier.redis.urls", &redis, "--http.address", &http], &fs[..]].concat();
    let answer = doctor(&place, &[&wrong[..], &["--json", "--socket.allow_uids", "[54321]"]].concat());
    let json = report(&answer);
    let told = |name: &str| -> Vec<(String, String)> {
        let checks = json["checks"].as_array().unwrap().iter().filter(|check| check["name"] == name);
        let words = |value: &Value| value.as_str().unwrap().to_owned();
        checks.map(|check| (words(&check["verdict"]), words(&check["finding"]))).collect()
    };
    let fs = told("fs");
    assert_eq!(answer.code, 1);
    assert!(fs[0].0 == "ok" && fs[0].1.contains("is empty and can be written"), "{fs:?}");
    assert!(fs[0].1.contains(" in all, less than `tier.fs.capacity_bytes`"), "{fs:?}");
    assert!(fs[1].0 == "fail" && fs[1].1.contains("holds other files"), "{fs:?}");
    assert!(fs[2].0 == "fail" && fs[2].1.contains("No such file"), "{fs:?}");
    let redis = told("redis");
    assert!(redis[0].0 == "fail" && redis[0].1.contains("Connection refused"), "{redis:?}");
    assert!(told("users")[0].1.contains("54321 (not in `/etc/passwd`)"), "{json:#}");
    assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0, "the doctor has made something");

    let mut serve = forebay(&["serve", "--socket.directory"]);
    let serve = serve.arg(place.sockets()).arg("--pool.directory").arg(place.pool()).args(CAPACITY).args(wrong);
    let refused = Answer::of(serve.output().unwrap());
    assert!(told("http")[0].0 == "fail" && refused.err.contains(&told("http")[0].1), "{refused:?}");
}

/// As another user, which only root can be.
fn as_user(uid: u32, command: &mut std::process::Command) -> Answer {
    use std::os::unix::process::CommandExt;
    Answer::of(command.uid(uid).gid(uid).output().unwrap())
}

/// `doctor` without a daemon and the start of one say the same of a disk.
#[test]
fn a_disk_that_a_daemon_would_refuse_or_do_without_is_a_failure_beforehand() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let place = Place::new();
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    std::fs::create_dir(at("directory")).unwrap();
    std::fs::write(at("words"), "some words").unwrap();
    std::fs::write(at("open"), "").unwrap();
    std::fs::set_permissions(at("open"), std::fs::Permissions::from_mode(0o666)).unwrap();
    let mut cases = vec![
        (at("directory"), Some("16MiB"), "Is a directory"),
        (at("words"), Some("16MiB"), "this disk holds other data"),
        (at("open"), Some("16MiB"), "others may write to the file"),
        (at("missing/disk"), Some("16MiB"), "No such file"),
    ];
    std::fs::write(at("unsized"), "").unwrap();
    std::fs::set_permissions(at("unsized"), std::fs::Permissions::from_mode(0o600)).unwrap();
    cases.push((at("unsized"), None, "a file needs a capacity"));
    if rustix::process::geteuid().is_root() {
        std::fs::create_dir(at("theirs")).unwrap();
        chown(at("theirs"), Some(54321), Some(54321)).unwrap();
        cases.push((at("theirs/disk"), Some("16MiB"), "belongs to user 54321"));
    }
    for (disk, capacity, says) in &cases {
        let mut arguments = vec!["--tier.ssd.create", "true", "--tier.ssd.disks", disk.to_str().unwrap()];
        arguments.extend(capacity.iter().flat_map(|bytes| ["--tier.ssd.capacity_bytes", bytes]));
        let report = report(&doctor(&place, &[&arguments[..], &["--json"]].concat()));
        assert_eq!(check(&report, "ssd")["verdict"], "fail", "{disk:?}: {report:#}");
        assert!(finding(&report, "ssd").contains(says) && check(&report, "ssd")["hint"].is_string(), "{report:#}");
        // The same words, from the start that refuses or the log that tells of a disk that is missing.
        let daemon = Daemon::spawn(&place, &[CAPACITY, &arguments].concat());
        wait_until("the daemon says so", || daemon.log().contains(says));
    }
    assert!(!at("missing").exists() && !at("theirs/disk").exists());
    assert_eq!(std::fs::read(at("words")).unwrap(), b"some words");
    assert_eq!(std::fs::metadata(at("unsized")).unwrap().len(), 0);
}

#[test]
fn a_disk_that_this_user_may_not_make_or_write_is_a_failure_beforehand() {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = Place::new();
    let home = tempfile::tempdir().unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let there = home.path().join("there");
    std::fs::write(&there, "").unwrap();
    std::fs::set_permissions(&there, std::fs::Permissions::from_mode(0o600)).unwrap();
    for disk in [there, home.path().join("new")] {
        let mut command = forebay(&["doctor", "--json", "--tier.ssd.create", "true"]);
        command.args(["--tier.ssd.capacity_bytes", "16MiB", "--tier.ssd.disks"]).arg(&disk).args(CAPACITY);
        command.arg("--socket.directory").arg(place.sockets()).arg("--pool.directory").arg(place.pool());
        let report = report(&as_user(54321, &mut command));
        assert_eq!(check(&report, "ssd")["verdict"], "fail", "{disk:?}: {report:#}");
        assert!(finding(&report, "ssd").contains("cannot open a disk"), "{report:#}");
        assert!(finding(&report, "ssd").contains("Permission denied"), "{report:#}");
    }
}

/// Two answers, so that the second is not a surprise after the first was obeyed.
#[test]
fn a_new_disk_on_the_root_filesystem_without_a_length_hears_of_both() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = |path: &std::path::Path| path.metadata().unwrap().dev();
    let disk = home.path().join("new");
    let report = report(&doctor(&place, &["--json", "--tier.ssd.disks", disk.to_str().unwrap()]));
    let checks: Vec<&Value> = report["checks"].as_array().unwrap().iter().filter(|c| c["name"] == "ssd").collect();
    let hints: String = checks.iter().map(|check| check["hint"].as_str().unwrap()).collect();
    assert!(hints.contains("`tier.ssd.capacity_bytes`"), "{report:#}");
    let is_on_root = device(home.path()) == device(std::path::Path::new("/"));
    assert_eq!(hints.contains("tier.ssd.create"), is_on_root, "{report:#}");
    assert!(!disk.exists());
}

#[test]
fn a_shared_directory_that_is_missing_needs_no_restart() {
    let place = Place::new();
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("missing");
    let fs = ["--tier.fs.directories", missing.to_str().unwrap()];
    let daemon = Daemon::start(&place, &[CAPACITY, &fs].concat());
    wait_until("the daemon has looked", || daemon.log().contains("serving without it"));
    let report = report(&doctor(&place, &["--json"]));
    let hint = check(&report, "fs")["hint"].as_str().unwrap();
    assert!(hint.contains("shared store") && hint.contains("tries it again by itself"), "{report:#}");
    assert!(!hint.contains("restart") && !hint.contains("disk"), "{report:#}");
}

/// The values are printed, and then the words of `serve`.
#[test]
fn config_refuses_what_serve_refuses_for_its_values() {
    let place = Place::new();
    let wrong = ["--tier.fs.directories", "[\"/a\", \"/a\"]"];
    let mut serve = forebay(&["serve", "--http.address", "off", "--socket.directory"]);
    let serve = serve.arg(place.sockets()).arg("--pool.directory").arg(place.pool()).args(CAPACITY).args(wrong);
    let refused = Answer::of(serve.output().unwrap());
    let config = Answer::of(forebay(&["config"]).args(wrong).output().unwrap());
    assert!(config.code == 2 && config.out.contains(wrong[0].trim_start_matches('-')), "{config:?}");
    let words = config.err.lines().next().unwrap();
    assert!(words.starts_with("error: ") && refused.err.contains(words), "{words} is not in {refused:?}");
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
    for direction in ["load", "store"] {
        let labels = format!("{{tier=\"redis\",store=\"{address}\",direction=\"{direction}\"}}");
        assert!(metrics.contains(&format!("forebay_shared_store_healthy{labels} 0")), "{metrics}");
    }

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
    let report = report(&doctor(&place, &["--json", "--tier.redis.urls", &url]));
    assert!(check(&report, "redis")["hint"].as_str().unwrap().contains("restart the daemon"), "{report:#}");
}

/// The daemon keeps no index of shared stores: other hosts write to them too.
#[test]
fn doctor_counts_no_blocks_of_a_shared_store() {
    let place = Place::new();
    let shared = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tier = ["--tier.fs.directories", shared.path().to_str().unwrap()];
    let _daemon = Daemon::start(&place, &[CAPACITY, &tier].concat());
    wait_until("the tier serves", || {
        let report = report(&doctor(&place, &[&tier[..], &["--json"]].concat()));
        finding(&report, "fs") == format!("it is serving: `{}`", shared.path().display())
    });
}

#[test]
fn doctor_says_that_a_pool_would_be_replaced_and_that_a_disk_keeps_its_capacity() {
    let (place, home) = (Place::new(), tempfile::tempdir().unwrap());
    let disk = home.path().join("disk");
    let with_disk = ["--tier.ssd.create", "true", "--tier.ssd.disks", disk.to_str().unwrap()];
    let of = |bytes: &'static str| [&with_disk[..], &["--tier.ssd.capacity_bytes", bytes]].concat();
    let daemon = Daemon::start(&place, &[CAPACITY, &of("64MiB")].concat());
    wait_until("the disk is there", || daemon.log().contains("opened a disk"));
    daemon.kill();
    let same = report(&doctor(&place, &[&of("64MiB")[..], &["--json"]].concat()));
    assert_eq!(
        (check(&same, "pool")["verdict"].as_str(), check(&same, "ssd")["verdict"].as_str()),
        (Some("ok"), Some("ok"))
    );
    assert!(finding(&same, "ssd").ends_with("can be used"), "{same:#}");
    for other in ["32MiB", "128MiB"] {
        let report = report(&doctor(&place, &[&of(other)[..], &["--pool.unit_bytes", "2MiB", "--json"]].concat()));
        assert_eq!(check(&report, "pool")["verdict"], "warn", "{report:#}");
        assert!(finding(&report, "pool").contains("would be replaced, and its blocks lost"), "{report:#}");
        assert!(finding(&report, "ssd").contains("64.0 MiB that it was formatted with"), "{report:#}");
    }
    let daemon = Daemon::start(&place, &[CAPACITY, &of("32MiB")].concat());
    wait_until("the log says so", || daemon.log().contains("a disk keeps the capacity and the segments"));
    daemon.kill();
}

#[test]
fn doctor_names_a_file_of_a_secret_that_all_users_may_read() {
    let (place, home) = (Place::new(), tempfile::tempdir().unwrap());
    let file = home.path().join("secret");
    std::fs::write(&file, "a secret of at least thirty-two bytes").unwrap();
    for (mode, verdict) in [(0o644, Some("warn")), (0o600, None)] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let report = report(&doctor(&place, &["--tier.secret_file", file.to_str().unwrap(), "--json"]));
        let found = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "secrets");
        assert_eq!(found.and_then(|check| check["verdict"].as_str()), verdict, "{report:#}");
    }
}
