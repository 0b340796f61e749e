//! What a machine can check of the house rules: `unsafe` stays inside its fence, the core has no clock, thread
//! or file, nothing speaks of the machine it was written on, files stand in no circle, and STYLE.md speaks of this
//! code.
//!
//! All else is taste, helped by the ratchets that the last test prints and never fails for:
//! `cargo test -p forebay-core --test tidy -- --nocapture`.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/shared.rs"]
mod shared;
#[path = "tidy/style.rs"]
mod style;

use std::fs;
use std::path::{Path, PathBuf};

/// The only places for `unsafe`: vector instructions of checksums, the kernel's calls about NUMA nodes, mapped memory,
/// the kernel's rings, sockets that fill memory which others use, the functions of UCX, tables of descriptors, copies,
/// the functions of a GPU's driver and the fake of them, buffers of other libraries, the tests that play a worker and
/// stop threads, and the allocator of the tests of parsers.
const UNSAFE: [&str; 14] = [
    "crates/checksum/src/",
    "crates/numa/src/kernel.rs",
    "crates/fuzz/src/allocator.rs",
    "crates/io/src/pool/",
    "crates/io/src/uring/",
    "crates/io/src/descriptors.rs",
    "crates/device/src/copy",
    "crates/device/src/cuda/libcuda.rs",
    "crates/fake-cuda/src/",
    "crates/fabric/src/memory.rs",
    "crates/fabric/src/socket.rs",
    "crates/fabric/src/ucx/",
    "crates/python/src/buffers.rs",
    "crates/cli/tests/support/",
];

/// Characters in a line, as rustfmt.toml has it for code.
const WIDTH: usize = 120;

/// What the core may not use; `std::io::Error` is a type like any other.
const OUTSIDE: [&str; 9] =
    ["std::time", "std::thread", "std::fs", "std::net", "std::env", "std::process", "std::os", "std::sync", "std::io"];

struct Source {
    /// From the repository's root on.
    path: String,
    text: String,
    /// The text without comments and the insides of strings, line by line.
    code: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate lies in crates/").to_owned()
}

/// All files below `folder` whose name ends so, without what is built or fetched.
fn files(folder: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.expect("the folder can be read").path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_ours =
            !name.starts_with('.') && !["target", "dist", "node_modules", "proptest-regressions"].contains(&&*name);
        if path.is_dir() && is_ours {
            files(&path, endings, found);
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

fn sources(endings: &[&str]) -> Vec<Source> {
    let mut paths = Vec::new();
    files(&root(), endings, &mut paths);
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        let path = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
        Some(Source { code: without_comments_and_strings(&text), path, text })
    };
    let sources: Vec<Source> = paths.into_iter().filter_map(read).collect();
    assert!(!sources.is_empty(), "no sources below {}", root().display());
    sources
}

/// Blanks what is not code and keeps every line break.
fn without_comments_and_strings(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string(rest) {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = hashes + 2;
            rest[open..].find(&close).map_or(rest.len(), |end| open + end + close.len())
        } else if first == '"' {
            end_of_string(rest)
        } else if rest.starts_with("'\"'") || rest.starts_with("'\\") {
            rest[2..].find('\'').map_or(rest.len(), |end| end + 3)
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        code.extend(rest[..skipped].chars().filter(|c| *c == '\n'));
        rest = &rest[skipped..];
    }
    code
}

/// Number of `#` if a raw string begins here.
fn raw_string(text: &str) -> Option<usize> {
    let behind = text.strip_prefix('r')?;
    let hashes = behind.len() - behind.trim_start_matches('#').len();
    behind[hashes..].starts_with('"').then_some(hashes)
}

fn end_of_string(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn has_word(code: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(is_part)
            && !code[at + word.len()..].chars().next().is_some_and(is_part)
    })
}

/// Lines in which `is_bad`, as people write them.
fn lines_with(source: &Source, is_bad: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = source.code.lines().enumerate().filter(|(_, line)| is_bad(line));
    lines.map(|(at, line)| format!("{}:{}: {}", source.path, at + 1, line.trim())).collect()
}

