//! Encryption of a connection: TLS 1.3, in a channel that the secret is tied to.
//!
//! Nobody manages keys: each endpoint draws one at its start, and shows it as a raw public key (RFC 7250). Such a key
//! proves nothing, and anybody may take it. What proves who is there is the secret. So when TLS stands, both sides show
//! again that they know the secret, with a key that is derived from the secret *and the channel*: from 32 bytes that
//! TLS exports. Two channels have the same bytes only if they have the same key exchange and the same handshake. Who
//! stands in the middle and ends TLS on both sides has two channels. The proof of one is wrong in the other, and
//! without the secret no other can be made.
//!
//! Invariants: no call waits. A stranger gets no byte into TLS, because the secret is proven before TLS begins. Bytes
//! that are being sent are encrypted from a copy, and received bytes are decrypted in buffers of this file, so memory
//! is touched by copies alone, while an operation owns it. Buffers have limits: of a connection, about 64 KiB that were
//! received and 256 KiB that wait for the socket; an idle one keeps some 20 KiB, of rustls.

use std::io::{self, BufRead, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};
use rustix::buffer::spare_capacity;
use rustix::net::RecvFlags;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, ClientConnection, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage, ServerConfig, ServerConnection};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{Connection, DigitallySignedStruct, SignatureScheme};

use crate::memory::Memory;
use crate::socket::{self, Part, Place};
use crate::wire::broken;

/// What one record holds.
const RECORD_BYTES: usize = 16 << 10;
/// Encrypted before the socket gets them: as much as frames that go together, which a cache of the second level holds.
const SEND_BYTES: usize = 256 << 10;
/// Received in one call: some records.
const RECEIVE_BYTES: usize = 64 << 10;
/// Records without content may have as many bytes one after another: more than a handshake, which has about one KiB,
/// and more than a record that is not complete.
const SILENT_BYTES: usize = 2 * RECORD_BYTES;
/// Name of the bytes that TLS exports.
const LABEL: &[u8] = b"EXPORTER-forebay-transfer";
/// Before the 32 random bytes of an Ed25519 key, in PKCS #8.
const ED25519: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// The key of an endpoint, and how it uses TLS.
pub struct Keys {
    connects: Arc<ClientConfig>,
    listens: Arc<ServerConfig>,
}

impl Keys {
    /// From 32 bytes drawn at random. Costs a signature.
    pub fn new(random: [u8; 32]) -> Result<Keys> {
        let failed = |error: rustls::Error| Error::new(ErrorKind::Io, "cannot make a key for TLS").source(error);
        // One of each: both sides are of this crate, so there is nothing to choose.
        let provider = Arc::new(CryptoProvider {
            cipher_suites: vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256],
            kx_groups: vec![ring::kx_group::X25519],
            ..ring::default_provider()
        });
        let algorithms = provider.signature_verification_algorithms;
        let client = ClientConfig::builder_with_provider(provider.clone());
        let client = client.with_protocol_versions(&[&TLS13]).map_err(failed)?.dangerous();
        let mut connects = client.with_custom_certificate_verifier(Arc::new(AnyKey(algorithms))).with_no_client_auth();
        // A session that is taken up again would have no key exchange of its own.
        connects.resumption = Resumption::disabled();

        let key = PrivatePkcs8KeyDer::from([&ED25519[..], &random].concat());
        let key = ring::sign::any_eddsa_type(&key).map_err(failed)?;
        let public = key.public_key().expect("a key pair has it").to_vec();
        let key = Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], key));
        let server = ServerConfig::builder_with_provider(provider);
        let server = server.with_protocol_versions(&[&TLS13]).map_err(failed)?.with_no_client_auth();
        let mut listens = server.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key)));
        listens.session_storage = Arc::new(NoServerSessionStorage {});
        listens.send_tls13_tickets = 0;
        Ok(Keys { connects: Arc::new(connects), listens: Arc::new(listens) })
    }

    /// TLS of the side that connects.
    pub fn connect(&self) -> Result<Tls> {
        // Nobody looks at the name, and an address is not sent.
        let name = ServerName::from(std::net::Ipv4Addr::UNSPECIFIED);
        let session = ClientConnection::new(self.connects.clone(), name).map_err(unusable)?;
        Ok(Tls::new(session.into()))
    }

    /// TLS of the side that listens.
    pub fn listen(&self) -> Result<Tls> {
        let session = ServerConnection::new(self.listens.clone()).map_err(unusable)?;
        Ok(Tls::new(session.into()))
    }
}

