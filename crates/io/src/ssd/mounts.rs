//! Filesystems that an administrator wants mounted, and that are not.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The mount point of `/etc/fstab` that `directory` is in, if nothing is mounted there or below. `None` where the
/// kernel does not say what is mounted.
pub(super) fn missing_above(directory: &Path) -> Option<PathBuf> {
    let wanted = std::fs::read("/etc/fstab").ok()?;
    let mounted = std::fs::read("/proc/self/mountinfo").ok()?;
    missing_of(directory, &wanted, &mounted)
}

/// The deepest one, since the others are below it.
fn missing_of(directory: &Path, wanted: &[u8], mounted: &[u8]) -> Option<PathBuf> {
    let mounted: Vec<PathBuf> = fields(mounted, 4).collect();
    let real = |point: PathBuf| point.canonicalize().unwrap_or(point);
    let points = fields(wanted, 1).filter(|point| point.is_absolute()).map(real);
    let is_mounted = |point: &Path| mounted.iter().any(|at| at.starts_with(point) && directory.starts_with(at));
    let missing = points.filter(|point| directory.starts_with(point) && !is_mounted(point));
    missing.max_by_key(|point| point.as_os_str().len())
}

/// The field of each line that is no comment, with spaces and the like as they were before they were escaped.
fn fields(text: &[u8], at: usize) -> impl Iterator<Item = PathBuf> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii_start().starts_with(b"#"));
    let field =
        move |line: &[u8]| line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()).nth(at).map(plain);
    lines.filter_map(field)
}

fn plain(escaped: &[u8]) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::new(), escaped);
    while let Some((first, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[3..];
            }
            None => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_of_the_table_that_is_not_mounted_is_found_above_a_directory() {
        let wanted = b"# /dev/sda1 /none ext4\n/dev/sda1 / ext4 defaults 0 1\nUUID=7\t/nowhere/a xfs nofail 0 2\n\
            UUID=8 /nowhere/b\\040c xfs\nUUID=9 /nowhere/a/deep xfs\n/dev/sdb none swap sw 0 0\nbroken\n";
        let mounted =
            b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n23 22 8:2 / /nowhere/a rw - xfs /dev/x rw\n\
            24 22 8:3 / /nowhere/b\\040c/other rw - xfs /dev/y rw\n";
        for (directory, found) in [
            ("/nowhere/b c", Some("/nowhere/b c")),
            ("/nowhere/b c/below", Some("/nowhere/b c")),
            ("/nowhere/b c/other/file", None),
            ("/nowhere/a", None),
            ("/nowhere/a/deep/er", Some("/nowhere/a/deep")),
            ("/nowhere/ab", None),
            ("/nowhere", None),
            ("/none", None),
            ("/", None),
        ] {
            let missing = missing_of(Path::new(directory), wanted, mounted);
            assert_eq!(missing.as_deref(), found.map(Path::new), "{directory}");
        }
    }
}
