//! From which NUMA nodes the pool gets its memory, on a host with several.
//!
//! A worker says near which node it copies, when it attaches. Units that get their memory from then on are shared among
//! the workers' nodes. Before the first such worker they are shared among the nodes of NVIDIA's GPUs, since a daemon
//! mostly starts before its engines. Memory that a unit has stays where it is: engines and devices may use it.
//!
//! Invariants: the deciding thread only writes counts. The thread that populates reads them without a lock, and makes
//! the calls. Nothing is asked of the kernel on a host with one node, and nothing is placed where an operator has
//! chosen nodes for the daemon (`numactl`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use forebay_core::nodes;
use forebay_io::pool::Pool;
use forebay_numa::{Kernel, Nodes, gpus};

/// More nodes than hosts have; others are left alone.
const MOST: usize = 64;

/// How many attached workers copy near each node.
pub struct Wishes([AtomicU32; MOST]);

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Wishes {
    /// `nodes`: of each worker that has said one.
    pub fn note(&self, nodes: impl Iterator<Item = u32>) {
        let counts = count(nodes);
        self.0.iter().zip(counts).for_each(|(wish, count)| wish.store(count, Relaxed));
    }

    pub fn get(&self) -> [u32; MOST] {
        std::array::from_fn(|node| self.0[node].load(Relaxed))
    }
}

fn count(nodes: impl Iterator<Item = u32>) -> [u32; MOST] {
    let mut counts = [0; MOST];
    nodes.for_each(|node| counts.get_mut(node as usize).into_iter().for_each(|count| *count += 1));
    counts
}

/// See the module documentation.
pub struct Placing {
    kernel: Arc<dyn Kernel>,
    has_memory: [bool; MOST],
    gpus: [u32; MOST],
    placed: [u32; MOST],
    /// That of the last unit; the next ones may share it.
    node: Option<usize>,
}

/// Where two neighbours are on different nodes, the kernel splits the mapping, of which a process has 65,530.
const MOST_PIECES: u32 = 4096;

impl Placing {
    /// None where nothing is to be placed.
    pub fn find(root: &Path, kernel: Arc<dyn Kernel>) -> io::Result<Option<Placing>> {
        let nodes = Nodes::read(root);
        if nodes.all().is_empty() || kernel.has_policy()? {
            return Ok(None);
        }
        let mut has_memory = [false; MOST];
        let with_memory = nodes.all().iter().filter(|node| node.has_memory);
        with_memory.for_each(|node| has_memory.get_mut(node.id as usize).into_iter().for_each(|has| *has = true));
        Ok(Some(Placing { kernel, has_memory, gpus: count(gpus(root).into_iter()), placed: [0; MOST], node: None }))
    }

    /// Says from where the unit, which is populated next, gets its memory.
    pub fn place(&mut self, pool: &Pool, unit: u32, wishes: &Wishes) -> io::Result<()> {
        let is_first = unit.is_multiple_of(pool.geometry().units.div_ceil(MOST_PIECES).max(1));
        if is_first || self.node.is_none() {
            self.node = self.next(wishes);
        }
        let Some(node) = self.node else { return Ok(()) };
        pool.prefer(unit, node as u32, &*self.kernel)?;
        self.placed[node] += 1;
        Ok(())
    }

