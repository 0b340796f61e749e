//! The disk to the byte; `docs/formats/ssd.md` draws the same picture.
//!
//! Invariants: all numbers are little-endian. Every page of the tier's own carries a checksum over all of it, the
//! disk's id and, in a segment, the segment's life, so that neither a torn page nor one of an earlier life is
//! accepted. The first 16 bytes of each page keep their meaning in every version.

use forebay_core::checksum::{Checksum, checksum};
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId};

/// Of what is written on a disk. A build with `--cfg forebay_next` plays a later release: `make rolling`.
pub const VERSION: u32 = if cfg!(forebay_next) { 2 } else { 1 };
pub(super) const READABLE_VERSIONS: std::ops::RangeInclusive<u32> = 1..=VERSION;
pub(super) const PAGE: u64 = 4096;
pub(super) const PAGE_BYTES: usize = PAGE as usize;
/// The superblock's page and space for later versions.
pub(super) const FIRST_SEGMENT_AT: u64 = 1 << 20;
pub(super) const MIN_SEGMENT_BYTES: u64 = 64 << 10;
pub(super) const MAX_SEGMENT_BYTES: u64 = 1 << 30;
/// One for writing, three ready, one being reclaimed, and three with content.
pub(super) const MIN_SEGMENTS: u32 = 8;

pub(super) const RECORD_BYTES: usize = 96;
const RECORDS_AT: usize = 256;
pub(super) const RECORDS_PER_BATCH: usize = (PAGE_BYTES - RECORDS_AT) / RECORD_BYTES;
/// Bounds a footer at 1.5 MiB, whatever the segment's size; a 256 MiB segment of 16 KiB blocks still fits.
pub(super) const RECORDS_PER_SEGMENT: u32 = 16_384;
/// The list of purges, twice. The copies lie far apart, so that what spoils a place of a medium spoils one of them.
pub(super) const PURGES_AT: [u64; 2] = [64 << 10, 576 << 10];
/// Of each copy: room for 2,000 namespaces.
pub(super) const PURGES_PAGES: u32 = 16;
pub(super) const PURGES_PER_PAGE: usize = (SEAL_AT - PURGE_RECORDS_AT) / PURGE_BYTES;
const PURGE_RECORDS_AT: usize = 64;
const PURGE_BYTES: usize = 32;

/// Length of the longest footer.
pub(super) const FOOTER_BYTES: u64 = (RECORDS_PER_SEGMENT as u64 * RECORD_BYTES as u64).next_multiple_of(PAGE) + PAGE;

/// Of all segments of a disk: 4 PiB. The index has bits for so many.
pub(super) const MOST_PAGES: u64 = 1 << 40;
/// No disk counts so far in its life. A number above is damage; below, sums of two never overflow.
pub(super) const MOST: u64 = 1 << 62;

const SUPERBLOCK_MAGIC: [u8; 8] = *b"FOREBAYS";
const SEGMENT_MAGIC: [u8; 8] = *b"FBSEGMNT";
const BATCH_MAGIC: [u8; 8] = *b"FBBATCH\0";
const FOOTER_MAGIC: [u8; 8] = *b"FBFOOTER";
const PURGES_MAGIC: [u8; 8] = *b"FBPURGES";
/// Position of a page's own checksum.
const SEAL_AT: usize = PAGE_BYTES - 8;
/// Positions of the owner and of its first sequence in the superblock. They are in one sector with the checksum, so a
/// power loss tears no signature.
const OWNER_AT: usize = SEAL_AT - 24;
const FIRST_SEQUENCE_AT: usize = SEAL_AT - 8;
const BATCH_SEAL_AT: usize = RECORDS_AT - 8;

pub(super) type Page = [u8; PAGE_BYTES];

/// A disk's geometry; fixed when it is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// A random id, drawn when the disk was created.
    pub id: u128,
    /// Bytes of one segment, a power of two.
    pub segment_bytes: u64,
    /// Number of segments.
    pub segments: u32,
}

impl Geometry {
    /// Bytes that the disk must have: the superblock's part and all segments.
    pub fn disk_bytes(&self) -> u64 {
        FIRST_SEGMENT_AT + self.segment_bytes * u64::from(self.segments)
    }

    pub(super) fn pages(&self) -> u32 {
        (self.segment_bytes / PAGE) as u32
    }

    /// Byte offset of a page of a segment.
    pub(super) fn at(&self, segment: u32, page: u32) -> u64 {
        assert!(segment < self.segments && page < self.pages(), "segment {segment} has no page {page}");
        FIRST_SEGMENT_AT + self.segment_bytes * u64::from(segment) + PAGE * u64::from(page)
    }

