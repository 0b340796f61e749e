//! The tiers below the pool: what a running daemon says of them, else whether the disks can be had.

use std::path::Path;

use forebay_daemon::config::TierSsd;
use forebay_rpc::proto::{StoreInfo, TierInfo};

use super::Check;
use crate::output::size;

/// `running` is what the daemon says, if one runs. Nothing to say where no tier is configured.
pub fn checks(config: &TierSsd, running: Option<&[TierInfo]>) -> Vec<Check> {
    match running {
        Some(tiers) => tiers.iter().map(served).collect(),
        None => config.disks.iter().map(|disk| wanted(disk, config.capacity_bytes.map(|bytes| bytes.0))).collect(),
    }
}

fn served(tier: &TierInfo) -> Check {
    let disks: Vec<String> =
        tier.disks.iter().map(|disk| format!("`{}` by {}: {}", disk.name, disk.engine, disk.engine_why)).collect();
    let stores = tier.stores.iter().map(said_of_store);
    let places: Vec<String> = disks.into_iter().chain(stores).collect();
    let finding = format!("{}, {} blocks; {}", tier.state, tier.blocks, places.join("; "));
    let name = tier.name.clone();
    let place = if tier.stores.is_empty() { "disk" } else { "shared store" };
    match tier.state.as_str() {
        "serving" => {
            match (tier.disks.iter().find(|disk| !disk.is_direct), tier.stores.iter().find(|store| !store.is_healthy)) {
                (Some(disk), _) => Check::warn(
                    name,
                    finding,
                    format!(
                        "`{}` is on a filesystem without direct i/o: bytes are copied through the page cache",
                        disk.name
                    ),
                ),
                (None, Some(store)) => {
                    Check::warn(name, finding, format!("check `{}`; the daemon tries it again by itself", store.name))
                }
                (None, None) => Check::ok(name, finding),
            }
        }
        "opening" => Check::warn(name, "its index is being read", "run `forebay doctor` again in a moment"),
        "failed" => {
            Check::fail(name, format!("failed: {}", tier.why), format!("check the {place}, and restart the daemon"))
        }
        _ => Check::warn(
            name,
            format!("sick: {}", tier.why),
            format!("check the {place}; the daemon tries it again by itself"),
        ),
    }
}

fn said_of_store(store: &StoreInfo) -> String {
    let colon = if store.trouble.is_empty() { "" } else { ": " };
    format!("`{}`{colon}{}", store.name, store.trouble.escape_debug())
}

/// A disk that no daemon has opened yet.
fn wanted(path: &Path, capacity_bytes: Option<u64>) -> Check {
    let shown = path.display();
    if path.exists() {
        return Check::ok("ssd", format!("`{shown}` exists"));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(wanted_bytes) = capacity_bytes else {
        return Check::fail(
            "ssd",
            format!("`{shown}` does not exist"),
            "set `tier.ssd.capacity_bytes`, which a new file needs",
        );
    };
    match rustix::fs::statvfs(parent) {
        Err(error) => Check::fail("ssd", format!("cannot create `{shown}`: {error}"), "create its directory first"),
        Ok(found) => {
            let free_bytes = found.f_bavail * found.f_frsize;
            let finding = format!("`{shown}` will be created with {} of {} free", size(wanted_bytes), size(free_bytes));
            if free_bytes >= wanted_bytes {
                Check::ok("ssd", finding)
            } else {
                Check::fail("ssd", finding, "lower `tier.ssd.capacity_bytes`, or free space")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use forebay_daemon::config::Bytes;
    use forebay_rpc::proto::DiskInfo;

    fn tier(state: &str, is_direct: bool) -> TierInfo {
        let disk = DiskInfo {
            name: "/mnt/ssd".to_string(),
            engine: "threads".to_string(),
            engine_why: "io_uring is not available".to_string(),
            is_direct,
            ..DiskInfo::default()
        };
        TierInfo { name: "ssd".to_string(), state: state.to_string(), disks: vec![disk], ..TierInfo::default() }
    }

    #[test]
    fn a_running_tier_is_judged_by_its_state_and_says_which_engine_and_why() {
        let config = TierSsd { disks: vec!["/mnt/ssd".into()], ..forebay_daemon::config::Config::default().tier_ssd };
        for (state, is_direct, verdict) in [
            ("serving", true, Verdict::Ok),
            ("serving", false, Verdict::Warn),
            ("opening", true, Verdict::Warn),
            ("sick", true, Verdict::Warn),
            ("failed", true, Verdict::Fail),
        ] {
            let checks = checks(&config, Some(&[tier(state, is_direct)]));
            assert_eq!(checks.iter().map(|check| check.verdict).collect::<Vec<_>>(), [verdict], "{state}");
            if state == "serving" {
                assert!(checks[0].finding.contains("threads: io_uring is not available"), "{:?}", checks[0]);
            }
        }
    }

    #[test]
    fn a_store_is_judged_under_its_own_name_and_says_what_is_wrong() {
        let store = |is_healthy: bool, trouble: &str| StoreInfo {
            name: "cache:6379".to_string(),
            is_healthy,
            trouble: trouble.to_string(),
            ..StoreInfo::default()
        };
        let tier = |state: &str, store: StoreInfo| TierInfo {
            name: "redis".to_string(),
            state: state.to_string(),
            why: store.trouble.clone(),
            stores: vec![store],
            ..TierInfo::default()
        };
        for (tier, verdict, says) in [
            (tier("serving", store(true, "")), Verdict::Ok, "`cache:6379`"),
            (tier("serving", store(true, "lost once")), Verdict::Ok, "`cache:6379`: lost once"),
            (tier("serving", store(false, "refused")), Verdict::Warn, "`cache:6379`: refused"),
            (tier("sick", store(false, "refused")), Verdict::Warn, "sick: refused"),
            (tier("failed", store(false, "misnamed")), Verdict::Fail, "failed: misnamed"),
        ] {
            let check = served(&tier);
            assert_eq!((check.name.as_ref(), check.verdict), ("redis", verdict), "{check:?}");
            assert!(check.finding.contains(says), "{check:?}");
            assert!(check.hint.as_deref().is_none_or(|hint| !hint.contains("disk")), "{check:?}");
        }
    }

    #[test]
    fn without_a_daemon_a_disk_is_there_or_can_be_made_or_not() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        std::fs::write(&there, "").unwrap();
        for (path, capacity_bytes, verdict) in [
            (there, None, Verdict::Ok),
            (directory.path().join("new"), Some(4096), Verdict::Ok),
            (directory.path().join("new"), None, Verdict::Fail),
            (directory.path().join("new"), Some(1 << 60), Verdict::Fail),
            (directory.path().join("no/such"), Some(4096), Verdict::Fail),
        ] {
            let capacity_bytes = capacity_bytes.map(Bytes);
            let config = TierSsd {
                disks: vec![path.clone()],
                capacity_bytes,
                ..forebay_daemon::config::Config::default().tier_ssd
            };
            let found: Vec<Verdict> = checks(&config, None).iter().map(|check| check.verdict).collect();
            assert_eq!(found, [verdict], "{path:?}");
        }
        assert!(checks(&forebay_daemon::config::Config::default().tier_ssd, None).is_empty());
    }
}
