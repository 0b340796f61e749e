//! Where the fragments of a block lie in the engine's KV tensors.
//!
//! Invariants: every page that [`Tensors`] can name, for every block id less than its group's `rows`, lies inside its
//! tensor's memory. This is checked once, when the tensors are registered.
//!
//! A block of a group consists of one fragment per ref (usually one per layer): `page_bytes` at `offset + block_id *
//! row_stride_bytes` of the ref's tensor. Its bytes, here and in a slot, are those fragments in the order of the
//! refs.

use std::ops::Range;

use forebay_core::{Error, Result};

use crate::copy::{Memory, Span};

/// The memory of a tensor.
#[derive(Clone)]
pub enum Place {
    Host(Memory),
    /// Of a device, which only its driver reads and writes. The submitter's promises are those of [`Memory::new`].
    Device {
        /// Position among the devices that the process sees.
        ordinal: u32,
        base: u64,
        bytes: u64,
    },
}

/// A strided tensor: row b, one block's page, begins at `offset + b * row_stride_bytes` of its memory.
#[derive(Clone)]
pub struct Tensor {
    pub place: Place,
    pub offset: u64,
    pub rows: u32,
    pub row_stride_bytes: u64,
}

/// Bytes of a block that lie side by side: `bytes` of them at `offset` of a tensor's memory.
pub(crate) struct Fragment<'a> {
    pub place: &'a Place,
    pub offset: u64,
    pub bytes: u64,
}

/// A group's share of each row of a tensor: its first `page_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRef {
    /// Position in the list of tensors.
    pub tensor: usize,
    /// Without the padding at the end of a row.
    pub page_bytes: u64,
}

/// All tensors of a rank, and the refs of each group by the group's position.
#[derive(Clone)]
pub struct Tensors {
    tensors: Vec<Tensor>,
    groups: Vec<Group>,
}

#[derive(Clone)]
struct Group {
    refs: Vec<PageRef>,
    block_bytes: u64,
    /// Number of blocks that every tensor of the group has.
    rows: u32,
}

impl Tensors {
    /// Errors with `Invalid` on a tensor or page that reaches outside its memory, rows that overlap, and groups
    /// without bytes.
    pub fn new(tensors: Vec<Tensor>, groups: Vec<Vec<PageRef>>) -> Result<Tensors> {
        let groups = groups
            .into_iter()
            .enumerate()
            .map(|(position, refs)| Group::new(&tensors, refs).map_err(|error| error.with("group", position)));
        let groups = groups.collect::<Result<_>>()?;
        Ok(Tensors { tensors, groups })
    }

    /// Bytes of one block of the group on this rank.
    pub fn block_bytes(&self, group: u16) -> Option<u64> {
        Some(self.groups.get(usize::from(group))?.block_bytes)
    }

    /// Number of blocks of the group: every block id is less.
    pub fn rows(&self, group: u16) -> Option<u32> {
        Some(self.groups.get(usize::from(group))?.rows)
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.tensors.iter().map(|tensor| &tensor.place)
    }

    pub(crate) fn overlap(&self, memory: &Memory) -> bool {
        self.places().any(|place| matches!(place, Place::Host(tensor) if tensor.overlaps(memory)))
    }

    /// `fragments` of tensors in host memory. Panics on others.
    pub(crate) fn spans<'a>(
        &'a self,
        group: u16,
        block_ids: &'a [u32],
        range: Range<u64>,
    ) -> impl Iterator<Item = Span<'a>> {
        self.fragments(group, block_ids, range).map(|Fragment { place, offset, bytes }| match place {
            Place::Host(memory) => memory.span(offset, bytes),
            Place::Device { .. } => unreachable!("the host engine refuses tensors of devices"),
        })
    }

    /// The fragments of bytes `range` of the blocks `block_ids`, block after block; fragments at the ends of the
    /// range are cut to it. The ids must be less than `rows`.
    pub(crate) fn fragments<'a>(
        &'a self,
        group: u16,
        block_ids: &'a [u32],
        range: Range<u64>,
    ) -> impl Iterator<Item = Fragment<'a>> {
        let refs = &self.groups[usize::from(group)].refs;
        let pages = block_ids.iter().flat_map(move |block_id| refs.iter().map(move |page| (*block_id, page)));
        let mut at = 0;
        pages.filter_map(move |(block_id, page)| {
            let (start, end) = (at, at + page.page_bytes);
            at = end;
            let cut = start.max(range.start)..end.min(range.end);
            (cut.start < cut.end).then(|| {
                let tensor = &self.tensors[page.tensor];
                let row = tensor.offset + u64::from(block_id) * tensor.row_stride_bytes;
                Fragment { place: &tensor.place, offset: row + (cut.start - start), bytes: cut.end - cut.start }
            })
        })
    }
}

