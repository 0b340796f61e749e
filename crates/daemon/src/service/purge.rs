//! Purge: from the pool at once, then from the tiers, and from shared stores if the client asks for that.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forebay_core::namespace::Descriptor;
use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_rpc::PURGE_OF_DISKS;
use forebay_rpc::proto::{PurgeReply, PurgeRequest, PurgedPlace};

use crate::state::{Shared, State};
use crate::tasks::purge_shared::{Emptied, Emptying};
use crate::tiers::Paused;

/// Purging a hundred hosts one after the other takes hours at most.
const LONGEST_PAUSE_SECONDS: u32 = 24 * 60 * 60;
/// Each is written down and begun, at about two microseconds.
const NAMESPACES_PER_EVENT: usize = 64;

/// Lookups miss at once. The reply waits until all blocks that have no holder are freed in the pool and removed from
/// the tiers. Failures in shared stores, or on the way to them, are in the reply, and do not stop the rest.
pub async fn purge(shared: &Shared, request: PurgeRequest) -> Result<PurgeReply> {
    check_pause(&request)?;
    let PurgeRequest { shared_stores: reached_stores, pause_seconds, .. } = request;
    let mut reply = PurgeReply { reached_stores, pause_seconds, ..PurgeReply::default() };
    let mut purged = Vec::new();
    let (ids, stores, known, removed_before) = shared.event(|state| -> Result<_> {
        let ids = named(state, &request)?;
        let is_known = |id: &NamespaceId| state.knows(*id);
        let known: Vec<NamespaceId> = ids.iter().copied().filter(is_known).collect();
        let stores = request.shared_stores.then(|| begin(state, shared, &request, &ids)).transpose()?;
        Ok((ids, stores, known, state.tiers.purged_blocks()))
    })?;
    let _pausing = stores.as_ref().and_then(|_| Pausing::of(shared, &request, &ids));
    for (number, piece) in ids.chunks(NAMESPACES_PER_EVENT).enumerate() {
        if number > 0 {
            tokio::task::yield_now().await;
        }
        let begun = shared.event(|state| -> Result<Vec<_>> {
            let begun = piece.iter().map(|id| state.begin_purge(*id)).collect::<Result<Vec<_>>>()?;
            Ok(begun.into_iter().flatten().collect())
        })?;
        for (gone, old) in begun {
            reply.purged_blocks += gone.blocks;
            reply.purged_bytes += gone.bytes;
            purged.push(old);
        }
    }
    shared.work_off().await;
    let emptied = async {
        match stores {
            Some(stores) => stores.run().await,
            None => Vec::new(),
        }
    };
    let wait = match request.wait_seconds {
        0 => PURGE_OF_DISKS,
        seconds => Duration::from_secs(seconds.into()),
    };
    let is_of_tenant = request.namespace_id.is_empty();
    let begun = Instant::now();
    let (own, emptied) = tokio::join!(still_on_own_tiers(shared, &ids, is_of_tenant, wait), emptied);
    let (purging, unnamed, missing) = {
        let mut state = shared.lock();
        // Of a purge at the same time too: the tiers count for all.
        let removed = state.tiers.purged_blocks().saturating_sub(removed_before);
        reply.disk_blocks = state.tiers.has_own_disks().then_some(removed);
        // Looked for only now: a tier that was being opened when the purge began had told of nothing.
        let missing = state.tiers.missing_disks();
        (state.tiers.purging(&ids), if is_of_tenant { unnamed(&state, &ids) } else { Vec::new() }, missing)
    };
    let told = |tier| {
        let error = match purging.contains(&tier) {
            true => still_on(tier, begun.elapsed()),
            false => not_whole(tier, begun.elapsed()),
        };
        if missing.is_empty() { error } else { error.with("missing", missing.join(", ")) }
    };
    let mut own: Vec<(&str, Error)> = own.into_iter().map(|tier| (tier, told(tier))).collect();
    own.extend(unnamed_error(&unnamed).map(|error| ("disks", error)));
    let is_complete = own.is_empty() && emptied.iter().all(|emptied| emptied.outcome.is_ok());
    reply.held_blocks = shared.event(|state| {
        let is_everywhere = request.shared_stores || state.tiers.shared_stores().next().is_none();
        ids.iter().filter(|_| is_complete && is_everywhere).for_each(|id| state.namespaces.recall(*id));
        purged.iter().map(|old| state.core.fenced_of(*old)).sum()
    });
    reply.purged_blocks -= reply.held_blocks.min(reply.purged_blocks);
    let only = ids.first().filter(|_| !is_of_tenant).map(tracing::field::display);
    tracing::info!(
        tenant = is_of_tenant.then_some(&request.tenant),
        namespace = only,
        namespaces = ids.len(),
        blocks = reply.purged_blocks,
        held = reply.held_blocks,
        is_complete,
        pause_seconds = (request.pause_seconds > 0).then_some(request.pause_seconds),
        "purged"
    );
    if let Some((tier, error)) = own.first() {
        shared.lock().purges.note_told(&ids);
        tracing::warn!(tier, %error, hint = error.hint_text(), "a purge is not complete");
    }
    if request.shared_stores {
        let own = own.into_iter().map(|(tier, error)| PurgedPlace { tier: tier.to_owned(), ..failed(&error) });
        reply.places = emptied.into_iter().map(place).chain(own).collect();
    } else if !own.is_empty() {
        let error = own.swap_remove(0).1.with("pool_blocks", reply.purged_blocks);
        return Err(reply.disk_blocks.into_iter().fold(error, |error, blocks| error.with("disk_blocks", blocks)));
    }
    reply.namespace_ids = known.iter().map(|id| id.0.to_be_bytes().to_vec()).collect();
    Ok(reply)
}

