//! The daemon's process: its start on the pool's files, the work of its threads and timers, and its end.
//!
//! A kill keeps of the pool's files what they were at that moment: what the destructors of this process do afterwards
//! is taken back.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_core::report::ReadyBlock;
use forebay_core::stats::Finder;
use forebay_core::tiers::TierId;
use forebay_core::{Core, NamespaceId};
use forebay_io::pool::{Entry, Pool};
use rustix::fs::{SeekFrom, seek};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, mpsc};

use super::copies::Copy;
use super::truth::Holder;
use super::world::World;
use crate::clients::{Clients, Limits};
use crate::config::{Bytes, Config, HugePages, TierSpec};
use crate::insight::{Insight, Present};
use crate::serve::{assemble, core_config, pool_config};
use crate::state::{Shared, State, ToMove, ToVerify};
use crate::tasks::verify::Verdict;
use crate::tasks::{relocate, scrub, verify};
use crate::tiers::spec::Found;

pub const UNIT_BYTES: u64 = 2 << 20;
const PAGE: usize = 4096;
/// What the daemon writes of the pool's files beside the blocks.
const RECORDS: [&str; 4] = ["table", "generation", "namespace", "purge"];

pub struct Daemon {
    pub shared: Shared,
    pub clients: Arc<Clients>,
    pub boot: u32,
    /// Its clock and its tasks; they run only when the seed says so.
    pub runtime: Runtime,
    pub lookups: Arc<Semaphore>,
    to_verify: mpsc::UnboundedReceiver<ToVerify>,
    to_move: mpsc::UnboundedReceiver<ToMove>,
    verifying: Vec<(ToVerify, Option<Verdict>, u64)>,
    moving: Vec<(ToMove, Option<bool>, u64)>,
    scrubbing: Vec<(ReadyBlock, Option<Entry>, Option<bool>)>,
    pub copies: Vec<Copy>,
    pub populated: u32,
    is_open: Vec<bool>,
}

impl Daemon {
    pub fn pool(&self) -> Arc<Pool> {
        self.shared.lock().table.pool().clone()
    }

    /// Whose block is moved next.
    pub fn moving_namespace(&self) -> Option<NamespaceId> {
        let (to_move, ..) = self.moving.first()?;
        Some(to_move.entry.as_ref()?.key.namespace)
    }

    /// Nothing is on its way in its own threads.
    pub fn is_idle(&self) -> bool {
        self.verifying.is_empty() && self.moving.is_empty() && self.copies.is_empty()
    }
}

impl World {
    fn pool_file(&self, name: &str) -> PathBuf {
        self.directory.path().join("pool").join(name)
    }