    fn next(&self, wishes: &Wishes) -> Option<usize> {
        let possible = |counts: [u32; MOST]| -> [u32; MOST] {
            std::array::from_fn(|node| if self.has_memory[node] { counts[node] } else { 0 })
        };
        nodes::next(&possible(wishes.get()), &self.placed).or_else(|| nodes::next(&possible(self.gpus), &self.placed))
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::ops::Range;
    use std::sync::Mutex;

    use forebay_io::pool::{HugePages, PoolConfig};

    use super::*;

    const UNIT_BYTES: usize = 2 << 20;

    /// What was placed, in place of a kernel that may refuse.
    #[derive(Debug, Default)]
    struct Fake {
        placed: Mutex<Vec<(Range<usize>, u32)>>,
        has_policy: bool,
        refuses: bool,
    }

    impl Kernel for Fake {
        fn affinity(&self) -> io::Result<BTreeSet<usize>> {
            unreachable!("no thread is moved")
        }

        fn set_affinity(&self, _: &BTreeSet<usize>) -> io::Result<()> {
            unreachable!("no thread is moved")
        }

        fn has_policy(&self) -> io::Result<bool> {
            Ok(self.has_policy)
        }

        fn prefer(&self, addresses: Range<usize>, node: u32) -> io::Result<()> {
            if self.refuses {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            self.placed.lock().unwrap().push((addresses, node));
            Ok(())
        }
    }

    /// A host of three nodes, the last without memory, and of GPUs on these nodes.
    fn host(gpus: &[u32]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/devices/system/node/online", "0-2\n");
        write("sys/devices/system/node/has_memory", "0-1\n");
        for (at, node) in gpus.iter().enumerate() {
            let folder = format!("sys/bus/pci/devices/0000:{at:02x}:00.0");
            write(&format!("{folder}/vendor"), "0x10de\n");
            write(&format!("{folder}/class"), "0x030200\n");
            write(&format!("{folder}/numa_node"), &format!("{node}\n"));
        }
        root
    }

    fn placing(gpus: &[u32]) -> Placing {
        Placing::find(host(gpus).path(), Arc::new(Fake::default())).unwrap().unwrap()
    }

    /// Where the next units would go.
    fn nodes(placing: &mut Placing, wishes: &Wishes, units: usize) -> Vec<Option<usize>> {
        let mut next = || placing.next(wishes).inspect(|node| placing.placed[*node] += 1);
        (0..units).map(|_| next()).collect()
    }

    #[test]
    fn units_are_shared_among_gpus_until_workers_say_where_they_are() {
        let (mut placing, wishes) = (placing(&[0, 1]), Wishes::default());
        assert_eq!(nodes(&mut placing, &wishes, 4), [Some(0), Some(1), Some(0), Some(1)]);
        wishes.note([1, 1].into_iter());
        assert_eq!(nodes(&mut placing, &wishes, 2), [Some(1), Some(1)]);
        // Without workers it is as before, and node 0 catches up.
        wishes.note([].into_iter());
        assert_eq!(nodes(&mut placing, &wishes, 3), [Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn a_node_without_memory_and_one_that_nobody_has_get_nothing() {
        let wishes = Wishes::default();
        assert_eq!(nodes(&mut placing(&[]), &wishes, 1), [None]);
        assert_eq!(nodes(&mut placing(&[2]), &wishes, 1), [None]);
        wishes.note([2, 9, 1 << 30].into_iter());
        assert_eq!(nodes(&mut placing(&[1]), &wishes, 1), [Some(1)]);
    }

    #[test]
    fn on_a_host_with_one_node_or_beside_a_choice_of_the_operator_nothing_is_placed() {
        let root = host(&[1]);
        let chosen = Fake { has_policy: true, ..Fake::default() };
        assert!(Placing::find(root.path(), Arc::new(chosen)).unwrap().is_none());
        fs::write(root.path().join("sys/devices/system/node/online"), "0\n").unwrap();
        assert!(Placing::find(root.path(), Arc::new(Fake::default())).unwrap().is_none());
    }

    #[test]
    fn a_unit_is_placed_by_its_addresses_and_a_refusal_is_an_error() {
        let home = tempfile::Builder::new().prefix("forebay-test-").tempdir_in("/dev/shm").unwrap();
        let config = PoolConfig {
            directory: home.path().join("pool"),
            capacity_bytes: 4 * UNIT_BYTES as u64,
            unit_bytes: Some(UNIT_BYTES as u64),
            huge_pages: HugePages::Off,
        };
        let pool = Pool::open(&config).unwrap().pool;
        let (root, wishes) = (host(&[]), Wishes::default());
        wishes.note([1].into_iter());
        let fake = Arc::new(Fake::default());
        let mut placing = Placing::find(root.path(), fake.clone()).unwrap().unwrap();
        (0..4).for_each(|unit| placing.place(&pool, unit, &wishes).unwrap());
        let placed = fake.placed.lock().unwrap().clone();
        let base = placed[0].0.start;
        let expected: Vec<_> =
            (0..4).map(|unit| base + unit * UNIT_BYTES).map(|start| (start..start + UNIT_BYTES, 1)).collect();
        assert_eq!(placed, expected);
        let strict = Arc::new(Fake { refuses: true, ..Fake::default() });
        let mut placing = Placing::find(root.path(), strict).unwrap().unwrap();
        assert!(placing.place(&pool, 0, &wishes).is_err());
    }
}
