//! The entry of Redis and Valkey in `ALL`, the list of tiers.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::tier::Capabilities;
use forebay_core::tiers::Admission;
use forebay_core::{Result, size};
use forebay_io::StoreReport;
use forebay_io::header::Sealing;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::redis::{
    CONNECTIONS, Credentials, LONGEST_VALUE, Mode, Redis, RedisConfig, SentinelConfig, THREADS, TTL_SECONDS, TlsConfig,
};
use forebay_io::secret_file::read_secret;
use forebay_io::uring::Region;
use toml::Value;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec, Touches};
use crate::config::{Bytes, Demand, Secret, ServerUrl, Setting, settings};

settings! {
    /// A Redis or Valkey server that several hosts share. Each host finds the blocks that the others stored.
    "tier.redis": TierRedis {
        /// URLs of the server, of some nodes of a cluster, or of sentinels; an empty list switches the tier off. A URL
        /// begins with `redis://`, `rediss://` (TLS) or `unix:///path`. `user:password@` may stand before the host, and
        /// `/number` of a database after it.
        urls: Vec<ServerUrl> = Vec::new();
        /// File with the password for the servers in `urls`, whose URLs then name a user at most. The password stands
        /// alone in the file; one newline at its end is not part of it. The daemon reads the file when it starts.
        password_file: Option<PathBuf> = None;
        /// How the servers named by `urls` belong together.
        mode: RedisMode = RedisMode::Single;
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
        /// Milliseconds that a request may wait for a probe or a block before it is a miss.
        load_deadline_ms: u64 = 1000;
        /// Milliseconds within which a new connection must be ready for use.
        connect_timeout_ms: u64 = 1000;
        /// Milliseconds that one operation may take; if one takes longer, its connection is replaced.
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
}

/// How the servers that are named belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RedisMode {
    Single,
    Cluster,
    Sentinel,
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
        let is_one = self.sentinel_password.is_none() || self.sentinel_password_file.is_none();
        let must = "not be set where `tier.redis.sentinel_password` is set";
        let [has_password, has_file] = [self.sentinel_password.is_some(), self.sentinel_password_file.is_some()];
        let has_sentinels = has_password
            || has_file
            || !self.sentinel_master.is_empty()
            || self.sentinel_user.is_some()
            || self.sentinel_tls.is_some();
        let is_sentinel = self.mode == RedisMode::Sentinel;
        let is_whole = self.certificate_file.is_some() == self.key_file.is_some();
        let length = |bytes: u64| size::exact(bytes);
        let (least, most) = LONGEST_VALUE.into_inner();
        vec![
            Demand::new("tier.redis.sentinel_password_file", is_one, must),
            Demand::new(
                "tier.redis.urls",
                self.mode != RedisMode::Single || self.urls.len() <= 1,
                "be one URL where `tier.redis.mode` is `single`",
            ),
            Demand::new(
                "tier.redis.mode",
                is_sentinel || !has_sentinels,
                "be `sentinel` where a key that begins with `tier.redis.sentinel_` is set",
            ),
            Demand::new(
                "tier.redis.sentinel_master",
                !is_sentinel || !self.sentinel_master.is_empty(),
                "name the master where `tier.redis.mode` is `sentinel`",
            ),
            Demand::new(
                "tier.redis.sentinel_user",
                self.sentinel_user.is_none() || has_password || has_file,
                "not be set without `tier.redis.sentinel_password` or `tier.redis.sentinel_password_file`",
            ),
            Demand::new(
                "tier.redis.certificate_file",
                is_whole,
                "be set together with `tier.redis.key_file`, or neither",
            ),
            Demand::new(
                "tier.redis.key_prefix",
                !self.key_prefix.contains(['{', '}']) && self.key_prefix.len() <= 128,
                "have at most 128 bytes and no braces, which choose the slot in a cluster",
            ),
            Demand::within("tier.redis.connections", self.connections.into(), CONNECTIONS),
            Demand::within("tier.redis.threads", self.threads.into(), THREADS),
            Demand::within("tier.redis.ttl_seconds", self.ttl_seconds.unwrap_or(1), TTL_SECONDS),
            Demand::new(
                "tier.redis.value_bytes",
                LONGEST_VALUE.contains(&self.value_bytes.0),
                format!("be from {} to {}", length(least), length(most)),
            ),
            Demand::at_least_1("tier.redis.connect_timeout_ms", self.connect_timeout_ms),
            Demand::at_least_1("tier.redis.operation_timeout_ms", self.operation_timeout_ms),
        ]
    }

    fn options(&self) -> Options {
        Options::new(self.admission, self.load_deadline_ms, self.load_bytes_per_second, self.store_bytes_per_second)
    }

    /// Each node has its own, for each direction.
    fn has_own_breakers(&self) -> bool {
        true
    }

    fn touching(&self) -> Option<Touches> {
        Some(Touches::by_use(self.ttl_seconds.map(Duration::from_secs)))
    }

    fn check(&self) -> Result<()> {
        settings(self)?.check()
    }

    fn examine(&self) -> Vec<Result<String>> {
        settings(self).map_or_else(|error| vec![Err(error)], |config| forebay_io::redis::examine(&config))
    }

    fn claim(&self, sealing: &Sealing) -> Result<Box<dyn Claimed>> {
        Ok(Box::new(RedisConfig { sealing: sealing.clone(), ..settings(self)? }))
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

/// With the secrets that are in files.
fn settings(config: &TierRedis) -> Result<RedisConfig> {
    let secret = |key, file: &Option<PathBuf>| file.as_deref().map(|file| read_secret(key, file)).transpose();
    let password = secret("tier.redis.password_file", &config.password_file)?;
    let sentinel_password = secret("tier.redis.sentinel_password_file", &config.sentinel_password_file)?;
    let mode = match config.mode {
        RedisMode::Single => Mode::Single,
        RedisMode::Cluster => Mode::Cluster,
        RedisMode::Sentinel => Mode::Sentinel { master: config.sentinel_master.clone() },
    };
    let credentials = Credentials {
        user: config.sentinel_user.clone(),
        password: sentinel_password.or_else(|| config.sentinel_password.as_ref().map(|secret| secret.0.clone())),
    };
    Ok(RedisConfig {
        mode,
        credentials: Credentials { user: None, password },
        sentinel: SentinelConfig { credentials, is_tls: config.sentinel_tls },
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
    })
}

impl Setting for RedisMode {
    const KIND: &'static str = "`\"single\"`, `\"cluster\"` or `\"sentinel\"`";

    fn read(value: &Value) -> Option<RedisMode> {
        match value.as_str()? {
            "single" => Some(RedisMode::Single),
            "cluster" => Some(RedisMode::Cluster),
            "sentinel" => Some(RedisMode::Sentinel),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            RedisMode::Single => "single",
            RedisMode::Cluster => "cluster",
            RedisMode::Sentinel => "sentinel",
        };
        Some(Value::String(text.to_string()))
    }
}
