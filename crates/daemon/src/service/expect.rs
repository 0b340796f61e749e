//! The engine's waiting queue, as a hint for evictions and promotions.

use forebay_core::{Core, Error, ErrorKind, Result};
use forebay_rpc::proto::{Done, ExpectRequest, GroupKeys, Waiting};

use super::{check_hashes, group_index};
use crate::instances::Session;
use crate::state::{Shared, State};
use crate::tick::work_off;

/// One event for all that wait no more, and one for each request that waits now; then what they want begins to come up.
pub async fn expect(shared: &Shared, request: ExpectRequest) -> Result<Done> {
    shared.event(|state| meet(state, request.session, &request.met))?;
    for waiting in &request.waiting {
        tokio::task::yield_now().await;
        shared.event(|state| note(state, request.session, request.namespace, waiting))?;
    }
    work_off(shared).await;
    Ok(Done {})
}

fn meet(state: &mut State, session: u64, met: &[u64]) -> Result<()> {
    let (instance, member) = state.instances.of_session(session)?;
    let known = member.session.as_mut().expect("found by its session");
    let ids = met.iter().filter_map(|request| known.waiting.remove(request)).flatten();
    ids.for_each(|id| state.core.met(instance, id));
    Ok(())
}

fn note(state: &mut State, session: u64, namespace: u32, waiting: &Waiting) -> Result<()> {
    let (instance, member) = state.instances.of_session(session)?;
    let known = member.session.as_mut().expect("found by its session");
    let namespace = known.namespace(namespace)?;
    if known.waiting.len() >= Session::MAX_WAITING && !known.waiting.contains_key(&waiting.request) {
        return Err(Error::new(ErrorKind::Full, "the session tells of too many waiting requests")
            .with("limit", Session::MAX_WAITING)
            .hint("tell of those that are served next, and say which were met"));
    }
    let ids = known.waiting.entry(waiting.request).or_default();
    ids.drain(..).for_each(|id| state.core.met(instance, id));
    for GroupKeys { group, hash_bytes, hashes } in &waiting.groups {
        let (hash_bytes, group) = (check_hashes(hashes, *hash_bytes)?, group_index(*group)?);
        let first = &hashes[..hashes.len().min(Core::MAX_KEYS_PER_EVENT * hash_bytes)];
        ids.push(state.core.expect(instance, namespace, group, first, hash_bytes));
    }
    Ok(())
}
