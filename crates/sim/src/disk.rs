//! The disk under the pool, as far as hits depend on it: a log of segments whose oldest is reclaimed.
//!
//! Invariants: a block lies in one segment; blocks read since they were written are carried on when their segment is
//! reclaimed, the latest first, to three eighths of a segment, and the rest is given up, as the daemon's disk does
//! (docs/tiers/ssd.md). Nothing is in flight: a block is written, read or given up between two events of the core.

use std::collections::VecDeque;

/// Segments of a disk; a block that is longer than one makes a segment of its own.
const SEGMENTS: u64 = 64;

pub struct Disk {
    capacity_bytes: u64,
    /// Oldest first; blocks are written to the last.
    segments: VecDeque<Segment>,
    /// Number of the oldest segment.
    oldest: u32,
    /// By block.
    places: Vec<Place>,
    used_bytes: u64,
    /// Given up since they were taken.
    pub given_up: Vec<u32>,
    pub written_blocks: u64,
    pub written_bytes: u64,
}

#[derive(Default)]
struct Segment {
    /// With their bytes.
    blocks: Vec<(u32, u64)>,
    bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Place {
    /// Number of the segment and one; 0 for a block that is not there.
    segment: u32,
    is_hot: bool,
}

impl Disk {
    /// For blocks numbered below `blocks`.
    pub fn new(capacity_bytes: u64, blocks: usize) -> Disk {
        Disk {
            capacity_bytes,
            segments: VecDeque::from([Segment::default()]),
            oldest: 0,
            places: vec![Place::default(); blocks],
            used_bytes: 0,
            given_up: Vec::new(),
            written_blocks: 0,
            written_bytes: 0,
        }
    }

    pub fn holds(&self, block: u32) -> bool {
        self.places[block as usize].segment != 0
    }

    /// Whether the block was there.
    pub fn read(&mut self, block: u32) -> bool {
        let place = &mut self.places[block as usize];
        place.is_hot = place.segment != 0;
        place.is_hot
    }

    /// Writes a block that is not there, and takes room for it from the oldest.
    pub fn write(&mut self, block: u32, bytes: u64) {
        self.written_blocks += 1;
        self.written_bytes += bytes;
        self.append(block, bytes);
        while self.used_bytes > self.capacity_bytes {
            self.reclaim();
        }
    }

    fn append(&mut self, block: u32, bytes: u64) {
        let is_full = |segment: &Segment| segment.bytes > 0 && segment.bytes + bytes > self.capacity_bytes / SEGMENTS;
        if self.segments.back().is_none_or(is_full) {
            self.segments.push_back(Segment::default());
        }
        let number = self.oldest + self.segments.len() as u32;
        self.places[block as usize] = Place { segment: number, is_hot: false };
        let segment = self.segments.back_mut().expect("there is one to write to");
        segment.blocks.push((block, bytes));
        segment.bytes += bytes;
        self.used_bytes += bytes;
    }

    fn reclaim(&mut self) {
        let victim = self.segments.pop_front().expect("what is used lies in segments");
        self.oldest += 1;
        self.used_bytes -= victim.bytes;
        let mut room = victim.bytes * 3 / 8;
        let mut carried = Vec::new();
        for (block, bytes) in victim.blocks.into_iter().rev() {
            if self.places[block as usize].is_hot && bytes <= room {
                room -= bytes;
                carried.push((block, bytes));
            } else {
                self.places[block as usize] = Place::default();
                self.given_up.push(block);
            }
        }
        for (block, bytes) in carried.into_iter().rev() {
            self.written_bytes += bytes;
            self.append(block, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_the_hot_are_carried_on_once() {
        let mut disk = Disk::new(640, 1000);
        (0..64).for_each(|block| disk.write(block, 10));
        assert!(disk.given_up.is_empty() && (0..64).all(|block| disk.holds(block)));
        // One block a segment: three eighths of it are none, so nothing is carried on.
        assert!(disk.read(0));
        disk.write(100, 10);
        assert_eq!((disk.given_up.as_slice(), disk.holds(0)), (&[0][..], false));

        let mut disk = Disk::new(6400, 1000);
        (0..640).for_each(|block| disk.write(block, 10));
        (0..5).for_each(|block| assert!(disk.read(block)));
        disk.write(700, 10);
        assert_eq!(disk.given_up, [9, 8, 7, 6, 5, 1, 0], "the latest three of five are carried on");
        assert_eq!((disk.written_blocks, disk.written_bytes), (641, 6440));
        // Nobody read them since: the second time they go.
        (701..1000).chain(0..2).chain(5..10).for_each(|block| disk.write(block, 10));
        (11..400).for_each(|block| {
            if !disk.holds(block) {
                disk.write(block, 10);
            }
        });
        assert!(!disk.holds(2) && !disk.read(3));
    }

    #[test]
    fn a_disk_never_holds_more_than_its_capacity() {
        let mut disk = Disk::new(1000, 5000);
        for block in 0..5000 {
            disk.write(block, 1 + u64::from(block) % 97);
            let held: u64 = (0..=block).filter(|b| disk.holds(*b)).map(|b| 1 + u64::from(b) % 97).sum();
            assert!(held <= 1000 && held == disk.used_bytes, "{held} bytes after {block}");
            if block % 3 == 0 {
                disk.read(block);
            }
        }
    }
}
