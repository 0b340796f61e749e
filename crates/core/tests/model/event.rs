//! What can happen to a core, as data, so that a failing sequence shrinks and replays.
//!
//! Events name things by small numbers that the world takes modulo what is there (the third lease of engine 1),
//! so that every event means something whatever came before it, also after others were shrunk away.

use forebay_core::tiers::Admission;
use proptest::prelude::*;

/// The pool and the shares of one run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub units: u32,
    pub seed: u64,
    pub promise_permille: u32,
    pub reserve_permille: u32,
    /// Units whose memory is there from the start.
    pub populated: u32,
    /// Number of the policy.
    pub policy: usize,
    pub tier: Option<Admission>,
}

/// A run of blocks of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub namespace: u8,
    pub chain: u8,
    pub blocks: u8,
}

#[derive(Clone, Copy, Debug)]
pub enum End {
    Finish,
    Cancel,
}

/// How a commit goes wrong, if it does.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    None,
    Incomplete,
    WrongGeneration,
    Foreign,
    OtherGroup,
    /// Into a namespace that was purged or closed meanwhile.
    Retired,
    Again,
}

#[derive(Clone, Copy, Debug)]
pub enum Event {
    Populate(u8),
    Start {
        engine: u8,
    },
    /// All groups of a prompt at once, `piece` keys an event.
    Lookup {
        engine: Option<u8>,
        prompt: Prompt,
        piece: u8,
        end: End,
    },
    Begin {
        engine: u8,
        prompt: Prompt,
    },
    Look {
        which: u8,
        group: u8,
        from: u8,
        blocks: u8,
    },
    End {
        which: u8,
        end: End,
    },
    Release {
        engine: u8,
        which: u8,
    },
    ReleaseAgain {
        engine: u8,
        which: u8,
    },
    ReleaseForeign {
        engine: u8,
        which: u8,
    },
    Reserve {
        engine: u8,
        namespace: u8,
        group: u8,
        count: u8,
        maps: bool,
    },
    Commit {
        engine: u8,
        which: u8,
        chain: u8,
        position: u8,
        fault: Fault,
    },
    Abort {
        engine: u8,
        which: u8,
        is_foreign: bool,
    },
    /// Lookup, reserve what is missing, commit it, release: what an engine does all day.
    Store {
        engine: u8,
        prompt: Prompt,
        at_once: u8,
    },
    Purge {
        namespace: u8,
    },
    Close {
        namespace: u8,
    },
    /// A request waits, with one of its groups.
    Hint {
        engine: u8,
        prompt: Prompt,
        group: u8,
    },
    /// A request waits for blocks that lie on the tier, and not in the pool.
    HintOnTier {
        engine: u8,
        which: u8,
    },
    WithdrawHint {
        engine: u8,
        which: u8,
    },
    Step,
    Verified {
        which: u8,
    },
    /// A block was copied to another slot.
    Moved {
        which: u8,
        is_copied: bool,
    },
    Corrupt {
        which: u8,
    },
    Audit {
        from: u8,
        records: u8,
    },
    Audited {
        which: u8,
        is_whole: bool,
    },
    Scrub,
    Scrubbed {
        which: u8,
        is_whole: bool,
    },
    /// A worker says that a slot's bytes are not what was stored, perhaps of a slot that changed hands since.
    Suspect {
        which: u8,
        is_stale: bool,
        is_right: bool,
    },
    /// Somebody finds that they are not, and says so.
    DropCorrupt {
        which: u8,
        is_stale: bool,
    },
    /// `loses` names an extent that cannot be read any more.
    Restart {
        loses: Option<u8>,
    },
    Resume {
        engine: u8,
        keep: u32,
        lies: bool,
    },
    Gone {
        engine: u8,
    },
    /// A load from the tier ends.
    Loaded {
        which: u8,
        how: Loading,
    },
    /// A load from the tier is late.
    GiveUp {
        which: u8,
    },
    /// A store to the tier ends.
    Stored {
        which: u8,
        is_written: bool,
    },
    /// The tier gives a block up.
    TierEvicts {
        which: u8,
    },
    /// The tier removes a block of a purged namespace.
    TierRemoves,
    TierHealth {
        is_healthy: bool,
    },
    ExpireSkips,
    /// What a killed daemon had in flight is over.
    TransfersOver,
}

#[derive(Clone, Copy, Debug)]
pub enum Loading {
    Whole,
    Corrupt,
    OtherLength,
    Io,
}

pub fn setup() -> impl Strategy<Value = Setup> {
    let shares = prop::sample::select(vec![(500, 250), (500, 1000), (100, 500), (1000, 1000), (20, 20)]);
    let policy = 0..forebay_core::policy::ALL.len();
    let tier = prop::sample::select(vec![None, Some(Admission::SecondSighting), Some(Admission::All)]);
    (2u32..8, any::<u64>(), shares, 0u32..7, policy, tier).prop_map(|(units, seed, shares, absent, policy, tier)| {
        let (promise_permille, reserve_permille) = shares;
        let populated = units.saturating_sub(absent);
        Setup { units, seed, promise_permille, reserve_permille, populated, policy, tier }
    })
}

