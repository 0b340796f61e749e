//! Huge pages: populates a mapping with them, and measures how much of it they cover.
//!
//! Invariant: reported values come from the kernel's own account of this process's page tables.

use std::collections::BTreeMap;
use std::ops::Range;
use std::{fs, io};

use super::format::Backing;
use super::map::{HUGE_PAGE_BYTES, Region, address_range};
use super::room::kib_field;

/// What `doctor` reports about the pool's pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HugePageReport {
    /// The kind of pages that was chosen when the pool was created.
    pub backing: Backing,
    /// Bytes of the pool that have memory and are mapped by this process.
    pub mapped_bytes: u64,
    /// The part of them that huge pages map.
    pub huge_bytes: u64,
    /// On a host with several NUMA nodes: bytes of the pool that this process maps, by node.
    pub nodes: Vec<(u32, u64)>,
    /// Why better backings were rejected when the pool was created.
    pub notes: Vec<String>,
}

/// Allocates memory for the pages of `range`, as huge as `backing` allows, and keeps their content.
pub(super) fn populate(region: &Region, range: Range<usize>, backing: Backing) -> io::Result<()> {
    if backing == Backing::Collapsed {
        // One small page in each 2 MiB is enough for the kernel to replace it by a huge one: 40 ms for 512 MiB.
        // Populating all small pages first takes 520 ms.
        for start in range.clone().step_by(HUGE_PAGE_BYTES as usize) {
            region.populate(start..start + rustix::param::page_size())?;
        }
        if let Err(error) = region.collapse(range.clone()) {
            tracing::debug!(%error, "some pages of the pool remain small");
        }
    }
    region.populate(range)
}

/// Mapped bytes of `region`, in total and by huge pages. Costs a walk over the process's mappings.
pub(super) fn mapped_and_huge_bytes(region: &Region) -> io::Result<(u64, u64)> {
    Ok(count(&fs::read_to_string("/proc/self/smaps")?, address_range(region)))
}

fn count(smaps: &str, addresses: Range<u64>) -> (u64, u64) {
    let (mut mapped, mut huge, mut is_inside) = (0, 0, false);
    for line in smaps.lines() {
        if let Some(start) = mapping_start(line) {
            is_inside = addresses.contains(&start);
        } else if is_inside {
            let kib = |name| kib_field(line, name).unwrap_or(0);
            // Pages of hugetlbfs are not part of `Rss`.
            let reserved = kib("Shared_Hugetlb") + kib("Private_Hugetlb");
            mapped += kib("Rss") + reserved;
            huge += kib("ShmemPmdMapped") + kib("FilePmdMapped") + reserved;
        }
    }
    (mapped, huge)
}

/// Bytes of `region` that this process maps, by NUMA node. Costs a walk over the process's mappings.
pub(super) fn node_bytes(region: &Region) -> io::Result<Vec<(u32, u64)>> {
    Ok(by_node(&fs::read_to_string("/proc/self/numa_maps")?, address_range(region)))
}

/// `7f0000200000 prefer:1 file=/dev/shm/x dirty=512 N0=12 N1=500 kernelpagesize_kB=4` tells of a mapping.
fn by_node(maps: &str, addresses: Range<u64>) -> Vec<(u32, u64)> {
    let mut nodes = BTreeMap::new();
    for line in maps.lines() {
        let mut words = line.split(' ');
        let start = words.next().and_then(|start| u64::from_str_radix(start, 16).ok());
        if !start.is_some_and(|start| addresses.contains(&start)) {
            continue;
        }
        let page_kib = line.rsplit_once("kernelpagesize_kB=").and_then(|(_, kib)| kib.trim().parse::<u64>().ok());
        let pages = |word: &str| {
            let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
            Some((node.parse::<u32>().ok()?, pages.parse::<u64>().ok()?))
        };
        for (node, pages) in words.filter_map(pages) {
            *nodes.entry(node).or_insert(0) += pages * (page_kib.unwrap_or(4) << 10);
        }
    }
    nodes.into_iter().collect()
}

/// `7f0000200000-7f0000400000 rw-s 00000000 00:27 2   /dev/shm/x` begins a mapping.
fn mapping_start(line: &str) -> Option<u64> {
    let (start, rest) = line.split_once('-')?;
    rest.split_once(' ')?;
    u64::from_str_radix(start, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_a_mapping_are_counted_by_node_whatever_their_size() {
        let maps = "\
7f0000000000 default file=/dev/shm/a dirty=512 N0=512 kernelpagesize_kB=4
7f0000200000 prefer:1 file=/dev/shm/N7=1 dirty=768 active=0 N0=256 N1=512 kernelpagesize_kB=4
7f0000600000 prefer:0 file=/dev/hugepages/c huge dirty=2 N0=2 kernelpagesize_kB=2048
7f0000a00000 default file=/dev/shm/b
";
        assert_eq!(by_node(maps, 0x7f00_0020_0000..0x7f00_00c0_0000), [(0, 5 << 20), (1, 2 << 20)]);
        assert_eq!(by_node(maps, 0..4096), []);
    }

    #[test]
    fn only_the_mappings_asked_for_are_counted() {
        let smaps = "\
7f0000000000-7f0000200000 rw-s 00000000 00:27 2   /dev/shm/a
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
7f0000200000-7f0000600000 rw-s 00000000 00:27 2   /dev/shm/b
Size:               4096 kB
Rss:                3072 kB
ShmemPmdMapped:     2048 kB
Shared_Hugetlb:        0 kB
VmFlags: rd wr sh
7f0000600000-7f0000800000 rw-s 00000000 00:2a 5   /dev/hugepages/c
Rss:                   0 kB
Shared_Hugetlb:     2048 kB
";
        assert_eq!(count(smaps, 0x7f00_0020_0000..0x7f00_0060_0000), (3 << 20, 2 << 20));
        assert_eq!(count(smaps, 0x7f00_0060_0000..0x7f00_0080_0000), (2 << 20, 2 << 20));
        assert_eq!(count(smaps, 0..4096), (0, 0));
    }
}
