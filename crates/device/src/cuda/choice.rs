//! Which methods an engine uses, and in which order.
//!
//! Invariants: only methods that have passed the self-test are used. One that fails later is used no more, unless it is
//! the last that takes every copy. Staged copies are made by the driver's own methods.

use std::sync::{Mutex, MutexGuard};

use super::methods::Method;

/// What a user asks for; what comes behind it stands in where it cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wish {
    /// The driver's own methods.
    #[default]
    Auto,
    /// The kernel for loads.
    Kernel,
    Batch,
    Loop,
}

impl Wish {
    pub const ALL: [Wish; 4] = [Wish::Auto, Wish::Kernel, Wish::Batch, Wish::Loop];

    pub fn name(self) -> &'static str {
        match self {
            Wish::Auto => "auto",
            Wish::Kernel => Method::Kernel.name(),
            Wish::Batch => Method::Batch.name(),
            Wish::Loop => Method::Loop.name(),
        }
    }

    /// The methods that may be used, the preferred one first.
    pub(super) fn methods(self) -> &'static [Method] {
        match self {
            Wish::Auto | Wish::Batch => &[Method::Batch, Method::Loop],
            Wish::Kernel => &[Method::Kernel, Method::Batch, Method::Loop],
            Wish::Loop => &[Method::Loop],
        }
    }
}

/// The methods in use. See the module documentation.
pub struct Choice {
    methods: Mutex<Vec<Method>>,
}

impl Choice {
    /// `methods`: those that were tested, the preferred one first.
    pub fn new(methods: Vec<Method>) -> Choice {
        Choice { methods: Mutex::new(methods) }
    }

    pub fn methods(&self) -> Vec<Method> {
        self.lock().clone()
    }

    /// For copies through staging memory.
    pub fn own(&self) -> Vec<Method> {
        self.lock().iter().copied().filter(|method| method.takes_all()).collect()
    }

    /// Uses a method that has failed no more.
    pub fn give_up(&self, method: Method) {
        let mut methods = self.lock();
        if methods.iter().any(|other| *other != method && other.takes_all()) {
            methods.retain(|other| *other != method);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Method>> {
        self.methods.lock().expect("nothing under this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_that_fails_is_given_up_but_for_the_last_that_takes_every_copy() {
        let choice = Choice::new(Wish::Kernel.methods().to_vec());
        choice.give_up(Method::Batch);
        assert_eq!(choice.methods(), [Method::Kernel, Method::Loop]);
        choice.give_up(Method::Loop);
        assert_eq!(choice.methods(), [Method::Kernel, Method::Loop], "the kernel does not take every copy");
        choice.give_up(Method::Kernel);
        choice.give_up(Method::Loop);
        assert_eq!(choice.methods(), [Method::Loop]);
    }

    #[test]
    fn staged_copies_are_made_by_the_drivers_own_methods() {
        assert_eq!(Choice::new(Wish::Kernel.methods().to_vec()).own(), [Method::Batch, Method::Loop]);
    }
}
