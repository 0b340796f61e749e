//! Small things that a user of other commands expects: help everywhere, completions, pages, a view that goes on, logs
//! for a collector, a configuration in its usual place.

mod command;
mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use command::{Answer, forebay, run};
use serde_json::Value;
use support::{Daemon, Place, wait_until};

const CAPACITY: [&str; 2] = ["--pool.capacity_bytes", "64MiB"];

#[test]
fn help_and_version_are_commands_too() {
    assert_eq!(run(&["help"]).out, run(&["--help"]).out);
    assert_eq!(run(&["help", "bench", "lookup"]).out, run(&["bench", "lookup", "--help"]).out);
    for asked in [&["help", "--help"][..], &["help", "-h"]] {
        assert_eq!(run(asked).out, run(&["--help"]).out, "{asked:?}");
    }
    assert_eq!(run(&["help", "bench", "lookup", "--help"]).out, run(&["bench", "lookup", "--help"]).out);
    let version = run(&["version"]).out;
    for part in ["(protocol ", "formats: pool ", ", disk ", ", store ", "engines here: copies ", "optional features: "]
    {
        assert!(version.contains(part), "{part} is not in {version}");
    }
    assert!(version.starts_with(run(&["--version"]).out.trim_end()), "{version}");
    let facts = run(&["version", "--json"]).json();
    let told = [
        format!("forebay {} (protocol {}", facts["version"].as_str().expect("text"), facts["protocol"]),
        format!(
            "pool {}, disk {}, store {}",
            facts["formats"]["pool"], facts["formats"]["disk"], facts["formats"]["store"][0]
        ),
        format!(
            "copies {}, disks {}",
            facts["engines"]["copies"].as_str().expect("text"),
            facts["engines"]["disks"].as_str().expect("text")
        ),
    ];
    assert!(told.iter().all(|fact| version.contains(fact)), "{facts}: {version}");
    assert_eq!(facts["revision"].as_str().unwrap_or_default().is_empty(), !version.contains(", revision "), "{facts}");
    assert_eq!(facts["optional_features"][0] == "object", version.ends_with("optional features: object\n"), "{facts}");
}

#[test]
fn every_help_ends_with_examples_and_exit_codes() {
    for command in ["serve", "inspect", "audit", "purge", "config", "doctor", "simulate", "advise", "man", "version"] {
        let help = run(&[command, "--help"]).out;
        let (_, end) = help.split_once("\nExamples:\n  forebay ").unwrap_or_else(|| panic!("no examples in {help}"));
        assert!(end.contains("\nExit codes:\n  0  done"), "{command}: {end}");
    }
}

#[test]
fn completions_and_manual_pages_are_of_the_commands_there_are() {
    let bash = run(&["completions", "bash"]);
    assert!(bash.code == 0 && bash.out.contains("--pool.capacity_bytes") && bash.out.contains("doctor"), "{bash:?}");
    let checked = Command::new("bash").args(["-n", "-c", &bash.out]).status().expect("bash runs");
    assert!(checked.success(), "bash does not read its completions");
    assert!(run(&["man"]).out.contains(".TH forebay"));
    let home = tempfile::tempdir().expect("a directory");
    let directory = home.path().join("man1");
    let answer = run(&["man", directory.to_str().expect("UTF-8")]);
    assert_eq!(answer.code, 0, "{answer:?}");
    for page in ["forebay", "forebay-serve", "forebay-bench-lookup"] {
        let text = std::fs::read_to_string(directory.join(format!("{page}.1"))).expect("the page");
        assert!(text.contains("Exit codes:") && text.contains("Examples:"), "{page}: {text}");
    }
    let refused = run(&["man", "/etc/passwd"]);
    refused.assert_refused(1, "(path=`/etc/passwd`)");
    assert!(
        refused.err.contains("is not a directory") && refused.err.contains("hint: name a directory"),
        "{refused:?}"
    );
}

