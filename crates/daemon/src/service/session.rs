//! Sessions: opening, resuming after a lost connection, naming a namespace, and the end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::LeaseId;
use forebay_core::namespace::Descriptor;
use forebay_core::recover::Resumption;
use forebay_core::{Core, Error, ErrorKind, Generation, Result, SlotId};
use forebay_rpc::PROTOCOL_VERSION;
use forebay_rpc::proto::session_event::Event;
use forebay_rpc::proto::{
    Attached, Attention as WireAttention, Draining, Group, Held, OpenNamespaceReply, OpenNamespaceRequest,
    OpenSessionRequest, SessionEvent, Welcome,
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::group_index;
use crate::clients::{Hold, Place};
use crate::instances::{EVENTS, Identity, Member, Session, drawn};
use crate::random;
use crate::state::{Shared, State};

type Events = Pin<Box<dyn Stream<Item = Result<SessionEvent, Status>> + Send>>;

/// If its owner opens a session again, the new one replaces what is left of the old: the engine would not open it if
/// the first stream still worked. What the engine holds is taken over in pieces, so that other calls run in between.
pub async fn open(shared: &Shared, place: &Arc<Place>, request: OpenSessionRequest) -> Result<Events> {
    check_protocol(request.protocol)?;
    let hold = place.hold_session()?;
    let (sender, receiver) = mpsc::channel(EVENTS);
    let (id, resumption) = shared.event(|state| begin(state, place, &request, sender))?;
    let end = End { shared: shared.clone(), id };
    let mut resuming = Resuming { shared: shared.clone(), resumption };
    for piece in slots(&request.leases).chunks(Core::MAX_HELD_PER_EVENT) {
        let Some(resumption) = resuming.resumption.as_mut() else { break };
        shared.event(|state| state.core.hold(resumption, piece));
        tokio::task::yield_now().await;
    }
    shared.event(|state| welcome(state, id, &request, &mut resuming.resumption))?;
    Ok(Box::pin(SessionStream { events: ReceiverStream::new(receiver), _end: end, _hold: hold }))
}

pub fn check_protocol(protocol: u32) -> Result<()> {
    if protocol == PROTOCOL_VERSION {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unsupported, "daemon and client speak different protocols")
        .with("daemon", PROTOCOL_VERSION)
        .with("client", protocol)
        .hint("install the same version of forebay on both sides"))
}

pub fn open_namespace(shared: &Shared, uid: u32, request: OpenNamespaceRequest) -> Result<OpenNamespaceReply> {
    let mut fields = request.fields;
    shared.event(|state| {
        let (_, member) = state.instances.of_session(request.session)?;
        let layout = layout(member, &request.groups)?;
        let session = member.session.as_ref().expect("found by its session");
        let is_trial = session.is_trial;
        if is_trial {
            // One that the session forgets would not end with it.
            if session.namespaces.len() >= Session::MAX_NAMESPACES {
                return Err(Error::new(ErrorKind::Full, "the trial has too many namespaces")
                    .with("limit", Session::MAX_NAMESPACES)
                    .hint("begin another trial"));
            }
            // So it is no other session's, nor one that stays, whatever fields others have.
            fields.insert("trial".to_owned(), format!("{}-{:016x}", request.session, random::number()));
        }
        let descriptor = Descriptor::new(fields)?;
        let namespace_id = descriptor.id().0.to_be_bytes().to_vec();
        let index = match is_trial {
            true => state.open_trial(descriptor, &layout, uid)?,
            false => state.open_namespace(descriptor, &layout, uid)?,
        };
        let (_, member) = state.instances.of_session(request.session)?;
        let session = member.session.as_mut().expect("found by its session");
        Ok(OpenNamespaceReply { namespace: session.open_namespace(index, windows(&request.groups)?), namespace_id })
    })
}

/// Tells the session that all its ranks are there, once each time that becomes true.
pub fn tell_attached(member: &mut Member) {
    let is_attached = member.ranks > 0 && member.is_attached();
    if let Some(session) = &mut member.session
        && is_attached
        && session.is_welcome
        && !session.was_told_attached
    {
        session.was_told_attached = true;
        session.tell(Event::Attached(Attached {}));
    }
}

