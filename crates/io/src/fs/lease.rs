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

use super::directory::{Directory, clock};
use super::layout::{self, LEASE, USAGE};

/// A lease that says that it holds for longer is damaged.
const MOST_DURATION: Duration = Duration::from_secs(24 * 3600);

/// See the module documentation.
pub(super) struct Lease {
    text: String,
    duration: Duration,
    is_held: bool,
    /// When it was renewed last: by this host's clock, and by the filesystem's.
    renewed: Option<(Duration, Duration)>,
    /// The lease of another host, as it was seen last.
    other: Option<Other>,
}

struct Other {
    text: String,
    touched: Duration,
    /// Since when it has not been touched.
    since: Duration,
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
        Lease { text, duration, is_held: false, renewed: None, other: None }
    }

    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Takes or renews the lease; none if another live host holds it. Returns the filesystem's time if the lease is
    /// held. A lease that was renewed less than a quarter of its duration ago costs nothing. That of another host costs
    /// one look, as long as that host renews it.
    pub fn hold(&mut self, directory: &Directory) -> Result<Option<Duration>, Errno> {
        if let Some((at, now)) = self.renewed {
            let passed = clock().saturating_sub(at);
            if passed < self.duration / 4 {
                return Ok(Some(now + passed));
            }
        }
        (self.is_held, self.renewed) = (false, None);
        let is_free = match directory.read_plain(LEASE) {
            Ok((text, file)) if text == self.text => return self.touch(&file).map(Some),
            Ok((text, file)) => {
                let touched = touched_at(&rustix::fs::fstat(&file)?);
                !self.is_alive(text, touched) && self.take_away_old(directory)?
            }
            Err(Errno::NOENT) => true,
            Err(error) => return Err(error),
        };
        if !is_free || !directory.publish(LEASE, self.text.as_bytes())? {
            return Ok(None);
        }
        match directory.read_plain(LEASE) {
            Ok((text, file)) if text == self.text => self.touch(&file).map(Some),
            Ok(_) | Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether another host has shown a sign of life while this one has looked.
    fn is_alive(&mut self, text: String, touched: Duration) -> bool {
        let before = self.other.take_if(|other| other.text == text);
        let is_first = before.is_none();
        let since = before.filter(|other| other.touched == touched).map_or_else(clock, |other| other.since);
        let duration = self.duration_of(&text);
        self.other = Some(Other { text, touched, since });
        // What it was before, only its age tells.
        !is_first && clock().saturating_sub(since) <= duration
    }

    /// For how long after its last touch a lease holds.
    fn duration_of(&self, text: &str) -> Duration {
        expires(text).filter(|duration| *duration <= MOST_DURATION).unwrap_or(self.duration)
    }

    fn touch(&mut self, file: &File) -> Result<Duration, Errno> {
        let now = touch(file)?;
        (self.is_held, self.renewed, self.other) = (true, Some((clock(), now)), None);
        Ok(now)
    }

    /// Lets the next host take the lease at once.
    pub fn give_back(&mut self, directory: &Directory) {
        if self.is_held && directory.read_plain(LEASE).is_ok_and(|(text, _)| text == self.text) {
            let _ = directory.own_folder().and_then(|folder| folder.remove(LEASE));
        }
        (self.is_held, self.renewed) = (false, None);
    }

    /// Whether there is no lease any more because its holder showed no sign of life.
    fn take_away_old(&self, directory: &Directory) -> Result<bool, Errno> {
        let (text, file) = match directory.read_plain(LEASE) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(true),
            Err(error) => return Err(error),
        };
        let duration = self.duration_of(&text);
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

fn expires(text: &str) -> Option<Duration> {
    text.lines().find_map(|line| line.strip_prefix("expires_ms ")?.parse().ok()).map(Duration::from_millis)
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

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use rustix::fs::{AtFlags, CWD, FileType, Mode};

    use super::super::config::FsConfig;
    use super::super::layout::OWN_FOLDER;
    use super::*;

    const LONG_AGO: Timespec = Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };

    #[test]
    fn a_host_that_waits_changes_nothing_as_long_as_the_sweeper_lives_and_takes_over_when_it_does_not() {
        let home = tempfile::tempdir().unwrap();
        let directory = Directory::open(home.path(), &FsConfig::new(vec![home.path().to_owned()])).unwrap();
        let duration = Duration::from_secs(2);
        let [mut first, mut second] = [0, 1].map(|_| Lease::new(&directory, duration));
        let held = first.hold(&directory).unwrap().expect("nobody else is there");
        assert_eq!(second.hold(&directory), Ok(None), "it looks how old the lease is");
        let own = home.path().join(OWN_FOLDER);
        let changed = |name: &str| fs::metadata(own.join(name)).unwrap().modified().unwrap();
        let names = || fs::read_dir(&own).unwrap().count();
        let before = (changed(USAGE), changed("."), names());
        for round in 0..5 {
            sleep(duration / 4);
            let now = first.hold(&directory).unwrap().expect("it renews the lease");
            assert!(now > held && first.is_held(), "round {round}");
            assert_eq!(second.hold(&directory), Ok(None), "round {round}");
        }
        assert_eq!((changed(USAGE), changed("."), names()), before, "a change of metadata for each look");
        sleep(duration + duration / 4);
        assert!(second.hold(&directory).unwrap().is_some(), "the lease has expired");
        assert_eq!(first.hold(&directory), Ok(None));
        second.give_back(&directory);
        assert!(first.hold(&directory).unwrap().is_some() && !second.is_held());
    }

    #[test]
    fn something_else_in_the_place_of_the_lease_is_an_error_at_once() {
        let home = tempfile::tempdir().unwrap();
        let directory = Directory::open(home.path(), &FsConfig::new(vec![home.path().to_owned()])).unwrap();
        let path = home.path().join(OWN_FOLDER).join(LEASE);
        let mut lease = Lease::new(&directory, Duration::from_secs(60));
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(lease.hold(&directory), Err(Errno::INVAL));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(lease.hold(&directory), Err(Errno::INVAL));
        fs::remove_dir(&path).unwrap();
        assert!(lease.hold(&directory).unwrap().is_some());
    }

    #[test]
    fn what_is_no_lease_is_taken_away_when_it_is_old() {
        let home = tempfile::tempdir().unwrap();
        let directory = Directory::open(home.path(), &FsConfig::new(vec![home.path().to_owned()])).unwrap();
        let path = home.path().join(OWN_FOLDER).join(LEASE);
        let for_ever = format!("forebay sweeper 1\nexpires_ms {}\n", u64::MAX);
        let make: [(&str, &dyn Fn()); 2] = [
            ("bytes", &|| fs::write(&path, [0xff; 100]).unwrap()),
            ("for ever", &|| fs::write(&path, &for_ever).unwrap()),
        ];
        for (what, make) in make {
            make();
            let old = Timestamps { last_access: LONG_AGO, last_modification: LONG_AGO };
            rustix::fs::utimensat(CWD, &path, &old, AtFlags::empty()).unwrap();
            let mut lease = Lease::new(&directory, Duration::from_secs(60));
            assert!(lease.hold(&directory).unwrap().is_some(), "{what}");
            lease.give_back(&directory);
        }
    }
}
