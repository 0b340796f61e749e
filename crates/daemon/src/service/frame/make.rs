//! A frame out of the counters, those of a while ago, and the estimates.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_core::miss::MissReason;
use forebay_core::report::{ClassReport, Held};
use forebay_core::{Instance, NamespaceId};
use forebay_io::StoreReport;
use forebay_io::ssd::DiskReport;
use forebay_rpc::proto::{
    CurvePoint, FrameEngine, FrameEstimates, FrameLookups, FrameMiss, FrameNamespace, FramePool, FrameReply,
    FrameSaved, FrameTenant, FrameTier, FrameWindow,
};

use crate::frame::Newest;
use crate::frame::sample::{MAX_ENGINES, Sample, quantile};
use crate::frame::steps::{Past, ratio};
use crate::frame::windows::{self, Lately, Sum};
use crate::health::{Finding, Health};
use crate::insight::{Alarm, Estimates, alarms};
use crate::instances::{Looked, Member};
use crate::service::advise::alarm as proto_alarm;
use crate::service::health::check as proto_check;
use crate::state::{Shared, State};
use crate::tiers::Report;

/// Those that hold most of the pool are told about.
const MAX_NAMESPACES: usize = 32;
const MAX_TENANTS: usize = 16;
/// "Now" is at least so long, and what was sampled before it at most so old.
const LEAST_NOW: Duration = Duration::from_millis(900);
const MOST_NOW: Duration = Duration::from_secs(10);
/// Windows of hit rates.
const WINDOWS: [&str; 3] = ["15m", "1h", "1d"];

/// All that is read under the lock.
struct Gathered {
    boot: u64,
    uptime: Duration,
    now: Sample,
    /// Where "now" begins, and where the last minute does.
    from: Option<Sample>,
    minute_ago: Option<Sample>,
    health: Health,
    alarms: Vec<Alarm>,
    classes: Vec<ClassReport>,
    held: Held,
    capacity_bytes: u64,
    populated_bytes: u64,
    disk_bytes: u64,
    tiers: Vec<Report>,
    engines: Vec<FrameEngine>,
    /// Of the sessions, by their place here.
    incarnations: Vec<u128>,
    namespaces: Vec<FrameNamespace>,
    tenants: Vec<FrameTenant>,
    left_out: usize,
}

/// Makes the next frame.
pub fn make(
    newest: &mut Newest,
    shared: &Shared,
    (begun, estimates): &(Instant, Arc<Estimates>),
    huge_bytes: Option<u64>,
) {
    let at = Instant::now();
    let (gathered, later) = {
        let mut state = shared.lock();
        state.steps.note(at, estimates);
        (Gathered::of(&state, at, estimates, newest.before.take()), state.steps.take())
    };
    newest.past.add(later);
    let frame = gathered.frame(&newest.past, estimates, begun.elapsed(), huge_bytes);
    (newest.before, newest.made) = (Some(gathered.now), Some((at, frame)));
}

/// The counters now. Looks at no block and no lease, only at what is counted anyway.
pub fn sample(state: &State, at: Instant) -> Sample {
    let (core, held) = (&state.core, state.core.held());
    let members = state.instances.iter().take(MAX_ENGINES).map(|(_, member)| member);
    Sample {
        at,
        at_ms: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
        core: core.stats().clone(),
        used_bytes: core.classes().iter().map(|class| class.used * class.slot_bytes).sum(),
        held_bytes: held.pinned_bytes + held.reserved_bytes + held.fenced_bytes,
        saved: state.saved,
        lookup_time: state.lookup_time.clone(),
        tiers: state.tiers.moved(core),
        engines: members.map(|member| (member.identity.incarnation, member.looked)).collect(),
    }
}

