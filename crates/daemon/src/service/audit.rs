//! The audit of the pool while it serves: compares every ready block with its checksum and its record in the table.

use std::sync::Arc;

use forebay_core::report::ReadyBlock;
use forebay_core::stats::Finder;
use forebay_core::{BlockId, Error, ErrorKind, Result};
use forebay_io::pool::{Entry, Pool};
use forebay_rpc::proto::AuditReply;
use tokio::sync::Semaphore;

use crate::state::Shared;

/// Records looked at, and blocks pinned, at a time: small beside any pool, so that stores go on.
const RECORDS_PER_PIECE: u32 = 64;

/// One at a time: two would read the same blocks.
pub async fn audit(shared: &Shared, audits: &Arc<Semaphore>) -> Result<AuditReply> {
    let place = audits.clone().try_acquire_owned().map_err(|_| {
        Error::new(ErrorKind::Full, "an audit is already running").hint("wait for its end, and audit again")
    })?;
    let shared = shared.clone();
    let run = move || {
        let _place = place;
        read_all(&shared)
    };
    Ok(tokio::task::spawn_blocking(run).await.expect("an audit does not panic"))
}

fn read_all(shared: &Shared) -> AuditReply {
    let pool = shared.lock().table.pool().clone();
    let mut reply = AuditReply::default();
    let (mut cursor, mut complaint) = (Some(0), Ok(()));
    while let Some(from) = cursor {
        let (piece, next, records) = shared.event(|state| {
            let records = state.core.audit_records(from, RECORDS_PER_PIECE);
            let (piece, next) = state.core.audit_piece(from, RECORDS_PER_PIECE);
            // The entry of one that is purged while it is read counts no more.
            let with_entry =
                |audited: ReadyBlock| (state.table.pool().entry(audited.slot, audited.generation), audited);
            (piece.into_iter().map(with_entry).collect::<Vec<_>>(), next, records)
        });
        complaint = complaint.and(records);
        let judge = |(entry, audited): (Option<Entry>, ReadyBlock)| {
            (audited.block, is_whole(&pool, &audited, entry, &mut reply))
        };
        let verdicts: Vec<(BlockId, bool)> = piece.into_iter().map(judge).collect();
        shared.event(|state| {
            verdicts.into_iter().for_each(|(block, is_whole)| state.core.audited(block, is_whole));
        });
        cursor = next;
    }
    let complaint = complaint.and_then(|()| shared.lock().core.audit_counters());
    reply.complaint = complaint.err().unwrap_or_default();
    reply
}

fn is_whole(pool: &Pool, audited: &ReadyBlock, entry: Option<Entry>, reply: &mut AuditReply) -> bool {
    reply.blocks += 1;
    let Some(entry) = entry.filter(|entry| entry.key == audited.key) else {
        reply.misnamed += 1;
        let (slot, found_by) = (audited.slot.0, Finder::Audit.name());
        tracing::warn!(slot, found_by, "dropped a misnamed block: its entry in the table does not name it");
        return false;
    };
    reply.bytes += entry.length;
    let is_whole = pool.checksum(audited.slot.offset(), entry.length) == entry.checksum;
    reply.corrupt += u64::from(!is_whole);
    if !is_whole {
        let (slot, found_by) = (audited.slot.0, Finder::Audit.name());
        tracing::warn!(slot, found_by, "dropped a corrupt block: its bytes do not match its checksum");
    }
    is_whole
}
