//! The pool's files to the byte; `docs/formats/pool.md` draws the same picture.
//!
//! Invariants: all numbers are little-endian. Anything longer than one word carries a checksum or is stored before
//! the word that makes it valid, so that a reader after a crash sees it whole or not at all. The first 16 bytes of
//! `table` and of `generation` keep their meaning in every version.

use std::fmt;

use forebay_core::checksum::{checksum, combine};
use forebay_core::{BlockHash, BlockKey, Generation, NamespaceId, PAGE_BYTES, SlotId};

use super::geometry::{Extent, Geometry, MAX_RANKS, MAX_UNITS};

const _: () = assert!(cfg!(target_endian = "little"), "the files are mapped as words in the machine's order");

/// Version of `table`. Version 1 kept one record per instance and rewrote it in place.
pub const VERSION: u32 = if cfg!(forebay_next) { 3 } else { 2 };
const READABLE_VERSIONS: std::ops::RangeInclusive<u32> = 1..=VERSION;
/// Version of `generation`.
const GENERATION_VERSION: u32 = 1;
pub(super) const TABLE_MAGIC: [u8; 8] = *b"FOREBAYT";
pub(super) const GENERATION_MAGIC: [u8; 8] = *b"FOREBAYG";

pub(super) const HEADER_BYTES: u64 = 4096;
pub(super) const INSTANCES_AT: u64 = HEADER_BYTES;
pub(super) const INSTANCE_BYTES: u64 = 256;
pub(super) const UNITS_AT: u64 = INSTANCES_AT + 64 * INSTANCE_BYTES;
pub(super) const ENTRIES_AT: u64 = 1 << 20;
pub(super) const ENTRY_BYTES: u64 = 128;
pub(super) const ENTRY_WORDS: usize = (ENTRY_BYTES / 8) as usize;
const _: () = assert!(UNITS_AT + MAX_UNITS as u64 * 8 <= ENTRIES_AT);

pub(super) const STATE_AT: u64 = 12;
pub(super) const CEILING_WORD_AT: u64 = 64;
/// Used bytes of the header's page.
pub(super) const HEADER_HEAD_BYTES: usize = 72;

/// Limits on what a pool records of engines and namespaces.
pub const MAX_ENGINE_ID_BYTES: usize = 64;
/// Namespaces that a pool records at a time.
pub const NAMESPACES: u32 = 1024;
pub(super) const NAMESPACE_BYTES: u64 = 16 << 10;
pub(super) const NAMESPACE_HEAD_BYTES: usize = 64;
pub const MAX_DESCRIPTOR_BYTES: usize = 8 << 10;
pub const MAX_LAYOUT_BYTES: usize = 4 << 10;

/// Purges that a pool records at a time: four times as many as namespaces.
pub const PURGES: u32 = 4096;
pub(super) const PURGE_BYTES: u64 = 64;
/// The first record's place holds the file's head. Earlier builds wrote no more than this.
pub(super) const PENDING_BYTES: u64 = (PURGES as u64 + 1) * PURGE_BYTES;
/// Purges that have ended of which a pool knows: more than the list of a disk holds.
pub const ENDED_PURGES: u32 = 2048;
pub(super) const ENDED_BYTES: u64 = 32;
/// They stand behind the others. The first record's place says whether the pool has met disks.
pub(super) const ENDED_AT: u64 = PENDING_BYTES;
pub(super) const PURGE_FILE_BYTES: u64 = ENDED_AT + (ENDED_PURGES as u64 + 1) * ENDED_BYTES;
pub(super) const PURGE_MAGIC: [u8; 8] = *b"FOREBAYP";
/// The magic, and version 1 of `purge`.
pub(super) const PURGE_HEAD: [u8; 12] = *b"FOREBAYP\x01\0\0\0";

pub(super) const BIRTH_BYTES: u64 = 16;
pub(super) const GENERATIONS_AT: u64 = HEADER_BYTES;
pub(super) const RETIRED_WORD: usize = 3;

/// Lengths of the files that grow with the pool.
pub(super) fn table_bytes(geometry: &Geometry) -> u64 {
    ENTRIES_AT + u64::from(geometry.pages) * ENTRY_BYTES
}

pub(super) fn generation_bytes(geometry: &Geometry) -> u64 {
    GENERATIONS_AT + u64::from(geometry.pages) * 4
}

