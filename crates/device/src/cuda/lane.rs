//! One direction of a device: its stream, its events, two staging buffers of pinned memory, and for loads the kernel.
//!
//! Invariants: everything of a direction is queued on one stream, so its copies begin in the order of submission and,
//! by an event, after the work that they must follow. Whoever waits sleeps in the driver. After an error whose extent
//! is unknown, the stream is watched until it is empty: nothing is told to have ended while a copy could still be made.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::driver::{Attribute, EventHandle, Status, StreamHandle};
use super::kernel::Kernel;
use super::methods::{Method, batches, rows, singles};
use super::ops::{Op, Piece};
use crate::copy::Memory;
use crate::job::{After, Direction};

/// See the module documentation. Made and dropped in the context.
pub struct Lane {
    context: Arc<Context>,
    direction: Direction,
    stream: StreamHandle,
    /// Recorded on the stream of whoever comes first; a wait takes what is recorded when it is queued.
    after: EventHandle,
    buffers: Vec<Buffer>,
    /// Events that nobody waits for.
    spare: Mutex<Vec<EventHandle>>,
    kernel: Option<Kernel>,
    /// The furthest that rows of one copy may be apart; 0 if the driver does not tell.
    max_pitch: u64,
}

/// A method that could not queue copies, and why.
pub struct Failed {
    pub method: Method,
    pub error: Error,
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

struct Buffer {
    memory: Memory,
    done: EventHandle,
}

impl Lane {
    pub fn new(context: Arc<Context>, direction: Direction, staging_bytes: u64) -> Result<Lane> {
        let driver = context.driver();
        let cannot = |status| context.error("cannot make a stream with its events", status);
        let stream = driver.least_priority().and_then(|priority| driver.create_stream(priority)).map_err(cannot)?;
        let after = match driver.create_event() {
            Ok(after) => after,
            Err(status) => {
                let _ = driver.destroy_stream(stream);
                return Err(cannot(status));
            }
        };
        let (buffers, spare) = (Vec::new(), Mutex::default());
        let max_pitch = context.attribute(Attribute::MaxPitch).map_or(0, |pitch| u64::try_from(pitch).unwrap_or(0));
        let mut lane =
            Lane { context: context.clone(), direction, stream, after, buffers, spare, kernel: None, max_pitch };
        for _ in 0..2 {
            let done = driver.create_event().map_err(cannot)?;
            match driver.alloc_host(staging_bytes) {
                Ok(memory) => lane.buffers.push(Buffer { memory, done }),
                Err(status) => {
                    lane.spare().push(done);
                    let error = context.error("cannot allocate pinned staging memory", status);
                    return Err(error.with("bytes", staging_bytes));
                }
            }
        }
        Ok(lane)
    }

    /// Makes the kernel one of the methods. Errors, with a hint, if it cannot be.
    pub fn load_kernel(&mut self, multiprocessors: u32) -> Result<()> {
        self.kernel = Some(Kernel::load(self.context.clone(), multiprocessors)?);
        Ok(())
    }

    /// Whether copies can be queued by it.
    pub fn has(&self, method: Method) -> bool {
        match method {
            Method::Kernel => self.kernel.is_some(),
            Method::Batch => self.context.driver().has_batch(),
            Method::Pitched => self.max_pitch > 0,
            Method::Loop => true,
        }
    }

    /// The most multiprocessors that the kernel takes; 0 without it.
    pub fn multiprocessors(&self) -> u32 {
        self.kernel.as_ref().map_or(0, Kernel::blocks)
    }

    /// The furthest that rows of one copy may be apart.
    pub fn max_pitch(&self) -> u64 {
        self.max_pitch
    }

    pub fn staging(&self) -> &Memory {
        &self.buffers[0].memory
    }

    /// Lets what is queued from now on wait for `after`. Errors, with nothing queued, also while the stream of `after`
    /// is being captured: the event would become part of somebody's graph.
    pub fn follow(&self, after: After) -> Result<()> {
        let After::Stream(stream) = after else { return Ok(()) };
        let (driver, stream) = (self.context.driver(), StreamHandle(stream));
        let cannot = |status| self.context.error("cannot follow the engine's stream", status);
        if driver.is_capturing(stream).map_err(cannot)? {
            return Err(self.context.error("the engine's stream is being captured", Status::CAPTURE_UNSUPPORTED));
        }
        driver.record(self.after, stream).and_then(|()| driver.stream_wait(self.stream, self.after)).map_err(cannot)
    }

    /// Queues copies by the first of the methods, and by each next one what is left. After an error some may be queued.
    pub fn queue(&self, methods: &[Method], ops: &[Op]) -> Result<(), Failed> {
        let (driver, direction, stream) = (self.context.driver(), self.direction, self.stream);
        let mut left = Cow::Borrowed(ops);
        for &method in methods {
            if left.is_empty() {
                return Ok(());
            }
            let rest = match (method, &self.kernel) {
                (Method::Kernel, Some(kernel)) => kernel.queue(direction, &left, stream),
                (Method::Kernel, None) => Ok(left.into_owned()),
                (Method::Batch, _) => batches(driver, direction, &left, stream).map(|()| Vec::new()),
                (Method::Pitched, _) => rows(driver, direction, &left, self.max_pitch, stream),
                (Method::Loop, _) => singles(driver, direction, &left, stream).map(|()| Vec::new()),
            };
            left = Cow::Owned(rest.map_err(|status| {
                let error = self.context.error("cannot queue copies", status).with("method", method.name());
                Failed { method, error }
            })?);
        }
        match methods.last() {
            Some(&method) if !left.is_empty() => {
                let error = Error::new(ErrorKind::Unsupported, "copies are left that no method takes");
                Err(Failed { method, error: error.with("copies", left.len()) })
            }
            _ => Ok(()),
        }
    }

