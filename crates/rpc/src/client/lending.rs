//! Where the payloads of a client's calls come from and go to, and the memory between it and the daemon.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_core::Result;

use crate::proto;

/// A block to store.
pub trait Source: Sync {
    /// The block's hash.
    fn hash(&self) -> &[u8];
    /// How long it is.
    fn bytes(&self) -> u64;
    /// Calls `read` once with its bytes.
    fn read(&self, read: &mut dyn FnMut(&[u8]));
}

/// A place for a block.
pub trait Sink: Sync {
    /// How long it is.
    fn bytes(&self) -> u64;
    /// Calls `write` once with so many bytes to fill.
    fn fill(&self, bytes: u64, write: &mut dyn FnMut(&mut [u8]));
}

/// Memory that the daemon has mapped too. Offsets beyond its end panic.
pub trait Memory: Send {
    /// The daemon's name of it.
    fn number(&self) -> u64;
    /// How long it is.
    fn bytes(&self) -> u64;
    /// Copies to an offset.
    fn write(&self, offset: u64, bytes: &[u8]);
    /// Copies from an offset.
    fn read(&self, offset: u64, bytes: &mut [u8]);
    /// Checksum of `len` bytes at an offset.
    fn checksum(&self, offset: u64, len: u64) -> u64;
}

/// Makes memory and lends it to the daemon whose sockets are in the directory, for the session that the message names,
/// within the time. The message's `bytes` is filled in.
pub type Lend = Box<dyn FnMut(&Path, proto::Lending, Duration) -> Result<Box<dyn Memory>> + Send>;

impl Source for proto::Block {
    fn hash(&self) -> &[u8] {
        &self.hash
    }

    fn bytes(&self) -> u64 {
        self.data.len() as u64
    }

    fn read(&self, read: &mut dyn FnMut(&[u8])) {
        read(&self.data);
    }
}

/// It becomes as long as the block.
impl Sink for Mutex<Vec<u8>> {
    fn bytes(&self) -> u64 {
        self.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn fill(&self, bytes: u64, write: &mut dyn FnMut(&mut [u8])) {
        let mut block = self.lock().unwrap_or_else(PoisonError::into_inner);
        block.resize(bytes as usize, 0);
        write(&mut block);
    }
}
