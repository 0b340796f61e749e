//! Benchmarks print what they promise: one object, with every row, and no private daemon afterwards.
//!
//! Small rounds: the figures themselves are not judged here.

mod command;
mod support;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use command::{Answer, forebay, hearing, run};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{DEADLINE, Daemon, Place, wait_until};

fn rows(report: &Value, bench: &str) -> Vec<Value> {
    assert_eq!(report["bench"], bench);
    assert!(report["version"].as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION")));
    assert!(report["command"].as_str().unwrap().starts_with(&format!("forebay bench {bench} ")));
    assert!(report["machine"]["memory_bytes"].as_u64().unwrap() > 0);
    report["rows"].as_array().unwrap().clone()
}

/// That a picture was written with these words, and without a place that is no number.
fn assert_plot(path: &std::path::Path, told: &[&str]) {
    let picture = std::fs::read_to_string(path).expect("a plot");
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n") && !picture.contains("NaN"), "{picture}");
    told.iter().for_each(|word| assert!(picture.contains(&format!(">{word}</text>")), "{word} is not in {picture}"));
}

/// Directories that the process `pid` made for a private daemon.
fn leavings(pid: u32) -> usize {
    let prefix = format!("forebay-bench-{pid}-");
    let ours = |directory: &str| {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(&prefix)).count()
    };
    ours("/dev/shm") + ours("/tmp")
}

#[test]
fn lookups_are_measured_on_a_private_daemon_that_is_gone_afterwards() {
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    let flags = ["--rounds", "20", "--keys", "16", "--keys", "64", "--json", "--plot", plot.to_str().unwrap()];
    let mut command = forebay(&[&["bench", "lookup"][..], &flags].concat());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let report = Answer::of(child.wait_with_output().unwrap()).json();
    let rows = rows(&report, "lookup");
    let varied: Vec<_> = rows.iter().map(|row| (row["op"].as_str().unwrap(), row["keys"].as_u64().unwrap())).collect();
    assert_eq!(varied, [("hit", 16), ("hit", 64), ("miss", 16), ("miss", 64)]);
    for row in &rows {
        assert_eq!(row["errors"], 0, "{row}");
        let [p50, p99] = ["p50_us", "p99_us"].map(|name| row[name].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99, "{row}");
        for (ours, empty, ratio) in [(p50, "empty_p50_us", "ratio"), (p99, "empty_p99_us", "p99_ratio")] {
            let [empty, ratio] = [empty, ratio].map(|name| row[name].as_f64().unwrap());
            assert!(empty > 0.0 && (ratio - ours / empty).abs() < 1e-9, "{row}");
        }
    }
    assert_eq!(leavings(pid), 0);
    assert_plot(&plot, &["lookups that hit", "lookups that miss", "p50", "p99", "empty call, p50"]);
}

/// Of the shell, of a terminal that goes, of a service manager, and of people with other habits.
const ENDING: [Signal; 6] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::ALARM];

/// A measurement that goes on for ever, once its daemon has its directories.
fn lookups_for_ever() -> Child {
    let mut command = hearing(&["bench", "lookup", "--rounds", "100000000"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the private daemon has its directories", || leavings(child.id()) == 2);
    child
}

#[test]
fn an_interrupted_measurement_takes_its_daemon_with_it() {
    for signal in ENDING {
        let child = lookups_for_ever();
        let pid = child.id();
        is_interrupted(child, signal);
        assert_eq!(leavings(pid), 0, "{signal:?}");
    }
}

#[test]
fn a_private_daemon_ends_with_a_measurement_that_is_killed_and_leaves_nothing() {
    let mut child = lookups_for_ever();
    let pid = child.id();
    wait_until("the measurement runs", || !sockets(pid).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the private daemon and what it made are gone", || leavings(pid) == 0);
}

/// Of private daemons of the process `pid`.
fn sockets(pid: u32) -> Vec<std::path::PathBuf> {
    let prefix = format!("forebay-bench-{pid}-");
    let directories = std::fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().path());
    let ours =
        directories.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)));
    ours.map(|path| path.join("forebay.sock")).filter(|path| path.exists()).collect()
}

