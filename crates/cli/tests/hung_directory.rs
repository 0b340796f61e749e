//! A shared directory that hangs for good, and the next daemon of the host.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::tiers::*;
use support::*;

/// A filesystem of its own on a file. Frozen, it holds whoever writes to it, as a shared mount whose server is gone.
struct Volume {
    point: PathBuf,
    is_frozen: bool,
}

fn run(command: &str, arguments: &[&Path]) -> bool {
    let mut words = command.split(' ');
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words).args(arguments).output().is_ok_and(|output| output.status.success())
}

impl Volume {
    /// None where this user may not mount.
    fn new(home: &Path) -> Option<Volume> {
        let (image, point) = (home.join("image"), home.join("shared"));
        fs::create_dir(&point).expect("a directory");
        fs::File::create(&image).and_then(|file| file.set_len(128 << 20)).expect("a file");
        let is_mounted = run("mkfs.ext4 -q", &[&image]) && run("mount -o loop", &[&image, &point]);
        let volume = is_mounted.then_some(Volume { point, is_frozen: false })?;
        fs::create_dir(volume.directory()).expect("a directory");
        Some(volume)
    }

    fn directory(&self) -> PathBuf {
        self.point.join("blocks")
    }

    fn freeze(&mut self) {
        assert!(run("fsfreeze --freeze", &[&self.point]));
        self.is_frozen = true;
    }

    fn thaw(&mut self) {
        self.is_frozen = !run("fsfreeze --unfreeze", &[&self.point]);
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.is_frozen {
            self.thaw();
        }
        run("umount --lazy", &[&self.point]);
    }
}

/// Ends the daemon, whose process the hung thread keeps.
fn end(daemon: &Daemon, signal: Signal) {
    kill_process(Pid::from_raw(daemon.pid()).expect("a process"), signal).expect("a signal");
}

/// The daemon's threads of this name.
fn threads(daemon: &Daemon, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("its threads").flatten();
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).filter(|own| own.trim() == name).count()
}

/// Begins a purge, and leaves it when its thread is there.
fn purge(place: &Place, daemon: &Daemon) {
    let mut purge = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["purge", "--tenant", "t", "--shared-stores", "--socket.directory"])
        .arg(place.sockets())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a command");
    wait_until("the purge waits for the directory", || threads(daemon, "forebay-purge") > 0);
    purge.kill().and_then(|()| purge.wait()).expect("its end");
}

/// Through three tries to open the directory, which come every two seconds.
fn waits_with_one_thread(daemon: &Daemon) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(8) {
        let waiting = threads(daemon, "forebay-fs-open");
        assert!(waiting <= 1, "{waiting} threads wait for one directory");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_directory_that_hangs_keeps_no_later_daemon_from_starting() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let place = Place::new();
    // Their drop waits for their processes, and so for the volume's.
    let mut daemons = Vec::new();
    let Some(mut volume) = Volume::new(home.path()) else { return eprintln!("skipped: nothing can be mounted here") };
    let path = volume.directory();
    let directory = ["--tier.fs.directories", path.to_str().expect("UTF-8"), "--tier.fs.timeout_ms", "500"];
    let arguments = [&directory[..], &["--drain.deadline_seconds", "1"]].concat();
    let (first, client, worker) = serving(&place, &arguments);
    daemons.push(first);
    volume.freeze();
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..50);
    // Frozen, it answers reads.
    wait_until("it takes no writes", || {
        tier(&client, "fs").stores.iter().any(|store| !store.refuses_writes.is_empty())
    });
    drop((client, worker));
    purge(&place, &daemons[0]);
    end(&daemons[0], Signal::KILL);
    // It finds its directory hanging, and serves without.
    let arguments = [&["--pool.capacity_bytes", "16MiB"], &arguments[..]].concat();
    daemons.push(Daemon::start(&place, &arguments));
    waits_with_one_thread(&daemons[1]);
    end(&daemons[1], Signal::TERM);
    daemons.push(Daemon::start(&place, &arguments));
    volume.thaw();
}
