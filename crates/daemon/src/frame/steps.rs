//! The history of a frame: an hour in steps of 5 s and a day in steps of five minutes.
//!
//! Rows are made here, and move to the [`Past`] of the frames when somebody looks: so nothing is copied while the state
//! is locked, however long the history is.
//!
//! Invariant: memory is fixed, 220 KB of rows here, as much where frames are made, and a minute of samples. Rows hold
//! no name and grow with nothing.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forebay_core::histogram::Histogram;
use forebay_core::miss::MissReason;
use forebay_core::tiers::TierId;
use forebay_rpc::{DAY_STEPS, HOUR_STEPS};

use super::sample::{Sample, quantile};
use crate::insight::Estimates;

/// A step of the hour, and how many there are.
pub const HOUR: (Duration, usize) = (Duration::from_secs(5), HOUR_STEPS);
/// A step of the day, and how many there are.
pub const DAY: (Duration, usize) = (Duration::from_secs(300), DAY_STEPS);
/// Samples that are kept whole, one for each step of the hour: latencies are those of the last minute.
const RECENT: usize = 13;
/// How long an estimate is taken to hold. The daemon makes one every five minutes, for the alarms.
const ESTIMATE_HOLDS: Duration = Duration::from_secs(900);

/// What happened in one step. Rates are by second, and what is not known is NaN.
#[derive(Clone, Copy)]
pub struct Row {
    pub end_ms: u64,
    pub seconds: f32,
    pub keys: u64,
    pub hits: u64,
    pub ceiling: f32,
    pub optimum: f32,
    pub hit_bytes: f32,
    pub stored_bytes: f32,
    pub evicted_bytes: f32,
    pub used_bytes: f32,
    pub held_bytes: f32,
    pub saved_tokens: f32,
    pub saved_prefill: f32,
    pub lookup_p99: f32,
    pub misses: [f32; MissReason::ALL.len()],
    /// The pool, then the configured tiers.
    pub tiers: [TierRow; 1 + TierId::MAX],
}

#[derive(Clone, Copy, Default)]
pub struct TierRow {
    pub hits: f32,
    pub up_bytes: f32,
    pub down_bytes: f32,
}

pub struct Steps {
    hour: Ring,
    day: Ring,
    /// Oldest first.
    recent: VecDeque<Sample>,
    /// Ceiling and optimum as they were told last.
    estimated: Option<(Instant, f32, f32)>,
}

struct Ring {
    step: (Duration, usize),
    rows: Rows,
    next: Option<Instant>,
    before: Option<Sample>,
}

/// Rows in their order, the oldest first.
#[derive(Default)]
pub struct Rows {
    pub rows: VecDeque<Row>,
    /// The number of the last one: how many there ever were.
    pub last: u64,
}

/// The rows that frames have, or those that came since the frame before.
#[derive(Default)]
pub struct Past {
    pub hour: Rows,
    pub day: Rows,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps { hour: Ring::new(HOUR), day: Ring::new(DAY), recent: VecDeque::new(), estimated: None }
    }
}

impl Steps {
    /// Called now and then. `None` if it is not yet time for a sample.
    pub fn is_due(&self, now: Instant) -> bool {
        self.hour.is_due(now)
    }

