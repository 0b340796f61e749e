//! The engine on io_uring: one ring and one thread per disk.
//!
//! Requests reach the thread through a queue and an eventfd that the ring watches. The thread sleeps in the kernel
//! until a request is done or submitted, so nothing polls. It is woken only while it sleeps. Parts of the pool that are
//! populated are pinned as registered buffers, if the machine allows it; spans outside of them are used unregistered.
//!
//! Invariant: the thread, which owns file and memory, ends only when nothing is in flight.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use rustix::io::Errno;

use super::engine::{Done, Engine, Request, TRIM, Work};
use super::memory::{Memory, Place, Span};
use super::registration::Registration;
use super::shared::{Shared, Waker};
use crate::{descriptors, thread_time};

/// Bytes summed up before the ring is checked again: about 50 µs.
const SUMMED_BYTES: u64 = 1 << 20;
/// Entries for flushes and a tier's own pages, beyond the requested depth.
const EXTRA_ENTRIES: u32 = 64;
/// The tag of the eventfd's own entry.
const WAKE: u64 = u64::MAX;

type Ring = IoUring<squeue::Entry, cqueue::Entry>;

/// See the module documentation.
pub struct Uring {
    shared: Arc<Shared>,
    submitted: Arc<Waker>,
    memory: Arc<Memory>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Uring {
    /// Errors if the kernel, its settings or a container forbid rings.
    pub fn start(file: Arc<File>, memory: Arc<Memory>, waker: Arc<Waker>, depth: u32) -> io::Result<Uring> {
        let (shared, submitted) = (Arc::<Shared>::default(), Arc::new(Waker::new()?));
        let (started, start) = mpsc::channel();
        let (theirs, given, mapped) = (shared.clone(), (file, submitted.clone(), waker), memory.clone());
        let work = move || {
            let own = descriptors::own(&given.0, [&given.1, &given.2]);
            match own.and_then(|(file, wakers)| Loop::new(file, mapped, theirs.clone(), wakers, depth)) {
                Ok(mut looping) => {
                    let _ = started.send(Ok(given));
                    looping.run();
                }
                Err(error) => drop(started.send(Err(error))),
            }
            theirs.thread_ended();
        };
        let thread = thread::Builder::new().name("forebay-ring".to_owned()).spawn(work)?;
        start.recv().map_err(io::Error::other)??;
        Ok(Uring { shared, submitted, memory, thread: Some(thread) })
    }
}

impl Engine for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        if self.shared.submit(requests) {
            self.submitted.wake();
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        self.shared.poll(done);
    }

    fn wait(&mut self, timeout: Duration) {
        self.shared.wait(timeout);
    }

    fn register(&mut self, populated_bytes: u64) {
        self.shared.requests().populated_bytes = populated_bytes;
        self.submitted.wake();
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.requests().is_closed = true;
        self.submitted.wake();
        if self.shared.close(1) {
            let _ = self.thread.take().map(thread::JoinHandle::join);
        } else {
            // The last to drop the memory closes descriptors of the process, which the ring's thread cannot.
            mem::forget(self.memory.clone());
        }
    }
}

/// A request in the kernel.
struct InFlight {
    request: Request,
    /// The target of its entry's pointer.
    _vectors: Box<[libc::iovec]>,
}

/// The thread's own state.
struct Loop {
    ring: Ring,
    memory: Arc<Memory>,
    shared: Arc<Shared>,
    submitted: Waker,
    waker: Waker,
    waiting: VecDeque<Request>,
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
    registration: Registration,
    /// Whether the kernel can write several spans of one registered piece at once (6.15).
    has_fixed_vectors: bool,
    is_wake_armed: bool,
    is_closed: bool,
    /// With its locks. The ring does not register it. A mapped ring keeps what it has registered, and the thread of
    /// another disk that hangs keeps all mappings of a process that has ended. Transfers under way keep the file open.
    file: File,
}

