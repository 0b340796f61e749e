//! One session's part of libucp: a worker with one endpoint, and the messages that are under way on it.
//!
//! Invariants: memory that libucp may touch is kept until the worker is destroyed, or until its request ended in the
//! usual way. That a request was canceled is not enough: bytes that were on the way still came into its memory. libucp
//! is called by one thread at a time for each worker, and its callbacks only take notes. In a child that was forked
//! nothing is called.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_core::{Error, ErrorKind, Result};

use super::library::{self, EndpointParams, Library, Params, Part, ReceiveInfo, RequestParams, Status, WorkerParams};
use crate::ids::RegionId;
use crate::line::Span;

/// Defaults of ours that are better than UCX's. With segments of 8 KiB, UCX's own, TCP moved 1.4 GB/s instead of 4.8.
/// The receiver gets the bytes, or takes them out of messages, rather than that the sender puts them. The session's own
/// connection says that a peer has ended; version 1.23 crashes if it probes a peer whose endpoint is being closed.
const DEFAULTS: [(&str, &str); 4] = [
    ("TCP_TX_SEG_SIZE", "256k"),
    ("TCP_RX_SEG_SIZE", "256k"),
    ("RNDV_SCHEME", "get_zcopy"),
    ("KEEPALIVE_INTERVAL", "inf"),
];
/// Steps in one turn of a worker, before others' turns.
const STEPS: usize = 32;
/// The type of messages in one part: bytes, one after another.
const BYTES: u64 = 1 << 3;
/// Which bits of a tag count: all.
const WHOLE_TAG: u64 = u64::MAX;

type Handle = *mut c_void;

/// libucp and its settings, for all sessions of this process.
pub struct Context {
    library: Library,
    handle: Handle,
    process: u32,
}

// SAFETY: libucp was asked for a context that workers of several threads share.
unsafe impl Send for Context {}
// SAFETY: as above; the rest is a table of functions.
unsafe impl Sync for Context {}

/// By the file of the library that was asked for.
static CONTEXTS: Mutex<Vec<(Option<PathBuf>, Arc<Context>)>> = Mutex::new(Vec::new());

impl Context {
    /// Opens the library, the system's if none is named, and reads UCX's variables; once for this process. Takes some
    /// ms. Errors with `Unsupported` if there is none that fits, or if the process that forked this one has opened it.
    pub fn open(path: Option<&Path>) -> Result<Arc<Context>> {
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if contexts.iter().any(|(_, context)| context.process != std::process::id()) {
            let error = Error::new(ErrorKind::Unsupported, "UCX was used by the process that forked this one");
            return Err(error.hint("begin the process anew (`spawn`), or fork before UCX is used"));
        }
        if let Some((_, context)) = contexts.iter().find(|(opened, _)| opened.as_deref() == path) {
            return Ok(context.clone());
        }
        let context = Arc::new(Context::new(path)?);
        contexts.push((path.map(PathBuf::from), context.clone()));
        Ok(context)
    }

    fn new(path: Option<&Path>) -> Result<Context> {
        let library = Library::open(path)?;
        let failed = |status: Status| {
            let error = Error::new(ErrorKind::Unsupported, "cannot start UCX").with("reason", library::meaning(status));
            error.hint("are the variables that begin with `UCX_` right? `UCX_LOG_LEVEL=info` tells more")
        };
        let mut config = null_mut();
        // SAFETY: null asks for the usual variables and no file; the function writes one handle.
        let status = unsafe { (library.config_read)(null(), null(), &mut config) };
        if status != library::OK {
            return Err(failed(status));
        }
        for (name, value) in DEFAULTS {
            if std::env::var_os(format!("UCX_{name}")).is_none() {
                let [name, value] = [name, value].map(|text| CString::new(text).expect("no zero in it"));
                // SAFETY: the configuration was read above, and both texts end with a zero. A version that has no such
                // setting says so and changes nothing.
                let _ = unsafe { (library.config_modify)(config, name.as_ptr(), value.as_ptr()) };
            }
        }
        let features = library::FEATURE_TAG | library::FEATURE_WAKEUP;
        let params = Params {
            mask: library::PARAM_FEATURES | library::PARAM_SHARED,
            features,
            request_bytes: 0,
            request_init: null(),
            request_cleanup: null(),
            tag_sender_mask: 0,
            is_shared: 1,
        };
        let mut handle = null_mut();
        let (major, minor) = library::API;
        // SAFETY: the mask names the fields that are there; the function writes one handle.
        let status = unsafe { (library.init_version)(major, minor, &params, config, &mut handle) };
        // SAFETY: read above, and used no more.
        unsafe { (library.config_release)(config) };
        match status {
            library::OK => Ok(Context { library, handle, process: std::process::id() }),
            status => Err(failed(status)),
        }
    }
}

