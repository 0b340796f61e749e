//! The sockets: where they are, who may connect, and how those of a dead daemon are replaced.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::Seldom;
use forebay_io::trust::{self, Holds};
use tokio::net::{UnixListener, UnixStream};

use crate::clients::{Clients, Place};
use crate::config::Config;
use crate::state::Shared;

/// Connections that wait to be accepted are the kernel's to hold; a failing accept (out of descriptors) is
/// tried again after this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The kernel closes the files of a killed daemon one after another, so its socket may be open for a moment when its
/// pool is free already. A socket that is open for longer than this is somebody else's.
const LAST_CLOSES: Duration = Duration::from_secs(1);
const LAST_CLOSES_PAUSE: Duration = Duration::from_millis(5);

/// Binds `name` in the socket directory, which is made if it is missing. A socket file without a listener is replaced.
/// A socket with a listener is an error, and so is a directory that another user could have made or can change. Only
/// the daemon's own user may connect, unless others are allowed.
pub fn bind(directory: &Path, name: &str, allow_uids: &[u32]) -> Result<UnixListener> {
    let directory = trust::make_directory(directory, Holds::Sockets)?;
    let path = directory.join(name);
    remove_stale(&path)?;
    let listener = UnixListener::bind(&path).map_err(|error| cannot_listen(&path, error))?;
    // The peer's credentials are checked in any case; the mode keeps others from even trying.
    let mode = if allow_uids.is_empty() { 0o600 } else { 0o666 };
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).map_err(|error| cannot_listen(&path, error))?;
    if !allow_uids.is_empty() {
        warn_of_closed(&directory);
    }
    Ok(listener)
}

/// Users who may connect also need search permission for the directories. The daemon's own directory may be searched by
/// all; directories that others made are left as they are.
fn warn_of_closed(directory: &Path) {
    let is_closed = |path: &&Path| path.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o001 == 0);
    if let Some(path) = directory.ancestors().find(is_closed) {
        let path = path.display();
        let hint = format!("run `chmod o+x {path}`, unless these users have access through the directory's group");
        tracing::warn!(%path, hint, "users of `socket.allow_uids` may not reach the sockets");
    }
}

/// While descriptors are short, each try fails.
static UNACCEPTED: LazyLock<Seldom> = LazyLock::new(Seldom::default);

/// The next connection of a user who may connect, and its place: root, the daemon's own user, or a configured one.
pub async fn accept(listener: &UnixListener, shared: &Shared, clients: &Arc<Clients>) -> (UnixStream, Arc<Place>) {
    loop {
        // Those who have asked already are heard before the next comes.
        tokio::task::yield_now().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                if let Some(times) = UNACCEPTED.add(Instant::now()) {
                    let hint = "raise the daemon's limit of descriptors: `LimitNOFILE=` of a service, `ulimit -n`";
                    tracing::warn!(%error, times, hint, "cannot accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        match stream.peer_cred() {
            Ok(peer) if shared.lock().users.contains(&peer.uid()) => return (stream, clients.enter(peer.uid())),
            Ok(peer) => refuse(shared, format!("user {}", peer.uid())),
            Err(error) => refuse(shared, format!("unknown user ({error})")),
        }
    }
}

/// Users who may connect: root, the daemon's own, and those that are configured.
pub fn users(config: &Config) -> Vec<u32> {
    let own = rustix::process::geteuid().as_raw();
    let mut users: Vec<u32> = config.socket.allow_uids.iter().copied().chain([0, own]).collect();
    users.sort_unstable();
    users.dedup();
    users
}

fn refuse(shared: &Shared, who: String) {
    let mut state = shared.lock();
    state.rpc.refused_peers += 1;
    if let Some(times) = state.refusals.add(Instant::now()) {
        tracing::warn!(who, hint = "add the user id to `socket.allow_uids`", times, "refused a connection");
    }
}

fn remove_stale(path: &Path) -> Result<()> {
    let is_socket = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type().is_socket(),
        Err(_) => return Ok(()),
    };
    if !is_socket {
        return Err(Error::invalid("the socket's path exists and is not a socket")
            .with("path", path.display())
            .hint("move the file away, or set `socket.directory`"));
    }
    match is_held(path) {
        true => Err(Error::new(ErrorKind::Unavailable, "another daemon is listening on the socket")
            .with("path", path.display())
            .hint("stop that daemon, or give a second one its own `socket.directory`, `pool.directory` and `http.address`")),
        false => std::fs::remove_file(path).map_err(|error| cannot_listen(path, error)),
    }
}

/// Whether somebody listens there, and goes on to.
fn is_held(path: &Path) -> bool {
    let begun = Instant::now();
    while forebay_rpc::client::knock(path).is_ok() {
        if begun.elapsed() >= LAST_CLOSES {
            return true;
        }
        std::thread::sleep(LAST_CLOSES_PAUSE);
    }
    false
}

fn cannot_listen(path: &Path, error: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot listen on the socket")
        .with("path", path.display())
        .source(error)
        .hint("set `socket.directory` to a directory that this user may write to, with a path below 100 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_a_killed_daemon_is_about_to_lose_is_waited_for_and_one_that_stays_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let held = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let refused = remove_stale(&path).unwrap_err();
        assert!(refused.to_string().contains("another daemon is listening") && path.exists(), "{refused}");
        assert!(refused.hint_text().is_some_and(|hint| hint.contains("`http.address`")), "{refused}");
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| remove_stale(&path));
            std::thread::sleep(LAST_CLOSES_PAUSE);
            drop(held);
            removed.join().unwrap().unwrap();
        });
        assert!(!path.exists());
    }
}