impl Group {
    fn new(tensors: &[Tensor], refs: Vec<PageRef>) -> Result<Group> {
        let (mut block_bytes, mut rows) = (0u64, u32::MAX);
        for page in &refs {
            let tensor = tensors.get(page.tensor).ok_or_else(|| {
                Error::invalid("a ref names a tensor that does not exist")
                    .with("tensor", page.tensor)
                    .with("tensors", tensors.len())
            })?;
            tensor.check(page.page_bytes).map_err(|error| error.with("tensor", page.tensor))?;
            let sum = block_bytes.checked_add(page.page_bytes);
            block_bytes = sum.ok_or_else(|| Error::invalid("a block has more than 2^64 bytes"))?;
            rows = rows.min(tensor.rows);
        }
        if refs.is_empty() {
            return Err(Error::invalid("a group has no refs"));
        }
        Ok(Group { refs, block_bytes, rows })
    }
}

impl Place {
    fn bytes(&self) -> u64 {
        match self {
            Place::Host(memory) => memory.len() as u64,
            Place::Device { bytes, .. } => *bytes,
        }
    }
}

impl Tensor {
    /// Whether a page of `page_bytes` at the start of each row stays inside its row and the memory.
    fn check(&self, page_bytes: u64) -> Result<()> {
        let last_row = u64::from(self.rows.saturating_sub(1)).checked_mul(self.row_stride_bytes);
        let end = last_row.and_then(|row| row.checked_add(self.offset)?.checked_add(page_bytes));
        let is_inside = end.is_some_and(|end| end <= self.place.bytes());
        let is_apart = self.rows <= 1 || page_bytes <= self.row_stride_bytes;
        if page_bytes == 0 || self.rows == 0 || !is_inside || !is_apart {
            return Err(Error::invalid("a tensor's pages are empty, overlap, or reach outside its memory")
                .with("page_bytes", page_bytes)
                .with("offset", self.offset)
                .with("rows", self.rows)
                .with("row_stride_bytes", self.row_stride_bytes)
                .with("memory_bytes", self.place.bytes()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(offset: u64, rows: u32, row_stride_bytes: u64) -> Tensor {
        Tensor { place: Place::Host(Memory::anonymous(1000).unwrap()), offset, rows, row_stride_bytes }
    }

    fn with_page(tensor: Tensor, page_bytes: u64) -> Result<Tensors> {
        Tensors::new(vec![tensor], vec![vec![PageRef { tensor: 0, page_bytes }]])
    }

    #[test]
    fn a_tensor_may_fill_its_memory_to_the_last_byte() {
        assert!(with_page(tensor(0, 10, 100), 100).is_ok());
        assert!(with_page(tensor(5, 10, 105), 50).is_ok());
        assert!(with_page(tensor(0, 1, 0), 1000).is_ok());
    }

    #[test]
    fn tensors_that_cannot_be_are_refused() {
        let bad = [
            (tensor(1, 10, 100), 100),
            (tensor(0, 11, 100), 1),
            (tensor(0, 10, 100), 101),
            (tensor(0, 0, 100), 10),
            (tensor(0, 10, 100), 0),
            (tensor(0, u32::MAX, u64::MAX), 1),
            (tensor(u64::MAX, 1, 1), 1),
        ];
        for (tensor, page_bytes) in bad {
            let case = format!("{} {} {} {page_bytes}", tensor.offset, tensor.rows, tensor.row_stride_bytes);
            assert!(with_page(tensor, page_bytes).is_err(), "{case} was accepted");
        }
        assert!(Tensors::new(vec![], vec![vec![PageRef { tensor: 0, page_bytes: 1 }]]).is_err());
        assert!(Tensors::new(vec![], vec![vec![]]).is_err());
    }

    #[test]
    fn a_group_has_the_rows_of_its_shortest_tensor() {
        let refs = [0, 1, 2].map(|tensor| PageRef { tensor, page_bytes: 10 }).to_vec();
        let tensors = Tensors::new([7, 3, 5].map(|rows| tensor(0, rows, 10)).to_vec(), vec![refs]).unwrap();
        assert_eq!((tensors.rows(0), tensors.block_bytes(0)), (Some(3), Some(30)));
        assert_eq!((tensors.rows(1), tensors.block_bytes(1)), (None, None));
    }

    #[test]
    fn a_range_of_a_slice_cuts_the_fragments_at_its_ends() {
        let refs = vec![PageRef { tensor: 0, page_bytes: 10 }, PageRef { tensor: 1, page_bytes: 20 }];
        let tensors = Tensors::new(vec![tensor(0, 3, 10), tensor(0, 3, 20)], vec![refs]).unwrap();
        let lengths = |range| tensors.fragments(0, &[2, 0], range).map(|cut| cut.bytes).collect::<Vec<_>>();
        assert_eq!(lengths(0..60), [10, 20, 10, 20]);
        assert_eq!(lengths(5..35), [5, 20, 5]);
        assert_eq!(lengths(12..13), [1]);
        assert!(lengths(30..30).is_empty());
    }
}
