//! Mutated inputs for parsers, in tests.
//!
//! A [`Target`] has inputs that the real writers made. It changes copies of them and gives them to a closure, which
//! parses them and asserts what must hold. A panic, an allocation out of proportion to the input, and a case that does
//! not end are failures. What the closure returns is the outcome: an input with a new outcome is changed further. This
//! takes the place of coverage, which stable Rust does not measure.
//!
//! Invariants: a run is determined by its seed, its inputs and the outcomes. In every `cargo test` the seed is always
//! the same, and so is the number of cases. `FUZZ_SECONDS=N` searches for so long, from a new seed, which is printed;
//! `FUZZ_SEED=N` runs that seed again; `FUZZ_INPUT=FILE` runs that input alone. A failure prints its seed, and its
//! smallest input. This crate is a dependency of tests alone: it counts every allocation of the program it is in.

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod allocator;
mod mutate;
mod watchdog;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mutate::Mutator;
use watchdog::Watchdog;

/// Of the runs in every `cargo test`.
const USUAL_SEED: u64 = 1;
/// Inputs that had a new outcome; more of them cost memory and say little.
const MOST_KEPT_INPUTS: usize = 2000;
const MOST_KEPT_BYTES: usize = 64 << 20;
/// Tries to make a failing input smaller.
const TRIES: usize = 3000;
/// Of an input that is printed; a longer one is only written to a file.
const MOST_PRINTED_BYTES: usize = 512;

/// Makes the checksums of a changed input right again.
type Mend<'a> = Box<dyn Fn(&mut [u8]) + 'a>;

/// A parser and the inputs that are changed for it.
pub struct Target<'a> {
    name: &'static str,
    inputs: Vec<Vec<u8>>,
    words: Vec<&'a [u8]>,
    places: Vec<Range<usize>>,
    mend: Option<Mend<'a>>,
    cases: u64,
    bytes_per_byte: usize,
    spare_bytes: usize,
}

/// What one case came to.
struct Done {
    outcome: Result<u64, String>,
    peak_bytes: usize,
}

