//! One connection to the daemon's Unix socket.
//!
//! Invariant: a connection that ended stays ended. gRPC channels reconnect by themselves, but a session lives on one
//! connection: its number must not reach a daemon that was started later.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use forebay_core::{ErrorKind, Result};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use super::trust::{self, closed, unreachable};
use crate::proto::forebay_client::ForebayClient;
use crate::status::root_cause;
use crate::{FRAME_BYTES, MAX_MESSAGE_BYTES, RPC_SOCKET, WINDOW_BYTES};

/// Clones share the connection.
pub type Rpc = ForebayClient<Channel>;

/// Connects to the daemon with its sockets in `directory`. Errors with `Unavailable` or, after `deadline`, `Timeout`;
/// with `Invalid` if the directory or the daemon belongs to somebody else.
///
/// In a box, so that HTTP/2 is compiled here once, and not in each crate that connects.
pub fn connect(directory: &Path, deadline: Duration) -> Pin<Box<dyn Future<Output = Result<Rpc>> + Send + '_>> {
    Box::pin(async move {
        let path = &trust::socket(directory, RPC_SOCKET)?;
        let unavailable = |error: io::Error| unreachable(ErrorKind::Unavailable, path, error);
        let attempt = async {
            let stream = UnixStream::connect(path).await.map_err(unavailable)?;
            trust::peer(stream.peer_cred().map_err(unavailable)?.uid())?;
            handshake(stream).await.map_err(|error| closed(path, root_cause(&error)))
        };
        let attempted = tokio::time::timeout(deadline, attempt).await;
        let channel = attempted.unwrap_or_else(|elapsed| Err(unreachable(ErrorKind::Timeout, path, elapsed)))?;
        let rpc = ForebayClient::new(channel);
        Ok(rpc.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES))
    })
}

async fn handshake(stream: UnixStream) -> std::result::Result<Channel, tonic::transport::Error> {
    let once = Mutex::new(Some(stream));
    let connector = tower::service_fn(move |_| {
        let stream = once.lock().ok().and_then(|mut stream| stream.take());
        let ended = || std::io::Error::new(std::io::ErrorKind::NotConnected, "the connection ended");
        std::future::ready(stream.map(TokioIo::new).ok_or_else(ended))
    });
    // The authority is never resolved; gRPC requires one.
    Endpoint::from_static("http://forebay")
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .connect_with_connector(connector)
        .await
}
