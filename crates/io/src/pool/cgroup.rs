//! What the control groups of this process allow, in both versions of the kernel's interface.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::mounts::{Mount, mounts};

/// What the groups from this process's own up to the root still allow of `controller`, whose file names begin with
/// `files`.
pub(super) fn room_of(controller: &str, files: &str) -> io::Result<Option<u64>> {
    Ok(own_directories(controller)?.iter().filter_map(|directory| group_room(directory, files)).min())
}

/// How many cores the narrowest of these groups lets its processes use; none if nothing limits it.
pub fn core_quota() -> io::Result<Option<f64>> {
    Ok(own_directories("cpu")?.iter().filter_map(|directory| group_quota(directory)).min_by(f64::total_cmp))
}

fn own_directories(controller: &str) -> io::Result<Vec<PathBuf>> {
    match fs::read_to_string("/proc/self/cgroup") {
        Ok(groups) => Ok(directories_of(&groups, controller, &mounts()?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// `cpu.max` has both numbers of a group; the older interface has a file for each, and -1 for no limit.
fn group_quota(directory: &Path) -> Option<f64> {
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    let both = read("cpu.max").or_else(|| Some(read("cpu.cfs_quota_us")? + " " + &read("cpu.cfs_period_us")?))?;
    let (quota, period) = both.trim().split_once(char::is_whitespace)?;
    let (quota, period) = (quota.trim().parse::<u32>().ok()?, period.trim().parse::<u32>().ok()?);
    (period > 0).then(|| f64::from(quota) / f64::from(period))
}

/// Directories of the process's group and its ancestors, in both versions of the interface.
fn directories_of(groups: &str, controller: &str, mounts: &[Mount]) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mount = mounts.iter().find(|mount| match controllers {
            "" => mount.filesystem == "cgroup2",
            _ => mount.filesystem == "cgroup" && mount.options.iter().any(|option| option == controller),
        });
        let concerns = controllers.is_empty() || controllers.split(',').any(|name| name == controller);
        let Some(mount) = mount.filter(|_| concerns) else { continue };
        // In a container only the part at or under its own group is mounted.
        let inside = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
        directories.extend(inside.ancestors().map(|ancestor| mount.point.join(ancestor)));
    }
    directories
}

/// One group's limit minus its use. Its page cache counts as free, since it can be dropped.
fn group_room(directory: &Path, files: &str) -> Option<u64> {
    let number = |suffix: &str| -> Option<u64> {
        fs::read_to_string(directory.join(format!("{files}.{suffix}"))).ok()?.trim().parse().ok()
    };
    let limit = number("max").or_else(|| number("limit_in_bytes"))?;
    let usage = number("current").or_else(|| number("usage_in_bytes")).unwrap_or(0);
    let stat = fs::read_to_string(directory.join(format!("{files}.stat"))).unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.parse().ok()
    };
    let cached = |name: &str| field(&format!("total_{name}")).or_else(|| field(name)).unwrap_or(0);
    Some(limit.saturating_sub(usage).saturating_add(cached("inactive_file") + cached("active_file")).min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_both_interfaces_and_inside_containers() {
        let mount = |filesystem: &str, root: &str, point: &str, options: &[&str]| Mount {
            id: 0,
            parent: 0,
            device: 0,
            root: root.into(),
            point: point.into(),
            is_shared: false,
            is_slave: false,
            filesystem: filesystem.into(),
            source: "none".into(),
            options: options.iter().map(|option| option.to_string()).collect(),
        };
        let unified = [mount("cgroup2", "/", "/sys/fs/cgroup", &["rw"])];
        let both = [
            mount("cgroup", "/docker/77", "/cg/memory", &["rw", "memory"]),
            mount("cgroup2", "/", "/cg/unified", &["rw"]),
        ];
        let cases: [(&str, &[Mount], &[&str]); 4] = [
            ("0::/a/b\n", &unified, &["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"]),
            ("4:memory:/docker/77/x\n", &both, &["/cg/memory/x", "/cg/memory/"]),
            ("4:memory:/elsewhere\n5:cpu,cpuacct:/\n0::/\n", &both, &["/cg/memory/", "/cg/unified/"]),
            ("", &unified, &[]),
        ];
        for (groups, mounts, expected) in cases {
            let expected: Vec<PathBuf> = expected.iter().map(PathBuf::from).collect();
            assert_eq!(directories_of(groups, "memory", mounts), expected, "{groups:?}");
        }
    }

    #[test]
    fn a_group_allows_its_limit_less_what_cannot_be_dropped() {
        type Files = &'static [(&'static str, &'static str)];
        let cases: [(Files, Option<u64>); 5] = [
            (&[("memory.max", "max\n"), ("memory.current", "5")], None),
            (&[("memory.max", "1000\n"), ("memory.current", "300\n")], Some(700)),
            (
                &[
                    ("memory.max", "1000"),
                    ("memory.current", "300"),
                    ("memory.stat", "file 9\ninactive_file 50\nactive_file 7\n"),
                ],
                Some(757),
            ),
            (
                &[
                    ("memory.limit_in_bytes", "1000"),
                    ("memory.usage_in_bytes", "1200"),
                    ("memory.stat", "inactive_file 1\ntotal_inactive_file 50\n"),
                ],
                Some(50),
            ),
            (&[], None),
        ];
        for (files, expected) in cases {
            let directory = tempfile::tempdir().unwrap();
            for (name, text) in files {
                fs::write(directory.path().join(name), text).unwrap();
            }
            assert_eq!(group_room(directory.path(), "memory"), expected, "{files:?}");
        }
    }

    #[test]
    fn a_group_says_in_both_interfaces_how_many_cores_it_may_use() {
        let cases: [(&[_], _); 5] = [
            (&[("cpu.max", "max 100000\n")], None),
            (&[("cpu.max", "50000 100000\n")], Some(0.5)),
            (&[("cpu.cfs_quota_us", "-1\n"), ("cpu.cfs_period_us", "100000\n")], None),
            (&[("cpu.cfs_quota_us", "300000\n"), ("cpu.cfs_period_us", "100000\n")], Some(3.0)),
            (&[], None),
        ];
        for (files, expected) in cases {
            let directory = tempfile::tempdir().unwrap();
            files.iter().for_each(|(name, text)| fs::write(directory.path().join(name), text).unwrap());
            assert_eq!(group_quota(directory.path()), expected, "{files:?}");
        }
    }
}
