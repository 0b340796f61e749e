//! The device's primary context, which everybody in the process shares, and how a thread gets into it.
//!
//! Invariants: it is retained while this lives. A thread of ours adopts it once and for good. A thread of the engine
//! enters it for a call, and has its own context and capture mode again afterwards. No call made inside can spoil the
//! capture of a graph that another thread makes: the mode is relaxed first. An end of the context is remembered, and
//! every later use is refused. The driver's start has a deadline: it is waited for on a thread of its own, which ends
//! when the driver answers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

use super::driver::{Answer, Attribute, CaptureMode, ContextHandle, Device, Driver, Status};

/// See the module documentation.
pub struct Context {
    driver: Arc<dyn Driver>,
    device: Device,
    handle: ContextHandle,
    ordinal: u32,
    bus_id: String,
    description: String,
    /// The status with which the context ended; 0 while it lives.
    end: AtomicU32,
}

/// While it lives, the calling thread is in the context.
pub struct Entered<'a> {
    context: &'a Context,
    mode: CaptureMode,
}

impl Context {
    /// `Unsupported` if the driver has no such device, `Unavailable` if it cannot be used now, `Timeout` if it has not
    /// started within `patience`.
    pub fn retain(driver: Arc<dyn Driver>, ordinal: u32, patience: Duration) -> Result<Context> {
        within(patience, move || Context::retain_now(driver, ordinal))
    }

    fn retain_now(driver: Arc<dyn Driver>, ordinal: u32) -> Result<Context> {
        let fail = |what: &'static str| {
            let driver = driver.clone();
            move |status| failed(&*driver, what, status).with("device", ordinal)
        };
        driver.init().map_err(fail("the driver does not start"))?;
        let device = driver.device(ordinal).map_err(fail("the driver has no such device"))?;
        let handle = driver.retain_primary(device).map_err(fail("the device's context cannot be used"))?;
        let bus_id = driver.pci_bus_id(device).unwrap_or_default();
        let bus = if bus_id.is_empty() { "an unknown place" } else { &bus_id };
        let version = driver.version().unwrap_or(0);
        let (major, minor) = (version / 1000, version % 1000 / 10);
        let description = format!("device {ordinal} at {bus}, driver for CUDA {major}.{minor}");
        Ok(Context { driver, device, handle, ordinal, bus_id, description, end: AtomicU32::new(0) })
    }

    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Which device it is, and its driver.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Where the system finds it, as `0000:3b:00.0`; empty if the driver does not tell.
    pub fn bus_id(&self) -> &str {
        &self.bus_id
    }

    /// The device's own number in hexadecimal digits, if the driver tells it.
    pub fn uuid(&self) -> Option<String> {
        let uuid = self.driver.uuid(self.device).ok()?;
        Some(uuid.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn attribute(&self, attribute: Attribute) -> Answer<i32> {
        self.driver.attribute(self.device, attribute)
    }

    /// Makes the calling thread, which is ours, one of the context for good.
    pub fn adopt(&self) -> Result<()> {
        let modes = self.driver.exchange_capture_mode(CaptureMode::Relaxed);
        modes.and_then(|_| self.driver.set_current(self.handle)).map_err(|status| self.error("cannot enter", status))
    }

    /// Takes the calling thread in until the answer is dropped. `Unavailable` if the context has ended.
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.check()?;
        let cannot = |status| self.error("cannot enter the device's context", status);
        let mode = self.driver.exchange_capture_mode(CaptureMode::Relaxed).map_err(cannot)?;
        if let Err(status) = self.driver.push_current(self.handle) {
            let _ = self.driver.exchange_capture_mode(mode);
            return Err(cannot(status));
        }
        Ok(Entered { context: self, mode })
    }

    /// Errors with `Unavailable` once the context has ended.
    pub fn check(&self) -> Result<()> {
        match self.end.load(Ordering::Acquire) {
            0 => Ok(()),
            status => Err(failed(&*self.driver, "the device's context has ended", Status(status))
                .hint("this engine copies nothing until it is started again")),
        }
    }

    /// An error of this kind; an end of the context is remembered.
    pub fn error(&self, what: &'static str, status: Status) -> Error {
        self.note(status);
        failed(&*self.driver, what, status)
    }

    /// Remembers an end of the context.
    pub fn note(&self, status: Status) {
        if status.is_end_of_context() {
            self.end(status);
        }
    }

    /// Uses the context for nothing any more.
    pub fn end(&self, status: Status) {
        let _ = self.end.compare_exchange(0, status.0, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // At the process's end the driver may be gone already, which is as good.
        let _ = self.driver.release_primary(self.device);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let driver = &*self.context.driver;
        let _ = driver.pop_current();
        let _ = driver.exchange_capture_mode(self.mode);
    }
}

/// What starts the driver, on a thread of its own. `Timeout` if that has not ended within `patience`.
pub(super) fn within<T: Send + 'static>(
    patience: Duration,
    start: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, started) = mpsc::sync_channel(1);
    // If nobody waits any more, what it sends is dropped at once, and releases a context.
    let start = move || _ = sender.send(start());
    let cannot = |error| Error::new(ErrorKind::Unavailable, "cannot start a thread").source(error);
    thread::Builder::new().name("forebay-cuda".to_string()).spawn(start).map_err(cannot)?;
    started.recv_timeout(patience).unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Timeout, "the driver does not start")
            .with("seconds", patience.as_secs_f64())
            .hint("see whether `nvidia-smi` answers; if it hangs as well, the GPU or its driver has to be reset"))
    })
}

pub(super) fn failed(driver: &dyn Driver, what: &'static str, status: Status) -> Error {
    let kind = match status {
        Status::NOT_FOUND | Status::INVALID_VALUE => ErrorKind::Unsupported,
        Status::STUB_LIBRARY | Status::NO_DEVICE | Status::INVALID_DEVICE => ErrorKind::Unsupported,
        _ => ErrorKind::Unavailable,
    };
    let error = Error::new(kind, what).with("cuda", driver.error_name(status));
    match remedy(status) {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// What to do about a status that says it.
pub(super) fn remedy(status: Status) -> Option<&'static str> {
    match status {
        Status::STUB_LIBRARY => Some(
            "the `libcuda.so.1` that was found is the toolkit's, for linking: take its folder `stubs` out of \
             `LD_LIBRARY_PATH`, so that the driver's own library is found",
        ),
        Status::NO_DEVICE | Status::INVALID_DEVICE => Some(
            "see `nvidia-smi -L` for the GPUs of this host, and `CUDA_VISIBLE_DEVICES` for those that this process may \
             see; in a container, start it with the GPU's runtime, as with `--gpus all`",
        ),
        Status::ALREADY_REGISTERED => Some(
            "another part of this process has registered some of the same memory; copies of the pool's memory there go \
             through staging memory, which is slower",
        ),
        _ => None,
    }
}
