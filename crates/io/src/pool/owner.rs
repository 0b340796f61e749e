//! The pool as the daemon holds it.
//!
//! Invariants: the daemon is the only one (two locks say so), and all methods take `&self`: one thread decides
//! about slots, others populate, read, write and verify payloads beside it. What must not happen (reserving a
//! slot that has an owner or holders, naming bytes outside the pool) panics; what the machine may refuse (memory,
//! locks) is an error.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_core::checksum::Checksum;
use forebay_core::size::human;
use forebay_core::{Error, ErrorKind, Generation, Instance, NamespaceId, Result, SlotId};
use forebay_numa::{Kernel, Nodes, ROOT};
use rustix::io::Errno;

use super::directory::{Directory, remove_if_there};
use super::files::{ALL_LOCK_BYTES, BIRTH_NAME, Files, GENERATION_NAME, held_bytes};
use super::format::*;
use super::generations::Generations;
use super::geometry::{Extent, Geometry, MAX_RANKS};
use super::huge::{self, HugePageReport};
use super::lent::Lent;
use super::map::{Access, Region};
use super::mapping::{GeometryDescription, MapperFds, read_birth, write_birth};
use super::room::Room;
use super::site::Site;
use super::table::{RecoveredSlot, Table, Units};
use super::{found, lock, records};
use crate::{Seldom, trust};

/// See the module's head.
pub struct Pool {
    header: Header,
    site: Site,
    table: Table,
    generations: Generations,
    data: Region,
    data_file: File,
    birth: File,
    namespaces: File,
    purges: File,
    /// What the table said about its units when it was opened.
    found: Units,
    /// How often a unit was populated.
    populated_units: AtomicU64,
    counted: Mutex<Counted>,
    /// Data files of pools that this one replaced and that workers still map.
    replaced: Mutex<Vec<(PathBuf, File)>>,
    birthless: Seldom,
    /// Extents that were refused, and when the last was.
    refused: Seldom,
    /// The last that was refused: when, and its units.
    last_refused: Mutex<Option<(Instant, u32)>>,
    _directory: Directory,
}

/// The last count of huge pages and of pages on each node, and after how many populated units it was taken.
#[derive(Default)]
struct Counted {
    at_units: Option<u64>,
    mapped_bytes: u64,
    huge_bytes: u64,
    nodes: Vec<(u32, u64)>,
}

/// As long after a refusal no memory is taken for an extent of as many units: a try may go over thousands of pages.
const PAUSE: Duration = Duration::from_secs(1);

impl Pool {
    /// Maps what [`Pool::open`] found or made.
    pub(super) fn assemble(
        directory: Directory,
        site: Site,
        header: Header,
        table: File,
        files: Files,
        replaced: Vec<(PathBuf, File)>,
    ) -> Result<Pool> {
        let geometry = header.geometry;
        let cannot =
            |what| move |error| Error::new(ErrorKind::Io, format!("cannot map the pool's {what}")).source(error);
        let (table, found) = Table::map(table, &header).map_err(cannot("table"))?;
        let generations =
            Generations::map(&files.generation, &geometry, Access::ReadWrite).map_err(cannot("generations"))?;
        let data = Region::map(&files.data, 0, geometry.data_bytes(), Access::ReadWrite).map_err(|error| {
            let error = cannot("data")(error).with("bytes", human(geometry.data_bytes()));
            error.hint("raise the limit on address space (`ulimit -v`), or lower `pool.capacity_bytes`")
        })?;
        if matches!(site.backing, Backing::Advised | Backing::Collapsed) {
            data.want_huge_pages();
        }
        let purges = found::purge_file(&site.home).map_err(cannot("purges"))?;
        let Files { data: data_file, birth, namespaces, .. } = files;
        let replaced = Mutex::new(replaced);
        Ok(Pool {
            header,
            site,
            table,
            generations,
            data,
            data_file,
            birth,
            namespaces,
            purges,
            found,
            populated_units: AtomicU64::new(0),
            counted: Mutex::default(),
            replaced,
            birthless: Seldom::default(),
            refused: Seldom::default(),
            last_refused: Mutex::default(),
            _directory: directory,
        })
    }

