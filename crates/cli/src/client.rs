//! The way to the daemon for commands that ask it something.

use std::path::Path;
use std::time::Duration;

use forebay_rpc::client::Client;

/// Long enough for a daemon that is busy; a person is waiting.
const DEADLINE: Duration = Duration::from_secs(10);

/// Connects with the first question.
pub fn connect(socket_directory: &Path) -> Client {
    connect_for(socket_directory, Duration::ZERO)
}

/// The same, to ask for what takes the daemon `work` besides.
pub fn connect_for(socket_directory: &Path, work: Duration) -> Client {
    Client::new(socket_directory, format!("forebay-cli-{}", std::process::id()), DEADLINE + work)
}
