//! Copies by size, number, method and direction, and both directions at once: the figures of `forebay bench device`.
//!
//! Method: what is measured is a GPU with the methods of its driver ([`crate::cuda::bench`]), or the engine over host
//! memory. Before a shape is timed, its copies are made and compared byte by byte. A row's speed is the median of its
//! runs, and its share is that of the peak of single large copies in the same run: of pinned memory with a GPU, of a
//! parallel memcpy without one. Copies lie in shuffled places of the working set. Beside a matrix product, runs go on
//! for a while, so that several products end meanwhile; how many end in a second is compared with products alone.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;

use super::{Random, cpu_time};
use crate::copy::Memory;
use crate::cuda;
use crate::cuda::driver::Driver;
use crate::engine::{CopyEngine, PoolId};
use crate::host::{HostCopyEngine, HostOptions};
use crate::job::{After, Direction, Item, Job, Outcome, Until};
use crate::tensor::{PageRef, Place, Tensor, Tensors};

/// The parameters of a measurement.
#[derive(Clone, Debug)]
pub struct DeviceBench {
    /// Of a copy.
    pub sizes_bytes: Vec<u64>,
    /// Copies that are submitted at once.
    pub counts: Vec<usize>,
    pub ways: Vec<Way>,
    /// Of memory on each side. A shape that does not fit is left out.
    pub working_set_bytes: u64,
    pub runs: usize,
    /// Of the matrices of a product beside which copies are measured too, a multiple of 4; 0 for none.
    pub product_rows: u32,
    /// How long copies go on beside it, at least.
    pub beside: Duration,
    pub seed: u64,
}

/// Between the tensors and the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    Load,
    Store,
    /// Half of the copies each way, at once.
    Both,
}

/// One measured row, in the format of all `forebay bench` rows.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub engine: &'static str,
    pub method: &'static str,
    pub direction: Way,
    /// Of a copy.
    pub size_bytes: u64,
    /// Copies that are submitted at once.
    pub count: usize,
    pub gb_per_s: f64,
    pub baseline: &'static str,
    pub baseline_gb_per_s: f64,
    /// The share of the peak.
    pub ratio: f64,
    /// The most multiprocessors of the device that the method takes; none where that is not known.
    pub multiprocessors: Option<u32>,
    /// None beside a product, whose launches take time of the processor too.
    pub cpu_s_per_gb: Option<f64>,
    /// What runs on the device meanwhile.
    pub beside: Option<&'static str>,
    /// The share of its speed that the product keeps; none if no product has ended meanwhile.
    pub product_ratio: Option<f64>,
}

impl Way {
    pub const ALL: [Way; 3] = [Way::Load, Way::Store, Way::Both];

    pub fn name(self) -> &'static str {
        match self {
            Way::Load => "load",
            Way::Store => "store",
            Way::Both => "both",
        }
    }
}

impl Default for DeviceBench {
    fn default() -> DeviceBench {
        let sizes_bytes = (12..=24).step_by(2).map(|power| 1 << power).collect();
        let (counts, ways) = (vec![16, 256, 4096], Way::ALL.to_vec());
        DeviceBench {
            sizes_bytes,
            counts,
            ways,
            working_set_bytes: 512 << 20,
            runs: 5,
            product_rows: 1024,
            beside: Duration::from_millis(50),
            seed: 1,
        }
    }
}

/// What is measured: copies between two memories.
pub(crate) trait Side {
    fn engine(&self) -> &'static str;
    /// What the peak is one of.
    fn baseline(&self) -> &'static str;
    /// GB/s of large copies each way, by the position of the way.
    fn peaks(&self, runs: usize) -> Result<[f64; 3]>;
    fn methods(&self) -> Vec<&'static str>;
    /// The most multiprocessors that the method at this position takes.
    fn multiprocessors(&self, method: usize) -> Option<u32>;
    /// Makes these copies the ones of the next passes, and checks that they arrive.
    fn lay_out(&mut self, method: usize, size: u64, count: usize, random: &mut Random) -> Result<()>;
    /// Bytes of a pass; 0 if the method does not copy this way, or has no room.
    fn bytes(&self, way: Way) -> u64;
    fn pass(&self, way: Way) -> Result<Duration>;
    fn has_product(&self) -> bool {
        false
    }
    /// Runs `run` while one matrix product follows the other on the device; how many end in a second, if any does.
    fn beside_product(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<Option<f64>> {
        run().map(|()| None)
    }
}

/// A measurement that can begin, on the thread that has prepared it.
pub struct Prepared {
    bench: DeviceBench,
    side: Box<dyn Side>,
}

impl DeviceBench {
    /// On a GPU. Errors with `Unsupported` where there is none that can be used.
    pub fn on_device(self, driver: Arc<dyn Driver>, ordinal: u32) -> Result<Prepared> {
        let side = cuda::bench::side(driver, ordinal, &self)?;
        Ok(Prepared { bench: self, side: Box::new(side) })
    }

