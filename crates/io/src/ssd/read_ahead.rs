//! The records of footers while a disk is opened. While some are taken in, another thread decodes the next ones, and
//! those behind them are read.
//!
//! Invariant: a read under way is the only one, so it ends before anything else is read.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Fingerprint, Result};

use super::index::{Hasher, Proof};
use super::io::{Begun, Io};
use super::layout::{FOOTER_BYTES, Footer, Geometry, PAGE, Record};
use super::staging::Staging;
use crate::uring::{Memory, Span, Work};

/// Readings that are being decoded: one is waited for, and the next one is decoded while that is taken in.
const DECODING: usize = 2;

/// A record of a footer.
pub(super) struct Listed {
    pub record: Record,
    pub block: Fingerprint,
    pub proof: Proof,
}

/// The records of a footer. None if they are damaged, or cannot be read.
type Decoded = Option<Vec<Listed>>;

/// See the module documentation.
pub(super) struct ReadAhead {
    geometry: Geometry,
    hasher: Hasher,
    memory: Arc<Memory>,
    depth: usize,
    patience: Duration,
    /// Those that are not read yet, in the order in which they are asked for.
    rest: VecDeque<Footer>,
    reading: Option<Reading>,
    decoding: VecDeque<JoinHandle<Vec<Decoded>>>,
    decoded: VecDeque<Decoded>,
}

/// As many footers as fit into the space of one full footer.
struct Reading {
    begun: Begun,
    footers: Vec<(Footer, Span)>,
}

impl ReadAhead {
    /// `hasher`: of the index. `patience`: how long nothing may be answered.
    pub fn new(
        footers: impl Iterator<Item = Footer>,
        geometry: Geometry,
        hasher: Hasher,
        memory: Arc<Memory>,
        depth: usize,
        patience: Duration,
    ) -> ReadAhead {
        let (rest, decoding, decoded) = (footers.collect(), VecDeque::new(), VecDeque::new());
        ReadAhead { geometry, hasher, memory, depth, patience, rest, reading: None, decoding, decoded }
    }

    /// The records of the next footer.
    pub fn next(&mut self, io: &mut Io) -> Result<Decoded> {
        while self.decoded.is_empty() {
            while self.decoding.len() < DECODING && (self.reading.is_some() || !self.rest.is_empty()) {
                self.begin(io);
                self.pause(io)?;
            }
            self.begin(io);
            let first = self.decoding.pop_front().expect("there are as many footers as calls");
            self.decoded = first.join().expect("records are decoded without a panic").into();
        }
        Ok(self.decoded.pop_front().expect("some were decoded"))
    }

    /// Ends the read under way: the engine is free.
    pub fn pause(&mut self, io: &mut Io) -> Result<()> {
        let Some(Reading { begun, footers }) = self.reading.take() else { return Ok(()) };
        let mut results = io.end_all(begun, self.patience)?.into_iter();
        let mut bytes_of = |span: Span| {
            let is_read = span.len == 0 || results.next().expect("each read has a result").is_ok();
            let mut bytes = vec![0; span.len as usize];
            is_read.then(|| {
                self.memory.read(span, &mut bytes);
                bytes
            })
        };
        let read: Vec<_> = footers.into_iter().map(|(footer, span)| (footer, bytes_of(span))).collect();
        let hasher = self.hasher.clone();
        let decode = move || read.into_iter().map(|(footer, bytes)| decoded(&footer, &bytes?, &hasher)).collect();
        let thread = thread::Builder::new().name("disk-records".to_owned()).spawn(decode);
        let no_thread =
            |error| Error::new(ErrorKind::Unavailable, "cannot start a thread to open a disk").source(error);
        self.decoding.push_back(thread.map_err(no_thread)?);
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

fn decoded(footer: &Footer, bytes: &[u8], hasher: &Hasher) -> Decoded {
    let listed = |record: Record| Listed { block: hasher.block(&record.key), proof: hasher.proof_of(&record), record };
    Some(footer.decode_records(bytes)?.into_iter().map(listed).collect())
}
