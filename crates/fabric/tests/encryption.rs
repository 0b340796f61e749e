//! What encryption keeps out: whoever reads, changes or ends what is between two endpoints. And what one side says if
//! the other does not encrypt.

mod support;

use std::io::{ErrorKind as Io, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_core::{Error, ErrorKind};
use forebay_fabric::{Address, Event, Fabric, Options, Rights, Verb};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, ServerConnection, SignatureScheme,
};
use support::{PATIENCE, Pair, Side, Transport, both, bytes_of, options, options_of, pattern, segment, take};

/// What stands between two endpoints does with two connections.
type Between = fn(TcpStream, TcpStream, &Seen);

/// What it found.
#[derive(Default)]
struct Seen {
    bytes: std::sync::Mutex<Vec<u8>>,
    /// Connections on which it got where it wanted.
    channels: AtomicUsize,
}

/// Stands in front of `target`. Returns where it listens.
fn stand_between(target: SocketAddr, between: Between) -> (SocketAddr, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, seen) = (listener.local_addr().unwrap(), Arc::new(Seen::default()));
    let ours = seen.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(target) else { return };
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
            }
            let seen = ours.clone();
            std::thread::spawn(move || between(client, server, &seen));
        }
    });
    (address, seen)
}

/// Forwards what comes until one side ends.
fn forward(mut from: &TcpStream, mut into: &TcpStream, change: &mut dyn FnMut(&mut [u8])) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        change(&mut bytes[..count]);
        if into.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = into.shutdown(Shutdown::Both);
}

fn both_ways(client: &TcpStream, server: &TcpStream, change: &(dyn Fn(&mut [u8], bool) + Sync)) {
    std::thread::scope(|scope| {
        scope.spawn(|| forward(client, server, &mut |bytes| change(bytes, true)));
        forward(server, client, &mut |bytes| change(bytes, false));
    });
}

/// `a` connects to `b` through what stands between; what `a` hears, and whether `b` has a peer.
fn meet(a: Options, b: Options, between: Between) -> (Result<(), Error>, bool, Arc<Seen>) {
    let (mut a, mut b) = (Side::new(a), Side::new(b));
    let Address::Tcp(target) = b.fabric.listen(&Address::parse("tcp://127.0.0.1:0").unwrap()).unwrap() else {
        panic!("another address");
    };
    let (address, seen) = stand_between(target, between);
    a.fabric.connect(&Address::Tcp(address)).unwrap();
    let said = both(&mut a, &mut b, |a, _| {
        let at = a.events.iter().position(|event| matches!(event, Event::Up { .. } | Event::Gone { .. }))?;
        Some(a.events.remove(at))
    });
    let said = match said {
        Event::Gone { reason, .. } => Err(reason),
        _ => Ok(()),
    };
    // Long enough for what is still on its way.
    for _ in 0..20 {
        b.poll(Duration::from_millis(1));
    }
    let is_up = b.events.iter().any(|event| matches!(event, Event::Up { .. }));
    (said, is_up, seen)
}

fn encrypting() -> Options {
    options_of(Transport::Encrypted)
}

/// Ends TLS on both sides, as who can change all packets and does not know the secret.
fn end_tls(client: TcpStream, server: TcpStream, seen: &Seen) {
    let [mut client, mut server] = [client, server];
    // The secret's proofs come before TLS, and are passed on as they are.
    for (forth, bytes) in [(true, 96), (false, 96), (true, 32)] {
        let mut record = vec![0; bytes];
        let (from, into) = if forth { (&mut client, &mut server) } else { (&mut server, &mut client) };
        if from.read_exact(&mut record).is_err() || into.write_all(&record).is_err() {
            return;
        }
    }
    let (listens, connects) = configurations();
    let name = ServerName::from(std::net::Ipv4Addr::UNSPECIFIED);
    let to_client: Connection = ServerConnection::new(listens).unwrap().into();
    let to_server: Connection = ClientConnection::new(connects, name).unwrap().into();
    let mut ends = [(to_client, client), (to_server, server)];
    for (tls, stream) in &mut ends {
        while tls.is_handshaking() {
            tls.complete_io(stream).expect("TLS with anybody");
        }
        // Taking turns from here on.
        stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    }
    seen.channels.fetch_add(1, Ordering::SeqCst);
    while pass_on(&mut ends, seen) {}
}

