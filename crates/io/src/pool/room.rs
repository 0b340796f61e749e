//! How much memory a pool could take here: limited by the machine, the control group and the filesystem.
//!
//! Invariants: reading changes nothing. A pool that passes `check` leaves the machine a reserve: if a tmpfs outgrows
//! memory, the kernel kills a process instead of returning an error.

use std::path::{Path, PathBuf};
use std::{fs, io};

use forebay_core::size::{exact, human, human_at_most};
use forebay_core::{Error, ErrorKind, Result};
use rustix::process::Resource;

use super::cgroup;

/// Left for all other processes: 512 MiB, or a sixteenth of a small machine.
const RESERVE_BYTES: u64 = 512 << 20;
const RESERVE_SHARE: u64 = 16;
/// A daemon with all kinds of tiers has 22 to 35 MiB, and the kernel counts page tables and buffers beside them.
const DAEMON_BYTES: u64 = 64 << 20;

/// Memory available for a pool at this moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Room {
    /// All memory of the machine.
    pub memory_total_bytes: u64,
    /// What the kernel could give without swapping (`MemAvailable`).
    pub memory_available_bytes: u64,
    /// What the narrowest control group still allows; none if nothing limits it.
    pub cgroup_available_bytes: Option<u64>,
    /// Free space of the filesystem in question; none if it has no limit of its own.
    pub filesystem_free_bytes: Option<u64>,
    /// How much a process may pin; none if unlimited. If it is less than the pool, disks are read into buffers that
    /// are not registered.
    pub memlock_bytes: Option<u64>,
}

impl Room {
    /// Reads `/proc`, the control groups and the filesystem of `path`. Costs about ten small file reads.
    pub fn read(path: &Path) -> Result<Room> {
        let unreadable =
            |error: io::Error| Error::new(ErrorKind::Io, "cannot read how much memory is available").source(error);
        let meminfo = fs::read_to_string("/proc/meminfo").map_err(unreadable)?;
        let filesystem = rustix::fs::statvfs(path).map_err(|errno| unreadable(errno.into()))?;
        let has_limit = filesystem.f_blocks > 0;
        Ok(Room {
            memory_total_bytes: kib_field(&meminfo, "MemTotal").unwrap_or(0),
            memory_available_bytes: kib_field(&meminfo, "MemAvailable").unwrap_or(0),
            cgroup_available_bytes: cgroup::room_of("memory", "memory").map_err(unreadable)?,
            filesystem_free_bytes: has_limit.then(|| filesystem.f_bavail * filesystem.f_frsize),
            memlock_bytes: rustix::process::getrlimit(Resource::Memlock).current,
        })
    }

    /// What the machine could still give to a process without taking the reserve of others, and its control group too.
    pub fn free_memory_bytes(&self) -> u64 {
        self.left_in_group_bytes().map_or(self.left_in_machine_bytes(), |bytes| bytes.min(self.left_in_machine_bytes()))
    }

    fn left_in_machine_bytes(&self) -> u64 {
        self.memory_available_bytes.saturating_sub(self.reserve_bytes())
    }

    fn reserve_bytes(&self) -> u64 {
        RESERVE_BYTES.min(self.memory_total_bytes / RESERVE_SHARE)
    }

    /// A group has to hold the daemon too, and what the kernel counts for it. Past its limit the daemon is killed.
    fn left_in_group_bytes(&self) -> Option<u64> {
        let left = |bytes: u64| bytes.saturating_sub((bytes / RESERVE_SHARE).clamp(DAEMON_BYTES, RESERVE_BYTES));
        self.cgroup_available_bytes.map(left)
    }

    /// Errors with `Full`, the numbers and a hint if `needed_bytes` of new memory do not fit. What nobody can raise is
    /// judged first: with too little memory, a larger filesystem is no help.
    pub fn check(&self, needed_bytes: u64) -> Result<()> {
        let free_memory = match needed_bytes.saturating_add(self.reserve_bytes()) <= self.memory_total_bytes {
            true => "free memory, or lower `pool.capacity_bytes`".to_owned(),
            false => {
                format!("lower `pool.capacity_bytes`: this machine has {} of memory", human(self.memory_total_bytes))
            }
        };
        let limits = [
            (Some(self.left_in_machine_bytes()), "of memory is available", free_memory),
            (
                self.left_in_group_bytes(),
                "is left in the control group beside the daemon's own memory",
                "raise the control group's memory limit, or lower `pool.capacity_bytes`".to_owned(),
            ),
            (
                self.filesystem_free_bytes,
                "is free on the pool's filesystem",
                "enlarge the filesystem (`mount -o remount,size=…`), or lower `pool.capacity_bytes`".to_owned(),
            ),
        ];
        let too_narrow = limits.into_iter().find(|(bytes, ..)| bytes.is_some_and(|bytes| bytes < needed_bytes));
        let Some((available, what, hint)) = too_narrow else { return Ok(()) };
        let (needed, available) = (human(needed_bytes), human_at_most(available.unwrap_or(0)));
        Err(Error::new(ErrorKind::Full, format!("cannot allocate {needed} for the pool: {available} {what}"))
            .hint(hint))
    }
}