    fn record_file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.pool_file(name)).expect("the pool has its files")
    }

    pub fn data_file(&self) -> File {
        self.record_file("data")
    }

    fn config(&self) -> Config {
        let mut config = Config::default();
        config.pool.directory = self.directory.path().join("pool");
        config.pool.capacity_bytes = Bytes(u64::from(self.setup.units) * UNIT_BYTES);
        config.pool.unit_bytes = Some(Bytes(UNIT_BYTES));
        config.pool.huge_pages = HugePages::Off;
        config.pool.policy = self.setup.policy;
        config.limits.lookups_in_flight = 4;
        let tier = |medium: &super::medium::SharedMedium| {
            Box::new(super::medium::Simulated { is_shared: medium.get().is_shared }) as Box<dyn TierSpec>
        };
        config.tiers = self.media.iter().map(tier).collect();
        config
    }

    /// A daemon starts, on what an earlier one left.
    pub fn boot(&mut self) {
        if self.daemon.is_some() {
            return;
        }
        self.boots += 1;
        let config = self.config();
        let opened = Pool::open(&pool_config(&config)).expect("the pool opens");
        let mut core = core_config(&config, &opened.pool);
        core.seed = self.setup.seed ^ u64::from(self.boots);
        core.promise_permille = self.setup.promise_permille;
        (core.memory_entries, core.table_bits) = (64, 2);
        let clients = Clients::new(Limits::of(&config, config.limits.connections_per_user as usize));
        let lookups = Arc::new(Semaphore::new(config.limits.lookups_in_flight as usize));
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        let guard = runtime.enter();
        let opened = assemble(config, Core::new(core), opened, u64::from(self.boots), no_insight());
        drop(guard);
        let (shared, to_verify, to_move) = opened.expect("the pool is recovered");
        for medium in &self.media {
            medium.get().begin(self.boots, self.data_file());
        }
        let (verifying, moving, scrubbing, copies) = Default::default();
        let is_open = vec![false; self.media.len()];
        let (boot, populated) = (self.boots, 0);
        self.daemon = Some(Daemon {
            shared,
            clients,
            boot,
            runtime,
            lookups,
            to_verify,
            to_move,
            verifying,
            moving,
            scrubbing,
            copies,
            populated,
            is_open,
        });
        self.truth.get().count("boots");
    }

    /// `kill -9`, between two events.
    pub fn kill_daemon(&mut self) {
        let Some(daemon) = self.daemon.take() else { return };
        self.truth.get().count("kills of the daemon");
        self.note_purges();
        let kept = RECORDS.map(|name| pages(&self.record_file(name)));
        self.media.iter().for_each(|medium| medium.get().cut_off());
        self.truth.get().end(Holder::Daemon);
        let guard = daemon.runtime.enter();
        for engine in 0..self.engines.len() {
            self.disconnect(engine);
            (0..self.engines[engine].workers.len()).for_each(|rank| self.hang_up(engine, rank));
        }
        self.abandon(|_| true);
        self.closing.clear();
        drop(guard);
        let Daemon { shared, runtime, .. } = daemon;
        drop(runtime);
        drop(shared);
        for (name, kept) in RECORDS.iter().zip(kept) {
            let file = self.record_file(name);
            for (at, now) in pages(&file) {
                let before = kept.get(&at).copied().unwrap_or([0; PAGE]);
                if before != now {
                    file.write_all_at(&before, at).expect("there is room, as before");
                }
            }
        }
    }

    /// What a purge has begun with is gone, whether or not anybody is told: the next daemon goes on with it.
    fn note_purges(&self) {
        for (shape, asked) in self.purges_begun() {
            let mut truth = self.truth.get();
            truth.count("purges cut off");
            truth.purged(shape, asked);
        }
    }

    /// A record of an instance is damaged while no daemon runs.
    pub fn tear_record(&mut self) {
        let engine = self.dice.pick(self.engines.len()).map(|at| self.engines[at].name.clone());
        let Some(name) = engine.filter(|_| self.daemon.is_none() && self.boots > 0) else { return };
        let table = self.record_file("table");
        let mut head = vec![0; 64 << 10];
        let read = table.read_at(&mut head, 0).expect("a table has a head");
        let places: Vec<usize> = head[..read]
            .windows(name.len())
            .enumerate()
            .filter(|(_, at)| *at == name.as_bytes())
            .map(|it| it.0)
            .collect();
        for at in places {
            table.write_all_at(&[0xff], at as u64).expect("the table can be written");
            self.truth.get().count("torn records");
        }
    }

    /// Runs what its tasks are woken for.
    pub fn run_tasks(&mut self, pass: Duration) {
        let Some(daemon) = &self.daemon else { return };
        daemon.runtime.block_on(async {
            tokio::time::advance(pass).await;
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
        });
    }

    pub fn event<T>(&mut self, run: impl FnOnce(&mut State) -> T) -> Option<T> {
        let daemon = self.daemon.as_ref()?;
        let _guard = daemon.runtime.enter();
        Some(daemon.shared.event(run))
    }

    /// Takes what events have put into the threads' queues.
    pub fn take_queues(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        let mut truth = self.truth.get();
        while let Ok(asked) = daemon.to_verify.try_recv() {
            let at = (asked.slot, asked.generation);
            let claim = truth.claim(at, asked.slices.iter().sum(), false, Holder::Daemon, "a verification");
            daemon.verifying.push((asked, None, claim));
        }
        while let Ok(to_move) = daemon.to_move.try_recv() {
            let at = (to_move.to_slot, to_move.to_generation);
            let bytes = to_move.entry.as_ref().map_or(1, |entry| entry.length);
            let claim = truth.claim(at, bytes, true, Holder::Daemon, "a move");
            daemon.moving.push((to_move, None, claim));
        }
    }

    /// The verifying thread reads a block, or tells what it read.
    pub fn verify(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        let Some((asked, verdict, claim)) = daemon.verifying.first_mut() else { return };
        if verdict.is_none() {
            let pool = daemon.shared.lock().table.pool().clone();
            *verdict = Some(verify::verify(&pool, asked));
            let is_spoiled = self.truth.get().is_spoiled(asked.slot, asked.slices.iter().sum());
            if *verdict == Some(Verdict::Rotten) && pool.entry(asked.slot, asked.generation).is_some() && !is_spoiled {
                let what = format!("{:?} of {:?} is rotten, and nothing spoiled it", asked.slot, asked.generation);
                self.truth.get().violate(what);
            }
            return;
        }
        let (claim, verdict) = (*claim, verdict.expect("checked above"));
        let (asked, ..) = daemon.verifying.remove(0);
        self.truth.get().leave(claim, Holder::Daemon);
        self.event(|state| verify::end(state, &asked, verdict));
        self.truth.get().count("verified");
    }

    /// The moving thread copies a block, or tells that it did.
    pub fn relocate(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        let Some((to_move, is_copied, claim)) = daemon.moving.first_mut() else { return };
        let Some(is_copied) = *is_copied else {
            let pool = daemon.shared.lock().table.pool().clone();
            // What lies behind the slot that it goes to is not the mover's.
            let length = to_move.entry.as_ref().map_or(0, |entry| entry.length);
            let from = to_move.to_slot.offset() + length.next_multiple_of(PAGE as u64);
            let behind = UNIT_BYTES.min(pool.geometry().data_bytes() - from);
            let before = pool.checksum(from, behind);
            *is_copied = Some(relocate::copy(&pool, to_move));
            if pool.checksum(from, behind) != before {
                self.truth.get().violate(format!("a move to {:?} wrote behind its slot", to_move.to_slot));
            }
            let bytes = to_move.entry.as_ref().map_or(0, |entry| entry.length);
            self.truth.get().spoil_copy(to_move.slot, to_move.to_slot, bytes);
            return;
        };
        let claim = *claim;
        let (to_move, ..) = daemon.moving.remove(0);
        self.truth.get().leave(claim, Holder::Daemon);
        self.event(|state| relocate::end(state, &to_move, is_copied));
        self.truth.get().count("moved");
    }

    /// The scrub takes some blocks, reads one, or tells what it read.
    pub fn scrub(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        if daemon.scrubbing.is_empty() {
            let piece = self.event(scrub::piece).unwrap_or_default();
            let daemon = self.daemon.as_mut().expect("it ran the event");
            daemon.scrubbing = piece.into_iter().map(|(block, entry)| (block, entry, None)).collect();
            return;
        }
        let pool = daemon.shared.lock().table.pool().clone();
        let (block, entry, verdict) = &mut daemon.scrubbing[0];
        let Some(is_whole) = *verdict else {
            *verdict = Some(scrub::is_whole(&pool, block, entry));
            return;
        };
        let (slot, generation) = (block.slot, block.generation);
        let bytes = entry.as_ref().map_or(1, |entry| entry.length);
        daemon.scrubbing.remove(0);
        if !is_whole {
            let is_spoiled = self.truth.get().is_spoiled(slot, bytes);
            let is_dropped = self.event(|state| state.core.drop_corrupt(slot, generation, Finder::Scrub));
            if is_dropped == Some(true) && !is_spoiled {
                self.truth
                    .get()
                    .violate(format!("the scrub dropped {slot:?} of {generation:?}, which nothing spoiled"));
            }
        }
    }

    pub fn populate(&mut self) {
        let units = self.setup.units;
        let Some(daemon) = self.daemon.as_mut().filter(|daemon| daemon.populated < units) else { return };
        let unit = daemon.populated;
        daemon.populated += 1;
        daemon.pool().populate_unit(unit).expect("the machine has memory for the pool");
        self.event(|state| state.core.populate(unit));
    }

    /// As `tasks/tick.rs`, without the rest of the work.
    pub fn tick(&mut self) {
        self.event(|state| {
            state.instances.idle().into_iter().for_each(|instance| state.settle_instance(instance));
        });
    }

    pub fn step_core(&mut self) -> bool {
        self.event(|state| state.core.step()).unwrap_or(false)
    }

    /// A tier opens, or has a turn.
    pub fn drive(&mut self, number: usize) {
        let Some(daemon) = self.daemon.as_mut() else { return };
        let tier = TierId(number as u8);
        let is_new = !std::mem::replace(&mut daemon.is_open[number], true);
        let boot = daemon.boot;
        let medium = self.media[number].clone();
        self.event(|state| {
            if is_new {
                let found = medium.get().found();
                let hasher = state.core.tier_hasher();
                let blocks = found.iter().map(|key| hasher.hash(key)).collect();
                let namespaces = found.iter().map(|key| key.namespace).collect();
                state.tiers.of(tier).found(Found { blocks, namespaces }, &mut state.core);
                state.tiers.of(tier).attach(medium.open(boot), u64::from(boot));
            }
            let State { tiers, core, table, .. } = state;
            tiers.drive(tier, core, table.pool());
        });
    }

    pub fn walk(&mut self, number: usize) {
        self.event(|state| state.tiers.walk(TierId(number as u8), &mut state.core));
    }

    /// What must hold between any two steps while a daemon runs.
    pub fn check(&mut self) {
        self.take_queues();
        let Some(daemon) = &self.daemon else { return };
        let state = daemon.shared.lock();
        let mut truth = self.truth.get();
        truth.check_generations(|slot| state.table.pool().generation(slot));
        if truth.now.is_multiple_of(32)
            && let Err(complaint) = state.core.audit()
        {
            truth.violate(format!("the core's audit: {complaint}"));
        }
    }
}

/// The pages of a sparse file that have memory.
fn pages(file: &File) -> BTreeMap<u64, [u8; PAGE]> {
    let (mut pages, mut at) = (BTreeMap::new(), 0);
    while let Ok(start) = seek(file, SeekFrom::Data(at)) {
        let end = seek(file, SeekFrom::Hole(start)).expect("a file ends with a hole");
        for at in (start..end).step_by(PAGE) {
            let mut page = [0; PAGE];
            let read = file.read_at(&mut page, at).expect("the page is there");
            assert!(read == PAGE || at + read as u64 == end, "a page was cut off");
            pages.insert(at, page);
        }
        at = end;
    }
    pages
}

/// Estimates decide nothing: lookups are noted nowhere.
fn no_insight() -> Insight {
    static INSIGHT: OnceLock<Insight> = OnceLock::new();
    INSIGHT.get_or_init(|| Insight::new(1, Present::of_pool(1 << 20)).0).clone()
}
