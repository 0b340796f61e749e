//! Reclaiming space: the oldest segment is reused for the log.
//!
//! Its list says which blocks it has. Its hot blocks are carried over to the log's head, the others are evicted, and
//! the segment begins a new life. Invariants: a carried block is flushed at its new position before the old one is
//! void. The index has an evicted block until the header that makes its record void was flushed: until then a restart
//! finds it. Segments begin lives in the order of age, one per flush, so that a note about a removed key outlives all
//! records of that key. Each reclaimed segment frees more space than the carried blocks took.

use std::collections::VecDeque;

use forebay_core::ErrorKind;

use super::disk::Disk;
use super::index::Spot;
use super::io::{Flight, RETRY_INTERVAL};
use super::layout::{PAGE, RECORDS_PER_BATCH, Record, SegmentHeader};
use super::lists::{List, Reader};
use super::log::{self, Erase, Item};
use super::space::SegmentState;
use super::staging::{Staging, joined, pieces};
use crate::uring::{Span, Work};

/// Segments that are kept ready: two for all writes, and one for carried blocks only.
pub(super) const READY: usize = 3;
/// Trimmed at a time, so that a device that is slow at it delays other transfers for a short time only.
const TRIM_BYTES: u64 = 16 << 20;
/// Records looked at for blocks to evict, and blocks forgotten, in one turn, so that a turn stays short.
const KEYS_PER_TURN: usize = 48;
/// Records of the list that are looked at for hot blocks in one turn.
const RECORDS_PER_TURN: u32 = 128;

/// See the module documentation.
pub(super) struct Reclaim {
    victim: u32,
    stage: Stage,
    /// Blocks to carry over, oldest first, and the bytes that they take.
    hot: VecDeque<Record>,
    hot_bytes: u64,
    carry: Option<Carry>,
    batches: Vec<u64>,
}

/// How far the list was gone through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// For hot blocks; the next record.
    Choosing(u32),
    Carrying,
    /// For the others; the next record.
    Evicting(u32),
}

impl Reclaim {
    pub fn victim(&self) -> u32 {
        self.victim
    }
}

/// A batch on its way to the log's head.
struct Carry {
    batch: u64,
    sources: Vec<Record>,
    pieces: Vec<Piece>,
    next: usize,
    outstanding: usize,
}

/// A part of a block that goes through one chunk of staging.
struct Piece {
    item: usize,
    offset: u64,
    len: u32,
    chunk: u32,
    checksum: u64,
}

impl Disk {
    pub(super) fn make_room(&mut self) {
        self.begin_reclaim();
        self.choose_hot();
        self.carry_on();
        self.evict_rest();
        self.begin_life();
        self.forget_void();
    }

    fn begin_reclaim(&mut self) {
        let coming = self.space.ready.len() + self.space.free.len() + usize::from(self.log.erase.is_some());
        if self.reclaim.is_some() || coming >= READY {
            return;
        }
        if let Some(victim) = self.space.take_oldest() {
            let (stage, hot) = (Stage::Choosing(0), VecDeque::new());
            self.reclaim = Some(Reclaim { victim, stage, hot, hot_bytes: 0, carry: None, batches: Vec::new() });
        }
    }

    /// Finds the latest hot blocks of the victim, up to three eighths of its size: two such sets fit into one segment,
    /// so reclaiming always frees space.
    fn choose_hot(&mut self) {
        let Some(Reclaim { victim, stage: Stage::Choosing(from), .. }) = self.reclaim else { return };
        let count = match self.list(Reader::Reclaim, victim) {
            List::Waits => return,
            List::Here(count) => count,
            List::Lost => 0,
        };
        let end = count.min(from + RECORDS_PER_TURN);
        let records = self.listed(Reader::Reclaim, victim, from.min(end)..end).into_iter();
        let blocks = self.blocks_at(records, victim).into_iter();
        let hot: Vec<Record> =
            blocks.filter(|(_, entry)| entry.is_served() && entry.is_hot).map(|(record, _)| record).collect();
        let bytes = |record: &Record| u64::from(record.payload_pages()) * PAGE;
        let room = self.geometry.segment_bytes / 8 * 3;
        let reclaim = self.reclaim.as_mut().expect("it was begun");
        for record in hot {
            reclaim.hot_bytes += bytes(&record);
            reclaim.hot.push_back(record);
            while reclaim.hot_bytes > room
                && let Some(earliest) = reclaim.hot.pop_front()
            {
                reclaim.hot_bytes -= bytes(&earliest);
            }
        }
        reclaim.stage = if end < count { Stage::Choosing(end) } else { Stage::Carrying };
        self.has_more |= end < count;
    }

