//! The certificates and the key of TLS connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use super::config::TlsConfig;
use super::replaceable::Replaceable;
use crate::secret_file;

/// The machine's trusted certificates, on Debian and on Red Hat.
const SYSTEM_CERTIFICATES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// The certificates that a system trusts take some 200 KiB.
const MOST_BYTES: u64 = 16 << 20;

/// TLS settings.
#[derive(Clone)]
pub(super) struct Tls {
    pub files: Replaceable<Arc<ClientConfig>>,
    /// Replaces the host's name.
    pub server_name: Option<ServerName<'static>>,
}

impl Tls {
    pub fn of(config: &TlsConfig) -> Result<Tls> {
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|error| {
                Error::invalid("`server_name` is not a host name").with("server_name", name).source(error)
            })
        };
        let server_name = config.server_name.as_ref().map(name).transpose()?;
        let (for_paths, for_read) = (config.clone(), config.clone());
        let read = move || Ok(Arc::new(client(&for_read)?));
        Ok(Tls { files: Replaceable::new("TLS", move || files(&for_paths), read)?, server_name })
    }
}

fn files(config: &TlsConfig) -> Vec<PathBuf> {
    let files = [authorities(config), config.certificate_file.clone(), config.key_file.clone()];
    files.into_iter().flatten().collect()
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
    let whole = secret_file::open(path).and_then(|file| secret_file::whole(&file, MOST_BYTES));
    let text = whole.map_err(|error| {
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
