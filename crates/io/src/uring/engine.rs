//! The interface of an engine, and the choice of the one that runs here.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use super::memory::{Memory, Span, Spans};
use super::ring::Uring;
use super::shared::Waker;
use super::threads::Threads;

/// One transfer or flush. Offsets, lengths and memory are multiples of 4 KiB, as direct I/O requires.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Fills `span`. When all of it arrived and `checksum` gives a piece of memory, the engine's thread sums that
    /// piece up.
    Read { at: u64, span: Span, checksum: Option<Span> },
    /// Writes `spans` consecutively, [`MOST_SPANS`](super::MOST_SPANS) at most.
    Write { at: u64, spans: Spans },
    /// Makes every write that was done before this was submitted durable across a power loss.
    Sync,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    pub tag: u64,
    pub work: Work,
}

/// The end of a request: bytes moved, perhaps fewer than requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    pub tag: u64,
    pub result: Result<u32, Errno>,
    pub checksum: u64,
}

/// See the module documentation. Dropping an engine waits a short time for requests in flight. After that a thread
/// keeps file and memory until they have ended.
pub trait Engine: Send {
    fn name(&self) -> &'static str;
    /// Takes all of `requests`; their owner bounds how many are in flight.
    fn submit(&mut self, requests: &mut VecDeque<Request>);
    /// Appends completed requests. Never blocks.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// Blocks until [`Engine::poll`] has something to return, or `timeout` has passed.
    fn wait(&mut self, timeout: Duration);
    /// Reports that the pool's first bytes are populated, so that they can be pinned.
    fn register(&mut self, _populated_bytes: u64) {}
}

/// The operator's choice of engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineChoice {
    /// A ring where the kernel allows one, otherwise threads.
    #[default]
    Auto,
    Uring,
    Threads,
}

/// A running engine.
pub struct Started {
    pub engine: Box<dyn Engine>,
    /// The reason for this engine, as `forebay doctor` prints it.
    pub why: String,
}

/// Starts the engine for `file`. `depth` bounds what is in flight at once.
pub fn start(
    choice: EngineChoice,
    file: &Arc<File>,
    memory: &Arc<Memory>,
    waker: &Arc<Waker>,
    depth: u32,
) -> Result<Started> {
    let cannot = |error: std::io::Error| Error::new(ErrorKind::Unsupported, "cannot start an i/o engine").source(error);
    let threads = |why: String| {
        let engine = Threads::start(file.clone(), memory.clone(), waker.clone(), depth).map_err(cannot)?;
        Ok(Started { engine: Box::new(engine), why })
    };
    if choice == EngineChoice::Threads {
        return threads("it is configured".to_owned());
    }
    match Uring::start(file.clone(), memory.clone(), waker.clone(), depth) {
        Ok(engine) => Ok(Started { engine: Box::new(engine), why: "this kernel allows io_uring".to_owned() }),
        Err(error) if choice == EngineChoice::Auto => threads(format!("io_uring is not available: {error}")),
        Err(error) => Err(cannot(error).hint(
            "allow io_uring (`sysctl kernel.io_uring_disabled`, the container's seccomp profile), or set \
             `tier.ssd.engine = \"auto\"`",
        )),
    }
}
