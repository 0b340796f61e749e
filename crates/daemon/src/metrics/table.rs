//! The table of metrics: name, meaning, labels, and where in the snapshot the value lies.

use std::fmt;

use forebay_core::ceiling::Estimate;
use forebay_core::corrupt::Finder;
use forebay_core::decorate::Counts;
use forebay_core::miss::MissReason;
use forebay_core::report::ClassReport;
use forebay_core::tier::Health;
use forebay_io::StoreReport;
use forebay_io::ssd::DiskReport;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::{Histogram, Share, Snapshot, Tier};
use crate::insight::ALARMS;

/// What [`render`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct Metric {
    name: &'static str,
    help: &'static str,
    read: Read,
}

enum Read {
    Counter(fn(&Snapshot) -> u64),
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

use Read::{Counter, Counters, Gauge, Gauges, Ratios, Seconds, SecondsBy};

const fn metric(name: &'static str, help: &'static str, read: Read) -> Metric {
    Metric { name, help, read }
}

static METRICS: &[Metric] = &[
    metric("forebay_build_info", "Always 1; the label says what runs.", Gauges(&["version"], |_| version())),
    metric("forebay_start_time_seconds", "When the daemon started, since 1970.", Gauge(|s| s.start_time_seconds)),
    // The pool.
    metric("forebay_pool_capacity_bytes", "Memory the pool may use for blocks.", Gauge(|s| s.pool.capacity_bytes)),
    metric("forebay_pool_populated_bytes", "Memory that is backed by pages.", Gauge(|s| s.pool.populated_bytes)),
    metric("forebay_pool_huge_bytes", "Memory that is backed by huge pages.", Gauge(|s| s.pool.huge_bytes)),
    metric(
        "forebay_pool_slots",
        "Slots by size and state; each is in one state.",
        Gauges(&["slot_bytes", "state"], slots_by_class),
    ),
    metric("forebay_pool_used_bytes", "Bytes of the slots in use, over all sizes.", Gauge(used_bytes)),
    metric("forebay_pool_pinned_bytes", "Bytes that leases keep from eviction.", Gauge(|s| s.held.pinned_bytes)),
    metric("forebay_pool_reserved_bytes", "Bytes handed out to be filled.", Gauge(|s| s.held.reserved_bytes)),
    metric("forebay_pool_fenced_bytes", "Bytes out of use until a holder is gone.", Gauge(|s| s.held.fenced_bytes)),
    metric("forebay_pool_fenced_blocks", "Slots out of use until a holder is gone.", Gauge(|s| s.held.fenced_blocks)),
    metric(
        "forebay_expected_groups",
        "Groups of requests that wait in engines' queues, as far as these said so.",
        Gauge(|s| s.held.expected),
    ),
    metric(
        "forebay_wanted_bytes",
        "Bytes that such requests will ask for and evictions pass over, stored or not yet.",
        Gauge(|s| s.held.wanted_bytes),
    ),
    metric("forebay_extents_moved_total", "Extents that went to another slot size.", Counter(|s| s.core.extents_moved)),
    metric("forebay_blocks_moved_total", "Blocks that left such extents for other slots.", Counter(|s| s.core.moved)),
    // Lookups.
    metric(
        "forebay_lookups_total",
        "Requests asked about; one asked again while blocks come up counts once.",
        Counter(|s| s.core.lookups),
    ),
    metric("forebay_lookup_keys_total", "Keys asked about; hits and misses add up to it.", Counter(|s| s.core.keys)),
    metric("forebay_lookup_hits_total", "Keys answered as ready.", Counter(|s| s.core.hits)),
    metric("forebay_lookup_hit_bytes_total", "Bytes of the blocks answered as ready.", Counter(|s| s.core.hit_bytes)),
    metric("forebay_lookup_misses_total", "Keys not served, by reason.", Counters(&["reason"], misses_by_reason)),
    metric(
        "forebay_lookup_seconds",
        "From a lookup's arrival to its answer, in the daemon.",
        Seconds(|s| &s.lookup_time),
    ),
    // How good the hit rate could be.
    metric(
        "forebay_ceiling_ratio",
        "Share of the keys asked about in the window that a cache without limit would have hit.",
        Ratios(&["window"], ceilings),
    ),
    metric(
        "forebay_sampled_keys",
        "Keys looked at for the optimum: some of the latest.",
        Gauge(|s| s.estimates.all.sampled.asked),
    ),
    metric(
        "forebay_sampled_hits",
        "Of the sampled keys, those that were hits.",
        Gauge(|s| s.estimates.all.sampled.hits),
    ),
    metric(
        "forebay_sampled_optimum_hits",
        "Of the sampled keys, those that the best possible cache of the pool's size would have hit.",
        Gauge(|s| s.estimates.all.sampled.optimum_hits),
    ),
    metric(
        "forebay_capacity_curve_ratio",
        "Share of the keys that would be hit with so much memory, and the disk there is.",
        Ratios(&["capacity_bytes"], curve),
    ),
    metric(
        "forebay_sampled_below_optimum_ratio",
        "Share of another sample that the best possible cache as large as pool and disk together would have hit.",
        Ratios(&["tiers"], below_optimum),
    ),
    metric(
        "forebay_disk_curve_ratio",
        "Share of the keys that would be hit with the pool as it is and a disk of so many bytes under it, 0 for none.",
        Ratios(&["capacity_bytes"], |s| ratios(&s.estimates.all.disk_curve)),
    ),
    metric(
        "forebay_namespace_sampled_keys",
        "Sampled keys by namespace; the last may stand for others.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.asked)),
    ),
    metric(
        "forebay_namespace_sampled_hits",
        "Of a namespace's sampled keys, those that were hits.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.hits)),
    ),
    metric(
        "forebay_namespace_sampled_optimum_hits",
        "Of a namespace's sampled keys, its share of what the best possible cache of the pool's size would have hit.",
        Gauges(NAMESPACE, |s| by_namespace(s, |share| share.sampled.optimum_hits)),
    ),
    metric(
        "forebay_namespace_capacity_curve_ratio",
        "Share of a namespace's keys that would be hit with so much memory for all, and the disk there is.",
        Ratios(&["namespace", "capacity_bytes"], |s| curves_by_namespace(s, |share| &share.curve)),
    ),
    metric(
        "forebay_namespace_disk_curve_ratio",
        "Share of a namespace's keys that would be hit with a disk of so many bytes for all.",
        Ratios(&["namespace", "capacity_bytes"], |s| curves_by_namespace(s, |share| &share.disk_curve)),
    ),
    metric("forebay_alarm", "1 while the alarm holds; `forebay advise` says why.", Gauges(&["name"], alarms)),
    metric(
        "forebay_insight_left_out_total",
        "Lookups that came too fast to be looked at for these estimates.",
        Counter(|s| s.estimates.left_out),
    ),
    // Stores.
    metric("forebay_reserved_slots_total", "Empty slots handed out to be filled.", Counter(|s| s.core.reserved)),
    metric("forebay_refused_slots_total", "Slots asked for and not given.", Counter(|s| s.core.reserve_refused)),
    metric("forebay_stored_blocks_total", "Blocks that became ready.", Counter(|s| s.core.stored)),
    metric("forebay_stored_bytes_total", "Bytes of the blocks that became ready.", Counter(|s| s.core.stored_bytes)),
    metric(
        "forebay_unstored_blocks_total",
        "Reserved slots that did not become a block, by reason.",
        Counters(&["reason"], unstored_by_reason),
    ),
    // What left the pool, and what came back.
    metric("forebay_evicted_blocks_total", "Blocks that made room for others.", Counter(|s| s.core.evicted)),
    metric("forebay_evicted_bytes_total", "Bytes of the blocks that made room.", Counter(|s| s.core.evicted_bytes)),
    metric("forebay_purged_blocks_total", "Blocks dropped by `forebay purge`.", Counter(|s| s.core.purged)),
    metric("forebay_recovered_blocks_total", "Blocks found in the pool at start.", Counter(|s| s.core.recovered)),
    metric("forebay_verified_blocks_total", "Recovered blocks whose checksum was right.", Counter(|s| s.core.verified)),
    metric(
        "forebay_suspected_blocks_total",
        "Blocks that were compared because a worker said that they are not what was stored.",
        Counter(|s| s.core.suspected),
    ),
    metric(
        "forebay_corrupt_blocks_total",
        "Blocks whose checksum was wrong, by who found it: restart, load, get, scrub or audit.",
        Counters(&["found_by"], corrupt_by_finder),
    ),
    metric(
        "forebay_scrubbed_bytes_total",
        "Bytes of the pool that were read to find such blocks.",
        Counter(|s| s.core.scrubbed_bytes),
    ),
    metric("forebay_scrubs_total", "Times that all of the pool was read for it.", Counter(|s| s.core.scrubs)),
    // The tiers below the pool.
    metric(
        "forebay_tier_state",
        "1 for the state the tier is in: opening, serving, sick or failed.",
        Gauges(&["tier", "state"], tier_states),
    ),
    metric("forebay_tier_blocks", "Blocks known to lie on the tier.", Gauges(TIER, |s| tiers(s, |t| t.core.blocks))),
    metric(
        "forebay_tier_operations_total",
        "Operations that ended, by kind and outcome.",
        Counters(&["tier", "op", "outcome"], tier_operations),
    ),
    metric(
        "forebay_tier_refused_operations_total",
        "Operations that the tier's full queue sent back; each is offered again.",
        Counters(&["tier", "op"], |s| by_kind(s, |counts| counts.refused)),
    ),
    metric(
        "forebay_tier_operation_bytes_total",
        "Bytes moved by operations that succeeded.",
        Counters(&["tier", "op"], |s| by_kind(s, |counts| counts.done_bytes)),
    ),
    metric(
        "forebay_tier_operation_seconds",
        "From submission to completion, of operations that succeeded.",
        SecondsBy(&["tier", "op"], tier_times),
    ),
    metric(
        "forebay_tier_waiting_operations",
        "Operations that wait to be taken by the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.waiting)),
    ),
    metric(
        "forebay_tier_loading_bytes",
        "Bytes of slots that the tier is filling.",
        Gauges(TIER, |s| tiers(s, |t| t.core.loading_bytes)),
    ),
    metric(
        "forebay_tier_late_bytes",
        "Bytes of slots out of use until a late load ends; too many close the tier.",
        Gauges(TIER, |s| tiers(s, |t| t.core.late_bytes)),
    ),
    metric(
        "forebay_tier_storing_bytes",
        "Bytes of blocks pinned while they are written.",
        Gauges(TIER, |s| tiers(s, |t| t.core.storing_bytes)),
    ),
    metric(
        "forebay_tier_waiting_blocks",
        "Blocks that wait to be written.",
        Gauges(TIER, |s| tiers(s, |t| t.core.waiting_blocks)),
    ),
    metric(
        "forebay_tier_promotions_total",
        "Promotions that ended, by outcome.",
        Counters(&["tier", "outcome"], tier_promotions),
    ),
    metric(
        "forebay_tier_promotions_ahead_total",
        "Promotions started for requests that wait in engines' queues, before a lookup asked.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.ahead)),
    ),
    metric(
        "forebay_tier_promotions_ahead_used_total",
        "Of these, blocks that a lookup then asked for; the others were loaded in vain, or their requests still wait.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.ahead_used)),
    ),
    metric(
        "forebay_tier_promoted_bytes_total",
        "Bytes that came up into the pool.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.promoted_bytes)),
    ),
    metric(
        "forebay_tier_unwritten_blocks_total",
        "Blocks that were to be written and were not, by reason.",
        Counters(&["tier", "reason"], tier_unwritten),
    ),
    metric(
        "forebay_tier_stored_blocks_total",
        "Blocks written down.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.stored)),
    ),
    metric(
        "forebay_tier_evicted_blocks_total",
        "Blocks that the tier gave up, or removed for a purge.",
        Counters(TIER, |s| tiers(s, |t| t.core.stats.evicted)),
    ),
    metric(
        "forebay_tier_breaker_opened_total",
        "Times that the tier failed so often that it was left alone for a while.",
        Counters(TIER, |s| tiers(s, |t| t.breaker_opened)),
    ),
    metric(
        "forebay_disk_written_bytes_total",
        "All bytes written to the disk; beside stored bytes, its write amplification.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.written_bytes)),
    ),
    metric(
        "forebay_disk_stored_bytes_total",
        "Bytes of the blocks stored on the disk.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.stored_bytes)),
    ),
    metric(
        "forebay_disk_lifetime_written_bytes",
        "Written since the disk was made, for its endurance.",
        Gauges(DISK, |s| disks(s, |disk| disk.lifetime_written_bytes)),
    ),
    metric(
        "forebay_disk_live_bytes",
        "Bytes of the blocks that the disk holds.",
        Gauges(DISK, |s| disks(s, |disk| disk.live_bytes)),
    ),
    metric(
        "forebay_disk_carried_bytes_total",
        "Bytes of hot blocks that were written again to outlive their segment.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.carried_bytes)),
    ),
    metric(
        "forebay_disk_corrupt_blocks_total",
        "Blocks that were not what was written; none was served.",
        Counters(DISK, |s| disks(s, |disk| disk.counters.corrupt_blocks)),
    ),
    // The stores that hosts share.
    metric(
        "forebay_store_healthy",
        "1 if the store serves, 0 if it is left alone for now.",
        Gauges(STORE, |s| stores(s, |store| Some(u64::from(store.health == Health::Healthy)))),
    ),
    metric(
        "forebay_store_connections",
        "Connections to the store that can be used.",
        Gauges(STORE, |s| stores(s, |store| store.connections)),
    ),
    metric(
        "forebay_store_used_bytes",
        "An upper bound of what all hosts keep in the store, as this one last saw it.",
        Gauges(STORE, |s| stores(s, |store| store.used_bytes)),
    ),
    metric(
        "forebay_store_capacity_bytes",
        "What all hosts together may keep in the store, if that is limited.",
        Gauges(STORE, |s| stores(s, |store| store.capacity_bytes)),
    ),
    metric(
        "forebay_store_hanging_threads",
        "Threads that have been at one operation for longer than its timeout.",
        Gauges(STORE, |s| stores(s, |store| store.hanging_threads)),
    ),
    metric(
        "forebay_store_sweeper",
        "1 on the host that makes room in the store for all.",
        Gauges(STORE, |s| stores(s, |store| store.is_sweeper.map(u64::from))),
    ),
    metric(
        "forebay_store_events_total",
        "What happened to connections and values, by the names of the tier's page.",
        Counters(&["tier", "store", "event"], store_events),
    ),
    // Clients and the core.
    metric("forebay_sessions", "Open sessions.", Gauge(|s| s.clients.sessions)),
    metric("forebay_attached_workers", "Worker processes that map the pool.", Gauge(|s| s.clients.attached_workers)),
    metric("forebay_leases", "Leases held by clients.", Gauge(|s| s.held.leases)),
    metric("forebay_namespaces", "Namespaces known.", Gauge(|s| s.clients.namespaces)),
    metric("forebay_put_bytes_total", "Bytes copied in for clients without a mapping.", Counter(|s| s.rpc.put_bytes)),
    metric("forebay_get_bytes_total", "Bytes copied out for clients without a mapping.", Counter(|s| s.rpc.get_bytes)),
    metric("forebay_refused_peers_total", "Connections refused for their user id.", Counter(|s| s.rpc.refused_peers)),
    metric(
        "forebay_rpc_errors_total",
        "Calls that failed, by method and status.",
        Counters(&["method", "code"], errors_by_method),
    ),
    metric("forebay_event_seconds", "Time of one event in the core's thread.", Seconds(|s| &s.event_time)),
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
            Counter(_) | Counters(..) => MetricType::Counter,
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

fn version() -> Samples {
    vec![(vec![env!("CARGO_PKG_VERSION").to_string()], 1)]
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

fn below_optimum(snapshot: &Snapshot) -> Shares {
    let below = snapshot.estimates.all.sampled_below.filter(|below| below.asked > 0);
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

fn errors_by_method(snapshot: &Snapshot) -> Samples {
    let one = |errors: &super::RpcErrors| (vec![errors.method.to_string(), errors.code.to_string()], errors.count);
    snapshot.rpc.errors.iter().map(one).collect()
}

const PAGE_HEAD: &str = "\
# Metrics

The daemon serves these at `http://127.0.0.1:9477/metrics` (`http.address`), in OpenMetrics text form. Counters begin at zero
with each start of the daemon. Times are in seconds, sizes in bytes.

This page is generated from the code; `FOREBAY_UPDATE_GOLDEN=1 cargo test -p forebay-daemon --test pages` writes it anew.

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
