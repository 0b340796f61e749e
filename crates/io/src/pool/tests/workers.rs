//! Workers: what they map, what is refused, and how the daemon detects that they live.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use forebay_core::{ErrorKind, Instance};

use super::process::{Actor, act, soon};
use super::*;

/// Attaches a child as rank `rank` of `instance` and waits until it has mapped the pool.
fn attach(home: &Home, pool: &Pool, instance: Instance, rank: usize) -> Actor {
    let actor = act("worker", home.path(), false);
    let GeometryDescription { pool_id, unit_bytes, units } = pool.description();
    let fds = pool.mapper_fds(instance, rank).unwrap();
    actor.say(&format!("{pool_id} {unit_bytes} {units}"), &fds.as_fds());
    drop(fds);
    assert_eq!(actor.hear(), "mapped");
    actor
}

/// Maps the pool, then stores into the slots that the test names, or reports their generations, until the test is
/// done.
pub fn play_worker(socket: &UnixStream) {
    let (line, fds) = recv_fds(socket, soon()).unwrap();
    let numbers: Vec<u128> = String::from_utf8(line).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
    let description =
        GeometryDescription { pool_id: numbers[0], unit_bytes: numbers[1] as u64, units: numbers[2] as u32 };
    let fds = MapperFds::from_received(fds).unwrap();
    let mapping = Mapping::new(fds, &description).unwrap();
    send_fds(socket, b"mapped", &[], soon()).unwrap();
    while let Ok((line, _)) = recv_fds(socket, soon()) {
        let numbers: Vec<u32> = String::from_utf8(line).unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
        let (slot, rank) = (SlotId(numbers[0]), numbers[1] as usize);
        let generation = mapping.generation(slot);
        let record = BirthRecord { generation, length: 600, checksum: u64::from(slot.0) };
        mapping.write_birth(slot, rank, &record).unwrap();
        send_fds(socket, generation.0.to_string().as_bytes(), &[], soon()).unwrap();
    }
}

#[test]
fn a_worker_counts_as_alive_until_its_process_is_gone_even_when_stopped() {
    let home = Home::alone();
    let pool = home.pool(4 * MIB);
    assert!(!pool.lock_held(Instance(5)).unwrap());
    let mut actor = attach(&home, &pool, Instance(5), 63);
    // The worker has closed the descriptor: only the mapping keeps the lock.
    let open_data = std::fs::read_dir(format!("/proc/{}/fd", actor.child.id())).unwrap();
    let links = open_data.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    assert!(links.into_iter().all(|link| link != home.path().join("data")));
    let is_alive = || {
        let ranks: Vec<bool> = (0..64).map(|rank| pool.lock_held_rank(Instance(5), rank).unwrap()).collect();
        assert!(ranks[..63].iter().all(|held| !held));
        assert!([4, 6].iter().all(|other| !pool.lock_held(Instance(*other)).unwrap()));
        assert_eq!(pool.lock_held(Instance(5)).unwrap(), ranks[63]);
        ranks[63]
    };
    assert!(is_alive());
    let error = pool.mapper_fds(Instance(5), 63).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.hint_text().unwrap().contains("earlier worker"), "{error}");
    actor.signal(libc::SIGSTOP);
    actor.wait_until_stopped();
    assert!(is_alive(), "a stopped worker can go on to write");
    actor.signal(libc::SIGKILL);
    actor.child.wait().unwrap();
    assert!(!is_alive());
    pool.mapper_fds(Instance(5), 63).unwrap();
}

#[test]
fn a_worker_outlives_the_daemon_and_the_next_daemon_sees_it() {
    let home = Home::alone();
    let pool = home.pool(4 * MIB);
    let extent = with_extent(&pool, 4096);
    let slot = pool.geometry().slot(&extent, 3);
    pool.reserve(slot, Generation(12));
    pool.set_holders(slot, Instance(0).bit());
    let actor = attach(&home, &pool, Instance(0), 2);
    drop(pool);
    let pool = home.pool(4 * MIB);
    assert!(pool.lock_held(Instance(0)).unwrap());
    assert_eq!(pool.birth(slot, 2), None);
    actor.say(&format!("{} 2", slot.0), &[]);
    assert_eq!(actor.hear(), "12");
    let birth = BirthRecord { generation: Generation(12), length: 600, checksum: u64::from(slot.0) };
    assert_eq!(pool.birth(slot, 2), Some(birth));
    assert_eq!(pool.birth(slot, 1), None);
    pool.ready(slot, Generation(12), &block(4).0);
    pool.free(slot, Generation(13));
    actor.say(&format!("{} 2", slot.0), &[]);
    assert_eq!(actor.hear(), "13", "the worker sees that it lost the slot");
}