/// Decrypts what came on each side and encrypts it for the other. False when one has ended.
fn pass_on(ends: &mut [(Connection, TcpStream); 2], seen: &Seen) -> bool {
    for from in [0, 1] {
        let (tls, stream) = &mut ends[from];
        match tls.read_tls(stream) {
            Ok(0) => return false,
            Ok(_) => {}
            // The handshake may have brought some already.
            Err(error) if matches!(error.kind(), Io::WouldBlock | Io::TimedOut) => {}
            Err(_) => return false,
        }
        if tls.process_new_packets().is_err() {
            return false;
        }
        let mut plain = vec![0; 64 << 10];
        let count = tls.reader().read(&mut plain).unwrap_or(0);
        seen.bytes.lock().unwrap().extend_from_slice(&plain[..count]);
        let (tls, stream) = &mut ends[1 - from];
        tls.writer().write_all(&plain[..count]).unwrap();
        while tls.wants_write() {
            if tls.write_tls(stream).is_err() {
                return false;
            }
        }
    }
    true
}

/// As an endpoint has them, with another key.
fn configurations() -> (Arc<ServerConfig>, Arc<ClientConfig>) {
    let key = [&b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20"[..], &[9; 32]].concat();
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key)).unwrap();
    let public = CertificateDer::from(key.public_key().unwrap().to_vec());
    let key = Arc::new(CertifiedKey::new(vec![public], key));
    let provider = Arc::new(ring::default_provider());
    let server = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let server = server.with_no_client_auth();
    let server = server.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key)));
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = client.dangerous().with_custom_certificate_verifier(Arc::new(Anybody)).with_no_client_auth();
    (Arc::new(server), Arc::new(client))
}

#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[test]
fn who_ends_tls_between_the_two_gets_no_session_and_hears_nothing_but_one_proof() {
    for connections in [1, 4] {
        let (said, is_up, seen) = meet(Options { connections, ..encrypting() }, encrypting(), end_tls);
        let error = said.unwrap_err();
        assert!(!is_up, "the side that listens took it for a peer");
        assert!(seen.channels.load(Ordering::SeqCst) >= 1, "TLS was never ended: {error}");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("ends encryption")), "{error}");
        // The side that listens says nothing to one with another channel.
        let heard = seen.bytes.lock().unwrap().len();
        assert!(heard > 0 && heard.is_multiple_of(32) && heard <= 32 * usize::from(connections), "{heard} bytes");
    }
}

/// The same on one of four connections: the others do not make up for it.
#[test]
fn one_connection_with_somebody_between_ends_the_session_before_it_is_up() {
    fn end_one(client: TcpStream, server: TcpStream, seen: &Seen) {
        match seen.channels.fetch_add(1, Ordering::SeqCst) {
            2 => end_tls(client, server, seen),
            _ => both_ways(&client, &server, &|_, _| {}),
        }
    }
    let (said, is_up, _) = meet(encrypting(), encrypting(), end_one);
    assert!(said.is_err() && !is_up);
}