    /// Drawn when the pool was made; another pool in the same directory has another.
    pub fn id(&self) -> u128 {
        self.header.id
    }

    /// How often the pool was opened; 1 for a new one.
    pub fn epoch(&self) -> u32 {
        self.header.epoch
    }

    /// Size of the pool and of its units; fixed while it is open.
    pub fn geometry(&self) -> Geometry {
        self.header.geometry
    }

    /// What a worker must be told to map the pool.
    pub fn description(&self) -> GeometryDescription {
        let Geometry { unit_bytes, units, .. } = self.header.geometry;
        GeometryDescription { pool_id: self.header.id, unit_bytes, units }
    }

    /// What the pool lies on. The walk over page tables takes 3 ms for each GiB (`pool_speed` in `crates/bench`), so it
    /// is done again only after more was populated.
    pub fn huge_page_report(&self) -> Result<HugePageReport> {
        let cannot = |error| Error::new(ErrorKind::Io, "cannot read the pool's page tables").source(error);
        let populated_units = self.populated_units.load(Relaxed);
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.at_units != Some(populated_units) {
            let (mapped_bytes, huge_bytes) = huge::mapped_and_huge_bytes(&self.data).map_err(cannot)?;
            let is_alone = Nodes::read(Path::new(ROOT)).all().is_empty();
            let nodes = if is_alone { Vec::new() } else { huge::node_bytes(&self.data).unwrap_or_default() };
            *counted = Counted { at_units: Some(populated_units), mapped_bytes, huge_bytes, nodes };
        }
        let Counted { mapped_bytes, huge_bytes, ref nodes, .. } = *counted;
        let (nodes, notes) = (nodes.clone(), self.site.notes.clone());
        Ok(HugePageReport { backing: self.site.backing, mapped_bytes, huge_bytes, nodes, notes })
    }

    /// Errors where others have removed the pool's files, or left no space for its records: nothing else fails for the
    /// first before the next start. Three calls of the filesystem.
    pub fn check_files(&self) -> Result<()> {
        let own = file_id(&self.data_file.metadata().map_err(cannot_record)?);
        let is_gone = match std::fs::metadata(&self.site.data) {
            Ok(there) => file_id(&there) != own,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if is_gone {
            return Err(Error::new(ErrorKind::NotFound, "the pool's file was removed")
                .with("path", self.site.data.display())
                .hint("restart the daemon at a quiet time: it serves this pool until it ends, and then begins anew"));
        }
        let filesystem = rustix::fs::fstatvfs(&self.birth).map_err(|error| cannot_record(error.into()))?;
        let births = self.birth.metadata().map_err(cannot_record)?;
        let is_full = filesystem.f_blocks > 0 && filesystem.f_bavail == 0;
        if is_full && held_bytes(&self.birth) < births.len() {
            return Err(Error::new(
                ErrorKind::Full,
                "no space is left on the pool's filesystem for the records of blocks",
            )
            .with("path", self.site.home.display())
            .hint("free space there, or enlarge the filesystem; new blocks may be refused until then"));
        }
        Ok(())
    }

    /// Whether [`Pool::huge_page_report`] needs no walk over the process's mappings, and waits for nobody's.
    pub fn is_counted(&self) -> bool {
        let populated_units = self.populated_units.load(Relaxed);
        self.counted.try_lock().is_ok_and(|counted| counted.at_units == Some(populated_units))
    }

    /// Tells workers to unmap, for good: the next daemon makes another pool.
    pub fn retire(&self) {
        self.generations.retire();
    }
}

/// Memory.
impl Pool {
    /// Has unit `unit` get its memory from a NUMA node that has some left, whoever touches it first. Memory that the
    /// unit has stays where it is: engines and their devices may use it.
    pub fn prefer(&self, unit: u32, node: u32, kernel: &dyn Kernel) -> io::Result<()> {
        let geometry = self.geometry();
        assert!(unit < geometry.units, "unit {unit} of {}", geometry.units);
        let start = unit as usize * geometry.unit_bytes as usize;
        self.data.prefer(start..start + geometry.unit_bytes as usize, node, kernel)
    }