/// Takes every key: see the head of the file.
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyKey {
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
        Err(rustls::Error::General("TLS 1.2 is not used".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// TLS of one connection, between its lines and its socket.
pub struct Tls {
    session: Connection,
    /// What was received, and how much of it the session has. No memory while the socket has nothing.
    received: Vec<u8>,
    taken: usize,
    /// Bytes of records since the last one with content.
    silent: usize,
    /// Bytes of content that the session holds.
    readable: usize,
    /// What leaves before the first record, as it is.
    clear: Vec<u8>,
}

impl Tls {
    fn new(mut session: Connection) -> Tls {
        // `send` keeps the limit.
        session.set_buffer_limit(None);
        Tls { session, received: Vec::new(), taken: 0, silent: 0, readable: 0, clear: Vec::new() }
    }

    /// Begins where the connection is: these bytes leave first, as they are, and these have come already.
    pub fn begin(&mut self, clear: Vec<u8>, received: Vec<u8>) {
        (self.clear, self.received) = (clear, received);
    }

    /// What only this channel has, once TLS stands.
    pub fn channel(&self) -> Option<[u8; 32]> {
        let is_up = !self.session.is_handshaking();
        is_up.then(|| self.session.export_keying_material([0; 32], LABEL, None).ok()).flatten()
    }

    /// Whether bytes wait for the socket.
    pub fn has_to_send(&self) -> bool {
        !self.clear.is_empty() || self.session.wants_write()
    }

    /// Encrypts bytes of the parts and sends what the socket takes. Returns how many bytes were encrypted: they are
    /// copied, and leave in this call or a later one. None are while earlier ones wait.
    pub fn send<'a>(&mut self, socket: BorrowedFd<'_>, parts: impl Iterator<Item = Part<'a>>) -> io::Result<usize> {
        if !self.flush(socket)? {
            return Ok(0);
        }
        let encrypted = self.encrypt(parts)?;
        self.flush(socket)?;
        Ok(encrypted)
    }

    fn encrypt<'a>(&mut self, parts: impl Iterator<Item = Part<'a>>) -> io::Result<usize> {
        let mut record = [0; RECORD_BYTES];
        let (mut filled, mut encrypted) = (0, 0);
        for part in parts {
            let bytes = match &part {
                Part::Bytes(bytes) => bytes.len(),
                Part::Memory(_, _, bytes) => *bytes as usize,
            };
            let mut at = 0;
            while at < bytes {
                let now = (bytes - at).min(RECORD_BYTES - filled);
                let place = &mut record[filled..filled + now];
                match &part {
                    Part::Bytes(bytes) => place.copy_from_slice(&bytes[at..at + now]),
                    Part::Memory(memory, offset, _) => memory.read(offset + at as u64, place),
                }
                (at, filled) = (at + now, filled + now);
                if filled == RECORD_BYTES {
                    self.session.writer().write_all(&record)?;
                    encrypted += std::mem::take(&mut filled);
                    if encrypted >= SEND_BYTES {
                        return Ok(encrypted);
                    }
                }
            }
        }
        self.session.writer().write_all(&record[..filled])?;
        Ok(encrypted + filled)
    }

    /// True if nothing waits any more.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.has_to_send() {
            let sent = match self.clear.is_empty() {
                true => self.session.write_tls(&mut Socket(socket)).map(drop),
                false => Socket(socket).write(&self.clear).map(|sent| drop(self.clear.drain(..sent))),
            };
            match sent {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// As a socket's: fewer bytes than there is room for only if the socket has no more. 0 if the other side closed,
    /// `WouldBlock` if there is nothing. `InvalidData` if somebody changed bytes, or breaks the rules of TLS.
    pub fn receive<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        places: impl Iterator<Item = Place<'a>>,
    ) -> io::Result<usize> {
        let mut received = 0;
        for mut place in places {
            let room = match &place {
                Place::Bytes(bytes) => bytes.len(),
                Place::Memory(_, _, bytes) => *bytes as usize,
            };
            let mut at = 0;
            while at < room {
                match self.decrypt(socket) {
                    Ok(true) => {}
                    Ok(false) => return Ok(received),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock && received > 0 => return Ok(received),
                    Err(error) => return Err(error),
                }
                let mut reader = self.session.reader();
                let content = reader.fill_buf()?;
                let now = content.len().min(room - at);
                put(&mut place, at, &content[..now]);
                reader.consume(now);
                self.readable -= now;
                (at, received) = (at + now, received + now);
            }
        }
        Ok(received)
    }

    /// Goes on to the next record with content. False if the other side closed.
    fn decrypt(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.readable == 0 {
            if self.taken == self.received.len() && !self.fill(socket)? {
                return Ok(false);
            }
            let mut rest = &self.received[self.taken..];
            let before = rest.len();
            self.session.read_tls(&mut rest)?;
            let taken = before - rest.len();
            (self.taken, self.silent) = (self.taken + taken, self.silent + taken);
            let state = self.session.process_new_packets();
            let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.readable = state.plaintext_bytes_to_read();
            if self.readable > 0 {
                self.silent = 0;
            } else if taken == 0 || self.silent > SILENT_BYTES || state.peer_has_closed() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "records without content"));
            }
        }
        Ok(true)
    }

    /// Receives records. False if the other side closed.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        self.received.clear();
        self.taken = 0;
        self.received.reserve_exact(RECEIVE_BYTES);
        let place = &mut self.received;
        let mut receive = || rustix::net::recv(socket, spare_capacity(place), RecvFlags::DONTWAIT);
        match rustix::io::retry_on_intr(&mut receive) {
            Ok((_, count)) => Ok(count > 0),
            Err(errno) => {
                self.received = Vec::new();
                Err(errno.into())
            }
        }
    }
}

