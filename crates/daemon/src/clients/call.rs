//! One call of the control plane, from its first bytes to the last byte of its answer.
//!
//! Invariants: a message is read no further than its length before the length has been admitted. An answer is counted
//! until its last byte has left the process or its connection is gone. Whoever sends its message too slowly loses the
//! call. A large message that would take far more memory once it is decoded is refused before.
//!
//! Calls that copy blocks wait for room: a `Put` before its message is read, a `Get` when no tier keeps it waiting any
//! more. All others are refused at once: an engine is better off without an answer than behind the copies of others.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::{lists, to_status};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep, timeout};
use tonic::Status;

use super::decoded::Decoded;
use super::{Place, Refusal, WAITING_COPIES, WAITING_COPIES_OF_CONNECTION, kib, leaving};

/// From the first byte of a call to the last of its message. A client on this host sends 16 MiB in milliseconds.
const TIME_TO_SEND: Duration = Duration::from_secs(10);
/// How long a call that copies waits for room: the others' copies take milliseconds, and at worst as long as a tier's
/// deadline.
const TIME_TO_WAIT: Duration = Duration::from_secs(12);
/// gRPC's own header of a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// Messages from here on take more than about 100 µs to decode. The longest of usual requests is a lookup of 8,192
/// keys, a quarter of a MiB.
pub const LARGE_BYTES: u64 = 384 << 10;
/// A request for health has no fields; later versions may add some.
const HEALTH_BYTES: u64 = 4 << 10;

/// What a call needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Health, which is answered whatever else is refused.
    Health,
    /// Its message carries blocks.
    Put,
    /// Its answer carries blocks.
    Get,
    Other,
}

impl Kind {
    pub fn of(path: &str) -> Kind {
        match path.strip_prefix("/forebay.v1.Forebay/") {
            Some("Health") => Kind::Health,
            Some("Put") => Kind::Put,
            Some("Get") => Kind::Get,
            _ => Kind::Other,
        }
    }
}

/// A call that was let in; it counts until this is dropped.
pub struct Call {
    place: Arc<Place>,
    /// Of its message; 0 if its room covers it.
    bytes: AtomicU64,
}

/// A call without an answer yet.
pub struct Answering(Arc<Call>);

/// Room for what a call copies, of `limits.copy_bytes_per_user`.
pub type Room = OwnedSemaphorePermit;

/// A call that was let in.
pub struct Begun {
    pub call: Arc<Call>,
    pub answering: Answering,
    pub message: Receiving,
    /// Of the message.
    pub length: u64,
    pub kind: Kind,
    /// Of a `Put`, for its message.
    pub room: Option<Room>,
}

impl Call {
    /// Lets a call in, or refuses it, when it is known how long its message is.
    pub async fn begin(place: &Arc<Place>, path: &str, mut message: Incoming) -> Result<Begun> {
        let kind = Kind::of(path);
        let call = Arc::new(Call::count(place, kind)?);
        let answering = Answering::new(&call)?;
        if kind != Kind::Health {
            place.seat().await?;
        }
        let (first, length) =
            timeout(TIME_TO_SEND, read_prefix(&mut message)).await.unwrap_or_else(|_| Err(too_slow()))?;
        let limits = place.limits();
        let room = match kind {
            // The service refuses it.
            _ if length > limits.message_bytes => None,
            Kind::Put => Some(place.room(length).await?),
            Kind::Health if length > HEALTH_BYTES => {
                return Err(Error::invalid("a request for health is too long").with("bytes", length));
            }
            Kind::Health => None,
            Kind::Get | Kind::Other => {
                call.admit(length)?;
                None
            }
        };
        let (first, left) = (Some(first), length + PREFIX_BYTES as u64);
        let decoded = (length >= LARGE_BYTES).then(|| Decoded::new(lists::of(path), PREFIX_BYTES, length));
        let message = Receiving { first, rest: message, left, decoded, late: Box::pin(sleep(TIME_TO_SEND)) };
        Ok(Begun { call, answering, message, length, kind, room })
    }

