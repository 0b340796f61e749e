//! One recording of lookups: salted keys, sizes and times, sent to the client that asked for it.
//!
//! Invariants: nothing is recorded unless a client asks. A channel bounds the messages that the client has not taken
//! yet; lookups that did not fit are counted in the next message. The salt exists only here, so keys of two recordings
//! cannot be compared, nor keys be guessed from a recording.

use forebay_core::Fingerprint;
use std::time::Instant;

use forebay_rpc::proto::Recorded;
use tokio::sync::mpsc::Sender;
use tonic::Status;

use super::seen::Seen;

pub struct Recording {
    salt: u64,
    start: Instant,
    to: Sender<Result<Recorded, Status>>,
    left_out: u64,
}

impl Recording {
    pub fn new(salt: u64, to: Sender<Result<Recorded, Status>>) -> Recording {
        Recording { salt, start: Instant::now(), to, left_out: 0 }
    }

    /// Whoever asked for it is gone.
    pub fn is_over(&self) -> bool {
        self.to.is_closed()
    }

    pub fn see(&mut self, seen: &Seen) {
        let key = |hash: &[u8]| Fingerprint::new(self.salt, seen.namespace, seen.group, hash).0;
        let recorded = Recorded {
            at_us: seen.at.saturating_duration_since(self.start).as_micros() as u64,
            namespace: u64::from(seen.namespace.0) << 16 | u64::from(seen.group),
            block_tokens: seen.block_tokens,
            block_bytes: seen.block_bytes,
            keys: seen.hashes.chunks_exact(seen.hash_bytes).map(key).collect(),
            left_out: self.left_out,
        };
        match self.to.try_send(Ok(recorded)) {
            Ok(()) => self.left_out = 0,
            Err(_) => self.left_out += 1,
        }
    }
}
