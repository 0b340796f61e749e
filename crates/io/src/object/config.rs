//! An operator's settings for a bucket, and the limits that follow from them.

use std::fmt;
use std::time::Duration;

use forebay_core::{Error, Result};

use crate::demand::{self, Demand, LONGEST_MS};
use crate::header::Sealing;

/// A secret that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret(…)")
    }
}

/// See the module documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct ObjectConfig {
    /// Name of the bucket, which must exist.
    pub bucket: String,
    /// With or without the secret of the hosts that share the bucket.
    pub sealing: Sealing,
    /// Prefix of every object's name, without a slash at its end; may be empty.
    pub prefix: String,
    /// The bucket's region; each request's signature names it.
    pub region: String,
    /// Endpoint of a store other than Amazon's, such as `http://127.0.0.1:9000`. Plain HTTP only if the URL says so.
    pub endpoint: Option<String>,
    /// If absent, the environment's credentials are used: `AWS_ACCESS_KEY_ID` and so on, a web identity, the
    /// instance's role.
    pub access_key_id: Option<String>,
    /// The secret of `access_key_id`: both or none.
    pub secret_access_key: Option<Secret>,
    /// Requests in flight at a time, at most half of them stores; each has a block in memory.
    pub requests: usize,
    /// An operation that takes longer fails. The time runs from the request for loads and lookups, from the first
    /// request to the store for stores.
    pub timeout: Duration,
    /// Longer objects are uploaded in parts of this size; stores require 5 MiB at least.
    pub part_bytes: u64,
    /// Longer blocks are refused.
    pub max_block_bytes: u64,
    /// Stores nothing and removes nothing.
    pub read_only: bool,
    /// Loads, lookups and removals that wait or are in flight; more are refused.
    pub queued_loads: usize,
    /// Stores that wait or are in flight; more are refused. Each pins a slot of the pool.
    pub queued_stores: usize,
}

/// The least that S3 accepts for any part but the last.
const LEAST_PART_BYTES: u64 = 5 << 20;

impl ObjectConfig {
    /// The defaults for this bucket, at Amazon in `us-east-1`. Nothing is contacted or checked.
    pub fn new(bucket: impl Into<String>) -> ObjectConfig {
        ObjectConfig {
            bucket: bucket.into(),
            sealing: Sealing::default(),
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

    /// Checks the settings before the bucket is contacted. Errors say what to change.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, hint: &str| Err(Error::invalid(what).hint(hint));
        if self.bucket.is_empty() {
            return wrong("an object tier needs a bucket", "set `tier.object.bucket`, or remove the tier");
        }
        if self.prefix.starts_with('/') || self.prefix.ends_with('/') || self.prefix.contains("//") {
            return wrong("a prefix must not begin or end with a slash", "write it like `team/forebay`");
        }
        demand::check(self.demands(""))
    }

    /// What the values must hold, if the tier is on. `section` stands before the names of the settings.
    pub fn demands(&self, section: &str) -> Vec<Demand> {
        let key = |name: &str| format!("{section}{name}");
        let at_least_1 = |name: &str, value| Demand::at_least_1(key(name), value);
        vec![
            Demand::new(
                key("access_key_id_file"),
                self.access_key_id.is_some() == self.secret_access_key.is_some(),
                format!("be set together with `{section}secret_access_key_file`, or neither"),
            ),
            Demand::new(key("part_bytes"), self.part_bytes >= LEAST_PART_BYTES, "be at least 5 MiB"),
            at_least_1("requests", self.requests as u64),
            at_least_1("queued_loads", self.queued_loads as u64),
            at_least_1("queued_stores", self.queued_stores as u64),
            Demand::within(key("timeout_ms"), self.timeout.as_millis() as u64, 1..=LONGEST_MS),
            Demand::within(key("max_block_bytes"), self.max_block_bytes, 1..=1 << 31),
        ]
    }
}
