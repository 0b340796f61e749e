//! Which lists the requests have, written by the build script from the .proto: what makes a message larger in memory
//! than on the wire.

use crate::proto;

/// A message's fields whose occurrences add up, by number.
#[derive(Debug)]
pub struct Lists(&'static [(u32, Entries)]);

/// What an occurrence of a field adds to the decoded message.
#[derive(Clone, Copy, Debug)]
pub enum Entries {
    /// An entry that has a length on the wire: a message, a text, or an entry of a map.
    Lengths {
        /// In memory, without what its own lists and texts take.
        bytes: usize,
        /// Its own lists.
        of: &'static Lists,
    },
    /// Numbers of one to ten bytes on the wire and eight in memory, one or many.
    Numbers,
}

static NONE: Lists = Lists(&[]);

impl Lists {
    /// What the field adds, if it adds up.
    pub fn field(&self, number: u64) -> Option<Entries> {
        self.0.iter().find(|(field, _)| u64::from(*field) == number).map(|(_, entries)| *entries)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

include!(concat!(env!("OUT_DIR"), "/lists.rs"));
