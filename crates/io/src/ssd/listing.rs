//! The lists of segments: which keys a segment has records of. The index knows no keys.
//!
//! The list of a closed segment is its footer, and is read from the disk when it is needed: by `reclaim`, by the walk
//! of a purge, and by `void`. Of a segment that is not closed, or whose footer could not be written, the records are in
//! memory. `lists` keeps what each of these readers has.
//!
//! Invariants: a list is believed if its checksum, its segment and its life are right. A record in a list counts if the
//! index has a block at that very spot, of that fingerprint. A list that cannot be read has three attempts. If the disk
//! can be read elsewhere then, the blocks of its segment are given up: the whole index is gone through for them, some
//! at a time.

use std::ops::Range;
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::Health;

use super::disk::Disk;
use super::index::{Entry, Spot, WARM_AT_ONCE};
use super::io::Flight;
use super::layout::{Footer, PAGE, RECORD_BYTES, Record, RecordKind};
use super::lists::{List, Reader, Reading, State, Step, Walk};
use super::reclaim::READY;
use super::space::SegmentState;
use super::staging::{Staging, page_at};
use crate::uring::{Span, Work};

/// Attempts to read a list, and between them.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(100);
/// Where many lists are lost, as of a file that was truncated, each has one attempt, or two if it cannot be read.
const MANY_WITHIN: Duration = Duration::from_secs(60);
/// Segments that a walk goes to in one turn.
const SEGMENTS_AT_A_TIME: u32 = 64;
/// Places of the index that are gone through in one turn, for the blocks of a segment without a list.
const PLACES_AT_A_TIME: u32 = 512;

impl Disk {
    /// The list of this segment, which begins to be read if it is not there. It stays until the reader asks for
    /// another. A segment of which the index has nothing has no list.
    pub(super) fn list(&mut self, reader: Reader, segment: u32) -> List {
        if self.space.segments[segment as usize].entries == 0 {
            return List::Here(0);
        }
        let Some(listed) = self.list_on_disk(segment) else {
            return List::Here(self.kept_records(segment).count() as u32);
        };
        let life = self.space.segments[segment as usize].life;
        if self.space.segments[segment as usize].is_lost {
            return List::Lost;
        }
        let is_one_of_many = self.lists.gave_up_at.is_some_and(|at| self.now.saturating_sub(at) < MANY_WITHIN);
        let few_tries = if self.lists.readings[reader as usize].is_damaged { 1 } else { 2 };
        let most_tries = if is_one_of_many { few_tries } else { TRIES };
        let is_readable_elsewhere = self.io.reads.failures_in_a_row < TRIES && self.health() == Health::Healthy;
        let reading = &mut self.lists.readings[reader as usize];
        if reading.of != Some((segment, life)) {
            if !reading.is_under_way {
                *reading = Reading { of: Some((segment, life)), ..Reading::default() };
                self.read_list(reader, segment, life, listed);
            }
            return List::Waits;
        }
        match reading.state {
            State::UnderWay => List::Waits,
            State::Whole => List::Here(listed + self.space.segments[segment as usize].doubted.len() as u32),
            State::Failed { again_at } if self.now < again_at => List::Waits,
            State::Failed { .. } if reading.tries >= most_tries && is_readable_elsewhere => {
                self.give_up(segment);
                List::Lost
            }
            State::Failed { .. } => {
                if !is_readable_elsewhere {
                    reading.tries = 0;
                }
                self.read_list(reader, segment, life, listed);
                List::Waits
            }
        }
    }

    /// Some records of a list that is here. Records that were not kept come last.
    pub(super) fn listed(&self, reader: Reader, segment: u32, some: Range<u32>) -> Vec<Record> {
        let Some(listed) = self.list_on_disk(segment) else {
            return self.kept_records(segment).skip(some.start as usize).take(some.len()).copied().collect();
        };
        let on_disk = some.start.min(listed)..some.end.min(listed);
        let mut bytes = vec![0; on_disk.len() * RECORD_BYTES];
        self.memory.read(Staging::list(reader, on_disk.start * RECORD_BYTES as u32, bytes.len() as u32), &mut bytes);
        let records = bytes.chunks_exact(RECORD_BYTES).filter_map(Record::decode);
        let doubted = &self.space.segments[segment as usize].doubted;
        let rest = some.start.max(listed) - listed..some.end.max(listed) - listed;
        records.chain(doubted[rest.start as usize..rest.end as usize].iter().copied()).collect()
    }

