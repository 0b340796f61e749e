//! Figures of a Redis tier for metrics, `inspect` and `doctor`.

use std::time::Instant;

use forebay_core::tier::Health;

/// Counts since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Blocks that a server took.
    pub stored_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub stored_bytes: u64,
    /// Blocks that were loaded and whose checksum matched.
    pub loaded_blocks: u64,
    /// Bytes of these blocks, without headers.
    pub loaded_bytes: u64,
    /// Lookups that found their block.
    pub found_blocks: u64,
    /// Lookups of absent blocks.
    pub absent_finds: u64,
    /// Loads of absent blocks.
    pub absent_loads: u64,
    /// Blocks that were removed on request.
    pub removed_blocks: u64,
    /// Values whose length differs from the requested block's.
    pub wrong_sizes: u64,
    /// Values whose header is damaged or belongs to another block.
    pub foreign_values: u64,
    /// Blocks whose bytes do not match their checksum.
    pub corrupt_blocks: u64,
    /// Stores for which the server had no memory, or that it refused because it takes no writes at present.
    pub full_stores: u64,
    /// Operations that the server answered with another error.
    pub refused_operations: u64,
    /// Operations whose connection ended, or that had no connection.
    pub unavailable_operations: u64,
    /// Operations that passed their deadline.
    pub late_operations: u64,
    /// Operations that were cancelled before they ended.
    pub cancelled_operations: u64,
    /// Connections that became usable.
    pub connections_made: u64,
    /// Usable connections that ended.
    pub connections_lost: u64,
    /// Connections that ended because the server violated the protocol.
    pub lost_steps: u64,
    /// Attempts that ended before the connection was usable.
    pub failed_connects: u64,
    /// Operations that a cluster redirected.
    pub redirects: u64,
    /// Times that a node was left alone for a while, in one direction, after failures in a row.
    pub breakers_opened: u64,
}

impl Counters {
    pub(super) fn add(&mut self, other: &Counters) {
        let pairs: [(&mut u64, u64); 22] = [
            (&mut self.stored_blocks, other.stored_blocks),
            (&mut self.stored_bytes, other.stored_bytes),
            (&mut self.loaded_blocks, other.loaded_blocks),
            (&mut self.loaded_bytes, other.loaded_bytes),
            (&mut self.found_blocks, other.found_blocks),
            (&mut self.absent_finds, other.absent_finds),
            (&mut self.absent_loads, other.absent_loads),
            (&mut self.removed_blocks, other.removed_blocks),
            (&mut self.wrong_sizes, other.wrong_sizes),
            (&mut self.foreign_values, other.foreign_values),
            (&mut self.corrupt_blocks, other.corrupt_blocks),
            (&mut self.full_stores, other.full_stores),
            (&mut self.refused_operations, other.refused_operations),
            (&mut self.unavailable_operations, other.unavailable_operations),
            (&mut self.late_operations, other.late_operations),
            (&mut self.cancelled_operations, other.cancelled_operations),
            (&mut self.connections_made, other.connections_made),
            (&mut self.connections_lost, other.connections_lost),
            (&mut self.lost_steps, other.lost_steps),
            (&mut self.failed_connects, other.failed_connects),
            (&mut self.redirects, other.redirects),
            (&mut self.breakers_opened, other.breakers_opened),
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
    }
}

/// See the module documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct RedisReport {
    /// The configured servers, without passwords.
    pub name: String,
    /// The servers known now, without passwords.
    pub servers: Vec<String>,
    /// Sick while no connection for lookups, or none for loads and stores, can be had, or all nodes fail to be read.
    pub health: Health,
    /// Usable connections, those for lookups included.
    pub connections: usize,
    /// Operations that wait or are in flight.
    pub loads: usize,
    /// Stores and removals that wait or are in flight.
    pub stores: usize,
    /// Lookups that wait or are in flight.
    pub finds: usize,
    /// The last error of a connection, and when it happened.
    pub last_error: Option<(String, Instant)>,
    /// What a server said last that refused most recent stores; in a cluster, each such server with what it said.
    pub refuses_writes: Option<String>,
    /// The same of probes or loads.
    pub refuses_reads: Option<String>,
    /// What to do about that.
    pub hint: Option<String>,
    /// Counts since the tier was opened, over all servers.
    pub counters: Counters,
}
