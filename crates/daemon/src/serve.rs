//! The daemon from its start to its end.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_core::size::human;
use forebay_core::{Core, Error, ErrorKind, Result};
use forebay_io::pool::{Outcome, Pool, PoolConfig};
use forebay_rpc::proto::forebay_server::ForebayServer;
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::{Draining, FrameRequest};
use forebay_rpc::{ATTACH_SOCKET, RPC_SOCKET};
use rustix::process::Signal;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::mpsc;

use crate::clients::{self, Clients, Limits};
use crate::config::Config;
use crate::health::Health;
use crate::http;
use crate::insight::{Insight, alarms};
use crate::metrics::{Clients as ClientNumbers, Pool as PoolNumbers, Snapshot};
use crate::service::{self, Service};
use crate::state::{Shared, State, ToMove, ToVerify, present};
use crate::tasks::watch_files::{self, Sockets};
use crate::tasks::{attach, drive_tiers, open_tiers, populate_memory, relocate, scrub, tick, verify, work_off};
use crate::{listen, random, recover, turns, vital};

/// Opens the pool, serves until SIGTERM, SIGINT or SIGHUP, drains, and returns. Needs a current-thread runtime.
/// `revision` is the commit that the program was built from, for who asks; empty if it is not known.
///
/// In a box, so that all of the daemon is compiled in this crate. An `async fn` is compiled in the crate that waits for
/// it, here the command, which is compiled for size.
pub fn serve(config: Config, revision: &'static str) -> Pin<Box<dyn Future<Output = Result<()>>>> {
    Box::pin(run(config, revision))
}

async fn run(config: Config, revision: &'static str) -> Result<()> {
    let mut end = End::new()?;
    // Handled, a write past `ulimit -f` is an error like any other, and not the end without a word.
    let _past_file_size = handler(SignalKind::from_raw(Signal::XFSZ.as_raw()))?;
    // The sockets come first: a second daemon stops here, before it looks at the pool.
    let rpc = listen::bind(&config.socket.directory, RPC_SOCKET, &config.socket.allow_uids)?;
    let attach = listen::bind(&config.socket.directory, ATTACH_SOCKET, &config.socket.allow_uids)?;
    let pages = http::bind(config.http.address).await?;
    let hosts = http::Hosts::new(&config.http.hosts)?;
    let directory = config.socket.directory.clone();
    let sockets = Sockets::in_directory(&directory);
    let clients = Clients::new(Limits::of(&config, clients::raise_limit(&config)));
    // A disk that is misnamed or in use stops the start before the pool is touched.
    let claimed = tokio::select! {
        () = end.recv() => None,
        claimed = open_tiers::claim(config) => Some(claimed?),
    };
    let Some((config, openings)) = claimed else {
        sockets.remove();
        return Ok(());
    };
    let (shared, to_verify, to_move) = open(config)?;
    shared.lock().revision = revision;
    shared.turns().begin();
    verify::start(&shared, to_verify);
    relocate::start(&shared, to_move);
    scrub::start(&shared);
    populate_memory::start(&shared);
    drive_tiers::start(openings, &shared);

    if let Some(listener) = pages {
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "serving metrics and health");
        }
        let (shared, clients) = (shared.clone(), clients.clone());
        let source = Arc::new(Pages { shared, clients, start_time_seconds: now_seconds() });
        vital::task(http::serve(listener, hosts, source));
    }
    vital::task(tick::run(shared.clone()));
    vital::task(work_off::run(shared.clone()));
    vital::task(attach::run(attach, shared.clone(), clients.clone()));
    vital::task(serve_rpc(rpc, shared.clone(), clients.clone()));
    vital::task(clients.sweep());
    vital::task(watch_files::run(shared.clone(), sockets.clone()));
    vital::task(watch_files::run_disks(shared.clone()));
    tracing::info!(socket = %directory.display(), pid = std::process::id(), "serving");

    end.recv().await;
    tokio::select! {
        () = turns::timed(drain(&shared)) => {}
        () = end.recv() => tracing::warn!(left = %left(&shared), "a second signal ends the drain"),
    }
    sockets.remove();
    Ok(())
}

/// The signals that end the daemon. SIGHUP is among them, since nothing is read anew, and a terminal that is closed
/// must not cost the engines their transfers.
struct End {
    terminate: Signals,
    interrupt: Signals,
    hangup: Signals,
}