/// Huge pages of one size that an operator reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReservedHugePages {
    pub page_bytes: u64,
    pub free: u64,
    pub total: u64,
}

impl ReservedHugePages {
    /// Reads those of `page_bytes`. If a control group allows fewer, fewer count as free.
    pub fn read(page_bytes: u64) -> io::Result<ReservedHugePages> {
        let directory = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10));
        let read = |name: &str| -> io::Result<u64> {
            fs::read_to_string(directory.join(name))?.trim().parse().map_err(io::Error::other)
        };
        let unclaimed = read("free_hugepages")?.saturating_sub(read("resv_hugepages")?);
        let files = format!("hugetlb.{}", exact(page_bytes).replace("iB", "B"));
        let allowed = cgroup::room_of("hugetlb", &files)?.map_or(u64::MAX, |bytes| bytes / page_bytes);
        Ok(ReservedHugePages { page_bytes, free: unclaimed.min(allowed), total: read("nr_hugepages")? })
    }
}

/// A field of `/proc/meminfo` or `smaps`, in bytes: `MemTotal:  24684092 kB`.
pub(super) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room() -> Room {
        Room {
            memory_total_bytes: 64 << 30,
            memory_available_bytes: 40 << 30,
            cgroup_available_bytes: None,
            filesystem_free_bytes: None,
            memlock_bytes: None,
        }
    }

    #[test]
    fn the_narrowest_limit_refuses_with_numbers_and_a_hint() {
        let cases = [
            (room(), 39 << 30, None),
            (room(), 40 << 30, Some("cannot allocate 40.0 GiB for the pool: 39.5 GiB of memory is available")),
            (
                Room { cgroup_available_bytes: Some(8 << 30), ..room() },
                30 << 30,
                Some(
                    "cannot allocate 30.0 GiB for the pool: 7.5 GiB is left in the control group beside the daemon's own memory",
                ),
            ),
            // The kernel killed daemons in such groups at their first stores.
            (
                Room { cgroup_available_bytes: Some(560 << 20), ..room() },
                512 << 20,
                Some(
                    "cannot allocate 512.0 MiB for the pool: 496.0 MiB is left in the control group beside the daemon's own memory",
                ),
            ),
            (
                Room { cgroup_available_bytes: Some(282 << 20), ..room() },
                256 << 20,
                Some(
                    "cannot allocate 256.0 MiB for the pool: 218.0 MiB is left in the control group beside the daemon's own memory",
                ),
            ),
            (Room { cgroup_available_bytes: Some(330 << 20), ..room() }, 256 << 20, None),
            (Room { cgroup_available_bytes: Some(80 << 20), ..room() }, 16 << 20, None),
            (Room { cgroup_available_bytes: Some(8 << 20), ..room() }, 0, None),
            (
                Room { filesystem_free_bytes: Some(64 << 20), ..room() },
                1 << 30,
                Some("cannot allocate 1.0 GiB for the pool: 64.0 MiB is free on the pool's filesystem"),
            ),
            (
                Room { filesystem_free_bytes: Some(16 << 30), ..room() },
                200 << 30,
                Some("cannot allocate 200.0 GiB for the pool: 39.5 GiB of memory is available"),
            ),
            (Room { memory_total_bytes: 0, memory_available_bytes: 0, ..room() }, 0, None),
        ];
        for (room, needed, message) in cases {
            let answer = room.check(needed).err();
            assert_eq!(answer.as_ref().map(|error| error.to_string()).as_deref(), message);
            assert!(answer.is_none_or(|error| error.hint_text().is_some()));
        }
        let too_much = room().check(200 << 30).unwrap_err();
        assert_eq!(too_much.hint_text(), Some("lower `pool.capacity_bytes`: this machine has 64.0 GiB of memory"));
    }

    #[test]
    fn this_machine_says_how_much_memory_it_has() {
        let room = Room::read(Path::new("/dev/shm")).unwrap();
        assert!(room.memory_available_bytes > 0 && room.memory_available_bytes <= room.memory_total_bytes);
        assert!(room.filesystem_free_bytes.is_none_or(|bytes| bytes > 0));
    }
}
