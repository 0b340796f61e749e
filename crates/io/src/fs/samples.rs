//! Decides when a walk's count is valid: an old enough sample must say how many bytes had been granted.
//!
//! Invariant: at least two grants' ages have passed since the sample that [`Samples::basis`] returns. Everything
//! granted before the sample has lapsed by now. What was spent of it is published, or has been in flight for a
//! grant's age.

use std::time::Duration;

use super::grants::Figures;

/// What the directory's figures said at one moment.
#[derive(Clone, Copy)]
struct Sample {
    at: Duration,
    /// None if the figures could not be read.
    granted_bytes: Option<u64>,
}

/// See the module documentation.
pub(super) struct Samples {
    ripe_after: Duration,
    /// The newest sample that is old enough; beside it one that is not old enough yet.
    ripe: Option<Sample>,
    ripening: Option<Sample>,
}

impl Samples {
    pub fn new(grant_age: Duration) -> Samples {
        Samples { ripe_after: grant_age * 2, ripe: None, ripening: None }
    }

    /// Takes a sample if one is due. `now` is later than the figures.
    pub fn saw(&mut self, figures: Option<&Figures>, now: Duration) {
        let granted_bytes = figures.map(|figures| figures.granted_bytes);
        // Figures that were damaged or repaired do not continue the earlier ones.
        if self.ripening.is_some_and(|sample| sample.granted_bytes.is_some() != granted_bytes.is_some()) {
            (self.ripe, self.ripening) = (None, None);
        }
        let is_ripe = |sample: &Sample| now.saturating_sub(sample.at) >= self.ripe_after;
        if let Some(ripened) = self.ripening.take_if(|sample| is_ripe(sample)) {
            self.ripe = Some(ripened);
        }
        self.ripening.get_or_insert(Sample { at: now, granted_bytes });
    }

    /// Granted bytes at the sample, `Some(None)` if they are unknown; none if no sample is old enough.
    pub fn basis(&self) -> Option<Option<u64>> {
        self.ripe.map(|sample| sample.granted_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(granted_bytes: u64) -> Figures {
        Figures { granted_bytes, ..Figures::default() }
    }

    #[test]
    fn a_sample_is_used_when_it_is_ripe_and_until_a_newer_one_is() {
        let mut samples = Samples::new(Duration::from_secs(5));
        let mut basis_at = |seconds, granted_bytes| {
            samples.saw(Some(&figures(granted_bytes)), Duration::from_secs(seconds));
            samples.basis()
        };
        assert_eq!(basis_at(0, 1), None);
        assert_eq!(basis_at(9, 2), None);
        assert_eq!(basis_at(10, 3), Some(Some(1)));
        assert_eq!(basis_at(19, 4), Some(Some(1)));
        assert_eq!(basis_at(20, 5), Some(Some(3)));
    }

    #[test]
    fn damage_and_its_end_begin_from_nothing() {
        let mut samples = Samples::new(Duration::from_secs(5));
        let mut basis_at = |seconds, figures: Option<Figures>| {
            samples.saw(figures.as_ref(), Duration::from_secs(seconds));
            samples.basis()
        };
        assert_eq!(basis_at(0, Some(figures(1))), None);
        assert_eq!(basis_at(10, Some(figures(1))), Some(Some(1)));
        assert_eq!(basis_at(11, None), None, "who has a grant may still spend it");
        assert_eq!(basis_at(21, None), Some(None));
        assert_eq!(basis_at(22, Some(figures(7))), None);
    }
}
