//! Chooses where a new pool lies, so that it gets huge pages if this machine has any.
//!
//! Tried in order: reserved pages on hugetlbfs, a directory whose tmpfs already gives huge pages, a private tmpfs
//! mounted for the pool, `MADV_COLLAPSE`, small pages. A place is accepted only if a probe of 2 MiB became one huge
//! page. The reasons for rejecting places are kept for the operator.
//!
//! Invariant: no file is on a disk. The files are memory, and writing them back would wear the disk out.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use forebay_core::size::human;
use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::config::HugePages;
use super::directory::{Directory, MOUNT_SOURCE, data_beside, is_safe};
use super::format::Backing;
use super::geometry::Geometry;
use super::huge;
use super::map::{Access, HUGE_PAGE_BYTES, Region};
use super::mounts::{Mount, mount_of, mounts};
use super::room::ReservedHugePages;

/// Where the files of a pool are, and on which kind of pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Site {
    /// Directory of the small files; always a tmpfs.
    pub home: PathBuf,
    pub data: PathBuf,
    pub backing: Backing,
    /// Why better places were rejected.
    pub notes: Vec<String>,
}

/// Finds the best place for a pool of `geometry`. The pool that this one replaces is about to return huge pages worth
/// `freed_bytes`.
pub(super) fn choose(directory: &Directory, wish: HugePages, geometry: &Geometry, freed_bytes: u64) -> Result<Site> {
    let ground = mount_of(directory.path()).map_err(|error| cannot_choose(directory).source(error))?;
    let needed_bytes = geometry.data_bytes();
    let mut notes = Vec::new();
    if wish != HugePages::Off {
        let attempts: [&dyn Fn() -> Result<Site, String>; 4] = [
            &|| on_hugetlbfs(directory, &ground, needed_bytes, freed_bytes, geometry.unit_bytes),
            &|| on_own_tmpfs(directory, &ground),
            &|| on_private_mount(directory, &ground),
            &|| by_collapsing(directory, &ground),
        ];
        for attempt in attempts {
            match attempt() {
                Ok(site) => return Ok(Site { notes, ..site }),
                Err(why) => notes.push(why),
            }
        }
    }
    if wish == HugePages::Require {
        return Err(no_huge_pages(needed_bytes, &notes));
    }
    let home = home_for_small_files(directory, &ground).map_err(|why| not_in_memory(directory, &ground, why))?;
    Ok(Site { data: data_beside(&home), home, backing: Backing::Small, notes })
}

fn on_hugetlbfs(
    directory: &Directory,
    ground: &Mount,
    needed_bytes: u64,
    freed_bytes: u64,
    unit_bytes: u64,
) -> Result<Site, String> {
    let mut why = "no hugetlbfs is mounted".to_owned();
    for mount in mounts().map_err(text)?.iter().filter(|mount| mount.filesystem == "hugetlbfs") {
        let Some(page_bytes) = mount.option("pagesize").and_then(size) else { continue };
        let point = mount.point.display();
        let pages = ReservedHugePages::read(page_bytes).map_err(text)?;
        let (needed, free) = (needed_bytes / page_bytes, pages.free + freed_bytes / page_bytes);
        if !unit_bytes.is_multiple_of(page_bytes) {
            why = format!("pages of {} on `{point}` are larger than a unit", human(page_bytes));
        } else if free < needed {
            let wanted = human(needed_bytes);
            why = format!(
                "cannot map {wanted} of huge pages from `{point}`: {needed} pages are needed, {free} of {} are free",
                pages.total
            );
        } else if !is_safe(mount) {
            why = format!("other users may replace files on `{point}`: mount it with `mode=0700` or `mode=1777`");
        } else if let Err(error) = rustix::fs::access(&mount.point, rustix::fs::Access::WRITE_OK) {
            why = format!("cannot write to `{point}`: {error}");
        } else {
            let home = home_for_small_files(directory, ground)?;
            let data = directory.data_on_hugetlbfs(mount);
            return Ok(Site { home, data, backing: Backing::Hugetlbfs, notes: Vec::new() });
        }
    }
    Err(why)
}

