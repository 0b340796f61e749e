//! What a peer needs to reach a region: 48 opaque bytes, which travel by any way that the programs have.

use forebay_core::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"FOREBAYM");
const VERSION: u8 = 1;

/// What peers may do with a region. Without any right it is for operations of its own side only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    pub read: bool,
    pub write: bool,
}

impl Rights {
    pub const NONE: Rights = Rights { read: false, write: false };
    pub const READ: Rights = Rights { read: true, write: false };
    pub const READ_AND_WRITE: Rights = Rights { read: true, write: true };
}

/// See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Of the endpoint: drawn at its start.
    pub(super) epoch: u64,
    pub(super) name: u64,
    pub(super) bytes: u64,
    pub(super) rights: Rights,
    pub(super) is_mappable: bool,
}

impl Descriptor {
    /// Its length as bytes.
    pub const BYTES: usize = 48;

    /// Of the region.
    pub fn region_bytes(&self) -> u64 {
        self.bytes
    }

    /// What a mapping of it is of.
    pub(super) fn map(&self) -> super::Map {
        (self.name, self.bytes, self.rights.write)
    }

    pub fn to_bytes(&self) -> [u8; Descriptor::BYTES] {
        let flags = u8::from(self.rights.read) | u8::from(self.rights.write) << 1 | u8::from(self.is_mappable) << 2;
        let mut bytes = [0; Descriptor::BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8] = VERSION;
        bytes[9] = flags;
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.name.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Errors with `Invalid` if these bytes are no descriptor of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Descriptor> {
        let wrong = || Error::invalid("these bytes are no descriptor of memory").hint("pass on what `export` returned");
        let bytes: &[u8; Descriptor::BYTES] = bytes.try_into().map_err(|_| wrong())?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let descriptor = Descriptor {
            epoch: word(16),
            name: word(24),
            bytes: word(32),
            rights: Rights { read: bytes[9] & 1 != 0, write: bytes[9] & 2 != 0 },
            is_mappable: bytes[9] & 4 != 0,
        };
        if descriptor.to_bytes() == *bytes { Ok(descriptor) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_comes_back_and_nothing_else_is_one() {
        let rights = Rights::READ;
        let descriptor = Descriptor { epoch: 1, name: 2, bytes: 3, rights, is_mappable: true };
        let bytes = descriptor.to_bytes();
        assert_eq!(Descriptor::from_bytes(&bytes).unwrap(), descriptor);
        assert!(Descriptor::from_bytes(&bytes[1..]).is_err());
        for at in [0, 8, 10, 47] {
            let mut wrong = bytes;
            wrong[at] ^= 0x80;
            assert!(Descriptor::from_bytes(&wrong).is_err(), "byte {at}");
        }
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        #[test]
        fn whatever_bytes_a_program_passes_on_they_are_one_descriptor_or_none() {
            let made = Descriptor { epoch: 1, name: 2, bytes: 3, rights: Rights::READ, is_mappable: true };
            Target::new("memory descriptors", vec![made.to_bytes().to_vec()]).cases(30_000).run(|bytes| {
                let read = Descriptor::from_bytes(bytes).ok()?;
                assert_eq!(read.to_bytes(), bytes, "it is read as it was written");
                Some((read.rights.read, read.rights.write, read.is_mappable))
            });
        }
    }
}
