//! The entry of Redis and Valkey in `ALL`, the list of tiers.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use forebay_core::tier::Capabilities;
use forebay_core::tiers::Admission;
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::redis::{Credentials, Mode, Password, Redis, RedisConfig, SentinelConfig, TlsConfig};
use forebay_io::secret_file::SecretFile;
use forebay_io::uring::Region;
use forebay_io::{Demand, StoreReport};
use toml::Value;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec, Touches};
use crate::config::{Bytes, Idle, Secret, ServerUrl, Setting, settings};

settings! {
    /// A Redis or Valkey server that several hosts share. Each host finds the blocks that the others stored.
    "tier.redis": TierRedis {
        /// URLs of the server, of some nodes of a cluster, or of sentinels; an empty list switches the tier off. A URL
        /// begins with `redis://`, `rediss://` (TLS) or `unix:///path`. `user:password@` may stand before the host, or
        /// `user@` with a `password_file`, and `/number` of a database after it.
        urls: Vec<ServerUrl> = Vec::new();
        /// File with the password for the servers in `urls`, whose URLs then name a user at most. The password stands
        /// alone in the file; one newline at its end is not part of it. The daemon reads the file when it starts, and
        /// again if a connection fails after the file was replaced.
        password_file: Option<PathBuf> = None;
        /// How the servers named by `urls` belong together.
        mode: Mode = Mode::Single;
        /// Name of the master, as the sentinels know it.
        sentinel_master: String = String::new();
        /// User name for sentinels that have users; needs a password of theirs. The user and password in `urls` are for
        /// the master alone.
        sentinel_user: Option<String> = None;
        /// Password for the sentinels. Not set by default, for sentinels without a password.
        sentinel_password: Option<Secret> = None;
        /// File with the password for the sentinels, instead of `sentinel_password`; like `password_file`.
        sentinel_password_file: Option<PathBuf> = None;
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
        value_bytes: Bytes = Bytes(forebay_io::redis::VALUE_BYTES);
        /// Seconds after which the server drops a block that no host used meanwhile. Not set by default: the server
        /// then drops blocks when it runs out of memory, if its `maxmemory-policy` lets it.
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
        /// Milliseconds that a request may wait for a probe or a block before it is a miss. A wait for room in the pool
        /// does not count: it ends after half a second in which no block comes.
        load_deadline_ms: u64 = 1000;
        /// Milliseconds within which a new connection must be ready for use.
        connect_timeout_ms: u64 = 1000;
        /// Milliseconds that one operation may take; if one takes longer, its connection is replaced.
        operation_timeout_ms: u64 = 5000;
        /// File of the certificate authorities that may have signed the server's certificate, for `rediss://`. By
        /// default, those that this machine trusts. The daemon reads this file and the next two again when they were
        /// replaced and a connection fails.
        ca_file: Option<PathBuf> = None;
        /// File of the client certificate, for servers that require one; needs `key_file`.
        certificate_file: Option<PathBuf> = None;
        /// File of the private key of `certificate_file`. Like `password_file`, it must not be another user's, and
        /// nobody else may write to it.
        key_file: Option<PathBuf> = None;
        /// Name in the server's certificate, if it differs from the host in the URL.
        server_name: Option<String> = None;
    }
}

impl TierSpec for TierRedis {
    fn capabilities(&self) -> Capabilities {
        Redis::CAPABILITIES
    }

    fn is_configured(&self) -> bool {
        !self.urls.is_empty()
    }

