//! The daemon's configuration: one struct, which is also the one table of keys.
//!
//! The `settings!` block below is the only place where a key is named. The struct, the flags, the `FOREBAY_*`
//! variables, `forebay config` and docs/config.md all come from it. Whoever holds a `Config` from [`load`] may
//! trust it: values were parsed and checked at the border.

mod check;
mod load;
mod page;
mod table;
mod value;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

pub use forebay_core::tiers::Admission;
pub use forebay_io::fs::Fsync;
pub use forebay_io::pool::HugePages;
pub use forebay_io::uring::EngineChoice;
pub use load::{Loaded, Origin, Sources, load, nearest};
pub use page::page;
pub use table::Key;
pub use value::{Bytes, HttpAddress, RedisMode, Secret, ServerUrl};

table::settings! {
    /// Where clients find the daemon, and which users may connect.
    socket: Socket {
        /// Directory of the sockets `forebay.sock` and `attach.sock`. Share this directory, and nothing else, with the
        /// engines' containers.
        directory: PathBuf = default_socket_directory(),
            shown "`/run/forebay` for root, else `$XDG_RUNTIME_DIR/forebay`, or `/run/user/UID/forebay` if that is not set";
        /// User ids that may connect, besides root and the daemon's own. Empty by default, because a process that
        /// attaches can read and change every block of the pool.
        allow_uids: Vec<u32> = Vec::new();
    }

    /// The host memory that holds the blocks.
    pool: Pool {
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
        /// to start without huge pages. The default is `auto`, because small pages work, but cost copy speed and page
        /// tables.
        huge_pages: HugePages = HugePages::Auto;
        /// Share of the capacity that leases may pin at once; beyond it, lookups return a shorter prefix. The default
        /// is one half, so that waiting requests cannot leave stores without space.
        promise_share: f64 = 0.5;
        /// Whether workers compare each block that they load with its checksum, in the same pass, and `Get` compares
        /// what it copies. If false, a bit that flips in the pool's memory is served until the block is verified in
        /// another way.
        verify_loads: bool = true;
        /// Bytes of the pool that the scrub reads per second to compare blocks with their checksums; `0` switches it
        /// off. The scrub finds corrupt blocks that no load compares. At most half of the budget goes to blocks that
        /// are hit, the rest to all blocks in turn, so each block is read once while the scrub reads twice the pool's
        /// capacity. 256 MiB per second take 3 % of one core (bench/reports/2026-11-22-scrub.md).
        scrub_bytes_per_second: Bytes = Bytes(256 << 20);
    }

    /// Files or block devices on this host that hold blocks for which the pool has no space. They outlive the daemon,
    /// the pool and restarts of the host.
    tier_ssd: TierSsd {
        /// Files or block devices, one for each disk; an empty list switches the tier off. Blocks are spread over the
        /// disks by key. A disk belongs to one daemon.
        disks: Vec<PathBuf> = Vec::new();
        /// Bytes of each disk. Required for a file, which is preallocated to this length; a device without it is used
        /// whole.
        capacity_bytes: Option<Bytes> = None;
        /// Size of the segments in which space is reclaimed, a power of two; no block may be longer. Not set by
        /// default: about a 64th of the disk, from 1 MiB to 256 MiB.
        segment_bytes: Option<Bytes> = None;
        /// I/O engine: `auto` takes `io_uring` where the kernel allows it, and `threads` elsewhere.
        engine: EngineChoice = EngineChoice::Auto;
        /// Which blocks are written to the disks: `second_sighting` writes those that were looked up again, or stored
        /// again after the pool had evicted them; `all` writes every block. The default is `second_sighting`, because
        /// most blocks are never looked up again, and writes wear a disk.
        admission: Admission = Admission::SecondSighting;
        /// Milliseconds that a request may wait for a block to be promoted before it is a miss. One second is far more
        /// than a healthy disk takes, and less than the computation of a long prefix.
        load_deadline_ms: u64 = 1000;
        /// Limit on the bytes written to each disk per second. Not limited by default.
        write_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to each disk per day, to spare its endurance. Not limited by default.
        write_bytes_per_day: Option<Bytes> = None;
    }

    /// Directories, local or NFS, that several hosts share.
    tier_fs: TierFs {
        /// Shared directories, which must exist; an empty list switches the tier off. Each block is in one of them.
        directories: Vec<PathBuf> = Vec::new();
        /// Whether reads and writes bypass the page cache (direct I/O). Useful for mounts whose client would only cache
        /// what the pool holds already.
        io_direct: bool = false;
        /// Threads for each directory, each with one operation at a time. Eight hide the latency of a remote mount.
        streams: u32 = 8;
        /// Bounce buffers for each directory, which also limit its transfers at a time. A mount that hangs keeps some
        /// of them, and never a slot of the pool.
        buffers: u32 = 16;
        /// Milliseconds after which an operation fails. If the mount hangs, the operation's thread and buffer are
        /// not free before the mount answers.
        timeout_ms: u64 = 30_000;
        /// Whether the blocks of each namespace are spread over 4,096 folders. Set when a directory is first used, and
        /// the same for all hosts that use it.
        shard_folders: bool = true;
        /// What is flushed before a block counts as stored: `none`, the file's `data`, or `all`, which includes its
        /// name. Without a flush, a crash of the host costs misses.
        fsync: Fsync = Fsync::None;
        /// Bytes of each directory, the same on all hosts. Not limited by default.
        capacity_bytes: Option<Bytes> = None;
        /// Seconds after which blocks are removed that were neither stored nor loaded meanwhile. Not limited by
        /// default.
        max_age_seconds: Option<u64> = None;
        /// Whether the tier only reads and never stores. A mount that cannot be written is treated as read-only anyway.
        read_only: bool = false;
        /// Which blocks are written to the tier: `second_sighting` or `all`, as for `tier.ssd.admission`. The default
        /// is `all`, as for every shared store.
        admission: Admission = Admission::All;
        /// Limit on the bytes loaded from the tier per second: this daemon's share of a store that others use as well.
        /// Loads beyond it wait, and are misses after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to the tier per second; writes beyond it wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a probe or a block before it is a miss.
        load_deadline_ms: u64 = 1000;
    }

    /// A Redis or Valkey that several hosts share: a block that one host has computed is found by the others.
    tier_redis: TierRedis {
        /// URLs of the server, of some nodes of a cluster, or of sentinels; an empty list switches the tier off. A URL
        /// begins with `redis://`, `rediss://` (TLS) or `unix:///path`. `user:password@` may stand before the host, and
        /// `/number` of a database after it.
        urls: Vec<ServerUrl> = Vec::new();
        /// How the servers named by `urls` belong together.
        mode: RedisMode = RedisMode::Single;
        /// Name of the master, as the sentinels know it.
        sentinel_master: String = String::new();
        /// User name for sentinels that have users; needs `sentinel_password`. The user and password in `urls` are for
        /// the master alone.
        sentinel_user: Option<String> = None;
        /// Password for the sentinels. Not set by default, for sentinels without a password.
        sentinel_password: Option<Secret> = None;
        /// Whether connections to sentinels use TLS, with the same certificate files as their master. By default, the
        /// scheme of `urls` decides for both.
        sentinel_tls: Option<bool> = None;
        /// Prefix of the names of all values, so that several fleets can use one server.
        key_prefix: String = "forebay:".to_string();
        /// Connections to each server for blocks; probes have one of their own. Use more on networks that one
        /// connection does not fill.
        connections: u32 = 4;
        /// Threads over which these connections are spread. One thread moves 2 to 4 GB/s.
        threads: u32 = 1;
        /// Blocks longer than this are stored as several values; `forebay bench redis --sweep` finds the best size for
        /// a server. All hosts that share a store must use the same size.
        value_bytes: Bytes = Bytes(1 << 20);
        /// Seconds after which the server drops a block. Not set by default: the server then drops blocks when it runs
        /// out of memory, if its `maxmemory-policy` lets it.
        ttl_seconds: Option<u64> = None;
        /// Which blocks are written to the tier: `second_sighting` or `all`, as for `tier.ssd.admission`. The default
        /// is `all`, because a block that each of many hosts needs once is worth sharing, and no host sees the lookups
        /// of the others.
        admission: Admission = Admission::All;
        /// Limit on the bytes loaded from the tier per second: this daemon's share of a store that others use as well.
        /// Loads beyond it wait, and are misses after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to the tier per second; writes beyond it wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a probe or a block before it is a miss.
        load_deadline_ms: u64 = 1000;
        /// Milliseconds within which a new connection must be ready for use.
        connect_timeout_ms: u64 = 1000;
        /// Milliseconds that one operation may take; a connection on which one takes longer is replaced.
        operation_timeout_ms: u64 = 5000;
        /// File of the certificate authorities that may have signed the server's certificate, for `rediss://`. By
        /// default, those that this machine trusts.
        ca_file: Option<PathBuf> = None;
        /// File of the client certificate, for servers that require one; needs `key_file`.
        certificate_file: Option<PathBuf> = None;
        /// File of the private key of `certificate_file`.
        key_file: Option<PathBuf> = None;
        /// Name in the server's certificate, if it differs from the host in the URL.
        server_name: Option<String> = None;
    }

    /// A bucket of an S3-compatible store that several hosts share; in builds with the feature `object`. Credentials
    /// come from the environment: `AWS_ACCESS_KEY_ID` and so on, a web identity, or the instance's role.
    tier_object: TierObject {
        /// Name of the bucket; empty switches the tier off.
        bucket: String = String::new();
        /// Prefix of the names of all objects.
        prefix: String = "forebay".to_string();
        /// Region of the bucket.
        region: String = "us-east-1".to_string();
        /// URL of a store other than Amazon's, such as `https://s3.internal`. Plain HTTP is used only if the URL begins
        /// with `http://`.
        endpoint: Option<String> = None;
        /// Requests at a time, of which at most half are stores; each keeps a block in memory.
        requests: u32 = 32;
        /// Milliseconds after which an operation fails.
        timeout_ms: u64 = 30_000;
        /// Longer objects are uploaded in parts of this size, at least 5 MiB.
        part_bytes: Bytes = Bytes(16 << 20);
        /// Whether the tier only reads and never stores.
        read_only: bool = false;
        /// Which blocks are written to the tier: `second_sighting` or `all`, as for `tier.ssd.admission`. The default
        /// is `all`, as for every shared store.
        admission: Admission = Admission::All;
        /// Limit on the bytes loaded from the tier per second: this daemon's share of a store that others use as well.
        /// Loads beyond it wait, and are misses after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to the tier per second; writes beyond it wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a probe or a block before it is a miss.
        load_deadline_ms: u64 = 2000;
    }

    /// Metrics and health checks for people and supervisors, over plain HTTP.
    http: Http {
        /// Address of `/metrics`, `/livez` and `/readyz`, or `off`. Loopback by default, because the pages have no
        /// authentication.
        address: HttpAddress = HttpAddress::At(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9477));
        /// Whether `http.address` may be an address that other hosts can reach, as a metrics collector on another host
        /// needs.
        allow_remote: bool = false;
    }

    /// Limits on what clients can ask for. A call beyond a limit is refused, and the engine goes on without it.
    limits: Limits {
        /// Sessions at a time, 1 to 63. A slot's holders are one bit each in a word of 64, and one bit is the daemon's
        /// own.
        sessions: u32 = 63;
        /// Largest message of the control plane in bytes, at most 16 MiB, the limit of the protocol.
        message_bytes: Bytes = Bytes(16 << 20);
        /// Lookups that may wait for the core at a time, over all sessions. At 50 us each, 1,024 are 50 ms of work:
        /// replies to more would come later than an engine waits.
        lookups_in_flight: u32 = 1024;
        /// Keys of one lookup, over all its groups. 65,536 blocks of 16 tokens are a prompt of a million tokens.
        keys_per_lookup: u32 = 65_536;
        /// Blocks of one commit, over all its groups. The default is that of `limits.keys_per_lookup`.
        blocks_per_commit: u32 = 65_536;
        /// Leases of one session at a time; beyond it, the session's lookups miss. An engine holds one for each request
        /// that waits or loads, and vLLM runs at most a few thousand of those.
        leases_per_session: u32 = 16_384;
    }

    /// Alarms that the daemon raises: blocks that are stored and never hit, and a hit rate that fell.
    alarm: Alarm {
        /// Seconds between two checks. The last three steps are compared with up to 285 steps before them: at five
        /// minutes, a quarter of an hour with the day before it.
        step_seconds: u64 = 300;
    }

    /// Logs on standard error, one line an event.
    log: Log {
        /// `error`, `warn`, `info`, `debug` or `trace`, or directives by module such as `warn,forebay_daemon=debug`. At
        /// `info`, a day of normal running fits on a screen; no level logs a line for each block.
        level: String = "info".to_string(), variable "FOREBAY_LOG";
    }

    /// Shutdown: the time between SIGTERM and the daemon's end.
    drain: Drain {
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
