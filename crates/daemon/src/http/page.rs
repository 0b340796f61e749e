//! The page at `/`: one file that shows the frame, live.
//!
//! Invariants: the page asks for nothing but `frame.json` beside it, and its policy lets the browser ask for nothing
//! else and run no other script. It is put together when the daemon is compiled; the files are in `page/`.

use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::header::HeaderValue;
use sha2::{Digest, Sha256};

/// Charts, with the licence that goes with every copy: `page/uplot/vendored.toml` says what it is.
macro_rules! uplot {
    () => {
        concat!("/*\n", include_str!("page/uplot/LICENSE"), "\n*/\n", include_str!("page/uplot/uPlot.iife.min.js"))
    };
}

macro_rules! style {
    () => {
        concat!(include_str!("page/uplot/uPlot.min.css"), "\n", include_str!("page/page.css"))
    };
}

macro_rules! script {
    () => {
        concat!(uplot!(), "\n", include_str!("page/page.js"))
    };
}

/// The text of `<style>` and `<script>` begins where `head.html` and `body.html` end.
pub const PAGE: &str = concat!(
    include_str!("page/head.html"),
    style!(),
    include_str!("page/body.html"),
    script!(),
    "</script>\n</body>\n</html>\n"
);

/// What the browser may do for this page. Style and script are named by their digests.
pub static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let digest = |text: &str| format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)));
    let policy = format!(
        "default-src 'none'; connect-src 'self'; img-src data:; style-src {}; script-src {}; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        // The line break behind the opening tag belongs to the element.
        digest(concat!("\n", style!())),
        digest(concat!("\n", script!())),
    );
    HeaderValue::try_from(policy).expect("the policy is printable")
});

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that is in everybody's way is not looked at.
    #[test]
    fn the_page_is_one_small_file_that_names_no_other() {
        assert!(PAGE.len() <= 120 << 10, "{} bytes", PAGE.len());
        for foreign in ["src=", "@import", "url(", "<iframe"] {
            let ours = PAGE.replace(include_str!("page/uplot/uPlot.iife.min.js"), "");
            assert!(!ours.contains(foreign), "{foreign}");
        }
        assert_eq!(PAGE.matches("<script>").count(), 1);
        assert!(PAGE.contains(concat!("<style>\n", style!(), "</style>")));
        assert!(PAGE.contains(concat!("<script>\n", script!(), "</script>")));
    }
}
