//! Opening a disk: determines its geometry, then its blocks.
//!
//! A closed segment's footer lists its blocks. A segment without a footer is read along its chain of heads. Its
//! blocks after the last mark, which may not have been flushed, are read and verified. Invariants: every acknowledged
//! block is found. No incomplete block is found. A geometry is never guessed: it comes from the superblock, or from
//! all readable segments if they agree. Only a blank disk is formatted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::tiers::TierHasher;
use forebay_core::{Error, ErrorKind, NamespaceId, Result};

use super::config::SsdConfig;
use super::device::Device;
use super::disk::{Disk, Opened};
use super::index::{Entry, Hasher, Index, WARM_AT_ONCE};
use super::io::Io;
use super::layout::*;
use super::log::Sequences;
use super::owner::{Owner, taken_by_another};
use super::purges::Purges;
use super::read_ahead::{Listed, ReadAhead};
use super::report::Recovery;
use super::space::{Segment, SegmentState, Space};
use super::staging::{CHUNK_BYTES, CHUNKS, HEADS, Staging, joined, page_at, pieces};
use crate::uring::{Engine, Memory, Span, Work};

/// Keeps the sequence numbers of unseen records of a stopped chain lower than all new ones.
const SEQUENCE_GAP: u64 = 1 << 32;
/// The same where records of several daemons may be unseen, each of which began behind a gap: of 4,096 of them. Also
/// where purges may be unseen: what is stored next must not have a lower number than they have.
const WIDE_SEQUENCE_GAP: u64 = SEQUENCE_GAP << 12;
/// After a device was signed, another daemon has this long to read the signature and to end what it is writing: three
/// times as long as it takes to look again.
const OTHERS_STOP: Duration = Duration::from_millis(1500);
/// Pages of a chain that are read at once.
const WINDOW_PAGES: u32 = CHUNK_BYTES / 4 / PAGE as u32;

/// An engine on a disk that is not opened yet.
pub struct Medium {
    /// The name in reports.
    pub name: String,
    /// What moves bytes between the medium and `memory`.
    pub engine: Box<dyn Engine>,
    /// Why it is this engine, for reports.
    pub engine_why: String,
    /// The pool, and staging of [`STAGING_BYTES`](super::STAGING_BYTES).
    pub memory: Arc<Memory>,
    /// Length of the medium. A shorter disk on it keeps its own capacity.
    pub bytes: u64,
    /// Whether transfers bypass the page cache, for reports.
    pub is_direct: bool,
    /// Whether it takes trims.
    pub can_trim: bool,
    /// The id that the disk gets if it is blank.
    pub new_id: u128,
}

/// Opens an existing disk, or formats a blank one.
pub(super) fn open(medium: Medium, device: Option<Device>, config: &SsdConfig, mode: Mode) -> Result<Disk> {
    let begun = Instant::now();
    let Medium { name, engine, engine_why, memory, bytes, is_direct, can_trim, new_id } = medium;
    let named = |error: Error| error.with("disk", &name);
    let depth = config.depth.max(1) as usize;
    let mut opening = Opening {
        name: name.clone(),
        io: Io::new(engine),
        memory: memory.clone(),
        patience: config.open_patience,
        depth,
        recovery: Recovery::default(),
        is_missing: false,
        are_purges_missing: false,
        first_of_last: 0,
        hasher: config.hasher,
    };
    let is_block_device = device.as_ref().is_some_and(Device::is_block_device);
    let (geometry, owner) = match mode {
        Mode::Serve => opening.taken(bytes, config, new_id, is_block_device).map_err(named)?,
        Mode::Look => {
            let found = opening.geometry(bytes).and_then(|found| found.ok_or_else(holds_nothing));
            (found.map_err(named)?, Owner::Unknown)
        }
    };
    let contents = opening.contents(geometry).map_err(named)?;
    if mode == Mode::Serve && opening.recovery.segments_scanned > 0 {
        // Writes of a killed daemon may still be in the drive's cache, but the next mark will call them flushed.
        opening.sync().map_err(named)?;
    }
    let sequences = opening.sequences(contents.last_sequence, contents.purges.last_sequence());
    // As builds that do not sign.
    let is_signed = config.owner != 0;
    if mode == Mode::Serve && is_signed {
        opening.begin_sequences(geometry, owner, config.owner, sequences.next).map_err(named)?;
    }
    let Opening { io, mut recovery, .. } = opening;
    recovery.blocks = contents.index.len() as u64;
    recovery.took_us = begun.elapsed().as_micros() as u64;
    let opened = Opened {
        engine_why,
        is_direct,
        geometry,
        owner,
        memory,
        io,
        index: contents.index,
        space: contents.space,
        purges: contents.purges,
        sequences,
        written_bytes: contents.written_bytes,
        stored_bytes: contents.stored_bytes,
        balance: contents.balance,
        recovery,
        namespaces: contents.namespaces.namespaces(),
        device,
        can_trim,
        name,
    };
    Ok(Disk::new(opened, config))
}

