//! What each frame of a peer does.
//!
//! Invariants: a peer that is not up gets nothing done. What a peer makes us keep or answer is counted, and too much of
//! it ends the session.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::epoll;

use super::{Books, Cause, Event, Fabric, MOST_UNTAKEN_BYTES, OpId, PeerId, Region, RemoteId, TURN, cannot_watch};
use crate::line::{Arrived, Incoming, Landing, Line, Phase, Queued, Span};
use crate::memory::Memory;
use crate::wire::{Header, Kind, MESSAGE_WINDOW, Refusal, WINDOW, WireSegment, broken, segments_from_wire};

/// Small frames that wait for a peer that asks and does not receive.
const MOST_ANSWERS: usize = 4096;
/// Files that are asked for at once.
const MOST_MAPPING: usize = 32;

impl Fabric {
    /// Receives, sends, and comes back later if there is more.
    pub(super) fn turn(&mut self, id: u64) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.has_more = true;
        }
        for _ in 0..TURN {
            let Some(line) = self.lines.get_mut(&id) else { return };
            if matches!(line.phase, Phase::Connecting(_)) {
                if !line.can_write {
                    line.has_more = false;
                    return;
                }
                if let Err(error) = self.connected(id) {
                    return self.lost(id, error);
                }
                continue;
            }
            let arrived = match line.receive(&mut self.scratch) {
                Ok(Arrived::Nothing) => {
                    line.has_more = false;
                    break;
                }
                Ok(Arrived::Record(bytes)) => self.record(id, &bytes),
                Ok(Arrived::Frame(header, body)) => self.frame(id, header, body),
                Ok(Arrived::Landed(landing)) => self.landed(id, &landing),
                Err(error) => Err(error),
            };
            if let Err(error) = arrived {
                return self.lost(id, error);
            }
        }
        self.prove_channel(id);
        self.flush(id);
        if self.lines.get(&id).is_some_and(Line::is_ready) {
            self.make_line_ready(id);
        }
    }

    /// Sends what waits on this line.
    pub(super) fn flush(&mut self, id: u64) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        if matches!(line.phase, Phase::Connecting(_)) {
            return;
        }
        let books = &self.books;
        if let Err(error) = line.flush(&mut |segments| books.spans(segments, false)) {
            return self.lost(id, error);
        }
        if line.must_watch_otherwise() {
            line.is_room_watched = !line.is_room_watched;
            // Of a socket that has room by now, the kernel tells at once.
            let (socket, data) = (line.socket(), epoll::EventData::new_u64(id));
            if let Err(errno) = epoll::modify(&self.epoll, socket, data, line.events() | epoll::EventFlags::ET) {
                self.lost(id, cannot_watch(errno));
            }
        }
    }

    fn frame(&mut self, id: u64, header: Header, body: Vec<u8>) -> Result<()> {
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        let peer = line.peer.ok_or_else(|| broken("a frame before its session"))?;
        if line.waiting() > MOST_ANSWERS {
            return Err(broken("requests, and takes no answers"));
        }
        let Some(entry) = self.books.peers.get_mut(&peer) else { return Ok(()) };
        if !entry.is_up {
            if header.kind == Kind::Refused && entry.is_ours {
                return Err(Cause::Refused(Refusal::from_wire(header.count).unwrap_or(Refusal::Full)).error());
            }
            let is_first = entry.lines.first() == Some(&Some(id));
            if entry.is_ours && !is_first && matches!(header.kind, Kind::Read | Kind::Write) {
                line.held = Some((header, body));
                return Ok(());
            }
            if header.kind != Kind::Ready || !entry.is_ours || !is_first {
                return Err(broken("a frame before its session"));
            }
            entry.is_up = true;
            self.event(Event::Up { peer });
            return self.take_held(peer);
        }
        let is_move = matches!(header.kind, Kind::Worker | Kind::Pull | Kind::Push | Kind::Land);
        let is_socket = matches!(header.kind, Kind::Read | Kind::Write | Kind::Data);
        let is_file = matches!(header.kind, Kind::Map | Kind::Mapped | Kind::Revoke | Kind::Unmapped);
        if is_move || (entry.is_ucx && (is_socket || is_file)) {
            return match is_move {
                true => self.ucx_frame(id, peer, header, &body),
                false => Err(broken("a frame of another transport")),
            };
        }
        match header.kind {
            Kind::Worker | Kind::Pull | Kind::Push | Kind::Land => unreachable!("handled above"),
            Kind::Ready => Err(broken("a second beginning")),
            Kind::Read => {
                let segments = segments_from_wire(&body, 0)?;
                if line.serving >= WINDOW {
                    return Err(broken("more requests than its window"));
                }
                line.serving += 1;
                line.push(Queued::Serve { op: header.op, segments });
                Ok(())
            }
            Kind::Write => {
                let segments = segments_from_wire(&body, header.payload)?;
                let (spans, refusal) = match self.books.spans(&segments, true) {
                    Ok(spans) => (Some(spans), Refusal::Unknown),
                    Err(refusal) => (None, refusal),
                };
                line.incoming = Incoming::Payload(Landing { header, spans, refusal, done: 0 });
                Ok(())
            }
            Kind::Data => {
                let piece = line.asked.get_mut(&header.op);
                let piece = piece.filter(|piece| !piece.is_write && piece.is_sent);
                let Some(piece) = piece.filter(|piece| piece.bytes == u64::from(header.payload)) else {
                    return Err(broken("data that was not asked for"));
                };
                let spans = piece.spans.take();
                line.incoming = Incoming::Payload(Landing { header, spans, refusal: Refusal::Unknown, done: 0 });
                Ok(())
            }
            Kind::Written | Kind::Refused => {
                let is_right = line
                    .asked
                    .get(&header.op)
                    .is_some_and(|piece| piece.is_sent && (piece.is_write || header.kind == Kind::Refused));
                if !is_right || line.is_sending(header.op) {
                    return Err(broken("an answer without a question"));
                }
                let refusal = Refusal::from_wire(header.count);
                if line.is_ucx {
                    return self.ucx_answered(id, peer, header.op, refusal);
                }
                self.answered(id, header.op, refusal);
                Ok(())
            }
            Kind::Message => {
                if entry.untaken >= MESSAGE_WINDOW {
                    return Err(broken("more messages than its window"));
                }
                entry.untaken += 1;
                entry.lengths.push_back(body.len());
                self.books.untaken_bytes += body.len();
                self.event(match header.count {
                    0 => Event::Message { peer, bytes: body },
                    _ => Event::Notice { peer, bytes: body },
                });
                self.limit_messages();
                Ok(())
            }
            Kind::Taken => {
                let left = entry.unacknowledged.checked_sub(usize::from(header.count));
                entry.unacknowledged = left.ok_or_else(|| broken("an answer without a question"))?;
                self.books.send_messages(&mut self.lines, peer);
                self.make_ready(peer);
                Ok(())
            }
            Kind::Map => self.map(id, peer, header.op),
            Kind::Mapped => self.mapped(id, peer, header.op),
            Kind::Revoke => {
                self.revoked(peer, header.op);
                self.books.push_frame(&mut self.lines, peer, Kind::Unmapped, 0, header.op);
                self.make_ready(peer);
                Ok(())
            }
            Kind::Unmapped => {
                // The answer to `Map` if there is no file to map; to `Revoke` otherwise.
                match entry.mapping.remove(&header.op) {
                    Some(_) => self.books.ask_for_files(&mut self.lines, peer),
                    None => self.unmapped(header.op, peer),
                }
                self.make_ready(peer);
                Ok(())
            }
        }
    }

    /// Does what was asked on other connections before the session was up.
    fn take_held(&mut self, peer: PeerId) -> Result<()> {
        let lines = self.books.peers.get(&peer).map(|entry| entry.lines.clone()).unwrap_or_default();
        for id in lines.into_iter().flatten() {
            if let Some((header, body)) = self.lines.get_mut(&id).and_then(|line| line.held.take()) {
                self.make_line_ready(id);
                self.frame(id, header, body)?;
            }
        }
        Ok(())
    }

    /// Ends the session of which most is not taken, if all together have too much.
    fn limit_messages(&mut self) {
        if self.books.untaken_bytes > MOST_UNTAKEN_BYTES
            && let Some((peer, _)) = self.books.peers.iter().max_by_key(|(_, peer)| peer.lengths.iter().sum::<usize>())
        {
            let error = Error::new(ErrorKind::Full, "messages that this program does not take have too many bytes");
            let error = error.with("most", MOST_UNTAKEN_BYTES).hint("receive the messages of each peer");
            self.gone(*peer, error);
        }
    }

    fn landed(&mut self, id: u64, landing: &Landing) -> Result<()> {
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        match (landing.header.kind, &landing.spans) {
            (Kind::Data, _) => self.answered(id, landing.header.op, None),
            (_, Some(_)) => line.push_frame(Kind::Written, 0, landing.header.op),
            (_, None) => line.push_frame(Kind::Refused, landing.refusal as u16, landing.header.op),
        }
        Ok(())
    }

    /// The end of a piece, and room for another.
    pub(super) fn answered(&mut self, id: u64, number: u64, refusal: Option<Refusal>) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        let Some(piece) = line.asked.remove(&number) else { return };
        line.asked_bytes -= piece.bytes;
        let peer = line.peer;
        self.piece_ended(piece.op, refusal);
        if let Some(peer) = peer {
            self.pump(peer);
        }
    }

    fn map(&mut self, id: u64, peer: PeerId, name: u64) -> Result<()> {
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        if !line.is_shm {
            return Err(broken("a request for a file, over a network"));
        }
        if line.files() >= MOST_MAPPING {
            return Err(broken("requests for files, and takes none"));
        }
        let region = self.books.names.get(&name).copied();
        let exported = region.and_then(|region| self.books.regions.get(&region));
        let exported = exported.filter(|region| region.rights.read || region.rights.write);
        let file = exported.and_then(|region| self.books.file_of(region));
        match region.and_then(|region| self.books.regions.get_mut(&region)).zip(file) {
            Some((region, file)) => {
                region.mapped_by.insert(peer);
                line.push(Queued::File { name, file });
            }
            None => line.push_frame(Kind::Unmapped, 0, name),
        }
        Ok(())
    }

    fn mapped(&mut self, id: u64, peer: PeerId, name: u64) -> Result<()> {
        let file = self.lines.get_mut(&id).and_then(Line::take_right);
        let entry = self.books.peers.get_mut(&peer);
        let waiting = entry.and_then(|entry| Some((entry.mapping.remove(&name)?, &mut entry.maps)));
        let (Some((waiting, maps)), Some(file)) = (waiting, file) else {
            return Err(broken("a file that was not asked for"));
        };
        for remote in waiting {
            let Some(remote) = self.books.remotes.get_mut(&remote) else { continue };
            let descriptor = remote.descriptor;
            remote.mapping = maps.get(&descriptor.map()).and_then(Weak::upgrade).or_else(|| {
                // If it cannot be mapped, bytes go through the socket.
                let mapping = Arc::new(Memory::of_peer(&file, descriptor.bytes, descriptor.rights.write).ok()?);
                maps.insert(descriptor.map(), Arc::downgrade(&mapping));
                Some(mapping)
            });
        }
        self.books.ask_for_files(&mut self.lines, peer);
        Ok(())
    }

    /// Unmaps a region that the peer has deregistered.
    fn revoked(&mut self, peer: PeerId, name: u64) {
        let is_it = |remote: &super::Remote| remote.peer == peer && remote.descriptor.name == name;
        let remotes = self.books.remotes.iter().filter(|(_, remote)| is_it(remote));
        let remotes: Vec<RemoteId> = remotes.map(|(id, _)| *id).collect();
        let uses = |op: &super::Op| {
            op.is_copied && op.operation.segments.iter().any(|segment| remotes.contains(&segment.remote))
        };
        let ops: Vec<OpId> = self.books.ops.iter().filter(|(_, op)| uses(op)).map(|(id, _)| *id).collect();
        for op in ops {
            self.abandon(op, &Cause::Refused(Refusal::Unknown));
        }
        for remote in remotes {
            self.books.remotes.get_mut(&remote).expect("listed above").mapping = None;
        }
        if let Some(entry) = self.books.peers.get_mut(&peer) {
            entry.maps.retain(|map, _| map.0 != name);
        }
    }
}

