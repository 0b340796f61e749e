//! All policies: those that a daemon may have, and published ones that the simulator compares them with.
//!
//! One file a policy, each on the parts that the core's own are made of.

pub mod arc;
pub mod s3fifo;
pub mod twoq;

use forebay_core::policy::{ALL as OF_CORE, Make};

/// By name, the default first.
pub const ALL: [(&str, Make); 6] = [
    OF_CORE[0],
    OF_CORE[1],
    ("twoq", || Box::<twoq::TwoQ>::default()),
    ("arc", || Box::<arc::Arc>::default()),
    ("s3fifo", || Box::<s3fifo::S3Fifo>::default()),
    OF_CORE[2],
];

/// The policy of this name.
pub fn by_name(name: &str) -> Option<Make> {
    ALL.iter().find(|(known, _)| *known == name).map(|(_, make)| *make)
}
