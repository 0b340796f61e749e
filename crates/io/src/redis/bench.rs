//! `forebay bench redis`: the speed of a tier and its server, and the CPU time of both.
//!
//! It stores and loads blocks through [`Tier`] as a daemon would, with as many at once as fit into [`AT_ONCE_BYTES`]
//! or as configured, over a working set much larger than any cache. Lookups of a batch are compared with lookups of
//! the same keys one by one, by a plain client on a connection of its own. The server's CPU time comes from the
//! kernel's account of its threads, if it runs on this machine.
//!
//! Invariants: written blocks are removed at the end. Every loaded block is compared with its checksum within the
//! measured time, since the tier does so.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_core::checksum::{Checksum, checksum};
use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome, Tier};
use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, Generation, NamespaceId, PAGE_BYTES, Result, SlotId};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::time::{ClockId, clock_gettime};

use super::address::Address;
use super::config::{RedisConfig, Settings};
use super::event_loop::greeting;
use super::resp;
use super::tier::Redis;
use crate::uring::Region;

/// Total size of the blocks that are in flight at once.
const AT_ONCE_BYTES: u64 = 64 << 20;
/// After this long without a completion, the server is given up.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a row measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Blocks are loaded.
    Get,
    /// Blocks are stored.
    Set,
}

/// The parameters of a measurement.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// The servers, and the settings of the tier that is measured.
    pub redis: RedisConfig,
    /// Measured in this order for each size.
    pub directions: Vec<Direction>,
    /// Block sizes, each with rows of its own.
    pub sizes_bytes: Vec<u64>,
    /// Runs of each row.
    pub runs: usize,
    /// Bytes moved in each run.
    pub run_bytes: u64,
    /// Blocks that are stored, loaded repeatedly, and removed.
    pub working_set_bytes: u64,
    /// Maximum of operations in flight; without it, as many as fit into [`AT_ONCE_BYTES`]. One measures a round trip.
    pub at_once: Option<u64>,
    /// Keys per lookup; none for no lookups.
    pub lookup_keys: u64,
    /// Set by another thread to end the measurement early; what it wrote is removed then too.
    pub stop: Arc<AtomicBool>,
}

impl BenchConfig {
    /// Both directions of 256 KiB to 16 MiB, five runs of 1 GiB each, and lookups of 512 keys.
    pub fn new(redis: RedisConfig) -> BenchConfig {
        BenchConfig {
            redis,
            directions: vec![Direction::Set, Direction::Get],
            sizes_bytes: vec![256 << 10, 1 << 20, 4 << 20, 16 << 20],
            runs: 5,
            run_bytes: 1 << 30,
            working_set_bytes: 128 << 20,
            at_once: None,
            lookup_keys: 512,
            stop: Arc::default(),
        }
    }

    /// Bytes that a measurement moves.
    pub fn moved_bytes(&self) -> u64 {
        let runs = (self.directions.len() * self.runs) as u64;
        let each = runs.saturating_mul(self.run_bytes).saturating_add(self.working_set_bytes);
        each.saturating_mul(self.sizes_bytes.len() as u64)
    }
}

/// One run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Bytes of blocks over the time of the run, in units of 10⁹ bytes.
    pub gb_per_s: f64,
    /// CPU time of this process with the kernel's work for it.
    pub client_cpu_s_per_gb: f64,
    /// None if the server is on another machine.
    pub server_cpu_s_per_gb: Option<f64>,
}

impl Sample {
    /// Sum of client and server.
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.client_cpu_s_per_gb + self.server_cpu_s_per_gb.unwrap_or(0.0)
    }
}

/// One direction and size.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Whether blocks were stored or loaded.
    pub direction: Direction,
    /// Bytes of each block.
    pub size_bytes: u64,
    /// Maximum of operations in flight, over all connections.
    pub depth: u64,
    /// In the order of the runs.
    pub samples: Vec<Sample>,
    /// From submission to completion, over all runs, ascending.
    pub latencies_us: Vec<u64>,
    /// Operations with an unexpected outcome.
    pub errors: u64,
}

