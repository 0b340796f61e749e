//! Creating, recovering, growing, replacing and refusing pools.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;

use forebay_core::{ErrorKind, Instance};

use super::process::{act, soon};
use super::*;

#[test]
fn a_pool_is_found_again_as_it_was_left() {
    let home = Home::new();
    let opened = home.open(32 * MIB);
    assert_eq!(opened.outcome, Outcome::Created);
    let (pool, id) = (&opened.pool, opened.pool.id());
    assert_eq!((pool.epoch(), pool.first_generation(), recovered(pool)), (1, Generation(1), vec![]));
    let extent = with_extent(pool, 8192);
    let geometry = pool.geometry();
    let slot = |index| geometry.slot(&extent, index);
    store(pool, slot(0), 5, 1);
    store(pool, slot(7), 900_000, 2);
    pool.reserve(slot(2), Generation(9));
    pool.set_holders(slot(2), 0b1010);
    pool.set_namespace(3, NamespaceId(77), "model=m", None, b"layout").unwrap();
    pool.set_instance(Instance(63), &InstanceRecord { ranks: 8, ..InstanceRecord::default() }).unwrap();
    drop(opened);

    let opened = home.open(32 * MIB);
    assert_eq!(opened.outcome, Outcome::Recovered { previous_epoch: 1, grown_by_units: 0 });
    let pool = &opened.pool;
    assert_eq!((pool.epoch(), pool.id()), (2, id));
    assert!(pool.first_generation().0 > 900_000);
    assert_eq!(pool.recovered_extents(), [extent]);
    let slots = recovered(pool);
    assert_eq!(slots.len(), 256);
    assert_eq!(block_in(pool, &slots[0]), Some(block(1).0));
    assert_eq!(block_in(pool, &slots[7]), Some(block(2).0));
    assert_eq!((slots[2].state, slots[2].holders), (SlotState::Reserved { epoch: 1 }, 0b1010));
    assert_eq!((slots[2].generation, slots[7].generation), (Generation(9), Generation(900_000)));
    assert_eq!(slots.iter().filter(|slot| slot.state == SlotState::Free).count(), 253);
    assert_eq!(pool.namespaces().unwrap()[0].1.descriptor, "model=m");
    assert_eq!(pool.instances().unwrap()[0].1.ranks, 8);
    assert_eq!(pool.entry(slot(7), slots[7].generation), Some(block(2).0));
    for no_block in [slot(2), slot(3), SlotId(1), SlotId(pool.geometry().pages - 1)] {
        assert_eq!(pool.entry(no_block, pool.generation(no_block)), None, "{no_block:?}");
    }
}

#[test]
fn purges_that_have_not_ended_are_found_again_also_by_the_next_pool_in_the_same_place() {
    let home = Home::new();
    let purge =
        |namespace, pool, disks| PurgeRecord { namespace: NamespaceId(namespace), places: PurgePlaces { pool, disks } };
    let (first, second, last) = (purge(7, true, true), purge(8, true, false), purge(u128::MAX, false, true));
    let pool = home.pool(8 * MIB);
    assert_eq!(pool.purges().unwrap(), []);
    for (index, record) in [(0, first), (1, second), (PURGES - 1, last)] {
        pool.set_purge(index, &record).unwrap();
    }
    drop(pool);
    let pool = home.pool(8 * MIB);
    assert_eq!(pool.purges().unwrap(), [(0, first), (1, second), (PURGES - 1, last)]);
    let first = purge(7, false, true);
    pool.set_purge(0, &first).unwrap();
    pool.clear_purge(1).unwrap();
    drop(pool);
    let opened = home.open(4 * MIB);
    assert!(matches!(opened.outcome, Outcome::Replaced { .. }));
    assert_eq!(opened.pool.purges().unwrap(), [(0, first), (PURGES - 1, last)], "disks keep their blocks");
    drop(opened);
    // A daemon that was killed while it replaced the pool leaves nothing else.
    for name in ["table", "generation", "data", "birth", "namespace"] {
        std::fs::remove_file(home.path().join(name)).unwrap();
    }
    assert_eq!(home.pool(4 * MIB).purges().unwrap(), [(0, first), (PURGES - 1, last)]);
    assert!(remove(home.path()).unwrap());
    assert_eq!(home.pool(4 * MIB).purges().unwrap(), []);
}

