//! What is said of values beyond their type, in the words of the configuration. Most demands come from the settings of
//! the tiers themselves.

use forebay_io::Demand;

use super::value::Bytes;

/// Of a limit in bytes, per whatever time.
pub fn rate(key: impl Into<String>, rate: Option<Bytes>) -> Demand {
    Demand::new(key, rate.is_none_or(|bytes| bytes.0 > 0), "be greater than 0, or not set")
}

/// Nothing comes of these keys, at the values that the configuration has.
pub struct Idle {
    pub keys: Vec<String>,
    /// Follows a colon.
    pub because: String,
}

impl Idle {
    pub fn new<K: Into<String>>(keys: impl IntoIterator<Item = K>, because: impl Into<String>) -> Idle {
        Idle { keys: keys.into_iter().map(Into::into).collect(), because: because.into() }
    }
}
