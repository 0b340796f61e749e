//! `forebay bench lookup`: how long one lookup takes over the socket, as an engine's scheduler asks it.
//!
//! Method: one client on one connection stores as many blocks of 4 KiB as the largest lookup asks for, and then
//! asks for all of them again and again, one lookup at a time. Measured is the round trip of `Lookup`: encoding,
//! socket, decoding, the core, the offsets back. A client without workers gets no lease, so none is in it. The `miss`
//! rows ask for as many keys that were never stored.
//!
//! Each lookup is followed by an empty call (`Ping`) on the same connection, with as many bytes each way: the baseline.
//! What the kernel, gRPC and the machine cost is in both, so only the ratios of p50 and p99 compare machines.
//!
//! The session is a trial: its blocks stay in the pool, count nowhere, and are gone before the rows are returned.

use std::path::PathBuf;
use std::pin::Pin;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::{Rpc, Trial, connect};
use forebay_rpc::proto::{
    Attention, Block, CommitOutcome, Group, GroupKeys, LookupReply, LookupRequest, PingRequest, PutRequest,
};
use forebay_rpc::{from_status, words};
use prost::Message;
use serde::Serialize;

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
    /// Of the empty calls between the lookups.
    pub empty_p50_us: f64,
    pub empty_p99_us: f64,
    /// Median lookup ÷ median empty call.
    pub ratio: f64,
    /// The same of the p99.
    pub p99_ratio: f64,
    /// Bytes of a lookup and of its reply, and of the empty call and its reply.
    pub request_bytes: usize,
    pub reply_bytes: usize,
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

/// Tells what goes on. If it is dropped, the private daemon ends.
///
/// In a box, so that the client is compiled in this crate, for speed as an engine's, and not in the command.
pub fn run<'a>(bench: &'a LookupBench, tell: &'a dyn Fn(&str)) -> Pin<Box<dyn Future<Output = Result<Vec<Row>>> + 'a>> {
    Box::pin(measure(bench, tell))
}

async fn measure(bench: &LookupBench, tell: &dyn Fn(&str)) -> Result<Vec<Row>> {
    let largest = bench.keys.iter().copied().max().unwrap_or(0);
    if largest == 0 || bench.keys.contains(&0) || bench.rounds == 0 {
        return Err(
            Error::invalid("`--keys` and `--rounds` must be at least 1").hint("leave them out for the defaults")
        );
    }
    // Twice what the blocks need: extents of another size may be in use in a pool this small.
    let capacity_bytes = (2 * largest * BLOCK_BYTES).max(256 << 20);
    let mut private = None;
    let rpc = match &bench.socket_directory {
        Some(directory) => connect(directory, DEADLINE).await?,
        None => private.insert(PrivateDaemon::start(&capacity_bytes.to_string())?).connect().await?,
    };
    let mut engine = Engine::open(rpc).await?;
    let outcome = rows(&mut engine, bench, largest, tell).await;
    engine.trial.end().await?;
    outcome
}

async fn rows(engine: &mut Engine, bench: &LookupBench, largest: usize, tell: &dyn Fn(&str)) -> Result<Vec<Row>> {
    tell(&format!("storing {largest} blocks of {BLOCK_BYTES} bytes"));
    engine.store(largest).await?;
    let mut rows = Vec::new();
    for op in ["hit", "miss"] {
        for keys in &bench.keys {
            tell(&format!("{op}: {} lookups of {keys} keys", bench.rounds));
            rows.push(engine.row(op, *keys, bench.rounds).await?);
        }
    }
    Ok(rows)
}

/// A client that asks what an engine's scheduler asks.
struct Engine {
    trial: Trial,
}

impl Engine {
    async fn open(rpc: Rpc) -> Result<Engine> {
        let group = Group {
            group: 0,
            attention: Attention::Full.into(),
            tokens_per_block: 16,
            is_replicated: false,
            rank_bytes: vec![BLOCK_BYTES as u64],
            window_blocks: 0,
        };
        Ok(Engine { trial: Trial::open(rpc, "bench lookup", group).await? })
    }

