//! The attached pools, and a thread that pins their memory for the device, chunk by chunk.
//!
//! Invariants: a registration lies in one chunk, chunks begin at multiples of their size in the pool, and what this
//! engine registered it unregisters before the pool is unmapped, the newest first. It relies on no registration of
//! others. A pool that has grown keeps the registrations of the smaller one, in whose last chunk another one then
//! begins. Memory that the daemon has not populated yet is left alone: pinning would populate it with small pages. What
//! cannot be registered stays as it is; copies of it go through staging memory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

use super::context::Context;
use super::driver::Status;
use crate::copy::Memory;
use crate::engine::Bell;

/// No extent of a pool crosses a multiple of it, and a failed attempt costs no more than one of them.
pub const REGISTRATION_BYTES: u64 = 1 << 30;
/// Where a chunk is refused, smaller registrations are tried down to this part of it.
const LEAST_PART: u64 = 16;
/// Chunks refused one after another, after which no further one is tried.
const REFUSALS: usize = 3;
/// A chunk that stays as it is.
const REFUSED: u64 = u64::MAX;

/// A pool's memory with its registrations.
pub struct Pool {
    /// The pool before it grew, with the registrations up to its end; the other fields are about what is behind.
    smaller: Option<Arc<Pool>>,
    memory: Memory,
    context: Arc<Context>,
    chunk_bytes: u64,
    /// Bytes at its start that have memory, as far as the daemon has said.
    populated: AtomicU64,
    /// By chunk: bytes of each registration in it, 0 while there is none, or `REFUSED`.
    parts: Vec<AtomicU64>,
    /// A chunk that a job had to stage, to be registered first; `usize::MAX` if none is.
    wanted: AtomicUsize,
    /// Addresses of our registrations, the newest last.
    registered: Mutex<Vec<u64>>,
}

impl Pool {
    pub fn new(memory: Memory, context: Arc<Context>, chunk_bytes: u64, smaller: Option<Arc<Pool>>) -> Pool {
        let (start, end) = (smaller.as_ref().map_or(0, |pool| pool.end()), memory.len() as u64);
        if let Some(smaller) = &smaller {
            smaller.forgive();
        }
        let chunks = end.div_ceil(chunk_bytes) - start / chunk_bytes;
        let parts = (0..chunks).map(|_| AtomicU64::new(0)).collect();
        let wanted = AtomicUsize::new(usize::MAX);
        let populated = AtomicU64::new(0);
        Pool { smaller, memory, context, chunk_bytes, populated, parts, wanted, registered: Mutex::default() }
    }

    /// Whether the memory begins with all of this pool.
    pub fn is_start_of(&self, memory: &Memory) -> bool {
        self.memory.address() == memory.address() && self.memory.len() <= memory.len()
    }

