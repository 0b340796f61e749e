//! The segments of one disk, and the life and state of each.
//!
//! Free → erasing → ready → active → closing → closed → (reclaimed) → free. Invariants: one segment is active. Lives
//! begin in the order in which segments become active, so a segment's life orders it in the log. A segment is written
//! to only after the header of its new life was flushed, and while nobody reads its old bytes.

use std::collections::VecDeque;

use forebay_core::Fingerprint;

use super::layout::{Footer, Geometry, RECORDS_PER_SEGMENT, Record};

/// Where a segment stands in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentState {
    /// Nothing in it is served; its header may be of an earlier life.
    Free,
    /// The header of its new life is being written and flushed.
    Erasing,
    /// Empty, in a new life.
    Ready,
    /// The head of the log.
    Active,
    /// Full; its footer is not written yet.
    Closing,
    /// Its footer is written, or was given up: the next start then scans it.
    Closed,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Segment {
    pub state: SegmentState,
    pub life: u64,
    /// Bytes written to the disk before this life began.
    pub began_at_bytes: u64,
    /// The same of the bytes of blocks.
    pub began_at_stored_bytes: u64,
    /// Start of the next batch.
    pub next_page: u32,
    /// Appended records, which need space in the footer.
    pub appended: u32,
    /// Whole records for the footer; empty once it is written, unless that has failed.
    pub whole: Vec<Record>,
    /// Records in the footer that was written.
    pub listed: u32,
    /// Records of blocks that are in no footer, and that a restart might find all the same.
    pub doubted: Vec<Record>,
    /// Blocks that were evicted from an earlier life, until nothing of that can come back.
    pub evicted: Vec<Fingerprint>,
    /// The life of which the index has entries.
    pub life_of_entries: u64,
    /// Entries of the index for blocks in it, served or not.
    pub entries: u32,
    /// Its list cannot be read: none of its blocks is served.
    pub is_lost: bool,
    /// The first record that may be incomplete: the mark does not pass it.
    pub first_bad: Option<u64>,
    /// The first batch that recovery could not reach, because an earlier head could not be written.
    pub broken_from: Option<u64>,
    /// Loads that read from it.
    pub readers: u32,
    pub live_blocks: u32,
    pub live_bytes: u64,
}

impl Segment {
    pub(super) fn free(life: u64) -> Segment {
        Segment {
            state: SegmentState::Free,
            life,
            began_at_bytes: 0,
            began_at_stored_bytes: 0,
            next_page: 1,
            appended: 0,
            whole: Vec::new(),
            listed: 0,
            doubted: Vec::new(),
            evicted: Vec::new(),
            life_of_entries: life,
            entries: 0,
            is_lost: false,
            first_bad: None,
            broken_from: None,
            readers: 0,
            live_blocks: 0,
            live_bytes: 0,
        }
    }

    /// Records that the record may be incomplete.
    pub fn doubt(&mut self, sequence: u64) {
        self.first_bad = Some(self.first_bad.map_or(sequence, |first| first.min(sequence)));
    }

    /// Whether a batch of `records` with `payload_pages` fits before the footer's space.
    fn has_room(&self, geometry: &Geometry, records: u32, payload_pages: u32) -> bool {
        let records = self.appended + records;
        let needed = u64::from(self.next_page) + 1 + u64::from(payload_pages);
        records <= RECORDS_PER_SEGMENT
            && needed + u64::from(Footer::record_pages(records)) < u64::from(geometry.pages())
    }
}

/// See the module documentation.
pub(super) struct Space {
    pub geometry: Geometry,
    pub segments: Vec<Segment>,
    /// Of all segments.
    pub live_bytes: u64,
    /// In the order of use.
    pub ready: VecDeque<u32>,
    pub free: VecDeque<u32>,
    /// Oldest first.
    pub closed: VecDeque<u32>,
    /// Until each is closed, also while its footer is written.
    pub closing: VecDeque<u32>,
    /// Memory for the records of the next active segment. A list that grows moves, and fresh memory for so many records
    /// takes 2 ms where pages are slow to come.
    pub spare: Vec<Record>,
    pub active: Option<u32>,
    pub last_life: u64,
    /// The latest life of a segment that was written to.
    pub last_written_life: u64,
}

/// Where a record stands in the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Position {
    life: u64,
    page: u32,
}

impl Space {
    pub fn new(geometry: Geometry) -> Space {
        Space {
            geometry,
            segments: (0..geometry.segments).map(|_| Segment::free(0)).collect(),
            live_bytes: 0,
            ready: VecDeque::new(),
            free: VecDeque::new(),
            closed: VecDeque::new(),
            closing: VecDeque::new(),
            spare: Vec::new(),
            active: None,
            last_life: 0,
            last_written_life: 0,
        }
    }

    pub fn segment(&mut self, index: u32) -> &mut Segment {
        &mut self.segments[index as usize]
    }

