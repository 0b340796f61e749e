//! The files of a pool: their names, the bytes that workers lock, and the memory that they hold.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

pub(super) const TABLE_NAME: &str = "table";
pub(super) const GENERATION_NAME: &str = "generation";
pub(super) const BIRTH_NAME: &str = "birth";
pub(super) const NAMESPACE_NAME: &str = "namespace";
pub(super) const PURGE_NAME: &str = "purge";
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
