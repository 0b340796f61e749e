//! What is wrong with the daemon's own files.

/// With what to do; nothing while they are as the daemon made them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnFiles {
    /// Without its sockets nobody reaches the daemon.
    pub sockets: Option<String>,
    pub pool: Option<String>,
}
