//! What the shipped daemon does where the system sets it a limit: a log that nobody reads, files that may not grow.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use forebay_rpc::MAX_BLOCKS;
use forebay_rpc::proto::*;
use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, Resource, Rlimit};
use support::tiers::{BYTES, is_missed, is_served, store};
use support::*;

/// Small pages, so that the pool's files are plain ones.
const POOL: &[&str] = &["--pool.capacity_bytes", "16MiB", "--pool.huge_pages", "off"];

/// From now on no file of the daemon takes bytes from here on.
fn limit_files(daemon: &Daemon, bytes: Option<u64>) {
    let limit = Rlimit { current: bytes, maximum: None };
    rustix::process::prlimit(Pid::from_raw(daemon.pid()), Resource::Fsize, limit).expect("it is ours");
}

fn put(client: &Client, namespace: u32, seed: u64) -> Vec<CommitOutcome> {
    let blocks = vec![Block { hash: hash(seed).to_vec(), data: pattern(seed, BYTES) }];
    let (session, predecessor) = (client.welcome.session, Vec::new());
    let request = PutRequest { session, namespace, group: 0, predecessor, blocks, lent: None };
    call!(client, put, request).expect("a put").outcomes().collect()
}

#[test]
fn a_log_that_nobody_reads_keeps_nobody_waiting_and_loses_no_more_than_lines() {
    let place = Place::new();
    rustix::fs::mknodat(CWD, place.log(), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let reader = File::options().read(true).custom_flags(nonblock).open(place.log()).unwrap();
    let mut daemon = Daemon::spawn(&place, &[POOL, &["--log.level", "trace"]].concat()).listening(&place);
    // A pipe holds 64 KiB; each of these logs some of them.
    for start in 0..100 {
        let client = Client::open_start(&place, "a", start, 0);
        let namespace = client.namespace("t", vec![Group { rank_bytes: vec![BYTES], ..group() }]).unwrap();
        assert!(client.lookup(namespace, &hashes(0..10)).groups[0].states.is_empty());
    }
    wait_until("the pipe is full", || rustix::io::ioctl_fionread(&reader).unwrap() >= 60 << 10);
    daemon.terminate();
    wait_until("the daemon ends", || !daemon.is_running());
}

#[test]
fn a_limit_on_the_size_of_files_is_told_with_a_hint() {
    let place = Place::new();
    let own = rustix::process::geteuid().as_raw();
    let mut command = Command::new("sh");
    command.env_clear().env("PATH", "/usr/bin:/bin").env("FOREBAY_CONFIG", "");
    command.args(["-c", "ulimit -f 1000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_forebay"), "serve"]);
    command.args(["--socket.directory".as_ref(), place.sockets().as_os_str()]);
    command.args(["--pool.directory".as_ref(), place.pool().as_os_str()]);
    command.args(["--http.address", "off"]).args(POOL).uid(own).stdin(Stdio::null());
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("File too large") && said.contains("hint: ") && said.contains("ulimit -f"), "{said}");
}

#[test]
fn a_block_without_room_for_its_checksums_is_no_hit() {
    let place = Place::new();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let disk = directory.path().join("ssd");
    let disk = ["--tier.ssd.disks", disk.to_str().expect("a path in UTF-8"), "--tier.ssd.capacity_bytes", "64MiB"];
    let arguments = [POOL, &disk, &["--tier.ssd.admission", "all"]].concat();
    let daemon = Daemon::start(&place, &arguments);
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("the tier serves", || support::tiers::tier(&client, "ssd").state == "serving");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..20);
    wait_until("all lie on the disk", || support::tiers::tier(&client, "ssd").blocks == 20);
    drop((client, worker));
    daemon.kill();
    fs::remove_dir_all(place.pool()).unwrap();

    let daemon = Daemon::start(&place, &arguments);
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("the tier serves", || support::tiers::tier(&client, "ssd").state == "serving");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    // The slots are there, the pages of their records are not.
    assert!(!client.reserve(namespace, 1).is_empty());
    limit_files(&daemon, Some(0));
    is_missed(&client, namespace, 0..20);
    assert_eq!(put(&client, namespace, 100), [CommitOutcome::CommitIncomplete]);
    is_missed(&client, namespace, 100..101);
    limit_files(&daemon, None);
    assert_eq!(put(&client, namespace, 100), [CommitOutcome::CommitStored]);
    wait_until("what lies on the disk comes up", || {
        let reply = client.lookup_settled(namespace, &hashes(0..20));
        client.release(reply.lease);
        reply.groups[0].states == vec![1; 20]
    });
    is_served(&client, &worker, namespace, 0..20);
}

#[test]
fn a_call_of_too_many_blocks_is_refused_with_a_hint() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, POOL);
    let client = Client::open(&place, "a", 0);
    let namespace = client.namespace("t", vec![Group { rank_bytes: vec![1], ..group() }]).unwrap();
    let session = client.welcome.session;
    let get = |count: usize| {
        let request =
            GetRequest { session, namespace, group: 0, hash_bytes: 4, hashes: vec![7; 4 * count], lent: None };
        call!(client, get, request)
    };
    assert!(get(MAX_BLOCKS).unwrap().blocks.is_empty());
    let blocks = vec![Block { hash: vec![7; 4], data: vec![1] }; MAX_BLOCKS + 1];
    let put = PutRequest { session, namespace, group: 0, predecessor: vec![], blocks, lent: None };
    for refused in [get(MAX_BLOCKS + 1).unwrap_err(), call!(client, put, put).unwrap_err()] {
        let refused = forebay_rpc::from_status(refused);
        assert!(refused.to_string().contains("too many blocks (blocks=`16385`, limit=`16384`)"), "{refused}");
        assert!(refused.hint_text().unwrap().contains("fewer blocks at a time"), "{refused}");
    }
}

#[test]
fn sessions_of_programs_are_no_lines_of_an_operators_log() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL);
    (0..3).for_each(|start| drop(Client::open_start(&place, "a program", start, 0)));
    drop(engine(&place, "an engine", BYTES));
    daemon.says("session ended", 1);
    let log = daemon.log();
    assert!(log.contains("session opened") && log.contains("an engine") && !log.contains("a program"), "{log}");
}

#[test]
fn too_few_threads_are_told_with_a_hint() {
    let place = Place::new();
    // Root has no such limit, and a user who runs something else has more processes already.
    let own = rustix::process::geteuid();
    let uid = if own.is_root() { 61_234 } else { own.as_raw() };
    let mut command = Command::new("prlimit");
    command.env_clear().env("PATH", "/usr/bin:/bin").env("FOREBAY_CONFIG", "");
    command.args(["--nproc=4", env!("CARGO_BIN_EXE_forebay"), "serve"]);
    command.args(["--socket.directory".as_ref(), place.sockets().as_os_str()]);
    command.args(["--pool.directory".as_ref(), place.pool().as_os_str()]);
    command.args(["--http.address", "off"]).args(POOL).uid(uid).stdin(Stdio::null());
    let ended = command.output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("error: cannot start the daemon's threads: ") && told.contains("of 16 started"), "{told}");
    assert!(told.contains("hint: raise the limit of tasks"), "{told}");
}
