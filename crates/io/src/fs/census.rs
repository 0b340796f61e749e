//! When a walk's count may be believed: how much had been granted, by a sample that is old enough.
//!
//! Invariant: [`Census::basis`] gives a sample after which two grants' ages have passed. Whatever had been granted by
//! then has lapsed by now, and what was spent of it is published, or has been in flight for a grant's age.

use std::time::Duration;

use super::ledger::Figures;

/// What the directory's figures said at a moment.
#[derive(Clone, Copy)]
struct Sample {
    at: Duration,
    /// None if they could not be read.
    granted_bytes: Option<u64>,
}

/// See the module's head.
pub(super) struct Census {
    ripe_after: Duration,
    /// The newest that is ripe, and one that ripens.
    ripe: Option<Sample>,
    ripening: Option<Sample>,
}

impl Census {
    pub fn new(grant_age: Duration) -> Census {
        Census { ripe_after: grant_age * 2, ripe: None, ripening: None }
    }

    /// Takes a sample, if it is time for one. `now` is later than the figures are.
    pub fn saw(&mut self, figures: Option<&Figures>, now: Duration) {
        let granted_bytes = figures.map(|figures| figures.granted_bytes);
        // Figures that were damaged or mended have nothing to do with those before.
        if self.ripening.is_some_and(|sample| sample.granted_bytes.is_some() != granted_bytes.is_some()) {
            (self.ripe, self.ripening) = (None, None);
        }
        let is_ripe = |sample: &Sample| now.saturating_sub(sample.at) >= self.ripe_after;
        if let Some(ripened) = self.ripening.take_if(|sample| is_ripe(sample)) {
            self.ripe = Some(ripened);
        }
        self.ripening.get_or_insert(Sample { at: now, granted_bytes });
    }

    /// What had been granted by then, or that nobody knows; none if no sample is ripe.
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
        let mut census = Census::new(Duration::from_secs(5));
        let mut basis_at = |seconds, granted_bytes| {
            census.saw(Some(&figures(granted_bytes)), Duration::from_secs(seconds));
            census.basis()
        };
        assert_eq!(basis_at(0, 1), None);
        assert_eq!(basis_at(9, 2), None);
        assert_eq!(basis_at(10, 3), Some(Some(1)));
        assert_eq!(basis_at(19, 4), Some(Some(1)));
        assert_eq!(basis_at(20, 5), Some(Some(3)));
    }

    #[test]
    fn damage_and_its_end_begin_from_nothing() {
        let mut census = Census::new(Duration::from_secs(5));
        let mut basis_at = |seconds, figures: Option<Figures>| {
            census.saw(figures.as_ref(), Duration::from_secs(seconds));
            census.basis()
        };
        assert_eq!(basis_at(0, Some(figures(1))), None);
        assert_eq!(basis_at(10, Some(figures(1))), Some(Some(1)));
        assert_eq!(basis_at(11, None), None, "who has a grant may still spend it");
        assert_eq!(basis_at(21, None), Some(None));
        assert_eq!(basis_at(22, Some(figures(7))), None);
    }
}
