//! Reserve, commit and abort, for engines that map the pool.

use forebay_core::key::BlockHash;
use forebay_core::store::CommitOutcome as Outcome;
use forebay_core::{Core, Error, Generation, Instance, NamespaceIndex, Result, SlotId};
use forebay_rpc::proto::{
    AbortRequest, CommitOutcome, CommitReply, CommitRequest, Done, GroupBlocks, Held, ReserveReply, ReserveRequest,
};

use super::{check_hashes, group_index};
use crate::state::{Shared, State};

/// Slots given in one event, each of which may cost an eviction of about 2 µs. A client that needs more asks again.
const SLOTS_PER_EVENT: usize = 64;
/// Blocks committed in one event: each reads its birth records and writes its entry, about 0.5 µs.
const COMMITS_PER_EVENT: usize = 128;

pub async fn reserve(shared: &Shared, request: ReserveRequest) -> Result<ReserveReply> {
    // Pending touches decide who is evicted, so they are applied first, in pieces.
    shared.work_off().await;
    let group = group_index(request.group)?;
    shared.event(|state| {
        if state.is_draining {
            return Ok(ReserveReply::default());
        }
        let (instance, member) = state.instances.of_engine(request.session)?;
        let namespace = member.session.as_ref().expect("found by its session").namespace(request.namespace)?;
        let count = (request.count as usize).min(SLOTS_PER_EVENT);
        let mut slots = Vec::with_capacity(count);
        state.core.reserve(instance, namespace, group, count, true, &mut slots);
        let (slots, generations) = slots.into_iter().map(|(slot, generation)| (slot.0, generation.0)).unzip();
        Ok(ReserveReply { slots, generations })
    })
}

/// Blocks are named in the request's order, so that parents come before children.
pub async fn commit(shared: &Shared, request: CommitRequest) -> Result<CommitReply> {
    check_size(shared, &request)?;
    let mut outcomes = Vec::new();
    for blocks in &request.groups {
        let named = named_slots(blocks)?;
        let mut before = if blocks.predecessor.is_empty() { None } else { Some(BlockHash::new(&blocks.predecessor)?) };
        for piece in named.chunks(COMMITS_PER_EVENT) {
            shared.event(|state| -> Result<()> {
                let (instance, member) = state.instances.of_engine(request.session)?;
                let namespace = member.session.as_ref().expect("found by its session").namespace(request.namespace)?;
                let group = group_index(blocks.group)?;
                let hashes: Vec<BlockHash> = piece.iter().map(|(hash, _)| *hash).collect();
                state.core.prepare_commits(namespace, group, &hashes);
                for (hash, at) in piece {
                    let outcome = commit_one(state, instance, namespace, group, *hash, before, *at);
                    outcomes.push(wire(outcome).into());
                    before = Some(*hash);
                }
                Ok(())
            })?;
            tokio::task::yield_now().await;
        }
    }
    Ok(CommitReply { outcomes })
}

/// One event for each piece of the list.
pub async fn abort(shared: &Shared, request: AbortRequest) -> Result<Done> {
    let mut slots = request.slots.chunks(Core::MAX_HELD_PER_EVENT);
    loop {
        let slots_now = slots.next().unwrap_or_default();
        shared.event(|state| abort_some(state, request.session, slots_now, request.are_unused))?;
        if slots.len() == 0 {
            return Ok(Done {});
        }
        tokio::task::yield_now().await;
    }
}

fn abort_some(state: &mut State, session: u64, slots: &[Held], are_unused: bool) -> Result<()> {
    let (instance, _) = state.instances.of_engine(session)?;
    for Held { slot, generation } in slots {
        let at = (SlotId(*slot), Generation(*generation));
        if are_unused { state.core.return_unused(instance, at) } else { state.core.abort(instance, at) }
    }
    Ok(())
}

pub fn wire(outcome: Outcome) -> CommitOutcome {
    match outcome {
        Outcome::Stored => CommitOutcome::CommitStored,
        Outcome::Duplicate => CommitOutcome::CommitDuplicate,
        Outcome::Orphan => CommitOutcome::CommitOrphan,
        Outcome::Incomplete => CommitOutcome::CommitIncomplete,
        Outcome::Lost => CommitOutcome::CommitLost,
    }
}

fn commit_one(
    state: &mut State,
    instance: Instance,
    namespace: NamespaceIndex,
    group: u16,
    hash: BlockHash,
    before: Option<BlockHash>,
    at: (SlotId, Generation),
) -> Outcome {
    let layout = state.core.layout(namespace).group(group);
    let born = layout.and_then(|layout| state.table.born(layout, at));
    state.core.commit(instance, namespace, group, hash, before, at, born)
}

/// Hashes with their slots, checked to be parallel.
fn named_slots(blocks: &GroupBlocks) -> Result<Vec<(BlockHash, (SlotId, Generation))>> {
    let hash_bytes = check_hashes(&blocks.hashes, blocks.hash_bytes)?;
    let count = blocks.hashes.len() / hash_bytes;
    if blocks.slots.len() != count || blocks.generations.len() != count {
        return Err(Error::invalid("a commit must name each slot once")
            .with("hashes", count)
            .with("slots", blocks.slots.len())
            .with("generations", blocks.generations.len()));
    }
    let slots = blocks.slots.iter().zip(&blocks.generations).map(|(s, g)| (SlotId(*s), Generation(*g)));
    blocks.hashes.chunks_exact(hash_bytes).zip(slots).map(|(hash, at)| Ok((BlockHash::new(hash)?, at))).collect()
}

fn check_size(shared: &Shared, request: &CommitRequest) -> Result<()> {
    let limit = shared.lock().config.limits.blocks_per_commit as usize;
    let blocks: usize = request.groups.iter().map(|blocks| blocks.slots.len()).sum();
    if blocks > limit {
        return Err(Error::invalid("the commit has too many blocks").with("blocks", blocks).with("limit", limit));
    }
    Ok(())
}
