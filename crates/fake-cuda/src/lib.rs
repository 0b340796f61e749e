//! The fake driver under libcuda's names, for tests of the loader, of the signatures, and of all that lies above them.
//! No build that is shipped contains it; it replaces the real library only in a process that loads it by its path.
//!
//! Invariants: `cuGetProcAddress_v2` knows a function by its name and the version at which its signature is the one
//! here. There is one driver in a process, with seed 1. What begins with `fake_` is for tests, which play the model.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_device::Memory;
use forebay_device::cuda::driver::{
    Answer, Attribute, Batch, CaptureMode, ContextHandle, Device, Driver, EventHandle, FunctionHandle, Grid, Location,
    ModuleHandle, Rows, SourceOrder, Status, StreamHandle,
};
use forebay_device::cuda::fake::{Fake, Fault};

static FAKE: LazyLock<Fake> = LazyLock::new(|| {
    eprintln!("fake libcuda: there is no GPU here");
    Fake::new(1)
});
/// The CUDA version that the driver is of: older ones lack functions.
static VERSION: AtomicU32 = AtomicU32::new(13_000);

fn status(answer: Answer<()>) -> u32 {
    answer.err().map_or(0, |status| status.0)
}

/// Writes an answer to where the caller wants it.
fn give<T>(answer: Answer<T>, out: *mut T) -> u32 {
    // SAFETY: the caller of a driver's function passes places for its answers, as this crate's only caller does.
    status(answer.map(|value| unsafe { out.write(value) }))
}

unsafe extern "C" fn init(_flags: c_uint) -> u32 {
    status(FAKE.init())
}

unsafe extern "C" fn version(out: *mut c_int) -> u32 {
    give(FAKE.version().map(|_| VERSION.load(Ordering::Relaxed) as c_int), out)
}

unsafe extern "C" fn error_name(error: u32, out: *mut *const c_char) -> u32 {
    let name = CString::new(FAKE.error_name(Status(error))).expect("a name has no null");
    // The names of a driver stay for ever, and a test asks for few.
    give(Ok(name.into_raw().cast_const()), out)
}

unsafe extern "C" fn device_count(out: *mut c_int) -> u32 {
    give(FAKE.device_count().map(|count| count as c_int), out)
}

unsafe extern "C" fn device(out: *mut c_int, ordinal: c_int) -> u32 {
    give(FAKE.device(ordinal as u32).map(|device| device.0), out)
}

unsafe extern "C" fn attribute(out: *mut c_int, attribute: c_uint, device: c_int) -> u32 {
    let known = match attribute {
        11 => Attribute::MaxPitch,
        16 => Attribute::Multiprocessors,
        40 => Attribute::CopyEngines,
        75 => Attribute::ComputeMajor,
        76 => Attribute::ComputeMinor,
        91 => Attribute::HostPointers,
        134 => Attribute::HostNumaNode,
        _ => return Status::INVALID_VALUE.0,
    };
    give(FAKE.attribute(Device(device), known), out)
}

unsafe extern "C" fn name(out: *mut c_char, bytes: c_int, device: c_int) -> u32 {
    // SAFETY: the caller's buffer has `bytes` bytes.
    unsafe { spell(FAKE.name(Device(device)), out, bytes) }
}

unsafe extern "C" fn pci_bus_id(out: *mut c_char, bytes: c_int, device: c_int) -> u32 {
    // SAFETY: the caller's buffer has `bytes` bytes.
    unsafe { spell(FAKE.pci_bus_id(Device(device)), out, bytes) }
}

/// Writes a text to where the caller wants it.
///
/// # Safety
/// The place has so many bytes.
unsafe fn spell(answer: Answer<String>, out: *mut c_char, bytes: c_int) -> u32 {
    let text = match answer {
        Ok(text) if text.len() < bytes as usize => CString::new(text).expect("it has no null"),
        Ok(_) => return Status::INVALID_VALUE.0,
        Err(error) => return error.0,
    };
    // SAFETY: as stated, and the text with its end was compared with them.
    unsafe { out.copy_from_nonoverlapping(text.as_ptr(), text.count_bytes() + 1) };
    0
}

unsafe extern "C" fn uuid(out: *mut [u8; 16], device: c_int) -> u32 {
    give(FAKE.uuid(Device(device)), out)
}

