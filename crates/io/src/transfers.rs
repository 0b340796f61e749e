//! One line at debug level for each transfer: the blocks of one submission that go in one direction.

use std::collections::HashMap;
use std::time::Instant;

use forebay_core::tier::{Completion, OpId, OpKind, Operation, Outcome};

struct Transfer {
    direction: &'static str,
    begun: Instant,
    left: usize,
    count: u64,
    bytes: u64,
    failed: u64,
}

/// See the module documentation. Empty while that log level is disabled.
#[derive(Default)]
pub(crate) struct Transfers {
    last: u64,
    under_way: HashMap<u64, Transfer>,
    /// The transfer and the length of each operation.
    members: HashMap<OpId, (u64, u64)>,
}

impl Transfers {
    pub fn begin(&mut self, taken: &[Operation]) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let direction = |op: &Operation| match op.kind {
            OpKind::Load => Some("load"),
            OpKind::Store => Some("store"),
            OpKind::Exists | OpKind::Remove | OpKind::Touch { .. } => None,
        };
        for wanted in ["load", "store"] {
            let members: Vec<&Operation> = taken.iter().filter(|op| direction(op) == Some(wanted)).collect();
            if members.is_empty() {
                continue;
            }
            self.last += 1;
            let (left, begun) = (members.len(), Instant::now());
            let transfer = Transfer { direction: wanted, begun, left, count: 0, bytes: 0, failed: 0 };
            self.under_way.insert(self.last, transfer);
            self.members.extend(members.iter().map(|op| (op.id, (self.last, op.length_bytes))));
        }
    }

    pub fn ended(&mut self, completions: &[Completion]) {
        for Completion { id, outcome } in completions {
            let Some((task, bytes)) = self.members.remove(id) else { continue };
            let Some(transfer) = self.under_way.get_mut(&task) else { continue };
            transfer.left -= 1;
            match outcome {
                Outcome::Loaded { .. } | Outcome::Stored => {
                    transfer.count += 1;
                    transfer.bytes += bytes;
                }
                Outcome::Failed(_) => transfer.failed += 1,
                _ => {}
            }
            if transfer.left == 0 {
                transfer.told(task);
                self.under_way.remove(&task);
            }
        }
    }
}

impl Transfer {
    fn told(&self, task: u64) {
        let Transfer { direction, count, bytes, failed, .. } = self;
        let seconds = self.begun.elapsed().as_secs_f64();
        let gb_per_s = format!("{:.3}", *bytes as f64 / 1e9 / seconds);
        let time_ms = format!("{:.3}", seconds * 1e3);
        tracing::debug!(task, direction, count, bytes, failed, time_ms, gb_per_s, "transfer");
    }
}
