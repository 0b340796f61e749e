//! What an operator says about a Redis tier, and what follows from it before any server is asked.
//!
//! Invariant: whatever cannot be right in a configuration is an error of [`Settings::of`], with a hint; a server that
//! is absent or refuses is not.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use super::address::{Address, Credentials, Url};

/// Where certificates that everybody trusts lie, on Debian and on Red Hat.
const SYSTEM_CERTIFICATES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// How the servers that are named belong together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mode {
    /// One server.
    Single,
    /// Nodes of a cluster, of which any may be asked for the others.
    Cluster,
    /// Sentinels that know where `master` is. Scheme, user and password of the URLs are for the master, and for the
    /// sentinels [`SentinelConfig`].
    Sentinel { master: String },
}

/// How sentinels are spoken to, where that is not how their master is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SentinelConfig {
    /// None if they ask for none; the master's are never told to a sentinel.
    pub credentials: Credentials,
    /// Whether by TLS; without it, if the URLs begin with `rediss`.
    pub is_tls: Option<bool>,
}

/// For URLs that begin with `rediss`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsConfig {
    /// Who may have signed the server's certificate; without it, those whom this machine trusts.
    pub ca_file: Option<PathBuf>,
    /// Who we are, if the server asks: both or none.
    pub certificate_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host of the URL.
    pub server_name: Option<String>,
}

/// See the module's head.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RedisConfig {
    /// One server, or several seeds of a cluster, or several sentinels.
    pub urls: Vec<String>,
    pub mode: Mode,
    pub sentinel: SentinelConfig,
    /// Connections to each server for loads and stores; lookups have one of their own. If there are several, the
    /// first of them carries no stores.
    pub connections: usize,
    /// Threads that these connections are spread over. One moves 2 to 4 GB/s; more are for faster networks.
    pub threads: usize,
    /// Operations in flight on one connection.
    pub pipeline_depth: usize,
    /// Bytes in flight to one server, of loads and of stores each; a single operation may have more. The server
    /// copies replies into memory of its own before it sends them, so many large values at once cost cache misses:
    /// 16 MiB took up to half again as much CPU time as 2 MiB (bench/reports/2026-11-21-redis.md). A network wants its
    /// bandwidth times its round trip, at least.
    pub pipeline_bytes: u64,
    /// Loads that wait or are in flight; more are refused.
    pub queued_loads: usize,
    /// Stores and removals, likewise. Each store pins a slot of the pool.
    pub queued_stores: usize,
    /// Lookups, likewise.
    pub queued_finds: usize,
    /// Seconds after which the server forgets a value; without it, when it needs the room.
    pub ttl_seconds: Option<u64>,
    /// Blocks longer than this are stored as several values. All who share a store must agree on it. Redis 7 moves
    /// values of 16 MiB at a third of the speed of values of 1 MiB; Valkey does not care.
    pub value_bytes: u64,
    /// Goes before the names of all values.
    pub key_prefix: String,
    pub tls: TlsConfig,
    /// For a connection until it may be used, greeting included.
    pub connect_timeout: Duration,
    /// For one operation on a connection, and with it for the connection.
    pub operation_timeout: Duration,
    /// Of a socket, each way. Without it the kernel chooses, and grows them with the connection's speed.
    pub socket_buffer_bytes: Option<u32>,
}

impl RedisConfig {
    pub fn new(urls: Vec<String>) -> RedisConfig {
        RedisConfig {
            urls,
            mode: Mode::Single,
            sentinel: SentinelConfig::default(),
            connections: 4,
            threads: 1,
            pipeline_depth: 32,
            pipeline_bytes: 2 << 20,
            queued_loads: 1024,
            queued_stores: 256,
            queued_finds: 8192,
            ttl_seconds: None,
            value_bytes: 1 << 20,
            key_prefix: "forebay:".to_string(),
            tls: TlsConfig::default(),
            connect_timeout: Duration::from_secs(1),
            operation_timeout: Duration::from_secs(5),
            socket_buffer_bytes: None,
        }
    }

    /// Whether it can be right, before anything is opened; errors with what to change.
    pub fn check(&self) -> Result<()> {
        Settings::of(self).map(|_| ())
    }
}

