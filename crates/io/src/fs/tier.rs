//! The filesystem tier: blocks distributed over directories by their keys.
//!
//! Invariants: a key lives in one directory, chosen by the key and the directories' own ids, so every host finds it,
//! whatever the names and the configured order of its mounts are. A directory that hangs or is missing affects its own
//! blocks only. While it is missing, new ones of them go to the others. One that is not at its path any more is closed,
//! and is missing from then on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use forebay_core::checksum::Checksum;
use forebay_core::decorate::Timed;
use forebay_core::tier::{Capabilities, Completion, Health, OpId, Operation, Outcome, Tier};
use forebay_core::{BlockKey, Error, ErrorKind, Result};

use super::aside;
use super::config::{FsConfig, Fsync};
use super::directory::Directory;
use super::io_threads::IoThreads;
use super::missing::Missing;
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
    /// Directories that were lost, until their last operation has ended.
    abandoned: Vec<Root>,
    /// Of operations that found no directory open.
    refused: Vec<Completion>,
    config: FsConfig,
    pool: Region,
    waker: Arc<Waker>,
    transfers: Transfers,
}

impl Fs {
    /// Less where directories are read-only, or nothing is flushed.
    pub const CAPABILITIES: Capabilities =
        Capabilities { can_store: true, can_remove: true, can_touch: true, is_durable: true, is_shared: true };

    /// Opens the directories, all at once, and blocks for at most one timeout. `pool` is the memory with the slots.
    /// Directories that cannot be used yet are waited for beside serving, if there is another. An error names the
    /// directory and what to do.
    pub fn open(config: &FsConfig, pool: Region) -> Result<Fs> {
        Opening::new(config.clone()).open(pool)
    }