unsafe extern "C" fn retain_primary(out: *mut u64, device: c_int) -> u32 {
    give(FAKE.retain_primary(Device(device)).map(|context| context.0), out)
}

unsafe extern "C" fn release_primary(device: c_int) -> u32 {
    status(FAKE.release_primary(Device(device)))
}

unsafe extern "C" fn set_current(context: u64) -> u32 {
    status(FAKE.set_current(ContextHandle(context)))
}

unsafe extern "C" fn push_current(context: u64) -> u32 {
    status(FAKE.push_current(ContextHandle(context)))
}

unsafe extern "C" fn pop_current(out: *mut u64) -> u32 {
    give(FAKE.pop_current().map(|()| 0), out)
}

unsafe extern "C" fn capture_mode(mode: *mut c_uint) -> u32 {
    // SAFETY: as for answers; it is read before it is written.
    let asked = match unsafe { mode.read() } {
        0 => CaptureMode::Global,
        1 => CaptureMode::ThreadLocal,
        2 => CaptureMode::Relaxed,
        _ => return Status::INVALID_VALUE.0,
    };
    give(FAKE.exchange_capture_mode(asked).map(|mode| mode as c_uint), mode)
}

unsafe extern "C" fn priorities(least: *mut c_int, greatest: *mut c_int) -> u32 {
    give(FAKE.least_priority().map(|_| -5), greatest).max(give(FAKE.least_priority(), least))
}

unsafe extern "C" fn create_stream(out: *mut u64, flags: c_uint, priority: c_int) -> u32 {
    assert_eq!(flags, 1, "a stream of ours does not block");
    give(FAKE.create_stream(priority).map(|stream| stream.0), out)
}

unsafe extern "C" fn destroy_stream(stream: u64) -> u32 {
    status(FAKE.destroy_stream(StreamHandle(stream)))
}

unsafe extern "C" fn stream_wait(stream: u64, event: u64, _flags: c_uint) -> u32 {
    status(FAKE.stream_wait(StreamHandle(stream), EventHandle(event)))
}

unsafe extern "C" fn query_stream(stream: u64) -> u32 {
    status(FAKE.query_stream(StreamHandle(stream)))
}

unsafe extern "C" fn is_capturing(stream: u64, out: *mut c_uint) -> u32 {
    give(FAKE.is_capturing(StreamHandle(stream)).map(c_uint::from), out)
}

unsafe extern "C" fn create_event(out: *mut u64, flags: c_uint) -> u32 {
    assert_eq!(flags, 1 | 2, "an event of ours is waited for asleep and has no times");
    give(FAKE.create_event().map(|event| event.0), out)
}

unsafe extern "C" fn destroy_event(event: u64) -> u32 {
    status(FAKE.destroy_event(EventHandle(event)))
}

unsafe extern "C" fn record(event: u64, stream: u64) -> u32 {
    status(FAKE.record(EventHandle(event), StreamHandle(stream)))
}

unsafe extern "C" fn query_event(event: u64) -> u32 {
    status(FAKE.query_event(EventHandle(event)))
}

unsafe extern "C" fn synchronize(event: u64) -> u32 {
    status(FAKE.synchronize(EventHandle(event)))
}

unsafe extern "C" fn register(base: *mut c_void, bytes: usize, flags: c_uint) -> u32 {
    assert_eq!(flags, 1 | 2, "memory is registered for every device, to be read and written");
    // SAFETY: the caller keeps the range mapped until it unregisters it.
    match unsafe { Memory::new(base.cast(), bytes, ()) } {
        Ok(memory) => status(FAKE.register(&memory, 0, bytes as u64)),
        Err(_) => Status::INVALID_VALUE.0,
    }
}

unsafe extern "C" fn unregister(base: *mut c_void) -> u32 {
    status(FAKE.unregister(base.expose_provenance() as u64))
}

unsafe extern "C" fn alloc_host(out: *mut *mut c_void, bytes: usize, flags: c_uint) -> u32 {
    assert_eq!(flags, 1 | 2, "memory is pinned for every device");
    let memory = FAKE.alloc_host(bytes as u64);
    give(memory.map(|memory| std::ptr::with_exposed_provenance_mut(memory.address() as usize)), out)
}