    /// Gives unit `unit` memory and keeps what it holds, so that extents may be put there. Takes up to a second
    /// for 256 MiB: call it from a thread of its own.
    ///
    /// Errors with `Full` where the machine has none left, and with `Unavailable` while workers still map the
    /// pool that this one replaced.
    pub fn populate_unit(&self, unit: u32) -> Result<()> {
        let geometry = self.geometry();
        assert!(unit < geometry.units, "unit {unit} of {}", geometry.units);
        self.drop_replaced()?;
        self.check_room_for_unit()?;
        let start = unit as usize * geometry.unit_bytes as usize;
        huge::populate(&self.data, start..start + geometry.unit_bytes as usize, self.site.backing)
            .and_then(|()| self.generations.populate_unit(&geometry, unit))
            .map_err(|error| cannot_populate(unit, error))?;
        self.populated_units.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Lets go of replaced pools that nobody maps any more.
    fn drop_replaced(&self) -> Result<()> {
        let mut replaced = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((path, file)) = replaced.last() {
            if lock::is_locked(file, ALL_LOCK_BYTES).map_err(cannot_ask)? {
                return Err(Error::new(ErrorKind::Unavailable, "workers still map the pool that was replaced")
                    .hint("the workers detach when they are idle; stop the engines to free the memory now"));
            }
            remove_if_there(path)
                .map_err(|error| Error::new(ErrorKind::Io, "cannot remove a replaced pool").source(error))?;
            replaced.pop();
        }
        Ok(())
    }

    /// hugetlbfs has set its pages aside already; a tmpfs takes them as they come.
    fn check_room_for_unit(&self) -> Result<()> {
        if self.site.backing == Backing::Hugetlbfs {
            return Ok(());
        }
        let missing_bytes = self.geometry().data_bytes().saturating_sub(held_bytes(&self.data_file));
        match missing_bytes.min(self.geometry().unit_bytes) {
            0 => Ok(()),
            needed_bytes => Room::read(&self.site.home)?.check(needed_bytes),
        }
    }
}

/// Slots: one thread decides about each.
impl Pool {
    /// Whether the table has memory for the slots of `extent`; takes it. What is not shorter than an extent that was
    /// just refused is refused without another look.
    pub fn has_room(&self, extent: &Extent) -> bool {
        let mut last = self.last_refused.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if last.is_some_and(|(at, units)| now - at < PAUSE && units <= extent.units) {
            return false;
        }
        let room = self.table.make_room(extent);
        *last = room.is_err().then_some((now, extent.units));
        if let Err(error) = &room
            && let Some(times) = self.refused.add(now)
        {
            let (slot_bytes, hint) = (extent.slot_bytes, "free memory where `pool.directory` lies");
            tracing::warn!(slot_bytes, times, %error, hint, "the pool gives no more slots of this size");
        }
        room.is_ok()
    }

    /// Puts slots of one size into units that were populated. Errors with `Full` where the table finds no memory.
    pub fn set_extent(&self, extent: &Extent) -> Result<()> {
        self.table.set_extent(extent)
    }

    /// Takes the extent that begins at `first_unit` away; all its slots must be free.
    pub fn clear_extent(&self, first_unit: u32) -> Result<()> {
        self.table.clear_extent(first_unit)
    }

    /// Gives a free slot without holders to a new owner and publishes its `generation`, which no owner of this
    /// slot had before. From here on workers that hold another one see that they lost the slot.
    pub fn reserve(&self, slot: SlotId, generation: Generation) {
        self.publish(slot, generation);
        self.table.reserve(slot, generation);
    }

    /// Makes a reserved slot's content count; `generation` is that of its owner. Its bytes must be complete.
    pub fn ready(&self, slot: SlotId, generation: Generation, entry: &Entry) {
        self.publish_again(slot, generation);
        self.table.ready(slot, generation, entry);
    }

    /// Makes the content of a slot in any state count no more, also after a restart. Its generation and its holders
    /// stay: whoever reads it may go on.
    pub fn fence(&self, slot: SlotId) {
        self.table.fence(slot, self.generations.get(slot));
    }

    /// Ends the ownership of a slot in any state that nobody may touch any more, and publishes a number that no
    /// owner of it had.
    pub fn free(&self, slot: SlotId, next: Generation) {
        self.publish(slot, next);
        self.table.free(slot);
    }

