//! The network cards with RDMA, which transfers over `ucx://` can use, and the library that they need.

use std::path::Path;

use forebay_core::Result;
use forebay_numa::ROOT;

use super::Check;

/// The least version of UCX whose sessions end safely, in words.
const NEEDS: &str = "transfers over `ucx://` need UCX 1.18 or later: install it, or name its `libucp.so.0` to them";

/// Nothing on a host without such cards.
pub fn checks() -> Vec<Check> {
    let cards = cards(Path::new(ROOT));
    let ucx = (!cards.is_empty()).then(|| judged(forebay_fabric::ucx_version()));
    cards.iter().map(Card::check).chain(ucx).collect()
}

fn judged(version: Result<[u32; 3]>) -> Check {
    match version {
        Ok([major, minor, release]) => Check::ok("ucx", format!("the system's UCX is {major}.{minor}.{release}")),
        // Nothing but these transfers needs it.
        Err(error) => Check::warn("ucx", error.to_string(), NEEDS),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct Card {
    name: String,
    bus_id: Option<String>,
    numa_node: Option<u32>,
    ports: Vec<Port>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    number: u32,
    /// As the kernel tells: `ACTIVE`, `400 Gb/sec (4X NDR)`, `InfiniBand`.
    state: String,
    rate: String,
    link: String,
}

impl Card {
    fn check(&self) -> Check {
        let port = |port: &Port| format!("port {}: {}, {}, {}", port.number, port.state, port.rate, port.link);
        let parts = [
            self.bus_id.as_ref().map(|bus_id| format!("at {bus_id}")),
            self.numa_node.map(|node| format!("NUMA node {node}")),
        ];
        let finding: Vec<String> = parts.into_iter().flatten().chain(self.ports.iter().map(port)).collect();
        let name = format!("rdma {}", self.name);
        match self.ports.iter().any(|port| port.state == "ACTIVE") {
            true => Check::ok(name, finding.join(", ")),
            false => Check::warn(name, finding.join(", "), "no port is active: see the cable, the switch and `ibstat`"),
        }
    }
}

fn cards(root: &Path) -> Vec<Card> {
    let mut cards: Vec<Card> = names(&root.join("sys/class/infiniband"))
        .into_iter()
        .map(|name| {
            let folder = root.join("sys/class/infiniband").join(&name);
            let device = folder.join("device");
            let bus_id = std::fs::read_link(&device).ok();
            let bus_id = bus_id.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
            // -1 on a host with one node.
            let numa_node = said(&device.join("numa_node")).parse().ok();
            let port = |name: String| {
                let folder = folder.join("ports").join(&name);
                let [state, rate, link] = ["state", "rate", "link_layer"].map(|fact| said(&folder.join(fact)));
                // `4: ACTIVE`
                let state = state.split_once(": ").map_or(state.clone(), |(_, word)| word.to_owned());
                Some(Port { number: name.parse().ok()?, state, rate, link })
            };
            let mut ports: Vec<Port> = names(&folder.join("ports")).into_iter().filter_map(port).collect();
            ports.sort_by_key(|port| port.number);
            Card { name, bus_id, numa_node, ports }
        })
        .collect();
    cards.sort_by(|one, other| one.name.cmp(&other.name));
    cards
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Empty where the system does not tell.
fn said(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    use forebay_core::{Error, ErrorKind};

    use super::*;
    use crate::doctor::Verdict;

    fn host(ports: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let [pci, class] = ["sys/devices/pci0000:80/0000:81:00.0", "sys/class/infiniband/mlx5_0"];
        let [pci, class] = [pci, class].map(|path| root.path().join(path));
        create_dir_all(&pci).unwrap();
        write(pci.join("numa_node"), "1\n").unwrap();
        create_dir_all(class.join("ports")).unwrap();
        symlink(&pci, class.join("device")).unwrap();
        for (number, state) in ports {
            let port = class.join("ports").join(number);
            create_dir_all(&port).unwrap();
            write(port.join("state"), state).unwrap();
            write(port.join("rate"), "400 Gb/sec (4X NDR)\n").unwrap();
            write(port.join("link_layer"), "InfiniBand\n").unwrap();
        }
        root
    }

    #[test]
    fn a_card_is_told_with_its_place_and_its_ports() {
        let root = host(&[("2", "1: DOWN\n"), ("1", "4: ACTIVE\n")]);
        let [card] = &cards(root.path())[..] else { panic!("one card") };
        let told = "at 0000:81:00.0, NUMA node 1, port 1: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand, port 2: DOWN, 400 \
                    Gb/sec (4X NDR), InfiniBand";
        assert_eq!(card.check(), Check::ok("rdma mlx5_0", told));
    }

    #[test]
    fn a_card_without_an_active_port_is_a_warning_and_a_host_without_cards_says_nothing() {
        let root = host(&[("1", "1: DOWN\n")]);
        assert_eq!(cards(root.path())[0].check().verdict, Verdict::Warn);
        assert_eq!(cards(tempfile::tempdir().unwrap().path()), []);
    }

    #[test]
    fn a_library_that_is_missing_or_old_is_a_warning() {
        assert_eq!(judged(Ok([1, 18, 1])), Check::ok("ucx", "the system's UCX is 1.18.1"));
        let old = judged(Err(Error::new(ErrorKind::Unsupported, "it is version 1.13")));
        assert_eq!((old.verdict, old.hint.as_deref()), (Verdict::Warn, Some(NEEDS)));
    }
}