impl Gathered {
    fn of(state: &State, at: Instant, estimates: &Estimates, before: Option<Sample>) -> Gathered {
        let age = |sample: &Sample| at.saturating_duration_since(sample.at);
        let is_fit = |sample: &Sample| (LEAST_NOW..MOST_NOW).contains(&age(sample));
        let before = before.filter(is_fit).or_else(|| state.steps.before(at, LEAST_NOW).cloned());
        let (namespaces, tenants, left_out) = namespaces(state, estimates);
        let sessions = state.instances.iter().count();
        let told = || state.instances.iter().take(MAX_ENGINES);
        Gathered {
            boot: state.boot_id,
            uptime: state.started.elapsed(),
            now: sample(state, at),
            from: before,
            minute_ago: state.steps.minute_ago().cloned(),
            health: Health::of(state),
            alarms: alarms(state.core.stats(), &state.history, estimates),
            classes: state.classes(),
            held: state.core.held(),
            capacity_bytes: state.core.capacity_bytes(),
            populated_bytes: state.core.populated_bytes(),
            disk_bytes: state.disk_bytes().unwrap_or(0),
            tiers: state.tiers.reports(&state.core),
            engines: told().map(|(instance, member)| engine(state, instance, member)).collect(),
            incarnations: told().map(|(_, member)| member.identity.incarnation).collect(),
            namespaces,
            tenants,
            left_out: left_out + sessions.saturating_sub(MAX_ENGINES),
        }
    }

    fn frame(&self, past: &Past, estimates: &Estimates, age: Duration, huge_bytes: Option<u64>) -> FrameReply {
        let lately = Lately::of(past);
        let tiers = (0..self.tiers.len()).map(|at| self.tier(at, &lately));
        let holds = |checks: &[crate::health::Check]| checks.iter().all(|check| check.finding != Finding::Fails);
        let (live, ready) = (self.health.live(), self.health.ready());
        FrameReply {
            boot: format!("{:016x}", self.boot),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            at_ms: self.now.at_ms,
            uptime_seconds: self.uptime.as_secs(),
            now_seconds: short(self.seconds()),
            is_live: holds(&live),
            is_ready: holds(&ready),
            checks: ready.into_iter().map(proto_check).collect(),
            alarms: self.alarms.iter().cloned().map(proto_alarm).collect(),
            pool: Some(self.pool(huge_bytes)),
            lookups: Some(self.lookups()),
            windows: windows(past, estimates),
            estimates: Some(self.estimates(estimates, age)),
            misses: self.misses(&lately),
            tiers: std::iter::once(self.pool_tier(&lately)).chain(tiers).collect(),
            engines: self.engines(),
            namespaces: self.namespaces.clone(),
            tenants: self.tenants.clone(),
            left_out: self.left_out as u64,
            saved: Some(self.saved(&lately)),
            hour: None,
            day: None,
        }
    }

    /// How long "now" is: since the daemon started, if there is no sample yet.
    fn seconds(&self) -> f64 {
        let from = self.from.as_ref().map(|from| self.now.at.saturating_duration_since(from.at));
        from.unwrap_or(self.uptime).as_secs_f64().max(1e-3)
    }

    /// By second, now.
    fn rate(&self, of: impl Fn(&Sample) -> u64) -> f64 {
        let before = self.from.as_ref().map_or(0, &of);
        short(of(&self.now).saturating_sub(before) as f64 / self.seconds())
    }

    fn pool(&self, huge_bytes: Option<u64>) -> FramePool {
        let bytes = |slots: fn(&ClassReport) -> u64| -> u64 {
            self.classes.iter().map(|class| slots(class) * class.slot_bytes).sum()
        };
        FramePool {
            capacity_bytes: self.capacity_bytes,
            populated_bytes: self.populated_bytes,
            huge_bytes,
            ready_bytes: bytes(|class| class.ready),
            pinned_bytes: self.held.pinned_bytes,
            reserved_bytes: self.held.reserved_bytes,
            promoting_bytes: bytes(|class| class.promoting),
            fenced_bytes: self.held.fenced_bytes,
            used_bytes: bytes(|class| class.used),
            stored_bytes_per_second: self.rate(|sample| sample.core.stored_bytes),
            evicted_bytes_per_second: self.rate(|sample| sample.core.evicted_bytes),
            stored_blocks: self.now.core.stored,
            evicted_blocks: self.now.core.evicted,
            is_draining: self.health.is_draining,
        }
    }