/// The purpose of opening a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// A blank disk is formatted, a damaged superblock rebuilt.
    Serve,
    /// Nothing is written.
    Look,
}

/// Pages of a chain that were read at once.
struct Window {
    pages: Range<u32>,
    /// A page before this one cannot be read, of a payload or of the footer perhaps. So heads before it are read alone.
    alone_before: u32,
}

struct Contents {
    index: Index,
    namespaces: Census,
    space: Space,
    purges: Purges,
    last_sequence: u64,
    written_bytes: u64,
    stored_bytes: u64,
    balance: Option<Balance>,
}

struct Opening {
    name: String,
    io: Io,
    memory: Arc<Memory>,
    /// How long nothing may be answered.
    patience: Duration,
    depth: usize,
    recovery: Recovery,
    /// Records that were on the disk could not be read, or are damaged.
    is_missing: bool,
    /// A page of the list of purges is damaged in both copies, or could not be read.
    are_purges_missing: bool,
    /// The first sequence of the daemon that opened the disk last; 0 if that is not known.
    first_of_last: u64,
    hasher: TierHasher,
}

/// What the segments' headers say.
struct Headers {
    /// Life and number of the segments that were used.
    used: Vec<(u64, u32)>,
    /// Numbers of the segments whose header is lost.
    lost: Vec<u32>,
}

/// The geometry.
impl Opening {
    /// Makes the disk this daemon's. From here on another that has it under another path stops, as soon as it reads the
    /// superblock: what that one has acknowledged by then is read afterwards. The geometry, and the owner.
    fn taken(
        &mut self,
        bytes: u64,
        config: &SsdConfig,
        new_id: u128,
        is_block_device: bool,
    ) -> Result<(Geometry, Owner)> {
        let before = self.page(0)?.filter(|page| Geometry::decode_superblock(page).is_some());
        let earlier = before.as_ref().map(Geometry::owner_in);
        self.first_of_last = before.as_ref().map_or(0, Geometry::first_sequence_in);
        let geometry = match self.geometry(bytes)? {
            Some(geometry) if self.recovery.was_rebuilt => self.rebuild(geometry, config.owner)?,
            Some(geometry) => self.sign(geometry, config.owner)?,
            None => self.make(bytes, config, new_id)?,
        };
        if is_block_device {
            // A lock on a file is known under all its paths. One on a device is known under this path only.
            std::thread::sleep(OTHERS_STOP);
        }
        let owner = match earlier {
            Some(earlier) => Owner::OwnOrEarlier(config.owner, earlier),
            None if self.recovery.was_made || self.recovery.was_rebuilt => Owner::Is(config.owner),
            None => Owner::Unknown,
        };
        if self.page(0)?.is_some_and(|page| owner.is_of_another(&page, &geometry)) {
            return Err(taken_by_another());
        }
        Ok((geometry, owner))
    }

