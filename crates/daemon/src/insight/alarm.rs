//! Alarms with their likely cause: blocks are stored and never hit, and the hit rate fell.
//!
//! Alarms are computed for each request for them, and at each step of the history; then the log says which alarms began
//! and ended.

use forebay_core::miss::MissReason;
use forebay_core::stats::Stats;

use super::{Estimates, History};

/// Fewer keys prove nothing.
const LEAST_KEYS: u64 = 1000;
/// "Lately", in steps of the history: 15 minutes.
const LATELY: usize = 3;
/// Below this share of the keys, hits are as good as none.
const NEXT_TO_NONE: f64 = 0.001;
/// A fall raises the alarm if less than half of the hit rate is left and at least five points are lost: smaller changes
/// are normal within a day.
const FELL_BELOW: f64 = 0.5;
const LEAST_FALL: f64 = 0.05;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    pub name: &'static str,
    pub cause: &'static str,
    pub hint: &'static str,
}

/// Of all alarms there are.
pub const NAMES: [&str; 2] = [NEVER_HIT, FELL];
const NEVER_HIT: &str = "stored but never hit";
const FELL: &str = "hit rate fell";

/// Those that hold now.
pub fn alarms(now: &Stats, history: &History, estimates: &Estimates) -> Vec<Alarm> {
    let lately = history.ago(LATELY).map(|then| since(now, then));
    let before = history.ago(LATELY).zip(history.oldest()).map(|(then, oldest)| since(then, oldest));
    let never_hit = never_hit(now, estimates);
    let fell = lately.zip(before).and_then(|(lately, before)| fell(&lately, &before));
    never_hit.into_iter().chain(fell).collect()
}

/// Remembers which alarms were told, so that each is logged when it begins and when it ends.
#[derive(Default)]
pub struct Watch {
    told: Vec<&'static str>,
}

impl Watch {
    pub fn tell(&mut self, now: &[Alarm]) {
        for Alarm { name, cause, hint } in now.iter().filter(|alarm| !self.told.contains(&alarm.name)) {
            tracing::warn!(alarm = name, cause, hint, "raised");
        }
        for name in self.told.iter().filter(|name| !now.iter().any(|alarm| alarm.name == **name)) {
            tracing::info!(alarm = name, "cleared");
        }
        self.told = now.iter().map(|alarm| alarm.name).collect();
    }
}

fn never_hit(now: &Stats, estimates: &Estimates) -> Option<Alarm> {
    let is_idle = now.keys < LEAST_KEYS || now.stored < LEAST_KEYS;
    if is_idle || now.hits as f64 >= NEXT_TO_NONE * now.keys as f64 {
        return None;
    }
    let (cause, hint) = cause_of_no_hits(now, estimates);
    Some(Alarm { name: NEVER_HIT, cause, hint })
}

fn cause_of_no_hits(now: &Stats, estimates: &Estimates) -> (&'static str, &'static str) {
    let share = |reason: MissReason| now.misses[reason as usize] as f64 / now.miss_count().max(1) as f64;
    let again = estimates.all.sampled.again as f64 / estimates.all.sampled.asked.max(1) as f64;
    if share(MissReason::OtherNamespace) > 0.1 {
        return (
            "the same blocks are stored under another model, layout or tenant",
            "compare the namespaces that `forebay inspect` lists, to find the field that differs",
        );
    }
    if share(MissReason::Evicted) > 0.1 {
        return (
            "blocks are evicted before they are looked up again",
            "give the pool more memory: raise `pool.capacity_bytes`",
        );
    }
    if again < NEXT_TO_NONE {
        return (
            "no key came twice: engines hash with random seeds or different block sizes, or prompts share nothing",
            "set the same PYTHONHASHSEED and block size for all engines",
        );
    }
    (
        "keys are looked up again, but the stored blocks have other keys",
        "see the engine's log and `forebay_unstored_blocks_total`: it may store nothing, or use another block size",
    )
}

fn fell(lately: &Stats, before: &Stats) -> Option<Alarm> {
    if lately.keys < LEAST_KEYS || before.keys < LEAST_KEYS {
        return None;
    }
    let ratio = |stats: &Stats| stats.hits as f64 / stats.keys as f64;
    let (new, old) = (ratio(lately), ratio(before));
    if new > FELL_BELOW * old || old - new < LEAST_FALL {
        return None;
    }
    let share = |stats: &Stats, reason: MissReason| stats.misses[reason as usize] as f64 / stats.keys as f64;
    let grown = |reason: &MissReason| share(lately, *reason) - share(before, *reason);
    let most = MissReason::ALL.into_iter().max_by(|a, b| grown(a).total_cmp(&grown(b)))?;
    let (cause, hint) = cause_of_fall(most);
    Some(Alarm { name: FELL, cause, hint })
}