#[test]
fn a_flipped_bit_costs_the_record_of_one_purge_and_makes_no_other() {
    let home = Home::new();
    let record =
        |namespace| PurgeRecord { namespace: NamespaceId(namespace), places: PurgePlaces { pool: false, disks: true } };
    let pool = home.pool(4 * MIB);
    (0..3).for_each(|index| pool.set_purge(index, &record(index.into())).unwrap());
    let file = home.file("purge");
    let (mut whole, at) = ([0; 64], 2 * 64);
    file.read_exact_at(&mut whole, at).unwrap();
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole;
        flipped[bit / 8] ^= 1 << (bit % 8);
        file.write_all_at(&flipped, at).unwrap();
        assert_eq!(pool.purges().unwrap(), [(0, record(0)), (2, record(2))], "bit {bit}");
        // Its place can be used again.
        pool.set_purge(1, &record(1)).unwrap();
        assert_eq!(pool.purges().unwrap().len(), 3);
    }
}

fn ended(namespace: u128) -> EndedPurge {
    EndedPurge { namespace: NamespaceId(namespace), time: (1 << 50) + namespace as u64 }
}

#[test]
fn purges_that_have_ended_are_found_again_also_by_the_next_pool_in_the_same_place() {
    let home = Home::new();
    let pool = home.pool(8 * MIB);
    assert_eq!((pool.ended_purges().unwrap(), pool.has_met_disks().unwrap()), (vec![], false));
    for (index, namespace) in [(0, 1), (7, 2), (ENDED_PURGES - 1, 3)] {
        pool.set_ended_purge(index, &ended(namespace)).unwrap();
    }
    drop(pool);
    let pool = home.pool(8 * MIB);
    let last = ENDED_PURGES - 1;
    assert_eq!(pool.ended_purges().unwrap(), [(0, ended(1)), (7, ended(2)), (last, ended(3))]);
    assert!(!pool.has_met_disks().unwrap());
    pool.set_ended_purge(7, &ended(4)).unwrap();
    pool.set_met_disks().unwrap();
    drop(pool);
    let opened = home.open(4 * MIB);
    assert!(matches!(opened.outcome, Outcome::Replaced { .. }));
    let pool = opened.pool;
    assert_eq!(pool.ended_purges().unwrap(), [(0, ended(1)), (7, ended(4)), (last, ended(3))], "disks keep blocks");
    assert!(pool.has_met_disks().unwrap());
    assert_eq!(pool.purges().unwrap(), [], "the others are apart");
    drop(pool);
    assert!(remove(home.path()).unwrap());
    let pool = home.pool(4 * MIB);
    assert_eq!((pool.ended_purges().unwrap(), pool.has_met_disks().unwrap()), (vec![], false));
}

/// A filesystem that is full by then has it nonetheless.
#[test]
fn purges_have_their_room_from_the_beginning() {
    let home = Home::new();
    drop(home.pool(4 * MIB));
    let file = std::fs::metadata(home.path().join("purge")).unwrap();
    assert!(file.blocks() * 512 >= file.len(), "{} of {} bytes", file.blocks() * 512, file.len());
}

#[test]
fn a_flipped_bit_costs_the_record_of_one_purge_that_has_ended_and_no_meeting_with_disks() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    (0..3).for_each(|index| pool.set_ended_purge(index, &ended(index.into())).unwrap());
    pool.set_met_disks().unwrap();
    // The first place is that of the word.
    let (file, at) = (home.file("purge"), 4097 * 64 + 2 * 32);
    let mut whole = [0; 32];
    file.read_exact_at(&mut whole, at).unwrap();
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole;
        flipped[bit / 8] ^= 1 << (bit % 8);
        file.write_all_at(&flipped, at).unwrap();
        assert_eq!(pool.ended_purges().unwrap(), [(0, ended(0)), (2, ended(2))], "bit {bit}");
        file.read_exact_at(&mut flipped, at).unwrap();
        assert_eq!(flipped, [0; 32], "it is told once");
    }
    let at = 4097 * 64;
    for bit in 0..64 {
        let mut word = *b"1PRESENT";
        word[bit / 8] ^= 1 << (bit % 8);
        file.write_all_at(&word, at).unwrap();
        assert!(pool.has_met_disks().unwrap(), "bit {bit}");
    }
}

