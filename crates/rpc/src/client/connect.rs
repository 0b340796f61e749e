//! One connection to the daemon's Unix socket.
//!
//! Holds true: a connection that ends stays ended. gRPC channels reconnect by themselves, but a session lives on
//! one connection: its number must not reach a daemon that was started since.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::proto::forebay_client::ForebayClient;
use crate::{FRAME_BYTES, MAX_MESSAGE_BYTES, RPC_SOCKET, WINDOW_BYTES};

/// Clones share the connection.
pub type Rpc = ForebayClient<Channel>;

/// Connects to the daemon whose sockets lie in `directory`. Errors with `Unavailable` or, after `deadline`,
/// `Timeout`.
pub async fn connect(directory: &Path, deadline: Duration) -> Result<Rpc> {
    let path = directory.join(RPC_SOCKET);
    let unreachable = |kind, source: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(kind, "cannot reach the daemon")
            .with("socket", path.display())
            .source(source)
            .hint("start it with `forebay serve`, or give the directory of its sockets")
    };
    let attempt = async {
        let stream = UnixStream::connect(&path).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(handshake(stream).await?)
    };
    let channel = match tokio::time::timeout(deadline, attempt).await {
        Ok(outcome) => outcome.map_err(|error| unreachable(ErrorKind::Unavailable, error))?,
        Err(elapsed) => return Err(unreachable(ErrorKind::Timeout, elapsed.into())),
    };
    let rpc = ForebayClient::new(channel);
    Ok(rpc.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES))
}

async fn handshake(stream: UnixStream) -> std::result::Result<Channel, tonic::transport::Error> {
    let once = Mutex::new(Some(stream));
    let connector = tower::service_fn(move |_| {
        let stream = once.lock().ok().and_then(|mut stream| stream.take());
        let ended = || std::io::Error::new(std::io::ErrorKind::NotConnected, "the connection ended");
        std::future::ready(stream.map(TokioIo::new).ok_or_else(ended))
    });
    // The authority is never resolved; gRPC wants one.
    Endpoint::from_static("http://forebay")
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .connect_with_connector(connector)
        .await
}