    /// On the engine over host memory.
    pub fn on_host(self, threads: usize) -> Result<Prepared> {
        let side = Host::new(&self, threads)?;
        Ok(Prepared { bench: self, side: Box::new(side) })
    }

    /// Sizes and counts of the rows, as far as they fit.
    fn shapes(&self) -> Vec<(u64, usize)> {
        let all = self.sizes_bytes.iter().flat_map(|size| self.counts.iter().map(move |count| (*size, *count)));
        all.filter(|(size, count)| size.saturating_mul(*count as u64) <= self.working_set_bytes).collect()
    }
}

impl Prepared {
    pub fn engine(&self) -> &'static str {
        self.side.engine()
    }

    /// The most rows that there can be, and the bytes that they move.
    pub fn extent(&self) -> (usize, u64) {
        let shapes = self.bench.shapes();
        let (methods, ways) = (self.side.methods().len(), self.bench.ways.len());
        let each: u64 = shapes.iter().map(|(size, count)| size * *count as u64).sum();
        let ways = if self.side.has_product() { 2 * ways } else { ways };
        let runs = (methods * ways).saturating_mul(self.bench.runs) as u64;
        (shapes.len() * methods * ways, each.saturating_mul(runs))
    }

    /// Measures all rows. Calls `progress` with each when it is done. Errors if a copy is wrong.
    pub fn run(mut self, mut progress: impl FnMut(&Row)) -> Result<Vec<Row>> {
        let (mut random, mut rows) = (Random(self.bench.seed), Vec::new());
        let peaks = self.side.peaks(self.bench.runs)?;
        let products = match self.side.has_product() {
            true => self.side.beside_product(&mut || {
                thread::sleep(self.bench.beside);
                Ok(())
            })?,
            false => None,
        };
        for (at, method) in self.side.methods().into_iter().enumerate() {
            for (size, count) in self.bench.shapes() {
                self.side.lay_out(at, size, count, &mut random)?;
                for way in self.bench.ways.iter().copied().filter(|way| self.side.bytes(*way) > 0) {
                    let (baseline_gb_per_s, multiprocessors) = (peaks[way as usize], self.side.multiprocessors(at));
                    let mut tell = |beside, Speed { gb_per_s, cpu_s_per_gb, product_ratio }| {
                        let row = Row {
                            engine: self.side.engine(),
                            method,
                            direction: way,
                            size_bytes: size,
                            count: (self.side.bytes(way) / size) as usize,
                            gb_per_s,
                            baseline: self.side.baseline(),
                            baseline_gb_per_s,
                            ratio: gb_per_s / baseline_gb_per_s,
                            multiprocessors,
                            cpu_s_per_gb,
                            beside,
                            product_ratio,
                        };
                        progress(&row);
                        rows.push(row);
                    };
                    tell(None, self.alone(way)?);
                    if self.side.has_product() {
                        tell(Some("product"), self.beside(way, products)?);
                    }
                }
            }
        }
        Ok(rows)
    }

    fn alone(&self, way: Way) -> Result<Speed> {
        let (begun, gb) = (cpu_time(), self.side.bytes(way) as f64 / 1e9);
        let passes: Vec<_> = (0..self.bench.runs).map(|_| self.side.pass(way)).collect::<Result<_>>()?;
        let cpu_s_per_gb = Some((cpu_time() - begun).as_secs_f64() / (gb * passes.len() as f64));
        Ok(Speed { gb_per_s: gb / median(passes).as_secs_f64(), cpu_s_per_gb, product_ratio: None })
    }