pub(super) fn birth_bytes(geometry: &Geometry) -> u64 {
    u64::from(geometry.pages) * MAX_RANKS as u64 * BIRTH_BYTES
}

/// Where rank `rank` writes its record of `slot`. Records are ordered by unit, then rank, then page, so that growing
/// appends.
pub(super) fn birth_at(geometry: &Geometry, slot: SlotId, rank: usize) -> u64 {
    let (pages, unit) = (u64::from(geometry.pages_per_unit()), u64::from(geometry.unit_of(slot)));
    let page = u64::from(slot.0) % pages;
    ((unit * MAX_RANKS as u64 + rank as u64) * pages + page) * BIRTH_BYTES
}

/// The kind of memory under the pool's slots; decided when the pool is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Pages reserved by the operator on a hugetlbfs mount.
    Hugetlbfs,
    /// A tmpfs that gives huge pages on request (`huge=advise` or more).
    Advised,
    /// A tmpfs without huge pages, whose pages `MADV_COLLAPSE` joins while populating.
    Collapsed,
    /// 4 KiB pages.
    Small,
}

impl Backing {
    const ALL: [Backing; 4] = [Backing::Hugetlbfs, Backing::Advised, Backing::Collapsed, Backing::Small];

    /// Whether 2 MiB pages map it, as far as the kernel finds them.
    pub fn is_huge(self) -> bool {
        self != Backing::Small
    }

    fn code(self) -> u32 {
        match self {
            Backing::Hugetlbfs => 1,
            Backing::Advised => 2,
            Backing::Collapsed => 3,
            Backing::Small => 4,
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backing::Hugetlbfs => "hugetlbfs",
            Backing::Advised => "huge pages on request",
            Backing::Collapsed => "collapsed huge pages",
            Backing::Small => "small pages",
        })
    }
}

/// Whether the files beside the table are complete.
pub(super) const CREATING: u32 = 0x5441_4552;
pub(super) const LIVE: u32 = 0x4556_494c;

/// The start of `table`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub id: u128,
    pub geometry: Geometry,
    pub backing: Backing,
    pub epoch: u32,
    /// Higher than any published generation.
    pub ceiling: Generation,
}

impl Header {
    /// The header's bytes, in state `CREATING` or `LIVE`.
    pub fn encode(&self, state: u32) -> [u8; HEADER_HEAD_BYTES] {
        let mut bytes = [0; HEADER_HEAD_BYTES];
        bytes[..8].copy_from_slice(&TABLE_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&state.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id.to_le_bytes());
        bytes[32..36].copy_from_slice(&(self.geometry.unit_bytes as u32).to_le_bytes());
        bytes[36..40].copy_from_slice(&self.backing.code().to_le_bytes());
        let seal = header_seal(&bytes);
        bytes[40..48].copy_from_slice(&seal.to_le_bytes());
        bytes[48..56].copy_from_slice(&echoed(self.geometry.units).to_le_bytes());
        bytes[56..64].copy_from_slice(&echoed(self.epoch).to_le_bytes());
        bytes[64..72].copy_from_slice(&echoed(self.ceiling.0).to_le_bytes());
        bytes
    }

    /// An error gives the reason why this table cannot be used, as the end of "the pool was replaced: …".
    pub fn decode(bytes: &[u8; HEADER_HEAD_BYTES]) -> Result<Header, String> {
        if bytes[..8] != TABLE_MAGIC {
            return Err("its table does not begin as a pool's does".to_owned());
        }
        let version = u32_at(bytes, 8);
        if !READABLE_VERSIONS.contains(&version) {
            return Err(format!("its table has version {version}, but this build reads {READABLE_VERSIONS:?}"));
        }
        match u32_at(bytes, 12) {
            LIVE => {}
            CREATING => return Err("its creation was interrupted".to_owned()),
            state => return Err(format!("its table has the unknown state {state:#x}")),
        }
        let broken = || "its table's header is damaged".to_owned();
        let backing = Backing::ALL.into_iter().find(|backing| backing.code() == u32_at(bytes, 36));
        let [units, epoch, ceiling] = [48, 56, 64].map(|at| unechoed(u64_at(bytes, at)));
        let (Some(backing), Some(units), Some(epoch), Some(ceiling)) = (backing, units, epoch, ceiling) else {
            return Err(broken());
        };
        if u64_at(bytes, 40) != header_seal(bytes) {
            return Err(broken());
        }
        let unit_bytes = u64::from(u32_at(bytes, 32));
        let geometry = Geometry::new(u64::from(units) * unit_bytes, Some(unit_bytes)).map_err(|_| broken())?;
        let id = u128::from_le_bytes(bytes[16..32].try_into().unwrap());
        Ok(Header { id, geometry, backing, epoch, ceiling: Generation(ceiling) })
    }
}