    fn carry_on(&mut self) {
        let Some(mut reclaim) = self.reclaim.take() else { return };
        let is_chosen = reclaim.stage == Stage::Carrying;
        if is_chosen && reclaim.carry.is_none() && self.log.may_add() && !self.staging.free_heads.is_empty() {
            reclaim.carry = self.next_carry(&mut reclaim);
        }
        self.reclaim = Some(reclaim);
        self.start_pieces();
        self.finish_carry();
    }

    /// Reserves space for the next hot blocks. Without space they are evicted.
    fn next_carry(&mut self, reclaim: &mut Reclaim) -> Option<Carry> {
        let (mut sources, mut pages) = (Vec::new(), 0);
        while let Some(record) = reclaim.hot.front() {
            // Beside an unfinished store of the same key, a copy would count as the later one.
            let is_current = !self.log.is_busy(&record.key)
                && self.served(&record.key).is_some_and(|entry| {
                    let spot = Spot { segment: reclaim.victim, first_page: record.first_page };
                    entry.spot == spot && entry.proof == self.index.hasher().proof_of(record)
                });
            let needed = pages + record.payload_pages();
            if is_current && !self.space.active_has_room(sources.len() as u32 + 1, needed) {
                if !sources.is_empty() || self.space.roll(0) {
                    if sources.is_empty() {
                        continue;
                    }
                    break;
                }
                reclaim.hot.clear();
                break;
            }
            if is_current {
                sources.push(*record);
                pages = needed;
            }
            reclaim.hot.pop_front();
            if sources.len() == RECORDS_PER_BATCH {
                break;
            }
        }
        if sources.is_empty() {
            return None;
        }
        let copy = |source| Item::copy(source, reclaim.victim);
        let batch = self.reserve_batch(sources.iter().map(copy).collect(), log::Stage::Filling);
        reclaim.batches.push(batch);
        let piece = |item: usize| move |(offset, len)| Piece { item, offset, len, chunk: 0, checksum: 0 };
        let parts = sources.iter().enumerate().flat_map(|(item, source)| pieces(source.length_bytes).map(piece(item)));
        Some(Carry { batch, pieces: parts.collect(), sources, next: 0, outstanding: 0 })
    }

    /// Reads pieces of the carried blocks into free chunks, in parallel with loads and stores.
    fn start_pieces(&mut self) {
        let victim = self.reclaim.as_ref().map(|reclaim| reclaim.victim);
        let Some(carry) = self.reclaim.as_mut().and_then(|reclaim| reclaim.carry.as_mut()) else { return };
        while carry.next < carry.pieces.len()
            && let Some(chunk) = self.staging.free_chunks.pop()
        {
            let piece = &mut carry.pieces[carry.next];
            piece.chunk = chunk;
            let source = &carry.sources[piece.item];
            let at = self.geometry.at(victim.expect("it carries"), source.first_page) + piece.offset;
            let span = Staging::chunk(chunk, padded(piece.len));
            let checksum = Some(Span { len: piece.len, ..span });
            self.io.start(Flight::CarryRead { piece: carry.next }, Work::Read { at, span, checksum });
            carry.next += 1;
            carry.outstanding += 1;
        }
    }

    pub(super) fn carry_read(&mut self, piece: usize, result: Result<u64, ErrorKind>) {
        let Ok(checksum) = result else { return self.piece_ended(piece, result) };
        let carry = self.carry();
        carry.pieces[piece].checksum = checksum;
        let Piece { item, offset, len, chunk, .. } = carry.pieces[piece];
        let id = carry.batch;
        let batch = &self.log.batches[&id];
        let at = self.geometry.at(batch.segment, batch.items[item].record.first_page) + offset;
        let span = Staging::chunk(chunk, padded(len));
        self.write(Flight::CarryWrite { piece }, Work::Write { at, spans: span.into() });
    }

