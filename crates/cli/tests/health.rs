//! `forebay health` as probes run it: its exit code and its words, beside those of the pages.

mod command;
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use command::{Answer, forebay, run};
use rustix::process::{Pid, Signal, kill_process};
use support::{Client, Daemon, Place, engine, wait_until};

fn health(place: &Place, more: &[&str]) -> Answer {
    let sockets = place.sockets();
    run(&[&["health", "--socket.directory", sockets.to_str().unwrap()], more].concat())
}

#[test]
fn a_daemon_that_serves_is_alive_and_ready_in_the_words_of_its_pages() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--http.address", "127.0.0.1:0"]);
    wait_until("the daemon is ready", || health(&place, &[]).code == 0);
    for (flag, page) in [("--live", "/livez"), ("--ready", "/readyz")] {
        let answer = health(&place, &[flag]);
        assert_eq!((answer.code, answer.err.as_str()), (0, ""), "{answer:?}");
        let names =
            |text: &str| text.lines().map(|line| line.split(':').next().unwrap().to_owned()).collect::<Vec<_>>();
        let page = daemon.page(page);
        let (_, body) = page.split_once("\r\n\r\n").expect("a page");
        assert_eq!(names(&answer.out), names(body), "{answer:?}");
    }
    assert_eq!(health(&place, &["--json"]).json()["is_ready"], true);
    assert_eq!(health(&place, &["--live", "--json"]).json()["is_alive"], true);
    assert_eq!(health(&place, &["--live", "--ready"]).code, 2);
}

#[test]
fn a_daemon_that_drains_is_alive_and_not_ready() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB", "--drain.deadline_seconds", "60"]);
    let (client, _worker) = engine(&place, "a", 4096);
    let namespace = client.namespace("t", vec![support::group()]).expect("a namespace");
    let held = client.reserve(namespace, 4);
    assert!(!held.is_empty());
    daemon.terminate();
    wait_until("it drains", || health(&place, &[]).code == 1);
    let answer = health(&place, &[]);
    assert!(answer.out.starts_with("not ready\n") && answer.out.contains("\nfail drain: "), "{answer:?}");
    assert_eq!(health(&place, &["--live"]).code, 0);
}

/// The memory of a pool that was replaced is had again when its last worker lets go of it.
#[test]
fn memory_that_cannot_be_had_is_told_and_asked_for_again_until_it_is_there() {
    let place = Place::new();
    let arguments = ["--pool.capacity_bytes", "16MiB", "--pool.huge_pages", "off"];
    let daemon = Daemon::start(&place, &arguments);
    let (client, worker) = engine(&place, "a", 4096);
    daemon.kill();
    drop(client);
    let mapping = worker.detach();
    let table = File::options().write(true).open(place.pool().join("table")).expect("a table");
    table.write_all_at(b"?", 0).expect("it is damaged");

    let _daemon = Daemon::start(&place, &arguments);
    let watcher = Client::open(&place, "watcher", 0);
    let told = "0 B of 16.0 MiB populated: workers still map the pool that was replaced";
    wait_until("it is told", || health(&place, &[]).out.contains(&format!("\nfail pool: {told}")));
    let reply = watcher.inspect();
    assert!(reply.populated_bytes == 0 && reply.pool_trouble.starts_with(told), "{reply:?}");
    drop(mapping);
    wait_until("there is memory again", || watcher.inspect().populated_bytes == 16 << 20);
    assert_eq!(watcher.inspect().pool_trouble, "");
    assert_eq!(health(&place, &[]).code, 0);
}

#[test]
fn a_daemon_that_is_not_there_or_stands_still_fails_in_time() {
    let place = Place::new();
    let absent = health(&place, &["--live"]);
    assert!(absent.code == 1 && absent.err.contains("hint:"), "{absent:?}");
    let absent = health(&place, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&absent.out).expect("an object also where nobody answers");
    assert_eq!((&json["is_ready"], &json["checks"][0]["verdict"]), (&false.into(), &"fail".into()), "{absent:?}");
    assert!(json["checks"][0]["finding"].as_str().unwrap().starts_with("cannot reach the daemon"), "{absent:?}");
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    let pid = Pid::from_raw(daemon.pid()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let begun = Instant::now();
    let stopped = health(&place, &["--live", "--timeout", "1"]);
    kill_process(pid, Signal::CONT).unwrap();
    assert!(stopped.code == 1 && stopped.err.contains("error:") && stopped.err.contains("hint:"), "{stopped:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for {:?}", begun.elapsed());
}

/// They wait long for a daemon that works, and have no deadline of their own.
#[test]
fn commands_whose_answer_may_take_long_end_when_the_daemon_stands_still() {
    let (place, home) = (Place::new(), tempfile::tempdir().expect("a directory"));
    let daemon = Daemon::start(&place, &["--pool.capacity_bytes", "16MiB"]);
    let (trace, sockets) = (home.path().join("trace"), place.sockets());
    let trace = trace.to_str().expect("a path in UTF-8");
    let pid = Pid::from_raw(daemon.pid()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let commands = [&["audit"][..], &["trace", "record", trace], &["purge", "--tenant", "blue"]];
    let mut children = commands.map(|words| {
        let mut command = forebay(words);
        command.arg("--socket.directory").arg(&sockets).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary runs")
    });
    let begun = Instant::now();
    while children.iter_mut().any(|child| child.try_wait().expect("it is ours").is_none()) {
        if begun.elapsed() > Duration::from_secs(40) {
            children.iter_mut().for_each(|child| child.kill().expect("it is ours"));
            kill_process(pid, Signal::CONT).unwrap();
            panic!("they wait for ever");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    kill_process(pid, Signal::CONT).unwrap();
    for child in children {
        Answer::of(child.wait_with_output().unwrap()).assert_refused(1, "the daemon did not answer in time");
    }
    assert!(!home.path().join("trace").exists(), "a file of nothing");
}
