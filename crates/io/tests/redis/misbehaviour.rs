//! A server that answers what it should not, as told and by a seed.
//!
//! The random one keeps to nothing: answers are cut off, swapped, doubled, left out, flipped, of another type or
//! length, torn into pieces, or never come. Whatever it does, each operation completes once and what is called loaded
//! is the block. `FOREBAY_SEED` repeats one session, whose seed a failure prints.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_core::tier::{Outcome, Tier};
use forebay_io::redis::RedisConfig;

use crate::bed::{Bed, KIB, config, key, loaded, name_of};
use crate::fake::{Answer, Fake, Script, Store, Then, bulk, well_behaved};

const SESSIONS: u64 = 10_000;
const BLOCK_BYTES: u64 = 3000;

/// A fake that answers GETs as `get` says, and all else as it should.
fn answering_gets(get: impl Fn(&[u8], &mut Store) -> Answer + Send + Sync + 'static) -> Fake {
    let get = Arc::new(get);
    Fake::start(move |_| {
        let get = get.clone();
        Box::new(move |command, store| match command[0].as_slice() {
            b"GET" => get(&command[1], store),
            _ => Answer::say(well_behaved(command, store)),
        })
    })
}

fn value_of(name: &[u8], store: &Store) -> Vec<u8> {
    store.get(name).map_or(b"$-1\r\n".to_vec(), |value| bulk(value))
}

fn failed(kind: ErrorKind) -> Outcome {
    Outcome::Failed(kind)
}

/// Stores blocks 1 to 4 and loads them in one batch, on one connection.
fn four(fake: &Fake) -> (Bed, Vec<Outcome>) {
    let mut bed = Bed::open(&RedisConfig { connections: 1, ..config(&fake.url()) });
    bed.store_all(1..=4, BLOCK_BYTES);
    let loads: Vec<_> = (1..=4).map(|number| bed.load(number, number, BLOCK_BYTES)).collect();
    let outcomes = bed.run(&loads);
    (bed, outcomes)
}

#[test]
fn errors_are_for_their_key_alone() {
    for (text, kind) in [
        ("LOADING Redis is loading the dataset in memory", ErrorKind::Unavailable),
        ("MOVED 1 127.0.0.1:1", ErrorKind::Unavailable),
        ("OOM command not allowed", ErrorKind::Full),
        ("ERR something else", ErrorKind::Io),
    ] {
        let second = name_of(&key(2)).into_bytes();
        let fake = answering_gets(move |name, store| match name == second {
            true => Answer::say(format!("-{text}\r\n")),
            false => Answer::say(value_of(name, store)),
        });
        let (bed, outcomes) = four(&fake);
        let whole = |number| loaded(number, BLOCK_BYTES);
        assert_eq!(outcomes, [whole(1), failed(kind), whole(3), whole(4)], "{text}");
        assert_eq!(bed.redis.report().counters.connections_lost, 0, "{text}");
    }
}

#[test]
fn half_a_reply_and_then_the_end_fails_what_was_in_flight() {
    let third = name_of(&key(3)).into_bytes();
    let fake = answering_gets(move |name, store| {
        let whole = value_of(name, store);
        match name == third {
            true => Answer { bytes: whole[..1500].to_vec(), pieces: 3, then: Then::Close },
            false => Answer::say(whole),
        }
    });
    let (mut bed, outcomes) = four(&fake);
    let gone = failed(ErrorKind::Unavailable);
    assert_eq!(outcomes, [loaded(1, BLOCK_BYTES), loaded(2, BLOCK_BYTES), gone, gone]);
    bed.await_service();
    assert_eq!(bed.look(4, BLOCK_BYTES), loaded(4, BLOCK_BYTES));
}

#[test]
fn the_reply_of_another_key_is_never_taken_for_the_block() {
    let (second, third) = (name_of(&key(2)).into_bytes(), name_of(&key(3)).into_bytes());
    let fake = answering_gets(move |name, store| match name {
        name if *name == second => Answer::say(value_of(&third, store)),
        name => Answer::say(value_of(name, store)),
    });
    let (bed, outcomes) = four(&fake);
    assert_eq!(outcomes[..2], [loaded(1, BLOCK_BYTES), failed(ErrorKind::Corrupt)]);
    assert_eq!(outcomes[2..], [failed(ErrorKind::Unavailable); 2], "a connection that lost step is of no use");
    assert_eq!(bed.redis.report().counters.lost_steps, 1);
}

