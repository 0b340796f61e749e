//! Whether the pool can be made, and whether it lies on huge pages: as the daemon reports it or, without one, as a pool
//! made here would.
//!
//! Without a daemon a pool of the configured size is really made in a directory of its own beside the configured
//! one, one unit of it is populated and counted, and it is removed: what was seen is what `serve` will do.

use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};
use forebay_daemon::config::{Config, HugePages};
use forebay_io::pool::{Backing, HugePageReport, MIN_UNIT_BYTES, Pool, PoolConfig, check_mount, remove};
use forebay_io::trust::{Holds, check_directory};

use super::Check;
use super::daemon::Holdings;
use super::machine::existing;
use crate::output::size;

const NAME: &str = "huge pages";

/// Less than this share of huge pages is worth a warning; a few small ones at the edges are not.
const ENOUGH: f64 = 0.95;

pub fn checks(config: &Config, holdings: Option<&Holdings>, held_bytes: u64, outlook: Outlook) -> Vec<Check> {
    if let Some(holdings) = holdings {
        return vec![of_daemon(holdings, config.pool.huge_pages)];
    }
    // A pool that does not fit is what the check of memory is about.
    let unless_full = |error: Error| if error.kind() == ErrorKind::Full { None } else { Some(error) };
    let replaced = match outlook.map_err(unless_full) {
        Err(Some(error)) => return vec![Check::failed("pool", &error)],
        outlook => outlook.ok().flatten(),
    };
    let capacity_bytes = config.pool.capacity_bytes.0.saturating_sub(held_bytes).max(4 * MIN_UNIT_BYTES);
    let trial = match try_out(&config.pool.directory, capacity_bytes, config.pool.huge_pages).map_err(unless_full) {
        Err(Some(error)) => return vec![Check::failed("pool", &error)],
        trial => trial.ok(),
    };
    let directory = config.pool.directory.display();
    let usable = match replaced {
        Some(reason) => {
            let finding = format!("the pool in `{directory}` would be replaced, and its blocks lost: {reason}");
            let hint = "keep `pool.unit_bytes`, and lower `pool.capacity_bytes` only to lose the blocks";
            Check::warn("pool", finding, hint)
        }
        None => Check::ok("pool", format!("`{directory}` can be used")),
    };
    let pages = trial.map(|report| of_trial(&report, config.pool.huge_pages, capacity_bytes));
    [usable].into_iter().chain(pages).collect()
}

/// Why `serve` would replace the pool that is there, if it would, or the error with which it would not open one.
pub type Outlook = Result<Option<String>>;

/// What `serve` would do with the configured pool.
pub fn outlook(config: &Config) -> Outlook {
    let wanted = PoolConfig {
        directory: config.pool.directory.clone(),
        capacity_bytes: config.pool.capacity_bytes.0,
        unit_bytes: config.pool.unit_bytes.map(|bytes| bytes.0),
        huge_pages: config.pool.huge_pages,
    };
    let directory = check_directory(&config.pool.directory, Holds::Pool);
    let usable = directory.and_then(|(path, is_there)| if is_there { check_mount(&path) } else { Ok(()) });
    usable.and_then(|()| Pool::check(&wanted))
}

fn of_daemon(holdings: &Holdings, wish: HugePages) -> Check {
    // While the pool is being populated, pages are there before the unit they belong to is.
    let huge_bytes = holdings.huge_bytes.min(holdings.populated_bytes);
    let finding = format!("{} of {} are on huge pages", size(huge_bytes), size(holdings.populated_bytes));
    let is_enough = huge_bytes as f64 >= ENOUGH * holdings.populated_bytes as f64;
    match is_enough || wish == HugePages::Off {
        true => Check::ok(NAME, finding),
        false => Check::warn(NAME, finding, more_pages(holdings.capacity_bytes)),
    }
}

