//! The host: one daemon, some engines and clients, the tiers' media, and all that is on its way between them. Each
//! step lets one of them do one thing; the seed says which, and what.

use std::any::Any;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use forebay_core::report::Held;
use forebay_core::{ErrorKind, Result};
use forebay_rpc::proto::{CommitReply, OpenNamespaceReply, PurgeReply, PurgeRequest, ReserveReply};
use tempfile::TempDir;
use tokio::sync::Semaphore;

use super::daemon::{Daemon, UNIT_BYTES};
use super::dice::Dice;
use super::engine::{Engine, Events, Lease, Shape, Stocked, no_waker};
use super::medium::SharedMedium;
use super::truth::{Key, SharedTruth};
use crate::config::PolicyChoice;
use crate::serve;
use crate::service::lookup::Replies;
use crate::service::purge;
use crate::state::Shared;

/// Who purges and drains.
const OPERATOR: u32 = u32::MAX;
const CLIENTS: [&str; 2] = ["client-a", "client-b"];
/// Two starts of an engine have the same name, and the same shape.
const ENGINES: [(&str, u8); 5] =
    [("engine-small", 0), ("engine-wide", 1), ("engine-other", 0), ("engine-large", 2), ("engine-pair", 1)];

/// What differs from run to run.
#[derive(Debug)]
pub struct Setup {
    pub seed: u64,
    pub units: u32,
    pub promise_permille: u32,
    pub policy: PolicyChoice,
    /// Of each tier, whether hosts share it.
    tiers: Vec<bool>,
    pub steps: u64,
    /// How rarely the thread that moves blocks gets the processor.
    sloth: usize,
    /// How rarely an operator purges a namespace.
    peace: usize,
    /// How rarely a process dies, a connection breaks or the daemon drains. Where they seldom do, more is stored.
    safety: usize,
    /// Prompts of each shape. Few are often hits; many fill the pool, so that blocks are evicted and moved.
    chains: usize,
    /// Starts of engines and clients at a time.
    starts: usize,
    /// Steps after which the traffic turns to another shape; 0 if all shapes are asked for at all times. Blocks move
    /// only when another size needs their place, so without turns of the traffic there are few moves.
    tide: u64,
}

pub struct World {
    pub setup: Setup,
    pub truth: SharedTruth,
    pub dice: Dice,
    pub directory: TempDir,
    pub daemon: Option<Daemon>,
    pub boots: u32,
    pub media: Vec<SharedMedium>,
    pub engines: Vec<Engine>,
    /// Scheduler and workers of all starts that there were.
    started: u32,
    processes: u32,
    calls: Vec<Call>,
    pub mail: Vec<(u32, Mail)>,
    /// Ends of connections that the daemon has not heard of; dropped when it hears.
    pub closing: Vec<Box<dyn Any>>,
}

/// A request that the daemon has not answered.
struct Call {
    who: u32,
    asked: u64,
    what: What,
    /// The daemon has looked at it.
    has_begun: bool,
    future: Pin<Box<dyn Future<Output = Answer>>>,
}

pub enum What {
    Open,
    Name,
    Reserve {
        group: u16,
    },
    Lookup {
        keys: Vec<(u16, Vec<Key>)>,
    },
    /// The stores, and whether all ranks said that they are whole.
    Commit {
        stores: Vec<(u64, bool)>,
    },
    Purge {
        shape: u8,
    },
    Drain,
    Done,
}

pub enum Answer {
    Open(Result<Events>),
    Name(Result<OpenNamespaceReply>),
    Reserve(Result<ReserveReply>),
    Lookup(Result<Replies>),
    Commit(Result<CommitReply>),
    Purge(Result<PurgeReply>),
    Done(Result<()>),
}

