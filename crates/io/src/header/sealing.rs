//! With or without a secret: how this host seals the blocks that it writes, and which ones it accepts.
//!
//! A host reads and writes one version of the header: the one with a MAC if it has a secret, else the one without. The
//! MAC is BLAKE3 with a key that is derived from the secret, over the header up to the MAC and then the block's bytes.
//!
//! Invariants: without the secret nobody can make a block that a host with the secret accepts, or make it accept a
//! block under another name. The secret is never printed. A header with a MAC is written only over bytes that had the
//! block's checksum: such a header does not hold the checksum, so nobody could tell later that the bytes had changed
//! before.

use std::fmt;

use forebay_core::checksum::Checksum;
use forebay_core::{BlockKey, Error, Result};

use super::{HEADER_BYTES, Header, Mac, Proof, VERSION, VERSION_WITH_MAC, identity, version};
use crate::uring::Region;

/// The least that a secret must have: that many random bytes cannot be guessed, also written as hex digits.
const LEAST_SECRET_BYTES: usize = 32;
/// What the key is for. Another purpose gets another key from the same secret.
const KEY_OF_BLOCKS: &str = "forebay 2026-11-23 MAC of a block in a shared store";
/// Bytes are copied and summed up in pieces of this size, while they are in the second-level cache.
const PIECE_BYTES: usize = 256 << 10;
/// As long as these are the pieces that are copied only to be summed up.
const COPY_BYTES: usize = 64 << 10;

/// See the module documentation. The default has no secret.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Sealing {
    key: Option<[u8; blake3::KEY_LEN]>,
}

impl fmt::Debug for Sealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has_secret() { "Sealing(with a secret)" } else { "Sealing(without a secret)" })
    }
}

impl Sealing {
    /// With this secret. An error if it is short.
    pub fn with(secret: &[u8]) -> Result<Sealing> {
        if secret.len() < LEAST_SECRET_BYTES {
            return Err(Error::invalid("the secret of shared stores is too short")
                .with("bytes", secret.len())
                .with("least", LEAST_SECRET_BYTES)
                .hint("make one with `openssl rand -hex 32`, and give it to all hosts that share the stores"));
        }
        Ok(Sealing { key: Some(blake3::derive_key(KEY_OF_BLOCKS, secret)) })
    }

    /// Whether blocks carry a MAC.
    pub fn has_secret(&self) -> bool {
        self.key.is_some()
    }

    /// Of the headers that this host reads and writes.
    pub fn version(&self) -> u32 {
        if self.has_secret() { VERSION_WITH_MAC } else { VERSION }
    }

    /// `None` if the bytes are not a header of this host's version.
    pub fn read(&self, bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        Header::read(bytes).filter(|header| matches!(header.proof, Proof::Mac(_)) == self.has_secret())
    }

    /// Whether the bytes are a whole header of a version later than this host's.
    pub fn is_later(&self, bytes: &[u8; HEADER_BYTES]) -> bool {
        version(bytes).is_some_and(|version| version > self.version())
    }

    /// Whether a store leaves what it finds under the block's name. `has_its_length`: as long as this block is stored;
    /// a block in a later format may have another length.
    pub fn keeps(&self, found: &[u8; HEADER_BYTES], key: &BlockKey, length_bytes: u64, has_its_length: bool) -> bool {
        let is_ours = || self.read(found).is_some_and(|header| header.is_of(key, length_bytes));
        self.is_later(found) || (has_its_length && is_ours())
    }

    /// Begins the sum of that block's bytes.
    pub fn sum(&self, key: &BlockKey, length_bytes: u64) -> BlockSum {
        let mac = self.key.map(|mac_key| {
            let mut hasher = blake3::Hasher::new_keyed(&mac_key);
            hasher.update(&identity(VERSION_WITH_MAC, key, length_bytes));
            Box::new(MacSum { hasher, copy: Vec::new() })
        });
        BlockSum { key: *key, length_bytes, checksum: Checksum::new(), mac }
    }

