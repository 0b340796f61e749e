//! Jobs: turns slots and block ids into copies, and tracks them.
//!
//! Invariants: until it is reported, a job is either with the copy engine or in `done`. A job that cannot be copied
//! is in `done` at once.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::{Error, PAGE_BYTES, Result};
use forebay_device::cuda::{CudaCopyEngine, CudaOptions, LibCuda, Wish};
use forebay_device::{
    After, Completion, CopyEngine, Direction, EngineReport, HostCopyEngine, HostOptions, Item, Job, Outcome, Tensors,
    Until,
};
use forebay_io::pool::{GeometryDescription, Mapping};
use forebay_rpc::client::SessionState;
use forebay_rpc::proto::Held;

use super::pool::{GroupShape, Guard, MappedPool, Meant, Suspects};
use crate::buffers;

/// Limit on the jobs submitted and not yet reported. An engine step submits a handful and reports as many.
const QUEUE_JOBS: usize = 16_384;

/// The engine that copies from and to these tensors, of a device if there are options for one. `threads`: 0 leaves the
/// number to the engine.
pub fn engine(tensors: Tensors, cuda: Option<CudaOptions>, threads: usize) -> Result<Arc<dyn CopyEngine>> {
    Ok(match cuda {
        None => {
            let default = HostOptions::default();
            let threads = if threads == 0 { default.threads } else { threads };
            Arc::new(HostCopyEngine::new(tensors, HostOptions { threads, queue_jobs: QUEUE_JOBS, ..default })?)
        }
        Some(default) => {
            let threads = if threads == 0 { default.threads } else { threads };
            let options = CudaOptions { threads, queue_jobs: QUEUE_JOBS, ..default };
            Arc::new(CudaCopyEngine::new(Arc::new(LibCuda::load()?), tensors, options)?)
        }
    })
}

/// The options of a device. `stages`: see [`CudaOptions::stages`]. `multiprocessors`: 0 leaves the number to the
/// engine.
pub fn cuda(ordinal: u32, stages: bool, method: &str, multiprocessors: u32) -> Result<CudaOptions> {
    let default = CudaOptions::new(ordinal);
    let Some(method) = Wish::ALL.into_iter().find(|wish| wish.name() == method) else {
        let names = Wish::ALL.map(Wish::name).join(", ");
        return Err(Error::invalid("there is no such method of copies").with("method", method).with("methods", names));
    };
    let multiprocessors = if multiprocessors == 0 { default.multiprocessors } else { multiprocessors };
    Ok(CudaOptions { stages, method, multiprocessors, ..default })
}

/// The copies of one group.
pub struct GroupJob {
    pub group: u32,
    pub slots: Vec<Held>,
    /// `blocks_per_chunk` of each slot, consecutively; fewer of the last one if a load ends inside it.
    pub block_ids: Vec<u32>,
    /// Blocks at the start of the first slot that are skipped.
    pub skipped: u32,
}

/// The end of a job.
pub struct End {
    pub job: u64,
    /// Whether all of it was copied.
    pub is_whole: bool,
    pub bytes: u64,
    pub elapsed: Duration,
}

/// The worker's progress, and why it has not advanced further.
#[derive(Clone)]
pub struct Standing {
    pub state: SessionState,
    pub reason: Option<String>,
}

/// See the module documentation.
pub struct Copies {
    groups: Vec<GroupShape>,
    rank: u32,
    blocks_per_chunk: u32,
    /// Whether loads are compared with births, where births exist.
    verifies: bool,
    suspects: Arc<Suspects>,
    inner: Mutex<Inner>,
}

struct Inner {
    /// `None` once closed.
    engine: Option<Arc<dyn CopyEngine>>,
    pool: Option<MappedPool>,
    standing: Standing,
    done: Vec<End>,
}

impl Copies {
    pub fn new(
        engine: Arc<dyn CopyEngine>,
        groups: Vec<GroupShape>,
        rank: u32,
        blocks_per_chunk: u32,
        verifies: bool,
        wake: UnixStream,
    ) -> Copies {
        let standing = Standing { state: SessionState::Connecting, reason: Some("not connected yet".to_string()) };
        let inner = Inner { engine: Some(engine), pool: None, standing, done: Vec::new() };
        let suspects = Arc::new(Suspects::new(wake));
        Copies { groups, rank, blocks_per_chunk, verifies, suspects, inner: Mutex::new(inner) }
    }

    pub fn suspects(&self) -> &Suspects {
        &self.suspects
    }

    pub fn standing(&self) -> Standing {
        self.inner().standing.clone()
    }