    /// Records which instances were handed the slot's offset and may still touch it. Call it before offsets
    /// leave, and again when some of them are done with it.
    pub fn set_holders(&self, slot: SlotId, holders: u64) {
        self.table.set_holders(slot, holders);
    }

    /// The published generation of the slot.
    pub fn generation(&self, slot: SlotId) -> Generation {
        self.generations.get(slot)
    }

    /// What the table says of a ready slot whose owner has `generation`; nothing where it is not ready or the entry is
    /// damaged. Where memory publishes another number now, the owner's is published again.
    pub fn entry(&self, slot: SlotId, generation: Generation) -> Option<Entry> {
        self.publish_again(slot, generation);
        self.table.content(slot, generation)
    }

    /// What rank `rank` says it copied into `slot`, if anything. Costs one read of 16 bytes through the file.
    pub fn birth(&self, slot: SlotId, rank: usize) -> Option<BirthRecord> {
        assert!(slot.0 < self.geometry().pages && rank < MAX_RANKS, "{slot:?} of rank {rank} is not in the pool");
        read_birth(&self.birth, &self.geometry(), slot, rank)
    }

    /// Says what each rank's slice of `slot` is, in place of its workers: they compare what they load with it. A record
    /// that says so already is left alone. False where one cannot be written: no worker could load that block.
    #[must_use]
    pub fn set_births(&self, slot: SlotId, generation: Generation, slices: &[Slice]) -> bool {
        let no_birth = |error: &Error| {
            if let Some(blocks) = self.birthless.add(Instant::now()) {
                let hint = "free memory where `pool.directory` lies";
                tracing::warn!(blocks, %error, hint, "blocks are not kept: there is no memory for their checksums");
            }
        };
        let set = |(rank, slice): (usize, &Slice)| {
            let record = BirthRecord { generation, length: slice.length, checksum: slice.checksum };
            let is_there = self.birth(slot, rank) == Some(record);
            is_there || write_birth(&self.birth, &self.geometry(), slot, rank, &record).inspect_err(no_birth).is_ok()
        };
        slices.iter().enumerate().all(set)
    }

    /// As [`Pool::set_births`], of a block that was copied from a slot to another, whose births are right.
    #[must_use]
    pub fn move_births(&self, (from, before): (SlotId, Generation), (to, now): (SlotId, Generation)) -> bool {
        let births = (0..MAX_RANKS).map_while(|rank| self.birth(from, rank).filter(|it| it.generation == before));
        let slices: Vec<Slice> = births.map(|birth| Slice { length: birth.length, checksum: birth.checksum }).collect();
        self.set_births(to, now, &slices)
    }

    /// Publishes the number of the slot's present owner where memory says another one now.
    fn publish_again(&self, slot: SlotId, generation: Generation) {
        if self.generations.get(slot) != generation {
            self.generations.publish(slot, generation);
            let (slot, generation) = (slot.0, generation.0);
            tracing::warn!(slot, generation, "a slot's published generation was damaged; it is repaired");
        }
    }

    fn publish(&self, slot: SlotId, generation: Generation) {
        assert!(generation.0 != 0, "{slot:?} is given nobody's generation");
        self.table.raise_ceiling(generation);
        self.generations.publish(slot, generation);
    }
}

/// What an earlier daemon left.
impl Pool {
    /// Later than any generation that an earlier epoch published, whatever became of its slot.
    pub fn first_generation(&self) -> Generation {
        self.table.first_generation()
    }

    /// The extents that were there when the pool was opened, in order.
    pub fn recovered_extents(&self) -> &[Extent] {
        &self.found.extents
    }

    /// Units whose record in the table is damaged. What lies there is unknown, so they may be used again only
    /// when no worker of an earlier epoch maps the pool; then `clear_extent` first.
    pub fn unreadable_units(&self) -> &[u32] {
        &self.found.unreadable
    }