unsafe extern "C" fn free_host(base: *mut c_void) -> u32 {
    // SAFETY: only its address is used, to find the allocation.
    match unsafe { Memory::new(base.cast(), 1, ()) } {
        Ok(memory) => status(FAKE.free_host(&memory)),
        Err(_) => Status::INVALID_VALUE.0,
    }
}

unsafe extern "C" fn alloc_device(out: *mut u64, bytes: usize) -> u32 {
    give(FAKE.alloc_device(bytes as u64), out)
}

unsafe extern "C" fn free_device(address: u64) -> u32 {
    status(FAKE.free_device(address))
}

unsafe extern "C" fn pointer(count: c_uint, attributes: *const c_uint, out: *const *mut c_void, address: u64) -> u32 {
    let location = match FAKE.location(address) {
        Ok(location) => location,
        Err(error) => return error.0,
    };
    for at in 0..count as usize {
        // SAFETY: both lists have `count` elements, and each output is as wide as its attribute, 4 bytes for these.
        unsafe {
            let value = match (attributes.add(at).read(), location) {
                (2, Location::Host) => 1,
                (2, Location::Device(_)) => 2,
                (9, Location::Device(ordinal)) => ordinal,
                (9, Location::Host) => 0,
                _ => return Status::INVALID_VALUE.0,
            };
            out.add(at).read().cast::<u32>().write(value);
        }
    }
    0
}

unsafe extern "C" fn copy(to: u64, from: u64, bytes: usize, stream: u64) -> u32 {
    status(FAKE.copy(to, from, bytes as u64, StreamHandle(stream)))
}

/// `CUmemcpyAttributes`.
#[repr(C)]
struct CopyAttributes {
    source_order: u32,
    locations: [[u32; 2]; 2],
    flags: u32,
}

#[allow(clippy::too_many_arguments, reason = "the driver has them")]
unsafe extern "C" fn batch_13(
    to: *mut u64,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    stream: u64,
) -> u32 {
    // SAFETY: the lists have as many elements as the caller says.
    let (batch, order) = unsafe {
        assert_eq!((attribute_count, indices.read()), (1, 0), "all copies have the same attributes");
        assert_eq!((*attributes).locations, [[0; 2]; 2]);
        let list = |of: *mut u64| (0..count).map(|at| of.add(at).read()).collect();
        let bytes = (0..count).map(|at| bytes.add(at).read()).collect();
        (Batch { to: list(to), from: list(from), bytes }, (*attributes).source_order)
    };
    let order = match order {
        1 => SourceOrder::Stream,
        3 => SourceOrder::Any,
        _ => return Status::INVALID_VALUE.0,
    };
    status(FAKE.copy_batch(&mut { batch }, order, StreamHandle(stream)))
}

#[allow(clippy::too_many_arguments, reason = "the driver has them")]
unsafe extern "C" fn batch_12(
    to: *mut u64,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: u64,
) -> u32 {
    // SAFETY: the caller's promises are those of the newer signature, and a place for the failed copy's position.
    unsafe {
        failed.write(usize::MAX);
        batch_13(to, from, bytes, count, attributes, indices, attribute_count, stream)
    }
}

