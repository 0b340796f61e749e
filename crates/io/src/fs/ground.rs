//! What a directory stood on when it was opened: whether an empty one at its path now is a new directory, or the mount
//! point of a mount that is gone.
//!
//! Invariant: in doubt it is taken for a mount point, which must not be filled.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

/// See the module documentation.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    /// Without links.
    path: PathBuf,
    /// The mount point that the path was below.
    mount: PathBuf,
}

impl Ground {
    /// None if the kernel does not tell mount points. Blocks as long as the mount does.
    pub fn of(path: &Path) -> Option<Ground> {
        let path = fs::canonicalize(path).ok()?;
        let mount = mount_of(&path)?;
        Some(Ground { path, mount })
    }

    /// Whether the path is still below that mount point, or below one further down. Blocks as long as the mount does.
    pub fn is_still_mounted(&self) -> bool {
        Ground::of(&self.path).is_some_and(|now| now.path == self.path && now.mount.starts_with(&self.mount))
    }
}

/// By the kernel's word: a bind mount has the device of what it hides.
fn mount_of(path: &Path) -> Option<PathBuf> {
    for place in path.ancestors() {
        let about = statx(CWD, place, AtFlags::empty(), StatxFlags::empty()).ok()?;
        if !about.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
            return None;
        }
        if about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Some(place.to_owned());
        }
    }
    // The root of a process may be any folder.
    Some(PathBuf::from("/"))
}
