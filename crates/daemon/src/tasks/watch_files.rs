//! Looks at the daemon's own files: no call fails when somebody removes its sockets or its pool's file, or fills the
//! pool's filesystem, so nobody would hear of it before the next start.

use std::convert::Infallible;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::{ATTACH_SOCKET, RPC_SOCKET};

use crate::own_files::OwnFiles;
use crate::state::Shared;

/// Between two looks: seven calls of the filesystem.
const PERIOD: Duration = Duration::from_secs(2);

/// The sockets as they were bound.
#[derive(Clone)]
pub struct Sockets(Vec<(PathBuf, Option<u64>)>);

impl Sockets {
    /// Those in `directory`.
    pub fn in_directory(directory: &Path) -> Sockets {
        let paths = [RPC_SOCKET, ATTACH_SOCKET].map(|name| directory.join(name));
        Sockets(paths.into_iter().map(|path| (path.clone(), inode(&path))).collect())
    }

    /// Removes those that are still this daemon's: others may have removed them, and another daemon has its own there.
    pub fn remove(&self) {
        for (path, bound) in &self.0 {
            if inode(path) == *bound {
                // A successor replaces a leftover all the same.
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// Errors with the first that is gone, or is another's.
    fn check(&self) -> Result<()> {
        match self.0.iter().find(|(path, bound)| inode(path) != *bound) {
            None => Ok(()),
            Some((path, _)) => {
                Err(Error::new(ErrorKind::NotFound, "a socket was removed or replaced: nobody reaches this daemon")
                    .with("path", path.display())
                    .hint("restart the daemon, which makes its sockets anew and keeps its pool"))
            }
        }
    }
}

/// Looks for as long as the daemon runs.
pub async fn run(shared: Shared, sockets: Sockets) -> Infallible {
    let pool = shared.lock().table.pool().clone();
    let look = std::sync::Arc::new(move || (sockets.check(), pool.check_files()));
    loop {
        tokio::time::sleep(PERIOD).await;
        let look = look.clone();
        // A filesystem may let its callers wait, and these are the deciding thread's.
        let Ok((sockets, pool)) = tokio::task::spawn_blocking(move || look()).await else { continue };
        let told = |checked: Result<()>| checked.err().map(|error| error.told());
        let found = OwnFiles { sockets: told(sockets), pool: told(pool) };
        if shared.lock().own_files != found {
            shared.event(|state| tell(&std::mem::replace(&mut state.own_files, found.clone()), &found));
        }
    }
}

/// One line for each change.
fn tell(before: &OwnFiles, now: &OwnFiles) {
    for (before, now) in [(&before.sockets, &now.sockets), (&before.pool, &now.pool)] {
        match now {
            Some(why) if before.as_ref() != Some(why) => tracing::error!(why, "a file of the daemon is in trouble"),
            None if before.is_some() => tracing::info!("the daemon's files are as they should be"),
            _ => {}
        }
    }
}

/// No other file gets a socket's number while this process listens on it.
fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_another_daemon_stay_when_this_one_ends() {
        let home = tempfile::tempdir().unwrap();
        let [own, other] = [RPC_SOCKET, ATTACH_SOCKET].map(|name| home.path().join(name));
        [&own, &other].iter().for_each(|path| std::fs::write(path, b"").unwrap());
        let sockets = Sockets::in_directory(home.path());
        sockets.check().unwrap();
        // The earlier file lives on, so that the new one gets another number.
        std::fs::rename(&other, home.path().join("away")).unwrap();
        std::fs::write(&other, b"").unwrap();
        assert!(sockets.check().unwrap_err().to_string().contains("removed or replaced"));
        sockets.remove();
        assert_eq!((own.exists(), other.exists()), (false, true));
    }
}
