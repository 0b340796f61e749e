//! Recovery: fills the core from the table of an earlier epoch.
//!
//! The daemon serves before blocks are verified: a recovered block is compared with its checksum at its first lookup.

use std::collections::HashMap;

use forebay_core::layout::Layout;
use forebay_core::namespace::Descriptor;
use forebay_core::recover::{Recovered, Recovery};
use forebay_core::tiers::TRANSFERS;
use forebay_core::{Instance, NamespaceId, NamespaceIndex, Result};
use forebay_io::pool::{InstanceRecord, NamespaceRecord, RecoveredSlot, RecoveryCursor, SlotState};

use crate::instances::Identity;
use crate::state::State;

/// Learns of the purges that an earlier daemon did not end, also if the pool was replaced: the disks keep their blocks.
pub fn restore_purges(state: &mut State) -> Result<()> {
    let pool = state.table.pool();
    state.purges.restore(&pool.purges()?, &pool.ended_purges()?);
    let under_way = state.purges.under_way();
    if !under_way.is_empty() {
        tracing::info!(namespaces = under_way.len(), "going on with purges of an earlier daemon");
    }
    under_way.iter().filter(|(_, places)| places.disks).for_each(|(namespace, _)| state.purge_disks(*namespace));
    Ok(())
}

/// The pool has no block of these any more.
pub fn end_purges_of_pool(state: &mut State) {
    let has_disks = state.tiers.has_own_disks();
    for (namespace, _) in state.purges.under_way() {
        state.purges.off_pool(state.table.pool(), namespace, has_disks);
    }
}

/// Rebuilds the core's whole state. A million blocks take about a second; the daemon serves nothing before that.
pub fn recover(state: &mut State) -> Result<()> {
    let mut namespaces = restore_namespaces(state)?;
    let pool = state.table.pool().clone();
    for (namespace, _) in state.purges.under_way().iter().filter(|(_, places)| places.pool) {
        // Which of its blocks were stored since the purge began is not known.
        namespaces.remove(namespace);
    }
    let mut slots: Vec<RecoveredSlot> = Vec::new();
    pool.recover(&mut RecoveryCursor::default(), usize::MAX, |slot| slots.push(slot));
    let has_transfers = slots.iter().any(|slot| slot.holders & TRANSFERS.bit() != 0);
    restore_instances(state, has_transfers)?;
    for unit in pool.unreadable_units() {
        // Without holders, no process can use anything there; with holders, the units stay out of use until the holders
        // are gone.
        if state.core.earlier() == 0 {
            pool.clear_extent(*unit)?;
        } else {
            state.core.exclude(*unit);
        }
    }
    for extent in pool.recovered_extents() {
        let is_restored = state.core.restore_extent(extent.slot_bytes, extent.first_unit, extent.units);
        assert!(is_restored, "the table admitted {extent:?}, the core does not");
    }
    restore_slots(state, slots, &namespaces);
    state.core.finish_restore();
    state.apply();
    Ok(())
}

fn restore_slots(state: &mut State, mut slots: Vec<RecoveredSlot>, names: &HashMap<NamespaceId, NamespaceIndex>) {
    // Oldest first, so that recency comes back.
    slots.sort_by_key(sequence);
    let (mut blocks, mut fenced, mut dropped) = (0u64, 0u64, 0u64);
    for slot in slots.iter().filter(|slot| slot.state != SlotState::Free) {
        state.table.recovered(sequence(slot));
        match state.core.restore(known(slot, names)) {
            Recovery::Block => blocks += 1,
            Recovery::Fenced => fenced += 1,
            Recovery::Dropped => {
                dropped += 1;
                state.table.pool().free(slot.slot, state.core.fresh_generation());
                state.table.pool().set_holders(slot.slot, 0);
            }
        }
    }
    tracing::info!(blocks, fenced, dropped, epoch = state.table.pool().epoch(), "recovered the pool");
}

fn known(slot: &RecoveredSlot, names: &HashMap<NamespaceId, NamespaceIndex>) -> Recovered {
    let key = match &slot.state {
        SlotState::Ready(entry) => {
            names.get(&entry.key.namespace).map(|index| (*index, entry.key.group, entry.key.hash))
        }
        SlotState::Free | SlotState::Reserved { .. } | SlotState::Torn => None,
    };
    Recovered { slot: slot.slot, generation: slot.generation, holders: slot.holders, key }
}

fn sequence(slot: &RecoveredSlot) -> u64 {
    match &slot.state {
        SlotState::Ready(entry) => entry.sequence,
        SlotState::Free | SlotState::Reserved { .. } | SlotState::Torn => 0,
    }
}

fn restore_namespaces(state: &mut State) -> Result<HashMap<NamespaceId, NamespaceIndex>> {
    let mut names = HashMap::new();
    for (number, record) in state.table.pool().namespaces()? {
        match restore_namespace(state, number, &record) {
            Ok(index) => {
                names.insert(record.id, index);
            }
            Err(error) => {
                tracing::warn!(namespace = %record.id, %error, "cannot read a namespace of the pool; its blocks are lost");
            }
        }
    }
    Ok(names)
}

fn restore_namespace(state: &mut State, number: u32, record: &NamespaceRecord) -> Result<NamespaceIndex> {
    let descriptor = Descriptor::from_text(&record.descriptor)?;
    let index = state.core.open_namespace(record.id, &Layout::from_bytes(&record.layout)?)?;
    state.namespaces.restore(number, record.id, descriptor, record.uid);
    Ok(index)
}

/// `has_transfers`: an earlier daemon was killed while its own disk was filling slots; earlier builds recorded the same
/// for shared stores. The slots stay fenced until the disk reports that the transfers are over. If no disk is
/// configured, no such report comes, and they stay fenced for good.
fn restore_instances(state: &mut State, has_transfers: bool) -> Result<()> {
    let mut earlier = if has_transfers || state.tiers.has_own_disks() { TRANSFERS.bit() } else { 0 };
    if has_transfers && !state.tiers.has_own_disks() {
        let hint = "start once with the earlier daemon's disks in `tier.ssd.disks`; if it had none, stop daemon and engines and \
                    remove the pool's directory";
        tracing::warn!(
            hint,
            "an earlier daemon was killed while its disks filled slots, and no disk is configured that could tell \
                        whether transfers are still in flight; these slots stay out of use"
        );
    }
    let mut records: HashMap<Instance, InstanceRecord> = state.table.pool().instances()?.into_iter().collect();
    // A live lock counts whether or not its record can be read.
    for instance in (0..TRANSFERS.0).map(Instance) {
        let record = records.remove(&instance);
        if state.is_mapping(instance) {
            let InstanceRecord { engine_id, ranks, incarnation, owner } = record.unwrap_or_default();
            let engine_id = String::from_utf8_lossy(&engine_id).into_owned();
            tracing::info!(instance = instance.0, engine_id, "workers from before the restart still map the pool");
            state.instances.restore(instance, Identity { engine_id, incarnation }, ranks, owner);
            earlier |= instance.bit();
        } else if record.is_some() {
            state.table.pool().clear_instance(instance)?;
        }
    }
    state.core.set_earlier(earlier);
    Ok(())
}
