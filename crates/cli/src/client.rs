//! The way to the daemon for commands that ask it something.

use std::path::Path;
use std::time::Duration;

use forebay_rpc::client::Client;

/// Long enough for a daemon that is busy; a person is waiting.
const DEADLINE: Duration = Duration::from_secs(10);

/// Connects with the first question.
pub fn connect(socket_directory: &Path) -> Client {
    connect_within(socket_directory, DEADLINE)
}

/// As [`connect`], with another time for each answer.
pub fn connect_within(socket_directory: &Path, deadline: Duration) -> Client {
    Client::new(socket_directory, format!("forebay-cli-{}", std::process::id()), deadline)
}
