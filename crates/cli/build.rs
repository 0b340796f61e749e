//! Tells the program which revision it is built from, where the sources are a git checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    // Grows with every commit, so the revision is never an older one. A worktree has it elsewhere than a checkout.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]);
    println!("cargo:rerun-if-changed=build.rs");
    if Path::new(&log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    println!("cargo:rustc-env=BUILD_REVISION={}", git(&["rev-parse", "--short=12", "HEAD"]));
}

/// What git says; empty without git.
fn git(arguments: &[&str]) -> String {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success());
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}
