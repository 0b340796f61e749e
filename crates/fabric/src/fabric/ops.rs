//! Operations: checked, cut into pieces, given to connections, or copied here; and their one end.
//!
//! Invariants: an operation leaves `ops` in `end` alone, with one `Done`. One that is abandoned ends at once, because
//! nothing touches its memory any more: lines drop what comes for it, and send what they began from a copy.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use forebay_core::{Error, ErrorKind, Result};

use super::timers::Timer;
use super::{
    Books, Cause, Event, Fabric, MOST_NOTICES, MOST_OP_SEGMENTS, MOST_OPS, Op, OpId, Operation, PeerId, Segment, Verb,
    check_message, takes_none,
};
use crate::line::{Line, Moving, Piece, Queued, Span};
use crate::memory::Memory;
use crate::wire::{MOST_SEGMENTS, PIECE_BYTES, Refusal, WINDOW, WireSegment};

/// Asked of a peer on one connection before another piece is, so that a later operation waits for little more. With
/// 4 MiB the sockets of four connections held more than the cache, at 1.1 to 1.3 times the CPU time of one plain
/// socket; with 1 MiB it is 0.8 to 1.0. At a round trip of 1 ms it limits four connections to 4 GB/s.
const LINE_BYTES: u64 = 1 << 20;
/// As `LINE_BYTES`, of a session over UCX, which has one connection, and whose landing places are posted before.
const UCX_BYTES: u64 = 4 << 20;
/// Copied in one turn.
const COPY_BYTES: u64 = 4 << 20;

impl Fabric {
    /// Begins an operation, whose end `poll` reports. Errors with `Invalid` if it cannot be right, with `Full` if too
    /// many are under way, and then nothing happens.
    pub fn submit(&mut self, operation: Operation) -> Result<OpId> {
        let is_copied = self.books.check(&operation)?;
        if self.books.ops.len() >= MOST_OPS {
            let error = Error::new(ErrorKind::Full, "too many operations").with("operations", MOST_OPS);
            return Err(error.hint("wait for some of them to end"));
        }
        let id = OpId(self.draw_id());
        let peer = operation.peer;
        if let Some(deadline) = operation.deadline {
            self.set_timer(deadline, Timer::Op(id));
        }
        if operation.notice.is_some() {
            self.books.peer_mut(peer)?.noticing += 1;
        }
        self.books.ops.insert(id, Op { operation, next: (0, 0), pieces: 0, fault: None, is_copied });
        if is_copied {
            self.books.copies.push_back(id);
        } else {
            self.books.peer_mut(peer)?.queue.push_back(id);
            self.pump(peer);
            self.go_on(peer);
        }
        self.leave();
        Ok(id)
    }

    /// Ends an operation now, if it has not ended: its `Done` is the next thing that `poll` says of it. A peer's memory
    /// may still change by a write that was given up, until the peer is gone.
    pub fn give_up(&mut self, op: OpId) {
        self.abandon(op, &Cause::GivenUp);
        self.leave();
    }

    pub(super) fn abandon(&mut self, id: OpId, cause: &Cause) {
        self.abandon_all(&[id], cause);
    }

    /// Ends all of them for one cause. Where UCX may touch their memory, their sessions end with them.
    pub(super) fn abandon_all(&mut self, ids: &[OpId], cause: &Cause) {
        let mut moving: Vec<(PeerId, OpId)> = Vec::new();
        for id in ids {
            let Some(op) = self.books.ops.get(id) else { continue };
            let peer = op.operation.peer;
            match op.pieces > 0 && self.books.peers.get(&peer).is_some_and(|peer| peer.is_ucx) {
                true => moving.push((peer, *id)),
                false => self.abandon_one(*id, cause),
            }
        }
        while let Some((peer, _)) = moving.first().copied() {
            let its: Vec<OpId> = moving.iter().filter(|(it, _)| *it == peer).map(|(_, id)| *id).collect();
            moving.retain(|(it, _)| *it != peer);
            self.abandon_with_session(peer, &its, cause);
        }
    }

    fn abandon_one(&mut self, id: OpId, cause: &Cause) {
        let Some(op) = self.books.ops.get(&id) else { return };
        if op.is_copied {
            self.books.copies.retain(|copy| *copy != id);
        } else if let Some(peer) = self.books.peers.get_mut(&op.operation.peer) {
            peer.queue.retain(|queued| *queued != id);
            for line in peer.lines.iter().flatten() {
                if let Some(line) = self.lines.get_mut(line) {
                    line.forget_op(id);
                }
            }
        }
        self.end(id, Err(cause.error()));
    }

