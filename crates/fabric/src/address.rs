//! Where an endpoint listens: `tcp://HOST:PORT`, `ucx://HOST:PORT`, or `shm:///PATH` for processes on one host.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::wire::MOST_CONNECTIONS;

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
    /// As `Tcp`, and the bytes of transfers go through UCX, which chooses the network. For trusted networks only.
    Ucx(SocketAddr),
    /// The path of a Unix socket, over which peers hand each other their memory.
    Shm(PathBuf),
}

impl Address {
    /// `tcp://HOST:PORT`, `ucx://HOST:PORT` or `shm:///PATH`. A host's name is looked up, which may take seconds.
    pub fn parse(text: &str) -> Result<Address> {
        let wrong = |why: &str| {
            let error = Error::invalid(format!("an address {why}")).with("address", text);
            let hint = "write `tcp://10.0.0.1:7000` or `ucx://10.0.0.1:7000` between hosts, or \
                        `shm:///run/user/1000/kv.sock` on one host";
            error.hint(hint)
        };
        if let Some(path) = text.strip_prefix("shm://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() { Ok(Address::Shm(path)) } else { Err(wrong("needs an absolute path")) };
        }
        let (host, kind): (&str, fn(SocketAddr) -> Address) = match text.split_once("://") {
            Some(("tcp", host)) => (host, Address::Tcp),
            Some(("ucx", host)) => (host, Address::Ucx),
            _ => return Err(wrong("begins with `tcp://`, `ucx://` or `shm://`")),
        };
        let mut found = host.to_socket_addrs().map_err(|error| wrong("was not found").source(error))?;
        found.next().map(kind).ok_or_else(|| wrong("was not found"))
    }

    /// As `parse`, for up to 16 addresses of TCP with commas between: `tcp://10.0.0.1:7000,tcp://10.1.0.1:7000`.
    pub fn parse_all(text: &str) -> Result<Vec<Address>> {
        // The path of a socket may have commas in it.
        let addresses = match text.starts_with("shm://") {
            true => vec![Address::parse(text)?],
            false => text.split(',').map(|one| Address::parse(one.trim())).collect::<Result<Vec<Address>>>()?,
        };
        Address::check_together(&addresses)?;
        Ok(addresses)
    }

    /// Whether one session can use all of them: it has one address, or up to 16 of TCP.
    pub(crate) fn check_together(addresses: &[Address]) -> Result<()> {
        if addresses.is_empty() || addresses.len() > usize::from(MOST_CONNECTIONS) {
            let error = Error::invalid("a wrong number of addresses").with("addresses", addresses.len());
            return Err(error.hint(format!("1 to {MOST_CONNECTIONS}")));
        }
        match addresses.iter().find(|address| !matches!(address, Address::Tcp(_))) {
            Some(address) if addresses.len() > 1 => {
                let error = Error::invalid("one of several addresses is not of TCP").with("address", address);
                Err(error.hint("give one `shm://` or `ucx://`, or several `tcp://` of one endpoint"))
            }
            _ => Ok(()),
        }
    }

    /// Whether only processes of this host reach it.
    pub fn is_on_this_host(&self) -> bool {
        match self {
            Address::Tcp(address) | Address::Ucx(address) => address.ip().to_canonical().is_loopback(),
            Address::Shm(_) => true,
        }
    }

    /// Whether bytes of transfers go through UCX.
    pub(crate) fn is_ucx(&self) -> bool {
        matches!(self, Address::Ucx(_))
    }

    /// A socket that listens there.
    pub(crate) fn listen(&self) -> Result<Listener> {
        let failed = |errno: Errno| {
            let error = Error::new(ErrorKind::Io, "cannot listen").with("address", self).source(errno);
            match (self, errno) {
                (Address::Tcp(_) | Address::Ucx(_), Errno::ADDRINUSE) => {
                    error.hint("another process listens there; use port 0 for a free one")
                }
                (Address::Tcp(_) | Address::Ucx(_), Errno::ADDRNOTAVAIL) => {
                    error.hint("give an address that this host has")
                }
                (Address::Shm(_), Errno::ADDRINUSE) => {
                    error.hint("another endpoint listens there; name another path, or close that endpoint")
                }
                (Address::Shm(_), Errno::NAMETOOLONG) => error.hint("the path of a socket has at most 107 bytes"),
                (Address::Shm(_), _) => {
                    error.hint("name a path in a directory that is there and that this user may write")
                }
                _ => error,
            }
        };
        let socket = self.socket().map_err(failed)?;
        match self {
            Address::Tcp(address) | Address::Ucx(address) => {
                // A restarted endpoint can listen where its predecessor's connections wait for their end.
                sockopt::set_socket_reuseaddr(&socket, true).map_err(failed)?;
                rustix::net::bind(&socket, address).map_err(failed)?;
                rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
                let bound = rustix::net::getsockname(&socket).map_err(failed)?;
                let bound = SocketAddr::try_from(bound).map_err(failed)?;
                let address = if self.is_ucx() { Address::Ucx(bound) } else { Address::Tcp(bound) };
                Ok(Listener { socket, address, file: None })
            }
            Address::Shm(path) => {
                let name = SocketAddrUnix::new(path).map_err(failed)?;
                remove_stale(path, &name)?;
                // The file of the socket gets this mode, so no other user can connect at any time.
                rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
                rustix::net::bind(&socket, &name).map_err(failed)?;
                let listener = Listener { socket, address: self.clone(), file: file_at(path) };
                rustix::net::listen(&listener.socket, BACKLOG).map_err(failed)?;
                Ok(listener)
            }
        }
    }