    /// The longest block that fits beside the segment's header, a batch head and a footer of one record.
    pub(super) fn max_block_bytes(&self) -> u64 {
        self.segment_bytes - 4 * PAGE
    }

    fn is_possible(&self) -> bool {
        self.segment_bytes.is_power_of_two()
            && (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&self.segment_bytes)
            && self.segments >= MIN_SEGMENTS
            && self.segment_bytes / PAGE * u64::from(self.segments) <= MOST_PAGES
    }

    pub(super) fn encode_superblock(&self, owner: u128, first_sequence: u64) -> Page {
        let mut page = self.start(SUPERBLOCK_MAGIC, 0);
        page[OWNER_AT..OWNER_AT + 16].copy_from_slice(&owner.to_le_bytes());
        put_u64(&mut page, FIRST_SEQUENCE_AT, first_sequence);
        put_u64(&mut page, 32, self.segment_bytes);
        put_u32(&mut page, 40, self.segments);
        sealed(page, SEAL_AT)
    }

    /// None if the page is not a superblock that this build can read.
    pub(super) fn decode_superblock(page: &Page) -> Option<Geometry> {
        check(page, SUPERBLOCK_MAGIC, SEAL_AT)?;
        Geometry::decode(page)
    }

    /// The daemon that signed this superblock last; 0 if it was of a build that does not sign.
    pub(super) fn owner_in(page: &Page) -> u128 {
        u128_at(page, OWNER_AT)
    }

    /// The number with which that daemon began its records; 0 if it did not say.
    pub(super) fn first_sequence_in(page: &Page) -> u64 {
        Some(u64_at(page, FIRST_SEQUENCE_AT)).filter(|first| *first < MOST).unwrap_or(0)
    }

    fn decode(page: &Page) -> Option<Geometry> {
        let geometry = Geometry { id: u128_at(page, 16), segment_bytes: u64_at(page, 32), segments: u32_at(page, 40) };
        geometry.is_possible().then_some(geometry)
    }

    fn start(&self, magic: [u8; 8], count: u32) -> Page {
        let mut page = [0; PAGE_BYTES];
        page[..8].copy_from_slice(&magic);
        put_u32(&mut page, 8, VERSION);
        put_u32(&mut page, 12, count);
        page[16..32].copy_from_slice(&self.id.to_le_bytes());
        page
    }
}

/// What was left of a disk's daily write budget, as its own pages keep it. Builds that know nothing of it leave zeros,
/// and read over it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Balance {
    /// By the clock of the host.
    pub unix_seconds: u64,
    /// Bytes that could be written then; negative if too many were.
    pub bytes: i64,
    /// Bytes written to the disk since it was made: the later of two has more.
    pub written_bytes: u64,
}

impl Balance {
    fn encode(balance: Option<Balance>, page: &mut Page, at: usize) {
        let Some(Balance { unix_seconds, bytes, written_bytes }) = balance else { return };
        put_u64(page, at, unix_seconds);
        put_u64(page, at + 8, bytes as u64);
        put_u64(page, at + 16, written_bytes);
    }

    fn decode(page: &Page, at: usize) -> Option<Balance> {
        let [unix_seconds, bytes, written_bytes] = [0, 8, 16].map(|offset| u64_at(page, at + offset));
        (unix_seconds > 0 && written_bytes < MOST).then_some(Balance {
            unix_seconds,
            bytes: bytes as i64,
            written_bytes,
        })
    }
}

/// The version of a page of ours that this build cannot read, for the error message.
pub(super) fn superblock_version(page: &Page) -> Option<u32> {
    (page[..8] == SUPERBLOCK_MAGIC).then(|| u32_at(page, 8))
}

/// Whether another version wrote this first page, whole. Its segments may be in a format that looks like ours.
pub(super) fn is_of_other_version(page: &Page) -> bool {
    let is_other = superblock_version(page).is_some_and(|version| !READABLE_VERSIONS.contains(&version));
    is_other && u64_at(page, SEAL_AT) == seal_of(page, SEAL_AT)
}

/// Why a disk with this first page, or with an unreadable one, is refused.
pub(super) fn not_ours(page: Option<&Page>) -> Error {
    match page.and_then(superblock_version) {
        Some(version) if !READABLE_VERSIONS.contains(&version) => {
            // Another release wrote it, and may come back: the disk stays as it is.
            Error::new(ErrorKind::Corrupt, "a disk was formatted by another version")
                .with("version", version)
                .with("readable", VERSION)
                .hint("use that version, or delete the file to start empty")
        }
        _ => Error::invalid("this disk holds other data").hint(
            "name another file, or delete this one (zero a device with `blkdiscard -z`) if nobody needs the data",
        ),
    }
}

