//! The disk under the pool, as far as hits depend on it: a log of segments whose oldest is reclaimed.
//!
//! Invariants: a block lies in one segment; blocks read since they were written are carried on when their segment is
//! reclaimed, the latest first, to three eighths of a segment, and the rest is given up, as the daemon's disk does
//! (docs/tiers/ssd.md). That a block is there the core knows, as of any tier: 18 bytes a block here, and 21 to 43 more
//! for one that was read. Nothing is in flight: a block is written, read or given up between two events of the core.

use std::collections::{HashSet, VecDeque};

use forebay_core::BlockKey;

use super::{Hash, Rehearsal};

/// Segments of a disk; a block that is longer than one makes a segment of its own.
const SEGMENTS: u64 = 64;

pub struct Disk {
    capacity_bytes: u64,
    /// By namespace.
    block_bytes: Vec<u64>,
    /// Oldest first; blocks are written to the last.
    segments: VecDeque<Segment>,
    /// Those that were read since they were written.
    hot: HashSet<Held>,
    used_bytes: u64,
    blocks: u64,
    pub written_blocks: u64,
    pub written_bytes: u64,
}

#[derive(Default)]
struct Segment {
    blocks: Vec<Held>,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Held {
    hash: Hash,
    namespace: u16,
}

impl Held {
    fn of(key: &BlockKey) -> Held {
        let hash = key.hash.as_bytes().try_into().expect("hashes have 16 bytes here");
        Held { hash, namespace: key.namespace.0 as u16 - 1 }
    }

    fn key(&self) -> BlockKey {
        Rehearsal::key(self.namespace.into(), &self.hash)
    }
}

impl Disk {
    pub(super) fn new(capacity_bytes: u64, block_bytes: Vec<u64>) -> Disk {
        Disk {
            capacity_bytes,
            block_bytes,
            segments: VecDeque::from([Segment::default()]),
            hot: HashSet::new(),
            used_bytes: 0,
            blocks: 0,
            written_blocks: 0,
            written_bytes: 0,
        }
    }

    /// Blocks that are there.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Reads a block that is there.
    pub(super) fn read(&mut self, key: &BlockKey) {
        self.hot.insert(Held::of(key));
    }

    /// Writes a block that is not there. Until it is not over its capacity any more, the oldest has to be reclaimed.
    pub(super) fn write(&mut self, key: &BlockKey) {
        self.written_blocks += 1;
        self.append(Held::of(key));
    }

    pub(super) fn is_over(&self) -> bool {
        self.used_bytes > self.capacity_bytes
    }

    /// Returns the blocks that were given up; the others are carried on.
    pub(super) fn reclaim(&mut self) -> Vec<BlockKey> {
        let victim = self.segments.pop_front().expect("what is used lies in segments");
        self.used_bytes -= victim.bytes;
        self.blocks -= victim.blocks.len() as u64;
        let mut room = victim.bytes * 3 / 8;
        let (mut given_up, mut carried) = (Vec::new(), Vec::new());
        for held in victim.blocks.into_iter().rev() {
            let bytes = self.bytes(&held);
            if self.hot.remove(&held) && bytes <= room {
                room -= bytes;
                carried.push(held);
            } else {
                given_up.push(held.key());
            }
        }
        carried.into_iter().rev().for_each(|held| self.append(held));
        given_up
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let blocks: usize = self.segments.iter().map(|segment| segment.blocks.capacity()).sum();
        // A byte of a set beside each place.
        let hot = self.hot.capacity() * 8 / 7 * (size_of::<Held>() + 1);
        blocks * size_of::<Held>() + self.segments.capacity() * size_of::<Segment>() + hot
    }

    fn append(&mut self, held: Held) {
        let bytes = self.bytes(&held);
        let is_full = |segment: &Segment| segment.bytes > 0 && segment.bytes + bytes > self.capacity_bytes / SEGMENTS;
        if self.segments.back().is_none_or(is_full) {
            self.segments.push_back(Segment::default());
        }
        let segment = self.segments.back_mut().expect("there is one to write to");
        segment.blocks.push(held);
        segment.bytes += bytes;
        self.used_bytes += bytes;
        self.written_bytes += bytes;
        self.blocks += 1;
    }

    fn bytes(&self, held: &Held) -> u64 {
        self.block_bytes[usize::from(held.namespace)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u64) -> BlockKey {
        Rehearsal::key(0, &[n.to_le_bytes(), [0; 8]].concat().try_into().unwrap())
    }

    /// Writes blocks from `from` on and reclaims what has to go.
    fn fill(disk: &mut Disk, from: u64, count: u64) -> Vec<BlockKey> {
        let mut given_up = Vec::new();
        for n in from..from + count {
            disk.write(&key(n));
            while disk.is_over() {
                given_up.extend(disk.reclaim());
            }
        }
        given_up
    }

    #[test]
    fn the_oldest_go_first_and_the_hot_are_carried_on_once() {
        // One block a segment: three eighths of it are none, so nothing is carried on.
        let mut disk = Disk::new(640, vec![10]);
        let given_up = fill(&mut disk, 0, 64);
        assert!(given_up.is_empty() && disk.blocks() == 64);
        disk.read(&key(0));
        assert_eq!(fill(&mut disk, 100, 1), [key(0)]);

        let mut disk = Disk::new(6400, vec![10]);
        fill(&mut disk, 0, 640);
        (0..5).for_each(|n| disk.read(&key(n)));
        disk.write(&key(700));
        assert_eq!(disk.reclaim(), [9, 8, 7, 6, 5, 1, 0].map(key), "the latest three of five are carried on");
        let written: Vec<BlockKey> = disk.segments.back().unwrap().blocks.iter().map(Held::key).collect();
        assert_eq!(written, [700, 2, 3, 4].map(key));
        assert_eq!((disk.written_blocks, disk.written_bytes), (641, 6440));
        // Nobody read them since: the second time they go.
        let given_up = fill(&mut disk, 1000, 640);
        assert!([2, 3, 4].into_iter().all(|n| given_up.contains(&key(n))));
    }
}
