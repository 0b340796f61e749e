//! `forebay bench transfer`: how fast bytes go from one process's memory to another's, beside plain sockets.
//!
//! Method: two processes, each with memory of which half is filled with a pattern. This side keeps `depth` operations
//! under way, each of `segments` segments; the other only serves. Memory and connections are set up before the clock
//! starts. After each run the bytes that moved are compared with the pattern, by who has them.
//!
//! Each run is followed or preceded by one of the baseline, with as many bytes in as many requests: over TCP, one
//! blocking socket for each direction between the same two processes (a request of 16 bytes, then the bytes); on shared
//! memory, a copy out of a mapped file. Other engines run in the same turn, if there are any. The ratio is the median
//! over these pairs. CPU time is that of all threads of both processes.

mod other;
mod pattern;
mod peer;
mod plain;
mod shape;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::{
    Address, Descriptor, Event, Fabric, Memory, OpId, Operation, Options, PeerId, RegionId, RemoteId, Rights, Segment,
    Verb,
};
use serde::Serialize;

pub use self::other::serve;
use self::other::{Ask, Tell};
use self::pattern::{fill, wrong_bytes};
pub use self::peer::{Missing, PEERS, Peer};
use self::plain::Plain;
pub use self::shape::Direction;
use self::shape::{MOST_MEMORY_BYTES, Shape, cpu_s, odd};

/// Until the other side answers a question between the runs, or an operation ends.
const PATIENCE: Duration = Duration::from_secs(60);
/// What to measure.
#[derive(Clone, Debug)]
pub struct TransferBench {
    pub directions: Vec<Direction>,
    /// Of one segment.
    pub sizes_bytes: Vec<u64>,
    pub depths: Vec<u64>,
    /// Of one operation.
    pub segments: Vec<u64>,
    /// Moved in each run and direction.
    pub run_bytes: u64,
    pub pairs: usize,
    pub options: Options,
}

impl Default for TransferBench {
    fn default() -> TransferBench {
        TransferBench {
            directions: vec![Direction::Read],
            sizes_bytes: (12..=26).step_by(2).map(|log| 1 << log).collect(),
            depths: vec![1, 8],
            segments: vec![1],
            run_bytes: 256 << 20,
            pairs: 5,
            options: Options::default(),
        }
    }
}

impl TransferBench {
    pub fn rows(&self) -> usize {
        self.directions.len() * self.sizes_bytes.len() * self.depths.len() * self.segments.len()
    }

    /// At most, by transport and baseline, in the runs that count and in one before them.
    pub fn moved_bytes(&self) -> u64 {
        (2 * self.rows() as u64).saturating_mul(self.pairs as u64 + 1).saturating_mul(self.run_bytes)
    }

    /// Of each side: for what reads use, and as much for what writes use.
    pub fn memory_bytes(&self) -> Result<u64> {
        let shape = [&self.sizes_bytes, &self.segments, &self.depths];
        let largest = shape.iter().map(|values| values.iter().max().copied().unwrap_or(0));
        let bytes = largest.fold(2, u64::saturating_mul);
        let is_empty = shape.iter().any(|values| values.contains(&0));
        if is_empty || bytes == 0 || bytes > MOST_MEMORY_BYTES || self.pairs == 0 || self.run_bytes == 0 {
            let error = Error::invalid("a shape without bytes, or with too many").with("bytes", bytes);
            return Err(error.hint("size x segments x depth is at most 1 GiB, and pairs and bytes of a run at least 1"));
        }
        Ok(bytes)
    }
}

/// Medians over the runs of one shape, beside one baseline. 1 GB is 10^9 bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub transport: &'static str,
    pub direction: &'static str,
    pub size_bytes: u64,
    pub segments: u64,
    pub depth: u64,
    /// In one run.
    pub operations: u64,
    pub gb_per_s: f64,
    /// `sockets` or `memcpy`, or the name of a peer.
    pub baseline: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline_version: Option<String>,
    pub baseline_gb_per_s: f64,
    /// Of each pair of runs, the median.
    pub ratio: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub baseline_p50_us: f64,
    pub baseline_p99_us: f64,
    /// Of both sides.
    pub cpu_s_per_gb: f64,
    pub baseline_cpu_s_per_gb: f64,
    pub cpu_ratio: f64,
    /// Bytes that were compared with the pattern, in all runs.
    pub verified_bytes: u64,
    pub wrong_bytes: u64,
    /// The same of a peer.
    pub baseline_verified_bytes: u64,
    pub baseline_wrong_bytes: u64,
}

