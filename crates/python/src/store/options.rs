//! Opens a tier from a URL and options.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use forebay_core::decorate::Timed;
use forebay_core::{Error, ErrorKind};
use forebay_io::StoreReport;
use forebay_io::fs::{Fs, FsConfig, Fsync};
use forebay_io::header::Sealing;
use forebay_io::redis::{Mode, Password, Redis, RedisConfig};
use forebay_io::secret_file::{SecretFile, read_secret};
use forebay_io::uring::Region;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Raised;

type Opened = (Box<dyn Shared>, OwnedFd);

/// A tier that says how its stores are.
pub trait Shared: Timed + Send {
    fn stores(&self) -> Vec<StoreReport>;
}

impl Shared for Redis {
    fn stores(&self) -> Vec<StoreReport> {
        vec![StoreReport::of_redis(self.report())]
    }
}

impl Shared for Fs {
    fn stores(&self) -> Vec<StoreReport> {
        StoreReport::of_fs(self.report())
    }
}

/// `file:///directory`, or a Redis URL. Contacts no server; a directory is examined.
pub fn open(url: &str, options: &Bound<'_, PyDict>, staging: Region) -> PyResult<Opened> {
    let options = Options(options.copy()?);
    // A URL may hold a password, so that only its scheme is repeated.
    match url.split_once("://") {
        Some(("file", directory)) => directory_at(directory, &options, staging),
        Some(("redis" | "rediss" | "unix", _)) => redis_at(url, &options, staging),
        Some((scheme, _)) => Err(no_store(&format!("no kind of store has URLs that begin with `{scheme}://`"))),
        None => Err(no_store("the URL of a store begins with its kind, and this one with none")),
    }
}

fn no_store(what: &str) -> PyErr {
    let hint = "give `redis://cache.internal`, `rediss://cache.internal` for TLS, `unix:///run/redis.sock` or \
                `file:///mnt/kv`; daemons alone reach buckets";
    Raised::from(Error::invalid(what).hint(hint)).into()
}

fn redis_at(url: &str, options: &Options<'_>, staging: Region) -> PyResult<Opened> {
    // Each caller is told what became of its own blocks.
    let config = RedisConfig::new(url.split(',').map(str::to_string).collect());
    let mut config = RedisConfig { has_breakers: false, ..config };
    options.take("connections", &mut config.connections)?;
    options.take("threads", &mut config.threads)?;
    options.take("key_prefix", &mut config.key_prefix)?;
    options.take("value_bytes", &mut config.value_bytes)?;
    config.ttl_seconds = options.get("ttl_seconds")?;
    config.tls.ca_file = options.get("ca_file")?;
    let password_file = options.get("password_file")?;
    config.credentials.password =
        password_file.map(|path: PathBuf| Password::File(SecretFile::new("password_file", path)));
    config.sealing = options.sealing()?;
    if options.get("cluster")?.unwrap_or(false) {
        config.mode = Mode::Cluster;
    }
    options.none_left()?;
    let redis = Redis::open(&config, staging).map_err(by_its_options)?;
    let wake = owned(redis.wake_fd().try_clone_to_owned())?;
    Ok((Box::new(redis), wake))
}

fn directory_at(directory: &str, options: &Options<'_>, staging: Region) -> PyResult<Opened> {
    let directory = PathBuf::from(directory);
    if directory.is_relative() {
        // From another working directory this would be another store.
        let hint = match std::path::absolute(&directory) {
            Ok(whole) => format!("write `file://{}`", whole.display()),
            Err(_) => "write `file:///` and the whole path".to_owned(),
        };
        return Err(Raised::from(Error::invalid("the directory of a store is relative").hint(hint)).into());
    }
    let mut config = FsConfig::new(vec![directory]);
    options.take("streams", &mut config.streams)?;
    options.take("buffers", &mut config.buffers)?;
    options.take("io_direct", &mut config.io_direct)?;
    options.take("shard_folders", &mut config.is_sharded)?;
    options.take("read_only", &mut config.read_only)?;
    config.capacity_bytes = options.get("capacity_bytes")?;
    config.sealing = options.sealing()?;
    if let Some(fsync) = options.get::<String>("fsync")? {
        config.fsync = match fsync.as_str() {
            "none" => Fsync::None,
            "data" => Fsync::Data,
            "all" => Fsync::All,
            _ => return Err(invalid("`fsync` is none, data or all")),
        };
    }
    options.none_left()?;
    let fs = Fs::open(&config, staging).map_err(by_its_options)?;
    let wake = owned(fs.wake_fd().try_clone_to_owned())?;
    Ok((Box::new(fs), wake))
}

fn by_its_options(error: Error) -> Raised {
    let hint = error.hint_text().map(in_its_words);
    Raised::from(match hint {
        Some(hint) => error.hint(hint),
        None => error,
    })
}

/// The tiers name the daemon's keys, whose last words are the names of a store's options, and the values of a TOML
/// file.
pub fn in_its_words(hint: &str) -> String {
    let words = [("`tier.fs.", "`"), ("`tier.redis.", "`"), ("`true`", "`True`"), ("`false`", "`False`")];
    words.into_iter().fold(hint.to_owned(), |hint, (theirs, ours)| hint.replace(theirs, ours))
}

/// Options that were not used yet.
struct Options<'py>(Bound<'py, PyDict>);

impl<'py> Options<'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(&self, name: &str) -> PyResult<Option<T>> {
        let value = self.0.get_item(name)?;
        if value.is_some() {
            self.0.del_item(name)?;
        }
        value.map(|value| value.extract()).transpose()
    }

    fn take<T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(&self, name: &str, into: &mut T) -> PyResult<()> {
        if let Some(value) = self.get(name)? {
            *into = value;
        }
        Ok(())
    }

    /// What the file holds that this option names. The options have no secrets themselves: they end up in logs.
    fn secret(&self, name: &'static str) -> PyResult<Option<String>> {
        let file: Option<PathBuf> = self.get(name)?;
        Ok(file.map(|file| read_secret(name, &file)).transpose().map_err(Raised::from)?)
    }

    fn sealing(&self) -> PyResult<Sealing> {
        let sealing = |secret: String| Sealing::with(secret.as_bytes()).map_err(Raised::from);
        Ok(self.secret("secret_file")?.map(sealing).transpose()?.unwrap_or_default())
    }

    fn none_left(&self) -> PyResult<()> {
        match self.0.keys().iter().next() {
            None => Ok(()),
            Some(name) => Err(invalid(&format!("this kind of store has no option `{name}`"))),
        }
    }
}

fn invalid(what: &str) -> PyErr {
    Raised::from(Error::invalid(what).hint("the docstring of `forebay.Store` lists the options")).into()
}

fn owned(fd: std::io::Result<OwnedFd>) -> PyResult<OwnedFd> {
    fd.map_err(|error| Raised::from(Error::new(ErrorKind::Io, "cannot wait for the store").source(error)).into())
}
