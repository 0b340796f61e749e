//! Which methods an engine uses, and in which order.
//!
//! Invariants: only methods that have passed the self-test are used. One that fails later is used no more, unless it is
//! the last that takes every copy. Staged copies are made by the driver's own methods. The kernel is used where it was
//! asked for, or was measured to be worth it.

use std::sync::{Mutex, MutexGuard};

use super::costs::Costs;
use super::methods::Method;
use super::ops::Op;
use crate::job::Direction;

/// What a user asks for; what comes behind it stands in where it cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wish {
    /// What was measured to be the best for copies of this size, number and direction.
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
            Wish::Batch => &[Method::Batch, Method::Loop],
            Wish::Auto | Wish::Kernel => &[Method::Kernel, Method::Batch, Method::Loop],
            Wish::Loop => &[Method::Loop],
        }
    }
}

/// The methods in use. See the module documentation.
pub struct Choice {
    methods: Mutex<Vec<Method>>,
    /// By which the order of the methods is changed; none if somebody wished it so.
    costs: Option<Costs>,
}

impl Choice {
    /// `methods`: those that were tested, the preferred one first.
    pub fn new(methods: Vec<Method>, costs: Option<Costs>) -> Choice {
        Choice { methods: Mutex::new(methods), costs }
    }

    /// The methods for these copies; each next one is for what those before it leave.
    pub fn order(&self, direction: Direction, ops: &[Op]) -> Vec<Method> {
        let methods = self.methods();
        let Some(costs) = &self.costs else { return methods };
        let (count, bytes) = (ops.len() as u64, ops.iter().map(|op| op.bytes).sum::<u64>());
        let best = costs.best(direction, bytes / count.max(1), count, &methods);
        let others = methods.into_iter().filter(|method| method.takes_all() && Some(*method) != best);
        best.into_iter().chain(others).collect()
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
    use super::super::costs::Cost;
    use super::*;

    #[test]
    fn a_method_that_fails_is_given_up_but_for_the_last_that_takes_every_copy() {
        let choice = Choice::new(Wish::Kernel.methods().to_vec(), None);
        choice.give_up(Method::Batch);
        assert_eq!(choice.methods(), [Method::Kernel, Method::Loop]);
        choice.give_up(Method::Loop);
        assert_eq!(choice.methods(), [Method::Kernel, Method::Loop], "the kernel does not take every copy");
        choice.give_up(Method::Kernel);
        choice.give_up(Method::Loop);
        assert_eq!(choice.methods(), [Method::Loop]);
    }

    #[test]
    fn without_a_measurement_the_kernel_is_used_only_where_it_was_asked_for() {
        let ops = [Op { device: 0, host: 0, bytes: 4096 }; 100];
        let order = |costs| Choice::new(Wish::Auto.methods().to_vec(), costs).order(Direction::Load, &ops);
        assert_eq!(order(None), [Method::Kernel, Method::Batch, Method::Loop]);
        assert_eq!(order(Some(Costs::default())), [Method::Batch, Method::Loop]);
        let cost =
            |method, nanoseconds| Cost { direction: Direction::Load, method, bytes: 4096, count: 128, nanoseconds };
        let costs = Costs(vec![cost(Method::Kernel, 10), cost(Method::Batch, 30), cost(Method::Loop, 20)]);
        assert_eq!(order(Some(costs)), [Method::Kernel, Method::Batch, Method::Loop]);
        let costs = Costs(vec![cost(Method::Kernel, 10), cost(Method::Batch, 30), cost(Method::Loop, 12)]);
        assert_eq!(order(Some(costs)), [Method::Loop, Method::Batch]);
    }

    #[test]
    fn staged_copies_are_made_by_the_drivers_own_methods() {
        assert_eq!(Choice::new(Wish::Kernel.methods().to_vec(), None).own(), [Method::Batch, Method::Loop]);
    }
}
