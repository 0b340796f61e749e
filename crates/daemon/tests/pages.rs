//! The generated pages are equal to the code. With `FOREBAY_UPDATE_GOLDEN=1` they are written anew instead.

use std::path::Path;

fn assert_page(name: &str, page: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    if std::env::var_os("FOREBAY_UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, page).expect("the page can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page, "docs/{name} is behind the code: run this test with FOREBAY_UPDATE_GOLDEN=1");
}

#[test]
fn the_page_of_keys_is_equal_to_the_code() {
    assert_page("config.md", &forebay_daemon::config::page());
}

#[test]
fn the_page_of_metrics_is_equal_to_the_code() {
    assert_page("metrics.md", &forebay_daemon::metrics::page());
}