impl Row {
    /// Median over the runs.
    pub fn gb_per_s(&self) -> f64 {
        median(self.samples.iter().map(|sample| sample.gb_per_s))
    }

    /// Median over the runs, client and server together.
    pub fn cpu_s_per_gb(&self) -> f64 {
        median(self.samples.iter().map(Sample::cpu_s_per_gb))
    }

    /// A percentile over all runs; 0 if nothing completed.
    pub fn latency_us(&self, percent: usize) -> u64 {
        percentile(&self.latencies_us, percent)
    }
}

/// A batch of lookups, compared with one round trip per key.
#[derive(Clone, PartialEq, Debug)]
pub struct Lookups {
    /// Keys in one batch.
    pub keys: u64,
    /// Median time from a batch's submission to its last completion.
    pub p50_us: u64,
    /// The same, as the 99th percentile.
    pub p99_us: u64,
    /// The same keys one by one, by a plain client.
    pub one_by_one_p50_us: u64,
    /// Lookups that were refused or did not find their key.
    pub errors: u64,
}

/// All that a measurement found.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// One for each size and direction, in the order of the runs.
    pub rows: Vec<Row>,
    /// None if no lookups were asked for.
    pub lookups: Option<Lookups>,
}

/// Measures all rows, and passes each to `tell` when it is done.
pub fn run(config: &BenchConfig, mut tell: impl FnMut(&Row)) -> Result<Report> {
    let mut plain = Plain::connect(&Settings::of(&config.redis)?)?;
    let server = plain.local_pid();
    let mut rows = Vec::new();
    for size_bytes in &config.sizes_bytes {
        let mut rig = Rig::open(config, *size_bytes)?;
        let measured = rig.rows(config, server, |row| {
            tell(&row);
            rows.push(row);
        });
        rig.remove_all_after(measured)?;
    }
    let lookups = (config.lookup_keys > 0).then(|| lookups(config, &mut plain)).transpose()?;
    Ok(Report { rows, lookups })
}

/// The best block size by store and load speed together: the largest size within 5 % of the best, since fewer values
/// cost the server less.
pub fn sweet_spot(rows: &[Row]) -> Option<u64> {
    let speed = |size: u64| {
        let of_size = rows.iter().filter(|row| row.size_bytes == size);
        1.0 / of_size.map(|row| 1.0 / row.gb_per_s()).sum::<f64>()
    };
    let best = rows.iter().map(|row| speed(row.size_bytes)).fold(0.0, f64::max);
    rows.iter().map(|row| row.size_bytes).filter(|size| speed(*size) >= 0.95 * best).max()
}

/// A tier, and blocks of one size.
struct Rig {
    redis: Redis,
    pool: Region,
    namespace: NamespaceId,
    size_bytes: u64,
    slot_bytes: u64,
    blocks: u64,
    at_once: u64,
    checksums: Vec<u64>,
    next_id: u64,
    latencies_us: Vec<u64>,
    errors: u64,
    stop: Arc<AtomicBool>,
}

impl Rig {
    fn open(config: &BenchConfig, size_bytes: u64) -> Result<Rig> {
        let slot_bytes = size_bytes.next_multiple_of(PAGE_BYTES);
        let blocks = (config.working_set_bytes / slot_bytes).max(2);
        let at_once = config.at_once.unwrap_or((AT_ONCE_BYTES / size_bytes).clamp(2, 256));
        let queues = config.redis.queued_loads.min(config.redis.queued_stores);
        let pool = Region::anonymous((blocks * slot_bytes) as usize)
            .map_err(|error| Error::new(ErrorKind::Full, "cannot get memory for blocks").source(error))?;
        pool.want_huge_pages();
        let mut rig = Rig {
            redis: Redis::open(&config.redis, pool.clone())?,
            pool,
            namespace: NamespaceId(u128::from(std::process::id()) << 64 | u128::from(size_bytes)),
            size_bytes,
            slot_bytes,
            blocks,
            at_once: at_once.clamp(1, blocks).min(queues as u64),
            checksums: Vec::new(),
            next_id: 0,
            latencies_us: Vec::new(),
            errors: 0,
            stop: config.stop.clone(),
        };
        rig.fill();
        Ok(rig)
    }

