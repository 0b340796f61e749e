//! Purge: from the pool at once, then from the tiers, and from shared stores if the client asks for that.

use std::time::{Duration, Instant};

use forebay_core::namespace::Descriptor;
use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_rpc::proto::{PurgeReply, PurgeRequest, PurgedPlace};

use crate::state::{Shared, State};
use crate::tasks::purge_shared::{Emptied, Emptying};

/// A disk removes thousands of blocks a second; one that is sick is not waited for.
const OWN_TIERS: Duration = Duration::from_secs(10);

/// Lookups miss at once. The reply waits until all blocks that have no holder are freed in the pool and removed from
/// the tiers. Failures in shared stores, or on the way to them, are in the reply, and do not stop the rest.
pub async fn purge(shared: &Shared, request: PurgeRequest) -> Result<PurgeReply> {
    let mut reply = PurgeReply { reached_stores: request.shared_stores, ..PurgeReply::default() };
    let mut purged = Vec::new();
    let (ids, stores) = shared.event(|state| -> Result<_> {
        let ids = named(state, &request)?;
        let stores = request.shared_stores.then(|| begin(state, shared, &request, &ids)).transpose()?;
        for id in &ids {
            let Some((gone, old, new)) = state.core.purge(*id) else { continue };
            state.instances.rename(old, new);
            reply.purged_blocks += gone.blocks;
            reply.purged_bytes += gone.bytes;
            purged.push(old);
        }
        Ok((ids, stores))
    })?;
    shared.work_off().await;
    let emptied = async {
        match stores {
            Some(stores) => stores.run().await,
            None => Vec::new(),
        }
    };
    let (own, emptied) = tokio::join!(still_on_own_tiers(shared, &ids), emptied);
    if request.shared_stores {
        let own = own.into_iter().map(|tier| PurgedPlace { tier: tier.to_owned(), ..failed(&still_on(tier)) });
        reply.places = emptied.into_iter().map(place).chain(own).collect();
    } else if let Some(tier) = own.first() {
        return Err(still_on(tier));
    }
    reply.namespace_ids = ids.iter().map(|id| id.0.to_be_bytes().to_vec()).collect();
    reply.held_blocks = shared.event(|state| purged.iter().map(|old| state.core.fenced_of(*old)).sum());
    reply.purged_blocks -= reply.held_blocks.min(reply.purged_blocks);
    tracing::info!(blocks = reply.purged_blocks, held = reply.held_blocks, "purged");
    Ok(reply)
}

/// Nothing of the namespaces goes to a shared store or comes up from one from now on.
fn begin(state: &mut State, shared: &Shared, request: &PurgeRequest, ids: &[NamespaceId]) -> Result<Emptying> {
    if ids.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "this daemon knows no namespace of the tenant")
            .with("tenant", &request.tenant)
            .hint(
                "purge its namespaces with `--namespace`: `forebay inspect` lists them on hosts that served the tenant",
            ));
    }
    if request.timeout_seconds == 0 {
        return Err(Error::invalid("a purge of shared stores needs a timeout").hint("give a timeout greater than 0"));
    }
    let deadline = Instant::now() + Duration::from_secs(request.timeout_seconds.into());
    Emptying::begin(state, shared, ids.iter().copied().collect(), deadline)
}

/// Waits, for a limited time, until this host's own tiers have no block of these namespaces. Returns the tiers that
/// still have some.
async fn still_on_own_tiers(shared: &Shared, ids: &[NamespaceId]) -> Vec<&'static str> {
    let start = Instant::now();
    loop {
        let purging = shared.lock().tiers.purging(ids);
        if purging.is_empty() || start.elapsed() > OWN_TIERS {
            return purging;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn still_on(tier: &str) -> Error {
    let says = "the pool is purged, but blocks of the namespace are still on a tier";
    let error = Error::new(ErrorKind::Timeout, says).with("tier", tier).with("seconds", OWN_TIERS.as_secs());
    error
        .hint("none is served, and their removal continues; purge again before a restart to be sure that they are gone")
}

fn place(emptied: Emptied) -> PurgedPlace {
    let Emptied { tier, place, blocks, values, outcome } = emptied;
    let outcome = outcome.err().map_or_else(PurgedPlace::default, |error| failed(&error));
    PurgedPlace { tier: tier.to_owned(), place, blocks, values, ..outcome }
}

fn failed(error: &Error) -> PurgedPlace {
    let hint = error.hint_text().unwrap_or("see the daemon's log").to_owned();
    PurgedPlace { error: error.to_string(), hint, ..PurgedPlace::default() }
}

fn named(state: &State, request: &PurgeRequest) -> Result<Vec<NamespaceId>> {
    if !request.namespace_id.is_empty() {
        let id: [u8; 16] = request.namespace_id.as_slice().try_into().map_err(|_| {
            Error::invalid("a namespace id must have 16 bytes").with("bytes", request.namespace_id.len())
        })?;
        return Ok(vec![NamespaceId(u128::from_be_bytes(id))]);
    }
    if request.tenant.is_empty() && !request.all_tenants_named_empty {
        return Err(Error::invalid("a purge must name a namespace or a tenant"));
    }
    let is_its = |descriptor: &Descriptor| descriptor.tenant() == request.tenant;
    Ok(state.descriptors.values().filter(|(_, descriptor)| is_its(descriptor)).map(|(id, _)| *id).collect())
}