/// A worker of libucp.
struct Engine {
    handle: Handle,
    event: c_int,
    address: Vec<u8>,
    /// On the heap, where callbacks find it.
    notes: Box<Mutex<Notes>>,
}

// SAFETY: libucp was asked for calls of any thread, one at a time, and whoever owns this makes them.
unsafe impl Send for Engine {}

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// The bytes of a read of ours come.
    Read { number: u64 },
    /// The bytes of a write of ours leave.
    Write { number: u64 },
    /// The bytes of a peer's read leave.
    Serve,
    /// The bytes of a peer's write come.
    Land { number: u64 },
}

/// Why a message did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    Canceled,
    Other(String),
}

/// A message under way.
struct Request {
    job: Job,
    /// Of the whole message.
    bytes: u64,
    /// What libucp may touch.
    spans: Vec<Span>,
    /// The list of the parts, which libucp reads until the end.
    _parts: Box<[Part]>,
}

/// What a callback notes: the request, its status, and the bytes that came.
struct Ended {
    request: usize,
    status: Status,
    received: Option<u64>,
}

/// What callbacks write to.
#[derive(Default)]
struct Notes {
    ended: Vec<Ended>,
    /// Of an endpoint.
    fault: Option<(usize, Status)>,
}

/// See the module's head.
pub struct Worker {
    /// `None` once it was destroyed, or left alone.
    engine: Option<Engine>,
    endpoint: Handle,
    requests: HashMap<usize, Request>,
    done: Vec<(Job, Result<(), Failure>)>,
    context: Arc<Context>,
}

// SAFETY: handles of requests and of the endpoint belong to the worker in `engine`.
unsafe impl Send for Worker {}

impl Engine {
    fn new(context: &Context) -> Result<Engine> {
        let library = &context.library;
        let failed = |status: Status| {
            let error =
                Error::new(ErrorKind::Io, "cannot make a worker of UCX").with("reason", library::meaning(status));
            error.hint("are descriptors left (`ulimit -n`)? is `UCX_TLS` or `UCX_NET_DEVICES` too narrow?")
        };
        let params = WorkerParams {
            mask: library::WORKER_THREAD_MODE | library::WORKER_FLAGS,
            thread_mode: library::THREAD_SERIALIZED,
            processors: [0; 16],
            events: 0,
            user_data: null_mut(),
            event_file: -1,
            flags: library::WORKER_IGNORE_REQUESTS,
        };
        let mut handle = null_mut();
        // SAFETY: the mask names fields that are there; the function writes one handle.
        let status = unsafe { (library.worker_create)(context.handle, &params, &mut handle) };
        if status != library::OK {
            return Err(failed(status));
        }
        let (mut event, mut address, mut bytes) = (-1, null_mut(), 0);
        // SAFETY: the worker is alive; the function writes one number.
        let status = unsafe { (library.worker_get_efd)(handle, &mut event) };
        if status != library::OK {
            return Err(failed(status));
        }
        // SAFETY: the worker is alive; the function writes an address of memory and its length.
        let status = unsafe { (library.worker_get_address)(handle, &mut address, &mut bytes) };
        if status != library::OK {
            return Err(failed(status));
        }
        // SAFETY: libucp gave these bytes, which stay until they are released below.
        let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
        // SAFETY: as above, and nothing borrows them any more.
        unsafe { (library.worker_release_address)(handle, address) };
        Ok(Engine { handle, event, address: copy, notes: Box::default() })
    }
}