/// The state of a table that a pool made, also of a later version; none if the header is not whole.
pub(super) fn table_state(bytes: &[u8; HEADER_HEAD_BYTES]) -> Option<u32> {
    let (version, state) = (u32_at(bytes, 8), u32_at(bytes, 12));
    let is_whole = !READABLE_VERSIONS.contains(&version) || u64_at(bytes, 40) == header_seal(bytes);
    (bytes[..8] == TABLE_MAGIC && [CREATING, LIVE].contains(&state) && is_whole).then_some(state)
}

/// The pool's id at the start of `table` or of `generation`.
pub(super) fn pool_id_in(bytes: &[u8; HEADER_HEAD_BYTES]) -> u128 {
    u128::from_le_bytes(bytes[16..32].try_into().unwrap())
}

/// Covers everything that never changes: magic, version, id, unit size, backing. Excludes the state.
fn header_seal(bytes: &[u8; HEADER_HEAD_BYTES]) -> u64 {
    let mut sealed = *bytes;
    sealed[12..16].fill(0);
    checksum(&sealed[..40])
}

/// A number that changes in place is stored with its complement in one word, so that one store replaces both.
pub(super) fn echoed(number: u32) -> u64 {
    u64::from(number) | u64::from(!number) << 32
}

fn unechoed(word: u64) -> Option<u32> {
    let number = word as u32;
    (echoed(number) == word).then_some(number)
}

/// The start of `generation`.
pub(super) fn encode_generation_header(id: u128) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&GENERATION_MAGIC);
    bytes[8..12].copy_from_slice(&GENERATION_VERSION.to_le_bytes());
    bytes[16..].copy_from_slice(&id.to_le_bytes());
    bytes
}

/// The pool's id and whether it is retired; none if the file is not a `generation` file of this version.
pub(super) fn decode_generation_header(bytes: &[u8; 32]) -> Option<(u128, bool)> {
    let is_ours = bytes[..8] == GENERATION_MAGIC && u32_at(bytes, 8) == GENERATION_VERSION;
    is_ours.then(|| (u128::from_le_bytes(bytes[16..].try_into().unwrap()), u32_at(bytes, RETIRED_WORD * 4) != 0))
}

/// One word per unit: zero, or the extent that begins here with a check that detects a damaged word.
pub(super) fn encode_extent(extent: &Extent) -> u64 {
    let body = u64::from(extent.slot_pages()) | u64::from(extent.units as u16) << 32;
    body | extent_check(extent.first_unit, body) << 48
}

/// An error if the word is neither.
pub(super) fn decode_extent(first_unit: u32, word: u64) -> Result<Option<Extent>, ()> {
    if word == 0 {
        return Ok(None);
    }
    let body = word & 0xffff_ffff_ffff;
    if word >> 48 != extent_check(first_unit, body) {
        return Err(());
    }
    let slot_bytes = (body & 0xffff_ffff) * PAGE_BYTES;
    Ok(Some(Extent { first_unit, units: (body >> 32) as u32, slot_bytes }))
}

fn extent_check(first_unit: u32, body: u64) -> u64 {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&first_unit.to_le_bytes());
    bytes[4..].copy_from_slice(&body.to_le_bytes());
    checksum(&bytes) & 0xffff
}

/// The content of a ready slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The block's key.
    pub key: BlockKey,
    /// Bytes of the block; the slot may be longer.
    pub length: u64,
    /// Checksum of the block's bytes.
    pub checksum: u64,
    /// The owner's use counter. It restores recency after a restart.
    pub sequence: u64,
    /// Tokens in the block.
    pub tokens: u32,
}

/// First words of an entry, stored one by one; the sealed words follow.
pub(super) const STATE_WORD: usize = 0;
pub(super) const HOLDERS_WORD: usize = 1;
pub(super) const HOLDERS_COPY_WORD: usize = 2;
pub(super) const SEALED_AT: usize = 3;
pub(super) const SEALED_WORDS: usize = ENTRY_WORDS - SEALED_AT;
/// The sealed word with the boot epoch in its upper half.
pub(super) const EPOCH_WORD: usize = 9;

