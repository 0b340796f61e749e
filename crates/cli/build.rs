//! Tells the program which revision it is built from, where the sources are a git checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    // Grows with every commit, so the revision is never an older one.
    let log = "../../.git/logs/HEAD";
    println!("cargo:rerun-if-changed=build.rs");
    if Path::new(log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    let revision = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok();
    let revision = revision.filter(|output| output.status.success()).map(|output| output.stdout).unwrap_or_default();
    println!("cargo:rustc-env=BUILD_REVISION={}", String::from_utf8_lossy(&revision).trim());
}
