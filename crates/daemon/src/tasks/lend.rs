//! Memory that clients lend for the payloads of their calls, over the socket of the workers.
//!
//! A session's client asks with the token of its welcome; it needs no right that its calls do not need. It sends the
//! descriptor when it is told to, and seals the memory when the daemon has mapped it. From then on its calls can name
//! places in the memory. The connection ends; the memory is the session's, and goes with it or with the next memory.
//!
//! The memory counts towards `limits.lent_bytes_per_user` from before it is mapped until it is unmapped. Only calls of
//! the user whose client lent it can name it, and only by the number that its client alone was told (`loans.rs`).
//! Memory that no call names for `limits.idle_seconds` is given back; a client that wants to go on lends anew.
//!
//! Holds true: whatever a client sends, only a thread of its own user's four waits for it. Closing a descriptor can
//! wait too, where a program of the client is the file system. So the thread that decides never has one in its hands.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as Socket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::pool::{self, Lent, recv_fds, send_fds};
use forebay_rpc::proto::{AttachReply, Lending};
use prost::Message;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::attach::{refusal, write};
use crate::clients::Place;
use crate::loans::Loan;
use crate::service::check_protocol;
use crate::state::{Shared, State};

/// For a thread, and then for both messages of a client, which has nothing else to do.
const DEADLINE: Duration = Duration::from_secs(2);

/// Takes the memory of one session.
pub async fn serve(
    stream: &mut UnixStream,
    place: &Arc<Place>,
    shared: &Shared,
    (protocol, lending): (u32, &Lending),
) -> Result<()> {
    let taken = take(stream, place, shared, protocol, lending).await;
    let reply = taken.as_ref().map_or_else(refusal, |number| AttachReply { lent: *number, ..AttachReply::default() });
    write(stream, &reply).await?;
    taken.map(|_| ())
}

async fn take(
    stream: &mut UnixStream,
    place: &Arc<Place>,
    shared: &Shared,
    protocol: u32,
    lending: &Lending,
) -> Result<u64> {
    check_protocol(protocol)?;
    place.seat().await?;
    let _hold = place.hold()?;
    session_of(&mut shared.lock(), lending)?;
    pool::Lending::check(lending.bytes)?;
    let counted = place.borrow(lending.bytes)?;
    let copier = timeout(DEADLINE, place.copiers().acquire_owned()).await.map_err(|_| {
        Error::new(ErrorKind::Full, "this user's copies take all of its threads").hint("make fewer calls at a time")
    })?;
    let copier = copier.expect("the semaphore is never closed");
    write(stream, &AttachReply::default()).await?;
    let failed = |error| Error::new(ErrorKind::Io, "cannot use a connection").source(error);
    let socket = Socket::from(stream.as_fd().try_clone_to_owned().map_err(failed)?);
    let bytes = lending.bytes;
    let run = move || {
        let _copier = copier;
        receive(&socket, bytes)
    };
    let lent = tokio::task::spawn_blocking(run).await.expect("receiving does not panic")?;
    let loan = Loan::new(lent, counted);
    let number = loan.number();
    shared.event(|state| {
        // Copies that are under way keep what was there before.
        session_of(state, lending)?.lent = Some(loan);
        Ok(number)
    })
}

/// The exchange in which both map the memory.
fn receive(socket: &Socket, bytes: u64) -> Result<Lent> {
    let deadline = Instant::now() + DEADLINE;
    let (_, files) = recv_fds(socket, deadline)?;
    let [file] = <[_; 1]>::try_from(files)
        .map_err(|files| Error::invalid("one descriptor is lent").with("received", files.len()))?;
    let lending = pool::Lending::received(file, bytes)?;
    send_fds(socket, &AttachReply::default().encode_to_vec(), &[], deadline)?;
    recv_fds(socket, deadline)?;
    lending.sealed()
}

/// The session for which memory is lent. Errors with `NotFound` if it is another client's.
fn session_of<'a>(state: &'a mut State, lending: &Lending) -> Result<&'a mut crate::instances::Session> {
    let (_, member) = state.instances.of_session(lending.session)?;
    let session = member.session.as_mut().expect("found by its session");
    if session.lending_token != lending.token[..] {
        return Err(Error::new(ErrorKind::NotFound, "memory is lent with the token of the session's welcome"));
    }
    Ok(session)
}