fn check_pause(request: &PurgeRequest) -> Result<()> {
    let seconds = request.pause_seconds;
    if seconds > 0 && !request.shared_stores {
        return Err(Error::invalid("only a purge of shared stores can pause")
            .hint("ask for the shared stores too, or leave the pause out"));
    }
    if seconds > LONGEST_PAUSE_SECONDS {
        return Err(Error::invalid("the pause is too long")
            .with("seconds", seconds)
            .with("limit", LONGEST_PAUSE_SECONDS)
            .hint("a pause has to last until the last host is purged"));
    }
    Ok(())
}

/// A purge with a pause that has begun. Its drop is the purge's end, from which the pause's time counts.
struct Pausing {
    shared: Shared,
    paused: Paused,
    lasts: Duration,
}

impl Pausing {
    fn of(shared: &Shared, request: &PurgeRequest, ids: &[NamespaceId]) -> Option<Pausing> {
        let paused = paused(request, ids)?;
        Some(Pausing { shared: shared.clone(), paused, lasts: Duration::from_secs(request.pause_seconds.into()) })
    }
}

impl Drop for Pausing {
    fn drop(&mut self) {
        let end = Instant::now() + self.lasts;
        self.shared.event(|state| state.tiers.end_paused_purge(&self.paused, end));
    }
}

/// What is to pause; none if the request asks for no pause.
fn paused(request: &PurgeRequest, ids: &[NamespaceId]) -> Option<Paused> {
    let paused = match ids {
        [id] if !request.namespace_id.is_empty() => Paused::Namespace(*id),
        _ => Paused::Tenant(request.tenant.clone()),
    };
    Some(paused).filter(|_| request.pause_seconds > 0)
}