/// The first page of a segment. Each use of a segment is a new life, which makes all content of earlier lives void.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SegmentHeader {
    pub geometry: Geometry,
    pub index: u32,
    /// 0 for a segment that was never used.
    pub life: u64,
    /// Bytes written to this disk since it was made, when this life began.
    pub written_bytes: u64,
    /// Bytes of blocks stored on this disk since it was made, when this life began.
    pub stored_bytes: u64,
    pub balance: Option<Balance>,
}

impl SegmentHeader {
    pub fn encode(&self) -> Page {
        let mut page = self.geometry.start(SEGMENT_MAGIC, 0);
        put_u64(&mut page, 32, self.geometry.segment_bytes);
        put_u32(&mut page, 40, self.geometry.segments);
        put_u32(&mut page, 44, self.index);
        put_u64(&mut page, 48, self.life);
        put_u64(&mut page, 56, self.written_bytes);
        put_u64(&mut page, 64, self.stored_bytes);
        Balance::encode(self.balance, &mut page, 72);
        sealed(page, SEAL_AT)
    }

    pub fn decode(page: &Page) -> Option<SegmentHeader> {
        check(page, SEGMENT_MAGIC, SEAL_AT)?;
        let [life, written_bytes, stored_bytes] = [48, 56, 64].map(|at| u64_at(page, at));
        if [life, written_bytes, stored_bytes].iter().any(|count| *count >= MOST) {
            return None;
        }
        let (geometry, balance) = (Geometry::decode(page)?, Balance::decode(page, 72));
        Some(SegmentHeader { geometry, index: u32_at(page, 44), life, written_bytes, stored_bytes, balance })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecordKind {
    /// A block with its payload at `first_page`.
    Block,
    /// The key was removed: earlier records of it are void.
    Removed,
    /// The key was read since it was written, so it is worth carrying over.
    Touched,
}

/// The header of a block, or a note about one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub kind: RecordKind,
    pub key: BlockKey,
    /// Counts records of a disk; a key's latest record is valid.
    pub sequence: u64,
    pub first_page: u32,
    pub length_bytes: u64,
    /// Checksum of the payload.
    pub checksum: u64,
}

impl Record {
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let hash = self.key.hash.as_bytes();
        put_u64(&mut bytes, 0, self.sequence);
        bytes[8..24].copy_from_slice(&self.key.namespace.0.to_le_bytes());
        bytes[24..26].copy_from_slice(&self.key.group.to_le_bytes());
        bytes[26] = hash.len() as u8;
        bytes[27] = match self.kind {
            RecordKind::Block => 1,
            RecordKind::Removed => 2,
            RecordKind::Touched => 3,
        };
        put_u32(&mut bytes, 28, self.first_page);
        bytes[32..32 + hash.len()].copy_from_slice(hash);
        put_u64(&mut bytes, 64, self.length_bytes);
        put_u64(&mut bytes, 72, self.checksum);
        let seal = record_seal(&bytes);
        put_u64(&mut bytes, 88, seal);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Record> {
        if u64_at(bytes, 88) != record_seal(bytes) || u64_at(bytes, 80) != 0 || u64_at(bytes, 0) >= MOST {
            return None;
        }
        let kind = match bytes[27] {
            1 => RecordKind::Block,
            2 => RecordKind::Removed,
            3 => RecordKind::Touched,
            _ => return None,
        };
        let hash = BlockHash::new(bytes[32..64].get(..bytes[26] as usize)?).ok()?;
        let namespace = NamespaceId(u128_at(bytes, 8));
        let group = u16::from_le_bytes(bytes[24..26].try_into().unwrap());
        Some(Record {
            kind,
            key: BlockKey { namespace, group, hash },
            sequence: u64_at(bytes, 0),
            first_page: u32_at(bytes, 28),
            length_bytes: u64_at(bytes, 64),
            checksum: u64_at(bytes, 72),
        })
    }

    /// Whether this block has bytes, and all of them lie before that page.
    fn ends_by(&self, page: u32) -> bool {
        let pages = self.length_bytes.div_ceil(PAGE);
        pages > 0 && u64::from(self.first_page).saturating_add(pages) <= u64::from(page)
    }

