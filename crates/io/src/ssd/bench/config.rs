//! What is measured, and where.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forebay_core::{Error, Result};

use crate::uring::EngineChoice;

/// What a row measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Blocks are loaded from the disk.
    Read,
    /// Blocks are stored on the disk, flushes included.
    Write,
}

/// The parameters of a measurement.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// Created with twice `capacity_bytes`, and removed at the end.
    pub path: PathBuf,
    /// Bytes of the tier; the baseline writes to as many behind it.
    pub capacity_bytes: u64,
    /// The engine of the tier; the baseline has its own.
    pub engine: EngineChoice,
    /// Measured in this order for each size and depth.
    pub directions: Vec<Direction>,
    /// Block sizes; each is measured at each depth, on a new tier.
    pub sizes_bytes: Vec<u64>,
    /// Transfers in flight.
    pub depths: Vec<u32>,
    /// Runs of tier and baseline per row.
    pub pairs: usize,
    /// Bytes moved in each run.
    pub run_bytes: u64,
    /// Whether the baseline is fio where it is installed. Otherwise it makes plain system calls.
    pub may_use_fio: bool,
    /// Set by another thread to end the measurement early.
    pub stop: Arc<AtomicBool>,
}

impl BenchConfig {
    /// Shapes that fill an NVMe drive; two to three minutes on one of 2 GB/s.
    pub fn new(path: PathBuf) -> BenchConfig {
        BenchConfig {
            path,
            capacity_bytes: 4 << 30,
            engine: EngineChoice::Auto,
            // Blocks that were read are hot, and later writes would carry them over.
            directions: vec![Direction::Write, Direction::Read],
            sizes_bytes: vec![64 << 10, 256 << 10, 1 << 20, 4 << 20],
            depths: vec![8, 32],
            pairs: 5,
            run_bytes: 1 << 30,
            may_use_fio: true,
            stop: Arc::default(),
        }
    }

    /// An error if the file is there, or its directory is not.
    pub fn check_path(&self) -> Result<()> {
        let refused = |why: &'static str| {
            let error = Error::invalid(why).with("path", self.path.display());
            Err(error.hint("name a file that does not exist, on the disk to be measured"))
        };
        let directory = self.path.parent().filter(|directory| !directory.as_os_str().is_empty());
        match directory {
            _ if self.path.symlink_metadata().is_ok() => refused("the benchmark's file exists already"),
            Some(directory) if !directory.is_dir() => refused("there is no directory for the benchmark's file"),
            _ => Ok(()),
        }
    }

    /// Of the tier. Disks of 16 GiB or more have the largest; a benchmark's file is shorter.
    pub(super) fn segment_bytes(&self) -> u64 {
        (1 << (self.capacity_bytes / 16).max(1).ilog2()).clamp(1 << 20, 256 << 20)
    }

    /// A segment holds two of them, beside its own records.
    pub fn most_block_bytes(&self) -> u64 {
        self.segment_bytes() / 4
    }

    /// Bytes that a measurement moves: it fills tier and baseline for each size and depth, and then makes the runs.
    pub fn moved_bytes(&self) -> u64 {
        let shapes = (self.sizes_bytes.len() * self.depths.len()) as u64;
        let runs_bytes = (2 * self.directions.len() as u64 * self.pairs as u64).saturating_mul(self.run_bytes);
        shapes.saturating_mul(runs_bytes.saturating_add(self.capacity_bytes / 4 * 9))
    }
}
