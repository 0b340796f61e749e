//! `forebay bench lookup`: how long one lookup takes over the socket, as an engine's scheduler asks it.
//!
//! Method: one client on one connection stores as many blocks of 4 KiB as the largest lookup asks for, and then
//! asks for all of them again and again, one lookup at a time. Measured is the round trip of `Lookup`: encoding,
//! socket, decoding, the core, the lease on every key, the offsets back. The release of the lease that follows is
//! not. The `miss` rows ask for as many keys that were never stored.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::{Rpc, connect, lone_session};
use forebay_rpc::from_status;
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::{
    Attention, Block, CommitOutcome, Group, GroupKeys, LookupReply, LookupRequest, OpenNamespaceRequest, PurgeRequest,
    PutRequest, ReleaseRequest, SessionEvent,
};
use serde::Serialize;
use tonic::Streaming;

use crate::private::PrivateDaemon;

const BLOCK_BYTES: usize = 4096;
const HASH_BYTES: usize = 32;
const DEADLINE: Duration = Duration::from_secs(10);

/// Lookups before the measured ones, so that caches and buffers have their size.
const WARM_UP: usize = 100;

/// Blocks in one `Put`: 4 MiB.
const PUT_BLOCKS: usize = 1024;

#[derive(Debug, Serialize)]
pub struct Row {
    pub op: &'static str,
    pub keys: usize,
    pub client: &'static str,
    pub transport: &'static str,
    pub rounds: usize,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
    /// Lookups that answered something else than they had to.
    pub errors: usize,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct LookupBench {
    /// Of a daemon that runs; none for a private one.
    pub socket_directory: Option<PathBuf>,
    /// Of one lookup: a row for hits and one for misses each.
    pub keys: Vec<usize>,
    pub rounds: usize,
}

pub async fn run(bench: &LookupBench) -> Result<Vec<Row>> {
    let largest = bench.keys.iter().copied().max().unwrap_or(0);
    if largest == 0 || bench.keys.contains(&0) || bench.rounds == 0 {
        return Err(
            Error::invalid("`--keys` and `--rounds` must be at least 1").hint("leave them out for the defaults")
        );
    }
    // Dropping the measurement ends the private daemon; so the signal is listened for before there is one.
    tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Err(Error::new(ErrorKind::Unavailable, "interrupted")),
        rows = measure(bench, largest) => rows,
    }
}

async fn measure(bench: &LookupBench, largest: usize) -> Result<Vec<Row>> {
    // Twice what the blocks need: extents of another size may be in use in a pool this small.
    let capacity_bytes = (2 * largest * BLOCK_BYTES).max(256 << 20);
    let mut private = None;
    let rpc = match &bench.socket_directory {
        Some(directory) => connect(directory, DEADLINE).await?,
        None => private.insert(PrivateDaemon::start(&capacity_bytes.to_string())?).connect().await?,
    };
    let mut engine = Engine::open(rpc).await?;
    let outcome = rows(&mut engine, bench, largest).await;
    engine.purge().await?;
    outcome
}

async fn rows(engine: &mut Engine, bench: &LookupBench, largest: usize) -> Result<Vec<Row>> {
    eprintln!("storing {largest} blocks of {BLOCK_BYTES} bytes");
    engine.store(largest).await?;
    let mut rows = Vec::new();
    for op in ["hit", "miss"] {
        for keys in &bench.keys {
            eprintln!("{op}: {} lookups of {keys} keys", bench.rounds);
            rows.push(engine.row(op, *keys, bench.rounds).await?);
        }
    }
    Ok(rows)
}

/// A client that does what an engine's scheduler does.
struct Engine {
    rpc: Rpc,
    session: u64,
    namespace: u32,
    namespace_id: Vec<u8>,
    /// The session lives as long as this stream.
    _events: Streaming<SessionEvent>,
}

impl Engine {
    async fn open(mut rpc: Rpc) -> Result<Engine> {
        let engine_id = format!("forebay-bench-{}", std::process::id());
        let mut events = rpc.open_session(lone_session(engine_id)).await.map_err(from_status)?.into_inner();
        let Some(Event::Welcome(welcome)) = events.message().await.map_err(from_status)?.and_then(|event| event.event)
        else {
            return Err(Error::new(ErrorKind::Io, "the session did not begin with a welcome"));
        };
        let fields =
            [("tenant", "bench"), ("purpose", "bench lookup")].map(|(name, value)| (name.into(), value.into()));
        let group = Group {
            group: 0,
            attention: Attention::Full.into(),
            tokens_per_block: 16,
            is_replicated: false,
            rank_bytes: vec![BLOCK_BYTES as u64],
        };
        let request = OpenNamespaceRequest { session: welcome.session, fields: fields.into(), groups: vec![group] };
        let reply = rpc.open_namespace(request).await.map_err(from_status)?.into_inner();
        let (session, namespace, namespace_id) = (welcome.session, reply.namespace, reply.namespace_id);
        Ok(Engine { rpc, session, namespace, namespace_id, _events: events })
    }

