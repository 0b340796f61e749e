//! Examines a disk without a daemon: what it holds, and whether all of that is whole.
//!
//! Invariant: nothing is written, even where a daemon would make a repair.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{BlockKey, Error, ErrorKind, Result};
use rustix::fs::OFlags;

use super::config::SsdConfig;
use super::device::{Content, DAEMON_BYTE, check_content, formatted_bytes};
use super::disk::Disk;
use super::io::RETRY_INTERVAL;
use super::lists::{Reader, Step, Walk};
use super::recover::{self, Medium, Mode};
use super::report::{BlockInfo, DiskReport, SegmentReport};
use super::staging::{STAGING_BYTES, no_memory};
use crate::uring::{Memory, Region, Threads, Waker, is_locked};

/// How long a disk may answer nothing before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// Limit on the damaged keys that are named; all are counted.
const NAMED_KEYS: usize = 1024;
/// An inspection waits for one list so many times: it is read, and a probe of the disk, three times.
const MOST_WAITS: u32 = 12;
const NAME_A_DISK: &str = "name a file or device of `tier.ssd.disks` that a daemon has used";
/// An audit reads one block at a time, in a few pieces.
const DEPTH: u32 = 4;

/// See the module documentation.
pub struct Inspection {
    disk: Disk,
}

/// The result of reading every block of a disk.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Audit {
    /// Blocks that were read, damaged ones included.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Blocks that could not be read or whose bytes do not match their checksum.
    pub damaged_blocks: u64,
    /// The first of them only.
    pub damaged: Vec<BlockKey>,
}

impl Inspection {
    /// Reads the disk's own records at `path`; refuses while a daemon uses it. Takes as long as recovery.
    pub fn open(path: &Path) -> Result<Inspection> {
        let with_path = |error: Error| error.with("path", path.display());
        let cannot = |error| with_path(Error::new(ErrorKind::Io, "cannot read a disk").source(error).hint(NAME_A_DISK));
        // If it is a FIFO, opening it must not wait.
        let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let mut file = file.map_err(cannot)?;
        let kind = file.metadata().map_err(cannot)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(with_path(Error::invalid("a disk is a file or a block device").hint(NAME_A_DISK)));
        }
        if is_locked(&file, DAEMON_BYTE).map_err(cannot)? {
            return Err(Error::new(ErrorKind::Unavailable, "a daemon is using this disk")
                .with("path", path.display())
                .hint("run `forebay inspect` to ask the daemon, or stop it first"));
        }
        let bytes = file.seek(SeekFrom::End(0)).map_err(cannot)?;
        if let Some(made_bytes) = formatted_bytes(&file).filter(|made_bytes| bytes < *made_bytes) {
            return Err(with_path(Error::new(ErrorKind::Corrupt, "this disk was cut: its file is too short"))
                .with("bytes", bytes)
                .with("made_bytes", made_bytes)
                .hint("start the daemon, which lengthens the file and serves the blocks that are left; then stop it"));
        }
        // No bytes move to or from a pool here.
        let [pool, staging] = [1 << 12, STAGING_BYTES].map(Region::anonymous);
        let memory = Arc::new(Memory::new(pool.map_err(no_memory)?, staging.map_err(no_memory)?));
        let waker = Arc::new(Waker::new().map_err(no_memory)?);
        let file = Arc::new(file);
        let engine = Threads::start(file.clone(), memory.clone(), waker, DEPTH).map_err(no_memory)?;
        let opened = Inspection::on(Medium {
            name: path.display().to_string(),
            engine: Box::new(engine),
            engine_why: "offline inspection".to_owned(),
            memory,
            bytes,
            is_direct: false,
            can_trim: false,
            new_id: 0,
        });
        // The reason why the disk cannot be read; a file that never was a disk is named as such.
        opened.map_err(|error| match check_content(&file, bytes) {
            Ok(Content::Blank) => with_path(Error::invalid("this disk is empty").hint(NAME_A_DISK)),
            Err(other) if other.kind() == ErrorKind::Invalid => {
                with_path(Error::invalid("this is not a disk of Forebay").hint(NAME_A_DISK))
            }
            Ok(Content::Ours) | Err(_) => error,
        })
    }

    /// Examines a disk behind the caller's engine.
    pub fn on(medium: Medium) -> Result<Inspection> {
        let config = SsdConfig { depth: DEPTH, ..SsdConfig::new(Vec::new()) };
        Ok(Inspection { disk: recover::open(medium, None, &config, Mode::Look)? })
    }

    /// The disk's figures as recovery found them; nothing runs that would change them.
    pub fn report(&self) -> DiskReport {
        self.disk.report()
    }

    /// The disk's segments, by number.
    pub fn segments(&self) -> Vec<SegmentReport> {
        self.disk.segments()
    }

    /// All blocks, the oldest first. Reads the lists of the segments once more, one at a time; an error if the disk
    /// does not answer. The blocks of a segment whose list cannot be read any more are left out.
    pub fn blocks(&mut self) -> impl Iterator<Item = Result<BlockInfo>> {
        Blocks {
            walk: Some(Walk::new(Reader::Purge)),
            waits: 0,
            life: 0,
            disk: &mut self.disk,
            some: Vec::new().into_iter(),
        }
    }

    /// Reads every block and compares checksums. Takes as long as reading the whole disk.
    pub fn audit(&mut self) -> Result<Audit> {
        let mut audit = Audit::default();
        let blocks = self.blocks().collect::<Result<Vec<BlockInfo>>>()?;
        for block in blocks {
            let at = block.offset_bytes(&self.disk.geometry);
            audit.blocks += 1;
            audit.bytes += block.length_bytes;
            if !recover::is_whole(&mut self.disk.io, at, block.length_bytes, block.checksum, PATIENCE)? {
                audit.damaged_blocks += 1;
                if audit.damaged.len() < NAMED_KEYS {
                    audit.damaged.push(block.key);
                }
            }
        }
        Ok(audit)
    }
}

