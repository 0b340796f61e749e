//! The filesystem tier: blocks distributed over directories by their keys.
//!
//! Invariants: a key lives in one directory, chosen by the key and the directories' own ids, so every host finds it,
//! whatever the names and the configured order of its mounts are. A directory that hangs or is missing affects its own
//! blocks only. While it is missing, new ones of them go to the others.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::checksum::Checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, Operation, Tier};
use forebay_core::{BlockKey, Error, ErrorKind, Result};

use super::config::{FsConfig, Fsync};
use super::directory::Directory;
use super::io_threads::IoThreads;
use super::missing::Missing;
use super::purge;
use super::report::FsReport;
use super::root::Root;
use super::sweeper::SweeperHandle;
use crate::purge::Place;
use crate::transfers::Transfers;
use crate::uring::{Region, Waker};

/// How long closing the tier waits for threads: for all of them together, however many mounts hang.
const PATIENCE: Duration = Duration::from_secs(5);

/// See the module documentation.
pub struct Fs {
    roots: Vec<Root>,
    missing: Vec<Missing>,
    /// As they are configured.
    paths: Vec<PathBuf>,
    is_read_only: bool,
    waker: Arc<Waker>,
    transfers: Transfers,
    fsync: Fsync,
}

impl Fs {
    /// Less where directories are read-only, or nothing is flushed.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, is_durable: true, is_shared: true };

    /// Opens the directories, all at once, and blocks for at most one timeout. `pool` is the memory with the slots.
    /// Directories that cannot be used yet are waited for beside serving, if there is another. An error names the
    /// directory and what to do.
    pub fn open(config: &FsConfig, pool: Region) -> Result<Fs> {
        config.check()?;
        let waker = Arc::new(Waker::new().map_err(no_memory)?);
        let mut opened = open_all(config)?;
        let is_wrong =
            |opened: &Result<Directory>| opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Invalid);
        if let Some(at) = opened.iter().position(is_wrong).or(opened.iter().all(Result::is_err).then_some(0)) {
            return Err(opened.swap_remove(at).err().expect("it is an error"));
        }
        // On an error the drop of this value closes it.
        let mut fs = Fs {
            roots: Vec::new(),
            missing: Vec::new(),
            paths: config.directories.clone(),
            is_read_only: config.read_only,
            waker,
            transfers: Transfers::default(),
            fsync: config.fsync,
        };
        for (path, opened) in config.directories.iter().zip(opened) {
            let (config, pool, waker) = (config.clone(), pool.clone(), fs.waker.clone());
            match opened {
                Ok(directory) => {
                    if let Some(error) = fs.twin_of(&directory) {
                        return Err(error);
                    }
                    fs.roots.push(start(directory, &config, &pool, &waker)?);
                }
                Err(error) => {
                    let named = path.clone();
                    let open = move || start(Directory::open(&named, &config)?, &config, &pool, &waker);
                    fs.missing.push(Missing::start(path.clone(), error, open).map_err(no_memory)?);
                }
            }
        }
        Ok(fs)
    }

    fn twin_of(&self, directory: &Directory) -> Option<Error> {
        let twin = self.roots.iter().find(|root| root.directory.id == directory.id)?;
        Some(
            Error::invalid("two paths lead to the same directory")
                .with("path", directory.path.display())
                .with("also", twin.directory.path.display())
                .hint("name each directory once"),
        )
    }

    /// Uses directories that were missing and came.
    fn take_up(&mut self) {
        for missing in std::mem::take(&mut self.missing) {
            let Some(mut root) = missing.opened() else {
                self.missing.push(missing);
                continue;
            };
            if let Some(error) = self.twin_of(&root.directory) {
                tracing::error!(%error, "a shared directory is not used");
                root.close();
                missing.refuse(error);
                self.missing.push(missing);
                continue;
            }
            tracing::info!(path = %missing.path.display(), "a shared directory came, and is used");
            self.roots.push(root);
        }
    }

    /// Readable when [`Tier::poll`] has work to do.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    /// Does no I/O.
    pub fn report(&self) -> FsReport {
        let roots = self.roots.iter().map(Root::report);
        let mut roots: Vec<_> = roots.chain(self.missing.iter().map(Missing::report)).collect();
        roots.sort_by_key(|root| self.paths.iter().position(|path| *path == root.path));
        FsReport { roots }
    }

    /// Where its blocks are, for purges of namespaces.
    pub fn places(&self) -> Vec<Place> {
        let open = self.roots.iter().map(|root| purge::place(&root.directory, root.timeout()));
        open.chain(self.missing.iter().map(Missing::place)).collect()
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.roots.iter().all(Root::is_idle)
    }

    /// Blocks until every accepted operation has completed; false if that takes longer than `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.roots.iter_mut().for_each(Root::advance);
            self.poll(completions);
            let Some(busy) = self.roots.iter().find(|root| !root.is_idle()) else { return true };
            if Instant::now() > deadline {
                return false;
            }
            busy.wait(Duration::from_millis(10));
        }
    }

    /// Rendezvous hashing: adding or losing a directory moves no other directory's keys.
    fn home_of(&mut self, key: &BlockKey) -> &mut Root {
        let weight = |root: &Root| {
            let mut sum = Checksum::new();
            sum.update(&root.directory.id.to_le_bytes());
            sum.update(&key.namespace.0.to_le_bytes());
            sum.update(&key.group.to_le_bytes());
            sum.update(key.hash.as_bytes());
            // A checksum is linear. After mixing, its high bits depend on the whole key.
            sum.finish().wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        let index = (0..self.roots.len()).max_by_key(|index| weight(&self.roots[*index])).unwrap_or(0);
        &mut self.roots[index]
    }
}

