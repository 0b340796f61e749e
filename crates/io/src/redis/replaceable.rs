//! What is read from files that may be replaced at any time: certificates and their key, a password.
//!
//! Invariants: an event loop reads no file; readers are threads of their own. There is one at a time, unless one hangs:
//! then others follow, at most [`MOST_READERS`] in all, and only the last one's result counts. Files that cannot be
//! read, or do not belong together, change nothing: what was read before stays in use.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use forebay_core::Result;

use crate::seldom::Seldom;

/// A reader that takes longer hangs: its filesystem does not answer.
const HANGS: Duration = Duration::from_secs(10);
/// Each that hangs keeps a thread until its filesystem answers.
const MOST_READERS: u32 = 4;

/// See the module documentation.
pub(super) struct Replaceable<T>(Arc<Files<T>>);

struct Files<T> {
    /// For the log.
    of: &'static str,
    paths: Box<dyn Fn() -> Vec<PathBuf> + Send + Sync>,
    read: Box<dyn Fn() -> Result<T> + Send + Sync>,
    state: Mutex<State<T>>,
    /// A reader has ended.
    ended: Condvar,
}

struct State<T> {
    latest: Read<T>,
    /// The last reader, and since when it reads; none between readers.
    reader: u64,
    since: Option<Instant>,
    /// Readers that have not ended, with those that hang.
    readers: u32,
    warnings: Seldom,
}

/// What was read last.
struct Read<T> {
    value: T,
    stamps: Stamps,
}

/// Device, inode, length and time of change of each file; none of one that cannot be found. The time is that of the
/// inode, which no program can set back.
type Stamps = Vec<(PathBuf, Option<(u64, u64, u64, i64, i64)>)>;