/// A walk that waits for the disk.
struct Blocks<'a> {
    disk: &'a mut Disk,
    walk: Option<Walk>,
    /// Times that the walk has waited for one list, of the segment of this life.
    waits: u32,
    life: u64,
    some: std::vec::IntoIter<BlockInfo>,
}

impl Blocks<'_> {
    /// Waits for the list that is being read. One that could not be read is tried again at once.
    fn wait(&mut self) -> Result<()> {
        let begun = Instant::now();
        while self.disk.io.in_flight() > 0 {
            self.disk.io.engine.wait(Duration::from_millis(100));
            self.disk.hear();
            if begun.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::Timeout, "a disk did not answer while it was inspected"));
            }
        }
        self.disk.now += RETRY_INTERVAL;
        self.disk.go_on_giving_up();
        self.waits += 1;
        // A list that alone cannot be read is given up before that.
        let is_unreadable = self.waits > MOST_WAITS;
        if is_unreadable { Err(Error::new(ErrorKind::Io, "a disk can be read no more")) } else { Ok(()) }
    }
}

impl Iterator for Blocks<'_> {
    type Item = Result<BlockInfo>;

    fn next(&mut self) -> Option<Result<BlockInfo>> {
        loop {
            if let Some(block) = self.some.next() {
                return Some(Ok(block));
            }
            let mut walk = self.walk.take()?;
            match self.disk.walk_on(&mut walk, u32::MAX, |_| true) {
                Step::Blocks(segment, blocks) => {
                    self.waits = 0;
                    let served = blocks.into_iter().filter(|(_, entry)| entry.is_served());
                    let infos = served.map(|(record, entry)| BlockInfo::new(&record, &entry, segment));
                    self.some = infos.collect::<Vec<_>>().into_iter();
                }
                Step::Waits => {
                    if walk.life != self.life {
                        (self.life, self.waits) = (walk.life, 0);
                    }
                    if let Err(error) = self.wait() {
                        return Some(Err(error));
                    }
                }
                Step::End => return None,
            }
            self.walk = Some(walk);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn a_fifo_is_refused_without_a_wait() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (done, inspected) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(Inspection::open(&path).err().map(|error| error.kind())));
        assert_eq!(inspected.recv_timeout(Duration::from_secs(20)), Ok(Some(ErrorKind::Invalid)));
    }
}
