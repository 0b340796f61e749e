//! How inputs are changed: by bits, bytes, ranges, numbers and words, and by parts of other inputs.

use std::ops::Range;

/// Splitmix64: what a seed draws.
pub struct Dice(pub u64);

impl Dice {
    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// Draws changed inputs.
pub struct Mutator<'a> {
    pub dice: Dice,
    /// What is changed.
    pub inputs: Vec<Vec<u8>>,
    words: &'a [&'a [u8]],
    places: &'a [Range<usize>],
    most_bytes: usize,
}

impl<'a> Mutator<'a> {
    pub fn new(seed: u64, inputs: Vec<Vec<u8>>, words: &'a [&'a [u8]], places: &'a [Range<usize>]) -> Mutator<'a> {
        let most_bytes = 2 * inputs.iter().map(Vec::len).max().unwrap_or(0) + 1024;
        Mutator { dice: Dice(seed), inputs, words, places, most_bytes }
    }

    /// One of the inputs, with one to eight changes.
    pub fn next(&mut self) -> Vec<u8> {
        let chosen = self.dice.below(self.inputs.len());
        let mut bytes = self.inputs[chosen].clone();
        for _ in 0..1 << self.dice.below(4) {
            self.change(&mut bytes);
        }
        bytes.truncate(self.most_bytes);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return self.insert(bytes);
        }
        let at = self.place(bytes.len());
        match self.dice.below(14) {
            0 | 1 => bytes[at] ^= 1 << self.dice.below(8),
            2 => bytes[at] = self.dice.below(256) as u8,
            3 => bytes.truncate(at),
            4 => self.insert(bytes),
            5 => drop(bytes.drain(self.range(at, bytes.len()))),
            6 => {
                let piece = bytes[self.range(at, bytes.len())].to_vec();
                let to = self.place(bytes.len());
                bytes.splice(to..to, piece);
            }
            7 => {
                let piece = bytes[self.range(at, bytes.len())].to_vec();
                let to = self.place(bytes.len());
                overwrite(bytes, to, &piece);
            }
            8 => {
                let other = &self.inputs[self.dice.below(self.inputs.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(other.get(at..).unwrap_or(&[]));
            }
            9 => {
                let other = self.inputs[self.dice.below(self.inputs.len())].clone();
                if at < other.len() {
                    let piece = self.range(at, other.len());
                    overwrite(bytes, at, &other[piece]);
                }
            }
            10 if !self.words.is_empty() => {
                let word = self.words[self.dice.below(self.words.len())];
                match self.dice.below(2) {
                    0 => overwrite(bytes, at, word),
                    _ => drop(bytes.splice(at..at, word.iter().copied())),
                }
            }
            11 => self.decimal(bytes, at),
            _ => self.number(bytes, at),
        }
    }

    fn place(&mut self, len: usize) -> usize {
        if !self.places.is_empty() && self.dice.below(8) > 0 {
            let place = self.places[self.dice.below(self.places.len())].clone();
            let at = place.start + self.dice.below(place.len().max(1));
            if at < len {
                return at;
            }
        }
        self.dice.below(len)
    }

    /// From `at` on, mostly short.
    fn range(&mut self, at: usize, len: usize) -> Range<usize> {
        let longest = 1 << self.dice.below(14);
        at..(at + 1 + self.dice.below(longest)).min(len)
    }

    fn insert(&mut self, bytes: &mut Vec<u8>) {
        let (at, count, is_zero) = (self.dice.below(bytes.len() + 1), 1 + self.dice.below(64), self.dice.below(2) == 0);
        let new: Vec<u8> = (0..count).map(|_| if is_zero { 0 } else { self.dice.below(256) as u8 }).collect();
        bytes.splice(at..at, new);
    }

    /// A binary number of some width becomes one that programs get wrong.
    fn number(&mut self, bytes: &mut [u8], at: usize) {
        let width = 1 << self.dice.below(4);
        // Numbers mostly lie at multiples of their width.
        let at = if self.dice.below(4) > 0 { at - at % width } else { at };
        let len = bytes.len();
        let Some(field) = bytes.get_mut(at..at + width) else { return };
        let is_big = self.dice.below(4) == 0;
        let mut word = [0; 8];
        word[..width].copy_from_slice(field);
        if is_big {
            word[..width].reverse();
        }
        let number = self.odd_number(u64::from_le_bytes(word), len as u64, width as u32 * 8);
        word = number.to_le_bytes();
        if is_big {
            word[..width].reverse();
        }
        field.copy_from_slice(&word[..width]);
    }

    fn odd_number(&mut self, now: u64, len: u64, bits: u32) -> u64 {
        let max = u64::MAX >> (64 - bits);
        match self.dice.below(14) {
            0 => 0,
            1 => 1,
            2 => max,
            3 => max - 1,
            4 => max / 2,
            5 => max / 2 + 1,
            6 | 7 => now.wrapping_add(1),
            8 | 9 => now.wrapping_sub(1),
            10 => len.wrapping_add(self.dice.below(3) as u64).wrapping_sub(1),
            11 => 1 << self.dice.below(bits as usize),
            12 => now.wrapping_mul(2),
            _ => self.dice.next(),
        }
    }

    /// A number in digits becomes another; without one, a number is put in.
    fn decimal(&mut self, bytes: &mut Vec<u8>, at: usize) {
        let begin = bytes[at..].iter().position(u8::is_ascii_digit).map_or(at, |digit| at + digit);
        let end = bytes[begin..].iter().position(|byte| !byte.is_ascii_digit()).map_or(bytes.len(), |end| begin + end);
        let now = std::str::from_utf8(&bytes[begin..end]).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        let text = match self.dice.below(8) {
            0 => "-1".to_owned(),
            1 => "99999999999999999999999".to_owned(),
            2 => "1e308".to_owned(),
            3 => "0.5".to_owned(),
            _ => self.odd_number(now, bytes.len() as u64, 64).to_string(),
        };
        bytes.splice(begin..end, text.into_bytes());
    }
}

fn overwrite(bytes: &mut [u8], at: usize, piece: &[u8]) {
    for (to, from) in bytes[at..].iter_mut().zip(piece) {
        *to = *from;
    }
}

/// An input that fails as well, with pieces taken out and bytes made zero.
pub fn shrink(mut input: Vec<u8>, tries: usize, fails: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut left = tries;
    for is_removal in [true, false] {
        let mut piece = input.len() / 2;
        while piece > 0 && left > 0 {
            let mut at = 0;
            while at < input.len() && left > 0 {
                let end = (at + piece).min(input.len());
                let mut fewer = input.clone();
                match is_removal {
                    true => drop(fewer.drain(at..end)),
                    false => fewer[at..end].fill(0),
                }
                let is_new = fewer != input;
                left -= usize::from(is_new);
                match is_new && fails(&fewer) {
                    true => input = fewer,
                    false => at += piece,
                }
            }
            piece /= 2;
        }
    }
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_matter_is_taken_out() {
        let input: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let smallest = shrink(input, 3000, |bytes| bytes.windows(2).any(|two| two == [9, 10]));
        assert_eq!(smallest, [9, 10]);
    }
}