impl Worker {
    /// Makes a worker, which takes some ms, some descriptors, and a listening socket of UCX for each network device.
    pub fn new(context: &Arc<Context>) -> Result<Worker> {
        Ok(Worker {
            engine: Some(Engine::new(context)?),
            endpoint: null_mut(),
            requests: HashMap::new(),
            done: Vec::new(),
            context: context.clone(),
        })
    }

    fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("taken only when it is dropped")
    }

    fn handle(&self) -> Handle {
        self.engine().handle
    }

    /// What the peer needs to send to this worker.
    pub fn address(&self) -> &[u8] {
        &self.engine().address
    }

    /// Readable when the worker has something to do, after `arm`.
    pub fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: libucp keeps the descriptor open until the worker is destroyed, when this is dropped.
        unsafe { BorrowedFd::borrow_raw(self.engine().event) }
    }

    pub fn is_connected(&self) -> bool {
        !self.endpoint.is_null()
    }

    /// Makes the way to the peer whose worker has this address. libucp trusts these bytes: a peer that makes them up
    /// can crash this process.
    pub fn connect(&mut self, address: &[u8]) -> Result<()> {
        let mask = library::ENDPOINT_ADDRESS | library::ENDPOINT_ERROR_MODE | library::ENDPOINT_ERROR_HANDLER;
        let params = EndpointParams {
            mask,
            address: address.as_ptr().cast(),
            error_mode: library::ERROR_MODE_PEER,
            error_handler: endpoint_failed,
            error_argument: self.notes_address(),
        };
        // SAFETY: the worker is alive, the mask names the fields that are there, and libucp copies the address. What
        // the handler gets lives as long as the worker.
        let status = unsafe { (self.context.library.ep_create)(self.handle(), &params, &mut self.endpoint) };
        if status == library::OK {
            return Ok(());
        }
        self.endpoint = null_mut();
        let error = Error::new(ErrorKind::Unavailable, "UCX finds no way to the peer");
        let error = error.with("reason", library::meaning(status));
        Err(error.hint("both sides need a common transport that notices a peer's end: `tcp` in `UCX_TLS`, or RDMA"))
    }

    /// Posts a landing place for the one message with this tag.
    pub fn receive(&mut self, job: Job, spans: Vec<Span>, tag: u64) -> Result<()> {
        let (parts, bytes) = parts_of(&spans);
        let (base, count, datatype) = shape(&parts);
        let mut info = ReceiveInfo::default();
        let callback: library::ReceiveCallback = received;
        let mut params = self.params(datatype, callback as *const c_void);
        params.mask |= library::REQUEST_RECEIVE_INFO;
        params.receive_info = &mut info;
        // SAFETY: each part is a checked range of memory that may be written; memory and list are kept until the
        // request has ended. The callback is that of receiving.
        let request =
            unsafe { (self.context.library.tag_recv_nbx)(self.handle(), base, count, tag, WHOLE_TAG, &params) };
        self.began(request, Request { job, bytes, spans, _parts: parts }, Some(info.bytes as u64))
    }

    /// Sends one message with this tag, for which the peer has a landing place.
    pub fn send(&mut self, job: Job, spans: Vec<Span>, tag: u64) -> Result<()> {
        let (parts, bytes) = parts_of(&spans);
        let (base, count, datatype) = shape(&parts);
        let callback: library::SendCallback = sent;
        let params = self.params(datatype, callback as *const c_void);
        // SAFETY: the caller has connected. Each part is a checked range of memory; memory and list are kept until the
        // request has ended. The callback is that of sending.
        let request = unsafe { (self.context.library.tag_send_nbx)(self.endpoint, base, count, tag, &params) };
        self.began(request, Request { job, bytes, spans, _parts: parts }, None)
    }

    /// A request that libucp has taken, refused, or ended at once.
    fn began(&mut self, request: Handle, entry: Request, received: Option<u64>) -> Result<()> {
        if request.is_null() {
            self.ended(entry, library::OK, received);
        } else if (request as usize) < library::FIRST_ERROR {
            self.requests.insert(request as usize, entry);
        } else {
            return Err(lost(request as isize as Status));
        }
        Ok(())
    }

    fn ended(&mut self, entry: Request, status: Status, received: Option<u64>) {
        let result = match status {
            library::OK if received.is_none_or(|received| received == entry.bytes) => Ok(()),
            library::OK => Err(Failure::Other("a message has another length".into())),
            library::CANCELED => Err(Failure::Canceled),
            status => Err(Failure::Other(library::meaning(status))),
        };
        self.done.push((entry.job, result));
    }

    /// Goes on for a while. True if there may be more to do at once.
    pub fn progress(&mut self) -> bool {
        for _ in 0..STEPS {
            // SAFETY: the worker is alive.
            let did = unsafe { (self.context.library.worker_progress)(self.handle()) };
            self.collect();
            self.discard();
            if did == 0 {
                return false;
            }
        }
        true
    }

    /// From now on the descriptor becomes readable when there is something to do. False if there is already.
    pub fn arm(&mut self) -> bool {
        // SAFETY: the worker is alive.
        unsafe { (self.context.library.worker_arm)(self.handle()) != library::BUSY }
    }

    /// What has ended, each once.
    pub fn take_done(&mut self) -> Vec<(Job, Result<(), Failure>)> {
        std::mem::take(&mut self.done)
    }

    /// Why the endpoint no longer works, if UCX has said so.
    pub fn fault(&self) -> Option<Error> {
        let (endpoint, status) = self.notes().fault?;
        (endpoint == self.endpoint as usize).then(|| lost(status))
    }

    /// Whether libucp may touch memory of this region.
    pub fn touches(&self, region: RegionId) -> bool {
        self.requests.values().any(|request| request.spans.iter().any(|span| span.region == region))
    }

    /// Whether libucp has no request of ours.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes a landing place back, if its message has not begun to come.
    pub fn cancel(&mut self, job: Job) {
        let found = self.requests.iter().find(|(_, request)| request.job == job).map(|(request, _)| *request);
        if let Some(request) = found {
            // SAFETY: the request has not been freed: it is in the list.
            unsafe { (self.context.library.request_cancel)(self.handle(), request as Handle) };
            self.collect();
        }
    }

    /// Takes what callbacks have noted.
    fn collect(&mut self) {
        let ended = std::mem::take(&mut self.notes().ended);
        for ended in ended {
            let Some(entry) = self.requests.remove(&ended.request) else { continue };
            // SAFETY: it has ended, and was in the list, so nobody has freed it.
            unsafe { (self.context.library.request_free)(ended.request as Handle) };
            self.ended(entry, ended.status, ended.received);
        }
    }

    /// Drops messages without a landing place: of operations that have ended, and of strangers.
    fn discard(&mut self) {
        let mut info = ReceiveInfo::default();
        loop {
            // SAFETY: the worker is alive; a mask of zero fits every tag, and the message is ours from now on.
            let message = unsafe { (self.context.library.tag_probe_nb)(self.handle(), 0, 0, 1, &mut info) };
            if message.is_null() {
                return;
            }
            let mut params = self.params(0, null());
            params.mask = library::REQUEST_MEMORY_TYPE;
            // SAFETY: no byte of it is asked for, so nothing is written.
            let request =
                unsafe { (self.context.library.tag_msg_recv_nbx)(self.handle(), null_mut(), 0, message, &params) };
            if !request.is_null() && (request as usize) < library::FIRST_ERROR {
                // SAFETY: libucp ends it alone, and nobody asks for it any more.
                unsafe { (self.context.library.request_free)(request) };
            }
        }
    }

    fn params(&self, datatype: u64, callback: *const c_void) -> RequestParams {
        let mut mask = library::REQUEST_CALLBACK | library::REQUEST_USER_DATA | library::REQUEST_MEMORY_TYPE;
        mask |= library::REQUEST_DATATYPE;
        RequestParams {
            mask,
            flags: 0,
            request: null_mut(),
            callback,
            datatype,
            user_data: self.notes_address(),
            reply_buffer: null_mut(),
            memory_type: library::MEMORY_HOST,
            receive_info: null_mut(),
            memory: null_mut(),
        }
    }

    fn notes_address(&self) -> Handle {
        std::ptr::from_ref::<Mutex<Notes>>(&self.engine().notes).cast_mut().cast()
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.engine().notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Worker {
    /// From here on nothing touches memory of the session, whether or not its requests had ended: a worker that is
    /// destroyed has neither sockets nor queues. Nothing is closed or canceled before: in libucp 1.23, a worker that
    /// went on after its endpoint was closed by force has jumped to freed memory.
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        match self.context.process == std::process::id() {
            // SAFETY: nothing uses the worker after this. What callbacks write to, and the memory of requests, is
            // dropped after it.
            true => unsafe { (self.context.library.worker_destroy)(engine.handle) },
            false => std::mem::forget((engine, std::mem::take(&mut self.requests))),
        }
    }
}

