//! The same documents asked round after round, each time with a new question: what a test of long documents, a batch
//! job, or agents in lockstep ask for.
//!
//! Every document that is resident when a round begins can be hit in that round, in whatever order it is asked. So the
//! optimum is the pool's share of the documents, and a subset that is kept reaches it.

use crate::trace::{ROOT, Shape, Trace, mix};

/// In which order the documents of a round come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The same in each round.
    Same,
    /// Another one in each round.
    Shuffled,
    /// Each request is for any of them; a round is as many requests as there are documents.
    Random,
}

#[derive(Clone, Debug)]
pub struct Rounds {
    pub documents: usize,
    /// Blocks of a document; its question is one more.
    pub blocks: usize,
    pub rounds: usize,
    pub order: Order,
    /// Tenants; document `n` belongs to tenant `n % shapes.len()`.
    pub shapes: Vec<Shape>,
    pub seed: u64,
}

impl Rounds {
    /// Sixty documents of 40 blocks of one tenant.
    pub fn new(order: Order, rounds: usize) -> Rounds {
        let shapes = vec![Shape { block_tokens: 16, block_bytes: None }];
        Rounds { documents: 60, blocks: 40, rounds, order, shapes, seed: 1 }
    }

    /// Blocks of all documents.
    pub fn working_set(&self) -> usize {
        self.documents * self.blocks
    }

    /// With fewer rounds it is the beginning of the same trace. One request a microsecond.
    pub fn trace(&self) -> Trace {
        let mut trace = Trace::new("rounds", self.shapes.clone());
        let mut first = vec![ROOT; self.documents];
        let mut order: Vec<usize> = (0..self.documents).collect();
        let mut random = self.seed;
        for _ in 0..self.rounds {
            self.next_round(&mut order, &mut random);
            for document in &order {
                let next = trace.unique() as u32;
                let start = if first[*document] == ROOT { next } else { first[*document] };
                first[*document] = start;
                let end = start + self.blocks as u32;
                let blocks: Vec<u32> = (start..end).chain([next.max(end)]).collect();
                trace.push(trace.len() as u64, (document % self.shapes.len()) as u16, &blocks);
            }
        }
        trace
    }

    fn next_round(&self, order: &mut [usize], random: &mut u64) {
        let mut below = |end: usize| {
            *random = mix(*random);
            (*random % end as u64) as usize
        };
        match self.order {
            Order::Same => {}
            Order::Shuffled => (1..order.len()).rev().for_each(|at| order.swap(at, below(at + 1))),
            Order::Random => order.iter_mut().for_each(|document| *document = below(self.documents)),
        }
    }
}
