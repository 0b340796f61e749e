//! `forebay bench ssd`: the tier's speed compared with the disk's own.
//!
//! It creates a tier on a file and fills it. Then for each direction, size and depth the tier and a baseline move the
//! same number of bytes, in turns. The tier works through [`Tier`] with its checksums. The baseline makes plain
//! random reads in the part of the file that holds the blocks, or plain writes in an equal part behind it, with as
//! many flushes as the tier made. Invariants: every block that is read is compared, outside of the measured time. A
//! ratio is the median over pairs, never of a best run.

mod baseline;
mod config;
mod recovery;
mod run;
mod sample;

use std::fs::File;
use std::path::PathBuf;

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::FallocateFlags;

use self::baseline::Baseline;
pub use self::config::{BenchConfig, Direction};
pub use self::recovery::{RecoveredDisk, RecoveryRow, fill_file, recovery};
pub use self::run::Errors;
use self::run::Rig;
pub use self::sample::Sample;

/// One direction, size and depth.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Whether blocks were loaded or stored.
    pub direction: Direction,
    /// Bytes of each block.
    pub size_bytes: u64,
    /// Transfers in flight.
    pub depth: u32,
    /// Name of the tier's engine.
    pub engine: &'static str,
    /// Name of the program or calls that the tier is compared with.
    pub baseline: &'static str,
    /// Tier and baseline, pair by pair, in the order of the runs.
    pub pairs: Vec<(Sample, Sample)>,
    /// From submission to completion, over all runs of the tier. For a write it includes the wait for one of the
    /// `depth` transfers, and for its flush.
    pub p50_us: u64,
    /// As `p50_us`, for the slowest hundredth.
    pub p99_us: u64,
    /// One core's time to sum up bytes that have just arrived; part of the tier's CPU time for reads.
    pub checksum_ms_per_gb: f64,
    /// Operations that failed and blocks that came back with other bytes.
    pub errors: Errors,
}

impl Row {
    /// The tier's median over the pairs, in units of 10⁹ bytes.
    pub fn gb_per_s(&self) -> f64 {
        median(self.pairs.iter().map(|(tier, _)| tier.gb_per_s))
    }

    /// The tier's median CPU time over the pairs, checksums included.
    pub fn cpu_ms_per_gb(&self) -> f64 {
        median(self.pairs.iter().map(|(tier, _)| tier.cpu_ms_per_gb))
    }

    /// The baseline's median over the pairs, in units of 10⁹ bytes.
    pub fn baseline_gb_per_s(&self) -> f64 {
        median(self.pairs.iter().map(|(_, baseline)| baseline.gb_per_s))
    }

    /// The baseline's median CPU time over the pairs.
    pub fn baseline_cpu_ms_per_gb(&self) -> f64 {
        median(self.pairs.iter().map(|(_, baseline)| baseline.cpu_ms_per_gb))
    }

    /// Tier divided by baseline.
    pub fn ratio(&self) -> f64 {
        median(self.pairs.iter().map(|(tier, baseline)| tier.gb_per_s / baseline.gb_per_s))
    }
}

/// Measures all rows, and passes each to `tell` when it is done.
pub fn run(config: &BenchConfig, mut tell: impl FnMut(&Row)) -> Result<Vec<Row>> {
    config.check_path()?;
    let remove = RemoveAtEnd(&config.path);
    let mut rows = Vec::new();
    for &size_bytes in &config.sizes_bytes {
        for &depth in &config.depths {
            let mut rig = Rig::new(config, size_bytes, depth)?;
            lengthen(config)?;
            let baseline = Baseline::find(config, size_bytes, depth);
            rig.fill()?;
            baseline.prepare()?;
            for &direction in &config.directions {
                let row = measure(config, &mut rig, &baseline, direction)?;
                tell(&row);
                rows.push(row);
            }
            drop(rig);
            std::fs::remove_file(remove.0).map_err(|error| cannot(config, error))?;
        }
    }
    Ok(rows)
}

fn measure(config: &BenchConfig, rig: &mut Rig, baseline: &Baseline, direction: Direction) -> Result<Row> {
    let (mut pairs, mut latencies_us) = (Vec::new(), Vec::new());
    for _ in 0..config.pairs {
        let flushes_before = rig.flushes();
        let tier = rig.sample(direction, config.run_bytes, &mut latencies_us)?;
        let writes_per_flush = config.run_bytes / rig.size_bytes / (rig.flushes() - flushes_before).max(1);
        pairs.push((tier, baseline.sample(direction, config.run_bytes, writes_per_flush.max(1))?));
    }
    latencies_us.sort_unstable();
    let quantile = |share: f64| latencies_us.get((latencies_us.len() as f64 * share) as usize).copied().unwrap_or(0);
    Ok(Row {
        direction,
        size_bytes: rig.size_bytes,
        depth: rig.depth,
        engine: rig.engine(),
        baseline: baseline.name(),
        pairs,
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        checksum_ms_per_gb: rig.checksum_ms_per_gb(config.run_bytes)?,
        errors: rig.take_errors(),
    })
}

/// Extends the file by the baseline's part, behind the tier's.
fn lengthen(config: &BenchConfig) -> Result<()> {
    let file = File::options().write(true).open(&config.path).map_err(|error| cannot(config, error))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 2 * config.capacity_bytes)
        .map_err(|error| cannot(config, error.into()))
}

fn cannot(config: &BenchConfig, error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot use the benchmark's file").with("path", config.path.display()).source(error)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len => (values[(len - 1) / 2] + values[len / 2]) / 2.0,
    }
}

/// Removes the file, however the benchmark ends.
struct RemoveAtEnd<'a>(&'a PathBuf);

impl Drop for RemoveAtEnd<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}
