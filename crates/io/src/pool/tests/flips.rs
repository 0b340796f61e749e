//! A flipped bit in the table, the published generations or a payload is detected.

use super::*;

/// A pool with blocks in its first three slots, and a way to flip bits in its files.
struct Bench {
    home: Home,
    pool: Pool,
    slots: Vec<SlotId>,
}

impl Bench {
    fn new() -> Bench {
        let home = Home::new();
        let pool = home.pool(4 * MIB);
        let extent = with_extent(&pool, 4096);
        let slots: Vec<SlotId> = (0..3).map(|index| pool.geometry().slot(&extent, index)).collect();
        for (number, slot) in slots.iter().enumerate() {
            store(&pool, *slot, 10 + number as u32, number as u64 + 1);
        }
        pool.set_holders(slots[1], 0x8000_0000_0000_0101);
        drop(pool);
        let pool = home.pool(4 * MIB);
        Bench { home, pool, slots }
    }

    /// The state of the three slots while bit `bit` after `at` in `name` is flipped.
    fn flipped(&self, name: &str, at: u64, bit: u64) -> Vec<RecoveredSlot> {
        self.flip(name, at, bit);
        let mut slots = Vec::new();
        self.pool.recover(&mut RecoveryCursor::default(), 3, |slot| slots.push(slot));
        self.flip(name, at, bit);
        slots
    }

    fn flip(&self, name: &str, at: u64, bit: u64) {
        let (file, mut byte) = (self.home.file(name), [0]);
        file.read_exact_at(&mut byte, at + bit / 8).unwrap();
        byte[0] ^= 1 << (bit % 8);
        file.write_all_at(&byte, at + bit / 8).unwrap();
    }
}

#[test]
fn any_flipped_bit_of_an_entry_is_noticed_and_no_holder_is_lost() {
    let bench = Bench::new();
    let intact = recovered(&bench.pool);
    let (mut torn, mut held) = (0, 0);
    for bit in 0..format::ENTRY_BYTES * 8 {
        let slots = bench.flipped("table", format::ENTRIES_AT + format::ENTRY_BYTES, bit);
        assert_eq!((slots[0], slots[2]), (intact[0], intact[2]), "bit {bit} reached a neighbour");
        assert_eq!(slots[1].holders & intact[1].holders, intact[1].holders, "bit {bit} lost a holder");
        match slots[1].state {
            SlotState::Torn => torn += 1,
            // Holders are outside the seal: one more bit is harmless.
            state => held += (state == intact[1].state && (64..192).contains(&bit)) as usize,
        }
    }
    assert_eq!((torn, held), (1024 - 128, 128));
}

#[test]
fn a_free_slot_with_a_flipped_bit_is_not_taken_for_free_nor_for_a_block() {
    let bench = Bench::new();
    bench.pool.free(bench.slots[1], Generation(99));
    let mut torn = 0;
    for bit in 0..192 {
        torn +=
            (bench.flipped("table", format::ENTRIES_AT + format::ENTRY_BYTES, bit)[1].state == SlotState::Torn) as u32;
    }
    assert_eq!(torn, 192);
}

#[test]
fn a_flipped_bit_in_the_entry_of_a_free_slot_keeps_it_from_no_owner() {
    let bench = Bench::new();
    let (pool, slot, first) = (&bench.pool, bench.slots[1], bench.pool.recovered_extents()[0].first_unit);
    for bit in 0..format::ENTRY_BYTES * 8 {
        let number = 100 + 10 * bit as u32;
        pool.free(slot, Generation(number));
        bench.flip("table", format::ENTRIES_AT + format::ENTRY_BYTES, bit);
        store(pool, slot, number + 1, 2);
        assert_eq!(pool.entry(slot, Generation(number + 1)), Some(block(2).0), "bit {bit}");
    }
    bench.slots.iter().for_each(|slot| pool.free(*slot, Generation(90_000)));
    bench.flip("table", format::ENTRIES_AT + format::ENTRY_BYTES, 3);
    pool.clear_extent(first).unwrap();
    with_extent(pool, 4096);
    drop(bench.pool);
    assert!(recovered(&bench.home.pool(4 * MIB)).iter().all(|slot| slot.state == SlotState::Free));
}

