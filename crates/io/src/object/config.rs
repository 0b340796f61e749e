//! What an operator says about a bucket, and the limits that follow.

use std::fmt;
use std::time::Duration;

use forebay_core::{Error, Result};

/// Shown to nobody.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret(…)")
    }
}

/// See the module's head.
#[derive(Clone, PartialEq, Debug)]
pub struct ObjectConfig {
    pub bucket: String,
    /// Before every object's name, without a slash at its end; may be empty.
    pub prefix: String,
    pub region: String,
    /// Of another store than Amazon's, such as `http://127.0.0.1:9000`. Plain HTTP only if it says so.
    pub endpoint: Option<String>,
    /// Without them, those of the environment: `AWS_ACCESS_KEY_ID` and so on, a web identity, the instance's role.
    pub access_key_id: Option<String>,
    pub secret_access_key: Option<Secret>,
    /// Requests under way at a time, half of them stores at most; each has a block in memory.
    pub requests: usize,
    /// An operation that takes longer fails: loads and lookups from when they were asked for, stores from their first
    /// request on.
    pub timeout: Duration,
    /// Longer objects are uploaded in parts of this size; the stores want 5 MiB at least.
    pub part_bytes: u64,
    /// Longer blocks are refused.
    pub max_block_bytes: u64,
    pub read_only: bool,
    /// Loads, lookups and removals that wait or are under way; more are refused.
    pub queued_loads: usize,
    /// Stores that wait or are under way; more are refused. Each pins a slot of the pool.
    pub queued_stores: usize,
}

/// The least that S3 takes for any part but the last.
const LEAST_PART_BYTES: u64 = 5 << 20;

impl ObjectConfig {
    pub fn new(bucket: impl Into<String>) -> ObjectConfig {
        ObjectConfig {
            bucket: bucket.into(),
            prefix: String::new(),
            region: "us-east-1".to_owned(),
            endpoint: None,
            access_key_id: None,
            secret_access_key: None,
            requests: 32,
            timeout: Duration::from_secs(30),
            part_bytes: 16 << 20,
            max_block_bytes: 256 << 20,
            read_only: false,
            queued_loads: 4096,
            queued_stores: 256,
        }
    }

    /// Whether it can be right, before the bucket is asked; errors with what to change.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, hint: &str| Err(Error::invalid(what).hint(hint));
        if self.bucket.is_empty() {
            return wrong("an object tier needs a bucket", "name one, or leave the tier out");
        }
        if self.prefix.starts_with('/') || self.prefix.ends_with('/') || self.prefix.contains("//") {
            return wrong("a prefix has no slash at its ends", "write it like `team/forebay`");
        }
        if self.access_key_id.is_some() != self.secret_access_key.is_some() {
            return wrong(
                "an access key has two parts",
                "give its id and its secret, or neither to take the environment's",
            );
        }
        if self.part_bytes < LEAST_PART_BYTES {
            return wrong("a part is at least 5 MiB", "leave it out");
        }
        if self.requests == 0 || self.queued_loads == 0 || self.queued_stores == 0 || self.timeout.is_zero() {
            return wrong("requests, queues and the timeout are more than nothing", "leave them out");
        }
        if self.max_block_bytes == 0 || self.max_block_bytes > 1 << 31 {
            return wrong("the longest block is 1 byte to 2 GiB", "leave it out");
        }
        Ok(())
    }
}
