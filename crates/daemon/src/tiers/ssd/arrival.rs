//! One disk from the configuration into the tier, on a thread of its own: at the start, or whenever it comes.
//!
//! Claimed by a process of its own → an earlier daemon's transfers have ended → read → in the tier. Invariants: a disk
//! that is missing, or does not answer, holds up nobody else. What cannot be had is tried again for as long as the
//! daemon runs. The log has one line for each change.

use std::process::Command;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_core::tiers::TierHasher;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::ssd::{Answer, ClaimProcess, DiskClaim, DiskConfig, DiskReport, Inbox, SsdConfig, named_twice};
use forebay_io::uring::Region;

use super::novelty::{Known, Novelty, missing_beside_others};

/// The command by which this program claims a disk for a daemon that started it.
pub const CLAIM_COMMAND: &str = "claim-disk";

/// A disk that does not answer for so long is missing until it does. Healthy ones take milliseconds.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// How long a new disk waits for the first look at the others: they are asked at the same time.
const OTHERS_LOOK: Duration = Duration::from_secs(2);
/// How often a missing disk is looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(3);
/// How often a killed daemon's transfers are asked about; they take as long as a disk's slowest answer.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

/// See the module's head.
pub struct Arrival {
    /// Number of the disk in the configuration.
    pub place: usize,
    pub config: SsdConfig,
    pub novelty: Arc<Novelty>,
    pub inbox: Inbox,
    /// Whoever waits for the first look at the disk.
    pub first_look: Option<Sender<Result<()>>>,
    /// The pool, and what gives blocks their fingerprints, come later than the first look.
    pub pools: Receiver<(Region, TierHasher)>,
    pub pool: Option<Region>,
    /// What the log says of the disk.
    pub said: String,
    /// Of all disks, by place.
    pub identities: Arc<Mutex<Vec<Option<String>>>>,
}

impl Arrival {
    pub fn spawn(self) {
        let run = move || self.run();
        std::thread::Builder::new().name("disk-open".into()).spawn(run).expect("the system starts a thread");
    }