#[test]
fn a_flipped_bit_in_the_entry_of_a_slot_that_is_filled_keeps_its_block_from_nothing() {
    let bench = Bench::new();
    for bit in (0..64).chain(64 * format::SEALED_AT as u64..format::ENTRY_BYTES * 8) {
        let number = 100 + 10 * bit as u32;
        bench.pool.free(bench.slots[1], Generation(number));
        bench.pool.reserve(bench.slots[1], Generation(number + 1));
        bench.flip("table", format::ENTRIES_AT + format::ENTRY_BYTES, bit);
        bench.pool.ready(bench.slots[1], Generation(number + 1), &block(2).0);
        assert_eq!(bench.pool.entry(bench.slots[1], Generation(number + 1)), Some(block(2).0), "bit {bit}");
    }
}

#[test]
fn a_flipped_bit_of_a_published_generation_costs_no_block_while_its_owner_is_known() {
    let bench = Bench::new();
    let (pool, slot) = (&bench.pool, bench.slots[1]);
    let at = format::GENERATIONS_AT + u64::from(slot.0) * 4;
    for bit in 0..32 {
        bench.flip("generation", at, bit);
        assert_eq!(pool.entry(slot, Generation(11)), Some(block(2).0), "bit {bit}");
        assert_eq!(pool.generation(slot), Generation(11), "workers read the owner's again");
    }
    pool.free(slot, Generation(100));
    pool.reserve(slot, Generation(101));
    bench.flip("generation", at, 7);
    pool.ready(slot, Generation(101), &block(3).0);
    assert_eq!((pool.generation(slot), pool.entry(slot, Generation(101))), (Generation(101), Some(block(3).0)));
}

#[test]
fn a_free_slots_generation_that_flipped_to_the_next_one_keeps_it_from_no_owner() {
    let bench = Bench::new();
    bench.pool.free(bench.slots[1], Generation(100));
    bench.flip("generation", format::GENERATIONS_AT + u64::from(bench.slots[1].0) * 4, 0);
    store(&bench.pool, bench.slots[1], 101, 4);
    assert_eq!(bench.pool.entry(bench.slots[1], Generation(101)), Some(block(4).0));
}

#[test]
fn any_flipped_bit_of_a_published_generation_is_noticed() {
    let bench = Bench::new();
    for bit in 0..32 {
        let at = format::GENERATIONS_AT + u64::from(bench.slots[1].0) * 4;
        let slots = bench.flipped("generation", at, bit);
        assert_eq!(slots[1].state, SlotState::Torn, "bit {bit}");
        assert!(matches!((slots[0].state, slots[2].state), (SlotState::Ready(_), SlotState::Ready(_))));
    }
}

#[test]
fn any_flipped_bit_of_a_payload_is_noticed() {
    let bench = Bench::new();
    let entry = bench.pool.entry(bench.slots[1], Generation(11)).unwrap();
    let sum = || bench.pool.checksum(bench.slots[1].offset(), entry.length);
    assert_eq!(sum(), entry.checksum);
    for bit in 0..entry.length * 8 {
        bench.flip("data", bench.slots[1].offset(), bit);
        assert_ne!(sum(), entry.checksum, "bit {bit}");
        bench.flip("data", bench.slots[1].offset(), bit);
    }
    assert_eq!(sum(), entry.checksum);
}

#[test]
fn an_entry_in_another_slots_place_is_not_believed() {
    let bench = Bench::new();
    let (file, mut bytes) = (bench.home.file("table"), [0; format::ENTRY_BYTES as usize]);
    file.read_exact_at(&mut bytes, format::ENTRIES_AT).unwrap();
    file.write_all_at(&bytes, format::ENTRIES_AT + format::ENTRY_BYTES).unwrap();
    // Even if the generations agree.
    let mut generation = [0; 4];
    let generations = bench.home.file("generation");
    generations.read_exact_at(&mut generation, format::GENERATIONS_AT).unwrap();
    generations.write_all_at(&generation, format::GENERATIONS_AT + 4).unwrap();
    assert_eq!(recovered(&bench.pool)[1].state, SlotState::Torn);
}

#[test]
fn a_checksum_covers_every_byte_of_a_large_block_whatever_its_length() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    with_extent(&pool, MIB);
    let bytes: Vec<u8> = (0..MIB).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect();
    pool.write(0, &bytes);
    for len in [1, 4095, 16_384, 16_385, 100_000, MIB as usize] {
        assert_eq!(pool.checksum(0, len as u64), checksum(&bytes[..len]), "{len} bytes");
        let mut copy = vec![0; len];
        pool.read(0, &mut copy);
        assert!(copy == bytes[..len]);
    }
}
