//! `forebay doctor`: checks of the machine and of the daemon, each with a verdict and a hint.
//!
//! Facts are gathered first and judged by pure functions, so that every verdict can be tested without the
//! machine that deserves it. Doctor changes nothing that lasts: its self-test is a trial, which the daemon
//! removes with its session.

mod daemon;
mod gpu;
mod machine;
mod numa;
mod pool;
mod rdma;
mod tier;

use std::borrow::Cow;

use forebay_daemon::config::{Key, Origin, keys};
use forebay_io::secret_file;
use forebay_rpc::RPC_SOCKET;
use forebay_rpc::client::find_sockets;
use serde::Serialize;
use serde_json::json;

use crate::arguments::Doctor;
use crate::failure::Failure;
use crate::output::{Colour, is_coloured, painted, print, print_json};
use crate::serve::runtime;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// Forebay runs, but worse than it could, or not yet.
    Warn,
    /// Forebay does not run, or not as configured.
    Fail,
}

impl Verdict {
    fn colour(self) -> Colour {
        match self {
            Verdict::Ok => Colour::Green,
            Verdict::Warn => Colour::Yellow,
            Verdict::Fail => Colour::Red,
        }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    name: Cow<'static, str>,
    verdict: Verdict,
    finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl Check {
    fn ok(name: impl Into<Cow<'static, str>>, finding: impl Into<String>) -> Check {
        Check { name: name.into(), verdict: Verdict::Ok, finding: finding.into(), hint: None }
    }

    fn warn(name: impl Into<Cow<'static, str>>, finding: impl Into<String>, hint: impl Into<String>) -> Check {
        Check { name: name.into(), verdict: Verdict::Warn, finding: finding.into(), hint: Some(hint.into()) }
    }

    fn fail(name: impl Into<Cow<'static, str>>, finding: impl Into<String>, hint: impl Into<String>) -> Check {
        Check { name: name.into(), verdict: Verdict::Fail, finding: finding.into(), hint: Some(hint.into()) }
    }

    /// A failure in the error's words.
    fn failed(name: impl Into<Cow<'static, str>>, error: &forebay_core::Error) -> Check {
        let hint = error.hint_text().map(str::to_string);
        Check { name: name.into(), verdict: Verdict::Fail, finding: error.to_string(), hint }
    }
}

pub fn run(arguments: &Doctor) -> Result<(), Failure> {
    let loaded = arguments.settings.load()?;
    let origin = |key: &Key| loaded.origin(key);
    let is_said = keys().into_iter().any(|key| key.name == "socket.directory" && *origin(key) != Origin::Default);
    let flags: Vec<&str> = keys().into_iter().filter(|key| *origin(key) == Origin::Flag).map(|key| key.name).collect();
    let mut config = loaded.config;
    // If nobody says where the sockets are, the daemon of interest is the one that engines of this user find. Where
    // there is none, a daemon would listen in the directory that is configured.
    let found = find_sockets(None);
    if !is_said && found.join(RPC_SOCKET).symlink_metadata().is_ok() {
        config.socket.directory = found;
    }
    let mut daemon = runtime()?.block_on(daemon::examine(&config));
    let disks = tier::disks(&config, daemon.tiers.as_deref());
    // A daemon that does not answer has the disks, and is what is wrong: said first, and the disks are not judged.
    let mut checks = Vec::new();
    if daemon.is_silent {
        checks.append(&mut daemon.checks);
    }
    let is_there = daemon.holdings.is_some() || daemon.is_silent;
    let outlook = if is_there { Ok(None) } else { pool::outlook(&config) };
    checks.extend(machine::checks(&config, daemon.holdings.as_ref(), disks, outlook));
    checks.extend(gpu::checks());
    checks.push(numa::check(daemon.holdings.as_ref()));
    checks.extend(rdma::checks());
    checks.extend(tier::sealing(&config));
    match daemon.is_silent {
        true => checks.extend(tier::unjudged(&config)),
        false => checks.extend(tier::checks(&config, daemon.tiers.as_deref())),
    }
    let exposed = secret_file::readable_by_all().into_iter();
    checks.extend(exposed.map(|file| {
        Check::warn("secrets", format!("all users who reach `{}` can read it", file.display()), secret_file::HIDE)
    }));
    if let Some(holdings) = &daemon.holdings {
        let is_same = config.pool.capacity_bytes.0 == holdings.capacity_bytes;
        checks.extend(unchecked(&flags, is_same));
    }
    checks.extend(daemon.checks);
    let worst = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Ok);
    if arguments.json {
        print_json(&json!({"version": crate::machine::version(), "verdict": worst, "checks": checks}));
    } else {
        print(&text(&checks, is_coloured(&std::io::stdout())));
    }
    if worst == Verdict::Fail { Err(Failure::Judged) } else { Ok(()) }
}

/// Flags that nothing was compared with, since a daemon runs: its pool and its tiers are judged. `is_same` says whether
/// its pool has the capacity that is named.
fn unchecked(flags: &[&str], is_same: bool) -> Option<Check> {
    let is_unchecked = |name: &str| match name {
        "pool.directory" => false,
        "pool.capacity_bytes" => !is_same,
        name => name.starts_with("pool.") || name.starts_with("tier."),
    };
    let named: Vec<String> = flags.iter().filter(|name| is_unchecked(name)).map(|name| format!("`--{name}`")).collect();
    let finding = format!("a daemon runs, and its values are judged; not checked: {}", named.join(", "));
    let hint = "stop the daemon, or name another `--socket.directory`, to check what `forebay serve` would do";
    (!named.is_empty()).then(|| Check::warn("flags", finding, hint))
}

fn text(checks: &[Check], is_coloured: bool) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let line = |check: &Check| {
        let verdict = format!("{:<4}", format!("{:?}", check.verdict).to_lowercase());
        let verdict = if is_coloured { painted(&verdict, check.verdict.colour()) } else { verdict };
        let hint = check.hint.as_ref().map(|hint| format!("{:width$}        hint: {hint}\n", "")).unwrap_or_default();
        format!("{verdict}  {:<width$}  {}\n{hint}", check.name, check.finding)
    };
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let summary = format!("{} ok, {} warn, {} fail\n", count(Verdict::Ok), count(Verdict::Warn), count(Verdict::Fail));
    format!("forebay {}\n\n{}\n{summary}", crate::machine::version(), checks.iter().map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_verdict_is_the_last_in_order() {
        assert!(Verdict::Ok < Verdict::Warn && Verdict::Warn < Verdict::Fail);
    }

    #[test]
    fn findings_stand_under_each_other_with_their_hints_below() {
        let checks =
            [Check::ok("cpu", "fast"), Check::warn("memory", "little", "buy some"), Check::fail("x", "no", "yes")];
        assert!(text(&checks, true).contains("\x1b[33mwarn\x1b[0m  memory  little"));
        let text = text(&checks, false);
        let (_, report) = text.split_once("\n\n").unwrap();
        assert_eq!(
            report,
            "ok    cpu     fast\nwarn  memory  little\n              hint: buy some\nfail  x       no\n              hint: yes\n\n1 ok, 1 warn, 1 fail\n"
        );
    }
}
