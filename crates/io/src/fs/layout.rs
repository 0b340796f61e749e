//! Paths of objects inside a directory, and the meaning of file names. `docs/formats/directory.md` draws them.
//!
//! Invariants: a name consists of lower-case hex digits, `-` and one leading `.tmp-`, so it is safe on any
//! filesystem. [`key_of`] returns the key of every path that [`object`] made, and of no other path.

use std::path::{Path, PathBuf};

use forebay_core::checksum::Checksum;
use forebay_core::{BlockHash, BlockKey, NamespaceId};

use crate::header::HEADER_BYTES;

/// The header has a page of its own, so that direct I/O can move the block behind it.
pub(super) const HEAD_BYTES: u64 = 4096;
const _: () = assert!(HEADER_BYTES as u64 <= HEAD_BYTES);

/// The folder for everything that is not a block, and the files in it.
pub(super) const OWN_FOLDER: &str = ".forebay";
pub(super) const MARKER: &str = "directory";
pub(super) const LEASE: &str = "sweeper";
pub(super) const USAGE: &str = "usage";

const TEMPORARY: &str = ".tmp-";
const PROBE: &str = "-probe";

/// Length of an object's file: the head, and the block in whole pages.
pub(super) fn file_bytes(length_bytes: u64) -> u64 {
    HEAD_BYTES + length_bytes.next_multiple_of(HEAD_BYTES)
}

/// The longest block that a tier can be told to take.
pub(super) const LONGEST_BLOCK_BYTES: u64 = 1 << 31;

/// Whether a file of that length may be an object. A file cut off inside a page never passes, and neither does one that
/// is longer than any block: its length would count as used, and cost other blocks their room.
pub(super) fn is_object_length(bytes: u64) -> bool {
    bytes.is_multiple_of(HEAD_BYTES) && (HEAD_BYTES + 1..=file_bytes(LONGEST_BLOCK_BYTES)).contains(&bytes)
}

/// Relative to the directory: `<namespace>/<2 digits>/<1 digit>/<group>-<hash>`, without the digits if it is not
/// sharded.
pub(super) fn object(key: &BlockKey, is_sharded: bool) -> PathBuf {
    let shard = shard_of(key);
    let name = format!("{:04x}-{}", key.group, key.hash);
    match is_sharded {
        true => format!("{}/{:02x}/{:x}/{name}", key.namespace, shard >> 4, shard & 15).into(),
        false => format!("{}/{name}", key.namespace).into(),
    }
}

/// The key of the object at `path`, which is relative to the directory.
pub(super) fn key_of(path: &Path, is_sharded: bool) -> Option<BlockKey> {
    let mut parts = path.iter().map(|part| part.to_str());
    let namespace = NamespaceId(u128::from_str_radix(parts.next()??, 16).ok()?);
    let (group, hash) = parts.next_back()??.split_once('-')?;
    let group = u16::from_str_radix(group, 16).ok()?;
    let key = BlockKey { namespace, group, hash: BlockHash::from_hex(hash)? };
    (object(&key, is_sharded) == path).then_some(key)
}

/// A unique name for a file that tries out whether the directory can be written.
pub(super) fn probe(writer: &str) -> String {
    temporary(writer) + PROBE
}

/// A unique name for a file that is not whole yet.
pub(super) fn temporary(writer: &str) -> String {
    format!("{TEMPORARY}{writer}-{:016x}", random())
}

/// A file of anybody else may begin in the same way.
pub(super) fn is_temporary(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(TEMPORARY) else { return false };
    let mut parts = rest.strip_suffix(PROBE).unwrap_or(rest).rsplitn(3, '-');
    let [random, process, host] = [parts.next(), parts.next(), parts.next()];
    let is_of = |part: Option<&str>, is_ok: fn(&u8) -> bool| part.is_some_and(|part| part.as_bytes().iter().all(is_ok));
    random.is_some_and(|random| random.len() == 16)
        && is_of(random, |byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte))
        && process.is_some_and(|process| !process.is_empty())
        && is_of(process, u8::is_ascii_digit)
        && host.is_some()
}

/// Whether a folder can contain objects. No other folder is ever entered, for example a filer's snapshots.
pub(super) fn is_folder(name: &str) -> bool {
    matches!(name.len(), 1 | 2 | 32) && name.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c))
}