    fn fill(&mut self) {
        let (mut state, mut page) = (self.size_bytes | 1, vec![0; 64 << 10]);
        for block in 0..self.blocks {
            let mut at = 0;
            while at < self.slot_bytes {
                for word in page.chunks_exact_mut(8) {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    word.copy_from_slice(&state.to_le_bytes());
                }
                let some = (self.slot_bytes - at).min(page.len() as u64);
                self.pool.write(block * self.slot_bytes + at, &page[..some as usize]);
                at += some;
            }
            let mut sum = Checksum::new();
            self.pool.sum(&mut sum, block * self.slot_bytes, self.size_bytes as usize);
            self.checksums.push(sum.finish());
        }
    }

    fn rows(&mut self, config: &BenchConfig, server: Option<u32>, mut tell: impl FnMut(Row)) -> Result<()> {
        // This provides blocks to load.
        self.pass(Direction::Set, self.blocks)?;
        for direction in &config.directions {
            tell(self.measure(*direction, config, server)?);
        }
        Ok(())
    }

    fn measure(&mut self, direction: Direction, config: &BenchConfig, server: Option<u32>) -> Result<Row> {
        (self.latencies_us, self.errors) = (Vec::new(), 0);
        let count = config.run_bytes.div_ceil(self.size_bytes);
        let mut samples = Vec::new();
        for _ in 0..config.runs {
            let (begun, client, server_before) = (Instant::now(), own_cpu(), server.and_then(cpu_of));
            self.pass(direction, count)?;
            let gb = (count * self.size_bytes) as f64 / 1e9;
            let server_cpu = server.and_then(cpu_of).zip(server_before).map(|(after, before)| after - before);
            samples.push(Sample {
                gb_per_s: gb / begun.elapsed().as_secs_f64(),
                client_cpu_s_per_gb: (own_cpu() - client).as_secs_f64() / gb,
                server_cpu_s_per_gb: server_cpu.map(|cpu| cpu.as_secs_f64() / gb),
            });
        }
        self.latencies_us.sort_unstable();
        Ok(Row {
            direction,
            size_bytes: self.size_bytes,
            depth: self.at_once,
            samples,
            latencies_us: std::mem::take(&mut self.latencies_us),
            errors: self.errors,
        })
    }

