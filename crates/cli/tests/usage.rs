//! What the user sees of flags, variables and files: help, suggestions, precedence, exit codes.

mod command;
mod golden;

use command::{Answer, forebay, run};
use golden::assert_golden;

#[test]
fn help_is_the_golden_one() {
    let commands: [&[&str]; 17] = [
        &[],
        &["serve"],
        &["inspect"],
        &["inspect", "ssd"],
        &["audit"],
        &["purge"],
        &["config"],
        &["doctor"],
        &["bench", "copy"],
        &["bench", "device"],
        &["bench", "lookup"],
        &["bench", "redis"],
        &["bench", "ssd"],
        &["bench", "transfer"],
        &["advise"],
        &["simulate"],
        &["trace", "record"],
    ];
    let mut text = String::new();
    for command in commands {
        let answer = run(&[command, &["--help"]].concat());
        assert_eq!((answer.code, answer.err.as_str()), (0, ""), "{command:?}");
        text += &format!("$ {} --help\n{}\n", [&["forebay"], command].concat().join(" "), answer.out);
    }
    assert_golden("tests/golden/help.txt", &text);
}

#[test]
fn the_version_names_the_protocol() {
    let version = run(&["--version"]).out;
    let expected = format!("forebay {} (protocol {}", env!("CARGO_PKG_VERSION"), forebay_rpc::PROTOCOL_VERSION);
    assert!(version.starts_with(&expected), "{version}");
}