impl<'a> Target<'a> {
    /// `inputs` are right: a real writer made them. There must be one at least.
    pub fn new(name: &'static str, inputs: Vec<Vec<u8>>) -> Target<'a> {
        assert!(!inputs.is_empty(), "{name} has an input");
        let (words, places) = (Vec::new(), Vec::new());
        Target { name, inputs, words, places, mend: None, cases: 10_000, bytes_per_byte: 64, spare_bytes: 64 << 10 }
    }

    /// Words of the format, which are put into inputs.
    pub fn words(self, words: &[&'a [u8]]) -> Target<'a> {
        Target { words: words.to_vec(), ..self }
    }

    /// Most changes begin here: the fields of an input most of which is padding or payload.
    pub fn places(self, places: impl IntoIterator<Item = Range<usize>>) -> Target<'a> {
        Target { places: places.into_iter().collect(), ..self }
    }

    /// Makes the checksums of three in four changed inputs right again, so that the parser behind them is reached.
    pub fn mended(self, mend: impl Fn(&mut [u8]) + 'a) -> Target<'a> {
        Target { mend: Some(Box::new(mend)), ..self }
    }

    /// Cases in every `cargo test`.
    pub fn cases(self, cases: u64) -> Target<'a> {
        Target { cases, ..self }
    }

    /// What a case may have allocated at one time: this many bytes for each byte of the input, and `spare_bytes`. Only
    /// allocations of the thread that runs the closure count.
    pub fn allocates(self, bytes_per_byte: usize, spare_bytes: usize) -> Target<'a> {
        Target { bytes_per_byte, spare_bytes, ..self }
    }

    /// Runs the cases. `parse` panics if something is wrong, and returns what tells kinds of inputs apart.
    pub fn run<Outcome: Hash>(self, parse: impl Fn(&[u8]) -> Outcome) {
        let _quiet = Quiet::new();
        let watchdog = Watchdog::start(self.name);
        let try_one = |input: &[u8]| self.case(&watchdog, &parse, input);
        if let Some(path) = std::env::var_os("FUZZ_INPUT") {
            let input =
                std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read `{}`: {error}", path.display()));
            return self.judge_alone(&parse, &input);
        }
        for input in &self.inputs {
            try_one(input).outcome.unwrap_or_else(|why| panic!("{}: an input as it was made: {why}", self.name));
        }
        let limit = number_of("FUZZ_SECONDS").map(Duration::from_secs);
        let seed = number_of("FUZZ_SEED").unwrap_or_else(|| limit.map_or(USUAL_SEED, |_| drawn_seed()));
        if limit.is_some() {
            watchdog::say(&format!("fuzz {}: seed {seed}", self.name));
        }
        let mut mutator = Mutator::new(seed, self.inputs.clone(), &self.words, &self.places);
        let (begun, mut cases, mut peak_bytes) = (Instant::now(), 0, 0);
        let (mut outcomes, mut kept_bytes) = (HashSet::new(), 0);
        while limit.map_or(cases < self.cases, |limit| begun.elapsed() < limit) {
            let mut input = mutator.next();
            if let Some(mend) = &self.mend
                && mutator.dice.below(4) > 0
            {
                mend(&mut input);
            }
            let done = try_one(&input);
            cases += 1;
            peak_bytes = peak_bytes.max(done.peak_bytes);
            match done.outcome {
                Err(why) => self.fail(&watchdog, &parse, input, &format!("seed {seed}, case {cases}: {why}")),
                Ok(outcome) if outcomes.insert(outcome) => {
                    if mutator.inputs.len() < MOST_KEPT_INPUTS && kept_bytes + input.len() <= MOST_KEPT_BYTES {
                        kept_bytes += input.len();
                        mutator.inputs.push(input);
                    }
                }
                Ok(_) => {}
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let line = format!(
            "fuzz {}: seed {seed}, {cases} cases in {seconds:.1} s, {:.0} a second, {} outcomes, at most {peak_bytes} bytes",
            self.name,
            cases as f64 / seconds,
            outcomes.len()
        );
        match limit {
            Some(_) => watchdog::say(&line),
            None => println!("{line}"),
        }
    }

    fn case<Outcome: Hash>(&self, watchdog: &Watchdog, parse: impl Fn(&[u8]) -> Outcome, input: &[u8]) -> Done {
        watchdog.begin(input);
        let (outcome, peak_bytes) = allocator::peak_of(|| catch_unwind(AssertUnwindSafe(|| digest(parse(input)))));
        watchdog.end();
        let most_bytes = self.most_bytes(input);
        let outcome = match outcome {
            Err(panic) => Err(message(&*panic)),
            Ok(_) if peak_bytes > most_bytes => {
                Err(format!("{peak_bytes} bytes were allocated for {} of input, more than {most_bytes}", input.len()))
            }
            Ok(outcome) => Ok(outcome),
        };
        Done { outcome, peak_bytes }
    }

    fn most_bytes(&self, input: &[u8]) -> usize {
        self.spare_bytes + self.bytes_per_byte * input.len()
    }

    /// Panics with the smallest input that fails as well.
    fn fail<Outcome: Hash>(
        &self,
        watchdog: &Watchdog,
        parse: impl Fn(&[u8]) -> Outcome,
        input: Vec<u8>,
        why: &str,
    ) -> ! {
        let smallest = mutate::shrink(input, TRIES, |fewer| self.case(watchdog, &parse, fewer).outcome.is_err());
        let path = keep(self.name, &smallest);
        let printed = match smallest.len() {
            0..=MOST_PRINTED_BYTES => format!("b\"{}\"", smallest.escape_ascii()),
            bytes => format!("{bytes} bytes"),
        };
        watchdog::say(&format!(
            "fuzz {}: {why}\nsmallest input: {printed}\nagain: FUZZ_INPUT={} and this test alone",
            self.name,
            path.display()
        ));
        // Not caught, so that place and backtrace are told.
        self.judge_alone(&parse, &smallest);
        panic!("{}: {why}; alone the input passes", self.name);
    }

    fn judge_alone<Outcome: Hash>(&self, parse: impl Fn(&[u8]) -> Outcome, input: &[u8]) {
        IS_QUIET.set(false);
        let (_, peak_bytes) = allocator::peak_of(|| digest(parse(input)));
        let most_bytes = self.most_bytes(input);
        assert!(peak_bytes <= most_bytes, "{}: {peak_bytes} bytes allocated, more than {most_bytes}", self.name);
    }
}

fn digest(outcome: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    outcome.hash(&mut hasher);
    hasher.finish()
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_owned())
}

fn number_of(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("`{name}` is not a number: {value}")))
}

