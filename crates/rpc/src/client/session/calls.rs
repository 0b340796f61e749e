//! The concurrent tasks of one connection, on one thread: the session's events, the namespace, lookups, deliveries,
//! the stock, queue hints.
//!
//! Invariant: all of them end with the connection, so no reply of one connection is applied during another.

use std::sync::Arc;
use std::time::Instant;

use forebay_core::{Error, ErrorKind, Result};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::{Response, Status, Streaming};

use super::limits::LATE_FACTOR;
use super::outbox::Batch;
use super::shared::Shared;
use super::stock::Refill;
use super::ticket::Lookup;
use crate::client::{Backoff, Rpc};
use crate::proto::{self, CommitOutcome, Held, session_event::Event};
use crate::{from_status, is_transport};

/// A session on its connection.
pub(super) struct Open {
    pub rpc: Rpc,
    pub session: u64,
    pub events: Streaming<proto::SessionEvent>,
}

/// Serves until the connection ends or the engine closes; `Err` says why it ended.
pub(super) async fn serve(shared: &Arc<Shared>, open: Open, lookups: &mut mpsc::Receiver<Lookup>) -> Result<()> {
    let Open { rpc, session, events } = open;
    tokio::select! {
        error = follow(shared, events) => Err(error),
        () = broken(shared) => Err(Error::new(ErrorKind::Timeout, "the daemon does not answer")),
        never = name(shared, rpc.clone(), session) => match never {},
        never = deliver(shared, rpc.clone(), session) => match never {},
        never = refill(shared, rpc.clone(), session) => match never {},
        never = hint(shared, rpc.clone(), session) => match never {},
        never = look_up(shared, rpc, session, lookups) => match never {},
        () = closed_and_drained(shared) => Ok(()),
    }
}

/// Applies the daemon's events; returns why they ended.
async fn follow(shared: &Shared, mut events: Streaming<proto::SessionEvent>) -> Error {
    loop {
        match events.message().await {
            Ok(Some(event)) => apply(shared, event.event),
            Ok(None) => return Error::new(ErrorKind::Unavailable, "the daemon ended the session"),
            Err(status) => return from_status(status),
        }
    }
}

fn apply(shared: &Shared, event: Option<Event>) {
    let mut holdings = shared.holdings();
    match event {
        Some(Event::Attached(_)) => holdings.link.attached(),
        Some(Event::Detached(_)) => holdings.link.detached(),
        Some(Event::Draining(_)) => holdings.draining(),
        // A second welcome has no meaning, and this version ignores events of a newer daemon.
        Some(Event::Welcome(_)) | None => return,
    }
    drop(holdings);
    shared.wake_all();
}

/// Keeps the current namespace declared.
async fn name(shared: &Shared, mut rpc: Rpc, session: u64) -> std::convert::Infallible {
    let mut backoff = Backoff::new();
    loop {
        let Some((epoch, namespace)) = shared.holdings().link.to_name() else {
            backoff.reset();
            shared.wake_name.notified().await;
            continue;
        };
        let fields = namespace.fields.clone().into_iter().collect();
        let request = proto::OpenNamespaceRequest { session, fields, groups: namespace.groups.clone() };
        match watched(shared, rpc.open_namespace(request), None).await {
            Ok(reply) => {
                shared.holdings().link.named(epoch, reply.namespace);
                shared.wake_all();
            }
            Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) => {
                tracing::warn!(%error, hint = error.hint_text(), "the daemon refused the namespace");
                shared.holdings().link.refused(Some(epoch), &error);
            }
            Err(error) => {
                shared.holdings().link.troubled(&error);
                pause(backoff.pause(), shared.wake_name.notified()).await;
            }
        }
    }
}