    pub fn add(&mut self, sample: Sample) {
        let estimated = self.estimated.filter(|(at, ..)| sample.at.saturating_duration_since(*at) < ESTIMATE_HOLDS);
        let estimated = estimated.map_or((f32::NAN, f32::NAN), |(_, ceiling, optimum)| (ceiling, optimum));
        self.hour.add(&sample, estimated);
        if self.day.is_due(sample.at) {
            self.day.add(&sample, estimated);
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
    }

    /// Rows have these from now on.
    pub fn note(&mut self, now: Instant, estimates: &Estimates) {
        let ceiling = estimates.windows[0].and_then(|window| window.ceiling());
        let optimum = ratio(estimates.all.sampled.optimum_hits, estimates.all.sampled.asked);
        self.estimated = Some((now, known(ceiling), known(optimum)));
    }

    /// The rows that were not taken before.
    pub fn take(&mut self) -> Past {
        Past { hour: self.hour.rows.take(), day: self.day.rows.take() }
    }

    /// The youngest sample that is at least so old.
    pub fn before(&self, now: Instant, age: Duration) -> Option<&Sample> {
        self.recent.iter().rev().find(|sample| now.saturating_duration_since(sample.at) >= age)
    }

    /// The oldest that is kept, about a minute old.
    pub fn minute_ago(&self) -> Option<&Sample> {
        self.recent.front()
    }
}

impl Ring {
    fn new(step: (Duration, usize)) -> Ring {
        Ring { step, rows: Rows::default(), next: None, before: None }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    fn add(&mut self, sample: &Sample, estimated: (f32, f32)) {
        let (step, length) = self.step;
        // A late step is no reason to be late with the next; one that is missed altogether is left out.
        let on_time = self.next.map(|next| next + step).filter(|next| *next > sample.at);
        self.next = Some(on_time.unwrap_or(sample.at + step));
        if let Some(before) = self.before.replace(sample.clone()) {
            self.rows.push(Row::between(&before, sample, estimated), length);
        }
    }
}

impl Past {
    /// Rows that were taken later.
    pub fn add(&mut self, later: Past) {
        for (rows, later, (_, length)) in [(&mut self.hour, later.hour, HOUR), (&mut self.day, later.day, DAY)] {
            later.rows.into_iter().for_each(|row| rows.push(row, length));
            rows.last = later.last;
        }
    }
}

impl Rows {
    /// The oldest goes if there are more than `length`.
    fn push(&mut self, row: Row, length: usize) {
        if self.rows.len() == length {
            self.rows.pop_front();
        }
        self.rows.push_back(row);
        self.last += 1;
    }