    /// Of directories that were asked, in the order of the configuration.
    fn of(config: &FsConfig, mut opened: Vec<Result<Directory>>, pool: Region) -> Result<Fs> {
        let waker = Arc::new(Waker::new().map_err(no_memory)?);
        let is_wrong =
            |opened: &Result<Directory>| opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Invalid);
        if let Some(at) = opened.iter().position(is_wrong).or(opened.iter().all(Result::is_err).then_some(0)) {
            return Err(opened.swap_remove(at).err().expect("it is an error"));
        }
        // On an error the drop of this value closes it.
        let mut fs = Fs {
            roots: Vec::new(),
            missing: Vec::new(),
            abandoned: Vec::new(),
            refused: Vec::new(),
            config: config.clone(),
            pool,
            waker,
            transfers: Transfers::default(),
        };
        for (path, opened) in config.directories.iter().zip(opened) {
            match opened {
                Ok(directory) => {
                    if let Some(error) = fs.twin_of(&directory) {
                        return Err(error);
                    }
                    fs.roots.push(start(directory, config, &fs.pool, &fs.waker)?);
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, hint = error.hint_text(),
                        "cannot open a shared directory yet; serving without it");
                    fs.wait_for(path.clone(), error, Directory::open).map_err(no_memory)?;
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

    /// The directory is used when `open` can open it.
    fn wait_for(
        &mut self,
        path: PathBuf,
        why: Error,
        open: impl Fn(&Path, &FsConfig) -> Result<Directory> + Send + 'static,
    ) -> io::Result<()> {
        let (named, config, pool, waker) = (path.clone(), self.config.clone(), self.pool.clone(), self.waker.clone());
        let open = move || start(open(&named, &config)?, &config, &pool, &waker);
        self.missing.push(Missing::start(path, why, self.waker.clone(), open)?);
        Ok(())
    }

    /// Closes directories that are not at their paths any more.
    fn give_up_lost(&mut self) {
        for at in (0..self.roots.len()).rev() {
            let root = &self.roots[at];
            let Some(loss) = root.loss() else { continue };
            let (path, ground) = (root.directory.path.clone(), root.directory.ground.clone());
            let open = move |path: &Path, config: &FsConfig| Directory::open_again(path, config, ground.as_ref());
            // Without a thread the next call tries again.
            if self.wait_for(path.clone(), loss.error(&path), open).is_ok() {
                let error = loss.error(&path);
                tracing::warn!(path = %path.display(), %error, hint = error.hint_text(),
                    "a shared directory is lost; serving without it");
                self.abandoned.push(self.roots.swap_remove(at));
            }
        }
    }

    /// Accepts the operation; false if its queue is full.
    fn take(&mut self, op: &Operation) -> bool {
        if let Some(root) = self.home_of(&op.key) {
            return root.take(op);
        }
        self.refused.push(Completion { id: op.id, outcome: Outcome::Failed(ErrorKind::Unavailable) });
        true
    }

    fn wake_for_completions(&self) {
        if !self.refused.is_empty() || self.all_roots().any(|root| !root.completions.is_empty()) {
            self.waker.wake();
        }
    }

    fn all_roots(&self) -> impl Iterator<Item = &Root> {
        self.roots.iter().chain(&self.abandoned)
    }

    /// Uses directories that were missing and came.
    fn take_up(&mut self) {
        for missing in std::mem::take(&mut self.missing) {
            let Some(mut root) = missing.opened() else {
                self.missing.push(missing);
                continue;
            };
            if let Some(error) = self.twin_of(&root.directory) {
                root.close();
                missing.refuse(error);
                self.missing.push(missing);
                continue;
            }
            tracing::info!(path = %missing.path.display(), "a missing shared directory appeared and is used now");
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
        roots.sort_by_key(|root| self.config.directories.iter().position(|path| *path == root.path));
        FsReport { roots }
    }

    /// Where its blocks are, for purges of namespaces.
    pub fn places(&self) -> Vec<Place> {
        self.roots.iter().map(Root::place).chain(self.missing.iter().map(Missing::place)).collect()
    }

    /// Whether nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.refused.is_empty() && self.all_roots().all(Root::is_idle)
    }

    /// Blocks until every accepted operation has completed; false if that takes longer than `timeout`.
    pub fn drain(&mut self, timeout: Duration, completions: &mut Vec<Completion>) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            self.roots.iter_mut().for_each(Root::advance);
            self.abandoned.iter_mut().for_each(Root::abandon);
            self.poll(completions);
            let Some(busy) = self.all_roots().find(|root| !root.is_idle()) else { return true };
            if Instant::now() > deadline {
                return false;
            }
            busy.wait(Duration::from_millis(10));
        }
    }

    /// Rendezvous hashing: adding or losing a directory moves no other directory's keys.
    fn home_of(&mut self, key: &BlockKey) -> Option<&mut Root> {
        let weight = |root: &Root| {
            let mut sum = Checksum::new();
            sum.update(&root.directory.id.to_le_bytes());
            sum.update(&key.namespace.0.to_le_bytes());
            sum.update(&key.group.to_le_bytes());
            sum.update(key.hash.as_bytes());
            // A checksum is linear. After mixing, its high bits depend on the whole key.
            sum.finish().wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        self.roots.iter_mut().max_by_key(|root| weight(root))
    }
}

impl Tier for Fs {
    fn name(&self) -> &'static str {
        "fs"
    }

    fn capabilities(&self) -> Capabilities {
        let may_write = !self.missing.is_empty() && !self.config.read_only;
        let can_write = may_write || self.roots.iter().any(|root| !root.directory.is_read_only);
        Capabilities {
            can_store: can_write,
            can_remove: can_write,
            can_touch: can_write,
            is_durable: self.config.fsync != Fsync::None,
            ..Fs::CAPABILITIES
        }
    }

    fn submit(&mut self, batch: &[Operation]) -> usize {
        let taken = batch.iter().take_while(|op| self.take(op)).count();
        self.transfers.begin(&batch[..taken]);
        self.roots.iter().for_each(Root::start);
        self.wake_for_completions();
        taken
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.waker.clear();
        let from = completions.len();
        completions.append(&mut self.refused);
        for root in self.roots.iter_mut().chain(&mut self.abandoned) {
            root.poll();
            completions.append(&mut root.completions);
        }
        self.transfers.ended(&completions[from..]);
    }