    /// Says that so many bytes at its start have memory.
    pub fn populated(&self, bytes: u64) {
        self.populated.fetch_max(bytes, Ordering::AcqRel);
        if let Some(smaller) = &self.smaller {
            smaller.populated(bytes);
        }
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What was refused is tried again, unless so much was that no thread registers any more.
    fn forgive(&self) {
        for part in &self.parts {
            let _ = part.compare_exchange(REFUSED, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        if let Some(smaller) = &self.smaller {
            smaller.forgive();
        }
    }

    /// Bytes at and behind `offset` that are in its registration; 0 if it is in none.
    pub fn registered(&self, offset: u64) -> u64 {
        if let Some(smaller) = self.smaller_at(offset) {
            return smaller.registered(offset).min(smaller.end() - offset);
        }
        let chunk = self.chunk_at(offset);
        let (start, bytes) = self.chunk(chunk);
        match self.parts[chunk].load(Ordering::Acquire) {
            0 | REFUSED => 0,
            part => (part - (offset - start) % part).min(start + bytes - offset),
        }
    }

    /// Bytes up to the next chunk.
    pub fn border(&self, offset: u64) -> u64 {
        let chunk = self.chunk_bytes - offset % self.chunk_bytes;
        self.smaller_at(offset).map_or(chunk, |smaller| chunk.min(smaller.end() - offset))
    }

    pub fn registered_bytes(&self) -> u64 {
        let is_registered = |chunk: &usize| ![0, REFUSED].contains(&self.parts[*chunk].load(Ordering::Acquire));
        let own: u64 = (0..self.parts.len()).filter(is_registered).map(|chunk| self.chunk(chunk).1).sum();
        own + self.smaller.as_ref().map_or(0, |smaller| smaller.registered_bytes())
    }

    /// Says that a job touches a chunk that is not registered.
    pub fn want(&self, offset: u64) {
        match self.smaller_at(offset) {
            Some(smaller) => smaller.want(offset),
            None => self.wanted.store(self.chunk_at(offset), Ordering::Relaxed),
        }
    }

    /// The pool before it grew, if `offset` was in it.
    fn smaller_at(&self, offset: u64) -> Option<&Arc<Pool>> {
        self.smaller.as_ref().filter(|smaller| offset < smaller.end())
    }

    fn start(&self) -> u64 {
        self.smaller.as_ref().map_or(0, |smaller| smaller.end())
    }

    fn end(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Position of the chunk in which `offset` lies.
    fn chunk_at(&self, offset: u64) -> usize {
        (offset / self.chunk_bytes - self.start() / self.chunk_bytes) as usize
    }

    /// Offset and bytes of what this pool registers of a chunk.
    fn chunk(&self, chunk: usize) -> (u64, u64) {
        let first = (self.start() / self.chunk_bytes + chunk as u64) * self.chunk_bytes;
        let (start, end) = (first.max(self.start()), (first + self.chunk_bytes).min(self.end()));
        (start, end - start)
    }

    /// Registers all of it now, for measurements. `Err` with the refusal that ended it.
    pub fn register_all(&self) -> Result<(), Status> {
        if let Some(smaller) = &self.smaller {
            smaller.register_all()?;
        }
        (0..self.parts.len()).try_for_each(|chunk| self.register(chunk))
    }

    /// Registers a chunk, in parts if it must. `Err` with the last refusal.
    fn register(&self, chunk: usize) -> Result<(), Status> {
        let (start, bytes) = self.chunk(chunk);
        let mut part = self.chunk_bytes;
        loop {
            match self.register_parts(start, bytes, part) {
                Ok(()) => {
                    self.parts[chunk].store(part, Ordering::Release);
                    return Ok(());
                }
                Err(Status::INVALID_VALUE | Status::OUT_OF_MEMORY) if part > self.chunk_bytes / LEAST_PART => part /= 2,
                Err(status) => return Err(status),
            }
        }
    }

    fn register_parts(&self, start: u64, bytes: u64, part: u64) -> Result<(), Status> {
        let (driver, before) = (self.context.driver(), self.ours().len());
        for offset in (start..start + bytes).step_by(part as usize) {
            let len = part.min(start + bytes - offset);
            match driver.register(&self.memory, offset, len) {
                Ok(()) => self.ours().push(self.memory.address() + offset),
                // `ALREADY_REGISTERED` too: somebody else's registration may cover a part alone, end at any time, or be
                // left from memory that was at these addresses before, whose pages the device would then read.
                Err(status) => {
                    self.unregister(before);
                    return Err(status);
                }
            }
        }
        Ok(())
    }

    /// Ends all of our registrations but the oldest `kept`.
    fn unregister(&self, kept: usize) {
        for address in self.ours().drain(kept..).rev() {
            // A context that has ended has no registrations any more.
            let _ = self.context.driver().unregister(address);
        }
    }

    fn ours(&self) -> MutexGuard<'_, Vec<u64>> {
        self.registered.lock().expect("nothing under this lock panics")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        self.unregister(0);
    }
}

/// What the thread shares with the engine.
#[derive(Default)]
pub struct Registrar {
    state: Mutex<State>,
    woken: Condvar,
    /// For whoever wants to know how much is registered.
    bell: OnceLock<Bell>,
}

#[derive(Default)]
struct State {
    pools: Vec<Weak<Pool>>,
    /// Counts what makes a look at the pools worth it.
    news: u64,
    is_stopping: bool,
    refusals: usize,
    trouble: Option<String>,
}

impl Registrar {
    pub fn add(&self, pool: &Arc<Pool>) {
        self.lock().pools.push(Arc::downgrade(pool));
        self.look();
    }

    /// Rings it after each chunk that was registered; the first one alone.
    pub fn ring(&self, bell: Bell) {
        let _ = self.bell.set(bell);
    }

    /// There may be something to register.
    pub fn look(&self) {
        self.lock().news += 1;
        self.woken.notify_all();
    }

    pub fn stop(&self) {
        self.lock().is_stopping = true;
        self.woken.notify_all();
    }

    /// Why parts of the pools are not registered and will not be.
    pub fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// The loop of the thread, which has adopted the context.
    pub fn run(&self, context: &Context) {
        loop {
            let (pools, news) = {
                let mut state = self.lock();
                state.pools.retain(|pool| pool.strong_count() > 0);
                if state.is_stopping {
                    return;
                }
                (state.pools.clone(), state.news)
            };
            pools.iter().filter_map(Weak::upgrade).for_each(|pool| self.advance(context, &pool));
            let state = self.lock();
            if state.is_stopping || state.refusals >= REFUSALS {
                return;
            }
            // Nothing is lost between the look and the wait: news are counted under the lock that is held.
            if state.news == news {
                drop(self.woken.wait(state));
            }
        }
    }

    /// Registers what can be registered of the pool now.
    fn advance(&self, context: &Context, pool: &Pool) {
        let mut next = 0;
        while next < pool.parts.len() {
            let wanted = pool.wanted.swap(usize::MAX, Ordering::Relaxed);
            let chunk = if wanted < pool.parts.len() { wanted } else { next };
            next += usize::from(chunk == next);
            if self.lock().is_stopping || context.check().is_err() {
                return;
            }
            if pool.parts[chunk].load(Ordering::Acquire) > 0 {
                continue;
            }
            let (start, bytes) = pool.chunk(chunk);
            if start + bytes > pool.populated.load(Ordering::Acquire) {
                continue;
            }
            match pool.register(chunk) {
                Ok(()) => {
                    self.lock().refusals = 0;
                    if let Some(bell) = self.bell.get() {
                        bell();
                    }
                }
                Err(status) => {
                    pool.parts[chunk].store(REFUSED, Ordering::Release);
                    if self.refuse(context, status) {
                        return;
                    }
                }
            }
        }
    }

    /// Whether it was the last attempt.
    fn refuse(&self, context: &Context, status: Status) -> bool {
        let error = context.error("the driver does not register the pool's memory", status);
        let error = match error.hint_text() {
            Some(_) => error,
            None => error.hint(
                "copies go through staging memory, which is slower; see the limits of this host or container on locked \
                 memory",
            ),
        };
        let mut state = self.lock();
        state.refusals += 1;
        state.trouble.get_or_insert_with(|| error.told());
        state.refusals >= REFUSALS
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing under this lock panics")
    }
}