fn begin(
    state: &mut State,
    place: &Place,
    request: &OpenSessionRequest,
    events: crate::instances::EventSender,
) -> Result<(u64, Option<Resumption>)> {
    if state.is_draining {
        return Err(Error::new(ErrorKind::Unavailable, "the daemon is shutting down"));
    }
    if request.is_trial && request.ranks > 0 {
        return Err(Error::invalid("a trial has no workers").with("ranks", request.ranks));
    }
    let identity = Identity::parse(&request.engine_id, &request.incarnation)?;
    let owner = drawn("owner", &request.owner)?;
    if request.ranks > 0 {
        // Better told now than when the model is loaded.
        state.check_instance(&identity, place.uid()).inspect_err(|error| place.note_engine(error))?;
    }
    let id = state.next_session;
    state.next_session += 1;
    let session = Session {
        id,
        engine_id: request.engine_id.clone(),
        is_of_engine: request.ranks > 0,
        is_trial: request.is_trial,
        events,
        namespaces: Default::default(),
        windows: Default::default(),
        hints: Default::default(),
        follows: Default::default(),
        is_welcome: false,
        was_told_attached: false,
        lending_token: forebay_rpc::random_id(),
        lent: None,
    };
    // Dropping the old one ends its stream.
    let (instance, old) = state.instances.open(identity, request.ranks, owner, session)?;
    old.into_iter().for_each(|old| state.end_trials(&old));
    let Some(instance) = instance else { return Ok((id, None)) };
    if let Err(error) = state.record_instance(instance) {
        state.end_session(id);
        return Err(error);
    }
    Ok((id, Some(state.core.begin_resume(instance))))
}

/// The engine has said all it holds. An error if it opened yet another session meanwhile.
fn welcome(
    state: &mut State,
    id: u64,
    request: &OpenSessionRequest,
    resumption: &mut Option<Resumption>,
) -> Result<()> {
    let (instance, member) = state.instances.of_session(id)?;
    let session = member.session.as_mut().expect("found by its session");
    session.is_welcome = true;
    let lending_token = session.lending_token.to_vec();
    // An engine without a number holds nothing.
    let (lease, lost) = match resumption.take() {
        Some(resumption) => state.core.resume(resumption, &slots(&request.reservations)),
        None => (LeaseId(0), slots(&[&request.leases[..], &request.reservations].concat())),
    };
    let welcome = Welcome {
        session: id,
        boot_id: state.boot_id,
        pool_id: state.table.pool().id().to_be_bytes().to_vec(),
        lost: lost.iter().map(|(slot, generation)| Held { slot: slot.0, generation: generation.0 }).collect(),
        lease: lease.0,
        lending_token,
    };
    let is_draining = state.is_draining;
    let (_, member) = state.instances.of_session(id)?;
    let session = member.session.as_ref().expect("found by its session");
    session.tell(Event::Welcome(welcome));
    if is_draining {
        session.tell(Event::Draining(Draining {}));
    }
    tell_attached(member);
    let (engine_id, ranks, is_trial) = (&request.engine_id, request.ranks, request.is_trial);
    match ranks {
        0 => tracing::debug!(session = id, engine_id, is_trial, "session opened"),
        _ => tracing::info!(session = id, instance = instance.map(|i| i.0), engine_id, ranks, "session opened"),
    }
    Ok(())
}

/// What an engine has said of what it holds; forgotten when the call is cancelled.
struct Resuming {
    shared: Shared,
    resumption: Option<Resumption>,
}

impl Drop for Resuming {
    fn drop(&mut self) {
        if let Some(resumption) = self.resumption.take() {
            self.shared.event(|state| state.core.cancel_resume(resumption));
        }
    }
}

fn slots(held: &[Held]) -> Vec<(SlotId, Generation)> {
    held.iter().map(|held| (SlotId(held.slot), Generation(held.generation))).collect()
}

/// Sizes from the workers' own declarations; from the request only where there are no workers.
fn layout(member: &Member, groups: &[Group]) -> Result<Layout> {
    if member.ranks > 0 && !member.is_attached() {
        return Err(Error::new(ErrorKind::Unavailable, "not all ranks are attached yet")
            .with("attached", member.workers.len())
            .with("ranks", member.ranks));
    }
    let group_layout = |group: &Group| {
        let rank_bytes = match member.ranks {
            0 => group.rank_bytes.clone(),
            _ => member.rank_bytes(group.group, group.is_replicated).ok_or_else(|| {
                Error::invalid("not all workers declared this group with the same size").with("group", group.group)
            })?,
        };
        let attention = match group.attention() {
            WireAttention::Full => Attention::Full,
            WireAttention::Windowed => Attention::Windowed,
        };
        let layout = GroupLayout {
            attention,
            tokens_per_block: group.tokens_per_block,
            rank_bytes,
            is_replicated: group.is_replicated,
        };
        Ok((group_index(group.group)?, layout))
    };
    Layout::new(groups.iter().map(group_layout).collect::<Result<Vec<_>>>()?)
}

/// The groups whose windows the engine has told.
fn windows(groups: &[Group]) -> Result<Vec<(u16, u32)>> {
    let told = groups.iter().filter(|group| group.attention() == WireAttention::Windowed && group.window_blocks > 0);
    told.map(|group| Ok((group_index(group.group)?, group.window_blocks))).collect()
}

/// The session's stream; dropped when the client is gone, which ends the session.
struct SessionStream {
    events: ReceiverStream<Result<SessionEvent, Status>>,
    _end: End,
    /// Its connection's place.
    _hold: Hold,
}

struct End {
    shared: Shared,
    id: u64,
}

impl Stream for SessionStream {
    type Item = Result<SessionEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.events).poll_next(context)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.shared.event(|state| state.end_session(self.id));
    }
}
