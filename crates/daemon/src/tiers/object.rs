//! The entry of object stores in `ALL`, the list of tiers. The tier itself is a feature of the build.

use std::time::Duration;

use std::path::PathBuf;

use forebay_core::Result;
use forebay_core::tier::Capabilities;
use forebay_core::tiers::Admission;
use forebay_io::Demand;
use forebay_io::header::Sealing;

use super::spec::{Claimed, Options, TierSpec, Touches};
use crate::config::{Bytes, settings};

settings! {
    /// A bucket of an S3-compatible store that several hosts share; in builds with the feature `object`. Credentials
    /// come from files, or else from the environment: `AWS_ACCESS_KEY_ID` and so on, a web identity, or the instance's
    /// role.
    "tier.object": TierObject {
        /// Name of the bucket; empty switches the tier off.
        bucket: String = String::new();
        /// Prefix of the names of all objects.
        prefix: String = "forebay".to_string();
        /// Region of the bucket.
        region: String = "us-east-1".to_string();
        /// URL of a store other than Amazon's, such as `https://s3.internal`. Plain HTTP is used only if the URL begins
        /// with `http://`.
        endpoint: Option<String> = None;
        /// File with the id of the access key; needs `secret_access_key_file`. The id stands alone in the file; one
        /// newline at its end is not part of it. The daemon reads the file when it starts.
        access_key_id_file: Option<PathBuf> = None;
        /// File with the secret of the access key; like `access_key_id_file`.
        secret_access_key_file: Option<PathBuf> = None;
        /// Requests at a time, of which at most half are stores; each keeps a block in memory.
        requests: u32 = 32;
        /// Milliseconds after which an operation fails.
        timeout_ms: u64 = 30_000;
        /// Longer objects are uploaded in parts of this size, at least 5 MiB.
        part_bytes: Bytes = Bytes(16 << 20);
        /// Whether the tier only reads and never stores.
        read_only: bool = false;
        /// Which blocks are written to the tier: `second_sighting` or `all`, as for `tier.ssd.admission`. The default
        /// is `all`, as for every shared store.
        admission: Admission = Admission::All;
        /// Limit on the bytes loaded from the tier per second: this daemon's share of a store that others use as well.
        /// Loads beyond it wait, and are misses after `load_deadline_ms`. Not limited by default.
        load_bytes_per_second: Option<Bytes> = None;
        /// Limit on the bytes written to the tier per second; writes beyond it wait. Not limited by default.
        store_bytes_per_second: Option<Bytes> = None;
        /// Milliseconds that a request may wait for a probe or a block before it is a miss. A wait for room in the pool
        /// does not count: it ends after half a second in which no block comes.
        load_deadline_ms: u64 = 2000;
    }
}

impl TierSpec for TierObject {
    fn capabilities(&self) -> Capabilities {
        built::capabilities()
    }

    fn is_configured(&self) -> bool {
        !self.bucket.is_empty()
    }

    fn switch(&self) -> &'static str {
        "tier.object.bucket"
    }

    fn demands(&self) -> Vec<Demand> {
        let is_built = !self.is_configured() || cfg!(feature = "object");
        let must = "be empty in this build: object stores need a build with `--features object`";
        let mut demands = vec![Demand::new("tier.object.bucket", is_built, must)];
        if self.is_configured() {
            demands.extend(built::demands(self));
        }
        demands
    }

    fn operation_timeout(&self) -> Option<(&'static str, Duration)> {
        Some(("tier.object.timeout_ms", Duration::from_millis(self.timeout_ms)))
    }

    fn options(&self) -> Options {
        Options::new(self.admission, self.load_deadline_ms, self.load_bytes_per_second, self.store_bytes_per_second)
    }

    /// A bucket evicts nothing by use, and each request has a price. But its rules may end objects that are in use.
    fn touching(&self) -> Option<Touches> {
        let hour = Duration::from_secs(3600);
        Some(Touches { per_second: 16, least: hour, most: hour, asks_per_second: 0 })
    }

    fn check(&self) -> Result<()> {
        built::claim(self, &Sealing::default()).map(drop)
    }

    fn examine(&self) -> Vec<Result<String>> {
        vec![built::claim(self, &Sealing::default()).map(|_| format!("configured with the bucket `{}`", self.bucket))]
    }

    fn claim(&self, sealing: &Sealing) -> Result<Box<dyn Claimed>> {
        built::claim(self, sealing)
    }
}

