//! Workers: the second socket, over which the pool's files are passed.
//!
//! A worker says which rank of which engine it is, and how many bytes its rank has of each group. It gets descriptors
//! of its own; their lock shows the daemon, as long as the worker maps the pool, that the worker is there. When all
//! ranks of an engine have attached, each rank gets the places of its slices; only when all have acknowledged that does
//! their scheduler get slots. The connection stays open. Its end does not end the mapping; it only means that this rank
//! must attach again before the scheduler gets new slots.

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::layout::{GroupLayout, Layout};
use forebay_core::{Error, ErrorKind, Generation, Instance, Result, SlotId};
use forebay_io::Seldom;
use forebay_io::pool::{MapperFds, send_fds};
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::worker_says::Says;
use forebay_rpc::proto::{AttachReady, AttachReply, AttachRequest, Detached, Held, RankGroup, RankSlice, WorkerSays};
use forebay_rpc::{MAX_ATTACH_BYTES, MAX_SUSPECTS};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout, timeout_at};

use crate::clients::{Clients, Place};
use crate::instances::{Identity, Member, Worker};
use crate::listen;
use crate::service::{check_protocol, tell_attached};
use crate::state::{Shared, State};
use crate::tasks::lend;
use crate::turns;

/// Time for each message from the other side: a worker answers at once.
const DEADLINE: Duration = Duration::from_secs(10);
/// Time for the one message that is written without yielding; the write to a worker never waits.
const SEND_DEADLINE: Duration = Duration::from_millis(1);

pub async fn run(listener: UnixListener, shared: Shared, clients: Arc<Clients>) -> Infallible {
    let failed = Arc::new(Seldom::default());
    loop {
        let (stream, place) = listen::accept(&listener, &shared, &clients).await;
        let (shared, failed) = (shared.clone(), failed.clone());
        turns::spawn(async move {
            let served = tokio::select! {
                served = serve(stream, &place, &shared) => served,
                () = place.closed() => Ok(()),
            };
            if let Err(error) = served
                && let Some(times) = failed.add(Instant::now())
            {
                tracing::warn!(%error, hint = error.hint_text(), times, "a connection to the attach socket failed");
            }
        });
    }
}

/// A worker's connection, from its request to its end.
async fn serve(mut stream: UnixStream, place: &Arc<Place>, shared: &Shared) -> Result<()> {
    let Some(request) = read::<AttachRequest>(&mut stream).await? else {
        tracing::debug!("a connection for workers said nothing");
        return Ok(());
    };
    if let Some(lending) = &request.lending {
        return lend::serve(&mut stream, place, shared, (request.protocol, lending)).await;
    }
    let (ready, mut all_there) = mpsc::channel(1);
    let held = place.seat().await.and_then(|()| place.hold());
    let welcomed = held.and_then(|hold| {
        let welcomed = shared.event(|state| welcome(state, place.uid(), &request, ready));
        Ok((hold, welcomed.inspect_err(|error| place.note_engine(error))?))
    });
    let (_hold, welcomed) = match welcomed {
        Ok(welcomed) => welcomed,
        Err(error) => {
            write(&mut stream, &refusal(&error)).await?;
            return Err(error);
        }
    };
    // A worker of an earlier build would take the news for the places of its slices, and attach again and again.
    let units = if request.hears_population { welcomed.reply.units } else { 0 };
    let progress = Progress { told_units: welcomed.reply.populated_units, units };
    let attached = Attached {
        shared: shared.clone(),
        instance: welcomed.instance,
        rank: request.rank,
        connection: welcomed.connection,
    };
    match &welcomed.files {
        Some(files) => write_with(&stream, &welcomed.reply, files)?,
        None => write(&mut stream, &welcomed.reply).await?,
    }
    // The worker's lock now lives with what it received.
    drop(welcomed.files);
    tracing::info!(
        instance = attached.instance.0,
        rank = attached.rank,
        engine_id = request.engine_id,
        numa_node = request.numa_node,
        "worker attached"
    );
    shared.event(|state| wake_if_all_there(state, attached.instance));
    converse(&mut stream, &attached, &mut all_there, progress).await
}

pub fn refusal(error: &Error) -> AttachReply {
    let hint = error.hint_text().unwrap_or("").to_owned();
    AttachReply { error: error.to_string(), hint, ..AttachReply::default() }
}

/// What a worker knows of the memory that the pool has by now.
struct Progress {
    told_units: u32,
    units: u32,
}

