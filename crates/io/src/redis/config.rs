//! An operator's settings for a Redis tier, and everything that follows from them before any server is contacted.
//!
//! Invariant: everything wrong in a configuration is an error of [`Settings::of`], with a hint. A server that is
//! absent or refuses is not.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_core::{BlockKey, Error, Result, size};

use super::address::{Address, Credentials, FORMS, MASK, Password, Url, without_password};
use super::name;
use super::replaceable::Replaceable;
use super::tls::Tls;
use crate::demand::{self, Demand, LONGEST_MS};
use crate::header::Sealing;

/// Longer blocks are stored as several values, where nothing else is configured. Hosts with the same setting share
/// blocks, so daemons and programs need the same default.
pub const VALUE_BYTES: u64 = 1 << 20;

/// Bytes of a value. The upper end is the servers' limit minus the header.
const VALUES: RangeInclusive<u64> = 4096..=511 << 20;
/// Operations of one kind that may wait.
const MOST_QUEUED: u64 = 1 << 20;

/// How the configured servers belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// One server.
    Single,
    /// Nodes of a cluster; any of them can list the others.
    Cluster,
    /// Sentinels that know the address of their master. Scheme, user and password of the URLs are for the master;
    /// [`SentinelConfig`] has those for the sentinels.
    Sentinel,
}

/// Whom to ask sentinels for, and how to contact them where that differs from their master.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SentinelConfig {
    /// The name under which the sentinels watch the master.
    pub master: String,
    /// None if the sentinels require none; the master's credentials are never sent to a sentinel.
    pub credentials: Credentials,
    /// Whether to use TLS; without it, TLS is used if the URLs begin with `rediss`.
    pub is_tls: Option<bool>,
}

/// For URLs that begin with `rediss`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsConfig {
    /// The authorities that may have signed the server's certificate; without it, those that this machine trusts.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate, if the server requires one: both files or none.
    pub certificate_file: Option<PathBuf>,
    /// The private key of `certificate_file`.
    pub key_file: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host of the URL.
    pub server_name: Option<String>,
}

/// See the module documentation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RedisConfig {
    /// One server, or several seeds of a cluster, or several sentinels.
    pub urls: Vec<String>,
    /// The password where the URLs have none, as they then must. A user stands in the URLs: `redis://user@host`.
    pub credentials: Credentials,
    /// Says what `urls` names.
    pub mode: Mode,
    /// With or without the secret of the hosts that share the servers.
    pub sealing: Sealing,
    /// As it is by default, unless the mode is [`Mode::Sentinel`].
    pub sentinel: SentinelConfig,
    /// Connections to each server for loads and stores; lookups have a separate one. If there are several, the first
    /// carries no stores.
    pub connections: usize,
    /// Threads for these connections. One moves 2 to 4 GB/s; use more for faster networks.
    pub threads: usize,
    /// Operations in flight on one connection.
    pub pipeline_depth: usize,
    /// Limit on the bytes in flight to one server, for loads and for stores separately; a single operation may have
    /// more. The server copies replies into its own memory before it sends them, so many large values at once cost
    /// cache misses: 16 MiB took up to half again as much CPU time as 2 MiB (bench/reports/2026-11-21-redis.md). A
    /// network needs at least its bandwidth times its round trip.
    pub pipeline_bytes: u64,
    /// Loads that may wait or be in flight; more are refused.
    pub queued_loads: usize,
    /// Stores and removals, and touches where values end by time, that may wait or be in flight; more are refused.
    /// Each store pins a slot of the pool.
    pub queued_stores: usize,
    /// Lookups that may wait or be in flight; more are refused.
    pub queued_finds: usize,
    /// Seconds after which the server drops a value; without it, when the server needs the space.
    pub ttl_seconds: Option<u64>,
    /// Longer blocks are stored as several values. All users of a shared store must use the same setting. Redis 7
    /// moves values of 16 MiB at a third of the speed of values of 1 MiB; Valkey shows no difference.
    pub value_bytes: u64,
    /// Prefix of the names of all values.
    pub key_prefix: String,
    /// Used only where a connection has TLS.
    pub tls: TlsConfig,
    /// Deadline for a new connection until it may be used, greeting included.
    pub connect_timeout: Duration,
    /// Deadline for one operation on a connection. A late operation ends the connection.
    pub operation_timeout: Duration,
    /// Size of a socket's buffer in each direction. Without it the kernel chooses, and grows the buffers with the
    /// connection's speed.
    pub socket_buffer_bytes: Option<u32>,
    /// Whether a node that fails again and again is left alone for a while, in the direction in which it fails.
    pub has_breakers: bool,
}

