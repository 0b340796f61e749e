//! Which NUMA node the next unit of the pool gets its memory from.

/// The node whose part of the units is the furthest below its part of what is wanted; `None` if nothing is wanted.
/// Both lists are by node: what is wanted in any measure, such as workers, and how many units were placed.
pub fn next(wanted: &[u32], placed: &[u32]) -> Option<usize> {
    // The next unit would be one of so many; the fewest for each that is wanted.
    let share = |node: &usize| (u64::from(placed[*node]) + 1, u64::from(wanted[*node]));
    let candidates = (0..wanted.len()).filter(|node| wanted[*node] > 0);
    candidates.min_by(|one, other| {
        let ((one, for_one), (other, for_other)) = (share(one), share(other));
        (one * for_other).cmp(&(other * for_one))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(wanted: &[u32], placed: &mut [u32], units: u32) {
        for _ in 0..units {
            placed[next(wanted, placed).expect("something is wanted")] += 1;
        }
    }

    #[test]
    fn units_are_shared_as_is_wanted_at_every_moment() {
        let mut placed = [0; 3];
        for units in 1..=100 {
            place(&[3, 0, 1], &mut placed, 1);
            let expected = f64::from(units) * 0.75;
            assert!((f64::from(placed[0]) - expected).abs() < 1.0, "{placed:?} of {units}");
        }
        assert_eq!(placed, [75, 0, 25]);
    }

    #[test]
    fn what_is_wanted_later_catches_up_and_without_a_wish_there_is_no_node() {
        assert_eq!(next(&[0, 0], &[5, 0]), None);
        assert_eq!(next(&[], &[]), None);
        let mut placed = [10, 0];
        place(&[1, 1], &mut placed, 10);
        assert_eq!(placed, [10, 10]);
        assert_eq!(next(&[1, 1], &placed), Some(0), "of equal ones the first");
    }
}
