//! How many bytes a block has, and where each rank's slice of it lies.
//!
//! A block's slot holds the slices of all ranks side by side, in rank order, without gaps:
//! `offset_of(rank) = sum of the slices before it`. A replicated group (MLA under tensor parallelism) is
//! stored once, by rank 0, and loaded by all.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::key::PAGE_BYTES;

/// How a group's layers look back, which decides which of its blocks a prefix needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Attention {
    /// A hit of n blocks needs all n.
    Full,
    /// Only blocks near the end of the prefix are needed (sliding window, chunked, recurrent states).
    Windowed,
}

/// One group of layers that share block size and attention kind.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct GroupLayout {
    /// How the group's layers look back.
    pub attention: Attention,
    /// Tokens whose KV one block holds.
    pub tokens_per_block: u32,
    /// Bytes of one block on each rank, by rank. One entry, for rank 0, where `is_replicated`.
    pub rank_bytes: Vec<u64>,
    /// All ranks have the same bytes, so rank 0 stores for all of them.
    pub is_replicated: bool,
}

impl GroupLayout {
    /// Bytes of one block, over all ranks that store a slice.
    pub fn block_bytes(&self) -> u64 {
        self.rank_bytes.iter().sum()
    }

    /// Bytes of the slot that holds a block: `block_bytes` rounded up to whole pages.
    pub fn slot_bytes(&self) -> u64 {
        self.block_bytes().next_multiple_of(PAGE_BYTES)
    }

    /// Byte range of `rank`'s slice inside the slot.
    pub fn slice(&self, rank: usize) -> std::ops::Range<u64> {
        let rank = if self.is_replicated { 0 } else { rank };
        let start = self.rank_bytes[..rank].iter().sum();
        start..start + self.rank_bytes[rank]
    }

    /// Ranks that write a slice when a block is stored.
    pub fn writers(&self) -> usize {
        self.rank_bytes.len()
    }
}

impl fmt::Display for GroupLayout {
    /// `65536 bytes of 16 tokens`; then whatever else can tell two groups apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, ranks) = (self.rank_bytes.first().copied().unwrap_or(0), self.rank_bytes.len());
        match self.rank_bytes.iter().all(|bytes| *bytes == first) {
            true if ranks > 1 => write!(f, "{ranks} slices of {first} bytes")?,
            true => write!(f, "{first} bytes")?,
            false => {
                let slices: Vec<String> = self.rank_bytes.iter().map(u64::to_string).collect();
                write!(f, "slices of {} bytes", slices.join(" + "))?;
            }
        }
        write!(f, " of {} tokens", self.tokens_per_block)?;
        match (self.attention, self.is_replicated) {
            (Attention::Full, false) => Ok(()),
            (Attention::Windowed, false) => write!(f, " (windowed)"),
            (Attention::Full, true) => write!(f, " (replicated)"),
            (Attention::Windowed, true) => write!(f, " (windowed, replicated)"),
        }
    }
}

/// All groups of a model, by group index. Groups that cache nothing are absent.
#[derive(Clone, PartialEq, Eq, Debug, Default, Hash)]
pub struct Layout {
    groups: Vec<(u16, GroupLayout)>,
}

impl fmt::Display for Layout {
    /// `group 0: 65536 bytes of 16 tokens; group 1: …`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: Vec<String> = self.groups.iter().map(|(index, group)| format!("group {index}: {group}")).collect();
        f.write_str(&groups.join("; "))
    }
}

impl Layout {
    /// Larger blocks than this are a mistake of the caller: the biggest published models use about 40 MiB.
    pub const MAX_BLOCK_BYTES: u64 = 512 << 20;
    /// More groups than this are a mistake of the caller.
    pub const MAX_GROUPS: usize = 64;
    /// Ranks of one engine; the pool has room for so many birth records a slot.
    pub const MAX_RANKS: usize = 64;

    /// Errors with `Invalid` on duplicate groups, empty or oversize blocks, or too many groups or ranks.
    pub fn new(mut groups: Vec<(u16, GroupLayout)>) -> Result<Layout> {
        groups.sort_by_key(|(group, _)| *group);
        if groups.is_empty() || groups.len() > Layout::MAX_GROUPS {
            return Err(Error::invalid("a layout has 1 to 64 groups").with("groups", groups.len()));
        }
        if let Some(pair) = groups.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::invalid("a layout names a group twice").with("group", pair[0].0));
        }
        for (group, layout) in &groups {
            layout.check().map_err(|error| error.with("group", group))?;
        }
        Ok(Layout { groups })
    }

    /// As it is kept in the pool's table: for each group its index (u16), attention and replication (u8 each),
    /// tokens (u32), number of ranks (u16) and their bytes (u64 each), little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, group) in &self.groups {
            bytes.extend(index.to_le_bytes());
            bytes.push(u8::from(group.attention == Attention::Windowed));
            bytes.push(u8::from(group.is_replicated));
            bytes.extend(group.tokens_per_block.to_le_bytes());
            bytes.extend((group.rank_bytes.len() as u16).to_le_bytes());
            group.rank_bytes.iter().for_each(|rank| bytes.extend(rank.to_le_bytes()));
        }
        bytes
    }

    /// Errors with `Corrupt` on bytes that `to_bytes` did not write.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Layout> {
        let mut groups = Vec::new();
        while !bytes.is_empty() {
            let group = GroupLayout::read(&mut bytes);
            groups.push(group.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a stored layout is damaged"))?);
        }
        Layout::new(groups)
    }

    /// The group with this index; `None` if the layout has none.
    pub fn group(&self, group: u16) -> Option<&GroupLayout> {
        let at = self.groups.binary_search_by_key(&group, |(index, _)| *index).ok()?;
        Some(&self.groups[at].1)
    }

    /// All groups with their indexes, in ascending order.
    pub fn groups(&self) -> impl Iterator<Item = (u16, &GroupLayout)> {
        self.groups.iter().map(|(index, layout)| (*index, layout))
    }
}

