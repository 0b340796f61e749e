//! The calls for hints: the keys of requests in the engine's queue, for evictions and prefetch.

use forebay_core::layout::Attention;
use forebay_core::{Core, Error, ErrorKind, PackedKeys, Result};
use forebay_rpc::proto::{Done, GroupKeys, HintRequest, QueueHint};

use super::{check_hashes, group_index};
use crate::instances::Session;
use crate::state::{Shared, State};

/// One event for each piece of the list of requests that wait no more, and one for each request that waits now; then
/// their prefetches begin.
pub async fn hint(shared: &Shared, request: HintRequest) -> Result<Done> {
    for withdrawn in request.withdrawn.chunks(Session::MAX_WAITING) {
        shared.event(|state| withdraw(state, request.session, withdrawn))?;
        tokio::task::yield_now().await;
    }
    for hint in &request.hints {
        tokio::task::yield_now().await;
        shared.event(|state| note(state, request.session, request.namespace, hint))?;
    }
    shared.work_off().await;
    Ok(Done {})
}

fn withdraw(state: &mut State, session: u64, withdrawn: &[u64]) -> Result<()> {
    let (instance, member) = state.instances.of_engine(session)?;
    let known = member.session.as_mut().expect("found by its session");
    let ids = withdrawn.iter().filter_map(|request| known.hints.remove(request)).flatten();
    ids.for_each(|id| state.core.withdraw_hint(instance, id));
    Ok(())
}

fn note(state: &mut State, session: u64, handle: u32, hint: &QueueHint) -> Result<()> {
    let (instance, member) = state.instances.of_engine(session)?;
    let known = member.session.as_mut().expect("found by its session");
    let namespace = known.namespace(handle)?;
    if known.hints.len() >= Session::MAX_WAITING && !known.hints.contains_key(&hint.request) {
        return Err(Error::new(ErrorKind::Full, "the session has sent too many queue hints")
            .with("limit", Session::MAX_WAITING)
            .hint("send hints for the requests that run next, and withdraw the hints of those that have run"));
    }
    let ids = known.hints.entry(hint.request).or_default();
    ids.drain(..).for_each(|id| state.core.withdraw_hint(instance, id));
    // Groups of full attention say how much of a windowed one is needed.
    let mut full = Vec::new();
    for GroupKeys { group, hash_bytes, hashes } in &hint.groups {
        let (hash_bytes, group) = (check_hashes(hashes, *hash_bytes)?, group_index(*group)?);
        let hashes = &hashes[..hashes.len().min(Core::MAX_KEYS_PER_EVENT * hash_bytes)];
        let window = known.window(handle, group);
        let id = if window > 0 && !full.is_empty() {
            state.core.hint_window(instance, PackedKeys { namespace, group, hashes, hash_bytes }, window, &full)
        } else {
            state.core.hint(instance, namespace, group, hashes, hash_bytes)
        };
        let layout = state.core.layout(namespace).group(group);
        if layout.is_some_and(|layout| layout.attention == Attention::Full) {
            full.push((id, group));
        }
        known.hints.entry(hint.request).or_default().push(id);
    }
    Ok(())
}
