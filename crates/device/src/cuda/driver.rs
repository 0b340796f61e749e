//! The driver of a device as this crate uses it: a method for each of the driver's calls.
//!
//! Invariants of callers: an address comes from a registered tensor, an attached pool or an allocation of the driver,
//! and a copy stays inside it. Calls that need a context are made on a thread that has entered one
//! ([`super::context`]). No call is made that waits for the whole device.
//!
//! A trait, and no table alone: C functions have no `self`, and tests that run side by side need drivers of their own.

use std::ffi::CStr;

use crate::copy::Memory;

/// What a driver answers: 0 is success, and never stands in an `Err`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Status(pub u32);

pub type Answer<T> = Result<T, Status>;

impl Status {
    pub const INVALID_VALUE: Status = Status(1);
    pub const OUT_OF_MEMORY: Status = Status(2);
    pub const DEINITIALIZED: Status = Status(4);
    pub const STUB_LIBRARY: Status = Status(34);
    pub const NO_DEVICE: Status = Status(100);
    pub const INVALID_DEVICE: Status = Status(101);
    pub const INVALID_CONTEXT: Status = Status(201);
    pub const INVALID_HANDLE: Status = Status(400);
    pub const INVALID_PTX: Status = Status(218);
    pub const NOT_FOUND: Status = Status(500);
    pub const NOT_READY: Status = Status(600);
    pub const ILLEGAL_ADDRESS: Status = Status(700);
    pub const LAUNCH_TIMEOUT: Status = Status(702);
    pub const ALREADY_REGISTERED: Status = Status(712);
    pub const MISALIGNED_ADDRESS: Status = Status(716);
    pub const CAPTURE_UNSUPPORTED: Status = Status(900);
    pub const UNKNOWN: Status = Status(999);

    /// Whether the context has ended with it: nothing queued there touches memory any more, and no call succeeds.
    pub fn is_end_of_context(self) -> bool {
        matches!(self.0, 4 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 714..=719 | 911 | 999)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Device(pub i32);

/// A context's handle. The primary one of a device is shared with everybody in the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ContextHandle(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct StreamHandle(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct EventHandle(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ModuleHandle(pub u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct FunctionHandle(pub u64);

/// Numbers as in `cuda.h`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Attribute {
    MaxPitch = 11,
    Multiprocessors = 16,
    CopyEngines = 40,
    ComputeMajor = 75,
    ComputeMinor = 76,
    /// Whether the device knows registered memory by the addresses of the host.
    HostPointers = 91,
    HostNumaNode = 134,
}

/// What an address is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Location {
    Host,
    Device(u32),
}

/// Whether queued operations of other threads may spoil a capture, and calls of this thread be forbidden during one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum CaptureMode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

/// When a batch may read its sources.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum SourceOrder {
    /// In the order of the stream.
    Stream = 1,
    /// At any time after the call.
    Any = 3,
}

/// Copies of one call, element by element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub to: Vec<u64>,
    pub from: Vec<u64>,
    pub bytes: Vec<usize>,
}

/// Rows of one size, evenly spaced on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub to: u64,
    /// From the start of a row to that of the next.
    pub to_pitch: u64,
    pub from: u64,
    pub from_pitch: u64,
    pub row_bytes: u64,
    pub rows: u64,
}

/// How much of a device a kernel takes: blocks, of so many threads each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
}

/// See the module documentation.
pub trait Driver: Send + Sync {
    fn init(&self) -> Answer<()>;
    /// 1000 times the major version plus 10 times the minor one.
    fn version(&self) -> Answer<u32>;
    fn error_name(&self, status: Status) -> String;
    /// Whether the driver has batched copies.
    fn has_batch(&self) -> bool;

    /// Devices that this process may see.
    fn device_count(&self) -> Answer<u32>;
    fn device(&self, ordinal: u32) -> Answer<Device>;
    fn name(&self, device: Device) -> Answer<String>;
    fn attribute(&self, device: Device, attribute: Attribute) -> Answer<i32>;
    fn pci_bus_id(&self, device: Device) -> Answer<String>;
    /// The device's own number, the same in every process and after a restart.
    fn uuid(&self, device: Device) -> Answer<[u8; 16]>;

    fn retain_primary(&self, device: Device) -> Answer<ContextHandle>;
    fn release_primary(&self, device: Device) -> Answer<()>;
    /// For a thread that nobody else uses.
    fn set_current(&self, context: ContextHandle) -> Answer<()>;
    fn push_current(&self, context: ContextHandle) -> Answer<()>;
    fn pop_current(&self) -> Answer<()>;
    /// Returns the calling thread's former mode.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode>;

    /// The number of the lowest priority; greater ones have smaller numbers.
    fn least_priority(&self) -> Answer<i32>;
    /// A stream that does not synchronise with the legacy stream.
    fn create_stream(&self, priority: i32) -> Answer<StreamHandle>;
    fn destroy_stream(&self, stream: StreamHandle) -> Answer<()>;
    /// What is queued on `stream` from now on waits for what `event` has recorded by now.
    fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Answer<()>;
    /// `NOT_READY` while work is queued.
    fn query_stream(&self, stream: StreamHandle) -> Answer<()>;
    fn is_capturing(&self, stream: StreamHandle) -> Answer<bool>;

    /// An event without times, whose waiters sleep.
    fn create_event(&self) -> Answer<EventHandle>;
    fn destroy_event(&self, event: EventHandle) -> Answer<()>;
    fn record(&self, event: EventHandle, stream: StreamHandle) -> Answer<()>;
    /// `NOT_READY` until what `event` has recorded is done.
    fn query_event(&self, event: EventHandle) -> Answer<()>;
    /// Sleeps until what `event` has recorded is done.
    fn synchronize(&self, event: EventHandle) -> Answer<()>;

    /// Pins `bytes` at `offset` of `memory` for all devices. They stay mapped until they are unregistered.
    fn register(&self, memory: &Memory, offset: u64, bytes: u64) -> Answer<()>;
    /// Ends the registration that begins at this address.
    fn unregister(&self, address: u64) -> Answer<()>;
    /// Pinned memory, until it is given to `free_host`.
    fn alloc_host(&self, bytes: u64) -> Answer<Memory>;
    fn free_host(&self, memory: &Memory) -> Answer<()>;
    fn alloc_device(&self, bytes: u64) -> Answer<u64>;
    fn free_device(&self, address: u64) -> Answer<()>;
    fn location(&self, address: u64) -> Answer<Location>;

    fn copy(&self, to: u64, from: u64, bytes: u64, stream: StreamHandle) -> Answer<()>;
    fn copy_batch(&self, batch: &mut Batch, order: SourceOrder, stream: StreamHandle) -> Answer<()>;
    /// Bytes between the rows are not touched. `INVALID_VALUE` if a pitch is shorter than a row or beyond `MaxPitch`.
    fn copy_rows(&self, rows: &Rows, stream: StreamHandle) -> Answer<()>;

    /// Compiles PTX for the device of the current context.
    fn load_module(&self, text: &CStr) -> Answer<ModuleHandle>;
    fn unload_module(&self, module: ModuleHandle) -> Answer<()>;
    fn function(&self, module: ModuleHandle, name: &CStr) -> Answer<FunctionHandle>;
    /// Queues a kernel, all of whose parameters have 8 bytes.
    fn launch(&self, function: FunctionHandle, grid: Grid, arguments: &[u64], stream: StreamHandle) -> Answer<()>;
}
