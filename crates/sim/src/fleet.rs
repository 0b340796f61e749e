//! Hosts with a pool each on one shared store that evicts by use: how much of what they ask for is in their pools or in
//! the store, compared with a store that sees every use.
//!
//! Each host is a real core, driven as the daemon drives it, in virtual time. The store is a model (`store`): it evicts
//! as real stores do, as far as it was told of the uses. Payloads do not exist.

mod store;

use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::{Answer, LeaseId, STATE_NOT_YET, STATE_READY};
use forebay_core::tier::Outcome as Ended;
use forebay_core::tiers::{Admission, Limits, Probe, TierId, Touching};
use forebay_core::{BlockHash, BlockKey, Config, Core, Effect, Instance, NamespaceId, NamespaceIndex, PAGE_BYTES};

use self::store::Store;
pub use self::store::{Eviction, Operations};
use crate::trace::mix;

const ENGINE: Instance = Instance(0);
const STORE: TierId = TierId(0);
const NAMESPACE: NamespaceId = NamespaceId(1);
/// Blocks of a unit of a pool.
const UNIT_BLOCKS: u64 = 16;
/// Time between two ticks of a host, as in the daemon.
const TICK_MS: u64 = 2000;
/// Lookups of a request that may bring nothing new up before it is served with what there is.
const MAX_IDLE: usize = 16;

/// How the store learns of uses in the hosts' pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Of none.
    Nothing,
    /// By touches, as the daemon's tiers are.
    Touches(Touching),
    /// Of each at once, and it is given again what it lacks: the oracle.
    All,
}

/// Hosts, a store, and the traffic.
#[derive(Clone, Copy, Debug)]
pub struct Fleet {
    /// At first.
    pub hosts: usize,
    /// After so many requests there are so many hosts: new ones join, or the last ones are gone for good.
    pub changes: &'static [(u64, usize)],
    pub pool_blocks: u64,
    pub store_blocks: u64,
    pub eviction: Eviction,
    /// Prompts that come again and again, the `n`th with a frequency of `1 / n`.
    pub prompts: u64,
    pub prompt_blocks: u64,
    /// Thousandths of the requests whose prompt comes once.
    pub once_permille: u64,
    pub requests: u64,
    /// Of all hosts together.
    pub requests_per_second: u64,
    /// After so many requests a host begins anew with an empty pool; the hosts in turn.
    pub restart_every: u64,
    /// When the store is emptied, in requests.
    pub emptied_at: Option<u64>,
    /// A use is not noted in the store if one was noted less than so long ago.
    pub fresh_ms: u64,
    /// How far the hosts' clocks are ahead of the store's, in turn. None are wrong if there is nothing.
    pub clocks_ahead_ms: &'static [i64],
    pub seed: u64,
}

/// What came of it, over the second half of the requests and those prompts that come again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    pub asked_blocks: u64,
    pub pool_blocks: u64,
    pub store_blocks: u64,
    /// Touches of all hosts, and blocks that they found gone, over all requests.
    pub touches: u64,
    pub lost_blocks: u64,
    /// Blocks written to the store, over all requests.
    pub stored_blocks: u64,
    /// Over all requests.
    pub operations: Operations,
    /// Of the host whose period is longest at the end.
    pub longest_period_seconds: u64,
}

impl Found {
    pub fn hit_rate(&self) -> f64 {
        (self.pool_blocks + self.store_blocks) as f64 / self.asked_blocks.max(1) as f64
    }
}

