//! A trace in memory: which blocks each request asked for, and when.
//!
//! Invariants: blocks are numbered from 0 in order of first appearance. A number names a block with all its
//! predecessors, so each block has one parent and one namespace. Requests are in time order.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use forebay_core::{Error, Result};

/// Bytes of a block if they are unknown.
pub const ASSUMED_BLOCK_BYTES: u64 = 4096;
/// Each takes up to 80 bytes while it is read, and about 40 in a replay.
pub const MAX_DIFFERENT: usize = 64 << 20;
/// Marks the first block of a prompt.
pub const ROOT: u32 = u32::MAX;

/// Sizes of the blocks of one model and tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub block_tokens: u32,
    /// Unknown in traces of token counts alone.
    pub block_bytes: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub name: String,
    pub shapes: Vec<Shape>,
    requests: Vec<Header>,
    blocks: Vec<u32>,
    /// By block number, like the next fields.
    parents: Vec<u32>,
    owners: Vec<u16>,
}

#[derive(Clone, Debug)]
struct Header {
    at_us: u64,
    namespace: u16,
    end: usize,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub at_us: u64,
    pub namespace: u16,
    /// In prefix order.
    pub blocks: &'a [u32],
}

impl Trace {
    pub fn new(name: &str, shapes: Vec<Shape>) -> Trace {
        Trace { name: name.to_owned(), shapes, ..Trace::default() }
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn request(&self, at: usize) -> Request<'_> {
        let start = at.checked_sub(1).map_or(0, |before| self.requests[before].end);
        let Header { at_us, namespace, end } = self.requests[at];
        Request { at_us, namespace, blocks: &self.blocks[start..end] }
    }

    pub fn requests(&self) -> impl Iterator<Item = Request<'_>> {
        (0..self.len()).map(|at| self.request(at))
    }

    /// Number of requested blocks.
    pub fn accesses(&self) -> usize {
        self.blocks.len()
    }

    /// Number of distinct blocks.
    pub fn unique(&self) -> usize {
        self.parents.len()
    }

    /// The block before `block` in its prompt, or [`ROOT`].
    pub fn parent(&self, block: u32) -> u32 {
        self.parents[block as usize]
    }

    pub fn block_bytes(&self, block: u32) -> u64 {
        self.bytes_in(self.namespace_of(block))
    }

    /// Gives all blocks this size, whatever the trace contains.
    pub fn set_bytes(&mut self, block_bytes: u64) {
        self.shapes.iter_mut().for_each(|shape| shape.block_bytes = Some(block_bytes));
    }

    pub fn namespace_of(&self, block: u32) -> u16 {
        self.owners[block as usize]
    }

    /// Whether the size of every block is known.
    pub fn has_bytes(&self) -> bool {
        self.shapes.iter().all(|shape| shape.block_bytes.is_some())
    }

    /// Bytes of each block of a namespace, which are assumed where they are not known.
    pub fn bytes_in(&self, namespace: u16) -> u64 {
        self.shapes[usize::from(namespace)].block_bytes.unwrap_or(ASSUMED_BLOCK_BYTES)
    }

    /// The size of all blocks, if it is the same.
    pub fn uniform_bytes(&self) -> Option<u64> {
        let first = self.bytes_in(0);
        (0..self.shapes.len() as u16).all(|namespace| self.bytes_in(namespace) == first).then_some(first)
    }

    /// How many sizes of blocks there are.
    pub fn sizes(&self) -> usize {
        (0..self.shapes.len() as u16).map(|namespace| self.bytes_in(namespace)).collect::<HashSet<_>>().len()
    }

    /// Total of all distinct blocks.
    pub fn unique_bytes(&self) -> u64 {
        self.owners.iter().map(|owner| self.bytes_in(*owner)).sum()
    }

    pub fn unique_tokens(&self) -> u64 {
        self.owners.iter().map(|owner| u64::from(self.shapes[usize::from(*owner)].block_tokens)).sum()
    }

    /// Hits of an infinite cache, which misses each block once.
    pub fn infinite_hits(&self) -> u64 {
        (self.accesses() - self.unique()) as u64
    }

    /// The hash of `block` on the wire, 16 bytes. Another salt gives an equivalent trace.
    pub fn hash(block: u32, salt: u64) -> [u8; 16] {
        let low = mix(u64::from(block) ^ salt.rotate_left(32));
        let high = mix(low ^ salt ^ 0x517c_c1b7_2722_0a95);
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&low.to_le_bytes());
        hash[8..].copy_from_slice(&high.to_le_bytes());
        hash
    }

    /// Adds a request whose blocks already have numbers; new numbers come in order.
    pub fn push(&mut self, at_us: u64, namespace: u16, blocks: &[u32]) {
        let mut parent = ROOT;
        for block in blocks {
            if *block as usize == self.parents.len() {
                self.parents.push(parent);
                self.owners.push(namespace);
            }
            assert!(self.parents[*block as usize] == parent, "block {block} has two parents");
            parent = *block;
        }
        self.blocks.extend_from_slice(blocks);
        self.requests.push(Header { at_us, namespace, end: self.blocks.len() });
    }
}

