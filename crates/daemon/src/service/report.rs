//! The call that reports what the daemon holds.

use std::time::{Duration, Instant};

use forebay_core::tier::Health as Judged;
use forebay_core::{Instance, Result};
use forebay_io::StoreReport;
use forebay_io::pool::{HugePageReport, core_quota};
use forebay_io::ssd::DiskReport;
use forebay_rpc::proto::{
    ClassInfo, DiskInfo, GroupInfo, InspectReply, NamespaceInfo, NodeBytes, PauseInfo, SessionInfo, StoreInfo,
    TierInfo, TierPurge, UserInfo,
};

use tokio::sync::Semaphore;

use crate::clients::{Clients, UserReport};
use crate::health::Health;
use crate::instances::Member;
use crate::state::{Shared, State};
use crate::tiers::{Paused, PurgeReport};
use crate::turns::{QueueTime, one_at_a_time};

pub async fn inspect(shared: &Shared, clients: &Clients) -> Result<InspectReply> {
    let users = clients.reports().into_iter().map(user).collect();
    let pages = pages(shared).await?;
    let (queue_time, core_quota) = cores(shared).await;
    Ok(shared.event(|state| {
        let held = state.core.held();
        InspectReply {
            boot_id: state.boot_id,
            pool_id: state.table.pool().id().to_be_bytes().to_vec(),
            capacity_bytes: state.core.capacity_bytes(),
            populated_bytes: state.core.populated_bytes(),
            huge_bytes: pages.huge_bytes,
            namespaces: namespaces(state),
            sessions: state.instances.iter().map(|(instance, member)| session(state, instance, member)).collect(),
            classes: classes(state),
            pinned_bytes: held.pinned_bytes + held.reserved_bytes,
            fenced_bytes: held.fenced_bytes,
            tiers: state.tiers.reports(&state.core).iter().map(tier).collect(),
            saved_tokens: state.saved.tokens,
            saved_prefill_us: state.saved.prefill_us,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: state.revision.to_owned(),
            policy: state.config.pool.policy.name().to_owned(),
            uptime_seconds: state.started.elapsed().as_secs(),
            keys: state.core.stats().keys,
            hits: state.core.stats().hits,
            users,
            used_bytes: state.core.classes().iter().map(|class| class.used * class.slot_bytes).sum(),
            pool_trouble: Health::of(state).without_memory().unwrap_or_default(),
            core_wait_us: queue_time.waited.as_micros() as u64,
            runs: queue_time.runs,
            core_quota,
            pauses: state.tiers.pauses(Instant::now()).map(pause).collect(),
            nodes: pages.nodes.iter().map(|&(node, bytes)| NodeBytes { node, bytes }).collect(),
        }
    }))
}

/// How long the deciding thread waited for a core, and how many cores the daemon may use; 0 for no limit. Both stand in
/// files of the kernel, one of which lists all mounts: they are not read on the deciding thread.
async fn cores(shared: &Shared) -> (QueueTime, f64) {
    static READ: Semaphore = Semaphore::const_new(1);
    let turns = shared.turns().clone();
    // If the files cannot be read, there is no limit to tell of.
    one_at_a_time(&READ, move || (turns.queue_time(), core_quota().ok().flatten().unwrap_or(0.0))).await
}

/// Of the pool. A walk over page tables goes on when its caller has gone, so there is one at a time; the next finds its
/// result.
pub async fn pages(shared: &Shared) -> Result<HugePageReport> {
    static WALK: Semaphore = Semaphore::const_new(1);
    let pool = shared.lock().table.pool().clone();
    match pool.is_counted() {
        true => pool.huge_page_report(),
        false => one_at_a_time(&WALK, move || pool.huge_page_report()).await,
    }
}

fn user(report: UserReport) -> UserInfo {
    let UserReport { uid, connections, sessions, calls, bytes, lent_bytes, refused } = report;
    let refused = refused.into_iter().filter(|(_, count)| *count > 0);
    let refused = refused.map(|(limit, count)| (limit.to_owned(), count)).collect();
    UserInfo { uid, connections, sessions, calls, bytes, lent_bytes, refused }
}

fn pause((paused, left): (&Paused, Option<Duration>)) -> PauseInfo {
    let info = PauseInfo { seconds: left.map(|left| left.as_secs()), ..PauseInfo::default() };
    match paused {
        Paused::Tenant(tenant) => PauseInfo { tenant: tenant.clone(), ..info },
        Paused::Namespace(id) => PauseInfo { namespace_id: id.0.to_be_bytes().to_vec(), ..info },
    }
}

