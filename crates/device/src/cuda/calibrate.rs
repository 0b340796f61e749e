//! Measures what copies cost by each method, once for a device, its driver and this version, beside an engine at work.
//!
//! Invariants: nobody waits for it. It begins when the engine's first job has ended, measures only while the engine has
//! no job and the stream of its last one is not being captured, and looks at both before each pass; a pass that a job
//! came into counts for nothing. A pass moves at most `HOST_BYTES`. All passes together end within `BUDGET` and one
//! pass; shapes that it had no time for are not known, and there the driver's own methods are used. A shape is known
//! for all methods or for none. Its memory is allocated before the engine's first job and freed with the engine, since
//! freeing can wait for the whole device. It finds out nothing about copies beside a model that computes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::{Error, Result};

use super::context::Context;
use super::costs::{Cost, Costs};
use super::kernel;
use super::lane::Lane;
use super::methods::Method;
use super::ops::Op;
use super::pitched;
use crate::bench::Random;
use crate::copy::Memory;
use crate::job::Direction;

const BUDGET: Duration = Duration::from_millis(1500);
const SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// The border between methods moves with the number of copies.
const COUNTS: [u64; 3] = [16, 128, 1024];
/// After one that warms up; the fastest of them counts.
const PASSES: usize = 3;
/// Copies of a pass use it several times over: nearly all of a device belongs to the model.
const DEVICE_BYTES: u64 = 1 << 20;
/// At 50 GB/s a pass of so many bytes takes 0.2 ms.
const HOST_BYTES: u64 = 8 << 20;

/// The memory that is measured with, and what it is kept for.
pub struct Calibration {
    context: Arc<Context>,
    device: u64,
    host: Memory,
    /// The file that keeps the costs, if anything can.
    place: Option<PathBuf>,
    /// All that a measurement holds for.
    what: String,
}

/// Whether a pass may be made now, and has been made alone.
pub trait Quiet {
    /// Waits until nothing else is copied, and returns a mark of that moment; none if the engine stops.
    fn await_quiet(&self) -> Option<u64>;
    /// Whether nothing else has been copied since `mark`.
    fn was_quiet(&self, mark: u64) -> bool;
}

impl Calibration {
    /// Called in the context. Errors if the memory cannot be had.
    pub fn new(
        context: Arc<Context>,
        lanes: &[Lane; 2],
        methods: &[Method],
        folder: Option<&Path>,
    ) -> Result<Calibration> {
        let cannot = |status| context.error("cannot allocate memory to calibrate with", status);
        let driver = context.driver();
        let device = driver.alloc_device(DEVICE_BYTES).map_err(cannot)?;
        let host = driver.alloc_host(HOST_BYTES).map_err(|status| {
            let _ = driver.free_device(device);
            cannot(status)
        })?;
        let (uuid, what) = (context.uuid(), what(&context, lanes, methods));
        let place = folder.zip(uuid).map(|(folder, uuid)| folder.join(format!("gpu-{uuid}.costs")));
        Ok(Calibration { context, device, host, place, what })
    }

    /// What is kept from another measurement.
    pub fn kept(&self) -> Option<Costs> {
        Costs::read(self.place.as_ref()?, &self.what)
    }

    /// Keeps them. A folder that keeps nothing costs a measurement at the next start.
    pub fn keep(&self, costs: &Costs) {
        if let Some(place) = &self.place {
            let _ = costs.write(place, &self.what);
        }
    }

    /// What is found within the budget; none if the engine stops before. Errors with the method that fails.
    pub fn measure(&self, lanes: &[Lane; 2], methods: &[Method], quiet: &dyn Quiet) -> Result<Option<Costs>, Refused> {
        let (mut costs, mut random, mut left) = (Costs::default(), Random(1), BUDGET);
        // Every size in a small number first: what there is no time for lies beside something known.
        for (bytes, count) in COUNTS.into_iter().flat_map(|count| SIZES.map(|bytes| (bytes, count))) {
            if bytes * count > HOST_BYTES {
                continue;
            }
            for direction in [Direction::Store, Direction::Load] {
                let lane = &lanes[direction as usize];
                let mut shape = Vec::new();
                let usable = |method: &Method| method.copies(direction) && lane.has(*method);
                for method in methods.iter().copied().filter(usable) {
                    let ops = self.ops(method, bytes, count, &mut random);
                    match fastest(lane, method, &ops, quiet, &mut left).map_err(|error| Refused { method, error })? {
                        Pace::Stopped => return Ok(None),
                        Pace::NoTime => return Ok(Some(costs)),
                        Pace::Took(nanoseconds) => shape.push(Cost { direction, method, bytes, count, nanoseconds }),
                    }
                }
                costs.0.extend(shape);
            }
        }
        Ok(Some(costs))
    }

    /// In any order, as blocks of a cache lie; or in rows, for a method that wants these.
    fn ops(&self, method: Method, bytes: u64, count: u64, random: &mut Random) -> Vec<Op> {
        let room = DEVICE_BYTES / bytes;
        let op = |place: u64| Op::new(self.device + place % room * bytes, self.host.address() + place * bytes, bytes);
        if method == Method::Pitched {
            return (0..count).map(pitched::place).map(op).collect();
        }
        random.permutation(count as u32).into_iter().map(u64::from).map(op).collect()
    }
}

impl Drop for Calibration {
    fn drop(&mut self) {
        // A context that has ended has taken all of this with it.
        let Ok(_entered) = self.context.enter() else { return };
        let _ = self.context.driver().free_device(self.device);
        let _ = self.context.driver().free_host(&self.host);
    }
}

/// A method that could not copy.
pub struct Refused {
    pub method: Method,
    pub error: Error,
}

enum Pace {
    Took(u64),
    NoTime,
    Stopped,
}

fn what(context: &Context, lanes: &[Lane; 2], methods: &[Method]) -> String {
    let names: Vec<_> = methods.iter().map(|method| method.name()).collect();
    let (ours, driver) = (env!("CARGO_PKG_VERSION"), context.driver().version().unwrap_or(0));
    let (kernel, grid) = (checksum(kernel::TEXT.as_bytes()), lanes[Direction::Load as usize].multiprocessors());
    let uuid = context.uuid().unwrap_or_default();
    format!("{uuid} driver {driver} forebay {ours} kernel {kernel:016x} on {grid} methods {}", names.join(","))
}

/// Takes the time of its passes from `left`.
fn fastest(lane: &Lane, method: Method, ops: &[Op], quiet: &dyn Quiet, left: &mut Duration) -> Result<Pace> {
    let (mut fastest, mut passes) = (u64::MAX, 0);
    while passes <= PASSES {
        let Some(mark) = quiet.await_quiet() else { return Ok(Pace::Stopped) };
        if left.is_zero() {
            return Ok(Pace::NoTime);
        }
        let start = Instant::now();
        // What lies in no row is copied one by one.
        let methods = if method.takes_all() { vec![method] } else { vec![method, Method::Loop] };
        let queued = lane.queue(&methods, ops).map_err(Error::from);
        lane.finish(lane.mark()).and(queued)?;
        let took = start.elapsed();
        *left = left.saturating_sub(took);
        if quiet.was_quiet(mark) {
            if passes > 0 {
                fastest = fastest.min(took.as_nanos() as u64);
            }
            passes += 1;
        }
    }
    Ok(Pace::Took(fastest))
}
