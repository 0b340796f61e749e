//! A reader's frames, one after another: it asks for the steps of the history that it lacks, and adds them to its own.

use crate::proto::{FrameHistory, FrameReply, FrameRequest};

/// Steps of a frame's hour, at most.
pub const HOUR_STEPS: usize = 720;
/// Steps of a frame's day, at most.
pub const DAY_STEPS: usize = 288;

impl FrameReply {
    /// Asks for a later frame, and for no step of the history that this one has.
    pub fn next_request(&self) -> FrameRequest {
        let last = |history: &Option<FrameHistory>| history.as_ref().map_or(0, |history| history.last);
        FrameRequest { boot: self.boot.clone(), hour_last: last(&self.hour), day_last: last(&self.day) }
    }

    /// The answer to `before`'s [`FrameReply::next_request`], with the steps of `before` as well.
    pub fn continuing(mut self, before: FrameReply) -> FrameReply {
        if self.boot == before.boot {
            self.hour = joined(before.hour, self.hour, HOUR_STEPS);
            self.day = joined(before.day, self.day, DAY_STEPS);
        }
        self
    }
}

fn joined(before: Option<FrameHistory>, later: Option<FrameHistory>, most: usize) -> Option<FrameHistory> {
    let (mut before, mut later) = (before?, later?);
    join(&mut before.end_ms, &mut later.end_ms, most);
    for (before, later) in lists(&mut before).into_iter().zip(lists(&mut later)) {
        join(before, later, most);
    }
    Some(later)
}

/// `later` gets the values of `before` too, and loses the oldest beyond `most`.
fn join<T>(before: &mut Vec<T>, later: &mut Vec<T>, most: usize) {
    before.append(later);
    before.drain(..before.len().saturating_sub(most));
    std::mem::swap(before, later);
}

/// All values of the steps, in the same order for any history of one daemon.
fn lists(history: &mut FrameHistory) -> Vec<&mut Vec<f32>> {
    let FrameHistory {
        step_seconds: _,
        last: _,
        end_ms: _,
        keys_per_second,
        hit_ratio,
        ceiling_ratio,
        optimum_ratio,
        hit_bytes_per_second,
        stored_bytes_per_second,
        evicted_bytes_per_second,
        used_bytes,
        held_bytes,
        saved_tokens_per_second,
        lookup_p99_seconds,
        misses,
        tiers,
    } = history;
    let lists = [
        keys_per_second,
        hit_ratio,
        ceiling_ratio,
        optimum_ratio,
        hit_bytes_per_second,
        stored_bytes_per_second,
        evicted_bytes_per_second,
        used_bytes,
        held_bytes,
        saved_tokens_per_second,
        lookup_p99_seconds,
    ];
    let misses = misses.iter_mut().map(|reason| &mut reason.per_second);
    let tiers = tiers
        .iter_mut()
        .flat_map(|tier| [&mut tier.hits_per_second, &mut tier.up_bytes_per_second, &mut tier.down_bytes_per_second]);
    lists.into_iter().chain(misses).chain(tiers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{FrameSeries, FrameTierSeries};

    /// A frame of a daemon whose steps so far have the numbers up to `hour` and `day`, as an answer to `request`.
    fn answer(request: &FrameRequest, boot: &str, (hour, day): (u64, u64)) -> FrameReply {
        let history = |last: u64, known: u64, most: usize| {
            let known = if request.boot == boot { known } else { 0 };
            let numbers = known.max(last.saturating_sub(most as u64)) + 1..=last;
            let list = |of: u32| numbers.clone().map(|number| (number * 100) as f32 + of as f32).collect::<Vec<f32>>();
            FrameHistory {
                step_seconds: 5.0,
                last,
                end_ms: numbers.clone().collect(),
                keys_per_second: list(1),
                hit_ratio: list(2),
                ceiling_ratio: list(3),
                optimum_ratio: list(4),
                hit_bytes_per_second: list(5),
                stored_bytes_per_second: list(6),
                evicted_bytes_per_second: list(7),
                used_bytes: list(8),
                held_bytes: list(9),
                saved_tokens_per_second: list(10),
                lookup_p99_seconds: list(11),
                misses: (12..15).map(|at| FrameSeries { name: at.to_string(), per_second: list(at) }).collect(),
                tiers: (0..2)
                    .map(|at| FrameTierSeries {
                        name: at.to_string(),
                        hits_per_second: list(20 + at),
                        up_bytes_per_second: list(30 + at),
                        down_bytes_per_second: list(40 + at),
                    })
                    .collect(),
            }
        };
        FrameReply {
            boot: boot.to_owned(),
            hour: Some(history(hour, request.hour_last, HOUR_STEPS)),
            day: Some(history(day, request.day_last, DAY_STEPS)),
            ..FrameReply::default()
        }
    }

    #[test]
    fn frames_one_after_another_have_the_history_of_a_frame_that_was_asked_for_in_full() {
        let mut frame = answer(&FrameRequest::default(), "a", (0, 0));
        // Also after longer than the history, and of a daemon that was started again.
        for (boot, hour, day) in [
            ("a", 1, 0),
            ("a", 1, 0),
            ("a", 3, 0),
            ("a", 719, 4),
            ("a", 725, 9),
            ("a", 2000, 300),
            ("b", 2, 0),
            ("b", 9, 1),
        ] {
            let next = answer(&frame.next_request(), boot, (hour, day));
            frame = next.continuing(frame);
            assert_eq!(frame, answer(&FrameRequest::default(), boot, (hour, day)), "{boot} {hour} {day}");
        }
    }
}
