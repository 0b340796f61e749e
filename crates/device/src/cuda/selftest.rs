//! Finds out whether copies by a method arrive as they should, before anything is served.
//!
//! Invariant: each method that is kept has taken random bytes from pinned memory of the driver, and from memory that
//! was registered as a pool is, to scattered places on the device and back, and every byte was compared. The device
//! memory is ours, below 1 MiB, and given back.

use std::time::{SystemTime, UNIX_EPOCH};

use forebay_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::lane::Lane;
use super::methods::Method;
use super::ops::Op;
use crate::bench::Random;
use crate::copy::Memory;
use crate::job::After;

const BYTES: u64 = 512 << 10;
const PIECES: u32 = 200;
/// Fewer for a method that copies words, so that some are longer than its largest step.
const WORD_PIECES: u32 = 15;
const WORD_BYTES: u64 = 16;
/// What the destinations hold before a copy.
const POISON: u8 = 0xd5;

/// Memory to test with, given back when it is dropped.
pub struct SelfTest<'a> {
    context: &'a Context,
    loads: &'a Lane,
    stores: &'a Lane,
    device: u64,
    /// Registered as a pool's memory is.
    pageable: Memory,
}

impl<'a> SelfTest<'a> {
    /// Called in the context. Errors if the memory cannot be had.
    pub fn new(context: &'a Context, loads: &'a Lane, stores: &'a Lane) -> Result<SelfTest<'a>> {
        let pageable = Memory::anonymous(BYTES as usize)?;
        let cannot = |what| move |status| context.error(what, status);
        let device = context.driver().alloc_device(BYTES).map_err(cannot("cannot allocate memory to test with"))?;
        Ok(SelfTest { context, loads, stores, device, pageable })
    }

    /// Whether memory of a process can be registered, and loaded from and stored to by these methods.
    pub fn with_registered(&self, load: Method, store: Method) -> Result<()> {
        let driver = self.context.driver();
        driver
            .register(&self.pageable, 0, BYTES)
            .map_err(|status| self.context.error("the driver does not register memory", status))?;
        let tested = self.there_and_back(load, store, &self.pageable, self.stores.staging());
        let tested = tested.and_then(|()| self.there_and_back(load, store, self.loads.staging(), &self.pageable));
        let _ = driver.unregister(self.pageable.address());
        tested
    }

    /// Whether copies from and to the driver's pinned memory arrive by these methods.
    pub fn with_pinned(&self, load: Method, store: Method) -> Result<()> {
        self.there_and_back(load, store, self.loads.staging(), self.stores.staging())
    }

    /// Copies from `source` to shuffled places on the device, and from there to `result` in another order.
    fn there_and_back(&self, load: Method, store: Method, source: &Memory, result: &Memory) -> Result<()> {
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |age| age.as_nanos() as u64);
        let mut random = Random(seed);
        let (sizes, [from, there, back]) = pieces(load, &mut random);
        random.fill(source);
        result.write(0, &vec![POISON; BYTES as usize]);
        let ops = |host: &Memory, places: &[u64]| -> Vec<Op> {
            let op = |at: usize| Op::new(self.device + there[at], host.address() + places[at], sizes[at]);
            (0..sizes.len()).map(op).collect()
        };
        let ways = [(self.loads, load, ops(source, &from)), (self.stores, store, ops(result, &back))];
        for (lane, method, ops) in ways {
            lane.follow(After::Now)?;
            let queued = lane.queue(&[method], &ops).map_err(Error::from);
            lane.finish(lane.mark()).and(queued)?;
        }
        let is_equal = |at: usize| {
            let (sent, arrived) = (source.span(from[at], sizes[at]), result.span(back[at], sizes[at]));
            sent.bytes() == arrived.bytes()
        };
        match (0..sizes.len()).find(|at| !is_equal(*at)) {
            None => Ok(()),
            Some(at) => Err(Error::new(ErrorKind::Corrupt, "bytes that went to the device came back changed")
                .with("method", load.name())
                .with("bytes", sizes[at])
                .with("seed", seed)),
        }
    }
}

impl Drop for SelfTest<'_> {
    fn drop(&mut self) {
        let _ = self.context.driver().free_device(self.device);
    }
}

/// Sizes of pieces that the method takes, and where they lie in three memories.
fn pieces(method: Method, random: &mut Random) -> (Vec<u64>, [Vec<u64>; 3]) {
    if method == Method::Pitched {
        // Rows of any size, with a gap that differs from memory to memory.
        let room = BYTES / u64::from(PIECES);
        let row_bytes = 1 + random.next() % (room - 1);
        let places = [(); 3].map(|()| {
            let pitch = row_bytes + random.next() % (room - row_bytes + 1);
            (0..u64::from(PIECES)).map(|row| row * pitch).collect()
        });
        return (vec![row_bytes; PIECES as usize], places);
    }
    let (pieces, unit) = if method.takes_all() { (PIECES, 1) } else { (WORD_PIECES, WORD_BYTES) };
    let most = BYTES / u64::from(pieces) / unit;
    let sizes: Vec<u64> = (0..pieces).map(|_| (1 + random.next() % (most - 1)) * unit).collect();
    let places = [(); 3].map(|()| shuffled(&sizes, random));
    (sizes, places)
}

/// Where pieces of these sizes lie if they are laid one after another in a random order.
fn shuffled(sizes: &[u64], random: &mut Random) -> Vec<u64> {
    let (mut places, mut at) = (vec![0; sizes.len()], 0);
    for piece in random.permutation(sizes.len() as u32) {
        places[piece as usize] = at;
        at += sizes[piece as usize];
    }
    places
}