#[test]
fn a_worker_reads_and_writes_the_very_bytes_of_the_pool() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let mapping = Mapping::new(pool.mapper_fds(Instance(0), 0).unwrap(), &pool.description()).unwrap();
    assert_eq!((mapping.len() as u64, mapping.geometry(), mapping.pool_id()), (4 * MIB, pool.geometry(), pool.id()));
    assert_eq!(mapping.data_ptr() as u64 % (2 * MIB), 0);
    pool.write(2 * MIB + 5, b"daemon");
    let mut seen = [0; 6];
    process::peek(&mapping, 2 * MIB as usize + 5, &mut seen);
    assert_eq!(&seen, b"daemon");
    process::poke(&mapping, 4 * MIB as usize - 6, b"worker");
    pool.read(4 * MIB - 6, &mut seen);
    assert_eq!(&seen, b"worker");
    pool.retire();
    assert!(mapping.is_retired());
}

#[test]
fn birth_records_of_all_ranks_and_slots_lie_apart() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let mapping = Mapping::new(pool.mapper_fds(Instance(0), 0).unwrap(), &pool.description()).unwrap();
    let pages = pool.geometry().pages;
    let places = || {
        let slots = [0, 1, 511, 512, pages - 1].map(SlotId);
        slots.into_iter().flat_map(|slot| [0, 1, 62, 63].map(|rank| (slot, rank)))
    };
    let record = |slot: SlotId, rank: usize| BirthRecord {
        generation: Generation(slot.0 + 1),
        length: rank as u64,
        checksum: u64::from(slot.0) << 32 | rank as u64,
    };
    for (slot, rank) in places() {
        assert_eq!(pool.birth(slot, rank), None);
        mapping.write_birth(slot, rank, &record(slot, rank)).unwrap();
    }
    for (slot, rank) in places() {
        assert_eq!(pool.birth(slot, rank), Some(record(slot, rank)));
    }
    assert!(mapping.write_birth(SlotId(pages), 0, &record(SlotId(0), 0)).is_err());
    assert!(mapping.write_birth(SlotId(0), MAX_RANKS, &record(SlotId(0), 0)).is_err());
    // A worker that cuts the file short harms nobody.
    home.file("birth").set_len(0).unwrap();
    assert!(places().all(|(slot, rank)| pool.birth(slot, rank).is_none()));
}

#[test]
fn descriptors_that_are_not_what_the_daemon_says_are_refused_before_they_are_mapped() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let honest = pool.description();
    let fds = || pool.mapper_fds(Instance(1), 0).unwrap();
    let refused = |what: &str, fds: MapperFds, description: GeometryDescription| {
        let error = Mapping::new(fds, &description).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
    };
    refused("more units than there are", fds(), GeometryDescription { units: 3, ..honest });
    refused("larger units than there are", fds(), GeometryDescription { unit_bytes: 4 * MIB, ..honest });
    refused("a unit of 3 MiB", fds(), GeometryDescription { unit_bytes: 3 * MIB, ..honest });
    refused("no units", fds(), GeometryDescription { units: 0, ..honest });
    refused("units beyond all bounds", fds(), GeometryDescription { units: u32::MAX, ..honest });
    refused("another pool's id", fds(), GeometryDescription { pool_id: 1, ..honest });
    let MapperFds { data, generation, birth } = fds();
    refused("two files swapped", MapperFds { data: generation, generation: data, birth }, honest);
    let (reader, _writer) = std::io::pipe().unwrap();
    refused("a pipe", MapperFds { data: reader.into(), ..fds() }, honest);
    let short = tempfile::tempfile().unwrap();
    short.set_len(4 * MIB - 1).unwrap();
    refused("a file too short by a byte", MapperFds { data: short.into(), ..fds() }, honest);
    assert!(MapperFds::from_received(vec![]).is_err());
    Mapping::new(fds(), &honest).unwrap();
}

#[test]
fn a_worker_cannot_write_what_is_the_daemons() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let fds = pool.mapper_fds(Instance(1), 0).unwrap();
    let generation = File::from(fds.generation.as_fd().try_clone_to_owned().unwrap());
    assert!(generation.write_all_at(&[1], 0).is_err());
    for name in ["table", "generation", "data", "birth", "namespace", "purge"] {
        let mode = std::os::unix::fs::PermissionsExt::mode(&home.file(name).metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn numbers_that_no_worker_has_are_refused() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    assert!(pool.mapper_fds(Instance(64), 0).is_err() && pool.mapper_fds(Instance(0), 64).is_err());
    assert!(pool.lock_held(Instance(64)).is_err() && pool.lock_held_rank(Instance(0), 64).is_err());
    let too_long = InstanceRecord { engine_id: vec![b'x'; 65], ranks: 1, ..InstanceRecord::default() };
    assert!(pool.set_instance(Instance(0), &too_long).is_err());
    assert!(pool.set_namespace(1024, NamespaceId(0), "", None, b"").is_err());
    assert!(pool.set_namespace(0, NamespaceId(0), &"x".repeat(8193), None, b"").is_err());
    assert!(pool.set_namespace(0, NamespaceId(0), "", None, &[0; 4097]).is_err());
}