/// On a terminal of its own, which `script` makes. What a terminal shows is all in `out`.
fn on_a_terminal(arguments: &[&str], environment: &[(&str, &str)]) -> Answer {
    let mut command = Command::new("script");
    let line = [&[env!("CARGO_BIN_EXE_forebay")], arguments].concat().join(" ");
    command.env_clear().env("PATH", "/usr/bin:/bin").env("FOREBAY_CONFIG", "").envs(environment.iter().copied());
    command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    Answer::of(command.output().expect("script runs"))
}

#[test]
fn a_terminal_shows_colours_unless_somebody_does_not_want_them_or_it_has_none() {
    let place = Place::new();
    let [sockets, pool] = [place.sockets(), place.pool()].map(|path| path.display().to_string());
    let doctor = ["doctor", "--http.address", "off", "--socket.directory", &sockets, "--pool.directory", &pool];
    let doctor = [&doctor[..], &CAPACITY].concat();
    let xterm = ("TERM", "xterm");
    for arguments in [&["--help"][..], &["inspect", "--qwertz"], &[], &doctor] {
        let is_coloured = |environment: &[(&str, &str)]| {
            let shown = on_a_terminal(arguments, environment).out;
            assert!(shown.contains("forebay"), "{arguments:?}: {shown}");
            shown.contains("\x1b[")
        };
        assert!(is_coloured(&[xterm]), "{arguments:?}");
        assert!(is_coloured(&[xterm, ("NO_COLOR", "")]), "an empty NO_COLOR says nothing: {arguments:?}");
        for without in [&[xterm, ("NO_COLOR", "1")][..], &[("TERM", "dumb")], &[]] {
            assert!(!is_coloured(without), "{arguments:?} {without:?}");
        }
        let piped = Answer::of(forebay(arguments).envs([xterm]).output().expect("it runs"));
        assert!(!(piped.out + &piped.err).contains('\x1b'), "{arguments:?}");
    }
}

#[test]
fn a_terminal_is_told_how_to_read_the_manual_page() {
    let answer = on_a_terminal(&["man"], &[]);
    assert!(answer.code == 2 && !answer.out.contains(".TH"), "{answer:?}");
    for part in ["forebay man | man -l -", "forebay man DIRECTORY"] {
        assert!(answer.out.contains(part), "{part} is not in {answer:?}");
    }
}

#[test]
fn inspect_begins_with_a_summary_and_can_watch() {
    let place = Place::new();
    let _daemon = Daemon::start(&place, &CAPACITY);
    let sockets = place.sockets().display().to_string();
    let text = run(&["inspect", "--socket.directory", &sockets]).out;
    let first = text.lines().next().unwrap_or_default();
    // The revision follows, if the command was built from a checkout.
    let begin = format!("forebay {}", env!("CARGO_PKG_VERSION"));
    let end = ": 0 B of 64.0 MiB are used, 64.0 MiB are free; no key was looked up yet; 0 engines are connected";
    assert!(first.starts_with(&begin) && first.contains(" has run for ") && first.ends_with(end), "{first}");

    let watch = ["inspect", "--watch", "0.1", "--json", "--socket.directory", &sockets];
    let mut child = forebay(&watch).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    for _ in 0..3 {
        let line = lines.next().expect("it goes on").expect("a line");
        let seen: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(seen["capacity_bytes"], 64 << 20);
    }
    child.kill().expect("it is ours");
    child.wait().expect("it ends");

    // Whoever has read enough ends it, as `head` does.
    for arguments in [&watch[..], &["inspect", "--watch", "0.1", "--socket.directory", &sockets]] {
        let mut child = forebay(arguments).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        lines.next().expect("a first line").expect("a line");
        drop(lines);
        let mut ended = None;
        wait_until("it ends with its reader", || {
            ended = child.try_wait().expect("it is ours");
            ended.is_some()
        });
        assert_eq!(ended.and_then(|status| status.code()), Some(0), "{arguments:?}");
    }
    run(&["inspect", "--watch", "0"]).assert_refused(2, "`--watch` cannot be `0`");
}

#[test]
fn the_log_can_be_objects() {
    let place = Place::new();
    let daemon = Daemon::spawn(&place, &[&CAPACITY[..], &["--log.format", "json"]].concat()).listening(&place);
    wait_until("it serves", || daemon.log().contains("\"message\":\"serving\""));
    for line in daemon.log().lines() {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let is_whole = ["timestamp", "level", "target"].iter().all(|part| event[*part].is_string());
        assert!(is_whole && event["fields"]["message"].is_string(), "{line}");
    }
}

