//! Directories and files of somebody else: the shipped daemon and its clients refuse them and say what to do.
//!
//! Root plays another user as well; where an ordinary user runs the tests, what others made is left to the table of
//! `forebay_core::trust`, and the rest is tried all the same.

mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use forebay_rpc::{ATTACH_SOCKET, RPC_SOCKET};
use support::*;

const SMALL: &[&str] = &["--pool.capacity_bytes", "32MiB"];
const NOBODY: u32 = 65_534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn give_away(path: &Path) {
    chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
}

/// What is done to a directory that a daemon or a client is then told to use, by a part of what it should say.
type Harm = fn(&Path);

fn harms() -> Vec<(&'static str, Harm)> {
    let mut harms: Vec<(&str, Harm)> = vec![
        ("others may write", |directory| mode(directory, 0o777)),
        ("others may write", |directory| mode(directory, 0o1777)),
        ("others may write", |directory| mode(directory, 0o2770)),
        ("above it", |directory| mode(directory.parent().unwrap(), 0o777)),
        ("symbolic link", |directory| {
            let elsewhere = directory.with_extension("elsewhere");
            fs::rename(directory, &elsewhere).unwrap();
            symlink(elsewhere, directory).unwrap();
        }),
    ];
    if is_root() {
        harms.push(("belongs to user 65534", give_away));
        harms.push(("belongs to user 65534", |directory| give_away(directory.parent().unwrap())));
    }
    harms
}

/// The daemon does not start, says why with a hint, and makes nothing in `directory`.
fn is_refused(place: &Place, directory: &Path, why: &str) {
    let (succeeded, log) = Daemon::spawn(place, SMALL).finish();
    assert!(!succeeded && log.contains(why) && log.contains("hint: "), "expected `{why}`:\n{log}");
    assert_eq!(fs::read_dir(directory).unwrap().count(), 0, "it made something in {}", directory.display());
}

#[test]
fn a_pool_directory_that_others_made_or_can_change_is_refused() {
    for (why, harm) in harms() {
        let place = Place::new();
        fs::create_dir(place.pool()).unwrap();
        harm(&place.pool());
        is_refused(&place, &place.pool(), why);
    }
}

#[test]
fn a_socket_directory_that_others_made_or_can_change_is_refused() {
    for (why, harm) in harms() {
        let place = Place::new();
        fs::create_dir(place.sockets()).unwrap();
        harm(&place.sockets());
        is_refused(&place, &place.sockets(), why);
    }
}

#[test]
fn a_directory_is_not_made_in_one_that_others_can_change() {
    let place = Place::new();
    mode(place.sockets().parent().unwrap(), 0o777);
    let (succeeded, log) = Daemon::spawn(&place, SMALL).finish();
    assert!(!succeeded && log.contains("above it") && log.contains("hint: "), "{log}");
    assert!(!place.sockets().exists() && !place.pool().exists());
}

#[test]
fn a_file_of_the_pool_that_others_made_or_can_change_is_refused() {
    let mut harms: Vec<(&str, Harm)> = vec![
        ("others may write", |file| mode(file, 0o620)),
        ("others may write", |file| mode(file, 0o602)),
        ("another hard link", |file| fs::hard_link(file, file.with_extension("linked")).unwrap()),
        ("symbolic link", |file| {
            fs::rename(file, file.with_extension("elsewhere")).unwrap();
            symlink(file.with_extension("elsewhere"), file).unwrap();
        }),
    ];
    if is_root() {
        harms.push(("belongs to user 65534", give_away));
    }
    for name in ["table", "data", "generation", "birth", "namespace", "purge"] {
        for (why, harm) in &harms {
            let place = Place::new();
            // Small pages lie beside the rest wherever the tests run.
            let arguments = [SMALL, &["--pool.huge_pages", "off"]].concat();
            let daemon = Daemon::start(&place, &arguments);
            // It listens before it makes its pool, and answers after that.
            drop(Client::open(&place, "watcher", 0));
            daemon.kill();
            harm(&place.pool().join(name));
            let (succeeded, log) = Daemon::spawn(&place, &arguments).finish();
            assert!(!succeeded && log.contains(why), "{name}, expected `{why}`:\n{log}");
            assert_eq!(log.matches("hint: ").count(), 1, "{name}, one hint:\n{log}");
        }
    }
}

