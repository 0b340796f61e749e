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

pub use forebay_core::below::Admission;
pub use forebay_io::arena::HugePages;
pub use forebay_io::fs::Fsync;
pub use forebay_io::uring::EngineChoice;
pub use load::{Loaded, Origin, Sources, load, nearest};
pub use page::page;
pub use table::Key;
pub use value::{Bytes, HttpAddress, RedisMode, Secret, ServerUrl};

table::settings! {
    /// Where clients find the daemon, and who may be one.
    socket: Socket {
        /// Directory of the sockets `forebay.sock` and `attach.sock`. Containers share this directory and nothing
        /// else.
        directory: PathBuf = default_socket_directory(),
            shown "`/run/forebay` for root, else `$XDG_RUNTIME_DIR/forebay`, or `/run/user/UID/forebay` without that variable";
        /// User ids that may connect besides root and the daemon's own. Empty by default, because whoever attaches
        /// can read and alter every block of the pool.
        allow_uids: Vec<u32> = Vec::new();
    }

    /// The host memory that holds the blocks.
    pool: Pool {
        /// Directory of the pool's files, in a file system that lives in memory. It outlives the daemon, which is
        /// why a restarted daemon finds its blocks again.
        directory: PathBuf = default_pool_directory(),
            shown "`/dev/shm/forebay` for root, else `/dev/shm/forebay-UID`";
        /// Memory for blocks. The default fits a laptop; a serving host gives what its engines leave free.
        capacity_bytes: Bytes = Bytes(4 << 30);
        /// Memory moves between block sizes in units of this many bytes: a power of two from 2 MiB to 256 MiB. Not
        /// set by default: a pool that is found keeps its own, a new one takes about a sixteenth of the capacity.
        unit_bytes: Option<Bytes> = None;
        /// `auto` takes the best kind of huge page the machine offers, `off` takes 4 KiB pages, `require` refuses to
        /// start without huge pages. `auto`, because small pages cost copy speed and page tables but work.
        huge_pages: HugePages = HugePages::Auto;
        /// Share of the capacity that leases may hold at once; over it lookups answer with a shorter prefix. Half, so
        /// that waiting requests can never starve stores of room.
        promise_share: f64 = 0.5;
        /// Whether workers compare each block that they load with its checksum, in the same pass, and `Get` what it
        /// copies. Without it a bit that flips in the pool's memory is served until the block is verified otherwise.
        verify_loads: bool = true;
        /// Bytes of the pool that the daemon reads in a second to compare blocks with their checksums, so that a byte that
        /// changed is found where no load compares it; `0` switches it off. Half of it at most goes to blocks that are
        /// hit, the rest to all in turn: each is read once while twice the pool's capacity is. 256 MiB take 3 % of one
        /// core (bench/reports/2026-11-22-scrub.md).
        scrub_bytes_per_second: Bytes = Bytes(256 << 20);
    }

    /// Files or block devices that hold blocks the pool has no room for. They outlive the daemon, the pool and the
    /// host's restarts.
    tier_ssd: TierSsd {
        /// One file or block device for each disk; none by default, which means no such tier. Blocks are spread over
        /// them by key. A disk belongs to one daemon.
        disks: Vec<PathBuf> = Vec::new();
        /// Bytes of each disk. A file needs it and is preallocated to this length; a device without it is taken whole.
        capacity_bytes: Option<Bytes> = None;
        /// Space is reclaimed in segments of this size, a power of two; no block may be longer. Not set by default:
        /// about a 64th of the disk, from 1 MiB to 256 MiB.
        segment_bytes: Option<Bytes> = None;
        /// How bytes are moved: `auto` takes `io_uring` where the kernel allows it and `threads` elsewhere.
        engine: EngineChoice = EngineChoice::Auto;
        /// Which blocks are written down: `second_sighting` those that were asked for again, or stored once more after
        /// the pool had evicted them; `all` every one. Most blocks are never asked for twice, and a disk wears.
        admission: Admission = Admission::SecondSighting;
        /// How long a request may wait for a block to come up before it is a miss. A second is far more than a healthy
        /// disk takes, and less than computing a long prefix.
        load_deadline_ms: u64 = 1000;
        /// Bytes that may be written to each disk in a second. Not limited by default.
        write_bytes_per_second: Option<Bytes> = None;
        /// Bytes that may be written to each disk in a day, for its endurance. Not limited by default.
        write_bytes_per_day: Option<Bytes> = None;
    }

    /// Directories, local or NFS, that several hosts share.
    tier_fs: TierFs {
        /// None by default, which means no such tier. They must exist; each block lies in one of them.
        directories: Vec<PathBuf> = Vec::new();
        /// Past the page cache: for mounts whose client would only cache what the pool holds already.
        io_direct: bool = false;
        /// Threads of each directory, each with one operation at a time: eight hide the latency of a remote mount.
        streams: u32 = 8;
        /// Bounce buffers of each directory, and with it transfers at a time: a mount that hangs keeps some of them, and
        /// never a slot of the pool.
        buffers: u32 = 16;
        /// After so long an operation has failed; its thread and buffer stay with the mount for as long as that hangs.
        timeout_ms: u64 = 30_000;
        /// Whether blocks are spread over 4,096 folders for each namespace. Said when a directory is first used, and the
        /// same for all who use it.
        shard_folders: bool = true;
        /// What is flushed before a block counts as stored: `none`, the file's `data`, or `all`, its name too. What a
        /// crash of the host costs without it are misses.
        fsync: Fsync = Fsync::None;
        /// Bytes of each directory, the same on all hosts. Not limited by default.
        capacity_bytes: Option<Bytes> = None;
        /// Blocks that were neither stored nor loaded for so long are removed. Not limited by default.
        max_age_seconds: Option<u64> = None;
        /// Reads and stores nothing. A mount that cannot be written is read-only by itself.
        read_only: bool = false;
        /// Which blocks are written there. All by default, as for every shared store.
        admission: Admission = Admission::All;
        /// Bytes loaded from there in a second, at most: this daemon's share of what others use as well. More wait, and are
        /// a miss after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Bytes written there in a second, at most; more wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// How long a request may wait for an answer or a block before it is a miss.
        load_deadline_ms: u64 = 1000;
    }

    /// A Redis or Valkey that several hosts share: what one has computed, the others find there.
    tier_redis: TierRedis {
        /// The server; or some nodes of a cluster, or sentinels. `redis://`, `rediss://` for TLS, or `unix:///path`, with
        /// `user:password@` before the host and `/number` of a database behind it. None by default, which means no such
        /// tier.
        urls: Vec<ServerUrl> = Vec::new();
        /// How the servers named by `urls` belong together.
        mode: RedisMode = RedisMode::Single;
        /// What sentinels call the master.
        sentinel_master: String = String::new();
        /// Who we are to sentinels that know users; needs `sentinel_password`. User and password of `urls` are for the
        /// master alone.
        sentinel_user: Option<String> = None;
        /// The password that sentinels ask for. Not set by default: it then is not asked for.
        sentinel_password: Option<Secret> = None;
        /// Whether sentinels are spoken to by TLS, with the same files as their master. By default as `urls` say for both.
        sentinel_tls: Option<bool> = None;
        /// Goes before the names of all values, so that several fleets can use one server.
        key_prefix: String = "forebay:".to_string();
        /// Connections to each server for blocks; questions have one of their own. More are for networks that one
        /// connection does not fill.
        connections: u32 = 4;
        /// Threads that these connections are spread over. One moves 2 to 4 GB/s.
        threads: u32 = 1;
        /// Blocks longer than this are stored as several values; `forebay bench redis --sweep` finds what suits a server.
        /// All who share a store must agree on it.
        value_bytes: Bytes = Bytes(1 << 20);
        /// After so long the server forgets a block. Not set by default: it forgets when it needs the room, if its
        /// `maxmemory-policy` lets it.
        ttl_seconds: Option<u64> = None;
        /// Which blocks are written there. All by default, since what is asked for once on each of many hosts is worth
        /// sharing, and no host sees more than its own share of the sightings.
        admission: Admission = Admission::All;
        /// Bytes loaded from there in a second, at most: this daemon's share of what others use as well. More wait, and are
        /// a miss after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Bytes written there in a second, at most; more wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// How long a request may wait for an answer or a block before it is a miss.
        load_deadline_ms: u64 = 1000;
        /// For a connection until it may be used.
        connect_timeout_ms: u64 = 1000;
        /// For one operation; a connection on which one takes longer is replaced.
        operation_timeout_ms: u64 = 5000;
        /// For `rediss://`: who may have signed the server's certificate. By default those whom this machine trusts.
        ca_file: Option<PathBuf> = None;
        /// Who we are, if the server asks; needs `key_file`.
        certificate_file: Option<PathBuf> = None;
        /// The key of `certificate_file`.
        key_file: Option<PathBuf> = None;
        /// The name in the server's certificate, if it is not the host of the URL.
        server_name: Option<String> = None;
    }

    /// A bucket of an S3-compatible store that several hosts share; in builds with the feature `object`. Keys come from
    /// the environment: `AWS_ACCESS_KEY_ID` and so on, a web identity, the instance's role.
    tier_object: TierObject {
        /// The bucket. None by default, which means no such tier.
        bucket: String = String::new();
        /// Goes before every object's name.
        prefix: String = "forebay".to_string();
        /// The bucket's region.
        region: String = "us-east-1".to_string();
        /// Of another store than Amazon's, such as `https://s3.internal`. Plain HTTP only if it says so.
        endpoint: Option<String> = None;
        /// Requests under way at a time, half of them stores at most; each has a block in memory.
        requests: u32 = 32;
        /// After so long an operation has failed.
        timeout_ms: u64 = 30_000;
        /// Longer objects are uploaded in parts of this size, 5 MiB at least.
        part_bytes: Bytes = Bytes(16 << 20);
        /// Reads and stores nothing.
        read_only: bool = false;
        /// Which blocks are written there. All by default, as for every shared store.
        admission: Admission = Admission::All;
        /// Bytes loaded from there in a second, at most: this daemon's share of what others use as well. More wait, and are
        /// a miss after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Bytes written there in a second, at most; more wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// How long a request may wait for an answer or a block before it is a miss.
        load_deadline_ms: u64 = 2000;
    }

    /// Metrics and health for people and supervisors, over plain HTTP.
    http: Http {
        /// Address of `/metrics`, `/livez` and `/readyz`, or `off`. Loopback by default: the pages are not
        /// authenticated.
        address: HttpAddress = HttpAddress::At(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9477));
        /// Allows an address that other hosts can reach, as a metrics collector outside the host needs.
        allow_remote: bool = false;
    }

    /// Bounds on what clients can ask for; a call over a bound is refused, and the engine goes on without it.
    limits: Limits {
        /// Sessions at a time, 1 to 63: a slot's holders are one bit each in a word of 64, and one is the daemon's own.
        sessions: u32 = 63;
        /// Largest message of the control plane, at most 16 MiB, which is what both sides of the protocol agreed on.
        message_bytes: Bytes = Bytes(16 << 20);
        /// Lookups that wait for the core at a time, over all sessions. At 50 us each, 1,024 are 50 ms of work: more
        /// would be answered later than an engine waits.
        lookups_in_flight: u32 = 1024;
        /// Keys of one lookup, over all its groups. 65,536 blocks of 16 tokens are a prompt of a million tokens.
        keys_per_lookup: u32 = 65_536;
        /// Blocks of one commit, over all its groups; as for lookups.
        blocks_per_commit: u32 = 65_536;
        /// Leases of one session at a time, over which its lookups miss. An engine holds one for each request that
        /// waits or loads, and vLLM runs at most a few thousand of those.
        leases_per_session: u32 = 16_384;
    }

    /// What is watched: blocks that are stored and never hit, and a hit rate that fell.
    alarm: Alarm {
        /// Seconds between two looks. "Lately" are the last three steps, compared with up to 285 before them: at five
        /// minutes a quarter of an hour is compared with the day before it.
        step_seconds: u64 = 300;
    }

    /// What goes to standard error, one line an event.
    log: Log {
        /// `error`, `warn`, `info`, `debug` or `trace`, or directives by module such as
        /// `warn,forebay_daemon=debug`. At `info` a day of normal running fits on a screen; nothing is logged per
        /// block at any level.
        level: String = "info".to_string(), variable "FOREBAY_LOG";
    }

    /// What happens between SIGTERM and the end.
    drain: Drain {
        /// How long sessions may finish what they hold before the daemon goes. Ten seconds stay well below the
        /// thirty that systemd and Kubernetes allow, and cutting it short loses no block that was committed.
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
