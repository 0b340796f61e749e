//! TLS: a proxy of our own ends it before a real server, so that servers built without it will do.

use std::fs::{Permissions, set_permissions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use forebay_core::tier::{Health, Tier};
use forebay_io::redis::{Mode, RedisConfig, SentinelConfig, TlsConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, FileType, mknodat};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use tempfile::TempDir;

use crate::bed::{Bed, config, loaded};
use crate::conform::Suited;
use crate::purge::{OWN, emptied};
use crate::servers::{Kind, Server, until};

/// An authority, and certificates for a server of the name `cache.test` and for a client.
struct Papers {
    directory: TempDir,
}

impl Papers {
    fn new() -> Papers {
        let directory = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let papers = Papers { directory };
        std::fs::write(papers.path("ca.pem"), authority.pem()).unwrap();
        for (name, host) in [("server", "cache.test"), ("client", "forebay.test")] {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![host.to_string()]).unwrap();
            let certificate = params.signed_by(&key, &authority).unwrap();
            std::fs::write(papers.path(&format!("{name}.pem")), certificate.pem()).unwrap();
            std::fs::write(papers.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        papers
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn trusting(&self) -> TlsConfig {
        TlsConfig {
            ca_file: Some(self.path("ca.pem")),
            server_name: Some("cache.test".to_string()),
            ..TlsConfig::default()
        }
    }

    fn identified(&self) -> TlsConfig {
        TlsConfig {
            certificate_file: Some(self.path("client.pem")),
            key_file: Some(self.path("client.key")),
            ..self.trusting()
        }
    }
}

/// Ends TLS, with clients that have a certificate, and passes everything on to a Unix socket; returns its URL.
fn proxy(papers: &Papers, to: &Path) -> String {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(papers.path("ca.pem")).unwrap()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
    let chain = vec![CertificateDer::from_pem_file(papers.path("server.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(papers.path("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .unwrap();
    let (config, to) = (Arc::new(config), to.to_owned());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://127.0.0.1:{}", listener.local_addr().unwrap().port());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let session = ServerConnection::new(config.clone()).unwrap();
            let Ok(inner) = UnixStream::connect(&to) else { continue };
            // Whatever ends the one connection ends the other.
            thread::spawn(move || pass(session, stream, inner));
        }
    });
    url
}

fn pass(mut session: ServerConnection, mut outer: TcpStream, mut inner: UnixStream) -> io::Result<()> {
    outer.set_nonblocking(true)?;
    inner.set_nonblocking(true)?;
    let (mut inwards, mut outwards, mut bytes) = (Vec::new(), Vec::new(), vec![0; 64 << 10]);
    loop {
        let wants = |read: bool, write: bool| {
            let flags = [(read, PollFlags::IN), (write, PollFlags::OUT)];
            flags.into_iter().filter(|(wants, _)| *wants).fold(PollFlags::empty(), |all, (_, flag)| all | flag)
        };
        let mut polled = [
            PollFd::new(&outer, wants(inwards.is_empty(), session.wants_write())),
            PollFd::new(&inner, wants(outwards.is_empty(), !inwards.is_empty())),
        ];
        rustix::event::poll(&mut polled, None)?;
        if inwards.is_empty() {
            match session.read_tls(&mut outer) {
                Ok(0) => return Ok(()),
                Ok(_) => {
                    let result = session.process_new_packets();
                    while session.wants_write() && session.write_tls(&mut outer).is_ok() {}
                    result.map_err(io::Error::other)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            while let Ok(count @ 1..) = session.reader().read(&mut bytes) {
                inwards.extend_from_slice(&bytes[..count]);
            }
        }
        if let Some(count) = unless_blocked(inner.write(&inwards))? {
            inwards.drain(..count);
        }
        if outwards.is_empty()
            && let Some(count) = unless_blocked(inner.read(&mut bytes))?
        {
            if count == 0 {
                return Ok(());
            }
            outwards.extend_from_slice(&bytes[..count]);
        }
        let taken = session.writer().write(&outwards)?;
        outwards.drain(..taken);
        while session.wants_write() && unless_blocked(session.write_tls(&mut outer))?.is_some() {}
    }
}

fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        result => result.map(Some),
    }
}

#[test]
fn over_tls_it_is_a_tier() {
    let (papers, server) = (Papers::new(), Server::start(Kind::Valkey));
    let url = proxy(&papers, &server.socket());
    let config = RedisConfig { tls: papers.identified(), value_bytes: 100_000, ..config(&url) };
    forebay_io::conformance::check(&mut Suited::open(config.clone(), &|_| server.admin()));
    let mut bed = Bed::ready(&config);
    server.admin().must(&["FLUSHALL"]);
    bed.store_all(0..300, 100);
    assert_eq!(emptied(&bed, &[OWN]), (300, 300));
}

#[test]
fn a_server_or_client_without_the_right_papers_is_not_spoken_to() {
    let (papers, others, server) = (Papers::new(), Papers::new(), Server::start(Kind::Valkey));
    let url = proxy(&papers, &server.socket());
    let wrong_name = TlsConfig { server_name: Some("other.test".to_string()), ..papers.identified() };
    let wrong_authority = TlsConfig { ca_file: Some(others.path("ca.pem")), ..papers.identified() };
    let cases = [(wrong_name, "server_name"), (wrong_authority, "ca_file"), (papers.trusting(), "certificate_file")];
    for (tls, key) in cases {
        let mut bed = Bed::open(&RedisConfig { tls: tls.clone(), ..config(&url) });
        until(
            || {
                bed.turn();
                bed.redis.health() != Health::Healthy
            },
            || format!("{tls:?} passes"),
        );
        assert_eq!(bed.redis.report().counters.connections_made, 0);
        let (why, _) = bed.redis.report().last_error.expect("there was an error");
        assert!(why.contains(key), "{key}: {why}");
    }
    let mut bed = Bed::ready(&RedisConfig { tls: papers.identified(), ..config(&url) });
    bed.store_all([1], 5000);
    assert_eq!(bed.look(1, 5000), loaded(1, 5000));
}

#[test]
fn papers_that_are_replaced_on_disk_are_read_without_a_restart() {
    let (papers, earlier, server) = (Papers::new(), Papers::new(), Server::start(Kind::Valkey));
    let url = proxy(&papers, &server.socket());
    let config = RedisConfig { tls: earlier.identified(), ..config(&url) };
    let mut bed = Bed::open(&config);
    until(
        || {
            bed.turn();
            bed.redis.health() != Health::Healthy
        },
        || "papers of another authority pass".to_string(),
    );
    // One after the other, as a program that renews them does.
    for name in ["ca.pem", "client.pem", "client.key"] {
        std::fs::copy(papers.path(name), earlier.path("new")).unwrap();
        std::fs::rename(earlier.path("new"), earlier.path(name)).unwrap();
    }
    bed.await_service();
    bed.store_all([1], 5000);
    assert_eq!(bed.look(1, 5000), loaded(1, 5000));
    assert_eq!(emptied(&bed, &[OWN]), (1, 1));
}

#[test]
fn a_key_that_others_may_change_is_refused_as_a_password_would_be() {
    let papers = Papers::new();
    let config = RedisConfig { tls: papers.identified(), ..config("rediss://127.0.0.1:1") };
    config.check().unwrap();
    set_permissions(papers.path("client.key"), Permissions::from_mode(0o666)).unwrap();
    let error = config.check().unwrap_err();
    assert!(error.to_string().contains("client.key") && error.hint_text().is_some(), "{error}");
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_without_waiting_for_it() {
    let papers = Papers::new();
    let pipe = papers.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    let identified = papers.identified();
    for tls in [
        TlsConfig { ca_file: Some(pipe.clone()), ..identified.clone() },
        TlsConfig { certificate_file: Some(pipe.clone()), ..identified.clone() },
        TlsConfig { key_file: Some(pipe.clone()), ..identified },
    ] {
        let error = RedisConfig { tls, ..config("rediss://127.0.0.1:1") }.check().unwrap_err();
        assert!(error.told().contains("not a file"), "{}", error.told());
    }
}

#[test]
fn sentinels_are_spoken_to_by_tls_though_their_master_is_not() {
    let (papers, master) = (Papers::new(), Server::on_port(Kind::Valkey, &[]));
    let watch = format!("sentinel monitor blocks 127.0.0.1 {} 1\n", master.port.unwrap());
    let sentinel = Server::sentinel(Kind::Valkey, &watch);
    let url = proxy(&papers, &sentinel.socket()).replace("rediss://", "redis://");
    let config = RedisConfig {
        mode: Mode::Sentinel,
        sentinel: SentinelConfig { master: "blocks".to_string(), is_tls: Some(true), ..SentinelConfig::default() },
        tls: papers.identified(),
        ..config(&url)
    };
    let mut bed = Bed::ready(&config);
    bed.store_all([1], 5000);
    assert_eq!(bed.look(1, 5000), loaded(1, 5000));
}
