//! NVIDIA's driver library, found at run time: this build needs no toolkit, and a host without a GPU no library.
//!
//! Invariants: `libcuda.so.1` is the one that the process uses already, or the one that the loader finds; it is never
//! closed. Each function is asked for by name and version with `cuGetProcAddress`, so its signature is the one that is
//! written here, whatever the driver's own version. A function that the driver lacks answers `NOT_FOUND`.
//!
//! This file is the only `unsafe` of the CUDA engine.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{size_of, transmute_copy};
use std::ptr::{null, null_mut};

use forebay_core::{Error, ErrorKind, Result};

use super::context::remedy;
use super::driver::{
    Answer, Attribute, Batch, CaptureMode, ContextHandle, Device, Driver, EventHandle, FunctionHandle, Grid, Location,
    ModuleHandle, Rows, SourceOrder, Status, StreamHandle,
};
use crate::copy::Memory;

/// The library would bring a C library of its own into a program that has one already.
const IS_STATIC: bool = cfg!(target_feature = "crt-static");
const LIBRARY: &CStr = c"libcuda.so.1";
/// Drivers of CUDA 12.0 and newer have it, and nothing older is served.
const FINDER: &CStr = c"cuGetProcAddress_v2";

type Finder = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> u32;

/// A table with a field for each function of the driver; `load` asks for them. The column of HIP's names is for whoever
/// ports this engine: nothing was built or run with them, and no build loads AMD's library. docs/hip.md shows them.
macro_rules! table {
    ($($field:ident: $symbol:literal, $version:literal, $hip:expr, ($($argument:ty),*);)*) => {
        struct Table { $($field: Option<unsafe extern "C" fn($($argument),*) -> u32>,)* }

        impl Table {
            fn load(finder: Finder) -> Table {
                Table { $($field: {
                    // SAFETY: the driver gives a function of this name at this version, whose arguments are those
                    // that `cudaTypedefs.h` states, or null. Both are an `Option` of a function pointer.
                    find(finder, $symbol, $version).ok().map(|found| unsafe { transmute_copy(&found) })
                },)* }
            }
        }

        #[cfg(test)]
        const NAMES: &[(&CStr, c_int, tests::Hip)] = {
            use tests::Hip::{Differs, Lacks, Same};
            use tests::OLD;
            &[$(($symbol, $version, $hip)),*]
        };
    };
}

