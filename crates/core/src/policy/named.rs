//! The policies that can be chosen, by name.

use super::{Policy, lhd, lru, tinylfu};

/// Makes a policy.
pub type Make = fn() -> Box<dyn Policy>;

/// What an operator can choose for the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyChoice {
    /// Whatever policy serves most traffic best: today `lhd`.
    Default,
    /// Evicts the block that was used longest ago.
    Lru,
    /// Keeps the blocks that are looked up most often.
    TinyLfu,
}

impl PolicyChoice {
    /// Every choice, the default first.
    pub const ALL: [PolicyChoice; 3] = [PolicyChoice::Default, PolicyChoice::Lru, PolicyChoice::TinyLfu];

    /// As an operator writes it.
    pub const fn name(self) -> &'static str {
        match self {
            PolicyChoice::Default => "default",
            PolicyChoice::Lru => "lru",
            PolicyChoice::TinyLfu => "tinylfu",
        }
    }

    /// The function that makes the chosen policy.
    pub const fn make(self) -> Make {
        match self {
            PolicyChoice::Default => || Box::<lhd::Lhd>::default(),
            PolicyChoice::Lru => || Box::<lru::Lru>::default(),
            PolicyChoice::TinyLfu => || Box::<tinylfu::TinyLfu>::default(),
        }
    }
}

/// The policies that a daemon may have, by their own names, the default first. The simulator has more.
pub const ALL: [(&str, Make); 3] = [
    ("lhd", PolicyChoice::Default.make()),
    ("lru", PolicyChoice::Lru.make()),
    ("tinylfu", PolicyChoice::TinyLfu.make()),
];

/// The policy of this name.
pub fn by_name(name: &str) -> Option<Make> {
    ALL.iter().find(|(known, _)| *known == name).map(|(_, make)| *make)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_says_the_name_that_it_is_found_by() {
        ALL.into_iter().for_each(|(name, make)| assert_eq!(make().name(), name));
    }
}
