//! The tiers below the pool: what a running daemon says of them, else what each says of its configuration.

use forebay_core::Result;
use forebay_daemon::Disks;
use forebay_daemon::config::{Config, TierSpec};
use forebay_rpc::proto::{DiskInfo, StoreInfo, TierInfo};

use super::Check;
use crate::output::{counted, escaped};

/// Whether the configuration keeps others from forging blocks. Nothing to say where no store is shared.
pub fn sealing(config: &Config) -> Option<Check> {
    let (name, file) = ("shared stores", &config.stores.secret_file);
    let is_shared = |tier: &dyn TierSpec| tier.capabilities().is_shared;
    match (config.sealing(), file) {
        (Err(error), _) => Some(Check::failed(name, &error)),
        (Ok(_), Some(file)) => {
            Some(Check::ok(name, format!("each block has a MAC; the secret is in `{}`", file.display())))
        }
        (Ok(_), None) => config.configured_tiers().any(is_shared).then(|| {
            Check::ok(
                name,
                "there is no secret (`tier.secret_file`): whoever may write to them can change blocks and make some up",
            )
        }),
    }
}

/// `running` is what the daemon says, if one runs. Nothing to say where no tier is configured.
pub fn checks(config: &Config, running: Option<&[TierInfo]>) -> Vec<Check> {
    match running {
        Some(tiers) => tiers.iter().map(|tier| served(tier, is_shared(config, &tier.name))).collect(),
        None => config.configured_tiers().flat_map(examined).collect(),
    }
}

/// Beside a daemon that does not answer: it has this host's disks, and shared stores are judged without it.
pub fn unjudged(config: &Config) -> Vec<Check> {
    let judged = |tier: &dyn TierSpec| match tier.capabilities().is_shared {
        true => examined(tier),
        false => {
            let says = "not examined: the daemon that does not answer may use the disks";
            vec![Check::warn(tier.name(), says, "run `forebay doctor` again when the daemon answers or has ended")]
        }
    };
    config.configured_tiers().flat_map(judged).collect()
}

/// The disks of this host to which blocks go, if there are any: without a daemon, as long as they are configured.
pub fn disks(config: &Config, running: Option<&[TierInfo]>) -> Option<Disks> {
    let served = |disk: &DiskInfo| Disks {
        capacity_bytes: disk.capacity_bytes,
        blocks: disk.blocks,
        live_bytes: disk.live_bytes,
    };
    let own: Vec<Disks> = match running {
        Some(tiers) => {
            let own = tiers.iter().filter(|tier| !is_shared(config, &tier.name));
            own.map(|tier| Disks::all(tier.disks.iter().map(served))).collect()
        }
        None => {
            let own = config.configured_tiers().filter(|tier| !tier.capabilities().is_shared);
            own.map(|tier| Disks { capacity_bytes: tier.capacity_bytes().unwrap_or(0), ..Disks::default() }).collect()
        }
    };
    (!own.is_empty()).then(|| Disks::all(own.into_iter()))
}

fn examined(tier: &dyn TierSpec) -> Vec<Check> {
    let check = |found: Result<String>| match found {
        Ok(finding) => Check::ok(tier.name(), finding),
        Err(error) => Check::failed(tier.name(), &error),
    };
    let found = tier.check().map_or_else(|error| vec![Err(error)], |()| tier.examine());
    found.into_iter().map(check).collect()
}

/// Whether hosts share the tiers of this name.
fn is_shared(config: &Config, name: &str) -> bool {
    config.tiers.iter().any(|tier| tier.name() == name && tier.capabilities().is_shared)
}

fn served(tier: &TierInfo, is_shared: bool) -> Check {
    let disks = tier.disks.iter().map(said_of_disk);
    let stores = tier.stores.iter().map(said_of_store);
    let places: Vec<String> = disks.chain(stores).collect();
    // The daemon keeps no index of shared stores, so it counts no blocks there.
    let blocks =
        if tier.stores.is_empty() { " with ".to_string() + &counted(tier.blocks, "block") } else { String::new() };
    let finding = format!("it is {}{blocks}: {}", tier.state, places.join("; "));
    let name = tier.name.clone();
    let place = if is_shared { "shared store" } else { "disk" };
    match tier.state.as_str() {
        "serving" => {
            let troubled = troubled(tier);
            match (troubled.is_empty(), tier.disks.iter().find(|disk| !disk.is_direct)) {
                (false, _) => Check::warn(name, finding, hint_of(&troubled)),
                (true, Some(disk)) => Check::warn(
                    name,
                    finding,
                    format!(
                        "`{}` is on a filesystem without direct i/o: bytes are copied through the page cache",
                        disk.name
                    ),
                ),
                (true, None) => Check::ok(name, finding),
            }
        }
        "opening" => Check::warn(name, "its index is being read", "run `forebay doctor` again in a moment"),
        "failed" => Check::fail(
            name,
            format!("it has failed: {}", escaped(&tier.why)),
            format!("check the {place}, and restart the daemon"),
        ),
        // A server's words where a user or a password is wrong.
        _ if ["WRONGPASS", "NOAUTH"].iter().any(|word| tier.why.contains(word)) => Check::warn(
            name,
            format!("it is sick: {}", escaped(&tier.why)),
            "correct the file of the password, which the daemon reads again by itself; or correct the configuration, and \
             restart the daemon",
        ),
        _ => {
            let troubled = troubled(tier);
            let hint = match troubled.iter().any(|(_, hint)| !hint.is_empty()) {
                true => hint_of(&troubled),
                false => format!("check the {place}; the daemon tries it again by itself"),
            };
            Check::warn(name, format!("it is sick: {}", escaped(&tier.why)), hint)
        }
    }
}