/// An answer that has not arrived.
pub enum Mail {
    Named(Option<u32>),
    Slots(Vec<Stocked>),
    Found(Lease),
    Committed(Vec<u64>),
    /// The call failed: the session is not what the engine thought.
    Broken,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Schedule,
    Work,
    Poll,
    Deliver,
    Close,
    Copy,
    Verify,
    Relocate,
    Scrub,
    Tick,
    RunCore,
    Drive,
    Walk,
    Medium,
    Populate,
    Time,
    Start,
    Disconnect,
    KillScheduler,
    KillWorker,
    Pause,
    Continue,
    KillDaemon,
    Boot,
    TearRecord,
    Spoil,
    Purge,
    Drain,
    Hang,
    Expire,
}

const WEIGHTS: &[(usize, Step)] = &[
    (900, Step::Schedule),
    (1200, Step::Work),
    (900, Step::Poll),
    (800, Step::Deliver),
    (80, Step::Close),
    (250, Step::Copy),
    (200, Step::Verify),
    (200, Step::Relocate),
    (30, Step::Scrub),
    (60, Step::Tick),
    (150, Step::RunCore),
    (200, Step::Drive),
    (40, Step::Walk),
    (300, Step::Medium),
    (20, Step::Populate),
    (60, Step::Time),
    (20, Step::Start),
    (3, Step::Disconnect),
    (5, Step::KillScheduler),
    (3, Step::KillWorker),
    (15, Step::Pause),
    (30, Step::Continue),
    (2, Step::KillDaemon),
    (200, Step::Boot),
    (60, Step::TearRecord),
    (2, Step::Spoil),
    (40, Step::Purge),
    (1, Step::Drain),
    (6, Step::Hang),
    (10, Step::Expire),
];

impl Setup {
    pub fn of(seed: u64) -> Setup {
        let mut dice = Dice::new(seed, u64::MAX);
        let policies = [PolicyChoice::Default, PolicyChoice::Lru, PolicyChoice::TinyLfu];
        let tiers = [vec![], vec![false], vec![true], vec![false, true]];
        Setup {
            seed,
            units: 2 + dice.below(4) as u32,
            promise_permille: [500, 1000, 250][dice.below(3)],
            policy: policies[dice.below(3)],
            tiers: tiers[dice.below(4)].clone(),
            steps: 1500 + dice.below(6000) as u64,
            sloth: [1, 8, 64, 512][dice.below(4)],
            peace: [20, 4][dice.below(2)],
            safety: [1, 10][dice.below(2)],
            chains: [8, 64][dice.below(2)],
            starts: [2, 3, 5][dice.below(3)],
            tide: [0, 300, 1000][dice.below(3)],
        }
    }
}

impl World {
    pub fn new(setup: Setup) -> World {
        let truth = SharedTruth::default();
        let mut dice = Dice::new(setup.seed, u64::MAX - 1);
        let capacity = UNIT_BYTES * (1 + dice.below(4) as u64);
        let tiers = setup.tiers.iter().enumerate();
        let media = tiers.map(|(number, is_shared)| SharedMedium::new(number, *is_shared, capacity, truth.clone()));
        let media = media.collect();
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let (boots, started, processes) = Default::default();
        let (engines, calls, mail, closing) = Default::default();
        let mut world = World {
            setup,
            truth,
            dice,
            directory,
            daemon: None,
            boots,
            media,
            engines,
            started,
            processes,
            calls,
            mail,
            closing,
        };
        world.boot();
        (0..world.setup.units - 1).for_each(|_| world.populate());
        (0..world.setup.starts).for_each(|_| world.start());
        world
    }

    /// Step `number` of the seed.
    pub fn step(&mut self, number: u64) {
        self.dice = Dice::new(self.setup.seed, number);
        self.truth.get().now += 1;
        let step = self.dice.weighted(WEIGHTS);
        let is_end =
            matches!(step, Step::Disconnect | Step::KillScheduler | Step::KillWorker | Step::KillDaemon | Step::Drain);
        if !is_end || self.dice.is_one_in(self.setup.safety) {
            self.run(step);
        }
        self.note_live();
        self.check();
    }

