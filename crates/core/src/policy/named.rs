//! The policies that can be chosen, by name.

use super::{Policy, lhd, lru, tinylfu};

/// Makes a policy.
pub type Make = fn() -> Box<dyn Policy>;

/// The policies that a daemon may have, by name, the default first. The simulator has more.
pub const ALL: [(&str, Make); 3] = [
    ("lhd", || Box::<lhd::Lhd>::default()),
    ("lru", || Box::<lru::Lru>::default()),
    ("tinylfu", || Box::<tinylfu::TinyLfu>::default()),
];

/// The policy of this name.
pub fn by_name(name: &str) -> Option<Make> {
    ALL.iter().find(|(known, _)| *known == name).map(|(_, make)| *make)
}