fn on_own_tmpfs(directory: &Directory, ground: &Mount) -> Result<Site, String> {
    if !ground.gives_huge_pages() {
        return Err(format!("`{}` is not on a tmpfs mounted with `huge=advise`", directory.path().display()));
    }
    probed(directory.path().to_owned(), Backing::Advised)
}

fn on_private_mount(directory: &Directory, ground: &Mount) -> Result<Site, String> {
    if ground.filesystem == "tmpfs" && !Surroundings::look().keep_mounts(ground) {
        return Err("a tmpfs mounted here, and the pool on it, would end with this container".to_owned());
    }
    let was_mounted = directory.private_mount().map_err(|error| error.told())?.is_some();
    let home = mount_privately(directory, "advise")?;
    let site = probed(home, Backing::Advised);
    if site.is_err() && !was_mounted {
        unmount(directory).map_err(text)?;
    }
    site
}

fn by_collapsing(directory: &Directory, ground: &Mount) -> Result<Site, String> {
    if ground.filesystem != "tmpfs" {
        return Err(format!("`{}` is not on a tmpfs", directory.path().display()));
    }
    probed(directory.path().to_owned(), Backing::Collapsed)
}

/// The directory itself if it is memory, otherwise a mount made for the pool.
fn home_for_small_files(directory: &Directory, ground: &Mount) -> Result<PathBuf, String> {
    match ground.filesystem.as_str() {
        "tmpfs" => Ok(directory.path().to_owned()),
        _ => mount_privately(directory, "never"),
    }
}

/// Mounts the private tmpfs. If it exists without huge pages, enables them. The tmpfs has no size limit of its own:
/// the sizes of its files were checked against memory.
fn mount_privately(directory: &Directory, huge: &str) -> Result<PathBuf, String> {
    let point = directory.mount_point();
    let cannot = |error: &dyn Display| format!("cannot mount a tmpfs at `{}`: {error}", point.display());
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    match directory.private_mount().map_err(|error| error.told())? {
        Some(mount) if mount.gives_huge_pages() || huge == "never" => {}
        Some(mount) if mount.source != MOUNT_SOURCE => {
            return Err(format!("the tmpfs at `{}` is not mounted with `huge={huge}`", point.display()));
        }
        Some(_) => rustix::mount::mount_remount(&point, flags, format!("huge={huge}")).map_err(|e| cannot(&e))?,
        None => {
            if !point.is_dir() {
                fs::create_dir(&point).map_err(|error| cannot(&error))?;
            }
            let options = std::ffi::CString::new(format!("huge={huge},size=0,mode=0700")).expect("no zero byte in it");
            if let Err(errno) = rustix::mount::mount(MOUNT_SOURCE, &point, "tmpfs", flags, options.as_c_str()) {
                let _ = fs::remove_dir(&point);
                return Err(cannot(&errno));
            }
        }
    }
    Ok(point)
}