    /// Until the disk is in the tier, or the tier is gone.
    fn run(mut self) {
        while let Err(error) = self.open() {
            self.say_missing(error);
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn open(&mut self) -> Result<()> {
        let mut claim = self.claim()?;
        self.looked(Ok(()));
        if self.pool.is_none()
            && let Ok((pool, hasher)) = self.pools.recv()
        {
            (self.pool, self.config.hasher) = (Some(pool), hasher);
        }
        let Some(pool) = self.pool.clone() else { return Ok(()) };
        let mut was_told = false;
        while !claim.is_earlier_io_done()? {
            if !std::mem::replace(&mut was_told, true) {
                tracing::info!(disk = self.name(), "waiting for transfers of an earlier daemon to end");
            }
            std::thread::sleep(CLAIM_PAUSE);
        }
        self.inbox.earlier_io_done(self.place);
        let opened = claim.open(&self.config, &pool, self.inbox.waker())?;
        let found = opened.report();
        let (engine, why) = (found.engine, &found.engine_why);
        let (disk, blocks, is_direct) = (found.name.as_str(), found.blocks, found.is_direct);
        tracing::info!(disk, blocks, engine, why, is_direct, "opened a disk");
        self.warn_of_geometry(&found);
        if found.recovery.segments_lost > 0 {
            tracing::warn!(
                disk,
                segments = found.recovery.segments_lost,
                hint = "was its file cut? look for errors of this disk in the kernel's log",
                "a disk has lost segments; the blocks in them are misses"
            );
        }
        self.inbox.opened(self.place, opened);
        Ok(())
    }

    /// A disk that is there keeps its capacity and its segments, whatever is configured now.
    fn warn_of_geometry(&self, found: &DiskReport) {
        let (made_bytes, segment_bytes) = (found.geometry.disk_bytes(), found.geometry.segment_bytes);
        // A disk is made a part of a segment shorter than it may be.
        let kept = made_bytes..made_bytes + segment_bytes;
        let is_other = self.disk().capacity_bytes.is_some_and(|wanted| !kept.contains(&wanted));
        if is_other || self.config.segment_bytes.is_some_and(|wanted| wanted != segment_bytes) {
            tracing::warn!(
                disk = found.name,
                made_bytes,
                segment_bytes,
                hint = "empty the disk to change that; its blocks are lost then",
                "a disk keeps the capacity and the segments that it was formatted with"
            );
        }
    }

    /// A file that is missing is made if the operator says so, or if all disks are new.
    fn claim(&mut self) -> Result<DiskClaim> {
        let found = self.ask(false);
        let known = match &found {
            Ok(None) => Known::ToBeMade,
            Err(error) if is_absent(error) => Known::Nothing,
            Ok(Some(_)) | Err(_) => Known::Found,
        };
        self.novelty.know(self.place, known);
        if let Some(claim) = found? {
            return Ok(claim);
        }
        if !self.disk().create && !self.novelty.are_all_new(OTHERS_LOOK) {
            return Err(missing_beside_others(&self.disk().path));
        }
        let made = self.ask(true)?.expect("it makes the file or says why not");
        self.novelty.know(self.place, Known::Made);
        Ok(made)
    }

    /// Asks a process for the disk; `None` if that made no file and there is none.
    fn ask(&mut self, makes_file: bool) -> Result<Option<DiskClaim>> {
        let disk = self.disk().clone();
        let process = ClaimProcess::start(command(&disk, makes_file), disk.path.clone())?;
        if !process.has_answered(SILENT_AFTER) {
            self.say_missing(silent(&disk));
            if !process.has_answered(self.config.open_patience) {
                return Err(silent(&disk));
            }
        }
        let Answer { identity, claim } = process.answer();
        match self.twin_of(identity) {
            // While the daemon runs, the first that is there is used.
            Some(twin) if claim.is_err() || self.first_look.is_some() => Err(twin),
            _ => claim,
        }
    }

    /// The error if another path of the configuration leads to the same disk.
    fn twin_of(&self, identity: Option<String>) -> Option<Error> {
        let mut identities = self.identities.lock().unwrap_or_else(PoisonError::into_inner);
        identities[self.place] = identity;
        let own = identities[self.place].as_ref()?;
        let twin =
            (0..identities.len()).find(|other| *other != self.place && identities[*other].as_ref() == Some(own))?;
        Some(named_twice(&self.disk().path, &self.config.disks[twin].path))
    }

    /// Before the daemon serves, a mistake of the operator ends it. Afterwards it costs this disk.
    fn say_missing(&mut self, error: Error) {
        let (kind, text) = (error.kind(), error.to_string());
        let hint = error.hint_text().unwrap_or("check the disk").to_owned();
        let is_mistake = is_mistake(&error);
        let is_heard = self.looked(if is_mistake { Err(error) } else { Ok(()) });
        if is_mistake && is_heard {
            return;
        }
        if self.said != text {
            tracing::warn!(disk = self.name(), error = text, hint, "a disk is missing; the tier serves without it");
            self.inbox.missing(self.place, Error::new(kind, text.clone()).hint(hint));
            self.said = text;
        }
    }

    /// Whether anybody still waited for the first look.
    fn looked(&mut self, what: Result<()>) -> bool {
        self.first_look.take().is_some_and(|first_look| first_look.send(what).is_ok())
    }

    fn disk(&self) -> &DiskConfig {
        &self.config.disks[self.place]
    }

    fn name(&self) -> String {
        self.disk().path.display().to_string()
    }
}

/// What only another configuration mends: the disk holds something else, or it is not what it should be. Everything
/// else passes when the disk is mounted, mended, replaced or given room, or when its user ends: that may be a daemon
/// which was killed while the disk hung.
fn is_mistake(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported)
}

/// Whether the look says nothing of the disk: there is no such directory, nothing is mounted, or there was no answer.
fn is_absent(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Io | ErrorKind::Timeout)
}

fn silent(disk: &DiskConfig) -> Error {
    Error::new(ErrorKind::Timeout, "a disk does not answer")
        .with("path", disk.path.display())
        .hint("look for errors of the disk or its mount in the kernel's log; the daemon takes it when it answers")
}

fn command(disk: &DiskConfig, makes_file: bool) -> Command {
    // The program that runs, even if its file was replaced since.
    let mut command = Command::new("/proc/self/exe");
    command.arg(CLAIM_COMMAND).arg(&disk.path);
    if let Some(bytes) = disk.capacity_bytes {
        command.args(["--capacity-bytes", &bytes.to_string()]);
    }
    let flags = [("--create", disk.create), ("--makes-file", makes_file)];
    command.args(flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag));
    command
}