/// A free slot's state word is zero. The others differ from it and from each other in many bits, so that no
/// flipped bit turns one into another.
pub(super) const RESERVED: u32 = 0x5652_4553;
pub(super) const READY: u32 = 0x5944_4552;

pub(super) fn state_word(state: u32, generation: Generation) -> u64 {
    u64::from(state) << 32 | u64::from(generation.0)
}

/// The words of a ready entry: key, length, checksum, sequence, tokens, epoch, and a checksum over them, the
/// slot's id and its generation.
pub(super) fn seal_entry(entry: &Entry, slot: SlotId, generation: Generation, epoch: u32) -> [u64; SEALED_WORDS] {
    let hash = entry.key.hash.as_bytes();
    let mut padded = [0; BlockHash::MAX_LEN];
    padded[..hash.len()].copy_from_slice(hash);
    let mut words = [0; SEALED_WORDS];
    words[0] = entry.key.namespace.0 as u64;
    words[1] = (entry.key.namespace.0 >> 64) as u64;
    for (word, bytes) in words[2..6].iter_mut().zip(padded.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap());
    }
    words[6] = hash.len() as u64 | u64::from(entry.key.group) << 16 | entry.length << 32;
    words[7] = entry.checksum;
    words[8] = entry.sequence;
    words[EPOCH_WORD] = u64::from(entry.tokens) | u64::from(epoch) << 32;
    words[SEALED_WORDS - 1] = entry_seal(&words, slot, generation);
    words
}

/// The entry, or none if any of its bits, its slot or its generation differs from what was sealed.
pub(super) fn unseal_entry(words: &[u64; SEALED_WORDS], slot: SlotId, generation: Generation) -> Option<Entry> {
    if words[SEALED_WORDS - 1] != entry_seal(words, slot, generation) {
        return None;
    }
    let mut hash = [0; BlockHash::MAX_LEN];
    for (bytes, word) in hash.chunks_exact_mut(8).zip(&words[2..6]) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let hash = BlockHash::new(hash.get(..(words[6] & 0xffff) as usize)?).ok()?;
    let namespace = NamespaceId(u128::from(words[0]) | u128::from(words[1]) << 64);
    let key = BlockKey { namespace, group: (words[6] >> 16) as u16, hash };
    let tokens = words[EPOCH_WORD] as u32;
    Some(Entry { key, length: words[6] >> 32, checksum: words[7], sequence: words[8], tokens })
}

fn entry_seal(words: &[u64; SEALED_WORDS], slot: SlotId, generation: Generation) -> u64 {
    let mut bytes = [0; SEALED_WORDS * 8];
    bytes[..4].copy_from_slice(&slot.0.to_le_bytes());
    bytes[4..8].copy_from_slice(&generation.0.to_le_bytes());
    for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    checksum(&bytes)
}

/// A worker's record of the slice that it copied into a slot. It is input from another process, so every field is
/// checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BirthRecord {
    /// The owner's number of the slot when the copy was made. A record with another number is of an earlier block.
    pub generation: Generation,
    /// Bytes of the slice; under 4 GiB.
    pub length: u64,
    /// Checksum of the slice.
    pub checksum: u64,
}

/// A rank's share of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    /// Bytes of the slice.
    pub length: u64,
    /// Checksum of these bytes.
    pub checksum: u64,
}

impl Slice {
    /// The checksum of slices in their order.
    pub fn combine(slices: &[Slice]) -> Option<u64> {
        let join = |front: Slice, back: &Slice| Slice {
            length: front.length + back.length,
            checksum: combine(front.checksum, back.checksum, back.length),
        };
        let (first, rest) = slices.split_first()?;
        Some(rest.iter().fold(*first, join).checksum)
    }
}

pub(super) fn encode_birth(record: &BirthRecord) -> [u8; BIRTH_BYTES as usize] {
    let length = u32::try_from(record.length).expect("a slice is shorter than 4 GiB");
    let mut bytes = [0; BIRTH_BYTES as usize];
    bytes[..8].copy_from_slice(&record.checksum.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12..].copy_from_slice(&record.generation.0.to_le_bytes());
    bytes
}