table! {
    init: c"cuInit", 2000, Same("hipInit"), (c_uint);
    version: c"cuDriverGetVersion", 2020,
        Differs("hipDriverGetVersion", "10,000,000 for each major version, 100,000 for each minor one"),
        (*mut c_int);
    error_name: c"cuGetErrorName", 6000, Same("hipDrvGetErrorName"), (u32, *mut *const c_char);
    device_count: c"cuDeviceGetCount", 2000, Same("hipGetDeviceCount"), (*mut c_int);
    device: c"cuDeviceGet", 2000, Same("hipDeviceGet"), (*mut c_int, c_int);
    name: c"cuDeviceGetName", 2000, Same("hipDeviceGetName"), (*mut c_char, c_int, c_int);
    attribute: c"cuDeviceGetAttribute", 2000, Differs("hipDeviceGetAttribute", "attributes have other numbers"),
        (*mut c_int, c_uint, c_int);
    pci_bus_id: c"cuDeviceGetPCIBusId", 4010, Same("hipDeviceGetPCIBusId"), (*mut c_char, c_int, c_int);
    uuid: c"cuDeviceGetUuid", 11040, Same("hipDeviceGetUuid"), (*mut [u8; 16], c_int);
    retain_primary: c"cuDevicePrimaryCtxRetain", 7000, Differs("hipDevicePrimaryCtxRetain", OLD),
        (*mut u64, c_int);
    release_primary: c"cuDevicePrimaryCtxRelease", 11000, Differs("hipDevicePrimaryCtxRelease", OLD), (c_int);
    set_current: c"cuCtxSetCurrent", 4000, Differs("hipCtxSetCurrent", OLD), (u64);
    push_current: c"cuCtxPushCurrent", 4000, Differs("hipCtxPushCurrent", OLD), (u64);
    pop_current: c"cuCtxPopCurrent", 4000, Differs("hipCtxPopCurrent", OLD), (*mut u64);
    capture_mode: c"cuThreadExchangeStreamCaptureMode", 10010, Same("hipThreadExchangeStreamCaptureMode"),
        (*mut c_uint);
    priorities: c"cuCtxGetStreamPriorityRange", 5050, Same("hipDeviceGetStreamPriorityRange"), (*mut c_int, *mut c_int);
    create_stream: c"cuStreamCreateWithPriority", 5050, Same("hipStreamCreateWithPriority"), (*mut u64, c_uint, c_int);
    destroy_stream: c"cuStreamDestroy", 4000, Same("hipStreamDestroy"), (u64);
    stream_wait: c"cuStreamWaitEvent", 3020, Same("hipStreamWaitEvent"), (u64, u64, c_uint);
    query_stream: c"cuStreamQuery", 2000, Same("hipStreamQuery"), (u64);
    is_capturing: c"cuStreamIsCapturing", 10000, Same("hipStreamIsCapturing"), (u64, *mut c_uint);
    create_event: c"cuEventCreate", 2000, Same("hipEventCreateWithFlags"), (*mut u64, c_uint);
    destroy_event: c"cuEventDestroy", 4000, Same("hipEventDestroy"), (u64);
    record: c"cuEventRecord", 2000, Same("hipEventRecord"), (u64, u64);
    query_event: c"cuEventQuery", 2000, Same("hipEventQuery"), (u64);
    synchronize: c"cuEventSynchronize", 2000, Same("hipEventSynchronize"), (u64);
    register: c"cuMemHostRegister", 6050, Same("hipHostRegister"), (*mut c_void, usize, c_uint);
    unregister: c"cuMemHostUnregister", 4000, Same("hipHostUnregister"), (*mut c_void);
    alloc_host: c"cuMemHostAlloc", 2020, Same("hipHostMalloc"), (*mut *mut c_void, usize, c_uint);
    free_host: c"cuMemFreeHost", 2000, Same("hipHostFree"), (*mut c_void);
    alloc_device: c"cuMemAlloc", 3020, Same("hipMalloc"), (*mut u64, usize);
    free_device: c"cuMemFree", 3020, Same("hipFree"), (u64);
    pointer: c"cuPointerGetAttributes", 7000,
        Differs("hipDrvPointerGetAttributes", "before HIP 6, memory of a device has type 1 instead of 2"),
        (c_uint, *const c_uint, *const *mut c_void, u64);
    copy: c"cuMemcpyAsync", 4000, Differs("hipMemcpyAsync", "one argument more: the direction"), (u64, u64, usize, u64);
    copy_rows: c"cuMemcpy2DAsync", 3020, Differs("hipMemcpyParam2DAsync", "unified memory has type 11 instead of 4"),
        (*const CopyRows, u64);
    // The same function with two signatures; a driver below 13.0 knows the first alone.
    batch_12: c"cuMemcpyBatchAsync", 12080, Differs("hipMemcpyBatchAsync", "from HIP 7.1 on"),
        (*mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize, u64);
    batch_13: c"cuMemcpyBatchAsync", 13000, Lacks("the function has the nine arguments of CUDA 12.8"),
        (*mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, u64);
    load_module: c"cuModuleLoadData", 2000, Differs("hipModuleLoadData", "compiled code of one family of GPUs, no PTX"),
        (*mut u64, *const c_void);
    unload_module: c"cuModuleUnload", 2000, Same("hipModuleUnload"), (u64);
    function: c"cuModuleGetFunction", 2000, Same("hipModuleGetFunction"), (*mut u64, u64, *const c_char);
    // The grid and the blocks in three dimensions each, shared memory, stream, parameters, another way to pass them.
    launch: c"cuLaunchKernel", 4000, Same("hipModuleLaunchKernel"),
        (u64, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, u64, *const *const c_void, *const *const c_void);
}

/// `CUmemcpyAttributes`.
#[repr(C)]
struct CopyAttributes {
    source_order: u32,
    /// Of the sources and the destinations: kind 0 leaves it to the driver to look them up.
    locations: [[u32; 2]; 2],
    flags: u32,
}

