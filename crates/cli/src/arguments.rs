//! The commands and their arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use forebay_bench::transfer::TransferBench;
use forebay_daemon::config::{Bytes, Setting};
use forebay_device::bench::CopyBench;
use forebay_device::bench::device::DeviceBench;
use forebay_fabric::Options;
use forebay_io::redis::{RedisConfig, bench as redis};
use forebay_io::ssd::bench as ssd;
use forebay_sim::chart;

use crate::settings::{Daemon, Settings};

/// Keeps the KV cache of LLM engines in host memory, across restarts
#[derive(Debug, Parser)]
#[command(name = "forebay", version = crate::machine::version())]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon until SIGTERM
    Serve(Settings),
    /// Watch the daemon: what is wrong, the hit rate and the best possible one, tiers, engines, what would help
    Top(Top),
    /// Show what the daemon holds: namespaces, slots, tiers, sessions
    Inspect(Inspect),
    /// Ask whether the daemon is alive and ready, for probes
    Health(Health),
    /// Compare every block of the pool with its checksum while the daemon serves
    Audit(Audit),
    /// Remove the blocks of a namespace or of a tenant
    Purge(Purge),
    /// Remove a pool that no daemon uses, with its mount and its directory
    #[command(subcommand)]
    Pool(Pool),
    /// Print the effective configuration and where each value comes from
    Config(Config),
    /// Check the machine and the daemon; each check has a verdict and a hint
    Doctor(Doctor),
    /// Measure copies, lookups and tiers
    #[command(subcommand)]
    Bench(Bench),
    /// Replay request traces on the daemon's own core: hit rate by policy and capacity, beside the optimum
    Simulate(Simulate),
    /// Show the hit rate and the best possible one, why keys missed, and the hit rate with more memory
    Advise(Advise),
    /// Record lookups for `simulate`
    #[command(subcommand)]
    Trace(Trace),
    /// Print the completions of the command line for a shell
    Completions(Completions),
    /// Print the manual page, or write the pages of all commands
    Man(Man),
    /// Print the version, the protocol, the formats and the engines
    Version(Version),
    /// Run the daemon of a measurement, which ends with the process that started it
    #[command(name = forebay_bench::private::COMMAND, hide = true)]
    PrivateDaemon(Settings),
    /// Claim a disk for the daemon that starts this command
    #[command(name = forebay_daemon::CLAIM_COMMAND, hide = true)]
    ClaimDisk(ClaimDisk),
}

#[derive(Args, Debug)]
pub struct ClaimDisk {
    pub path: PathBuf,
    #[arg(long)]
    pub capacity_bytes: Option<u64>,
    #[arg(long)]
    pub create: bool,
    /// Makes the file if there is none
    #[arg(long)]
    pub makes_file: bool,
}

#[derive(Args, Debug)]
pub struct Completions {
    /// Shell whose completions are printed
    #[arg(value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
pub struct Man {
    /// Directory for the pages of all commands; it is made if it is missing
    #[arg(value_name = "PATH")]
    pub directory: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct Advise {
    #[command(flatten)]
    pub daemon: Daemon,
    /// Write a plot of hit rate against the size of memory and disk to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Trace {
    /// Write the daemon's lookups to a file: salted keys, sizes and times, no tokens
    Record(TraceRecord),
}

#[derive(Args, Debug)]
pub struct TraceRecord {
    #[command(flatten)]
    pub daemon: Daemon,
    /// File to write; it must not exist yet
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Largest size of the file; the recording ends before the file exceeds it
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = Bytes(1 << 30))]
    pub max_bytes: Bytes,
    /// Seconds after which the recording ends
    #[arg(long, value_name = "COUNT", default_value_t = 3600)]
    pub seconds: u64,
}

