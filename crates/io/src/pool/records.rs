//! Records that change rarely: engine instances in `table`, namespaces in `namespace`, purges in `purge`.
//!
//! Invariants: a record is its first word, which says which content is valid, and a rest with a checksum. An instance's
//! rest has two places: the invalid one is written, then the word selects it, so a crash leaves the old record or the
//! new one. A namespace's word is cleared before its rest is replaced and set after it, so a crash leaves it whole or
//! absent. An absent namespace costs blocks, never a fence. A purge is written in one piece that lies in one page, so a
//! kill leaves the old record or the new one; one that has ended has no first word, and is absent if all of it is zero.
//! Records are written through the file, not through a mapping: a full filesystem is an error here, and would be a
//! signal there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use forebay_core::Instance;

use super::format::*;

/// Replaces the namespace at `at`.
fn put(file: &File, at: u64, rest: &[u8]) -> io::Result<()> {
    clear(file, at)?;
    file.write_all_at(rest, at + 8)?;
    file.write_all_at(&PRESENT.to_le_bytes(), at)
}

fn clear(file: &File, at: u64) -> io::Result<()> {
    file.write_all_at(&[0; 8], at)
}

/// Replaces an instance's record in one store.
pub(super) fn put_instance(table: &File, instance: Instance, record: &InstanceRecord) -> io::Result<()> {
    let at = instance_at(instance);
    let mut word = [0; 8];
    table.read_exact_at(&mut word, at)?;
    // A version 1 record lies in the first place.
    let is_second = u64::from_le_bytes(word) == CONTENT_WORDS[1] || word == [0; 8];
    let place = if is_second { 0 } else { 1 };
    table.write_all_at(&encode_instance(record), at + CONTENT_AT[place] as u64)?;
    table.write_all_at(&CONTENT_WORDS[place].to_le_bytes(), at)
}

pub(super) fn clear_instance(table: &File, instance: Instance) -> io::Result<()> {
    clear(table, instance_at(instance))
}

/// All instances with whole records.
pub(super) fn instances(table: &File) -> io::Result<Vec<(Instance, InstanceRecord)>> {
    let mut found = Vec::new();
    for instance in (0..Instance::MAX as u8).map(Instance) {
        let mut bytes = [0; INSTANCE_BYTES as usize];
        table.read_exact_at(&mut bytes, instance_at(instance))?;
        found.extend(decode_instance(&bytes).map(|record| (instance, record)));
    }
    Ok(found)
}

fn instance_at(instance: Instance) -> u64 {
    INSTANCES_AT + u64::from(instance.0) * INSTANCE_BYTES
}

pub(super) fn put_namespace(file: &File, index: u32, record: &NamespaceRecord) -> io::Result<()> {
    put(file, u64::from(index) * NAMESPACE_BYTES, &encode_namespace(record))
}

pub(super) fn clear_namespace(file: &File, index: u32) -> io::Result<()> {
    clear(file, u64::from(index) * NAMESPACE_BYTES)
}

/// All namespaces with whole records, by index.
pub(super) fn namespaces(file: &File) -> io::Result<Vec<(u32, NamespaceRecord)>> {
    let mut found = Vec::new();
    let mut bytes = vec![0; NAMESPACE_BYTES as usize];
    for index in 0..NAMESPACES {
        file.read_exact_at(&mut bytes[..8], u64::from(index) * NAMESPACE_BYTES)?;
        if bytes[..8] != [0; 8] {
            file.read_exact_at(&mut bytes, u64::from(index) * NAMESPACE_BYTES)?;
            let record = decode_namespace(bytes[..].try_into().expect("the buffer is one record long"));
            found.extend(record.map(|record| (index, record)));
        }
    }
    Ok(found)
}

/// Sets the purge at `index`, or replaces it by another of the same namespace.
pub(super) fn put_purge(file: &File, index: u32, record: &PurgeRecord) -> io::Result<()> {
    file.write_all_at(&encode_purge(record), purge_at(index))
}

pub(super) fn clear_purge(file: &File, index: u32) -> io::Result<()> {
    clear(file, purge_at(index))
}

/// All purges that have not ended by index; none where a record cannot be read.
pub(super) fn purges(file: &File) -> io::Result<Vec<(u32, Option<PurgeRecord>)>> {
    present(file, purge_at(0)..PENDING_BYTES, decode_purge)
}