fn of_trial(report: &HugePageReport, wish: HugePages, capacity_bytes: u64) -> Check {
    let how = match report.backing {
        Backing::Hugetlbfs => "reserved huge pages",
        Backing::Advised => "a tmpfs with huge pages",
        Backing::Collapsed => "a tmpfs whose pages the kernel collapses into huge pages while it is populated",
        Backing::Small => "4 KiB pages",
    };
    let finding = format!("the pool would be on {how}; {} were tried", size(report.mapped_bytes));
    let is_huge = report.backing.is_huge() && report.huge_bytes == report.mapped_bytes;
    match is_huge || wish == HugePages::Off {
        true => Check::ok(NAME, finding),
        false => Check::warn(NAME, format!("{finding}: {}", report.notes.join("; ")), more_pages(capacity_bytes)),
    }
}

fn more_pages(capacity_bytes: u64) -> String {
    let pages = capacity_bytes.div_ceil(2 << 20);
    format!(
        "run `sysctl vm.nr_hugepages={pages}` and mount a hugetlbfs, or put `pool.directory` on a tmpfs with `huge=advise`"
    )
}

/// Makes a pool as `serve` would, populates its first unit, counts, and removes it.
fn try_out(pool_directory: &Path, capacity_bytes: u64, huge_pages: HugePages) -> Result<HugePageReport> {
    let parent = existing(pool_directory);
    let directory = tempfile::Builder::new().prefix(".forebay-doctor-").tempdir_in(&parent).map_err(|error| {
        Error::new(ErrorKind::Io, "cannot make a pool")
            .with("path", parent.display())
            .source(error)
            .hint("let this user write to the path, or set `pool.directory` to another directory on a tmpfs")
    })?;
    let config = PoolConfig {
        directory: directory.path().to_path_buf(),
        capacity_bytes,
        // The smallest that such a pool can have: one unit is populated.
        unit_bytes: Some((capacity_bytes / MAX_UNITS).next_power_of_two().max(MIN_UNIT_BYTES)),
        huge_pages,
    };
    let report = Pool::open(&config).and_then(|opened| {
        opened.pool.populate_unit(0)?;
        opened.pool.huge_page_report()
    });
    let removed = remove(directory.path());
    report.and_then(|report| removed.map(|_| report))
}

/// Units that a pool may have.
const MAX_UNITS: u64 = 65_536;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn the_daemons_huge_pages_are_judged_by_what_there_is_and_what_was_wanted() {
        let holdings =
            |huge_bytes| Holdings { capacity_bytes: 4 << 30, populated_bytes: 2 << 30, huge_bytes, nodes: Vec::new() };
        let all = of_daemon(&holdings(2 << 30), HugePages::Auto);
        assert_eq!((all.verdict, all.finding.as_str()), (Verdict::Ok, "2.0 GiB of 2.0 GiB are on huge pages"));
        let few = of_daemon(&holdings(1 << 30), HugePages::Auto);
        assert_eq!(few.verdict, Verdict::Warn);
        assert!(few.hint.unwrap().contains("vm.nr_hugepages=2048"));
        assert_eq!(of_daemon(&holdings(0), HugePages::Off).verdict, Verdict::Ok);
    }

    #[test]
    fn a_trial_on_small_pages_says_why() {
        let report = HugePageReport {
            backing: Backing::Small,
            mapped_bytes: 2 << 20,
            huge_bytes: 0,
            nodes: Vec::new(),
            notes: vec!["no hugetlbfs is mounted".to_string()],
        };
        let check = of_trial(&report, HugePages::Auto, 4 << 30);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.finding.ends_with("4 KiB pages; 2.0 MiB were tried: no hugetlbfs is mounted"), "{check:?}");
        let huge = HugePageReport { backing: Backing::Collapsed, huge_bytes: 2 << 20, notes: Vec::new(), ..report };
        assert_eq!(of_trial(&huge, HugePages::Auto, 4 << 30).verdict, Verdict::Ok);
    }

    #[test]
    fn a_trial_leaves_nothing_behind() {
        let parent = tempfile::tempdir_in("/dev/shm").unwrap();
        let report = try_out(&parent.path().join("pool"), 16 << 20, HugePages::Off).unwrap();
        assert_eq!((report.backing, report.mapped_bytes), (Backing::Small, MIN_UNIT_BYTES));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