#[test]
fn a_disk_that_others_made_or_can_change_is_refused() {
    let mut harms: Vec<(&str, Harm)> = vec![("others may write", |file| mode(file, 0o666))];
    if is_root() {
        harms.push(("belongs to user 65534", give_away));
    }
    for (why, harm) in harms {
        let place = Place::new();
        let disk = place.pool().with_extension("disk");
        fs::write(&disk, "").unwrap();
        harm(&disk);
        let path = disk.to_str().unwrap();
        let arguments = [SMALL, &["--tier.ssd.disks", path, "--tier.ssd.capacity_bytes", "64MiB"]].concat();
        let (succeeded, log) = Daemon::spawn(&place, &arguments).finish();
        assert!(!succeeded && log.contains(why) && log.contains("hint: "), "expected `{why}`:\n{log}");
        assert_eq!(fs::metadata(&disk).unwrap().len(), 0, "it wrote to it");
    }
}

fn inspect(sockets: &Path, variables: &[(&str, &str)], uid: Option<u32>) -> Output {
    ask(&["inspect"], sockets, variables, uid)
}

fn ask(what: &[&str], sockets: &Path, variables: &[(&str, &str)], uid: Option<u32>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.env_clear().env("FOREBAY_CONFIG", "").envs(variables.iter().copied()).current_dir("/");
    command.args(what).arg("--socket.directory").arg(sockets);
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    command.output().unwrap()
}

#[test]
fn a_client_talks_to_nobody_in_a_directory_that_others_made_or_can_change() {
    for (why, harm) in harms() {
        let place = Place::new();
        fs::create_dir(place.sockets()).unwrap();
        let listeners = [RPC_SOCKET, ATTACH_SOCKET].map(|name| UnixListener::bind(place.sockets().join(name)).unwrap());
        harm(&place.sockets());
        let output = inspect(&place.sockets(), &[], None);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why) && said.contains("hint: "), "expected `{why}`: {said}");
        for listener in listeners {
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err(), "it was talked to: {why}");
        }
    }
}

/// Plays the part of another user's daemon; a test of its own only for being started by one.
#[test]
fn impostor() {
    let Some(path) = std::env::var_os("FOREBAY_TEST_IMPOSTOR") else { return };
    let listener = UnixListener::bind(path).unwrap();
    for stream in listener.incoming() {
        // Whatever is said, there is no answer.
        std::mem::forget(stream.unwrap());
    }
}

#[test]
fn a_client_asks_the_kernel_whose_daemon_it_is() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    mode(place.sockets().parent().unwrap(), 0o755);
    fs::create_dir(place.sockets()).unwrap();
    // Somebody could make the socket once, and the directory was put right later.
    mode(&place.sockets(), 0o777);
    let socket = place.sockets().join(RPC_SOCKET);
    let mut impostor = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "impostor"])
        .env("FOREBAY_TEST_IMPOSTOR", &socket)
        .uid(NOBODY)
        .gid(NOBODY)
        .spawn()
        .unwrap();
    wait_until("the impostor listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    mode(&place.sockets(), 0o755);
    let output = inspect(&place.sockets(), &[], None);
    impostor.kill().unwrap();
    impostor.wait().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("user 65534") && said.contains("hint: "), "{said}");
}

#[test]
fn a_daemon_of_an_ordinary_user_serves_its_own_and_those_who_name_it() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    give_away(place.sockets().parent().unwrap());
    let mut daemon = Daemon::start_as(&place, SMALL, NOBODY);
    let own = inspect(&place.sockets(), &[], Some(NOBODY));
    assert!(own.status.success(), "{}", String::from_utf8_lossy(&own.stderr));
    let root = inspect(&place.sockets(), &[], None);
    let said = String::from_utf8_lossy(&root.stderr).into_owned();
    assert!(!root.status.success() && said.contains("FOREBAY_DAEMON_UID"), "{said}");
    let trusting = inspect(&place.sockets(), &[("FOREBAY_DAEMON_UID", "65534")], None);
    assert!(trusting.status.success(), "{}", String::from_utf8_lossy(&trusting.stderr));
    let wrong = inspect(&place.sockets(), &[("FOREBAY_DAEMON_UID", "everybody")], None);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("give a user id, such as 998"), "{said}");
    let empty = inspect(&place.sockets(), &[("FOREBAY_DAEMON_UID", "")], Some(NOBODY));
    assert!(empty.status.success(), "an empty variable is one that is not set");
    assert!(daemon.is_running());
}

#[test]
fn a_user_who_is_not_allowed_is_told_how_to_be() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    mode(place.sockets().parent().unwrap(), 0o755);
    let _daemon = Daemon::start(&place, SMALL);
    let refused = inspect(&place.sockets(), &[], Some(NOBODY));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("id (65534) to the daemon's `socket.allow_uids`"), "{said}");
    assert!(!said.contains("forebay serve"), "a daemon that runs is not to be started: {said}");
    mode(&place.sockets(), 0o700);
    let kept_out = inspect(&place.sockets(), &[], Some(NOBODY));
    let said = String::from_utf8_lossy(&kept_out.stderr);
    let hint = format!("hint: run `chmod o+x {}`", place.sockets().display());
    assert!(!kept_out.status.success() && said.contains(&hint), "{said}");
}