/// One run.
struct Run {
    seconds: f64,
    cpu_s: f64,
    latencies_us: Vec<f64>,
}

impl Run {
    fn gb_per_s(&self, shape: Shape) -> f64 {
        self.gb(shape) / self.seconds
    }

    fn cpu_s_per_gb(&self, shape: Shape) -> f64 {
        self.cpu_s / self.gb(shape)
    }

    /// A peer's run may have fewer operations than the shape asks for.
    fn gb(&self, shape: Shape) -> f64 {
        (self.latencies_us.len() as u64 * shape.op_bytes()) as f64 / 1e9
    }
}

/// What a shape is compared with, and its runs.
struct Beside {
    name: &'static str,
    version: Option<String>,
    runs: Vec<Run>,
    verified_bytes: u64,
    wrong_bytes: u64,
}

/// Measures against the endpoint at `address`, which [`serve`] drives, and beside the peers. Calls `on_row` as rows are
/// done: for each shape one with the baseline, and one with each peer.
pub fn run(
    bench: &TransferBench,
    address: &Address,
    peers: &mut [Peer],
    on_row: &mut dyn FnMut(&Row),
) -> Result<Vec<Row>> {
    let mut side = Side::connect(bench, address, bench.memory_bytes()?)?;
    let mut rows = Vec::new();
    for direction in &bench.directions {
        for segments in &bench.segments {
            for depth in &bench.depths {
                for size_bytes in &bench.sizes_bytes {
                    let most = bench.run_bytes / (size_bytes * segments);
                    // Few enough of the small ones that a row takes seconds, and each slot twice of the large ones.
                    let operations = most.min(20_000).max(2 * depth);
                    let (size_bytes, segments, depth) = (*size_bytes, *segments, *depth);
                    let shape = Shape { direction: *direction, size_bytes, segments, depth, operations };
                    let found = side.rows(shape, bench.pairs, peers)?;
                    found.iter().for_each(&mut *on_row);
                    rows.extend(found);
                }
            }
        }
    }
    Ok(rows)
}

/// This side of the measurement.
struct Side {
    fabric: Fabric,
    peer: PeerId,
    memory: Arc<Memory>,
    region: RegionId,
    remote: RemoteId,
    events: Vec<Event>,
    transport: &'static str,
    baseline: Baseline,
}

enum Baseline {
    /// Sockets beside the fabric.
    Sockets(Plain),
    /// A mapped file as long as the memory.
    Memcpy(Memory),
}

impl Side {
    fn connect(bench: &TransferBench, address: &Address, memory_bytes: u64) -> Result<Side> {
        let mut fabric = Fabric::new(bench.options.clone())?;
        let peer = fabric.connect(address)?;
        let memory = Arc::new(Memory::allocate(memory_bytes)?);
        let region = fabric.register(&memory, 0, memory_bytes, Rights::NONE)?;
        let (remote, baseline) = (RemoteId(0), Baseline::Memcpy(Memory::allocate(memory_bytes)?));
        let transport = match address {
            Address::Tcp(_) if bench.options.encrypt => "tcp+tls",
            Address::Tcp(_) => "tcp",
            Address::Ucx(_) => "ucx",
            Address::Shm(_) => "shm",
        };
        let mut side = Side { fabric, peer, memory, region, remote, events: Vec::new(), transport, baseline };
        side.until(|event| match event {
            Event::Up { .. } => Some(Ok(())),
            Event::Gone { reason, .. } => Some(Err(std::mem::replace(reason, Error::invalid("")))),
            _ => None,
        })??;
        let Tell::Prepared { descriptor, port } = side.ask(&Ask::Prepare { bytes: memory_bytes })? else {
            return Err(odd());
        };
        side.remote = side.fabric.import(peer, &Descriptor::from_bytes(&descriptor)?)?;
        if let Address::Tcp(there) | Address::Ucx(there) = address {
            side.baseline = Baseline::Sockets(Plain::connect((there.ip(), port).into(), memory_bytes / 2)?);
        }
        Ok(side)
    }

