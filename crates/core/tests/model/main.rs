//! The whole core against a simple reference, over random sequences of events.
//!
//! `PROPTEST_CASES=100000 cargo test -p forebay-core --release --test model` searches longer. A failure prints
//! the smallest sequence found and leaves its seed in `proptest-regressions/`, which later runs try first.

mod event;
mod prompts;
mod table;
mod tiers;
mod world;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use world::World;

const REGRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/model.txt");

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    // A few seconds, unless somebody asks for more or less.
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 4096 };
    let failure_persistence = Some(Box::new(FileFailurePersistence::Direct(REGRESSIONS)) as _);
    ProptestConfig { cases, failure_persistence, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_sequence_of_events_breaks_the_core(setup in event::setup(), events in event::events(120)) {
        let mut world = World::new(setup);
        events.into_iter().for_each(|event| world.run(event));
        world.finish();
    }
}