#[test]
fn an_interrupted_measurement_takes_its_file_with_it() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("disk");
    for signal in ENDING {
        let mut command = hearing(&["bench", "ssd", path.to_str().expect("a path in UTF-8")]);
        command.args(["--size-bytes", "65536", "--depth", "4", "--pairs", "1000000"]);
        command.args(["--run-bytes", "1048576", "--capacity-bytes", "16777216"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the file is there", || path.metadata().is_ok_and(|file| file.len() > 0));
        is_interrupted(child, signal);
        assert!(!path.exists(), "{signal:?} left the file");
    }
}

#[test]
fn an_interrupted_measurement_takes_its_other_process_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let count = || std::fs::read_dir(directory.path()).unwrap().count();
    for signal in ENDING {
        let mut command = hearing(&["bench", "transfer", "--transport", "shm", "--pairs", "1000000"]);
        command.env("TMPDIR", directory.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until("the other process has its directory", || count() > 0);
        is_interrupted(child, signal);
        assert_eq!(count(), 0, "{signal:?}");
    }
}

#[test]
fn a_disk_that_cannot_be_measured_is_refused_before_anything_is_announced() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("a file");
    std::fs::write(&file, "precious").unwrap();
    for (path, why) in [
        (file.clone(), "the benchmark's file exists already"),
        (home.path().to_owned(), "the benchmark's file exists already"),
        (home.path().join("nowhere/disk"), "there is no directory for the benchmark's file"),
        (file.join("disk"), "there is no directory for the benchmark's file"),
    ] {
        let refused = run(&["bench", "ssd", path.to_str().expect("a path in UTF-8")]);
        assert!(refused.err.starts_with(&format!("error: {why} (path=`{}`)\nhint: ", path.display())), "{refused:?}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn what_cannot_be_measured_is_refused_with_bounds() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = home.path().join("disk");
    let ssd = ["bench", "ssd", path.to_str().expect("a path in UTF-8")];
    let redis = ["bench", "redis", "redis://localhost:1"];
    let transfer = ["bench", "transfer"];
    for (command, flag, value, bounds) in [
        (&ssd[..], "--size-bytes", "18446744073709551615", "a multiple of 4KiB, and 64MiB at most"),
        (&ssd, "--size-bytes", "4097", "a multiple of 4KiB"),
        (&ssd, "--size-bytes", "0", "a multiple of 4KiB"),
        (&ssd, "--depth", "0", "from 1 to 1024"),
        (&ssd, "--depth", "4294967295", "from 1 to 1024"),
        (&ssd, "--pairs", "0", "1 or more"),
        (&ssd, "--run-bytes", "0", "from 128MiB"),
        (&ssd, "--run-bytes", "1", "from 128MiB"),
        (&ssd, "--run-bytes", "64MiB", "from 128MiB"),
        (&ssd, "--capacity-bytes", "1", "from 16MiB to 4TiB"),
        (&ssd, "--capacity-bytes", "18446744073709551615", "from 16MiB to 4TiB"),
        (&["bench", "copy"], "--pairs", "0", "1 or more"),
        (&["bench", "copy"], "--threads", "0", "from 1 to 1024"),
        (&["bench", "copy"], "--working-set-bytes", "0", "from 16MiB to 1TiB"),
        (&["bench", "copy"], "--working-set-bytes", "18446744073709551615", "from 16MiB to 1TiB"),
        (&["bench", "lookup"], "--keys", "18446744073709551615", "from 1 to 1048576"),
        (&["bench", "lookup"], "--rounds", "0", "from 1 to"),
        (&redis, "--size-bytes", "0", "from 1 to 512MiB"),
        (&redis, "--size-bytes", "18446744073709551615", "from 1 to 512MiB"),
        (&redis, "--runs", "0", "from 1 to"),
        (&redis, "--run-bytes", "0", "from 1 to"),
        (&redis, "--threads", "0", "from 1 to 1024"),
        (&redis, "--lookup-keys", "18446744073709551615", "or less"),
        (&transfer, "--pairs", "0", "be 1 or more"),
        (&transfer, "--run-bytes", "0", "be 1 or more"),
        (&transfer, "--size-bytes", "0", "be 1 or more"),
        (&transfer, "--segments", "0", "be 1 or more"),
        (&transfer, "--depth", "0", "be 1 or more"),
    ] {
        let refused = run(&[command, &[flag, value]].concat());
        refused.assert_refused(2, &format!("`{flag}` cannot be `"));
        assert!(refused.err.contains(bounds), "{flag} {value}: {refused:?}");
    }
    let shape = ["bench", "transfer", "--size-bytes", "18446744073709551615"];
    run(&shape).assert_refused(1, "a shape without bytes, or with too many");
    let nobody = ["bench", "transfer", "--connect", "tcp://127.0.0.1:1"];
    run(&nobody).assert_refused(1, "address=`tcp://127.0.0.1:1`");
    assert!(!path.exists());
}

/// A benchmark of an hour would be lost with the terminal.
#[test]
fn a_measurement_goes_on_though_nobody_takes_what_it_says() {
    let (reader, closed) = std::io::pipe().unwrap();
    drop(reader);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    for stderr in [Stdio::from(full), Stdio::from(closed)] {
        let flags = ["--pairs", "1", "--threads", "1", "--working-set-bytes", "16MiB", "--json"];
        let mut command = forebay(&[&["bench", "copy"][..], &flags].concat());
        let answer = Answer::of(command.stdout(Stdio::piped()).stderr(stderr).output().unwrap());
        assert!(!rows(&answer.json(), "copy").is_empty());
    }
}

fn is_interrupted(mut child: Child, signal: Signal) {
    kill_process(Pid::from_child(&child), signal).unwrap();
    let begun = Instant::now();
    // What it says before its end fits into the pipes.
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("{signal:?} did not end it: {:?}", child.wait_with_output().unwrap());
        }
        thread::sleep(Duration::from_millis(5));
    }
    let answer = Answer::of(child.wait_with_output().unwrap());
    let is_told = answer.err.ends_with("error: the measurement was interrupted\n");
    assert!(answer.code == 1 && is_told, "{signal:?}: {answer:?}");
}