/// Sends the queued messages, one batch at a time.
async fn deliver(shared: &Arc<Shared>, mut rpc: Rpc, session: u64) -> std::convert::Infallible {
    let mut backoff = Backoff::new();
    loop {
        let next = shared.holdings().next_batch();
        let Some((batch, namespace)) = next else {
            shared.drained.notify_one();
            shared.wake_deliver.notified().await;
            continue;
        };
        let mut sending = Sending { shared, batch: Some(batch) };
        match sending.send(&mut rpc, session, namespace).await {
            Ok(outcomes) => {
                let batch = sending.batch.take().expect("it was sent");
                shared.holdings().delivered(&batch, outcomes.into_iter());
                // A group may wait for slots of others, which the daemon has now.
                shared.wake_stock.notify_one();
                backoff.reset();
            }
            Err(error) if error.kind() == ErrorKind::Invalid => {
                tracing::warn!(%error, "the daemon refused a commit, an abort or a release");
                sending.batch.take().into_iter().for_each(|batch| shared.holdings().refused(batch));
                shared.wake_stock.notify_one();
            }
            Err(_) => {
                drop(sending);
                tokio::time::sleep(backoff.pause()).await;
            }
        }
    }
}

/// A batch in flight; it goes back to the queue if it is dropped unacknowledged.
struct Sending<'a> {
    shared: &'a Shared,
    batch: Option<Batch>,
}

impl Sending<'_> {
    async fn send(&mut self, rpc: &mut Rpc, session: u64, namespace: u32) -> Result<Vec<CommitOutcome>> {
        match self.batch.as_ref().expect("it is taken when done") {
            Batch::Commits(commits) => {
                let groups = commits.iter().map(|commit| commit.message()).collect();
                let call = rpc.commit(proto::CommitRequest { session, namespace, groups });
                let reply = watched(self.shared, call, None).await?;
                let expected: usize = commits.iter().map(|commit| commit.slots.len()).sum();
                match reply.outcomes.len() {
                    count if count == expected => Ok(reply.outcomes().collect()),
                    count => Err(Error::invalid("the reply to a commit has the wrong number of outcomes")
                        .with("outcomes", count)
                        .with("blocks", expected)),
                }
            }
            batch @ (Batch::Aborts(slots) | Batch::Returns(slots)) => {
                let are_unused = matches!(batch, Batch::Returns(_));
                let call = rpc.abort(proto::AbortRequest { session, slots: slots.clone(), are_unused });
                watched(self.shared, call, None).await.map(|_| Vec::new())
            }
            Batch::Releases { leases, lookups, saved } => {
                let (leases, lookups) = (leases.clone(), lookups.clone());
                let (saved_tokens, saved_prefill_us) = (saved.tokens, saved.prefill_us);
                let request = proto::ReleaseRequest { session, leases, lookups, saved_tokens, saved_prefill_us };
                let call = rpc.release(request);
                watched(self.shared, call, None).await.map(|_| Vec::new())
            }
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if let Some(batch) = self.batch.take() {
            self.shared.holdings().undelivered(batch);
        }
    }
}

/// Keeps the stock full.
async fn refill(shared: &Shared, mut rpc: Rpc, session: u64) -> std::convert::Infallible {
    loop {
        let (refill, epoch, namespace, has_surplus) = shared.holdings().refill(Instant::now());
        if has_surplus {
            shared.wake_deliver.notify_one();
        }
        match refill {
            Refill::Reserve { group, count } => {
                let request = proto::ReserveRequest { session, namespace, group, count: count as u32 };
                let reply = watched(shared, rpc.reserve(request), None).await;
                let slots = reply.ok().map(|reply| {
                    let pairs = reply.slots.into_iter().zip(reply.generations);
                    pairs.map(|(slot, generation)| Held { slot, generation }).collect()
                });
                if shared.holdings().stocked(epoch, group, count, slots, Instant::now()) {
                    shared.wake_deliver.notify_one();
                }
            }
            Refill::Wait(None) => shared.wake_stock.notified().await,
            Refill::Wait(Some(until)) => {
                pause(until.saturating_duration_since(Instant::now()), shared.wake_stock.notified()).await
            }
        }
    }
}

/// Keeps the daemon's hints up to date; one call at a time, so that changes meanwhile go with the next call.
async fn hint(shared: &Shared, mut rpc: Rpc, session: u64) -> std::convert::Infallible {
    loop {
        let next = shared.holdings().next_hints(session);
        match next {
            // A lost hint is not repeated.
            Some(request) => drop(watched(shared, rpc.hint(request), None).await),
            None => shared.wake_hints.notified().await,
        }
    }
}