#[derive(Args, Debug)]
pub struct Version {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Simulate {
    #[command(flatten)]
    pub simulation: forebay_sim::Arguments,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Inspect {
    #[command(subcommand)]
    pub what: Option<InspectWhat>,
    #[command(flatten)]
    pub daemon: Daemon,
    /// Print again every so many seconds, until it is interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = seconds)]
    pub watch: Option<Duration>,
    /// Print one JSON object; with `--watch` one a line
    #[arg(long)]
    pub json: bool,
}

/// A size as in the configuration.
fn bytes(text: &str) -> Result<Bytes, String> {
    Bytes::read(&text.into()).ok_or_else(|| format!("give {}", Bytes::KIND))
}

fn sizes(bytes: &[u64]) -> Vec<Bytes> {
    bytes.iter().map(|bytes| Bytes(*bytes)).collect()
}

/// The defaults of `bench ssd` and of `bench redis`; those that the command line has no flag for are not asked for.
fn ssd() -> ssd::BenchConfig {
    ssd::BenchConfig::new(PathBuf::new())
}

fn redis() -> redis::BenchConfig {
    redis::BenchConfig::new(RedisConfig::new(Vec::new()))
}

/// From a tenth of a second to a day.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give seconds from 0.1 to 86400".to_owned())
}

#[derive(Debug, Subcommand)]
pub enum InspectWhat {
    /// Show what a disk of the SSD tier holds, while no daemon uses it; changes nothing
    Ssd(InspectSsd),
}

#[derive(Args, Debug)]
pub struct InspectSsd {
    /// Files or block devices, as in `tier.ssd.disks`
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<std::path::PathBuf>,
    /// Read every block and compare its checksum
    #[arg(long)]
    pub audit: bool,
    /// List every segment
    #[arg(long)]
    pub segments: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Top {
    #[command(flatten)]
    pub daemon: Daemon,
    /// Print one screen as text
    #[arg(long, conflicts_with_all = ["lines", "json"])]
    pub once: bool,
    /// Print a line every second, until it is interrupted
    #[arg(long, conflicts_with = "json")]
    pub lines: bool,
    /// Print one frame as a JSON object, with its history
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Health {
    #[command(flatten)]
    pub daemon: Daemon,
    /// Fail if the daemon does not answer, or hangs and needs a restart, as /livez does
    #[arg(long, conflicts_with = "ready")]
    pub live: bool,
    /// Fail if the daemon cannot serve engines now, as /readyz does; this is the default
    #[arg(long)]
    pub ready: bool,
    /// Fail if the daemon has not answered after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub timeout: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Audit {
    #[command(flatten)]
    pub daemon: Daemon,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Purge {
    #[command(flatten)]
    pub daemon: Daemon,
    #[command(flatten)]
    pub what: What,
    /// Also remove the blocks from the shared stores (Redis, directories, buckets), whichever host stored them
    #[arg(long)]
    pub shared_stores: bool,
    /// Seconds that the purge of shared stores may take; what is removed by then stays removed
    #[arg(long, value_name = "COUNT", default_value_t = 600, requires = "shared_stores",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout_seconds: u32,
    /// Seconds after the purge in which this host neither reads blocks of what was purged from a tier nor writes them
    /// to one, so that they do not come back while other hosts are purged
    #[arg(long, value_name = "COUNT", requires = "shared_stores",
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub pause_seconds: Option<u32>,
    /// Seconds to wait until the daemon's own disks have removed the blocks, but no longer than 10 s in which they
    /// neither remove nor read anything; the daemon continues the removal afterwards
    #[arg(long, value_name = "COUNT", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub wait_seconds: u32,
    /// Show which namespaces and how many blocks of the pool the purge would remove, and remove nothing
    #[arg(long, conflicts_with = "shared_stores")]
    pub dry_run: bool,
    /// Print one JSON object, also where the purge fails: `is_complete` is then false
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct What {
    /// Id of the namespace: the digits that `forebay inspect` shows, or their beginning, at least four digits
    #[arg(long, value_name = "ID")]
    pub namespace: Option<String>,
    /// Name of the tenant, all of whose namespaces are purged; '' for namespaces without a tenant
    #[arg(long, value_name = "NAME")]
    pub tenant: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Give the memory of a pool back: its files, the mount that a daemon made for it, and its directory
    Remove(PoolRemove),
}

#[derive(Args, Debug)]
pub struct PoolRemove {
    /// The pool's directory; by default `pool.directory` of the configuration
    #[arg(value_name = "PATH")]
    pub directory: Option<PathBuf>,
    /// Configuration file of the daemon
    #[arg(long, value_name = "FILE", conflicts_with = "directory")]
    pub config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Config {
    #[command(flatten)]
    pub settings: Settings,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct Doctor {
    #[command(flatten)]
    pub settings: Settings,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Measure copies between tensors and slots, against a plain parallel memcpy of the same bytes
    Copy(BenchCopy),
    /// Measure copies from and to a GPU, against the peak of pinned memory; without one the engine over host memory
    Device(BenchDevice),
    /// Measure lookups over the socket of a daemon that it starts itself, against an empty call of as many bytes
    Lookup(BenchLookup),
    /// Measure the Redis tier on a running server: stores, loads, lookups, and the best size of values
    Redis(BenchRedis),
    /// Measure the SSD tier on a new file, against fio or plain direct I/O on the same file
    Ssd(BenchSsd),
    /// Measure transfers between the memory of two processes, against plain sockets or memcpy in the same run
    Transfer(BenchTransfer),
}

#[derive(Args, Clone, Debug)]
pub struct BenchTransfer {
    /// Ways of the bytes between two processes on this host, one after the other: `tcp`, `shm`, and `ucx`, which needs
    /// libucp; by default `tcp` and `shm`, or `tcp` with `--encrypt`
    #[arg(long, value_name = "TRANSPORT", value_delimiter = ',', value_parser = ["tcp", "shm", "ucx"],
        conflicts_with_all = ["listen", "connect"])]
    pub transport: Vec<String>,
    /// Serve measurements of other processes at this address, `tcp://HOST:PORT`, `ucx://HOST:PORT` or `shm:///PATH`
    #[arg(long, value_name = "ADDRESS", conflicts_with = "connect")]
    pub listen: Option<String>,
    /// Stop when the first measurement has ended
    #[arg(long, requires = "listen")]
    pub once: bool,
    /// Measure against `forebay bench transfer --listen` at this address
    #[arg(long, value_name = "ADDRESS")]
    pub connect: Option<String>,
    /// Engines to measure over TCP in the same run: `sockets`, which always are, `nixl`, `mooncake`, `ucx`
    #[arg(long, value_name = "PEERS", value_delimiter = ',', value_parser = ["sockets", "nixl", "mooncake", "ucx"],
        conflicts_with_all = ["listen", "connect"])]
    pub peers: Vec<String>,
    /// Python that finds the peers
    #[arg(long, value_name = "PROGRAM", default_value = "python3", requires = "peers")]
    pub python: std::path::PathBuf,
    /// File with the secret that both sides share; needed between hosts
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<std::path::PathBuf>,
    /// Encrypt what goes over TCP; both sides need it, and the secret
    #[arg(long, requires = "secret_file")]
    pub encrypt: bool,
    /// TCP connections
    #[arg(long, value_name = "COUNT", default_value_t = Options::default().connections)]
    pub connections: u16,
    /// The file of libucp for `ucx`, 1.18 or later; the system's by default
    #[arg(long, value_name = "FILE")]
    pub ucx_library: Option<std::path::PathBuf>,
    /// Bytes of a segment; may be given several times
    #[arg(long, value_name = "BYTES", value_parser = bytes,
        default_values_t = sizes(&TransferBench::default().sizes_bytes))]
    pub size_bytes: Vec<Bytes>,
    /// Segments of an operation; may be given several times
    #[arg(long, value_name = "COUNT", default_values_t = TransferBench::default().segments)]
    pub segments: Vec<u64>,
    /// Operations under way; may be given several times
    #[arg(long, value_name = "COUNT", default_values_t = TransferBench::default().depths)]
    pub depth: Vec<u64>,
    /// Direction, `read`, `write` or `both` at once; may be given several times
    #[arg(long, value_name = "DIRECTION", value_parser = ["read", "write", "both"], default_value = "read")]
    pub direction: Vec<String>,
    /// Runs of the transport and of the baseline for each row; a row shows their medians
    #[arg(long, value_name = "COUNT", default_value_t = TransferBench::default().pairs)]
    pub pairs: usize,
    /// Bytes moved in each run and direction
    #[arg(long, value_name = "BYTES", value_parser = bytes,
        default_value_t = Bytes(TransferBench::default().run_bytes))]
    pub run_bytes: Bytes,
    /// Write a plot of throughput against the size of a segment to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file(), conflicts_with = "listen")]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct BenchRedis {
    /// URL of the server, `redis://…` or `unix:///…`; the benchmark removes at the end what it wrote
    #[arg(value_name = "URL")]
    pub url: String,
    /// Bytes of a block; may be given several times
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_values_t = sizes(&redis().sizes_bytes))]
    pub size_bytes: Vec<Bytes>,
    /// Operation to measure, `get` or `set`; by default both
    #[arg(long, value_name = "OPERATION", value_parser = ["get", "set"])]
    pub op: Option<String>,
    /// Bytes of the values into which blocks are cut; by default blocks are stored whole
    #[arg(long, value_name = "BYTES", value_parser = bytes, conflicts_with = "sweep")]
    pub value_bytes: Option<Bytes>,
    /// Operations submitted at once; by default as many as make up 64 MiB
    #[arg(long, value_name = "COUNT")]
    pub at_once: Option<u64>,
    /// Operations in flight on one connection
    #[arg(long, value_name = "COUNT", default_value_t = redis().redis.pipeline_depth)]
    pub depth: usize,
    /// Connections for stores and loads
    #[arg(long, value_name = "COUNT", default_value_t = redis().redis.connections)]
    pub connections: usize,
    /// Threads over which these connections are spread
    #[arg(long, value_name = "COUNT", default_value_t = redis().redis.threads)]
    pub threads: usize,
    /// Runs of each row; a row shows their medians
    #[arg(long, value_name = "COUNT", default_value_t = redis().runs)]
    pub runs: usize,
    /// Bytes moved in each run
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = Bytes(redis().run_bytes))]
    pub run_bytes: Bytes,
    /// Keys of a lookup, or 0 for no lookups
    #[arg(long, value_name = "COUNT", default_value_t = redis().lookup_keys)]
    pub lookup_keys: u64,
    /// Try value sizes from 128 KiB to 32 MiB, and print the best one as a line of the configuration
    #[arg(long, conflicts_with_all = ["size_bytes", "op"])]
    pub sweep: bool,
    /// Write a plot of throughput against the size of a block to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct BenchSsd {
    /// File to create on the disk that is measured; it must not exist yet, and is removed at the end
    #[arg(value_name = "PATH")]
    pub path: std::path::PathBuf,
    /// Bytes of a block; may be given several times
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_values_t = sizes(&ssd().sizes_bytes))]
    pub size_bytes: Vec<Bytes>,
    /// Operations in flight; may be given several times
    #[arg(long, value_name = "COUNT", default_values_t = ssd().depths)]
    pub depth: Vec<u32>,
    /// Runs of tier and baseline for each row; the ratio is the median over the pairs
    #[arg(long, value_name = "COUNT", default_value_t = ssd().pairs)]
    pub pairs: usize,
    /// Bytes moved in each run
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = Bytes(ssd().run_bytes))]
    pub run_bytes: Bytes,
    /// Bytes of the tier; its file is twice as long
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = Bytes(ssd().capacity_bytes))]
    pub capacity_bytes: Bytes,
    /// Write a plot of throughput against the size of a block to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct BenchCopy {
    /// Copying threads of the engine and of memcpy; by default as many as the engine chooses
    #[arg(long, value_name = "COUNT")]
    pub threads: Option<usize>,
    /// Copies of the working set for each row; the ratio is the median over the pairs
    #[arg(long, value_name = "COUNT", default_value_t = CopyBench::default().pairs)]
    pub pairs: usize,
    /// Bytes of memory on each side of a copy, far more than any CPU cache holds
    #[arg(long, value_name = "BYTES", value_parser = bytes,
        default_value_t = Bytes(CopyBench::default().working_set_bytes))]
    pub working_set_bytes: Bytes,
    /// Write a plot of throughput against the size of a block to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct BenchDevice {
    /// What copies: `cuda`, the driver of an NVIDIA GPU, or `host`, the engine over host memory; by default a GPU where
    /// there is one
    #[arg(long, value_name = "ENGINE", value_parser = ["cuda", "host"])]
    pub engine: Option<String>,
    /// Position of the GPU among those that this process may see
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub device: u32,
    /// Bytes of a copy, a multiple of 16; may be given several times
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_values_t = sizes(&DeviceBench::default().sizes_bytes))]
    pub size_bytes: Vec<Bytes>,
    /// Copies submitted at once; may be given several times. What does not fit the working set is left out
    #[arg(long, value_name = "COUNT", default_values_t = DeviceBench::default().counts)]
    pub count: Vec<usize>,
    /// Direction, `load`, `store` or `both` at once; may be given several times; by default all
    #[arg(long, value_name = "DIRECTION", value_parser = ["load", "store", "both"],
        default_values = ["load", "store", "both"], hide_default_value = true)]
    pub direction: Vec<String>,
    /// Bytes of memory on each side of a copy
    #[arg(long, value_name = "BYTES", value_parser = bytes,
        default_value_t = Bytes(DeviceBench::default().working_set_bytes))]
    pub working_set_bytes: Bytes,
    /// Runs of each row; a row shows their median
    #[arg(long, value_name = "COUNT", default_value_t = DeviceBench::default().runs)]
    pub runs: usize,
    /// Rows of the matrices of a product beside which a GPU's copies are measured too, a multiple of 4; 0 for none
    #[arg(long, value_name = "COUNT", default_value_t = DeviceBench::default().product_rows)]
    pub product_rows: u32,
    /// Threads of the engine over host memory and of its memcpy; by default as many as the engine chooses
    #[arg(long, value_name = "COUNT", conflicts_with = "device")]
    pub threads: Option<usize>,
    /// Write a plot of throughput against the size of a copy to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct BenchLookup {
    /// Sockets' directory of a daemon to measure instead of a private one; its tiers get nothing, nothing is
    /// evicted, and the blocks are removed at the end
    #[arg(long = "socket.directory", value_name = "PATH")]
    pub socket_directory: Option<std::path::PathBuf>,
    /// Keys of one lookup; may be given several times
    #[arg(long, value_name = "COUNT", default_values_t = [1024, 8192])]
    pub keys: Vec<usize>,
    /// Lookups for each row
    #[arg(long, value_name = "COUNT", default_value_t = 2000)]
    pub rounds: usize,
    /// Write a plot of time against the keys of a lookup to this SVG file
    #[arg(long, value_name = "FILE", value_parser = chart::file())]
    pub plot: Option<std::path::PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