/// Unmounts the private tmpfs; the kernel frees its memory when nobody maps it any more. Waits up to two seconds for
/// files that somebody has open: the kernel closes a killed process's own a moment after the process is gone.
pub(super) fn unmount(directory: &Directory) -> io::Result<()> {
    let (point, deadline) = (directory.mount_point(), Instant::now() + Duration::from_secs(2));
    while let Err(errno) = rustix::mount::unmount(&point, UnmountFlags::empty()) {
        if errno != Errno::BUSY || Instant::now() >= deadline {
            return Err(errno.into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::remove_dir(&point)
}

/// Facts about this process's mount namespace.
struct Surroundings {
    is_host_pid_namespace: bool,
    /// Whether it is the first process's namespace; unknown without the permission to read that.
    is_first_process_namespace: Option<bool>,
    root_filesystem: String,
}

impl Surroundings {
    fn look() -> Surroundings {
        /// The kernel's number for the first PID namespace.
        const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";
        let link = |path: &str| fs::read_link(path).ok();
        let (mine, first) = (link("/proc/self/ns/mnt"), link("/proc/1/ns/mnt"));
        Surroundings {
            is_host_pid_namespace: link("/proc/self/ns/pid").is_some_and(|name| name == Path::new(HOST_PID_NAMESPACE)),
            is_first_process_namespace: mine.zip(first).map(|(mine, first)| mine == first),
            root_filesystem: mount_of(Path::new("/")).map_or_else(|_| String::new(), |root| root.filesystem),
        }
    }

    /// Whether a mount made inside `ground` still exists for the next daemon: it is visible on the host, or this is
    /// the host. This is a guess if the kernel does not tell; a wrong guess costs the pool's content at a restart.
    fn keep_mounts(&self, ground: &Mount) -> bool {
        let is_host = self.is_first_process_namespace.unwrap_or(self.root_filesystem != "overlay");
        !ground.is_slave && (ground.is_shared || (self.is_host_pid_namespace && is_host))
    }
}

/// The site with its data in `home`, if a file there gets a huge page.
fn probed(home: PathBuf, backing: Backing) -> Result<Site, String> {
    match probe(&home, backing) {
        Ok(true) => Ok(Site { data: data_beside(&home), home, backing, notes: Vec::new() }),
        Ok(false) => Err(format!("a file in `{}` got no huge page", home.display())),
        Err(error) => Err(format!("a file in `{}` got no huge page: {error}", home.display())),
    }
}

fn probe(home: &Path, backing: Backing) -> io::Result<bool> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(home, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ftruncate(&file, HUGE_PAGE_BYTES)?;
    let region = Region::map(&file, 0, HUGE_PAGE_BYTES, Access::ReadWrite)?;
    if !region.want_huge_pages() {
        return Ok(false);
    }
    huge::populate(&region, 0..region.len(), backing)?;
    Ok(huge::mapped_and_huge_bytes(&region)? == (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES))
}

/// `2M`, `1024M`, `1G`, `64K`.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn text(error: io::Error) -> String {
    error.to_string()
}

fn cannot_choose(directory: &Directory) -> Error {
    Error::new(ErrorKind::Io, "cannot find the mount of the pool's directory").with("path", directory.path().display())
}

fn no_huge_pages(needed_bytes: u64, notes: &[String]) -> Error {
    let pages = needed_bytes / HUGE_PAGE_BYTES;
    Error::new(ErrorKind::Unsupported, format!("cannot put the pool on huge pages: {}", notes.join("; "))).hint(
        format!("run `sysctl vm.nr_hugepages={pages}` and mount a hugetlbfs, or set `pool.huge_pages = \"auto\"`"),
    )
}

fn not_in_memory(directory: &Directory, ground: &Mount, why: String) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the pool's directory is not in memory: {why}"))
        .with("path", directory.path().display())
        .with("filesystem", &ground.filesystem)
        .hint("set `pool.directory` to a directory on a tmpfs, such as one in `/dev/shm`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_read_as_the_kernel_writes_them() {
        let cases = [("2M", Some(2 << 20)), ("1024M", Some(1 << 30)), ("1G", Some(1 << 30)), ("64K", Some(65_536))];
        for (text, bytes) in cases.into_iter().chain([("", None), ("M", None), ("2MM", None), ("two", None)]) {
            assert_eq!(size(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn a_mount_lasts_where_it_reaches_the_host() {
        let ground = |is_shared, is_slave| {
            let mount = mount_of(Path::new("/proc")).unwrap();
            Mount { is_shared, is_slave, ..mount }
        };
        let host = || Surroundings {
            is_host_pid_namespace: true,
            is_first_process_namespace: Some(true),
            root_filesystem: "ext4".to_owned(),
        };
        let container =
            || Surroundings { is_host_pid_namespace: false, root_filesystem: "overlay".to_owned(), ..host() };
        let sandboxed_service = || Surroundings { is_first_process_namespace: Some(false), ..host() };
        let untold =
            |root: &str| Surroundings { is_first_process_namespace: None, root_filesystem: root.to_owned(), ..host() };
        let cases = [
            (host(), ground(false, false), true),
            (host(), ground(true, false), true),
            (container(), ground(false, false), false),
            (container(), ground(false, true), false),
            (container(), ground(true, false), true),
            (sandboxed_service(), ground(true, true), false),
            (sandboxed_service(), ground(false, false), false),
            (untold("ext4"), ground(false, false), true),
            (untold("overlay"), ground(false, false), false),
        ];
        for (case, (surroundings, ground, expected)) in cases.into_iter().enumerate() {
            assert_eq!(surroundings.keep_mounts(&ground), expected, "case {case}");
        }
    }
}
