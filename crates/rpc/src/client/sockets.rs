//! Where the daemon's sockets are, for every client that is not told: one rule for commands, programs and engines.
//!
//! Whether the daemon found there may be believed is for [`trust`](super::trust), before anything is said to it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{env, io};

use forebay_core::{Error, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::configuration::{CONFIG_VARIABLE, USUAL_CONFIG, config_file, read_config};
use super::trust;
use crate::RPC_SOCKET;

/// The second is the daemon's own name for it: whoever sets it for `forebay serve` means clients too.
const VARIABLES: [&str; 2] = ["FOREBAY_SOCKET", "FOREBAY_SOCKET_DIRECTORY"];
/// Of a daemon that root started.
const HOST: &str = "/run/forebay";

/// `named`, else what a variable names: the directory, or the path of `forebay.sock` in it. Else `socket.directory` of
/// the configuration file, if this user may read it. Else [`usual_sockets`].
pub fn find_sockets(named: Option<&str>) -> PathBuf {
    named.map(directory_of).unwrap_or_else(|| look_for_sockets().0)
}

/// Where the sockets are if nobody names them, and why the configuration file was passed over, if it was. A file that
/// cannot be read may be meant for the daemon's user alone, so it keeps no client from its daemon.
pub fn look_for_sockets() -> (PathBuf, Option<Error>) {
    if let Some(directory) = sockets_of_variables() {
        return (directory, None);
    }
    let variable = env::var_os(CONFIG_VARIABLE);
    let file = config_file(variable.as_deref().map(Path::new), Some(Path::new(USUAL_CONFIG)));
    match file.map_or(Ok(None), |file| sockets_of_file(&file)) {
        Ok(directory) => (directory.unwrap_or_else(usual_sockets), None),
        Err(why) => (usual_sockets(), Some(why)),
    }
}

/// What the daemon reads there. The other keys are the daemon's to judge.
fn sockets_of_file(path: &Path) -> Result<Option<PathBuf>> {
    let table = read_config(path)?;
    let Some(value) = table.get("socket").and_then(|section| section.get("directory")) else { return Ok(None) };
    match value.as_str().filter(|text| !text.is_empty()) {
        Some(text) => Ok(Some(PathBuf::from(text))),
        None => Err(Error::invalid(format!("`socket.directory` cannot be `{value}`"))
            .with("file", path.display())
            .hint("give the directory of the daemon's sockets")),
    }
}

/// The variable to set, or to correct: the first that is set hides the other one.
pub(super) fn variable() -> &'static str {
    let is_set = |variable: &&str| env::var_os(variable).is_some_and(|value| !value.is_empty());
    VARIABLES.into_iter().find(is_set).unwrap_or(VARIABLES[1])
}

/// What `FOREBAY_SOCKET` or `FOREBAY_SOCKET_DIRECTORY` names.
pub fn sockets_of_variables() -> Option<PathBuf> {
    let values = VARIABLES.iter().filter_map(|variable| env::var(variable).ok());
    values.filter(|value| !value.is_empty()).map(|value| directory_of(&value)).next()
}

/// The first of the usual directories where a daemon answers this user. Else the first with the sockets of one that has
/// ended, else the first that is there; those of believed users before others. Else the one that this user's daemon
/// would make.
pub fn usual_sockets() -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    let runtime = env::var("XDG_RUNTIME_DIR").ok().filter(|runtime| !runtime.is_empty());
    let runtime = runtime.unwrap_or_else(|| format!("/run/user/{user}"));
    usual_of(Path::new(HOST), &Path::new(&runtime).join("forebay"), user, is_strangers)
}

/// Whether somebody listens at the socket; never waits. A daemon that accepts nobody listens too: where as many wait
/// for it as its queue holds, the kernel would let the caller wait with them.
pub fn knock(socket: &Path) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let caller = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&caller, &SocketAddrUnix::new(socket)?) {
        Err(Errno::AGAIN) => Ok(()),
        connected => Ok(connected?),
    }
}

/// What is in a directory for sockets, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sockets {
    /// A daemon that lets this user connect.
    Answering,
    /// Those of a daemon that has ended, or of one for other users.
    Silent,
    /// A daemon that ends leaves its directory, so this says little.
    None,
}

impl Sockets {
    fn of(directory: &Path) -> Sockets {
        let socket = directory.join(RPC_SOCKET);
        match knock(&socket) {
            Ok(()) => Sockets::Answering,
            Err(_) if socket.exists() => Sockets::Silent,
            Err(_) => Sockets::None,
        }
    }
}

/// Whether a daemon of the user who owns `path` would not be believed.
fn is_strangers(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| trust::peer(found.uid()).is_err())
}