const _: () = assert!(size_of::<CopyAttributes>() == 24, "the driver reads 24 bytes");

/// One end of `CUDA_MEMCPY2D`.
#[repr(C)]
struct End {
    x_bytes: usize,
    y: usize,
    memory_type: u32,
    /// Unused with `MEMORY_TYPE_UNIFIED`, where the driver finds out what `address` is.
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

const _: () = assert!(size_of::<CopyRows>() == 128, "the driver reads 128 bytes");

const MEMORY_TYPE_UNIFIED: u32 = 4;
const EVENT_BLOCKING_SYNC: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
/// `PORTABLE | DEVICEMAP`. Never `READ_ONLY`: stores write.
const HOST_FLAGS: c_uint = 1 | 2;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE` and `_DEVICE_ORDINAL`.
const POINTER_ATTRIBUTES: [c_uint; 2] = [2, 9];
const MEMORY_TYPE_DEVICE: u32 = 2;
/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`: a hint.
const PREFER_OVERLAP: u32 = 1;

/// See the module documentation.
pub struct LibCuda {
    table: Table,
}

impl LibCuda {
    /// `Unsupported` without a library, or with one that lacks what is needed.
    pub fn load() -> Result<LibCuda> {
        let missing = || match IS_STATIC {
            false => Error::new(ErrorKind::Unsupported, "there is no `libcuda.so.1`").hint(
                "it comes with NVIDIA's driver; in a container, start it with the GPU's runtime, as with `--gpus all`",
            ),
            true => Error::new(ErrorKind::Unsupported, "a program that is linked statically loads no `libcuda.so.1`")
                .hint("take the `forebay` command that the wheel brings along"),
        };
        LibCuda::find()?.ok_or_else(missing)
    }

    /// None without a library; `Unsupported` if it cannot be loaded or lacks what is needed.
    pub fn find() -> Result<Option<LibCuda>> {
        if IS_STATIC {
            return Ok(None);
        }
        // SAFETY: names are terminated; the library's initialisers are those that any user of a GPU runs. The handle is
        // not closed, so the functions stay.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: it is the loader's message for the call above on this thread: null, or terminated and there until
            // the thread's next call of the loader.
            let told = unsafe { libc::dlerror().as_ref().map(|told| CStr::from_ptr(told)) };
            let told = told.unwrap_or_default().to_string_lossy();
            return if is_missing(&told) { Ok(None) } else { Err(not_loaded(&told)) };
        }
        // SAFETY: `library` is open and the name terminated.
        let finder = unsafe { libc::dlsym(library, FINDER.as_ptr()) };
        if finder.is_null() {
            return Err(too_old("cuGetProcAddress_v2"));
        }
        // SAFETY: it is `cuGetProcAddress` as CUDA 12.0 and later type it, and not null.
        let finder = unsafe { transmute_copy::<*mut c_void, Finder>(&finder) };
        if find(finder, c"cuInit", 2000) == Err(Status::STUB_LIBRARY) {
            return Err(stub());
        }
        let table = Table::load(finder);
        if table.capture_mode.is_none() || table.synchronize.is_none() || table.copy.is_none() {
            return Err(too_old("a function that copies, waits, or leaves captures alone"));
        }
        Ok(Some(LibCuda { table }))
    }
}

/// `told`: why it is not loaded, in the loader's words, which begin with the name of the file that it could not load.
fn is_missing(told: &str) -> bool {
    told.contains("libcuda.so.1") && told.ends_with("No such file or directory")
}

fn not_loaded(told: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "`libcuda.so.1` cannot be loaded").source(told).hint(
        "the file, or one that it needs, is damaged or of another kind of machine: install NVIDIA's driver anew; in a \
         container, see what is mounted there",
    )
}

fn too_old(lacks: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "NVIDIA's driver is too old").with("lacks", lacks).hint("525 or newer is needed")
}

fn stub() -> Error {
    let error = Error::new(ErrorKind::Unsupported, "`libcuda.so.1` is not a driver's");
    error.hint(remedy(Status::STUB_LIBRARY).expect("there is one"))
}