    /// An event behind all that is queued by now, for `finish`. `None` if that cannot be had.
    pub fn mark(&self) -> Option<EventHandle> {
        let spare = self.spare().pop();
        let event = spare.map_or_else(|| self.context.driver().create_event(), Ok);
        let event = event.inspect_err(|status| self.context.note(*status)).ok()?;
        match self.context.driver().record(event, self.stream) {
            Ok(()) => Some(event),
            Err(status) => {
                self.context.note(status);
                self.spare().push(event);
                None
            }
        }
    }

    /// Returns when everything before the mark has ended. Errors if that was not all well.
    pub fn finish(&self, mark: Option<EventHandle>) -> Result<()> {
        let Some(event) = mark else {
            self.drain();
            return Err(Error::new(ErrorKind::Unavailable, "the end of copies could not be marked"));
        };
        let ended = self.sleep(event);
        self.spare().push(event);
        ended
    }

    /// Copies pieces of a pool through the staging buffers: while one is with the device, the other is with the host.
    /// Asks `allows` for the item of a piece before the host copies it. Nothing is on the way when it returns.
    pub fn stage(
        &self,
        methods: &[Method],
        pool: &Memory,
        pieces: &[Piece],
        allows: &dyn Fn(usize) -> bool,
    ) -> Result<()> {
        let staged = self.stage_windows(methods, pool, pieces, allows);
        if staged.is_err() {
            self.drain();
        }
        staged
    }

    fn stage_windows(
        &self,
        methods: &[Method],
        pool: &Memory,
        pieces: &[Piece],
        allows: &dyn Fn(usize) -> bool,
    ) -> Result<()> {
        let mut in_flight: [Option<&[Piece]>; 2] = [None, None];
        let finish = |buffer: &Buffer, window: Option<&[Piece]>| -> Result<()> {
            let Some(window) = window else { return Ok(()) };
            self.sleep(buffer.done)?;
            if self.direction == Direction::Store {
                for (piece, at) in placed(window).filter(|(piece, _)| allows(piece.item)) {
                    pool.span(piece.offset, piece.bytes).copy_from(buffer.memory.span(at, piece.bytes));
                }
            }
            Ok(())
        };
        for (at, window) in windows(pieces, self.staging().len() as u64).enumerate() {
            let buffer = &self.buffers[at % 2];
            finish(buffer, in_flight[at % 2].take())?;
            if self.direction == Direction::Load {
                for (piece, at) in placed(window).filter(|(piece, _)| allows(piece.item)) {
                    buffer.memory.span(at, piece.bytes).copy_from(pool.span(piece.offset, piece.bytes));
                }
            }
            let base = buffer.memory.address();
            let op = |(piece, at): (&Piece, u64)| Op::new(piece.device, base + at, piece.bytes);
            self.queue(methods, &placed(window).map(op).collect::<Vec<_>>())?;
            let recorded = self.context.driver().record(buffer.done, self.stream);
            recorded.map_err(|status| self.context.error("cannot mark the end of copies", status))?;
            in_flight[at % 2] = Some(window);
            // The older of the two first, whose buffer comes next.
            finish(&self.buffers[(at + 1) % 2], in_flight[(at + 1) % 2].take())?;
        }
        (0..2).try_for_each(|at| finish(&self.buffers[at], in_flight[at].take()))
    }

    fn sleep(&self, event: EventHandle) -> Result<()> {
        self.context.driver().synchronize(event).map_err(|status| {
            let error = self.context.error("copies have failed", status);
            self.drain();
            error
        })
    }

    /// Watches the stream until it is empty or its context has ended. Only for what should not happen: it looks every
    /// millisecond.
    fn drain(&self) {
        while self.context.check().is_ok() {
            match self.context.driver().query_stream(self.stream) {
                Err(Status::NOT_READY) => thread::sleep(Duration::from_millis(1)),
                Ok(()) => return,
                // The stream itself is beyond reach: whatever the reason, this context is not used again.
                Err(status) => return self.context.end(status),
            }
        }
    }

    fn spare(&self) -> MutexGuard<'_, Vec<EventHandle>> {
        self.spare.lock().expect("nothing under this lock panics")
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A context that has ended has taken all of this with it.
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        let spare = std::mem::take(&mut *self.spare());
        let events = spare.into_iter().chain([self.after]).chain(self.buffers.iter().map(|buffer| buffer.done));
        for event in events {
            let _ = driver.destroy_event(event);
        }
        for buffer in &self.buffers {
            let _ = driver.free_host(&buffer.memory);
        }
        let _ = driver.destroy_stream(self.stream);
    }
}

/// Consecutive pieces that fit a buffer together.
fn windows(mut pieces: &[Piece], buffer_bytes: u64) -> impl Iterator<Item = &[Piece]> {
    std::iter::from_fn(move || {
        let mut filled = 0;
        let fits = |piece: &&Piece| {
            filled += piece.bytes;
            filled <= buffer_bytes
        };
        let count = pieces.iter().take_while(fits).count();
        let (window, rest) = pieces.split_at(count);
        pieces = rest;
        (!window.is_empty()).then_some(window)
    })
}

/// Each piece with its place in the buffer.
fn placed(window: &[Piece]) -> impl Iterator<Item = (&Piece, u64)> {
    let mut at = 0;
    window.iter().map(move |piece| {
        let start = at;
        at += piece.bytes;
        (piece, start)
    })
}
