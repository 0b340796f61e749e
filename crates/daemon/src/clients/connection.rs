//! A connection of the control plane: HTTP/2 between its socket and the service.
//!
//! Calls with a large message, and those that copy blocks, run on a thread of their own: there their messages are
//! decoded and their answers encoded. The deciding thread moves their bytes between socket and buffers, in pieces, and
//! serves others in between.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use forebay_core::Error;
use forebay_rpc::proto::forebay_server::ForebayServer;
use forebay_rpc::{FRAME_BYTES, STREAM_WINDOW_BYTES, WINDOW_BYTES, to_status};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::codegen::Service as _;

use super::call::{Answer, Begun, Call, Kind, LARGE_BYTES, Room};
use super::{Place, kib};
use crate::service::Service;
use crate::turns;

/// Bytes that one connection moves before others are served, a frame; they take some 50 µs.
const PIECE_BYTES: usize = FRAME_BYTES as usize;

/// Serves a connection until it ends or loses its place. `aside` is the thread for large messages.
pub async fn serve(stream: UnixStream, place: Arc<Place>, service: ForebayServer<Service>, aside: Handle) {
    let call = |request| {
        let (place, service, aside) = (place.clone(), service.clone(), aside.clone());
        async move { Ok::<_, Infallible>(answer(request, &place, service, &aside).await) }
    };
    let connection = http2::Builder::new(Tasks)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(place.limits().calls_of_connection)
        // Nothing that speaks gRPC reads it.
        .auto_date_header(false)
        .serve_connection(TokioIo::new(InPieces { stream, moved: 0 }), service_fn(call));
    tokio::select! {
        ended = connection => {
            if let Err(error) = ended {
                tracing::debug!(%error, uid = place.uid(), "a connection failed");
            }
        }
        () = place.closed() => tracing::debug!(uid = place.uid(), "closed a connection"),
    }
}

async fn answer(
    request: Request<Incoming>,
    place: &Arc<Place>,
    mut service: ForebayServer<Service>,
    aside: &Handle,
) -> Response<Body> {
    let (mut head, message) = request.into_parts();
    let begun = match Call::begin(place, head.uri.path(), message).await {
        Ok(begun) => begun,
        Err(error) => return refused(&error),
    };
    let Begun { call, answering, message, length, kind, mut room } = begun;
    head.extensions.insert(place.clone());
    let called = service.call(Request::from_parts(head, message));
    let response = match kind {
        Kind::Put | Kind::Get => {
            let mut response = Aside::run(aside, async { encoded(called.await).await }).await;
            room = room.or(response.extensions_mut().remove::<Arc<Room>>().and_then(Arc::into_inner));
            response.map(|(body, bytes)| {
                // What a call needs beyond its answer ends with it.
                let spare = |room: &mut Room| room.split(room.num_permits().saturating_sub(kib(bytes) as usize));
                drop(room.as_mut().map(spare));
                body
            })
        }
        _ if length >= LARGE_BYTES => Aside::run(aside, called).await.unwrap_or_else(|never| match never {}),
        _ => called.await.unwrap_or_else(|never| match never {}),
    };
    drop(answering);
    response.map(|body| Body::new(Answer::new(body, call, room)))
}

fn refused(error: &Error) -> Response<Body> {
    tracing::debug!(%error, "refused a call");
    to_status(error).into_http()
}

/// The answer of a call that copies, with its bytes ready to be sent, and how many they are.
async fn encoded(response: std::result::Result<Response<Body>, Infallible>) -> Response<(Body, u64)> {
    let (head, mut body) = response.unwrap_or_else(|never| match never {}).into_parts();
    let (mut frames, mut bytes) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        bytes += frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        frames.push(frame);
    }
    Response::from_parts(head, (Body::new(StreamBody::new(tokio_stream::iter(frames))), bytes))
}

/// A call on the thread for large messages; it ends with the one that waits for it.
struct Aside<T>(JoinHandle<T>);

impl<T: Send + 'static> Aside<T> {
    async fn run(aside: &Handle, call: impl Future<Output = T> + Send + 'static) -> T {
        let mut call = Aside(aside.spawn(call));
        (&mut call.0).await.expect("a call does not panic, and nobody else ends it")
    }
}

impl<T> Drop for Aside<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs what HTTP/2 does beside a connection's own task.
#[derive(Clone)]
struct Tasks;

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        turns::spawn(task);
    }
}

/// A socket that lets others get in between after each piece.
struct InPieces {
    stream: UnixStream,
    /// Since it last let others in.
    moved: usize,
}

impl InPieces {
    fn pause(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.moved < PIECE_BYTES {
            return Poll::Ready(());
        }
        self.moved = 0;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl AsyncRead for InPieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.pause(context));
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.moved = if read.is_pending() { 0 } else { self.moved + buffer.filled().len() - before };
        read
    }
}

impl AsyncWrite for InPieces {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.pause(context));
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.moved = match &written {
            Poll::Ready(Ok(bytes)) => self.moved + bytes,
            _ => 0,
        };
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