#[test]
fn lookups_can_be_measured_on_a_running_daemon_which_keeps_nothing() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "64MiB"]);
    let sockets = place.sockets();
    let inspect = || run(&["inspect", "--json", "--socket.directory", sockets.to_str().unwrap()]).json();
    let flags = ["--rounds", "5", "--keys", "100", "--socket.directory", sockets.to_str().unwrap()];
    let answer = run(&[&["bench", "lookup"][..], &flags].concat());
    assert_eq!(answer.code, 0, "{answer:?}");
    let head =
        "op    keys  lookups  p50 us  p99 us  max us  empty p50 us  empty p99 us  p50 ratio  p99 ratio  errors\n";
    assert!(answer.out.starts_with(&format!("{head}hit    100        5 ")), "{}", answer.out);

    wait_until("the session is gone", || inspect()["sessions"] == Value::Array(Vec::new()));
    let after = inspect();
    assert_eq!(after["namespaces"], Value::Array(Vec::new()), "{after:#}");
    assert_eq!(after["pinned_bytes"], 0, "{after:#}");
}

#[test]
fn copies_are_measured_as_stores_loads_and_summed_loads_of_each_shape() {
    let flags = ["bench", "copy", "--pairs", "1", "--threads", "1", "--working-set-bytes", "33554432", "--json"];
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    let report = run(&[&flags[..], &["--plot", plot.to_str().unwrap()]].concat()).json();
    assert_plot(&plot, &["store", "in one piece", "in many pieces", "memcpy"]);
    let rows = rows(&report, "copy");
    let stores = rows.iter().filter(|row| row["direction"] == "store").count();
    assert!(stores > 0 && 3 * stores == rows.len(), "{report:#}");
    for row in &rows {
        assert!(row["ratio"].as_f64().unwrap() > 0.0 && row["threads"] == 1, "{row}");
    }
}

