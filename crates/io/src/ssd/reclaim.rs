//! Reclaiming space: the oldest segment is reused for the log.
//!
//! Its hot blocks are carried over to the log's head, the others are evicted, and the segment begins a new life.
//! Invariants: a carried block is flushed at its new position before the old one is void. The index has an evicted
//! block until the header that makes its record void was flushed: until then a restart finds it. Segments begin lives
//! in the order of age, one per flush, so that a note about a removed key outlives all records of that key. Each
//! reclaimed segment frees more space than the carried blocks took.

use std::collections::VecDeque;

use forebay_core::ErrorKind;

use super::disk::Disk;
use super::index::Entry;
use super::io::{Flight, RETRY_INTERVAL};
use super::layout::{PAGE, RECORDS_PER_BATCH, Record, SegmentHeader};
use super::log::{Erase, Item, Stage};
use super::space::SegmentState;
use super::staging::{Staging, joined, pieces};
use crate::uring::{Span, Work};

/// Segments that are kept ready: two for all writes, and one for carried blocks only.
pub(super) const READY: usize = 3;
/// Trimmed at a time, so that a device that is slow at it delays other transfers for a short time only.
const TRIM_BYTES: u64 = 16 << 20;
/// Blocks evicted and keys forgotten in one turn, so that a turn stays short.
const KEYS_PER_TURN: usize = 48;

/// See the module documentation.
pub(super) struct Reclaim {
    victim: u32,
    /// Blocks to carry over, oldest first.
    hot: VecDeque<Record>,
    carry: Option<Carry>,
    batches: Vec<u64>,
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
            let hot = self.hot_blocks(victim);
            self.reclaim = Some(Reclaim { victim, hot, carry: None, batches: Vec::new() });
        }
    }

    /// The latest hot blocks of a segment, up to three eighths of its size: two such sets fit into one segment, so
    /// reclaiming always frees space.
    fn hot_blocks(&self, victim: u32) -> VecDeque<Record> {
        let mut room = self.geometry.segment_bytes / 8 * 3;
        let mut hot = VecDeque::new();
        for entry in self.index.of_segment(victim).filter(|entry| entry.is_hot) {
            let bytes = u64::from(entry.payload_pages()) * PAGE;
            if bytes > room {
                break;
            }
            room -= bytes;
            hot.push_front(entry.record());
        }
        hot
    }

    fn carry_on(&mut self) {
        let Some(mut reclaim) = self.reclaim.take() else { return };
        if reclaim.carry.is_none() && self.log.may_add() && !self.staging.free_heads.is_empty() {
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
                && self.served(&record.key).is_some_and(|entry| entry.sequence == record.sequence);
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
        let batch = self.reserve_batch(sources.iter().map(Item::copy).collect(), Stage::Filling);
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
                damaged.push(source.key);
            }
        }
        self.counters.corrupt_blocks += damaged.len() as u64;
        for key in &damaged {
            self.withdraw(key);
        }
        self.write_head(carry.batch);
    }

    /// Once the carried blocks are flushed, evicts the others, a few per turn.
    fn evict_rest(&mut self) {
        let Some(Reclaim { victim, hot, carry, batches }) = &self.reclaim else { return };
        let victim = *victim;
        let is_settled = batches.iter().all(|id| !self.log.batches.contains_key(id));
        if !hot.is_empty() || carry.is_some() || !is_settled {
            return;
        }
        let keys: Vec<_> = self.index.of_segment(victim).take(KEYS_PER_TURN).map(Entry::key).collect();
        for key in &keys {
            self.withdraw(key);
            self.tell_evicted(*key);
        }
        self.counters.evicted_blocks += keys.len() as u64;
        if keys.len() < KEYS_PER_TURN {
            self.space.segment(victim).state = SegmentState::Free;
            self.space.free.push_back(victim);
            self.counters.reclaimed_segments += 1;
            self.reclaim = None;
        } else {
            self.has_more = true;
        }
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

    /// Forgets the keys whose records the new life has made void, a few per turn. Then the segment is ready.
    fn forget_void(&mut self) {
        let Some(Erase::Flushed(segment)) = self.log.erase else { return };
        let keys = self.index.withdrawn_of_segment(segment).take(KEYS_PER_TURN).map(Entry::key);
        let keys: Vec<_> = keys.collect();
        keys.iter().for_each(|key| self.forget(key));
        if keys.len() == KEYS_PER_TURN {
            self.has_more = true;
        } else if self.may_trim(segment) {
            self.trim(segment, PAGE);
        } else {
            self.make_ready(segment);
        }
    }

    fn make_ready(&mut self, segment: u32) {
        self.log.erase = None;
        self.space.segment(segment).state = SegmentState::Ready;
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