    /// Shows up to `limit` more recovered slots, about 100 ns each, and says whether any are left. `cursor`
    /// begins as `RecoveryCursor::default()`. Slots of an extent must not change before they were shown.
    pub fn recover(&self, cursor: &mut RecoveryCursor, limit: usize, mut visit: impl FnMut(RecoveredSlot)) -> bool {
        let mut left = limit;
        while let Some(extent) = self.found.extents.get(cursor.extent) {
            let slots = self.geometry().slots(extent);
            while left > 0 && cursor.slot < slots {
                visit(self.table.recover(extent, cursor.slot, |slot| self.generations.get(slot)));
                (cursor.slot, left) = (cursor.slot + 1, left - 1);
            }
            if cursor.slot < slots {
                return true;
            }
            *cursor = RecoveryCursor { extent: cursor.extent + 1, slot: 0 };
        }
        false
    }
}

/// Of a copy whose checksum is computed behind it, while the bytes are in the processor's second cache.
const PIECE_BYTES: u64 = 64 << 10;

/// How far a recovery has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecoveryCursor {
    extent: usize,
    slot: u32,
}

/// Payloads. Offsets are those of slots; bytes outside the pool cannot be named.
impl Pool {
    /// Checksum of what `len` bytes at `offset` hold now; workers may write meanwhile.
    pub fn checksum(&self, offset: u64, len: u64) -> u64 {
        let mut sum = Checksum::new();
        self.data.sum(&mut sum, offset, len);
        sum.finish()
    }

    /// As [`Pool::checksum`], of slices of these lengths one behind the other.
    pub fn slices(&self, offset: u64, lengths: &[u64]) -> Vec<Slice> {
        let mut at = offset;
        let slice = |length: &u64| {
            let slice = Slice { length: *length, checksum: self.checksum(at, *length) };
            at += length;
            slice
        };
        lengths.iter().map(slice).collect()
    }

    /// Copies `len` bytes; workers may write meanwhile, and who wants the copy finds out whether one did.
    pub fn copy(&self, from: u64, to: u64, len: u64) {
        self.data.copy(from, to, len);
    }

    /// Fills `bytes` from `offset`; workers may write meanwhile. Panics if the bytes leave the pool.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.data.read(offset, bytes);
    }

    /// Copies `bytes` to `offset`. The slot must be the caller's. Panics if the bytes leave the pool.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.data.write(offset, bytes);
    }

    /// Copies slices of these lengths from lent memory to `offset`, and returns the checksums of what is then in the
    /// pool: the lent bytes are read once, and may change meanwhile. The slot must be the caller's.
    pub fn copy_in(&self, lent: &Lent, from: u64, offset: u64, lengths: &[u64]) -> Vec<Slice> {
        let mut done = 0;
        let mut slice = |length: &u64| {
            let (mut sum, end) = (Checksum::new(), done + length);
            while done < end {
                let piece = (end - done).min(PIECE_BYTES);
                lent.region.copy_to(from + done, &self.data, offset + done, piece);
                self.data.sum(&mut sum, offset + done, piece);
                done += piece;
            }
            Slice { length: *length, checksum: sum.finish() }
        };
        lengths.iter().map(&mut slice).collect()
    }

    /// Copies `len` bytes at `offset` to lent memory.
    pub fn copy_out(&self, offset: u64, lent: &Lent, to: u64, len: u64) {
        self.data.copy_to(offset, &lent.region, to, len);
    }

    /// Start of the mapping, for the kernel and devices to copy to and from. It holds `geometry().data_bytes()`
    /// bytes and lives as long as the pool; nobody may form a reference to them.
    pub fn data_ptr(&self) -> *mut u8 {
        self.data.as_ptr()
    }
}

/// Instances and namespaces.
impl Pool {
    /// Records who was given offsets under this number; call it before the first offset leaves.
    pub fn set_instance(&self, instance: Instance, record: &InstanceRecord) -> Result<()> {
        let (len, ranks) = (record.engine_id.len(), record.ranks as usize);
        if len > MAX_ENGINE_ID_BYTES || ranks > MAX_RANKS || usize::from(instance.0) >= Instance::MAX {
            return Err(Error::invalid("an instance has a number below 64, an id of at most 64 bytes and 64 ranks")
                .with("instance", instance.0)
                .with("id_bytes", len)
                .with("ranks", ranks));
        }
        records::put_instance(self.table.file(), instance, record).map_err(cannot_record)
    }