/// The driver's refusal, or `NOT_FOUND`.
fn find(finder: Finder, symbol: &CStr, version: c_int) -> Answer<*mut c_void> {
    let (mut found, mut status) = (null_mut(), 0);
    // SAFETY: the name is terminated and both outputs are ours. Flag 0 asks for the default variant of a stream's call.
    answer(unsafe { finder(symbol.as_ptr(), &mut found, version, 0, &mut status) })?;
    if found.is_null() { Err(Status::NOT_FOUND) } else { Ok(found) }
}

fn answer(status: u32) -> Answer<()> {
    if status == 0 { Ok(()) } else { Err(Status(status)) }
}

/// Calls a function of the table.
///
/// What makes each call sound: outputs are locals that live through the call. Handles come from the driver. Addresses
/// are checked by the callers of [`Driver`]: pieces of tensors, of pools that stay mapped while they are registered, or
/// of the driver's own allocations.
macro_rules! call {
    ($self:ident.$function:ident($($argument:expr),* $(,)?)) => {
        match $self.table.$function {
            // SAFETY: as the macro's documentation says; the signature is that of the version that was asked for.
            Some(function) => answer(unsafe { function($($argument),*) }),
            None => Err(Status::NOT_FOUND),
        }
    };
}

impl Driver for LibCuda {
    fn init(&self) -> Answer<()> {
        call!(self.init(0))
    }

    fn version(&self) -> Answer<u32> {
        let mut version = 0;
        call!(self.version(&mut version)).map(|()| version as u32)
    }

    fn error_name(&self, status: Status) -> String {
        let mut name = null();
        match call!(self.error_name(status.0, &mut name)) {
            // SAFETY: the driver's names are terminated and constant.
            Ok(()) if !name.is_null() => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            _ => format!("CUDA error {}", status.0),
        }
    }

    fn has_batch(&self) -> bool {
        self.table.batch_12.is_some() || self.table.batch_13.is_some()
    }

    fn device_count(&self) -> Answer<u32> {
        let mut count = 0;
        call!(self.device_count(&mut count)).map(|()| count as u32)
    }

    fn device(&self, ordinal: u32) -> Answer<Device> {
        let mut device = 0;
        call!(self.device(&mut device, ordinal as c_int)).map(|()| Device(device))
    }

    fn attribute(&self, device: Device, attribute: Attribute) -> Answer<i32> {
        let mut value = 0;
        call!(self.attribute(&mut value, attribute as c_uint, device.0)).map(|()| value)
    }

    fn name(&self, device: Device) -> Answer<String> {
        let mut name = [0u8; 256];
        call!(self.name(name.as_mut_ptr().cast(), name.len() as c_int, device.0))?;
        Ok(CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default())
    }

    fn pci_bus_id(&self, device: Device) -> Answer<String> {
        let mut id = [0u8; 32];
        call!(self.pci_bus_id(id.as_mut_ptr().cast(), id.len() as c_int, device.0))?;
        Ok(CStr::from_bytes_until_nul(&id).map(|id| id.to_string_lossy().to_lowercase()).unwrap_or_default())
    }

    fn uuid(&self, device: Device) -> Answer<[u8; 16]> {
        let mut uuid = [0; 16];
        call!(self.uuid(&mut uuid, device.0)).map(|()| uuid)
    }

    fn retain_primary(&self, device: Device) -> Answer<ContextHandle> {
        let mut context = 0;
        call!(self.retain_primary(&mut context, device.0)).map(|()| ContextHandle(context))
    }

    fn release_primary(&self, device: Device) -> Answer<()> {
        call!(self.release_primary(device.0))
    }

    fn set_current(&self, context: ContextHandle) -> Answer<()> {
        call!(self.set_current(context.0))
    }

    fn push_current(&self, context: ContextHandle) -> Answer<()> {
        call!(self.push_current(context.0))
    }