    fn take(&mut self) -> Rows {
        Rows { rows: std::mem::take(&mut self.rows), last: self.last }
    }
}

impl Row {
    fn between(from: &Sample, to: &Sample, (ceiling, optimum): (f32, f32)) -> Row {
        let seconds = to.at.saturating_duration_since(from.at).as_secs_f64().max(1e-3);
        let rate = |now: u64, before: u64| (now.saturating_sub(before) as f64 / seconds) as f32;
        let (new, old) = (&to.core, &from.core);
        let pool = TierRow {
            hits: rate(to.pool_hits(), from.pool_hits()),
            up_bytes: rate(new.hit_bytes, old.hit_bytes),
            down_bytes: rate(new.stored_bytes, old.stored_bytes),
        };
        let mut tiers = [TierRow::default(); 1 + TierId::MAX];
        tiers[0] = pool;
        for (row, (new, old)) in tiers[1..].iter_mut().zip(to.tiers.iter().zip(&from.tiers)) {
            *row = TierRow {
                hits: rate(new.hits, old.hits),
                up_bytes: rate(new.up_bytes, old.up_bytes),
                down_bytes: rate(new.down_bytes, old.down_bytes),
            };
        }
        let p99 = |to: &Histogram, from: &Histogram| known(quantile(to, Some(from), 0.99));
        Row {
            end_ms: to.at_ms,
            seconds: seconds as f32,
            keys: new.keys - old.keys,
            hits: new.hits - old.hits,
            ceiling,
            optimum,
            hit_bytes: rate(new.hit_bytes, old.hit_bytes),
            stored_bytes: rate(new.stored_bytes, old.stored_bytes),
            evicted_bytes: rate(new.evicted_bytes, old.evicted_bytes),
            used_bytes: to.used_bytes as f32,
            held_bytes: to.held_bytes as f32,
            saved_tokens: rate(to.saved.tokens, from.saved.tokens),
            saved_prefill: rate(to.saved.prefill_us, from.saved.prefill_us) / 1e6,
            lookup_p99: p99(&to.lookup_time, &from.lookup_time),
            misses: std::array::from_fn(|at| rate(new.misses[at], old.misses[at])),
            tiers,
        }
    }
}

/// `None` of nothing.
pub fn ratio(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

/// As rows have it.
pub fn known(value: Option<f64>) -> f32 {
    value.map_or(f32::NAN, |value| value as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, keys: u64) -> Sample {
        let mut sample = Sample {
            at,
            at_ms: 0,
            core: Default::default(),
            used_bytes: 0,
            held_bytes: 0,
            saved: Default::default(),
            lookup_time: Histogram::default(),
            tiers: Vec::new(),
            engines: Vec::new(),
        };
        (sample.core.keys, sample.core.hits) = (keys, keys / 2);
        sample
    }

    #[test]
    fn an_hour_and_a_day_are_kept_in_fixed_memory_and_their_keys_add_up() {
        let (start, mut steps) = (Instant::now(), Steps::default());
        let asked = |second: u64| second * second;
        let ticks = 2 * 86_400;
        for second in 0..ticks {
            let now = start + Duration::from_secs(second);
            if steps.is_due(now) {
                steps.add(sample(now, asked(second)));
            }
        }
        let Past { hour, day } = steps.take();
        assert_eq!((hour.rows.len(), hour.last), (720, (ticks - 1) / 5));
        assert_eq!((day.rows.len(), day.last), (288, (ticks - 1) / 300));
        let keys = |rows: &VecDeque<Row>| rows.iter().map(|row| row.keys).sum::<u64>();
        let last = ticks - 5;
        assert_eq!(keys(&hour.rows), asked(last) - asked(last - 3600));
        let last = ticks - 300;
        assert_eq!(keys(&day.rows), asked(last) - asked(last - 86_400));
        assert_eq!(steps.recent.len(), RECENT);
    }

    /// However often somebody looked meanwhile, and after a long time in which nobody did.
    #[test]
    fn the_rows_that_were_taken_piece_by_piece_are_those_that_there_are() {
        let (start, mut steps, mut past) = (Instant::now(), Steps::default(), Past::default());
        let mut sampled = 0;
        for (ticks, every) in [(100, 1), (400, 7), (10, 3), (900, 900), (40, 1), (1600, 1599)] {
            for tick in 1..=ticks {
                steps.add(sample(start + HOUR.0 * sampled, u64::from(sampled)));
                sampled += 1;
                if tick % every == 0 {
                    let later = steps.take();
                    let most = every.min(HOUR.1 as u32) as usize;
                    assert!(later.hour.rows.len() <= most && steps.take().hour.rows.is_empty());
                    past.add(later);
                }
            }
            past.add(steps.take());
            let made = sampled - 1;
            assert_eq!(past.hour.last, u64::from(made));
            assert_eq!(past.hour.rows.len(), (made as usize).min(HOUR.1));
            assert!(past.hour.rows.iter().all(|row| row.keys == 1), "one key came in each step");
            assert_eq!((past.day.last, past.day.rows.len()), (u64::from(made / 60), made as usize / 60));
        }
    }

    #[test]
    fn a_late_step_does_not_delay_those_after_it() {
        let (start, mut ring) = (Instant::now(), Ring::new(HOUR));
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        ring.add(&sample(at(0), 0), (0.0, 0.0));
        ring.add(&sample(at(52), 52), (0.0, 0.0));
        assert!(!ring.is_due(at(99)) && ring.is_due(at(100)));
        ring.add(&sample(at(170), 170), (0.0, 0.0));
        assert!(!ring.is_due(at(219)) && ring.is_due(at(220)));
        assert_eq!(ring.rows.rows.iter().map(|row| row.keys).collect::<Vec<_>>(), [52, 118]);
    }

    #[test]
    fn a_row_has_the_estimates_that_were_told_last() {
        let (start, mut steps) = (Instant::now(), Steps::default());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        steps.add(sample(at(0), 0));
        let mut estimates = Estimates::default();
        (estimates.all.sampled.asked, estimates.all.sampled.optimum_hits) = (4, 3);
        steps.note(at(1), &estimates);
        steps.add(sample(at(5), 0));
        steps.add(sample(at(1000), 0));
        let optimums: Vec<f32> = steps.take().hour.rows.iter().map(|row| row.optimum).collect();
        assert!(optimums[0] == 0.75 && optimums[1].is_nan(), "{optimums:?}: too old in the end");
    }
}