/// The requests of one trace, then those of the other, over blocks of their own.
pub fn followed_by(first: &Trace, then: &Trace) -> Trace {
    let mut both = first.clone();
    let offset = both.unique() as u32;
    for request in then.requests() {
        let blocks: Vec<u32> = request.blocks.iter().map(|block| block + offset).collect();
        both.push(both.len() as u64 + request.at_us, request.namespace, &blocks);
    }
    both
}

/// The requests of several traces in turn, one a microsecond. A turn names a trace and goes on with it where its last
/// turn ended, until it has asked for so many blocks or the trace ends.
pub fn in_turns(traces: &[Trace], turns: &[(usize, u64)]) -> Trace {
    let empty = |trace: &Trace| Trace::new(&trace.name, trace.shapes.clone());
    let mut timed: Vec<Trace> = traces.iter().map(empty).collect();
    let mut now = 0;
    for (of, blocks) in turns {
        let mut asked = 0;
        while asked < *blocks && timed[*of].len() < traces[*of].len() {
            let request = traces[*of].request(timed[*of].len());
            timed[*of].push(now, request.namespace, request.blocks);
            asked += request.blocks.len() as u64;
            now += 1;
        }
    }
    merge(&timed)
}

/// All of `traces` as one, in order of time. The namespaces of each are numbered after those of the previous one.
pub fn merge(traces: &[Trace]) -> Trace {
    let name = traces.iter().map(|trace| trace.name.as_str()).collect::<Vec<_>>().join("+");
    let mut merged = Trace::new(&name, traces.iter().flat_map(|trace| trace.shapes.clone()).collect());
    let mut numbers: Vec<Vec<u32>> = traces.iter().map(|trace| vec![ROOT; trace.unique()]).collect();
    let first_namespace = |of: usize| traces[..of].iter().map(|trace| trace.shapes.len() as u16).sum::<u16>();
    let offsets: Vec<u16> = (0..traces.len()).map(first_namespace).collect();
    let mut order: Vec<(u64, usize, usize)> = (traces.iter().enumerate())
        .flat_map(|(of, trace)| trace.requests().enumerate().map(move |(at, request)| (request.at_us, of, at)))
        .collect();
    order.sort_unstable();
    let mut blocks = Vec::new();
    for (at_us, of, at) in order {
        let request = traces[of].request(at);
        let mut next = merged.unique() as u32;
        blocks.clear();
        blocks.extend(request.blocks.iter().map(|block| {
            let number = &mut numbers[of][*block as usize];
            if *number == ROOT {
                *number = next;
                next += 1;
            }
            *number
        }));
        merged.push(at_us, offsets[of] + request.namespace, &blocks);
    }
    merged
}

/// The finalizer of SplitMix64.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn key(namespace: u16, place: u32, id: u128) -> [u32; 3] {
    let (low, high) = (id as u64, (id >> 64) as u64);
    let outer = mix(u64::from(namespace) << 32 | u64::from(place));
    let (one, other) = (mix(low ^ mix(high ^ outer)), mix(low.rotate_left(32) ^ high ^ !outer));
    [one as u32, (one >> 32) as u32, other as u32]
}

/// Numbers the blocks of a trace while it is read.
pub struct Numbering {
    /// By 96 bits of a hash of namespace, position and id. Among [`MAX_DIFFERENT`] blocks two collide once in 10^13
    /// traces, and an entry takes 16 bytes instead of 48.
    numbers: HashMap<[u32; 3], u32>,
    /// Ids name a block alone, without its predecessors.
    is_chaining: bool,
}

impl Numbering {
    pub fn new(is_chaining: bool) -> Numbering {
        Numbering { numbers: HashMap::new(), is_chaining }
    }

    /// Adds a request with its file's ids. Errors with `Invalid` if an id was at another position before.
    pub fn add(&mut self, trace: &mut Trace, at_us: u64, namespace: u16, ids: &[u128]) -> Result<()> {
        if trace.requests.last().is_some_and(|last| last.at_us > at_us) {
            let last = trace.requests.last().expect("just seen").at_us;
            return Err(Error::invalid("a request is earlier than the one before it")
                .with("at_us", at_us)
                .with("before_at_us", last)
                .hint("sort the trace by time"));
        }
        let mut parent = ROOT;
        for id in ids {
            let next = trace.parents.len() as u32;
            let place = if self.is_chaining { parent } else { ROOT };
            let number = match self.numbers.entry(key(namespace, place, *id)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(_) if next as usize == MAX_DIFFERENT => {
                    let error = Error::invalid("the trace asks for more than 64 Mi different blocks");
                    return Err(error.hint("cut it into parts"));
                }
                Entry::Vacant(vacant) => {
                    trace.parents.push(parent);
                    trace.owners.push(namespace);
                    *vacant.insert(next)
                }
            };
            if trace.parents[number as usize] != parent {
                return Err(Error::invalid("a block id follows two different ones").with("id", id).hint(
                    "an id must name a block with all blocks before it; if ids name blocks alone, pass `--chain`",
                ));
            }
            trace.blocks.push(number);
            parent = number;
        }
        trace.requests.push(Header { at_us, namespace, end: trace.blocks.len() });
        Ok(())
    }
}