impl Books {
    /// Where a peer's segments are, if it may do this with them.
    pub(super) fn spans(&self, segments: &[WireSegment], is_write: bool) -> Result<Vec<Span>, Refusal> {
        let span = |segment: &WireSegment| {
            let id = self.names.get(&segment.name).ok_or(Refusal::Unknown)?;
            let region: &Region = self.regions.get(id).ok_or(Refusal::Unknown)?;
            let may = if is_write { region.rights.write } else { region.rights.read };
            if !may {
                return Err(Refusal::Forbidden);
            }
            let end = segment.offset.checked_add(segment.bytes);
            if end.is_none_or(|end| end > region.bytes) {
                return Err(Refusal::Outside);
            }
            let offset = region.start + segment.offset;
            Ok(Span { memory: region.memory.clone(), region: *id, offset, bytes: segment.bytes })
        };
        segments.iter().map(span).collect()
    }

    /// Sends the messages for which the peer has room.
    pub(super) fn send_messages(&mut self, lines: &mut HashMap<u64, Line>, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        let Some(line) = entry.lines.first().copied().flatten().and_then(|line| lines.get_mut(&line)) else { return };
        while entry.unacknowledged < MESSAGE_WINDOW
            && let Some((is_notice, body)) = entry.outbox.pop_front()
        {
            entry.unacknowledged += 1;
            let (count, bytes) = (u16::from(is_notice), body.len() as u32);
            let header = Header { kind: Kind::Message, count, body: bytes, payload: 0, op: 0 };
            line.push(Queued::Frame { header, body });
        }
    }

    /// Asks for the files of imported regions, some at a time.
    pub(super) fn ask_for_files(&mut self, lines: &mut HashMap<u64, Line>, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        let Some(line) = entry.lines.first().copied().flatten().and_then(|line| lines.get_mut(&line)) else { return };
        while entry.mapping.len() < MOST_MAPPING
            && let Some(id) = entry.to_map.pop_front()
        {
            let Some(remote) = self.remotes.get(&id) else { continue };
            let name = remote.descriptor.name;
            let waiting = entry.mapping.entry(name).or_default();
            if waiting.is_empty() {
                line.push_frame(Kind::Map, 0, name);
            }
            waiting.push(id);
        }
    }
}
