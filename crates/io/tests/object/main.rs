//! The object tier: the suite for all tiers, large blocks, damage, servers that fail and hang. The store is a server of
//! the tests' own, which keeps objects in memory and misbehaves as it is told; and the S3 server of `moto`.

mod bed;
mod conform;
mod faults;
mod moto;
mod purge;
mod s3;
mod server;