/// The release 0.1.0 wrote the first 262,208 bytes.
#[test]
fn a_pool_whose_list_of_purges_is_shorter_keeps_its_blocks_and_gets_room_for_purges_that_have_ended() {
    let home = Home::new();
    let record = PurgeRecord { namespace: NamespaceId(7), places: PurgePlaces { pool: true, disks: true } };
    let pool = home.pool(4 * MIB);
    let slot = pool.geometry().slot(&with_extent(&pool, 8192), 0);
    store(&pool, slot, 5, 1);
    pool.set_purge(PURGES - 1, &record).unwrap();
    drop(pool);
    home.file("purge").set_len(262_208).unwrap();
    for is_whole in [true, false] {
        if !is_whole {
            home.file("purge").write_all_at(b"X", 0).unwrap();
        }
        let opened = home.open(4 * MIB);
        assert!(matches!(opened.outcome, Outcome::Recovered { .. }));
        let pool = opened.pool;
        assert_eq!(block_in(&pool, &recovered(&pool)[0]), Some(block(1).0));
        assert_eq!(pool.purges().unwrap(), if is_whole { vec![(PURGES - 1, record)] } else { vec![] });
        assert_eq!((pool.ended_purges().unwrap(), pool.has_met_disks().unwrap()), (vec![], false));
        pool.set_ended_purge(ENDED_PURGES - 1, &ended(1)).unwrap();
        drop(pool);
        assert_eq!(home.pool(4 * MIB).ended_purges().unwrap(), [(ENDED_PURGES - 1, ended(1))]);
        home.file("purge").set_len(262_208).unwrap();
    }
}

#[test]
fn a_list_of_purges_that_cannot_be_read_begins_anew() {
    let home = Home::new();
    let record = PurgeRecord { namespace: NamespaceId(7), places: PurgePlaces { pool: true, disks: true } };
    // Another magic, a later version, and a daemon that was killed while it made the file.
    for (head, is_kept) in [(&b"FOREBAYX\x01"[..], false), (b"FOREBAYP\x02", false), (b"FOREBAYP\x01", true)] {
        home.pool(4 * MIB).set_purge(3, &record).unwrap();
        home.file("purge").write_all_at(head, 0).unwrap();
        let found = home.pool(4 * MIB).purges().unwrap();
        assert_eq!(found, if is_kept { vec![(3, record)] } else { Vec::new() }, "{head:?}");
    }
    for bytes in [0, 64, 1000] {
        home.file("purge").set_len(bytes).unwrap();
        let pool = home.pool(4 * MIB);
        pool.set_purge(PURGES - 1, &record).unwrap();
        assert_eq!(pool.purges().unwrap().last(), Some(&(PURGES - 1, record)), "of a file of {bytes} bytes");
    }
}

/// As from its directory to a private mount, when that can be made at last.
#[test]
fn a_pool_that_replaces_one_in_another_directory_takes_over_its_purges() {
    let [old, new] = [Home::another(), Home::another()];
    let record =
        |namespace| PurgeRecord { namespace: NamespaceId(namespace), places: PurgePlaces { pool: true, disks: true } };
    let pool = old.pool(4 * MIB);
    pool.set_purge(5, &record(1)).unwrap();
    pool.set_ended_purge(8, &ended(1)).unwrap();
    pool.set_met_disks().unwrap();
    drop(pool);
    new.pool(4 * MIB).set_purge(6, &record(2)).unwrap();
    found::carry_purges(old.path(), new.path()).unwrap();
    let carried = || {
        let pool = new.pool(4 * MIB);
        (pool.purges().unwrap(), pool.ended_purges().unwrap(), pool.has_met_disks().unwrap())
    };
    let all = (vec![(5, record(1))], vec![(8, ended(1))], true);
    assert_eq!(carried(), all, "what was there is of an even earlier pool");
    std::fs::remove_file(old.path().join("purge")).unwrap();
    found::carry_purges(old.path(), new.path()).unwrap();
    assert_eq!(carried(), all, "an earlier build made none");
    // Of the release 0.1.0.
    old.pool(4 * MIB).set_purge(4, &record(3)).unwrap();
    old.file("purge").set_len(262_208).unwrap();
    std::fs::remove_file(new.path().join("purge")).unwrap();
    found::carry_purges(old.path(), new.path()).unwrap();
    assert_eq!(carried(), (vec![(4, record(3))], vec![], false));
}

