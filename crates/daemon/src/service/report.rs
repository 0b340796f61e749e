//! Inspect and purge.

use forebay_core::{Error, NamespaceId, Result};
use forebay_rpc::proto::{ClassInfo, GroupInfo, InspectReply, NamespaceInfo, PurgeReply, PurgeRequest, SessionInfo};

use crate::instances::Member;
use crate::state::{Shared, State};
use crate::tick::work_off;

pub fn inspect(shared: &Shared) -> Result<InspectReply> {
    let huge_bytes = shared.lock().pool.clone().huge_page_report()?.huge_bytes;
    Ok(shared.event(|state| {
        let held = state.core.held();
        InspectReply {
            boot_id: state.boot_id,
            pool_id: state.pool.id().to_be_bytes().to_vec(),
            capacity_bytes: state.core.capacity_bytes(),
            populated_bytes: state.core.populated_bytes(),
            huge_bytes,
            namespaces: namespaces(state),
            sessions: state.instances.iter().map(|(instance, member)| session(state, instance, member)).collect(),
            classes: classes(state),
            pinned_bytes: held.pinned_bytes + held.reserved_bytes,
            fenced_bytes: held.fenced_bytes,
        }
    }))
}

/// Gone for lookups at once; the reply waits until all that nobody holds is free.
pub async fn purge(shared: &Shared, request: PurgeRequest) -> Result<PurgeReply> {
    let mut reply = PurgeReply::default();
    let mut purged = Vec::new();
    shared.event(|state| -> Result<()> {
        for id in named(state, &request)? {
            let Some((gone, old, new)) = state.core.purge(id) else { continue };
            state.instances.rename(old, new);
            reply.purged_blocks += gone.blocks;
            reply.purged_bytes += gone.bytes;
            purged.push(old);
        }
        Ok(())
    })?;
    work_off(shared).await;
    reply.held_blocks = shared.event(|state| purged.iter().map(|old| state.core.fenced_of(*old)).sum());
    reply.purged_blocks -= reply.held_blocks.min(reply.purged_blocks);
    tracing::info!(blocks = reply.purged_blocks, held = reply.held_blocks, "purged");
    Ok(reply)
}

fn named(state: &State, request: &PurgeRequest) -> Result<Vec<NamespaceId>> {
    if !request.namespace_id.is_empty() {
        let id: [u8; 16] = request
            .namespace_id
            .as_slice()
            .try_into()
            .map_err(|_| Error::invalid("a namespace id has 16 bytes").with("bytes", request.namespace_id.len()))?;
        return Ok(vec![NamespaceId(u128::from_be_bytes(id))]);
    }
    if request.tenant.is_empty() && !request.all_tenants_named_empty {
        return Err(Error::invalid("a purge names a namespace or a tenant"));
    }
    let is_its = |descriptor: &forebay_core::namespace::Descriptor| descriptor.tenant() == request.tenant;
    Ok(state.descriptors.values().filter(|(_, descriptor)| is_its(descriptor)).map(|(id, _)| *id).collect())
}

fn namespaces(state: &State) -> Vec<NamespaceInfo> {
    let reports = state.core.namespaces().into_iter().map(|report| {
        let descriptor = state.descriptors.values().find(|(id, _)| *id == report.id);
        let fields = descriptor.into_iter().flat_map(|(_, descriptor)| descriptor.fields());
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

fn session(state: &State, instance: forebay_core::Instance, member: &Member) -> SessionInfo {
    let (leases, leased_blocks, reserved_blocks) = state.core.holdings(instance);
    SessionInfo {
        session: member.session.as_ref().map_or(0, |session| session.id),
        engine_id: member.engine_id.clone(),
        instance: instance.0.into(),
        ranks: member.ranks,
        attached_ranks: member.workers.len() as u32,
        leases,
        leased_blocks,
        reserved_blocks,
        is_connected: member.session.is_some(),
    }
}

fn classes(state: &State) -> Vec<ClassInfo> {
    let classes = state.core.classes().into_iter().map(|class| ClassInfo {
        slot_bytes: class.slot_bytes,
        slots: class.slots,
        ready: class.ready,
        free: class.slots.saturating_sub(class.used),
        pinned: class.pinned + class.reserved,
    });
    classes.collect()
}
