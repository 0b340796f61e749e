//! Turns the items of a job into copies between addresses. Pure: no memory is touched, and no driver is called.
//!
//! Invariants: the copies of an item cover each of its bytes once, in the order of the slice. A copy of registered
//! memory stays inside one registration. A piece of memory that is not registered has at most the bytes of a staging
//! buffer.

use crate::job::{Direction, Job};
use crate::plan;
use crate::tensor::{Place, Tensors};

/// One copy between a device and pinned host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Op {
    pub device: u64,
    pub host: u64,
    pub bytes: u64,
    /// Where the tensor and the registration end: two copies of one call have both in common.
    pub within: [u64; 2],
}

impl Op {
    /// Of memory that is one allocation on either side.
    pub fn new(device: u64, host: u64, bytes: u64) -> Op {
        Op { device, host, bytes, within: [0; 2] }
    }

    /// Destination and source.
    pub fn ends(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::Store => (self.host, self.device),
            Direction::Load => (self.device, self.host),
        }
    }
}

/// Bytes of a slot that must go through a staging buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub item: usize,
    pub device: u64,
    /// From the start of the pool.
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Default, Debug, PartialEq, Eq)]
pub struct Ops {
    pub direct: Vec<Op>,
    pub staged: Vec<Piece>,
}

/// What the copies go by: addresses, and what of the pool is registered.
pub struct Ground<'a> {
    pub tensors: &'a Tensors,
    /// Address of the pool.
    pub base: u64,
    /// Bytes at and behind an offset of the pool that are in its registration; 0 if it is in none.
    pub registered: &'a dyn Fn(u64) -> u64,
    /// Bytes behind an offset after which what `registered` says may change.
    pub border: &'a dyn Fn(u64) -> u64,
    pub staging_bytes: u64,
}

/// The copies of the items that `allows`. The job must have been accepted by [`plan::check`].
pub fn ops(job: &Job, ground: &Ground<'_>, allows: impl Fn(usize) -> bool) -> Ops {
    let mut ops = Ops::default();
    for (item, it) in job.items.iter().enumerate().filter(|(item, _)| allows(*item)) {
        let block_ids = &job.block_ids[it.blocks.start as usize..it.blocks.end as usize];
        let mut offset = it.offset;
        for cut in ground.tensors.fragments(it.group, block_ids, 0..plan::slice_bytes(it, ground.tensors)) {
            let Place::Device { base, bytes, .. } = cut.place else {
                unreachable!("a device engine has no host tensors")
            };
            ops.add(ground, item, Op { within: [base + bytes, 0], ..Op::new(base + cut.offset, offset, cut.bytes) });
            offset += cut.bytes;
        }
    }
    ops
}

impl Ops {
    /// `whole`: a copy between the device and an offset of the pool.
    fn add(&mut self, ground: &Ground<'_>, item: usize, whole: Op) {
        let Op { mut device, host: mut offset, mut bytes, within: [tensor_end, _] } = whole;
        while bytes > 0 {
            let inside = (ground.registered)(offset);
            let taken = if inside > 0 {
                let taken = bytes.min(inside);
                let host = ground.base + offset;
                self.add_direct(Op { device, host, bytes: taken, within: [tensor_end, host + inside] });
                taken
            } else {
                let taken = bytes.min((ground.border)(offset)).min(ground.staging_bytes);
                self.staged.push(Piece { item, device, offset, bytes: taken });
                taken
            };
            (device, offset, bytes) = (device + taken, offset + taken, bytes - taken);
        }
    }

