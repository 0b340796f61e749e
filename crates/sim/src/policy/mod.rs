//! All policies: those that a daemon may have, and published ones that the simulator compares them with.
//!
//! One file a policy, each on the parts that the core's own are made of.

pub mod arc;
pub mod s3fifo;
pub mod twoq;

use forebay_core::policy::{ALL as OF_CORE, Make};

/// By the names of the configuration, the default first.
pub const ALL: [(&str, Make); 6] = [
    ("default", OF_CORE[0].1),
    OF_CORE[1],
    ("twoq", || Box::<twoq::TwoQ>::default()),
    ("arc", || Box::<arc::Arc>::default()),
    ("s3fifo", || Box::<s3fifo::S3Fifo>::default()),
    OF_CORE[2],
];

/// The policy of this name, with the name that it is listed under. The first is also known by its own name.
pub fn find(name: &str) -> Option<(&'static str, Make)> {
    let name = if name == OF_CORE[0].0 { ALL[0].0 } else { name };
    ALL.into_iter().find(|(known, _)| *known == name)
}

/// As [`find`], without the name.
pub fn by_name(name: &str) -> Option<Make> {
    find(name).map(|(_, make)| make)
}