impl RedisConfig {
    /// The defaults for these servers, as [`Mode::Single`]. Nothing is contacted or checked.
    pub fn new(urls: Vec<String>) -> RedisConfig {
        RedisConfig {
            urls,
            credentials: Credentials::default(),
            mode: Mode::Single,
            sealing: Sealing::default(),
            sentinel: SentinelConfig::default(),
            connections: 4,
            threads: 1,
            pipeline_depth: 32,
            pipeline_bytes: 2 << 20,
            queued_loads: 1024,
            queued_stores: 256,
            queued_finds: 8192,
            ttl_seconds: None,
            value_bytes: VALUE_BYTES,
            key_prefix: "forebay:".to_string(),
            tls: TlsConfig::default(),
            connect_timeout: Duration::from_secs(1),
            operation_timeout: Duration::from_secs(5),
            socket_buffer_bytes: None,
            has_breakers: true,
        }
    }

    /// Checks the settings before anything is opened. Errors say what to change.
    pub fn check(&self) -> Result<()> {
        Settings::of(self).map(|_| ())
    }

    /// What single values must hold. `section` stands before the names of the settings.
    pub fn demands(&self, section: &str) -> Vec<Demand> {
        let key = |name: &str| format!("{section}{name}");
        let (shortest, longest) = (size::exact(*VALUES.start()), size::exact(*VALUES.end()));
        let within = |name: &str, value, most| Demand::within(key(name), value, 1..=most);
        vec![
            within("connections", self.connections as u64, 1024),
            within("threads", self.threads as u64, 64),
            within("pipeline_depth", self.pipeline_depth as u64, 4096),
            within("pipeline_bytes", self.pipeline_bytes, 1 << 40),
            within("queued_loads", self.queued_loads as u64, MOST_QUEUED),
            within("queued_stores", self.queued_stores as u64, MOST_QUEUED),
            within("queued_finds", self.queued_finds as u64, MOST_QUEUED),
            within("ttl_seconds", self.ttl_seconds.unwrap_or(1), 1 << 40),
            Demand::new(
                key("value_bytes"),
                VALUES.contains(&self.value_bytes),
                format!("be from {shortest} to {longest}"),
            ),
            Demand::new(
                key("key_prefix"),
                !self.key_prefix.contains(['{', '}']) && self.key_prefix.len() <= 128,
                "have at most 128 bytes and no braces, which choose the slot in a cluster",
            ),
            within("connect_timeout_ms", self.connect_timeout.as_millis() as u64, LONGEST_MS),
            within("operation_timeout_ms", self.operation_timeout.as_millis() as u64, LONGEST_MS),
        ]
    }

    /// What the values must hold together, if the tier is on. `section` as for [`RedisConfig::demands`].
    pub fn joint_demands(&self, section: &str) -> Vec<Demand> {
        let key = |name: &str| format!("{section}{name}");
        let is_sentinel = self.mode == Mode::Sentinel;
        let Credentials { user, password } = &self.sentinel.credentials;
        let mut demands = self.url_demands(section);
        demands.extend([
            Demand::new(
                key("urls"),
                self.mode != Mode::Single || self.urls.len() <= 1,
                format!("be one URL where `{section}mode` is `single`"),
            ),
            Demand::new(
                key("mode"),
                is_sentinel || self.sentinel == SentinelConfig::default(),
                format!("be `sentinel` where a key that begins with `{section}sentinel_` is set"),
            ),
            Demand::new(
                key("sentinel_master"),
                !is_sentinel || !self.sentinel.master.is_empty(),
                format!("name the master where `{section}mode` is `sentinel`"),
            ),
            Demand::new(
                key("sentinel_user"),
                user.is_none() || password.is_some(),
                format!("not be set without `{section}sentinel_password` or `{section}sentinel_password_file`"),
            ),
            Demand::new(
                key("certificate_file"),
                self.tls.certificate_file.is_some() == self.tls.key_file.is_some(),
                format!("be set together with `{section}key_file`, or neither"),
            ),
            Demand::new(
                key("sentinel_password"),
                *password != Some(Password::from(MASK)),
                format!("be the password itself, not the `{MASK}` that commands print in its place"),
            ),
        ]);
        demands
    }

