//! The command line with examples and exit codes in every help; its completions for shells, and its manual pages.
//!
//! Invariant: whatever shows the command line shows this one.

use std::ffi::OsString;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use forebay_core::{Error, ErrorKind};

use crate::arguments::{Arguments, Completions, Man};
use crate::failure::Failure;
use crate::output::{print, print_bytes};

/// Of each command, by its words.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("", &["forebay serve --pool.capacity_bytes 200GiB", "forebay doctor", "forebay inspect"]),
    (
        "serve",
        &[
            "forebay serve --pool.capacity_bytes 200GiB",
            "forebay serve --pool.capacity_bytes 200GiB --tier.ssd.disks /mnt/nvme/forebay --tier.ssd.capacity_bytes 1TiB",
            "forebay serve --config forebay.toml --log.level debug",
        ],
    ),
    ("top", &["forebay top", "forebay top --once", "forebay top --lines"]),
    ("inspect", &["forebay inspect", "forebay inspect --watch", "forebay inspect --json"]),
    ("inspect ssd", &["forebay inspect ssd /mnt/nvme/forebay --audit"]),
    ("health", &["forebay health", "forebay health --live --timeout 5"]),
    ("audit", &["forebay audit"]),
    (
        "purge",
        &[
            "forebay purge --tenant blue --dry-run",
            "forebay purge --namespace 79e825c7",
            "forebay purge --tenant blue --shared-stores",
        ],
    ),
    ("pool", &["forebay pool remove /dev/shm/forebay"]),
    ("pool remove", &["forebay pool remove", "forebay pool remove /dev/shm/forebay"]),
    ("config", &["forebay config", "forebay config --config forebay.toml --json"]),
    ("doctor", &["forebay doctor --pool.capacity_bytes 200GiB", "forebay doctor --json"]),
    ("bench", &["forebay bench lookup"]),
    ("bench copy", &["forebay bench copy --threads 2"]),
    ("bench device", &["forebay bench device", "forebay bench device --engine host --size-bytes 64KiB --count 256"]),
    ("bench lookup", &["forebay bench lookup", "forebay bench lookup --socket.directory /run/forebay --keys 1024"]),
    ("bench redis", &["forebay bench redis redis://localhost --sweep"]),
    ("bench ssd", &["forebay bench ssd /mnt/nvme/measured --size-bytes 1048576"]),
    (
        "bench transfer",
        &[
            "forebay bench transfer --transport tcp",
            "forebay bench transfer --transport tcp --peers nixl,mooncake,ucx --python .cache/peers/python",
            "forebay bench transfer --transport tcp --encrypt --secret-file /etc/forebay.transfer-secret",
            "forebay bench transfer --listen tcp://0.0.0.0:7000 --secret-file /etc/forebay.transfer-secret",
            "forebay bench transfer --connect tcp://10.0.0.1:7000 --secret-file /etc/forebay.transfer-secret",
        ],
    ),
    ("simulate", &["forebay simulate trace.jsonl --policy default,lru --capacity 1%,64GiB --block-bytes 2097152"]),
    ("advise", &["forebay advise", "forebay advise --json", "forebay advise --plot sizes.svg"]),
    ("trace", &["forebay trace record trace.jsonl"]),
    ("trace record", &["forebay trace record trace.jsonl --seconds 600"]),
    ("completions", &["forebay completions bash > /etc/bash_completion.d/forebay"]),
    ("man", &["forebay man", "forebay man /usr/local/share/man/man1"]),
    ("version", &["forebay version", "forebay version --json"]),
];

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it failed; `error:` says why, and `hint:` what to do
  2  the arguments or the configuration are wrong";
const JUDGES: &str = "\
Exit codes:
  0  done, and nothing is wrong
  1  it failed, or a check did
  2  the arguments or the configuration are wrong";

/// All commands.
pub fn command() -> Command {
    described(Arguments::command(), "")
}

/// What was typed. Behind `help` the flag for help asks for the same, and clap knows no flag there.
pub fn words() -> Vec<OsString> {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if words.get(1).is_some_and(|word| word == "help") {
        words.retain(|word| word != "--help" && word != "-h");
    }
    words
}

