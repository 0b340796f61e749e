//! The records of footers while a disk is opened: the next ones are read while the last ones are taken in.
//!
//! Invariant: a read under way is the only one, so it ends before anything else is read.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;

use super::io::{Begun, Io};
use super::layout::{FOOTER_BYTES, Footer, Geometry, PAGE, Record};
use super::staging::Staging;
use crate::uring::{Memory, Span, Work};

/// See the module documentation.
pub(super) struct ReadAhead {
    geometry: Geometry,
    memory: Arc<Memory>,
    depth: usize,
    patience: Duration,
    /// Those that are not read yet, in the order in which they are asked for.
    rest: VecDeque<Footer>,
    reading: Option<Reading>,
    /// Each footer, and its records as they lie on the disk; none where they could not be read.
    read: VecDeque<(Footer, Option<Vec<u8>>)>,
}

/// As many footers as fit into the space of one full footer.
struct Reading {
    begun: Begun,
    footers: Vec<(Footer, Span)>,
}

impl ReadAhead {
    /// `patience`: how long nothing may be answered.
    pub fn new(
        footers: impl Iterator<Item = Footer>,
        geometry: Geometry,
        memory: Arc<Memory>,
        depth: usize,
        patience: Duration,
    ) -> ReadAhead {
        ReadAhead { rest: footers.collect(), geometry, memory, depth, patience, reading: None, read: VecDeque::new() }
    }

    /// The records of the next footer, each with its seal. None if they cannot be read.
    pub fn next(&mut self, io: &mut Io) -> Result<Option<Vec<(Record, u64)>>> {
        if self.read.is_empty() {
            self.begin(io);
            self.pause(io)?;
            self.begin(io);
        }
        let (footer, bytes) = self.read.pop_front().expect("there are as many footers as calls");
        Ok(bytes.and_then(|bytes| footer.decode_records(&bytes)))
    }

    /// Ends the read under way: the engine is free.
    pub fn pause(&mut self, io: &mut Io) -> Result<()> {
        let Some(Reading { begun, footers }) = self.reading.take() else { return Ok(()) };
        let mut results = io.end_all(begun, self.patience)?.into_iter();
        for (footer, span) in footers {
            let mut bytes = vec![0; span.len as usize];
            let is_read = span.len == 0 || results.next().expect("each read has a result").is_ok();
            if is_read {
                self.memory.read(span, &mut bytes);
            }
            self.read.push_back((footer, is_read.then_some(bytes)));
        }
        Ok(())
    }

    /// Begins to read the next footers, unless some are being read.
    fn begin(&mut self, io: &mut Io) {
        if self.reading.is_some() {
            return;
        }
        let (mut end, mut work, mut footers) = (0, Vec::new(), Vec::new());
        while let Some(footer) = self.rest.front() {
            let pages = Footer::record_pages(footer.count);
            let span = Staging::footer(end, pages * PAGE as u32);
            end += span.len;
            if u64::from(end) > FOOTER_BYTES {
                break;
            }
            if pages > 0 {
                let at = self.geometry.at(footer.index, self.geometry.pages() - 1 - pages);
                work.push(Work::Read { at, span, checksum: None });
            }
            footers.extend(self.rest.pop_front().map(|footer| (footer, span)));
        }
        if !footers.is_empty() {
            self.reading = Some(Reading { begun: io.begin_all(&work, self.depth), footers });
        }
    }
}
