//! What a value must hold beyond its type.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use super::value::Bytes;

/// Where `holds` is false, the key's value cannot be, and `must` says what it must be instead.
pub struct Demand {
    pub key: String,
    pub holds: bool,
    pub must: Cow<'static, str>,
}

impl Demand {
    pub fn new(key: impl Into<String>, holds: bool, must: impl Into<Cow<'static, str>>) -> Demand {
        Demand { key: key.into(), holds, must: must.into() }
    }

    pub fn within(key: impl Into<String>, value: u64, range: RangeInclusive<u64>) -> Demand {
        Demand::new(key, range.contains(&value), format!("be from {} to {}", range.start(), range.end()))
    }

    pub fn at_least_1(key: impl Into<String>, value: u64) -> Demand {
        Demand::new(key, value > 0, "be at least 1")
    }

    /// In bytes, per whatever time.
    pub fn rate(key: impl Into<String>, rate: Option<Bytes>) -> Demand {
        Demand::new(key, rate.is_none_or(|bytes| bytes.0 > 0), "be greater than 0, or not set")
    }
}
