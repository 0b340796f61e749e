//! What is wrong with the daemon's own files.

/// With what to do; nothing while they are as the daemon made them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnFiles {
    /// Without its sockets nobody reaches the daemon.
    pub sockets: Option<String>,
    pub pool: Option<String>,
    /// Each disk whose file is no longer at its path. The daemon reads and writes it as before, and the next one does
    /// not find it.
    pub disks: Vec<String>,
}