/// Runs the traffic.
pub fn run(fleet: &Fleet, told: Told) -> Found {
    let mut store = Store::new(fleet.eviction, fleet.store_blocks, fleet.fresh_ms, fleet.seed);
    let (mut hosts, mut found): (Vec<Host>, _) = (Vec::new(), Found::default());
    let weights: Vec<f64> = (1..=fleet.prompts).map(|rank| 1.0 / rank as f64).collect();
    let sum: f64 = weights.iter().sum();
    let mut changes = std::iter::once((0, fleet.hosts)).chain(fleet.changes.iter().copied()).peekable();
    for number in 0..fleet.requests {
        store.now_ms = number * 1000 / fleet.requests_per_second;
        if let Some((_, count)) = changes.next_if(|(at, _)| *at == number) {
            hosts.drain(count.min(hosts.len())..).for_each(|host| host.leave(&mut found));
            for at in hosts.len()..count {
                // The second ticks of hosts are not at the same moment.
                let next_tick_ms = store.now_ms + 1 + at as u64 * 137 % TICK_MS;
                hosts.push(Host::new(fleet, told, at, number + at as u64, next_tick_ms));
                hosts[at].core.expire_skips();
            }
        }
        for host in &mut hosts {
            while host.next_tick_ms <= store.now_ms {
                host.next_tick_ms += TICK_MS;
                host.core.expire_skips();
                host.settle(&mut store);
            }
        }
        if fleet.emptied_at == Some(number) {
            store.empty();
        }
        if number % fleet.restart_every == fleet.restart_every - 1 {
            let at = (number / fleet.restart_every) as usize % hosts.len();
            hosts[at].leave(&mut found);
            hosts[at] = Host::new(fleet, told, at, number, hosts[at].next_tick_ms);
        }
        let draw = |what: u64| mix(fleet.seed ^ mix(number * 4 + what));
        let is_once = draw(0) % 1000 < fleet.once_permille;
        let prompt = if is_once { 1 << 40 | number } else { ranked(&weights, sum, draw(1)) };
        let hashes: Vec<[u8; 16]> = (0..fleet.prompt_blocks).map(|block| hash(prompt, block)).collect();
        let host = draw(2) as usize % hosts.len();
        let served = hosts[host].serve(&hashes, &mut store, told == Told::All);
        if !is_once && number >= fleet.requests / 2 {
            found.asked_blocks += fleet.prompt_blocks;
            found.pool_blocks += served.0 as u64;
            found.store_blocks += (served.1 - served.0) as u64;
        }
    }
    for host in &hosts {
        host.leave(&mut found);
        let period = u64::from(host.core.tier_report(STORE).touch_ticks) * TICK_MS / 1000;
        found.longest_period_seconds = found.longest_period_seconds.max(period);
    }
    Found { operations: store.operations, ..found }
}

fn ranked(weights: &[f64], sum: f64, draw: u64) -> u64 {
    let mut at = (draw >> 11) as f64 / (1u64 << 53) as f64 * sum;
    let rank = weights.iter().position(|weight| {
        at -= weight;
        at < 0.0
    });
    rank.unwrap_or(weights.len() - 1) as u64
}

fn hash(prompt: u64, block: u64) -> [u8; 16] {
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&mix(prompt).to_le_bytes());
    hash[8..].copy_from_slice(&mix(prompt ^ block << 48).to_le_bytes());
    hash
}

struct Host {
    next_tick_ms: u64,
    clock_ahead_ms: i64,
    core: Core,
    namespace: NamespaceIndex,
    answer: Answer,
}

impl Host {
    fn new(fleet: &Fleet, told: Told, at: usize, salt: u64, next_tick_ms: u64) -> Host {
        let clock_ahead_ms = fleet.clocks_ahead_ms.get(at % fleet.clocks_ahead_ms.len().max(1)).copied().unwrap_or(0);
        let mut config = Config::new(UNIT_BLOCKS * PAGE_BYTES, fleet.pool_blocks.div_ceil(UNIT_BLOCKS) as u32);
        (config.seed, config.memory_entries, config.table_bits) = (mix(fleet.seed ^ salt), 1 << 12, 4);
        let units = config.units;
        let mut core = Core::new(config);
        (0..units).for_each(|unit| core.populate(unit));
        let touching = if let Told::Touches(touching) = told { Some(touching) } else { None };
        core.open_tier(Limits { admission: Admission::All, is_shared: true, touching, ..Limits::default() });
        let rank_bytes = vec![PAGE_BYTES];
        let group = GroupLayout { attention: Attention::Full, tokens_per_block: 16, rank_bytes, is_replicated: false };
        let layout = Layout::new(vec![(0, group)]).expect("the layout is right");
        let namespace = core.open_namespace(NAMESPACE, &layout).expect("the pool has room for blocks");
        Host { next_tick_ms, clock_ahead_ms, core, namespace, answer: Answer::default() }
    }

    fn leave(&self, found: &mut Found) {
        let stats = self.core.tier_report(STORE).stats;
        found.touches += stats.touches;
        found.lost_blocks += stats.lost;
        found.stored_blocks += stats.stored;
    }

