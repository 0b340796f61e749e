//! From the daemon's configuration to the tiers' own.

use std::path::Path;
use std::time::Duration;

use forebay_io::fs::FsConfig;
use forebay_io::redis::{Credentials, Mode, RedisConfig, SentinelConfig, TlsConfig};
use forebay_io::ssd::{DiskConfig, SsdConfig};

use crate::config::{RedisMode, TierFs, TierRedis, TierSsd};

pub fn ssd(config: &TierSsd) -> SsdConfig {
    let disk = |path: &Path| DiskConfig {
        path: path.to_path_buf(),
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
    };
    SsdConfig {
        segment_bytes: config.segment_bytes.map(|bytes| bytes.0),
        engine: config.engine,
        write_bytes_per_second: config.write_bytes_per_second.map(|bytes| bytes.0),
        write_bytes_per_day: config.write_bytes_per_day.map(|bytes| bytes.0),
        ..SsdConfig::new(config.disks.iter().map(|path| disk(path)).collect())
    }
}

pub fn fs(config: &TierFs) -> FsConfig {
    FsConfig {
        io_direct: config.io_direct,
        streams: config.streams,
        timeout: Duration::from_millis(config.timeout_ms),
        buffers: config.buffers,
        is_sharded: config.shard_folders,
        fsync: config.fsync,
        capacity_bytes: config.capacity_bytes.map(|bytes| bytes.0),
        max_age: config.max_age_seconds.map(Duration::from_secs),
        read_only: config.read_only,
        ..FsConfig::new(config.directories.clone())
    }
}

pub fn redis(config: &TierRedis) -> RedisConfig {
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

#[cfg(feature = "object")]
pub fn object(config: &crate::config::TierObject) -> forebay_io::object::ObjectConfig {
    forebay_io::object::ObjectConfig {
        prefix: config.prefix.clone(),
        region: config.region.clone(),
        endpoint: config.endpoint.clone(),
        requests: config.requests as usize,
        timeout: Duration::from_millis(config.timeout_ms),
        part_bytes: config.part_bytes.0,
        read_only: config.read_only,
        ..forebay_io::object::ObjectConfig::new(config.bucket.clone())
    }
}
