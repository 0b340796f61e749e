//! `forebay simulate` on traces that are not what they should be, and with several tiers and tenants, as a process.
//!
//! Long input comes through a pipe, and memory is bounded by the kernel: a process that needs more than its limit of
//! address space dies, and the test with it.

mod command;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn cut(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../sim/tests/data/{name}.jsonl.zst"))
}

/// Runs with so many KiB of address space on what `write` puts into a pipe.
fn simulate_within(kib: u64, write: fn(&mut File) -> std::io::Result<()>) -> Output {
    let directory = tempfile::tempdir().expect("a directory");
    let pipe = directory.path().join("trace.jsonl");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || {
            let mut file = File::options().write(true).open(pipe).expect("somebody reads");
            // The reader may have seen enough.
            let _ = write(&mut file);
        }
    });
    let script = format!("ulimit -v {kib}; exec \"$0\" simulate \"$1\" --no-opt --capacity 100%");
    let output = Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_forebay")]).arg(&pipe).output();
    writer.join().expect("the writer ends");
    output.expect("it ran")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_gigabyte_of_lines_needs_no_more_memory_than_its_blocks() {
    let output = simulate_within(384 << 10, |file| {
        let padding = "x".repeat(1 << 20);
        for at in 0..1024 {
            writeln!(file, "{{\"timestamp\": {at}, \"padding\": \"{padding}\", \"hash_ids\": [0, 1, 2]}}")?;
        }
        Ok(())
    });
    assert!(output.status.success(), "{}", text(&output.stderr));
    // 3 of 3,072 were new.
    assert!(text(&output.stdout).contains("99.90%"), "{}", text(&output.stdout));
}

#[test]
fn a_line_without_end_is_refused_in_bounded_memory() {
    let output = simulate_within(384 << 10, |file| (0..1024).try_for_each(|_| file.write_all(&[b'1'; 1 << 20])));
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("a line is longer than 16 MiB") && error.contains("line=`1`"), "{error}");
}

#[test]
fn a_trace_that_was_cut_names_the_line_where_it_ends() {
    let directory = tempfile::tempdir().expect("a directory");
    let whole = std::fs::read(cut("conv")).expect("the cut is in the repository");
    let compressed = directory.path().join("cut.jsonl.zst");
    std::fs::write(&compressed, &whole[..whole.len() / 2]).expect("a file");
    let plain = directory.path().join("cut.jsonl");
    std::fs::write(&plain, "{\"timestamp\": 0, \"hash_ids\": [0, 1]}\n{\"timestamp\": 1, \"hash_ids\": [0, 1, 2")
        .expect("a file");
    let other = directory.path().join("other.jsonl");
    std::fs::write(&other, "hello\n").expect("a file");
    for (path, what) in [
        (&compressed, "cannot read trace"),
        (&plain, "a line is cut short"),
        (&other, "hint: name a trace of Mooncake or Qwen-Bailian"),
    ] {
        let done = command::run(&["simulate", &path.to_string_lossy()]);
        assert_eq!(done.code, 1);
        assert!(done.err.contains(what) && done.err.contains("line=`"), "{}", done.err);
        assert!(done.err.contains(&*path.to_string_lossy()), "{}", done.err);
    }
}

#[test]
fn default_is_named_as_in_the_configuration_and_another_name_is_refused_with_all_of_them() {
    let trace = cut("conv").to_string_lossy().into_owned();
    let row = |policy: &str| {
        let arguments = ["simulate", &trace, "--no-opt", "--capacity", "10%", "--json", "--policy", policy];
        let row = command::run(&arguments).json()["rows"][0].clone();
        (row["policy"].clone(), row["prefix_hits"].clone())
    };
    let [default, lru] = ["default", "lru"].map(row);
    assert_eq!((&default, default.0.as_str()), (&row("lhd"), Some("default")), "one word for it everywhere");
    assert_ne!(default.1, lru.1);
    let refused = command::run(&["simulate", &trace, "--policy", "lfu"]);
    refused.assert_refused(2, "unknown policy (policy=`lfu`)");
    assert!(refused.err.contains("hint: give default, lru, twoq, arc, s3fifo, tinylfu or all"), "{}", refused.err);
}

#[test]
fn sizes_of_nothing_are_refused_with_what_to_give() {
    let trace = cut("conv").to_string_lossy().into_owned();
    let least = "hint: give a whole number from 1 on";
    let more = "hint: give a larger one, such as `5%`";
    for (flag, value, error, hint) in [
        ("--store-batch", "0", "`--store-batch` cannot be `0`", least),
        ("--block-tokens", "0", "`--block-tokens` cannot be `0`", least),
        ("--capacity", "0%", "`--capacity` cannot be `0%`", more),
        ("--capacity", "5 parsecs", "`--capacity` cannot be `5 parsecs`", "hint: give a number and a unit, such as"),
        ("--ssd", "5%,0GiB", "`--ssd` cannot be `0GiB`", more),
    ] {
        let refused = command::run(&["simulate", &trace, flag, value]);
        refused.assert_refused(2, error);
        assert!(refused.err.contains(hint), "{}", refused.err);
    }
}