#[test]
fn a_file_named_purge_that_no_pool_made_is_left_alone() {
    let home = Home::new();
    std::fs::write(home.path().join("purge"), "#!/bin/sh\n").unwrap();
    let refused = Pool::open(&home.config(4 * MIB)).err().unwrap();
    assert!(refused.to_string().contains("not a pool's"), "{refused}");
    assert_eq!(std::fs::read(home.path().join("purge")).unwrap(), b"#!/bin/sh\n");
}

#[test]
fn a_file_of_a_pool_that_was_cut_is_refused_with_a_hint_that_works() {
    for name in ["data", "birth"] {
        let home = Home::new();
        drop(home.pool(4 * MIB));
        home.file(name).set_len(5000).unwrap();
        let refused = Pool::open(&home.config(4 * MIB)).err().unwrap();
        let path = home.path().join(name);
        assert!(refused.to_string().contains("was cut"), "{refused}");
        assert!(refused.hint_text().unwrap().contains(&format!("`rm {}`", path.display())), "{refused:?}");
        assert_eq!(path.metadata().unwrap().len(), 5000, "it may be somebody else's");
        std::fs::remove_file(path).unwrap();
        home.pool(4 * MIB);
    }
}

#[test]
fn a_recovery_can_be_cut_into_pieces() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    pool.populate_unit(1).unwrap();
    with_extent(&pool, MIB);
    pool.set_extent(&Extent { first_unit: 1, units: 1, slot_bytes: 512 << 10 }).unwrap();
    drop(pool);
    let pool = home.pool(4 * MIB);
    let whole = recovered(&pool);
    assert_eq!(whole.len(), 2 + 4);
    for limit in 1..=7 {
        let (mut cursor, mut pieces, mut calls) = (RecoveryCursor::default(), Vec::new(), 0);
        loop {
            let before = pieces.len();
            calls += 1;
            let is_more = pool.recover(&mut cursor, limit, |slot| pieces.push(slot));
            assert!(pieces.len() - before <= limit);
            if !is_more {
                break;
            }
        }
        assert_eq!(pieces, whole, "limit {limit}");
        assert!(calls >= whole.len() / limit);
    }
}

#[test]
fn a_second_daemon_is_refused_by_directory_and_by_table() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let refusal = |directory: &Path| {
        let config = PoolConfig { directory: directory.to_owned(), ..home.config(4 * MIB) };
        let error = Pool::open(&config).err().expect("two daemons serve one pool");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.hint_text().unwrap().contains("stop that daemon"), "{error}");
    };
    refusal(home.path());
    drop(pool);
    // The same table through another path, as from another container.
    let table = home.file("table");
    assert!(found::lock_table(&table).unwrap());
    refusal(home.path());
    drop(table);
    assert_eq!(home.open(4 * MIB).outcome, Outcome::Recovered { previous_epoch: 1, grown_by_units: 0 });
}

#[test]
fn a_second_daemon_is_refused_before_there_is_a_table() {
    let home = Home::new();
    let claim = directory::Directory::claim(home.path()).unwrap();
    assert_eq!(Pool::open(&home.config(4 * MIB)).err().expect("both make a pool").kind(), ErrorKind::Unavailable);
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
    drop(claim);
    assert_eq!(home.open(4 * MIB).outcome, Outcome::Created);
}

#[test]
fn growing_keeps_every_block_even_while_workers_map_the_pool() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let extent = with_extent(&pool, 4096);
    let slot = pool.geometry().slot(&extent, 11);
    store(&pool, slot, 4, 1);
    let worker = Mapping::new(pool.mapper_fds(Instance(2), 1).unwrap(), &pool.description()).unwrap();
    let birth = BirthRecord { generation: Generation(4), length: 600, checksum: 6 };
    worker.write_birth(slot, 63, &birth).unwrap();
    drop(pool);

    let opened = home.open(9 * MIB);
    assert_eq!(opened.outcome, Outcome::Recovered { previous_epoch: 1, grown_by_units: 2 });
    let pool = &opened.pool;
    assert_eq!(pool.geometry().data_bytes(), 8 * MIB);
    assert_eq!(block_in(pool, &recovered(pool)[11]), Some(block(1).0));
    assert_eq!(pool.birth(slot, 63), Some(birth));
    assert!(pool.lock_held(Instance(2)).unwrap() && !worker.is_retired());
    pool.populate_unit(3).unwrap();
    pool.set_extent(&Extent { first_unit: 3, units: 1, slot_bytes: 4096 }).unwrap();
    let last = SlotId(pool.geometry().pages - 1);
    store(pool, last, 5, 2);
    let larger = Mapping::new(pool.mapper_fds(Instance(2), 0).unwrap(), &pool.description()).unwrap();
    assert_eq!((larger.len() as u64, larger.generation(last)), (8 * MIB, Generation(5)));
    assert_eq!(worker.generation(slot), Generation(4));
}