/// The list of the spans for libucp, and their bytes together.
fn parts_of(spans: &[Span]) -> (Box<[Part]>, u64) {
    let part = |span: &Span| Part { base: span.memory.at(span.offset, span.bytes).cast(), bytes: span.bytes as usize };
    (spans.iter().map(part).collect(), spans.iter().map(|span| span.bytes).sum())
}

/// Where a message is: an address, a count, and what is counted.
fn shape(parts: &[Part]) -> (Handle, usize, u64) {
    match parts {
        [] => (null_mut(), 0, BYTES),
        [part] => (part.base, part.bytes, BYTES),
        parts => (parts.as_ptr().cast_mut().cast(), parts.len(), library::DATATYPE_LIST),
    }
}

fn lost(status: Status) -> Error {
    let error = Error::new(ErrorKind::Unavailable, "the way to the peer through UCX broke");
    let error = error.with("reason", library::meaning(status));
    error.hint("is the peer's process still there, and can UCX reach it? see `UCX_NET_DEVICES` and `UCX_TLS`")
}

/// # Safety
///
/// `notes` is that of a living worker.
unsafe fn note(notes: Handle, write: impl FnOnce(&mut Notes)) {
    // SAFETY: the caller's promise; others have only shared references to it.
    let notes = unsafe { &*notes.cast::<Mutex<Notes>>() };
    write(&mut notes.lock().unwrap_or_else(PoisonError::into_inner));
}

unsafe extern "C" fn sent(request: Handle, status: Status, notes: Handle) {
    let ended = Ended { request: request as usize, status, received: None };
    // SAFETY: given to libucp with the request, by a worker that has them as long as it lives.
    unsafe { note(notes, |notes| notes.ended.push(ended)) }
}

unsafe extern "C" fn received(request: Handle, status: Status, info: *const ReceiveInfo, notes: Handle) {
    // SAFETY: libucp gives a pointer to what it has received, or null.
    let received = unsafe { info.as_ref() }.map_or(0, |info| info.bytes as u64);
    let ended = Ended { request: request as usize, status, received: Some(received) };
    // SAFETY: as in `sent`.
    unsafe { note(notes, |notes| notes.ended.push(ended)) }
}

unsafe extern "C" fn endpoint_failed(notes: Handle, endpoint: Handle, status: Status) {
    // SAFETY: given to libucp with the endpoint, by a worker that has them as long as it lives.
    unsafe { note(notes, |notes| notes.fault = Some((endpoint as usize, status))) }
}
