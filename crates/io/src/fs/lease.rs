//! Decides which host sweeps a shared directory: the one whose lease file lies there and was touched recently.
//!
//! Invariants: a lease gets its name by link, so one host gets it. An old lease is taken away by rename, so one host
//! takes it. A host that took away a fresh lease, because it looked too early, puts it back. For that moment there
//! may be two sweepers: they do no harm, they only do work twice. Ages are measured by the filesystem's own clock.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;

use super::directory::{Directory, errno, link};
use super::layout::{self, LEASE, OWN_FOLDER};

/// Longer than any lease file.
const MAX_BYTES: u64 = 4096;

/// See the module documentation.
pub(super) struct Lease {
    path: PathBuf,
    folder: PathBuf,
    text: String,
    writer: String,
    duration: Duration,
    is_held: bool,
}

impl Lease {
    pub fn new(directory: &Directory, duration: Duration) -> Lease {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let text = format!(
            "forebay sweeper 1\nholder {}\nboot {}\nlease {:016x}\nexpires_ms {}\n",
            directory.writer,
            boot.trim(),
            layout::random(),
            duration.as_millis()
        );
        let (path, folder) = (directory.path.join(LEASE), directory.path.join(OWN_FOLDER));
        Lease { path, folder, text, writer: directory.writer.clone(), duration, is_held: false }
    }

    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Takes or renews the lease; none if another live host holds it. Returns the filesystem's time if the lease is
    /// held.
    pub fn hold(&mut self, directory: &Directory) -> Result<Option<Duration>, Errno> {
        let now = match self.renew()? {
            None if directory.publish(&self.path, self.text.as_bytes())? => self.renew()?,
            None => {
                let is_free = self.take_away_old(directory)?;
                if is_free && directory.publish(&self.path, self.text.as_bytes())? { self.renew()? } else { None }
            }
            now => now,
        };
        self.is_held = now.is_some();
        Ok(now)
    }

    /// Lets the next host take the lease at once.
    pub fn give_back(&mut self) {
        if self.is_held && self.read().is_ok_and(|(text, _)| text == self.text) {
            let _ = rustix::fs::unlink(&self.path);
        }
        self.is_held = false;
    }

    fn renew(&self) -> Result<Option<Duration>, Errno> {
        match self.read() {
            Ok((text, file)) if text == self.text => touch(&file).map(Some),
            Ok(_) | Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&self) -> Result<(String, fs::File), Errno> {
        let file: fs::File = rustix::fs::open(&self.path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into();
        let mut text = String::new();
        (&file).take(MAX_BYTES).read_to_string(&mut text).map_err(errno)?;
        Ok((text, file))
    }

    /// Whether there is no lease any more because its holder showed no sign of life.
    fn take_away_old(&self, directory: &Directory) -> Result<bool, Errno> {
        let (text, file) = match self.read() {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(true),
            Err(error) => return Err(error),
        };
        let expires = text.lines().find_map(|line| line.strip_prefix("expires_ms ")?.parse().ok());
        let duration = expires.map_or(self.duration, Duration::from_millis);
        let touched = touched_at(&rustix::fs::fstat(&file)?);
        if now(directory)?.saturating_sub(touched) <= duration {
            return Ok(false);
        }
        let away = layout::temporary(&self.folder, &self.writer);
        match rustix::fs::rename(&self.path, &away) {
            Err(Errno::NOENT) => return Ok(true),
            renamed => renamed?,
        }
        let is_same = fs::read_to_string(&away).is_ok_and(|taken| taken == text);
        if !is_same {
            link(&away, &self.path)?;
        }
        rustix::fs::unlink(&away)?;
        Ok(is_same)
    }
}

/// The time of the filesystem's clock, which is the server's clock if there is a server.
pub(super) fn now(directory: &Directory) -> Result<Duration, Errno> {
    let (path, file) = directory.create(&directory.path.join(OWN_FOLDER))?;
    let now = touch(&file);
    rustix::fs::unlink(&path)?;
    now
}

/// Sets a file's time to now and returns it.
pub(super) fn touch(file: &fs::File) -> Result<Duration, Errno> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now })?;
    Ok(touched_at(&rustix::fs::fstat(file)?))
}

pub(super) fn touched_at(about: &rustix::fs::Stat) -> Duration {
    Duration::new(about.st_mtime.max(0) as u64, about.st_mtime_nsec as u32)
}