    fn rows(&mut self, shape: Shape, pairs: usize, peers: &mut [Peer]) -> Result<Vec<Row>> {
        let transport = self.transport;
        let baseline = match &self.baseline {
            Baseline::Sockets(_) => "sockets",
            Baseline::Memcpy(_) => "memcpy",
        };
        let names = peers.iter().map(|peer| (peer.name, Some(peer.version.clone())));
        let beside = |(name, version)| Beside { name, version, runs: Vec::new(), verified_bytes: 0, wrong_bytes: 0 };
        let mut besides: Vec<Beside> = std::iter::once((baseline, None)).chain(names).map(beside).collect();
        let mut ours = Vec::new();
        let (mut verified_bytes, mut wrong_bytes) = (0, 0);
        // One that is not counted: connections and caches get warm, and a mapping comes into being.
        for pair in 0..pairs + 1 {
            let seed = pair as u64;
            self.clear(shape, seed)?;
            // This side, the baseline, and the peers; and backwards.
            let mut turns: Vec<usize> = (0..peers.len() + 2).collect();
            if pair % 2 == 0 {
                turns.reverse();
            }
            for turn in turns {
                let (runs, run) = match turn {
                    0 => (&mut ours, self.run_fabric(shape)?),
                    1 => (&mut besides[0].runs, self.run_baseline(shape)?),
                    _ => {
                        let beside = &mut besides[turn - 1];
                        let (run, wrong) = peers[turn - 2].run(shape, seed)?;
                        beside.verified_bytes += shape.half_bytes();
                        beside.wrong_bytes += wrong;
                        (&mut beside.runs, run)
                    }
                };
                if pair > 0 {
                    runs.push(run);
                }
            }
            let (compared, wrong) = self.compare(shape, seed)?;
            (verified_bytes, wrong_bytes) = (verified_bytes + compared, wrong_bytes + wrong);
        }
        let rate = |run: &Run| run.gb_per_s(shape);
        let cpu = |run: &Run| run.cpu_s_per_gb(shape);
        let at = |runs: &[Run], share: f64| median(runs.iter().map(|run| percentile(&run.latencies_us, share)));
        let row = |beside: Beside| {
            let theirs = &beside.runs;
            let ratios = |of: &dyn Fn(&Run) -> f64| median(ours.iter().zip(theirs).map(|(a, b)| of(a) / of(b)));
            Row {
                transport,
                direction: shape.direction.name(),
                size_bytes: shape.size_bytes,
                segments: shape.segments,
                depth: shape.depth,
                operations: shape.operations,
                gb_per_s: median(ours.iter().map(rate)),
                baseline_gb_per_s: median(theirs.iter().map(rate)),
                ratio: ratios(&rate),
                p50_us: at(&ours, 0.5),
                p99_us: at(&ours, 0.99),
                baseline_p50_us: at(theirs, 0.5),
                baseline_p99_us: at(theirs, 0.99),
                cpu_s_per_gb: median(ours.iter().map(cpu)),
                baseline_cpu_s_per_gb: median(theirs.iter().map(cpu)),
                cpu_ratio: ratios(&cpu),
                verified_bytes,
                wrong_bytes,
                baseline_verified_bytes: beside.verified_bytes,
                baseline_wrong_bytes: beside.wrong_bytes,
                baseline: beside.name,
                baseline_version: beside.version,
            }
        };
        Ok(besides.into_iter().map(row).collect())
    }

    /// Fills what is to be moved with the pattern, and what it moves to with zeros.
    fn clear(&mut self, shape: Shape, seed: u64) -> Result<()> {
        let half = shape.half_bytes();
        fill(&self.memory, 0, half, None);
        fill(&self.memory, half, half, Some(seed));
        self.ask(&Ask::Fill { half, seed }).map(drop)
    }

    /// Bytes that were compared, and those that were wrong.
    fn compare(&mut self, shape: Shape, seed: u64) -> Result<(u64, u64)> {
        let half = shape.half_bytes();
        let mut found = (0, 0);
        for verb in shape.direction.verbs() {
            found.0 += half;
            found.1 += match verb {
                Verb::Read => wrong_bytes(&self.memory, 0, half, seed),
                Verb::Write => match self.ask(&Ask::Compare { half, seed })? {
                    Tell::Compared { wrong } => wrong,
                    _ => return Err(odd()),
                },
            };
        }
        Ok(found)
    }