    fn url_demands(&self, section: &str) -> Vec<Demand> {
        let demand = |holds, must: String| Demand::new(format!("{section}urls"), holds, must);
        let mut urls = Vec::new();
        for text in &self.urls {
            match Url::read(text) {
                Ok(url) => urls.push(url),
                Err(why) => {
                    let shown = without_password(text);
                    return vec![demand(false, format!("hold URLs, and `{shown}` is none: {why}; {FORMS}"))];
                }
            }
        }
        let Some(first) = urls.first() else { return Vec::new() };
        let is_like_first = |url: &Url| {
            (url.is_tls, &url.credentials, url.database) == (first.is_tls, &first.credentials, first.database)
        };
        let is_unix = matches!(first.address, Address::Unix(_));
        let Credentials { user, password } = &first.credentials;
        let is_given = self.credentials.password.is_some();
        let is_given_twice = is_given && password.as_ref().is_some_and(|password| *password != Password::from(""));
        let is_known = user.is_none() || password.is_some() || is_given;
        vec![
            demand(
                urls.iter().all(is_like_first),
                "differ in the server only: give all URLs the same scheme, user, password and database".to_owned(),
            ),
            demand(
                self.mode != Mode::Cluster || first.database == 0,
                format!("name no database where `{section}mode` is `cluster`: a cluster has only database 0"),
            ),
            demand(
                self.mode == Mode::Single || !is_unix,
                format!("begin with `redis://` or `rediss://` unless `{section}mode` is `single`"),
            ),
            demand(!is_given_twice, format!("hold no password where `{section}password_file` is set")),
            demand(
                is_known,
                format!("hold a user's password, as in `user:password@`, where `{section}password_file` is not set"),
            ),
        ]
    }

    /// Writes the name of a part of a block into `name`, replacing its content.
    pub(super) fn write_name(&self, name: &mut Vec<u8>, key: &BlockKey, part: u32) {
        name::write(name, &self.key_prefix, key, self.sealing.version(), part);
    }
}

/// A configuration that was checked.
#[derive(Clone)]
pub(super) struct Settings {
    pub config: RedisConfig,
    /// At least one.
    pub addresses: Vec<Address>,
    /// Access to the servers that hold blocks.
    pub access: Access,
    /// Access to the servers that know where those are.
    pub sentinel_access: Access,
    pub database: u32,
}

/// Credentials and TLS settings, as their files hold them now.
#[derive(Clone)]
pub(super) struct Access {
    pub user: Option<String>,
    pub password: Option<Replaceable<String>>,
    pub tls: Option<Tls>,
}

impl Access {
    fn of(credentials: &Credentials, tls: Option<Tls>) -> Result<Access> {
        let password = credentials.password.clone().map(|password| {
            let paths = password.clone();
            Replaceable::new("the password", move || paths.file().into_iter().collect(), move || password.read())
        });
        Ok(Access { user: credentials.user.clone(), password: password.transpose()?, tls })
    }

    /// Reads again what was replaced. Waits for the disk until `due`.
    pub fn renew(&self, due: Instant) {
        self.password.iter().for_each(|password| password.renew(due));
        self.tls.iter().for_each(|tls| tls.files.renew(due));
    }

    /// The same on other threads, for the next connection but one.
    pub fn renew_aside(&self) {
        self.password.iter().for_each(Replaceable::renew_aside);
        self.tls.iter().for_each(|tls| tls.files.renew_aside());
    }
}

impl Settings {
    pub fn of(config: &RedisConfig) -> Result<Settings> {
        let urls = config.urls.iter().map(|url| Url::parse(url)).collect::<Result<Vec<_>>>()?;
        let Some(first) = urls.first() else {
            return Err(Error::invalid("a redis tier needs the url of a server").hint("set `urls` to at least one URL"));
        };
        demand::check(config.joint_demands(""))?;
        demand::check(config.demands(""))?;
        let tls = |is_wanted: bool| is_wanted.then(|| Tls::of(&config.tls)).transpose();
        let access = Access::of(&credentials(config, first), tls(first.is_tls)?)?;
        let sentinel_access = match &config.mode {
            Mode::Single | Mode::Cluster => access.clone(),
            Mode::Sentinel => {
                Access::of(&config.sentinel.credentials, tls(config.sentinel.is_tls.unwrap_or(first.is_tls))?)?
            }
        };
        Ok(Settings {
            addresses: urls.iter().map(|url| url.address.clone()).collect(),
            access,
            sentinel_access,
            database: first.database,
            config: config.clone(),
        })
    }
}

