//! The limit of each queue, with its reason.

use std::time::Duration;

/// Lookups in flight, with late ones and those whose blocks are promoted. An engine makes one lookup per waiting
/// request, and a burst of a thousand requests is not unusual.
pub const LOOKUPS: usize = 1024;
/// Keys of all lookups in flight, 32 MiB. A request of a million tokens in blocks of 16 has 65,536.
pub const LOOKUP_KEYS: usize = 1 << 20;
/// Keys of one lookup; this fits well into a message.
pub const KEYS_PER_LOOKUP: usize = 1 << 18;
/// Leased blocks. All of them must fit into one message when they are declared after a reconnect.
pub const LEASED_BLOCKS: usize = 1 << 19;
/// Slots held by the engine or in queued commits.
pub const RESERVED_BLOCKS: usize = 1 << 16;
/// Blocks in one commit call, so that a call stays short on the daemon's side.
pub const COMMIT_BLOCKS: usize = 4096;
/// Requests in the engine's queue that are reported to the daemon: many more than most pools can protect.
pub const WAITING: usize = 64;
/// Keys per group of a waiting request; the daemon accepts no more.
pub const KEYS_PER_WAITING: usize = 2048;
/// A late answer is awaited for this many further deadlines before the connection is given up. Until then the
/// late answer is still useful: its lease can be released, its slots used.
pub const LATE_FACTOR: u32 = 4;
/// After this long without lookups and reservations an engine counts as idle.
pub const IDLE: Duration = Duration::from_secs(2);
/// Slots of each group that an idle engine keeps for a while: a request that generates slowly fills a block now and
/// then.
pub const IDLE_STOCK: usize = 4;
/// After this long it keeps none.
pub const LONG_IDLE: Duration = Duration::from_secs(30);
