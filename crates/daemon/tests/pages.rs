//! The generated pages are equal to the code.

#[path = "pages/frame.rs"]
mod frame;
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

#[test]
fn the_page_of_the_frame_is_equal_to_the_protocol() {
    assert_golden("../../docs/frame.md", &frame::page());
}
