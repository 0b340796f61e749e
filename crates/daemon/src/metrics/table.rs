//! The table of metrics: name, meaning, labels, and how the value is read from the snapshot.

use std::fmt;

use forebay_core::decorate::Counts;
use forebay_core::miss::MissReason;
use forebay_core::report::ClassReport;
use forebay_core::stats::Finder;
use forebay_core::tier::Health;
use forebay_insight::ceiling::Estimate;
use forebay_io::StoreReport;
use forebay_io::ssd::DiskReport;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::{Histogram, Share, Snapshot, Tier, User};
use crate::insight::ALARMS;
use crate::tiers::TICK;

/// What [`render`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct Metric {
    name: &'static str,
    help: &'static str,
    read: Read,
}

enum Read {
    Counter(fn(&Snapshot) -> u64),
    /// Microseconds, told in seconds.
    CounterOfTime(fn(&Snapshot) -> u64),
    Gauge(fn(&Snapshot) -> u64),
    /// Names of the labels, and each combination of their values with its count.
    Counters(&'static [&'static str], fn(&Snapshot) -> Samples),
    Gauges(&'static [&'static str], fn(&Snapshot) -> Samples),
    /// Shares, 0 to 1.
    Ratios(&'static [&'static str], fn(&Snapshot) -> Shares),
    Seconds(fn(&Snapshot) -> &Histogram),
    SecondsBy(&'static [&'static str], fn(&Snapshot) -> Times),
}

type Samples = Vec<(Vec<String>, u64)>;
type Shares = Vec<(Vec<String>, f64)>;

type Times<'a> = Vec<(Vec<String>, &'a Histogram)>;

use Read::{Counter, CounterOfTime, Counters, Gauge, Gauges, Ratios, Seconds, SecondsBy};

const fn metric(name: &'static str, help: &'static str, read: Read) -> Metric {
    Metric { name, help, read }
}