    /// Forgets who was given offsets under this number. Call it only when nobody of the instance can touch the pool.
    pub fn clear_instance(&self, instance: Instance) -> Result<()> {
        records::clear_instance(self.table.file(), instance).map_err(cannot_record)
    }

    /// The recorded instances, those of earlier daemons included.
    pub fn instances(&self) -> Result<Vec<(Instance, InstanceRecord)>> {
        records::instances(self.table.file()).map_err(cannot_record)
    }

    /// Keeps a namespace under `index` (below 1024) for as long as slots hold its blocks. `uid`: whose it is.
    pub fn set_namespace(
        &self,
        index: u32,
        id: NamespaceId,
        descriptor: &str,
        uid: Option<u32>,
        layout: &[u8],
    ) -> Result<()> {
        if index >= NAMESPACES || descriptor.len() > MAX_DESCRIPTOR_BYTES || layout.len() > MAX_LAYOUT_BYTES {
            return Err(Error::invalid("a pool keeps 1024 namespaces of 8 KiB of text and 4 KiB of layout")
                .with("index", index)
                .with("descriptor_bytes", descriptor.len())
                .with("layout_bytes", layout.len()));
        }
        let record = NamespaceRecord { id, descriptor: descriptor.to_owned(), uid, layout: layout.to_vec() };
        records::put_namespace(&self.namespaces, index, &record).map_err(cannot_record)
    }

    /// Forgets the namespace under `index`. Call it only when no slot holds its blocks.
    pub fn clear_namespace(&self, index: u32) -> Result<()> {
        assert!(index < NAMESPACES, "namespace {index}");
        records::clear_namespace(&self.namespaces, index).map_err(cannot_record)
    }

    /// The recorded namespaces by index.
    pub fn namespaces(&self) -> Result<Vec<(u32, NamespaceRecord)>> {
        records::namespaces(&self.namespaces).map_err(cannot_record)
    }

    /// Keeps a purge that has not ended under `index` (below [`PURGES`]), which no other namespace's has.
    pub fn set_purge(&self, index: u32, record: &PurgeRecord) -> Result<()> {
        assert!(index < PURGES, "purge {index}");
        records::put_purge(&self.purges, index, record).map_err(cannot_record)
    }

    /// The purge under `index` has ended.
    pub fn clear_purge(&self, index: u32) -> Result<()> {
        assert!(index < PURGES, "purge {index}");
        records::clear_purge(&self.purges, index).map_err(cannot_record)
    }

    /// Keeps a purge that has ended under `index` (below [`ENDED_PURGES`]), in the place of what is there.
    pub fn set_ended_purge(&self, index: u32, record: &EndedPurge) -> Result<()> {
        assert!(index < ENDED_PURGES, "ended purge {index}");
        records::put_ended(&self.purges, index, record).map_err(cannot_record)
    }

    /// The purges that have ended by index. They outlive a pool that was replaced. A record that cannot be read is
    /// cleared.
    pub fn ended_purges(&self) -> Result<Vec<(u32, EndedPurge)>> {
        let found = records::ended(&self.purges).map_err(cannot_record)?;
        but_for_damaged(found, |index| {
            let hint = "if a disk was away during a purge, purge again when it is back";
            tracing::warn!(index, hint, "the record of a purge that has ended is damaged; the pool forgets the purge");
            records::clear_ended(&self.purges, index).map_err(cannot_record)
        })
    }

    /// A disk that had blocks has come to this pool, and [`Pool::set_ended_purge`] has told the pool of the purges that
    /// the disk knows of.
    pub fn set_met_disks(&self) -> Result<()> {
        records::set_met_disks(&self.purges).map_err(cannot_record)
    }

    /// Whether a disk that had blocks has ever come to this pool, or to one that it replaced.
    pub fn has_met_disks(&self) -> Result<bool> {
        records::has_met_disks(&self.purges).map_err(cannot_record)
    }

    /// The recorded purges by index. They outlive a pool that was replaced. A record that cannot be read is cleared.
    pub fn purges(&self) -> Result<Vec<(u32, PurgeRecord)>> {
        let found = records::purges(&self.purges).map_err(cannot_record)?;
        but_for_damaged(found, |index| {
            let hint = "purge again what was being purged";
            tracing::warn!(index, hint, "the record of a purge is damaged; the purge is forgotten");
            self.clear_purge(index)
        })
    }
}