#[test]
fn an_answer_that_cannot_be_written_is_a_failure_and_one_that_nobody_reads_is_none() {
    for arguments in [&["config"][..], &["--help"], &["--version"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ended = forebay(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("error: cannot write the answer"), "{arguments:?}: {said}");
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert!(forebay(&["config"]).stdout(writer).status().unwrap().success());
}

#[test]
fn a_failure_ends_though_nobody_reads_standard_error() {
    let (_reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while std::io::Write::write(&mut writer, &[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut failing = forebay(&["serve", "--config", "/nonexistent.toml"]).stderr(writer).spawn().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let status = loop {
        if let Some(status) = failing.try_wait().unwrap() {
            break status;
        }
        if std::time::Instant::now() > deadline {
            failing.kill().unwrap();
            panic!("it waits for a reader");
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(2));
}

#[test]
fn a_wrong_argument_is_refused_with_the_nearest_one() {
    for (arguments, error, hint) in [
        (&["serv"][..], "unknown command `serv`", "did you mean `serve`?"),
        (
            &["serve", "--pool.capcity_bytes", "1"],
            "unknown argument `--pool.capcity_bytes`",
            "`--pool.capacity_bytes`?",
        ),
        (&["serve", "--capacity_bytes", "1"], "unknown argument `--capacity_bytes`", "`--pool.capacity_bytes`?"),
        (&["serve", "--tier.object.urls", "x"], "unknown argument `--tier.object.urls`", "`tier.object` are bucket, "),
        (&["serve", "--tier.ssd.url", "x"], "unknown argument `--tier.ssd.url`", "`tier.ssd` are disks, "),
        (&["health", "--pool.capacity_bytes", "1"], "unknown argument `--pool.capacity_bytes`", "`forebay serve`"),
        (&["inspect", "--jsn"], "unknown argument `--jsn`", "`--json`?"),
        (&["purge"], "required arguments were not provided", "--help"),
        (&["purge", "--tenant", "a", "--namespace", "b"], "cannot be used with", "--help"),
        (&["purge", "--tenant", "a", "--timeout-seconds", "9"], "required arguments were not provided", "--help"),
        (&["purge", "--tenant", "a", "--shared-stores", "--timeout-seconds", "0"], "invalid value `0`", "--help"),
        (&["purge", "--namespace", "12"], "`12` is not a namespace id", "at least four digits"),
        (&["config", "--pool.capacity_bytes", "-1"], "`pool.capacity_bytes` cannot be `-1`", "a number with KiB"),
        (&["config", "--pool.capacity_bytes", "99999999999GiB"], "`99999999999GiB`", "less than 16777216TiB"),
        (&["bench", "ssd", "disk", "--size-bytes", "1MB"], "`--size-bytes` cannot be `1MB`", "a number with KiB"),
        (&["bench", "ssd", "disk", "--capacity-bytes", "1"], "`--capacity-bytes` cannot be `1`", "it must be"),
        (&["bench", "ssd", "disk", "--size-bytes", "1KiB"], "`--size-bytes` cannot be `1KiB`", "it must be"),
        (&["bench", "copy", "--threads", "0"], "`--threads` cannot be `0`", "it must be"),
        (&["bench", "device", "--size-bytes", "100"], "`--size-bytes` cannot be `100`", "a multiple of 16"),
        (&["bench", "device", "--product-rows", "7"], "`--product-rows` cannot be `7`", "a multiple of 4"),
        (
            &[
                "bench",
                "device",
                "--engine",
                "host",
                "--size-bytes",
                "16MiB",
                "--count",
                "16",
                "--working-set-bytes",
                "32MiB",
            ],
            "no number of copies fits the working set",
            "raise `--working-set-bytes`",
        ),
        (&["simulate", "/dev/null", "--policy", "nope"], "unknown policy", "give "),
        (&["simulate", "/dev/null", "--one-time", "1.5"], "0 to 0.95", "such as 0.5"),
        (&["simulate", "/dev/null", "--block-bytes", "0"], "1 byte to 512 MiB", "`--block-bytes`"),
        (&["simulate", "/dev/null", "--block-bytes", "1,2"], "`--block-bytes` has neither", "one for each trace"),
        (&["bench", "lookup", "--keys", "many"], "invalid value `many`", "--help"),
        (&["bench", "lookup", "--keys", "0"], "`--keys` cannot be `0`", "it must be from 1"),
        (&["serve", "extra"], "`extra`", "--help"),
    ] {
        let answer = run(arguments);
        answer.assert_refused(2, error);
        assert!(answer.err.contains(hint), "{hint} is not in {}", answer.err);
    }
    let bare = run(&[]);
    assert!(bare.code == 2 && bare.err.contains("Usage: forebay"), "{bare:?}");
}

/// `forebay config` with flags that make it say the same on every machine.
fn config(file: Option<&str>, variables: &[(&str, &str)], flags: &[&str]) -> Answer {
    let directory = tempfile::tempdir().unwrap();
    let mut command =
        forebay(&["config", "--socket.directory", "/run/forebay", "--pool.directory", "/dev/shm/forebay"]);
    command.args(flags).envs(variables.iter().copied()).current_dir(directory.path());
    if let Some(text) = file {
        std::fs::write(directory.path().join("forebay.toml"), text).unwrap();
        command.args(["--config", "forebay.toml"]);
    }
    Answer::of(command.output().unwrap())
}

#[test]
fn the_effective_configuration_says_where_each_value_comes_from() {
    let file = "[pool]\ncapacity_bytes = \"8GiB\"\nhuge_pages = \"off\"\n\n[limits]\nengines = 8\n";
    let variables =
        [("FOREBAY_LIMITS_ENGINES", "16"), ("FOREBAY_POOL_PROMISE_SHARE", "0.25"), ("FOREBAY_LOG", "debug")];
    let answer = config(Some(file), &variables, &["--pool.promise_share", "0.75", "--drain.deadline_seconds", "3"]);
    assert_eq!((answer.code, answer.err.as_str()), (0, ""));
    assert_golden("tests/golden/config.txt", &answer.out);
    // What is printed is a file that says the same.
    let again = config(Some(&answer.out), &[], &[]);
    let values =
        |text: &str| text.lines().map(|line| line.split("  #").next().unwrap().to_string()).collect::<Vec<_>>();
    assert_eq!(values(&again.out), values(&answer.out));
}

#[test]
fn json_tells_the_same_as_the_text() {
    let json = config(None, &[("FOREBAY_POOL_CAPACITY_BYTES", "1GiB")], &["--json"]).json();
    assert_eq!(json["pool.capacity_bytes"]["value"], "1GiB");
    assert_eq!(json["pool.capacity_bytes"]["origin"], "variable FOREBAY_POOL_CAPACITY_BYTES");
    assert_eq!(json["pool.unit_bytes"]["value"], serde_json::Value::Null);
    assert_eq!(json.as_object().unwrap().len(), forebay_daemon::config::keys().len());
}

#[test]
fn an_unknown_or_impossible_setting_stops_every_command_that_reads_settings() {
    config(Some("[pool]\nsize = 1\n"), &[], &[]).assert_refused(2, "unknown key `pool.size`");
    config(Some("pool = 1\n"), &[], &[]).assert_refused(2, "unknown key `pool`");
    let invalid = config(Some("[pool\n"), &[], &[]);
    invalid.assert_refused(2, "not valid TOML");
    assert!(invalid.err.contains("hint: docs/config.md has an example") && !invalid.err.contains("forebay config"));
    config(None, &[("FOREBAY_POOL_HUGEPAGES", "off")], &[])
        .assert_refused(2, "unknown variable `FOREBAY_POOL_HUGEPAGES`");
    config(None, &[("FOREBAY_CONFIG", "/nowhere.toml")], &[]).assert_refused(2, "/nowhere.toml");
    for command in ["serve", "inspect", "doctor"] {
        let mut command = forebay(&[command]);
        Answer::of(command.env("FOREBAY_LIMIT_ENGINES", "1").output().unwrap())
            .assert_refused(2, "FOREBAY_LIMIT_ENGINES");
    }
    run(&["serve", "--http.address", "0.0.0.0:80"])
        .assert_refused(2, "`http.address` cannot be `0.0.0.0:80` (from=`flag`)");
    for command in ["serve", "config", "doctor"] {
        for (key, value) in [
            ("log.level", "forebay=loud"),
            ("log.level", "blah=="),
            ("pool.capacity_bytes", "17TiB"),
            ("pool.unit_bytes", "256MiB"),
        ] {
            let capacity = if key == "pool.unit_bytes" { &["--pool.capacity_bytes", "64MiB"][..] } else { &[] };
            let answer = run(&[&[command, &format!("--{key}"), value], capacity].concat());
            answer.assert_refused(2, &format!("`{key}` cannot be `{value}` (from=`flag`)"));
            assert!(answer.err.contains("hint: it must be"), "{answer:?}");
        }
        let twice = run(&[command, "--tier.ssd.disks", "['/tmp/a', '/tmp/b', '/tmp//a']"]);
        twice.assert_refused(2, "`tier.ssd.disks` cannot be");
        assert!(twice.err.contains("hint: it must name each disk once"), "{twice:?}");
    }
}

#[test]
fn a_benchmark_without_its_server_and_a_trace_without_requests_say_what_to_do() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let (redis, peer) = (format!("redis://127.0.0.1:{port}"), format!("tcp://127.0.0.1:{port}"));
    run(&["bench", "redis", &redis]).assert_refused(1, "refused");
    run(&["bench", "transfer", "--connect", &peer]).assert_refused(1, "cannot connect to the peer");
    run(&["simulate", "/dev/null", "--capacity", "1MiB"]).assert_refused(1, "no requests");
}

#[test]
fn a_size_in_units_that_are_none_is_refused_with_those_there_are() {
    for size in ["1GB", "1.5", "8gib"] {
        let refused = run(&["config", "--pool.capacity_bytes", size]);
        refused.assert_refused(2, &format!("`pool.capacity_bytes` cannot be `{size}`"));
        assert!(refused.err.contains("a number with KiB, MiB, GiB or TiB"), "{refused:?}");
    }
}

/// The keys of directories and disks: what is relative in a file is another place from another directory.
#[test]
fn a_relative_path_is_refused_in_files_and_variables_and_made_whole_in_flags() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().canonicalize().unwrap();
    let ask = |file: &str, variable: Option<(&str, &str)>, flags: &[&str]| {
        std::fs::write(home.join("forebay.toml"), file).unwrap();
        let mut command = forebay(&["config", "--json", "--config", "forebay.toml"]);
        Answer::of(command.args(flags).envs(variable).current_dir(&home).output().unwrap())
    };
    let shown = |path: &str| home.join(path).display().to_string();
    for (file, variable, key) in [
        ("[socket]\ndirectory = \"run\"\n", None, "socket.directory"),
        ("[pool]\ndirectory = \"run\"\n", None, "pool.directory"),
        ("[tier.fs]\ndirectories = [\"/mnt/a\", \"run\"]\n", None, "tier.fs.directories"),
        ("[tier.ssd]\ndisks = \"run\"\n", None, "tier.ssd.disks"),
        ("", Some(("FOREBAY_POOL_DIRECTORY", "run")), "pool.directory"),
        ("", Some(("FOREBAY_TIER_SSD_DISKS", "[\"run\"]")), "tier.ssd.disks"),
    ] {
        let refused = ask(file, variable, &[]);
        refused.assert_refused(2, &format!("`{key}` cannot be `run`"));
        assert!(refused.err.contains(&format!("such as `{}`", shown("run"))), "{refused:?}");
    }
    let flags = ["--socket.directory", "s", "--pool.directory", "../p", "--tier.ssd.disks", "[\"a\", \"/b\"]"];
    let json = ask("", None, &flags).json();
    assert_eq!(json["socket.directory"]["value"], shown("s"));
    assert_eq!(json["pool.directory"]["value"], shown("../p"));
    assert_eq!(json["tier.ssd.disks"]["value"], serde_json::json!([shown("a"), "/b"]));
}

#[test]
fn what_is_no_directory_or_no_disk_is_called_so() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    std::fs::write(&file, "some words").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, error, hint) in [
        (&["serve", "--socket.directory", file][..], "the directory is not a directory", "name a directory"),
        (&["inspect", "ssd", file], "this is not a disk of Forebay", "`tier.ssd.disks`"),
        (&["inspect", "ssd", "/nope"], "(path=`/nope`): No such file", "`tier.ssd.disks`"),
        (&["inspect", "ssd", "/"], "a disk is a file or a block device", "`tier.ssd.disks`"),
    ] {
        let refused = run(arguments);
        refused.assert_refused(1, error);
        assert!(refused.err.contains(hint), "{hint} is not in {refused:?}");
        assert!(!refused.err.contains("symbolic"), "{refused:?}");
    }
}

#[test]
fn a_pool_that_was_named_is_not_looked_up_in_the_configuration() {
    let home = tempfile::tempdir().unwrap();
    if rustix::process::geteuid().is_root() {
        let mut command = forebay(&["pool", "remove", "/root"]);
        let refused = Answer::of(std::os::unix::process::CommandExt::uid(&mut command, 54321).output().unwrap());
        refused.assert_refused(1, "cannot use the directory (path=`/root`)");
        assert!(refused.err.contains("may write to") && !refused.err.contains("pool.directory"), "{refused:?}");
    }
    let empty = run(&["pool", "remove", home.path().to_str().unwrap()]);
    empty.assert_refused(1, "there is no pool in");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    use std::process::Stdio;
    let mut child = forebay(&["serve", "--help"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let answer = Answer::of(child.wait_with_output().unwrap());
    assert!(!answer.err.contains("panicked"), "{answer:?}");
    let mut child = forebay(&["config"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let answer = Answer::of(child.wait_with_output().unwrap());
    assert_eq!((answer.code, answer.err.as_str()), (0, ""));
}
