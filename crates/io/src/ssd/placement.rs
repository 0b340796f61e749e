//! Which disk a new block goes to.
//!
//! A prefix is of use up to the first block that is lost. So consecutive blocks of a prompt lie on one disk, in a run.
//! Invariants: a choice moves nothing and is written nowhere, since a block is found on the disk that has it. A run
//! goes on only behind its last block: of several prompts that go on from one block, one continues the run, and each of
//! the others begins one of its own. So many prompts with one beginning do not all go to one disk. A run begins on the
//! usable disk that was given the fewest bytes. Behind a full run of the same prompt it begins on another disk than
//! that, if there is one, so a long prompt is read by all disks.
//!
//! What is remembered is bounded, and gone after a restart: a prompt that goes on from a forgotten block begins a run.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use forebay_core::tier::{Lineage, Position};

/// Longest run. The core has 1,024 loads of a tier under way, in the order of the prompt: with 16 disks they reach over
/// one run on each, so all 16 read for one long prompt.
const RUN_BLOCKS: u16 = 64;
/// Longest run of large blocks. A disk of 3 GB/s reads it in 43 ms. By so much, at most, a prompt waits longer than if
/// all disks read for it from its first block to its last.
const RUN_BYTES: u64 = 128 << 20;
/// Positions that are remembered in each of two generations, the newer of which becomes the older when it is full.
/// Both together take 2 MiB, and fill a table of a power of two up to its limit. With blocks of 2 MiB they are the
/// latest 100 to 200 GB: longer than any prompt that is being stored waits for its next block.
const REMEMBERED: usize = 57_344;

/// The disks' part of a choice; disks are numbered as in the configuration.
pub(super) trait Disks {
    fn count(&self) -> usize;
    /// Whether new blocks may go to the disk.
    fn is_usable(&self, disk: usize) -> bool;
    /// Whether its queue takes one now.
    fn has_room(&self, disk: usize) -> bool;
}

/// See the module documentation.
pub(super) struct Placement {
    newer: HashMap<Position, Place, Spread>,
    older: HashMap<Position, Place, Spread>,
    /// By disk: bytes of the blocks that it was given. A disk that could not be used counts as much as the least of the
    /// others; otherwise all new runs would go to it when it is back.
    given_bytes: Vec<u64>,
    /// The disk of the run that began last.
    last_disk: usize,
}

/// Where a block went, and what of its run ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    disk: u16,
    /// [`CONTINUED`] if the run has gone on from here.
    blocks: u16,
    kib: u32,
}

const CONTINUED: u16 = u16::MAX;

/// Positions are digests already, seeded by a secret. Their lowest bit is always set, so a table goes by others.
#[derive(Default)]
struct Spreading(u64);

type Spread = BuildHasherDefault<Spreading>;

