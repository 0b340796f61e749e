//! The command and the native module are built from the same dependencies with the same features, so that a build of
//! both compiles each once.

use std::collections::BTreeSet;
use std::process::Command;

use crate::root;

/// Crates below `package`, each with its features; twice if the compiler needs it with others than the product.
fn features(package: &str) -> BTreeSet<(String, String)> {
    let mut cargo = Command::new(env!("CARGO"));
    let arguments = ["--edges", "normal,build", "--prefix", "none", "--format", "{p}|{f}", "--package", package];
    let done = cargo.current_dir(root()).args(["tree", "--locked"]).args(arguments).output().expect("cargo runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8_lossy(&done.stdout);
    let lines = text.lines().filter_map(|line| line.trim_end_matches(" (*)").split_once('|'));
    lines.map(|(name, features)| (name.to_owned(), features.to_owned())).collect()
}

#[test]
fn the_native_module_is_built_from_what_the_command_is_built_from() {
    let (module, command) = (features("forebay-python"), features("forebay-cli"));
    let names: BTreeSet<&String> = command.iter().map(|(name, _)| name).collect();
    let shared: Vec<_> = module.iter().filter(|(name, _)| names.contains(name)).collect();
    assert!(shared.len() > 100, "only {} shared crates were found", shared.len());
    let other: Vec<_> = shared.into_iter().filter(|one| !command.contains(*one)).collect();
    assert!(other.is_empty(), "the command has these with other features; say them in crates/python: {other:?}");
}
