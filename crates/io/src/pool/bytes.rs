//! Byte counts for people.

/// "512 bytes", "2 MiB", "1.5 GiB": at most one digit after the point, rounded down.
pub(super) fn human(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1024 => return format!("{bytes} bytes"),
        1024..0x10_0000 => (10, "KiB"),
        0x10_0000..0x4000_0000 => (20, "MiB"),
        0x4000_0000..0x100_0000_0000 => (30, "GiB"),
        _ => (40, "TiB"),
    };
    let tenths = ((u128::from(bytes) * 10) >> unit) as u64;
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        tenth => format!("{}.{tenth} {name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::human;

    #[test]
    fn byte_counts_read_short_and_never_too_large() {
        let cases = [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1536, "1.5 KiB"),
            (2 << 20, "2 MiB"),
            ((30 << 30) - 1, "29.9 GiB"),
            (1 << 44, "16 TiB"),
            (u64::MAX, "16777215.9 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(human(bytes), text);
        }
    }
}
