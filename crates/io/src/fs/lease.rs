//! Decides which host sweeps a shared directory: the one whose lease file lies there and was touched recently.
//!
//! Invariants: a lease gets its name by link, so one host gets it. An old lease is taken away by rename, so one host
//! takes it. A host that took away a fresh lease, because it looked too early, puts it back. For that moment there
//! may be two sweepers: they do no harm, they only do work twice. Ages are measured by the filesystem's own clock. If
//! that clock was set back, a lease may lie in the future: it is old as well, since its holder would have renewed it.

use std::fs::{self, File};
use std::time::Duration;

use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;

use super::directory::Directory;
use super::layout::{self, LEASE, USAGE};

/// See the module documentation.
pub(super) struct Lease {
    text: String,
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
        Lease { text, duration, is_held: false }
    }

    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Takes or renews the lease; none if another live host holds it. Returns the filesystem's time if the lease is
    /// held.
    pub fn hold(&mut self, directory: &Directory) -> Result<Option<Duration>, Errno> {
        let now = match self.renew(directory)? {
            None if directory.publish(LEASE, self.text.as_bytes())? => self.renew(directory)?,
            None => {
                let is_free = self.take_away_old(directory)?;
                let is_ours = is_free && directory.publish(LEASE, self.text.as_bytes())?;
                if is_ours { self.renew(directory)? } else { None }
            }
            now => now,
        };
        self.is_held = now.is_some();
        Ok(now)
    }

    /// Lets the next host take the lease at once.
    pub fn give_back(&mut self, directory: &Directory) {
        if self.is_held && directory.read(LEASE).is_ok_and(|(text, _)| text == self.text) {
            let _ = directory.own_folder().and_then(|folder| folder.remove(LEASE));
        }
        self.is_held = false;
    }

    fn renew(&self, directory: &Directory) -> Result<Option<Duration>, Errno> {
        match directory.read(LEASE) {
            Ok((text, file)) if text == self.text => touch(&file).map(Some),
            Ok(_) | Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether there is no lease any more because its holder showed no sign of life.
    fn take_away_old(&self, directory: &Directory) -> Result<bool, Errno> {
        let (text, file) = match directory.read(LEASE) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(true),
            Err(error) => return Err(error),
        };
        let expires = text.lines().find_map(|line| line.strip_prefix("expires_ms ")?.parse().ok());
        let duration = expires.map_or(self.duration, Duration::from_millis);
        let touched = touched_at(&rustix::fs::fstat(&file)?);
        if now(directory)?.abs_diff(touched) <= duration {
            return Ok(false);
        }
        let (folder, away) = (directory.own_folder()?, layout::temporary(&directory.writer));
        match folder.rename(LEASE, &away) {
            Err(Errno::NOENT) => return Ok(true),
            renamed => renamed?,
        }
        let is_same = directory.read(&away).is_ok_and(|(taken, _)| taken == text);
        if !is_same {
            folder.link(&away, LEASE)?;
        }
        folder.remove(&away)?;
        Ok(is_same)
    }
}

/// The time of the filesystem's clock, which is the server's clock if there is a server. A file that is there already
/// shows it: a full volume may have no room for another.
pub(super) fn now(directory: &Directory) -> Result<Duration, Errno> {
    touch(&directory.own_folder()?.open(USAGE, OFlags::RDONLY)?)
}

/// Sets a file's time to now and returns it.
pub(super) fn touch(file: &File) -> Result<Duration, Errno> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now })?;
    Ok(touched_at(&rustix::fs::fstat(file)?))
}

pub(super) fn touched_at(about: &rustix::fs::Stat) -> Duration {
    Duration::new(about.st_mtime.max(0) as u64, about.st_mtime_nsec as u32)
}