#[test]
fn the_scanner_sees_code_and_nothing_else() {
    let text =
        "let a = \"unsafe \\\" x\"; // unsafe\n/* unsafe\n */ let b = r#\"unsafe \" \"#; 'x'; '\"'; '\\''; fn c() {}";
    let code = without_comments_and_strings(text);
    assert!(!has_word(&code, "unsafe"), "{code}");
    assert_eq!(code.lines().count(), text.lines().count());
    assert!(code.contains("let a = ;") && code.contains("fn c() {}"), "{code}");
    assert!(has_word("x(unsafe{})", "unsafe") && !has_word("forbid(unsafe_code)", "unsafe"));
}

#[test]
fn unsafe_stays_inside_its_fence() {
    let sources = sources(&[".rs"]);
    let outside = sources.iter().filter(|source| !UNSAFE.iter().any(|fence| source.path.starts_with(fence)));
    let found: Vec<String> = outside.flat_map(|source| lines_with(source, |line| has_word(line, "unsafe"))).collect();
    assert!(found.is_empty(), "`unsafe` outside {UNSAFE:?}:\n{}", found.join("\n"));
    let is_empty = |fence: &&str| !sources.iter().any(|source| source.path.starts_with(fence));
    let nothing: Vec<&str> = UNSAFE.into_iter().filter(is_empty).collect();
    assert!(nothing.is_empty(), "the fence names what is not there: {nothing:?}");
}

#[test]
fn comments_are_no_wider_than_code() {
    let mut found = Vec::new();
    for source in sources(&[".rs", ".py", ".sh"]) {
        let marks: &[&str] = if source.path.ends_with(".rs") { &["//"] } else { &["#"] };
        for (at, line) in source.text.lines().enumerate() {
            let is_comment = marks.iter().any(|mark| line.trim_start().starts_with(mark));
            if is_comment && line.chars().count() > WIDTH {
                found.push(format!("{}:{}", source.path, at + 1));
            }
        }
    }
    assert!(found.is_empty(), "these lines of comment have more than {WIDTH} characters:\n{}", found.join("\n"));
}

#[test]
fn the_core_and_what_explains_it_have_no_clock_no_thread_and_no_file() {
    let sources = sources(&[".rs"]);
    let is_fenced = |source: &&Source| {
        ["crates/core/src/", "crates/insight/src/"].iter().any(|folder| source.path.starts_with(folder))
    };
    let core: Vec<&Source> = sources.iter().filter(is_fenced).collect();
    assert!(core.len() > 20, "only {} sources of the core were found", core.len());
    let is_bad = |line: &str| {
        // An error is a value, and so is a length of time.
        let line = line.replace("std::io::Error", "").replace("std::time::Duration", "");
        // A list in braces could hide a module from this test.
        line.contains("use std::{") || OUTSIDE.iter().any(|module| has_word(&line, module))
    };
    let found: Vec<String> = core.iter().flat_map(|source| lines_with(source, is_bad)).collect();
    assert!(found.is_empty(), "the core decides and does nothing:\n{}", found.join("\n"));
    let manifest = fs::read_to_string(root().join("crates/core/Cargo.toml")).expect("the core has a manifest");
    for crate_name in ["tokio", "rustix", "libc", "rand", "tracing", "chrono"] {
        assert!(!has_word(&manifest, crate_name), "the core depends on `{crate_name}`");
    }
}

#[test]
fn only_paths_see_all_parts_of_the_core() {
    let sources = sources(&[".rs"]);
    let may = |path: &str| path == "crates/core/src/core.rs" || path.starts_with("crates/core/src/paths/");
    let others = sources.iter().filter(|source| source.path.starts_with("crates/") && !may(&source.path));
    let is_bad = |line: &str| line.trim_start().starts_with("impl Core") || line.contains(" for Core {");
    let found: Vec<String> = others.flat_map(|source| lines_with(source, is_bad)).collect();
    assert!(found.is_empty(), "parts own their state and know no `Core`:\n{}", found.join("\n"));
    let paths = sources.iter().filter(|source| source.path.starts_with("crates/core/src/paths/"));
    assert!(paths.count() > 10, "the paths of the core were not found");
}

