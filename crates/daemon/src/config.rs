//! The daemon's configuration: sections, and keys in them.
//!
//! A `settings!` block is the only place where a key is named. This file has those of the daemon itself, the file of
//! each tier has that tier's. The structs, the flags, the `FOREBAY_*` variables, `forebay config` and docs/config.md
//! all come from them. Whoever holds a `Config` from [`load`] may trust it: values were parsed and checked at the
//! border.

mod check;
mod demand;
mod load;
mod names;
mod page;
mod table;
mod value;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use forebay_core::Result;
use forebay_io::header::Sealing;
use forebay_io::secret_file::read_secret;

use crate::http::Hosts;
use crate::tiers;

pub use crate::tiers::spec::TierSpec;
pub use demand::Idle;
pub(crate) use demand::rate;
pub use forebay_core::policy::PolicyChoice;
pub use forebay_core::tiers::Admission;
pub use forebay_io::pool::HugePages;
pub use load::{Loaded, Origin, Sources, load};
pub use names::{check_names, key_hint};
pub use page::page;
pub use table::{Key, Section};
pub(crate) use table::{only, settings};
pub use value::{Bytes, HttpAddress, LogFormat, Secret, ServerUrl, Setting};

/// See the module's head. `Config::default()` is what runs when nothing is set.
#[derive(Debug)]
pub struct Config {
    pub socket: Socket,
    pub pool: Pool,
    pub stores: Stores,
    /// Of all kinds, configured or not, the nearest first.
    pub tiers: Vec<Box<dyn TierSpec>>,
    pub http: Http,
    pub limits: Limits,
    pub alarm: Alarm,
    pub log: Log,
    pub drain: Drain,
}

impl Default for Config {
    fn default() -> Config {
        let (socket, pool, stores, tiers) = (Socket::default(), Pool::default(), Stores::default(), tiers::all());
        let (http, limits, alarm) = (Http::default(), Limits::default(), Alarm::default());
        Config { socket, pool, stores, tiers, http, limits, alarm, log: Log::default(), drain: Drain::default() }
    }
}

impl Config {
    /// The tiers that are configured, the nearest first.
    pub fn configured_tiers(&self) -> impl Iterator<Item = &dyn TierSpec> {
        self.tiers.iter().map(|tier| &**tier).filter(|tier| tier.is_configured())
    }

    /// Checks each configured tier by its values and its files of secrets. `serve` refuses to start with such an error.
    pub fn check(&self) -> Result<()> {
        self.sealing()?;
        Hosts::new(&self.http.hosts)?;
        self.configured_tiers().try_for_each(TierSpec::check)
    }

    /// With the secret that is in a file, if one is configured.
    pub fn sealing(&self) -> Result<Sealing> {
        let Some(file) = &self.stores.secret_file else { return Ok(Sealing::default()) };
        let key = "tier.secret_file";
        let secret = read_secret(key, file)?;
        Sealing::with(secret.as_bytes()).map_err(|error| error.with("key", key).with("file", file.display()))
    }

    /// A value as it would stand in the file; none if it is not set.
    pub fn value(&self, key: &Key) -> Option<toml::Value> {
        self.sections().into_iter().find_map(|section| section.get(key))
    }

    /// False if the value does not fit.
    fn set(&mut self, key: &Key, value: &toml::Value) -> bool {
        let Config { socket, pool, stores, tiers, http, limits, alarm, log, drain } = self;
        let own: [&mut dyn Section; 8] = [socket, pool, stores, http, limits, alarm, log, drain];
        own.into_iter().any(|section| section.set(key, value)) || tiers.iter_mut().any(|tier| tier.set(key, value))
    }

    /// In the page's order.
    fn sections(&self) -> Vec<&dyn Section> {
        let Config { socket, pool, stores, tiers, http, limits, alarm, log, drain } = self;
        let mut sections: Vec<&dyn Section> = vec![socket, pool, stores];
        sections.extend(tiers.iter().map(|tier| &**tier as &dyn Section));
        sections.extend([http as &dyn Section, limits, alarm, log, drain]);
        sections
    }
}

/// Every key, in the page's order.
pub fn keys() -> Vec<&'static Key> {
    Config::default().sections().into_iter().flat_map(Section::keys).collect()
}