    async fn store(&mut self, count: usize) -> Result<()> {
        let mut predecessor = Vec::new();
        for first in (0..count).step_by(PUT_BLOCKS) {
            let numbers = first..count.min(first + PUT_BLOCKS);
            let block = |number| Block { hash: hash("hit", number).to_vec(), data: vec![number as u8; BLOCK_BYTES] };
            let blocks: Vec<Block> = numbers.map(block).collect();
            let last = blocks.last().map(|block| block.hash.clone()).unwrap_or_default();
            let (session, namespace) = (self.session, self.namespace);
            let request = PutRequest { session, namespace, group: 0, predecessor, blocks };
            let reply = self.rpc.put(request).await.map_err(from_status)?.into_inner();
            let is_there = |outcome| matches!(outcome, CommitOutcome::CommitStored | CommitOutcome::CommitDuplicate);
            if !reply.outcomes().all(is_there) {
                return Err(Error::new(ErrorKind::Full, "the daemon did not store all blocks of the benchmark")
                    .hint("give the daemon a larger pool, or leave out `--socket.directory`"));
            }
            predecessor = last;
        }
        Ok(())
    }

    async fn row(&mut self, op: &'static str, keys: usize, rounds: usize) -> Result<Row> {
        let hashes: Vec<u8> = (0..keys).flat_map(|number| hash(op, number)).collect();
        let expected = if op == "hit" { keys } else { 0 };
        let (mut times, mut errors) = (Vec::with_capacity(rounds), 0);
        for round in 0..WARM_UP + rounds {
            let (elapsed, reply) = self.lookup(hashes.clone()).await?;
            errors += usize::from(reply.groups.iter().map(|group| group.slots.len()).sum::<usize>() != expected);
            if reply.lease != 0 {
                let request = ReleaseRequest { session: self.session, leases: vec![reply.lease], ..Default::default() };
                self.rpc.release(request).await.map_err(from_status)?;
            }
            if round >= WARM_UP {
                times.push(elapsed);
            }
        }
        times.sort_unstable();
        let [p50_us, p99_us, max_us] = [0.5, 0.99, 1.0].map(|share| at(&times, share));
        Ok(Row { op, keys, client: "grpc", transport: "unix", rounds, p50_us, p99_us, max_us, errors })
    }

    async fn lookup(&mut self, hashes: Vec<u8>) -> Result<(Duration, LookupReply)> {
        let keys = GroupKeys { group: 0, hash_bytes: HASH_BYTES as u32, hashes };
        let request = LookupRequest { session: self.session, namespace: self.namespace, groups: vec![keys] };
        let start = Instant::now();
        let mut replies = self.rpc.lookup(request).await.map_err(from_status)?.into_inner();
        let reply = replies.message().await.map_err(from_status)?.unwrap_or_default();
        let elapsed = start.elapsed();
        // Nothing is promoted here. HTTP/2 closes a connection on which many streams were dropped before their end.
        while replies.message().await.map_err(from_status)?.is_some() {}
        Ok((elapsed, reply))
    }

    async fn purge(&mut self) -> Result<()> {
        let request = PurgeRequest { namespace_id: self.namespace_id.clone(), ..PurgeRequest::default() };
        self.rpc.purge(request).await.map(drop).map_err(from_status)
    }
}

/// As long as an engine's SHA-256, and as evenly spread over the index.
fn hash(op: &str, number: usize) -> [u8; HASH_BYTES] {
    let mut hash = [0; HASH_BYTES];
    for (at, word) in hash.chunks_exact_mut(8).enumerate() {
        let seed = format!("{op} {number} {at}");
        word.copy_from_slice(&forebay_core::checksum::checksum(seed.as_bytes()).to_le_bytes());
    }
    hash
}

/// The time below which `share` of the sorted times lie, in microseconds.
fn at(times: &[Duration], share: f64) -> f64 {
    let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1;
    times[index].as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_time_that_was_measured() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_micros).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| at(&times, share)), [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(at(&times[..1], 0.99), 1.0);
    }

    #[test]
    fn no_two_keys_are_alike() {
        let mut hashes: Vec<_> = (0..8192).flat_map(|number| [hash("hit", number), hash("miss", number)]).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 2 * 8192);
    }
}
