//! Looks at the daemon's own files: no call fails when somebody removes its sockets, its pool's file or that of a disk,
//! or fills the pool's filesystem, so nobody would hear of it before the next start.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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
        let (sockets, pool) = (told(sockets), told(pool));
        note(&shared, |known| OwnFiles { sockets, pool, disks: known.disks.clone() });
    }
}

/// As `run`, of the files of disks. Each look has a thread of its own: a filesystem that hangs holds up this alone.
pub async fn run_disks(shared: Shared) -> Infallible {
    let mut known = Disks::default();
    loop {
        tokio::time::sleep(PERIOD).await;
        let paths = shared.lock().tiers.used_disks();
        let (tell, told) = tokio::sync::oneshot::channel();
        let look = move || {
            let disks = known.look(paths, &of_disk);
            drop(tell.send((known, disks)));
        };
        let thread = std::thread::Builder::new().name("disk-watch".to_owned()).spawn(look);
        let (still_known, disks) = match (thread, told.await) {
            (Ok(_), Ok(told)) => told,
            // Without a thread this begins again: what is found next is taken for what was opened.
            _ => (Disks::default(), Vec::new()),
        };
        known = still_known;
        note(&shared, |known| OwnFiles { disks, ..known.clone() });
    }
}

/// What tells a disk from all others, however often its path leads elsewhere: the number of a device, which may get
/// another file, or device and inode of a file.
type DiskFile = (u64, u64);

/// What was found first at the path of each disk that is in use.
#[derive(Default)]
struct Disks(BTreeMap<String, DiskFile>);

impl Disks {
    /// Disks that are not at their paths any more.
    fn look(&mut self, paths: Vec<String>, of_disk: &dyn Fn(&Path) -> io::Result<DiskFile>) -> Vec<String> {
        self.0.retain(|path, _| paths.contains(path));
        let gone = |path: &String| {
            let found = match of_disk(Path::new(path)) {
                Ok(found) => Some(found),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                // It may be there.
                Err(_) => return false,
            };
            let Some(found) = found else { return true };
            found != *self.0.entry(path.clone()).or_insert(found)
        };
        let told = |path: String| {
            Error::new(ErrorKind::NotFound, "a disk's file was removed or replaced: its blocks go with this daemon")
                .with("path", path)
                .hint("put the file back, or restart the daemon, which makes a new one if `tier.ssd.create` says so")
                .told()
        };
        paths.into_iter().filter(gone).map(told).collect()
    }
}

fn of_disk(path: &Path) -> io::Result<DiskFile> {
    let metadata = path.metadata()?;
    let is_device = metadata.file_type().is_block_device();
    Ok(if is_device { (u64::MAX, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) })
}

fn note(shared: &Shared, found: impl FnOnce(&OwnFiles) -> OwnFiles) {
    let found = found(&shared.lock().own_files);
    if shared.lock().own_files != found {
        shared.event(|state| tell(&std::mem::replace(&mut state.own_files, found.clone()), &found));
    }
}

/// One line for each change.
fn tell(before: &OwnFiles, now: &OwnFiles) {
    let lines = |files: &OwnFiles| {
        let all = [&files.sockets, &files.pool].into_iter().flatten().chain(&files.disks);
        all.cloned().collect::<Vec<String>>()
    };
    let (before, now) = (lines(before), lines(now));
    for why in now.iter().filter(|why| !before.contains(why)) {
        tracing::error!(why, "a file of the daemon is in trouble");
    }
    if now.is_empty() {
        tracing::info!("the daemon's files are as they should be");
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
    fn a_disk_whose_path_leads_elsewhere_or_nowhere_is_told_until_it_is_back() {
        let home = tempfile::tempdir().unwrap();
        let [path, away] = ["disk", "away"].map(|name| home.path().join(name));
        std::fs::write(&path, b"").unwrap();
        let named = || vec![path.display().to_string()];
        let mut disks = Disks::default();
        assert!(disks.look(named(), &of_disk).is_empty());
        std::fs::rename(&path, &away).unwrap();
        assert!(disks.look(named(), &of_disk)[0].contains("removed or replaced"));
        std::fs::write(&path, b"another").unwrap();
        assert_eq!(disks.look(named(), &of_disk).len(), 1);
        let hangs = |_: &Path| Err(io::Error::from(io::ErrorKind::PermissionDenied));
        assert!(disks.look(named(), &hangs).is_empty(), "nobody knows");
        std::fs::rename(&away, &path).unwrap();
        assert!(disks.look(named(), &of_disk).is_empty());
        // One that the daemon has given up, and takes anew.
        disks.look(Vec::new(), &of_disk);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"new").unwrap();
        assert!(disks.look(named(), &of_disk).is_empty());
    }

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
