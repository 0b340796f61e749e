//! Eight bytes at a time by tables: for short ends, and for machines without a carry-less multiplication.

use super::polynomial::POLYNOMIAL;

/// Bytes of a step.
const WORD: usize = 8;

/// `TABLES[k][b]` is the register after byte `b` and `k` zero bytes, from a register of zero.
static TABLES: [[u64; 256]; WORD] = {
    let mut tables = [[0; 256]; WORD];
    let mut byte = 0;
    while byte < 256 {
        let mut register = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            register = register >> 1 ^ POLYNOMIAL & 0u64.wrapping_sub(register & 1);
            bit += 1;
        }
        tables[0][byte] = register;
        byte += 1;
    }
    let mut zeros = 1;
    while zeros < WORD {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[zeros - 1][byte];
            tables[zeros][byte] = before >> 8 ^ tables[0][before as u8 as usize];
            byte += 1;
        }
        zeros += 1;
    }
    tables
};

/// The register after `bytes`.
pub fn add(mut register: u64, bytes: &[u8]) -> u64 {
    let (words, end) = bytes.as_chunks::<WORD>();
    for word in words {
        let mixed = (register ^ u64::from_le_bytes(*word)).to_le_bytes();
        register = mixed.iter().zip(TABLES.iter().rev()).fold(0, |sum, (byte, table)| sum ^ table[usize::from(*byte)]);
    }
    for byte in end {
        register = register >> 8 ^ TABLES[0][usize::from(register as u8 ^ byte)];
    }
    register
}