#[test]
fn a_mapping_grows_with_its_pool_where_it_is() {
    let home = Home::alone();
    let pool = home.pool(4 * MIB);
    let mut worker = Mapping::new(pool.mapper_fds(Instance(2), 1).unwrap(), &pool.description()).unwrap();
    let first = worker.data_ptr();
    drop(pool);
    let mut pool = None;
    for mib in [6, 8, 40] {
        drop(pool.take());
        let opened = home.open(mib * MIB);
        let description = opened.pool.description();
        let larger = worker.grown(&description).unwrap();
        assert_eq!((larger.len() as u64, larger.data_ptr()), (mib * MIB, first));
        let last = SlotId(opened.pool.geometry().pages - 1);
        opened.pool.populate_unit(opened.pool.geometry().units - 1).unwrap();
        opened.pool.set_extent(&Extent { first_unit: (mib / 2 - 1) as u32, units: 1, slot_bytes: 4096 }).unwrap();
        store(&opened.pool, last, 5, 2);
        assert_eq!(larger.generation(last), Generation(5));
        let birth = BirthRecord { generation: Generation(5), length: 600, checksum: 6 };
        larger.write_birth(last, 63, &birth).unwrap();
        assert_eq!(opened.pool.birth(last, 63), Some(birth));
        process::poke(&larger, (mib * MIB) as usize - 6, b"worker");
        let mut seen = [0; 6];
        opened.pool.read(mib * MIB - 6, &mut seen);
        assert_eq!(&seen, b"worker");
        // What it was before has its own bounds, and both keep the lock.
        assert!((worker.len() as u64) < mib * MIB);
        assert!(opened.pool.lock_held_rank(Instance(2), 1).unwrap());
        worker = larger;
        pool = Some(opened.pool);
    }
    let pool = pool.unwrap();
    let honest = pool.description();
    for other in [
        GeometryDescription { pool_id: 1, ..honest },
        GeometryDescription { unit_bytes: 4 * MIB, ..honest },
        GeometryDescription { units: 19, ..honest },
        GeometryDescription { units: 21, ..honest },
        GeometryDescription { units: u32::MAX, ..honest },
    ] {
        let error = worker.grown(&other).err().unwrap_or_else(|| panic!("it grew to {other:?}"));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    worker.grown(&honest).unwrap();
    drop(worker);
    assert!(!pool.lock_held_rank(Instance(2), 1).unwrap(), "the lock ends with the last mapping");
}

#[test]
fn another_shape_replaces_the_pool_when_nobody_maps_it_and_is_refused_else() {
    let home = Home::new();
    let pool = home.pool(32 * MIB);
    let id = pool.id();
    let worker = pool.mapper_fds(Instance(0), 0).unwrap();
    drop(pool);
    for config in [home.config(16 * MIB), PoolConfig { unit_bytes: Some(4 * MIB), ..home.config(32 * MIB) }] {
        let error = Pool::open(&config).err().expect("the shape changed under a worker");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let hint = error.hint_text().unwrap();
        assert!(hint.contains("stop the engines") && hint.contains("pool.capacity_bytes = 33554432"), "{hint}");
    }
    assert_eq!(home.pool(32 * MIB).id(), id);
    drop(worker);
    let opened = home.open(16 * MIB);
    let Outcome::Replaced { reason } = &opened.outcome else { panic!("{:?}", opened.outcome) };
    assert_eq!(reason, "it has 32.0 MiB, but 16.0 MiB are configured");
    assert_ne!(opened.pool.id(), id);
    assert_eq!((opened.pool.epoch(), recovered(&opened.pool)), (1, vec![]));
    assert_eq!(opened.pool.geometry().data_bytes(), 16 * MIB);
}

#[test]
fn a_table_that_cannot_be_read_is_replaced_and_says_why() {
    // Each function breaks a pool in its own way and returns a part of the expected reason.
    type Break = fn(&Home);
    let cases: [(&str, Break); 9] = [
        ("version 3", |home| write_at(home, "table", 8, &3u32.to_le_bytes())),
        ("does not begin as a pool's does", |home| write_at(home, "table", 0, b"X")),
        ("creation was interrupted", |home| write_at(home, "table", 12, &format::CREATING.to_le_bytes())),
        ("it was discarded before", |home| home.pool(4 * MIB).retire()),
        ("header is damaged", |home| write_at(home, "table", 33, &[0xff])),
        ("too short", |home| home.file("table").set_len(10).unwrap()),
        ("`data` file has 2097152 bytes", |home| home.file("data").set_len(2 * MIB).unwrap()),
        ("of another pool", |home| write_at(home, "generation", 16, &[1; 16])),
        ("table is gone", |home| std::fs::remove_file(home.path().join("table")).unwrap()),
    ];
    let _turn = with_others();
    for (expected, damage) in cases {
        let home = Home::another();
        let pool = home.pool(4 * MIB);
        let (id, extent) = (pool.id(), with_extent(&pool, 4096));
        store(&pool, pool.geometry().slot(&extent, 0), 1, 1);
        drop(pool);
        damage(&home);
        let opened = home.open(4 * MIB);
        let Outcome::Replaced { reason } = &opened.outcome else { panic!("{expected}: {:?}", opened.outcome) };
        assert!(reason.contains(expected), "{reason:?} does not say {expected:?}");
        assert!(opened.pool.id() != id && recovered(&opened.pool).is_empty(), "{expected}");
        drop(opened);
        assert_eq!(home.open(4 * MIB).outcome, Outcome::Recovered { previous_epoch: 1, grown_by_units: 0 });
        assert_eq!(files_in(home.path()).len(), 6, "{expected}");
    }
}

#[test]
fn a_replaced_pool_keeps_its_bytes_for_those_who_map_it_and_its_memory_is_waited_for() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let extent = with_extent(&pool, 4096);
    let slot = pool.geometry().slot(&extent, 1);
    store(&pool, slot, 1, 1);
    let worker = Mapping::new(pool.mapper_fds(Instance(9), 0).unwrap(), &pool.description()).unwrap();
    assert!(!worker.is_retired());
    drop(pool);
    write_at(&home, "table", 8, &7u32.to_le_bytes());

    let opened = home.open(4 * MIB);
    assert!(matches!(&opened.outcome, Outcome::Replaced { reason } if reason.contains("version 7")));
    assert!(worker.is_retired());
    assert_eq!(worker.generation(slot), Generation(1));
    assert_ne!(worker.pool_id(), opened.pool.id());
    let refused = |pool: &Pool| {
        let error = pool.populate_unit(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    };
    refused(&opened.pool);
    assert!(!opened.pool.lock_held(Instance(9)).unwrap(), "the new pool's locks are its own");
    drop(opened);
    // The fact survives a restart in between, and a second replacement would lose it.
    refused(&home.pool(4 * MIB));
    let second = home.pool(4 * MIB).mapper_fds(Instance(0), 0).unwrap();
    write_at(&home, "table", 8, &7u32.to_le_bytes());
    assert_eq!(Pool::open(&home.config(4 * MIB)).err().unwrap().kind(), ErrorKind::Unavailable);
    assert!(remove(home.path()).is_err());
    drop((worker, second));
    let opened = home.open(4 * MIB);
    assert!(matches!(opened.outcome, Outcome::Replaced { .. }));
    opened.pool.populate_unit(0).unwrap();
    assert_eq!(files_in(home.path()).len(), 6);
}

#[test]
fn memory_of_a_replaced_pool_comes_back_while_the_new_one_runs() {
    let home = Home::new();
    let worker = home.pool(4 * MIB).mapper_fds(Instance(1), 1).unwrap();
    write_at(&home, "table", 0, b"?");
    let pool = home.pool(4 * MIB);
    assert!(pool.populate_unit(0).is_err());
    drop(worker);
    pool.populate_unit(0).unwrap();
    assert!(!home.path().join("data.replaced").exists());
}

#[test]
fn a_pool_larger_than_memory_is_refused_with_numbers_and_leaves_nothing() {
    let home = Home::new();
    let error = Pool::open(&home.config(15 << 40)).err().expect("15 TiB fit");
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("cannot allocate 15.2 TiB for the pool: "), "{error}");
    assert!(error.hint_text().unwrap().contains("lower `pool.capacity_bytes`"), "{error}");
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
    // An existing pool stays unchanged if it cannot grow that far.
    let id = home.pool(4 * MIB).id();
    let config = PoolConfig { unit_bytes: None, ..home.config(100 << 30) };
    assert_eq!(Pool::open(&config).err().expect("100 GiB fit").kind(), ErrorKind::Full);
    assert_eq!(home.pool(4 * MIB).id(), id);
}