impl Progress {
    /// A worker that stands still reads nothing for a long time, so it is told only this often.
    const PARTS: u32 = 16;
    /// How often the pool is looked at.
    const EACH: Duration = Duration::from_millis(500);

    fn is_over(&self) -> bool {
        self.told_units >= self.units
    }

    /// The message for a worker, if there is enough to tell.
    fn news(&mut self, populated_units: u32) -> Option<AttachReady> {
        let is_worth = populated_units - self.told_units >= (self.units / Self::PARTS).max(1);
        if !is_worth && populated_units < self.units {
            return None;
        }
        self.told_units = populated_units;
        Some(AttachReady { slices: Vec::new(), populated_units: Some(populated_units) })
    }
}

/// Sends the worker the places of its slices, each time all ranks are there, and how much memory the pool has, until it
/// is whole; receives the worker's reports of mismatches, and of memory that it has registered; until it disconnects.
async fn converse(
    stream: &mut UnixStream,
    attached: &Attached,
    all_there: &mut mpsc::Receiver<()>,
    mut progress: Progress,
) -> Result<()> {
    let mut heard = Vec::new();
    let mut looks = interval(Progress::EACH);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Answers that the worker owes, and until when.
    let (mut owed, mut due) = (0, None);
    loop {
        tokio::select! {
            woken = all_there.recv() => {
                if woken.is_none() {
                    return Ok(());
                }
                let slices = attached.shared.event(|state| slices(state, attached.instance, attached.rank))?;
                write(stream, &AttachReady { slices, populated_units: None }).await?;
                (owed, due) = (owed + 1, Some(tokio::time::Instant::now() + DEADLINE));
            }
            _ = looks.tick(), if !progress.is_over() => {
                let populated_units = attached.shared.lock().populated_units;
                if let Some(news) = progress.news(populated_units) {
                    write(stream, &news).await?;
                }
            }
            () = late_at(due) => return Err(late()),
            // A message that is read in part stays in `heard`.
            read = stream.read_buf(&mut heard) => {
                if matches!(read, Ok(0) | Err(_)) {
                    return Ok(());
                }
                while let Some(said) = take_message::<WorkerSays>(&mut heard)? {
                    match said.says {
                        Some(Says::Suspects(suspects)) => suspect(attached, &suspects.slots)?,
                        Some(Says::Registered(registered)) => note_registered(attached, registered.bytes)?,
                        Some(Says::Ack(_)) | None if owed == 0 => {
                            return Err(Error::invalid("a worker sent an unexpected message"));
                        }
                        Some(Says::Ack(_)) | None => {
                            owed -= 1;
                            if owed == 0 {
                                due = None;
                                attached.shared.event(|state| acknowledge(state, attached));
                            }
                        }
                    }
                }
            }
        }
    }
}

