//! Whether a shared store takes no writes at present: it refuses one after the other, and none was taken in between.

use std::time::{Duration, Instant};

use crate::seldom::Seldom;

/// So many refusals in a row, over so long a time, are more than a moment without room.
const IN_A_ROW: u32 = 8;
const LASTING: Duration = Duration::from_secs(5);

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Refusals {
    in_a_row: u32,
    since: Option<Instant>,
    why: Option<String>,
    warnings: Seldom,
    has_warned: bool,
}

impl Refusals {
    /// As the store was found when it was opened. `why` is what it said when it refused to write, and was logged.
    pub fn found(why: Option<String>) -> Refusals {
        Refusals { has_warned: why.is_some(), why, ..Refusals::default() }
    }

    /// The store refused to write.
    pub fn refused(&mut self, now: Instant) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.since.get_or_insert(now);
    }

    /// The store wrote.
    pub fn taken(&mut self, store: &str) {
        (self.in_a_row, self.since) = (0, None);
        if self.why.take().is_some() && std::mem::take(&mut self.has_warned) {
            tracing::info!(store, "the shared store takes writes again");
        }
    }

    /// Says so when the refusals have lasted, and again when the store gives another reason. `why` is what it said
    /// last.
    pub fn judge(&mut self, store: &str, now: Instant, why: impl FnOnce() -> String) {
        let lasts = self.since.is_some_and(|since| now.saturating_duration_since(since) >= LASTING);
        if !lasts || self.in_a_row < IN_A_ROW {
            return;
        }
        let why = why();
        if self.why.as_ref() == Some(&why) {
            return;
        }
        let why = self.why.insert(why);
        let warns = self.warnings.add(now).is_some();
        self.has_warned |= warns;
        if warns {
            tracing::warn!(
                store,
                why,
                hint = "make room, or let the daemon write there",
                "the shared store takes no writes; what it holds is still read"
            );
        }
    }

    /// Why the store takes no writes; none while it does.
    pub fn told(&self) -> Option<String> {
        self.why.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_when_they_last_and_until_one_write_is_taken() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let judged = |refusals: &mut Refusals, second| {
            refusals.judge("a", at(second), || "no memory".to_string());
            refusals.told()
        };
        (1..IN_A_ROW).for_each(|_| refusals.refused(at(0)));
        assert_eq!(judged(&mut refusals, 60), None, "too few");
        refusals.refused(at(60));
        assert_eq!(judged(&mut refusals, 60), Some("no memory".to_string()));
        refusals.refused(at(61));
        refusals.judge("a", at(61), || "read-only".to_string());
        assert_eq!(refusals.told(), Some("read-only".to_string()), "the reason of today");
        refusals.taken("a");
        assert_eq!(judged(&mut refusals, 60), None);
        (0..100).for_each(|_| refusals.refused(at(61)));
        assert_eq!(judged(&mut refusals, 65), None, "too short");
        refusals.taken("a");
        refusals.refused(at(66));
        assert_eq!(judged(&mut refusals, 100), None, "none in a row");
    }
}