    fn run_fabric(&mut self, shape: Shape) -> Result<Run> {
        let before = self.cpu_of_both()?;
        let mut latencies_us = Vec::with_capacity(shape.operations as usize);
        let mut under_way: HashMap<OpId, (Verb, u64, Instant)> = HashMap::new();
        let mut left: HashMap<bool, u64> =
            shape.direction.verbs().iter().map(|verb| (*verb == Verb::Write, shape.operations)).collect();
        let start = Instant::now();
        let mut begin = |side: &mut Side, verb: Verb, slot: u64| -> Result<Option<(OpId, Instant)>> {
            let left = left.get_mut(&(verb == Verb::Write)).expect("a direction of this shape");
            if *left == 0 {
                return Ok(None);
            }
            *left -= 1;
            let now = Instant::now();
            Ok(Some((side.submit(shape, verb, slot)?, now)))
        };
        for slot in 0..shape.depth {
            for verb in shape.direction.verbs() {
                if let Some((op, now)) = begin(self, *verb, slot)? {
                    under_way.insert(op, (*verb, slot, now));
                }
            }
        }
        let mut events = Vec::new();
        while !under_way.is_empty() {
            self.fabric.poll(Some(PATIENCE), &mut events)?;
            if events.is_empty() {
                return Err(Error::new(ErrorKind::Timeout, "a transfer did not end"));
            }
            for event in events.drain(..) {
                let Event::Done { op, result } = event else { continue };
                result?;
                let (verb, slot, began) = under_way.remove(&op).expect("it was submitted");
                let now = Instant::now();
                latencies_us.push((now - began).as_secs_f64() * 1e6);
                if let Some((op, now)) = begin(self, verb, slot)? {
                    under_way.insert(op, (verb, slot, now));
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Run { seconds, cpu_s: self.cpu_of_both()? - before, latencies_us })
    }

    fn submit(&mut self, shape: Shape, verb: Verb, slot: u64) -> Result<OpId> {
        let base = slot * shape.op_bytes() + if verb == Verb::Write { shape.half_bytes() } else { 0 };
        // Backwards, so that no two segments follow each other.
        let segment = |at: u64| {
            let offset = base + (shape.segments - 1 - at) * shape.size_bytes;
            let (local, remote, bytes) = (self.region, self.remote, shape.size_bytes);
            Segment { local, local_offset: offset, remote, remote_offset: offset, bytes }
        };
        let segments = (0..shape.segments).map(segment).collect();
        self.fabric.submit(Operation { peer: self.peer, verb, segments, deadline: None, notice: None })
    }

    fn run_baseline(&mut self, shape: Shape) -> Result<Run> {
        let before = self.cpu_of_both()?;
        let (seconds, latencies_us) = match &mut self.baseline {
            Baseline::Sockets(plain) => plain.run(shape)?,
            Baseline::Memcpy(file) => copies(file, shape),
        };
        Ok(Run { seconds, cpu_s: self.cpu_of_both()? - before, latencies_us })
    }

    fn cpu_of_both(&mut self) -> Result<f64> {
        match self.ask(&Ask::Cpu)? {
            Tell::Cpu { seconds } => Ok(seconds + cpu_s()),
            _ => Err(odd()),
        }
    }

    /// A question and its answer.
    fn ask(&mut self, ask: &Ask) -> Result<Tell> {
        self.fabric.send(self.peer, serde_json::to_vec(ask).expect("a question is JSON"))?;
        let bytes = self.until(|event| match event {
            Event::Message { bytes, .. } => Some(Ok(std::mem::take(bytes))),
            Event::Gone { reason, .. } => Some(Err(std::mem::replace(reason, Error::invalid("")))),
            _ => None,
        })??;
        self.fabric.taken(self.peer);
        serde_json::from_slice(&bytes).map_err(|error| odd().source(error))
    }

    fn until<T>(&mut self, mut is_it: impl FnMut(&mut Event) -> Option<T>) -> Result<T> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.fabric.poll(Some(PATIENCE), &mut self.events)?;
            if let Some(found) = self.events.drain(..).find_map(|mut event| is_it(&mut event)) {
                return Ok(found);
            }
            if Instant::now() > end {
                let error = Error::new(ErrorKind::Timeout, "the other side of the measurement does not answer");
                return Err(error.hint("does `forebay bench transfer --listen` run there?"));
            }
        }
    }
}

/// The baseline of shared memory: as many copies of as many bytes, from one half of a mapped file to the other.
fn copies(file: &Memory, shape: Shape) -> (f64, Vec<f64>) {
    let start = Instant::now();
    let mut latencies_us = Vec::with_capacity(shape.operations as usize);
    for number in 0..shape.operations {
        for _ in shape.direction.verbs() {
            let began = Instant::now();
            let base = number % shape.depth * shape.op_bytes();
            for at in (0..shape.segments).rev() {
                let offset = base + at * shape.size_bytes;
                Memory::copy((file, shape.half_bytes() + offset), (file, offset), shape.size_bytes);
            }
            latencies_us.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    (start.elapsed().as_secs_f64(), latencies_us)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

fn percentile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}