    fn pop_current(&self) -> Answer<()> {
        call!(self.pop_current(&mut 0))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode> {
        let mut mode = mode as c_uint;
        call!(self.capture_mode(&mut mode))?;
        Ok(match mode {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            _ => CaptureMode::Relaxed,
        })
    }

    fn least_priority(&self) -> Answer<i32> {
        let (mut least, mut greatest) = (0, 0);
        call!(self.priorities(&mut least, &mut greatest)).map(|()| least)
    }

    fn create_stream(&self, priority: i32) -> Answer<StreamHandle> {
        let mut stream = 0;
        call!(self.create_stream(&mut stream, STREAM_NON_BLOCKING, priority)).map(|()| StreamHandle(stream))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Answer<()> {
        call!(self.destroy_stream(stream.0))
    }

    fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Answer<()> {
        call!(self.stream_wait(stream.0, event.0, 0))
    }

    fn query_stream(&self, stream: StreamHandle) -> Answer<()> {
        call!(self.query_stream(stream.0))
    }

    fn is_capturing(&self, stream: StreamHandle) -> Answer<bool> {
        let mut status = 0;
        call!(self.is_capturing(stream.0, &mut status)).map(|()| status != 0)
    }

    fn create_event(&self) -> Answer<EventHandle> {
        let mut event = 0;
        call!(self.create_event(&mut event, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)).map(|()| EventHandle(event))
    }

    fn destroy_event(&self, event: EventHandle) -> Answer<()> {
        call!(self.destroy_event(event.0))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Answer<()> {
        call!(self.record(event.0, stream.0))
    }

    fn query_event(&self, event: EventHandle) -> Answer<()> {
        call!(self.query_event(event.0))
    }

    fn synchronize(&self, event: EventHandle) -> Answer<()> {
        call!(self.synchronize(event.0))
    }

    fn register(&self, memory: &Memory, offset: u64, bytes: u64) -> Answer<()> {
        call!(self.register(memory.span(offset, bytes).as_mut_ptr().cast(), bytes as usize, HOST_FLAGS))
    }

    fn unregister(&self, address: u64) -> Answer<()> {
        call!(self.unregister(std::ptr::with_exposed_provenance_mut(address as usize)))
    }

    fn alloc_host(&self, bytes: u64) -> Answer<Memory> {
        let mut base = null_mut();
        call!(self.alloc_host(&mut base, bytes as usize, HOST_FLAGS))?;
        // SAFETY: the driver has just allocated these bytes, which stay until `free_host`; only this crate knows them.
        unsafe { Memory::new(base.cast(), bytes as usize, ()) }.map_err(|_| Status::OUT_OF_MEMORY)
    }

    fn free_host(&self, memory: &Memory) -> Answer<()> {
        call!(self.free_host(memory.span(0, 0).as_mut_ptr().cast()))
    }

    fn alloc_device(&self, bytes: u64) -> Answer<u64> {
        let mut address = 0;
        call!(self.alloc_device(&mut address, bytes as usize)).map(|()| address)
    }

    fn free_device(&self, address: u64) -> Answer<()> {
        call!(self.free_device(address))
    }

    fn location(&self, address: u64) -> Answer<Location> {
        let (mut kind, mut ordinal) = (0u32, 0i32);
        let outputs: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
        call!(self.pointer(2, POINTER_ATTRIBUTES.as_ptr(), outputs.as_ptr(), address))?;
        Ok(if kind == MEMORY_TYPE_DEVICE { Location::Device(ordinal as u32) } else { Location::Host })
    }

    fn copy(&self, to: u64, from: u64, bytes: u64, stream: StreamHandle) -> Answer<()> {
        call!(self.copy(to, from, bytes as usize, stream.0))
    }

    fn copy_batch(&self, batch: &mut Batch, order: SourceOrder, stream: StreamHandle) -> Answer<()> {
        let count = batch.bytes.len();
        assert!(batch.to.len() == count && batch.from.len() == count, "the lists of a batch are of one length");
        let mut attributes =
            CopyAttributes { source_order: order as u32, locations: [[0; 2]; 2], flags: PREFER_OVERLAP };
        let (to, from, bytes) = (batch.to.as_mut_ptr(), batch.from.as_mut_ptr(), batch.bytes.as_mut_ptr());
        let (mut first, mut failed) = (0, 0);
        if self.table.batch_13.is_some() {
            call!(self.batch_13(to, from, bytes, count, &mut attributes, &mut first, 1, stream.0))
        } else {
            call!(self.batch_12(to, from, bytes, count, &mut attributes, &mut first, 1, &mut failed, stream.0))
        }
    }

    fn copy_rows(&self, rows: &Rows, stream: StreamHandle) -> Answer<()> {
        let end = |address: u64, pitch: u64| End {
            x_bytes: 0,
            y: 0,
            memory_type: MEMORY_TYPE_UNIFIED,
            host: null(),
            address,
            array: null(),
            pitch: pitch as usize,
        };
        let copy = CopyRows {
            from: end(rows.from, rows.from_pitch),
            to: end(rows.to, rows.to_pitch),
            row_bytes: rows.row_bytes as usize,
            rows: rows.rows as usize,
        };
        call!(self.copy_rows(&raw const copy, stream.0))
    }

    fn load_module(&self, text: &CStr) -> Answer<ModuleHandle> {
        let mut module = 0;
        call!(self.load_module(&mut module, text.as_ptr().cast())).map(|()| ModuleHandle(module))
    }

    fn unload_module(&self, module: ModuleHandle) -> Answer<()> {
        call!(self.unload_module(module.0))
    }

    fn function(&self, module: ModuleHandle, name: &CStr) -> Answer<FunctionHandle> {
        let mut function = 0;
        call!(self.function(&mut function, module.0, name.as_ptr())).map(|()| FunctionHandle(function))
    }

    fn launch(&self, function: FunctionHandle, grid: Grid, arguments: &[u64], stream: StreamHandle) -> Answer<()> {
        // The driver reads the arguments during the call.
        let places: Vec<*const c_void> = arguments.iter().map(|argument| (&raw const *argument).cast()).collect();
        let (blocks, threads) = (grid.blocks, grid.threads);
        call!(self.launch(function.0, blocks, 1, 1, threads, 1, 1, 0, stream.0, places.as_ptr(), null()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// HIP's function for one of CUDA's, as AMD documents it.
    pub enum Hip {
        /// Of the same arguments with the same meaning.
        Same(&'static str),
        /// With what is different.
        Differs(&'static str, &'static str),
        /// With the reason.
        Lacks(&'static str),
    }

    pub const OLD: &str = "deprecated: a device is a thread's context";

    /// As docs/hip.md has it.
    fn row((cuda, version, hip): &(&CStr, c_int, Hip)) -> String {
        let cuda = format!("`{}` of CUDA {}.{}", cuda.to_str().unwrap(), version / 1000, version % 1000 / 10);
        match hip {
            Hip::Same(name) => format!("| {cuda} | `{name}` | |\n"),
            Hip::Differs(name, what) => format!("| {cuda} | `{name}` | {what} |\n"),
            Hip::Lacks(why) => format!("| {cuda} | none | {why} |\n"),
        }
    }

    #[test]
    fn the_page_lists_each_function_with_its_name_in_hip() {
        let page = include_str!("../../../../docs/hip.md");
        let head = "| CUDA | HIP | what is different |\n|---|---|---|\n";
        let wanted = NAMES.iter().fold(head.to_string(), |table, function| table + &row(function));
        let found = page.find(head).map(|at| page[at..].split("\n\n").next().unwrap().trim_end());
        assert_eq!(found, Some(wanted.trim_end()), "docs/hip.md needs this table:\n\n{wanted}");
    }

    #[test]
    fn no_name_in_hip_stands_for_two_functions_of_cuda() {
        let mut seen = HashSet::new();
        for (cuda, _, hip) in NAMES {
            let (Hip::Same(name) | Hip::Differs(name, _)) = hip else { continue };
            assert!(name.starts_with("hip") && seen.insert(name), "{name} stands for {cuda:?}, and for another one");
        }
    }

    #[test]
    fn a_library_that_cannot_be_loaded_is_not_called_missing() {
        assert!(is_missing("libcuda.so.1: cannot open shared object file: No such file or directory"));
        for told in [
            "libcuda.so.1: file too short",
            "/usr/lib/libcuda.so.1: invalid ELF header",
            "libcuda.so.1: cannot open shared object file: Permission denied",
            "libnvidia-other.so.5: cannot open shared object file: No such file or directory",
        ] {
            let error = not_loaded(told);
            assert!(error.to_string().ends_with(told) && !is_missing(told), "{error}");
            assert!(error.hint_text().is_some_and(|hint| hint.contains("anew")));
        }
    }
}
