//! Texts that people see, kept beside the tests. With `FOREBAY_UPDATE_GOLDEN=1` they are written anew instead.

use std::path::Path;

/// `path` is relative to the crate.
pub fn assert_golden(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("FOREBAY_UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, text).expect("the golden file can be written");
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(golden == text, "{path} is not what the code says; FOREBAY_UPDATE_GOLDEN=1 writes it anew:\n{text}");
}