/// One end of `CUDA_MEMCPY2D`.
#[repr(C)]
struct End {
    x_bytes: usize,
    y: usize,
    memory_type: u32,
    host: *const c_void,
    address: u64,
    array: *const c_void,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct CopyRows {
    from: End,
    to: End,
    row_bytes: usize,
    rows: usize,
}

unsafe extern "C" fn copy_rows(copy: *const CopyRows, stream: u64) -> u32 {
    // SAFETY: the caller passes what it wants copied.
    let CopyRows { from, to, row_bytes, rows } = unsafe { copy.read() };
    for end in [&from, &to] {
        assert_eq!((end.x_bytes, end.y, end.memory_type), (0, 0, 4), "the driver finds out where an address is");
        assert!(end.host.is_null() && end.array.is_null());
    }
    let rows = Rows {
        to: to.address,
        to_pitch: to.pitch as u64,
        from: from.address,
        from_pitch: from.pitch as u64,
        row_bytes: row_bytes as u64,
        rows: rows as u64,
    };
    status(FAKE.copy_rows(&rows, StreamHandle(stream)))
}

unsafe extern "C" fn load_module(out: *mut u64, text: *const c_void) -> u32 {
    // SAFETY: text of PTX is terminated.
    give(FAKE.load_module(unsafe { CStr::from_ptr(text.cast()) }).map(|module| module.0), out)
}

unsafe extern "C" fn unload_module(module: u64) -> u32 {
    status(FAKE.unload_module(ModuleHandle(module)))
}

unsafe extern "C" fn function(out: *mut u64, module: u64, name: *const c_char) -> u32 {
    // SAFETY: names are terminated.
    give(FAKE.function(ModuleHandle(module), unsafe { CStr::from_ptr(name) }).map(|function| function.0), out)
}

#[allow(clippy::too_many_arguments, reason = "the driver has them")]
unsafe extern "C" fn launch(
    function: u64,
    blocks: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    threads: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: u64,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> u32 {
    assert_eq!(
        (blocks_y, blocks_z, threads_y, threads_z, shared_bytes),
        (1, 1, 1, 1, 0),
        "a kernel of ours has one row"
    );
    assert!(extra.is_null(), "parameters come one by one");
    let function = FunctionHandle(function);
    let count = FAKE.parameters(function).unwrap_or(0);
    // SAFETY: there is a place for each parameter of the function, and each has 8 bytes, as its text says.
    let read = |at| unsafe { parameters.add(at).read().cast::<u64>().read() };
    let arguments: Vec<u64> = (0..count).map(read).collect();
    status(FAKE.launch(function, Grid { blocks, threads }, &arguments, StreamHandle(stream)))
}

/// # Safety
/// `symbol` is terminated; `out` and `found` are places for the answers.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the driver's name")]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    out: *mut *const c_void,
    version: c_int,
    _flags: u64,
    found: *mut c_int,
) -> u32 {
    // SAFETY: as stated.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().unwrap_or_default();
    let is_known = version as u32 <= VERSION.load(Ordering::Relaxed);
    let function = FUNCTIONS.iter().find(|function| is_known && (function.0, function.1) == (name, version));
    // SAFETY: as stated.
    unsafe {
        found.write(i32::from(function.is_none()));
        out.write(function.map_or(std::ptr::null(), |function| function.2.0));
    }
    if function.is_some() { 0 } else { Status::NOT_FOUND.0 }
}

/// The address of a function.
struct Address(*const c_void);

// SAFETY: functions stay where they are, for all threads.
unsafe impl Sync for Address {}

macro_rules! functions {
    ($($name:literal, $version:literal: $function:ident;)*) => {
        [$(($name, $version, Address($function as *const c_void))),*]
    };
}

static FUNCTIONS: [(&str, c_int, Address); 41] = functions! {
    "cuInit", 2000: init;
    "cuDriverGetVersion", 2020: version;
    "cuGetErrorName", 6000: error_name;
    "cuDeviceGetCount", 2000: device_count;
    "cuDeviceGet", 2000: device;
    "cuDeviceGetName", 2000: name;
    "cuDeviceGetAttribute", 2000: attribute;
    "cuDeviceGetPCIBusId", 4010: pci_bus_id;
    "cuDeviceGetUuid", 11040: uuid;
    "cuDevicePrimaryCtxRetain", 7000: retain_primary;
    "cuDevicePrimaryCtxRelease", 11000: release_primary;
    "cuCtxSetCurrent", 4000: set_current;
    "cuCtxPushCurrent", 4000: push_current;
    "cuCtxPopCurrent", 4000: pop_current;
    "cuThreadExchangeStreamCaptureMode", 10010: capture_mode;
    "cuCtxGetStreamPriorityRange", 5050: priorities;
    "cuStreamCreateWithPriority", 5050: create_stream;
    "cuStreamDestroy", 4000: destroy_stream;
    "cuStreamWaitEvent", 3020: stream_wait;
    "cuStreamQuery", 2000: query_stream;
    "cuStreamIsCapturing", 10000: is_capturing;
    "cuEventCreate", 2000: create_event;
    "cuEventDestroy", 4000: destroy_event;
    "cuEventRecord", 2000: record;
    "cuEventQuery", 2000: query_event;
    "cuEventSynchronize", 2000: synchronize;
    "cuMemHostRegister", 6050: register;
    "cuMemHostUnregister", 4000: unregister;
    "cuMemHostAlloc", 2020: alloc_host;
    "cuMemFreeHost", 2000: free_host;
    "cuMemAlloc", 3020: alloc_device;
    "cuMemFree", 3020: free_device;
    "cuPointerGetAttributes", 7000: pointer;
    "cuMemcpyAsync", 4000: copy;
    "cuMemcpy2DAsync", 3020: copy_rows;
    "cuMemcpyBatchAsync", 12080: batch_12;
    "cuMemcpyBatchAsync", 13000: batch_13;
    "cuModuleLoadData", 2000: load_module;
    "cuModuleUnload", 2000: unload_module;
    "cuModuleGetFunction", 2000: function;
    "cuLaunchKernel", 4000: launch;
};

// ---- for tests ------------------------------------------------------------------------------------------------------

/// Makes it a driver of another version, for those who load it from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_version(version: u32) {
    VERSION.store(version, Ordering::Relaxed);
}

