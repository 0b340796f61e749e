//! Where an endpoint listens: `tcp://HOST:PORT`, or `shm:///PATH` for processes on one host.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// An idle connection is probed, so that the end of a host is noticed.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// A peer is disconnected whose host answers no probe, or that takes nothing, for this long.
const STALLED_MS: u32 = 30_000;
/// Connections that the kernel keeps for us; more come while we are busy if many peers connect at once.
const BACKLOG: i32 = 256;

/// Where an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    /// The path of a Unix socket, over which peers hand each other their memory.
    Shm(PathBuf),
}

impl Address {
    /// `tcp://HOST:PORT` or `shm:///PATH`. A host's name is looked up, which may take seconds.
    pub fn parse(text: &str) -> Result<Address> {
        let wrong = |why: &str| {
            let error = Error::invalid(format!("an address {why}")).with("address", text);
            error.hint("write `tcp://10.0.0.1:7000` between hosts, or `shm:///run/user/1000/kv.sock` on one host")
        };
        if let Some(path) = text.strip_prefix("shm://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() { Ok(Address::Shm(path)) } else { Err(wrong("needs an absolute path")) };
        }
        let Some(host) = text.strip_prefix("tcp://") else { return Err(wrong("begins with `tcp://` or `shm://`")) };
        let mut found = host.to_socket_addrs().map_err(|error| wrong("was not found").source(error))?;
        found.next().map(Address::Tcp).ok_or_else(|| wrong("was not found"))
    }

    /// Whether only processes of this host reach it.
    pub fn is_on_this_host(&self) -> bool {
        match self {
            Address::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Address::Shm(_) => true,
        }
    }

    /// A socket that listens there, and the address with the port that it got.
    pub(crate) fn listen(&self) -> Result<(OwnedFd, Address)> {
        let failed = |errno: Errno| {
            let error = Error::new(ErrorKind::Io, "cannot listen").with("address", self).source(errno);
            match errno {
                Errno::ADDRINUSE => error.hint("another process listens there; use port 0 for a free one"),
                _ => error,
            }
        };
        let socket = self.socket().map_err(failed)?;
        match self {
            Address::Tcp(address) => {
                // A restarted endpoint can listen where its predecessor's connections wait for their end.
                sockopt::set_socket_reuseaddr(&socket, true).map_err(failed)?;
                rustix::net::bind(&socket, address).map_err(failed)?;
                rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
                let bound = rustix::net::getsockname(&socket).map_err(failed)?;
                let bound = SocketAddr::try_from(bound).map_err(failed)?;
                Ok((socket, Address::Tcp(bound)))
            }
            Address::Shm(path) => {
                let name = SocketAddrUnix::new(path).map_err(failed)?;
                remove_stale(path, &name);
                // The file of the socket gets this mode, so no other user can connect at any time.
                rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
                rustix::net::bind(&socket, &name).map_err(failed)?;
                rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
                Ok((socket, self.clone()))
            }
        }
    }

    /// A socket that is connecting there. Never waits.
    pub(crate) fn connect(&self) -> Result<OwnedFd> {
        let failed = |errno: Errno| cannot_connect().with("address", self).source(errno);
        let socket = self.socket().map_err(failed)?;
        let connected = match self {
            Address::Tcp(address) => {
                tune(&socket).map_err(failed)?;
                rustix::net::connect(&socket, address)
            }
            Address::Shm(path) => {
                let name = SocketAddrUnix::new(path).map_err(failed)?;
                rustix::net::connect(&socket, &name).and_then(|()| match is_trusted(&socket)? {
                    true => Ok(()),
                    false => Err(Errno::PERM),
                })
            }
        };
        match connected {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// The next connection, if there is one and this process may talk to the other.
    pub(crate) fn accept(&self, listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let socket = rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        match self {
            Address::Tcp(_) => tune(&socket)?,
            Address::Shm(_) if !is_trusted(&socket)? => return Ok(None),
            Address::Shm(_) => {}
        }
        Ok(Some(socket))
    }

    fn socket(&self) -> rustix::io::Result<OwnedFd> {
        let family = match self {
            Address::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
            Address::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
            Address::Shm(_) => AddressFamily::UNIX,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "tcp://{address}"),
            Address::Shm(path) => write!(f, "shm://{}", path.display()),
        }
    }
}

pub(crate) fn cannot_connect() -> Error {
    let hint = "does the peer listen there, and does no firewall stand between?";
    Error::new(ErrorKind::Unavailable, "cannot connect to the peer").hint(hint)
}

/// Whether the other side of a Unix socket may see this process's memory: this user's, or root's.
fn is_trusted(socket: &OwnedFd) -> rustix::io::Result<bool> {
    let user = sockopt::socket_peercred(socket)?.uid;
    Ok(user == rustix::process::geteuid() || user.is_root())
}

/// Sizes of buffers stay the kernel's: it adapts them to the route, and a fixed one would end that.
fn tune(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_user_timeout(socket, STALLED_MS)
}

/// Removes the socket of a process that was killed: nobody answers there.
fn remove_stale(path: &Path, name: &SocketAddrUnix) {
    // A living one whose queue is full would make a blocking probe wait.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    if probe.is_ok_and(|probe| rustix::net::connect(probe.as_fd(), name) == Err(Errno::CONNREFUSED)) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_how_and_where() {
        for text in ["tcp://127.0.0.1:7000", "tcp://[::1]:0", "shm:///tmp/a.sock"] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.to_string(), text);
            assert!(address.is_on_this_host());
        }
        assert!(!Address::parse("tcp://0.0.0.0:1").unwrap().is_on_this_host());
        for text in ["", "127.0.0.1:7000", "tcp://127.0.0.1", "shm://a.sock", "udp://127.0.0.1:1"] {
            assert!(Address::parse(text).unwrap_err().hint_text().is_some(), "{text}");
        }
    }
}