/// A block's record is written by the slots alone: `slots/mod.rs` keeps lists and counts, `record.rs` the states.
#[test]
fn only_slots_change_a_blocks_record() {
    let sources = sources(&[".rs"]);
    // Decorators are no part of the core's state, and have states of their own.
    let is_part = |path: &str| path.starts_with("crates/core/src/") && !path.starts_with("crates/core/src/decorate/");
    let core = sources.iter().filter(|source| is_part(&source.path));
    let is_write = |line: &str| line.replace(' ', "").contains(".state=") && !line.contains("==");
    let found: Vec<String> = core.flat_map(|source| lines_with(source, is_write)).collect();
    assert_eq!(found.len(), 1, "a state changes in one place:\n{}", found.join("\n"));
    assert!(found[0].starts_with("crates/core/src/slots/record.rs"), "{found:?}");
}

#[test]
fn nothing_is_left_undone_and_nothing_names_the_machine_it_was_written_on() {
    // Put together here, so that this file does not contain them.
    let words =
        [["TO", "DO"], ["FIX", "ME"], ["todo", "!"], ["unimple", "mented!"], ["dbg", "!"]].map(|word| word.concat());
    let places = [["/wo", "rk/"], ["/sha", "red/"], ["/ro", "ot/"], ["/ho", "me/"]].map(|place| place.concat());
    let mut found = Vec::new();
    for source in sources(&[".rs", ".py", ".pyi", ".sh", ".md", ".toml", ".proto", "Makefile"]) {
        for (at, line) in source.text.lines().enumerate() {
            let names_place = |place: &String| {
                let before = line.find(place.as_str()).map(|at| line[..at].chars().next_back());
                before.is_some_and(|before| before.is_none_or(|c| !c.is_alphanumeric() && !".})-_~".contains(c)))
            };
            if words.iter().any(|word| has_word(line, word)) || places.iter().any(names_place) {
                found.push(format!("{}:{}: {}", source.path, at + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Lines of each function in `code`, by the indentation of its closing brace, which rustfmt makes sure of.
fn functions(source: &Source) -> Vec<(usize, String)> {
    let lines: Vec<&str> = source.text.lines().collect();
    let is_head = |line: &str| {
        let line = line.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ").trim_start_matches("pub ");
        let line = line.trim_start_matches("const ").trim_start_matches("async ").trim_start_matches("unsafe ");
        line.starts_with("fn ")
    };
    let heads = lines.iter().enumerate().filter(|(_, line)| is_head(line.trim_start()));
    let length = |(at, head): (usize, &&str)| {
        let indent = head.len() - head.trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let is_one_line = head.ends_with('}') || head.ends_with(';');
        let count = if is_one_line { 1 } else { lines[at..].iter().position(|line| *line == end)? + 1 };
        Some((count, format!("{}:{}: {}", source.path, at + 1, head.trim())))
    };
    heads.filter_map(length).collect()
}

fn print_longest(what: &str, mut of: Vec<(usize, String)>) {
    of.sort_by(|a, b| b.cmp(a));
    println!("longest {what}:");
    of.iter().take(10).for_each(|(count, name)| println!("{count:5} {name}"));
}

/// Never fails: read it before calling a piece of work done.
#[test]
fn ratchets() {
    let all = sources(&[".rs"]);
    let shipped: Vec<&Source> = all.iter().filter(|source| source.path.contains("/src/")).collect();
    print_longest("files", shipped.iter().map(|s| (s.text.lines().count(), s.path.clone())).collect());
    print_longest("functions", shipped.iter().flat_map(|source| functions(source)).collect());
    // Tests come last in a file.
    let count = |word: &str| {
        let code = |source: &&Source| source.code.split("#[cfg(test)]").next().unwrap_or("").matches(word).count();
        shipped.iter().filter(|source| !source.path.contains("/tests")).map(code).sum::<usize>()
    };
    println!("outside tests: {} unwrap, {} expect", count(".unwrap()"), count(".expect("));
}
