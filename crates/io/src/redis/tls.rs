//! The certificates and the key of TLS connections, from files that may be replaced at any time.
//!
//! Invariants: an event loop reads no file; [`Tls::renew_aside`] reads on a thread of its own, of which there is one at
//! a time. Files that cannot be read, or do not belong together, change nothing: what was read before stays in use.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{fs, io, thread};

use forebay_core::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use super::config::TlsConfig;
use crate::secret_file;
use crate::seldom::Seldom;

/// The machine's trusted certificates, on Debian and on Red Hat.
const SYSTEM_CERTIFICATES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// TLS settings.
#[derive(Clone)]
pub(super) struct Tls {
    files: Arc<Files>,
    /// Replaces the host's name.
    pub server_name: Option<ServerName<'static>>,
}

struct Files {
    config: TlsConfig,
    read: Mutex<Read>,
    is_reading: AtomicBool,
    warnings: Seldom,
}

/// What was read last.
struct Read {
    client: Arc<ClientConfig>,
    stamps: Stamps,
}

/// Device, inode, length and time of change of each file; none of one that cannot be found.
type Stamps = Vec<Option<(u64, u64, u64, i64, i64)>>;

impl Tls {
    pub fn of(config: &TlsConfig) -> Result<Tls> {
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|error| {
                Error::invalid("`server_name` is not a host name").with("server_name", name).source(error)
            })
        };
        let server_name = config.server_name.as_ref().map(name).transpose()?;
        let read = Mutex::new(Read::of(config)?);
        let files =
            Files { config: config.clone(), read, is_reading: AtomicBool::new(false), warnings: Seldom::default() };
        Ok(Tls { files: Arc::new(files), server_name })
    }

    /// For new connections.
    pub fn client(&self) -> Arc<ClientConfig> {
        self.files.read().client.clone()
    }

    /// Reads the files again if they were replaced. Waits for the disk.
    pub fn renew(&self) {
        self.files.renew();
    }

    /// The same on another thread, for the next connection but one.
    pub fn renew_aside(&self) {
        if self.files.is_reading.swap(true, Ordering::AcqRel) {
            return;
        }
        let files = self.files.clone();
        let renew = move || {
            files.renew();
            files.is_reading.store(false, Ordering::Release);
        };
        // Where a host gives no thread, there is another time.
        if thread::Builder::new().name("redis-tls-files".to_string()).spawn(renew).is_err() {
            self.files.is_reading.store(false, Ordering::Release);
        }
    }
}

impl Files {
    fn renew(&self) {
        if self.read().stamps == stamps(&self.config) {
            return;
        }
        match Read::of(&self.config) {
            Ok(read) => {
                *self.read() = read;
                tracing::info!(tier = "redis", "the files of TLS were replaced; new connections use them");
            }
            Err(error) if self.warnings.add(Instant::now()).is_some() => {
                tracing::warn!(
                    tier = "redis",
                    %error,
                    hint = error.hint_text(),
                    "cannot use the files of TLS that were replaced; what they held before stays in use"
                );
            }
            Err(_) => {}
        }
    }

    fn read(&self) -> MutexGuard<'_, Read> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Read {
    /// The stamps are older than what is read: a file that is replaced meanwhile is read once more.
    fn of(config: &TlsConfig) -> Result<Read> {
        let stamps = stamps(config);
        Ok(Read { client: Arc::new(client(config)?), stamps })
    }
}

fn stamps(config: &TlsConfig) -> Stamps {
    let stamp = |path: PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    };
    let files = [authorities(config), config.certificate_file.clone(), config.key_file.clone()];
    files.into_iter().flatten().map(stamp).collect()
}

/// The file that lists whom to trust.
fn authorities(config: &TlsConfig) -> Option<PathBuf> {
    let usual = || SYSTEM_CERTIFICATES.map(PathBuf::from).into_iter().find(|path| path.exists());
    config.ca_file.clone().or_else(usual)
}

fn client(config: &TlsConfig) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(ErrorKind::Unsupported, "cannot set up TLS").source(error))?
        .with_root_certificates(roots(config)?);
    match config.certificate_file.as_ref().zip(config.key_file.as_ref()) {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            builder.with_client_auth_cert(certificates(certificate)?, private_key(key)?).map_err(|error| {
                Error::invalid("the certificate and the key do not match")
                    .source(error)
                    .hint("set `certificate_file` and `key_file` to files that were made together")
            })
        }
    }
}

fn roots(config: &TlsConfig) -> Result<RootCertStore> {
    let Some(file) = authorities(config) else {
        return Err(Error::new(ErrorKind::NotFound, "this machine has no list of trusted certificates")
            .hint("install `ca-certificates`, or set `ca_file`"));
    };
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(&file)?);
    if added == 0 {
        return Err(Error::invalid("the file holds no certificate")
            .with("path", file.display())
            .hint("give a PEM file"));
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    // A pipe would be waited for.
    let whole = || match fs::metadata(path)?.is_file() {
        true => fs::read(path),
        false => Err(io::Error::other("it is not a file")),
    };
    let text = whole().map_err(|error| {
        Error::new(ErrorKind::Io, "cannot read a file of the TLS configuration")
            .with("path", path.display())
            .source(error)
            .hint("check the path and who may read it")
    })?;
    CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|error| {
        Error::invalid("cannot read certificates").with("path", path.display()).source(error).hint("give a PEM file")
    })
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&secret_file::read_file("key_file", path)?).map_err(|error| {
        Error::invalid("cannot read a private key").with("path", path.display()).source(error).hint("give a PEM file")
    })
}