fn cause_of_fall(most: MissReason) -> (&'static str, &'static str) {
    match most {
        MissReason::NeverSeen => (
            "many keys were never stored: new traffic, or an engine restarted with another hash seed",
            "set PYTHONHASHSEED for all engines, and check whether a model or a prompt template changed",
        ),
        MissReason::Evicted => (
            "the working set outgrew the pool",
            "raise `pool.capacity_bytes`; `forebay advise` shows the hit rate with more memory",
        ),
        MissReason::Refused => (
            "blocks are refused because earlier blocks of their prompt are not in the cache",
            "raise `pool.capacity_bytes`: the pool is too small for the prompts that run at a time",
        ),
        MissReason::Failed => (
            "blocks were corrupt, or a lower tier fails",
            "run `forebay audit`; `forebay inspect` and the daemon's log show the state of the tier",
        ),
        MissReason::TooSlow => (
            "loads from a lower tier miss their deadline",
            "check that tier's latency (`forebay_tier_operation_seconds`)",
        ),
        MissReason::NotYet => {
            ("the daemon restarted and is comparing blocks with their checksums", "wait: this ends by itself")
        }
        MissReason::OtherNamespace => (
            "engines look up blocks under another model, layout or tenant than before",
            "compare the namespaces that `forebay inspect` lists",
        ),
        MissReason::PromotionUnfinished => (
            "a lower tier is too slow for the blocks that have to be promoted",
            "raise `pool.capacity_bytes`, or use faster disks",
        ),
        MissReason::OverLimit => (
            "leases pin their whole share of the pool, or all memory for blocks of a size",
            "raise `pool.capacity_bytes`, or `pool.promise_share`",
        ),
    }
}

/// What was counted after `then`.
fn since(now: &Stats, then: &Stats) -> Stats {
    Stats {
        keys: now.keys - then.keys,
        hits: now.hits - then.hits,
        misses: std::array::from_fn(|at| now.misses[at] - then.misses[at]),
        stored: now.stored - then.stored,
        evicted: now.evicted - then.evicted,
        ..Stats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Share;
    use super::*;
    use forebay_insight::optimum::Sampled;
    use std::time::{Duration, Instant};

    fn counted(keys: u64, hits: u64, reason: MissReason) -> Stats {
        let mut stats = Stats { keys, hits, stored: keys, ..Stats::default() };
        stats.misses[reason as usize] = keys - hits;
        stats
    }

    fn history() -> History {
        History::new(Duration::from_secs(300))
    }

    fn estimates(again: u64) -> Estimates {
        let sampled = Sampled { asked: 1000, again, ..Sampled::default() };
        Estimates { all: Share { sampled, ..Share::default() }, ..Estimates::default() }
    }

    fn causes(now: &Stats, again: u64) -> Vec<&'static str> {
        alarms(now, &history(), &estimates(again)).into_iter().map(|alarm| alarm.cause).collect()
    }

    #[test]
    fn what_is_stored_and_never_hit_is_told_with_its_cause() {
        let none = counted(5000, 0, MissReason::NeverSeen);
        assert!(causes(&none, 0)[0].contains("random seed"));
        assert!(causes(&none, 400)[0].contains("other keys"));
        assert!(causes(&counted(5000, 0, MissReason::OtherNamespace), 0)[0].contains("another model"));
        assert!(causes(&counted(5000, 2, MissReason::Evicted), 400)[0].contains("evicted"));
        assert!(causes(&counted(5000, 50, MissReason::NeverSeen), 0).is_empty(), "one in a hundred is something");
        assert!(causes(&counted(900, 0, MissReason::NeverSeen), 0).is_empty(), "too few to tell");
    }

    #[test]
    fn a_fall_is_told_with_the_reason_that_grew_most() {
        let start = Instant::now();
        let mut history = history();
        let mut total = Stats::default();
        let mut add = |more: Stats, minute: u64| {
            total.keys += more.keys;
            total.hits += more.hits;
            total.stored += more.stored;
            (0..total.misses.len()).for_each(|at| total.misses[at] += more.misses[at]);
            history.tick(start + Duration::from_secs(60 * minute), &total);
            alarms(&total, &history, &estimates(500))
        };
        for hour in 0..5 {
            assert!(add(counted(10_000, 6000, MissReason::NeverSeen), hour * 60).is_empty());
        }
        let last = (1..=4).map(|step| add(counted(10_000, 1000, MissReason::Evicted), 240 + step * 5)).last().unwrap();
        assert_eq!(last.len(), 1, "{last:?}");
        assert_eq!((last[0].name, last[0].cause), ("hit rate fell", "the working set outgrew the pool"));
    }
}