    /// Moves `count` blocks with a constant number in flight.
    fn pass(&mut self, direction: Direction, count: u64) -> Result<()> {
        let (mut submitted, mut ended) = (0, 0);
        let mut begun = vec![Instant::now(); count as usize];
        let first_id = self.next_id;
        let mut completions = Vec::new();
        while ended < count {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Unavailable, "the measurement was stopped"));
            }
            // In batches rather than one by one.
            if submitted < count && (submitted - ended) * 2 <= self.at_once {
                let most = (self.at_once - (submitted - ended)).min(count - submitted);
                let ops: Vec<_> =
                    (submitted..submitted + most).map(|at| self.operation(direction, at % self.blocks)).collect();
                let now = Instant::now();
                let taken = self.redis.submit(&ops) as u64;
                assert_eq!(taken, most, "no more is in flight than the tier's queues hold");
                begun[submitted as usize..][..taken as usize].fill(now);
                submitted += taken;
            }
            self.wait(&mut completions)?;
            for Completion { id, outcome } in completions.drain(..) {
                let is_good = matches!(outcome, Outcome::Stored | Outcome::Loaded { .. });
                self.errors += u64::from(!is_good);
                self.latencies_us.push(begun[(id.0 - first_id - 1) as usize].elapsed().as_micros() as u64);
                ended += 1;
            }
        }
        Ok(())
    }

    fn wait(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let woken = rustix::event::poll(&mut [PollFd::new(&self.redis.wake_fd(), PollFlags::IN)], Some(&patience));
        self.redis.poll(completions);
        if woken == Ok(0) && completions.is_empty() {
            return Err(Error::new(ErrorKind::Timeout, "the server has not answered for 30 s"));
        }
        Ok(())
    }

    fn operation(&mut self, direction: Direction, block: u64) -> Operation {
        self.next_id += 1;
        let kind = match direction {
            Direction::Get => OpKind::Load,
            Direction::Set => OpKind::Store,
        };
        Operation {
            id: OpId(self.next_id),
            kind,
            key: key(self.namespace, block),
            slot: Some((SlotId((block * self.slot_bytes / PAGE_BYTES) as u32), Generation(0))),
            length_bytes: self.size_bytes,
            checksum: self.checksums[block as usize],
            lineage: None,
        }
    }

    /// Nothing stays at the server, whether or not the measurement failed; it tells more than the removal then.
    fn remove_all_after<T>(&mut self, measured: Result<T>) -> Result<T> {
        let removed = self.remove_all();
        measured.and_then(|measured| removed.map(|()| measured))
    }

    fn remove_all(&mut self) -> Result<()> {
        let mut completions = Vec::new();
        for block in 0..self.blocks {
            let op = self.operation(Direction::Get, block);
            let op = Operation { kind: OpKind::Remove, slot: None, ..op };
            while self.redis.submit(&[op]) == 0 {
                self.wait(&mut completions)?;
            }
        }
        match self.redis.drain(PATIENCE, &mut completions) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Timeout, "cannot remove the values of the benchmark from the server")),
        }
    }
}

fn lookups(config: &BenchConfig, plain: &mut Plain) -> Result<Lookups> {
    let small = BenchConfig { working_set_bytes: config.lookup_keys * PAGE_BYTES, at_once: None, ..config.clone() };
    let mut rig = Rig::open(&small, PAGE_BYTES)?;
    let measured = time_lookups(&mut rig, config, plain);
    rig.remove_all_after(measured)
}

fn time_lookups(rig: &mut Rig, config: &BenchConfig, plain: &mut Plain) -> Result<Lookups> {
    rig.pass(Direction::Set, rig.blocks)?;
    let (mut batches, mut singles, mut completions) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..(config.runs * 40).max(100) {
        let ops: Vec<_> = (0..config.lookup_keys)
            .map(|block| Operation { kind: OpKind::Exists, slot: None, ..rig.operation(Direction::Get, block) })
            .collect();
        let begun = Instant::now();
        let mut ended = rig.redis.submit(&ops) as u64;
        rig.errors += config.lookup_keys - ended;
        while ended > 0 {
            rig.wait(&mut completions)?;
            for completion in completions.drain(..) {
                rig.errors += u64::from(!matches!(completion.outcome, Outcome::Found));
                ended -= 1;
            }
        }
        batches.push(begun.elapsed().as_micros() as u64);
    }
    let mut name = Vec::new();
    for _ in 0..config.runs.max(5) {
        let begun = Instant::now();
        for block in 0..config.lookup_keys {
            config.redis.write_name(&mut name, &key(rig.namespace, block), 0);
            plain.ask(&[b"EXISTS", &name])?;
        }
        singles.push(begun.elapsed().as_micros() as u64);
    }
    batches.sort_unstable();
    singles.sort_unstable();
    Ok(Lookups {
        keys: config.lookup_keys,
        p50_us: percentile(&batches, 50),
        p99_us: percentile(&batches, 99),
        one_by_one_p50_us: percentile(&singles, 50),
        errors: rig.errors,
    })
}

