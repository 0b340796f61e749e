//! The GPUs of this host with their links and their driver, as the driver's library tells of those that this process
//! may see, or as the system lists them where there is no library.
//!
//! Invariants: nothing is made on a GPU, no context either, so it costs the GPUs nothing. What is not told is left out.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;

use super::context::{failed, within};
use super::driver::{Driver, Status};

/// Below which the system tells of devices and modules; another folder in tests.
pub const ROOT: &str = "/";

/// See the module documentation.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Gpus {
    /// The driver's own version, as `580.65.06`.
    pub driver: Option<String>,
    /// The newest CUDA that the driver serves, as `13.0`.
    pub cuda: Option<String>,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Gpu {
    /// Position among those that this process may see; none if only the system lists it.
    pub ordinal: Option<u32>,
    pub name: String,
    /// As `0000:3b:00.0`; empty if the driver does not tell.
    pub bus_id: String,
    pub link: Link,
}

/// How a GPU hangs on the host: now, and at most.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Link {
    pub numa_node: Option<u32>,
    pub lanes: Option<u32>,
    pub most_lanes: Option<u32>,
    /// A GPU that has nothing to do lowers it.
    pub gt_per_s: Option<f64>,
    pub most_gt_per_s: Option<f64>,
}

impl Gpus {
    /// Those that the driver lets this process see. `Timeout` if the driver does not start within `patience`.
    pub fn find(driver: Arc<dyn Driver>, root: &Path, patience: Duration) -> Result<Gpus> {
        let root = root.to_owned();
        within(patience, move || {
            let cannot = |what| {
                let driver = driver.clone();
                move |status| failed(&*driver, what, status)
            };
            let count = match driver.init() {
                Ok(()) => driver.device_count().map_err(cannot("the driver does not count its devices"))?,
                Err(Status::NO_DEVICE) => 0,
                Err(status) => return Err(cannot("the driver does not start")(status)),
            };
            let gpu = |ordinal| {
                let device = driver.device(ordinal).map_err(cannot("the driver has no such device"))?;
                let name = driver.name(device).map_err(cannot("the driver does not name its device"))?;
                let bus_id = driver.pci_bus_id(device).unwrap_or_default();
                let link = Link::read(&root, &bus_id);
                Ok(Gpu { ordinal: Some(ordinal), name, bus_id, link })
            };
            let version = driver.version().unwrap_or(0);
            let cuda = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
            Ok(Gpus { driver: module(&root), cuda, gpus: (0..count).map(gpu).collect::<Result<_>>()? })
        })
    }

    /// Those that the driver's module of the kernel lists, by their places.
    pub fn listed(root: &Path) -> Gpus {
        let folders = fs::read_dir(root.join("proc/driver/nvidia/gpus")).into_iter().flatten().flatten();
        let mut gpus: Vec<Gpu> = folders
            .filter_map(|folder| {
                let told = fs::read_to_string(folder.path().join("information")).ok()?;
                let name = told.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string();
                let bus_id = folder.file_name().to_string_lossy().to_lowercase();
                let link = Link::read(root, &bus_id);
                Some(Gpu { ordinal: None, name, bus_id, link })
            })
            .collect();
        gpus.sort_by(|one, other| one.bus_id.cmp(&other.bus_id));
        Gpus { driver: module(root), cuda: None, gpus }
    }
}

/// The version of the driver's module of the kernel.
fn module(root: &Path) -> Option<String> {
    let told = fs::read_to_string(root.join("sys/module/nvidia/version")).ok()?;
    Some(told.trim().to_string())
}