static METRICS: &[Metric] = &[
    metric(
        "forebay_build_info",
        "Always 1; the labels name the daemon's version and the commit that it was built from.",
        Gauges(&["version", "revision"], version),
    ),
    metric(
        "forebay_start_time_seconds",
        "Time when the daemon started, in seconds since 1970.",
        Gauge(|s| s.start_time_seconds),
    ),
    // The pool.
    metric(
        "forebay_pool_capacity_bytes",
        "Bytes of memory that the pool may use for blocks (`pool.capacity_bytes`).",
        Gauge(|s| s.pool.capacity_bytes),
    ),
    metric(
        "forebay_pool_populated_bytes",
        "Bytes of the pool that are backed by memory pages.",
        Gauge(|s| s.pool.populated_bytes),
    ),
    metric("forebay_pool_huge_bytes", "Bytes of the pool that are backed by huge pages.", Gauge(|s| s.pool.huge_bytes)),
    metric(
        "forebay_pool_node_bytes",
        "Bytes of the pool on each NUMA node, on a host with several.",
        Gauges(&["node"], by_node),
    ),
    metric(
        "forebay_pool_slots",
        "Slots by size and state; each slot is in one state.",
        Gauges(&["slot_bytes", "state"], slots_by_class),
    ),
    metric("forebay_pool_used_bytes", "Bytes of all slots that are not free, over all slot sizes.", Gauge(used_bytes)),
    metric(
        "forebay_pool_pinned_bytes",
        "Bytes of blocks that cannot be evicted: leased, or being verified, promoted or written back.",
        Gauge(|s| s.held.pinned_bytes),
    ),
    metric(
        "forebay_pool_reserved_bytes",
        "Bytes of slots that clients have reserved and not committed yet.",
        Gauge(|s| s.held.reserved_bytes),
    ),
    metric(
        "forebay_pool_fenced_bytes",
        "Bytes of slots kept out of use because a process may still read or write them.",
        Gauge(|s| s.held.fenced_bytes),
    ),
    metric(
        "forebay_pool_fenced_blocks",
        "Slots kept out of use because a process may still read or write them.",
        Gauge(|s| s.held.fenced_blocks),
    ),
    metric(
        "forebay_hinted_groups",
        "Queue hints in effect: one for each KV cache group of each request that waits in an engine's queue.",
        Gauge(|s| s.held.hinted_groups),
    ),
    metric(
        "forebay_protected_bytes",
        "Bytes of hinted blocks that evictions pass over, whether they are in the pool yet or not.",
        Gauge(|s| s.held.protected_bytes),
    ),
    metric(
        "forebay_extents_moved_total",
        "Extents that were moved from one slot size to another.",
        Counter(|s| s.core.extents_moved),
    ),
    metric(
        "forebay_blocks_moved_total",
        "Blocks copied to another slot so that their extent could be moved.",
        Counter(|s| s.core.moved),
    ),
    // Lookups.
    metric(
        "forebay_lookups_total",
        "Lookups. A lookup whose blocks are promoted or verified meanwhile counts once, with its last answer.",
        Counter(|s| s.core.lookups),
    ),
    metric("forebay_lookup_keys_total", "Keys looked up: the sum of hits and misses.", Counter(|s| s.core.keys)),
    metric(
        "forebay_lookup_hits_total",
        "Keys looked up that were hits: their blocks were ready, with no gap before them in the prompt. Keys of `Get` are \
         hits one by one.",
        Counter(|s| s.core.hits),
    ),
    metric(
        "forebay_lookup_hits_by_tier_total",
        "Keys looked up that were hits, by where their blocks were: the first hit of a promoted block counts for the \
         tier that it came from, all others for `pool`. Their sum is that of all hits.",
        Counters(TIER, hits_by_tier),
    ),
    metric("forebay_lookup_hit_bytes_total", "Bytes of the blocks that were hits.", Counter(|s| s.core.hit_bytes)),
    metric(
        "forebay_lookup_misses_total",
        "Keys looked up that were misses, by reason.",
        Counters(&["reason"], misses_by_reason),
    ),
    metric(
        "forebay_lookup_seconds",
        "Time from a lookup's arrival at the daemon to its reply.",
        Seconds(|s| &s.lookup_time),
    ),
    // How good the hit rate could be.
    metric(
        "forebay_ceiling_ratio",
        "Hit ratio of a cache without limit (the ceiling) over the window, estimated.",
        Ratios(&["window"], ceilings),
    ),
    metric(
        "forebay_sampled_keys",
        "Keys in the sample of recent lookups, at most 65,536; a key looked up twice counts twice.",
        Gauge(|s| s.estimates.all.sampled.asked),
    ),
    metric("forebay_sampled_hits", "Sampled keys that were hits.", Gauge(|s| s.estimates.all.sampled.hits)),
    metric(
        "forebay_sampled_optimum_hits",
        "Sampled keys that a Belady-optimal cache of the pool's size would have hit.",
        Gauge(|s| s.estimates.all.sampled.optimum_hits),
    ),
    metric(
        "forebay_capacity_curve_ratio",
        "Hit ratio with a pool of `capacity_bytes` and the configured disks, simulated on a sample of keys.",
        Ratios(&["capacity_bytes"], curve),
    ),
    metric(
        "forebay_sampled_tiers_optimum_ratio",
        "Belady-optimal hit ratio of one cache of pool + SSD size, estimated on a sample.",
        Ratios(&["tiers"], tiers_optimum),
    ),
    metric(
        "forebay_disk_curve_ratio",
        "Hit ratio with the present pool and a disk of `capacity_bytes` (0: none), simulated on a sample of keys.",
        Ratios(&["capacity_bytes"], |s| ratios(&s.estimates.all.disk_curve)),
    ),
    metric(
        "forebay_namespace_sampled_keys",
        "Sampled keys by namespace; `others` stands for all namespaces not listed.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.asked)),
    ),
    metric(
        "forebay_namespace_sampled_hits",
        "Sampled keys that were hits, by namespace.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.hits)),
    ),
    metric(
        "forebay_namespace_sampled_optimum_hits",
        "Sampled keys that a Belady-optimal cache of the pool's size, shared by all, would have hit, by namespace.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.optimum_hits)),
    ),
    metric(
        "forebay_namespace_capacity_curve_ratio",
        "The namespace's simulated hit ratio if all share a pool of `capacity_bytes` and the configured disks.",
        Ratios(&["namespace", "capacity_bytes"], |s| curves_by_namespace(s, |share| &share.curve)),
    ),
    metric(
        "forebay_namespace_disk_curve_ratio",
        "The namespace's simulated hit ratio if all share the present pool and a disk of `capacity_bytes` (0: none).",
        Ratios(&["namespace", "capacity_bytes"], |s| curves_by_namespace(s, |share| &share.disk_curve)),
    ),
    metric(
        "forebay_alarm",
        "1 while the alarm is raised, else 0; `forebay advise` shows cause and hint.",
        Gauges(&["name"], alarms),
    ),
    metric(
        "forebay_insight_left_out_total",
        "Groups of lookups that the estimates left out because lookups came too fast.",
        Counter(|s| s.estimates.left_out),
    ),
    // Stores.
    metric("forebay_reserved_slots_total", "Slots given to clients to fill.", Counter(|s| s.core.reserved)),
    metric(
        "forebay_short_reservations_total",
        "Requests for slots that got fewer than they asked for; a request for more than 64 counts as one for 64.",
        Counter(|s| s.core.short_reservations),
    ),
    metric(
        "forebay_stored_blocks_total",
        "Blocks committed by clients that became ready in the pool.",
        Counter(|s| s.core.stored),
    ),
    metric(
        "forebay_stored_bytes_total",
        "Bytes of the blocks committed by clients that became ready in the pool.",
        Counter(|s| s.core.stored_bytes),
    ),
    metric(
        "forebay_unstored_blocks_total",
        "Slots that clients reserved or committed but that did not become blocks, by reason.",
        Counters(&["reason"], unstored_by_reason),
    ),
    // What left the pool, and what came back.
    metric("forebay_evicted_blocks_total", "Blocks evicted from the pool.", Counter(|s| s.core.evicted)),
    metric(
        "forebay_evicted_bytes_total",
        "Bytes of the blocks evicted from the pool.",
        Counter(|s| s.core.evicted_bytes),
    ),
    metric("forebay_purged_blocks_total", "Blocks removed from the pool by purges.", Counter(|s| s.core.purged)),
    metric(
        "forebay_recovered_blocks_total",
        "Blocks found in the pool when the daemon started.",
        Counter(|s| s.core.recovered),
    ),
    metric(
        "forebay_verified_blocks_total",
        "Recovered blocks whose checksum was right when they were first looked up.",
        Counter(|s| s.core.verified),
    ),
    metric(
        "forebay_suspected_blocks_total",
        "Blocks that the daemon compared with their checksum because a worker reported a mismatch.",
        Counter(|s| s.core.suspected),
    ),
    metric(
        "forebay_corrupt_blocks_total",
        "Blocks dropped because their checksum was wrong, by what found it: restart, load, get, scrub, audit or tier. \
         `tier` counts also blocks that a disk or a shared store gave damaged.",
        Counters(&["found_by"], corrupt_by_finder),
    ),
    metric(
        "forebay_scrubbed_bytes_total",
        "Bytes of the pool that the scrub has read to compare blocks with their checksums.",
        Counter(|s| s.core.scrubbed_bytes),
    ),
    metric("forebay_scrubs_total", "Times that the scrub has gone through the whole pool.", Counter(|s| s.core.scrubs)),
    // The tiers below the pool.
    metric(
        "forebay_tier_state",
        "1 for the tier's present state, 0 for the other states: opening, serving, sick or failed.",
        Gauges(&["tier", "state"], tier_states),
    ),
    metric(
        "forebay_tier_blocks",
        "Blocks known to be on the tier; 0 for shared tiers, of which the daemon keeps no index.",
        Gauges(TIER, |s| tiers(s, |t| t.core.blocks)),
    ),
    metric(
        "forebay_tier_operations_total",
        "Operations that ended, by kind (load, store, exists, remove, touch) and outcome (done, absent, failed).",
        Counters(&["tier", "op", "outcome"], tier_operations),
    ),
    metric(
        "forebay_tier_refused_operations_total",
        "Operations that the tier refused because its queue was full; each is submitted again.",
        Counters(&["tier", "op"], |s| by_kind(s, |counts| counts.refused)),
    ),
    metric(
        "forebay_tier_operation_bytes_total",
        "Bytes moved by operations that succeeded: loads and stores move a block, the others move nothing.",
        Counters(&["tier", "op"], |s| by_kind(s, |counts| counts.done_bytes)),
    ),
    metric(
        "forebay_tier_operation_seconds",
        "Time from submission to completion of operations that succeeded.",
        SecondsBy(&["tier", "op"], tier_times),
    ),
    metric(
        "forebay_tier_waiting_operations",
        "Operations that wait to be submitted to the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.waiting)),
    ),
    metric(
        "forebay_tier_loading_bytes",
        "Bytes of pool slots that are being filled from the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.core.loading_bytes)),
    ),
    metric(
        "forebay_tier_late_bytes",
        "Bytes of pool slots that wait for the end of a late load; too many of them suspend the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.core.late_bytes)),
    ),
    metric(
        "forebay_tier_storing_bytes",
        "Bytes of blocks pinned in the pool while they are written to the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.core.storing_bytes)),
    ),
    metric(
        "forebay_tier_waiting_blocks",
        "Blocks that wait to be written to the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.core.waiting_blocks)),
    ),
    metric(
        "forebay_tier_promotions_total",
        "Promotions from the tier to the pool that ended, by outcome: ready, absent, corrupt, failed or late.",
        Counters(&["tier", "outcome"], tier_promotions),
    ),
    metric(
        "forebay_tier_prefetches_total",
        "Promotions started from queue hints, before a lookup asked for the block.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.prefetches)),
    ),
    metric(
        "forebay_tier_prefetch_hits_total",
        "Prefetched blocks that a lookup asked for afterwards.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.prefetch_hits)),
    ),
    metric(
        "forebay_tier_promoted_bytes_total",
        "Bytes of the blocks promoted from the tier into the pool.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.promoted_bytes)),
    ),
    metric(
        "forebay_tier_unwritten_blocks_total",
        "Blocks that should have been written to the tier but were not, by reason: queue_full, evicted or failed. The \
         blocks behind such a block in its prompt are not offered to the tier, and are not counted.",
        Counters(&["tier", "reason"], tier_unwritten),
    ),
    metric(
        "forebay_tier_stored_blocks_total",
        "Blocks written to the tier.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.stored)),
    ),
    metric(
        "forebay_tier_evicted_blocks_total",
        "Blocks that left the tier: evicted by it, or removed by a purge.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.evicted)),
    ),
    metric(
        "forebay_purge_namespaces",
        "Namespaces that purges are removing from this host's own tier.",
        Gauges(TIER, |s| own_tiers(s, |t| t.purge.namespaces)),
    ),
    metric(
        "forebay_purge_removed_blocks_total",
        "Blocks that purges removed from this host's own tier.",
        Counters(TIER, |s| own_tiers(s, |t| t.purge.removed_blocks)),
    ),
    metric(
        "forebay_purge_walked_ratio",
        "Share of this host's own tier that the walk of a purge has looked through; no sample between walks.",
        Ratios(TIER, walked),
    ),
    metric(
        "forebay_tier_lost_blocks_total",
        "Blocks of the pool that a touch no longer found on the shared tier; their next use stores them there again.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.lost)),
    ),
    metric(
        "forebay_tier_touch_period_seconds",
        "Time after which a shared tier is touched again for a block in use in the pool; 0 for tiers without touches.",
        Gauges(TIER, |s| tiers(s, |t| u64::from(t.core.touch_ticks) * TICK.as_secs())),
    ),
    metric(
        "forebay_tier_breaker_opened_total",
        "Times that a circuit breaker kept reads or writes from the tier for a while, after repeated failures.",
        Counters(TIER, |s| tiers(s, |t| t.breaker_opened)),
    ),
    metric(
        "forebay_disk_healthy",
        "1 while the disk can be used in this direction, `load` or `store`; 0 while it fails, hangs or is missing.",
        Gauges(&["tier", "disk", "direction"], disk_health),
    ),
    metric(
        "forebay_disk_written_bytes_total",
        "Bytes written to the disk with headers and rewrites; over the stored bytes this is the write amplification.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.written_bytes)),
    ),
    metric(
        "forebay_disk_stored_bytes_total",
        "Bytes of the blocks stored on the disk, without headers and rewrites.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.stored_bytes)),
    ),
    metric(
        "forebay_disk_lifetime_written_bytes",
        "Bytes written to the disk since it was formatted, over all starts of the daemon.",
        Gauges(DISK, |s| disks(s, |disk| disk.lifetime_written_bytes)),
    ),
    metric(
        "forebay_disk_live_bytes",
        "Bytes of the blocks that are on the disk now.",
        Gauges(DISK, |s| disks(s, |disk| disk.live_bytes)),
    ),
    metric(
        "forebay_disk_carried_bytes_total",
        "Bytes of recently read blocks that were rewritten when their segment was reclaimed.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.carried_bytes)),
    ),
    metric(
        "forebay_disk_trimmed_bytes_total",
        "Old bytes that the device was told it need not keep; 0 unless `tier.ssd.trim` is set and the disk is a device.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.trimmed_bytes)),
    ),
    metric(
        "forebay_disk_corrupt_blocks_total",
        "Blocks whose checksum was wrong, and blocks of segments whose footer could not be read; none is served.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.corrupt_blocks)),
    ),
    // The stores that hosts share.
    metric(
        "forebay_shared_store_healthy",
        "1 while the shared store can be used in this direction, `load` or `store`, else 0. A store that is \
         configured as read-only has no `store`. Each is 0 also while the store or one of its nodes refuses such operations.",
        Gauges(&["tier", "store", "direction"], store_health),
    ),
    metric(
        "forebay_shared_store_connections",
        "Usable connections to the shared store.",
        Gauges(STORE, |s| stores(s, |store| store.connections)),
    ),
    metric(
        "forebay_shared_store_used_bytes",
        "Upper bound of the bytes that all hosts keep in the shared store, as this host last read it.",
        Gauges(STORE, |s| stores(s, |store| store.used_bytes)),
    ),
    metric(
        "forebay_shared_store_capacity_bytes",
        "Bytes that all hosts together may keep in the shared store, where that is limited.",
        Gauges(STORE, |s| stores(s, |store| store.capacity_bytes)),
    ),
    metric(
        "forebay_shared_store_hanging_threads",
        "Threads whose present operation has taken longer than its timeout.",
        Gauges(STORE, |s| stores(s, |store| store.hanging_threads)),
    ),
    metric(
        "forebay_shared_store_sweeper",
        "1 if this host is the sweeper, which frees space in the shared directory for all hosts, else 0.",
        Gauges(STORE, |s| stores(s, |store| store.is_sweeper.map(u64::from))),
    ),
    metric(
        "forebay_shared_store_events_total",
        "Events at the shared store, by name; the page of the tier in docs/tiers explains each.",
        Counters(&["tier", "store", "event"], store_events),
    ),
    // Clients and the core.
    metric("forebay_sessions", "Open sessions.", Gauge(|s| s.clients.sessions)),
    metric(
        "forebay_attached_workers",
        "Worker processes that have mapped the pool.",
        Gauge(|s| s.clients.attached_workers),
    ),
    metric(
        "forebay_gpu_workers",
        "Worker processes that have mapped the pool and copy from and to a GPU themselves.",
        Gauge(|s| s.clients.gpu_workers),
    ),
    metric(
        "forebay_registered_bytes",
        "Bytes of the pool that worker processes have registered with a GPU's driver, the sum over all of them.",
        Gauge(|s| s.clients.registered_bytes),
    ),
    metric(
        "forebay_connections",
        "Open connections to the two sockets, by user id.",
        Gauges(&["user"], |s| by_user(s, |user| user.connections)),
    ),
    metric(
        "forebay_calls_in_flight",
        "Calls whose answers were not taken yet, by user id.",
        Gauges(&["user"], |s| by_user(s, |user| user.calls)),
    ),
    metric(
        "forebay_call_bytes_in_flight",
        "Bytes of messages that are received and of answers that were not taken yet, by user id.",
        Gauges(&["user"], |s| by_user(s, |user| user.bytes)),
    ),
    metric(
        "forebay_lent_bytes",
        "Bytes of memory that clients lend the daemon for their blocks, by user id.",
        Gauges(&["user"], |s| by_user(s, |user| user.lent_bytes)),
    ),
    metric(
        "forebay_refused_clients_total",
        "Connections, sessions, calls and lent memory refused because their user had reached a limit, by user id and limit.",
        Counters(&["user", "limit"], refused_by_limit),
    ),
    metric("forebay_leases", "Leases held by clients.", Gauge(|s| s.held.leases)),
    metric("forebay_namespaces", "Namespaces that the daemon knows.", Gauge(|s| s.clients.namespaces)),
    metric(
        "forebay_saved_tokens_total",
        "Tokens of prompts that engines loaded and so did not compute, as the engines report when they return leases.",
        Counter(|s| s.saved.tokens),
    ),
    metric(
        "forebay_saved_prefill_seconds_total",
        "Least time that computing the saved tokens would have taken, by each engine's fastest prefill.",
        CounterOfTime(|s| s.saved.prefill_us),
    ),
    metric(
        "forebay_put_bytes_total",
        "Bytes copied into the pool by `Put`, for clients that do not map it; without measurements and self-tests.",
        Counter(|s| s.rpc.put_bytes),
    ),
    metric(
        "forebay_get_bytes_total",
        "Bytes copied out of the pool by `Get`, for clients that do not map it; without measurements and self-tests.",
        Counter(|s| s.rpc.get_bytes),
    ),
    metric(
        "forebay_refused_peers_total",
        "Connections refused because of the peer's user id.",
        Counter(|s| s.rpc.refused_peers),
    ),
    metric(
        "forebay_rpc_errors_total",
        "RPC calls that failed, by method and status code.",
        Counters(&["method", "code"], errors_by_method),
    ),
    metric(
        "forebay_event_seconds",
        "Times for which the deciding thread was kept from its next decision: one turn of a task on it, or one hold of \
         the state by another thread.",
        Seconds(|s| &s.event_time),
    ),
    metric(
        "forebay_core_wait_seconds_total",
        "Time for which the deciding thread could run, and other processes had all cores.",
        CounterOfTime(|s| s.queue_time.as_micros() as u64),
    ),
];