    /// Those of the records of blocks that are the records of their entries, with these: served or not.
    pub(super) fn blocks_at(&self, records: impl Iterator<Item = Record>, segment: u32) -> Vec<(Record, Entry)> {
        let named = |record: Record| (record, self.index.hasher().block(&record.key));
        let named: Vec<_> = records.filter(|record| record.kind == RecordKind::Block).map(named).collect();
        let mut blocks = Vec::new();
        for some in named.chunks(WARM_AT_ONCE) {
            self.index.warm(some.iter().map(|(_, block)| *block));
            for (record, block) in some {
                let spot = Spot { segment, first_page: record.first_page };
                let entry = self.index.entry_of(*block).filter(|entry| entry.spot == spot);
                blocks.extend(entry.map(|entry| (*record, entry)));
            }
        }
        blocks
    }

    /// How many records are to be read from the disk; none if the list is in memory.
    fn list_on_disk(&self, segment: u32) -> Option<u32> {
        let of = &self.space.segments[segment as usize];
        let is_closed = !matches!(of.state, SegmentState::Active | SegmentState::Closing);
        (is_closed && of.whole.is_empty() && of.listed > 0).then_some(of.listed)
    }

    fn kept_records(&self, segment: u32) -> impl Iterator<Item = &Record> {
        let closing = self.log.closing.as_ref().filter(|closing| closing.segment == segment);
        let of = &self.space.segments[segment as usize];
        closing.map_or(&of.whole, |closing| &closing.records).iter().chain(&of.doubted)
    }

    fn read_list(&mut self, reader: Reader, segment: u32, life: u64, listed: u32) {
        let reading = &mut self.lists.readings[reader as usize];
        (reading.is_under_way, reading.state, reading.tries) = (true, State::UnderWay, reading.tries + 1);
        let pages = Footer::record_pages(listed);
        let span = Staging::list(reader, 0, (pages + 1) * PAGE as u32);
        let checksum = Some(Span { len: listed * RECORD_BYTES as u32, ..span });
        let at = self.geometry.at(segment, self.geometry.pages() - 1 - pages);
        self.io.start(Flight::List { reader, segment, life }, Work::Read { at, span, checksum });
        self.io.submit();
    }

    pub(super) fn list_ended(&mut self, reader: Reader, segment: u32, life: u64, result: Result<u64, ErrorKind>) {
        let listed = self.space.segments[segment as usize].listed;
        let page = Staging::list(reader, Footer::record_pages(listed) * PAGE as u32, PAGE as u32);
        let footer = || Footer::decode(&page_at(&self.memory, page), &self.geometry, life, segment);
        let is_footer = |footer: Footer, sum| footer.count == listed && footer.records_checksum == sum;
        let is_whole = result.is_ok_and(|sum| footer().is_some_and(|footer| is_footer(footer, sum)));
        let reading = &mut self.lists.readings[reader as usize];
        reading.is_under_way = false;
        if reading.of == Some((segment, life)) {
            reading.is_damaged = result.is_ok();
            // By then it is known whether the disk can be read elsewhere.
            let again_at = self.now + if result.is_err() { PAUSE } else { Duration::ZERO };
            reading.state = if is_whole { State::Whole } else { State::Failed { again_at } };
        }
        if result.is_err() {
            self.io.start(Flight::Probe, Work::Read { at: 0, span: Staging::probe(), checksum: None });
        }
    }

    fn give_up(&mut self, segment: u32) {
        self.space.segment(segment).is_lost = true;
        self.lists.lost += 1;
        (self.lists.is_one_more, self.lists.is_giving_up) = (true, true);
        self.lists.gave_up_at = Some(self.now);
        if self.lists.told.add(Instant::now()).is_some() {
            let disk = self.name();
            let hint = "restart the daemon to read the segment's batch heads, which may be whole; if this happens \
                        again, replace the disk";
            tracing::warn!(disk, segment, hint, "a segment's footer cannot be read: its blocks are not served");
        }
    }