#[test]
fn without_a_gpu_the_engine_over_host_memory_is_measured_each_way_and_both_ways_at_once() {
    let shape = ["--size-bytes", "4096", "--size-bytes", "64KiB", "--count", "16"];
    let amount = ["--working-set-bytes", "1MiB", "--runs", "1", "--threads", "1"];
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    let drawn = ["--json", "--engine", "host", "--plot", plot.to_str().unwrap()];
    let report = run(&[&["bench", "device"][..], &shape, &amount, &drawn].concat()).json();
    assert_plot(&plot, &["load", "store", "both", "threads, 16 copies", "memcpy"]);
    let rows = rows(&report, "device");
    let found: Vec<_> =
        rows.iter().map(|row| (row["direction"].as_str().unwrap(), row["size_bytes"].as_u64().unwrap())).collect();
    let of = |bytes| [("load", bytes), ("store", bytes), ("both", bytes)];
    assert_eq!(found, [of(4096), of(65536)].concat());
    for row in &rows {
        assert!(row["gb_per_s"].as_f64().unwrap() > 0.0 && row["ratio"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["engine"] == "host" && row["multiprocessors"].is_null() && row["count"] == 16, "{row}");
    }
    let told = run(&[&["bench", "device"][..], &shape, &amount, &["--direction", "load"]].concat());
    assert_eq!(told.code, 0, "{told:?}");
    assert!(told.err.contains("no GPU is measured") || told.out.contains("cuda"), "{told:?}");
}

#[test]
fn the_ssd_is_measured_on_a_file_of_its_own_that_is_gone_afterwards() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("disk");
    let file = path.to_str().expect("a path in UTF-8");
    let shape = ["--size-bytes", "65536", "--depth", "4", "--pairs", "1"];
    let amount = ["--run-bytes", "1048576", "--capacity-bytes", "16777216", "--json"];
    let plot = directory.path().join("plot.svg");
    let drawn = ["--plot", plot.to_str().expect("a path in UTF-8")];
    let report = run(&[&["bench", "ssd", file][..], &shape, &amount, &drawn].concat()).json();
    assert_plot(&plot, &["read", "write", "depth 4", "GB/s"]);
    let rows = rows(&report, "ssd");
    let directions: BTreeSet<&str> = rows.iter().filter_map(|row| row["direction"].as_str()).collect();
    assert_eq!((rows.len(), directions), (2, BTreeSet::from(["read", "write"])));
    for row in &rows {
        assert!(row["gb_per_s"].as_f64().unwrap() > 0.0 && row["errors"] == 0, "{row}");
    }
    assert!(!path.exists());
}

#[test]
fn transfers_are_measured_on_both_transports_and_between_two_commands() {
    let shape = ["--size-bytes", "4096", "--size-bytes", "262144", "--segments", "3", "--depth", "2", "--pairs", "1"];
    let amount = ["--direction", "read", "--direction", "both", "--run-bytes", "4194304", "--json"];
    let check = |report: &Value, transports: &[&str]| {
        let rows = rows(report, "transfer");
        assert_eq!(rows.len(), 4 * transports.len(), "{report:#}");
        for row in &rows {
            let (direction, size) = (row["direction"].as_str().unwrap(), row["size_bytes"].as_u64().unwrap());
            let halves = if direction == "both" { 2 } else { 1 };
            // A run to warm up, and one that counts.
            assert_eq!(row["verified_bytes"].as_u64().unwrap(), 2 * halves * 2 * 3 * size, "{row}");
            assert_eq!(row["wrong_bytes"], 0, "{row}");
            assert!(transports.contains(&row["transport"].as_str().unwrap()), "{row}");
            for figure in ["gb_per_s", "ratio", "p50_us", "baseline_gb_per_s", "cpu_s_per_gb", "cpu_ratio"] {
                assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} of {row}");
            }
        }
    };
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg");
    let drawn = ["--plot", plot.to_str().expect("a path in UTF-8")];
    check(&run(&[&["bench", "transfer"][..], &shape, &amount, &drawn].concat()).json(), &["tcp", "shm"]);
    assert_plot(&plot, &["read over tcp", "both over shm", "3 segments, depth 2"]);

    let home = tempfile::tempdir().expect("a directory");
    let secret = home.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let secret = ["--secret-file", secret.to_str().expect("a path in UTF-8")];
    let mut command =
        forebay(&[&["bench", "transfer", "--once", "--listen", "tcp://127.0.0.1:0"], &secret[..]].concat());
    let mut other = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("listening at ").expect("it says where").to_owned();
    let encrypted = [&["bench", "transfer", "--encrypt"][..], &secret, &shape, &amount].concat();
    check(&run(&encrypted).json(), &["tcp+tls"]);
    run(&[&encrypted[..], &["--transport", "shm"]].concat()).assert_refused(2, "`--transport` cannot be `shm`");
    run(&["bench", "transfer", "--encrypt"]).assert_refused(2, "--secret-file");
    let refused = run(&["bench", "transfer", "--connect", &address, "--pairs", "1"]);
    assert!(refused.err.contains("another secret") && refused.err.contains("hint:"), "{}", refused.err);
    let connect = ["bench", "transfer", "--connect", &address];
    check(&run(&[&connect[..], &secret, &shape, &amount].concat()).json(), &["tcp"]);
    assert!(other.wait().unwrap().success());
}