/// Whether a folder at the top can contain objects.
pub(super) fn is_of_namespace(name: &str) -> bool {
    name.len() == 32 && is_folder(name)
}

/// This host and process, as written in names of unfinished files.
pub(super) fn writer() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let safe = host.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect::<String>();
    format!("{safe}-{}", std::process::id())
}

pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Once the machine has gathered entropy, eight bytes come whole; before that, none come. The process's id is in
    // the name too.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

/// 12 mixed bits: the engine's hashes need not be evenly distributed.
fn shard_of(key: &BlockKey) -> u64 {
    let mut sum = Checksum::new();
    sum.update(&key.group.to_le_bytes());
    sum.update(key.hash.as_bytes());
    sum.finish().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64, bytes: usize) -> BlockKey {
        let hash: Vec<u8> = (0..bytes as u64).map(|at| (number.wrapping_mul(31) + at * 7) as u8).collect();
        let namespace = NamespaceId(u128::from(number) << 70 | 5);
        BlockKey { namespace, group: number as u16, hash: BlockHash::new(&hash).unwrap() }
    }

    #[test]
    fn a_path_parses_back_to_its_key_and_to_no_other() {
        for (number, bytes, is_sharded) in [(0, 1, true), (7, 8, true), (65_535, 32, true), (9, 32, false)] {
            let key = key(number, bytes);
            let path = object(&key, is_sharded);
            assert_eq!(key_of(&path, is_sharded), Some(key), "{path:?}");
            assert_eq!(key_of(&path, !is_sharded), None, "{path:?}");
            let folders = path.parent().unwrap().iter().map(|name| name.to_str().unwrap());
            assert!(folders.into_iter().all(is_folder), "{path:?}");
        }
    }

    #[test]
    fn other_names_are_no_objects() {
        let path = object(&key(3, 8), true);
        let name = path.file_name().unwrap().to_str().unwrap();
        let elsewhere = path.with_file_name("elsewhere").join(name);
        let upper = path.with_file_name(name.to_uppercase());
        let wrong_shard = path.parent().unwrap().with_file_name("g").join(name);
        for path in [elsewhere, upper, wrong_shard, PathBuf::from(name), PathBuf::from("x"), path.join("0")] {
            assert_eq!(key_of(&path, true), None, "{path:?}");
        }
        for name in [OWN_FOLDER, ".snapshot", "lost+found", "AB", "abc", ""] {
            assert!(!is_folder(name), "{name}");
        }
    }

    #[test]
    fn names_of_unfinished_files_are_told_from_those_of_others() {
        for writer in [writer(), "-7".to_owned(), "a-b-c-12".to_owned()] {
            for name in [temporary(&writer), probe(&writer)] {
                assert!(is_temporary(&name), "{name}");
                assert!(!is_temporary(&name[1..]) && !is_temporary(&format!("{name}.gz")), "{name}");
            }
        }
        for name in [".tmp-backup", ".tmp-", ".tmp-host-1-ab", ".tmp-host-x-0123456789abcdef", ".tmp-0123456789abcdef"]
        {
            assert!(!is_temporary(name), "{name}");
        }
    }

    /// The example in `docs/formats`.
    #[test]
    fn the_format_page_has_the_path_of_this_build() {
        let hash = BlockHash::new(&[0xab, 0xcd, 0xef, 0x01]).unwrap();
        let key = BlockKey { namespace: NamespaceId(0x1234), group: 2, hash };
        let path = object(&key, true).display().to_string();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats/directory.md");
        assert!(std::fs::read_to_string(page).unwrap().contains(&path), "{path} stands in the page");
    }

    #[test]
    fn shards_are_filled_evenly_by_counting_hashes() {
        let mut filled = vec![0; 4096];
        (0..4096 * 16).for_each(|number: u64| {
            let hash = BlockHash::new(&number.to_le_bytes()).unwrap();
            filled[shard_of(&BlockKey { namespace: NamespaceId(1), group: 0, hash }) as usize] += 1;
        });
        assert!(filled.iter().all(|count| (1..64).contains(count)), "{:?}", filled.iter().max());
    }
}