/// A configuration that can be right.
#[derive(Clone)]
pub(super) struct Settings {
    pub config: RedisConfig,
    /// At least one.
    pub addresses: Vec<Address>,
    /// To the servers that hold blocks.
    pub access: Access,
    /// To those that are asked where these are.
    pub scout_access: Access,
    pub database: u32,
}

/// How to be let in.
#[derive(Clone)]
pub(super) struct Access {
    pub credentials: Credentials,
    pub tls: Option<Tls>,
}

/// How to speak TLS.
#[derive(Clone)]
pub(super) struct Tls {
    pub client: Arc<ClientConfig>,
    /// Instead of the host's name.
    pub server_name: Option<ServerName<'static>>,
}

impl Settings {
    pub fn of(config: &RedisConfig) -> Result<Settings> {
        let urls = config.urls.iter().map(|url| Url::parse(url)).collect::<Result<Vec<_>>>()?;
        let Some(first) = urls.first() else {
            return Err(Error::invalid("a redis tier needs a server").hint("set `urls` to at least one URL"));
        };
        let differs = |url: &Url| {
            (url.is_tls, &url.credentials, url.database) != (first.is_tls, &first.credentials, first.database)
        };
        if urls.iter().any(differs) {
            return Err(Error::invalid("the urls of a redis tier differ in more than the server")
                .hint("give all of them the same scheme, user, password and database"));
        }
        check_mode(config, first)?;
        check_limits(config)?;
        let tls = |is_wanted: bool| is_wanted.then(|| Tls::of(&config.tls)).transpose();
        let access = Access { credentials: first.credentials.clone(), tls: tls(first.is_tls)? };
        let scout_access = match &config.mode {
            Mode::Single | Mode::Cluster => access.clone(),
            Mode::Sentinel { .. } => Access {
                credentials: config.sentinel.credentials.clone(),
                tls: tls(config.sentinel.is_tls.unwrap_or(first.is_tls))?,
            },
        };
        Ok(Settings {
            addresses: urls.iter().map(|url| url.address.clone()).collect(),
            access,
            scout_access,
            database: first.database,
            config: config.clone(),
        })
    }
}

fn check_mode(config: &RedisConfig, first: &Url) -> Result<()> {
    let is_unix = matches!(first.address, Address::Unix(_));
    let has_sentinels = matches!(config.mode, Mode::Sentinel { .. });
    if !has_sentinels && config.sentinel != SentinelConfig::default() {
        return Err(Error::invalid("sentinels are configured, and the mode knows none")
            .hint("set `mode` to `sentinel`, or leave their user, password and TLS out"));
    }
    let Credentials { user, password } = &config.sentinel.credentials;
    if user.is_some() && password.is_none() {
        return Err(Error::invalid("a user of the sentinels needs a password").hint("set both, or the password alone"));
    }
    match &config.mode {
        Mode::Single if config.urls.len() > 1 => Err(Error::invalid("a single redis server has one url")
            .with("urls", config.urls.len())
            .hint("name one server, or set `mode` to `cluster` or `sentinel`")),
        Mode::Cluster if first.database != 0 => {
            Err(Error::invalid("a cluster has no databases").hint("leave the `/db` of the urls out"))
        }
        Mode::Cluster | Mode::Sentinel { .. } if is_unix => {
            Err(Error::invalid("clusters and sentinels tell addresses of TCP").hint("use `redis://` or `rediss://`"))
        }
        Mode::Sentinel { master } if master.is_empty() => {
            Err(Error::invalid("sentinels are asked for a master by its name").hint("set the master's name"))
        }
        _ => Ok(()),
    }
}

fn check_limits(config: &RedisConfig) -> Result<()> {
    let limits = [
        ("connections", config.connections as u64, 1, 1024),
        ("threads", config.threads as u64, 1, 64),
        ("pipeline_depth", config.pipeline_depth as u64, 1, 4096),
        ("pipeline_bytes", config.pipeline_bytes, 1, 1 << 40),
        ("queued_loads", config.queued_loads as u64, 1, 1 << 20),
        ("queued_stores", config.queued_stores as u64, 1, 1 << 20),
        ("queued_finds", config.queued_finds as u64, 1, 1 << 20),
        ("ttl_seconds", config.ttl_seconds.unwrap_or(1), 1, 1 << 40),
        // The upper end is what servers allow, less the header.
        ("value_bytes", config.value_bytes, 4096, 511 << 20),
    ];
    for (name, value, least, most) in limits {
        if !(least..=most).contains(&value) {
            let error = Error::invalid(format!("`{name}` is out of range")).with("value", value);
            return Err(error.hint(format!("choose {least} to {most}")));
        }
    }
    if config.key_prefix.contains(['{', '}']) || config.key_prefix.len() > 128 {
        return Err(Error::invalid("a key prefix has no braces and at most 128 bytes")
            .with("key_prefix", &config.key_prefix)
            .hint("braces choose the slot of a cluster; use other characters"));
    }
    if config.connect_timeout.is_zero() || config.operation_timeout.is_zero() {
        return Err(Error::invalid("a timeout of nothing fails everything").hint("choose some seconds"));
    }
    Ok(())
}