#[test]
fn nothing_of_the_bytes_and_messages_is_seen_on_the_way() {
    fn listen_in(client: TcpStream, server: TcpStream, seen: &Seen) {
        both_ways(&client, &server, &|bytes, _| seen.bytes.lock().unwrap().extend_from_slice(bytes));
    }
    for (transport, is_seen) in [(Transport::Tcp, true), (Transport::Encrypted, false)] {
        let (mut a, mut b) = (Side::new(options_of(transport)), Side::new(options_of(transport)));
        let Address::Tcp(target) = b.fabric.listen(&support::address(transport).0).unwrap() else { panic!() };
        let (address, seen) = stand_between(target, listen_in);
        let peer = a.fabric.connect(&Address::Tcp(address)).unwrap();
        both(&mut a, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        let bytes = 100_000;
        let (theirs, region) = b.memory(bytes, Rights::READ_AND_WRITE);
        let (ours, local) = a.memory(bytes, Rights::NONE);
        theirs.write(0, &pattern(1, bytes));
        let remote = a.fabric.import(peer, &b.fabric.export(region).unwrap()).unwrap();
        let run = |a: &mut Side, b: &mut Side, verb| {
            let segments = vec![segment(local, 0, remote, 0, bytes)];
            let operation = forebay_fabric::Operation { peer, verb, segments, deadline: None, notice: None };
            let op = a.fabric.submit(operation).unwrap();
            both(a, b, |a, _| support::end_of(a, op)).unwrap();
        };
        run(&mut a, &mut b, Verb::Read);
        assert!(bytes_of(&ours, 0, bytes) == pattern(1, bytes));
        ours.write(0, &pattern(2, bytes));
        run(&mut a, &mut b, Verb::Write);
        a.fabric.send(peer, pattern(3, 64)).unwrap();
        both(&mut a, &mut b, |_, b| take(b, |event| matches!(event, Event::Message { .. }).then_some(())));
        let seen = seen.bytes.lock().unwrap().clone();
        for seed in 1..=3 {
            let found = seen.windows(48).any(|window| window == &pattern(seed, 64)[..48]);
            assert_eq!(found, is_seen, "{transport:?}, bytes {seed}");
        }
    }
}

/// One bit of a payload, at whose place nothing else is changed.
#[test]
fn a_payload_that_was_changed_on_the_way_ends_the_session_and_no_operation_succeeds() {
    fn change_one(client: TcpStream, server: TcpStream, seen: &Seen) {
        both_ways(&client, &server, &|bytes, forth| {
            // Behind the handshake, of what the side that listens sends.
            if !forth && seen.channels.fetch_add(bytes.len(), Ordering::SeqCst) > 64 << 10 {
                bytes[bytes.len() / 2] ^= 1;
            }
        });
    }
    for (transport, is_noticed) in [(Transport::Tcp, false), (Transport::Encrypted, true)] {
        let one = || Side::new(Options { connections: 1, ..options_of(transport) });
        let (mut a, mut b) = (one(), one());
        let Address::Tcp(target) = b.fabric.listen(&support::address(transport).0).unwrap() else { panic!() };
        let (address, _) = stand_between(target, change_one);
        let peer = a.fabric.connect(&Address::Tcp(address)).unwrap();
        both(&mut a, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
        let bytes = 200_000;
        let (theirs, region) = b.memory(bytes, Rights::READ);
        let (ours, local) = a.memory(bytes, Rights::NONE);
        theirs.write(0, &pattern(1, bytes));
        let remote = a.fabric.import(peer, &b.fabric.export(region).unwrap()).unwrap();
        let segments = vec![segment(local, 0, remote, 0, bytes)];
        let operation = forebay_fabric::Operation { peer, verb: Verb::Read, segments, deadline: None, notice: None };
        let op = a.fabric.submit(operation).unwrap();
        let result = both(&mut a, &mut b, |a, _| support::end_of(a, op));
        let is_right = bytes_of(&ours, 0, bytes) == pattern(1, bytes);
        assert_eq!(result.is_err(), is_noticed, "{transport:?}");
        assert!(!is_right, "nothing was changed");
        if is_noticed {
            let reason = both(&mut a, &mut b, |a, _| {
                take(a, |event| match event {
                    Event::Gone { reason, .. } => Some((reason.kind(), reason.to_string())),
                    _ => None,
                })
            });
            assert!(
                reason.0 == ErrorKind::Corrupt && reason.1.contains("not encrypted as they should be"),
                "{reason:?}"
            );
        }
    }
}

#[test]
fn a_side_that_encrypts_alone_says_so_at_once() {
    fn pass(client: TcpStream, server: TcpStream, _: &Seen) {
        both_ways(&client, &server, &|_, _| {});
    }
    for (a, b, what) in [
        (encrypting(), options(), "this side encrypts, and the peer does not"),
        (options(), encrypting(), "the peer encrypts, and this side does not"),
    ] {
        let start = std::time::Instant::now();
        let (said, is_up, _) = meet(a, b, pass);
        let error = said.unwrap_err();
        assert!(error.to_string().contains(what) && error.hint_text().is_some(), "{error}");
        assert!(error.kind() == ErrorKind::Invalid && !is_up && start.elapsed() < Duration::from_secs(2));
    }
    // Another secret is another error.
    let secret = Some(forebay_fabric::Secret::new(b"another secret of the tests").unwrap());
    let (said, is_up, _) = meet(Options { secret, ..encrypting() }, encrypting(), pass);
    assert!(said.unwrap_err().to_string().contains("another secret") && !is_up);
}

#[test]
fn whoever_says_what_the_other_should_have_said_of_encryption_ends_the_handshake() {
    fn claim(client: TcpStream, server: TcpStream, seen: &Seen) {
        both_ways(&client, &server, &|bytes, _| {
            // Byte 14 of the first record, and of the second.
            if seen.channels.fetch_add(1, Ordering::SeqCst) < 2 && bytes.len() == 96 {
                bytes[14] ^= 1;
            }
        });
    }
    for connections in [1, 4] {
        let (said, is_up, _) = meet(Options { connections, ..encrypting() }, encrypting(), claim);
        assert!(said.is_err() && !is_up);
        let (said, is_up, _) = meet(Options { connections, ..options() }, options(), claim);
        assert!(said.is_err() && !is_up);
    }
}

#[test]
fn encryption_needs_a_secret() {
    let error = Fabric::new(Options { encrypt: true, ..Options::default() }).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
}

#[test]
fn bytes_through_ucx_are_refused_where_all_is_to_be_encrypted() {
    let address = Address::parse("ucx://127.0.0.1:7000").unwrap();
    let mut side = Side::new(encrypting());
    let refused = [side.fabric.listen(&address).unwrap_err(), side.fabric.connect(&address).unwrap_err()];
    for error in refused {
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("not encrypted"), "{error}");
        assert!(error.hint_text().is_some(), "{error}");
    }
}

#[test]
fn shared_memory_stays_as_it_is() {
    let home = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Side::new(encrypting()), Side::new(options()));
    let address = b.fabric.listen(&Address::Shm(home.path().join("a.sock"))).unwrap();
    a.fabric.connect(&address).unwrap();
    both(&mut a, &mut b, |a, _| take(a, |event| matches!(event, Event::Up { .. }).then_some(())));
}

/// More than fits the buffers of TLS and of the socket.
#[test]
fn a_peer_that_takes_nothing_holds_nobody_up_and_gets_all_later() {
    let mut pair = Pair::new(Transport::Encrypted);
    let bytes = 32 << 20;
    let (theirs, _, remote) = pair.remote(bytes, Rights::READ_AND_WRITE);
    let (ours, local) = pair.a.memory(bytes, Rights::NONE);
    ours.write(0, &pattern(5, bytes));
    let op = pair.submit(Verb::Write, vec![segment(local, 0, remote, 0, bytes)]).unwrap();
    let start = std::time::Instant::now();
    for _ in 0..50 {
        pair.a.poll(Duration::from_millis(1));
    }
    assert!(start.elapsed() < Duration::from_secs(10), "a call waited");
    pair.end_of(op).unwrap();
    assert!(bytes_of(&theirs, 0, bytes) == pattern(5, bytes));
}
