//! Tells a pool's files from files of the same names that somebody else made.
//!
//! The names are common words, and an operator may name any directory. So each file has to show that a pool made it:
//! - `table` and `generation` begin with their magic. One whose beginning is damaged has the other one's pool id.
//! - `data`, `birth` and `namespace` begin with nothing that is known. They have the mode of a pool's files, and the
//!   length of a pool of no more pages than the table or the generations beside them have. They are empty only while
//!   the table says that the pool is being made.
//! - `purge` begins with its magic, since it stays where a pool is replaced. One whose beginning is damaged, or not
//!   written yet, has the mode and the length, and a pool is beside it.
//! - `data.replaced` has the same mode and whole units. Workers map it, or a table or generations are beside it.
//! - An empty `table` is a pool's: a daemon that was killed at the right moment leaves it, and nothing is lost with it.
//!
//! Invariants: no file is changed here. A file that shows nothing stops the start, whatever is beside it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, PAGE_BYTES, Result};

use super::files::{
    ALL_LOCK_BYTES, BIRTH_NAME, DATA_NAME, FILE_MODE, GENERATION_NAME, NAMESPACE_NAME, PURGE_NAME, TABLE_NAME,
    replaced_name,
};
use super::format::*;
use super::geometry::{MAX_RANKS, MIN_UNIT_BYTES};
use super::lock;
use crate::trust;

/// Errors if `home` has a file of a pool's names that no pool made, or that cannot be read.
pub(super) fn check(home: &Path) -> Result<()> {
    let seen = |name: &str| Seen::look(home.join(name));
    let (table, generation) = (seen(TABLE_NAME)?, seen(GENERATION_NAME)?);
    let proof = Proof::of(table.as_ref(), generation.as_ref());
    let judged = [
        (table, Proof::admits_table as fn(&Proof, &Seen) -> bool),
        (generation, Proof::admits_generation),
        (seen(DATA_NAME)?, Proof::admits_data),
        (seen(BIRTH_NAME)?, Proof::admits_birth),
        (seen(NAMESPACE_NAME)?, Proof::admits_namespace),
        (seen(PURGE_NAME)?, Proof::admits_purge),
    ];
    for (file, admits) in judged {
        if let Some(file) = file.filter(|file| !admits(&proof, file)) {
            return Err(if proof.is_there() { altered(&file.path) } else { foreign(&file.path) });
        }
    }
    match Seen::look(replaced_name(&home.join(DATA_NAME)))? {
        Some(file) if !proof.admits_replaced(&file).map_err(|error| unreadable(&file.path, error))? => {
            Err(foreign(&file.path))
        }
        _ => Ok(()),
    }
}

/// Whether a pool's table or generations are in `home`.
pub(super) fn has_pool(home: &Path) -> Result<bool> {
    let proof =
        Proof::of(Seen::look(home.join(TABLE_NAME))?.as_ref(), Seen::look(home.join(GENERATION_NAME))?.as_ref());
    Ok(proof.is_there())
}

/// A file of a pool, for reading and writing.
pub(super) fn open(path: &Path) -> io::Result<File> {
    trust::open(path, File::options().read(true).write(true))
}

pub(super) fn foreign(path: &Path) -> Error {
    Error::invalid("the directory is not a pool's: it has a file that Forebay did not make")
        .with("path", path.display())
        .hint("name another directory, or move the file away; a directory for a pool may be missing or empty")
}

/// Of a file beside those of a pool. It may be somebody else's, so no daemon removes it.
fn altered(path: &Path) -> Error {
    let then = match path.file_name().is_some_and(|name| name == PURGE_NAME) {
        true => "purges that wait for a missing disk are then forgotten, so purge again when the disk is back",
        false => "the pool is then made anew, without its blocks",
    };
    Error::invalid("the directory is a pool's, and it has a file that Forebay did not make, or that was cut since")
        .with("path", path.display())
        .hint(format!("if nobody needs the file, `rm {}`: {then}", path.display()))
}

pub(super) fn unreadable(path: &Path, error: io::Error) -> Error {
    // A file that is not believed says itself what to do.
    let has_hint = error.get_ref().is_some();
    let hint = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit on open files (`ulimit -n`; `LimitNOFILE=` of a service)",
        Some(libc::EACCES | libc::EPERM) => {
            "run the daemon as the user that made the pool, or set another `pool.directory`"
        }
        _ => "see that `/proc` is mounted and that the path can be read, or set another `pool.directory`",
    };
    let error = Error::new(ErrorKind::Io, "cannot read the existing pool").with("path", path.display()).source(error);
    if has_hint { error } else { error.hint(hint) }
}

/// What is known of a file before it is believed.
struct Seen {
    path: PathBuf,
    file: File,
    length: u64,
    /// Whether it has the mode of a pool's files.
    is_private: bool,
    /// Its first bytes, then zeros.
    head: [u8; HEADER_HEAD_BYTES],
}

