//! What the machine offers: memory, huge pages, memory that may be pinned, io_uring, instructions.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::{ErrorKind, Result};
use forebay_daemon::config::Config;
use forebay_daemon::{Disks, IndexMemory};
use forebay_device::Level;
use forebay_io::pool::Room;

use super::daemon::Holdings;
use super::{Check, pool};
use crate::machine::{field, read};
use crate::output::size;

/// `holdings` is what a running daemon says of its pool; `disks` are those of this host to which blocks go. `outlook`
/// is what `serve` would do with the pool, where no daemon runs.
pub fn checks(
    config: &Config,
    holdings: Option<&Holdings>,
    disks: Option<Disks>,
    outlook: pool::Outlook,
) -> Vec<Check> {
    let capacity_bytes = holdings.map_or(config.pool.capacity_bytes.0, |holdings| holdings.capacity_bytes);
    let held_bytes = holdings.map_or_else(|| bytes_in(&config.pool.directory), |holdings| holdings.populated_bytes);
    let room = Room::read(&existing(&config.pool.directory));
    let lacks_memory = outlook.as_ref().err().filter(|error| error.kind() == ErrorKind::Full);
    let memory = || memory(&room, capacity_bytes, held_bytes);
    let mut checks = vec![lacks_memory.map_or_else(memory, |error| Check::failed("memory", error))];
    let missing_bytes = capacity_bytes.saturating_sub(held_bytes);
    let known = disks.filter(|disks| disks.capacity_bytes > 0).zip(room.as_ref().ok());
    checks.extend(known.map(|(disks, room)| index(&disks.when_full(), room, missing_bytes)));
    checks.extend(pool::checks(config, holdings, held_bytes, outlook));
    // Only the i/o of disks gains from pinned memory.
    let to_pin_bytes = if disks.is_some() { capacity_bytes } else { 0 };
    checks.extend(room.ok().map(|room| memlock(room.memlock_bytes, may_pin_all(), to_pin_bytes)));
    checks.push(io_uring(read("/proc/sys/kernel/io_uring_disabled").trim(), ring()));
    checks.push(cpu(&Level::available()));
    checks
}

/// Whether the rest of the pool still fits.
fn memory(room: &Result<Room>, capacity_bytes: u64, held_bytes: u64) -> Check {
    let room = match room {
        Ok(room) => room,
        Err(error) => return Check::failed("memory", error),
    };
    if let Err(error) = room.check(capacity_bytes.saturating_sub(held_bytes)) {
        return Check::failed("memory", &error);
    }
    // Some kernels write "unlimited" as a number beyond any memory.
    let limit_bytes = room.cgroup_available_bytes.filter(|bytes| *bytes < room.memory_total_bytes);
    let cgroup = limit_bytes.map(|bytes| format!(" ({} in the control group)", size(bytes)));
    let (available, cgroup) = (size(room.memory_available_bytes), cgroup.unwrap_or_default());
    let (held, capacity) = (size(held_bytes.min(capacity_bytes)), size(capacity_bytes));
    Check::ok("memory", format!("{available} are available{cgroup}; the pool has {held} of its {capacity} already"))
}

/// Whether the blocks of full disks fit into memory beside the part of the pool that is `missing_bytes` long.
fn index(memory: &IndexMemory, room: &Room, missing_bytes: u64) -> Check {
    match memory.check(room, missing_bytes) {
        Ok(()) => Check::ok("disk index", memory.said()),
        Err(error) => Check::warn("disk index", error.to_string(), error.hint_text().unwrap_or_default()),
    }
}

/// `to_pin_bytes` is the pool, if pinning is of use.
fn memlock(limit_bytes: Option<u64>, may_pin_all: bool, to_pin_bytes: u64) -> Check {
    match limit_bytes {
        None => Check::ok("memlock", "this user may pin any amount of memory"),
        Some(limit) if may_pin_all => {
            Check::ok("memlock", format!("the limit of {} does not bind this user", size(limit)))
        }
        Some(limit) if to_pin_bytes == 0 => {
            Check::ok("memlock", format!("this user may pin {}, and no disk needs more", size(limit)))
        }
        Some(limit) if limit >= to_pin_bytes => {
            Check::ok("memlock", format!("this user may pin {}, which is enough for the pool", size(limit)))
        }
        Some(limit) => Check::warn(
            "memlock",
            format!(
                "this user may pin {}, but the pool has {}: disk i/o costs more CPU",
                size(limit),
                size(to_pin_bytes)
            ),
            "run `ulimit -l unlimited` before `forebay serve`, or set `LimitMEMLOCK=infinity` in its unit; only root \
             raises the hard limit (`ulimit -Hl`), for example in `/etc/security/limits.conf`",
        ),
    }
}

/// `switch` is the kernel's `io_uring_disabled`; `ring` is what came of an attempt.
fn io_uring(switch: &str, ring: std::io::Result<()>) -> Check {
    let hint = match switch {
        "1" | "2" => {
            "run `sysctl kernel.io_uring_disabled=0`; without io_uring, disk i/o needs more threads and more CPU"
        }
        _ => "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile",
    };
    match ring {
        Ok(()) => Check::ok("io_uring", "this kernel allows it"),
        Err(error) => Check::warn("io_uring", format!("it cannot be used: {error}"), hint),
    }
}