async fn late_at(due: Option<tokio::time::Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Starts a comparison of the blocks that a worker could not load. Blocks whose slot has another owner since are left
/// out.
pub fn suspect(attached: &Attached, slots: &[Held]) -> Result<()> {
    if slots.len() > MAX_SUSPECTS {
        return Err(Error::invalid("a worker reported too many suspect blocks at once").with("limit", MAX_SUSPECTS));
    }
    attached.shared.event(|state| {
        for held in slots {
            state.core.suspect(SlotId(held.slot), Generation(held.generation));
        }
    });
    Ok(())
}

/// How much of the pool a worker has registered with its GPU's driver, for reports only.
pub fn note_registered(attached: &Attached, bytes: u64) -> Result<()> {
    attached.shared.event(|state| {
        let limit = state.table.pool().geometry().data_bytes();
        if bytes > limit {
            return Err(Error::invalid("a worker has registered more memory than the pool has")
                .with("bytes", bytes)
                .with("limit", limit));
        }
        if let Some(worker) = own_worker(state, attached) {
            worker.registered_bytes = Some(bytes);
        }
        Ok(())
    })
}

pub struct Welcomed {
    pub reply: AttachReply,
    pub files: Option<MapperFds>,
    pub instance: Instance,
    pub connection: u64,
}

/// The registered connection; dropped at its end.
pub struct Attached {
    pub shared: Shared,
    pub instance: Instance,
    pub rank: u32,
    pub connection: u64,
}

impl Drop for Attached {
    fn drop(&mut self) {
        let (instance, rank, connection) = (self.instance, self.rank, self.connection);
        self.shared.event(|state| {
            let Some(member) = state.instances.get(instance) else { return };
            // A later connection of the same rank may have taken its place.
            if member.workers.get(&rank).is_none_or(|worker| worker.connection != connection) {
                return;
            }
            member.workers.remove(&rank);
            if let Some(session) = &mut member.session {
                session.was_told_attached = false;
                session.tell(Event::Detached(Detached { rank }));
            }
            tracing::info!(instance = instance.0, rank, "worker detached");
            state.settle_instance(instance);
            state.note_nodes();
        });
    }
}

pub fn welcome(state: &mut State, uid: u32, request: &AttachRequest, ready: mpsc::Sender<()>) -> Result<Welcomed> {
    check(request)?;
    if state.is_draining {
        return Err(Error::new(ErrorKind::Unavailable, "the daemon is shutting down"));
    }
    let identity = Identity::parse(&request.engine_id, &request.incarnation)?;
    let instance = state.enter_instance(identity, request.ranks, uid)?;
    if let Err(error) = state.record_instance(instance) {
        state.settle_instance(instance);
        return Err(error);
    }
    let rank = request.rank as usize;
    let pool_id = state.table.pool().id().to_be_bytes().to_vec();
    let keeps_mapping = request.held_pool_id == pool_id && state.table.pool().lock_held_rank(instance, rank)?;
    let files = if keeps_mapping { None } else { Some(state.table.pool().mapper_fds(instance, rank)?) };
    let connection = state.next_connection;
    state.next_connection += 1;
    let member = state.instances.get(instance).expect("just entered");
    let groups = request.groups.clone();
    let (numa_node, is_ready, registered_bytes) = (request.numa_node, false, None);
    member.workers.insert(request.rank, Worker { connection, groups, is_ready, registered_bytes, numa_node, ready });
    state.note_nodes();
    let geometry = state.table.pool().geometry();
    let reply = AttachReply {
        pool_id,
        instance: instance.0.into(),
        unit_bytes: geometry.unit_bytes,
        units: geometry.units,
        has_files: files.is_some(),
        has_births: state.config.pool.verify_loads,
        populated_units: state.populated_units,
        hears_registered: true,
        ..AttachReply::default()
    };
    Ok(Welcomed { reply, files, instance, connection })
}

fn check(request: &AttachRequest) -> Result<()> {
    check_protocol(request.protocol)?;
    if request.ranks == 0 || request.rank >= request.ranks {
        return Err(Error::invalid("a worker's rank must be less than its engine's number of ranks")
            .with("rank", request.rank)
            .with("ranks", request.ranks));
    }
    let is_bad = |group: &&RankGroup| group.bytes == 0 || group.bytes > Layout::MAX_BLOCK_BYTES;
    if let Some(group) = request.groups.iter().find(is_bad) {
        return Err(Error::invalid("a rank must have 1 byte to 512 MiB of a block")
            .with("group", group.group)
            .with("bytes", group.bytes));
    }
    if request.groups.is_empty() || request.groups.len() > Layout::MAX_GROUPS {
        return Err(Error::invalid("a worker must declare 1 to 64 groups").with("groups", request.groups.len()));
    }
    Ok(())
}

/// When the last rank has attached, all ranks get their places, also those that had them before, because a rank may
/// have changed its sizes.
pub fn wake_if_all_there(state: &mut State, instance: Instance) {
    let Some(member) = state.instances.get(instance) else { return };
    if member.workers.len() as u32 == member.ranks {
        for worker in member.workers.values_mut() {
            worker.is_ready = false;
            // One wake-up is enough, so a full channel is as good.
            let _ = worker.ready.try_send(());
        }
    }
}

pub fn slices(state: &mut State, instance: Instance, rank: u32) -> Result<Vec<RankSlice>> {
    let gone = || Error::new(ErrorKind::Unavailable, "a rank disconnected while the others were being notified");
    let member = state.instances.get(instance).ok_or_else(gone)?;
    // Where the slices of a rank lie, follows from the sizes of all ranks before it.
    if member.workers.len() as u32 != member.ranks {
        return Err(gone());
    }
    let groups = member.workers.get(&rank).ok_or_else(gone)?.groups.clone();
    groups.iter().map(|group| slice(member, group, rank)).collect()
}

fn slice(member: &Member, group: &RankGroup, rank: u32) -> Result<RankSlice> {
    let rank_bytes = member.rank_bytes(group.group, group.is_replicated).ok_or_else(|| {
        Error::invalid("the ranks of an engine declared different groups or unequal replicas")
            .with("group", group.group)
    })?;
    let layout = GroupLayout {
        attention: forebay_core::layout::Attention::Full,
        tokens_per_block: 1,
        rank_bytes,
        is_replicated: group.is_replicated,
    };
    Ok(RankSlice { group: group.group, slot_bytes: layout.slot_bytes(), offset: layout.slice(rank as usize).start })
}

pub fn acknowledge(state: &mut State, attached: &Attached) {
    if let Some(worker) = own_worker(state, attached) {
        worker.is_ready = true;
    }
    if let Some(member) = state.instances.get(attached.instance) {
        tell_attached(member);
    }
}

/// None if a later connection of the same rank has taken its place.
fn own_worker<'a>(state: &'a mut State, attached: &Attached) -> Option<&'a mut Worker> {
    let member = state.instances.get(attached.instance)?;
    member.workers.get_mut(&attached.rank).filter(|worker| worker.connection == attached.connection)
}