impl GroupLayout {
    fn read(bytes: &mut &[u8]) -> Option<(u16, GroupLayout)> {
        let index = u16::from_le_bytes(take(bytes)?);
        let [windowed, replicated] = take(bytes)?;
        let tokens_per_block = u32::from_le_bytes(take(bytes)?);
        let ranks = u16::from_le_bytes(take(bytes)?);
        let rank_bytes = (0..ranks).map(|_| Some(u64::from_le_bytes(take(bytes)?))).collect::<Option<_>>()?;
        let attention = if windowed == 0 { Attention::Full } else { Attention::Windowed };
        Some((index, GroupLayout { attention, tokens_per_block, rank_bytes, is_replicated: replicated != 0 }))
    }

    fn check(&self) -> Result<()> {
        let ranks = self.rank_bytes.len();
        if ranks == 0 || ranks > Layout::MAX_RANKS {
            return Err(Error::invalid("a group has 1 to 64 ranks").with("ranks", ranks));
        }
        if self.is_replicated && ranks != 1 {
            return Err(Error::invalid("a replicated group has one slice").with("ranks", ranks));
        }
        let total = self.rank_bytes.iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes));
        if self.rank_bytes.contains(&0) || total.is_none_or(|bytes| bytes > Layout::MAX_BLOCK_BYTES) {
            return Err(Error::invalid("a rank's slice has at least 1 byte and a block at most 512 MiB")
                .with("rank_bytes", format!("{:?}", self.rank_bytes)));
        }
        Ok(())
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(rank_bytes: &[u64]) -> GroupLayout {
        GroupLayout {
            attention: Attention::Full,
            tokens_per_block: 16,
            rank_bytes: rank_bytes.to_vec(),
            is_replicated: false,
        }
    }

    #[test]
    fn ranks_lie_side_by_side_without_gaps() {
        let layout = group(&[100, 200, 50]);
        assert_eq!(layout.slice(0), 0..100);
        assert_eq!(layout.slice(1), 100..300);
        assert_eq!(layout.slice(2), 300..350);
        assert_eq!(layout.block_bytes(), 350);
        assert_eq!(layout.slot_bytes(), 4096);
    }

    #[test]
    fn people_read_sizes() {
        let layout = |groups| Layout::new(groups).unwrap().to_string();
        assert_eq!(layout(vec![(0, group(&[65536]))]), "group 0: 65536 bytes of 16 tokens");
        let windowed = GroupLayout { attention: Attention::Windowed, ..group(&[7, 7]) };
        let replicated = GroupLayout { is_replicated: true, ..group(&[100]) };
        assert_eq!(
            layout(vec![(0, group(&[100, 200])), (1, windowed), (2, replicated)]),
            "group 0: slices of 100 + 200 bytes of 16 tokens; group 1: 2 slices of 7 bytes of 16 tokens (windowed); \
             group 2: 100 bytes of 16 tokens (replicated)"
        );
    }

    #[test]
    fn a_layout_reads_back_from_its_bytes_and_not_from_others() {
        let windowed = GroupLayout { attention: Attention::Windowed, ..group(&[7]) };
        let layout = Layout::new(vec![(3, group(&[100, 200])), (1, windowed)]).unwrap();
        let bytes = layout.to_bytes();
        assert_eq!(Layout::from_bytes(&bytes).unwrap(), layout);
        for cut in 1..bytes.len() {
            assert_ne!(Layout::from_bytes(&bytes[..cut]).ok(), Some(layout.clone()), "cut at {cut}");
        }
    }

    #[test]
    fn a_replicated_group_gives_every_rank_the_same_slice() {
        let layout = GroupLayout { is_replicated: true, ..group(&[100]) };
        assert_eq!(layout.slice(7), 0..100);
        assert_eq!(layout.writers(), 1);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for bad in [vec![], vec![0], vec![4096, 0], vec![u64::MAX, 2], vec![Layout::MAX_BLOCK_BYTES + 1], vec![1; 65]] {
            assert!(Layout::new(vec![(0, group(&bad))]).is_err(), "{bad:?} was accepted");
        }
        assert!(Layout::new(vec![(1, group(&[1])), (1, group(&[1]))]).is_err());
        assert!(Layout::new(vec![]).is_err());
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        #[test]
        fn whatever_bytes_a_pool_holds_they_are_one_layout_or_none() {
            let windowed = GroupLayout { attention: Attention::Windowed, is_replicated: true, ..group(&[7]) };
            let made = [vec![(0, group(&[4096, 4096]))], vec![(3, group(&[1; 64])), (u16::MAX, windowed)]];
            let inputs = made.map(|groups| Layout::new(groups).unwrap().to_bytes()).to_vec();
            Target::new("layouts", inputs).cases(30_000).run(|bytes| {
                let read = Layout::from_bytes(bytes).map_err(|error| error.kind() == ErrorKind::Corrupt)?;
                assert_eq!(Layout::from_bytes(&read.to_bytes()).unwrap(), read, "it is read as it was written");
                for (_, group) in read.groups() {
                    assert!(group.slot_bytes() <= Layout::MAX_BLOCK_BYTES);
                    assert!((0..group.writers()).all(|rank| group.slice(rank).end <= group.block_bytes()));
                }
                Ok::<_, bool>(read.groups().count())
            });
        }
    }
}
