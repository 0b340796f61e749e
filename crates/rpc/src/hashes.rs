//! Block hashes in messages: all of one length, consecutive.
//!
//! Invariant: `packed.len()` is a multiple of `hash_bytes`, which is 1 to 32.

use forebay_core::{BlockHash, Error, Result};

/// See the module documentation. The length is that of the first hash pushed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hashes {
    hash_bytes: usize,
    packed: Vec<u8>,
}

impl Hashes {
    /// Allocates for `count` SHA-256 hashes.
    pub fn with_capacity(count: usize) -> Hashes {
        Hashes { hash_bytes: 0, packed: Vec::with_capacity(count * BlockHash::MAX_LEN) }
    }

    /// Errors with `Invalid` if the hash is empty, longer than 32 bytes, or of another length than earlier ones.
    #[inline]
    pub fn push(&mut self, hash: &[u8]) -> Result<()> {
        if hash.len() != self.hash_bytes || hash.is_empty() {
            self.admit(hash)?;
        }
        self.packed.extend_from_slice(hash);
        Ok(())
    }

    /// Number of hashes.
    pub fn len(&self) -> usize {
        self.packed.len() / self.hash_bytes()
    }

    /// Whether there is no hash.
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// The hashes in the order in which they were pushed.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &[u8]> + ExactSizeIterator {
        self.packed.chunks_exact(self.hash_bytes())
    }

    /// The hash at `index`; `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.iter().nth(index)
    }

    /// Length of each hash; 1 if there is none, so that nobody divides by zero.
    pub fn hash_bytes(&self) -> usize {
        self.hash_bytes.max(1)
    }

    /// Keeps the first `count`.
    pub fn truncate(&mut self, count: usize) {
        self.packed.truncate(count * self.hash_bytes());
    }

    /// The bytes of all hashes, one after another, as they stand in messages.
    pub fn into_packed(self) -> Vec<u8> {
        self.packed
    }

    /// The first hash sets the length; a hash of another length is refused.
    #[cold]
    fn admit(&mut self, hash: &[u8]) -> Result<()> {
        BlockHash::new(hash)?;
        if !self.packed.is_empty() {
            return Err(Error::invalid("the hashes of one call differ in length")
                .with("bytes", hash.len())
                .with("first_bytes", self.hash_bytes)
                .hint("hashes of one length go into one call; make a call for each length"));
        }
        self.hash_bytes = hash.len();
        Ok(())
    }
}

/// Collects hashes; errors like [`Hashes::push`].
pub fn pack<'a>(hashes: impl IntoIterator<Item = &'a [u8]>) -> Result<Hashes> {
    let mut packed = Hashes::default();
    hashes.into_iter().try_for_each(|hash| packed.push(hash))?;
    Ok(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_come_back_as_they_went_in() {
        let hashes = pack([b"aa".as_slice(), b"bb", b"cc"]).unwrap();
        assert_eq!((hashes.len(), hashes.hash_bytes()), (3, 2));
        assert_eq!(hashes.iter().collect::<Vec<_>>(), [b"aa", b"bb", b"cc"]);
        assert_eq!(hashes.into_packed(), b"aabbcc");
        assert_eq!(Hashes::default().len(), 0);
    }

    #[test]
    fn hashes_of_other_lengths_are_refused() {
        assert!(pack([b"aa".as_slice(), b"b"]).is_err());
        assert!(pack([b"".as_slice()]).is_err());
        assert!(pack([[0; 33].as_slice()]).is_err());
    }
}