#[test]
fn replies_of_another_type_or_without_an_end_are_lost_step() {
    for reply in
        ["+OK\r\n", ":1\r\n", "*0\r\n", "?\r\n", "$abc\r\n", "$99999999999999\r\n", "$4\r\nabcdefgh\r\n", "\r\n"]
    {
        let second = name_of(&key(2)).into_bytes();
        let fake = answering_gets(move |name, store| match name == second {
            true => Answer::say(reply),
            false => Answer::say(value_of(name, store)),
        });
        let (bed, outcomes) = four(&fake);
        assert_eq!(outcomes[0], loaded(1, BLOCK_BYTES), "{reply:?}");
        assert!(outcomes[1..].iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{reply:?}: {outcomes:?}");
        assert_eq!(bed.redis.report().counters.lost_steps, 1, "{reply:?}");
    }
}

#[test]
fn a_reply_that_nobody_asked_for_ends_the_connection() {
    let fake = answering_gets(|name, store| {
        let mut twice = value_of(name, store);
        twice.extend_from_slice(b":1\r\n");
        Answer::say(twice)
    });
    let mut bed = Bed::open(&RedisConfig { connections: 1, ..config(&fake.url()) });
    bed.store_all([1], BLOCK_BYTES);
    assert_eq!(bed.look(1, BLOCK_BYTES), loaded(1, BLOCK_BYTES), "what came before was whole");
    crate::servers::until(
        || {
            bed.turn();
            bed.redis.report().counters.lost_steps == 1
        },
        || "the connection is still used".to_string(),
    );
}

#[test]
fn a_long_value_is_loaded_in_whatever_pieces_it_comes() {
    const LONG_BYTES: u64 = 3 << 20;
    for pieces in [1, 2, 7, 48, 1000] {
        let fake = Fake::start_tcp(move |_| {
            Box::new(move |command, store| Answer { pieces, ..Answer::say(well_behaved(command, store)) })
        });
        let mut bed = Bed::open(&RedisConfig { connections: 1, value_bytes: LONG_BYTES, ..config(&fake.url()) });
        bed.store_all([1], LONG_BYTES);
        // The second follows the first, whose last bytes and its first come with one call.
        let loads = [bed.load(1, 0, LONG_BYTES), bed.load(2, 0, LONG_BYTES), bed.load(1, 0, LONG_BYTES)];
        let whole = loaded(1, LONG_BYTES);
        assert_eq!(bed.run(&loads), [whole, Outcome::Absent, whole], "in {pieces} pieces");
        assert!(bed.holds(1, 0, LONG_BYTES));
    }
}

#[test]
fn a_server_that_leaves_in_the_middle_of_a_long_value_is_noticed_at_once() {
    const LONG_BYTES: u64 = 3 << 20;
    let fake = Fake::start_tcp(|_| {
        Box::new(|command, store| {
            let mut answer = Answer::say(well_behaved(command, store));
            if command[0] == b"GET" {
                answer.bytes.truncate(answer.bytes.len() / 2);
                answer.then = Then::Close;
            }
            answer
        })
    });
    let mut bed = Bed::open(&RedisConfig {
        connections: 1,
        value_bytes: LONG_BYTES,
        operation_timeout: Duration::from_secs(600),
        ..config(&fake.url())
    });
    bed.store_all([1], LONG_BYTES);
    let load = bed.load(1, 0, LONG_BYTES);
    assert_eq!(bed.run(&[load]), [failed(ErrorKind::Unavailable)]);
}

#[test]
fn a_server_that_is_loading_is_waited_for() {
    let fake = Fake::start(|number| {
        Box::new(move |command, store| match (command[0].as_slice(), number) {
            (b"PING", 0..6) => Answer::say("-LOADING wait\r\n"),
            _ => Answer::say(well_behaved(command, store)),
        })
    });
    let mut bed = Bed::open(&RedisConfig { connections: 1, ..config(&fake.url()) });
    bed.await_service();
    bed.store_all([1], BLOCK_BYTES);
    assert!(bed.redis.report().counters.failed_connects > 0);
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Misbehaves for one command in `one_in`.
fn misbehave(mut random: Random, one_in: u64) -> Box<Script> {
    let mut earlier = b"+OK\r\n".to_vec();
    Box::new(move |command, store| {
        let mut bytes = well_behaved(command, store);
        let (mut then, mut pieces) = (Then::GoOn, 1 + random.below(4) as usize / 3 * 7);
        if random.below(one_in) == 0 {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(16) {
                0 => bytes.truncate(at),
                1 => (bytes, then) = (Vec::new(), Then::Close),
                2 => {
                    bytes.truncate(at);
                    then = Then::Close;
                }
                3 => bytes = earlier.clone(),
                4 => bytes = other_value(&mut random, store),
                5 => bytes.extend_from_slice(&earlier),
                6 => bytes = Vec::new(),
                7 | 8 => bytes[at] ^= 1 << random.below(8),
                9 => drop(bytes.remove(at)),
                10 => bytes.insert(at, random.next() as u8),
                11 => bytes = b"$-1\r\n".to_vec(),
                12 => bytes = b"-OOM no memory\r\n".to_vec(),
                13 => bytes = format!(":{}\r\n", random.below(3)).into_bytes(),
                14 => bytes = (0..random.below(300)).map(|_| random.next() as u8).collect(),
                _ if random.below(8) == 0 => then = Then::Hang,
                _ => pieces = 50,
            }
        }
        earlier.clone_from(&bytes);
        Answer { bytes, pieces, then }
    })
}

fn other_value(random: &mut Random, store: &Store) -> Vec<u8> {
    let mut names: Vec<_> = store.keys().collect();
    names.sort();
    match names.is_empty() {
        true => b"$-1\r\n".to_vec(),
        false => bulk(&store[names[random.below(names.len() as u64) as usize]]),
    }
}

/// One tier against that server; returns how many blocks were loaded.
fn session(fake: &Fake, seed: u64) -> u64 {
    let mut random = Random(seed);
    let mut bed = Bed::open(&RedisConfig {
        connections: 1 + random.below(3) as usize,
        pipeline_depth: 1 + random.below(8) as usize,
        value_bytes: if random.below(2) == 0 { 4 * KIB } else { 16 * KIB },
        pipeline_bytes: 1 + random.below(32 * KIB),
        operation_timeout: Duration::from_millis(50),
        connect_timeout: Duration::from_millis(50),
        ..config(&fake.url())
    });
    let length = |number: u64| 1 + number * 1777 % 9000;
    let ops: Vec<_> = (0..24)
        .map(|slot| {
            let number = random.below(8);
            match random.below(8) {
                0..3 => bed.store(number, slot, length(number)),
                3 => bed.find(number),
                4 if random.below(4) == 0 => bed.remove(number),
                _ => bed.load(number, slot, length(number)),
            }
        })
        .collect();
    let mut loaded_blocks = 0;
    for (at, some) in (0..).zip(ops.chunks(8)) {
        bed.submit(some);
        if random.below(4) == 0 {
            bed.redis.cancel(some[random.below(8) as usize].id);
        }
        for (slot, (op, outcome)) in (at * 8..).zip(some.iter().zip(bed.outcomes_of(some))) {
            if let Outcome::Loaded { length_bytes, .. } = outcome {
                let number = (0..8).find(|number| key(*number) == op.key).unwrap();
                let is_right = length_bytes == length(number) && bed.holds(number, slot, length_bytes);
                assert!(is_right, "a wrong payload was called loaded: block {number}");
                loaded_blocks += 1;
            }
        }
    }
    loaded_blocks
}

#[test]
fn ten_thousand_sessions_of_random_faults_bring_no_wrong_payload() {
    let seeds: Vec<u64> = match std::env::var("FOREBAY_SEED") {
        Ok(seed) => vec![seed.parse().expect("`FOREBAY_SEED` is a number")],
        Err(_) => (0..SESSIONS).collect(),
    };
    let (next, total, failures) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        // Most of a session is waiting for what never comes.
        for worker in 0..8u64 {
            let (seeds, next, total, failures) = (&seeds, &next, &total, &failures);
            scope.spawn(move || {
                let script = move |number: u64| misbehave(Random(number << 8 | worker), 12);
                let fake = if worker % 2 == 0 { Fake::start(script) } else { Fake::start_tcp(script) };
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let outcome = std::panic::catch_unwind(|| session(&fake, *seed));
                    match outcome {
                        Ok(loaded) => drop(total.fetch_add(loaded, Ordering::Relaxed)),
                        Err(_) => failures.lock().unwrap().push(*seed),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "sessions with these seeds failed: {failures:?}");
    let total = total.into_inner();
    println!("{} sessions, {total} blocks loaded", seeds.len());
    assert!(seeds.len() == 1 || total > SESSIONS, "only {total} blocks were loaded: the server misbehaves too much");
}
