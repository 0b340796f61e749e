//! The data that a connection has yet to send: commands in a buffer, payloads in the pool.
//!
//! Invariant: bytes leave in the order in which they were pushed. The buffer keeps its memory, so a command in the
//! steady state allocates nothing.

use std::collections::VecDeque;
use std::io;

use super::transport::Transport;
use crate::uring::{MOST_PIECES, Piece, Region};

/// Sent bytes are dropped from the buffer when there are this many.
const COMPACT_BYTES: usize = 64 << 10;

#[derive(Default)]
pub(super) struct SendBuffer {
    /// Bytes of the `Own` pieces in order; the first `sent` of them are sent.
    bytes: Vec<u8>,
    sent: usize,
    pieces: VecDeque<Waiting>,
}

#[derive(Clone, Copy)]
enum Waiting {
    Own { len: usize },
    Pool { offset: u64, len: usize },
}

impl SendBuffer {
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Lets `write` append to the buffer.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.bytes.len();
        write(&mut self.bytes);
        let more = self.bytes.len() - before;
        match self.pieces.back_mut() {
            Some(Waiting::Own { len }) => *len += more,
            _ if more == 0 => {}
            _ => self.pieces.push_back(Waiting::Own { len: more }),
        }
    }

    pub fn push_pool(&mut self, offset: u64, len: usize) {
        if len > 0 {
            self.pieces.push_back(Waiting::Pool { offset, len });
        }
    }

    /// Sends until everything is sent or the socket accepts no more.
    pub fn send(&mut self, transport: &mut Transport, pool: &Region) -> io::Result<()> {
        while !self.pieces.is_empty() {
            let mut pieces = [Piece::Bytes(&[]); MOST_PIECES];
            let (mut at, count) = (self.sent, self.pieces.len().min(MOST_PIECES));
            for (piece, waiting) in pieces.iter_mut().zip(&self.pieces) {
                *piece = match *waiting {
                    Waiting::Own { len } => {
                        at += len;
                        Piece::Bytes(&self.bytes[at - len..at])
                    }
                    Waiting::Pool { offset, len } => Piece::Pool { offset, len },
                };
            }
            match transport.send(pool, &pieces[..count]) {
                Ok(count) => self.advance(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn advance(&mut self, mut count: usize) {
        while count > 0 {
            let piece = self.pieces.front_mut().expect("no more is sent than was given");
            let (own, len) = match piece {
                Waiting::Own { len } => (true, len),
                Waiting::Pool { offset, len } => {
                    *offset += count.min(*len) as u64;
                    (false, len)
                }
            };
            let some = count.min(*len);
            *len -= some;
            count -= some;
            self.sent += if own { some } else { 0 };
            if *len == 0 {
                self.pieces.pop_front();
            }
        }
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.sent = 0;
        } else if self.sent > COMPACT_BYTES {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }
}