fn ring() -> std::io::Result<()> {
    io_uring::IoUring::new(2).map(drop)
}

/// `levels` from best to worst; the last one runs everywhere.
fn cpu(levels: &[Level]) -> Check {
    let best = levels.first().map_or_else(String::new, Level::to_string);
    match levels.len() {
        0 | 1 => Check::warn(
            "cpu",
            format!("copies use {best} instructions"),
            "use a CPU with AVX2 or AVX-512 for faster copies",
        ),
        _ => Check::ok("cpu", format!("copies use {best} instructions")),
    }
}

/// The capability that lifts the limit on pinned memory.
fn may_pin_all() -> bool {
    const IPC_LOCK: u32 = 14;
    let capabilities = field(&read("/proc/self/status"), "CapEff").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    capabilities.is_some_and(|mask| mask >> IPC_LOCK & 1 == 1)
}

/// The path, or the nearest directory above it that exists.
pub(super) fn existing(path: &Path) -> PathBuf {
    path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/")).to_path_buf()
}

/// Memory held by the files of a pool that no daemon has open: in its directory, or one below.
fn bytes_in(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, metadata)| if metadata.is_dir() { bytes_in(&path) } else { metadata.blocks() * 512 })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    fn room(available_bytes: u64) -> Result<Room> {
        Ok(Room {
            memory_total_bytes: 64 << 30,
            memory_available_bytes: available_bytes,
            cgroup_available_bytes: None,
            filesystem_free_bytes: None,
            memlock_bytes: None,
        })
    }

    #[test]
    fn only_the_part_of_the_pool_that_is_not_there_yet_needs_room() {
        assert_eq!(memory(&room(6 << 30), 4 << 30, 0).verdict, Verdict::Ok);
        let refused = memory(&room(6 << 30), 8 << 30, 0);
        assert_eq!(refused.verdict, Verdict::Fail);
        assert!(refused.hint.is_some(), "{refused:?}");
        assert_eq!(memory(&room(6 << 30), 8 << 30, 4 << 30).verdict, Verdict::Ok);
        assert_eq!(memory(&room(0), 8 << 30, 8 << 30).verdict, Verdict::Ok);
        let narrow = room(64 << 30).map(|room| Room { cgroup_available_bytes: Some(2 << 30), ..room });
        assert_eq!(memory(&narrow, 4 << 30, 0).verdict, Verdict::Fail);
        assert!(memory(&narrow, 1 << 30, 0).finding.contains("2.0 GiB in the control group"));
        let endless = room(64 << 30).map(|room| Room { cgroup_available_bytes: Some(i64::MAX as u64), ..room });
        assert!(!memory(&endless, 4 << 30, 0).finding.contains("control group"));
    }

    #[test]
    fn disks_whose_blocks_outgrow_memory_are_a_warning_and_the_finding_says_by_how_much() {
        let memory = Disks { capacity_bytes: 30 << 40, ..Disks::default() }.when_full();
        assert_eq!(index(&memory, &room(16 << 30).unwrap(), 4 << 30).verdict, Verdict::Ok);
        let narrow = index(&memory, &room(16 << 30).unwrap(), 15 << 30);
        assert_eq!(narrow.verdict, Verdict::Warn);
        assert!(narrow.finding.contains("blocks of 1.0 MiB") && narrow.hint.is_some(), "{narrow:?}");
    }

    #[test]
    fn a_limit_on_pinned_memory_matters_only_to_those_it_binds() {
        for (limit, may_pin_all, to_pin_bytes, verdict) in [
            (None, false, 4 << 30, Verdict::Ok),
            (Some(8 << 20), true, 4 << 30, Verdict::Ok),
            (Some(8 << 30), false, 4 << 30, Verdict::Ok),
            (Some(8 << 20), false, 4 << 30, Verdict::Warn),
            (Some(8 << 20), false, 0, Verdict::Ok),
        ] {
            assert_eq!(memlock(limit, may_pin_all, to_pin_bytes).verdict, verdict, "{limit:?} {may_pin_all}");
        }
    }

    #[test]
    fn a_forbidden_io_uring_is_a_warning_that_names_the_lock() {
        let forbidden = || Err(std::io::Error::from_raw_os_error(1));
        assert!(io_uring("2", forbidden()).hint.unwrap().contains("sysctl"));
        assert!(io_uring("0", forbidden()).hint.unwrap().contains("seccomp"));
        assert_eq!(io_uring("", Ok(())).verdict, Verdict::Ok);
    }

    #[test]
    fn files_of_a_pool_are_counted_by_the_memory_they_have_not_by_their_length() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::create_dir(directory.path().join("mnt")).unwrap();
        fs::File::create(directory.path().join("sparse")).unwrap().set_len(1 << 30).unwrap();
        fs::write(directory.path().join("mnt/data"), vec![1; 1 << 20]).unwrap();
        assert_eq!(bytes_in(directory.path()), 1 << 20);
        assert_eq!(bytes_in(&directory.path().join("nothing")), 0);
        assert_eq!(existing(&directory.path().join("a/b/c")), directory.path());
    }
}