    fn lookups(&self) -> FrameLookups {
        let core = &self.now.core;
        let before = self.from.as_ref().map_or((0, 0), |from| (from.core.keys, from.core.hits));
        FrameLookups {
            lookups: core.lookups,
            keys: core.keys,
            hits: core.hits,
            lookups_per_second: self.rate(|sample| sample.core.lookups),
            keys_per_second: self.rate(|sample| sample.core.keys),
            hit_ratio: ratio(core.hits - before.1, core.keys - before.0).map(short),
            hit_bytes_per_second: self.rate(|sample| sample.core.hit_bytes),
            p50_seconds: self.lookup_time(0.5),
            p99_seconds: self.lookup_time(0.99),
        }
    }

    fn lookup_time(&self, q: f64) -> Option<f64> {
        quantile(&self.now.lookup_time, self.minute_ago.as_ref().map(|sample| &sample.lookup_time), q)
    }

    fn estimates(&self, estimates: &Estimates, age: Duration) -> FrameEstimates {
        let (all, sampled) = (&estimates.all, &estimates.all.sampled);
        let of_sample = |part: u64| ratio(part, sampled.asked).map(short);
        FrameEstimates {
            age_seconds: short(age.as_secs_f64()),
            sampled_keys: sampled.asked,
            hit_ratio: of_sample(sampled.hits),
            ceiling_ratio: of_sample(sampled.again),
            optimum_ratio: of_sample(sampled.optimum_hits),
            tiers_optimum_ratio: all.sampled_tiers.and_then(|below| ratio(below.optimum_hits, below.asked)).map(short),
            memory_curve: points(&all.curve),
            disk_curve: points(&all.disk_curve),
            disk_bytes: self.disk_bytes,
            left_out: estimates.left_out,
        }
    }

    fn misses(&self, lately: &Lately) -> Vec<FrameMiss> {
        let miss = |reason: MissReason| FrameMiss {
            reason: reason.name().to_owned(),
            keys: self.now.core.misses[reason as usize],
            keys_per_second: self.rate(|sample| sample.core.misses[reason as usize]),
            share_ratio: share(&lately.misses, reason as usize),
        };
        MissReason::ALL.into_iter().map(miss).collect()
    }

    fn pool_tier(&self, lately: &Lately) -> FrameTier {
        FrameTier {
            name: "pool".to_owned(),
            state: "serving".to_owned(),
            hits: self.now.pool_hits(),
            hits_per_second: self.rate(Sample::pool_hits),
            share_ratio: share(&lately.hits, 0),
            held_bytes: Some(self.classes.iter().map(|class| class.ready * class.slot_bytes).sum()),
            capacity_bytes: Some(self.capacity_bytes),
            held_blocks: self.classes.iter().map(|class| class.ready).sum(),
            up_bytes_per_second: self.rate(|sample| sample.core.hit_bytes),
            down_bytes_per_second: self.rate(|sample| sample.core.stored_bytes),
            p50_seconds: self.lookup_time(0.5),
            p99_seconds: self.lookup_time(0.99),
            ..FrameTier::default()
        }
    }

    fn tier(&self, at: usize, lately: &Lately) -> FrameTier {
        let (report, health, moved) = (&self.tiers[at], &self.health.tiers[at], &self.now.tiers[at]);
        let minute_ago = self.minute_ago.as_ref().map(|sample| &sample.tiers[at].load_time);
        let load_time = |q: f64| quantile(&moved.load_time, minute_ago, q);
        let (held_bytes, capacity_bytes) = fill(report);
        FrameTier {
            name: report.name.to_owned(),
            state: health.state.to_owned(),
            trouble: if health.is_whole { String::new() } else { health.why.clone() },
            hits: moved.hits,
            hits_per_second: self.rate(|sample| sample.tiers[at].hits),
            share_ratio: share(&lately.hits, 1 + at),
            held_bytes,
            capacity_bytes,
            held_blocks: report.core.blocks,
            up_bytes_per_second: self.rate(|sample| sample.tiers[at].up_bytes),
            down_bytes_per_second: self.rate(|sample| sample.tiers[at].down_bytes),
            p50_seconds: load_time(0.5),
            p99_seconds: load_time(0.99),
            loading_blocks: report.core.loading_blocks,
            waiting_blocks: report.core.waiting_blocks,
            storing_blocks: report.core.storing_blocks,
            waiting_operations: report.waiting,
            late_bytes: report.core.late_bytes,
            is_shared: report.is_shared,
        }
    }