/// The first message of those that were read, if it is there whole.
pub fn take_message<M: Message + Default>(bytes: &mut Vec<u8>) -> Result<Option<M>> {
    let Some(length) = bytes.first_chunk::<4>() else { return Ok(None) };
    let length = check_length(u32::from_le_bytes(*length))?;
    let Some(message) = bytes.get(4..4 + length) else { return Ok(None) };
    let message = decode(message)?;
    bytes.drain(..4 + length);
    Ok(Some(message))
}

/// None if the other side sends nothing, as a probe of the socket does.
async fn read<M: Message + Default>(stream: &mut UnixStream) -> Result<Option<M>> {
    let cut = |error| Error::new(ErrorKind::Io, "a worker's message was truncated").source(error);
    let deadline = tokio::time::Instant::now() + DEADLINE;
    let mut length = [0; 4];
    let Ok(begun) = timeout_at(deadline, stream.read(&mut length)).await else { return Ok(None) };
    let begun = begun.map_err(cut)?;
    if begun == 0 {
        return Ok(None);
    }
    let rest = async {
        stream.read_exact(&mut length[begun..]).await.map_err(cut)?;
        let mut bytes = vec![0; check_length(u32::from_le_bytes(length))?];
        stream.read_exact(&mut bytes).await.map_err(cut)?;
        decode(&bytes)
    };
    timeout_at(deadline, rest).await.map_err(|_| late())?.map(Some)
}

fn check_length(length: u32) -> Result<usize> {
    if length as usize > MAX_ATTACH_BYTES {
        return Err(Error::invalid("a worker's message is too long")
            .with("bytes", length)
            .with("limit", MAX_ATTACH_BYTES));
    }
    Ok(length as usize)
}

fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    M::decode(bytes).map_err(|error| Error::invalid("a worker's message cannot be read").source(error))
}

pub async fn write(stream: &mut UnixStream, message: &impl Message) -> Result<()> {
    let mut frame = (message.encoded_len() as u32).to_le_bytes().to_vec();
    message.encode(&mut frame).expect("a vector has room");
    let failed = |error| Error::new(ErrorKind::Io, "cannot write to a worker").source(error);
    timeout(DEADLINE, stream.write_all(&frame)).await.map_err(|_| late())?.map_err(failed)
}

/// The first message to a worker, with its descriptors. A fresh connection's buffer takes it at once.
fn write_with(stream: &UnixStream, message: &impl Message, files: &MapperFds) -> Result<()> {
    let failed = |error| Error::new(ErrorKind::Io, "cannot write to a worker").source(error);
    let stream = std::os::unix::net::UnixStream::from(stream.as_fd().try_clone_to_owned().map_err(failed)?);
    send_fds(&stream, &message.encode_to_vec(), &files.as_fds(), Instant::now() + SEND_DEADLINE)
}

fn late() -> Error {
    Error::new(ErrorKind::Timeout, "a worker did not answer").with("seconds", DEADLINE.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_hears_of_the_pools_memory_a_few_times_and_of_the_last_of_it_always() {
        let mut progress = Progress { told_units: 3, units: 1000 };
        let told: Vec<u32> = (3..=1000).filter_map(|populated| progress.news(populated)?.populated_units).collect();
        assert_eq!((told.len(), told[0], told.last()), (17, 65, Some(&1000)), "{told:?}");
        assert!(progress.is_over());
        let mut small = Progress { told_units: 0, units: 2 };
        assert_eq!(small.news(0), None);
        assert_eq!(small.news(1).and_then(|news| news.populated_units), Some(1));
        assert!(!small.is_over());
    }
}
