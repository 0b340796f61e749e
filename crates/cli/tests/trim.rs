//! A device as a disk: the daemon tells it of what nobody needs.

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::tiers::{BYTES, is_served, store, tier};
use support::*;

/// The file below a device loses what the daemon says that nobody needs.
#[test]
fn a_device_is_trimmed_only_if_the_configuration_says_so() {
    let mut kept = Vec::new();
    for trim in ["false", "true"] {
        let (place, home) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let below = home.path().join("below");
        fs::File::create(&below).unwrap().set_len(64 << 20).unwrap();
        let Some(device) = Loop::over(&below) else { return eprintln!("no loop devices for this user") };
        let arguments = ["--pool.capacity_bytes", "16MiB", "--tier.ssd.admission", "all", "--tier.ssd.trim", trim];
        let disk = ["--tier.ssd.disks", device.0.to_str().expect("a path in UTF-8")];
        let daemon = Daemon::start(&place, &[&arguments[..], &disk].concat());
        let (client, worker) = engine(&place, "a", BYTES);
        wait_until("the tier serves", || tier(&client, "ssd").state == "serving");
        let namespace = client.namespace("t", vec![group()]).unwrap();
        // Twice what the device holds.
        store(&client, &worker, namespace, 0..6000);
        is_served(&client, &worker, namespace, 5900..5950);
        drop((client, worker));
        daemon.terminate();
        assert!(daemon.finish().0, "it ends");
        kept.push(fs::metadata(&below).unwrap().blocks() * 512);
    }
    assert!(kept[1] + (1 << 20) < kept[0], "{kept:?} bytes without and with trims");
}

/// A device over a file. None where this user may not make one.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let path = String::from_utf8(made.stdout).ok()?;
        made.status.success().then(|| Loop(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