impl Tls {
    fn of(config: &TlsConfig) -> Result<Tls> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::new(ErrorKind::Unsupported, "cannot set up TLS").source(error))?
            .with_root_certificates(roots(config.ca_file.as_deref())?);
        let client = match (&config.certificate_file, &config.key_file) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => builder
                .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
                .map_err(|error| Error::invalid("certificate and key do not fit together").source(error))?,
            _ => {
                return Err(Error::invalid("a client certificate needs its key, and a key its certificate")
                    .hint("set both `certificate_file` and `key_file`, or none"));
            }
        };
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|error| {
                Error::invalid("`server_name` is no name of a host").with("server_name", name).source(error)
            })
        };
        Ok(Tls { client: Arc::new(client), server_name: config.server_name.as_ref().map(name).transpose()? })
    }
}

fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let usual = || SYSTEM_CERTIFICATES.map(Path::new).into_iter().find(|path| path.exists());
    let Some(file) = file.or_else(usual) else {
        return Err(Error::new(ErrorKind::NotFound, "this machine has no list of trusted certificates")
            .hint("install `ca-certificates`, or set `ca_file`"));
    };
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(file)?);
    if added == 0 {
        return Err(Error::invalid("no certificate is found").with("path", file.display()).hint("give a PEM file"));
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = read(path)?;
    CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|error| {
        Error::invalid("cannot read certificates").with("path", path.display()).source(error).hint("give a PEM file")
    })
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|error| {
        Error::invalid("cannot read a private key").with("path", path.display()).source(error).hint("give a PEM file")
    })
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| {
        Error::new(ErrorKind::Io, "cannot read a file of the TLS configuration")
            .with("path", path.display())
            .source(error)
            .hint("check the path and who may read it")
    })
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
            SentinelConfig { credentials: Credentials { user, password }, is_tls: None }
        };
        let watched = Mode::Sentinel { master: "blocks".into() };
        let bad = [
            config(&[]),
            config(&["redis://a", "redis://b"]),
            RedisConfig { urls: vec!["redis://a".into(), "rediss://b".into()], ..cluster.clone() },
            RedisConfig { urls: vec!["redis://a/1".into()], ..cluster.clone() },
            RedisConfig { urls: vec!["unix:///a".into()], ..cluster },
            RedisConfig { mode: Mode::Sentinel { master: String::new() }, ..good.clone() },
            RedisConfig { sentinel: of_sentinels(None, Some("secret")), ..good.clone() },
            RedisConfig { sentinel: of_sentinels(Some("me"), None), mode: watched, ..good.clone() },
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
    fn sentinels_are_spoken_to_as_their_master_unless_it_is_said() {
        let mode = Mode::Sentinel { master: "blocks".into() };
        let settings = |url: &str, is_tls| {
            let sentinel = SentinelConfig { is_tls, ..SentinelConfig::default() };
            Settings::of(&RedisConfig { mode: mode.clone(), sentinel, ..config(&[url]) }).unwrap()
        };
        for (url, is_tls, expected) in [
            ("redis://:p@cache", None, (false, false)),
            ("rediss://:p@cache", None, (true, true)),
            ("rediss://:p@cache", Some(false), (true, false)),
            ("redis://:p@cache", Some(true), (false, true)),
        ] {
            let settings = settings(url, is_tls);
            assert_eq!((settings.access.tls.is_some(), settings.scout_access.tls.is_some()), expected, "{url}");
            assert_eq!(settings.access.credentials.password.as_deref(), Some("p"));
            assert_eq!(settings.scout_access.credentials.password, None, "a master's password is not a sentinel's");
        }
    }
}