    async fn store(&mut self, count: usize) -> Result<()> {
        let mut predecessor = Vec::new();
        for first in (0..count).step_by(PUT_BLOCKS) {
            let numbers = first..count.min(first + PUT_BLOCKS);
            let block = |number| Block { hash: hash("hit", number).to_vec(), data: vec![number as u8; BLOCK_BYTES] };
            let blocks: Vec<Block> = numbers.map(block).collect();
            let last = blocks.last().map(|block| block.hash.clone()).unwrap_or_default();
            let Trial { session, namespace, .. } = self.trial;
            let request = PutRequest { session, namespace, group: 0, predecessor, blocks, lent: None };
            let reply = self.trial.rpc.put(request).await.map_err(from_status)?.into_inner();
            let is_there = |outcome| matches!(outcome, CommitOutcome::CommitStored | CommitOutcome::CommitDuplicate);
            if !reply.outcomes().all(is_there) {
                return Err(Error::new(
                    ErrorKind::Full,
                    "the pool has too little free memory for the benchmark's blocks",
                )
                .hint("leave out `--socket.directory`: no block of others is evicted for a benchmark"));
            }
            predecessor = last;
        }
        Ok(())
    }

    async fn row(&mut self, op: &'static str, keys: usize, rounds: usize) -> Result<Row> {
        let hashes: Vec<u8> = (0..keys).flat_map(|number| hash(op, number)).collect();
        let expected = if op == "hit" { keys } else { 0 };
        let keys_of = GroupKeys { group: 0, hash_bytes: HASH_BYTES as u32, hashes };
        let Trial { session, namespace, .. } = self.trial;
        let request = LookupRequest { session, namespace, groups: vec![keys_of] };
        let (_, reply) = self.lookup(&request).await?;
        let (request_bytes, reply_bytes) = (request.encoded_len(), reply.encoded_len());
        let ping = empty_call(request_bytes, reply_bytes);
        let (mut times, mut empty_times, mut errors) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds), 0);
        for round in 0..WARM_UP + rounds {
            let (elapsed, reply) = self.lookup(&request).await?;
            let empty_elapsed = self.ping(&ping).await?;
            let found: usize = reply.groups.iter().map(|group| words(&group.slots).len()).sum();
            errors += usize::from(found != expected);
            if round >= WARM_UP {
                times.push(elapsed);
                empty_times.push(empty_elapsed);
            }
        }
        times.sort_unstable();
        empty_times.sort_unstable();
        let [p50_us, p99_us, max_us] = [0.5, 0.99, 1.0].map(|share| at(&times, share));
        let [empty_p50_us, empty_p99_us] = [0.5, 0.99].map(|share| at(&empty_times, share));
        Ok(Row {
            op,
            keys,
            client: "grpc",
            transport: "unix",
            rounds,
            p50_us,
            p99_us,
            max_us,
            empty_p50_us,
            empty_p99_us,
            ratio: p50_us / empty_p50_us,
            p99_ratio: p99_us / empty_p99_us,
            request_bytes,
            reply_bytes,
            errors,
        })
    }

    async fn lookup(&mut self, request: &LookupRequest) -> Result<(Duration, LookupReply)> {
        let request = request.clone();
        let start = Instant::now();
        let mut replies = self.trial.rpc.lookup(request).await.map_err(from_status)?.into_inner();
        let reply = replies.message().await.map_err(from_status)?.unwrap_or_default();
        let elapsed = start.elapsed();
        // Nothing is promoted here. HTTP/2 closes a connection on which many streams were dropped before their end.
        while replies.message().await.map_err(from_status)?.is_some() {}
        Ok((elapsed, reply))
    }

    async fn ping(&mut self, request: &PingRequest) -> Result<Duration> {
        let request = request.clone();
        let start = Instant::now();
        let mut replies = self.trial.rpc.ping(request).await.map_err(from_status)?.into_inner();
        replies.message().await.map_err(from_status)?;
        let elapsed = start.elapsed();
        while replies.message().await.map_err(from_status)?.is_some() {}
        Ok(elapsed)
    }
}

/// A ping as long as `request_bytes`, whose reply is as long as `reply_bytes`, but for the few bytes of its own fields.
fn empty_call(request_bytes: usize, reply_bytes: usize) -> PingRequest {
    let ping = PingRequest { filler: vec![0; request_bytes], reply_bytes: reply_bytes as u32 };
    let own_bytes = ping.encoded_len() - request_bytes;
    PingRequest { filler: vec![0; request_bytes.saturating_sub(own_bytes)], ..ping }
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
    fn an_empty_call_is_as_long_as_the_lookup_it_is_compared_with() {
        for bytes in [20, 300, 32 << 10, 256 << 10] {
            let ping = empty_call(bytes, 9 * bytes / 32);
            assert!(ping.encoded_len().abs_diff(bytes) <= 1, "{} of {bytes}", ping.encoded_len());
        }
    }

    #[test]
    fn no_two_keys_are_alike() {
        let mut hashes: Vec<_> = (0..8192).flat_map(|number| [hash("hit", number), hash("miss", number)]).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 2 * 8192);
    }
}