#[test]
fn a_directory_that_cannot_be_made_is_refused_with_a_hint() {
    let home = Home::new();
    std::fs::write(home.path().join("file"), b"").unwrap();
    let config = PoolConfig { directory: home.path().join("file/pool"), ..home.config(4 * MIB) };
    let error = Pool::open(&config).err().expect("a file is a directory");
    assert!(error.to_string().contains("a directory above it is not a directory"), "{error}");
    assert!(error.hint_text().is_some(), "{error}");
}

#[test]
fn removing_a_pool_leaves_an_empty_directory() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    assert!(remove(home.path()).is_err(), "a daemon serves it");
    drop(pool);
    remove(home.path()).unwrap();
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
    remove(home.path()).unwrap();
}

#[test]
fn another_user_is_refused_where_it_may_not_write_and_served_where_it_may() {
    let home = Home::alone();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (locked, owned) = (home.path().join("locked"), home.path().join("owned"));
    for (directory, mode) in [(&locked, 0o500), (&owned, 0o700)] {
        std::fs::create_dir(directory).unwrap();
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&owned, Some(65_534), Some(65_534)).unwrap();
    }
    let actor = act("unprivileged", home.path(), true);
    assert_eq!(actor.hear(), "refused");
    let report = actor.hear();
    assert!(report.starts_with("huge 4194304 of 4194304") || report.starts_with("small because "), "{report}");
}