    /// The disk's geometry; none if it is blank.
    fn geometry(&mut self, bytes: u64) -> Result<Option<Geometry>> {
        let first = self.page(0)?;
        let geometry = match first.as_ref().and_then(Geometry::decode_superblock) {
            Some(geometry) => geometry,
            None if first.as_ref().is_some_and(is_of_other_version) => return Err(not_ours(first.as_ref())),
            None => match self.agreed_geometry(bytes)? {
                Some(geometry) => {
                    self.recovery.was_rebuilt = true;
                    geometry
                }
                None if self.is_blank()? => return Ok(None),
                None => return Err(not_ours(first.as_ref())),
            },
        };
        if geometry.disk_bytes() > bytes {
            return Err(Error::invalid("this disk was formatted with a larger capacity than is now configured")
                .with("made_bytes", geometry.disk_bytes())
                .with("bytes", bytes)
                .hint(format!(
                    "set `tier.ssd.capacity_bytes = {}`, or delete the file and lose its blocks",
                    geometry.disk_bytes()
                )));
        }
        if geometry.disk_bytes() + geometry.segment_bytes <= bytes {
            let (made_bytes, id) = (geometry.disk_bytes(), format!("{:032x}", geometry.id));
            tracing::warn!(
                path = self.name,
                id,
                made_bytes,
                bytes,
                hint = "empty the disk to use all of it; its blocks are lost then",
                "a disk keeps the capacity that it was formatted with"
            );
        }
        Ok(Some(geometry))
    }

    /// The geometry that the segments' headers give, for any segment size. None if no header is readable.
    fn agreed_geometry(&mut self, bytes: u64) -> Result<Option<Geometry>> {
        let (mut agreed, mut witnesses) = (None, Vec::new());
        let mut segment_bytes = MIN_SEGMENT_BYTES;
        while segment_bytes <= MAX_SEGMENT_BYTES {
            let count = (bytes.saturating_sub(FIRST_SEGMENT_AT) / segment_bytes).min(u64::from(HEADS)) as u32;
            let at: Vec<u64> = (0..count).map(|i| FIRST_SEGMENT_AT + u64::from(i) * segment_bytes).collect();
            for (index, page) in self.pages(&at)?.iter().enumerate() {
                let header = page.as_ref().and_then(SegmentHeader::decode);
                let header = header.filter(|header| header.index == index as u32);
                let Some(header) = header.filter(|header| header.geometry.segment_bytes == segment_bytes) else {
                    continue;
                };
                if *agreed.get_or_insert(header.geometry) != header.geometry {
                    return Err(disagreeing());
                }
                witnesses.push(header.life);
            }
            segment_bytes *= 2;
        }
        match witnesses[..] {
            // One segment that was never used: the formatting of the disk was interrupted.
            [] | [0] => Ok(None),
            [_] => Err(disagreeing()),
            _ => Ok(agreed.filter(|geometry| geometry.disk_bytes() <= bytes)),
        }
    }

    /// From here on a disk of an earlier version has this version: an earlier build would take what this one writes for
    /// damage. The superblock is one page, so a kill comes before it or after it. A disk that takes no writes is
    /// read all the same, unless its version has to change.
    fn sign(&mut self, geometry: Geometry, owner: u128) -> Result<Geometry> {
        let first = self.page(0)?;
        let is_earlier = first.as_ref().and_then(superblock_version).is_some_and(|version| version < VERSION);
        match self.write_superblock(geometry, owner) {
            // It hangs, if a request is in flight.
            Err(error) if is_earlier || self.io.in_flight() > 0 => Err(error),
            _ => Ok(geometry),
        }
    }

    fn write_superblock(&mut self, geometry: Geometry, owner: u128) -> Result<()> {
        self.write_pages(&[(0, geometry.encode_superblock(owner, self.first_of_last))])?;
        self.sync()
    }

    /// Writes down with which number this daemon begins. If a disk loses the daemon's first batch and keeps one behind
    /// it, the next start finds neither, and must not use the same numbers: the kept batch would count behind its own.
    fn begin_sequences(&mut self, geometry: Geometry, expected: Owner, owner: u128, first: u64) -> Result<()> {
        if self.page(0)?.is_some_and(|page| expected.is_of_another(&page, &geometry)) {
            return Err(taken_by_another());
        }
        self.first_of_last = first;
        match self.write_superblock(geometry, owner) {
            // It hangs.
            Err(error) if self.io.in_flight() > 0 => Err(error),
            // A disk that takes no writes is read all the same.
            _ => Ok(()),
        }
    }

    fn rebuild(&mut self, geometry: Geometry, owner: u128) -> Result<Geometry> {
        tracing::warn!(
            id = format!("{:032x}", geometry.id),
            "a disk's superblock was unreadable; it is rebuilt from the segments"
        );
        self.write_superblock(geometry, owner)?;
        Ok(geometry)
    }

