//! The functions of libucp that are called here, found in a library at run time.
//!
//! Invariants: each type has the layout that the headers of libucp 1.13 to 1.23 give it. Versions only add fields at
//! the end, and read none that a mask does not name. A library that was opened stays open: it has threads of its own.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

/// What the system's own UCX is called.
pub const SYSTEM: &str = "libucp.so.0";
/// The oldest that is used. Version 1.13 ends the process, or crashes, when endpoints over TCP are closed by force.
pub const API: (c_uint, c_uint) = (1, 18);

/// `ucs_status_t`, which is one byte.
pub type Status = i8;
pub const OK: Status = 0;
pub const BUSY: Status = -15;
pub const CANCELED: Status = -16;
/// Pointers from here on are a status, not a request.
pub const FIRST_ERROR: usize = (-100_isize) as usize;

/// Bits of the masks and flags that are used.
pub const PARAM_FEATURES: u64 = 1;
pub const PARAM_SHARED: u64 = 1 << 5;
pub const FEATURE_TAG: u64 = 1;
pub const FEATURE_WAKEUP: u64 = 1 << 4;
pub const WORKER_THREAD_MODE: u64 = 1;
pub const WORKER_FLAGS: u64 = 1 << 5;
/// Requests that end with the worker are no mistake.
pub const WORKER_IGNORE_REQUESTS: u64 = 1;
/// Calls come from any thread, one at a time.
pub const THREAD_SERIALIZED: c_int = 1;
pub const ENDPOINT_ADDRESS: u64 = 1;
pub const ENDPOINT_ERROR_MODE: u64 = 1 << 1;
pub const ENDPOINT_ERROR_HANDLER: u64 = 1 << 2;
/// A request on an endpoint whose peer has ended completes.
pub const ERROR_MODE_PEER: c_int = 1;
pub const REQUEST_CALLBACK: u32 = 1 << 1;
pub const REQUEST_USER_DATA: u32 = 1 << 2;
pub const REQUEST_DATATYPE: u32 = 1 << 3;
pub const REQUEST_MEMORY_TYPE: u32 = 1 << 6;
pub const REQUEST_RECEIVE_INFO: u32 = 1 << 7;
pub const DATATYPE_LIST: u64 = 2;
pub const MEMORY_HOST: c_int = 0;

#[repr(C)]
pub struct Params {
    pub mask: u64,
    pub features: u64,
    pub request_bytes: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    /// Workers of several threads share the context.
    pub is_shared: c_int,
}

#[repr(C)]
pub struct WorkerParams {
    pub mask: u64,
    pub thread_mode: c_int,
    pub processors: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_file: c_int,
    pub flags: u64,
}

#[repr(C)]
pub struct EndpointParams {
    pub mask: u64,
    pub address: *const c_void,
    pub error_mode: c_int,
    pub error_handler: unsafe extern "C" fn(*mut c_void, *mut c_void, Status),
    pub error_argument: *mut c_void,
}

/// `ucp_request_param_t`.
#[repr(C)]
pub struct RequestParams {
    pub mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub callback: *const c_void,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_int,
    pub receive_info: *mut ReceiveInfo,
    pub memory: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ReceiveInfo {
    pub tag: u64,
    pub bytes: usize,
}

/// One part of a message: `ucp_dt_iov_t`.
#[repr(C)]
pub struct Part {
    pub base: *mut c_void,
    pub bytes: usize,
}

pub type SendCallback = unsafe extern "C" fn(*mut c_void, Status, *mut c_void);
pub type ReceiveCallback = unsafe extern "C" fn(*mut c_void, Status, *const ReceiveInfo, *mut c_void);

type Handle = *mut c_void;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Each is documented in UCX's `ucp.h` under its name behind `ucp_`.
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find(handle: Handle) -> Result<Library, &'static str> {
                Ok(Library { $($name: {
                    let name = concat!("ucp_", stringify!($name), "\0");
                    // SAFETY: the handle is that of an open library, and the name ends with a zero.
                    let found = unsafe { libc::dlsym(handle, name.as_ptr().cast()) };
                    if found.is_null() {
                        return Err(stringify!($name));
                    }
                    // SAFETY: a function of this name has this type in every version of libucp from 1.18 on.
                    unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found)
                    }
                },)* })
            }
        }
    };
}

functions! {
    get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint);
    config_read: fn(*const c_char, *const c_char, *mut Handle) -> Status;
    config_modify: fn(Handle, *const c_char, *const c_char) -> Status;
    config_release: fn(Handle);
    init_version: fn(c_uint, c_uint, *const Params, Handle, *mut Handle) -> Status;
    worker_create: fn(Handle, *const WorkerParams, *mut Handle) -> Status;
    worker_destroy: fn(Handle);
    worker_get_address: fn(Handle, *mut Handle, *mut usize) -> Status;
    worker_release_address: fn(Handle, Handle);
    worker_get_efd: fn(Handle, *mut c_int) -> Status;
    worker_arm: fn(Handle) -> Status;
    worker_progress: fn(Handle) -> c_uint;
    ep_create: fn(Handle, *const EndpointParams, *mut Handle) -> Status;
    tag_send_nbx: fn(Handle, *const c_void, usize, u64, *const RequestParams) -> Handle;
    tag_recv_nbx: fn(Handle, *mut c_void, usize, u64, u64, *const RequestParams) -> Handle;
    tag_probe_nb: fn(Handle, u64, u64, c_int, *mut ReceiveInfo) -> Handle;
    tag_msg_recv_nbx: fn(Handle, *mut c_void, usize, Handle, *const RequestParams) -> Handle;
    request_cancel: fn(Handle, Handle);
    request_free: fn(Handle);
}

impl Library {
    /// Opens it. Errors with `Unsupported` if it is not there or older than 1.18.
    pub fn open(path: Option<&Path>) -> Result<Library> {
        let path = path.unwrap_or(Path::new(SYSTEM));
        let failed = |why: String| {
            let error = Error::new(ErrorKind::Unsupported, "cannot use UCX").with("library", path.display());
            error.with("reason", why).hint("install UCX 1.18 or later, or name its `libucp.so.0`")
        };
        // The name of nothing is that of this program.
        if path.as_os_str().is_empty() {
            return Err(failed("its name is empty".to_owned()));
        }
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| failed(error.to_string()))?;
        // SAFETY: the name ends with a zero. What the library's initialization does is the choice of who named it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failure of this thread's call there is a text, which lives until its next one.
            let text = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(failed(text.to_string_lossy().into_owned()));
        }
        let library = Library::find(handle).map_err(|name| failed(format!("it has no function ucp_{name}")))?;
        let version = library.version();
        match (version[0], version[1]) >= API {
            true => Ok(library),
            false => Err(failed(format!("it is version {}.{}", version[0], version[1]))),
        }
    }

    /// Major, minor and release.
    pub fn version(&self) -> [u32; 3] {
        let [mut major, mut minor, mut release] = [0; 3];
        // SAFETY: it writes three numbers.
        unsafe { (self.get_version)(&mut major, &mut minor, &mut release) };
        [major, minor, release]
    }
}

/// What a status says.
pub fn meaning(status: Status) -> String {
    let known = match status {
        -3 => "input or output failed",
        -4 => "no memory is left",
        -6 => "no transport reaches the peer",
        -11 | -9 => "a message was longer than asked for",
        -14 => "there is no such device",
        -16 => "canceled",
        -20 | -80 => "the peer did not answer in time",
        -22 => "not supported",
        -24 => "not connected",
        -25 => "the connection was reset",
        _ => return format!("status {status} of UCX"),
    };
    format!("{known} (status {status} of UCX)")
}
