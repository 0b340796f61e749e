//! The GPUs that engines of this host copy from and to, and how they hang on it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_device::cuda::LibCuda;
use forebay_device::cuda::gpus::{Gpu, Gpus, Link, ROOT};

use super::Check;

/// A driver that was not in use starts for seconds on a host with many GPUs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Nothing on a host without NVIDIA's GPUs: the daemon needs none.
pub fn checks() -> Vec<Check> {
    let root = Path::new(ROOT);
    judged(LibCuda::find().and_then(|driver| match driver {
        Some(driver) => Gpus::find(Arc::new(driver), root, PATIENCE),
        None => Ok(Gpus::listed(root)),
    }))
}

fn judged(found: Result<Gpus>) -> Vec<Check> {
    match found {
        Ok(found) => found.gpus.iter().map(|gpu| judge(&found, gpu)).collect(),
        Err(error) => vec![trouble(&error)],
    }
}

/// The daemon serves without a GPU, so it is a warning.
fn trouble(error: &Error) -> Check {
    let hint =
        error.hint_text().unwrap_or("see whether `nvidia-smi` answers, and the kernel's log for lines with `NVRM`");
    Check::warn("gpu", error.to_string(), hint)
}

fn judge(found: &Gpus, gpu: &Gpu) -> Check {
    let Link { numa_node, lanes, most_lanes, .. } = gpu.link;
    let driver = [("driver ", &found.driver), ("CUDA ", &found.cuda)];
    let driver = driver.map(|(what, version)| version.as_ref().map(|version| format!("{what}{version}")));
    let parts = [
        Some(gpu.name.clone()),
        (!gpu.bus_id.is_empty()).then(|| format!("at {}", gpu.bus_id)),
        numa_node.map(|node| format!("NUMA node {node}")),
        told(&gpu.link),
    ];
    let finding = parts.into_iter().chain(driver).flatten().collect::<Vec<_>>().join(", ");
    let name = gpu.ordinal.map_or("gpu".to_string(), |ordinal| format!("gpu {ordinal}"));
    match lanes.zip(most_lanes) {
        Some((lanes, most)) if lanes < most => Check::warn(
            name,
            finding,
            format!(
                "copies have {lanes} of the {most} lanes that this GPU could use: see whether the card sits right, and \
                 whether its slot has all lanes and the firmware does not split them"
            ),
        ),
        _ => Check::ok(name, finding),
    }
}

/// `16 lanes of 32 GT/s`. What a GPU has when it is idle says nothing of what it has at work.
fn told(link: &Link) -> Option<String> {
    let lanes = link.lanes?;
    let speed = link.most_gt_per_s.map(|speed| format!(" of {speed} GT/s")).unwrap_or_default();
    let now = link.gt_per_s.filter(|now| link.most_gt_per_s.is_some_and(|most| *now < most));
    let now = now.map(|now| format!(" ({now} GT/s now, as of an idle GPU)")).unwrap_or_default();
    Some(format!("{lanes} lanes{speed}{now}"))
}

#[cfg(test)]
mod tests {
    use forebay_core::ErrorKind;

    use super::*;
    use crate::doctor::Verdict;

    fn found(link: Link) -> Gpus {
        let (name, bus_id) = ("NVIDIA H100 80GB HBM3".to_string(), "0000:3b:00.0".to_string());
        let gpus = vec![Gpu { ordinal: Some(0), name, bus_id, link }];
        Gpus { driver: Some("580.65.06".to_string()), cuda: Some("13.0".to_string()), gpus }
    }

    const LINK: Link = Link {
        numa_node: Some(1),
        lanes: Some(16),
        most_lanes: Some(16),
        gt_per_s: Some(32.0),
        most_gt_per_s: Some(32.0),
    };

    #[test]
    fn a_gpu_is_told_with_its_place_its_link_and_its_driver() {
        let told = |link| judged(Ok(found(link))).remove(0);
        let (gpu, driver) = ("NVIDIA H100 80GB HBM3, at 0000:3b:00.0", "driver 580.65.06, CUDA 13.0");
        let whole = format!("{gpu}, NUMA node 1, 16 lanes of 32 GT/s, {driver}");
        assert_eq!(told(LINK), Check::ok("gpu 0", whole));
        let idle = told(Link { gt_per_s: Some(2.5), ..LINK });
        assert!(idle.verdict == Verdict::Ok && idle.finding.contains("16 lanes of 32 GT/s (2.5 GT/s now"), "{idle:?}");
        let little = told(Link::default());
        assert_eq!(little, Check::ok("gpu 0", format!("{gpu}, {driver}")));
        let gpus = vec![Gpu { ordinal: None, ..found(LINK).gpus.remove(0) }];
        let listed = judged(Ok(Gpus { gpus, ..Gpus::default() })).remove(0);
        assert_eq!(listed, Check::ok("gpu", format!("{gpu}, NUMA node 1, 16 lanes of 32 GT/s")));
    }

    #[test]
    fn a_link_that_lacks_lanes_is_a_warning() {
        let check = judged(Ok(found(Link { lanes: Some(8), ..LINK }))).remove(0);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.hint.unwrap().contains("8 of the 16 lanes"));
    }

    #[test]
    fn a_host_without_gpus_has_no_line_and_a_driver_in_trouble_is_a_warning_with_a_hint() {
        assert_eq!(judged(Ok(Gpus::default())), []);
        let check = judged(Err(Error::new(ErrorKind::Unavailable, "the driver does not start"))).remove(0);
        assert!(check.verdict == Verdict::Warn && check.hint.is_some_and(|hint| hint.contains("nvidia-smi")));
    }
}
