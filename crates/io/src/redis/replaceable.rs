//! What is read from files that may be replaced at any time: certificates and their key, a password.
//!
//! Invariants: an event loop reads no file; [`Replaceable::renew_aside`] reads on a thread of its own, of which there
//! is one at a time. Files that cannot be read, or do not belong together, change nothing: what was read before stays
//! in use.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{fs, thread};

use forebay_core::Result;

use crate::seldom::Seldom;

/// See the module documentation.
pub(super) struct Replaceable<T>(Arc<Files<T>>);

struct Files<T> {
    /// For the log.
    of: &'static str,
    paths: Box<dyn Fn() -> Vec<PathBuf> + Send + Sync>,
    read: Box<dyn Fn() -> Result<T> + Send + Sync>,
    latest: Mutex<Read<T>>,
    is_reading: AtomicBool,
    warnings: Seldom,
}

/// What was read last.
struct Read<T> {
    value: T,
    stamps: Stamps,
}

/// Device, inode, length and time of change of each file; none of one that cannot be found.
type Stamps = Vec<Option<(u64, u64, u64, i64, i64)>>;

impl<T: Clone + Send + 'static> Replaceable<T> {
    /// `read` reads the files at `paths`. The first time is now.
    pub fn new(
        of: &'static str,
        paths: impl Fn() -> Vec<PathBuf> + Send + Sync + 'static,
        read: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Result<Replaceable<T>> {
        let latest = Mutex::new(Read::by(&paths, &read)?);
        let (paths, read, is_reading) = (Box::new(paths), Box::new(read), AtomicBool::new(false));
        Ok(Replaceable(Arc::new(Files { of, paths, read, latest, is_reading, warnings: Seldom::default() })))
    }

    /// For new connections.
    pub fn get(&self) -> T {
        self.0.latest().value.clone()
    }

    /// Reads the files again if they were replaced. Waits for the disk.
    pub fn renew(&self) {
        self.0.renew();
    }

    /// The same on another thread, for the next connection but one. Nothing to do if there are no files.
    pub fn renew_aside(&self) {
        if self.0.latest().stamps.is_empty() || self.0.is_reading.swap(true, Ordering::AcqRel) {
            return;
        }
        let files = self.0.clone();
        let renew = move || {
            files.renew();
            files.is_reading.store(false, Ordering::Release);
        };
        // Where a host gives no thread, there is another time.
        if thread::Builder::new().name("redis-files".to_string()).spawn(renew).is_err() {
            self.0.is_reading.store(false, Ordering::Release);
        }
    }
}

impl<T> Clone for Replaceable<T> {
    fn clone(&self) -> Replaceable<T> {
        Replaceable(self.0.clone())
    }
}

impl<T> Files<T> {
    fn renew(&self) {
        if self.latest().stamps == stamps(&self.paths) {
            return;
        }
        match Read::by(&self.paths, &self.read) {
            Ok(read) => {
                *self.latest() = read;
                tracing::info!(tier = "redis", of = self.of, "files were replaced; new connections use the new ones");
            }
            Err(error) if self.warnings.add(Instant::now()).is_some() => {
                tracing::warn!(
                    tier = "redis",
                    of = self.of,
                    %error,
                    hint = error.hint_text(),
                    "cannot use files that were replaced; what they held before stays in use"
                );
            }
            Err(_) => {}
        }
    }

    fn latest(&self) -> MutexGuard<'_, Read<T>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Read<T> {
    /// The stamps are older than what is read: a file that is replaced meanwhile is read once more.
    fn by(paths: &impl Fn() -> Vec<PathBuf>, read: &impl Fn() -> Result<T>) -> Result<Read<T>> {
        let stamps = stamps(paths);
        Ok(Read { value: read()?, stamps })
    }
}

fn stamps(paths: &impl Fn() -> Vec<PathBuf>) -> Stamps {
    let stamp = |path: PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    };
    paths().into_iter().map(stamp).collect()
}
