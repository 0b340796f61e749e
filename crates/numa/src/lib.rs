//! Hosts with several NUMA nodes: on which of them a thread runs, and where memory should lie.
//!
//! Invariants: on a host with one node, or on one that does not tell, nothing is asked of the kernel beyond the list of
//! nodes. A thread that is kept on a node never gets a CPU that it did not have. What the kernel refuses stays as it
//! was. The system's files are read below a folder that tests replace, and the kernel is called through a [`Kernel`]
//! that tests replace.

mod kernel;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

pub use kernel::{Kernel, Linux};

/// Below which the system tells of nodes and devices; another folder in tests.
pub const ROOT: &str = "/";

/// The nodes of a host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Nodes(Vec<Node>);

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    pub id: u32,
    pub cpus: BTreeSet<usize>,
    /// Whether it has memory, of which this process may take some.
    pub has_memory: bool,
}

impl Nodes {
    /// None where the system does not tell.
    pub fn read(root: &Path) -> Nodes {
        let folder = root.join("sys/devices/system/node");
        let online = list(&folder.join("online"));
        if online.len() < 2 {
            return Nodes::default();
        }
        let with_memory = list(&folder.join("has_memory"));
        let allowed = allowed(root);
        let node = |id: usize| Node {
            id: id as u32,
            cpus: list(&folder.join(format!("node{id}/cpulist"))),
            has_memory: with_memory.contains(&id) && allowed.as_ref().is_none_or(|allowed| allowed.contains(&id)),
        };
        Nodes(online.into_iter().map(node).collect())
    }

    /// Empty on a host with one node.
    pub fn all(&self) -> &[Node] {
        &self.0
    }

    pub fn get(&self, id: u32) -> Option<&Node> {
        self.0.iter().find(|node| node.id == id)
    }

    /// The node that has all of these CPUs.
    pub fn of(&self, cpus: &BTreeSet<usize>) -> Option<u32> {
        let has_all = |node: &&Node| !cpus.is_empty() && cpus.is_subset(&node.cpus);
        self.0.iter().find(has_all).map(|node| node.id)
    }
}

/// The node that has all CPUs of the calling thread, on a host with several.
pub fn own_node(root: &Path, kernel: &dyn Kernel) -> Option<u32> {
    let nodes = Nodes::read(root);
    if nodes.all().is_empty() { None } else { nodes.of(&kernel.affinity().ok()?) }
}

/// The nodes of which this process may take memory; `None` where the system does not tell.
fn allowed(root: &Path) -> Option<BTreeSet<usize>> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    Some(numbers(line))
}

/// How many of NVIDIA's GPUs hang on each node, by the list of the host's devices.
pub fn gpus(root: &Path) -> Vec<u32> {
    const NVIDIA: &str = "0x10de";
    /// Display controllers: of a screen, or for computing alone.
    const DISPLAY: [&str; 2] = ["0x0300", "0x0302"];
    let folders = fs::read_dir(root.join("sys/bus/pci/devices")).into_iter().flatten().flatten();
    let node = |folder: fs::DirEntry| {
        let told = |name: &str| fs::read_to_string(folder.path().join(name)).ok();
        let is_gpu = told("vendor")?.trim() == NVIDIA
            && DISPLAY.iter().any(|class| told("class").is_some_and(|told| told.starts_with(class)));
        // A device whose node is not known says -1.
        if is_gpu { told("numa_node")?.trim().parse().ok() } else { None }
    };
    folders.filter_map(node).collect()
}

/// Empty where the file does not exist.
fn list(path: &Path) -> BTreeSet<usize> {
    fs::read_to_string(path).map(|told| numbers(&told)).unwrap_or_default()
}

/// `0-3,8,10-11`. What is no number is left out.
fn numbers(told: &str) -> BTreeSet<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number < MOST);
        Some(number(first)?..=number(last)?)
    };
    told.split(',').filter_map(range).flatten().collect()
}

/// CPUs and nodes beyond it are not believed.
const MOST: usize = 1 << 16;

/// The CPUs of one node, for threads that work near it.
#[derive(Clone, Debug)]
pub struct Home {
    cpus: BTreeSet<usize>,
    kernel: Arc<dyn Kernel>,
}

impl Home {
    /// `None` on a host with one node, and where the node is not known or has no CPUs.
    pub fn on(nodes: &Nodes, id: u32, kernel: Arc<dyn Kernel>) -> Option<Home> {
        let cpus = nodes.get(id)?.cpus.clone();
        (!cpus.is_empty()).then_some(Home { cpus, kernel })
    }