    /// `products` end in a second when nothing is copied.
    fn beside(&self, way: Way, products: Option<f64>) -> Result<Speed> {
        let (mut passes, gb) = (Vec::new(), self.side.bytes(way) as f64 / 1e9);
        let rate = self.side.beside_product(&mut || {
            let start = Instant::now();
            while passes.len() < self.bench.runs || start.elapsed() < self.bench.beside {
                passes.push(self.side.pass(way)?);
            }
            Ok(())
        })?;
        let product_ratio = rate.zip(products).map(|(beside, alone)| beside / alone);
        Ok(Speed { gb_per_s: gb / median(passes).as_secs_f64(), cpu_s_per_gb: None, product_ratio })
    }
}

/// What a row adds to its shape.
struct Speed {
    gb_per_s: f64,
    cpu_s_per_gb: Option<f64>,
    product_ratio: Option<f64>,
}

pub(crate) fn median(mut passes: Vec<Duration>) -> Duration {
    passes.sort_unstable();
    passes[passes.len() / 2]
}

pub(crate) fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, "bytes came back changed").with("from", what)
}

/// The engine over host memory. Its copies are summed, as an engine's are by default.
struct Host {
    threads: usize,
    tensors: Memory,
    pool: Memory,
    laid: Option<Laid>,
}

/// Copies of a shape, and the engine that makes them.
struct Laid {
    engine: HostCopyEngine,
    pool: PoolId,
    size: u64,
    /// Block and slot of each copy: of a single direction, and of loads and stores that are made at once.
    alone: Vec<(u32, u32)>,
    together: [Vec<(u32, u32)>; 2],
}

impl Host {
    fn new(bench: &DeviceBench, threads: usize) -> Result<Host> {
        let memory = || Memory::anonymous(bench.working_set_bytes as usize);
        let (tensors, pool, mut random) = (memory()?, memory()?, Random(bench.seed));
        [&tensors, &pool].into_iter().for_each(|memory| random.fill(memory));
        Ok(Host { threads, tensors, pool, laid: None })
    }

    fn laid(&self) -> &Laid {
        self.laid.as_ref().expect("a shape is laid out before it is measured")
    }

    /// A parallel memcpy of everything, of which the second half may go the other way.
    fn memcpy(&self, way: Way) -> Duration {
        let (tensors, pool) = (&self.tensors, &self.pool);
        let (bytes, threads) = (pool.len() as u64, self.threads as u64);
        let start = Barrier::new(self.threads + 1);
        thread::scope(|scope| {
            for at in 0..threads {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let (from, to) = (bytes * at / threads, bytes * (at + 1) / threads);
                    let (tensors, pool) = (tensors.span(from, to - from), pool.span(from, to - from));
                    let is_load = way == Way::Load || way == Way::Both && at % 2 == 0;
                    if is_load { tensors.copy_from(pool) } else { pool.copy_from(tensors) }
                });
            }
            // Before they begin, since this thread may get a core only when they have ended.
            let begun = Instant::now();
            start.wait();
            begun
        })
        .elapsed()
    }

    /// Whether the block and the slot of each of these copies hold the same.
    fn are_equal(&self) -> bool {
        let Laid { size, alone, .. } = self.laid();
        let bytes = |memory: &Memory, at: u32| memory.span(u64::from(at) * size, *size).bytes().to_vec();
        alone.iter().all(|(block, slot)| bytes(&self.tensors, *block) == bytes(&self.pool, *slot))
    }
}

