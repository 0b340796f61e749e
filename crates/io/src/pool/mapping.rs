//! The pool as a worker process maps it.
//!
//! Invariants: the daemon's sizes are checked against the files before anything is mapped, so a wrong description
//! causes an error and not a signal. The data's descriptor is closed once it is mapped. The mapping alone keeps the
//! lock that shows the daemon that this worker is alive. A pool that grows keeps its addresses, if the system lets it:
//! a driver that has registered its memory goes by them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Generation, PAGE_BYTES, Result, SlotId};

use super::fence::fence_streaming_stores;
use super::format::*;
use super::generations::Generations;
use super::geometry::{Geometry, MAX_RANKS, MAX_UNITS};
use super::map::{Access, Region};

/// The descriptors that a worker receives from the daemon over the attach socket.
#[derive(Debug)]
pub struct MapperFds {
    /// Carries the worker's lock.
    pub data: OwnedFd,
    /// The slots' generations, read-only.
    pub generation: OwnedFd,
    /// The birth records of all ranks, writable.
    pub birth: OwnedFd,
}

impl MapperFds {
    /// In the order of sending.
    pub fn as_fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.data.as_fd(), self.generation.as_fd(), self.birth.as_fd()]
    }

    /// From received descriptors in the same order.
    pub fn from_received(fds: Vec<OwnedFd>) -> Result<MapperFds> {
        let count = fds.len();
        let [data, generation, birth] = <[OwnedFd; 3]>::try_from(fds).map_err(|_| {
            Error::invalid("the reply to an attach must carry three descriptors").with("received", count)
        })?;
        Ok(MapperFds { data, generation, birth })
    }
}

/// The daemon's description of the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeometryDescription {
    /// Drawn when the pool was created. A worker refuses descriptors of a pool with another id.
    pub pool_id: u128,
    /// Bytes of one unit, a power of two.
    pub unit_bytes: u64,
    /// Number of units that are mapped.
    pub units: u32,
}

/// See the module documentation.
pub struct Mapping {
    pool_id: u128,
    geometry: Geometry,
    files: Arc<Files>,
}

/// What is mapped of a pool, by all that it has been so far.
struct Files {
    data: Region,
    generations: Generations,
    birth: File,
}

impl Mapping {
    /// Maps the three files and closes the data's descriptor. Pages are mapped on first touch. For [`Mapping::grown`]
    /// it keeps as many addresses as the host has memory, if the system lets it.
    pub fn new(fds: MapperFds, description: &GeometryDescription) -> Result<Mapping> {
        let GeometryDescription { pool_id, unit_bytes, units } = *description;
        let capacity_bytes = u64::from(units).saturating_mul(unit_bytes);
        let geometry = Geometry::new(capacity_bytes, Some(unit_bytes))?;
        let MapperFds { data, generation, birth } = fds;
        let (data, generation, birth) = (File::from(data), File::from(generation), File::from(birth));
        check_file("data", &data, geometry.data_bytes())?;
        check_file("generation", &generation, generation_bytes(&geometry))?;
        check_file("birth", &birth, birth_bytes(&geometry))?;
        let cannot =
            |what| move |error| Error::new(ErrorKind::Io, format!("cannot map the pool's {what}")).source(error);
        let largest = largest(&geometry);
        let generations =
            Generations::map_with_room(&generation, &geometry, &largest).map_err(cannot("generations"))?;
        if generations.pool_id() != Some(pool_id) {
            return Err(Error::invalid("the descriptors and the description are of different pools")
                .with("pool_id", format!("{pool_id:032x}")));
        }
        let data = Region::map_with_room(&data, 0, geometry.data_bytes(), largest.data_bytes(), Access::ReadWrite);
        let data = data.map_err(cannot("data"))?;
        data.want_huge_pages();
        Ok(Mapping { pool_id, geometry, files: Arc::new(Files { data, generations, birth }) })
    }

    /// The same pool, which has more units now, at the same addresses. `self` stays what it was. Errors with
    /// `Unsupported` if the system cannot extend the mappings: the pool must be mapped anew.
    pub fn grown(&self, description: &GeometryDescription) -> Result<Mapping> {
        let GeometryDescription { pool_id, unit_bytes, units } = *description;
        if (pool_id, unit_bytes) != (self.pool_id, self.geometry.unit_bytes) || units < self.geometry.units {
            return Err(Error::invalid("a pool cannot grow into another one")
                .with("units", units)
                .with("mapped_units", self.geometry.units));
        }
        let geometry = Geometry::new(u64::from(units).saturating_mul(unit_bytes), Some(unit_bytes))?;
        check_file("birth", &self.files.birth, birth_bytes(&geometry))?;
        let cannot = |error: io::Error| {
            Error::new(ErrorKind::Unsupported, "the pool has grown, and cannot be mapped where it was").source(error)
        };
        self.files.generations.grow(&geometry).map_err(cannot)?;
        self.files.data.grow(geometry.data_bytes()).map_err(cannot)?;
        self.files.data.want_huge_pages();
        Ok(Mapping { pool_id, geometry, files: self.files.clone() })
    }

    /// Drawn when the pool was created; the daemon's description has the same.
    pub fn pool_id(&self) -> u128 {
        self.pool_id
    }

    /// Size of the mapped pool, as the daemon described it.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether the daemon gave this pool up. If so, unmap when idle and attach again.
    pub fn is_retired(&self) -> bool {
        self.files.generations.is_retired()
    }

