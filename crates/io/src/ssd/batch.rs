//! A batch is written together: a page of headers, then the payloads in runs.

use std::ops::Range;

use forebay_core::tier::{OpId, OpKind, Operation};
use forebay_core::{BlockKey, ErrorKind};

use super::layout::{PAGE, Record, RecordKind};
use crate::uring::{MOST_SPANS, Span};

/// Adjacent payloads are written together up to this size. The CPU cost of a transfer does not depend on its length,
/// and a disk moves long ones faster.
const RUN_PAGES: u32 = 128;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Its payloads are copied from elsewhere on the disk; its head is written when they are in place.
    Filling,
    Writing,
    Written,
    Syncing,
    /// The flush has ended, like this.
    Flushed(Option<ErrorKind>),
}

#[derive(Debug)]
pub(super) struct Item {
    pub record: Record,
    /// The operation that waits for it.
    pub op: Option<OpId>,
    pub error: Option<ErrorKind>,
    /// The sequence of the record of which it is a copy.
    pub moved_from: Option<u64>,
}

/// The payloads of one transfer: those of these items.
pub(super) struct Run {
    pub items: Range<usize>,
    pub spans: Vec<Span>,
    pages: u32,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub segment: u32,
    pub page: u32,
    pub next_page: u32,
    /// The staging page from which its head is written.
    pub head: u32,
    pub stage: Stage,
    pub items: Vec<Item>,
    /// Transfers that have not ended.
    pub outstanding: usize,
}

impl Batch {
    /// Stores in it, and the bytes of their slots. Copies have none.
    pub fn stores(&self) -> (usize, u64) {
        let stores = self.items.iter().filter(|item| item.op.is_some());
        let pages = stores.map(|item| item.record.payload_pages()).filter(|pages| *pages > 0);
        pages.fold((0, 0), |(count, bytes), pages| (count + 1, bytes + u64::from(pages) * PAGE))
    }
}

impl Run {
    pub fn at(item: usize) -> Run {
        Run { items: item..item, spans: Vec::new(), pages: 0 }
    }

    pub fn has_room(&self, pages: u32) -> bool {
        self.pages + pages <= RUN_PAGES && self.spans.len() < MOST_SPANS
    }

    pub fn add(&mut self, item: usize, span: Span, pages: u32) {
        self.items.end = item + 1;
        self.spans.push(span);
        self.pages += pages;
    }
}

impl Item {
    pub fn new(kind: RecordKind, key: BlockKey, length_bytes: u64, checksum: u64, op: Option<OpId>) -> Item {
        let record = Record { kind, key, sequence: 0, first_page: 0, length_bytes, checksum };
        Item { record, op, error: None, moved_from: None }
    }

    pub fn of(op: &Operation) -> Item {
        match op.kind {
            OpKind::Store => Item::new(RecordKind::Block, op.key, op.length_bytes, op.checksum, Some(op.id)),
            _ => Item::new(RecordKind::Removed, op.key, 0, 0, Some(op.id)),
        }
    }

    /// A copy of a block on the disk.
    pub fn copy(record: &Record) -> Item {
        let Record { key, length_bytes, checksum, sequence, .. } = *record;
        let item = Item::new(RecordKind::Block, key, length_bytes, checksum, None);
        Item { moved_from: Some(sequence), ..item }
    }
}
