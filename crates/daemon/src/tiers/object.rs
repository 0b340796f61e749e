//! Buckets of object stores: their entry among the tiers. The tier itself is a feature of the build.

use super::spec::{Options, TierSpec};
use crate::config::Config;

pub const SPEC: TierSpec = TierSpec {
    name: "object",
    is_shared: true,
    is_configured: |config| !config.tier_object.bucket.is_empty(),
    options: |Config { tier_object: tier, .. }| {
        Options::new(tier.admission, tier.load_deadline_ms, tier.load_bytes_per_second, tier.store_bytes_per_second)
    },
    #[cfg(feature = "object")]
    claim: |config| {
        let config = built::settings(&config.tier_object);
        config.check()?;
        Ok(Box::new(config))
    },
    #[cfg(not(feature = "object"))]
    claim: |_| {
        use forebay_core::{Error, ErrorKind};
        Err(Error::new(ErrorKind::Unsupported, "this build has no object tier"))
    },
};

#[cfg(feature = "object")]
mod built {
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;
    use std::time::Duration;

    use forebay_core::Result;
    use forebay_io::StoreReport;
    use forebay_io::object::{Object, ObjectConfig};
    use forebay_io::pool::Pool;
    use forebay_io::purge::Place;
    use forebay_io::uring::Region;

    use super::super::spec::{Claimed, Driven, OpeningEvents};
    use crate::config::TierObject;

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

    pub fn settings(config: &TierObject) -> ObjectConfig {
        ObjectConfig {
            prefix: config.prefix.clone(),
            region: config.region.clone(),
            endpoint: config.endpoint.clone(),
            requests: config.requests as usize,
            timeout: Duration::from_millis(config.timeout_ms),
            part_bytes: config.part_bytes.0,
            read_only: config.read_only,
            ..ObjectConfig::new(config.bucket.clone())
        }
    }
}