    /// The owner's number of `slot` at this moment. Call it before a copy, and [`Mapping::is_still`] afterwards.
    pub fn generation(&self, slot: SlotId) -> Generation {
        assert!(slot.0 < self.geometry.pages, "{slot:?} is outside the pool");
        self.files.generations.get(slot)
    }

    /// Whether the owner's number of `slot` was still this one when this thread made its latest reads. The copy must
    /// have been made by this thread, or by one that reported it after an acquire fence of its own.
    pub fn is_still(&self, slot: SlotId, generation: Generation) -> bool {
        assert!(slot.0 < self.geometry.pages, "{slot:?} is outside the pool");
        self.files.generations.is_still(slot, generation)
    }

    /// Rank `rank`'s slice checksum record (birth record) of `slot`, if there is one. Costs one read of 16 bytes
    /// through the file.
    pub fn birth(&self, slot: SlotId, rank: usize) -> Option<BirthRecord> {
        assert!(slot.0 < self.geometry.pages && rank < MAX_RANKS, "{slot:?} of rank {rank} is not in the pool");
        read_birth(&self.files.birth, &self.geometry, slot, rank)
    }

    /// Records what rank `rank` copied into `slot`. The copy must be complete. If it bypassed the caches, the thread
    /// that made it must have fenced it. This call orders the copy before the record for the calling thread. Costs
    /// one write of 16 bytes through the file: through a mapping, a full filesystem would kill the process.
    pub fn write_birth(&self, slot: SlotId, rank: usize, record: &BirthRecord) -> Result<()> {
        if slot.0 >= self.geometry.pages || rank >= MAX_RANKS {
            return Err(Error::invalid("a slice checksum record names a slot outside the pool")
                .with("slot", slot.0)
                .with("rank", rank));
        }
        fence_streaming_stores();
        write_birth(&self.files.birth, &self.geometry, slot, rank, record)
    }

    /// Start of the slots. They are [`Mapping::len`] bytes long and live as long as the mapping. Other processes
    /// write to them, so nobody may form a reference to them.
    pub fn data_ptr(&self) -> *mut u8 {
        self.files.data.as_ptr()
    }

    /// Bytes of the mapped slots.
    #[allow(clippy::len_without_is_empty, reason = "a mapping must have at least one unit")]
    pub fn len(&self) -> usize {
        self.geometry.data_bytes() as usize
    }
}

/// What a pool of these units can grow to: the host's memory, in whole units. At least what it is, and no more in a
/// process whose addresses are limited: it needs them for other things.
fn largest(geometry: &Geometry) -> Geometry {
    if rustix::process::getrlimit(rustix::process::Resource::As).current.is_some() {
        return *geometry;
    }
    let system = rustix::system::sysinfo();
    let memory_bytes = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    let limit_bytes = (u64::from(MAX_UNITS) * geometry.unit_bytes).min(u64::from(u32::MAX) * PAGE_BYTES);
    let bytes = memory_bytes.min(limit_bytes).max(geometry.data_bytes());
    Geometry::new(bytes, Some(geometry.unit_bytes)).unwrap_or(*geometry)
}

/// None also if a worker has cut the file short.
pub(super) fn read_birth(file: &File, geometry: &Geometry, slot: SlotId, rank: usize) -> Option<BirthRecord> {
    let mut bytes = [0; BIRTH_BYTES as usize];
    file.read_exact_at(&mut bytes, birth_at(geometry, slot, rank)).ok()?;
    let record = decode_birth(&bytes);
    (record.generation.0 != 0).then_some(record)
}

/// Errors with `Full` if the filesystem has no space for it.
pub(super) fn write_birth(
    file: &File,
    geometry: &Geometry,
    slot: SlotId,
    rank: usize,
    record: &BirthRecord,
) -> Result<()> {
    file.write_all_at(&encode_birth(record), birth_at(geometry, slot, rank)).map_err(|error| {
        Error::new(ErrorKind::Full, "cannot write a slice checksum record").with("slot", slot.0).source(error)
    })
}

/// Touching a mapping beyond the end of its file raises `SIGBUS`.
fn check_file(name: &'static str, file: &File, needed_bytes: u64) -> Result<()> {
    let unreadable = |error: io::Error| Error::new(ErrorKind::Io, "cannot stat a descriptor of the pool").source(error);
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() || metadata.len() < needed_bytes {
        return Err(Error::invalid("a descriptor of the pool does not match the daemon's description")
            .with("file", name)
            .with("is_file", metadata.is_file())
            .with("bytes", metadata.len())
            .with("needed_bytes", needed_bytes));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::MIN_UNIT_BYTES;

    #[test]
    fn there_is_room_for_the_hosts_memory_in_units_of_every_size() {
        let system = rustix::system::sysinfo();
        let memory_bytes = system.totalram as u64 * u64::from(system.mem_unit);
        for unit_bytes in [2 << 20, 64 << 20, 256 << 20] {
            let small = Geometry::new(4 * unit_bytes, Some(unit_bytes)).unwrap();
            let all = memory_bytes.min(u64::from(MAX_UNITS) * unit_bytes);
            let room = largest(&small).data_bytes();
            assert!(room <= all && room + unit_bytes > all, "{room} of {all} bytes in units of {unit_bytes}");
        }
        let whole = Geometry::new(u64::from(MAX_UNITS) * MIN_UNIT_BYTES, Some(MIN_UNIT_BYTES)).unwrap();
        assert_eq!(largest(&whole), whole, "no less than the pool is, and no more than it can be");
    }
}