fn put(place: &mut Place<'_>, at: usize, content: &[u8]) {
    match place {
        Place::Bytes(bytes) => bytes[at..at + content.len()].copy_from_slice(content),
        Place::Memory(memory, offset, _) => Memory::write(memory, *offset + at as u64, content),
    }
}

/// A socket that neither waits nor raises a signal.
struct Socket<'a>(BorrowedFd<'a>);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        socket::send(self.0, std::iter::once(Part::Bytes(bytes)), None)
    }

    fn write_vectored(&mut self, parts: &[io::IoSlice<'_>]) -> io::Result<usize> {
        socket::send(self.0, parts.iter().map(|part| Part::Bytes(part)), None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn unusable(error: rustls::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot begin TLS").source(error)
}

/// Of bytes that TLS does not take.
pub fn changed(error: io::Error) -> Error {
    broken("bytes that are not encrypted as they should be").source(error)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The side that connects and the side that listens, with their sockets, when TLS stands.
    fn pair() -> [(Tls, UnixStream); 2] {
        let (here, there) = UnixStream::pair().unwrap();
        let keys = || Keys::new([7; 32]).unwrap();
        let mut ends = [(keys().connect().unwrap(), here), (keys().listen().unwrap(), there)];
        while ends.iter().any(|(tls, _)| tls.channel().is_none()) {
            for (tls, socket) in &mut ends {
                tls.send(socket.as_fd(), std::iter::empty()).unwrap();
                let _ = receive(tls, socket, 1);
            }
        }
        ends
    }

    fn receive(tls: &mut Tls, socket: &UnixStream, most: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; most];
        let count = tls.receive(socket.as_fd(), std::iter::once(Place::Bytes(&mut bytes)))?;
        bytes.truncate(count);
        Ok(bytes)
    }

    #[test]
    fn both_ends_have_one_channel_and_no_two_channels_are_the_same() {
        let channels = [pair(), pair()].map(|ends| ends.map(|(tls, _)| tls.channel().unwrap()));
        assert_eq!(channels[0][0], channels[0][1]);
        assert_eq!(channels[1][0], channels[1][1]);
        assert_ne!(channels[0][0], channels[1][0], "with the same keys of the endpoints");
    }

    #[test]
    fn parts_of_any_lengths_arrive_in_places_of_any_lengths() {
        let [(mut here, one), (mut there, other)] = pair();
        let bytes: Vec<u8> = (0..700_000u32).map(|at| (at.wrapping_mul(7919) >> 5) as u8).collect();
        let memory = Memory::allocate(bytes.len() as u64).unwrap();
        memory.write(0, &bytes);
        let (mut sent, mut received, mut length) = (0, Vec::new(), 1);
        while received.len() < bytes.len() {
            let left = (bytes.len() - sent) as u64;
            let now = left.min(length);
            let parts = [
                Part::Memory(&memory, sent as u64, now),
                Part::Bytes(&bytes[sent + now as usize..bytes.len().min(sent + now as usize + 5)]),
            ];
            sent += here.send(one.as_fd(), parts.into_iter()).unwrap();
            received.extend(receive(&mut there, &other, length as usize % 3000 + 1).unwrap_or_default());
            length = length * 5 % 100_003;
        }
        assert!(received == bytes);
        assert_eq!(receive(&mut there, &other, 1).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop((here, one));
        assert!(receive(&mut there, &other, 1).unwrap().is_empty(), "the end");
    }

    #[test]
    fn keys_change_under_way_but_not_without_end() {
        let [(mut here, one), (mut there, other)] = pair();
        for round in 0..100 {
            here.session.refresh_traffic_keys().unwrap();
            here.send(one.as_fd(), std::iter::once(Part::Bytes(&[round; 10]))).unwrap();
            assert_eq!(receive(&mut there, &other, 100).unwrap(), [round; 10]);
            there.send(other.as_fd(), std::iter::once(Part::Bytes(&[round; 10]))).unwrap();
            assert_eq!(receive(&mut here, &one, 100).unwrap(), [round; 10]);
        }
        for _ in 0..100 {
            here.session.refresh_traffic_keys().unwrap();
            here.send(one.as_fd(), std::iter::empty()).unwrap();
        }
        assert_eq!(receive(&mut there, &other, 1).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_other_side_cannot_end_tls_and_keep_the_connection() {
        let [(mut here, one), (mut there, other)] = pair();
        here.session.send_close_notify();
        here.send(one.as_fd(), std::iter::empty()).unwrap();
        assert_eq!(receive(&mut there, &other, 1).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
