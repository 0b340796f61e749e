//! Arithmetic of polynomials over GF(2), modulo that of CRC-64/NVME.

/// CRC-64/NVME's polynomial, 0xad93d23594c93659, with its bits reversed: lowest power in the highest bit.
pub const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// `x^(2^k)` modulo the polynomial.
pub const SQUARES: [u64; 64] = {
    let mut squares = [1 << 62; 64];
    let mut k = 1;
    while k < 64 {
        squares[k] = multiply(squares[k - 1], squares[k - 1]);
        k += 1;
    }
    squares
};

/// The product of two polynomials over GF(2), modulo the polynomial.
pub const fn multiply(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut bit = 64;
    while bit > 0 {
        bit -= 1;
        // All bits of a mask or none, so that the loop has no branch to mispredict.
        product ^= b & 0u64.wrapping_sub(a >> bit & 1);
        b = b >> 1 ^ POLYNOMIAL & 0u64.wrapping_sub(b & 1);
    }
    product
}

/// `x^n` modulo the polynomial, bits reversed.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn power_of_x(n: u64) -> u64 {
    let (mut power, mut bit) = (1 << 63, 0);
    while bit < u64::BITS {
        if n >> bit & 1 == 1 {
            power = multiply(power, SQUARES[bit as usize]);
        }
        bit += 1;
    }
    power
}

/// Factors that carry the first and the second 8 bytes of a 16-byte lane across `bytes`. Multiplying two bit-reversed
/// numbers yields the product times x, hence one power less than the distance.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub const fn factors(bytes: usize) -> [u64; 2] {
    let bits = bytes as u64 * 8;
    [power_of_x(bits + 63), power_of_x(bits - 1)]
}
