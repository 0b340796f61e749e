//! The engine of plain system calls, for kernels and containers without io_uring.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{io, mem, thread};

use rustix::io::Errno;

use super::engine::{Done, Engine, Request, TRIM, Work};
use super::memory::Memory;
use super::shared::{Shared, Waker, is_change};
use crate::descriptors;

/// A thread per transfer in flight, up to this many: enough to fill the queue of one disk.
const MAX_THREADS: u32 = 16;
/// One in so many threads takes nothing but reads: a disk whose writes hang still gives what it has.
const FOR_READS: usize = 4;

/// See the module documentation.
pub struct Threads {
    shared: Arc<Shared>,
    memory: Arc<Memory>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Threads {
    /// Starts `depth` threads, at least one and at most 16. Errors when the machine gives none.
    pub fn start(file: Arc<File>, memory: Arc<Memory>, waker: Arc<Waker>, depth: u32) -> io::Result<Threads> {
        let mut engine = Threads { shared: Arc::default(), memory, threads: Vec::new() };
        let threads = depth.clamp(1, MAX_THREADS);
        let most_changing = most_changing(threads as usize);
        for _ in 0..threads {
            let (shared, memory) = (engine.shared.clone(), engine.memory.clone());
            let (theirs, (started, start)) = ((file.clone(), waker.clone()), mpsc::channel());
            let work = move || {
                match descriptors::own(&theirs.0, [&theirs.1]) {
                    Ok((file, [waker])) => {
                        // What is closed in this thread closes nothing of the process, so the process drops its own.
                        let _ = started.send(Ok(theirs));
                        serve(&shared, file, memory, &waker, most_changing);
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
                shared.thread_ended();
            };
            engine.threads.push(thread::Builder::new().name("forebay-disk".to_owned()).spawn(work)?);
            start.recv().map_err(io::Error::other)??;
        }
        Ok(engine)
    }
}

impl Engine for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn submit(&mut self, requests: &mut VecDeque<Request>) {
        self.shared.submit(requests);
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        self.shared.poll(done);
    }

    fn wait(&mut self, timeout: Duration) {
        self.shared.wait(timeout);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.shared.close(self.threads.len()) {
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        } else {
            // The last to drop the memory closes descriptors of the process, which a disk's thread cannot.
            mem::forget(self.memory.clone());
        }
    }
}

/// How many of so many threads may change the disk at once; a single one may.
fn most_changing(threads: usize) -> usize {
    (threads - threads.div_ceil(FOR_READS)).max(1)
}

fn serve(shared: &Shared, file: File, memory: Arc<Memory>, waker: &Waker, most_changing: usize) {
    while let Some(Request { tag, work }) = shared.next(most_changing) {
        let is_change = is_change(&work);
        let (result, checksum) = perform(&file, &memory, work);
        if is_change {
            shared.changed();
        }
        shared.publish(&mut vec![Done { tag, result, checksum }], waker);
    }
    // The file's locks are released before anybody learns that this thread has ended.
}

fn perform(file: &File, memory: &Memory, work: Work) -> (Result<u32, Errno>, u64) {
    match work {
        Work::Read { at, span, checksum } => {
            let result = memory.pread(file, span, at);
            let whole = checksum.filter(|_| result == Ok(span.len));
            (result, whole.map_or(0, |span| memory.checksum(span)))
        }
        Work::Write { at, spans } => (memory.pwrite(file, &spans, at), 0),
        Work::Sync => (rustix::fs::fdatasync(file).map(|()| 0), 0),
        Work::Trim { at, bytes } => (rustix::fs::fallocate(file, TRIM, at, bytes).map(|()| 0), 0),
    }
}