    fn count(place: &Arc<Place>, kind: Kind) -> Result<Call> {
        place.with(|clients, user, id| {
            if user.calls >= clients.limits.calls && kind != Kind::Health {
                return Err(clients.refuse(place.uid, user, Refusal::Calls));
            }
            let connection = user.connections.get_mut(&id).ok_or_else(leaving)?;
            connection.unfinished += 1;
            user.calls += 1;
            Ok(Call { place: place.clone(), bytes: AtomicU64::new(0) })
        })
    }

    fn admit(&self, bytes: u64) -> Result<()> {
        self.place.with(|clients, user, _| {
            if user.call_bytes + bytes > clients.limits.call_bytes {
                return Err(clients.refuse(self.place.uid, user, Refusal::CallBytes));
            }
            user.call_bytes += bytes;
            self.bytes.store(bytes, Relaxed);
            Ok(())
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        self.place.with(|_, user, id| {
            user.calls -= 1;
            user.call_bytes -= bytes;
            if let Some(connection) = user.connections.get_mut(&id) {
                connection.unfinished -= 1;
                connection.used = Instant::now();
            }
        });
    }
}

impl Answering {
    fn new(call: &Arc<Call>) -> Result<Answering> {
        call.place.with(|_, user, id| {
            let connection = user.connections.get_mut(&id).ok_or_else(leaving)?;
            connection.answering += 1;
            connection.used = Instant::now();
            Ok(Answering(call.clone()))
        })
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.place.with(|_, user, id| {
            if let Some(connection) = user.connections.get_mut(&id) {
                connection.answering -= 1;
                connection.used = Instant::now();
            }
        });
    }
}

/// The message's length, and what came with it. A call that has none is the service's to refuse.
async fn read_prefix(message: &mut Incoming) -> Result<(Bytes, u64)> {
    let mut first = Bytes::new();
    loop {
        if let Some(prefix) = first.first_chunk::<PREFIX_BYTES>() {
            let [_, length @ ..] = *prefix;
            return Ok((first, u32::from_be_bytes(length).into()));
        }
        let Some(frame) = message.frame().await else { return Ok((first, 0)) };
        let frame = frame.map_err(|error| Error::new(ErrorKind::Io, "a call's message was cut").source(error))?;
        let Ok(data) = frame.into_data() else { return Ok((first, 0)) };
        first = if first.is_empty() { data } else { [first, data].concat().into() };
    }
}

impl Place {
    /// Waits for room for what a call copies. Errors with `Full` if there is none for too long, or if too many of the
    /// user's calls wait for room.
    pub async fn room(self: &Arc<Place>, bytes: u64) -> Result<Room> {
        let (room, _waiting) = self.with(|clients, user, id| {
            let waiting = user.waiting_copies;
            let connection = user.connections.get_mut(&id).ok_or_else(leaving)?;
            if waiting >= WAITING_COPIES || connection.waiting_copies >= WAITING_COPIES_OF_CONNECTION {
                return Err(clients.refuse(self.uid, user, Refusal::CopyBytes));
            }
            connection.waiting_copies += 1;
            user.waiting_copies += 1;
            Ok((user.copies.clone(), WaitingCopy(self.clone())))
        })?;
        let wanted = room.acquire_many_owned(kib(bytes.max(1)));
        match timeout(TIME_TO_WAIT, wanted).await {
            Ok(room) => Ok(room.expect("the semaphore is never closed")),
            Err(_) => Err(self.with(|clients, user, _| clients.refuse(self.uid, user, Refusal::CopyBytes))),
        }
    }

    /// Errors with `Full` if too many of the user's `Get` calls wait for a tier.
    pub fn wait_for_tier(self: &Arc<Place>) -> Result<WaitingGet> {
        self.with(|clients, user, _| {
            if user.waiting_gets >= clients.limits.waiting_gets {
                return Err(clients.refuse(self.uid, user, Refusal::WaitingGets));
            }
            user.waiting_gets += 1;
            Ok(WaitingGet(self.clone()))
        })
    }
}

/// A call that waits for room; it counts until this is dropped.
struct WaitingCopy(Arc<Place>);

impl Drop for WaitingCopy {
    fn drop(&mut self) {
        self.0.with(|_, user, id| {
            user.waiting_copies -= 1;
            if let Some(connection) = user.connections.get_mut(&id) {
                connection.waiting_copies -= 1;
            }
        });
    }
}

/// A `Get` that waits for a tier; it counts until this is dropped.
pub struct WaitingGet(Arc<Place>);

impl Drop for WaitingGet {
    fn drop(&mut self) {
        self.0.with(|_, user, _| user.waiting_gets -= 1);
    }
}

fn too_slow() -> Error {
    Error::new(ErrorKind::Timeout, "the call's message did not arrive in time")
        .with("seconds", TIME_TO_SEND.as_secs())
        .hint("see whether the client has been stopped meanwhile, and call again")
}

/// A message on its way to the service: no longer than it said, in time, and not much larger in memory.
pub struct Receiving {
    first: Option<Bytes>,
    rest: Incoming,
    left: u64,
    /// Of a large message: the thread that decodes it also looks at it here.
    decoded: Option<Decoded>,
    late: Pin<Box<Sleep>>,
}

impl Body for Receiving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Status>>> {
        let frame = match self.first.take() {
            Some(first) => Frame::data(first),
            None => match Pin::new(&mut self.rest).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(Status::from_error(error.into())))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending if self.late.as_mut().poll(context).is_ready() => {
                    return Poll::Ready(Some(Err(to_status(&too_slow()))));
                }
                Poll::Pending => return Poll::Pending,
            },
        };
        let bytes = frame.data_ref().map(Bytes::as_ref).unwrap_or_default();
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Poll::Ready(Some(Err(Status::invalid_argument("a call has one message"))));
        };
        self.left = left;
        if let Some(Err(error)) = self.decoded.as_mut().map(|decoded| decoded.see(bytes)) {
            return Poll::Ready(Some(Err(to_status(&error))));
        }
        Poll::Ready(Some(Ok(frame)))
    }
}