/// The disks and stores that are in trouble, each with the daemon's hint.
fn troubled(tier: &TierInfo) -> Vec<(&str, &str)> {
    let disks = tier.disks.iter().filter(|disk| !disk.trouble.is_empty());
    let disks = disks.map(|disk| (disk.name.as_str(), disk.hint.as_str()));
    let stores = tier.stores.iter().filter(|store| is_troubled(store));
    disks.chain(stores.map(|store| (store.name.as_str(), store.hint.as_str()))).collect()
}

/// What to do about these: as the daemon says, which knows why. A daemon of 0.1.0 says nothing.
fn hint_of(troubled: &[(&str, &str)]) -> String {
    let hint = |(name, hint): &(&str, &str)| match (hint.is_empty(), troubled.len()) {
        (true, _) => format!("check `{name}`; the daemon tries it again by itself"),
        (false, 1) => escaped(hint),
        (false, _) => format!("`{name}`: {}", escaped(hint)),
    };
    troubled.iter().map(hint).collect::<Vec<_>>().join("; ")
}

fn said_of_disk(disk: &DiskInfo) -> String {
    if disk.trouble.is_empty() {
        format!("`{}` by {}: {}", disk.name, disk.engine, disk.engine_why)
    } else {
        format!("`{}`: {}", disk.name, escaped(&disk.trouble))
    }
}

fn is_troubled(store: &StoreInfo) -> bool {
    !store.is_healthy || !store.refuses_writes.is_empty() || !store.refuses_reads.is_empty()
}

