//! Blocks in a shared store, for programs without an engine and without a daemon.
//!
//! `begin` → copied into a staging slot as soon as one is free → tier → `turn`, which copies loaded blocks out and
//! reports finished batches.
//!
//! Invariants: block memory is the staging slots and no more. Every block of a batch ends with its own outcome, also
//! at the deadline. A buffer is read or written only between `begin` and the end of its batch.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::checksum::checksum;
use forebay_core::decorate::{Attempts, Limits, Rules, Stack, Timed};
use forebay_core::namespace::Descriptor;
use forebay_core::tier::{Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, Generation, NamespaceId, PAGE_BYTES, Result, SlotId};
use forebay_io::StoreReport;
use forebay_io::uring::Region;
use options::Shared;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::buffers::Pinned;
use crate::convert;
use crate::error::{Raised, kind_name, kind_named};
use crate::fork::Own;

mod options;

/// Staging slots: enough to keep several connections busy.
const SLOTS: u64 = 64;

/// The native part of `forebay.Store`.
#[pyclass(frozen, module = "forebay._native")]
pub struct StoreEngine {
    wake: OwnedFd,
    /// `None` once closed.
    open: Own<Mutex<Option<Open>>>,
}

struct Open {
    tier: Stack<Box<dyn Shared>>,
    namespace: NamespaceId,
    staging: Region,
    block_bytes: u64,
    free: Vec<SlotId>,
    start: Instant,
    next_id: u64,
    /// Waiting for a slot.
    waiting: VecDeque<Item>,
    /// Ready for the tier.
    ready: VecDeque<Operation>,
    under_way: HashMap<OpId, Item>,
    batches: HashMap<u64, Batch>,
    over: Vec<(u64, Vec<&'static str>)>,
}

/// One block of a batch.
struct Item {
    batch: u64,
    at: usize,
    kind: OpKind,
    key: BlockKey,
    buffer: Option<Pinned>,
    slot: Option<SlotId>,
}

struct Batch {
    left: usize,
    outcomes: Vec<&'static str>,
}

#[pymethods]
impl StoreEngine {
    #[new]
    fn new(
        url: &str,
        fields: &Bound<'_, PyAny>,
        block_bytes: u64,
        deadline: f64,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<StoreEngine> {
        let namespace = Descriptor::new(convert::fields(fields)?).map_err(Raised::from)?.id();
        let slot_bytes = block_bytes.next_multiple_of(PAGE_BYTES);
        let staging = staging(slot_bytes).map_err(Raised::from)?;
        let (tier, wake) = options::open(url, options, staging.clone())?;
        let rules = Rules {
            limits: Limits::default(),
            attempts: Attempts::default(),
            seed: u64::from(std::process::id()),
            deadline: convert::duration(deadline),
            // Each caller is told what became of its own blocks.
            has_breaker: false,
        };
        let open = Open {
            tier: Stack::new(tier, rules),
            namespace,
            staging,
            block_bytes,
            free: (0..SLOTS).map(|slot| SlotId((slot * slot_bytes / PAGE_BYTES) as u32)).collect(),
            start: Instant::now(),
            next_id: 1,
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            under_way: HashMap::new(),
            batches: HashMap::new(),
            over: Vec::new(),
        };
        Ok(StoreEngine { wake, open: Own::new(Mutex::new(Some(open))) })
    }

    /// Stores one buffer per hash. Returns the batch's number.
    fn begin_dump(
        &self,
        py: Python<'_>,
        group: u16,
        hashes: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let pinned = buffers.iter().map(Pinned::to_read).collect::<PyResult<Vec<_>>>()?;
        self.begin(py, OpKind::Store, group, hashes, Some(pinned))
    }

    /// Fills one buffer per hash, each as long as the block. Returns the batch's number.
    fn begin_load(
        &self,
        py: Python<'_>,
        group: u16,
        hashes: &Bound<'_, PyAny>,
        buffers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let pinned = buffers.iter().map(Pinned::to_write).collect::<PyResult<Vec<_>>>()?;
        self.begin(py, OpKind::Load, group, hashes, Some(pinned))
    }

    /// Looks up each hash. Returns the batch's number.
    fn begin_lookup(&self, py: Python<'_>, group: u16, hashes: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.begin(py, OpKind::Exists, group, hashes, None)
    }

    /// Batches that have ended since the last call, each with an outcome per block. Waits at most `timeout` seconds
    /// for an event.
    fn turn(&self, py: Python<'_>, timeout: f64) -> Result<Vec<(u64, Vec<&'static str>)>, Raised> {
        py.detach(|| {
            wait(self.wake.as_fd(), convert::duration(timeout));
            Ok(self.with(Open::turn)?)
        })
    }

    /// What to raise where a block ended with this outcome: the store's name and present trouble are in it.
    fn refusal(&self, py: Python<'_>, outcome: &str) -> PyErr {
        let stores = py.detach(|| self.with(|open| open.tier.tier().stores())).unwrap_or_default();
        Raised::from(refusal(outcome, &stores)).into()
    }

    /// Readable when `turn` has something to do.
    fn fileno(&self) -> i32 {
        self.wake.as_raw_fd()
    }

    /// Ends all connections; operations in progress never complete. Idempotent; does nothing in a child
    /// that was forked.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().map(|mut open| open.take())));
    }
}

impl StoreEngine {
    fn begin(
        &self,
        py: Python<'_>,
        kind: OpKind,
        group: u16,
        hashes: &Bound<'_, PyAny>,
        buffers: Option<Vec<Pinned>>,
    ) -> PyResult<u64> {
        let hashes: Vec<Vec<u8>> = hashes.try_iter()?.map(|hash| hash?.extract()).collect::<PyResult<_>>()?;
        let hashes: Vec<BlockHash> =
            hashes.iter().map(|hash| BlockHash::new(hash)).collect::<Result<_>>().map_err(Raised::from)?;
        if buffers.as_ref().is_some_and(|buffers| buffers.len() != hashes.len()) {
            return Err(Raised::from(Error::invalid("there is one buffer for each hash")).into());
        }
        let buffers =
            buffers.map_or_else(|| hashes.iter().map(|_| None).collect(), |some| some.into_iter().map(Some).collect());
        Ok(py.detach(|| self.with(|open| open.begin(kind, group, &hashes, buffers))?).map_err(Raised::from)?)
    }

