//! The object tier: which operations are in flight, and how they end.
//!
//! Invariant: each accepted operation completes once: by its request, or earlier because it was cancelled. In the
//! second case the request's result is ignored.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{Error, ErrorKind, Result};
use futures_util::StreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use tokio::runtime::Runtime;

use super::client::{Client, Done, Job};
use super::config::ObjectConfig;
use super::moves::Place;
use super::purge;
use super::report::{Counters, ObjectReport};
use crate::cancel::SlotGuard;
use crate::seldom::Seldom;
use crate::transfers::Transfers;
use crate::uring::{Region, Waker};

struct Flight {
    guard: Arc<SlotGuard>,
    kind: OpKind,
    length_bytes: u64,
}

/// See the module documentation.
pub struct Object {
    client: Client,
    config: ObjectConfig,
    waker: Arc<Waker>,
    flights: HashMap<OpId, Flight>,
    stores: usize,
    completions: Vec<Completion>,
    transfers: Transfers,
    counters: Counters,
    /// Counted where objects are read.
    misreads: Arc<AtomicU64>,
}

impl Object {
    /// Less where the configuration says read-only.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, can_touch: true, is_durable: true, is_shared: true };

    /// Checks that the bucket exists; blocks for at most one timeout. `pool` is the memory with the slots.
    pub fn open(config: &ObjectConfig, pool: Region) -> Result<Object> {
        config.check()?;
        // Every TLS connection of this process uses this provider. A second call fails, and would install the same
        // one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = store(config)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(no_machine)?;
        ask(config, &store, &runtime)?;
        let waker = Arc::new(Waker::new().map_err(no_machine)?);
        let misreads = Arc::<AtomicU64>::default();
        let (prefix, part_bytes) = (config.prefix.clone(), config.part_bytes);
        let (is_read_only, sealing) = (config.read_only, config.sealing.clone());
        let (damaged, misreads_there) = (Seldom::default(), misreads.clone());
        let place = Place { store, prefix, sealing, part_bytes, pool, is_read_only, damaged, misreads: misreads_there };
        let client =
            Client::start(runtime, place, config.requests, config.timeout, waker.clone()).map_err(no_machine)?;
        Ok(Object {
            client,
            config: config.clone(),
            waker,
            flights: HashMap::new(),
            stores: 0,
            completions: Vec::new(),
            transfers: Transfers::default(),
            counters: Counters::default(),
            misreads,
        })
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    /// Where its blocks are, for purges of namespaces.
    pub fn places(&self) -> Vec<crate::purge::Place> {
        vec![purge::place(&self.config, self.place_name())]
    }

    fn place_name(&self) -> String {
        let ObjectConfig { endpoint, region, bucket, prefix, .. } = &self.config;
        format!("{}/{bucket}/{prefix}", endpoint.as_ref().unwrap_or(region))
    }

    /// Does no I/O.
    pub fn report(&self) -> ObjectReport {
        ObjectReport {
            name: self.place_name(),
            health: self.health(),
            read_only: self.config.read_only,
            in_flight: self.flights.len(),
            counters: Counters { misread_blocks: self.misreads.load(Relaxed), ..self.counters },
        }
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.completions.is_empty()
    }

    /// Blocks until every accepted operation has completed; false if that takes longer than `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll(completions);
            if self.is_idle() {
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            self.client.wait(Duration::from_millis(10));
        }
    }

    /// Accepts the operation; false if its queue is full.
    fn take(&mut self, op: &Operation) -> bool {
        let is_store = op.kind == OpKind::Store;
        let (held, limit) = match is_store {
            true => (self.stores, self.config.queued_stores),
            false => (self.flights.len() - self.stores, self.config.queued_loads),
        };
        if held >= limit {
            return false;
        }
        let guard = Arc::<SlotGuard>::default();
        let (kind, length_bytes) = (op.kind, op.length_bytes);
        self.flights.insert(op.id, Flight { guard: guard.clone(), kind, length_bytes });
        self.stores += usize::from(is_store);
        match self.refusal(op) {
            Some(kind) => self.complete(op.id, Outcome::Failed(kind), false),
            None => self.client.push(Job { op: *op, guard, asked: Instant::now() }),
        }
        true
    }

    /// Why an operation is refused at once.
    fn refusal(&self, op: &Operation) -> Option<ErrorKind> {
        let is_change = matches!(op.kind, OpKind::Store | OpKind::Remove | OpKind::Touch { .. });
        if is_change && self.config.read_only {
            return Some(ErrorKind::Unsupported);
        }
        let is_transfer = matches!(op.kind, OpKind::Store | OpKind::Load);
        let fits = (1..=self.config.max_block_bytes).contains(&op.length_bytes);
        (is_transfer && !fits).then_some(ErrorKind::Invalid)
    }

    fn complete(&mut self, id: OpId, outcome: Outcome, was_there: bool) {
        let Some(flight) = self.flights.remove(&id) else { return };
        self.stores -= usize::from(flight.kind == OpKind::Store);
        self.count(&flight, outcome, was_there);
        self.completions.push(Completion { id, outcome });
    }