/// The records that can be read; `clear` gets the index of each other.
fn but_for_damaged<T>(found: Vec<(u32, Option<T>)>, clear: impl Fn(u32) -> Result<()>) -> Result<Vec<(u32, T)>> {
    let mut readable = Vec::new();
    for (index, record) in found {
        match record {
            Some(record) => readable.push((index, record)),
            None => clear(index)?,
        }
    }
    Ok(readable)
}

/// Workers.
impl Pool {
    /// Descriptors for one worker, with its lock taken: send them, then drop them. The lock lives as long as
    /// the worker has the data mapped or open. Errors with `Unavailable` while another process holds it.
    pub fn mapper_fds(&self, instance: Instance, rank: usize) -> Result<MapperFds> {
        let byte = lock_byte(instance, rank)?;
        let open = |path: PathBuf, is_writable: bool| -> Result<File> {
            trust::open(&path, File::options().read(true).write(is_writable)).map_err(|error| {
                Error::new(ErrorKind::Io, "cannot open the pool for a worker")
                    .with("path", path.display())
                    .source(error)
            })
        };
        let data = open(self.site.data.clone(), true)?;
        let is_ours = |file: &File| -> io::Result<bool> {
            let (theirs, ours) = (file.metadata()?, self.data_file.metadata()?);
            Ok((theirs.dev(), theirs.ino()) == (ours.dev(), ours.ino()))
        };
        if !is_ours(&data).map_err(cannot_ask)? {
            return Err(Error::new(ErrorKind::NotFound, "the pool's data file was replaced under the daemon")
                .with("path", self.site.data.display())
                .hint("restart the daemon"));
        }
        if !lock::try_lock(&data, byte..byte + 1).map_err(cannot_ask)? {
            return Err(Error::new(ErrorKind::Unavailable, "another process maps the pool as this worker")
                .with("instance", instance.0)
                .with("rank", rank)
                .hint("wait until the earlier worker process has ended, or attach as another instance"));
        }
        let generation = open(self.site.home.join(GENERATION_NAME), false)?;
        let birth = open(self.site.home.join(BIRTH_NAME), true)?;
        Ok(MapperFds { data: data.into(), generation: generation.into(), birth: OwnedFd::from(birth) })
    }

    /// Whether any worker of `instance` maps the pool, now or stopped.
    pub fn lock_held(&self, instance: Instance) -> Result<bool> {
        let first = lock_byte(instance, 0)?;
        lock::is_locked(&self.data_file, first..first + MAX_RANKS as u64).map_err(cannot_ask)
    }

    /// As [`Pool::lock_held`], for the worker of one rank.
    pub fn lock_held_rank(&self, instance: Instance, rank: usize) -> Result<bool> {
        let byte = lock_byte(instance, rank)?;
        lock::is_locked(&self.data_file, byte..byte + 1).map_err(cannot_ask)
    }
}

fn lock_byte(instance: Instance, rank: usize) -> Result<u64> {
    if usize::from(instance.0) >= Instance::MAX || rank >= MAX_RANKS {
        return Err(Error::invalid("a pool has 64 instances of 64 ranks")
            .with("instance", instance.0)
            .with("rank", rank));
    }
    Ok(u64::from(instance.0) * MAX_RANKS as u64 + rank as u64)
}

fn cannot_ask(error: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot ask who maps the pool").source(error)
}

/// Device and inode.
fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn cannot_record(error: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot read or write the pool's records").source(error)
}

fn cannot_populate(unit: u32, error: io::Error) -> Error {
    let is_too_old = error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
    let failed = match is_too_old {
        true => Error::new(ErrorKind::Unsupported, "this kernel cannot populate a mapping")
            .hint("Linux 5.14 or newer is needed (`MADV_POPULATE_WRITE`)"),
        false => Error::new(ErrorKind::Full, "cannot take memory for the pool")
            .hint("free memory, or lower `pool.capacity_bytes`"),
    };
    failed.with("unit", unit).source(error)
}