    /// A socket that is connecting there. Never waits.
    pub(crate) fn connect(&self) -> Result<OwnedFd> {
        let failed = |errno: Errno| {
            let error = Error::new(ErrorKind::Unavailable, CANNOT_CONNECT).with("address", self).source(errno);
            error.hint(match (self, errno) {
                (Address::Shm(_), Errno::ACCESS | Errno::PERM) => {
                    "the other endpoint must run as this user or root, in directories that this user may enter"
                }
                (Address::Shm(_), Errno::NOENT) => "no endpoint listens at this path; does the peer run?",
                (Address::Shm(_), Errno::NAMETOOLONG) => "the path of a socket has at most 107 bytes",
                (_, Errno::MFILE | Errno::NFILE) => NO_DESCRIPTORS,
                (Address::Shm(_), _) => "does the peer's process still run?",
                (Address::Tcp(_) | Address::Ucx(_), _) => CONNECT_HINT,
            })
        };
        let socket = self.socket().map_err(failed)?;
        let connected = match self {
            Address::Tcp(address) | Address::Ucx(address) => {
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
    fn accept(&self, listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let socket = rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        match self {
            Address::Tcp(_) | Address::Ucx(_) => tune(&socket)?,
            Address::Shm(_) if !is_trusted(&socket)? => return Ok(None),
            Address::Shm(_) => {}
        }
        Ok(Some(socket))
    }

    fn socket(&self) -> rustix::io::Result<OwnedFd> {
        let family = match self {
            Address::Tcp(SocketAddr::V4(_)) | Address::Ucx(SocketAddr::V4(_)) => AddressFamily::INET,
            Address::Tcp(SocketAddr::V6(_)) | Address::Ucx(SocketAddr::V6(_)) => AddressFamily::INET6,
            Address::Shm(_) => AddressFamily::UNIX,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
    }
}

/// A socket that listens, and the file of it, which goes with it.
pub(crate) struct Listener {
    pub socket: OwnedFd,
    /// With the port that it got.
    pub address: Address,
    /// Device and inode of the socket's file. No other file has them while the socket is open.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// The next connection, if there is one and this process may talk to the other.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        self.address.accept(&self.socket)
    }
}

impl Drop for Listener {
    /// Another process may have taken the path meanwhile: then it keeps its socket.
    fn drop(&mut self) {
        if let Address::Shm(path) = &self.address
            && self.file.is_some()
            && file_at(path) == self.file
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "tcp://{address}"),
            Address::Ucx(address) => write!(f, "ucx://{address}"),
            Address::Shm(path) => write!(f, "shm://{}", path.display()),
        }
    }
}

const CANNOT_CONNECT: &str = "cannot connect to the peer";
const CONNECT_HINT: &str = "does the peer listen there, and does no firewall stand between?";
/// What helps when the process can open no more files.
pub(crate) const NO_DESCRIPTORS: &str = "close endpoints or files, or raise the limit of descriptors (`ulimit -n`)";

/// Of a connection that the kernel has begun.
pub(crate) fn cannot_connect() -> Error {
    Error::new(ErrorKind::Unavailable, CANNOT_CONNECT).hint(CONNECT_HINT)
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

/// Whom a connection is counted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A user of this host.
    User(u32),
    Host(IpAddr),
    Unknown,
}

impl Origin {
    /// Who on this host knows the program's secret counts as the program's user: to ask the kernel costs a millisecond
    /// where there are thousands of connections.
    pub fn of(socket: &OwnedFd, is_shm: bool, knows_secret: bool) -> Origin {
        if is_shm {
            let user = sockopt::socket_peercred(socket).map(|peer| peer.uid.as_raw());
            return user.map_or(Origin::Unknown, Origin::User);
        }
        let address = |found: rustix::io::Result<SocketAddrAny>| found.and_then(SocketAddr::try_from).ok();
        let here = address(rustix::net::getsockname(socket));
        let Some((here, there)) =
            here.zip(address(rustix::net::getpeername(socket).and_then(|it| it.ok_or(Errno::NOTCONN))))
        else {
            return Origin::Unknown;
        };
        let host = there.ip().to_canonical();
        let user = || match knows_secret {
            true => Some(rustix::process::geteuid().as_raw()),
            false => user_of(there, here),
        };
        match host.is_loopback().then(user).flatten() {
            Some(user) => Origin::User(user),
            None => Origin::Host(host),
        }
    }
}

/// The user whose socket on this host has the address `there` and is connected to `here`. Reads the kernel's list.
fn user_of(there: SocketAddr, here: SocketAddr) -> Option<u32> {
    // Words of the address in the order of this machine's bytes, as the kernel prints them.
    let printed = |address: SocketAddr, is_long: bool| {
        let octets = match (address.ip().to_canonical(), is_long) {
            (IpAddr::V4(ip), false) => ip.octets().to_vec(),
            (IpAddr::V4(ip), true) => ip.to_ipv6_mapped().octets().to_vec(),
            (IpAddr::V6(ip), _) => ip.octets().to_vec(),
        };
        let (words, _) = octets.as_chunks::<4>();
        let words: String = words.iter().map(|word| format!("{:08X}", u32::from_ne_bytes(*word))).collect();
        format!("{words}:{:04X}", address.port())
    };
    // A socket of either family may be at its end.
    [("/proc/self/net/tcp", false), ("/proc/self/net/tcp6", true)].into_iter().find_map(|(list, is_long)| {
        let (there, here) = (printed(there, is_long), printed(here, is_long));
        let list = std::fs::read_to_string(list).ok()?;
        list.lines().find_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let is_it = fields.next() == Some(&there) && fields.next() == Some(&here);
            is_it.then(|| fields.nth(4)?.parse().ok()).flatten()
        })
    })
}