impl Side for Host {
    fn engine(&self) -> &'static str {
        "host"
    }

    fn baseline(&self) -> &'static str {
        "memcpy"
    }

    fn peaks(&self, runs: usize) -> Result<[f64; 3]> {
        let gb = self.pool.len() as f64 / 1e9;
        self.memcpy(Way::Both);
        let peak = |way| gb / median((0..runs).map(|_| self.memcpy(way)).collect()).as_secs_f64();
        Ok(Way::ALL.map(peak))
    }

    fn methods(&self) -> Vec<&'static str> {
        vec!["threads"]
    }

    fn multiprocessors(&self, _method: usize) -> Option<u32> {
        None
    }

    fn lay_out(&mut self, _method: usize, size: u64, count: usize, random: &mut Random) -> Result<()> {
        let rows = (self.pool.len() as u64 / size) as u32;
        let tensor = Tensor { place: Place::Host(self.tensors.clone()), offset: 0, rows, row_stride_bytes: size };
        let tensors = Tensors::new(vec![tensor], vec![vec![PageRef { tensor: 0, page_bytes: size }]])?;
        let engine = HostCopyEngine::new(tensors, HostOptions { threads: self.threads, ..HostOptions::default() })?;
        let pool = engine.attach_pool(self.pool.clone())?;
        let mut pairs = |from: u32, rows: u32, count| -> Vec<(u32, u32)> {
            let (blocks, slots) = (random.permutation(rows), random.permutation(rows));
            blocks.into_iter().zip(slots).map(|(block, slot)| (from + block, from + slot)).take(count).collect()
        };
        let alone = pairs(0, rows, count);
        // Each way has its half of the memory, so that neither reads what the other writes.
        let half = (count / 2).min(rows as usize / 2);
        let together = [pairs(0, rows / 2, half), pairs(rows / 2, rows / 2, half)];
        self.laid = Some(Laid { engine, pool, size, alone, together });
        for way in [Way::Load, Way::Store] {
            let into = if way == Way::Load { &self.tensors } else { &self.pool };
            for (block, slot) in &self.laid().alone {
                let at = if way == Way::Load { block } else { slot };
                into.write(u64::from(*at) * size, &vec![0xd5; size as usize]);
            }
            self.pass(way)?;
            if !self.are_equal() {
                return Err(wrong("the host engine").with("bytes", size).with("count", count));
            }
        }
        Ok(())
    }

    fn bytes(&self, way: Way) -> u64 {
        self.laid().parts(way).map(|(_, pairs)| pairs.len() as u64).sum::<u64>() * self.laid().size
    }

    fn pass(&self, way: Way) -> Result<Duration> {
        const PATIENCE: Duration = Duration::from_secs(60);

        let laid = self.laid();
        let jobs: Vec<_> = laid.parts(way).map(|(direction, pairs)| laid.job(direction, pairs)).collect();
        let ids: Vec<_> = jobs.iter().map(|job| job.id).collect();
        let start = Instant::now();
        jobs.into_iter().try_for_each(|job| laid.engine.submit(job))?;
        laid.engine.wait(&ids, Until::Settled, Instant::now() + PATIENCE)?;
        let took = start.elapsed();
        let outcomes = laid.engine.poll().into_iter().flat_map(|completion| completion.outcomes);
        let is_well = outcomes.into_iter().all(|outcome| !matches!(outcome, Outcome::Failed));
        if is_well { Ok(took) } else { Err(Error::new(ErrorKind::Io, "a copy of the host engine failed")) }
    }
}

impl Laid {
    /// What a pass has of each direction, if anything.
    fn parts(&self, way: Way) -> impl Iterator<Item = (Direction, &Vec<(u32, u32)>)> {
        let [loads, stores] = match way {
            Way::Load => [Some(&self.alone), None],
            Way::Store => [None, Some(&self.alone)],
            Way::Both => [Some(&self.together[0]), Some(&self.together[1])],
        };
        let parts = [(Direction::Load, loads), (Direction::Store, stores)];
        parts.into_iter().filter_map(|(direction, pairs)| Some((direction, pairs?)))
    }