#[cfg(feature = "object")]
mod built {
    use std::os::fd::BorrowedFd;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    use forebay_core::Result;
    use forebay_core::tier::Capabilities;
    use forebay_io::header::Sealing;
    use forebay_io::object::{Object, ObjectConfig, Secret};
    use forebay_io::pool::Pool;
    use forebay_io::purge::Place;
    use forebay_io::secret_file::read_secret;
    use forebay_io::uring::Region;
    use forebay_io::{Demand, StoreReport};

    use super::super::spec::{Claimed, Driven, OpeningEvents};
    use super::TierObject;

    pub fn capabilities() -> Capabilities {
        Object::CAPABILITIES
    }

    impl Claimed for ObjectConfig {
        fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
            Ok(Box::new(Object::open(self, Region::of_pool(pool.clone()))?))
        }
    }

    impl Driven for Object {
        fn wake_fd(&self) -> BorrowedFd<'_> {
            Object::wake_fd(self)
        }

        fn stores(&self) -> Vec<StoreReport> {
            vec![StoreReport::of_object(self.report())]
        }

        fn places(&self) -> Vec<Place> {
            Object::places(self)
        }
    }

    pub fn demands(config: &TierObject) -> Vec<Demand> {
        settings(config, |_, _| Ok(String::new())).map_or_else(|_| Vec::new(), |config| config.demands("tier.object."))
    }

    pub fn claim(config: &TierObject, sealing: &Sealing) -> Result<Box<dyn Claimed>> {
        let config = ObjectConfig { sealing: sealing.clone(), ..settings(config, read_secret)? };
        config.check()?;
        Ok(Box::new(config))
    }

    /// `read` gives the secret that is in a file: the file's key, and its path.
    fn settings(config: &TierObject, read: impl Fn(&'static str, &Path) -> Result<String>) -> Result<ObjectConfig> {
        let secret = |key, file: &Option<PathBuf>| file.as_deref().map(|file| read(key, file)).transpose();
        let access_key_id = secret("tier.object.access_key_id_file", &config.access_key_id_file)?;
        let secret_access_key = secret("tier.object.secret_access_key_file", &config.secret_access_key_file)?;
        Ok(ObjectConfig {
            access_key_id,
            secret_access_key: secret_access_key.map(Secret),
            prefix: config.prefix.clone(),
            region: config.region.clone(),
            endpoint: config.endpoint.clone(),
            requests: config.requests as usize,
            timeout: Duration::from_millis(config.timeout_ms),
            part_bytes: config.part_bytes.0,
            read_only: config.read_only,
            ..ObjectConfig::new(config.bucket.clone())
        })
    }
}

/// A build without the tier refuses the name of a bucket, so nobody gets here.
#[cfg(not(feature = "object"))]
mod built {
    use forebay_core::tier::Capabilities;
    use forebay_core::{Error, ErrorKind, Result};
    use forebay_io::Demand;
    use forebay_io::header::Sealing;

    use super::super::spec::Claimed;
    use super::TierObject;

    pub fn capabilities() -> Capabilities {
        Capabilities::default()
    }

    pub fn demands(_: &TierObject) -> Vec<Demand> {
        Vec::new()
    }

    pub fn claim(_: &TierObject, _: &Sealing) -> Result<Box<dyn Claimed>> {
        Err(Error::new(ErrorKind::Unsupported, "this build has no object tier"))
    }
}