pub(super) fn decode_birth(bytes: &[u8; BIRTH_BYTES as usize]) -> BirthRecord {
    BirthRecord {
        generation: Generation(u32_at(bytes, 12)),
        length: u64::from(u32_at(bytes, 8)),
        checksum: u64::from_le_bytes(bytes[..8].try_into().unwrap()),
    }
}

/// An engine that received offsets of this pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InstanceRecord {
    /// The engine's own name, at most 64 bytes.
    pub engine_id: Vec<u8>,
    /// Workers of the engine, at most [`MAX_RANKS`](super::MAX_RANKS).
    pub ranks: u32,
    /// One start of the engine; 0 in a record of version 1, which had no incarnation.
    pub incarnation: u128,
    /// The session that received slots; 0 if there was none yet.
    pub owner: u128,
}

/// Marks a record as whole; stored last. A version 1 instance record and a namespace are also cleared first.
pub(super) const PRESENT: u64 = 0x544e_4553_4552_5031;

/// An instance has space for two contents. Its first word says which one is valid, so that one store replaces one by
/// the other. The words differ from each other and from `PRESENT` in many bits.
pub(super) const CONTENT_WORDS: [u64; 2] = [0x3154_4e45_544e_4f43, u64::MAX - 0x3154_4e45_544e_4f43];
pub(super) const CONTENT_AT: [usize; 2] = [8, 128];
pub(super) const CONTENT_BYTES: usize = 112;
const _: () = assert!(CONTENT_AT[0] + CONTENT_BYTES <= CONTENT_AT[1]);
const _: () = assert!(CONTENT_AT[1] + CONTENT_BYTES <= INSTANCE_BYTES as usize);

pub(super) fn encode_instance(record: &InstanceRecord) -> [u8; CONTENT_BYTES] {
    let mut bytes = [0; CONTENT_BYTES];
    bytes[8..12].copy_from_slice(&record.ranks.to_le_bytes());
    bytes[12..16].copy_from_slice(&(record.engine_id.len() as u32).to_le_bytes());
    bytes[16..16 + record.engine_id.len()].copy_from_slice(&record.engine_id);
    bytes[80..96].copy_from_slice(&record.incarnation.to_le_bytes());
    bytes[96..112].copy_from_slice(&record.owner.to_le_bytes());
    let seal = checksum(&bytes[8..]);
    bytes[..8].copy_from_slice(&seal.to_le_bytes());
    bytes
}

pub(super) fn decode_instance(bytes: &[u8; INSTANCE_BYTES as usize]) -> Option<InstanceRecord> {
    let word = u64_at(bytes, 0);
    let content = match CONTENT_WORDS.iter().position(|known| *known == word) {
        Some(place) => &bytes[CONTENT_AT[place]..][..CONTENT_BYTES],
        // Version 1: one content, sealed with the zeros after it.
        None if word == PRESENT => &bytes[8..],
        None => return None,
    };
    let is_whole = u64_at(content, 0) == checksum(&content[8..]);
    let engine_id = content[16..].get(..u32_at(content, 12) as usize)?;
    let number = |at: usize| u128::from_le_bytes(content[at..at + 16].try_into().expect("16 bytes"));
    (is_whole && engine_id.len() <= MAX_ENGINE_ID_BYTES).then(|| InstanceRecord {
        engine_id: engine_id.to_vec(),
        ranks: u32_at(content, 8),
        incarnation: number(80),
        owner: number(96),
    })
}

/// A namespace of blocks in this pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceRecord {
    /// Digest of the descriptor; the keys of its blocks begin with it.
    pub id: NamespaceId,
    /// The descriptor as text, at most 8 KiB.
    pub descriptor: String,
    /// Who opened it first; not known in records of earlier builds.
    pub uid: Option<u32>,
    /// The layout as its owner encodes it, at most 4 KiB.
    pub layout: Vec<u8>,
}

/// Everything after the record's first word, which is `PRESENT` or zero.
pub(super) fn encode_namespace(record: &NamespaceRecord) -> Vec<u8> {
    let (descriptor, layout) = (record.descriptor.as_bytes(), &record.layout);
    let mut bytes = vec![0; NAMESPACE_HEAD_BYTES - 8];
    bytes[8..24].copy_from_slice(&record.id.0.to_le_bytes());
    bytes[24..28].copy_from_slice(&(descriptor.len() as u32).to_le_bytes());
    bytes[28..32].copy_from_slice(&(layout.len() as u32).to_le_bytes());
    let user = record.uid.map_or(0, |uid| u64::from(uid) + 1);
    bytes[32..40].copy_from_slice(&user.to_le_bytes());
    bytes.extend_from_slice(descriptor);
    bytes.extend_from_slice(layout);
    let seal = checksum(&bytes[8..]);
    bytes[..8].copy_from_slice(&seal.to_le_bytes());
    bytes
}

