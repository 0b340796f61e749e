//! Every kind of tier has what each of them has.

use std::fs::read_to_string;
use std::path::Path;

use forebay_daemon::config::Config;

/// In a tier's folder, beside what is its own.
const FILES: [&str; 4] = ["config.rs", "mod.rs", "report.rs", "tier.rs"];

#[test]
fn every_tier_has_the_same_set_of_files_a_page_and_passes_the_suite_for_all() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for tier in Config::default().tiers {
        let name = tier.name();
        let folder = root.join("crates/io/src").join(name);
        let shared = tier.capabilities().is_shared.then_some("purge.rs");
        for file in FILES.into_iter().chain(shared) {
            assert!(folder.join(file).exists(), "`{name}` has no {file}");
        }
        assert!(root.join(format!("docs/tiers/{name}.md")).exists(), "`{name}` has no page");
        let suite = read_to_string(root.join(format!("crates/io/tests/{name}/conform.rs"))).unwrap_or_default();
        assert!(suite.contains("conformance::check("), "`{name}` does not run the suite for all tiers");
    }
}