    fn engines(&self) -> Vec<FrameEngine> {
        let told = |(engine, incarnation): (&FrameEngine, &u128)| {
            let before = self.from.as_ref().map_or(Looked::default(), |from| from.looked(*incarnation));
            let keys = engine.keys.saturating_sub(before.keys);
            let hits = engine.hits.saturating_sub(before.hits);
            FrameEngine {
                keys_per_second: short(keys as f64 / self.seconds()),
                hit_ratio: ratio(hits, keys).map(short),
                ..engine.clone()
            }
        };
        self.engines.iter().zip(&self.incarnations).map(told).collect()
    }

    fn saved(&self, lately: &Lately) -> FrameSaved {
        let by_second = |sum: f64| short(sum / lately.seconds.max(1.0));
        FrameSaved {
            tokens: self.now.saved.tokens,
            prefill_seconds: self.now.saved.prefill_us as f64 / 1e6,
            tokens_per_second: by_second(lately.saved_tokens),
            prefill_seconds_per_second: by_second(lately.saved_prefill),
        }
    }
}

/// Of one among all.
fn share(all: &[f64], one: usize) -> Option<f64> {
    let sum: f64 = all.iter().sum();
    (sum > 0.0).then(|| short(all[one] / sum))
}

fn windows(past: &Past, estimates: &Estimates) -> Vec<FrameWindow> {
    let window = |((name, sum), ceiling): ((&str, Sum), Option<f64>)| FrameWindow {
        name: name.to_owned(),
        seconds: short(sum.seconds),
        keys: sum.keys,
        hit_ratio: ratio(sum.hits, sum.keys).map(short),
        ceiling_ratio: ceiling_above(ceiling, ratio(sum.hits, sum.keys)).map(short),
    };
    let ceilings = estimates.windows.iter().map(|window| window.as_ref()?.ceiling());
    WINDOWS.into_iter().zip(windows::sums(past)).zip(ceilings).map(window).collect()
}

/// What a tier holds and what it can hold, as far as all its disks or stores say so.
fn fill(report: &Report) -> (Option<u64>, Option<u64>) {
    if report.is_shared {
        let sum = |of: fn(&StoreReport) -> Option<u64>| report.stores.iter().map(of).sum::<Option<u64>>();
        let (used, capacity) = (sum(|store| store.used_bytes), sum(|store| store.capacity_bytes));
        return if report.stores.is_empty() { (None, None) } else { (used, capacity) };
    }
    let capacity = |disk: &DiskReport| u64::from(disk.geometry.segments) * disk.geometry.segment_bytes;
    let used = report.disks.iter().map(|disk| disk.live_bytes).sum();
    (Some(used), Some(report.disks.iter().map(capacity).sum()))
}

/// Without rates, which are made of it later.
fn engine(state: &State, instance: Option<Instance>, member: &Member) -> FrameEngine {
    let (leases, leased_blocks, reserved_blocks) =
        instance.map(|instance| state.core.holdings(instance)).unwrap_or_default();
    let state = match &member.session {
        None => "gone",
        Some(_) if member.ranks == 0 => "client",
        Some(_) if member.is_attached() => "ready",
        Some(_) => "attaching",
    };
    FrameEngine {
        session: member.session.as_ref().map_or(0, |session| session.id),
        engine_id: member.identity.engine_id.clone(),
        state: state.to_owned(),
        ranks: member.ranks,
        attached_ranks: member.workers.len() as u32,
        keys: member.looked.keys,
        hits: member.looked.hits,
        leases,
        leased_blocks,
        reserved_blocks,
        waiting_lookups: member.session.as_ref().map_or(0, |session| session.follows.len() as u64),
        saved_tokens: member.saved.tokens,
        saved_prefill_seconds: member.saved.prefill_us as f64 / 1e6,
        ..FrameEngine::default()
    }
}

