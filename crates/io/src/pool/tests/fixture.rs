//! The released formats: for each version a pool that it wrote, as text. That of version 1 has no list of purges.
//!
//! `tests/fixtures/pool-N.hex` lists, file by file, the length and all rows of 16 bytes that are not zero. After an
//! intended change, run the tests with `FOREBAY_BLESS=1` to write today's fixture again.

use std::collections::BTreeMap;
use std::fmt::Write;

use forebay_core::Instance;

use super::*;
use crate::pool::directory::{Directory, data_beside};
use crate::pool::format::Header;
use crate::pool::site::Site;

fn fixture(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/pool-{version}.hex"))
}

const POOL_ID: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;

/// A pool whose every byte is known: two extents, a slot in each state, an instance and a namespace.
fn written_today(home: &Home) {
    let geometry = Geometry::new(4 * MIB, None).unwrap();
    let header = Header { id: POOL_ID, geometry, backing: Backing::Small, epoch: 41, ceiling: Generation(1) };
    let path = home.path().to_owned();
    let site = Site { data: data_beside(&path), home: path.clone(), backing: Backing::Small, notes: Vec::new() };
    let directory = Directory::claim(&path).unwrap();
    let (table, files) = open::create_files(&site, &header).unwrap();
    let pool = Pool::assemble(directory, site, header, table, files, Vec::new()).unwrap();
    (0..2).for_each(|unit| pool.populate_unit(unit).unwrap());
    for extent in extents() {
        pool.set_extent(&extent).unwrap();
    }
    store(&pool, SlotId(0), 3, 1);
    store(&pool, SlotId(512 + 128), 4, 2);
    pool.reserve(SlotId(2), Generation(5));
    pool.set_holders(SlotId(2), 0x8000_0000_0000_0001);
    pool.reserve(SlotId(4), Generation(6));
    pool.free(SlotId(4), Generation(7));
    // Replaced, so that both places of the record are written.
    pool.set_instance(Instance(63), &InstanceRecord { owner: 0, ..engine() }).unwrap();
    pool.set_instance(Instance(63), &engine()).unwrap();
    pool.set_namespace(1, NamespaceId(9), "model=m", None, b"layout").unwrap();
    pool.set_purge(1, &purge()).unwrap();
    pool.set_ended_purge(2, &ended_purge()).unwrap();
    pool.set_met_disks().unwrap();
    let mapping = Mapping::new(pool.mapper_fds(Instance(63), 7).unwrap(), &pool.description()).unwrap();
    mapping.write_birth(SlotId(2), 7, &birth()).unwrap();
}

fn extents() -> [Extent; 2] {
    [Extent { first_unit: 0, units: 1, slot_bytes: 8192 }, Extent { first_unit: 1, units: 1, slot_bytes: 512 << 10 }]
}

fn engine() -> InstanceRecord {
    let (incarnation, owner) = (0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10, 0x1112_1314_1516_1718_191a_1b1c_1d1e_1f20);
    InstanceRecord { engine_id: b"engine".to_vec(), ranks: 8, incarnation, owner }
}

fn purge() -> PurgeRecord {
    PurgeRecord { namespace: NamespaceId(9), places: PurgePlaces { pool: false, disks: true } }
}

fn ended_purge() -> EndedPurge {
    EndedPurge { namespace: NamespaceId(8), time: 0x0006_0102_0304_0506 }
}

fn birth() -> BirthRecord {
    BirthRecord { generation: Generation(5), length: 0x1234, checksum: 0x1122_3344_5566_7788 }
}

fn dump(directory: &Path) -> String {
    let mut text = String::new();
    for path in files_in(directory) {
        let bytes = std::fs::read(&path).unwrap();
        writeln!(text, "{} {}", path.file_name().unwrap().display(), bytes.len()).unwrap();
        for (row, bytes) in bytes.chunks(16).enumerate().filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0)) {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "  {:07x} {hex}", row * 16).unwrap();
        }
    }
    text
}

