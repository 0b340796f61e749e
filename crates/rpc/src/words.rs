//! Lists of 32-bit numbers in messages, as bytes: four a number, little endian.
//!
//! On the wire they are the same bytes as `repeated fixed32`. As bytes they are copied whole: a list of that type is
//! encoded and decoded number by number, which takes longer than the lookup of the keys.

/// The bytes of `numbers`.
pub fn to_words(numbers: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; numbers.len() * 4];
    for (word, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *word = number.to_le_bytes();
    }
    bytes
}

/// The numbers in `bytes`. An incomplete number at the end is left out.
pub fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        let numbers = [0, 1, 0x0102_0304, u32::MAX];
        let bytes = to_words(&numbers);
        assert_eq!(bytes[8..12], [4, 3, 2, 1]);
        assert_eq!(words(&bytes).collect::<Vec<_>>(), numbers);
        assert_eq!(words(&bytes[..15]).len(), 3);
    }
}