/// `snapshot` in OpenMetrics text form.
pub fn render(snapshot: Snapshot) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(snapshot)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("writing to a string cannot fail");
    text
}

#[derive(Debug)]
struct Scrape(Snapshot);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        METRICS.iter().try_for_each(|metric| metric.encode(&self.0, &mut encoder))
    }
}

impl Metric {
    fn encode(&self, snapshot: &Snapshot, encoder: &mut DescriptorEncoder) -> fmt::Result {
        // The encoder adds the suffix of counters itself.
        let name = self.name.strip_suffix("_total").unwrap_or(self.name);
        let mut out = encoder.encode_descriptor(name, self.help, None, self.kind())?;
        match &self.read {
            Counter(read) => encode_counter(&mut out, read(snapshot)),
            CounterOfTime(read) => out.encode_counter::<NoLabelSet, f64, u64>(&(read(snapshot) as f64 / 1e6), None),
            Gauge(read) => out.encode_gauge(&read(snapshot)),
            Counters(names, read) => {
                each(names, read(snapshot), |labels, value| encode_counter(&mut out.encode_family(labels)?, value))
            }
            Gauges(names, read) => {
                each(names, read(snapshot), |labels, value| out.encode_family(labels)?.encode_gauge(&value))
            }
            Ratios(names, read) => read(snapshot).into_iter().try_for_each(|(values, ratio)| {
                let labels: Labels = names.iter().copied().zip(values).collect();
                out.encode_family(&labels)?.encode_gauge(&ratio)
            }),
            Seconds(read) => {
                let times = read(snapshot);
                out.encode_histogram::<NoLabelSet>(times.sum_seconds(), times.count(), &times.buckets(), None)
            }
            SecondsBy(names, read) => read(snapshot).into_iter().try_for_each(|(values, times)| {
                let labels: Labels = names.iter().copied().zip(values).collect();
                let mut out = out.encode_family(&labels)?;
                out.encode_histogram::<NoLabelSet>(times.sum_seconds(), times.count(), &times.buckets(), None)
            }),
        }
    }