/// In a mount namespace of its own, with another `/etc`, and a `/run` without a daemon of this host.
fn with_etc(file: &Path, mode: &str, uid: &str, arguments: &[&str]) -> Answer {
    let file = file.to_str().expect("a path in UTF-8");
    with_usual_file(&format!("install -m {mode} {file} /etc/forebay.toml"), uid, arguments)
}

const MOUNTS: &str = "mount -t tmpfs none /etc && mount -t tmpfs none /run";

/// The same, with `/etc/forebay.toml` made by a command of the shell. A command that hangs ends, with another code.
fn with_usual_file(make: &str, uid: &str, arguments: &[&str]) -> Answer {
    let script = format!("{MOUNTS} && {make} && exec timeout 10 setpriv --reuid {uid} --clear-groups -- \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_forebay")]);
    command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").args(arguments).stdin(Stdio::null());
    Answer::of(command.output().expect("unshare runs"))
}

#[test]
fn the_usual_file_is_read_if_it_is_there_and_every_command_says_so() {
    if !rustix::process::geteuid().is_root() {
        // The rule itself is tested beside it, in the daemon's configuration; another `/etc` needs root.
        return;
    }
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("forebay.toml");
    std::fs::write(&file, "[pool]\ncapacity_bytes = \"900GiB\"\n").expect("a file");
    let told = with_etc(&file, "644", "0", &["config", "--json"]).json();
    assert_eq!(told["pool.capacity_bytes"]["origin"], "file /etc/forebay.toml");
    assert_eq!(told["pool.capacity_bytes"]["value"], "900GiB");
    // An ordinary user may not read what may hold passwords: commands for a daemon go on, others say it.
    let denied = with_etc(&file, "600", "65534", &["config"]);
    denied.assert_refused(2, "cannot read the configuration");
    assert!(denied.err.contains("/etc/forebay.toml") && denied.err.contains("Permission denied"), "{denied:?}");
    let inspect = with_etc(&file, "600", "65534", &["inspect"]);
    assert!(
        inspect.err.contains("warning: cannot read the configuration (file=`/etc/forebay.toml`): Permission denied"),
        "{inspect:?}"
    );
    assert!(inspect.err.contains("error: cannot reach the daemon") || inspect.err.contains("no daemon"), "{inspect:?}");
}

#[test]
fn a_usual_file_that_cannot_be_read_is_no_missing_one_and_nothing_waits_for_it() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    for (make, why) in [
        ("ln -s /nowhere/forebay.toml /etc/forebay.toml", "No such file"),
        ("ln -s forebay.toml /etc/forebay.toml", "symbolic links"),
        ("mkfifo -m 644 /etc/forebay.toml", "it is not a regular file"),
        ("mknod -m 644 /etc/forebay.toml c 1 5", "it is not a regular file"),
        ("mkdir /etc/forebay.toml", "it is not a regular file"),
    ] {
        for arguments in [&["config"][..], &["doctor"], &["serve", "--pool.capacity_bytes", "64MiB"]] {
            let answer = with_usual_file(make, "0", arguments);
            answer.assert_refused(2, "cannot read the configuration (file=`/etc/forebay.toml`)");
            assert!(answer.err.contains(why), "{arguments:?}: {answer:?}");
        }
        // What clients cannot read costs them nothing but a warning.
        let inspect = with_usual_file(make, "0", &["inspect"]);
        let is_told = inspect.err.contains("warning: ") && inspect.err.contains(why);
        assert!(is_told && inspect.err.contains("/run/forebay"), "{make}: {inspect:?}");
    }
    for name in ["--config=/etc/pipe", "--config=/dev/zero"] {
        let answer = with_usual_file("mkfifo /etc/pipe", "0", &["config", name]);
        answer.assert_refused(2, "it is not a regular file");
    }
}