#[test]
fn tiers_and_tenants_are_told_in_the_table_in_json_and_in_the_plot() {
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("plot.svg").to_string_lossy().into_owned();
    let traces = ["conv", "agents"].map(|name| cut(name).to_string_lossy().into_owned());
    let arguments = ["simulate", &traces[0], &traces[1], "--together", "--block-bytes", "1048576,2097152"];
    let tiers = ["--capacity", "10%,20%", "--ssd", "50%", "--policy", "lhd,lru"];
    let table = command::run(&[&arguments[..], &tiers[..], &["--plot", &plot]].concat());
    assert_eq!(table.code, 0, "{}", table.err);
    for part in ["ssd", "below", "by GB", "namespace 1, 2097152 bytes a block"] {
        assert!(table.out.contains(part), "`{part}` is not in\n{}", table.out);
    }
    let picture = std::fs::read_to_string(&plot).expect("a plot");
    assert!(picture.starts_with("<svg") && picture.contains("default + 50%"), "{picture}");
    let rows = command::run(&[&arguments[..], &tiers[..], &["--json"]].concat()).json();
    let rows = rows["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    for row in rows {
        let number = |of: &serde_json::Value, name: &str| of[name].as_u64().unwrap_or_else(|| panic!("{name}: {of}"));
        assert_eq!(number(row, "prefix_hits"), number(row, "pool_hits") + number(row, "ssd_hits"));
        let misses: u64 =
            row["misses"].as_object().expect("reasons").values().map(|n| n.as_u64().expect("a count")).sum();
        assert_eq!(number(row, "blocks"), number(row, "prefix_hits") + misses);
        let namespaces = row["namespaces"].as_array().expect("two");
        let bytes: u64 = namespaces.iter().map(|n| number(n, "prefix_hits") * number(n, "block_bytes")).sum();
        assert_eq!(bytes, number(row, "hit_bytes"));
        assert!(number(row, "hit_bytes") <= number(row, "opt_hit_bytes"), "{row}");
    }
}

#[test]
fn no_bytes_are_told_of_a_trace_that_has_none() {
    let arguments = ["simulate", &cut("conv").display().to_string(), "--policy", "lru", "--capacity", "10%", "--json"];
    let row = |more: &[&str]| command::run(&[&arguments[..], more].concat()).json()["rows"][0].clone();
    let (unknown, known) = (row(&[]), row(&["--block-bytes", "65536"]));
    let bytes = ["capacity_bytes", "bytes", "hit_bytes", "opt_hit_bytes", "infinite_hit_bytes", "ssd_written_bytes"];
    for name in bytes {
        assert!(unknown[name].is_null() && known[name].is_u64(), "{name}: {unknown} {known}");
    }
    for name in ["prefix_hits", "opt_prefix_hits", "capacity_blocks", "metadata_bytes"] {
        assert!(unknown[name].is_u64() && unknown[name] == known[name], "{name}: {unknown} {known}");
    }
}

#[test]
fn a_capacity_in_bytes_needs_the_size_of_a_block() {
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["simulate", "--no-opt", "--policy", "lru"]).arg(cut("conv")).args(more);
        command.output().expect("it ran")
    };
    let refused = run(&["--capacity", "64GiB"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("hint: give `--block-bytes`"), "{}", text(&refused.stderr));
    for args in [&["--capacity", "64MiB", "--block-bytes", "65536"][..], &["--capacity", "50000tokens"]] {
        let output = run(args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "progress is for terminals");
    }
}

#[test]
fn what_cannot_end_well_is_refused_before_the_replay_with_a_hint() {
    let directory = tempfile::tempdir().expect("a directory");
    let trace = cut("synth");
    let (zipped, cut_short) = (directory.path().join("trace.jsonl.gz"), directory.path().join("trace.jsonl.zst"));
    std::fs::write(&zipped, [0x1f, 0x8b, 8, 0]).expect("ours");
    let whole = std::fs::read(&trace).expect("it is there");
    std::fs::write(&cut_short, &whole[..whole.len() / 2]).expect("ours");
    let [trace, zipped, cut_short] = [&trace, &zipped, &cut_short].map(|path| path.to_str().expect("UTF-8"));
    for (code, arguments, says, hint) in [
        (1, &[trace, "--plot", "/nope/x.svg"][..], "cannot write plot", "name a file in a directory"),
        (2, &[trace, "--plot", "x.png"], "`--plot` cannot be `x.png`", "give a name that ends in `.svg`"),
        (2, &[trace, "--one-time", "1.5"], "one_time=`1.5`", "such as 0.5"),
        (2, &[trace, trace, "--block-bytes", "1,2,3"], "neither one value", "one for each trace"),
        (1, &[zipped], "compressed by gzip", "gunzip"),
        (1, &[cut_short], "damaged or cut short", "copy it anew"),
    ] {
        let told = command::run(&[&["simulate"], arguments].concat());
        assert!(told.code == code && told.out.is_empty(), "{told:?}");
        assert!(told.err.contains(says) && told.err.contains(hint) && !told.err.contains("Error {"), "{told:?}");
    }
    // A plot that is there stays if the command fails, and none is left.
    let plot = directory.path().join("plot.svg");
    let told = command::run(&["simulate", cut_short, "--plot", plot.to_str().expect("UTF-8")]);
    assert!(told.code == 1 && !plot.exists(), "{told:?}");
}