impl Tier for Fs {
    fn name(&self) -> &'static str {
        "fs"
    }

    fn capabilities(&self) -> Capabilities {
        let may_write = !self.missing.is_empty() && !self.is_read_only;
        let can_write = may_write || self.roots.iter().any(|root| root.directory.read_only.is_none());
        Capabilities {
            can_store: can_write,
            can_remove: can_write,
            is_durable: self.fsync != Fsync::None,
            ..Fs::CAPABILITIES
        }
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.iter().take_while(|op| self.home_of(&op.key).take(op)).count();
        self.transfers.begin(&batch[..taken]);
        self.roots.iter().for_each(Root::start);
        if self.roots.iter().any(|root| !root.completions.is_empty()) {
            self.waker.wake();
        }
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.waker.clear();
        let from = completions.len();
        for root in &mut self.roots {
            root.poll();
            completions.append(&mut root.completions);
        }
        self.transfers.ended(&completions[from..]);
    }

    /// Completes the operation as late at once, whatever its thread does.
    fn cancel(&mut self, id: OpId) {
        if self.roots.iter_mut().any(|root| root.give_up(id)) {
            self.waker.wake();
        }
    }

    /// Sick only when every directory is.
    fn health(&self) -> Health {
        let mut health = Health::Sick(ErrorKind::Unavailable);
        for root in &self.roots {
            health = root.health();
            if health == Health::Healthy {
                break;
            }
        }
        health
    }
}

/// Nothing touches a slot after this, whatever hangs.
impl Drop for Fs {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        self.take_up();
        self.roots.iter_mut().for_each(Root::close);
        self.roots.iter().for_each(|root| root.wait_for_end(deadline));
    }
}

/// Time is real time, because mounts take it; call about every 10 ms.
impl Timed for Fs {
    fn advance(&mut self, _now: Duration) {
        if !self.missing.is_empty() {
            self.take_up();
        }
        self.roots.iter_mut().for_each(Root::advance);
        if self.roots.iter().any(|root| !root.completions.is_empty()) {
            self.waker.wake();
        }
    }
}

/// Starts what serves an open directory.
fn start(directory: Directory, config: &FsConfig, pool: &Region, waker: &Arc<Waker>) -> Result<Root> {
    let directory = Arc::new(directory);
    let sweeper = SweeperHandle::start(directory.clone(), config).map_err(no_memory)?;
    let (streams, buffers) = (config.streams, config.buffers);
    let io_threads = IoThreads::start(directory.clone(), pool.clone(), waker.clone(), streams, buffers);
    Ok(Root::new(directory, io_threads.map_err(no_memory)?, sweeper, config))
}

/// In separate threads, since a mount may never answer. In the order of the configuration.
fn open_all(config: &FsConfig) -> Result<Vec<Result<Directory>>> {
    let deadline = Instant::now() + config.timeout;
    let mut opening = Vec::new();
    for path in &config.directories {
        let (sender, receiver) = sync_channel(1);
        let (path, config) = (path.clone(), config.clone());
        let named = path.clone();
        // When the mount answers, the receiver may be gone.
        let open = move || drop(sender.send(Directory::open(&path, &config)));
        thread::Builder::new().name("forebay-fs-open".to_owned()).spawn(open).map_err(no_memory)?;
        opening.push((named, receiver));
    }
    let mut opened = Vec::new();
    for (path, receiver) in opening {
        let left = deadline.saturating_duration_since(Instant::now());
        opened.push(receiver.recv_timeout(left).unwrap_or_else(|error| Err(no_answer(&path, error))));
    }
    Ok(opened)
}

fn no_answer(path: &Path, error: RecvTimeoutError) -> Error {
    let error = match error {
        RecvTimeoutError::Timeout => Error::new(ErrorKind::Timeout, "the directory does not answer"),
        RecvTimeoutError::Disconnected => Error::new(ErrorKind::Io, "opening the directory ended early"),
    };
    error.with("path", path.display()).hint("check the mount and its server, or raise `tier.fs.timeout_ms`")
}

fn no_memory(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "cannot get threads or memory for the shared directory").source(error)
}
