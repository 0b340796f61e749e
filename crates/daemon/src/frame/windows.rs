//! What the rows of the last 15 minutes, hour and day add up to.

use forebay_core::miss::MissReason;
use forebay_core::tiers::TierId;

use super::steps::{Past, Row};

/// Steps of the hour.
const STEPS_OF_15_MINUTES: usize = 180;

/// Of the lookups in a window.
#[derive(Default)]
pub struct Sum {
    pub seconds: f64,
    pub keys: u64,
    pub hits: u64,
}

/// Of the last 15 minutes.
#[derive(Default)]
pub struct Lately {
    pub seconds: f64,
    pub misses: [f64; MissReason::ALL.len()],
    /// Hits of the pool, then of the configured tiers.
    pub hits: [f64; 1 + TierId::MAX],
    pub saved_tokens: f64,
    pub saved_prefill: f64,
}

/// Of 15 minutes, the hour and the day.
pub fn sums(past: &Past) -> [Sum; 3] {
    let (hour, day) = (&past.hour.rows, &past.day.rows);
    // Behind the last step of the day, the steps of the hour go on.
    let day_ends = day.back().map_or(0, |row| row.end_ms);
    let later = hour.iter().filter(|row| row.end_ms > day_ends);
    [Sum::of(lately(past)), Sum::of(hour.iter()), Sum::of(day.iter().chain(later))]
}

fn lately(past: &Past) -> impl Iterator<Item = &Row> {
    past.hour.rows.iter().rev().take(STEPS_OF_15_MINUTES)
}

impl Sum {
    fn of<'a>(rows: impl Iterator<Item = &'a Row>) -> Sum {
        rows.fold(Sum::default(), |sum, row| Sum {
            seconds: sum.seconds + f64::from(row.seconds),
            keys: sum.keys + row.keys,
            hits: sum.hits + row.hits,
        })
    }
}

impl Lately {
    pub fn of(past: &Past) -> Lately {
        let mut sum = Lately::default();
        for row in lately(past) {
            let all = |rate: f32| f64::from(rate * row.seconds);
            sum.seconds += f64::from(row.seconds);
            sum.misses.iter_mut().zip(row.misses).for_each(|(sum, rate)| *sum += all(rate));
            sum.hits.iter_mut().zip(row.tiers).for_each(|(sum, tier)| *sum += all(tier.hits));
            sum.saved_tokens += all(row.saved_tokens);
            sum.saved_prefill += all(row.saved_prefill);
        }
        sum
    }
}