    /// Joins the copy to the last one if it continues that on both sides, in one tensor and one registration.
    fn add_direct(&mut self, op: Op) {
        if let Some(last) = self.direct.last_mut() {
            let continues = last.device + last.bytes == op.device && last.host + last.bytes == op.host;
            if continues && last.within == op.within {
                last.bytes += op.bytes;
                return;
            }
        }
        self.direct.push(op);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::PoolId;
    use crate::job::{After, Item};
    use crate::tensor::{PageRef, Tensor};

    const BASE: u64 = 1 << 40;

    /// Two tensors of 8 rows: pages of 48 bytes in rows of 64, and pages of 32 side by side.
    fn tensors() -> Tensors {
        let tensor = |base, row_stride_bytes| Tensor {
            place: Place::Device { ordinal: 0, base, bytes: 512 },
            offset: 0,
            rows: 8,
            row_stride_bytes,
        };
        let refs = vec![PageRef { tensor: 0, page_bytes: 48 }, PageRef { tensor: 1, page_bytes: 32 }];
        let alone = vec![PageRef { tensor: 1, page_bytes: 32 }];
        Tensors::new(vec![tensor(0x1000, 64), tensor(0x2000, 32)], vec![refs, alone]).unwrap()
    }

    fn job(group: u16, offset: u64, block_ids: Vec<u32>) -> Job {
        let item = Item { offset, group, blocks: 0..block_ids.len() as u32, beside: [0; 2] };
        let (direction, after) = (Direction::Store, After::Now);
        Job { id: 1, direction, pool: PoolId(0), after, items: vec![item], block_ids, is_summed: false, guard: None }
    }

    /// With registrations of 128 bytes, of which those that `is_registered`.
    fn cut(job: &Job, is_registered: impl Fn(u64) -> bool) -> Ops {
        let tensors = tensors();
        let border = |offset| 128 - offset % 128;
        let registered = |offset| if is_registered(offset / 128) { border(offset) } else { 0 };
        let ground =
            Ground { tensors: &tensors, base: BASE, registered: &registered, border: &border, staging_bytes: 40 };
        ops(job, &ground, |_| true)
    }

    fn direct(ops: &Ops) -> Vec<(u64, u64, u64)> {
        ops.direct.iter().map(|op| (op.device, op.host - BASE, op.bytes)).collect()
    }

    #[test]
    fn a_block_is_its_fragments_side_by_side_in_the_slot() {
        let ops = cut(&job(0, 128, vec![3]), |_| true);
        assert_eq!(direct(&ops), [(0x1000 + 3 * 64, 128, 48), (0x2000 + 3 * 32, 176, 32)]);
        assert!(ops.staged.is_empty());
    }

    #[test]
    fn neighbours_on_both_sides_become_one_copy_and_others_do_not() {
        assert_eq!(direct(&cut(&job(1, 0, vec![2, 3, 4]), |_| true)), [(0x2000 + 64, 0, 96)]);
        assert_eq!(direct(&cut(&job(1, 0, vec![3, 2]), |_| true)), [(0x2000 + 96, 0, 32), (0x2000 + 64, 32, 32)]);
    }

    #[test]
    fn no_copy_crosses_the_border_of_a_registration() {
        let ops = cut(&job(1, 96, vec![2, 3, 4]), |_| true);
        assert_eq!(direct(&ops), [(0x2000 + 64, 96, 32), (0x2000 + 96, 128, 64)]);
        let ops = cut(&job(1, 112, vec![2]), |_| true);
        assert_eq!(direct(&ops), [(0x2000 + 64, 112, 16), (0x2000 + 80, 128, 16)]);
    }

    #[test]
    fn what_is_not_registered_is_cut_to_staging_buffers_at_the_same_borders() {
        let ops = cut(&job(0, 96, vec![1]), |chunk| chunk == 1);
        let piece = |device, offset, bytes| Piece { item: 0, device, offset, bytes };
        assert_eq!(ops.staged, [piece(0x1000 + 64, 96, 32)]);
        assert_eq!(direct(&ops), [(0x1000 + 96, 128, 16), (0x2000 + 32, 144, 32)]);
        let ops = cut(&job(0, 0, vec![1]), |_| false);
        let pieces = [piece(0x1000 + 64, 0, 40), piece(0x1000 + 104, 40, 8), piece(0x2000 + 32, 48, 32)];
        assert_eq!(ops.staged, pieces);
    }

    #[test]
    fn items_that_are_refused_are_left_out() {
        let (tensors, registered) = (tensors(), |_| 128);
        let ground =
            Ground { tensors: &tensors, base: BASE, registered: &registered, border: &registered, staging_bytes: 40 };
        assert_eq!(ops(&job(1, 0, vec![0]), &ground, |_| false), Ops::default());
    }
}