pub fn events(count: usize) -> impl Strategy<Value = Vec<Event>> {
    prop::collection::vec(event(), 1..count)
}

fn event() -> impl Strategy<Value = Event> {
    let index = || any::<u8>();
    let end = || prop_oneof![5 => Just(End::Finish), 1 => Just(End::Cancel)];
    prop_oneof![
        2 => index().prop_map(Event::Populate),
        3 => index().prop_map(|engine| Event::Start { engine }),
        8 => (prop::option::weighted(0.9, index()), prompt(), 1u8..40, end())
            .prop_map(|(engine, prompt, piece, end)| Event::Lookup { engine, prompt, piece, end }),
        3 => (index(), prompt()).prop_map(|(engine, prompt)| Event::Begin { engine, prompt }),
        5 => (index(), index(), 0u8..12, 0u8..12)
            .prop_map(|(which, group, from, blocks)| Event::Look { which, group, from, blocks }),
        4 => (index(), end()).prop_map(|(which, end)| Event::End { which, end }),
        6 => (index(), index()).prop_map(|(engine, which)| Event::Release { engine, which }),
        3 => (index(), index()).prop_map(|(engine, which)| Event::ReleaseAgain { engine, which }),
        1 => (index(), index()).prop_map(|(engine, which)| Event::ReleaseForeign { engine, which }),
        6 => (index(), index(), index(), 0u8..24, any::<bool>())
            .prop_map(|(engine, namespace, group, count, maps)| Event::Reserve { engine, namespace, group, count, maps }),
        8 => (index(), index(), index(), index(), fault())
            .prop_map(|(engine, which, chain, position, fault)| Event::Commit { engine, which, chain, position, fault }),
        3 => (index(), index(), prop::bool::weighted(0.2))
            .prop_map(|(engine, which, is_foreign)| Event::Abort { engine, which, is_foreign }),
        20 => (index(), prompt(), 1u8..8).prop_map(|(engine, prompt, at_once)| Event::Store { engine, prompt, at_once }),
        1 => index().prop_map(|namespace| Event::Purge { namespace }),
        1 => index().prop_map(|namespace| Event::Close { namespace }),
        4 => (index(), prompt(), index()).prop_map(|(engine, prompt, group)| Event::Hint { engine, prompt, group }),
        4 => (index(), index()).prop_map(|(engine, which)| Event::HintOnTier { engine, which }),
        1 => (index(), index()).prop_map(|(engine, which)| Event::WithdrawHint { engine, which }),
        6 => Just(Event::Step),
        8 => index().prop_map(|which| Event::Verified { which }),
        8 => (index(), prop::bool::weighted(0.95)).prop_map(|(which, is_copied)| Event::Moved { which, is_copied }),
        1 => index().prop_map(|which| Event::Corrupt { which }),
        1 => (index(), index()).prop_map(|(from, records)| Event::Audit { from, records }),
        3 => (index(), prop::bool::weighted(0.9)).prop_map(|(which, is_whole)| Event::Audited { which, is_whole }),
        1 => Just(Event::Scrub),
        3 => (index(), prop::bool::weighted(0.9))
            .prop_map(|(which, is_whole)| Event::Scrubbed { which, is_whole }),
        3 => (index(), prop::bool::weighted(0.2), any::<bool>())
            .prop_map(|(which, is_stale, is_right)| Event::Suspect { which, is_stale, is_right }),
        2 => (index(), prop::bool::weighted(0.2))
            .prop_map(|(which, is_stale)| Event::DropCorrupt { which, is_stale }),
        2 => prop::option::weighted(0.2, index()).prop_map(|loses| Event::Restart { loses }),
        4 => (index(), any::<u32>(), any::<bool>()).prop_map(|(engine, keep, lies)| Event::Resume { engine, keep, lies }),
        1 => index().prop_map(|engine| Event::Gone { engine }),
        8 => (index(), loading()).prop_map(|(which, how)| Event::Loaded { which, how }),
        1 => index().prop_map(|which| Event::GiveUp { which }),
        12 => (index(), prop::bool::weighted(0.9)).prop_map(|(which, is_written)| Event::Stored { which, is_written }),
        1 => index().prop_map(|which| Event::TierEvicts { which }),
        3 => Just(Event::TierRemoves),
        1 => prop::bool::weighted(0.7).prop_map(|is_healthy| Event::TierHealth { is_healthy }),
        1 => Just(Event::ExpireSkips),
        1 => Just(Event::TransfersOver),
    ]
}

fn loading() -> impl Strategy<Value = Loading> {
    prop_oneof![
        6 => Just(Loading::Whole),
        1 => Just(Loading::Corrupt),
        1 => Just(Loading::OtherLength),
        1 => Just(Loading::Io),
    ]
}

fn prompt() -> impl Strategy<Value = Prompt> {
    (any::<u8>(), any::<u8>(), 1u8..14).prop_map(|(namespace, chain, blocks)| Prompt { namespace, chain, blocks })
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        8 => Just(Fault::None),
        1 => Just(Fault::Incomplete),
        1 => Just(Fault::WrongGeneration),
        1 => Just(Fault::Foreign),
        1 => Just(Fault::OtherGroup),
        1 => Just(Fault::Retired),
        2 => Just(Fault::Again),
    ]
}