    /// The header of a block whose checksum is known. With a secret, `add` adds all bytes of the block to the sum;
    /// `None` if they do not have the checksum. Without one, no byte is read.
    pub fn header(
        &self,
        key: &BlockKey,
        length_bytes: u64,
        checksum: u64,
        add: impl FnOnce(&mut BlockSum),
    ) -> Option<Header> {
        if !self.has_secret() {
            return Some(Header { key: *key, length_bytes, proof: Proof::Checksum(checksum) });
        }
        let mut sum = self.sum(key, length_bytes);
        add(&mut sum);
        (sum.checksum() == checksum).then(|| sum.header())
    }
}

/// The sum of a block's bytes as they pass: their checksum, and with a secret their MAC.
pub struct BlockSum {
    key: BlockKey,
    length_bytes: u64,
    checksum: Checksum,
    mac: Option<Box<MacSum>>,
}

struct MacSum {
    hasher: blake3::Hasher,
    /// For pieces of the pool; it grows when it is first needed.
    copy: Vec<u8>,
}

impl BlockSum {
    /// Appends `bytes`.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(self.piece_bytes(bytes.len(), PIECE_BYTES));
            self.append(piece);
            bytes = rest;
        }
    }

    /// Copies bytes of the pool from `offset` into `target`, and appends them.
    pub fn copy_from(&mut self, pool: &Region, mut offset: u64, mut target: &mut [u8]) {
        while !target.is_empty() {
            let (piece, rest) = target.split_at_mut(self.piece_bytes(target.len(), PIECE_BYTES));
            pool.read(offset, piece);
            self.append(piece);
            offset += piece.len() as u64;
            target = rest;
        }
    }

    /// Appends `len` bytes of the pool from `offset`. Other processes may write them: with a secret, checksum and MAC
    /// are of the same copy.
    pub fn update_from(&mut self, pool: &Region, mut offset: u64, len: usize) {
        let Some(mac) = &mut self.mac else { return pool.sum(&mut self.checksum, offset, len) };
        let (mut copy, end) = (std::mem::take(&mut mac.copy), offset + len as u64);
        copy.resize(COPY_BYTES, 0);
        while offset < end {
            let piece_bytes = self.piece_bytes((end - offset) as usize, COPY_BYTES);
            let piece = &mut copy[..piece_bytes];
            pool.read(offset, piece);
            self.append(piece);
            offset += piece_bytes as u64;
        }
        self.mac.as_mut().expect("there is a secret").copy = copy;
    }

    /// How many of `left` bytes are appended next. BLAKE3 is fast for pieces that end at multiples of large powers of
    /// two, and the header's bytes come before the block's.
    fn piece_bytes(&self, left: usize, most: usize) -> usize {
        let begun = self.mac.as_ref().map_or(0, |mac| mac.hasher.count() as usize % most);
        left.min(most - begun)
    }

    fn append(&mut self, piece: &[u8]) {
        self.checksum.update(piece);
        if let Some(mac) = &mut self.mac {
            mac.hasher.update(piece);
        }
    }

    /// CRC-64/NVME of the bytes so far.
    pub fn checksum(&self) -> u64 {
        self.checksum.finish()
    }

    /// The header of a block with the bytes so far.
    pub fn header(&self) -> Header {
        let proof = match &self.mac {
            None => Proof::Checksum(self.checksum()),
            Some(mac) => {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(&mac.hasher.finalize().as_bytes()[..16]);
                Proof::Mac(Mac(bytes))
            }
        };
        Header { key: self.key, length_bytes: self.length_bytes, proof }
    }

    /// The checksum of the bytes so far, if they are those that `header` was written for.
    pub fn proves(&self, header: &Header) -> Option<u64> {
        (self.header() == *header).then(|| self.checksum())
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::checksum::checksum;
    use forebay_core::{BlockHash, NamespaceId};

    use super::super::{PROOF_AT, SEAL_AT};
    use super::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    fn key(number: u8) -> BlockKey {
        BlockKey { namespace: NamespaceId(9), group: 0, hash: BlockHash::new(&[number; 32]).unwrap() }
    }

    fn bytes() -> Vec<u8> {
        (0..700_000u32).map(|i| (i * 7 / 3) as u8).collect()
    }

    fn sum(sealing: &Sealing, number: u8, bytes: &[u8]) -> BlockSum {
        let mut sum = sealing.sum(&key(number), bytes.len() as u64);
        bytes.chunks(70_001).for_each(|piece| sum.update(piece));
        sum
    }

    /// As a load judges header and bytes.
    fn is_accepted(sealing: &Sealing, head: &[u8; HEADER_BYTES], number: u8, bytes: &[u8]) -> bool {
        let header = sealing.read(head).filter(|header| header.is_of(&key(number), bytes.len() as u64));
        header.is_some_and(|header| sum(sealing, number, bytes).proves(&header) == Some(checksum(bytes)))
    }

    /// What somebody without the secret can compute.
    fn reseal(head: &mut [u8; HEADER_BYTES]) {
        let seal = checksum(&head[..SEAL_AT]);
        head[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
    }

    #[test]
    fn a_block_is_accepted_by_the_hosts_with_its_secret_and_by_no_other() {
        let (bytes, none) = (bytes(), Sealing::default());
        let [ours, theirs] =
            [SECRET, b"another secret of at least 32 bytes"].map(|secret| Sealing::with(secret).unwrap());
        let [plain, sealed] = [&none, &ours].map(|sealing| sum(sealing, 1, &bytes).header().write());
        for (sealing, head, is_good) in [
            (&none, &plain, true),
            (&ours, &sealed, true),
            (&Sealing::with(SECRET).unwrap(), &sealed, true),
            (&ours, &plain, false),
            (&none, &sealed, false),
            (&theirs, &sealed, false),
        ] {
            assert_eq!(is_accepted(sealing, head, 1, &bytes), is_good, "{sealing:?}");
        }
        assert!(none.is_later(&sealed) && !ours.is_later(&sealed) && !ours.is_later(&plain));
    }

    #[test]
    fn no_bit_of_a_sealed_block_can_be_changed_by_somebody_who_makes_its_seal_anew() {
        let (sealing, good_bytes) = (Sealing::with(SECRET).unwrap(), bytes());
        let good = sum(&sealing, 1, &good_bytes).header().write();
        for bit in 0..SEAL_AT * 8 {
            let mut head = good;
            head[bit / 8] ^= 1 << (bit % 8);
            reseal(&mut head);
            assert!(!is_accepted(&sealing, &head, 1, &good_bytes), "bit {bit}");
        }
        for bit in [0, 8, 70_000 * 8, (good_bytes.len() - 1) * 8 + 7] {
            let mut bytes = good_bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_accepted(&sealing, &good, 1, &bytes), "bit {bit} of the block");
        }
        assert!(is_accepted(&sealing, &good, 1, &good_bytes));
    }

    #[test]
    fn a_sealed_block_is_no_other_block() {
        let (sealing, bytes) = (Sealing::with(SECRET).unwrap(), bytes());
        let mut head = sum(&sealing, 1, &bytes).header().write();
        assert!(!is_accepted(&sealing, &head, 2, &bytes));
        head[..PROOF_AT].copy_from_slice(&identity(VERSION_WITH_MAC, &key(2), bytes.len() as u64));
        reseal(&mut head);
        assert!(sealing.read(&head).unwrap().is_of(&key(2), bytes.len() as u64));
        assert!(!is_accepted(&sealing, &head, 2, &bytes), "under the name of another");
        assert!(!is_accepted(&sealing, &head, 2, &bytes[..bytes.len() - 1]), "shorter");
    }

    #[test]
    fn a_whole_header_of_another_version_is_known_as_later_or_as_none() {
        for sealing in [Sealing::default(), Sealing::with(SECRET).unwrap()] {
            let ours = sealing.version();
            for version in [0, 1, 2, 3, u32::MAX] {
                let mut head = sum(&sealing, 1, b"bytes").header().write();
                head[8..12].copy_from_slice(&version.to_le_bytes());
                assert!(version == ours || !sealing.is_later(&head), "its seal is not right");
                reseal(&mut head);
                assert_eq!(sealing.is_later(&head), version > ours, "{version}");
                assert_eq!(sealing.read(&head).is_some(), version == ours, "{version}");
                let kept = (version > ours, version >= ours);
                assert_eq!((sealing.keeps(&head, &key(1), 5, false), sealing.keeps(&head, &key(1), 5, true)), kept);
                assert_eq!(sealing.keeps(&head, &key(2), 5, true), version > ours, "{version}");
            }
        }
    }

    /// Such bytes would be right for every later reader.
    #[test]
    fn bytes_that_lost_their_checksum_get_no_mac() {
        let (bytes, pool) = (bytes(), Region::anonymous(1 << 20).unwrap());
        pool.write(5, &bytes);
        let sealing = Sealing::with(SECRET).unwrap();
        let header = |checksum| {
            let add = |sum: &mut BlockSum| sum.update_from(&pool, 5, bytes.len());
            sealing.header(&key(1), bytes.len() as u64, checksum, add)
        };
        assert_eq!(header(checksum(&bytes)), Some(sum(&sealing, 1, &bytes).header()));
        let (mut copied, mut target) = (sealing.sum(&key(1), bytes.len() as u64), vec![0; bytes.len()]);
        copied.copy_from(&pool, 5, &mut target);
        assert!(copied.proves(&sum(&sealing, 1, &bytes).header()).is_some() && target == bytes);
        assert_eq!(header(checksum(&bytes) ^ 1), None);
        let unread = |_: &mut BlockSum| panic!("nothing is read without a secret");
        assert!(Sealing::default().header(&key(1), 5, 17, unread).is_some());
    }

    /// Computed with other tools: `docs/formats/block.md` says how.
    #[test]
    fn the_mac_is_that_of_the_format_page() {
        let head = sum(&Sealing::with(SECRET).unwrap(), 1, b"bytes").header().write();
        let mac: String = head[PROOF_AT..SEAL_AT].iter().map(|byte| format!("{byte:02x}")).collect();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats/block.md");
        assert!(std::fs::read_to_string(page).unwrap().contains(&mac), "{mac} stands in the page");
    }

    #[test]
    fn a_secret_is_long_and_is_not_printed() {
        assert!(Sealing::with(&SECRET[1..]).unwrap_err().hint_text().is_some());
        let sealing = Sealing::with(SECRET).unwrap();
        assert_eq!(format!("{sealing:?} {:?}", Sealing::default()), "Sealing(with a secret) Sealing(without a secret)");
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        /// Header and block in one, as stores hold them.
        fn stored(sealing: &Sealing, number: u8, bytes: &[u8]) -> Vec<u8> {
            [&sum(sealing, number, bytes).header().write()[..], bytes].concat()
        }

        fn reseal_first(bytes: &mut [u8]) {
            if let Some(head) = bytes.first_chunk_mut::<HEADER_BYTES>() {
                reseal(head);
            }
        }

        /// Anybody may write to a shared store: without a secret a checksum can be made right again, with one nothing
        /// but what hosts wrote is accepted.
        #[test]
        fn whatever_lies_in_a_shared_store_is_a_block_that_was_stored_or_a_miss() {
            let block: Vec<u8> = bytes()[..300].to_vec();
            for (name, sealing) in [("headers", Sealing::default()), ("sealed headers", Sealing::with(SECRET).unwrap())]
            {
                let inputs: Vec<_> = [&block[..], &block[..1]].map(|bytes| stored(&sealing, 1, bytes)).to_vec();
                let plain = stored(&Sealing::default(), 2, &block);
                let all = inputs.iter().cloned().chain([plain]).collect();
                let target =
                    Target::new(name, all).places(std::iter::once(0..HEADER_BYTES)).mended(reseal_first).cases(40_000);
                target.run(|bytes| {
                    let Some((head, block)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return 0 };
                    let is_whole = checksum(&head[..SEAL_AT]).to_le_bytes() == head[SEAL_AT..];
                    let header = sealing.read(head);
                    assert!(is_whole || (header.is_none() && !sealing.is_later(head)), "it has another checksum");
                    assert!(header.is_none() || !sealing.is_later(head), "it is of this version and of a later one");
                    let Some(header) = header else { return 1 + u8::from(sealing.is_later(head)) };
                    assert_eq!(header.write(), *head, "a header that is read is written the same");
                    let is_accepted = is_accepted(&sealing, head, 1, block);
                    let is_stored = inputs.iter().any(|input| input == bytes);
                    assert!(is_stored || !is_accepted || !sealing.has_secret(), "nobody stored this");
                    3 + u8::from(is_accepted) + 2 * u8::from(header.is_of(&key(1), block.len() as u64))
                });
            }
        }
    }
}
