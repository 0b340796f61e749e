//! Random lives of slots against a model, with restarts in between.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Act {
    MakeExtent { unit: u32, pages: u32 },
    ClearExtent { unit: u32 },
    Reserve { pick: usize },
    Ready { pick: usize, number: u64 },
    Fence { pick: usize },
    Free { pick: usize },
    Hold { pick: usize, holders: u64 },
    Restart,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        2 => (0..4u32, prop_oneof![Just(1u32), Just(3), Just(64), Just(512)]).prop_map(|(unit, pages)| Act::MakeExtent { unit, pages }),
        1 => (0..4u32).prop_map(|unit| Act::ClearExtent { unit }),
        6 => any::<usize>().prop_map(|pick| Act::Reserve { pick }),
        5 => (any::<usize>(), 1..99u64).prop_map(|(pick, number)| Act::Ready { pick, number }),
        2 => any::<usize>().prop_map(|pick| Act::Fence { pick }),
        4 => any::<usize>().prop_map(|pick| Act::Free { pick }),
        3 => (any::<usize>(), any::<u64>()).prop_map(|(pick, holders)| Act::Hold { pick, holders }),
        1 => Just(Act::Restart),
    ];
    proptest::collection::vec(act, 1..120)
}

/// The pool's expected answer about a slot.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Expected {
    generation: Generation,
    holders: u64,
    state: SlotState,
}

struct Model {
    home: Home,
    pool: Option<Pool>,
    extents: BTreeMap<u32, Extent>,
    /// Slots of the present extents that were ever used.
    slots: BTreeMap<SlotId, Expected>,
    /// The published number of every page, which outlives extents.
    published: BTreeMap<SlotId, Generation>,
    /// The epoch in which each slot was last reserved or became ready.
    epochs: BTreeMap<SlotId, u32>,
    next_generation: u32,
}

impl Model {
    fn new() -> Model {
        let home = Home::new();
        let pool = Some(home.pool(8 * MIB));
        let (extents, slots, published, epochs) = Default::default();
        let model = Model { home, pool, extents, slots, published, epochs, next_generation: 1 };
        (0..4).for_each(|unit| model.pool().populate_unit(unit).unwrap());
        model
    }

    fn pool(&self) -> &Pool {
        self.pool.as_ref().unwrap()
    }

    fn generation(&mut self) -> Generation {
        self.next_generation += 1;
        Generation(self.next_generation - 1)
    }

    /// One of the slots in a state that `fits`.
    fn pick(&self, pick: usize, fits: impl Fn(&Expected) -> bool) -> Option<SlotId> {
        let fitting: Vec<SlotId> =
            self.all().into_iter().filter(|(_, expected)| fits(expected)).map(|(slot, _)| slot).collect();
        (!fitting.is_empty()).then(|| fitting[pick % fitting.len()])
    }

    /// Every slot of every extent.
    fn all(&self) -> Vec<(SlotId, Expected)> {
        let geometry = self.pool().geometry();
        let slots =
            self.extents.values().flat_map(|extent| (0..geometry.slots(extent)).map(move |k| geometry.slot(extent, k)));
        slots
            .map(|slot| {
                let generation = self.published.get(&slot).copied().unwrap_or(Generation(0));
                let free = Expected { generation, holders: 0, state: SlotState::Free };
                (slot, self.slots.get(&slot).copied().unwrap_or(free))
            })
            .collect()
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::MakeExtent { unit, pages } if !self.extents.contains_key(&unit) => {
                let extent = Extent { first_unit: unit, units: 1, slot_bytes: u64::from(pages) * 4096 };
                self.pool().set_extent(&extent).unwrap();
                self.extents.insert(unit, extent);
            }
            Act::ClearExtent { unit } => self.clear_extent(unit),
            Act::Reserve { pick } => self.reserve(pick),
            Act::Ready { pick, number } => self.ready(pick, number),
            Act::Fence { pick } => self.fence(pick),
            Act::Free { pick } => self.free(pick),
            Act::Hold { pick, holders } => {
                if let Some(slot) = self.pick(pick, |expected| expected.state != SlotState::Free) {
                    self.pool().set_holders(slot, holders);
                    self.slots.get_mut(&slot).unwrap().holders = holders;
                }
            }
            Act::Restart => {
                self.pool = None;
                self.pool = Some(self.home.pool(8 * MIB));
                (0..4).for_each(|unit| self.pool().populate_unit(unit).unwrap());
                self.check();
            }
            Act::MakeExtent { .. } => {}
        }
    }

    fn clear_extent(&mut self, unit: u32) {
        let geometry = self.pool().geometry();
        let is_inside = |slot: &SlotId| geometry.unit_of(*slot) == unit;
        let is_empty = self.all().iter().filter(|(slot, _)| is_inside(slot)).all(|(_, e)| e.state == SlotState::Free);
        if is_empty && self.extents.remove(&unit).is_some() {
            self.pool().clear_extent(unit).unwrap();
            self.slots.retain(|slot, _| !is_inside(slot));
        }
    }

    fn reserve(&mut self, pick: usize) {
        let generation = self.generation();
        if let Some(slot) = self.pick(pick, |expected| expected.state == SlotState::Free) {
            self.pool().reserve(slot, generation);
            let epoch = self.pool().epoch();
            self.slots.insert(slot, Expected { generation, holders: 0, state: SlotState::Reserved { epoch } });
            self.epochs.insert(slot, epoch);
            self.published.insert(slot, generation);
        }
    }

    fn ready(&mut self, pick: usize, number: u64) {
        if let Some(slot) = self.pick(pick, |expected| matches!(expected.state, SlotState::Reserved { .. })) {
            let (entry, bytes) = block(number);
            self.pool().write(slot.offset(), &bytes);
            self.pool().ready(slot, self.published[&slot], &entry);
            self.slots.get_mut(&slot).unwrap().state = SlotState::Ready(entry);
            self.epochs.insert(slot, self.pool().epoch());
        }
    }

    fn fence(&mut self, pick: usize) {
        if let Some(slot) = self.pick(pick, |expected| expected.state != SlotState::Free) {
            self.pool().fence(slot);
            self.slots.get_mut(&slot).unwrap().state = SlotState::Reserved { epoch: self.epochs[&slot] };
        }
    }

    fn free(&mut self, pick: usize) {
        let generation = self.generation();
        if let Some(slot) = self.pick(pick, |expected| expected.state != SlotState::Free) {
            self.pool().free(slot, generation);
            self.slots.insert(slot, Expected { generation, holders: 0, state: SlotState::Free });
            self.published.insert(slot, generation);
        }
    }

    fn check(&self) {
        let pool = self.pool();
        assert_eq!(pool.recovered_extents(), self.extents.values().copied().collect::<Vec<_>>());
        assert!(pool.first_generation().0 >= self.next_generation.min(2) - 1);
        let shown: Vec<_> = recovered(pool)
            .into_iter()
            .inspect(|slot| {
                block_in(pool, slot);
            })
            .map(|slot| (slot.slot, Expected { generation: slot.generation, holders: slot.holders, state: slot.state }))
            .collect();
        assert_eq!(shown, self.all());
        let latest = self.published.values().map(|generation| generation.0).max().unwrap_or(0);
        assert!(pool.first_generation().0 > latest);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happened_a_restart_shows_it(acts in acts()) {
        let mut model = Model::new();
        acts.iter().for_each(|act| model.act(act));
        model.act(&Act::Restart);
    }
}