    pub(super) fn end(&mut self, id: OpId, result: Result<()>) {
        let Some(op) = self.books.ops.remove(&id) else { return };
        if let Some(deadline) = op.operation.deadline {
            self.books.timers.remove(&(deadline, Timer::Op(id)));
        }
        let peer = op.operation.peer;
        if let Some(notice) = op.operation.notice
            && let Some(entry) = self.books.peers.get_mut(&peer)
        {
            entry.noticing -= 1;
            if result.is_ok() {
                entry.outbox.push_back((true, notice));
                self.books.send_messages(&mut self.lines, peer);
                self.make_ready(peer);
            }
        }
        self.event(Event::Done { op: id, result });
    }

    /// The end of a piece on a connection.
    pub(super) fn piece_ended(&mut self, id: OpId, refusal: Option<Refusal>) {
        let Some(op) = self.books.ops.get_mut(&id) else { return };
        op.pieces -= 1;
        op.fault = op.fault.or(refusal);
        let is_cut = op.next.0 == op.operation.segments.len();
        if op.pieces > 0 || !(is_cut || op.fault.is_some()) {
            return;
        }
        let result = op.fault.map_or(Ok(()), |refusal| Err(Cause::Refused(refusal).error()));
        if !is_cut && let Some(peer) = self.books.peers.get_mut(&op.operation.peer) {
            peer.queue.retain(|queued| *queued != id);
        }
        self.end(id, result);
    }

    /// Gives pieces to the connections that have room, those of different operations in turn.
    pub(super) fn pump(&mut self, peer: PeerId) {
        let Some(entry) = self.books.peers.get_mut(&peer) else { return };
        if entry.queue.is_empty() {
            return;
        }
        let lines = entry.lines.clone();
        let (is_ucx, most) = if entry.is_ucx { (true, UCX_BYTES) } else { (false, LINE_BYTES) };
        loop {
            // With TLS the proof of one may come after the word, on another, that the session is up.
            let has_room = |line: &&Line| line.is_open() && line.asked.len() < WINDOW && line.asked_bytes < most;
            let open = lines.iter().flatten().filter_map(|id| Some((*id, self.lines.get(id)?)));
            let best = open.filter(|(_, line)| has_room(line)).min_by_key(|(_, line)| line.asked_bytes);
            let Some(line) = best.map(|(id, _)| id) else { return };
            let Some(entry) = self.books.peers.get_mut(&peer) else { return };
            let Some(id) = entry.queue.pop_front() else { return };
            let op = self.books.ops.get_mut(&id).expect("an operation in a queue has not ended");
            if op.fault.is_some() {
                // Its last piece ends it.
                continue;
            }
            let piece = cut(id, op, &self.books.regions, &self.books.remotes);
            let Some(mut piece) = piece else { continue };
            op.pieces += 1;
            if op.next.0 < op.operation.segments.len() {
                entry.queue.push_back(id);
            }
            let number = self.draw_id();
            if is_ucx
                && !piece.is_write
                && let Err(error) = self.post(peer, number, &mut piece)
            {
                return self.gone(peer, error);
            }
            let target = self.lines.get_mut(&line).expect("found above");
            target.asked_bytes += piece.bytes;
            match target.asked.entry(number) {
                Entry::Vacant(place) => drop(place.insert(piece)),
                Entry::Occupied(_) => unreachable!("numbers are never given twice"),
            }
            target.push(Queued::Request(number));
            self.make_line_ready(line);
        }
    }

    /// Sends at once, on the thread that submits.
    pub(super) fn go_on(&mut self, peer: PeerId) {
        let Some(entry) = self.books.peers.get(&peer) else { return };
        for line in entry.lines.clone().into_iter().flatten() {
            self.flush(line);
            if !self.lines.get(&line).is_some_and(Line::is_ready) {
                self.ready.retain(|ready| *ready != line);
            }
        }
    }

    /// Copies between this process's memory and peers' memory that it maps, each operation in turn. True if it used up
    /// its share.
    pub(super) fn copy_some(&mut self) -> bool {
        let mut left = COPY_BYTES;
        while left > 0 {
            let Some(id) = self.books.copies.pop_front() else { return false };
            let op = self.books.ops.get_mut(&id).expect("an operation in the list has not ended");
            left = left.saturating_sub(copy(op, &self.books.regions, &self.books.remotes));
            if op.next.0 < op.operation.segments.len() {
                self.books.copies.push_back(id);
            } else {
                self.end(id, Ok(()));
            }
        }
        true
    }
}

type Regions = std::collections::HashMap<super::RegionId, super::Region>;
type Remotes = std::collections::HashMap<super::RemoteId, super::Remote>;