/// An answer on its way to the client.
pub struct Answer<B> {
    answer: B,
    call: Arc<Call>,
    /// What the answer copies; the rest of the call's room was given back.
    room: Option<Room>,
}

impl<B> Answer<B> {
    pub fn new(answer: B, call: Arc<Call>, room: Option<Room>) -> Answer<B> {
        Answer { answer, call, room }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answer<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, B::Error>>> {
        let Answer { answer, call, room } = &mut *self;
        let frame = ready!(Pin::new(answer).poll_frame(context));
        let count = |bytes| Unread::count(bytes, call, room.take());
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(count))))
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.answer.size_hint()
    }
}

/// Bytes of an answer that have not left the process.
struct Unread {
    bytes: Bytes,
    call: Arc<Call>,
    room: Option<Room>,
}

impl Unread {
    fn count(bytes: Bytes, call: &Arc<Call>, room: Option<Room>) -> Bytes {
        let length = bytes.len() as u64;
        call.place.with(|_, user, id| {
            user.call_bytes += if room.is_some() { 0 } else { length };
            if let Some(connection) = user.connections.get_mut(&id) {
                if connection.unread_bytes == 0 {
                    connection.unread_since = Instant::now();
                }
                connection.unread_bytes += length;
            }
        });
        Bytes::from_owner(Unread { bytes, call: call.clone(), room })
    }
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let length = self.bytes.len() as u64;
        self.call.place.with(|_, user, id| {
            user.call_bytes -= if self.room.is_some() { 0 } else { length };
            if let Some(connection) = user.connections.get_mut(&id) {
                connection.unread_bytes -= length;
                let now = Instant::now();
                (connection.unread_since, connection.used) = (now, now);
            }
        });
    }
}