/// Without any privilege, opens a pool where it may not, and one where it may.
pub fn play_unprivileged(socket: &UnixStream, directory: &Path) {
    let config = |name: &str| PoolConfig {
        directory: directory.join(name),
        capacity_bytes: 4 * MIB,
        unit_bytes: None,
        huge_pages: HugePages::Auto,
    };
    let error = Pool::open(&config("locked")).err().expect("it wrote where it may not");
    assert!(error.to_string().contains("cannot use the directory"), "{error}");
    assert!(error.hint_text().unwrap().contains("pool.directory"), "{error}");
    send_fds(socket, b"refused", &[], soon()).unwrap();
    let pool = Pool::open(&config("owned")).unwrap().pool;
    assert!(!directory.join("owned/mnt").exists(), "what could not be mounted on is gone");
    (0..2).for_each(|unit| pool.populate_unit(unit).unwrap());
    let report = pool.huge_page_report().unwrap();
    let text = match report.backing {
        Backing::Small => format!("small because {}", report.notes.join("; ")),
        _ => format!("huge {} of {}", report.huge_bytes, report.mapped_bytes),
    };
    send_fds(socket, text.as_bytes(), &[], soon()).unwrap();
}

#[test]
fn an_extent_for_whose_slots_the_table_has_no_memory_is_refused_until_it_has() {
    let home = Home::new();
    let pool = home.pool(8 * MIB);
    (0..4).for_each(|unit| pool.populate_unit(unit).unwrap());
    let table = home.file("table");
    let length = table.metadata().unwrap().len();
    let extent = |units| Extent { first_unit: 0, units, slot_bytes: 4096 };
    table.set_len(format::ENTRIES_AT).unwrap(); // Memory behind a file's end cannot be had, like that of a full filesystem.
    assert!(!pool.has_room(&extent(2)));
    table.set_len(length).unwrap();
    assert!(!pool.has_room(&extent(2)), "no second look so soon");
    assert!(pool.has_room(&extent(1)), "a shorter one needs less");
    assert!(pool.has_room(&extent(2)));
    pool.set_extent(&extent(2)).unwrap();
    store(&pool, SlotId(600), 5, 1);
    assert!(pool.has_room(&extent(2)), "what has room, has it still");
    assert_eq!(pool.entry(SlotId(600), Generation(5)), Some(block(1).0));
}