/// A tensor on a device; 0 if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn fake_tensor(ordinal: u32, bytes: u64) -> u64 {
    inside(ordinal, || FAKE.alloc_device(bytes)).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_free(address: u64) {
    inside(0, || FAKE.free_device(address)).expect("it was allocated");
}

/// A stream of the model's.
#[unsafe(no_mangle)]
pub extern "C" fn fake_stream(ordinal: u32) -> u64 {
    inside(ordinal, || FAKE.create_stream(0)).map_or(0, |stream| stream.0)
}

/// Queues the model's writing of these bytes, which are taken now, into a tensor.
///
/// # Safety
/// `bytes` are that many, and `at` lies with them in the tensor at `address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_compute(stream: u64, address: u64, at: u64, bytes: *const u8, count: u64) {
    // SAFETY: as stated.
    let content = unsafe { std::slice::from_raw_parts(bytes, count as usize) }.to_vec();
    let place = std::ptr::with_exposed_provenance_mut::<u8>((address + at) as usize);
    let place = Address(place.cast_const().cast());
    FAKE.task(StreamHandle(stream), move || {
        let place: Address = place;
        // SAFETY: the tensor is memory of this process, which a test keeps until the stream is idle.
        unsafe { place.0.cast_mut().cast::<u8>().copy_from_nonoverlapping(content.as_ptr(), content.len()) }
    });
}

// SAFETY: as for `Sync`; of a tensor, the driver's queue orders who touches it.
unsafe impl Send for Address {}

/// Stops a stream, or lets it go on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_hold(stream: u64, is_held: bool) {
    FAKE.hold(StreamHandle(stream), is_held);
}

/// Lets up to so many things run.
#[unsafe(no_mangle)]
pub extern "C" fn fake_turn(count: u32) {
    (0..count).take_while(|_| FAKE.turn()).for_each(drop);
}

/// Kernels that were queued since the start.
#[unsafe(no_mangle)]
pub extern "C" fn fake_launches() -> u64 {
    FAKE.launches()
}

/// From now on no memory is registered.
#[unsafe(no_mangle)]
pub extern "C" fn fake_refuse_registrations() {
    FAKE.fault(Fault::Registration(0, Status::OUT_OF_MEMORY));
}

/// The device is lost.
#[unsafe(no_mangle)]
pub extern "C" fn fake_lose() {
    FAKE.fault(Fault::Lost(Status::ILLEGAL_ADDRESS));
}

/// From now on batches arrive with a wrong byte.
#[unsafe(no_mangle)]
pub extern "C" fn fake_corrupt() {
    FAKE.fault(Fault::Corruption);
}

/// Ends all faults.
#[unsafe(no_mangle)]
pub extern "C" fn fake_heal() {
    FAKE.heal();
}

/// Streams, events, allocations, registrations and contexts that are open.
#[unsafe(no_mangle)]
pub extern "C" fn fake_open() -> u64 {
    FAKE.open() as u64
}

fn inside<T>(ordinal: u32, call: impl FnOnce() -> Answer<T>) -> Answer<T> {
    FAKE.push_current(FAKE.context(ordinal))?;
    let answer = call();
    FAKE.pop_current()?;
    answer
}