/// Device and inode of the file that has this path, not of one that it links to.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|facts| (facts.dev(), facts.ino()))
}

/// Removes the socket of a process that was killed: nobody answers there. Errors if something else is there: to connect
/// to a plain file is refused as well.
fn remove_stale(path: &Path, name: &SocketAddrUnix) -> Result<()> {
    let Ok(facts) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !facts.file_type().is_socket() {
        let error = Error::invalid("cannot listen where a file is that is no socket").with("path", path.display());
        return Err(error.hint("name a path at which nothing is; the socket is made there"));
    }
    // A living one whose queue is full would make a blocking probe wait.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let is_stale = probe.is_ok_and(|probe| rustix::net::connect(probe.as_fd(), name) == Err(Errno::CONNREFUSED));
    if is_stale && file_at(path) == Some((facts.dev(), facts.ino())) {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_how_and_where() {
        for text in ["tcp://127.0.0.1:7000", "tcp://[::1]:0", "ucx://127.0.0.1:7000", "shm:///tmp/a.sock"] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.to_string(), text);
            assert!(address.is_on_this_host());
        }
        assert!(!Address::parse("tcp://0.0.0.0:1").unwrap().is_on_this_host());
        let several = Address::parse_all("tcp://127.0.0.1:7000, tcp://[::1]:7001").unwrap();
        assert_eq!(
            several.iter().map(Address::to_string).collect::<Vec<_>>(),
            ["tcp://127.0.0.1:7000", "tcp://[::1]:7001"]
        );
        assert_eq!(Address::parse_all("shm:///tmp/a,b.sock").unwrap(), [Address::Shm("/tmp/a,b.sock".into())]);
        assert!(Address::parse_all("tcp://127.0.0.1:7000,").is_err());
        for text in ["", "127.0.0.1:7000", "tcp://127.0.0.1", "shm://a.sock", "udp://127.0.0.1:1"] {
            assert!(Address::parse(text).unwrap_err().hint_text().is_some(), "{text}");
        }
    }

    fn file_of(home: &tempfile::TempDir) -> (Address, PathBuf) {
        let path = home.path().join("a.sock");
        (Address::Shm(path.clone()), path)
    }

    #[test]
    fn what_is_no_socket_is_never_replaced_by_one() {
        let home = tempfile::tempdir().unwrap();
        let (address, path) = file_of(&home);
        let target = home.path().join("model.safetensors");
        std::fs::write(&target, b"precious").unwrap();
        let places: [&dyn Fn(); 3] = [
            &|| std::fs::write(&path, b"precious").unwrap(),
            &|| std::os::unix::fs::symlink(&target, &path).unwrap(),
            &|| std::os::unix::fs::symlink(home.path().join("absent"), &path).unwrap(),
        ];
        for make in places {
            make();
            let before = file_at(&path);
            let error = address.listen().map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.hint_text().is_some());
            assert_eq!(file_at(&path), before);
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_living_one_is_not() {
        let home = tempfile::tempdir().unwrap();
        let (address, path) = file_of(&home);
        // As after a kill: the file stays.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let living = address.listen().unwrap();
        let error = address.listen().map(drop).unwrap_err();
        assert!(error.hint_text().is_some_and(|hint| hint.contains("another path")), "{error}");
        assert!(path.exists());
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn a_listener_that_ends_leaves_its_successors_socket_in_place() {
        let home = tempfile::tempdir().unwrap();
        let (address, path) = file_of(&home);
        let first = address.listen().unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = address.listen().unwrap();
        drop(first);
        assert!(path.exists(), "the socket of another listener was removed");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_connection_of_this_host_is_counted_for_its_user() {
        let user = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Ok(listener) = std::net::TcpListener::bind(address) else { continue };
            let there = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (here, _) = listener.accept().unwrap();
            assert_eq!(Origin::of(&here.into(), false, false), Origin::User(user), "{address} {there:?}");
        }
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Origin::of(&here.into(), true, false), Origin::User(user));
    }
}