    pub fn stand(&self, state: SessionState, reason: Option<String>) {
        let mut inner = self.inner();
        if inner.engine.is_some() {
            inner.standing = Standing { state, reason };
        }
    }

    /// The id of the mapped pool.
    pub fn pool_id(&self) -> Option<Vec<u8>> {
        self.inner().pool.as_ref().map(|pool| pool.id.clone())
    }

    /// Drops the mapping, which ends with its last job.
    pub fn unmap(&self) -> Result<()> {
        let (engine, old) = {
            let mut inner = self.inner();
            (inner.engine.clone(), inner.pool.take())
        };
        engine.zip(old).map_or(Ok(()), |(engine, old)| engine.detach_pool(old.handle))
    }

    /// Replaces the present mapping, which ends with its last job.
    pub fn map(&self, id: Vec<u8>, mapping: Mapping) -> Result<()> {
        let mapping = Arc::new(mapping);
        let memory = buffers::pool(mapping.clone())?;
        let Some(engine) = self.inner().engine.clone() else { return Ok(()) };
        let handle = engine.attach_pool(memory)?;
        let old = self.inner().pool.replace(MappedPool { id, mapping, handle, has_births: false, offsets: None });
        old.map_or(Ok(()), |old| engine.detach_pool(old.handle))
    }

    /// Maps what the mapped pool has grown by, at the same addresses. Errors if that cannot be, and the pool must be
    /// mapped anew.
    pub fn grow(&self, description: &GeometryDescription) -> Result<()> {
        let Some(pool) = self.inner().pool.clone() else { return Ok(()) };
        if pool.mapping.geometry().units == description.units {
            return Ok(());
        }
        self.map(pool.id, pool.mapping.grown(description)?)
    }

    /// Says that so many bytes at the start of the mapped pool have memory.
    pub fn populated(&self, bytes: u64) {
        let (engine, handle) = {
            let inner = self.inner();
            (inner.engine.clone(), inner.pool.as_ref().map(|pool| pool.handle))
        };
        if let Some((engine, handle)) = engine.zip(handle) {
            engine.populated(handle, bytes);
        }
    }

    /// Sets whether the attached daemon maintains births.
    pub fn trust_births(&self, has_births: bool) {
        if let Some(pool) = &mut self.inner().pool {
            pool.has_births = has_births;
        }
    }

    /// Sets the offsets of this rank's slices in the mapped pool.
    pub fn place(&self, offsets: std::collections::HashMap<u32, u64>) {
        if let Some(pool) = &mut self.inner().pool {
            pool.offsets = Some(Arc::new(offsets));
        }
    }

    /// Queues a job. Errors with `Invalid` if its lists do not fit together.
    pub fn submit(
        &self,
        direction: Direction,
        job: u64,
        pool: &[u8],
        groups: Vec<GroupJob>,
        after: After,
    ) -> Result<()> {
        groups.iter().try_for_each(|group| self.check(group))?;
        let (engine, mapped) = {
            let inner = self.inner();
            (inner.engine.clone(), inner.pool.clone().filter(|mapped| mapped.id == pool))
        };
        let begin = |(engine, mapped): (Arc<dyn CopyEngine>, MappedPool)| {
            self.begin(&*engine, &mapped, direction, job, &groups, after)
        };
        if !engine.zip(mapped).is_some_and(begin) {
            self.inner().done.push(End { job, is_whole: false, bytes: 0, elapsed: Duration::ZERO });
        }
        Ok(())
    }

    /// Takes the jobs that have ended.
    pub fn finished(&self) -> Vec<End> {
        let mut inner = self.inner();
        let completions = inner.engine.as_ref().map(|engine| engine.poll()).unwrap_or_default();
        let mut ends = std::mem::take(&mut inner.done);
        ends.extend(completions.into_iter().map(end));
        ends
    }

    /// Whether no tensor of the jobs is touched any more, by the deadline at the latest.
    pub fn wait(&self, jobs: &[u64], deadline: Instant) -> bool {
        let engine = self.inner().engine.clone();
        engine.is_none_or(|engine| engine.wait(jobs, Until::Released, deadline).is_ok())
    }

    /// How the copying is done; `None` once closed.
    pub fn report(&self) -> Option<EngineReport> {
        let engine = self.inner().engine.clone();
        engine.map(|engine| engine.report())
    }

    /// Bytes of the mapped pool that are registered with the driver; `None` where there is none, or once closed.
    pub fn registered_bytes(&self) -> Option<u64> {
        let report = self.report()?;
        report.device.map(|_| report.registered_bytes)
    }