    /// Whether the part before the first segment is empty.
    fn is_blank(&mut self) -> Result<bool> {
        let span = Staging::chunk(0, CHUNK_BYTES);
        self.read(&[Work::Read { at: 0, span, checksum: None }])?.remove(0).map_err(|kind| unreadable(kind, 0))?;
        let mut bytes = vec![0; FIRST_SEGMENT_AT as usize];
        self.memory.read(span, &mut bytes);
        Ok(bytes.iter().all(|byte| *byte == 0))
    }

    /// Writes all headers, then the superblock, so that a disk whose formatting was interrupted is still blank.
    fn make(&mut self, bytes: u64, config: &SsdConfig, id: u128) -> Result<Geometry> {
        let (segment_bytes, segments) = config.segments(bytes)?;
        let geometry = Geometry { id, segment_bytes, segments };
        let header =
            |index| SegmentHeader { geometry, index, life: 0, written_bytes: 0, stored_bytes: 0, balance: None };
        let headers: Vec<_> = (0..segments).map(|index| (geometry.at(index, 0), header(index).encode())).collect();
        self.write_pages(&headers)?;
        self.sync()?;
        self.write_superblock(geometry, config.owner)?;
        self.recovery.was_made = true;
        Ok(geometry)
    }
}

/// The blocks.
impl Opening {
    fn contents(&mut self, geometry: Geometry) -> Result<Contents> {
        let purges = self.purges(&geometry)?;
        let mut contents = Contents {
            index: Index::new(geometry.segments, geometry.pages(), Hasher::new(self.hasher)),
            namespaces: Census::default(),
            space: Space::new(geometry),
            last_sequence: 0,
            purges,
            written_bytes: 0,
            stored_bytes: 0,
            balance: None,
        };
        let Headers { mut used, lost } = self.headers(&mut contents)?;
        contents.space.last_life = self.last_life_in(&geometry, &lost)?;
        used.sort_by_key(|(life, _)| *life);
        let last_pages: Vec<u64> = used.iter().map(|(_, index)| geometry.at(*index, geometry.pages() - 1)).collect();
        let last_pages = self.pages(&last_pages)?;
        let footers: Vec<Option<Footer>> = last_pages
            .iter()
            .zip(&used)
            .map(|(page, (life, index))| Footer::decode(page.as_ref()?, &geometry, *life, *index))
            .collect();
        contents.index.reserve(footers.iter().flatten().map(|footer| footer.count as usize).sum());
        let closed = footers.iter().flatten().copied();
        let mut ahead = ReadAhead::new(
            closed,
            geometry,
            contents.index.hasher().clone(),
            self.memory.clone(),
            self.depth,
            self.patience,
        );
        let mut open = Vec::new();
        for ((life, index), footer) in used.iter().zip(footers) {
            contents.space.last_life = contents.space.last_life.max(*life);
            contents.note(footer.and_then(|footer| footer.balance));
            let records = if footer.is_some() { ahead.next(&mut self.io)? } else { None };
            match footer.zip(records) {
                Some((footer, records)) => self.take_closed(&mut contents, &footer, &records),
                None => {
                    ahead.pause(&mut self.io)?;
                    open.extend(self.scan(&mut contents, *index, *life)?.then_some(*index));
                }
            }
        }
        self.place_open(&mut contents, &open);
        self.account(&mut contents);
        Ok(contents)
    }

    fn purges(&mut self, geometry: &Geometry) -> Result<Purges> {
        let [first, second] = PURGES_AT;
        let copies = [self.copy_of_purges(first)?, self.copy_of_purges(second)?];
        let purges = Purges::read(&copies, geometry);
        self.recovery.purges = purges.len() as u64;
        self.recovery.damaged_purge_pages = purges.found.damaged_pages;
        self.recovery.lost_purge_pages = purges.found.lost_pages;
        self.are_purges_missing = purges.found.lost_pages > 0;
        if self.are_purges_missing {
            let id = format!("{:032x}", geometry.id);
            let hint = "purge again what was purged lately: if the disk's log is damaged too, its blocks may be back";
            tracing::warn!(id, hint, "a disk's list of purges cannot be read");
        }
        Ok(purges)
    }