    /// The index has one more entry of a block in this segment, or one less.
    pub fn enter(&mut self, segment: u32) {
        self.segment(segment).entries += 1;
    }

    pub fn leave(&mut self, segment: u32) {
        self.segment(segment).entries -= 1;
    }

    /// A block's latest record lies in this segment.
    pub fn count(&mut self, segment: u32, length_bytes: u64) {
        let account = self.segment(segment);
        account.live_blocks += 1;
        account.live_bytes += length_bytes;
        self.live_bytes += length_bytes;
    }

    /// It does not any more.
    pub fn discount(&mut self, segment: u32, length_bytes: u64) {
        let account = self.segment(segment);
        account.live_blocks -= 1;
        account.live_bytes -= length_bytes;
        self.live_bytes -= length_bytes;
    }

    /// Whether the active segment has space for a batch of that many records.
    pub fn active_has_room(&self, records: u32, payload_pages: u32) -> bool {
        let room = |active| self.segments[active as usize].has_room(&self.geometry, records, payload_pages);
        self.active.is_some_and(room)
    }

    /// Moves the log to the next ready segment, if `reserve` more stay ready and nobody reads its old bytes.
    pub fn roll(&mut self, reserve: usize) -> bool {
        let can_roll = self.ready.len() > reserve && self.segments[self.ready[0] as usize].readers == 0;
        if can_roll {
            self.retire();
            let next = self.ready.pop_front().expect("more than the reserve are ready");
            let mut whole = std::mem::take(&mut self.spare);
            whole.reserve_exact(RECORDS_PER_SEGMENT.min(self.geometry.pages()) as usize);
            let segment = self.segment(next);
            (segment.state, segment.whole) = (SegmentState::Active, whole);
            let life = segment.life;
            (self.active, self.last_written_life) = (Some(next), life);
        }
        can_roll
    }

    /// Ends the use of the active segment, full or not.
    pub fn retire(&mut self) {
        if let Some(active) = self.active.take() {
            self.segment(active).state = SegmentState::Closing;
            self.closing.push_back(active);
        }
    }

    /// Closes the segment, with or without a footer.
    pub fn close(&mut self, index: u32) {
        let life = self.segments[index as usize].life;
        self.closing.retain(|closing| *closing != index);
        self.segment(index).state = SegmentState::Closed;
        // After a crash an older segment may get its footer later than a younger one.
        let place = self.closed.partition_point(|other| self.segments[*other as usize].life < life);
        self.closed.insert(place, index);
    }

    /// Takes the oldest segment, if it is closed.
    pub fn take_oldest(&mut self) -> Option<u32> {
        let oldest = *self.closed.front()?;
        let life = self.segments[oldest as usize].life;
        let is_older = |closing: &u32| self.segments[*closing as usize].life < life;
        if self.closing.iter().any(is_older) { None } else { self.closed.pop_front() }
    }

    /// Takes space for a batch in the active segment; returns the head's page.
    pub fn append(&mut self, records: u32, payload_pages: u32) -> (u32, u32) {
        assert!(self.active_has_room(records, payload_pages), "the log has no room for {payload_pages} pages");
        let active = self.active.expect("it has room");
        let segment = self.segment(active);
        let page = segment.next_page;
        segment.next_page += 1 + payload_pages;
        segment.appended += records;
        (active, page)
    }

    /// Begins a new life of the first free segment.
    pub fn begin_life(&mut self) -> Option<u32> {
        let index = self.free.pop_front()?;
        self.last_life += 1;
        let life = self.last_life;
        let segment = self.segment(index);
        let Segment { readers, life_of_entries, entries, is_lost, .. } = *segment;
        let evicted = std::mem::take(&mut segment.evicted);
        let state = SegmentState::Erasing;
        *segment = Segment { state, readers, evicted, life_of_entries, entries, is_lost, ..Segment::free(life) };
        Some(index)
    }

    /// Of a page in a segment.
    pub fn position(&self, segment: u32, page: u32) -> Position {
        Position { life: self.segments[segment as usize].life_of_entries, page }
    }

    /// All records that were written, or are being written, lie before it.
    pub fn end(&self) -> Position {
        match self.active {
            Some(active) => self.position(active, self.segments[active as usize].next_page),
            None => Position { life: self.last_written_life + 1, page: 0 },
        }
    }

    /// Of the segments with a list, the one with the earliest life that is not before `life`. `victim` is being
    /// emptied.
    pub fn oldest_from(&self, life: u64, victim: Option<u32>) -> Option<u32> {
        let life_of = |index: &u32| self.segments[*index as usize].life;
        let closed = self.closed.get(self.closed.partition_point(|index| life_of(index) < life));
        let others = self.closing.iter().chain(&self.active).chain(&victim).filter(|index| life_of(index) >= life);
        closed.into_iter().chain(others).min_by_key(|index| life_of(index)).copied()
    }
}