fn restore(directory: &Path, dump: &str) {
    let mut files = BTreeMap::new();
    let mut name = "";
    for line in dump.lines() {
        let (left, right) = line.trim_start().split_once(' ').unwrap();
        if line.starts_with(' ') {
            let at = u64::from_str_radix(left, 16).unwrap();
            let bytes: Vec<u8> =
                (0..right.len()).step_by(2).map(|i| u8::from_str_radix(&right[i..i + 2], 16).unwrap()).collect();
            let file: &File = &files[name];
            file.write_all_at(&bytes, at).unwrap();
        } else {
            name = left;
            let file = make_file(&directory.join(name));
            file.set_len(right.parse().unwrap()).unwrap();
            files.insert(name, file);
        }
    }
}

#[test]
fn a_pool_written_by_version_1_is_read_and_becomes_one_of_today() {
    let home = Home::new();
    let unknown = InstanceRecord { engine_id: b"engine".to_vec(), ranks: 8, ..InstanceRecord::default() };
    is_read(&home, 1, unknown);
    let version = |name: &str| {
        let mut bytes = [0; 4];
        home.file(name).read_exact_at(&mut bytes, 8).unwrap();
        u32::from_le_bytes(bytes)
    };
    assert_eq!((version("table"), version("generation"), version("purge")), (2, 1, 1));
    let pool = home.pool(4 * MIB);
    assert_eq!(pool.purges().unwrap(), [], "it had no such file");
    pool.set_instance(Instance(63), &engine()).unwrap();
    assert_eq!(pool.instances().unwrap(), [(Instance(63), engine())]);
}

#[test]
fn a_pool_written_by_version_2_is_read() {
    let home = Home::new();
    is_read(&home, 2, engine());
    let pool = home.pool(4 * MIB);
    assert_eq!(pool.purges().unwrap(), [(1, purge())]);
    assert_eq!((pool.ended_purges().unwrap(), pool.has_met_disks().unwrap()), (vec![(2, ended_purge())], true));
}

fn is_read(home: &Home, version: u32, engine: InstanceRecord) {
    restore(home.path(), &std::fs::read_to_string(fixture(version)).unwrap());
    let opened = home.open(4 * MIB);
    assert_eq!(opened.outcome, Outcome::Recovered { previous_epoch: 41, grown_by_units: 0 });
    let pool = &opened.pool;
    assert_eq!((pool.id(), pool.recovered_extents()), (POOL_ID, &extents()[..]));
    assert_eq!((pool.first_generation(), pool.generation(SlotId(4))), (Generation(65_539), Generation(7)));
    let slots = recovered(pool);
    assert_eq!(slots.len(), 256 + 4);
    assert_eq!(block_in(pool, &slots[0]), Some(block(1).0));
    assert_eq!(block_in(pool, &slots[256 + 1]), Some(block(2).0));
    assert_eq!((slots[1].state, slots[1].holders), (SlotState::Reserved { epoch: 41 }, 0x8000_0000_0000_0001));
    assert_eq!(slots.iter().filter(|slot| slot.state == SlotState::Free).count(), 257);
    assert_eq!(pool.instances().unwrap(), [(Instance(63), engine)]);
    let (descriptor, layout) = ("model=m".into(), b"layout".to_vec());
    let record = NamespaceRecord { id: NamespaceId(9), descriptor, uid: None, layout };
    assert_eq!(pool.namespaces().unwrap(), [(1, record)]);
    assert_eq!(pool.birth(SlotId(2), 7), Some(birth()));
    assert!(!Mapping::new(pool.mapper_fds(Instance(0), 0).unwrap(), &pool.description()).unwrap().is_retired());
}

#[test]
fn todays_files_are_those_of_version_2_to_the_byte() {
    let home = Home::new();
    written_today(&home);
    let today = dump(home.path());
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        std::fs::write(fixture(2), &today).unwrap();
    }
    let released = std::fs::read_to_string(fixture(2)).unwrap();
    for (today, released) in today.lines().zip(released.lines()) {
        assert_eq!(today, released, "the format changed: give it another version, or bless the fixture");
    }
    assert_eq!(today.len(), released.len());
}
