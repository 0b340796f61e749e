//! What an operator's value must hold beyond its type. A tier's settings list their demands once: the tier refuses what
//! does not meet them, and the daemon says the same of its configuration, by the whole names of the keys.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use forebay_core::{Error, Result};

/// A day. A longer deadline is none, and sums of times stay far from their type's end.
pub const LONGEST_MS: u64 = 24 * 3600 * 1000;

/// Where `holds` is false, the key's value cannot be, and `must` says what it must be instead.
#[derive(Debug)]
pub struct Demand {
    /// Name of the setting.
    pub key: String,
    /// Whether the value meets the demand.
    pub holds: bool,
    /// What the value must do; it follows "it must".
    pub must: Cow<'static, str>,
}

impl Demand {
    /// A demand of any form.
    pub fn new(key: impl Into<String>, holds: bool, must: impl Into<Cow<'static, str>>) -> Demand {
        Demand { key: key.into(), holds, must: must.into() }
    }

    /// A number within bounds.
    pub fn within(key: impl Into<String>, value: u64, range: RangeInclusive<u64>) -> Demand {
        Demand::new(key, range.contains(&value), format!("be from {} to {}", range.start(), range.end()))
    }

    /// A number without an upper bound.
    pub fn at_least_1(key: impl Into<String>, value: u64) -> Demand {
        Demand::new(key, value > 0, "be at least 1")
    }
}

/// Errors with the first demand that is not met.
pub(crate) fn check(demands: Vec<Demand>) -> Result<()> {
    match demands.into_iter().find(|demand| !demand.holds) {
        Some(Demand { key, must, .. }) => {
            Err(Error::invalid(format!("`{key}` cannot have this value")).hint(format!("it must {must}")))
        }
        None => Ok(()),
    }
}