    /// Page by page, where it cannot be read in one piece.
    fn copy_of_purges(&mut self, at: u64) -> Result<Vec<Option<Page>>> {
        let span = Staging::purges(PURGES_PAGES);
        if self.read(&[Work::Read { at, span, checksum: None }])?[0].is_err() {
            let at: Vec<u64> = (0..PURGES_PAGES).map(|page| at + u64::from(page) * PAGE).collect();
            return self.pages(&at);
        }
        let mut bytes = vec![0; span.len as usize];
        self.memory.read(span, &mut bytes);
        Ok(bytes.as_chunks::<PAGE_BYTES>().0.iter().copied().map(Some).collect())
    }

    /// `last_sequence`: of the log. What the disk stores next has no lower number than any purge in the list. A purge
    /// that finds nothing new in the log is noted with a number amid the gap above the log: above all that was written
    /// before it, unseen records included, and below the number with which a build goes on that looks at the log alone.
    /// So such a build's blocks are not void when the list is read again, however often the disk was opened and purged
    /// meanwhile, and also if the end of the log was lost meanwhile, as long as that end is of one daemon. The next
    /// number is also above those of the daemon before, whatever is left of its records.
    fn sequences(&self, last_sequence: u64, last_purge: u64) -> Sequences {
        let found = [last_sequence, last_purge];
        let after_unseen = if self.first_of_last == 0 { 0 } else { self.first_of_last + SEQUENCE_GAP };
        if self.is_missing {
            // Unseen records may be later than the last purge.
            let last = last_sequence.max(last_purge).max(self.first_of_last);
            return Sequences { end_of_earlier: last + WIDE_SEQUENCE_GAP / 2, next: last + WIDE_SEQUENCE_GAP, found };
        }
        let gap = if self.are_purges_missing { WIDE_SEQUENCE_GAP } else { SEQUENCE_GAP };
        let next = last_purge.max(last_sequence + gap).max(after_unseen);
        Sequences { end_of_earlier: last_sequence + SEQUENCE_GAP / 2, next, found }
    }

    /// Reads the header of each segment. Those that were not used, and those whose header is lost, are free.
    fn headers(&mut self, contents: &mut Contents) -> Result<Headers> {
        let geometry = contents.space.geometry;
        let at: Vec<u64> = (0..geometry.segments).map(|index| geometry.at(index, 0)).collect();
        let (mut used, mut lost) = (Vec::new(), Vec::new());
        for (index, page) in (0..).zip(self.pages(&at)?) {
            let header = page.as_ref().and_then(SegmentHeader::decode);
            match header.filter(|header| header.geometry == geometry && header.index == index) {
                Some(header) => {
                    contents.note(header.balance);
                    contents.written_bytes = contents.written_bytes.max(header.written_bytes);
                    contents.stored_bytes = contents.stored_bytes.max(header.stored_bytes);
                    let segment = contents.space.segment(index);
                    segment.began_at_bytes = header.written_bytes;
                    segment.began_at_stored_bytes = header.stored_bytes;
                    if header.life > 0 {
                        used.push((header.life, index));
                        continue;
                    }
                }
                None => lost.push(index),
            }
            contents.space.free.push_back(index);
        }
        self.recovery.segments_lost = lost.len() as u32;
        self.is_missing |= !lost.is_empty();
        Ok(Headers { used, lost })
    }

    /// The latest life of segments without a header, as far as their first head and their footer tell. No segment may
    /// begin that life again: what is left of it would count.
    fn last_life_in(&mut self, geometry: &Geometry, lost: &[u32]) -> Result<u64> {
        let last_page = geometry.pages() - 1;
        let [heads, footers] = [1, last_page].map(|page| lost.iter().map(|index| geometry.at(*index, page)).collect());
        let (heads, footers): (Vec<u64>, Vec<u64>) = (heads, footers);
        let (heads, footers) = (self.pages(&heads)?, self.pages(&footers)?);
        let lives = lost.iter().zip(heads.iter().zip(&footers)).flat_map(|(index, (head, footer))| {
            let of_head = head.as_ref().and_then(|page| BatchHead::life_of(page, geometry, 1));
            [of_head, footer.as_ref().and_then(|page| Footer::life_of(page, geometry, *index))]
        });
        Ok(lives.flatten().filter(|life| *life < MOST).max().unwrap_or(0))
    }

