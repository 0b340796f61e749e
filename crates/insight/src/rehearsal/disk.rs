//! The disk under the pool, as far as hits depend on it: a log of segments whose oldest is reclaimed.
//!
//! Invariants: a block lies in one segment; blocks read since they were written are carried on when their segment is
//! reclaimed, the latest first, to three eighths of a segment, and the rest is given up, as the daemon's disk does
//! (docs/tiers/ssd.md). Where a block lies only the core knows, as of any tier: 20 bytes a block here, no map. Nothing
//! is in flight: a block is written, read or given up between two events of the core.

use std::collections::VecDeque;

use forebay_core::BlockKey;
use forebay_core::tier::Location;

use super::{Hash, Rehearsal, location};

/// Segments of a disk; a block that is longer than one makes a segment of its own.
const SEGMENTS: u64 = 64;

pub struct Disk {
    capacity_bytes: u64,
    /// By namespace.
    block_bytes: Vec<u64>,
    /// Oldest first; blocks are written to the last.
    segments: VecDeque<Segment>,
    /// Number of the oldest segment.
    oldest: u64,
    used_bytes: u64,
    blocks: u64,
    pub written_blocks: u64,
    pub written_bytes: u64,
}

/// What became of the blocks of the oldest segment.
#[derive(Debug, PartialEq, Eq)]
pub struct Reclaimed {
    pub given_up: Vec<BlockKey>,
    pub carried: Vec<(BlockKey, Location)>,
}

#[derive(Default)]
struct Segment {
    blocks: Vec<Held>,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Held {
    hash: Hash,
    namespace: u16,
    /// It was read since it was written.
    is_hot: bool,
}

impl Held {
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
            oldest: 0,
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

    /// Panics if another block lies there: the core has lost count.
    pub(super) fn read(&mut self, at: Location, key: &BlockKey) {
        let segment = &mut self.segments[(at.0 - self.oldest) as usize];
        let held = &mut segment.blocks[at.1 as usize];
        assert!(held.key() == *key, "{at:?} holds another block than {key:?}");
        held.is_hot = true;
    }

    /// Writes a block that is not there. Until it is not over its capacity any more, the oldest has to be reclaimed.
    pub(super) fn write(&mut self, key: &BlockKey) -> Location {
        let hash = key.hash.as_bytes().try_into().expect("hashes have 16 bytes here");
        let held = Held { hash, namespace: key.namespace.0 as u16 - 1, is_hot: false };
        self.written_blocks += 1;
        self.append(held)
    }

    pub(super) fn is_over(&self) -> bool {
        self.used_bytes > self.capacity_bytes
    }

    pub(super) fn reclaim(&mut self) -> Reclaimed {
        let victim = self.segments.pop_front().expect("what is used lies in segments");
        self.oldest += 1;
        self.used_bytes -= victim.bytes;
        self.blocks -= victim.blocks.len() as u64;
        let mut room = victim.bytes * 3 / 8;
        let (mut given_up, mut carried) = (Vec::new(), Vec::new());
        for held in victim.blocks.into_iter().rev() {
            let bytes = self.bytes(&held);
            if held.is_hot && bytes <= room {
                room -= bytes;
                carried.push(held);
            } else {
                given_up.push(held.key());
            }
        }
        let carry = |held: Held| (held.key(), self.append(Held { is_hot: false, ..held }));
        Reclaimed { given_up, carried: carried.into_iter().rev().map(carry).collect() }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let blocks: usize = self.segments.iter().map(|segment| segment.blocks.capacity()).sum();
        blocks * size_of::<Held>() + self.segments.capacity() * size_of::<Segment>()
    }

    fn append(&mut self, held: Held) -> Location {
        let bytes = self.bytes(&held);
        let is_full = |segment: &Segment| segment.bytes > 0 && segment.bytes + bytes > self.capacity_bytes / SEGMENTS;
        if self.segments.back().is_none_or(is_full) {
            self.segments.push_back(Segment::default());
        }
        let number = self.oldest + self.segments.len() as u64 - 1;
        let segment = self.segments.back_mut().expect("there is one to write to");
        segment.blocks.push(held);
        segment.bytes += bytes;
        self.used_bytes += bytes;
        self.written_bytes += bytes;
        self.blocks += 1;
        location(number, segment.blocks.len() - 1)
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
    fn fill(disk: &mut Disk, from: u64, count: u64) -> (Vec<Location>, Vec<BlockKey>) {
        let (mut places, mut given_up) = (Vec::new(), Vec::new());
        for n in from..from + count {
            places.push(disk.write(&key(n)));
            while disk.is_over() {
                given_up.extend(disk.reclaim().given_up);
            }
        }
        (places, given_up)
    }

    #[test]
    fn the_oldest_go_first_and_the_hot_are_carried_on_once() {
        // One block a segment: three eighths of it are none, so nothing is carried on.
        let mut disk = Disk::new(640, vec![10]);
        let (places, given_up) = fill(&mut disk, 0, 64);
        assert!(given_up.is_empty() && disk.blocks() == 64);
        disk.read(places[0], &key(0));
        assert_eq!(fill(&mut disk, 100, 1).1, [key(0)]);

        let mut disk = Disk::new(6400, vec![10]);
        let (places, _) = fill(&mut disk, 0, 640);
        (0..5).for_each(|n| disk.read(places[n], &key(n as u64)));
        disk.write(&key(700));
        let Reclaimed { given_up, carried } = disk.reclaim();
        assert_eq!(given_up, [9, 8, 7, 6, 5, 1, 0].map(key), "the latest three of five are carried on");
        assert_eq!(carried.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [2, 3, 4].map(key));
        assert_eq!((disk.written_blocks, disk.written_bytes), (641, 6440));
        carried.iter().for_each(|(key, at)| {
            assert!(disk.segments[(at.0 - disk.oldest) as usize].blocks[at.1 as usize].key() == *key)
        });
        // Nobody read them since: the second time they go.
        let (_, given_up) = fill(&mut disk, 1000, 640);
        assert!([2, 3, 4].into_iter().all(|n| given_up.contains(&key(n))));
    }

    #[test]
    #[should_panic(expected = "holds another block")]
    fn a_block_is_read_where_it_lies_and_nowhere_else() {
        let mut disk = Disk::new(640, vec![10]);
        let (places, _) = fill(&mut disk, 0, 2);
        disk.read(places[1], &key(0));
    }
}
