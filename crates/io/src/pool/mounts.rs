//! Information from the kernel about mounted filesystems.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mount {
    pub id: u64,
    /// The mount that it lies on.
    pub parent: u64,
    pub device: u64,
    /// The mounted directory of the filesystem; differs from `/` for bind mounts and in containers.
    pub root: PathBuf,
    pub point: PathBuf,
    /// Whether mounts made inside it appear in the other mount namespaces of its peer group.
    pub is_shared: bool,
    /// Whether it only receives mounts made elsewhere, as in a container or a sandboxed service.
    pub is_slave: bool,
    pub filesystem: String,
    /// What was mounted: a device, or any word for a filesystem without one.
    pub source: String,
    pub options: Vec<String>,
}

impl Mount {
    /// The value of `name=value` among the filesystem's options.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }

    /// Whether this is a tmpfs that gives huge pages on request.
    pub fn gives_huge_pages(&self) -> bool {
        self.filesystem == "tmpfs" && matches!(self.option("huge"), Some("always" | "advise" | "within_size"))
    }
}

pub(super) fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?))
}

/// The mount that holds `path`.
pub(super) fn mount_of(path: &Path) -> io::Result<Mount> {
    let (device, real) = (fs::metadata(path)?.dev(), fs::canonicalize(path)?);
    let on_device = mounts()?.into_iter().filter(|mount| mount.device == device);
    // If a filesystem has several mounts, the path belongs to the one with the longest matching mount point. If none
    // matches (a mount covered by another), any of them has the options.
    on_device
        .max_by_key(|mount| (real.starts_with(&mount.point), mount.point.as_os_str().len()))
        .ok_or_else(|| io::Error::other(format!("no mount has the device of `{}`", path.display())))
}

/// The mount at this place, if it hides another one there.
pub(super) fn cover_of(point: &Path) -> io::Result<Option<Mount>> {
    let real = fs::canonicalize(point)?;
    let there: Vec<Mount> = mounts()?.into_iter().filter(|mount| mount.point == real).collect();
    let lies_on = |upper: &Mount, lower: &Mount| upper.parent == lower.id;
    let hides = |mount: &Mount| there.iter().any(|lower| lies_on(mount, lower));
    let is_hidden = |mount: &Mount| there.iter().any(|upper| lies_on(upper, mount));
    Ok(there.iter().find(|mount| hides(mount) && !is_hidden(mount)).cloned())
}

fn parse(mountinfo: &[u8]) -> Vec<Mount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `42 27 0:39 / /mnt rw,relatime shared:7 - tmpfs forebay rw,size=0k,huge=advise`
fn parse_line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    let (before, after) = fields.split_at(dash);
    let (major, minor) = std::str::from_utf8(before.get(2)?).ok()?.split_once(':')?;
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    Some(Mount {
        id: number(before.first()?)?,
        parent: number(before.get(1)?)?,
        device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
        root: path(before.get(3)?),
        point: path(before.get(4)?),
        is_shared: before.iter().skip(6).any(|field| field.starts_with(b"shared:")),
        is_slave: before.iter().skip(6).any(|field| field.starts_with(b"master:")),
        filesystem: String::from_utf8_lossy(after.get(1)?).into_owned(),
        source: String::from_utf8_lossy(after.get(2)?).into_owned(),
        options: String::from_utf8_lossy(after.get(3)?).split(',').map(str::to_owned).collect(),
    })
}

/// The file writes blanks, tabs, line ends and backslashes as `\040` and the like.
fn path(escaped: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read_whatever_its_optional_fields() {
        let text = b"42 27 0:39 / /mnt/a\\040b rw,relatime shared:7 master:1 - tmpfs forebay rw,size=0k,huge=advise\n\
            43 27 254:1 /var/x / rw - ext4 /dev/vda rw\n\
            broken\n\
            31 23 0:28 / /dev/hugepages rw - hugetlbfs none rw,pagesize=2M\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 3);
        assert_eq!((&*mounts[0].source, &*mounts[1].source), ("forebay", "/dev/vda"));
        assert_eq!(
            (&mounts[0].point, mounts[0].is_shared, mounts[0].is_slave),
            (&PathBuf::from("/mnt/a b"), true, true)
        );
        assert!(mounts[0].gives_huge_pages());
        assert_eq!(
            (&mounts[1].root, mounts[1].is_shared, mounts[1].is_slave),
            (&PathBuf::from("/var/x"), false, false)
        );
        assert_eq!(mounts[1].device, rustix::fs::makedev(254, 1));
        assert_eq!(mounts[2].option("pagesize"), Some("2M"));
    }

    #[test]
    fn the_mount_of_a_path_is_found() {
        assert_eq!(mount_of(Path::new("/proc/self")).unwrap().filesystem, "proc");
        assert_eq!(mount_of(Path::new("/dev/shm")).unwrap().filesystem, "tmpfs");
    }
}
