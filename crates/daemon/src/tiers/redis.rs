//! Redis and Valkey: their entry among the tiers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use forebay_io::StoreReport;
use forebay_io::pool::Pool;
use forebay_io::purge::Place;
use forebay_io::redis::{Credentials, Mode, Redis, RedisConfig, SentinelConfig, TlsConfig};
use forebay_io::uring::Region;

use super::spec::{Claimed, Driven, OpeningEvents, Options, TierSpec};
use crate::config::{Config, RedisMode, TierRedis};

pub const SPEC: TierSpec = TierSpec {
    name: "redis",
    is_shared: true,
    is_configured: |config| !config.tier_redis.urls.is_empty(),
    options: |Config { tier_redis: tier, .. }| {
        Options::new(tier.admission, tier.load_deadline_ms, tier.load_bytes_per_second, tier.store_bytes_per_second)
    },
    claim: |config| {
        let config = settings(&config.tier_redis);
        config.check()?;
        Ok(Box::new(config))
    },
};

impl Claimed for RedisConfig {
    fn open(&mut self, pool: &Arc<Pool>, _core: &dyn OpeningEvents) -> Result<Box<dyn Driven>> {
        Ok(Box::new(Redis::open(self, Region::of_pool(pool.clone()))?))
    }
}

impl Driven for Redis {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        Redis::wake_fd(self)
    }

    fn stores(&self) -> Vec<StoreReport> {
        vec![StoreReport::of_redis(self.report())]
    }

    fn places(&self) -> Vec<Place> {
        Redis::places(self)
    }
}

fn settings(config: &TierRedis) -> RedisConfig {
    let mode = match config.mode {
        RedisMode::Single => Mode::Single,
        RedisMode::Cluster => Mode::Cluster,
        RedisMode::Sentinel => Mode::Sentinel { master: config.sentinel_master.clone() },
    };
    let credentials = Credentials {
        user: config.sentinel_user.clone(),
        password: config.sentinel_password.as_ref().map(|secret| secret.0.clone()),
    };
    RedisConfig {
        mode,
        sentinel: SentinelConfig { credentials, is_tls: config.sentinel_tls },
        connections: config.connections as usize,
        threads: config.threads as usize,
        ttl_seconds: config.ttl_seconds,
        value_bytes: config.value_bytes.0,
        key_prefix: config.key_prefix.clone(),
        tls: TlsConfig {
            ca_file: config.ca_file.clone(),
            certificate_file: config.certificate_file.clone(),
            key_file: config.key_file.clone(),
            server_name: config.server_name.clone(),
        },
        connect_timeout: Duration::from_millis(config.connect_timeout_ms),
        operation_timeout: Duration::from_millis(config.operation_timeout_ms),
        ..RedisConfig::new(config.urls.iter().map(|url| url.0.clone()).collect())
    }
}
