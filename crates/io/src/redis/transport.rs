//! A non-blocking socket to a server, plain or with TLS.
//!
//! Invariant: received bytes go only where the client says. On a plain socket they go from the kernel into the slot;
//! with TLS, from the session's buffer.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustls::ClientConnection;
use rustls::pki_types::ServerName;

use super::tls::Tls;
use crate::uring::{Piece, Region, wake_at};

/// TLS records hold at most 16 KiB.
const BOUNCE_BYTES: usize = 16 << 10;
/// A silent connection is probed after this time, so that a dead server's connection is not kept for hours.
const KEEPALIVE: Duration = Duration::from_secs(30);

pub(super) struct Transport {
    socket: OwnedFd,
    tls: Option<Box<ClientConnection>>,
    wake: Wake,
}

/// When the socket becomes readable.
enum Wake {
    /// With its first byte. The kernel offers nothing else for Unix sockets; TLS may wait for a record of its own.
    AtOnce,
    /// When this many bytes have arrived.
    At(u32),
}

impl Transport {
    /// Begins to connect; the socket becomes writable when connecting ends.
    pub fn tcp(address: SocketAddr, buffer_bytes: Option<u32>) -> Result<Transport, Errno> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = new_socket(family)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, KEEPALIVE)?;
        // However the connection ends, also with this process, the kernel drops what it has not sent. Else it would go
        // on sending stores that were given up, for minutes, and a purge would be over before they arrive.
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        if let Some(bytes) = buffer_bytes {
            sockopt::set_socket_recv_buffer_size(&socket, bytes as usize)?;
            sockopt::set_socket_send_buffer_size(&socket, bytes as usize)?;
        }
        begun(rustix::net::connect(&socket, &address))?;
        Ok(Transport { socket, tls: None, wake: Wake::At(1) })
    }

    pub fn unix(path: &Path) -> Result<Transport, Errno> {
        let socket = new_socket(AddressFamily::UNIX)?;
        begun(rustix::net::connect(&socket, &SocketAddrUnix::new(path)?))?;
        Ok(Transport { socket, tls: None, wake: Wake::AtOnce })
    }

    /// Starts TLS with a server of that host.
    pub fn with_tls(self, tls: &Tls, host: &str) -> Result<Transport, String> {
        let name = match &tls.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_string()).map_err(|error| error.to_string())?,
        };
        let session = ClientConnection::new(tls.files.get(), name).map_err(|error| error.to_string())?;
        Ok(Transport { tls: Some(Box::new(session)), wake: Wake::AtOnce, ..self })
    }

    /// Returns the connect error, if any, once the socket is writable.
    pub fn check(&self) -> Result<(), Errno> {
        sockopt::socket_error(&self.socket)?
    }

    /// Requests a wake-up only after `bytes` more have arrived; they must be certain to come if all goes well. The
    /// end of the connection wakes in any case.
    pub fn await_bytes(&mut self, bytes: u32) {
        match &mut self.wake {
            Wake::At(before) if *before != bytes => {
                *before = bytes;
                wake_at(self.socket.as_fd(), bytes);
            }
            Wake::AtOnce | Wake::At(_) => {}
        }
    }

    /// Whether received bytes may wait where the kernel does not see them.
    pub fn hides_bytes(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether accepted data are still to be sent.
    pub fn holds_bytes(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.wants_write())
    }

    /// Receives into `span` of the region, and the bytes after it into `tail`. `WouldBlock` if nothing is there, 0 at
    /// the end.
    pub fn receive(&mut self, pool: &Region, span: Option<(u64, usize)>, tail: &mut [u8]) -> io::Result<usize> {
        if self.tls.is_some() {
            return self.receive_tls(pool, span, tail);
        }
        loop {
            let received = match span {
                Some(span) => pool.receive(self.socket.as_fd(), span, tail),
                None => rustix::io::read(&self.socket, &mut *tail),
            };
            match received {
                Err(Errno::INTR) => {}
                received => return Ok(received?),
            }
        }
    }

    fn receive_tls(&mut self, pool: &Region, span: Option<(u64, usize)>, tail: &mut [u8]) -> io::Result<usize> {
        self.advance_tls()?;
        let session = self.tls.as_mut().expect("called for TLS only");
        let Some((offset, len)) = span else { return session.reader().read(tail) };
        let mut bounce = [0; BOUNCE_BYTES];
        let count = session.reader().read(&mut bounce[..len.min(BOUNCE_BYTES)])?;
        pool.write(offset, &bounce[..count]);
        Ok(count)
    }

    /// Moves received data into the session as far as it has space, and sends TLS's own answers.
    fn advance_tls(&mut self) -> io::Result<()> {
        let session = self.tls.as_mut().expect("called for TLS only");
        while session.wants_read() {
            match session.read_tls(&mut Socket(&self.socket)) {
                Ok(0) => break,
                Ok(_) => {
                    let state = session.process_new_packets();
                    let state = state.map_err(|error| io::Error::other(told(&error)))?;
                    if state.plaintext_bytes_to_read() > 0 {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.flush()
    }

    /// Sends some of `pieces`; `WouldBlock` if none could be sent.
    pub fn send(&mut self, pool: &Region, pieces: &[Piece<'_>]) -> io::Result<usize> {
        if self.tls.is_some() {
            return self.send_tls(pool, pieces);
        }
        loop {
            match pool.send(self.socket.as_fd(), pieces) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn send_tls(&mut self, pool: &Region, pieces: &[Piece<'_>]) -> io::Result<usize> {
        self.flush()?;
        let session = self.tls.as_mut().expect("called for TLS only");
        let mut bounce = [0; BOUNCE_BYTES];
        let count = match pieces.first() {
            Some(Piece::Bytes(bytes)) => session.writer().write(bytes)?,
            Some(Piece::Pool { offset, len }) => {
                let some = &mut bounce[..(*len).min(BOUNCE_BYTES)];
                pool.read(*offset, some);
                session.writer().write(some)?
            }
            None => 0,
        };
        self.flush()?;
        if count == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }

    /// Passes the session's pending data to the socket as far as it accepts them.
    pub fn flush(&mut self) -> io::Result<()> {
        let Some(session) = &mut self.tls else { return Ok(()) };
        while session.wants_write() {
            match session.write_tls(&mut Socket(&self.socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// For the TLS session: a socket that raises no signal.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, _) = rustix::io::retry_on_intr(|| rustix::net::recv(self.0, &mut *bytes, RecvFlags::DONTWAIT))?;
        Ok(count)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::io::retry_on_intr(|| rustix::net::send(self.0, bytes, flags))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn new_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
}

fn begun(connected: Result<(), Errno>) -> Result<(), Errno> {
    match connected {
        Err(Errno::INPROGRESS) => Ok(()),
        other => other,
    }
}

/// What TLS says of an error, and which setting it is about.
fn told(error: &rustls::Error) -> String {
    let said = in_words(&error.to_string());
    match setting_of(error) {
        Some(advice) => format!("{said}: {advice}"),
        None => said,
    }
}

fn setting_of(error: &rustls::Error) -> Option<&'static str> {
    use rustls::{AlertDescription as Alert, CertificateError as Bad, Error};
    let advice = match error {
        // Another authority may have the name of the one that is trusted.
        Error::InvalidCertificate(Bad::UnknownIssuer | Bad::BadSignature) => {
            "set `ca_file` to the authority that signed the server's certificate"
        }
        Error::InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "set `server_name` to a name in the server's certificate"
        }
        Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => {
            "the server's certificate has expired; renew it there"
        }
        Error::AlertReceived(Alert::CertificateExpired) => {
            "this host's client certificate has expired; renew `certificate_file`"
        }
        Error::AlertReceived(Alert::CertificateRequired) => {
            "the server asks for a client certificate; set `certificate_file` and `key_file`"
        }
        // In TLS 1.2 a server that misses a client's certificate says no more than this.
        Error::AlertReceived(Alert::HandshakeFailure) => {
            "a server that asks for a client certificate needs `certificate_file` and `key_file`"
        }
        Error::AlertReceived(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::DecryptError,
        ) => "the server does not take this host's client certificate; check `certificate_file`",
        _ => return None,
    };
    Some(advice)
}

/// What TLS says of an error, without the names of this program's own types: `unknown issuer` for `UnknownIssuer`.
fn in_words(said: &str) -> String {
    let word = |word: &str| {
        let is_name = word.chars().all(char::is_alphanumeric) && word.chars().skip(1).any(char::is_lowercase);
        let is_joined = word.chars().filter(|letter| letter.is_uppercase()).count() > 1;
        if !(is_name && is_joined && word.starts_with(char::is_uppercase)) {
            return word.to_owned();
        }
        word.chars().fold(String::new(), |told, letter| {
            let gap = if letter.is_uppercase() && !told.is_empty() { " " } else { "" };
            told + gap + &letter.to_lowercase().to_string()
        })
    };
    said.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use rustls::{AlertDescription, CertificateError, Error};

    use super::*;

    #[test]
    fn an_error_of_tls_is_told_in_words_with_the_setting_that_it_is_about() {
        let expired = told(&Error::AlertReceived(AlertDescription::CertificateExpired));
        let advice = "this host's client certificate has expired; renew `certificate_file`";
        assert_eq!(expired, format!("received fatal alert: certificate expired: {advice}"));
        assert_eq!(
            told(&Error::AlertReceived(AlertDescription::InternalError)),
            "received fatal alert: internal error"
        );
        let told = |error: Error| in_words(&error.to_string());
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert_eq!(told(unknown), "invalid peer certificate: unknown issuer");
        let refused = Error::AlertReceived(AlertDescription::CertificateRequired);
        assert_eq!(told(refused), "received fatal alert: certificate required");
        assert_eq!(in_words("an A, a TLS and a CA stay"), "an A, a TLS and a CA stay");
    }
}