impl Hasher for Spreading {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a position is one number");
    }

    fn write_u64(&mut self, digest: u64) {
        self.0 = digest.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A disk for a block; [`Placement::note`] takes it when the disk has taken the block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub disk: usize,
    run: Run,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Run {
    /// A block of another group, or this block before, went to the same place.
    Beside,
    /// Behind the run's last block, this one is so many.
    On {
        blocks: u16,
        kib: u32,
    },
    First {
        kib: u32,
    },
}

impl Choice {
    /// Whether the block is the first of a run.
    pub fn begins_run(&self) -> bool {
        matches!(self.run, Run::First { .. })
    }
}

impl Placement {
    pub fn new(disks: usize) -> Placement {
        Placement {
            newer: HashMap::default(),
            older: HashMap::default(),
            given_bytes: vec![0; disks],
            last_disk: disks.saturating_sub(1),
        }
    }

    /// None if no disk is usable.
    pub fn choose(&self, lineage: Option<Lineage>, bytes: u64, disks: &impl Disks) -> Option<Choice> {
        let usable = |place: &Place| disks.is_usable(place.disk.into());
        let kib = bytes.div_ceil(1 << 10).min(u32::MAX.into()) as u32;
        if let Some(place) = lineage.and_then(|lineage| self.place(lineage.own)).filter(usable) {
            return Some(Choice { disk: place.disk.into(), run: Run::Beside });
        }
        let parent = lineage.and_then(|lineage| lineage.parent).and_then(|parent| self.place(parent));
        if let Some(Place { disk, blocks, kib: before }) = parent.filter(usable)
            && blocks < RUN_BLOCKS
            && (u64::from(before) + u64::from(kib)) << 10 <= RUN_BYTES
        {
            return Some(Choice { disk: disk.into(), run: Run::On { blocks: blocks + 1, kib: before + kib } });
        }
        let before = parent.filter(|place| place.blocks != CONTINUED).map(|place| usize::from(place.disk));
        let disk = self.next_disk(before, disks)?;
        Some(Choice { disk, run: Run::First { kib } })
    }

    /// The block was given to the disk.
    pub fn note(&mut self, choice: Choice, lineage: Option<Lineage>, bytes: u64, disks: &impl Disks) {
        let Choice { disk, run } = choice;
        if let Run::First { .. } = run {
            self.last_disk = disk;
            self.level(disks);
        }
        self.given_bytes[disk] += bytes;
        let Some(Lineage { own, parent }) = lineage else { return };
        let (blocks, kib) = match run {
            Run::Beside => return,
            Run::On { blocks, kib } => {
                parent.and_then(|parent| self.place_mut(parent)).into_iter().for_each(|place| place.blocks = CONTINUED);
                (blocks, kib)
            }
            Run::First { kib } => (1, kib),
        };
        if self.newer.len() == REMEMBERED {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(own, Place { disk: disk as u16, blocks, kib });
    }

    /// The usable disk that was given the fewest bytes; of several, the first in turn. A disk whose queue is full, or
    /// that of the run before, is taken only if there is no other.
    fn next_disk(&self, before: Option<usize>, disks: &impl Disks) -> Option<usize> {
        let count = disks.count();
        let behind = before.unwrap_or(self.last_disk);
        let in_turn = (1..=count).map(|step| (behind + step) % count).filter(|disk| disks.is_usable(*disk));
        in_turn.min_by_key(|disk| (!disks.has_room(*disk), Some(*disk) == before, self.given_bytes[*disk]))
    }

    /// Disks that are not usable do not fall behind.
    fn level(&mut self, disks: &impl Disks) {
        let usable = (0..disks.count()).filter(|disk| disks.is_usable(*disk));
        let Some(least) = usable.map(|disk| self.given_bytes[disk]).min() else { return };
        for (disk, given) in self.given_bytes.iter_mut().enumerate().filter(|(_, given)| **given < least) {
            if !disks.is_usable(disk) {
                *given = least;
            }
        }
    }

    fn place(&self, position: Position) -> Option<Place> {
        self.newer.get(&position).or_else(|| self.older.get(&position)).copied()
    }

    fn place_mut(&mut self, position: Position) -> Option<&mut Place> {
        self.newer.get_mut(&position).or_else(|| self.older.get_mut(&position))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Host {
        usable: Vec<bool>,
        with_room: Vec<bool>,
    }

    impl Host {
        fn new(disks: usize) -> Host {
            Host { usable: vec![true; disks], with_room: vec![true; disks] }
        }
    }

    impl Disks for Host {
        fn count(&self) -> usize {
            self.usable.len()
        }

        fn is_usable(&self, disk: usize) -> bool {
            self.usable[disk]
        }

        fn has_room(&self, disk: usize) -> bool {
            self.with_room[disk]
        }
    }

    fn at(position: u64) -> Position {
        Position::new(position << 1)
    }

    fn place(placement: &mut Placement, host: &Host, own: u64, parent: Option<u64>, bytes: u64) -> Option<usize> {
        let lineage = Some(Lineage { own: at(own), parent: parent.map(at) });
        let choice = placement.choose(lineage, bytes, host)?;
        placement.note(choice, lineage, bytes, host);
        Some(choice.disk)
    }

    /// What the model knows of a block: its disk, the run's blocks and bytes up to it, and whether the run went on.
    struct Known {
        disk: usize,
        blocks: u64,
        kib: u64,
        is_last: bool,
    }

    proptest! {
        /// Prompts that branch, of blocks of several sizes, on disks that come and go.
        #[test]
        fn a_run_goes_on_behind_its_last_block_and_begins_on_the_disk_that_was_given_least(
            steps in proptest::collection::vec((0u64..40, any::<bool>(), 0u64..4, 0usize..24), 1..600),
            disks in 1usize..9,
        ) {
            let (mut placement, mut host) = (Placement::new(disks), Host::new(disks));
            let mut known: HashMap<u64, Known> = HashMap::new();
            let mut tails = [None::<u64>; 40];
            for (own, (prompt, branches, size, turned)) in (0..).zip(steps) {
                if turned < disks {
                    host.usable[turned] = !host.usable[turned];
                }
                let bytes: u64 = [4 << 10, 700_000, 9 << 20, 200 << 20][size as usize];
                let kib = bytes.div_ceil(1 << 10);
                let tail = tails[prompt as usize];
                // A branch leaves the prompt's last block as the last of its run.
                let parent = tail.map(|tail| if branches { tail / 2 } else { tail });
                let given = placement.given_bytes.clone();
                let disk = place(&mut placement, &host, own, parent, bytes);
                prop_assert_eq!(disk.is_some(), host.usable.contains(&true));
                let Some(disk) = disk else { continue };
                prop_assert!(host.usable[disk]);
                let before = parent.and_then(|parent| known.get_mut(&parent));
                let goes_on = before.as_ref().is_some_and(|before| {
                    let fits = before.blocks < u64::from(RUN_BLOCKS) && (before.kib + kib) << 10 <= RUN_BYTES;
                    before.is_last && fits && host.usable[before.disk]
                });
                let mut of_run = Known { disk, blocks: 1, kib, is_last: true };
                match before {
                    Some(before) if goes_on => {
                        prop_assert_eq!(disk, before.disk);
                        before.is_last = false;
                        (of_run.blocks, of_run.kib) = (before.blocks + 1, before.kib + kib);
                    }
                    before => {
                        let before = before.filter(|before| before.is_last).map(|before| before.disk);
                        let others = (0..disks).filter(|disk| host.usable[*disk] && Some(*disk) != before);
                        match others.map(|other| given[other]).min() {
                            Some(least) => prop_assert!(Some(disk) != before && given[disk] == least),
                            None => prop_assert_eq!(Some(disk), before.or(host.usable.iter().position(|is| *is))),
                        }
                    }
                }
                known.insert(own, of_run);
                if !branches {
                    tails[prompt as usize] = Some(own);
                }
            }
        }
    }

    #[test]
    fn a_disk_that_is_back_gets_its_part_and_not_what_it_missed() {
        let (mut placement, mut host) = (Placement::new(4), Host::new(4));
        host.usable[2] = false;
        (0..300).for_each(|own| assert_ne!(place(&mut placement, &host, own, None, 4096), Some(2)));
        host.usable[2] = true;
        let after: Vec<_> = (300..340).filter_map(|own| place(&mut placement, &host, own, None, 4096)).collect();
        assert_eq!(after.iter().filter(|disk| **disk == 2).count(), 10);
    }

    #[test]
    fn a_run_begins_on_a_disk_whose_queue_is_not_full_and_waits_for_its_own_disk() {
        let (mut placement, mut host) = (Placement::new(2), Host::new(2));
        assert_eq!(place(&mut placement, &host, 1, None, 1 << 20), Some(0));
        host.with_room[0] = false;
        assert_eq!(place(&mut placement, &host, 2, Some(1), 1 << 20), Some(0), "the run goes on, if later");
        host.with_room = vec![true, false];
        assert_eq!(place(&mut placement, &host, 9, None, 1 << 20), Some(0), "although it was given more");
        host.with_room = vec![false, false];
        assert_eq!(place(&mut placement, &host, 10, None, 1 << 20), Some(1));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_latest() {
        let (mut placement, host) = (Placement::new(8), Host::new(8));
        let first = place(&mut placement, &host, 0, None, 4096).unwrap();
        for own in 1..3 * REMEMBERED as u64 {
            place(&mut placement, &host, own, None, 4096);
            assert!(placement.newer.len() <= REMEMBERED && placement.older.len() <= REMEMBERED);
        }
        let last = 3 * REMEMBERED as u64 - 1;
        let disk = placement.place(at(last)).unwrap().disk;
        assert_eq!(place(&mut placement, &host, last + 1, Some(last), 4096), Some(disk.into()));
        assert_eq!(placement.place(at(0)), None, "{first}");
        assert!(place(&mut placement, &host, last + 2, Some(0), 4096).is_some());
    }
}