impl Loop {
    fn new(
        file: File,
        memory: Arc<Memory>,
        shared: Arc<Shared>,
        [submitted, waker]: [Waker; 2],
        depth: u32,
    ) -> io::Result<Loop> {
        let entries = (depth + EXTRA_ENTRIES).next_power_of_two();
        let ring = build(entries)?;
        let pool_bytes = memory.pool.len() as u64;
        let is_refused = ring.submitter().register_buffers_sparse(Registration::pieces_of(pool_bytes)).is_err();
        let mut probe = Probe::new();
        let is_probed = ring.submitter().register_probe(&mut probe).is_ok();
        // One entry belongs to the eventfd.
        let room = entries as usize - 1;
        Ok(Loop {
            ring,
            memory,
            shared,
            submitted,
            waker,
            waiting: VecDeque::new(),
            in_flight: (0..room).map(|_| None).collect(),
            free: (0..room).rev().collect(),
            registration: Registration::new(pool_bytes, is_refused, Instant::now()),
            has_fixed_vectors: is_probed && probe.is_supported(opcode::WritevFixed::CODE),
            is_wake_armed: false,
            is_closed: false,
            file,
        })
    }

    fn run(&mut self) {
        let (mut ended, mut done) = (VecDeque::new(), Vec::new());
        loop {
            self.take_requests();
            let is_idle = self.waiting.is_empty() && ended.is_empty() && self.free.len() == self.in_flight.len();
            if self.is_closed && is_idle {
                return;
            }
            self.fill_ring();
            self.enter(ended.is_empty());
            self.reap(&mut ended);
            self.finish(&mut ended, &mut done);
            if !done.is_empty() {
                self.shared.publish(&mut done, &self.waker);
            }
        }
    }

    fn take_requests(&mut self) {
        let mut requests = self.shared.requests();
        self.waiting.append(&mut requests.queue);
        self.is_closed = requests.is_closed;
        let populated_bytes = requests.populated_bytes;
        drop(requests);
        self.register(populated_bytes);
    }

    /// Pins one piece of what is populated, if it is due. A refusal (`RLIMIT_MEMLOCK`) costs CPU time per transfer,
    /// nothing else.
    fn register(&mut self, populated_bytes: u64) {
        let begun = Instant::now();
        let Some((number, from, len)) = self.registration.due(populated_bytes, begun) else { return };
        let before = thread_time();
        let base = self.memory.pointer(Span::pool(from, len as u32));
        let piece = [libc::iovec { iov_base: base.cast(), iov_len: len as usize }];
        // SAFETY: the piece lies in the pool, which `self.memory` keeps mapped longer than the ring lives: fields are
        // dropped in order, and the ring is the first.
        match unsafe { self.ring.submitter().register_buffers_update(u32::from(number), &piece, None) } {
            Ok(_) => {
                let now = Instant::now();
                self.registration.registered(now - begun, thread_time().saturating_sub(before), now);
            }
            Err(error) => {
                tracing::warn!(%error, from, "cannot pin the pool for disk i/o");
                self.registration.refused();
            }
        }
    }

    fn fill_ring(&mut self) {
        if !self.is_wake_armed {
            let descriptor = Fd(self.submitted.as_fd().as_raw_fd());
            // One entry for all wake-ups: each write completes it once more, and nobody reads the eventfd.
            let watch = opcode::PollAdd::new(descriptor, libc::POLLIN as u32).multi(true);
            let entry = watch.build().user_data(WAKE);
            self.is_wake_armed = self.push(&entry);
        }
        while let Some(&slot) = self.free.last()
            && let Some(request) = self.waiting.pop_front()
        {
            let (entry, vectors) = self.entry(&request.work);
            if !self.push(&entry.user_data(slot as u64)) {
                self.waiting.push_front(request);
                return;
            }
            self.free.pop();
            self.in_flight[slot] = Some(InFlight { request, _vectors: vectors });
        }
    }

    fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the memory of the entry stays mapped until its completion arrives: `self.memory` lives as long as
        // the thread, and the thread ends only when nothing is in flight. Its vectors are kept as long.
        unsafe { self.ring.submission().push(entry).is_ok() }
    }

    fn entry(&self, work: &Work) -> (squeue::Entry, Box<[libc::iovec]>) {
        let file = self.descriptor();
        let entry = match work {
            Work::Read { at, span, .. } => {
                let to = self.memory.pointer(*span);
                match self.piece(*span) {
                    Some(piece) => opcode::ReadFixed::new(file, to, span.len, piece).offset(*at).build(),
                    None => opcode::Read::new(file, to, span.len).offset(*at).build(),
                }
            }
            Work::Write { at, spans } => match **spans {
                [span] => {
                    let from = self.memory.pointer(span).cast_const();
                    match self.piece(span) {
                        Some(piece) => opcode::WriteFixed::new(file, from, span.len, piece).offset(*at).build(),
                        None => opcode::Write::new(file, from, span.len).offset(*at).build(),
                    }
                }
                _ => return self.gather(*at, spans),
            },
            Work::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
            Work::Trim { at, bytes } => {
                opcode::Fallocate::new(file, *bytes).offset(*at).mode(TRIM.bits() as i32).build()
            }
        };
        (entry, Box::default())
    }

    fn descriptor(&self) -> Fd {
        Fd(self.file.as_raw_fd())
    }

    /// One write of several spans, and the vectors to which its entry points.
    fn gather(&self, at: u64, spans: &[Span]) -> (squeue::Entry, Box<[libc::iovec]>) {
        let (vectors, file) = (self.memory.vectors(spans), self.descriptor());
        let (first, count) = (vectors.as_ptr(), vectors.len() as u32);
        let piece = self.piece(spans[0]).filter(|piece| spans.iter().all(|span| self.piece(*span) == Some(*piece)));
        let entry = match piece.filter(|_| self.has_fixed_vectors) {
            Some(piece) => opcode::WritevFixed::new(file, first, count, piece).offset(at).build(),
            None => opcode::Writev::new(file, first, count).offset(at).build(),
        };
        (entry, vectors)
    }

    /// The registered buffer that holds all of `span`.
    fn piece(&self, span: Span) -> Option<u16> {
        self.registration.piece(span.offset, span.len).filter(|_| span.place == Place::Pool)
    }

    /// Submits. If `may_sleep`, sleeps until something completes or is submitted.
    fn enter(&mut self, may_sleep: bool) {
        let may_sleep = may_sleep && self.shared.begin_sleep();
        let entered = self.ring.submit_and_wait(usize::from(may_sleep));
        self.shared.end_sleep();
        match entered {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => {}
            Err(error) => {
                // The kernel has no memory for requests: those in flight still complete, the rest is tried again.
                tracing::warn!(%error, "cannot submit disk i/o");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn reap(&mut self, ended: &mut VecDeque<(Request, i32)>) {
        for entry in self.ring.completion() {
            let (slot, result) = (entry.user_data(), entry.result());
            if slot == WAKE {
                self.is_wake_armed = cqueue::more(entry.flags());
                continue;
            }
            let in_flight = self.in_flight[slot as usize].take().expect("the kernel completes what it was given");
            self.free.push(slot as usize);
            ended.push_back((in_flight.request, result));
        }
    }

    /// Sums up arrived bytes, a few long transfers at a time: the disk gets its next requests before the others are
    /// summed up.
    fn finish(&self, ended: &mut VecDeque<(Request, i32)>, done: &mut Vec<Done>) {
        let mut summed_bytes = 0;
        while summed_bytes < SUMMED_BYTES
            && let Some((request, result)) = ended.pop_front()
        {
            if let Work::Read { span, .. } = &request.work {
                summed_bytes += u64::from(span.len);
            }
            done.push(self.ended(request, result));
        }
    }

    fn ended(&self, Request { tag, work }: Request, result: i32) -> Done {
        let result = u32::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
        let checksum = match work {
            Work::Read { span, checksum: Some(sum), .. } if result == Ok(span.len) => self.memory.checksum(sum),
            _ => 0,
        };
        Done { tag, result, checksum }
    }
}

/// A ring that works when its thread asks it to, if the kernel supports that (6.1). An error before 5.13: a watch ends
/// with its first wake-up there.
fn build(entries: u32) -> io::Result<Ring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_defer_taskrun();
    let ring = match builder.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().build(entries)?,
        built => built?,
    };
    // The kernel does not say it of watches. It has said this since the same release.
    match ring.params().is_feature_resource_tagging() {
        true => Ok(ring),
        false => Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring of this kernel is older than Linux 5.13")),
    }
}