/// The next piece of an operation.
fn cut(id: OpId, op: &mut Op, regions: &Regions, remotes: &Remotes) -> Option<Piece> {
    let (mut spans, mut wire, mut bytes) = (Vec::new(), Vec::new(), 0);
    while bytes < PIECE_BYTES && wire.len() < MOST_SEGMENTS {
        let Some((segment, now)) = advance(op, PIECE_BYTES - bytes) else { break };
        let region = regions.get(&segment.local).expect("operations on a region end with it");
        let offset = region.start + segment.local_offset;
        spans.push(Span { memory: region.memory.clone(), region: segment.local, offset, bytes: now });
        let name = remotes.get(&segment.remote).expect("operations on a remote end with it").descriptor.name;
        wire.push(WireSegment { name, offset: segment.remote_offset, bytes: now });
        bytes += now;
    }
    let is_write = op.operation.verb == Verb::Write;
    (bytes > 0).then_some(Piece {
        op: id,
        is_write,
        spans: Some(spans),
        wire,
        bytes,
        is_sent: false,
        ucx: Moving::default(),
    })
}

/// Copies at most one piece. Returns its bytes.
fn copy(op: &mut Op, regions: &Regions, remotes: &Remotes) -> u64 {
    let mut bytes = 0;
    while bytes < PIECE_BYTES {
        let Some((segment, now)) = advance(op, PIECE_BYTES - bytes) else { break };
        let region = regions.get(&segment.local).expect("operations on a region end with it");
        let remote = remotes.get(&segment.remote).and_then(|remote| remote.mapping.as_ref());
        let remote: &Arc<Memory> = remote.expect("operations on a mapping end with it");
        let here = (&*region.memory, region.start + segment.local_offset);
        let there = (&**remote, segment.remote_offset);
        match op.operation.verb {
            Verb::Read => Memory::copy(there, here, now),
            Verb::Write => Memory::copy(here, there, now),
        }
        bytes += now;
    }
    bytes
}

/// The next range of at most `most` bytes, with its offsets, and its length.
fn advance(op: &mut Op, most: u64) -> Option<(Segment, u64)> {
    let (at, done) = op.next;
    let segment = op.operation.segments.get(at)?;
    let now = most.min(segment.bytes - done);
    op.next = if done + now == segment.bytes { (at + 1, 0) } else { (at, done + now) };
    let (local_offset, remote_offset) = (segment.local_offset + done, segment.remote_offset + done);
    Some((Segment { local_offset, remote_offset, ..*segment }, now))
}

impl Books {
    /// Whether this process can copy all of it. Errors if the operation cannot be right.
    fn check(&self, operation: &Operation) -> Result<bool> {
        let Some(peer) = self.peers.get(&operation.peer).filter(|peer| peer.is_up) else {
            let error = Error::new(ErrorKind::Unavailable, "the peer is not connected");
            return Err(error.hint("wait until it is up, or connect again"));
        };
        if operation.segments.is_empty() || operation.segments.len() > MOST_OP_SEGMENTS {
            let error = Error::invalid("a wrong number of segments").with("segments", operation.segments.len());
            return Err(error.hint(format!("1 to {MOST_OP_SEGMENTS}")));
        }
        check_message(operation.notice.as_deref().unwrap_or_default())?;
        let waiting = peer.noticing + peer.outbox.len();
        if operation.notice.is_some() && waiting >= MOST_NOTICES {
            return Err(takes_none(waiting));
        }
        let mut is_copied = true;
        for (at, segment) in operation.segments.iter().enumerate() {
            is_copied &= self.check_segment(operation, segment).map_err(|error| error.with("segment", at))?;
        }
        Ok(is_copied)
    }

    fn check_segment(&self, operation: &Operation, segment: &Segment) -> Result<bool> {
        let region = self.region(segment.local)?;
        let remote = self.remotes.get(&segment.remote).filter(|remote| remote.peer == operation.peer);
        let remote = remote.ok_or_else(|| {
            let error = Error::invalid("the remote memory was not imported from this peer, or was closed");
            error.hint("import its descriptor for the connection that is used")
        })?;
        let ends = [
            (segment.local_offset.checked_add(segment.bytes), region.bytes),
            (segment.remote_offset.checked_add(segment.bytes), remote.descriptor.bytes),
        ];
        let is_inside = ends.into_iter().all(|(end, bytes)| end.is_some_and(|end| end <= bytes));
        if !is_inside || segment.bytes == 0 {
            let error = Error::invalid("a segment of no bytes, or outside of the memory");
            let error = error.with("bytes", segment.bytes).with("local_bytes", region.bytes);
            let error = error.with("remote_bytes", remote.descriptor.bytes);
            return Err(error.hint("offset and bytes of a segment must lie within the memory of both sides"));
        }
        let rights = remote.descriptor.rights;
        let may = match operation.verb {
            Verb::Read => rights.read && region.memory.may_write(),
            Verb::Write => rights.write,
        };
        if !may {
            let error = Error::invalid("the memory was not exported for this, or cannot be changed");
            return Err(error.hint("export it with the right to write, or read into memory that can be changed"));
        }
        Ok(remote.mapping.is_some())
    }
}