#[test]
fn a_user_who_is_not_among_those_allowed_is_told_to_ask_for_it() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    mode(place.sockets().parent().unwrap(), 0o755);
    let daemon = Daemon::start(&place, &[SMALL, &["--socket.allow_uids", "[12345]"]].concat());
    // The connection may be closed at any of the client's steps.
    for number in 0..10 {
        let what: &[&str] = if number < 5 { &["inspect"] } else { &["purge", "--tenant", "t"] };
        let refused = ask(what, &place.sockets(), &[], Some(NOBODY));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("`socket.allow_uids`"), "{said}");
        let is_plain = ["Error(", "Error {", "Kind(", "source:", "None"].iter().all(|debug| !said.contains(debug));
        assert!(is_plain, "it is told in words, not in Rust's: {said}");
        assert!(!said.contains("forebay serve"), "a daemon that runs is not to be started: {said}");
    }
    // Whoever tries again and again fills no log.
    assert!(daemon.says("refused a connection", 1) < 5, "{}", daemon.log());
}

#[test]
fn the_umask_keeps_no_allowed_user_from_the_sockets() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    mode(place.sockets().parent().unwrap(), 0o755);
    let allowing = [SMALL, &["--socket.allow_uids", "[65534]"]].concat();
    let daemon = Daemon::start_after(&place, &allowing, "umask 077");
    let allowed = inspect(&place.sockets(), &[], Some(NOBODY));
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
    assert_eq!(fs::metadata(place.pool()).unwrap().permissions().mode() & 0o777, 0o700);
    daemon.kill();
    // Somebody else's choice is kept, and told.
    mode(&place.sockets(), 0o700);
    let daemon = Daemon::start(&place, &allowing);
    assert_eq!(fs::metadata(place.sockets()).unwrap().permissions().mode() & 0o777, 0o700);
    let log = daemon.log();
    assert!(log.contains("may not reach the sockets") && log.contains("chmod o+x"), "{log}");
}

#[test]
fn a_directory_is_made_behind_a_link_above_it() {
    let place = Place::new();
    let root = place.sockets().parent().unwrap().to_path_buf();
    fs::create_dir(root.join("run")).unwrap();
    symlink("run", root.join("var-run")).unwrap();
    // As `/var/run` leads to `/run`.
    let linked = root.join("var-run/forebay");
    let arguments = [SMALL, &["--socket.directory", linked.to_str().unwrap()]].concat();
    let mut daemon = Daemon::spawn(&place, &arguments);
    wait_until("the daemon answers", || inspect(&linked, &[], None).status.success());
    assert!(daemon.is_running() && root.join("run/forebay").join(RPC_SOCKET).exists());
}

#[test]
fn doctor_finds_what_would_keep_the_daemon_from_starting() {
    let place = Place::new();
    let checked = |uid: Option<u32>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.env_clear().env("FOREBAY_CONFIG", "").current_dir("/").arg("doctor").args(SMALL);
        command.arg("--socket.directory").arg(place.sockets()).arg("--pool.directory").arg(place.pool());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (_, usable) = checked(None);
    assert!(usable.contains("ok    pool "), "{usable}");
    assert!(!place.sockets().exists() && !place.pool().exists(), "doctor made something");
    fs::create_dir(place.pool()).unwrap();
    mode(&place.pool(), 0o1777);
    let (succeeded, report) = checked(None);
    assert!(
        !succeeded && report.contains("fail  pool ") && report.contains("others may write to the directory"),
        "{report}"
    );
    if is_root() {
        mode(&place.pool(), 0o755);
        give_away(&place.pool());
        let (succeeded, report) = checked(None);
        assert!(!succeeded && report.contains("fail  pool "), "{report}");
        assert!(report.contains("the directory belongs to user 65534"), "{report}");
        mode(place.sockets().parent().unwrap(), 0o755);
        let (succeeded, report) = checked(Some(NOBODY));
        assert!(!succeeded && report.contains("fail  socket "), "{report}");
        assert!(report.contains("Permission denied") && report.contains("FOREBAY_SOCKET_DIRECTORY"), "{report}");
    }
}

#[test]
fn no_default_lies_where_others_can_make_it() {
    if !is_root() {
        return;
    }
    let shown = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command
            .env_clear()
            .env("FOREBAY_CONFIG", "")
            .envs(variables.iter().copied())
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY);
        String::from_utf8(command.arg("config").output().unwrap().stdout).unwrap()
    };
    assert!(shown(&[]).contains("/run/user/65534/forebay"), "{}", shown(&[]));
    assert!(shown(&[("XDG_RUNTIME_DIR", "/x")]).contains("/x/forebay"));
    assert!(!shown(&[]).contains("/tmp"), "{}", shown(&[]));
}