    pub(super) fn carry_written(&mut self, piece: usize, result: Result<u64, ErrorKind>) {
        self.log.count(result, self.now);
        self.piece_ended(piece, result);
    }

    fn piece_ended(&mut self, piece: usize, result: Result<u64, ErrorKind>) {
        let carry = self.carry();
        carry.outstanding -= 1;
        let Piece { item, chunk, .. } = carry.pieces[piece];
        let id = carry.batch;
        self.staging.free_chunks.push(chunk);
        if let Err(kind) = result {
            self.log.batches.get_mut(&id).expect("its head is not written").items[item].error = Some(kind);
        }
    }

    /// Writes the head when all pieces are in place; it excludes blocks that turned out to be damaged.
    fn finish_carry(&mut self) {
        let is_done = |carry: &Carry| carry.outstanding == 0 && carry.next == carry.pieces.len();
        let Some(reclaim) = &mut self.reclaim else { return };
        let Some(carry) = reclaim.carry.take_if(|carry| is_done(carry)) else { return };
        let batch = self.log.batches.get_mut(&carry.batch).expect("its head is not written");
        let mut damaged = Vec::new();
        for (i, source) in carry.sources.iter().enumerate() {
            let sums = carry.pieces.iter().filter(|piece| piece.item == i).map(|piece| piece.checksum);
            let item = &mut batch.items[i];
            if item.error.is_none() && joined(source.length_bytes, sums) != source.checksum {
                item.error = Some(ErrorKind::Corrupt);
                damaged.extend(item.moved_from.map(|spot| (source.key, spot)));
            }
        }
        self.counters.corrupt_blocks += damaged.len() as u64;
        for (key, spot) in &damaged {
            // It may have been stored again meanwhile.
            if let Some(entry) = self.index.get(key).filter(|entry| entry.spot == *spot) {
                self.withdraw(entry.block);
            }
        }
        self.write_head(carry.batch);
    }

    /// Once the carried blocks are flushed, evicts the others, a few per turn.
    fn evict_rest(&mut self) {
        let Some(Reclaim { victim, stage, hot, carry, batches, .. }) = &self.reclaim else { return };
        let (victim, from) = match stage {
            Stage::Choosing(_) => return,
            Stage::Carrying => (*victim, 0),
            Stage::Evicting(from) => (*victim, *from),
        };
        let is_settled = batches.iter().all(|id| !self.log.batches.contains_key(id));
        if !hot.is_empty() || carry.is_some() || !is_settled {
            return;
        }
        let count = match self.list(Reader::Reclaim, victim) {
            List::Waits => return,
            List::Here(count) => count,
            List::Lost if self.lists.is_giving_up => return,
            List::Lost => 0,
        };
        let end = count.min(from + KEYS_PER_TURN as u32);
        let records = self.listed(Reader::Reclaim, victim, from.min(end)..end).into_iter();
        for (record, entry) in self.blocks_at(records, victim) {
            self.space.segment(victim).evicted.push(entry.block);
            if entry.is_served() {
                self.withdraw(entry.block);
                self.tell_evicted(record.key);
                self.counters.evicted_blocks += 1;
            }
        }
        if end < count {
            self.reclaim.as_mut().expect("looked at above").stage = Stage::Evicting(end);
            self.has_more = true;
            return;
        }
        let segment = self.space.segment(victim);
        (segment.state, segment.whole, segment.doubted) = (SegmentState::Free, Vec::new(), Vec::new());
        self.space.free.push_back(victim);
        self.counters.reclaimed_segments += 1;
        self.reclaim = None;
    }

    /// Writes the header of the next free segment's new life.
    fn begin_life(&mut self) {
        let is_wanted = self.space.ready.len() < READY && self.now >= self.log.paused_until;
        if self.log.erase.is_some() || !is_wanted {
            return;
        }
        let Some(index) = self.space.begin_life() else { return };
        let (written_bytes, stored_bytes) = (self.lifetime_written_bytes(), self.lifetime_stored_bytes());
        let (geometry, balance) = (self.geometry, Some(self.balance()));
        let segment = self.space.segment(index);
        (segment.began_at_bytes, segment.began_at_stored_bytes) = (written_bytes, stored_bytes);
        let header = SegmentHeader { geometry, index, life: segment.life, written_bytes, stored_bytes, balance };
        self.memory.write(Staging::header(), &header.encode());
        self.log.erase = Some(Erase::Writing(index));
        let at = self.geometry.at(index, 0);
        self.write(Flight::Erase { segment: index }, Work::Write { at, spans: Staging::header().into() });
    }