    fn take_closed(&mut self, contents: &mut Contents, footer: &Footer, records: &[Listed]) {
        self.recovery.segments_with_footer += 1;
        for some in records.chunks(WARM_AT_ONCE) {
            contents.index.warm(some.iter().map(|listed| listed.block));
            some.iter().for_each(|listed| contents.take(listed, footer.index));
        }
        contents.space.last_written_life = contents.space.last_written_life.max(footer.life);
        let segment = contents.space.segment(footer.index);
        (segment.state, segment.next_page, segment.listed) = (SegmentState::Closed, footer.end_page, footer.count);
        (segment.life, segment.life_of_entries) = (footer.life, footer.life);
        contents.space.closed.push_back(footer.index);
    }

    /// Follows the chain of heads; false if there is none.
    fn scan(&mut self, contents: &mut Contents, index: u32, life: u64) -> Result<bool> {
        self.recovery.segments_scanned += 1;
        let geometry = contents.space.geometry;
        let (mut page, mut mark, mut floor, mut records) = (1, 0, 0, Vec::new());
        let mut window = Window { pages: 0..0, alone_before: 0 };
        while page < geometry.pages() {
            let Some(bytes) = self.chain_page(&geometry, index, page, &mut window)? else {
                self.is_missing = true;
                break;
            };
            let Some(head) = BatchHead::decode(&bytes, &geometry, life, page) else {
                self.is_missing |= BatchHead::was_of(&bytes, &geometry, life);
                break;
            };
            if head.first_sequence < floor {
                break;
            }
            floor = head.first_sequence + head.records.len() as u64;
            contents.note(head.balance);
            mark = mark.max(head.mark);
            page = head.next_page;
            records.extend(head.records);
        }
        let Segment { began_at_bytes, began_at_stored_bytes, .. } = *contents.space.segment(index);
        let appended = records.len() as u32;
        *contents.space.segment(index) =
            Segment { next_page: page, appended, began_at_bytes, began_at_stored_bytes, ..Segment::free(life) };
        for record in records {
            contents.last_sequence = contents.last_sequence.max(record.sequence);
            if record.sequence < mark || self.is_whole(&geometry, index, &record)? {
                let hasher = contents.index.hasher();
                let (block, proof) = (hasher.block(&record.key), hasher.proof_of(&record));
                contents.take(&Listed { record, block, proof }, index);
                contents.space.segment(index).whole.push(record);
            } else {
                self.recovery.blocks_not_whole += 1;
                contents.space.segment(index).doubt(record.sequence);
                contents.doubt(&record, index);
            }
        }
        let is_used = page > 1;
        if is_used {
            contents.space.last_written_life = contents.space.last_written_life.max(life);
        } else {
            contents.space.free.push_back(index);
        }
        Ok(is_used)
    }

    /// One page of a chain, from a window of pages that are read at once.
    fn chain_page(&mut self, geometry: &Geometry, index: u32, page: u32, window: &mut Window) -> Result<Option<Page>> {
        let place = |offset: u32, pages: u32| {
            let chunk = Staging::chunk(0, CHUNK_BYTES);
            Span::staging(chunk.offset + u64::from(offset) * PAGE, pages * PAGE as u32)
        };
        while !window.pages.contains(&page) {
            let is_alone = page < window.alone_before;
            let pages = if is_alone { 1 } else { WINDOW_PAGES.min(geometry.pages() - page) };
            let work = Work::Read { at: geometry.at(index, page), span: place(0, pages), checksum: None };
            match self.read(&[work])?[0] {
                Ok(_) => window.pages = page..page + pages,
                Err(_) if is_alone => return Ok(None),
                Err(_) => window.alone_before = page + pages,
            }
        }
        Ok(Some(page_at(&self.memory, place(page - window.pages.start, 1))))
    }

