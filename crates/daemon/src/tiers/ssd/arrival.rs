//! One disk from the configuration into the tier, on a thread of its own: at the start, or whenever it comes.
//!
//! Claimed by a process of its own → an earlier daemon's transfers have ended → read → in the tier. Invariants: a disk
//! that is missing, or does not answer, holds up nobody else. What cannot be had is tried again for as long as the
//! daemon runs. The log has one line for each change.

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::ssd::{ClaimProcess, Create, DiskClaim, DiskConfig, Inbox, Known, SsdConfig};
use forebay_io::uring::Region;

use super::tells_of_past;

/// The command by which this program claims a disk for a daemon that started it.
pub const CLAIM_COMMAND: &str = "claim-disk";

/// A disk that does not answer for so long is missing until it does. Healthy ones take milliseconds.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// How often a missing disk is looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(3);
/// How often a killed daemon's transfers are asked about; they take as long as a disk's slowest answer.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

/// What the first look at a disk showed.
pub enum Look {
    Taken {
        is_new: bool,
    },
    /// There is no file, and the answer says whether to make one.
    Absent(Sender<Create>),
    /// It is done without.
    Missing {
        /// Whether the disk was made earlier.
        is_past: bool,
    },
    /// Of the operator.
    Mistake(Error),
}

/// See the module's head.
pub struct Arrival {
    /// Number of the disk in the configuration.
    pub place: usize,
    pub config: SsdConfig,
    pub inbox: Inbox,
    pub known: Arc<Known>,
    /// Whether it asks, if it is not there, what else was found.
    pub asks: bool,
    /// Whoever waits for the first look at the disk.
    pub first_look: Option<Sender<Look>>,
    /// The pool comes later than the first look.
    pub pools: Receiver<Region>,
    pub pool: Option<Region>,
    /// What the log says of the disk.
    pub said: String,
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
        let is_new = claim.is_new();
        self.looked(Look::Taken { is_new });
        if self.pool.is_none() {
            self.pool = self.pools.recv().ok();
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
        self.known.add(&self.disk().path);
        self.known.keep()?;
        let opened = claim.open(&self.config, &pool, self.inbox.waker())?;
        let disk = opened.report();
        let (engine, why) = (disk.engine, &disk.engine_why);
        let (disk, blocks, is_direct) = (disk.name.as_str(), disk.blocks, disk.is_direct);
        tracing::info!(disk, blocks, engine, why, is_direct, is_new, "opened a disk");
        self.inbox.opened(self.place, opened);
        Ok(())
    }

    fn claim(&mut self) -> Result<DiskClaim> {
        match self.claim_as_told() {
            Err(error) if error.kind() == ErrorKind::NotFound && std::mem::take(&mut self.asks) => {
                let (asking, answer) = mpsc::channel();
                if let Some(first_look) = &self.first_look {
                    // Nobody may be left to hear it.
                    let _ = first_look.send(Look::Absent(asking));
                }
                self.config.disks[self.place].create = answer.recv().unwrap_or(Create::Never);
                self.claim_as_told()
            }
            claimed => claimed,
        }
    }

    fn claim_as_told(&mut self) -> Result<DiskClaim> {
        let disk = self.disk().clone();
        let process = ClaimProcess::start(command(&disk), disk.path.clone())?;
        if !process.has_answered(SILENT_AFTER) {
            self.say_missing(silent(&disk));
            if !process.has_answered(self.config.open_deadline) {
                return Err(silent(&disk));
            }
        }
        process.claim()
    }

    /// Before the daemon serves, a mistake of the operator ends it. Afterwards it costs this disk.
    fn say_missing(&mut self, error: Error) {
        let (text, hint) = (error.to_string(), error.hint_text().unwrap_or("check the disk").to_owned());
        let is_mistake = is_mistake(&error);
        let is_past = tells_of_past(&error);
        let is_heard = self.looked(if is_mistake { Look::Mistake(error) } else { Look::Missing { is_past } });
        if is_mistake && is_heard {
            return;
        }
        if self.said != text {
            tracing::warn!(disk = self.name(), error = text, hint, "a disk is missing; the tier serves without it");
            self.inbox.missing(self.place, text.clone());
            self.said = text;
        }
    }

    /// Whether anybody still waited for the first look.
    fn looked(&mut self, what: Look) -> bool {
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

fn silent(disk: &DiskConfig) -> Error {
    Error::new(ErrorKind::Timeout, "a disk does not answer")
        .with("path", disk.path.display())
        .hint("look for errors of the disk or its mount in the kernel's log; the daemon takes it when it answers")
}

fn command(disk: &DiskConfig) -> Command {
    // The program that runs, even if its file was replaced since.
    let mut command = Command::new("/proc/self/exe");
    command.arg(CLAIM_COMMAND).arg(&disk.path);
    if let Some(bytes) = disk.capacity_bytes {
        command.args(["--capacity-bytes", &bytes.to_string()]);
    }
    command.args(["--create", disk.create.name()]);
    command
}
