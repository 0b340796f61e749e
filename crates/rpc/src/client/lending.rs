//! Where the payloads of a client's calls come from and go to, and the memory between it and the daemon.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

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
    /// Copies to an offset.
    fn write(&self, offset: u64, bytes: &[u8]);
    /// Copies from an offset.
    fn read(&self, offset: u64, bytes: &mut [u8]);
    /// Checksum of `len` bytes at an offset.
    fn checksum(&self, offset: u64, len: u64) -> u64;
}

/// Makes memory and lends it to the daemon whose sockets are in the directory, for the session that the message names,
/// within the time. It is as long as the message says.
pub type Lend = Box<dyn FnMut(&Path, proto::Lending, Duration) -> Result<Box<dyn Memory>> + Send>;

/// Memory between two calls. It is given back if no call takes it for a while, by a thread that ends with it.
pub(super) struct Shelf {
    shared: Arc<Mutex<Shelved>>,
    /// Its end ends the thread.
    _alive: Sender<()>,
}

struct Shelved {
    /// `None` during a call, and at the end.
    memory: Option<Box<dyn Memory>>,
    /// Since the thread last looked.
    was_used: bool,
}

impl Shelf {
    /// The memory is given back after `idle` at the earliest and twice as long at the latest.
    pub fn new(memory: Box<dyn Memory>, idle: Duration) -> Result<Shelf> {
        let shared = Arc::new(Mutex::new(Shelved { memory: Some(memory), was_used: true }));
        let (alive, end) = mpsc::channel::<()>();
        let watched = shared.clone();
        let watch = move || {
            while end.recv_timeout(idle) == Err(RecvTimeoutError::Timeout) {
                let mut shelved = lock(&watched);
                let is_idle = !std::mem::take(&mut shelved.was_used);
                if is_idle && shelved.memory.take().is_some() {
                    return;
                }
            }
        };
        let named = std::thread::Builder::new().name("forebay-lent".to_owned()).stack_size(STACK_BYTES);
        named.spawn(watch).map_err(|error| Error::new(ErrorKind::Io, "cannot start a thread").source(error))?;
        Ok(Shelf { shared, _alive: alive })
    }

    /// For one call.
    pub fn take(&self) -> Option<Box<dyn Memory>> {
        let mut shelved = lock(&self.shared);
        shelved.was_used = true;
        shelved.memory.take()
    }

    /// After a call that the daemon has answered: nobody touches the memory any more.
    pub fn put_back(&self, memory: Box<dyn Memory>) {
        *lock(&self.shared) = Shelved { memory: Some(memory), was_used: true };
    }

    pub fn has_memory(&self) -> bool {
        lock(&self.shared).memory.is_some()
    }
}

/// It waits, and unmaps.
const STACK_BYTES: usize = 128 << 10;

fn lock(shared: &Mutex<Shelved>) -> MutexGuard<'_, Shelved> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Memory of no bytes, which says when it is dropped.
    struct Nothing(Sender<()>);

    impl Memory for Nothing {
        fn number(&self) -> u64 {
            1
        }

        fn write(&self, _: u64, _: &[u8]) {}

        fn read(&self, _: u64, _: &mut [u8]) {}

        fn checksum(&self, _: u64, _: u64) -> u64 {
            0
        }
    }

    impl Drop for Nothing {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn memory_that_no_call_takes_is_given_back() {
        let (dropped, drops) = mpsc::channel();
        let shelf = Shelf::new(Box::new(Nothing(dropped)), Duration::from_millis(1)).unwrap();
        drops.recv_timeout(LONG).expect("it is given back in time");
        let deadline = Instant::now() + LONG;
        while shelf.has_memory() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert!(shelf.take().is_none());
    }

    #[test]
    fn memory_in_a_call_is_not_given_back_however_long_the_call_takes() {
        let (dropped, drops) = mpsc::channel();
        let taken = || {
            let shelf = Shelf::new(Box::new(Nothing(dropped.clone())), Duration::from_millis(10)).unwrap();
            shelf.take().map(|memory| (shelf, memory))
        };
        // This thread may be kept from taking it in time.
        let (shelf, memory) = std::iter::repeat_with(taken).flatten().next().expect("one is taken");
        while drops.try_recv().is_ok() {}
        assert_eq!(drops.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
        shelf.put_back(memory);
        drops.recv_timeout(LONG).expect("the thread still looks");
    }

    #[test]
    fn memory_goes_with_its_session() {
        let (dropped, drops) = mpsc::channel();
        drop(Shelf::new(Box::new(Nothing(dropped)), LONG * 100).unwrap());
        drops.recv_timeout(LONG).expect("the thread does not wait for its time");
    }
}
