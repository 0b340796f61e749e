//! Lookup and release.

use std::time::Instant;

use forebay_core::lookup::{Answer, LeaseId, Lookup, STATE_NOT_YET, STATE_READY};
use forebay_core::{Core, Error, ErrorKind, Instance, NamespaceIndex, Result};
use forebay_rpc::proto::{Done, GroupAnswer, GroupKeys, LookupReply, LookupRequest, ReleaseRequest};
use tokio::sync::Semaphore;

use super::{check_hashes, group_index};
use crate::insight::Seen;
use crate::state::{Shared, State};

/// Answers for all keys of all groups, and takes the lease. Long prompts are looked up in pieces, so that other
/// calls get in between.
pub async fn lookup(shared: &Shared, places: &Semaphore, request: LookupRequest) -> Result<LookupReply> {
    let start = Instant::now();
    let _place = places.try_acquire().map_err(|_| {
        Error::new(ErrorKind::Full, "too many lookups are waiting").hint("raise `limits.lookups_in_flight`")
    })?;
    check_size(shared, &request)?;
    let mut pending = begin(shared, &request)?;
    let mut groups = Vec::with_capacity(request.groups.len());
    for keys in &request.groups {
        let hash_bytes = check_hashes(&keys.hashes, keys.hash_bytes)?;
        let group = group_index(keys.group)?;
        let mut answer = Answer::default();
        for (piece, hashes) in keys.hashes.chunks(Core::MAX_KEYS_PER_EVENT * hash_bytes).enumerate() {
            if piece > 0 {
                tokio::task::yield_now().await;
            }
            let lookup = pending.lookup.as_mut().expect("taken only at the end");
            shared.event(|state| state.core.look(lookup, group, hashes, hash_bytes, &mut answer));
        }
        groups.push(GroupAnswer { states: answer.states, slots: answer.slots, generations: answer.generations });
    }
    let lookup = pending.lookup.take().expect("taken only here");
    let lease = shared.event(|state| {
        let lease = state.core.finish_lookup(lookup);
        // A session that ended meanwhile would never release it.
        if state.instances.of_session(request.session).is_err() {
            state.core.release(pending.instance, lease);
        }
        state.lookup_time.record(start.elapsed().as_micros() as u64);
        tell(state, pending.namespace, request.groups, &groups, start);
        lease
    });
    Ok(LookupReply { lease: lease.0, groups })
}

/// Hands the keys to those who look at them later. Not of lookups that will come again, because something is on its
/// way: they would count twice.
fn tell(state: &State, namespace: NamespaceIndex, asked: Vec<GroupKeys>, groups: &[GroupAnswer], at: Instant) {
    if groups.iter().any(|answer| answer.states.contains(&STATE_NOT_YET)) {
        return;
    }
    for (keys, answer) in asked.into_iter().zip(groups) {
        let Ok(group) = group_index(keys.group) else { continue };
        let Some(layout) = state.core.layout(namespace).group(group) else { continue };
        if keys.hashes.is_empty() {
            continue;
        }
        state.insight.note(Seen {
            at,
            namespace,
            id: state.core.namespace_id(namespace),
            group,
            block_tokens: layout.tokens_per_block,
            block_bytes: layout.slot_bytes(),
            attention: layout.attention,
            hashes: keys.hashes,
            hash_bytes: keys.hash_bytes as usize,
            hits: answer.states.iter().filter(|state| **state == STATE_READY).count(),
        });
    }
}

pub fn release(shared: &Shared, request: ReleaseRequest) -> Result<Done> {
    shared.event(|state| {
        let (instance, _) = state.instances.of_session(request.session)?;
        request.leases.iter().for_each(|lease| state.core.release(instance, LeaseId(*lease)));
        Ok(Done {})
    })
}

/// A lookup under way; dropped with what it pinned when the call is cancelled.
struct Pending {
    shared: Shared,
    instance: Instance,
    namespace: NamespaceIndex,
    lookup: Option<Lookup>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(lookup) = self.lookup.take() {
            self.shared.event(|state| state.core.cancel_lookup(lookup));
        }
    }
}

fn begin(shared: &Shared, request: &LookupRequest) -> Result<Pending> {
    shared.event(|state| {
        let limit = u64::from(state.config.limits.leases_per_session);
        let (instance, member) = state.instances.of_session(request.session)?;
        let maps_pool = member.ranks > 0;
        let namespace = member.session.as_ref().expect("found by its session").namespace(request.namespace)?;
        if state.core.lease_count(instance) >= limit {
            return Err(Error::new(ErrorKind::Full, "the session holds too many leases")
                .with("limit", limit)
                .hint("raise `limits.leases_per_session`, or release leases"));
        }
        // Whoever maps nothing has no use for offsets, and asks without taking a lease.
        let lookup = state.core.begin_lookup(maps_pool.then_some(instance), namespace);
        Ok(Pending { shared: shared.clone(), instance, namespace, lookup: Some(lookup) })
    })
}

fn check_size(shared: &Shared, request: &LookupRequest) -> Result<()> {
    let limit = shared.lock().config.limits.keys_per_lookup as usize;
    let keys: usize = request.groups.iter().map(|keys| keys.hashes.len() / keys.hash_bytes.max(1) as usize).sum();
    if keys > limit {
        return Err(Error::invalid("the lookup has too many keys").with("keys", keys).with("limit", limit));
    }
    Ok(())
}