    fn run(&mut self, step: Step) {
        let engine = self.dice.pick(self.engines.len());
        let tier = self.dice.pick(self.media.len());
        match step {
            Step::Schedule => {
                let Some(at) = engine else { return };
                if self.is_its_turn(self.engines[at].shape) || self.dice.is_one_in(8) {
                    self.schedule(at);
                }
            }
            Step::Work => {
                let Some(at) = engine else { return };
                let ranks = self.engines[at].workers.len();
                self.dice.pick(ranks).into_iter().for_each(|rank| self.work(at, rank));
            }
            Step::Poll => self.dice.pick(self.calls.len()).into_iter().for_each(|at| self.poll(at)),
            Step::Deliver => {
                if let Some(at) = self.dice.pick(self.mail.len()) {
                    let (who, mail) = self.mail.remove(at);
                    self.deliver(who, mail);
                }
            }
            Step::Close => {
                if let Some(at) = self.dice.pick(self.closing.len()) {
                    let closing = self.closing.swap_remove(at);
                    self.within(|| drop(closing));
                }
            }
            Step::Copy => self.copy(),
            Step::Verify => self.verify(),
            Step::Relocate if self.dice.is_one_in(self.setup.sloth) => self.relocate(),
            Step::Relocate => {}
            Step::Scrub => self.scrub(),
            Step::Tick => self.tick(),
            Step::RunCore => _ = self.step_core(),
            Step::Drive => tier.into_iter().for_each(|tier| self.drive(tier)),
            Step::Walk => tier.into_iter().for_each(|tier| self.walk(tier)),
            Step::Medium => tier.into_iter().for_each(|tier| self.media[tier].get().work(&mut self.dice)),
            Step::Populate => self.populate(),
            Step::Time => {
                let pass = [0, 1, 5, 10, 60, 2500][self.dice.below(6)];
                self.run_tasks(Duration::from_millis(pass));
            }
            Step::Start => self.start(),
            Step::Disconnect => engine.into_iter().for_each(|at| self.disconnect(at)),
            Step::KillScheduler => engine.into_iter().for_each(|at| self.kill_scheduler(at)),
            Step::KillWorker => {
                let Some(at) = engine else { return };
                let ranks = self.engines[at].workers.len();
                self.dice.pick(ranks).into_iter().for_each(|rank| self.kill_worker(at, rank));
            }
            Step::Pause | Step::Continue => {
                let Some(at) = engine else { return };
                let workers = self.engines[at].workers.iter_mut();
                workers.for_each(|worker| worker.is_paused = matches!(step, Step::Pause));
            }
            Step::KillDaemon => self.kill_daemon(),
            Step::Boot => self.boot(),
            Step::TearRecord => self.tear_record(),
            Step::Spoil => self.spoil(),
            Step::Purge if self.dice.is_one_in(self.setup.peace) => self.purge(),
            Step::Purge => {}
            Step::Drain => {
                let is_draining = self.calls.iter().any(|call| matches!(call.what, What::Drain));
                if !is_draining {
                    self.call(OPERATOR, What::Drain, |shared, _| async move {
                        serve::drain(&shared).await;
                        Answer::Done(Ok(()))
                    });
                }
            }
            Step::Hang => tier.into_iter().for_each(|tier| {
                let mut medium = self.media[tier].get();
                medium.is_hanging = !medium.is_hanging && self.dice.is_one_in(3);
            }),
            Step::Expire => {
                self.event(|state| {
                    state.core.expire_skips();
                    state.core.retry_drains();
                });
            }
        }
    }

    /// Whether the traffic is that of `shape` now.
    fn is_its_turn(&self, shape: u8) -> bool {
        let turns = self.truth.get().now.checked_div(self.setup.tide);
        turns.is_none_or(|turns| turns % u64::from(Shape::COUNT) == u64::from(shape))
    }

    /// Another start of an engine, or of a client, perhaps beside an earlier one of the same name.
    fn start(&mut self) {
        self.engines.retain(|engine| !engine.is_gone());
        if self.engines.len() >= self.setup.starts {
            return;
        }
        let is_client = self.dice.is_one_in(3);
        let (name, shape) = match is_client {
            true => (CLIENTS[self.dice.below(CLIENTS.len())], self.dice.below(Shape::COUNT.into()) as u8),
            false => ENGINES[self.dice.below(ENGINES.len())],
        };
        self.started += 1;
        let engine = Engine::new(self.started, name.to_owned(), shape, is_client, self.processes);
        self.processes += engine.workers.len() as u32;
        self.engines.push(engine);
    }