    /// Blocks that were in the pool, and all that were there when nothing more came up.
    fn serve(&mut self, hashes: &[[u8; 16]], store: &mut Store, is_told_all: bool) -> (usize, usize) {
        let (mut lease, pool_hits) = self.lookup(hashes);
        let (mut hits, mut idle) = (pool_hits, 0);
        while self.answer.states.contains(&STATE_NOT_YET) && idle < MAX_IDLE {
            self.follow(store);
            let (next, more) = self.lookup(hashes);
            self.core.release(ENGINE, lease);
            idle = if more > hits { 0 } else { idle + 1 };
            (lease, hits) = (next, more);
        }
        self.core.release(ENGINE, lease);
        self.store_missing(hashes, store);
        self.settle(store);
        if is_told_all {
            for hash in hashes.iter().rev() {
                let key = key(hash);
                if !store.see(&key, 0) {
                    store.insert(&key);
                }
            }
        }
        (pool_hits, hits)
    }

    /// Ends what the core cut up.
    fn settle(&mut self, store: &mut Store) {
        while self.core.step() {}
        self.follow(store);
    }

    fn lookup(&mut self, hashes: &[[u8; 16]]) -> (LeaseId, usize) {
        self.answer = Answer::default();
        let mut lookup = self.core.begin_lookup(Some(ENGINE), self.namespace);
        self.core.look(&mut lookup, 0, hashes.as_flattened(), 16, &mut self.answer);
        (self.core.finish_lookup(lookup), self.answer.slots.len())
    }

    fn store_missing(&mut self, hashes: &[[u8; 16]], store: &mut Store) {
        let is_missing = |at: &usize| self.answer.states.get(*at) != Some(&STATE_READY);
        for at in (0..hashes.len()).filter(is_missing).collect::<Vec<_>>() {
            let mut slots = Vec::new();
            self.core.reserve(ENGINE, self.namespace, 0, 1, false, &mut slots);
            self.follow(store);
            let Some(slot) = slots.first() else { return };
            let hash = |at: usize| BlockHash::new(&hashes[at]).expect("16 bytes are a hash");
            self.core.commit(ENGINE, self.namespace, 0, hash(at), at.checked_sub(1).map(hash), *slot, Some(0));
        }
    }

    /// Does what the core asks for, at once.
    fn follow(&mut self, store: &mut Store) {
        let (mut effects, mut probes) = (Vec::new(), Vec::new());
        loop {
            self.core.take_effects(&mut effects);
            self.core.take_probes(&mut probes);
            if effects.is_empty() && probes.is_empty() {
                return;
            }
            probes.drain(..).for_each(|probe: Probe| {
                self.core.probe_done(&probe, if store.probe(&probe.key) { FOUND } else { Ended::Absent });
            });
            effects.drain(..).for_each(|effect| self.carry_out(effect, store));
        }
    }

    fn carry_out(&mut self, effect: Effect, store: &mut Store) {
        match effect {
            Effect::WriteBack { tier, block, .. } => {
                store.write(&self.core.block_key(block));
                self.core.written_back(tier, block, Ended::Stored);
            }
            Effect::Promote { block, generation, .. } => {
                let (key, length_bytes) = (self.core.block_key(block), self.core.block_length_bytes(block));
                let outcome = if store.read(&key, self.clock_ahead_ms) {
                    Ended::Loaded { length_bytes, checksum: 0 }
                } else {
                    Ended::Absent
                };
                self.core.promoted(block, generation, outcome);
            }
            Effect::Touch { tier, age, block, generation } => {
                let Some(key) = self.core.resident_key(block, generation) else { return };
                let outcome = if store.touch(&key, self.clock_ahead_ms) { FOUND } else { Ended::Absent };
                self.core.touched(tier, block, generation, age, outcome);
            }
            Effect::Move { from, generation, to, .. } => {
                self.core.moved(from, generation, to, true);
            }
            _ => {}
        }
    }
}

const FOUND: Ended = Ended::Found;

fn key(hash: &[u8; 16]) -> BlockKey {
    BlockKey { namespace: NAMESPACE, group: 0, hash: BlockHash::new(hash).expect("16 bytes are a hash") }
}