/// For the servers that the URLs name.
fn credentials(config: &RedisConfig, first: &Url) -> Credentials {
    let Credentials { user, password } = first.credentials.clone();
    // Nothing behind a user's colon is a password only if there is no other.
    Credentials { user, password: config.credentials.password.clone().or(password) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(urls: &[&str]) -> RedisConfig {
        RedisConfig::new(urls.iter().map(|url| url.to_string()).collect())
    }

    #[test]
    fn what_cannot_be_right_is_refused_with_a_hint() {
        let good = config(&["redis://cache"]);
        let cluster = RedisConfig { mode: Mode::Cluster, ..good.clone() };
        let tls = |tls| RedisConfig { tls, ..config(&["rediss://cache"]) };
        let missing = Some(PathBuf::from("/nowhere/ca.pem"));
        let of_sentinels = |user: Option<&str>, password: Option<&str>| {
            let [user, password] = [user, password].map(|text| text.map(str::to_owned));
            SentinelConfig {
                credentials: Credentials { user, password: password.map(Password::Text) },
                ..SentinelConfig::default()
            }
        };
        let watched = |sentinel| SentinelConfig { master: "blocks".into(), ..sentinel };
        let given = Credentials { user: None, password: Some("secret".into()) };
        let bad = [
            config(&[]),
            config(&["redis://a", "redis://b"]),
            config(&["redis://user@a"]),
            RedisConfig { credentials: given.clone(), ..config(&["redis://u:secret@a"]) },
            RedisConfig { urls: vec!["redis://a".into(), "rediss://b".into()], ..cluster.clone() },
            RedisConfig { urls: vec!["redis://a/1".into()], ..cluster.clone() },
            RedisConfig { urls: vec!["unix:///a".into()], ..cluster },
            RedisConfig { mode: Mode::Sentinel, ..good.clone() },
            RedisConfig { sentinel: of_sentinels(None, Some("secret")), ..good.clone() },
            RedisConfig { sentinel: watched(of_sentinels(Some("me"), None)), mode: Mode::Sentinel, ..good.clone() },
            RedisConfig { sentinel: watched(of_sentinels(None, Some("***"))), mode: Mode::Sentinel, ..good.clone() },
            RedisConfig {
                urls: vec!["redis://:secret@a".into()],
                credentials: Credentials { user: None, password: Some("secret".into()) },
                ..good.clone()
            },
            RedisConfig { connections: 0, ..good.clone() },
            RedisConfig { value_bytes: 100, ..good.clone() },
            RedisConfig { key_prefix: "{a}".into(), ..good.clone() },
            RedisConfig { operation_timeout: Duration::ZERO, ..good.clone() },
            tls(TlsConfig { ca_file: missing.clone(), ..TlsConfig::default() }),
            tls(TlsConfig { key_file: missing, ..TlsConfig::default() }),
        ];
        for config in bad {
            let error = Settings::of(&config).err().unwrap_or_else(|| panic!("{config:?} passes"));
            assert!(error.hint_text().is_some(), "{error} has no hint");
            assert!(!format!("{:?} {error:?}", config.sentinel).contains("secret"), "{error:?} tells a password");
        }
        assert!(Settings::of(&good).is_ok());
    }

    #[test]
    fn the_urls_user_gets_the_password_that_is_given_beside_them() {
        let credentials = |url: &str, password: Option<&str>, mode| {
            let given = Credentials { user: None, password: password.map(Password::from) };
            let master = if mode == Mode::Sentinel { "blocks" } else { "" };
            let sentinel = SentinelConfig { master: master.to_owned(), ..SentinelConfig::default() };
            let config = RedisConfig { credentials: given, mode, sentinel, ..config(&[url]) };
            let Access { user, password, .. } = Settings::of(&config).unwrap().access;
            (user.unwrap_or_default(), password.as_ref().map(Replaceable::get))
        };
        let of = |user: &str, password: &str| (user.to_owned(), Some(password.to_owned()));
        for mode in [Mode::Single, Mode::Cluster, Mode::Sentinel] {
            for url in ["redis://fb@cache", "redis://fb:@cache"] {
                assert_eq!(credentials(url, Some("pw"), mode), of("fb", "pw"), "{url}");
            }
            // As a user without a password is greeted.
            assert_eq!(credentials("redis://fb:@cache", None, mode), of("fb", ""));
            assert_eq!(credentials("redis://cache", Some("pw"), mode), of("", "pw"));
        }
    }

    #[test]
    fn sentinels_are_spoken_to_as_their_master_unless_it_is_said() {
        let settings = |url: &str, is_tls| {
            let sentinel = SentinelConfig { master: "blocks".into(), is_tls, ..SentinelConfig::default() };
            Settings::of(&RedisConfig { mode: Mode::Sentinel, sentinel, ..config(&[url]) }).unwrap()
        };
        for (url, is_tls, expected) in [
            ("redis://:p@cache", None, (false, false)),
            ("rediss://:p@cache", None, (true, true)),
            ("rediss://:p@cache", Some(false), (true, false)),
            ("redis://:p@cache", Some(true), (false, true)),
        ] {
            let settings = settings(url, is_tls);
            assert_eq!((settings.access.tls.is_some(), settings.sentinel_access.tls.is_some()), expected, "{url}");
            assert_eq!(settings.access.password.map(|password| password.get()).as_deref(), Some("p"));
            assert!(settings.sentinel_access.password.is_none(), "a master's password is not a sentinel's");
        }
    }
}