    /// A request leaves its client.
    pub fn call<F, R>(&mut self, who: u32, what: What, run: F)
    where
        F: FnOnce(Shared, Arc<Semaphore>) -> R,
        R: Future<Output = Answer> + 'static,
    {
        let Some(daemon) = &self.daemon else { return };
        let future = Box::pin(run(daemon.shared.clone(), daemon.lookups.clone()));
        let asked = self.truth.get().now;
        self.calls.push(Call { who, asked, what, has_begun: false, future });
    }

    /// The daemon goes on with a request.
    fn poll(&mut self, at: usize) {
        let mut call = self.calls.swap_remove(at);
        let polled = {
            let daemon = self.daemon.as_ref().expect("calls end with the daemon");
            let _guard = daemon.runtime.enter();
            call.future.as_mut().poll(&mut no_waker())
        };
        let Call { who, asked, what, future, .. } = call;
        let Poll::Ready(answer) = polled else {
            return self.calls.push(Call { who, asked, what, has_begun: true, future });
        };
        match (what, answer) {
            (What::Purge { shape }, Answer::Purge(reply)) => {
                let mut truth = self.truth.get();
                truth.count("purges");
                // One that waits for a tier in vain goes on, and nothing is served meanwhile. A shared store keeps its
                // blocks, unless it is asked to remove them.
                let has_begun = reply.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Timeout);
                if has_begun && !self.shares_tiers() {
                    truth.purged(shape, asked);
                }
            }
            (What::Drain, _) => {
                self.truth.get().count("drains");
                self.kill_daemon();
            }
            (what, answer) => self.answered(who, asked, what, answer),
        }
    }

    fn shares_tiers(&self) -> bool {
        self.setup.tiers.iter().any(|is_shared| *is_shared)
    }

    /// What purges are removing, and since when they were asked for, where no shared store keeps it.
    pub fn purges_begun(&self) -> impl Iterator<Item = (u8, u64)> {
        let calls = self.calls.iter().filter(|call| call.has_begun && !self.shares_tiers());
        calls.filter_map(|call| match call.what {
            What::Purge { shape } => Some((shape, call.asked)),
            _ => None,
        })
    }

    /// What these have on the way is lost, both ways.
    pub fn abandon(&mut self, is_theirs: impl Fn(u32) -> bool) {
        let (lost, kept) = std::mem::take(&mut self.calls).into_iter().partition(|call| is_theirs(call.who));
        self.calls = kept;
        let lost: Vec<Call> = lost;
        for call in lost {
            if let What::Commit { stores } = &call.what {
                stores.iter().for_each(|(store, _)| self.truth.get().end_commit(*store, None));
            }
            self.within(|| drop(call.future));
        }
        let (lost, kept) = std::mem::take(&mut self.mail).into_iter().partition(|(who, _)| is_theirs(*who));
        self.mail = kept;
        let lost: Vec<(u32, Mail)> = lost;
        for (who, mail) in lost {
            self.within(|| ());
            self.lose(who, mail);
        }
    }

    /// As the daemon's own thread runs.
    fn within(&self, run: impl FnOnce()) {
        let _guard = self.daemon.as_ref().map(|daemon| daemon.runtime.enter());
        run();
    }

    pub fn note_live(&mut self) {
        let boot = self.daemon.as_ref().map(|daemon| daemon.boot);
        let live = self.engines.iter().filter(|engine| engine.is_live(boot)).map(|engine| engine.number);
        let live: BTreeSet<u32> = live.collect();
        self.engines.iter_mut().filter(|engine| !live.contains(&engine.number)).for_each(Engine::forget_number);
        self.truth.get().respect(live);
    }

    /// A byte of the pool changes by itself.
    fn spoil(&mut self) {
        use std::os::unix::fs::FileExt;
        let page = self.dice.below((u64::from(self.setup.units) * UNIT_BYTES / 4096) as usize);
        let (data, mut byte) = (self.data_file(), [0]);
        let at = page as u64 * 4096 + self.dice.below(4096) as u64;
        data.read_exact_at(&mut byte, at).expect("the page lies in the pool");
        data.write_all_at(&[!byte[0]], at).expect("the page lies in the pool");
        self.truth.get().spoil(page as u32);
    }

    fn purge(&mut self) {
        let any = self.dice.below(Shape::COUNT.into()) as u8;
        // What is being moved goes before the move has ended, and another size gets its place.
        let moving = self.daemon.as_ref().and_then(Daemon::moving_namespace).filter(|_| !self.dice.is_one_in(4));
        let of = |namespace| (0..Shape::COUNT).find(|shape| Shape::of(*shape).descriptor().id() == namespace);
        let shape = moving.and_then(of).unwrap_or(any);
        let namespace_id = Shape::of(shape).descriptor().id().0.to_be_bytes().to_vec();
        let request = PurgeRequest { namespace_id, ..PurgeRequest::default() };
        self.call(OPERATOR, What::Purge { shape }, |shared, _| async move {
            Answer::Purge(purge::purge(&shared, request).await)
        });
    }

    fn draw_chain(&mut self) -> u8 {
        let chains = self.setup.chains;
        self.dice.below(chains).min(self.dice.below(chains)) as u8
    }

    /// A key of any group.
    pub fn draw_key(&mut self, shape: u8) -> Key {
        let groups = Shape::of(shape).groups();
        let group = groups[self.dice.below(groups.len())].0;
        let chain = self.draw_chain();
        let position = if self.dice.is_one_in(2) { 0 } else { self.dice.below(Shape::POSITIONS) as u8 };
        Key { shape, group, chain, position }
    }

    /// The first keys of a chain, of all groups.
    pub fn draw_prompt(&mut self, shape: u8) -> Vec<(u16, Vec<Key>)> {
        let chain = self.draw_chain();
        let blocks = (1 + self.dice.below(Shape::POSITIONS)) as u8;
        let keys = |group: u16| (0..blocks).map(move |position| Key { shape, group, chain, position });
        Shape::of(shape).groups().iter().map(|(group, _)| (*group, keys(*group).collect())).collect()
    }

    pub fn is_over(&self) -> bool {
        self.truth.get().violation.is_some()
    }

    // The end.

    /// All give back what they hold, or die; then nothing is in anybody's hands, in this daemon or in the next.
    pub fn finish(&mut self) {
        self.dice = Dice::new(self.setup.seed, u64::MAX - 2);
        self.setup.sloth = 1;
        for medium in &self.media {
            let mut medium = medium.get();
            (medium.is_well, medium.is_hanging) = (true, false);
        }
        self.boot();
        if self.dice.is_one_in(2) {
            self.wind_down();
        }
        for at in 0..self.engines.len() {
            self.kill_scheduler(at);
            (0..self.engines[at].workers.len()).for_each(|rank| self.kill_worker(at, rank));
        }
        self.engines.clear();
        self.come_to_rest();
        if !self.is_over() {
            self.inspect();
        }
        if !self.is_over() {
            self.kill_daemon();
            self.boot();
            self.come_to_rest();
            self.inspect();
        }
    }

    /// Engines finish what they are at, and ask for nothing new.
    fn wind_down(&mut self) {
        for at in 0..self.engines.len() {
            self.engines[at].workers.iter_mut().for_each(|worker| worker.is_paused = false);
        }
        for _ in 0..3000 {
            if self.is_over() || self.engines.iter().all(|engine| !engine.is_alive || engine.is_idle()) {
                return;
            }
            self.truth.get().now += 1;
            let at = self.dice.below(self.engines.len());
            match self.dice.below(6) {
                0 => self.wind_up(at),
                1 => self.run(Step::Work),
                2 => self.run(Step::Poll),
                3 => self.run(Step::Deliver),
                4 => self.run(Step::Time),
                _ => self.background(),
            }
            self.boot();
            self.note_live();
            self.check();
        }
    }

    /// Something that goes on without clients.
    fn background(&mut self) {
        let steps = [
            Step::Close,
            Step::Copy,
            Step::Verify,
            Step::Relocate,
            Step::Tick,
            Step::RunCore,
            Step::Drive,
            Step::Walk,
            Step::Medium,
            Step::Populate,
        ];
        let step = steps[self.dice.below(steps.len())];
        self.run(step);
    }

    fn come_to_rest(&mut self) {
        let mut quiet = 0;
        for _ in 0..20_000 {
            if self.is_over() {
                return;
            }
            self.truth.get().now += 1;
            match self.dice.below(8) {
                0 => self.run(Step::Poll),
                1 => self.run_tasks(Duration::from_millis(20)),
                _ => self.background(),
            }
            self.boot();
            self.check();
            quiet = if self.is_resting() { quiet + 1 } else { 0 };
            if quiet > 300 {
                return;
            }
        }
        let what = format!("it does not come to rest: {:?}, {:?}", self.held(), self.truth.get().claims());
        self.truth.get().violate(what);
    }

    fn held(&self) -> Option<Held> {
        self.daemon.as_ref().map(|daemon| daemon.shared.lock().core.held())
    }

    fn is_resting(&self) -> bool {
        let Some(daemon) = &self.daemon else { return false };
        let is_empty = self.calls.is_empty() && self.closing.is_empty() && daemon.is_idle();
        let are_media = self.media.iter().all(|medium| medium.get().is_idle());
        is_empty && are_media && self.held() == Some(Held::default()) && daemon.populated == self.setup.units
    }

    /// Nothing is held; what is ready is what was stored.
    fn inspect(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        let claims = self.truth.get().claims();
        let mut complaints: Vec<String> = claims.into_iter().map(|claim| format!("never ended: {claim}")).collect();
        let pool = daemon.pool();
        let mut state = daemon.shared.lock();
        complaints.extend(state.core.audit().err());
        let instances: Vec<_> = state.instances.iter().map(|(instance, _)| instance).collect();
        if !instances.is_empty() || state.core.earlier() != 0 {
            complaints.push(format!("instances are left: {instances:?}, earlier {:x}", state.core.earlier()));
        }
        let (used, ready): (u64, u64) = state
            .core
            .classes()
            .iter()
            .map(|it| (it.used, it.ready))
            .fold((0, 0), |(used, ready), (more_used, more_ready)| (used + more_used, ready + more_ready));
        if used != ready {
            complaints.push(format!("{used} slots are in use, and {ready} of them are blocks"));
        }
        let (blocks, rest) = state.core.audit_piece(0, u32::MAX);
        assert!(rest.is_none(), "all fit in one piece");
        blocks.iter().for_each(|block| state.core.audited(block.block, true));
        state.apply();
        let shorts = |id| (0..Shape::COUNT).find(|shape| Shape::of(*shape).descriptor().id() == id);
        let mut found = Vec::new();
        for block in &blocks {
            let entry = state.table.pool().entry(block.slot, block.generation);
            let Some(entry) = entry.filter(|entry| entry.key == block.key) else {
                complaints.push(format!("{:?} is misnamed in the table", block.slot));
                continue;
            };
            let shape = shorts(block.key.namespace).expect("a namespace of some shape");
            let mut data = vec![0; entry.length as usize];
            pool.read(block.slot.offset(), &mut data);
            if !self.truth.get().is_spoiled(block.slot, entry.length) {
                found.push((shape, block.key, data));
            }
        }
        drop(state);
        complaints.into_iter().for_each(|complaint| self.truth.get().violate(format!("at the end: {complaint}")));
        let now = self.truth.get().now;
        for (shape, key, data) in found {
            let hash = key.hash.as_bytes();
            let named = Key { shape, group: key.group, chain: hash[0], position: hash[1] };
            self.check_block(named, &data, now, "the end");
        }
    }
}
