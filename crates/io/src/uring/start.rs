//! Which engine runs here: the one that the operator chose, or the one that this kernel allows.

use std::fs::File;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use super::engine::Engine;
use super::memory::Memory;
use super::ring::Uring;
use super::shared::Waker;
use super::threads::Threads;

/// The operator's choice of engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineChoice {
    /// A ring where the kernel allows one, otherwise threads.
    #[default]
    Auto,
    /// A ring; starting fails where the kernel allows none.
    Uring,
    /// Plain system calls on threads.
    Threads,
}

/// A running engine.
pub struct Started {
    /// It runs until it is dropped.
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