settings! {
    /// Where clients find the daemon, and which users may connect.
    "socket": Socket {
        /// Directory of the sockets `forebay.sock` and `attach.sock`. Share this directory, and nothing else, with the
        /// engines' containers.
        directory: PathBuf = default_socket_directory(),
            shown "`/run/forebay` for root, else `$XDG_RUNTIME_DIR/forebay`, or `/run/user/UID/forebay` if that is not set";
        /// User ids that may connect, besides root and the daemon's own. Empty by default, because a process that
        /// attaches can read and change every block of the pool.
        allow_uids: Vec<u32> = Vec::new();
    }

    /// The host memory that holds the blocks.
    "pool": Pool {
        /// Directory of the pool's files, on a file system in memory. The files outlive the daemon, so a restarted
        /// daemon finds its blocks again.
        directory: PathBuf = default_pool_directory(),
            shown "`/dev/shm/forebay` for root, else `/dev/shm/forebay-UID`";
        /// Bytes of memory for blocks. The default fits a laptop; on a serving host, give the pool what the engines
        /// leave free.
        capacity_bytes: Bytes = Bytes(4 << 30);
        /// Size of the units in which memory moves between block sizes: a power of two from 2 MiB to 256 MiB. Not set
        /// by default: an existing pool keeps its own, and a new pool takes about a sixteenth of the capacity.
        unit_bytes: Option<Bytes> = None;
        /// `auto` takes the best kind of huge page that the machine offers, `off` takes 4 KiB pages, `require` refuses
        /// to start without huge pages. The default is `auto`, because small pages work too, but copies are slower and
        /// page tables larger.
        huge_pages: HugePages = HugePages::Auto;
        /// Share of the capacity that leases may pin at once; beyond this share, lookups return a shorter prefix. The
        /// default is one half, so that waiting requests cannot leave stores without space.
        promise_share: f64 = 0.5;
        /// The policy that chooses which blocks are evicted: `default`, `lru` or `tinylfu`. `default` evicts those that
        /// are expected to earn the fewest hits for the time that they stay, as learned from the traffic. `lru` evicts
        /// those that were used longest ago. `tinylfu` evicts those that were looked up least often. A restart with
        /// another policy keeps the blocks. docs/policy.md says when to choose which.
        policy: PolicyChoice = PolicyChoice::Default;
        /// Whether workers compare each block that they load with its checksum, in the same pass, and `Get` compares
        /// what it copies. If false, a bit that flips in the pool's memory is served until the block is verified in
        /// another way.
        verify_loads: bool = true;
        /// Bytes of the pool that the scrub reads per second to compare blocks with their checksums; `0` switches it
        /// off. The scrub finds corrupt blocks that no load compares. At most half of the budget goes to blocks that
        /// are hit, the rest to all blocks in turn, so each block is read once while the scrub reads twice the pool's
        /// capacity. 256 MiB per second take 3 % of one core (bench/reports/2026-11-22-scrub.md).
        scrub_bytes_per_second: Bytes = Bytes(256 << 20);
        /// Seconds from the beginning of one walk of the scrub through the pool to the beginning of the next, at least:
        /// after a shorter walk it reads only blocks that are hit. With the default and 256 MiB per second, it never
        /// rests in a pool of 900 GiB or more.
        scrub_walk_seconds: u64 = 3600;
    }

    /// Settings of all shared stores: directories, Redis and object stores.
    "tier": Stores {
        /// File with the secret of all hosts that share stores. Text of at least 32 bytes, as `openssl rand -hex 32`
        /// makes it; one newline at its end is not part of it. With a secret, each block in a shared store carries a
        /// MAC. A host loads only blocks with the right MAC, so nobody without the secret can change or make up a
        /// block. Hosts with another secret, or without one, do not share blocks with this host. The daemon reads the
        /// file when it starts.
        secret_file: Option<PathBuf> = None;
    }

    /// Metrics, health checks and a page that shows what the daemon does, over plain HTTP.
    "http": Http {
        /// Address of `/metrics`, `/livez`, `/readyz`, `/frame.json` and the page at `/`, or `off`. Loopback by
        /// default, because the pages have no authentication.
        address: HttpAddress = HttpAddress::At(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9477));
        /// Whether `http.address` may be an address that other hosts can reach, as a metrics collector on another host
        /// needs.
        allow_remote: bool = false;
        /// Names by which people and proxies ask for `/` and `/frame.json`, without a port. Addresses and `localhost`
        /// need not be named. A request for another name is refused with status 421, so that no page of another site
        /// reads these two through a browser. `/metrics`, `/livez` and `/readyz` answer to every name, because
        /// collectors and probes ask by many.
        hosts: Vec<String> = Vec::new();
    }

    /// Limits on what clients can ask for. A call beyond a limit is refused, and the engine goes on without it.
    "limits": Limits {
        /// Engines at a time whose workers map the pool, 1 to 63. A slot's holders are one bit each in a word of 64,
        /// and one bit is the daemon's own. Clients that map nothing do not count.
        engines: u32 = 63;
        /// Connections of one user at a time, over both sockets. If all are in use, a connection that is idle makes
        /// room for a new one. A connection beyond the limit is told so, and may only ask for health. An engine takes
        /// one connection, and one more for each of its workers.
        connections_per_user: u32 = 256;
        /// Sessions of one user at a time. The default leaves a quarter of the connections for workers and for calls
        /// without a session.
        sessions_per_user: u32 = 192;
        /// Seconds after which a connection is closed that has no session and makes no call, and after which memory is
        /// given back that a client has lent and no call uses. Clients connect and lend again when they need to.
        idle_seconds: u64 = 60;
        /// Calls of one connection at a time; a client waits before it begins more. An engine makes one for each
        /// request that waits for blocks.
        calls_per_connection: u32 = 4096;
        /// Calls of one user at a time, until their answers have been taken.
        calls_per_user: u32 = 8192;
        /// Bytes of one user's calls at a time: messages that the daemon receives, and answers that were not taken yet.
        /// The blocks of `Put` and `Get` do not count here.
        call_bytes_per_user: Bytes = Bytes(64 << 20);
        /// Bytes of the messages and answers of one user's `Put` and `Get` calls at a time. More calls wait before
        /// the daemon reads their messages. A `Get` counts as a largest message while the daemon copies its blocks,
        /// and does not count while it waits for a tier.
        copy_bytes_per_user: Bytes = Bytes(32 << 20);
        /// `Get` calls of one user that wait at a time for a tier, or for blocks that are verified after a restart.
        /// More such calls are refused. Calls whose blocks are ready do not wait. For each call that waits, the
        /// deciding thread looks at the blocks again, after pauses of up to 40 ms.
        waiting_gets_per_user: u32 = 64;
        /// Bytes of memory that one user's clients lend the daemon at a time. A `forebay.Client` that moves much lends
        /// 16 MiB of its own memory, and its blocks then need no messages. Beyond the limit, blocks travel in messages,
        /// which is slower.
        lent_bytes_per_user: Bytes = Bytes(1 << 30);
        /// Largest message of the control plane in bytes, at most 16 MiB, the limit of the protocol.
        message_bytes: Bytes = Bytes(16 << 20);
        /// Lookups under way at a time, over all sessions: those that wait for the core, and those whose blocks are
        /// promoted. At 50 us each, 1,024 lookups are 50 ms of work: replies to more lookups would come later than an
        /// engine waits. At the limit, a new lookup takes the place of one whose blocks are being promoted: the oldest
        /// such lookup of the session that has most of them. The blocks of that lookup that are not ready are misses.
        lookups_in_flight: u32 = 1024;
        /// Keys of one lookup, over all its groups. 65,536 blocks of 16 tokens are a prompt of a million tokens.
        keys_per_lookup: u32 = 65_536;
        /// Blocks of one commit, over all its groups. The default is the same as that of `limits.keys_per_lookup`.
        blocks_per_commit: u32 = 65_536;
        /// Leases of one session at a time; beyond this number, the session's lookups miss. An engine holds one for
        /// each request that waits or loads, and vLLM runs at most a few thousand of those.
        leases_per_session: u32 = 16_384;
    }

    /// Alarms that the daemon raises: blocks that are stored and never hit, and a hit rate that fell.
    "alarm": Alarm {
        /// Seconds between two checks. Each check compares the last three steps with up to 285 steps before them: at
        /// five minutes, a quarter of an hour with the day before it.
        step_seconds: u64 = 300;
    }

    /// Logs on standard error, one line per event.
    "log": Log {
        /// `error`, `warn`, `info`, `debug` or `trace`, or directives by module such as `warn,forebay_daemon=debug`. At
        /// `info`, a day of normal running fits on a screen; no level logs a line for each block.
        level: String = "info".to_string(), variable "FOREBAY_LOG";
        /// `text`, one line an event, or `json`, one object an event, for a collector.
        format: LogFormat = LogFormat::Text;
    }

    /// Shutdown: the time between SIGTERM and the daemon's end.
    "drain": Drain {
        /// Seconds that sessions have to finish what they hold before the daemon ends. Ten seconds stay well below the
        /// thirty that systemd and Kubernetes allow, and a shorter drain loses no committed block.
        deadline_seconds: u64 = 10;
    }
}

fn default_socket_directory() -> PathBuf {
    match (uid(), std::env::var_os("XDG_RUNTIME_DIR")) {
        (0, _) => PathBuf::from("/run/forebay"),
        (_, Some(runtime)) if !runtime.is_empty() => PathBuf::from(runtime).join("forebay"),
        (uid, _) => PathBuf::from(format!("/run/user/{uid}/forebay")),
    }
}

fn default_pool_directory() -> PathBuf {
    match uid() {
        0 => PathBuf::from("/dev/shm/forebay"),
        uid => PathBuf::from(format!("/dev/shm/forebay-{uid}")),
    }
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