    fn count(&mut self, flight: &Flight, outcome: Outcome, was_there: bool) {
        let counters = &mut self.counters;
        match (flight.kind, outcome) {
            (_, Outcome::Stored) if was_there => counters.repeated_stores += 1,
            (_, Outcome::Stored) => {
                counters.stored_blocks += 1;
                counters.stored_bytes += flight.length_bytes;
            }
            (_, Outcome::Loaded { length_bytes, .. }) => {
                counters.loaded_blocks += 1;
                counters.loaded_bytes += length_bytes;
            }
            (OpKind::Exists, Outcome::Found) => counters.found_blocks += 1,
            (_, Outcome::Removed) => counters.removed_blocks += 1,
            (OpKind::Load, Outcome::Absent) => counters.absent_loads += 1,
            (OpKind::Load, Outcome::Failed(ErrorKind::Corrupt)) => counters.corrupt_blocks += 1,
            (OpKind::Load, Outcome::Failed(_)) => counters.failed_loads += 1,
            (OpKind::Store, Outcome::Failed(_)) => counters.failed_stores += 1,
            (_, Outcome::Found | Outcome::Absent | Outcome::Failed(_)) => {}
        }
    }
}

impl Tier for Object {
    fn name(&self) -> &'static str {
        "object"
    }

    fn capabilities(&self) -> Capabilities {
        let can_write = !self.config.read_only;
        Capabilities { can_store: can_write, can_remove: can_write, can_touch: can_write, ..Object::CAPABILITIES }
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.iter().take_while(|op| self.take(op)).count();
        self.transfers.begin(&batch[..taken]);
        if !self.completions.is_empty() {
            self.waker.wake();
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.waker.clear();
        let (from, mut done) = (completions.len(), Vec::new());
        self.client.poll(&mut done);
        for Done { id, outcome, was_there } in done {
            self.complete(id, outcome, was_there);
        }
        completions.append(&mut self.completions);
        self.transfers.ended(&completions[from..]);
    }

    /// Completes the operation as late at once. Its request may continue for a while but touches no slot.
    fn cancel(&mut self, id: OpId) {
        if self.flights.get(&id).is_some_and(|flight| flight.guard.give_up()) {
            self.counters.given_up += 1;
            self.complete(id, Outcome::Failed(ErrorKind::Timeout), false);
            self.waker.wake();
        }
    }

    /// The breaker decides what failures of the store mean.
    fn health(&self) -> Health {
        if self.client.is_alive() { Health::Healthy } else { Health::Sick(ErrorKind::Unavailable) }
    }
}

/// The thread with the requests keeps the deadlines.
impl Timed for Object {
    fn advance(&mut self, _now: Duration) {}
}

/// The tier's client. It repeats nothing: only the decorators do.
pub(super) fn store(config: &ObjectConfig) -> Result<AmazonS3> {
    client(config, RetryConfig { max_retries: 0, ..RetryConfig::default() })
}

/// A client that repeats requests which a busy store refused (429, 5xx), as long as one request may take.
pub(super) fn patient_store(config: &ObjectConfig) -> Result<AmazonS3> {
    let backoff = BackoffConfig { max_backoff: Duration::from_secs(1), ..BackoffConfig::default() };
    client(config, RetryConfig { backoff, max_retries: 20, retry_timeout: config.timeout })
}

fn client(config: &ObjectConfig, retry: RetryConfig) -> Result<AmazonS3> {
    let is_plain = config.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let options = ClientOptions::new()
        .with_allow_http(is_plain)
        .with_connect_timeout(config.timeout)
        .with_timeout(config.timeout)
        .with_pool_max_idle_per_host(config.requests);
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&config.bucket)
        .with_region(&config.region)
        .with_retry(retry)
        // Many stores that are not Amazon's cannot remove in bulk, and this tier removes one block at a time.
        .with_disable_bulk_delete(true)
        .with_client_options(options);
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let (Some(id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        builder = builder.with_access_key_id(id).with_secret_access_key(&secret.0);
    }
    builder.build().map_err(|error| {
        Error::invalid("cannot make a client for the object store")
            .with("bucket", &config.bucket)
            .source(error)
            .hint("check `endpoint`, `region` and the `AWS_` variables of the environment")
    })
}

/// Lists one name, so that a missing bucket or missing permission shows now and not at the first block.
fn ask(config: &ObjectConfig, store: &AmazonS3, runtime: &Runtime) -> Result<()> {
    let failed = |kind, what: &str| {
        Error::new(kind, what)
            .with("bucket", &config.bucket)
            .with("endpoint", config.endpoint.as_deref().unwrap_or("amazon"))
            .hint("create the bucket, and give the key the rights to list, get, put and delete in it")
    };
    let prefix = Path::from(config.prefix.as_str());
    let first = async { tokio::time::timeout(config.timeout, store.list(Some(&prefix)).next()).await };
    match runtime.block_on(first) {
        Err(_) => Err(failed(ErrorKind::Timeout, "the object store does not answer")),
        Ok(Some(Err(error))) => Err(failed(ErrorKind::Unavailable, "cannot use the bucket").source(error)),
        Ok(_) => Ok(()),
    }
}

fn no_machine(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "cannot get threads or memory for the object tier").source(error)
}