impl Link {
    /// Of a device at a place such as `0000:3b:00.0`.
    pub fn read(root: &Path, bus_id: &str) -> Link {
        let folder = root.join("sys/bus/pci/devices").join(bus_id);
        let told = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).ok()?;
            Some(text.split_whitespace().next()?.to_string())
        };
        // `16`; a host of one node says `-1`, and some a width of 0.
        let number = |name: &str| told(name)?.parse::<u32>().ok();
        // `16.0 GT/s PCIe`
        let speed = |name: &str| told(name)?.parse::<f64>().ok();
        let lanes = |name: &str| number(name).filter(|lanes| *lanes > 0);
        Link {
            numa_node: number("numa_node"),
            lanes: lanes("current_link_width"),
            most_lanes: lanes("max_link_width"),
            gt_per_s: speed("current_link_speed"),
            most_gt_per_s: speed("max_link_speed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake::{Fake, Fault};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn what_driver_and_system_tell_is_found_without_a_context() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| write(root.path(), name, text);
        write("sys/module/nvidia/version", "580.65.06\n");
        let first = "sys/bus/pci/devices/fake:00:00.0";
        for (name, text) in [
            ("numa_node", "1\n"),
            ("current_link_width", "8\n"),
            ("max_link_width", "16\n"),
            ("current_link_speed", "2.5 GT/s PCIe\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
        ] {
            write(&format!("{first}/{name}"), text);
        }
        write("sys/bus/pci/devices/fake:01:00.0/numa_node", "-1\n");
        write("sys/bus/pci/devices/fake:01:00.0/current_link_speed", "Unknown\n");
        let fake = Arc::new(Fake::new(1));
        let found = Gpus::find(fake.clone(), root.path(), PATIENCE).unwrap();
        let link = Link {
            numa_node: Some(1),
            lanes: Some(8),
            most_lanes: Some(16),
            gt_per_s: Some(2.5),
            most_gt_per_s: Some(32.0),
        };
        let gpu = |ordinal, link| {
            let (name, bus_id) = (format!("fake GPU {ordinal}"), format!("fake:{ordinal:02}:00.0"));
            Gpu { ordinal: Some(ordinal), name, bus_id, link }
        };
        let (gpus, cuda) = (vec![gpu(0, link), gpu(1, Link::default())], Some("13.0".to_string()));
        assert_eq!(found, Gpus { driver: Some("580.65.06".to_string()), cuda, gpus });
        assert_eq!(fake.open(), 0, "a context was made");
    }

    #[test]
    fn without_a_library_the_system_lists_them() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Gpus::listed(root.path()), Gpus::default());
        let told = "Model: \t\t NVIDIA L4\nIRQ:   \t\t 174\nBus Location: \t 0000:AF:00.0\n";
        for place in ["0000:AF:00.0", "0000:3B:00.0"] {
            write(root.path(), &format!("proc/driver/nvidia/gpus/{place}/information"), told);
        }
        write(root.path(), "sys/bus/pci/devices/0000:af:00.0/numa_node", "1");
        let found = Gpus::listed(root.path()).gpus;
        let told: Vec<_> = found.iter().map(|gpu| (gpu.bus_id.as_str(), gpu.link.numa_node)).collect();
        assert_eq!(told, [("0000:3b:00.0", None), ("0000:af:00.0", Some(1))]);
        assert!(found.iter().all(|gpu| gpu.name == "NVIDIA L4" && gpu.ordinal.is_none()), "{found:?}");
    }

    #[test]
    fn a_driver_without_gpus_is_no_error_and_one_that_fails_or_hangs_is_one() {
        let find = |fake: &Arc<Fake>, patience| Gpus::find(fake.clone(), Path::new("/nowhere"), patience);
        let fake = Arc::new(Fake::new(2));
        fake.fault(Fault::Call("init", 1, Status::NO_DEVICE));
        assert_eq!(find(&fake, PATIENCE).unwrap().gpus, []);
        fake.fault(Fault::Call("init", 1, Status::UNKNOWN));
        assert!(find(&fake, PATIENCE).unwrap_err().to_string().contains("the driver does not start"));
        let held = fake.hold_start();
        let late = find(&fake, Duration::from_millis(20)).unwrap_err();
        drop(held);
        assert!(late.hint_text().unwrap().contains("nvidia-smi"), "{late}");
    }
}