/// Sets the purge that has ended at `index`, or replaces it by another one.
pub(super) fn put_ended(file: &File, index: u32, record: &EndedPurge) -> io::Result<()> {
    file.write_all_at(&encode_ended(record), ended_at(index))
}

pub(super) fn clear_ended(file: &File, index: u32) -> io::Result<()> {
    file.write_all_at(&[0; ENDED_BYTES as usize], ended_at(index))
}

/// All purges that have ended by index; none where a record cannot be read.
pub(super) fn ended(file: &File) -> io::Result<Vec<(u32, Option<EndedPurge>)>> {
    present(file, ended_at(0)..PURGE_FILE_BYTES, decode_ended)
}

pub(super) fn set_met_disks(file: &File) -> io::Result<()> {
    file.write_all_at(&PRESENT.to_le_bytes(), ENDED_AT)
}

/// Damage does not make a pool one that has met none.
pub(super) fn has_met_disks(file: &File) -> io::Result<bool> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, ENDED_AT)?;
    Ok(word != [0; 8])
}

fn present<T, const BYTES: usize>(
    file: &File,
    range: Range<u64>,
    decode: fn(&[u8; BYTES]) -> Result<Option<T>, ()>,
) -> io::Result<Vec<(u32, Option<T>)>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start)?;
    let (records, _) = bytes.as_chunks();
    let present = |(index, bytes)| match decode(bytes) {
        Ok(record) => record.map(|record| (index, Some(record))),
        Err(()) => Some((index, None)),
    };
    Ok((0..).zip(records).filter_map(present).collect())
}

/// Behind the word that says whether the pool has met disks.
fn ended_at(index: u32) -> u64 {
    ENDED_AT + (u64::from(index) + 1) * ENDED_BYTES
}

/// Behind the file's head.
fn purge_at(index: u32) -> u64 {
    (u64::from(index) + 1) * PURGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::NamespaceId;

    #[test]
    fn records_come_back_as_they_were_put_and_go_when_cleared() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(u64::from(NAMESPACES) * NAMESPACE_BYTES).unwrap();
        let longest = NamespaceRecord {
            id: NamespaceId(u128::MAX - 5),
            descriptor: "é".repeat(MAX_DESCRIPTOR_BYTES / 2),
            uid: Some(u32::MAX),
            layout: vec![0xa5; MAX_LAYOUT_BYTES],
        };
        let shortest = NamespaceRecord { id: NamespaceId(0), descriptor: String::new(), uid: Some(0), layout: vec![] };
        put_namespace(&file, 0, &longest).unwrap();
        put_namespace(&file, NAMESPACES - 1, &shortest).unwrap();
        assert_eq!(namespaces(&file).unwrap(), [(0, longest), (NAMESPACES - 1, shortest.clone())]);
        put_namespace(&file, 0, &shortest).unwrap();
        clear_namespace(&file, NAMESPACES - 1).unwrap();
        assert_eq!(namespaces(&file).unwrap(), [(0, shortest)]);
    }

    #[test]
    fn a_record_with_any_bit_flipped_is_absent() {
        let record = InstanceRecord { engine_id: b"engine-7".to_vec(), ranks: 8, incarnation: 1 << 90, owner: 7 << 70 };
        for place in 0..2 {
            let mut bytes = [0; INSTANCE_BYTES as usize];
            bytes[..8].copy_from_slice(&CONTENT_WORDS[place].to_le_bytes());
            bytes[CONTENT_AT[place]..][..CONTENT_BYTES].copy_from_slice(&encode_instance(&record));
            assert_eq!(decode_instance(&bytes), Some(record.clone()));
            for bit in (0..64).chain(CONTENT_AT[place] * 8..(CONTENT_AT[place] + CONTENT_BYTES) * 8) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode_instance(&bytes), None, "bit {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        let (descriptor, layout) = ("model=m".to_owned(), vec![1, 2, 3]);
        let record = NamespaceRecord { id: NamespaceId(7), descriptor, uid: None, layout };
        let mut bytes = [0; NAMESPACE_BYTES as usize];
        let rest = encode_namespace(&record);
        bytes[..8].copy_from_slice(&PRESENT.to_le_bytes());
        bytes[8..8 + rest.len()].copy_from_slice(&rest);
        assert_eq!(decode_namespace(&bytes), Some(record));
        for bit in 0..(8 + rest.len()) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_namespace(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