fn key(namespace: NamespaceId, block: u64) -> BlockKey {
    // As long as the hashes of engines.
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&checksum(&block.to_le_bytes()).to_le_bytes());
    BlockKey { namespace, group: 0, hash: BlockHash::new(&hash).expect("32 bytes are a hash") }
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A client that waits for each reply.
struct Plain {
    stream: BufReader<Box<dyn Stream>>,
    is_local: bool,
    command: Vec<u8>,
}

impl Plain {
    fn connect(settings: &Settings) -> Result<Plain> {
        let address = &settings.addresses[0];
        let cannot = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, "cannot connect to the server").with("server", address).source(error)
        };
        if settings.access.tls.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "lookups with one round trip for each key cannot be measured over TLS",
            )
            .hint("measure with `redis://` or `unix://`"));
        }
        let (stream, is_local): (Box<dyn Stream>, _) = match address {
            Address::Unix(path) => (Box::new(UnixStream::connect(path).map_err(cannot)?), true),
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).map_err(cannot)?;
                stream.set_nodelay(true).map_err(cannot)?;
                let is_local = stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
                (Box::new(stream), is_local)
            }
        };
        let mut plain = Plain { stream: BufReader::new(stream), is_local, command: Vec::new() };
        let greeting = greeting(settings);
        plain.command = greeting.bytes;
        for reply in plain.exchange(greeting.commands).map_err(cannot)? {
            if let Some(error) = reply.strip_prefix('-') {
                let reply = resp::said(error.trim_end().as_bytes());
                return Err(Error::new(ErrorKind::Unavailable, "the server refused the benchmark").with("reply", reply));
            }
        }
        Ok(plain)
    }

    fn ask(&mut self, arguments: &[&[u8]]) -> Result<String> {
        self.command.clear();
        resp::command(&mut self.command, arguments);
        let replies = self.exchange(1);
        let reply = replies.map_err(|error| Error::new(ErrorKind::Io, "the server does not answer").source(error))?;
        Ok(reply.into_iter().next().unwrap_or_default())
    }

    fn exchange(&mut self, replies: usize) -> std::io::Result<Vec<String>> {
        self.stream.get_mut().write_all(&self.command)?;
        (0..replies).map(|_| self.read()).collect()
    }

    /// A reply that is not an array.
    fn read(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let Some(len) = line.strip_prefix('$').and_then(|len| len.trim_end().parse::<usize>().ok()) else {
            return Ok(line);
        };
        let mut bytes = vec![0; len + 2];
        self.stream.read_exact(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The server's process, if it runs on this machine.
    fn local_pid(&mut self) -> Option<u32> {
        let info = self.ask(&[b"INFO", b"server"]).ok()?;
        let pid = info.lines().find_map(|line| line.strip_prefix("process_id:"))?.trim().parse().ok()?;
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        (self.is_local && (comm.contains("redis") || comm.contains("valkey"))).then_some(pid)
    }
}

fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time of all threads of a process.
fn cpu_of(pid: u32) -> Option<Duration> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of_task = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    Some(tasks.flatten().filter_map(|task| of_task(task.path())).sum())
}

fn percentile(sorted: &[u64], percent: usize) -> u64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sweet_spot_is_the_largest_size_near_the_best() {
        let row = |direction, size_bytes, gb_per_s| {
            let sample = Sample { gb_per_s, client_cpu_s_per_gb: 0.0, server_cpu_s_per_gb: None };
            Row { direction, size_bytes, depth: 1, samples: vec![sample], latencies_us: Vec::new(), errors: 0 }
        };
        let both = |size, get, set| [row(Direction::Get, size, get), row(Direction::Set, size, set)];
        let rows = [both(1, 2.0, 2.0), both(2, 4.0, 3.0), both(4, 3.9, 3.0), both(8, 9.0, 0.5)].concat();
        assert_eq!(sweet_spot(&rows), Some(4));
        assert_eq!(sweet_spot(&[]), None);
    }
}
