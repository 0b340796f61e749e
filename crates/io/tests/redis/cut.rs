//! Blocks of several values: no more of them are in flight than `pipeline_bytes`, and what is of no use any more is not
//! asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{Outcome, Tier};
use forebay_io::redis::RedisConfig;

use crate::bed::{Bed, KIB, SLOT_BYTES, config, key, loaded, name_of};
use crate::fake::{Answer, Fake, well_behaved};
use crate::servers::until;

/// Sixteen values a block, two in flight.
fn cut(fake: &Fake) -> RedisConfig {
    RedisConfig { connections: 1, value_bytes: 4 * KIB, pipeline_bytes: 8 * KIB, ..config(&fake.url()) }
}

/// A fake that counts commands for block 1 that begin with `verb`, and answers them as `answer` says from the number of
/// the command; nothing where it says `None`.
fn counting(
    verb: &'static [u8],
    count: &Arc<AtomicUsize>,
    answer: impl Fn(usize) -> Option<Vec<u8>> + Clone + Send + Sync + 'static,
) -> Fake {
    let (count, name) = (count.clone(), name_of(&key(1)).into_bytes());
    Fake::start_tcp(move |_| {
        let (count, name, answer) = (count.clone(), name.clone(), answer.clone());
        Box::new(move |command, store| {
            let good = well_behaved(command, store);
            if command[0] != verb || !command[1].starts_with(&name) {
                return Answer::say(good);
            }
            Answer::say(answer(count.fetch_add(1, Ordering::SeqCst)).unwrap_or(good))
        })
    })
}

#[test]
fn no_more_values_are_asked_for_than_may_be_in_flight() {
    let asked = Arc::new(AtomicUsize::new(0));
    let fake = counting(b"GET", &asked, |number| (number == 0).then(|| b"$-1\r\n".to_vec()));
    let mut bed = Bed::ready(&cut(&fake));
    bed.store_all([1, 2], SLOT_BYTES);
    assert_eq!(bed.look(1, SLOT_BYTES), Outcome::Absent);
    assert_eq!(asked.load(Ordering::SeqCst), 2, "the second was on its way when the first was not there");
    assert_eq!(bed.look(1, SLOT_BYTES), loaded(1, SLOT_BYTES), "in step, and whole by now");
    assert_eq!(bed.look(2, SLOT_BYTES), loaded(2, SLOT_BYTES));
    assert_eq!(asked.load(Ordering::SeqCst), 2 + 16);
}

#[test]
fn a_store_that_is_refused_sends_no_more_of_its_values() {
    let sent = Arc::new(AtomicUsize::new(0));
    let fake = counting(b"SET", &sent, |number| (number == 1).then(|| b"-OOM no memory\r\n".to_vec()));
    let mut bed = Bed::ready(&cut(&fake));
    let stores = [bed.store(1, 1, SLOT_BYTES), bed.store(2, 2, SLOT_BYTES)];
    let [first, second] = bed.run(&stores)[..] else { unreachable!("as many as were submitted") };
    assert_eq!(first, Outcome::Failed(ErrorKind::Full));
    assert!(matches!(second, Outcome::Stored), "{second:?}");
    let sent = sent.load(Ordering::SeqCst);
    assert!((2..=3).contains(&sent), "{sent} of 16: the third at most was on its way when the second was refused");
    assert_eq!(bed.look(1, SLOT_BYTES), Outcome::Absent, "its first value, which makes it known, is sent last");
}

#[test]
fn a_load_that_is_cancelled_asks_for_no_more_values() {
    let (asked, may_answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let gate = may_answer.clone();
    let fake = counting(b"GET", &asked, move |_| {
        until(|| gate.load(Ordering::SeqCst), || "nobody opens the gate".to_string());
        None
    });
    let mut bed = Bed::ready(&cut(&fake));
    bed.store_all([1, 2], SLOT_BYTES);
    bed.fill(3, 0x77);
    let load = bed.load(1, 3, SLOT_BYTES);
    bed.submit(&[load]);
    until(|| asked.load(Ordering::SeqCst) > 0, || "no value is asked for".to_string());
    bed.redis.cancel(load.id);
    assert_eq!(bed.outcomes_of(&[load]), [Outcome::Failed(ErrorKind::Timeout)]);
    may_answer.store(true, Ordering::SeqCst);
    assert_eq!(bed.look(2, SLOT_BYTES), loaded(2, SLOT_BYTES), "behind the replies to what was asked");
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    assert!(bed.is_filled(3, 0x77), "what came late touched the slot");
    assert_eq!(bed.redis.report().counters.connections_lost, 0);
}

/// Whatever moment it comes in, between two values as well, where nothing is asked and more is to be.
#[test]
fn a_load_may_be_cancelled_at_any_moment() {
    let fake = Fake::start(|_| Box::new(|command, store| Answer::say(well_behaved(command, store))));
    let mut bed = Bed::ready(&RedisConfig { pipeline_bytes: 4 * KIB, ..cut(&fake) });
    bed.store_all([1, 2], SLOT_BYTES);
    for round in 0..2000 {
        let load = bed.load(1, 3, SLOT_BYTES);
        bed.submit(&[load]);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(round % 500) {
            std::hint::spin_loop();
        }
        bed.redis.cancel(load.id);
        let outcome = bed.outcomes_of(&[load])[0];
        assert!(outcome == loaded(1, SLOT_BYTES) || outcome == Outcome::Failed(ErrorKind::Timeout), "{outcome:?}");
        assert_eq!(bed.look(2, SLOT_BYTES), loaded(2, SLOT_BYTES), "round {round}");
    }
    let counters = bed.redis.report().counters;
    assert_eq!((counters.connections_lost, counters.lost_steps), (0, 0));
    assert!(counters.cancelled_operations > 0, "{counters:?}");
}
