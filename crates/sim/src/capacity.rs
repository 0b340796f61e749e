//! Capacities as people write them: bytes, tokens, blocks, or a share of a trace's distinct blocks.

use std::fmt;
use std::str::FromStr;

use forebay_core::{Error, Result, size};

use crate::trace::Trace;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    Bytes(u64),
    Tokens(u64),
    Blocks(u64),
    /// Share of the trace's distinct blocks.
    Share(f64),
}

/// Fewer blocks than this do not make a cache.
const LEAST_BLOCKS: u64 = 4;
impl Capacity {
    /// Errors where the blocks of the trace have no size in the unit of the capacity.
    pub fn check(self, trace: &Trace) -> Result<()> {
        match self {
            Capacity::Bytes(_) if !trace.has_bytes() => {
                Err(Error::invalid("a capacity in bytes needs the size of a block, which the trace does not name")
                    .with("capacity", self)
                    .with("trace", &trace.name)
                    .hint("give `--block-bytes`, or the capacity as `5%`, `1000000tokens` or `5000blocks`"))
            }
            _ => Ok(()),
        }
    }

    /// In whole blocks of the mean size.
    pub fn blocks(self, trace: &Trace) -> u64 {
        let different = trace.unique() as f64;
        let blocks = match self {
            Capacity::Bytes(bytes) => bytes as f64 / mean_bytes(trace),
            Capacity::Tokens(tokens) => tokens as f64 / (trace.unique_tokens() as f64 / different),
            Capacity::Blocks(blocks) => blocks as f64,
            Capacity::Share(share) => share * different,
        };
        (blocks as u64).max(LEAST_BLOCKS)
    }

    pub fn bytes(self, trace: &Trace) -> u64 {
        (self.blocks(trace) as f64 * mean_bytes(trace)) as u64
    }
}

/// Mean over the distinct blocks.
pub fn mean_bytes(trace: &Trace) -> f64 {
    trace.unique_bytes() as f64 / trace.unique() as f64
}

impl FromStr for Capacity {
    type Err = Error;

    /// `5%`, `64GiB`, `1000000tokens`, `5000blocks`.
    fn from_str(text: &str) -> Result<Capacity> {
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let wrong = || {
            let error = Error::invalid("a capacity is a number and a unit").with("capacity", text);
            error.hint("give a number and a unit, such as `5%`, `64GiB`, `1000000tokens` or `5000blocks`")
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let capacity = match unit.trim() {
            "%" if (0.0..=1000.0).contains(&number) => Capacity::Share(number / 100.0),
            "blocks" => Capacity::Blocks(number as u64),
            "tokens" => Capacity::Tokens(number as u64),
            // A bare number could be of anything.
            "" => return Err(wrong()),
            _ => size::parse(text).map(Capacity::Bytes).map_err(|_| wrong())?,
        };
        match capacity {
            // It would be replayed as the smallest cache.
            Capacity::Share(0.0) | Capacity::Bytes(0) | Capacity::Tokens(0) | Capacity::Blocks(0) => {
                let error = Error::invalid("a capacity is more than nothing").with("capacity", text);
                Err(error.hint("give a larger one, such as `5%`, `64GiB`, `1000000tokens` or `5000blocks`"))
            }
            capacity => Ok(capacity),
        }
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Capacity::Bytes(bytes) => write!(f, "{bytes}B"),
            Capacity::Tokens(tokens) => write!(f, "{tokens}tokens"),
            Capacity::Blocks(blocks) => write!(f, "{blocks}blocks"),
            Capacity::Share(share) => write!(f, "{}%", (share * 1e6).round() / 1e4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_read_as_people_write_them() {
        assert_eq!("0.5%".parse::<Capacity>().unwrap(), Capacity::Share(0.005));
        assert_eq!("64GiB".parse::<Capacity>().unwrap(), Capacity::Bytes(64 << 30));
        assert_eq!("1.5 GiB".parse::<Capacity>().unwrap(), Capacity::Bytes(3 << 29));
        assert_eq!("10tokens".parse::<Capacity>().unwrap(), Capacity::Tokens(10));
        assert_eq!("7blocks".parse::<Capacity>().unwrap(), Capacity::Blocks(7));
        for wrong in ["", "5", "GiB", "5 parsecs", "-1%", "1e9%", "nan%", "0%", "0GiB", "0.5blocks", "0tokens"] {
            assert!(wrong.parse::<Capacity>().is_err(), "`{wrong}` was read");
        }
        assert_eq!(Capacity::Share(0.005).to_string(), "0.5%");
    }
}