impl Seen {
    fn look(path: PathBuf) -> Result<Option<Seen>> {
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_symlink() => return Err(foreign(&path).with("is", "a symbolic link")),
            Ok(metadata) if !metadata.is_file() => return Err(foreign(&path).with("is", "no regular file")),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(&path, error)),
        }
        let read = || {
            let file = open(&path)?;
            let metadata = file.metadata()?;
            let mut head = [0; HEADER_HEAD_BYTES];
            let known = metadata.len().min(HEADER_HEAD_BYTES as u64) as usize;
            file.read_exact_at(&mut head[..known], 0)?;
            Ok((file, metadata, head))
        };
        let (file, metadata, head) = read().map_err(|error| unreadable(&path, error))?;
        let is_private = metadata.mode() & 0o7777 == FILE_MODE;
        Ok(Some(Seen { path, file, length: metadata.len(), is_private, head }))
    }

    fn pool_id(&self) -> u128 {
        pool_id_in(&self.head)
    }
}

/// What `table` and `generation` say of the files beside them.
struct Proof {
    /// Of a table with a whole header.
    table_id: Option<u128>,
    generation_id: Option<u128>,
    is_being_made: bool,
    /// The most pages that one of the two has place for.
    pages: u64,
}

impl Proof {
    fn of(table: Option<&Seen>, generation: Option<&Seen>) -> Proof {
        let table = table.and_then(|table| Some((table, table_state(&table.head)?)));
        let generation = generation.filter(|file| decode_generation_header(first_32(&file.head)).is_some());
        let pages_of_table = table.map_or(0, |(table, _)| table.length.saturating_sub(ENTRIES_AT) / ENTRY_BYTES);
        let pages_of_generation = generation.map_or(0, |file| file.length.saturating_sub(GENERATIONS_AT) / 4);
        Proof {
            table_id: table.map(|(table, _)| table.pool_id()),
            generation_id: generation.map(Seen::pool_id),
            is_being_made: table.is_some_and(|(_, state)| state == CREATING),
            pages: pages_of_table.max(pages_of_generation),
        }
    }

    fn is_there(&self) -> bool {
        self.table_id.is_some() || self.generation_id.is_some()
    }

    fn admits_table(&self, table: &Seen) -> bool {
        let is_begun = table.length == 0 && table.is_private;
        is_begun || table.head.starts_with(&TABLE_MAGIC) || self.generation_id == Some(table.pool_id())
    }

    fn admits_generation(&self, generation: &Seen) -> bool {
        let is_known = generation.head.starts_with(&GENERATION_MAGIC) || self.table_id == Some(generation.pool_id());
        is_known || self.admits_begun(generation)
    }

    fn admits_data(&self, data: &Seen) -> bool {
        self.admits_begun(data) || self.admits_length(data, PAGE_BYTES)
    }

    fn admits_birth(&self, birth: &Seen) -> bool {
        self.admits_begun(birth) || self.admits_length(birth, MAX_RANKS as u64 * BIRTH_BYTES)
    }

    fn admits_namespace(&self, namespace: &Seen) -> bool {
        let is_whole = namespace.length == u64::from(NAMESPACES) * NAMESPACE_BYTES;
        self.admits_begun(namespace) || (is_whole && namespace.is_private && self.is_there())
    }

    fn admits_purge(&self, purge: &Seen) -> bool {
        let is_shaped = purge.is_private && [0, PENDING_BYTES, PURGE_FILE_BYTES].contains(&purge.length);
        purge.head.starts_with(&PURGE_MAGIC) || (is_shaped && self.is_there())
    }

    fn admits_replaced(&self, data: &Seen) -> io::Result<bool> {
        let has_units = data.length > 0 && data.length.is_multiple_of(MIN_UNIT_BYTES);
        Ok(has_units && data.is_private && (self.is_there() || lock::is_locked(&data.file, ALL_LOCK_BYTES)?))
    }

    fn admits_begun(&self, file: &Seen) -> bool {
        file.length == 0 && file.is_private && self.is_being_made
    }

    /// Whether it has `page_bytes` for each page of whole units, and for no more pages than there are. A daemon that
    /// died while it grew the pool made the table longer first.
    fn admits_length(&self, file: &Seen, page_bytes: u64) -> bool {
        let has_units = file.length > 0 && file.length.is_multiple_of(MIN_UNIT_BYTES / PAGE_BYTES * page_bytes);
        has_units && file.is_private && file.length / page_bytes <= self.pages
    }
}

fn first_32(head: &[u8; HEADER_HEAD_BYTES]) -> &[u8; 32] {
    head.first_chunk().expect("the head is longer")
}