    /// Reads and verifies a block that may not have been flushed.
    fn is_whole(&mut self, geometry: &Geometry, index: u32, record: &Record) -> Result<bool> {
        if record.kind != RecordKind::Block {
            return Ok(true);
        }
        self.recovery.verified_bytes += record.length_bytes;
        is_whole(
            &mut self.io,
            geometry.at(index, record.first_page),
            record.length_bytes,
            record.checksum,
            self.patience,
        )
    }

    /// Continues the log in the latest segment; the others get their footers.
    fn place_open(&mut self, contents: &mut Contents, open: &[u32]) {
        let space = &mut contents.space;
        let Some((&latest, others)) = open.split_last() else { return };
        let newest_closed = space.closed.back().map_or(0, |index| space.segments[*index as usize].life);
        for index in others {
            space.segment(*index).state = SegmentState::Closing;
            space.closing.push_back(*index);
        }
        space.segment(latest).state = SegmentState::Active;
        space.active = Some(latest);
        if space.segments[latest as usize].life < newest_closed {
            space.retire();
        }
    }

    fn account(&mut self, contents: &mut Contents) {
        let Contents { space, written_bytes, stored_bytes, balance, .. } = contents;
        // Headers count what was written before them. A restart writes new ones, which count the active segment
        // already.
        let balance_bytes = balance.map_or(0, |balance| balance.written_bytes);
        *written_bytes = (*written_bytes).max(balance_bytes);
        if let Some(active) = space.active {
            let active = &space.segments[active as usize];
            let in_segment = u64::from(active.next_page) * PAGE;
            *written_bytes = (*written_bytes).max(active.began_at_bytes + in_segment);
            let blocks = active.whole.iter().filter(|record| record.kind == RecordKind::Block);
            let stored: u64 = blocks.map(|record| record.length_bytes).sum();
            *stored_bytes = (*stored_bytes).max(active.began_at_stored_bytes + stored);
        }
    }
}

/// Whether the bytes at `at` have the checksum. The disk must be otherwise idle.
pub(super) fn is_whole(io: &mut Io, at: u64, length_bytes: u64, checksum: u64, patience: Duration) -> Result<bool> {
    let mut sums = Vec::new();
    let parts: Vec<(u64, u32)> = pieces(length_bytes).collect();
    for some in parts.chunks(CHUNKS as usize - 1) {
        // The first chunk is the window of the chain.
        let work = |(chunk, (offset, len)): (u32, &(u64, u32))| {
            let span = Staging::chunk(chunk, len.next_multiple_of(PAGE as u32));
            Work::Read { at: at + offset, span, checksum: Some(Span { len: *len, ..span }) }
        };
        let work: Vec<Work> = (1..).zip(some).map(work).collect();
        for sum in io.run_all(&work, CHUNKS as usize, patience)? {
            let Ok(sum) = sum else { return Ok(false) };
            sums.push(sum);
        }
    }
    Ok(joined(length_bytes, sums.into_iter()) == checksum)
}

impl Contents {
    fn note(&mut self, found: Option<Balance>) {
        let later = found.filter(|found| self.balance.is_none_or(|known| known.written_bytes <= found.written_bytes));
        self.balance = later.or(self.balance);
    }

    /// A block that is not whole, or could not be read, is not served. A later start may find it whole: so it has an
    /// entry, and a purge removes it. Where the key has an entry, a removal of that one is of both.
    fn doubt(&mut self, record: &Record, segment: u32) {
        if self.index.record(&record.key).is_none() && !self.purges.cover(record) {
            self.index.insert(record, segment);
            self.space.enter(segment);
            self.index.withdraw(self.index.hasher().block(&record.key));
            self.space.segment(segment).doubted.push(*record);
        }
    }

    /// Records come in the order in which they were written.
    fn take(&mut self, Listed { record, block, proof }: &Listed, segment: u32) {
        self.last_sequence = self.last_sequence.max(record.sequence);
        match record.kind {
            RecordKind::Block => {
                let known = self.index.remove(*block);
                self.index.add(record, segment, *block, *proof);
                self.space.enter(segment);
                self.discount(known, record);
                // It was purged, and no removal was found so far. It keeps an entry, so that the next purge removes it:
                // the list of purges forgets.
                if self.purges.cover(record) {
                    self.index.withdraw(*block);
                } else {
                    self.space.count(segment, record.length_bytes);
                    self.namespaces.add(record.key.namespace);
                }
            }
            RecordKind::Removed => {
                let known = self.index.remove(*block);
                self.discount(known, record);
            }
            RecordKind::Touched => _ = self.index.touch(*block),
        }
    }