/// The order for commands; tests/python/test_client.py has the same for programs.
#[test]
fn commands_look_for_the_daemon_where_flags_variables_and_the_file_say_in_this_order() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let usual = |text: &str| format!("printf '{text}' > /etc/forebay.toml");
    let found = |make: &str, variables: &[&str], flags: &[&str]| {
        let set = [&["/usr/bin/env"], variables].concat().join(" ");
        let make = format!("{make} && set -- {set} \"$@\"");
        with_usual_file(&make, "0", &[&["inspect"], flags].concat()).err
    };
    let file = usual("[socket]\\ndirectory = \"/run/in-file\"");
    assert!(found(&file, &[], &[]).contains("/run/in-file/"));
    assert!(found(&file, &["FOREBAY_SOCKET_DIRECTORY=/run/second"], &[]).contains("/run/second/"));
    let both = ["FOREBAY_SOCKET_DIRECTORY=/run/second", "FOREBAY_SOCKET=/run/first/forebay.sock"];
    assert!(found(&file, &both, &[]).contains("/run/first/"));
    assert!(found(&file, &both, &[]).contains("(`FOREBAY_SOCKET`)"), "the hint names the variable that counts");
    assert!(found(&file, &both, &["--socket.directory", "/run/flag"]).contains("/run/flag/"));
    assert!(found(&file, &["FOREBAY_CONFIG="], &[]).contains("/run/forebay/"));
    // What another version of the daemon understands, or nobody, keeps no client from its daemon.
    let newer = usual("new = 1\\n[socket]\\ndirectory = \"/run/in-file\"\\n[pool]\\nnewer = 1");
    assert!(found(&newer, &[], &[]).contains("/run/in-file/"));
    for (text, why) in [("[socket", "not valid TOML"), ("[socket]\\ndirectory = 1", "`socket.directory` cannot be `1`")]
    {
        let inspect = found(&usual(text), &[], &[]);
        assert!(inspect.contains("warning: ") && inspect.contains(why), "{inspect}");
        assert!(inspect.contains("/run/forebay/"), "{inspect}");
    }
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {text}"))).collect()
}

#[test]
fn a_log_of_objects_ends_with_the_error_as_an_object() {
    let place = Place::new();
    std::fs::create_dir(place.sockets()).expect("a directory");
    std::fs::write(place.sockets().join("forebay.sock"), "precious").expect("a file");
    // The filter takes no last words.
    for level in ["info", "off"] {
        let directory = place.sockets().display().to_string();
        let pool = place.pool().display().to_string();
        let mut command = forebay(&["serve", "--log.format", "json", "--http.address", "off", "--log.level", level]);
        command.args(["--socket.directory", &directory, "--pool.directory", &pool]).args(CAPACITY);
        let answer = Answer::of(command.env("FOREBAY_QWERTZUIOP", "1").output().expect("it runs"));
        let lines = json_lines(&answer.err);
        let error = lines.last().expect("a last line");
        let fields = &error["fields"];
        assert!(error["level"] == "ERROR" && error["target"] == "forebay::serve", "{error}");
        assert!(error["timestamp"].is_string() && fields["hint"].is_string(), "{error}");
        assert!(fields["message"].as_str().is_some_and(|message| message.contains("is not a socket")), "{error}");
        let warned = |line: &&Value| line["level"] == "WARN" && line.to_string().contains("FOREBAY_QWERTZUIOP");
        assert_eq!(lines.iter().filter(warned).count(), 1, "{lines:?}");
        assert_eq!(answer.code, 1);
    }
}

#[test]
fn a_process_that_claims_a_disk_for_a_daemon_that_is_gone_says_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    for path in [directory.path().join("disk"), directory.path().join("no/disk")] {
        let (ours, daemon) = std::os::unix::net::UnixStream::pair().expect("a pair");
        drop(daemon);
        let mut command = forebay(&["claim-disk"]);
        command.arg(&path).args(["--capacity-bytes", "67108864", "--create"]).stdin(std::os::fd::OwnedFd::from(ours));
        let answer = Answer::of(command.output().expect("it runs"));
        assert_eq!((answer.code, answer.out.as_str(), answer.err.as_str()), (1, "", ""));
    }
}
