//! The NUMA nodes of this host, and on which of them the pool's memory lies.

use std::path::Path;

use forebay_numa::{Node, Nodes, ROOT, gpus};

use super::Check;
use super::daemon::Holdings;
use crate::inspect::nodes as told;

const NAME: &str = "numa";

pub fn check(holdings: Option<&Holdings>) -> Check {
    let root = Path::new(ROOT);
    judge(&Nodes::read(root), &gpus(root), holdings)
}

/// `gpus`: the node of each of NVIDIA's.
fn judge(nodes: &Nodes, gpus: &[u32], holdings: Option<&Holdings>) -> Check {
    if nodes.all().is_empty() {
        return Check::ok(NAME, "this host has one NUMA node");
    }
    let node = |node: &Node| {
        let gpus = gpus.iter().filter(|gpu| **gpu == node.id).count();
        let counted = |count: usize, what: &str| match count {
            0 => None,
            1 => Some(format!("1 {what}")),
            count => Some(format!("{count} {what}s")),
        };
        let has = [counted(node.cpus.len(), "CPU"), counted(gpus, "GPU")].into_iter().flatten();
        let has = has.chain((!node.has_memory).then(|| "no memory for this user".to_string()));
        format!("node {} ({})", node.id, has.collect::<Vec<_>>().join(", "))
    };
    let mut finding = format!("this host has {}", nodes.all().iter().map(node).collect::<Vec<_>>().join(", "));
    let Some(holdings) = holdings.filter(|holdings| !holdings.nodes.is_empty()) else {
        return Check::ok(NAME, finding);
    };
    finding += &format!("; the pool has {}", told(&holdings.nodes));
    let has_pool = |id: &u32| holdings.nodes.iter().any(|on| on.node == *id && on.bytes > 0);
    let may_have = |id: &u32| nodes.get(*id).is_some_and(|node| node.has_memory);
    match gpus.iter().find(|id| may_have(id) && !has_pool(id)) {
        None => Check::ok(NAME, finding),
        Some(id) => Check::warn(
            NAME,
            finding,
            format!(
                "GPUs hang on node {id}, and none of the pool lies there: copies cross the nodes; memory that the pool \
                 has stays where it is, so stop the daemon, run `forebay pool remove`, and start it again, without \
                 `numactl` and with room on that node"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use forebay_rpc::proto::NodeBytes;

    use super::*;
    use crate::doctor::Verdict;

    /// Of two nodes with two CPUs each.
    fn host() -> Nodes {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/node");
        for (name, text) in
            [("online", "0-1"), ("has_memory", "0-1"), ("node0/cpulist", "0-1"), ("node1/cpulist", "2-3")]
        {
            std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
            std::fs::write(folder.join(name), text).unwrap();
        }
        Nodes::read(root.path())
    }

    fn holdings(nodes: &[(u32, u64)]) -> Holdings {
        let nodes = nodes.iter().map(|&(node, bytes)| NodeBytes { node, bytes }).collect();
        Holdings { capacity_bytes: 4 << 30, populated_bytes: 2 << 30, huge_bytes: 0, nodes }
    }

    #[test]
    fn nodes_are_told_with_what_is_on_them() {
        assert_eq!(judge(&Nodes::default(), &[0], None), Check::ok("numa", "this host has one NUMA node"));
        let finding = "this host has node 0 (2 CPUs), node 1 (2 CPUs, 1 GPU)";
        assert_eq!(judge(&host(), &[1], None), Check::ok("numa", finding));
        let both = judge(&host(), &[1], Some(&holdings(&[(0, 1 << 30), (1, 1 << 30)])));
        assert_eq!(
            both,
            Check::ok("numa", format!("{finding}; the pool has 1.0 GiB on NUMA node 0, 1.0 GiB on NUMA node 1"))
        );
    }

    #[test]
    fn a_pool_that_lies_apart_from_a_gpu_is_a_warning_with_what_to_do() {
        let check = judge(&host(), &[0, 1], Some(&holdings(&[(0, 2 << 30)])));
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.hint.unwrap().contains("GPUs hang on node 1"));
        assert_eq!(judge(&host(), &[0], Some(&holdings(&[(0, 2 << 30)]))).verdict, Verdict::Ok);
    }
}