impl End {
    fn new() -> Result<End> {
        Ok(End {
            terminate: handler(SignalKind::terminate())?,
            interrupt: handler(SignalKind::interrupt())?,
            hangup: handler(SignalKind::hangup())?,
        })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

/// The state, and the queues of the threads that verify and move blocks.
pub type Opened = (Shared, mpsc::UnboundedReceiver<ToVerify>, mpsc::UnboundedReceiver<ToMove>);

/// The pool and the core that knows it.
fn open(config: Config) -> Result<Opened> {
    let start = Instant::now();
    let opened = Pool::open(&pool_config(&config))?;
    let geometry = opened.pool.geometry();
    let mut core = core_config(&config, &opened.pool);
    core.seed = random::number();
    let core = Core::new(core);
    let policy = config.pool.policy.name();
    let boot_id = random::number();
    // Keys are hashed anew with each start.
    let insight = Insight::start(boot_id, present(&config, &core, &opened.pool));
    let opened = assemble(config, core, opened, boot_id, insight)?;
    tracing::info!(
        capacity_bytes = geometry.data_bytes(),
        unit_bytes = geometry.unit_bytes,
        policy,
        ms = start.elapsed().as_millis() as u64,
        "opened the pool"
    );
    Ok(opened)
}

/// The core over this pool, as the configuration wants it.
pub fn core_config(config: &Config, pool: &Pool) -> forebay_core::Config {
    let geometry = pool.geometry();
    forebay_core::Config {
        policy: config.pool.policy.make(),
        promise_permille: (config.pool.promise_share * 1000.0) as u32,
        epoch: pool.epoch(),
        first_generation: pool.first_generation().0,
        ..forebay_core::Config::new(geometry.unit_bytes, geometry.units)
    }
}

/// The state over a pool that was just opened, with what an earlier daemon left in it.
pub fn assemble(
    config: Config,
    core: Core,
    opened: forebay_io::pool::Opened,
    boot_id: u64,
    insight: Insight,
) -> Result<Opened> {
    let is_recovered = matches!(opened.outcome, Outcome::Recovered { .. });
    // The core bounds what waits there: unverified blocks, and the copies that it starts at a time.
    let (verify, to_verify) = mpsc::unbounded_channel();
    let (relocate, to_move) = mpsc::unbounded_channel();
    let mut state = State::new(config, core, Arc::new(opened.pool), boot_id, insight, (verify, relocate));
    recover::restore_purges(&mut state)?;
    if is_recovered {
        recover::recover(&mut state)?;
    }
    recover::end_purges_of_pool(&mut state);
    state.is_recovered = true;
    Ok((Shared::new(state), to_verify, to_move))
}

/// The control plane: a task for each connection.
async fn serve_rpc(listener: tokio::net::UnixListener, shared: Shared, clients: Arc<Clients>) -> Infallible {
    let limit = shared.lock().config.limits.message_bytes.0 as usize;
    let service = ForebayServer::new(Service::new(shared.clone(), clients.clone()))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit);
    let aside = vital::runtime("forebay-aside");
    loop {
        let (stream, place) = listen::accept(&listener, &shared, &clients).await;
        turns::spawn(clients::serve(stream, place, service.clone(), aside.clone()));
    }
}

/// No new slots or leases are given; sessions may finish what they hold, within the deadline. A drain that is cut short
/// loses no committed block.
pub async fn drain(shared: &Shared) {
    let deadline = shared.event(|state| {
        state.is_draining = true;
        for session in state.instances.sessions() {
            session.follows.end_all();
            session.tell(Event::Draining(Draining {}));
        }
        Duration::from_secs(state.config.drain.deadline_seconds)
    });
    let hint = "a second signal ends the daemon at once; no committed block is lost";
    tracing::info!(seconds = deadline.as_secs(), waits_for = %left(shared), hint, "draining");
    let start = tokio::time::Instant::now();
    let is_over = |is_busy: bool| !is_busy || start.elapsed() >= deadline;
    while !is_over(is_held(shared)) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // What is being written to a tier may end; what waits is in the pool all the same.
    shared.event(|state| state.tiers.close(&mut state.core));
    let seconds = deadline.saturating_sub(start.elapsed()).as_secs_f64();
    if !is_over(!shared.lock().tiers.is_drained()) {
        tracing::info!(seconds = format!("{seconds:.1}"), waits_for = %left(shared), "waiting for tiers");
    }
    while !is_over(!shared.lock().tiers.is_drained()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for tier in shared.lock().tiers.given_up() {
        tracing::warn!(tier, "the store does nothing; the stop does not wait for it");
    }
    let stores = shared.lock().tiers.take_shared();
    drop(stores);
    tracing::info!(ms = start.elapsed().as_millis() as u64, left = %left(shared), "drained");
}

/// Whether sessions hold what a drain lets them finish.
fn is_held(shared: &Shared) -> bool {
    let held = shared.lock().core.held();
    held.leases > 0 || held.reserved_bytes > 0
}

/// What a drain has not seen the end of yet: `leases: 2, operations of the tier ssd: 17`, or `nothing`.
fn left(shared: &Shared) -> String {
    let state = shared.lock();
    let held = state.core.held();
    let of_sessions = [
        (held.leases > 0).then(|| format!("leases: {}", held.leases)),
        (held.reserved_bytes > 0).then(|| format!("reservations: {}", human(held.reserved_bytes))),
    ];
    let of_tiers = state.tiers.under_way().filter(|(_, count)| *count > 0);
    let of_tiers = of_tiers.map(|(tier, count)| format!("operations of the tier {tier}: {count}"));
    let left: Vec<String> = of_sessions.into_iter().flatten().chain(of_tiers).collect();
    if left.is_empty() { "nothing".to_owned() } else { left.join(", ") }
}

/// What the HTTP pages are made of.
struct Pages {
    shared: Shared,
    clients: Arc<Clients>,
    start_time_seconds: u64,
}

impl http::Source for Pages {
    async fn health(&self) -> Health {
        Health::of(&self.shared.lock())
    }

    async fn frame(&self, request: FrameRequest) -> String {
        service::frame::json(&self.shared, request).await
    }

    async fn snapshot(&self) -> Result<Snapshot> {
        let pages = service::pages(&self.shared).await?;
        let insight = self.shared.lock().insight.clone();
        let estimates = insight.estimates().await;
        let state = self.shared.lock();
        Ok(Snapshot {
            alarms: alarms(state.core.stats(), &state.history, &estimates),
            estimates,
            core: state.core.stats().clone(),
            classes: state.classes(),
            held: state.core.held(),
            pool: PoolNumbers {
                capacity_bytes: state.core.capacity_bytes(),
                populated_bytes: state.core.populated_bytes(),
                huge_bytes: pages.huge_bytes,
                nodes: pages.nodes,
            },
            tiers: state.tiers.reports(&state.core),
            clients: ClientNumbers {
                sessions: state.instances.iter().filter(|(_, member)| member.session.is_some()).count() as u64,
                attached_workers: state.instances.iter().map(|(_, member)| member.workers.len() as u64).sum(),
                gpu_workers: registered(&state).count() as u64,
                registered_bytes: registered(&state).sum(),
                namespaces: state.namespaces.len() as u64,
                users: self.clients.reports(),
            },
            saved: state.saved,
            rpc: state.rpc.clone(),
            lookup_time: state.lookup_time.clone(),
            event_time: self.shared.turns().histogram(),
            queue_time: self.shared.turns().queue_time().waited,
            start_time_seconds: self.start_time_seconds,
            revision: state.revision,
        })
    }
}

/// Of each worker that copies from and to a GPU: bytes of the pool that it has registered with the driver.
fn registered(state: &State) -> impl Iterator<Item = u64> {
    let workers = state.instances.iter().flat_map(|(_, member)| member.workers.values());
    workers.filter_map(|worker| worker.registered_bytes)
}

pub fn pool_config(config: &Config) -> PoolConfig {
    use crate::config::HugePages as Wanted;
    use forebay_io::pool::HugePages;
    PoolConfig {
        directory: config.pool.directory.clone(),
        capacity_bytes: config.pool.capacity_bytes.0,
        unit_bytes: config.pool.unit_bytes.map(|bytes| bytes.0),
        huge_pages: match config.pool.huge_pages {
            Wanted::Auto => HugePages::Auto,
            Wanted::Off => HugePages::Off,
            Wanted::Require => HugePages::Require,
        },
    }
}

fn handler(kind: SignalKind) -> Result<Signals> {
    signal(kind).map_err(|error| Error::new(ErrorKind::Io, "cannot handle signals").source(error))
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