fn drawn_seed() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(USUAL_SEED, |now| now.as_nanos() as u64)
}

/// Writes a failing input where `FUZZ_INPUT` can read it.
fn keep(name: &str, input: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("fuzz-{}-{}", name.replace(' ', "-"), std::process::id()));
    if let Err(error) = std::fs::write(&path, input) {
        watchdog::say(&format!("cannot write `{}`: {error}", path.display()));
    }
    path
}

thread_local! {
    /// Whether a panic on this thread is a case's, and no news.
    static IS_QUIET: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// While it is there, panics of this thread are not printed; those of others are, as before.
struct Quiet;

impl Quiet {
    fn new() -> Quiet {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                if !IS_QUIET.get() {
                    usual(panic);
                }
            }));
        });
        IS_QUIET.set(true);
        Quiet
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        IS_QUIET.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a target that fails: what its panic says.
    fn failure(target: Target, parse: impl Fn(&[u8]) -> u64) -> String {
        let done = catch_unwind(AssertUnwindSafe(|| target.run(parse)));
        message(&*done.expect_err("the target fails"))
    }

    fn made() -> Vec<Vec<u8>> {
        vec![b"length=5;hello".to_vec(), vec![0; 64]]
    }

    #[test]
    fn a_panic_behind_a_checksum_is_found_and_its_input_made_small() {
        let sum = |bytes: &[u8]| bytes.iter().fold(7u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(*byte));
        let mend = |bytes: &mut [u8]| {
            if let Some((seal, body)) = bytes.split_last_mut() {
                *seal = sum(body);
            }
        };
        let parse = |bytes: &[u8]| {
            let Some((seal, body)) = bytes.split_last() else { return 0 };
            assert!(*seal != sum(body) || body.len() < 8 || body[4] != 0xff, "byte 4 of {}", body.len());
            1
        };
        let mut input = vec![3; 20];
        mend(&mut input);
        let why = failure(Target::new("a checksum", vec![input]).mended(mend).cases(100_000), parse);
        assert!(why.starts_with("byte 4 of "), "{why}");
    }

    #[test]
    fn a_length_that_is_believed_is_found_before_it_is_used() {
        let parse = |bytes: &[u8]| {
            let Some(length) = bytes.first_chunk::<4>() else { return 0 };
            let length = u32::from_le_bytes(*length) as usize & 0xff_ffff;
            u64::from(Vec::<u8>::with_capacity(length).is_empty())
        };
        let why = failure(Target::new("a length", vec![vec![0; 64]]).allocates(8, 4096), parse);
        assert!(why.contains("bytes allocated"), "{why}");
    }

    #[test]
    fn a_seed_is_the_same_run_each_time() {
        let runs = [0, 1].map(|_| {
            let seen = std::cell::RefCell::new(Vec::new());
            Target::new("a seed", made()).words(&[b"word"]).cases(3000).run(|bytes| {
                seen.borrow_mut().push(digest(bytes));
                bytes.len() / 7
            });
            seen.into_inner()
        });
        assert!(runs[0].len() == 3002 && runs[0] == runs[1], "{} cases", runs[0].len());
    }

    #[test]
    fn words_numbers_and_other_inputs_reach_the_parser() {
        let reached = std::cell::Cell::new([false; 4]);
        Target::new("reach", made()).words(&[b"WORD"]).cases(20_000).run(|bytes| {
            let mut found = reached.get();
            let has = |part: &[u8]| bytes.windows(part.len()).any(|some| some == part);
            found[0] |= has(b"WORD");
            found[1] |= has(b"length=4;") || has(b"length=6;");
            found[2] |= has(&u64::MAX.to_le_bytes());
            found[3] |= has(b"hello") && has(&[0; 20]);
            reached.set(found);
        });
        assert_eq!(reached.get(), [true; 4]);
    }
}