fn said_of_store(store: &StoreInfo) -> String {
    let refused = [("refuses reads", &store.refuses_reads), ("refuses writes", &store.refuses_writes)];
    let refused = refused.into_iter().filter(|(_, why)| store.is_healthy && !why.is_empty());
    let refused: Vec<String> =
        refused.map(|(what, why)| format!("`{}` {what}: {}", store.name, escaped(why))).collect();
    if !refused.is_empty() {
        return refused.join("; ");
    }
    let colon = match (store.trouble.is_empty(), store.is_healthy) {
        (true, _) => "",
        (false, true) => ", last problem: ",
        (false, false) => ": ",
    };
    format!("`{}`{colon}{}", store.name, escaped(&store.trouble))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use forebay_daemon::config::{Sources, load};

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
        for (state, is_direct, verdict) in [
            ("serving", true, Verdict::Ok),
            ("serving", false, Verdict::Warn),
            ("opening", true, Verdict::Warn),
            ("sick", true, Verdict::Warn),
            ("failed", true, Verdict::Fail),
        ] {
            let checks = checks(&Config::default(), Some(&[tier(state, is_direct)]));
            assert_eq!(checks.iter().map(|check| check.verdict).collect::<Vec<_>>(), [verdict], "{state}");
            if state == "serving" {
                assert!(checks[0].finding.contains("threads: io_uring is not available"), "{:?}", checks[0]);
            }
        }
    }

    #[test]
    fn a_tier_that_does_without_a_disk_says_which_one_to_check() {
        let mut tier = tier("serving", true);
        tier.disks[0].trouble = "writes fail (io)".to_string();
        let check = served(&tier, false);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.finding.contains("`/mnt/ssd`: writes fail (io)"), "{check:?}");
        assert!(check.hint.as_ref().is_some_and(|hint| hint.contains("check `/mnt/ssd`")), "{check:?}");
    }

    #[test]
    fn the_daemons_own_hint_is_given_and_of_several_each_with_its_disk() {
        let mut tier = tier("serving", true);
        tier.disks[0] = DiskInfo { trouble: "none".to_string(), hint: "mount it".to_string(), ..tier.disks[0].clone() };
        let hint = |tier: &TierInfo| served(tier, false).hint.expect("something is wrong");
        assert_eq!(hint(&tier), "mount it");
        tier.disks.push(DiskInfo { name: "/mnt/other".to_string(), hint: String::new(), ..tier.disks[0].clone() });
        let both = "`/mnt/ssd`: mount it; check `/mnt/other`; the daemon tries it again by itself";
        assert_eq!(hint(&tier), both);
        tier.state = "sick".to_string();
        assert_eq!(hint(&tier), both);
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
            (tier("serving", store(true, "lost once")), Verdict::Ok, "`cache:6379`, last problem: lost once"),
            (
                tier("serving", StoreInfo { refuses_writes: "OOM".to_string(), ..store(true, "lost once") }),
                Verdict::Warn,
                "`cache:6379` refuses writes: OOM",
            ),
            (
                tier("serving", StoreInfo { refuses_reads: "NOPERM".to_string(), ..store(true, "lost once") }),
                Verdict::Warn,
                "`cache:6379` refuses reads: NOPERM",
            ),
            (tier("serving", store(false, "refused")), Verdict::Warn, "`cache:6379`: refused"),
            (tier("sick", store(false, "refused")), Verdict::Warn, "it is sick: refused"),
            (tier("failed", store(false, "misnamed")), Verdict::Fail, "it has failed: misnamed"),
        ] {
            let check = served(&tier, true);
            assert_eq!((check.name.as_ref(), check.verdict), ("redis", verdict), "{check:?}");
            assert!(check.finding.contains(says), "{check:?}");
            assert!(check.hint.as_deref().is_none_or(|hint| !hint.contains("disk")), "{check:?}");
        }
    }

    #[test]
    fn a_configuration_with_shared_stores_says_whether_there_is_a_secret() {
        let home = tempfile::tempdir().unwrap();
        let [good, short] = [("good", 64), ("short", 31)].map(|(name, count)| {
            let path = home.path().join(name);
            std::fs::write(&path, "s".repeat(count)).unwrap();
            path.to_str().unwrap().to_owned()
        });
        let redis = ("tier.redis.urls", "redis://cache");
        for (flags, verdict, says) in [
            (vec![redis], Verdict::Ok, "there is no secret"),
            (vec![redis, ("tier.secret_file", &good)], Verdict::Ok, "each block has a MAC"),
            (vec![("tier.secret_file", &short)], Verdict::Fail, "too short"),
            (vec![redis, ("tier.secret_file", "/no/such/file")], Verdict::Fail, "cannot read"),
        ] {
            let flags = flags.into_iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
            let check = sealing(&load(&Sources { flags, ..Sources::default() }).unwrap().config).unwrap();
            assert!(check.verdict == verdict && check.finding.contains(says), "{check:?}");
            assert!(verdict == Verdict::Ok || check.hint.is_some(), "{check:?}");
            assert!(!check.finding.contains("sss"), "{check:?}");
        }
        assert_eq!(sealing(&Config::default()), None);
    }

    #[test]
    fn without_a_daemon_every_configured_tier_says_what_it_would_use() {
        let home = tempfile::tempdir().unwrap();
        let [disk, shared] = ["disk", "shared"].map(|name| home.path().join(name).display().to_string());
        std::fs::create_dir(&shared).unwrap();
        let flags = [
            ("tier.ssd.disks", &*disk),
            ("tier.ssd.capacity_bytes", "64MiB"),
            ("tier.ssd.create", "true"),
            ("tier.fs.directories", &*shared),
            ("tier.redis.urls", "redis://cache"),
            ("tier.redis.password_file", "/no/such/file"),
        ];
        let flags = flags.map(|(key, value)| (key.to_string(), value.to_string())).to_vec();
        let config = load(&Sources { flags, ..Sources::default() }).unwrap().config;
        let checks = checks(&config, None);
        let found: Vec<(&str, Verdict)> = checks.iter().map(|check| (check.name.as_ref(), check.verdict)).collect();
        assert_eq!(found, [("ssd", Verdict::Ok), ("fs", Verdict::Ok), ("redis", Verdict::Fail)]);
        assert!(checks[1].finding.contains(&shared), "{:?}", checks[1]);
        assert!(
            checks[2].hint.as_ref().is_some_and(|hint| !hint.is_empty())
                && checks[2].finding.contains("tier.redis.password_file"),
            "{:?}",
            checks[2]
        );
        assert!(super::checks(&Config::default(), None).is_empty());
        assert_eq!(disks(&config, None), Some(Disks { capacity_bytes: 64 << 20, ..Disks::default() }));
        assert_eq!(disks(&Config::default(), None), None);
        let held = DiskInfo { capacity_bytes: 1 << 30, blocks: 3, live_bytes: 9, ..DiskInfo::default() };
        let [ssd, redis] = ["ssd", "redis"].map(|name| TierInfo {
            name: name.to_string(),
            disks: vec![held.clone(), held.clone()],
            ..TierInfo::default()
        });
        assert_eq!(
            disks(&config, Some(&[ssd, redis])),
            Some(Disks { capacity_bytes: 2 << 30, blocks: 6, live_bytes: 18 })
        );
    }
}
