//! The files of a pool: their names, the bytes that workers lock, and the memory that they hold.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub(super) const TABLE_NAME: &str = "table";
pub(super) const GENERATION_NAME: &str = "generation";
pub(super) const DATA_NAME: &str = "data";
pub(super) const BIRTH_NAME: &str = "birth";
pub(super) const NAMESPACE_NAME: &str = "namespace";
pub(super) const PURGE_NAME: &str = "purge";
const REPLACED_SUFFIX: &str = ".replaced";
/// The mode of each file, since the first version.
pub(super) const FILE_MODE: u32 = 0o600;
/// The bytes of `data` that workers lock: 64 ranks of 64 instances.
pub(super) const ALL_LOCK_BYTES: Range<u64> = 0..4096;

/// The open files of a pool beside its table.
pub(super) struct Files {
    pub generation: File,
    pub data: File,
    pub birth: File,
    pub namespaces: File,
}

/// Memory that the machine gets back when `data` is removed.
pub(super) fn held_bytes(data: &File) -> u64 {
    data.metadata().map_or(0, |metadata| metadata.blocks() * 512)
}

/// The new name of a data file whose pool was replaced while workers still mapped it.
pub(super) fn replaced_name(data: &Path) -> PathBuf {
    let mut name = data.as_os_str().to_owned();
    name.push(REPLACED_SUFFIX);
    PathBuf::from(name)
}