    fn with<T>(&self, run: impl FnOnce(&mut Open) -> T) -> Result<T> {
        self.lock()?.as_mut().map(run).ok_or_else(|| Error::invalid("the store is closed"))
    }

    /// Errors in a child that was forked.
    fn lock(&self) -> Result<MutexGuard<'_, Option<Open>>> {
        Ok(self.open.here()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Open {
    fn begin(&mut self, kind: OpKind, group: u16, hashes: &[BlockHash], buffers: Vec<Option<Pinned>>) -> Result<u64> {
        if let Some(buffer) = buffers.iter().flatten().find(|buffer| buffer.len() as u64 != self.block_bytes) {
            return Err(Error::invalid("a buffer is not as long as a block")
                .with("bytes", buffer.len())
                .with("block_bytes", self.block_bytes)
                .hint("the store was made with this `block_bytes`; use another store for blocks of another size"));
        }
        let batch = self.next_id();
        self.batches.insert(batch, Batch { left: hashes.len(), outcomes: vec![""; hashes.len()] });
        for (at, (hash, buffer)) in hashes.iter().zip(buffers).enumerate() {
            let key = BlockKey { namespace: self.namespace, group, hash: *hash };
            self.waiting.push_back(Item { batch, at, kind, key, buffer, slot: None });
        }
        if hashes.is_empty() {
            self.end_batch(batch);
        }
        self.go_on();
        Ok(batch)
    }

    fn turn(&mut self) -> Vec<(u64, Vec<&'static str>)> {
        let mut completions = Vec::new();
        self.tier.advance(self.start.elapsed());
        self.tier.poll(&mut completions);
        // Late operations are reported by the completion that the cancellation causes.
        self.tier.take_late(&mut Vec::new());
        completions.into_iter().for_each(|completion| self.ended(completion));
        self.go_on();
        std::mem::take(&mut self.over)
    }

    /// Assigns slots to waiting items, and submits what the tier accepts.
    fn go_on(&mut self) {
        while let Some(item) = self.waiting.pop_front_if(|item| item.buffer.is_none() || !self.free.is_empty()) {
            self.make_ready(item);
        }
        self.tier.advance(self.start.elapsed());
        let taken = self.tier.submit(self.ready.make_contiguous());
        self.ready.drain(..taken);
    }

    fn make_ready(&mut self, mut item: Item) {
        let mut op = Operation {
            id: OpId(self.next_id()),
            kind: item.kind,
            key: item.key,
            slot: None,
            length_bytes: 0,
            checksum: 0,
            lineage: None,
        };
        if let Some(buffer) = &item.buffer {
            let slot = self.free.pop().expect("looked for before");
            (item.slot, op.slot, op.length_bytes) = (Some(slot), Some((slot, Generation(0))), buffer.len() as u64);
            if item.kind == OpKind::Store {
                op.checksum = buffer.read(|bytes| {
                    self.staging.write(slot.offset(), bytes);
                    checksum(bytes)
                });
            }
        }
        self.under_way.insert(op.id, item);
        self.ready.push_back(op);
    }

    fn ended(&mut self, Completion { id, outcome }: Completion) {
        let Item { batch, at, buffer, slot, .. } =
            self.under_way.remove(&id).expect("a tier completes what it was given, once");
        if let (Outcome::Loaded { .. }, Some(buffer), Some(slot)) = (outcome, &buffer, slot) {
            buffer.write(|bytes| self.staging.read(slot.offset(), bytes));
        }
        self.free.extend(slot);
        let known = self.batches.get_mut(&batch).expect("it has blocks left");
        known.outcomes[at] = name(outcome);
        known.left -= 1;
        if known.left == 0 {
            self.end_batch(batch);
        }
    }

    fn end_batch(&mut self, batch: u64) {
        let Batch { outcomes, .. } = self.batches.remove(&batch).expect("it ends once");
        self.over.push((batch, outcomes));
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

fn staging(slot_bytes: u64) -> Result<Region> {
    let most = u64::from(u32::MAX) * PAGE_BYTES / SLOTS;
    if slot_bytes == 0 || slot_bytes > most {
        return Err(Error::invalid("a block has at least one byte, and no more than a store keeps")
            .with("block_bytes", slot_bytes)
            .with("limit", most));
    }
    let staging = Region::anonymous((SLOTS * slot_bytes) as usize).map_err(|error| {
        Error::new(ErrorKind::Full, "there is no memory to stage blocks in")
            .source(error)
            .hint("make `block_bytes` smaller")
    })?;
    staging.want_huge_pages();
    Ok(staging)
}

fn wait(fd: BorrowedFd<'_>, timeout: Duration) {
    let timeout = Timespec { tv_sec: timeout.as_secs().min(3600) as _, tv_nsec: timeout.subsec_nanos() as _ };
    // Interrupted or not: the caller checks again.
    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
}

fn refusal(outcome: &str, stores: &[StoreReport]) -> Error {
    let names: Vec<&str> = stores.iter().map(|store| store.name.as_str()).collect();
    let kind = kind_named(outcome).unwrap_or(ErrorKind::Invalid);
    let error = Error::new(kind, "the store did not answer").with("outcome", outcome).with("store", names.join(", "));
    // A server's words where a user or a password is wrong.
    let is_rejected = |trouble: &String| ["WRONGPASS", "NOAUTH"].iter().any(|word| trouble.contains(word));
    let known = stores.iter().filter(|store| store.health != Health::Healthy).find_map(|store| store.hint.as_deref());
    let error = error.hint(match (stores.iter().filter_map(|store| store.trouble.as_ref()).any(is_rejected), known) {
        (true, _) => "correct the user and the password in the url, or the file of `password_file`".to_owned(),
        (false, Some(hint)) => options::in_its_words(hint),
        (false, None) => "check that the store runs, and that this host reaches it".to_owned(),
    });
    match stores.iter().find_map(|store| store.trouble.clone()) {
        Some(trouble) => error.source(trouble),
        None => error,
    }
}

fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Stored => "stored",
        Outcome::Loaded { .. } => "loaded",
        Outcome::Found => "found",
        Outcome::Absent => "absent",
        Outcome::Removed => "removed",
        Outcome::Failed(kind) => kind_name(kind),
    }
}
