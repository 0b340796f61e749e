//! What a Redis tier tells: figures for metrics, `inspect` and `doctor`.

use forebay_core::tier::Health;

/// Counts since the tier was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    pub stored_blocks: u64,
    pub stored_bytes: u64,
    pub loaded_blocks: u64,
    pub loaded_bytes: u64,
    pub found_blocks: u64,
    /// Lookups of what is not there.
    pub absent_finds: u64,
    /// Loads of what is not there, or not any more.
    pub absent_loads: u64,
    pub removed_blocks: u64,
    /// Values of another length than the block that was asked for.
    pub wrong_sizes: u64,
    /// Values whose header is damaged or of another block.
    pub foreign_values: u64,
    /// Blocks whose bytes do not match their checksum.
    pub corrupt_blocks: u64,
    /// Stores that the server had no memory for.
    pub full_stores: u64,
    /// Operations that the server answered with another error.
    pub refused_operations: u64,
    /// Operations that ended with their connection, or had none.
    pub unavailable_operations: u64,
    pub late_operations: u64,
    pub cancelled_operations: u64,
    /// Connections that could be used.
    pub connections_made: u64,
    /// Those of them that ended.
    pub connections_lost: u64,
    /// Those that ended because of what the server sent.
    pub lost_steps: u64,
    pub failed_connects: u64,
    /// Operations that a cluster sent elsewhere.
    pub redirects: u64,
}

impl Counters {
    pub(super) fn add(&mut self, other: &Counters) {
        let pairs: [(&mut u64, u64); 21] = [
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
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
    }
}

/// See the module's head.
#[derive(Clone, PartialEq, Debug)]
pub struct RedisReport {
    /// The servers that are configured, without passwords.
    pub name: String,
    /// The servers that are known now, without passwords.
    pub servers: Vec<String>,
    pub health: Health,
    /// Connections that can be used now, those for lookups included.
    pub connections: usize,
    /// Operations that wait or are in flight.
    pub loads: usize,
    pub stores: usize,
    pub finds: usize,
    /// What went wrong last with a connection.
    pub last_error: Option<String>,
    pub counters: Counters,
}