/// The words of the command that was typed, as far as it is one.
pub fn given() -> String {
    let (mut command, mut given) = (command(), Vec::new());
    for word in words().into_iter().skip(1) {
        let Some(found) = command.find_subcommand(&word) else { break };
        given.push(found.get_name().to_owned());
        command = found.clone();
    }
    given.join(" ")
}

fn described(mut command: Command, words: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    for name in names {
        let words = format!("{words} {name}");
        command = command.mut_subcommand(name, |below| described(below, words.trim()));
    }
    let codes = if matches!(words, "doctor" | "audit" | "health" | "inspect ssd") { JUDGES } else { EXIT_CODES };
    command.after_help(format!("{}{codes}", examples(words)))
}

fn examples(words: &str) -> String {
    let lines = EXAMPLES.iter().filter(|(of, _)| *of == words).flat_map(|(_, lines)| *lines);
    let lines: String = lines.map(|line| format!("  {line}\n")).collect();
    if lines.is_empty() { lines } else { format!("Examples:\n{lines}\n") }
}

pub fn completions(arguments: &Completions) {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command(), "forebay", &mut script);
    print_bytes(&script);
}

/// The first page to standard output, or all pages into a directory.
pub fn man(arguments: &Man) -> Result<(), Failure> {
    let page = |command: Command| {
        let mut text = Vec::new();
        clap_mangen::Man::new(command).render(&mut text).map(|()| text)
    };
    let Some(directory) = &arguments.directory else {
        if std::io::stdout().is_terminal() {
            return Err(Failure::Usage(
                Error::invalid("a manual page is written for `man`, and standard output is a terminal").hint(
                    "`forebay man | man -l -` shows the page; `forebay man DIRECTORY` writes the pages of all commands",
                ),
            ));
        }
        let cannot = |error| Error::new(ErrorKind::Io, "cannot make the manual page").source(error);
        print_bytes(&page(command()).map_err(cannot)?);
        return Ok(());
    };
    let cannot = |error: std::io::Error| {
        let what = match directory.exists() && !directory.is_dir() {
            true => "cannot write the manual pages: it is not a directory",
            false => "cannot write the manual pages",
        };
        Error::new(ErrorKind::Io, what)
            .with("path", directory.display())
            .source(error)
            .hint("name a directory that this user may write to, or one that this user may make")
    };
    fs::create_dir_all(directory).map_err(cannot)?;
    let mut count = 0;
    for (name, command) in pages(command(), "forebay") {
        let text = page(command).map_err(cannot)?;
        write_page(&directory.join(format!("{name}.1")), &text).map_err(cannot)?;
        count += 1;
    }
    print(&format!("{count} manual pages were written to `{}`\n", directory.display()));
    Ok(())
}

/// Each command with the name of its page, such as `forebay-bench-lookup`.
fn pages(command: Command, name: &str) -> Vec<(String, Command)> {
    let shown = command.get_subcommands().filter(|below| !below.is_hide_set());
    let below = shown.cloned().flat_map(|below| {
        let name = format!("{name}-{}", below.get_name());
        pages(below, &name)
    });
    let below: Vec<_> = below.collect();
    let named = command.display_name(name.to_owned()).bin_name(name.replace('-', " "));
    std::iter::once((name.to_owned(), named)).chain(below).collect()
}

fn write_page(path: &Path, text: &[u8]) -> std::io::Result<()> {
    fs::File::create(path)?.write_all(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(command: &Command, words: &str, found: &mut Vec<String>) {
        found.push(words.to_owned());
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            all(below, format!("{words} {}", below.get_name()).trim(), found);
        }
    }

    #[test]
    fn every_command_has_examples_which_parse() {
        let mut words = Vec::new();
        all(&command(), "", &mut words);
        let described: Vec<&str> = EXAMPLES.iter().map(|(words, _)| *words).collect();
        assert_eq!(
            {
                words.sort();
                words
            },
            {
                let mut sorted = described;
                sorted.sort();
                sorted
            }
        );
        for example in EXAMPLES.iter().flat_map(|(_, examples)| *examples) {
            let argv = example.split(" > ").next().unwrap_or_default().split(' ');
            let parsed = command().try_get_matches_from(argv);
            assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let pages = pages(command(), "forebay");
        assert_eq!(pages.len(), EXAMPLES.len());
        assert!(pages.iter().any(|(name, _)| name == "forebay-bench-lookup"));
    }
}