    /// Number of pages of the payload.
    pub fn payload_pages(&self) -> u32 {
        match self.kind {
            RecordKind::Block => self.length_bytes.div_ceil(PAGE) as u32,
            RecordKind::Removed | RecordKind::Touched => 0,
        }
    }
}

/// The page before the payloads of one batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BatchHead {
    pub life: u64,
    /// Position of this page in its segment.
    pub page: u32,
    /// Start of the next batch.
    pub next_page: u32,
    /// Every record of this segment with a lower sequence is whole and flushed.
    pub mark: u64,
    /// None of its records or of the disk's later records has a lower sequence.
    pub first_sequence: u64,
    pub balance: Option<Balance>,
    pub records: Vec<Record>,
}

impl BatchHead {
    pub fn encode(&self, geometry: &Geometry) -> Page {
        let mut page = geometry.start(BATCH_MAGIC, self.records.len() as u32);
        put_u64(&mut page, 32, self.life);
        put_u32(&mut page, 40, self.page);
        put_u32(&mut page, 44, self.next_page);
        put_u64(&mut page, 48, self.mark);
        put_u64(&mut page, 56, self.first_sequence);
        Balance::encode(self.balance, &mut page, 64);
        for (record, bytes) in self.records.iter().zip(page[RECORDS_AT..].chunks_exact_mut(RECORD_BYTES)) {
            bytes.copy_from_slice(&record.encode());
        }
        sealed(page, BATCH_SEAL_AT)
    }

    /// The life of the head at this position, if there is one.
    pub fn life_of(bytes: &Page, geometry: &Geometry, page: u32) -> Option<u64> {
        BatchHead::decode(bytes, geometry, u64_at(bytes, 32), page).map(|head| head.life)
    }

    /// Whether the page looks like a head of this life, damaged or not.
    pub fn was_of(bytes: &Page, geometry: &Geometry, life: u64) -> bool {
        bytes[..8] == BATCH_MAGIC && u128_at(bytes, 16) == geometry.id && u64_at(bytes, 32) == life
    }

    /// None unless the page is the head at this position in this life of a segment.
    pub fn decode(bytes: &Page, geometry: &Geometry, life: u64, page: u32) -> Option<BatchHead> {
        check(bytes, BATCH_MAGIC, BATCH_SEAL_AT)?;
        let count = u32_at(bytes, 12) as usize;
        let next_page = u32_at(bytes, 44);
        let is_this = BatchHead::was_of(bytes, geometry, life) && u32_at(bytes, 40) == page;
        if !is_this || next_page <= page || next_page > geometry.pages() || count > RECORDS_PER_BATCH {
            return None;
        }
        let records = bytes[RECORDS_AT..].chunks_exact(RECORD_BYTES).take(count).map(Record::decode);
        let records: Vec<Record> = records.collect::<Option<_>>()?;
        let fits = |record: &Record| {
            record.kind != RecordKind::Block || (record.first_page > page && record.ends_by(next_page))
        };
        let (mark, first_sequence) = (u64_at(bytes, 48), u64_at(bytes, 56));
        if mark >= MOST || first_sequence >= MOST {
            return None;
        }
        let balance = Balance::decode(bytes, 64);
        let head = BatchHead { life, page, next_page, mark, first_sequence, balance, records };
        head.records.iter().all(fits).then_some(head)
    }
}

/// The last page of a closed segment; its records precede it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Footer {
    pub life: u64,
    pub index: u32,
    pub count: u32,
    /// End of the log in this segment.
    pub end_page: u32,
    pub records_checksum: u64,
    pub balance: Option<Balance>,
}

impl Footer {
    /// Pages that a footer's records take.
    pub fn record_pages(count: u32) -> u32 {
        (u64::from(count) * RECORD_BYTES as u64).div_ceil(PAGE) as u32
    }

    pub fn encode(&self, geometry: &Geometry) -> Page {
        let mut page = geometry.start(FOOTER_MAGIC, self.count);
        put_u64(&mut page, 32, self.life);
        put_u32(&mut page, 40, self.index);
        put_u32(&mut page, 44, self.end_page);
        put_u64(&mut page, 48, self.records_checksum);
        Balance::encode(self.balance, &mut page, 56);
        sealed(page, SEAL_AT)
    }

