//! The generated pages are equal to the code.

mod golden;

use golden::assert_golden;

#[test]
fn the_page_of_keys_is_equal_to_the_code() {
    assert_golden("../../docs/config.md", &forebay_daemon::config::page());
}

#[test]
fn the_page_of_metrics_is_equal_to_the_code() {
    assert_golden("../../docs/metrics.md", &forebay_daemon::metrics::page());
}