pub(super) fn decode_namespace(bytes: &[u8; NAMESPACE_BYTES as usize]) -> Option<NamespaceRecord> {
    let (text_len, layout_len) = (u32_at(bytes, 32) as usize, u32_at(bytes, 36) as usize);
    if u64_at(bytes, 0) != PRESENT || text_len > MAX_DESCRIPTOR_BYTES || layout_len > MAX_LAYOUT_BYTES {
        return None;
    }
    let end = NAMESPACE_HEAD_BYTES + text_len + layout_len;
    if u64_at(bytes, 8) != checksum(&bytes[16..end]) {
        return None;
    }
    let (text, layout) = bytes[NAMESPACE_HEAD_BYTES..end].split_at(text_len);
    let id = NamespaceId(u128::from_le_bytes(bytes[16..32].try_into().unwrap()));
    let uid = u64_at(bytes, 40).checked_sub(1).and_then(|uid| u32::try_from(uid).ok());
    Some(NamespaceRecord { id, descriptor: String::from_utf8(text.to_vec()).ok()?, uid, layout: layout.to_vec() })
}

/// A namespace that is not purged yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PurgeRecord {
    /// Whose blocks go.
    pub namespace: NamespaceId,
    /// From where they are not gone yet.
    pub places: PurgePlaces,
}

/// From where a namespace is to be removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PurgePlaces {
    /// The pool.
    pub pool: bool,
    /// The disks of this host.
    pub disks: bool,
}

pub(super) fn encode_purge(record: &PurgeRecord) -> [u8; PURGE_BYTES as usize] {
    let PurgePlaces { pool, disks } = record.places;
    let mut bytes = [0; PURGE_BYTES as usize];
    bytes[..8].copy_from_slice(&PRESENT.to_le_bytes());
    bytes[16..32].copy_from_slice(&record.namespace.0.to_le_bytes());
    bytes[32] = u8::from(pool) | u8::from(disks) << 1;
    let seal = checksum(&bytes[16..]);
    bytes[8..16].copy_from_slice(&seal.to_le_bytes());
    bytes
}

/// An error if there is a record that cannot be read.
pub(super) fn decode_purge(bytes: &[u8; PURGE_BYTES as usize]) -> Result<Option<PurgeRecord>, ()> {
    match u64_at(bytes, 0) {
        0 => return Ok(None),
        PRESENT if u64_at(bytes, 8) == checksum(&bytes[16..]) && (1..=3).contains(&bytes[32]) => {}
        _ => return Err(()),
    }
    let namespace = NamespaceId(u128::from_le_bytes(bytes[16..32].try_into().expect("16 bytes")));
    Ok(Some(PurgeRecord { namespace, places: PurgePlaces { pool: bytes[32] & 1 != 0, disks: bytes[32] & 2 != 0 } }))
}

/// A purge that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndedPurge {
    /// Whose blocks went.
    pub namespace: NamespaceId,
    /// When, as the disks have it: microseconds since 1970.
    pub time: u64,
}

pub(super) fn encode_ended(record: &EndedPurge) -> [u8; ENDED_BYTES as usize] {
    let mut bytes = [0; ENDED_BYTES as usize];
    bytes[..16].copy_from_slice(&record.namespace.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&record.time.to_le_bytes());
    let seal = checksum(&bytes[..24]);
    bytes[24..].copy_from_slice(&seal.to_le_bytes());
    bytes
}

/// An error if there is a record that cannot be read.
pub(super) fn decode_ended(bytes: &[u8; ENDED_BYTES as usize]) -> Result<Option<EndedPurge>, ()> {
    if *bytes == [0; ENDED_BYTES as usize] {
        return Ok(None);
    }
    if u64_at(bytes, 24) != checksum(&bytes[..24]) {
        return Err(());
    }
    let namespace = NamespaceId(u128::from_le_bytes(bytes[..16].try_into().expect("16 bytes")));
    Ok(Some(EndedPurge { namespace, time: u64_at(bytes, 16) }))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
