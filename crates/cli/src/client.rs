//! The way to the daemon for commands that ask it something.

use std::path::Path;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::Client;

/// Long enough for a daemon that is busy; a person is waiting.
const DEADLINE: Duration = Duration::from_secs(10);
/// How often a daemon that works on a long answer is asked whether it is alive.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Connects with the first question.
pub fn connect(socket_directory: &Path) -> Client {
    connect_within(socket_directory, DEADLINE)
}

/// As [`connect`], with another time for each answer.
pub fn connect_within(socket_directory: &Path, deadline: Duration) -> Client {
    Client::new(socket_directory, format!("forebay-cli-{}", std::process::id()), deadline)
}

/// Waits for an answer that may take long, as long as the daemon answers `ask` meanwhile, on a connection of its own.
pub async fn attended<T>(
    socket_directory: &Path,
    answer: impl Future<Output = Result<T>>,
    ask: impl AsyncFnMut(&mut Client) -> Result<()>,
) -> Result<T> {
    tokio::select! {
        biased;
        answer = answer => answer,
        error = silence(connect(socket_directory), ask) => Err(error),
    }
}

/// Whether the daemon is alive.
pub async fn is_alive(client: &mut Client) -> Result<()> {
    client.health().await.map(drop)
}

/// Ends when the daemon has not answered in time. What else goes wrong is for the answer to tell.
async fn silence(mut client: Client, mut ask: impl AsyncFnMut(&mut Client) -> Result<()>) -> Error {
    loop {
        match ask(&mut client).await {
            Err(error) if error.kind() == ErrorKind::Timeout => return error,
            _ => tokio::time::sleep(HEARTBEAT).await,
        }
    }
}