fn namespaces(state: &State) -> Vec<NamespaceInfo> {
    let reports = state.core.namespaces().into_iter().map(|report| {
        let fields = state.descriptor(report.id).into_iter().flat_map(|descriptor| descriptor.fields());
        let group = |&(group, block_bytes, ready_blocks): &(u16, u64, u64)| GroupInfo {
            group: group.into(),
            block_bytes,
            ready_blocks,
        };
        NamespaceInfo {
            namespace_id: report.id.0.to_be_bytes().to_vec(),
            fields: fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            groups: report.groups.iter().map(group).collect(),
        }
    });
    reports.collect()
}

fn session(state: &State, instance: Option<Instance>, member: &Member) -> SessionInfo {
    let held = instance.map(|instance| state.core.holdings(instance));
    let (leases, leased_blocks, reserved_blocks) = held.unwrap_or_default();
    SessionInfo {
        session: member.session.as_ref().map_or(0, |session| session.id),
        engine_id: member.identity.engine_id.clone(),
        instance: instance.map(|instance| instance.0.into()),
        ranks: member.ranks,
        attached_ranks: member.workers.len() as u32,
        leases,
        leased_blocks,
        reserved_blocks,
        is_connected: member.session.is_some(),
        saved_tokens: member.saved.tokens,
        saved_prefill_us: member.saved.prefill_us,
        registered_bytes: member.workers.values().filter_map(|worker| worker.registered_bytes).min(),
    }
}

fn tier(report: &crate::tiers::Report) -> TierInfo {
    let core = report.core;
    let (state, why) = report.standing.told();
    TierInfo {
        name: report.name.to_owned(),
        state: state.to_owned(),
        why: why.to_owned(),
        blocks: core.blocks,
        loading_blocks: core.loading_blocks,
        late_bytes: core.late_bytes,
        waiting_blocks: core.waiting_blocks,
        storing_blocks: core.storing_blocks,
        promoted_blocks: core.stats.promoted,
        hits: core.stats.hits,
        touched_blocks: core.stats.touches,
        lost_blocks: core.stats.lost,
        stored_blocks: report.stored_blocks(),
        evicted_blocks: core.stats.evicted,
        disks: report.disks.iter().map(disk).collect(),
        stores: report.stores.iter().map(store).collect(),
        purge: purge(&report.purge),
    }
}

fn purge(report: &PurgeReport) -> Option<TierPurge> {
    let PurgeReport { namespaces, removed_of_these, walked_ratio, .. } = *report;
    (namespaces > 0).then_some(TierPurge { namespaces, removed_blocks: removed_of_these, walked_ratio })
}

fn store(report: &StoreReport) -> StoreInfo {
    StoreInfo {
        name: report.name.clone(),
        is_healthy: report.health == Judged::Healthy,
        trouble: report.trouble.clone().unwrap_or_default(),
        trouble_age_seconds: report.trouble_age.map(|age| age.as_secs()),
        refuses_writes: report.refuses_writes.clone().unwrap_or_default(),
        refuses_reads: report.refuses_reads.clone().unwrap_or_default(),
        hint: report.hint.clone().unwrap_or_default(),
        connections: report.connections,
        used_bytes: report.used_bytes,
        capacity_bytes: report.capacity_bytes,
        hanging_threads: report.hanging_threads,
        is_sweeper: report.is_sweeper,
        events: report.events.iter().map(|(event, count)| (event.to_string(), *count)).collect(),
    }
}

fn disk(report: &DiskReport) -> DiskInfo {
    let segment_bytes = report.geometry.segment_bytes;
    DiskInfo {
        name: report.name.clone(),
        engine: report.engine.to_owned(),
        engine_why: report.engine_why.clone(),
        is_direct: report.is_direct,
        capacity_bytes: u64::from(report.geometry.segments) * segment_bytes,
        blocks: report.blocks,
        live_bytes: report.live_bytes,
        written_bytes: report.counters.written_bytes,
        stored_bytes: report.counters.stored_bytes,
        lifetime_written_bytes: report.lifetime_written_bytes,
        segments: report.geometry.segments.into(),
        segment_bytes,
        trouble: report.trouble().unwrap_or_default(),
        hint: report.hint.clone().unwrap_or_default(),
    }
}

fn classes(state: &State) -> Vec<ClassInfo> {
    let classes = state.classes().into_iter().map(|class| ClassInfo {
        slot_bytes: class.slot_bytes,
        slots: class.slots,
        ready: class.ready,
        free: class.free(),
        pinned: class.pinned + class.reserved,
        draining: class.draining,
    });
    classes.collect()
}