    /// Goes on to forget the blocks of a segment whose new life has begun, and of which a list did not say them all.
    pub(super) fn forget_lost(&mut self, segment: u32) {
        let (entries, next) = self.index.piece(self.lists.forget_place, PLACES_AT_A_TIME);
        let its: Vec<Entry> = entries.filter(|entry| entry.spot.segment == segment).collect();
        its.iter().for_each(|entry| self.forget(entry.block));
        self.lists.forget_place = next.unwrap_or(0);
        if next.is_none() {
            let of = self.space.segment(segment);
            debug_assert_eq!(of.entries, 0, "all entries were gone through");
            of.entries = 0;
        }
        self.has_more = true;
    }

    /// Goes on to withdraw the blocks of segments that are given up.
    pub(super) fn go_on_giving_up(&mut self) {
        if !self.lists.is_giving_up {
            return;
        }
        if self.lists.place == 0 {
            self.lists.is_one_more = false;
        }
        let (entries, next) = self.index.piece(self.lists.place, PLACES_AT_A_TIME);
        let is_lost = |entry: &Entry| self.space.segments[entry.spot.segment as usize].is_lost;
        let lost: Vec<Entry> = entries.filter(|entry| entry.is_served() && is_lost(entry)).collect();
        for Entry { block, .. } in &lost {
            self.withdraw(*block);
        }
        self.counters.corrupt_blocks += lost.len() as u64;
        self.lost.extend(lost.iter().map(|entry| entry.block));
        self.lists.place = next.unwrap_or(0);
        self.lists.is_giving_up = next.is_some() || self.lists.is_one_more;
        self.has_more = true;
    }
}

impl Disk {
    /// Looks at up to `most` records of a list.
    pub(super) fn walk_on(&mut self, walk: &mut Walk, most: u32, is_wanted: impl Fn(&Record) -> bool) -> Step {
        for _ in 0..SEGMENTS_AT_A_TIME {
            if self.watch.is_taken {
                return Step::End;
            }
            let victim = self.reclaim.as_ref().map(|reclaim| reclaim.victim());
            let Some(segment) = self.space.oldest_from(walk.life, victim) else { return self.end_of_walk(walk) };
            let life = self.space.segments[segment as usize].life;
            if life > walk.life {
                walk.go_to(life);
            }
            match self.list(walk.reader, segment) {
                List::Waits => return Step::Waits,
                List::Lost => walk.go_to(life + 1),
                List::Here(count) => {
                    let is_in_memory = self.list_on_disk(segment).is_none();
                    if std::mem::replace(&mut walk.is_in_memory, is_in_memory) != is_in_memory {
                        // A footer has another order.
                        walk.record = 0;
                    }
                    if walk.record >= count {
                        walk.go_to(life + 1);
                        continue;
                    }
                    let some = walk.record..count.min(walk.record.saturating_add(most));
                    walk.record = some.end;
                    let wanted = self.listed(walk.reader, segment, some).into_iter().filter(is_wanted);
                    return Step::Blocks(segment, self.blocks_at(wanted, segment));
                }
            }
        }
        Step::Blocks(0, Vec::new())
    }

    /// A restart finds what was evicted until the header of its segment's next life was flushed. Nobody waits for a
    /// disk that takes no writes.
    fn end_of_walk(&mut self, walk: &mut Walk) -> Step {
        let takes_writes = self.health_of_writes() == Health::Healthy && self.now >= self.log.paused_until;
        // With more of them, none was reclaimed.
        if !takes_writes || self.space.free.len() > 2 * READY {
            return Step::End;
        }
        let erasing = self.log.erase.map(|erase| erase.segment());
        let evicted = self.space.free.iter().copied().chain(erasing);
        let lives = evicted.map(|segment| &self.space.segments[segment as usize]).filter(|segment| segment.entries > 0);
        let lives: Vec<u64> = lives.map(|segment| segment.life_of_entries).collect();
        let until = *walk.void_until.get_or_insert_with(|| lives.iter().copied().max().unwrap_or(0));
        if lives.iter().any(|life| *life <= until) { Step::Waits } else { Step::End }
    }

    /// The share of the disk's segments with blocks that lie before the walk.
    pub(super) fn ratio_before(&self, walk: &Walk) -> (usize, usize) {
        let before = self.space.closed.partition_point(|index| self.space.segments[*index as usize].life < walk.life);
        (before, self.space.closed.len())
    }
}