fn usual_of(host: &Path, own: &Path, user: u32, is_strangers: impl Fn(&Path) -> bool) -> PathBuf {
    let there = [host, own].into_iter().filter(|path| path.is_dir());
    let there = there.min_by_key(|path| (is_strangers(path), Sockets::of(path)));
    there.unwrap_or(if user == 0 { host } else { own }).to_path_buf()
}

fn directory_of(named: &str) -> PathBuf {
    let path = match (named.strip_prefix("~/"), env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => PathBuf::from(named),
    };
    match path.parent() {
        Some(above) if path.file_name().is_some_and(|name| name == RPC_SOCKET) => above.to_path_buf(),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_directory_that_is_there_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let [host, own] = ["host", "own"].map(|name| folder.path().join(name));
        let of = |user| usual_of(&host, &own, user, |_| false);
        assert_eq!((of(0), of(1234)), (host.clone(), own.clone()));
        std::fs::create_dir(&own).unwrap();
        assert_eq!(of(0), own);
        std::fs::create_dir(&host).unwrap();
        assert_eq!(of(1234), host);
    }

    #[test]
    fn a_daemon_that_answers_is_found_before_what_another_one_left() {
        let folder = tempfile::tempdir().unwrap();
        let [host, own] = ["host", "own"].map(|name| folder.path().join(name));
        [&host, &own].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let of = || usual_of(&host, &own, 1234, |_| false);
        assert_eq!(of(), host);
        let ended = std::os::unix::net::UnixListener::bind(own.join(RPC_SOCKET)).unwrap();
        assert_eq!(of(), own, "one answers there, and the other directory is empty");
        drop(ended);
        assert_eq!(of(), own, "it may come again");
        let _other = std::os::unix::net::UnixListener::bind(host.join(RPC_SOCKET)).unwrap();
        assert_eq!(of(), host);
    }

    /// As where a daemon was stopped, and clients have tried for hours.
    #[test]
    fn a_daemon_that_accepts_nobody_is_found_without_a_wait() {
        let folder = tempfile::tempdir().unwrap();
        let [host, own] = ["host", "own"].map(|name| folder.path().join(name));
        [&host, &own].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let address = SocketAddrUnix::new(own.join(RPC_SOCKET)).unwrap();
        rustix::net::bind(&listener, &address).and_then(|()| rustix::net::listen(&listener, 0)).unwrap();
        let queued = || {
            let caller = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
            connect(&caller, &address).map(|()| caller)
        };
        let waiting: Vec<_> = std::iter::repeat_with(queued).map_while(Result::ok).collect();
        assert!(!waiting.is_empty());
        let (done, found) = std::sync::mpsc::channel();
        let own_too = own.clone();
        std::thread::spawn(move || done.send(usual_of(&host, &own_too, 1234, |_| false)));
        assert_eq!(found.recv_timeout(std::time::Duration::from_secs(20)), Ok(own));
    }

    #[test]
    fn a_directory_of_a_user_who_is_not_believed_is_the_last_choice() {
        let folder = tempfile::tempdir().unwrap();
        let [host, own] = ["host", "own"].map(|name| folder.path().join(name));
        [&host, &own].into_iter().for_each(|path| std::fs::create_dir(path).unwrap());
        assert_eq!(usual_of(&host, &own, 1234, |path| path == host), own);
        assert_eq!(usual_of(&host, &own, 1234, |_| true), host);
    }

    #[test]
    fn a_file_names_the_directory_whatever_else_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forebay.toml");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            sockets_of_file(&path).map_err(|error| error.to_string())
        };
        let ours = Some(PathBuf::from("/run/ours"));
        assert_eq!(of("[socket]\ndirectory = \"/run/ours\""), Ok(ours.clone()));
        assert_eq!(of("unknown = 1\nsocket.directory = \"/run/ours\"\n[pool]\npolicy = 7"), Ok(ours));
        assert_eq!(of("[pool]"), Ok(None));
        for (text, why) in [("[socket", "line 1"), ("socket.directory = 7", "`7`"), ("socket.directory = ''", "`\"\"`")]
        {
            assert!(of(text).is_err_and(|error| error.contains(why) && error.contains("forebay.toml")), "{text}");
        }
    }

    #[test]
    fn a_socket_stands_for_its_directory() {
        assert_eq!(find_sockets(Some("/run/ours/forebay.sock")).as_os_str(), "/run/ours");
        assert_eq!(find_sockets(Some("/run/ours")), Path::new("/run/ours"));
        assert_eq!(find_sockets(Some("~/run/forebay.sock")), Path::new(&env::var("HOME").unwrap()).join("run"));
    }
}