/// Nothing of the namespaces goes to a shared store or comes up from one from now on.
fn begin(state: &mut State, shared: &Shared, request: &PurgeRequest, ids: &[NamespaceId]) -> Result<Emptying> {
    let paused = paused(request, ids);
    paused.iter().try_for_each(|paused| state.tiers.check_pause(paused))?;
    if ids.is_empty() {
        if let Some(paused) = paused {
            // An engine may open one before all hosts are purged.
            state.tiers.begin_paused_purge(paused.clone(), ids);
            let end = Instant::now() + Duration::from_secs(request.pause_seconds.into());
            state.tiers.end_paused_purge(&paused, end);
        }
        if let Some(tier) = state.tiers.own_not_whole().next() {
            return Err(not_whole(tier, Duration::ZERO));
        }
        if let Some(error) = unnamed_error(&unnamed(state, ids)) {
            return Err(error);
        }
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
    let emptying = Emptying::begin(state, shared, ids.iter().copied().collect(), deadline)?;
    paused.into_iter().for_each(|paused| state.tiers.begin_paused_purge(paused, ids));
    Ok(emptying)
}

/// Waits, for a limited time, until this host's own tiers have no block of these namespaces, and, for a tenant, until
/// it is known which namespaces they have; not for tiers from which nothing goes. Returns the tiers of which that is
/// not so. The purge goes on whether or not anybody waits for it.
async fn still_on_own_tiers(
    shared: &Shared,
    ids: &[NamespaceId],
    is_of_tenant: bool,
    wait: Duration,
) -> Vec<&'static str> {
    let start = tokio::time::Instant::now();
    let (mut last, mut moved) = (None, start);
    loop {
        let (purging, progress) = {
            let tiers = &shared.lock().tiers;
            let mut purging = tiers.purging(ids);
            let unknown = tiers.own_not_whole().filter(|tier| is_of_tenant && !purging.contains(tier));
            let unknown: Vec<&str> = unknown.collect();
            purging.extend(unknown);
            (purging, tiers.purge_progress())
        };
        if last.as_ref() != Some(&progress) {
            last = Some(progress);
            moved = tokio::time::Instant::now();
        }
        if purging.is_empty() || start.elapsed() > wait || moved.elapsed() > PURGE_OF_DISKS {
            return purging;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn still_on(tier: &str, waited: Duration) -> Error {
    let says = "the pool is purged, but blocks of the namespace are still on a tier";
    let error = Error::new(ErrorKind::Timeout, says).with("tier", tier).with("seconds", waited.as_secs());
    error.hint(
        "the daemon serves none of them and continues the removal, also after a restart: `forebay inspect` says how \
         far it is",
    )
}

fn not_whole(tier: &str, waited: Duration) -> Error {
    let says = "the pool is purged, but a tier is not open, or a disk of it is missing: what it holds of the tenant is not known";
    let error = Error::new(ErrorKind::Timeout, says).with("tier", tier).with("seconds", waited.as_secs());
    error.hint("purge again when `forebay inspect` shows the tier with all its disks")
}

/// Namespaces on this host's disks, but for `purged`, whose descriptors went with an earlier pool or were given up
/// before a restart.
fn unnamed(state: &State, purged: &[NamespaceId]) -> Vec<NamespaceId> {
    let named: BTreeSet<NamespaceId> = state.namespaces.known().chain(purged.iter().copied()).collect();
    state.tiers.namespaces_found().difference(&named).copied().collect()
}

fn unnamed_error(unnamed: &[NamespaceId]) -> Option<Error> {
    const SHOWN: usize = 4;
    let says = "what this daemon knows of the tenant is purged, but disks of this host hold namespaces whose tenant is not known";
    let mut shown: Vec<String> = unnamed.iter().take(SHOWN).map(ToString::to_string).collect();
    if unnamed.len() > SHOWN {
        shown.push("…".to_owned());
    }
    let hint = "these namespaces were written before the pool was lost, or have given up their places to others: start \
                the tenant's engines once and purge again, or purge namespaces with `--namespace`";
    let error = Error::new(ErrorKind::NotFound, says).with("namespaces", shown.join(", "));
    (!unnamed.is_empty()).then(|| error.with("count", unnamed.len()).hint(hint))
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
            Error::invalid("a namespace id must have 16 bytes")
                .with("bytes", request.namespace_id.len())
                .hint("give the whole id, as `inspect` shows it: 32 hexadecimal digits")
        })?;
        return Ok(vec![NamespaceId(u128::from_be_bytes(id))]);
    }
    if request.tenant.is_empty() && !request.all_tenants_named_empty {
        return Err(Error::invalid("a purge must name a namespace or a tenant"));
    }
    if Descriptor::new([(Descriptor::TENANT.to_owned(), request.tenant.clone())]).is_err() {
        return Err(Error::invalid("no tenant has a name that long")
            .with("bytes", request.tenant.len())
            .hint("name a tenant that `forebay inspect` shows"));
    }
    Ok(state.namespaces.of_tenant(&request.tenant))
}