    /// None unless the page closes this life of this segment.
    pub fn decode(bytes: &Page, geometry: &Geometry, life: u64, index: u32) -> Option<Footer> {
        check(bytes, FOOTER_MAGIC, SEAL_AT)?;
        let count = u32_at(bytes, 12);
        let is_this = u128_at(bytes, 16) == geometry.id && u64_at(bytes, 32) == life && u32_at(bytes, 40) == index;
        let end_page = u32_at(bytes, 44);
        let needed = u64::from(end_page) + u64::from(Footer::record_pages(count)) + 1;
        let fits = count <= RECORDS_PER_SEGMENT && needed <= u64::from(geometry.pages());
        let (records_checksum, balance) = (u64_at(bytes, 48), Balance::decode(bytes, 56));
        (is_this && fits).then_some(Footer { life, index, count, end_page, records_checksum, balance })
    }

    /// The life of this segment that the page closes, if it closes one.
    pub fn life_of(bytes: &Page, geometry: &Geometry, index: u32) -> Option<u64> {
        Footer::decode(bytes, geometry, u64_at(bytes, 32), index).map(|footer| footer.life)
    }

    /// The records of a footer; none if they differ from what was written.
    pub fn decode_records(&self, bytes: &[u8]) -> Option<Vec<Record>> {
        let bytes = bytes.get(..self.count as usize * RECORD_BYTES)?;
        if checksum(bytes) != self.records_checksum {
            return None;
        }
        let fits = |record: &Record| record.kind != RecordKind::Block || record.ends_by(self.end_page);
        let fitting = |bytes| Record::decode(bytes).filter(fits);
        let mut records = Vec::with_capacity(self.count as usize);
        for bytes in bytes.chunks_exact(RECORD_BYTES) {
            records.push(fitting(bytes)?);
        }
        Some(records)
    }
}

/// All blocks of a namespace with a lower sequence were removed from the disk. That stays true for ever.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PurgeRecord {
    pub namespace: NamespaceId,
    pub sequence: u64,
    /// When it was purged, the same number on all disks that noted it: microseconds since 1970, even, and later than
    /// that of any earlier purge of the namespace. 0 if that is not known.
    pub time: u64,
    /// The disk was away then, and heard of it later: the namespace is to be purged again, and that has not ended.
    pub is_due_again: bool,
}

/// The least time: earlier builds wrote the number of a life there.
pub(super) const FIRST_TIME: u64 = 1 << 40;

impl PurgeRecord {
    /// A page of the list of purges, with at most [`PURGES_PER_PAGE`] of them.
    pub fn encode(geometry: &Geometry, records: &[PurgeRecord]) -> Page {
        let mut page = geometry.start(PURGES_MAGIC, records.len() as u32);
        for (record, bytes) in records.iter().zip(page[PURGE_RECORDS_AT..].chunks_exact_mut(PURGE_BYTES)) {
            bytes[..16].copy_from_slice(&record.namespace.0.to_le_bytes());
            bytes[16..24].copy_from_slice(&record.sequence.to_le_bytes());
            bytes[24..].copy_from_slice(&(record.time | u64::from(record.is_due_again)).to_le_bytes());
        }
        sealed(page, SEAL_AT)
    }

    /// Whether a page of the list is there, of whatever disk, damaged or not.
    pub fn is_at(at: u64, page: &[u8]) -> bool {
        let is_list = |start: &u64| (*start..*start + u64::from(PURGES_PAGES) * PAGE).contains(&at);
        page.starts_with(&PURGES_MAGIC) && PURGES_AT.iter().any(is_list)
    }

    /// None unless it is a page of this disk's list.
    pub fn decode(page: &Page, geometry: &Geometry) -> Option<Vec<PurgeRecord>> {
        check(page, PURGES_MAGIC, SEAL_AT)?;
        let count = u32_at(page, 12) as usize;
        if u128_at(page, 16) != geometry.id || count > PURGES_PER_PAGE {
            return None;
        }
        let time = |bytes: &[u8]| Some(u64_at(bytes, 24)).filter(|time| *time >= FIRST_TIME).unwrap_or(0);
        let record = |bytes: &[u8]| PurgeRecord {
            namespace: NamespaceId(u128_at(bytes, 0)),
            sequence: u64_at(bytes, 16),
            time: time(bytes) & !1,
            is_due_again: time(bytes) & 1 == 1,
        };
        let records: Vec<_> = page[PURGE_RECORDS_AT..].chunks_exact(PURGE_BYTES).take(count).map(record).collect();
        records.iter().all(|record| record.sequence < MOST && record.time < MOST).then_some(records)
    }
}

fn sealed(mut page: Page, seal_at: usize) -> Page {
    let seal = seal_of(&page, seal_at);
    put_u64(&mut page, seal_at, seal);
    page
}