    fn switch(&self) -> &'static str {
        "tier.redis.urls"
    }

    fn demands(&self) -> Vec<Demand> {
        let config = settings(self);
        let mut demands = config.demands(SECTION);
        if self.is_configured() {
            let is_one = self.sentinel_password.is_none() || self.sentinel_password_file.is_none();
            let must = "not be set where `tier.redis.sentinel_password` is set";
            demands.push(Demand::new("tier.redis.sentinel_password_file", is_one, must));
            demands.extend(config.joint_demands(SECTION));
        }
        demands
    }

    fn idle(&self) -> Vec<Idle> {
        let is_tls = |url: &ServerUrl| url.0.starts_with("rediss://");
        let has_tls = self.urls.iter().any(is_tls) || self.sentinel_tls == Some(true);
        let keys = ["ca_file", "certificate_file", "key_file", "server_name"];
        let because = "no URL of `tier.redis.urls` begins with `rediss://`";
        match has_tls {
            true => Vec::new(),
            false => vec![Idle::new(keys.map(|key| format!("{SECTION}{key}")), because)],
        }
    }

    fn operation_timeout(&self) -> Option<(&'static str, Duration)> {
        Some(("tier.redis.operation_timeout_ms", Duration::from_millis(self.operation_timeout_ms)))
    }

    fn options(&self) -> Options {
        Options::new(self.admission, self.load_deadline_ms, self.load_bytes_per_second, self.store_bytes_per_second)
    }

    /// Each node has its own, for each direction.
    fn has_own_breakers(&self) -> bool {
        true
    }

    fn touching(&self) -> Option<Touches> {
        Some(Touches { asks_per_second: 2048, ..Touches::by_use(self.ttl_seconds.map(Duration::from_secs)) })
    }

    fn check(&self) -> Result<()> {
        settings(self).check()
    }

    fn examine(&self) -> Vec<Result<String>> {
        forebay_io::redis::examine(&settings(self))
    }

    fn claim(&self, sealing: &Sealing) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(RedisConfig { sealing: sealing.clone(), ..settings(self) }))
    }
}

impl Claimed for RedisConfig {
    fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        Ok(Box::new(Redis::open(self, Region::of_pool(pool.clone()))?))
    }
}

impl Driven for Redis {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Redis::wake_fd(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        vec![StoreReport::of_redis(self.report())]
    }

    fn breakers_opened(&self) -> u64 {
        self.report().counters.breakers_opened
    }

    fn places(&self) -> Vec<Place> {
        Redis::places(self)
    }
}

/// What stands before each key.
const SECTION: &str = "tier.redis.";

fn settings(config: &TierRedis) -> RedisConfig {
    let in_file =
        |key, file: &Option<PathBuf>| file.as_ref().map(|file| Password::File(SecretFile::new(key, file.clone())));
    let password = in_file("tier.redis.password_file", &config.password_file);
    let sentinel_password = in_file("tier.redis.sentinel_password_file", &config.sentinel_password_file);
    let given = || config.sentinel_password.as_ref().map(|secret| Password::Text(secret.0.clone()));
    let credentials = Credentials { user: config.sentinel_user.clone(), password: sentinel_password.or_else(given) };
    RedisConfig {
        mode: config.mode,
        credentials: Credentials { user: None, password },
        sentinel: SentinelConfig { master: config.sentinel_master.clone(), credentials, is_tls: config.sentinel_tls },
        connections: config.connections as usize,
        threads: config.threads as usize,
        ttl_seconds: config.ttl_seconds,
        value_bytes: config.value_bytes.0,
        key_prefix: config.key_prefix.clone(),
        tls: TlsConfig {
            ca_file: config.ca_file.clone(),
            certificate_file: config.certificate_file.clone(),
            key_file: config.key_file.clone(),
            server_name: config.server_name.clone(),
        },
        connect_timeout: Duration::from_millis(config.connect_timeout_ms),
        operation_timeout: Duration::from_millis(config.operation_timeout_ms),
        ..RedisConfig::new(config.urls.iter().map(|url| url.0.clone()).collect())
    }
}

impl Setting for Mode {
    const KIND: &'static str = "`\"single\"`, `\"cluster\"` or `\"sentinel\"`";

    fn read(value: &Value) -> Option<Mode> {
        match value.as_str()? {
            "single" => Some(Mode::Single),
            "cluster" => Some(Mode::Cluster),
            "sentinel" => Some(Mode::Sentinel),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            Mode::Single => "single",
            Mode::Cluster => "cluster",
            Mode::Sentinel => "sentinel",
        };
        Some(Value::String(text.to_string()))
    }
}