    fn kind(&self) -> MetricType {
        match self.read {
            Counter(_) | CounterOfTime(_) | Counters(..) => MetricType::Counter,
            Gauge(_) | Gauges(..) | Ratios(..) => MetricType::Gauge,
            Seconds(_) | SecondsBy(..) => MetricType::Histogram,
        }
    }

    fn labels(&self) -> &'static [&'static str] {
        match self.read {
            Counters(names, _) | Gauges(names, _) | Ratios(names, _) | SecondsBy(names, _) => names,
            _ => &[],
        }
    }
}

type Labels = Vec<(&'static str, String)>;

fn each(names: &[&'static str], samples: Samples, mut encode: impl FnMut(&Labels, u64) -> fmt::Result) -> fmt::Result {
    samples.into_iter().try_for_each(|(values, count)| encode(&names.iter().copied().zip(values).collect(), count))
}

fn encode_counter(out: &mut MetricEncoder, value: u64) -> fmt::Result {
    out.encode_counter::<NoLabelSet, u64, u64>(&value, None)
}

fn version(snapshot: &Snapshot) -> Samples {
    vec![(vec![env!("CARGO_PKG_VERSION").to_string(), snapshot.revision.to_string()], 1)]
}

fn slots_by_class(snapshot: &Snapshot) -> Samples {
    let one = |class: &ClassReport| {
        let sample = |state: &str, slots| (vec![class.slot_bytes.to_string(), state.to_string()], slots);
        [
            sample("free", class.free()),
            sample("reserved", class.reserved),
            sample("promoting", class.promoting),
            sample("ready", class.ready),
            sample("fenced", class.fenced),
        ]
    };
    snapshot.classes.iter().flat_map(one).collect()
}

fn ceilings(snapshot: &Snapshot) -> Shares {
    let one =
        |(estimate, name): (&Option<Estimate>, &str)| Some((vec![name.to_string()], estimate.as_ref()?.ceiling()?));
    snapshot.estimates.windows.iter().zip(["15m", "1h", "24h"]).filter_map(one).collect()
}

fn curve(snapshot: &Snapshot) -> Shares {
    ratios(&snapshot.estimates.all.curve)
}

fn ratios(curve: &[(u64, f64)]) -> Shares {
    curve.iter().map(|(bytes, ratio)| (vec![bytes.to_string()], *ratio)).collect()
}

fn tiers_optimum(snapshot: &Snapshot) -> Shares {
    let below = snapshot.estimates.all.sampled_tiers.filter(|below| below.asked > 0);
    below
        .iter()
        .map(|below| (vec!["pool and disk".to_string()], below.optimum_hits as f64 / below.asked as f64))
        .collect()
}

const NAMESPACE: &[&str] = &["namespace"];

fn by_namespace(snapshot: &Snapshot, read: fn(&Share) -> u64) -> Samples {
    snapshot.estimates.namespaces.iter().map(|share| (vec![share.name.clone()], read(share))).collect()
}

fn curves_by_namespace(snapshot: &Snapshot, curve: fn(&Share) -> &[(u64, f64)]) -> Shares {
    let of = |share: &Share| {
        let named = |(labels, ratio): (Vec<String>, f64)| ([vec![share.name.clone()], labels].concat(), ratio);
        ratios(curve(share)).into_iter().map(named).collect::<Shares>()
    };
    snapshot.estimates.namespaces.iter().flat_map(of).collect()
}

fn alarms(snapshot: &Snapshot) -> Samples {
    let holds = |name: &str| snapshot.alarms.iter().any(|alarm| alarm.name == name);
    ALARMS.iter().map(|name| (vec![name.to_string()], u64::from(holds(name)))).collect()
}

fn used_bytes(snapshot: &Snapshot) -> u64 {
    snapshot.classes.iter().map(|class| class.used * class.slot_bytes).sum()
}

fn misses_by_reason(snapshot: &Snapshot) -> Samples {
    MissReason::ALL
        .iter()
        .map(|reason| (vec![reason.name().to_string()], snapshot.core.misses[*reason as usize]))
        .collect()
}

fn corrupt_by_finder(snapshot: &Snapshot) -> Samples {
    let one = |finder: &Finder| (vec![finder.name().to_string()], snapshot.core.corrupt[*finder as usize]);
    Finder::ALL.iter().map(one).collect()
}

fn unstored_by_reason(snapshot: &Snapshot) -> Samples {
    let core = &snapshot.core;
    [
        ("aborted", core.aborted),
        ("duplicate", core.duplicates),
        ("incomplete", core.incomplete),
        ("lost", core.lost),
        ("orphan", core.orphans),
    ]
    .map(|(reason, count)| (vec![reason.to_string()], count))
    .to_vec()
}

const TIER: &[&str] = &["tier"];
const DISK: &[&str] = &["tier", "disk"];
const STORE: &[&str] = &["tier", "store"];

fn tiers(snapshot: &Snapshot, read: fn(&Tier) -> u64) -> Samples {
    snapshot.tiers.iter().map(|tier| (vec![tier.name.to_string()], read(tier))).collect()
}

/// As [`tiers`], of those that other hosts do not use.
fn own_tiers(snapshot: &Snapshot, read: fn(&Tier) -> u64) -> Samples {
    let own = snapshot.tiers.iter().filter(|tier| !tier.is_shared);
    own.map(|tier| (vec![tier.name.to_string()], read(tier))).collect()
}

fn walked(snapshot: &Snapshot) -> Shares {
    let walked = |tier: &Tier| Some((vec![tier.name.to_string()], tier.purge.walked_ratio?));
    snapshot.tiers.iter().filter_map(walked).collect()
}

/// A sample for each part of a tier of which `one` says something: its name and its figure.
fn by_part<T>(snapshot: &Snapshot, parts: fn(&Tier) -> &[T], one: impl Fn(&T) -> Option<(&str, u64)>) -> Samples {
    let of = |tier: &Tier| {
        let told = parts(tier).iter().filter_map(&one);
        told.map(|(part, figure)| (vec![tier.name.to_string(), part.to_string()], figure)).collect::<Samples>()
    };
    snapshot.tiers.iter().flat_map(of).collect()
}

fn disks(snapshot: &Snapshot, read: fn(&DiskReport) -> u64) -> Samples {
    by_part(snapshot, |tier| &tier.disks, |disk| Some((&disk.name, read(disk))))
}

fn disk_health(snapshot: &Snapshot) -> Samples {
    let all = snapshot.tiers.iter().flat_map(|tier| tier.disks.iter().map(move |disk| (tier.name, disk)));
    let of = |(tier, disk): (&str, &DiskReport)| {
        [("load", disk.health), ("store", disk.health_of_writes)].map(|(direction, health)| {
            let labels = [tier, &disk.name, direction].map(str::to_string);
            (labels.to_vec(), u64::from(health == Health::Healthy))
        })
    };
    all.flat_map(of).collect()
}

fn store_health(snapshot: &Snapshot) -> Samples {
    let all = snapshot.tiers.iter().flat_map(|tier| tier.stores.iter().map(move |store| (tier.name, store)));
    let of = |(tier, store): (&str, &StoreReport)| -> Vec<(Vec<String>, u64)> {
        let can_store = (!store.is_read_only).then(|| store.can_store());
        let named = |(direction, can_be_used): (&str, Option<bool>)| {
            Some(([tier, &store.name, direction].map(str::to_string).to_vec(), u64::from(can_be_used?)))
        };
        [("load", Some(store.can_load())), ("store", can_store)].into_iter().filter_map(named).collect()
    };
    all.flat_map(of).collect()
}

fn stores(snapshot: &Snapshot, read: fn(&StoreReport) -> Option<u64>) -> Samples {
    by_part(snapshot, |tier| &tier.stores, |store| Some((&store.name, read(store)?)))
}

fn by_kind(snapshot: &Snapshot, read: fn(&Counts) -> u64) -> Samples {
    by_part(snapshot, |tier| &tier.counts, |(kind, counts)| Some((kind, read(counts))))
}

fn store_events(snapshot: &Snapshot) -> Samples {
    let all = snapshot.tiers.iter().flat_map(|tier| tier.stores.iter().map(move |store| (tier.name, store)));
    let of = |(tier, store): (&str, &StoreReport)| {
        let labels = |event: &str| vec![tier.to_string(), store.name.clone(), event.to_string()];
        store.events.iter().map(|(event, count)| (labels(event), *count)).collect::<Samples>()
    };
    all.flat_map(of).collect()
}

fn tier_operations(snapshot: &Snapshot) -> Samples {
    let of = |outcome: &str, read: fn(&Counts) -> u64| {
        let mut samples = by_kind(snapshot, read);
        samples.iter_mut().for_each(|(labels, _)| labels.push(outcome.to_string()));
        samples
    };
    let done = of("done", |counts| counts.done);
    [done, of("absent", |counts| counts.absent), of("failed", |counts| counts.failed)].concat()
}

fn tier_times(snapshot: &Snapshot) -> Times<'_> {
    let kinds = snapshot.tiers.iter().flat_map(|tier| tier.counts.iter().map(move |kind| (tier.name, kind)));
    kinds.map(|(name, (kind, counts))| (vec![name.to_string(), kind.to_string()], &counts.time)).collect()
}

fn tier_states(snapshot: &Snapshot) -> Samples {
    let of = |tier: &Tier| {
        let (name, (state, _)) = (tier.name.to_string(), tier.standing.told());
        let one = |known: &str| (vec![name.clone(), known.to_string()], u64::from(known == state));
        ["opening", "serving", "sick", "failed"].map(one)
    };
    snapshot.tiers.iter().flat_map(of).collect()
}

fn hits_by_tier(snapshot: &Snapshot) -> Samples {
    let of_tiers = snapshot.tiers.iter().map(|tier| (tier.name.to_string(), tier.core.stats.hits));
    let of_tiers: Vec<(String, u64)> = of_tiers.collect();
    let of_pool = snapshot.core.hits - of_tiers.iter().map(|(_, hits)| hits).sum::<u64>();
    std::iter::once(("pool".to_string(), of_pool)).chain(of_tiers).map(|(name, hits)| (vec![name], hits)).collect()
}

fn tier_promotions(snapshot: &Snapshot) -> Samples {
    let of = |tier: &Tier| {
        let (name, stats) = (tier.name.to_string(), tier.core.stats);
        let outcomes = [
            ("ready", stats.promoted),
            ("absent", stats.absent),
            ("corrupt", stats.corrupt),
            ("failed", stats.failed_loads),
            ("late", stats.late),
        ];
        outcomes.map(|(outcome, count)| (vec![name.clone(), outcome.to_string()], count))
    };
    snapshot.tiers.iter().flat_map(of).collect()
}

fn tier_unwritten(snapshot: &Snapshot) -> Samples {
    let of = |tier: &Tier| {
        let (name, stats) = (tier.name.to_string(), tier.core.stats);
        let reasons =
            [("queue_full", stats.dropped_full), ("evicted", stats.dropped_gone), ("failed", stats.failed_stores)];
        reasons.map(|(reason, count)| (vec![name.clone(), reason.to_string()], count))
    };
    snapshot.tiers.iter().flat_map(of).collect()
}

fn by_node(snapshot: &Snapshot) -> Samples {
    snapshot.pool.nodes.iter().map(|(node, bytes)| (vec![node.to_string()], *bytes)).collect()
}

fn by_user(snapshot: &Snapshot, read: fn(&User) -> u64) -> Samples {
    snapshot.clients.users.iter().map(|user| (vec![user.uid.to_string()], read(user))).collect()
}

fn refused_by_limit(snapshot: &Snapshot) -> Samples {
    let of_user = |user: &User| {
        let label = |&(limit, count): &(&'static str, u64)| (vec![user.uid.to_string(), limit.to_string()], count);
        user.refused.iter().map(label).collect::<Vec<_>>()
    };
    snapshot.clients.users.iter().flat_map(of_user).collect()
}

fn errors_by_method(snapshot: &Snapshot) -> Samples {
    let one = |errors: &super::RpcErrors| (vec![errors.method.to_string(), errors.code.to_string()], errors.count);
    snapshot.rpc.errors.iter().map(one).collect()
}

const PAGE_HEAD: &str = "\
# Metrics

The daemon serves these metrics at `http://127.0.0.1:9477/metrics` (`http.address`) in OpenMetrics text form. Counters
start at zero with each start of the daemon. Times are in seconds, sizes in bytes.

This page is generated from the code. To regenerate it:
`FOREBAY_UPDATE_GOLDEN=1 cargo test -p forebay-daemon --test pages`.

| name | type | labels | meaning |
|---|---|---|---|
";

/// docs/metrics.md.
pub fn page() -> String {
    let row = |metric: &Metric| {
        let labels: Vec<String> = metric.labels().iter().map(|name| format!("`{name}`")).collect();
        format!("| `{}` | {} | {} | {} |\n", metric.name, metric.kind().as_str(), labels.join(", "), metric.help)
    };
    METRICS.iter().fold(PAGE_HEAD.to_string(), |page, metric| page + &row(metric))
}