    /// This entry, of the record's block, is not in the index any more.
    fn discount(&mut self, known: Option<Entry>, record: &Record) {
        known.into_iter().for_each(|entry| self.space.leave(entry.spot.segment));
        if let Some(Entry { spot, length_bytes, .. }) = known.filter(Entry::is_served) {
            self.space.discount(spot.segment, length_bytes);
            self.namespaces.take_off(record.key.namespace);
        }
    }
}

/// How many blocks of each namespace are served.
#[derive(Default)]
struct Census {
    blocks: BTreeMap<NamespaceId, u64>,
    /// Of the namespace of the last call, what is not in `blocks` yet: the next one is likely to be of the same.
    latest: Option<(NamespaceId, i64)>,
}

impl Census {
    fn add(&mut self, namespace: NamespaceId) {
        self.count(namespace, 1);
    }

    fn take_off(&mut self, namespace: NamespaceId) {
        self.count(namespace, -1);
    }

    fn count(&mut self, namespace: NamespaceId, change: i64) {
        match &mut self.latest {
            Some((latest, sum)) if *latest == namespace => *sum += change,
            _ => {
                self.settle();
                self.latest = Some((namespace, change));
            }
        }
    }

    fn settle(&mut self) {
        if let Some((namespace, sum)) = self.latest.take() {
            let blocks = self.blocks.entry(namespace).or_default();
            // Two namespaces may have blocks of one fingerprint.
            *blocks = blocks.saturating_add_signed(sum);
        }
    }

    fn namespaces(mut self) -> Vec<NamespaceId> {
        self.settle();
        self.blocks.into_iter().filter(|(_, blocks)| *blocks > 0).map(|(namespace, _)| namespace).collect()
    }
}

/// Plain reading and writing.
impl Opening {
    fn read(&mut self, work: &[Work]) -> Result<Vec<Result<u64, ErrorKind>>> {
        self.io.run_all(work, self.depth, self.patience)
    }

    fn page(&mut self, at: u64) -> Result<Option<Page>> {
        Ok(self.pages(&[at])?.remove(0))
    }

    /// The pages at these offsets; none for a page that cannot be read.
    fn pages(&mut self, at: &[u64]) -> Result<Vec<Option<Page>>> {
        let mut pages = Vec::with_capacity(at.len());
        for some in at.chunks(HEADS as usize) {
            let read = |(head, at): (u32, &u64)| Work::Read { at: *at, span: Staging::head(head), checksum: None };
            let work: Vec<Work> = (0..).zip(some).map(read).collect();
            for (head, result) in (0..).zip(self.read(&work)?) {
                pages.push(result.ok().map(|_| page_at(&self.memory, Staging::head(head))));
            }
        }
        Ok(pages)
    }

    fn write_pages(&mut self, pages: &[(u64, Page)]) -> Result<()> {
        for some in pages.chunks(HEADS as usize) {
            let mut work = Vec::new();
            for (head, (at, page)) in (0..).zip(some) {
                let span = Staging::head(head);
                self.memory.write(span, page);
                work.push(Work::Write { at: *at, spans: span.into() });
            }
            self.done(&work)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.done(&[Work::Sync])
    }

    fn done(&mut self, work: &[Work]) -> Result<()> {
        let failed = self.read(work)?.into_iter().find_map(Result::err);
        failed.map_or(Ok(()), |kind| Err(Error::new(kind, "cannot write to a disk")))
    }
}

fn unreadable(kind: ErrorKind, at: u64) -> Error {
    Error::new(kind, "cannot read a disk").with("offset", at)
}

fn holds_nothing() -> Error {
    Error::invalid("this disk is empty").hint("name a file or device that a daemon has used")
}

fn disagreeing() -> Error {
    Error::new(ErrorKind::Corrupt, "a disk's superblock is damaged, and its segments disagree on its geometry")
        .hint("delete the file (zero a device with `blkdiscard -z`) to start empty")
}
