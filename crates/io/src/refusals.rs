//! Whether a shared store takes no writes, or answers no reads, at present: it refuses one after the other, and took or
//! answered none in between.

use std::time::{Duration, Instant};

use crate::seldom::Seldom;

/// So many refusals in a row, over so long a time, are more than a moment without room.
const IN_A_ROW: u32 = 8;
const LASTING: Duration = Duration::from_secs(5);

/// What a store refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    Writes,
    Reads,
}

/// See the module documentation.
pub(crate) struct Refusals {
    of: Refused,
    /// What to do, in words of the store's own tier.
    hint: &'static str,
    in_a_row: u32,
    /// The first and the last of them.
    span: Option<(Instant, Instant)>,
    why: Option<String>,
    warnings: Seldom,
    has_warned: bool,
}

impl Refusals {
    pub fn of(of: Refused, hint: &'static str) -> Refusals {
        Refusals::found(of, hint, None)
    }

    /// As the store was found when it was opened. `why` is what it said when it refused, and was logged.
    pub fn found(of: Refused, hint: &'static str, why: Option<String>) -> Refusals {
        let has_warned = why.is_some();
        Refusals { of, hint, in_a_row: 0, span: None, why, warnings: Seldom::default(), has_warned }
    }

    /// The store refused one.
    pub fn refused(&mut self, now: Instant) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.span.get_or_insert((now, now)).1 = now;
    }

    /// The store did not refuse.
    pub fn taken(&mut self, store: &str) {
        (self.in_a_row, self.span) = (0, None);
        if self.why.take().is_some() && std::mem::take(&mut self.has_warned) {
            match self.of {
                Refused::Writes => tracing::info!(store, "the shared store takes writes again"),
                Refused::Reads => tracing::info!(store, "the shared store answers reads again"),
            }
        }
    }

    /// Whether the last one was refused.
    pub fn are_pending(&self) -> bool {
        self.in_a_row > 0
    }

    /// Says so when the refusals have lasted, and again when the store gives another reason. `why` is what it said
    /// last.
    pub fn judge(&mut self, store: &str, now: Instant, why: impl FnOnce() -> String) {
        let lasts = self.span.is_some_and(|(first, last)| last.saturating_duration_since(first) >= LASTING);
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
        match self.of {
            _ if !warns => {}
            Refused::Writes => tracing::warn!(
                store,
                why,
                hint = self.hint,
                "the shared store takes no writes; what it holds is still read"
            ),
            Refused::Reads => tracing::warn!(
                store,
                why,
                hint = self.hint,
                "the shared store answers no reads; the blocks that it holds are misses"
            ),
        }
    }

    /// Why the store refuses; none while it does not.
    pub fn told(&self) -> Option<String> {
        self.why.clone()
    }

    /// What to do about that.
    pub fn hint(&self) -> Option<&'static str> {
        self.why.is_some().then_some(self.hint)
    }
}

/// The hints of reads and of writes, as one.
pub(crate) fn joined(hints: [Option<&str>; 2]) -> Option<String> {
    let hints: Vec<&str> = hints.into_iter().flatten().collect();
    (!hints.is_empty()).then(|| hints.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_when_they_last_and_until_one_write_is_taken() {
        let (mut refusals, start) = (Refusals::of(Refused::Writes, "make room"), Instant::now());
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
        assert_eq!(judged(&mut refusals, 3600), None, "all at once: the next one may be taken");
        refusals.taken("a");
        refusals.refused(at(66));
        assert_eq!(judged(&mut refusals, 100), None, "none in a row");
    }
}