impl<T: Clone + Send + 'static> Replaceable<T> {
    /// `read` reads the files at `paths`. The first time is now.
    pub fn new(
        of: &'static str,
        paths: impl Fn() -> Vec<PathBuf> + Send + Sync + 'static,
        read: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Result<Replaceable<T>> {
        let latest = Read { stamps: stamps(&paths), value: read()? };
        let state = State { latest, reader: 0, since: None, readers: 0, warnings: Seldom::default() };
        let (paths, read) = (Box::new(paths), Box::new(read));
        Ok(Replaceable(Arc::new(Files { of, paths, read, state: Mutex::new(state), ended: Condvar::new() })))
    }

    /// For new connections.
    pub fn get(&self) -> T {
        self.0.state().latest.value.clone()
    }

    /// Reads the files again if they were replaced, and waits for that until `due`.
    pub fn renew(&self, due: Instant) {
        self.renew_aside();
        let mut state = self.0.state();
        while state.since.is_some() {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.0.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The same for the next connection but one: waits for nothing. Nothing to do if there are no files.
    pub fn renew_aside(&self) {
        let mut state = self.0.state();
        let now = Instant::now();
        let hangs = |since: Instant| now.duration_since(since) >= HANGS;
        if state.latest.stamps.is_empty() || state.since.is_some_and(|since| !hangs(since)) {
            return;
        }
        if state.since.is_some() && state.warnings.add(now).is_some() {
            let files = state.latest.stamps.iter().map(|(path, _)| path.display().to_string());
            tracing::warn!(
                tier = "redis",
                of = self.0.of,
                files = files.collect::<Vec<_>>().join(", "),
                hint = if state.readers < MOST_READERS {
                    "check the filesystem of the files; what they held before stays in use"
                } else {
                    "check the filesystem of the files; if it is gone for good, restart the daemon: too many readings \
                     hang for another one"
                },
                "reading files again hangs"
            );
        }
        if state.readers >= MOST_READERS {
            return;
        }
        let (files, number) = (self.0.clone(), state.reader + 1);
        // Where a host gives no thread, there is another time.
        if thread::Builder::new().name("redis-files".to_string()).spawn(move || files.reader(number)).is_ok() {
            (state.reader, state.since, state.readers) = (number, Some(now), state.readers + 1);
        }
    }
}

impl<T> Clone for Replaceable<T> {
    fn clone(&self) -> Replaceable<T> {
        Replaceable(self.0.clone())
    }
}

impl<T> Files<T> {
    fn reader(&self, number: u64) {
        // The stamps are older than what is read: a file that is replaced meanwhile is read once more.
        let stamps = stamps(&self.paths);
        let is_replaced = self.state().latest.stamps != stamps;
        let read = is_replaced.then(|| (self.read)());
        let mut state = self.state();
        state.readers -= 1;
        if state.reader != number {
            return;
        }
        state.since = None;
        match read {
            Some(Ok(value)) => {
                state.latest = Read { value, stamps };
                tracing::info!(tier = "redis", of = self.of, "files were replaced; new connections use the new ones");
            }
            Some(Err(error)) if state.warnings.add(Instant::now()).is_some() => {
                tracing::warn!(
                    tier = "redis",
                    of = self.of,
                    %error,
                    hint = error.hint_text(),
                    "cannot use files that were replaced; what they held before stays in use"
                );
            }
            Some(Err(_)) | None => {}
        }
        drop(state);
        self.ended.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stamps(paths: &impl Fn() -> Vec<PathBuf>) -> Stamps {
    let stamp = |path: PathBuf| {
        let of = |about: fs::Metadata| (about.dev(), about.ino(), about.len(), about.ctime(), about.ctime_nsec());
        let stamp = fs::metadata(&path).ok().map(of);
        (path, stamp)
    };
    paths().into_iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Files whose reading waits for a word while it hangs; a later reading answers.
    fn hanging(path: PathBuf) -> (Replaceable<u32>, Arc<AtomicBool>, std::sync::mpsc::Sender<()>) {
        let (go, wait) = channel::<()>();
        let (hangs, wait): (_, Mutex<Receiver<()>>) = (Arc::new(AtomicBool::new(false)), Mutex::new(wait));
        let (is_hanging, counted) = (hangs.clone(), Mutex::new(0));
        let read = move || {
            *counted.lock().unwrap() += 1;
            let number = *counted.lock().unwrap();
            if is_hanging.load(Ordering::SeqCst) {
                let _ = wait.lock().unwrap().recv();
            }
            Ok(number)
        };
        (Replaceable::new("test", move || vec![path.clone()], read).unwrap(), hangs, go)
    }

    #[test]
    fn a_reader_that_hangs_is_waited_for_until_the_deadline_and_followed_by_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        fs::write(&path, "one").unwrap();
        let (files, hangs, go) = hanging(path.clone());
        let soon = || Instant::now() + Duration::from_millis(50);
        assert_eq!(files.get(), 1);
        hangs.store(true, Ordering::SeqCst);
        fs::write(&path, "two").unwrap();
        files.renew(soon());
        assert_eq!(files.get(), 1, "the second reading hangs");
        files.renew(soon());
        assert_eq!(files.0.state().readers, 1, "it is not old yet");
        hangs.store(false, Ordering::SeqCst);
        files.0.state().since = Instant::now().checked_sub(HANGS);
        files.renew(Instant::now() + Duration::from_secs(60));
        assert_eq!(files.get(), 3);
        go.send(()).unwrap();
        while files.0.state().readers > 0 {
            thread::yield_now();
        }
        assert_eq!(files.get(), 3, "what came late does not count");
    }

    #[test]
    fn those_that_hang_are_few() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        let (files, hangs, go) = hanging(path.clone());
        hangs.store(true, Ordering::SeqCst);
        fs::write(&path, "two").unwrap();
        for _ in 0..10 {
            files.renew_aside();
            files.0.state().since = Instant::now().checked_sub(HANGS);
        }
        assert_eq!(files.0.state().readers, MOST_READERS);
        (0..MOST_READERS).for_each(|_| go.send(()).unwrap());
        while files.0.state().readers > 0 {
            thread::yield_now();
        }
        assert!(files.get() > 1);
        assert!(files.0.state().since.is_none());
    }

    #[test]
    fn a_file_that_is_written_in_place_with_its_old_time_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        let old = fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
        let write = |text: &str| {
            fs::write(&path, text).unwrap();
            fs::File::options().write(true).open(&path).unwrap().set_times(old).unwrap();
        };
        write("one");
        let (files, ..) = hanging(path.clone());
        write("two");
        files.renew(Instant::now() + Duration::from_secs(60));
        assert_eq!(files.get(), 2);
    }
}
