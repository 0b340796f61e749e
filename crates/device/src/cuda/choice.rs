//! Which methods an engine uses, and in which order.
//!
//! Invariants: only methods that have passed the self-test are used. One that fails later is used no more, unless it is
//! the last that takes every copy. Staged copies are made by the driver's own methods. A method that leaves copies to
//! the next one is used where it was asked for, or where it was measured to be worth it. Until something is measured,
//! the order is that of the wish.

use std::sync::{Arc, Mutex, MutexGuard};

use super::costs::Costs;
use super::methods::Method;
use super::ops::Op;
use super::pitched;
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
    /// Copies in evenly spaced rows.
    Pitched,
}

impl Wish {
    pub const ALL: [Wish; 5] = [Wish::Auto, Wish::Kernel, Wish::Batch, Wish::Loop, Wish::Pitched];

    pub fn name(self) -> &'static str {
        match self {
            Wish::Auto => "auto",
            Wish::Kernel => Method::Kernel.name(),
            Wish::Batch => Method::Batch.name(),
            Wish::Loop => Method::Loop.name(),
            Wish::Pitched => Method::Pitched.name(),
        }
    }

    /// The methods that may be used, the preferred one first.
    pub(super) fn methods(self) -> &'static [Method] {
        match self {
            Wish::Auto => &[Method::Batch, Method::Loop, Method::Pitched, Method::Kernel],
            Wish::Kernel => &[Method::Kernel, Method::Batch, Method::Loop],
            Wish::Batch => &[Method::Batch, Method::Loop],
            Wish::Loop => &[Method::Loop],
            Wish::Pitched => &[Method::Pitched, Method::Batch, Method::Loop],
        }
    }
}

/// Where the order of the methods comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reason {
    /// Somebody wished it so, or nothing is measured yet.
    #[default]
    Given,
    /// This engine has measured them.
    Measured,
    /// Another engine of this user has measured them on this device.
    Kept,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Reason::Given => "given",
            Reason::Measured => "measured",
            Reason::Kept => "kept",
        }
    }
}

/// The methods in use. See the module documentation.
pub struct Choice {
    state: Mutex<State>,
    max_pitch: u64,
}

struct State {
    methods: Vec<Method>,
    costs: Option<Arc<Costs>>,
    reason: Reason,
}

impl Choice {
    /// `methods`: those that were tested, the preferred one first.
    pub fn new(methods: Vec<Method>, max_pitch: u64) -> Choice {
        let state = State { methods, costs: None, reason: Reason::Given };
        Choice { state: Mutex::new(state), max_pitch }
    }

    /// Chooses by these costs from now on.
    pub fn go_by(&self, costs: Costs, reason: Reason) {
        let mut state = self.lock();
        (state.costs, state.reason) = (Some(Arc::new(costs)), reason);
    }

    pub fn reason(&self) -> Reason {
        self.lock().reason
    }

    pub fn methods(&self) -> Vec<Method> {
        self.lock().methods.clone()
    }

    /// The methods for these copies; each next one is for what those before it leave.
    pub fn order(&self, direction: Direction, ops: &[Op]) -> Vec<Method> {
        let (mut methods, costs) = {
            let state = self.lock();
            (state.methods.clone(), state.costs.clone())
        };
        let Some(costs) = costs else { return methods };
        let (count, bytes) = (ops.len() as u64, ops.iter().map(|op| op.bytes).sum::<u64>());
        let best = |among: &[Method]| costs.best(direction, bytes / count.max(1), count, among);
        let mut first = best(&methods);
        if first == Some(Method::Pitched) && !pitched::is_worth(ops, self.max_pitch) {
            methods.retain(|method| *method != Method::Pitched);
            first = best(&methods);
        }
        let others = methods.into_iter().filter(|method| method.takes_all() && Some(*method) != first);
        first.into_iter().chain(others).collect()
    }

    /// For copies through staging memory.
    pub fn own(&self) -> Vec<Method> {
        self.lock().methods.iter().copied().filter(|method| method.takes_all()).collect()
    }

    /// Uses a method that has failed no more.
    pub fn give_up(&self, method: Method) {
        let methods = &mut self.lock().methods;
        if methods.iter().any(|other| *other != method && other.takes_all()) {
            methods.retain(|other| *other != method);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing under this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::Cost;
    use super::*;

    const FAR: u64 = 1 << 30;

    fn choice(wish: Wish) -> Choice {
        Choice::new(wish.methods().to_vec(), FAR)
    }

    #[test]
    fn a_method_that_fails_is_given_up_but_for_the_last_that_takes_every_copy() {
        let choice = choice(Wish::Kernel);
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
        assert_eq!(choice(Wish::Kernel).own(), [Method::Batch, Method::Loop]);
        assert_eq!(choice(Wish::Pitched).own(), [Method::Batch, Method::Loop]);
    }

    #[test]
    fn until_something_is_measured_the_order_is_that_of_the_wish_and_then_that_of_the_costs() {
        let scattered: Vec<_> = (0..100u64).map(|at| Op::new(at * at * 8192, at * 4096, 4096)).collect();
        let even: Vec<_> = (0..100u64).map(|at| Op::new(at * 8192, at * 4096, 4096)).collect();
        let all = [Method::Batch, Method::Loop, Method::Pitched, Method::Kernel];
        assert_eq!(choice(Wish::Auto).order(Direction::Load, &even), all);
        let order = |ops: &[Op], costs: [(Method, u64); 4]| {
            let choice = choice(Wish::Auto);
            let cost = |(method, nanoseconds)| {
                let direction = Direction::Load;
                Cost { direction, method, bytes: 4096, count: 128, nanoseconds }
            };
            choice.go_by(Costs(costs.map(cost).to_vec()), Reason::Measured);
            choice.order(Direction::Load, ops)
        };
        let [batch, one_by_one, pitched, kernel] = all;
        let by_kernel = [(batch, 30), (one_by_one, 20), (pitched, 25), (kernel, 10)];
        assert_eq!(order(&even, by_kernel), [Method::Kernel, Method::Batch, Method::Loop]);
        let by_rows = [(batch, 30), (one_by_one, 20), (pitched, 11), (kernel, 10)];
        assert_eq!(order(&even, by_rows), [Method::Pitched, Method::Batch, Method::Loop]);
        assert_eq!(order(&scattered, by_rows), [Method::Kernel, Method::Batch, Method::Loop], "these are no rows");
        let by_one = [(batch, 30), (one_by_one, 12), (pitched, 40), (kernel, 10)];
        assert_eq!(order(&even, by_one), [Method::Loop, Method::Batch]);
    }
}
