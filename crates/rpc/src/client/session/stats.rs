//! A session's counters.

/// Counters since the start, and the present state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Lookups of the engine, answered or not.
    pub lookups: u64,
    /// Answered as misses because the daemon could not be asked.
    pub lookup_failures: u64,
    /// Answers that came after the deadline, or for a dropped ticket; their leases were returned.
    pub lookups_late: u64,
    /// Committed blocks that became ready.
    pub stored: u64,
    /// Committed blocks that the daemon had already.
    pub duplicate: u64,
    /// Committed blocks whose predecessor the daemon does not have.
    pub orphan: u64,
    /// Committed blocks of which a rank left no birth record.
    pub incomplete: u64,
    /// Committed blocks whose slot no longer belonged to this engine.
    pub lost: u64,
    /// Commits that became aborts: refused by the daemon, or of an earlier namespace.
    pub commits_dropped: u64,
    /// Requested slots that the stock did not have.
    pub reserve_short: u64,
    /// Connections that followed an earlier one.
    pub reconnects: u64,
    /// Now: slots in the stock.
    pub reserved_stock: u64,
    /// Now: 1 while slots are requested and the daemon gave everything requested before.
    pub stock_filling: u64,
    /// Now: tickets that hold a lease.
    pub leases_held: u64,
    /// Now: slots held by the engine or in queued commits.
    pub reservations_held: u64,
    /// Now: blocks and leases that wait for delivery.
    pub queued: u64,
    /// Now: 1 while lookups are misses without a call because calls failed in a row.
    pub breaker_open: u64,
}

impl Stats {
    /// By name, in the order of the fields.
    pub fn entries(&self) -> [(&'static str, u64); 17] {
        [
            ("lookups", self.lookups),
            ("lookup_failures", self.lookup_failures),
            ("lookups_late", self.lookups_late),
            ("stored", self.stored),
            ("duplicate", self.duplicate),
            ("orphan", self.orphan),
            ("incomplete", self.incomplete),
            ("lost", self.lost),
            ("commits_dropped", self.commits_dropped),
            ("reserve_short", self.reserve_short),
            ("reconnects", self.reconnects),
            ("reserved_stock", self.reserved_stock),
            ("stock_filling", self.stock_filling),
            ("leases_held", self.leases_held),
            ("reservations_held", self.reservations_held),
            ("queued", self.queued),
            ("breaker_open", self.breaker_open),
        ]
    }
}
