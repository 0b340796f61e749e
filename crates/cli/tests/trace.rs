//! Whatever ends a recording, the file has what was recorded, in whole lines, and the command says how much.

mod command;
mod support;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use command::{Answer, hearing};
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_sim::read::{Hints, read};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use support::{DEADLINE, Daemon, Place, hashes, runtime, wait_until};

const LOOKUPS: u64 = 40;

struct Recording {
    child: Child,
    err: BufReader<std::process::ChildStderr>,
    file: PathBuf,
}

impl Recording {
    /// Once the daemon streams to it.
    fn start(place: &Place, home: &Path, more: &[&str]) -> Recording {
        let file = home.join(format!("trace-{}", std::fs::read_dir(home).unwrap().count()));
        let mut command = hearing(&["trace", "record"]);
        command.arg("--socket.directory").arg(place.sockets()).arg(&file).args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut err = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        err.read_line(&mut line).expect("it says that it records");
        assert!(line.contains("lookups are recorded"), "{line}");
        Recording { child, err, file }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn end(mut self) -> (Answer, String) {
        let mut err = String::new();
        self.err.read_to_string(&mut err).expect("text");
        let mut output = self.child.wait_with_output().expect("it ends");
        output.stderr = err.into_bytes();
        (Answer::of(output), std::fs::read_to_string(&self.file).expect("the file is there"))
    }
}

/// The daemon counts a lookup before the recording has it.
fn wait_for_lookups_in(file: &Path) {
    let lines = || std::fs::read_to_string(file).expect("the file is there").lines().count() as u64;
    wait_until("the lookups are in the file", || lines() == LOOKUPS + 1);
}

/// Lookups that the daemon has answered.
fn look_up(place: &Place, keys: u64) {
    let mut client = Client::new(place.sockets(), "asker", DEADLINE);
    runtime().block_on(async {
        let group = GroupBytes { group: 0, bytes: 4096 };
        let fields = [("model".to_string(), "recorded".to_string())];
        let namespace = client.open_namespace(fields, [group]).await.expect("a namespace");
        let before = looked_at(&mut client).await;
        for nth in 0..LOOKUPS {
            let hashes = hashes(nth * keys..(nth + 1) * keys);
            let hashes = pack(hashes.iter().map(|hash| hash.as_slice())).expect("hashes of one length");
            client.lookup(namespace, 0, &hashes).await.expect("a lookup");
        }
        while looked_at(&mut client).await < before + LOOKUPS * keys {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
}

async fn looked_at(client: &mut Client) -> u64 {
    client.advise().await.expect("advice").windows[2].keys
}

#[test]
fn each_signal_that_ends_a_recording_leaves_all_of_it_in_the_file() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1] {
        let recording = Recording::start(&place, home.path(), &[]);
        look_up(&place, 1);
        wait_for_lookups_in(&recording.file);
        kill_process(recording.pid(), signal).expect("it runs");
        let file = recording.file.clone();
        let (answer, _) = recording.end();
        assert!(answer.code == 0 && answer.out.starts_with("40 lookups were recorded"), "{signal:?}: {answer:?}");
        assert_eq!(read(&file, Hints::default()).expect("it reads back").len() as u64, LOOKUPS, "{signal:?}");
    }
}

#[test]
fn a_daemon_that_stands_still_while_it_is_recorded_ends_the_recording_with_a_hint() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    // There is one recording at a time; the second is over before anybody has noticed.
    for more in [&[][..], &["--seconds", "4"]] {
        let mut recording = Recording::start(&place, home.path(), more);
        look_up(&place, 1);
        wait_for_lookups_in(&recording.file);
        let pid = Pid::from_raw(daemon.pid()).expect("it runs");
        kill_process(pid, Signal::STOP).expect("it runs");
        let begun = std::time::Instant::now();
        let mut is_over = || recording.child.try_wait().expect("it is ours").is_some();
        while !is_over() && begun.elapsed() < 2 * DEADLINE {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let was_over = is_over();
        kill_process(pid, Signal::CONT).expect("it runs");
        if !was_over {
            recording.child.kill().expect("it is ours");
            panic!("it waits for ever: {more:?}");
        }
        let (answer, text) = recording.end();
        let is_told =
            answer.err.contains("error: the daemon did not answer in time") && answer.err.contains("\nhint: ");
        assert!(answer.code == 1 && is_told, "{more:?}: {answer:?}");
        assert!(answer.out.starts_with("40 lookups were recorded"), "{more:?}: {answer:?}");
        assert_eq!(text.lines().count() as u64, LOOKUPS + 1, "{more:?}");
    }
}

#[test]
fn a_daemon_that_ends_while_it_is_recorded_ends_the_recording_with_an_error() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    for signal in [Signal::TERM, Signal::KILL] {
        let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
        let recording = Recording::start(&place, home.path(), &["--seconds", "600"]);
        look_up(&place, 1);
        wait_for_lookups_in(&recording.file);
        kill_process(Pid::from_raw(daemon.pid()).expect("it runs"), signal).expect("it runs");
        let (answer, text) = recording.end();
        let is_told = answer.err.contains("error: the daemon has ended") && answer.err.contains("\nhint: ");
        assert!(answer.code == 1 && is_told, "{signal:?}: {answer:?}");
        assert!(answer.out.starts_with("40 lookups were recorded"), "{signal:?}: {answer:?}");
        assert_eq!(text.lines().count() as u64, LOOKUPS + 1, "{signal:?}");
    }
}

#[test]
fn a_file_that_takes_no_more_ends_with_a_whole_line() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    // In the middle of a line of 100 keys, as a full disk would.
    let most = 20_000;
    let recording = Recording::start(&place, home.path(), &[]);
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    prlimit(Some(recording.pid()), Resource::Fsize, limit).expect("it is ours");
    look_up(&place, 100);
    let file = recording.file.clone();
    let (answer, text) = recording.end();
    answer.assert_refused(1, "cannot write the trace");
    assert!(text.ends_with('\n') && text.len() as u64 <= most && text.len() > 16_000, "{} bytes", text.len());
    assert!(!read(&file, Hints::default()).expect("it reads back").is_empty());
}

#[test]
fn a_recording_goes_on_though_nobody_takes_what_it_says() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("it opens");
    let file = home.path().join("trace");
    let mut command = hearing(&["trace", "record", "--socket.directory"]);
    command.arg(place.sockets()).arg(&file).stdout(Stdio::piped()).stderr(full);
    let child = command.spawn().expect("it starts");
    wait_until("it records", || file.exists());
    look_up(&place, 1);
    wait_for_lookups_in(&file);
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    let answer = Answer::of(child.wait_with_output().expect("it ends"));
    assert!(answer.code == 0 && answer.out.starts_with("40 lookups were recorded"), "{answer:?}");
}