    fn job(&self, direction: Direction, pairs: &[(u32, u32)]) -> Job {
        let item = |(at, (_, slot)): (usize, &(u32, u32))| Item {
            offset: u64::from(*slot) * self.size,
            group: 0,
            blocks: at as u32..at as u32 + 1,
            beside: [0; 2],
        };
        // A pass has one job of each direction, and takes its completions.
        let id = direction as u64;
        let (items, block_ids) =
            (pairs.iter().enumerate().map(item).collect(), pairs.iter().map(|(b, _)| *b).collect());
        Job { id, direction, pool: self.pool, after: After::Now, items, block_ids, is_summed: true, guard: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake::{Fake, Fault};

    fn small() -> DeviceBench {
        let (sizes_bytes, counts) = (vec![4096, 65536], vec![4, 64]);
        DeviceBench {
            sizes_bytes,
            counts,
            working_set_bytes: 2 << 20,
            runs: 1,
            product_rows: 0,
            ..DeviceBench::default()
        }
    }

    #[test]
    fn each_shape_that_fits_has_a_row_for_each_direction_and_for_both_at_once() {
        let prepared = small().on_host(2).unwrap();
        let (most, bytes) = prepared.extent();
        let mut told = 0;
        let rows = prepared.run(|_| told += 1).unwrap();
        let found: Vec<_> = rows.iter().map(|row| (row.direction.name(), row.size_bytes >> 10, row.count)).collect();
        let shape = |size, count| [("load", size, count), ("store", size, count), ("both", size, count)];
        assert_eq!(found, [shape(4, 4), shape(4, 64), shape(64, 4)].concat(), "64 x 64 KiB do not fit");
        assert_eq!((told, most, bytes), (9, 9, 3 * (4 * 4096 + 64 * 4096 + 4 * 65536)));
        for row in rows {
            assert!(row.gb_per_s > 0.0 && row.ratio > 0.0 && row.multiprocessors.is_none(), "{row:?}");
        }
    }

    #[test]
    fn on_a_device_each_method_has_its_rows_and_the_kernel_loads_alone() {
        let fake = Arc::new(Fake::new(3));
        let bench = DeviceBench { counts: vec![16], ..small() };
        let rows = bench.on_device(fake.clone(), 0).unwrap().run(|_| ()).unwrap();
        let of = |method: &str| rows.iter().filter(|row| row.method == method).count();
        assert_eq!(["batch", "loop", "pitched", "kernel"].map(of), [6, 6, 6, 2]);
        for row in &rows {
            let multiprocessors = if row.method == "kernel" { 8 } else { 0 };
            assert_eq!((row.count, row.multiprocessors), (16, Some(multiprocessors)), "{row:?}");
            assert!(row.gb_per_s > 0.0 && row.baseline == "pinned" && row.baseline_gb_per_s > 0.0, "{row:?}");
        }
        assert_eq!(fake.open(), 0);
    }

    #[test]
    fn copies_in_rows_stay_in_the_memory_that_is_measured() {
        let (sizes_bytes, counts) = (vec![64 << 10], vec![24]);
        let bench = DeviceBench { sizes_bytes, counts, working_set_bytes: 24 << 16, ..small() };
        let rows = bench.on_device(Arc::new(Fake::new(4)), 0).unwrap().run(|_| ()).unwrap();
        let pitched = rows.iter().filter(|row| row.method == "pitched");
        let found: Vec<_> = pitched.map(|row| (row.direction.name(), row.count)).collect();
        assert_eq!(found, [("load", 20), ("store", 20), ("both", 20)]);
    }

    #[test]
    fn beside_a_product_each_shape_has_a_second_row_with_what_the_product_keeps() {
        let fake = Arc::new(Fake::new(5));
        let bench = DeviceBench { sizes_bytes: vec![4096], counts: vec![4], product_rows: 8, ..small() };
        let prepared = bench.on_device(fake.clone(), 0).unwrap();
        let (most, _) = prepared.extent();
        let rows = prepared.run(|_| ()).unwrap();
        let (beside, alone): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.beside == Some("product"));
        assert_eq!((beside.len(), alone.len(), most), (10, 10, 24), "three methods each way, and the kernel's loads");
        assert!(alone.iter().all(|row| row.product_ratio.is_none() && row.cpu_s_per_gb.is_some()), "{alone:?}");
        assert!(beside.iter().all(|row| row.gb_per_s > 0.0 && row.cpu_s_per_gb.is_none()), "{beside:?}");
        assert!(beside.iter().any(|row| row.product_ratio.is_some_and(|ratio| ratio > 0.0)), "{beside:?}");
        assert_eq!(fake.open(), 0);
    }

    #[test]
    fn a_product_that_is_wrong_ends_the_measurement() {
        let fake = Fake::new(6);
        fake.fault(Fault::IdleThread);
        let bench = DeviceBench { product_rows: 8, ..small() };
        let error = bench.on_device(Arc::new(fake), 0).err().unwrap();
        assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("a matrix product"), "{error}");
    }

    #[test]
    fn a_method_that_changes_a_byte_has_no_figure_and_ends_the_measurement() {
        let fake = Arc::new(Fake::new(3));
        fake.fault(Fault::Corruption);
        let error = small().on_device(fake.clone(), 0).unwrap().run(|row| assert_ne!(row.method, "batch"));
        let error = error.unwrap_err();
        assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("batch"), "{error}");
        assert_eq!(fake.open(), 0);
    }
}
