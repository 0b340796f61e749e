//! Measures what copies cost by each method, at the start of an engine, once for a device and its driver.
//!
//! Invariants: it ends within its budget and one copy; what it had no time for is not known, and the driver's own
//! methods are used there. A shape is known for all methods or for none. Its device memory is ours, at most 8 MiB, and
//! given back. It finds out nothing about copies beside a model at work.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::{Error, Result};

use super::context::Context;
use super::costs::{Cost, Costs};
use super::kernel;
use super::lane::Lane;
use super::methods::Method;
use super::ops::Op;
use crate::bench::Random;
use crate::job::Direction;

const BUDGET: Duration = Duration::from_millis(1500);
const SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// The border between methods moves with the number of copies.
const COUNTS: [u64; 3] = [16, 128, 1024];
/// After one that warms up; the fastest of them counts.
const PASSES: usize = 3;
/// Copies of a pass use it several times over: nearly all of a device belongs to the model.
const DEVICE_BYTES: u64 = 8 << 20;

/// What is kept in `folder`, or what is measured now and kept there.
pub fn costs(context: &Context, lanes: &[Lane; 2], methods: &[Method], folder: Option<&Path>) -> Result<Costs> {
    let what = what(context, lanes, methods);
    let place = folder.zip(context.uuid()).map(|(folder, uuid)| folder.join(format!("gpu-{uuid}.costs")));
    if let Some(kept) = place.as_ref().and_then(|place| Costs::read(place, &what)) {
        return Ok(kept);
    }
    let costs = measure(context, lanes, methods, Instant::now() + BUDGET)?;
    if let Some(place) = place {
        // A folder that keeps nothing costs a measurement at the next start.
        let _ = costs.write(&place, &what);
    }
    Ok(costs)
}

/// All that a measurement holds for.
fn what(context: &Context, lanes: &[Lane; 2], methods: &[Method]) -> String {
    let names: Vec<_> = methods.iter().map(|method| method.name()).collect();
    let (driver, staging) = (context.driver().version().unwrap_or(0), lanes[0].staging().len());
    let (kernel, grid) = (checksum(kernel::TEXT.as_bytes()), lanes[Direction::Load as usize].multiprocessors());
    let uuid = context.uuid().unwrap_or_default();
    format!("{uuid} driver {driver} kernel {kernel:016x} on {grid} buffers {staging} methods {}", names.join(","))
}

fn measure(context: &Context, lanes: &[Lane; 2], methods: &[Method], deadline: Instant) -> Result<Costs> {
    let driver = context.driver();
    let cannot = |status| context.error("cannot allocate memory to calibrate with", status);
    let bytes = DEVICE_BYTES.min(lanes[0].staging().len() as u64);
    let device = driver.alloc_device(bytes).map_err(cannot)?;
    let costs = shapes(lanes, methods, (device, bytes), deadline);
    driver.free_device(device).map_err(cannot)?;
    costs
}

fn shapes(lanes: &[Lane; 2], methods: &[Method], device: (u64, u64), deadline: Instant) -> Result<Costs> {
    let mut costs = Costs::default();
    let mut random = Random(1);
    for (bytes, count) in COUNTS.into_iter().flat_map(|count| SIZES.map(|bytes| (bytes, count))) {
        for direction in [Direction::Store, Direction::Load] {
            let lane = &lanes[direction as usize];
            if bytes * count > lane.staging().len() as u64 || bytes > device.1 {
                continue;
            }
            // In any order, as blocks of a cache lie.
            let places = random.permutation(count as u32).into_iter().map(|place| u64::from(place) * bytes);
            let host = lane.staging().address();
            let op = |at: u64| Op { device: device.0 + at % (device.1 / bytes * bytes), host: host + at, bytes };
            let ops: Vec<Op> = places.map(op).collect();
            let mut shape = Vec::new();
            for method in methods.iter().copied().filter(|method| lane.has(*method)) {
                let Some(nanoseconds) = fastest(lane, method, &ops, deadline)? else { return Ok(costs) };
                shape.push(Cost { direction, method, bytes, count, nanoseconds });
            }
            costs.0.extend(shape);
        }
    }
    Ok(costs)
}

/// None if there was no time for it.
fn fastest(lane: &Lane, method: Method, ops: &[Op], deadline: Instant) -> Result<Option<u64>> {
    let mut fastest = u64::MAX;
    for pass in 0..=PASSES {
        let start = Instant::now();
        if start >= deadline {
            return Ok(None);
        }
        let queued = lane.queue(&[method], ops).map_err(Error::from);
        lane.finish(lane.mark()).and(queued)?;
        if pass > 0 {
            fastest = fastest.min(start.elapsed().as_nanos() as u64);
        }
    }
    Ok(Some(fastest))
}