/// Sends all of the engine's lookups, concurrently.
async fn look_up(
    shared: &Arc<Shared>,
    rpc: Rpc,
    session: u64,
    lookups: &mut mpsc::Receiver<Lookup>,
) -> std::convert::Infallible {
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            Some(lookup) = lookups.recv() => drop(calls.spawn(ask(shared.clone(), rpc.clone(), session, lookup))),
            Some(_) = calls.join_next() => (),
            // The engine is gone: `closing` will end this.
            else => std::future::pending().await,
        }
    }
}

async fn ask(shared: Arc<Shared>, mut rpc: Rpc, session: u64, mut lookup: Lookup) {
    let Some(request) = lookup.request(session) else { return };
    let first = async {
        let mut replies = rpc.lookup(request).await?.into_inner();
        let reply = replies.message().await?;
        Ok(Response::new((reply.unwrap_or_default(), replies)))
    };
    let Ok((reply, mut replies)) = watched(&shared, first, Some(&lookup)).await else { return };
    lookup.answer(reply);
    // The daemon reports on what is promoting without another question, and ends the stream: at once when it is told
    // that the lookup is over. HTTP/2 closes a connection on which many streams were dropped before their end.
    while let Ok(Some(reply)) = replies.message().await {
        lookup.update(reply);
    }
}

/// Awaits a call and tracks the daemon's health. Only a lookup that is answered in time ends a row of failures, since
/// the breaker protects the engine's lookups.
async fn watched<T>(
    shared: &Shared,
    call: impl Future<Output = Result<Response<T>, Status>>,
    lookup: Option<&Lookup>,
) -> Result<T> {
    let (outcome, is_late) = awaited(shared, call, lookup).await?;
    match outcome {
        Ok(response) => {
            if lookup.is_some() && !is_late {
                shared.holdings().link.succeeded();
            }
            Ok(response.into_inner())
        }
        Err(status) => {
            let (is_transport, error) = (is_transport(&status), from_status(status));
            if is_transport {
                fail(shared, &error);
            }
            if error.kind() == ErrorKind::NotFound {
                // The daemon no longer knows the session.
                shared.break_off();
            }
            Err(error)
        }
    }
}

/// The call's outcome, and whether it came late. Past the deadline the call counts as failed and the engine continues
/// without it. Its answer is still awaited: the daemon may have given away a lease or slots with it.
async fn awaited<T>(
    shared: &Shared,
    call: impl Future<Output = Result<Response<T>, Status>>,
    lookup: Option<&Lookup>,
) -> Result<(Result<Response<T>, Status>, bool)> {
    let mut call = std::pin::pin!(call);
    let deadline = shared.config.deadline;
    if let Ok(outcome) = tokio::time::timeout(deadline, &mut call).await {
        return Ok((outcome, false));
    }
    lookup.into_iter().for_each(Lookup::give_up);
    let error = Error::new(ErrorKind::Timeout, "the daemon did not answer in time")
        .with("deadline_seconds", deadline.as_secs_f64());
    fail(shared, &error);
    match tokio::time::timeout(deadline * LATE_FACTOR, &mut call).await {
        Ok(outcome) => Ok((outcome, true)),
        Err(_) => {
            shared.break_off();
            Err(error)
        }
    }
}

fn fail(shared: &Shared, error: &Error) {
    let mut holdings = shared.holdings();
    holdings.link.troubled(error);
    if holdings.link.failed(shared.config.breaker_failures) {
        tracing::warn!(%error, "the session sends no calls before it has reached the daemon again");
        shared.broken.notify_one();
    }
}

async fn broken(shared: &Shared) {
    while !shared.holdings().link.is_broken() {
        shared.broken.notified().await;
    }
}

async fn closed_and_drained(shared: &Shared) {
    shared.closing().await;
    let drained = async {
        while !shared.holdings().is_drained() {
            shared.drained.notified().await;
        }
    };
    // Half of the wait of `close`: the rest is for ending the connection.
    let _ = tokio::time::timeout(shared.config.deadline / 2, drained).await;
}

/// Waits until the time is over or `wake` completes.
async fn pause(time: std::time::Duration, wake: impl Future<Output = ()>) {
    let _ = tokio::time::timeout(time, wake).await;
}