    /// Completes the operation as late at once, whatever its thread does.
    fn cancel(&mut self, id: OpId) {
        if self.roots.iter_mut().chain(&mut self.abandoned).any(|root| root.give_up(id)) {
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
        self.roots.append(&mut self.abandoned);
        self.roots.iter_mut().for_each(Root::close);
        self.roots.iter().for_each(|root| root.wait_for_end(deadline));
        self.missing.drain(..).for_each(|missing| missing.end(deadline));
    }
}

/// Time is real time, because mounts take it; call about every 10 ms.
impl Timed for Fs {
    fn advance(&mut self, _now: Duration) {
        if !self.missing.is_empty() {
            self.take_up();
        }
        self.give_up_lost();
        self.roots.iter_mut().for_each(Root::advance);
        // One with nothing to do has threads to end all the same.
        self.abandoned.iter_mut().for_each(Root::abandon);
        self.abandoned.retain(|root| !root.is_idle());
        self.wake_for_completions();
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

/// What would become of each directory, in the order of the configuration: a finding, or what to change. Changes
/// nothing. Takes `timeout` at most.
pub fn examine(config: &FsConfig) -> Vec<Result<String>> {
    each_of(config, Directory::examine).unwrap_or_else(|error| vec![Err(error)])
}

/// In separate threads, since a mount may never answer. In the order of the configuration.
fn each_of<T: Send + 'static>(config: &FsConfig, look: fn(&Path, &FsConfig) -> Result<T>) -> Result<Vec<Result<T>>> {
    let deadline = Instant::now() + config.timeout;
    let asked = config.directories.iter().map(|path| ask(path, config, look)).collect::<Result<Vec<_>>>()?;
    let answer = |(path, asked): (&PathBuf, Receiver<Result<T>>)| {
        let left = deadline.saturating_duration_since(Instant::now());
        asked.recv_timeout(left).unwrap_or_else(|error| Err(no_answer(path, error)))
    };
    Ok(config.directories.iter().zip(asked).map(answer).collect())
}

fn ask<T: Send + 'static>(
    path: &Path,
    config: &FsConfig,
    look: fn(&Path, &FsConfig) -> Result<T>,
) -> Result<Receiver<Result<T>>> {
    let (sender, receiver) = sync_channel(1);
    let (path, config) = (path.to_owned(), config.clone());
    // When the mount answers, the receiver may be gone.
    let open = move || drop(sender.send(look(&path, &config)));
    aside::spawn("forebay-fs-open", None, open).map_err(no_memory)?;
    Ok(receiver)
}

/// The tier on its way, for whoever tries again until it opens. A directory has one thread that waits for it, however
/// often it does not answer.
pub struct Opening {
    config: FsConfig,
    /// Of directories that have not answered an earlier try.
    asked: Vec<Option<Receiver<Result<Directory>>>>,
}

impl Opening {
    /// Nothing is asked yet.
    pub fn new(config: FsConfig) -> Opening {
        let asked = config.directories.iter().map(|_| None).collect();
        Opening { config, asked }
    }

    /// See [`Fs::open`].
    pub fn open(&mut self, pool: Region) -> Result<Fs> {
        let Opening { config, asked } = self;
        config.check()?;
        let deadline = Instant::now() + config.timeout;
        for (path, asked) in config.directories.iter().zip(asked.iter_mut()).filter(|(_, asked)| asked.is_none()) {
            *asked = Some(ask(path, config, Directory::open)?);
        }
        let answer = |(path, asked): (&PathBuf, &mut Option<Receiver<Result<Directory>>>)| {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = asked.as_ref().expect("each was asked").recv_timeout(left);
            if !matches!(answer, Err(RecvTimeoutError::Timeout)) {
                *asked = None;
            }
            answer.unwrap_or_else(|error| Err(no_answer(path, error)))
        };
        let opened = config.directories.iter().zip(asked.iter_mut()).map(answer).collect();
        Fs::of(config, opened, pool)
    }
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