    /// Keeps the calling thread on those of its CPUs that are the node's. If none is, it stays as it is.
    pub fn stay(&self) -> io::Result<()> {
        self.enter().map(|_| ())
    }

    /// As [`Home::stay`], until the answer is dropped.
    pub fn visit(&self) -> io::Result<Visit<'_>> {
        Ok(Visit { home: self, before: self.enter()? })
    }

    /// The CPUs that the thread had, if that has changed.
    fn enter(&self) -> io::Result<Option<BTreeSet<usize>>> {
        let before = self.kernel.affinity()?;
        let kept: BTreeSet<usize> = before.intersection(&self.cpus).copied().collect();
        if kept.is_empty() || kept == before {
            return Ok(None);
        }
        self.kernel.set_affinity(&kept)?;
        Ok(Some(before))
    }
}

/// A thread's stay on a node, after which it has its CPUs again.
pub struct Visit<'a> {
    home: &'a Home,
    before: Option<BTreeSet<usize>>,
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // They were the thread's a moment ago. If somebody has taken one since, the rest is refused to nobody.
            let _ = self.home.kernel.set_affinity(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Mutex;

    use super::*;

    /// A host with two nodes of two CPUs each, and a third of memory alone, which this process may not take.
    fn host() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("sys/devices/system/node/online", "0-2\n"),
            ("sys/devices/system/node/has_memory", "0-2\n"),
            ("sys/devices/system/node/node0/cpulist", "0,2\n"),
            ("sys/devices/system/node/node1/cpulist", "1,3\n"),
            ("sys/devices/system/node/node2/cpulist", "\n"),
            ("proc/self/status", "Name:\tforebay\nMems_allowed_list:\t0-1\n"),
        ] {
            write(root.path(), name, text);
        }
        root
    }

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A thread's CPUs in place of the kernel's, which may refuse to change them.
    #[derive(Debug)]
    struct Fake {
        cpus: Mutex<BTreeSet<usize>>,
        calls: Mutex<usize>,
        refuses: bool,
    }

    impl Fake {
        fn new(cpus: &[usize], refuses: bool) -> Arc<Fake> {
            Arc::new(Fake { cpus: Mutex::new(cpus.iter().copied().collect()), calls: Mutex::default(), refuses })
        }

        fn cpus(&self) -> Vec<usize> {
            self.cpus.lock().unwrap().iter().copied().collect()
        }

        fn changes(&self) -> usize {
            *self.calls.lock().unwrap()
        }
    }

    impl Kernel for Fake {
        fn affinity(&self) -> io::Result<BTreeSet<usize>> {
            Ok(self.cpus.lock().unwrap().clone())
        }

        fn set_affinity(&self, cpus: &BTreeSet<usize>) -> io::Result<()> {
            if self.refuses {
                return Err(io::Error::from_raw_os_error(libc::EPERM));
            }
            *self.calls.lock().unwrap() += 1;
            *self.cpus.lock().unwrap() = cpus.clone();
            Ok(())
        }

        fn has_policy(&self) -> io::Result<bool> {
            unreachable!("no memory is placed here")
        }

        fn prefer(&self, _: Range<usize>, _: u32) -> io::Result<()> {
            unreachable!("no memory is placed here")
        }
    }

    #[test]
    fn nodes_are_told_with_their_cpus_and_whether_their_memory_may_be_taken() {
        let root = host();
        let nodes = Nodes::read(root.path());
        let told: Vec<_> = nodes.all().iter().map(|node| (node.id, node.cpus.len(), node.has_memory)).collect();
        assert_eq!(told, [(0, 2, true), (1, 2, true), (2, 0, false)]);
        assert_eq!(nodes.of(&[1, 3].into()), Some(1));
        assert_eq!(nodes.of(&[2].into()), Some(0));
        assert_eq!(own_node(root.path(), &*Fake::new(&[1], false)), Some(1));
        assert_eq!(own_node(root.path(), &*Fake::new(&[0, 1], false)), None);
        assert_eq!((nodes.of(&[0, 1].into()), nodes.of(&[7].into()), nodes.of(&BTreeSet::new())), (None, None, None));
    }

    #[test]
    fn a_host_with_one_node_or_none_is_none_of_ours() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Nodes::read(root.path()), Nodes::default());
        write(root.path(), "sys/devices/system/node/online", "0\n");
        write(root.path(), "sys/devices/system/node/node0/cpulist", "0-3\n");
        let nodes = Nodes::read(root.path());
        assert!(nodes.all().is_empty() && Home::on(&nodes, 0, Fake::new(&[0], false)).is_none());
        assert_eq!(own_node(root.path(), &*Fake::new(&[0], false)), None);
    }

    #[test]
    fn lists_of_the_kernel_are_read_and_nonsense_is_left_out() {
        assert_eq!(numbers("0-2,8,10-11\n").into_iter().collect::<Vec<_>>(), [0, 1, 2, 8, 10, 11]);
        for told in ["", "\n", "x", "3-", "-3", "9-1", "0-99999999999", "1-99999999"] {
            assert_eq!(numbers(told), BTreeSet::new(), "{told:?}");
        }
    }

    #[test]
    fn a_thread_stays_on_those_of_its_cpus_that_are_the_nodes_and_gets_no_other() {
        let nodes = Nodes::read(host().path());
        for (had, kept, changes) in
            [(&[0, 1, 2, 3][..], &[1, 3][..], 1), (&[0, 1], &[1], 1), (&[1, 3], &[1, 3], 0), (&[0, 2], &[0, 2], 0)]
        {
            let fake = Fake::new(had, false);
            let home = Home::on(&nodes, 1, fake.clone()).unwrap();
            home.stay().unwrap();
            assert_eq!((fake.cpus(), fake.changes()), (kept.to_vec(), changes), "of {had:?}");
        }
        assert!(Home::on(&nodes, 2, Fake::new(&[0], false)).is_none(), "a node without CPUs is no home");
        assert!(Home::on(&nodes, 9, Fake::new(&[0], false)).is_none());
    }

    #[test]
    fn a_visit_ends_with_the_cpus_that_the_thread_had_and_a_refusal_changes_nothing() {
        let nodes = Nodes::read(host().path());
        let fake = Fake::new(&[0, 1, 2], false);
        let home = Home::on(&nodes, 0, fake.clone()).unwrap();
        let visit = home.visit().unwrap();
        assert_eq!(fake.cpus(), [0, 2]);
        drop(visit);
        assert_eq!(fake.cpus(), [0, 1, 2]);
        let strict = Fake::new(&[0, 1, 2], true);
        let home = Home::on(&nodes, 0, strict.clone()).unwrap();
        assert!(home.visit().is_err() && home.stay().is_err());
        assert_eq!(strict.cpus(), [0, 1, 2]);
    }

    #[test]
    fn this_threads_own_cpus_are_narrowed_by_the_kernel_and_come_back() {
        let had = Linux.affinity().unwrap();
        let first = *had.first().expect("a thread has a CPU");
        let node = |id, cpus| Node { id, cpus, has_memory: true };
        let nodes = Nodes(vec![node(0, [first].into()), node(1, had.iter().copied().skip(1).collect())]);
        let home = Home::on(&nodes, 0, Arc::new(Linux)).unwrap();
        let visit = home.visit().unwrap();
        assert_eq!(Linux.affinity().unwrap(), [first].into());
        drop(visit);
        assert_eq!(Linux.affinity().unwrap(), had);
    }

    #[test]
    fn a_thread_that_nobody_gave_a_policy_has_none() {
        match Linux.has_policy() {
            Ok(has_policy) => assert!(!has_policy),
            // The rules of a container may forbid the question.
            Err(error) => assert!([libc::EPERM, libc::ENOSYS].map(Some).contains(&error.raw_os_error()), "{error}"),
        }
    }

    #[test]
    fn the_gpus_of_a_host_are_counted_by_their_nodes() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(gpus(root.path()), []);
        for (place, vendor, class, node) in [
            ("0000:3b:00.0", "0x10de", "0x030200", "1"),
            ("0000:5e:00.0", "0x10de", "0x030000", "0"),
            ("0000:af:00.0", "0x10de", "0x030200", "1"),
            // Its node is not known; a sound device on the card; another maker's.
            ("0000:d8:00.0", "0x10de", "0x030200", "-1"),
            ("0000:5e:00.1", "0x10de", "0x040300", "0"),
            ("0000:00:02.0", "0x8086", "0x030000", "0"),
        ] {
            for (name, text) in [("vendor", vendor), ("class", class), ("numa_node", node)] {
                write(root.path(), &format!("sys/bus/pci/devices/{place}/{name}"), &format!("{text}\n"));
            }
        }
        let mut found = gpus(root.path());
        found.sort_unstable();
        assert_eq!(found, [0, 1, 1]);
    }
}