/// Covers the whole page except the seal's own eight bytes.
fn seal_of(page: &Page, seal_at: usize) -> u64 {
    let mut sum = Checksum::new();
    sum.update(&page[..seal_at]);
    sum.update(&page[seal_at + 8..]);
    sum.finish()
}

fn check(page: &Page, magic: [u8; 8], seal_at: usize) -> Option<()> {
    let is_ours = page[..8] == magic && READABLE_VERSIONS.contains(&u32_at(page, 8));
    (is_ours && u64_at(page, seal_at) == seal_of(page, seal_at)).then_some(())
}

/// Mixed, because a CRC over bytes that end in their own CRC is the same whatever the bytes: otherwise all pages of
/// records would have one checksum, and half of an old page under a new one would pass.
fn record_seal(bytes: &[u8]) -> u64 {
    checksum(&bytes[..88]).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32)
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from_le_bytes(bytes[at..at + 16].try_into().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { id: 77, segment_bytes: 1 << 20, segments: 9 };

    fn record(kind: RecordKind, first_page: u32) -> Record {
        let key = BlockKey { namespace: NamespaceId(5), group: 3, hash: BlockHash::new(&[7; 32]).unwrap() };
        Record { kind, key, sequence: 11, first_page, length_bytes: 5000, checksum: 13 }
    }

    const BALANCE: Option<Balance> = Some(Balance { unix_seconds: 14, bytes: -15, written_bytes: 16 });

    #[test]
    fn pages_read_as_they_were_written() {
        assert_eq!(Geometry::decode_superblock(&GEOMETRY.encode_superblock(7, 9)), Some(GEOMETRY));
        let header = SegmentHeader {
            geometry: GEOMETRY,
            index: 3,
            life: 4,
            written_bytes: 5,
            stored_bytes: 6,
            balance: BALANCE,
        };
        assert_eq!(SegmentHeader::decode(&header.encode()), Some(header));
        let records = vec![record(RecordKind::Block, 2), record(RecordKind::Removed, 0)];
        let head =
            BatchHead { life: 9, page: 1, next_page: 4, mark: 10, first_sequence: 11, balance: BALANCE, records };
        assert_eq!(BatchHead::decode(&head.encode(&GEOMETRY), &GEOMETRY, 9, 1), Some(head));
        let footer = Footer { life: 9, index: 2, count: 40, end_page: 200, records_checksum: 1, balance: BALANCE };
        assert_eq!(Footer::decode(&footer.encode(&GEOMETRY), &GEOMETRY, 9, 2), Some(footer));
        let purges = purges(PURGES_PER_PAGE as u64);
        let page = PurgeRecord::encode(&GEOMETRY, &purges);
        assert_eq!(PurgeRecord::decode(&page, &GEOMETRY), Some(purges));
        assert_eq!(PurgeRecord::decode(&page, &Geometry { id: 78, ..GEOMETRY }), None);
    }

    fn purges(count: u64) -> Vec<PurgeRecord> {
        let record = |n| PurgeRecord {
            namespace: NamespaceId(u128::from(n) << 70),
            sequence: 10 * n,
            time: FIRST_TIME + 2 * n,
            is_due_again: n % 3 == 1,
        };
        (0..count).map(record).collect()
    }

    #[test]
    fn a_page_with_any_bit_flipped_is_not_believed() {
        let records = vec![record(RecordKind::Block, 2), record(RecordKind::Touched, 0)];
        let head =
            BatchHead { life: 9, page: 1, next_page: 4, mark: 10, first_sequence: 11, balance: BALANCE, records };
        let mut page = head.encode(&GEOMETRY);
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(BatchHead::decode(&page, &GEOMETRY, 9, 1), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        let mut page = GEOMETRY.encode_superblock(7, 9);
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Geometry::decode_superblock(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        let mut page = PurgeRecord::encode(&GEOMETRY, &purges(PURGES_PER_PAGE as u64));
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(PurgeRecord::decode(&page, &GEOMETRY), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_page_of_another_life_place_or_disk_is_not_believed() {
        let head = BatchHead {
            life: 9,
            page: 1,
            next_page: 4,
            mark: 10,
            first_sequence: 11,
            balance: None,
            records: vec![record(RecordKind::Block, 2)],
        };
        let page = head.encode(&GEOMETRY);
        let other = Geometry { id: 78, ..GEOMETRY };
        assert_eq!(BatchHead::decode(&page, &GEOMETRY, 8, 1), None);
        assert_eq!(BatchHead::decode(&page, &GEOMETRY, 9, 2), None);
        assert_eq!(BatchHead::decode(&page, &other, 9, 1), None);
    }

    /// Power may fail in the middle of a page whose old content was sealed too.
    #[test]
    fn a_page_of_old_and_new_records_is_not_believed() {
        let record = |sequence| Record { sequence, ..record(RecordKind::Touched, 0) };
        let records = |first| (first..first + RECORDS_PER_BATCH as u64).map(record).collect();
        let head = |life, first| BatchHead {
            life,
            page: 1,
            next_page: 2,
            mark: first,
            first_sequence: first,
            balance: BALANCE,
            records: records(first),
        };
        let (old, new) = (head(8, 11).encode(&GEOMETRY), head(9, 1011).encode(&GEOMETRY));
        for cut in (512..PAGE_BYTES).step_by(512) {
            let mut torn = new;
            torn[cut..].copy_from_slice(&old[cut..]);
            assert_eq!(BatchHead::decode(&torn, &GEOMETRY, 9, 1), None, "torn at byte {cut}");
        }
        let (old, new): (Vec<Record>, Vec<Record>) = (records(11), records(1011));
        let bytes = |records: &[Record]| records.iter().flat_map(Record::encode).collect::<Vec<u8>>();
        let records_checksum = checksum(&bytes(&new));
        let footer =
            Footer { life: 9, index: 2, count: new.len() as u32, end_page: 200, records_checksum, balance: None };
        assert_eq!(footer.decode_records(&bytes(&old)), None);
        assert_eq!(footer.decode_records(&bytes(&new)), Some(new));
    }

    /// Under right checksums: the next such number would overflow, and an empty block may begin behind the segment.
    #[test]
    fn numbers_beyond_any_disks_life_and_blocks_without_bytes_are_damage() {
        let record = record(RecordKind::Block, 2);
        let pages = GEOMETRY.pages();
        let head = |mark, first_sequence, record| BatchHead {
            life: 9,
            page: 1,
            next_page: pages,
            mark,
            first_sequence,
            balance: None,
            records: vec![record],
        };
        let is_believed = |head: BatchHead| BatchHead::decode(&head.encode(&GEOMETRY), &GEOMETRY, 9, 1).is_some();
        assert!(is_believed(head(10, 11, record)));
        for damaged in [
            head(MOST, 11, record),
            head(10, u64::MAX, record),
            head(10, 11, Record { sequence: u64::MAX, ..record }),
            head(10, 11, Record { length_bytes: 0, first_page: pages, ..record }),
        ] {
            assert!(!is_believed(damaged.clone()), "{damaged:?}");
        }
        let header = SegmentHeader {
            geometry: GEOMETRY,
            index: 3,
            life: 4,
            written_bytes: 5,
            stored_bytes: 6,
            balance: BALANCE,
        };
        for damaged in [
            SegmentHeader { life: u64::MAX, ..header },
            SegmentHeader { written_bytes: u64::MAX, ..header },
            SegmentHeader { stored_bytes: u64::MAX, ..header },
        ] {
            assert_eq!(SegmentHeader::decode(&damaged.encode()), None);
        }
        let balance = Some(Balance { written_bytes: u64::MAX, ..BALANCE.unwrap() });
        assert_eq!(SegmentHeader::decode(&SegmentHeader { balance, ..header }.encode()).unwrap().balance, None);
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        const LIFE: u64 = 9;
        const SEGMENT: u32 = 2;

        /// A page of the tier's own, and for a footer its records after it.
        fn written() -> Vec<Vec<u8>> {
            let header = SegmentHeader {
                geometry: GEOMETRY,
                index: SEGMENT,
                life: LIFE,
                written_bytes: 5,
                stored_bytes: 6,
                balance: BALANCE,
            };
            let records =
                vec![record(RecordKind::Block, 2), record(RecordKind::Removed, 0), record(RecordKind::Touched, 0)];
            let listed: Vec<u8> = records.iter().flat_map(Record::encode).collect();
            let footer = Footer {
                life: LIFE,
                index: SEGMENT,
                count: records.len() as u32,
                end_page: 200,
                records_checksum: checksum(&listed),
                balance: None,
            };
            let head = BatchHead {
                life: LIFE,
                page: 1,
                next_page: 4,
                mark: 10,
                first_sequence: 11,
                balance: BALANCE,
                records,
            };
            let last_head = BatchHead { next_page: GEOMETRY.pages(), ..head.clone() };
            vec![
                GEOMETRY.encode_superblock(77, 9).to_vec(),
                header.encode().to_vec(),
                head.encode(&GEOMETRY).to_vec(),
                last_head.encode(&GEOMETRY).to_vec(),
                [&footer.encode(&GEOMETRY)[..], &listed].concat(),
                PurgeRecord::encode(&GEOMETRY, &purges(3)).to_vec(),
            ]
        }

        /// As somebody would who can write the format.
        fn reseal(bytes: &mut [u8]) {
            let Some((page, listed)) = bytes.split_first_chunk_mut::<PAGE_BYTES>() else { return };
            let reseal_records = |bytes: &mut [u8]| {
                for record in bytes.chunks_exact_mut(RECORD_BYTES) {
                    let seal = record_seal(record);
                    put_u64(record, 88, seal);
                }
            };
            let is_head = page[..8] == BATCH_MAGIC;
            if is_head {
                reseal_records(&mut page[RECORDS_AT..]);
            } else if page[..8] == FOOTER_MAGIC {
                reseal_records(listed);
                let count = u32_at(page, 12) as usize;
                let sum = count.checked_mul(RECORD_BYTES).and_then(|end| listed.get(..end)).map(checksum);
                put_u64(page, 48, sum.unwrap_or_default());
            }
            *page = sealed(*page, if is_head { BATCH_SEAL_AT } else { SEAL_AT });
        }

        /// As recovery uses a record of this segment.
        fn is_in_segment(record: &Record, end_page: u32) -> bool {
            record.kind != RecordKind::Block
                || GEOMETRY.at(SEGMENT, record.first_page) + record.length_bytes
                    <= GEOMETRY.at(SEGMENT, 0) + u64::from(end_page) * PAGE
        }

        #[test]
        fn whatever_a_page_holds_it_is_believed_as_it_was_written_or_not_at_all() {
            let fields = vec![
                0..96,
                248..256 + 3 * RECORD_BYTES,
                SEAL_AT..PAGE_BYTES,
                PAGE_BYTES..PAGE_BYTES + 3 * RECORD_BYTES,
            ];
            Target::new("pages of a disk", written()).places(fields).mended(reseal).cases(20_000).run(|bytes| {
                let Some((page, listed)) = bytes.split_first_chunk::<PAGE_BYTES>() else { return [false; 6] };
                let is_whole = [SEAL_AT, BATCH_SEAL_AT].iter().any(|at| u64_at(page, *at) == seal_of(page, *at));
                let superblock = Geometry::decode_superblock(page);
                if let Some(geometry) = superblock {
                    assert_eq!(
                        Geometry::decode_superblock(&geometry.encode_superblock(Geometry::owner_in(page), 9)),
                        superblock
                    );
                    geometry.at(geometry.segments - 1, geometry.pages() - 1);
                }
                let header = SegmentHeader::decode(page);
                assert_eq!(header.and_then(|header| SegmentHeader::decode(&header.encode())), header);
                let head = BatchHead::decode(page, &GEOMETRY, LIFE, 1);
                if let Some(head) = &head {
                    assert_eq!(BatchHead::decode(&head.encode(&GEOMETRY), &GEOMETRY, LIFE, 1).as_ref(), Some(head));
                    assert!(head.records.iter().all(|record| is_in_segment(record, head.next_page)), "{head:?}");
                }
                let footer = Footer::decode(page, &GEOMETRY, LIFE, SEGMENT);
                assert_eq!(
                    footer.and_then(|it| Footer::decode(&it.encode(&GEOMETRY), &GEOMETRY, LIFE, SEGMENT)),
                    footer
                );
                let records = footer.and_then(|footer| Some((footer, footer.decode_records(listed)?)));
                if let Some((footer, records)) = &records {
                    // Bytes that no field has are written as zeros.
                    let again: Vec<u8> = records.iter().flat_map(Record::encode).collect();
                    let footer_again = Footer { records_checksum: checksum(&again), ..*footer };
                    assert_eq!(footer_again.decode_records(&again).as_ref(), Some(records));
                    assert!(records.iter().all(|record| is_in_segment(record, footer.end_page)), "{records:?}");
                }
                let purges = PurgeRecord::decode(page, &GEOMETRY);
                if let Some(purges) = &purges {
                    let again = PurgeRecord::encode(&GEOMETRY, purges);
                    assert_eq!(PurgeRecord::decode(&again, &GEOMETRY).as_ref(), Some(purges));
                }
                let found = [
                    superblock.is_some(),
                    header.is_some(),
                    head.is_some(),
                    footer.is_some(),
                    records.is_some(),
                    purges.is_some(),
                ];
                assert!(is_whole || found == [false; 6], "a page without its checksum is believed: {found:?}");
                found
            });
        }
    }
}
