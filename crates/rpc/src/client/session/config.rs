//! What the engine tells a session: how to run, and the namespace that it stores and loads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use forebay_core::{Error, Result};

use crate::proto;

/// A session's configuration.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// The directory with the daemon's sockets.
    pub socket_directory: PathBuf,
    /// The engine's name on this host, 1 to 64 bytes; two engines of a daemon have different ones.
    pub engine_id: String,
    /// One start of the engine; not all zero. Its workers attach with the same number.
    pub incarnation: [u8; 16],
    /// Worker processes that will attach under the same engine id and incarnation.
    pub ranks: u32,
    /// Slots of each group that are kept reserved in the stock.
    pub stock_blocks: usize,
    /// After this long a call counts as failed.
    pub deadline: Duration,
    /// Failures, with no lookup answered in time between them, after which lookups are not sent until the daemon was
    /// reached again.
    pub breaker_failures: u32,
}

impl SessionConfig {
    /// Errors with `Invalid` on a contradiction.
    pub(super) fn check(&self) -> Result<()> {
        if self.engine_id.is_empty() || self.engine_id.len() > 64 {
            return Err(Error::invalid("an engine id must have 1 to 64 bytes").with("engine_id", &self.engine_id));
        }
        if self.incarnation == [0; 16] {
            return Err(Error::invalid("an engine's incarnation must not be zero").with("engine_id", &self.engine_id));
        }
        if self.deadline.is_zero() || self.breaker_failures == 0 {
            return Err(Error::invalid("a session's deadline and breaker must be greater than zero"));
        }
        Ok(())
    }
}

/// The namespace of all later stores and loads.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    /// What makes two caches interchangeable: model, weights, layout, tenant and others, by name.
    pub fields: BTreeMap<String, String>,
    /// The block sizes of each KV cache group.
    pub groups: Vec<proto::Group>,
}