/// The largest namespaces and tenants, and how many others there are.
fn namespaces(state: &State, estimates: &Estimates) -> (Vec<FrameNamespace>, Vec<FrameTenant>, usize) {
    let held = state.core.namespaces().into_iter().map(|report| {
        let blocks: u64 = report.groups.iter().map(|(_, _, blocks)| blocks).sum();
        let bytes: u64 = report.groups.iter().map(|(_, bytes, blocks)| bytes * blocks).sum();
        (report.id, (blocks, bytes))
    });
    let mut held: Vec<(NamespaceId, (u64, u64))> = held.filter(|(_, (blocks, _))| *blocks > 0).collect();
    held.sort_unstable_by_key(|(id, (_, bytes))| (Reverse(*bytes), id.0));
    let descriptors: HashMap<NamespaceId, _> = state.namespaces.descriptors().collect();
    let mut tenants: BTreeMap<&str, FrameTenant> = BTreeMap::new();
    for (id, (_, bytes)) in &held {
        let tenant = descriptors.get(id).map_or("", |descriptor| descriptor.tenant());
        let told = tenants.entry(tenant).or_default();
        told.namespaces += 1;
        told.ready_bytes += bytes;
    }
    let of = |(id, (ready_blocks, ready_bytes)): &(NamespaceId, (u64, u64))| {
        let namespace_id = id.to_string();
        let field =
            |name: &str| descriptors.get(id).and_then(|descriptor| descriptor.get(name)).unwrap_or("").to_owned();
        let sampled = estimates.namespaces.iter().find(|share| share.name == namespace_id);
        let sampled = sampled.map(|share| share.sampled).unwrap_or_default();
        FrameNamespace {
            namespace_id,
            model: field("model"),
            tenant: field("tenant"),
            ready_blocks: *ready_blocks,
            ready_bytes: *ready_bytes,
            sampled_keys: sampled.asked,
            hit_ratio: ratio(sampled.hits, sampled.asked).map(short),
            optimum_ratio: ratio(sampled.optimum_hits, sampled.asked).map(short),
        }
    };
    let left_out = held.len().saturating_sub(MAX_NAMESPACES) + tenants.len().saturating_sub(MAX_TENANTS);
    let namespaces = held.iter().take(MAX_NAMESPACES).map(of).collect();
    let named = |(tenant, told): (&str, FrameTenant)| FrameTenant { tenant: tenant.to_owned(), ..told };
    let mut tenants: Vec<FrameTenant> = tenants.into_iter().map(named).collect();
    tenants.sort_by_key(|tenant| Reverse(tenant.ready_bytes));
    tenants.truncate(MAX_TENANTS);
    (namespaces, tenants, left_out)
}

/// The estimate of a ceiling may be seconds older than the hits beside it, and is none of exactly their time. What was
/// hit could be hit.
fn ceiling_above(ceiling: Option<f64>, hit: Option<f64>) -> Option<f64> {
    ceiling.map(|ceiling| hit.map_or(ceiling, |hit| ceiling.max(hit)))
}

fn points(curve: &[(u64, f64)]) -> Vec<CurvePoint> {
    curve
        .iter()
        .map(|(capacity_bytes, ratio)| CurvePoint { capacity_bytes: *capacity_bytes, hit_ratio: *ratio })
        .collect()
}

/// To a ten-thousandth: enough for people, and short in JSON. The sum of nothing is -0.
fn short(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0 + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_of_a_window_is_not_below_its_hits() {
        assert_eq!(ceiling_above(Some(0.909), Some(1.0)), Some(1.0));
        assert_eq!(ceiling_above(Some(0.909), Some(0.5)), Some(0.909));
        assert_eq!(ceiling_above(Some(0.909), None), Some(0.909));
        assert_eq!(ceiling_above(None, Some(1.0)), None, "it is not estimated yet");
    }
}
