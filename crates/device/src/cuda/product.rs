//! A matrix product that keeps a device's multiprocessors at work while copies are measured: `kernels/product.cu`,
//! whose text every driver for CUDA 12 compiles for the GPUs from Ampere on. It is no model's: it has neither tensor
//! cores nor shared memory, and shows what copies and computation take from each other, not how much a model loses.
//!
//! Invariants: products run on a stream of the usual priority, as a model does, and only while [`Product::beside`] runs
//! something. The result of one is compared with the host's before any counts.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use forebay_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::driver::{Answer, EventHandle, FunctionHandle, Grid, ModuleHandle, StreamHandle};
use crate::bench::device::wrong;
use crate::copy::Memory;

pub const TEXT: &str = concat!(include_str!("kernels/product.ptx"), "\0");
const NAME: &CStr = c"forebay_product";
/// Of a block: what `product.cu` is compiled for.
const THREADS: u32 = 256;
/// Elements of a result that are compared.
const SAMPLES: usize = 64;

/// See the module documentation. Made and dropped in the context.
pub struct Product {
    context: Arc<Context>,
    module: ModuleHandle,
    function: FunctionHandle,
    stream: StreamHandle,
    /// Behind each of the two products that are queued at once.
    events: [EventHandle; 2],
    /// Three matrices: two factors and their product.
    device: u64,
    size: u32,
}

impl Product {
    /// Of matrices with `size` rows, a multiple of 4. Errors if the device does not take it.
    pub fn load(context: Arc<Context>, size: u32) -> Result<Product> {
        let driver = context.driver();
        let cannot = |status| context.error("the device does not take a matrix product", status);
        let text = CStr::from_bytes_with_nul(TEXT.as_bytes()).expect("the text has one null, at its end");
        let module = driver.load_module(text).map_err(cannot)?;
        // What is made before a failure lives as long as the context, which a measurement leaves soon.
        let function = driver.function(module, NAME).map_err(cannot)?;
        let stream = driver.create_stream(0).map_err(cannot)?;
        let events = [driver.create_event().map_err(cannot)?, driver.create_event().map_err(cannot)?];
        let device = driver.alloc_device(3 * matrix_bytes(size)).map_err(cannot)?;
        let product = Product { context: context.clone(), module, function, stream, events, device, size };
        product.check()?;
        Ok(product)
    }

    /// Runs `run` while one product follows the other; how many of them end in a second meanwhile. None if none does.
    pub fn beside(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<Option<f64>> {
        let is_over = AtomicBool::new(false);
        let (sender, begun) = mpsc::channel();
        thread::scope(|scope| {
            let fed = scope.spawn(|| -> Result<Option<f64>> {
                self.context.adopt()?;
                self.feed(&is_over, sender).map_err(|status| self.context.error("a matrix product failed", status))
            });
            // Also when it has failed: then nobody sends any more.
            let _ = begun.recv();
            let ran = run();
            is_over.store(true, Ordering::Release);
            let rate = fed.join().map_err(|_| Error::new(ErrorKind::Unavailable, "a thread of a product has ended"))?;
            ran.and(rate)
        })
    }

    /// Keeps two queued until it is over, and says so once the first has ended.
    fn feed(&self, is_over: &AtomicBool, begun: mpsc::Sender<()>) -> Answer<Option<f64>> {
        let driver = self.context.driver();
        self.events.iter().try_for_each(|event| self.queue(*event))?;
        driver.synchronize(self.events[0])?;
        let start = Instant::now();
        let (mut ended, mut last, mut at) = (0u32, start, 0);
        let _ = begun.send(());
        while !is_over.load(Ordering::Acquire) {
            self.queue(self.events[at])?;
            at = 1 - at;
            driver.synchronize(self.events[at])?;
            (ended, last) = (ended + 1, Instant::now());
        }
        driver.synchronize(self.events[1 - at])?;
        Ok((ended > 0).then(|| f64::from(ended) / (last - start).as_secs_f64()))
    }

    fn queue(&self, event: EventHandle) -> Answer<()> {
        let [left, right, out] = self.matrices();
        let driver = self.context.driver();
        let grid = Grid { blocks: self.size, threads: THREADS };
        driver.launch(self.function, grid, &[left, right, out, u64::from(self.size)], self.stream)?;
        driver.record(event, self.stream)
    }

    fn matrices(&self) -> [u64; 3] {
        [0, 1, 2].map(|at| self.device + at * matrix_bytes(self.size))
    }

    /// Fills the factors with small whole numbers, whose sums are exact in any order, and compares the product.
    fn check(&self) -> Result<()> {
        let context = &self.context;
        let cannot = |status| context.error("the device does not take a matrix product", status);
        let bytes = matrix_bytes(self.size);
        let host = context.driver().alloc_host(bytes).map_err(cannot)?;
        let checked = self.compare(&host);
        let _ = context.driver().free_host(&host);
        match checked.map_err(cannot)? {
            true => Ok(()),
            false => Err(wrong("a matrix product").with("size", self.size)),
        }
    }

    fn compare(&self, host: &Memory) -> Answer<bool> {
        let (driver, size, bytes) = (self.context.driver(), u64::from(self.size), matrix_bytes(self.size));
        let [left, right, out] = self.matrices();
        let factors: [fn(u64, u64) -> u64; 2] =
            [|row, column| (row + column) % 5, |row, column| (row * column + 1) % 7];
        for (matrix, factor) in [left, right].into_iter().zip(factors) {
            for row in 0..size {
                let numbers = (0..size).flat_map(|column| (factor(row, column) as f32).to_le_bytes());
                host.write(row * size * 4, &numbers.collect::<Vec<u8>>());
            }
            driver.copy(matrix, host.address(), bytes, self.stream)?;
            self.wait()?;
        }
        self.queue(self.events[0])?;
        driver.copy(host.address(), out, bytes, self.stream)?;
        self.wait()?;
        Ok((0..SAMPLES as u64).all(|sample| {
            let (row, column) = (sample * 31 % size, sample * 17 % size);
            let mut found = [0; 4];
            host.span((row * size + column) * 4, 4).read(&mut found);
            let sum: u64 = (0..size).map(|at| factors[0](row, at) * factors[1](at, column)).sum();
            f32::from_le_bytes(found) == sum as f32
        }))
    }

    fn wait(&self) -> Answer<()> {
        self.context.driver().record(self.events[1], self.stream)?;
        self.context.driver().synchronize(self.events[1])
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // A context that has ended has taken all of this with it.
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        let _ = driver.free_device(self.device);
        for event in self.events {
            let _ = driver.destroy_event(event);
        }
        let _ = driver.destroy_stream(self.stream);
        let _ = driver.unload_module(self.module);
    }
}

fn matrix_bytes(size: u32) -> u64 {
    u64::from(size) * u64::from(size) * 4
}
