//! Sizes as people read and write them: one parser, and one way to print each kind of answer.
//!
//! Invariant: what [`exact`] prints, [`parse`] takes back without the loss of a byte.

/// The largest first; a number alone is of bytes.
const UNITS: [(&str, u32); 6] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0), ("", 0)];

/// What [`parse`] takes, for people.
pub const KIND: &str = "a number of bytes, or a number with KiB, MiB, GiB or TiB";

/// Why a text is no size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// It is not written as a size is.
    Form,
    /// 64 bits cannot count its bytes.
    TooLarge,
}

/// Bytes of `4096`, `8GiB`, `1.5 GiB`. A fraction of a byte is cut off; a number without a unit has no fraction.
pub fn parse(text: &str) -> Result<u64, Wrong> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit.trim_start()).ok_or(Wrong::Form)?;
    let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, part)| (whole, Some(part)));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || fraction.is_some_and(|part| !is_number(part) || *shift == 0) {
        return Err(Wrong::Form);
    }
    let bytes = whole.parse::<u64>().ok().and_then(|count| count.checked_mul(1 << shift)).ok_or(Wrong::TooLarge)?;
    // Less than a unit, and so never more than 64 bits; digits after the 18th are less than a byte.
    let part = fraction.map_or("0", |part| &part[..part.len().min(18)]);
    let below = part.parse::<u128>().map_or(0, |count| (count << shift) / 10_u128.pow(part.len() as u32));
    Ok(bytes + below as u64)
}

/// `8GiB`, `1536MiB`, `4097`: in the largest unit that divides the size, so that no digit is lost.
pub fn exact(bytes: u64) -> String {
    let (unit, shift) = UNITS
        .into_iter()
        .find(|(name, shift)| name.len() == 3 && bytes > 0 && bytes.trailing_zeros() >= *shift)
        .unwrap_or(("", 0));
    format!("{}{unit}", bytes >> shift)
}

/// `8.0 GiB`, `512 B`: one digit after the point, the nearest.
pub fn human(bytes: u64) -> String {
    in_units(bytes, |units| units)
}

/// As [`human`], and never more than there is: what is left beside what is needed.
pub fn human_at_most(bytes: u64) -> String {
    in_units(bytes, |units| (units * 10.0).floor() / 10.0)
}

fn in_units(bytes: u64, rounded: impl Fn(f64) -> f64) -> String {
    match UNITS.into_iter().find(|(name, shift)| name.len() == 3 && bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", rounded(bytes as f64 / (1_u64 << shift) as f64)),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_with_its_unit_or_not_at_all() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7B", 7),
            ("8GiB", 8 << 30),
            ("3 MiB", 3 << 20),
            ("1.5GiB", 3 << 29),
            ("0.001KiB", 1),
            ("16777215TiB", 16_777_215 << 40),
            ("16777215.99999999999999999999TiB", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for bad in ["", "GiB", "8GB", "8gib", "-1", "+1", "8GiBs", "1.5", "1.5B", ".5GiB", "1.GiB", "1.5.1GiB", "1e3"] {
            assert_eq!(parse(bad), Err(Wrong::Form), "{bad:?} was taken");
        }
        for large in ["16777216TiB", "99999999999999999999", "99999999999999999999.5TiB"] {
            assert_eq!(parse(large), Err(Wrong::TooLarge), "{large}");
        }
    }

    #[test]
    fn a_size_is_shown_without_losing_a_byte() {
        for (bytes, text) in
            [(0, "0"), (1, "1"), (4096, "4KiB"), (4097, "4097"), (3 << 30, "3GiB"), (1536 << 20, "1536MiB")]
        {
            assert_eq!((exact(bytes).as_str(), parse(text)), (text, Ok(bytes)));
        }
    }

    #[test]
    fn sizes_read_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (4096, "4.0 KiB"),
            (160_000_000, "152.6 MiB"),
            (1 << 44, "16.0 TiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
        assert_eq!([human((30 << 30) - 1), human_at_most((30 << 30) - 1)], ["30.0 GiB", "29.9 GiB"]);
        assert_eq!([1023, 1536, 160_000_000].map(human_at_most), ["1023 B", "1.5 KiB", "152.5 MiB"]);
    }
}