    pub(super) fn erase_ended(&mut self, segment: u32, result: Result<u64, ErrorKind>) {
        self.log.count(result, self.now);
        match result {
            Ok(_) => self.log.erase = Some(Erase::Written(segment)),
            Err(_) => self.erase_settled(segment, result),
        }
    }

    /// The segment's old records are void once the header of its life was flushed. If that fails, it is tried again
    /// later.
    pub(super) fn erase_settled(&mut self, segment: u32, result: Result<u64, ErrorKind>) {
        match result {
            Ok(_) => self.log.erase = Some(Erase::Flushed(segment)),
            Err(_) => {
                self.log.erase = None;
                self.space.segment(segment).state = SegmentState::Free;
                self.space.free.push_front(segment);
                self.log.paused_until = self.log.paused_until.max(self.now + RETRY_INTERVAL);
            }
        }
    }

    /// Forgets the blocks whose records the new life has made void, a few per turn. Then the segment is ready.
    fn forget_void(&mut self) {
        let Some(Erase::Flushed(segment)) = self.log.erase else { return };
        for _ in 0..KEYS_PER_TURN {
            let Some(block) = self.space.segment(segment).evicted.pop() else { break };
            // The block may have been stored again.
            if self.index.entry_of(block).is_some_and(|entry| entry.spot.segment == segment) {
                self.forget(block);
            }
        }
        let evicted = &mut self.space.segment(segment).evicted;
        if !evicted.is_empty() {
            self.has_more = true;
            return;
        }
        *evicted = Vec::new();
        if self.space.segments[segment as usize].entries > 0 {
            return self.forget_lost(segment);
        }
        if self.may_trim(segment) {
            self.trim(segment, PAGE);
        } else {
            self.make_ready(segment);
        }
    }

    fn make_ready(&mut self, segment: u32) {
        self.log.erase = None;
        let of = self.space.segment(segment);
        debug_assert_eq!(of.entries, 0, "nothing of its earlier life is known");
        (of.state, of.life_of_entries) = (SegmentState::Ready, of.life);
        self.lists.lost -= u32::from(std::mem::take(&mut of.is_lost));
        self.lists.forget_place = 0;
        self.space.ready.push_back(segment);
    }

    /// Whether the device may be told of the segment's old bytes. Nothing waits for that: not the log, which has
    /// another segment, and not a load that still reads there.
    fn may_trim(&self, segment: u32) -> bool {
        self.trims && !self.space.ready.is_empty() && self.space.segments[segment as usize].readers == 0
    }

    /// Begins the next part. The header of the new life stays.
    fn trim(&mut self, segment: u32, from: u64) {
        let bytes = TRIM_BYTES.min(self.geometry.segment_bytes - from);
        self.log.erase = Some(Erase::Trimming { segment, from, bytes });
        self.io.start(Flight::Trim, Work::Trim { at: self.geometry.at(segment, 0) + from, bytes });
    }

    pub(super) fn trim_ended(&mut self, result: Result<u64, ErrorKind>) {
        let Some(Erase::Trimming { segment, from, bytes }) = self.log.erase else { return };
        let next = from + bytes;
        match result {
            Ok(_) => self.counters.trimmed_bytes += bytes,
            Err(kind) => self.stop_trimming(kind),
        }
        if next < self.geometry.segment_bytes && self.may_trim(segment) {
            self.trim(segment, next);
        } else {
            self.make_ready(segment);
        }
    }

    fn carry(&mut self) -> &mut Carry {
        self.reclaim.as_mut().and_then(|reclaim| reclaim.carry.as_mut()).expect("its piece was in flight")
    }
}

fn padded(len: u32) -> u32 {
    len.next_multiple_of(PAGE as u32)
}