    /// Ends the copying. Afterwards no byte is touched, unless somebody still waits for a job.
    pub fn close(&self) {
        let mut inner = self.inner();
        let (engine, pool) = (inner.engine.take(), inner.pool.take());
        inner.standing = Standing { state: SessionState::Closed, reason: Some("the worker was shut down".to_string()) };
        drop(inner);
        drop((engine, pool));
    }

    fn begin(
        &self,
        engine: &dyn CopyEngine,
        mapped: &MappedPool,
        direction: Direction,
        job: u64,
        groups: &[GroupJob],
        after: After,
    ) -> bool {
        let Some(job) = self.job(mapped, direction, job, groups, after) else { return false };
        engine.submit(job).inspect_err(|error| tracing::warn!(%error, "a copy was refused")).is_ok()
    }

    /// `None` if the pool's slots cannot be used yet, or a block would be stored in part.
    fn job(
        &self,
        mapped: &MappedPool,
        direction: Direction,
        id: u64,
        groups: &[GroupJob],
        after: After,
    ) -> Option<Job> {
        let offsets = mapped.offsets.as_ref()?;
        let is_store = direction == Direction::Store;
        let (mut items, mut block_ids, mut meant) = (Vec::new(), Vec::new(), Vec::new());
        for group in groups {
            let (position, shape) = self.shape(group.group)?;
            if is_store && shape.is_replicated && self.rank != 0 {
                continue;
            }
            let (base, rank) = (block_ids.len() as u32, if shape.is_replicated { 0 } else { self.rank as usize });
            for (slot, chunk) in group.slots.iter().zip(group.chunks(self.blocks_per_chunk)) {
                let blocks = chunk.blocks.len() as u32;
                if is_store && blocks != self.blocks_per_chunk {
                    return None;
                }
                let before = u64::from(chunk.skipped) * shape.block_bytes;
                let behind = shape.slice_bytes - before - u64::from(blocks) * shape.block_bytes;
                let offset = u64::from(slot.slot) * PAGE_BYTES + offsets.get(&group.group)? + before;
                let blocks = base + chunk.blocks.start..base + chunk.blocks.end;
                items.push(Item { offset, group: position, blocks, beside: [before, behind] });
                meant.push(Meant { held: *slot, bytes: shape.slice_bytes, rank });
            }
            block_ids.extend_from_slice(&group.block_ids);
        }
        let (mapping, suspects) = (mapped.mapping.clone(), self.suspects.clone());
        let guard = Some(Box::new(Guard { mapping, direction, meant, suspects }) as _);
        let is_summed = self.verifies && mapped.has_births;
        Some(Job { id, direction, pool: mapped.handle, after, items, block_ids, is_summed, guard })
    }

    fn check(&self, job: &GroupJob) -> Result<()> {
        if self.shape(job.group).is_none() {
            return Err(Error::invalid("a job names a group that the worker has not").with("group", job.group));
        }
        let blocks = job.block_ids.len() as u64 + u64::from(job.skipped);
        let is_skip_inside = job.skipped < self.blocks_per_chunk && (job.skipped == 0 || !job.block_ids.is_empty());
        if !is_skip_inside || blocks.div_ceil(self.blocks_per_chunk.into()) != job.slots.len() as u64 {
            return Err(Error::invalid("a job's block ids do not fill its slots")
                .with("slots", job.slots.len())
                .with("blocks_per_chunk", self.blocks_per_chunk)
                .with("block_ids", job.block_ids.len())
                .with("skipped", job.skipped));
        }
        Ok(())
    }

    /// Position among the copy engine's groups.
    fn shape(&self, group: u32) -> Option<(u16, &GroupShape)> {
        let position = self.groups.iter().position(|shape| shape.group == group)?;
        Some((u16::try_from(position).ok()?, &self.groups[position]))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing under the lock panics in the middle of a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of one slot.
struct Chunk {
    /// Skipped blocks at its start.
    skipped: u32,
    /// Range in the group's block ids.
    blocks: Range<u32>,
}

impl GroupJob {
    fn chunks(&self, blocks_per_chunk: u32) -> impl Iterator<Item = Chunk> {
        let (end, mut start, mut skipped) = (self.block_ids.len() as u32, 0, self.skipped);
        std::iter::from_fn(move || {
            let blocks = start..end.min(start + blocks_per_chunk - skipped);
            start = blocks.end;
            let skipped = std::mem::take(&mut skipped);
            (!blocks.is_empty()).then_some(Chunk { skipped, blocks })
        })
    }
}

fn end(completion: Completion) -> End {
    End {
        job: completion.job_id,
        is_whole: !completion.outcomes.contains(&Outcome::Failed),
        bytes: completion.bytes,
        elapsed: completion.elapsed,
    }
}
