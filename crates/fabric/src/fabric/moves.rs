//! Sessions whose bytes go through UCX: landing places, messages, and how such a session ends.
//!
//! Invariants: a message is sent only after name, range and rights were compared, and only to a tag that the peer has
//! told in a frame. An operation that ends while UCX may touch its memory ends its session; its `Done`, and then
//! `Gone`, come when the session's worker has been destroyed, after which nothing touches the memory.

use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};

use super::timers::Timer;
use super::{Cause, Fabric, OpId, PeerId, RegionId, fill_random};
use crate::line::{Line, Piece};
use crate::ucx::{Context, Failure, Job, Worker};
use crate::wire::{Header, Kind, Refusal, WINDOW, broken, segments_from_wire, split_tag};

/// Messages under way for a peer's requests. More than its window: that a message has left is known a moment after
/// the peer has it and asks again.
const MOST_SERVING: usize = 4 * WINDOW;
/// Until a session ends whose peer neither takes nor sends the bytes of memory that is deregistered.
const HELD: Duration = Duration::from_secs(1);

impl Fabric {
    /// libucp, opened at the first address of UCX.
    pub(super) fn need_ucx(&mut self) -> Result<()> {
        if self.ucx.is_none() {
            self.ucx = Some(Context::open(self.options.ucx_library.as_deref())?);
        }
        Ok(())
    }

    /// Makes this side's worker for a session, and tells the peer its address.
    pub(super) fn begin_worker(&mut self, peer: PeerId) -> Result<()> {
        self.need_ucx()?;
        let worker = Worker::new(self.ucx.as_ref().expect("opened above"))?;
        let id = self.draw_id();
        self.watch_level(worker.event(), id)?;
        self.workers.insert(id, peer);
        let body = worker.address().to_vec();
        let header = Header { kind: Kind::Worker, count: 0, body: body.len() as u32, payload: 0, op: 0 };
        let Some(line) = self.books.first_line(&mut self.lines, peer) else { return Ok(()) };
        line.push(crate::line::Queued::Frame { header, body });
        self.make_ready(peer);
        self.books.peer_mut(peer)?.worker = Some(worker);
        Ok(())
    }

    /// A frame that only sessions over UCX have.
    pub(super) fn ucx_frame(&mut self, id: u64, peer: PeerId, header: Header, body: &[u8]) -> Result<()> {
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        let entry = self.books.peers.get_mut(&peer);
        let Some(worker) = entry.and_then(|entry| entry.worker.as_mut()) else {
            return Err(broken("a frame of another transport"));
        };
        if worker.is_connected() == (header.kind == Kind::Worker) {
            return Err(broken("a worker's address too early, too late or twice"));
        }
        if matches!(header.kind, Kind::Pull | Kind::Push) && line.serving >= MOST_SERVING {
            return Err(broken("more requests than its window"));
        }
        match header.kind {
            Kind::Worker => worker.connect(body)?,
            Kind::Pull => {
                let (tag, list) = split_tag(body);
                match self.books.spans(&segments_from_wire(list, 0)?, false) {
                    Ok(spans) => {
                        line.serving += 1;
                        self.books.worker(peer)?.send(Job::Serve, spans, tag)?;
                    }
                    Err(refusal) => line.push_frame(Kind::Refused, refusal as u16, header.op),
                }
            }
            Kind::Push => match self.books.spans(&segments_from_wire(body, 0)?, true) {
                Ok(spans) => {
                    line.serving += 1;
                    let tag = draw_tag()?;
                    let body = tag.to_le_bytes().to_vec();
                    let land =
                        Header { kind: Kind::Land, count: 0, body: body.len() as u32, payload: 0, op: header.op };
                    line.push(crate::line::Queued::Frame { header: land, body });
                    self.books.worker(peer)?.receive(Job::Land { number: header.op }, spans, tag)?;
                }
                Err(refusal) => line.push_frame(Kind::Refused, refusal as u16, header.op),
            },
            _ => {
                let piece = line.asked.get_mut(&header.op);
                let piece = piece.filter(|piece| piece.is_write && piece.is_sent && !piece.ucx.is_landing);
                let Some(piece) = piece else { return Err(broken("an answer without a question")) };
                piece.ucx.is_landing = true;
                let spans = piece.spans.clone().unwrap_or_default();
                worker.send(Job::Write { number: header.op }, spans, split_tag(body).0)?;
            }
        }
        self.make_worker_ready(peer);
        Ok(())
    }

    /// Posts the landing place of a read.
    pub(super) fn post(&mut self, peer: PeerId, number: u64, piece: &mut Piece) -> Result<()> {
        piece.ucx.tag = draw_tag()?;
        let spans = piece.spans.clone().unwrap_or_default();
        self.books.worker(peer)?.receive(Job::Read { number }, spans, piece.ucx.tag)
    }

    /// The peer's answer to a piece: its end, if UCX has ended it too.
    pub(super) fn ucx_answered(&mut self, id: u64, peer: PeerId, number: u64, refusal: Option<Refusal>) -> Result<()> {
        let Some(piece) = self.lines.get_mut(&id).and_then(|line| line.asked.get_mut(&number)) else { return Ok(()) };
        let is_twice = piece.ucx.answer.replace(refusal).is_some();
        // A write that was refused has no landing place, and one that was not has one.
        if is_twice || (piece.is_write && piece.ucx.is_landing == refusal.is_some()) {
            return Err(broken("an answer without a question"));
        }
        match piece.is_write {
            true if refusal.is_none() && !piece.ucx.is_moved => {}
            true => self.answered(id, number, refusal),
            false => {
                self.books.worker(peer)?.cancel(Job::Read { number });
                self.make_worker_ready(peer);
            }
        }
        Ok(())
    }

    pub(super) fn make_worker_ready(&mut self, peer: PeerId) {
        if !self.moving.contains(&peer) {
            self.moving.push_back(peer);
        }
    }

    /// Goes on with a session's messages, and looks at what has ended.
    pub(super) fn move_some(&mut self, peer: PeerId) {
        let Ok(worker) = self.books.worker(peer) else { return };
        let has_more = worker.progress();
        let done = worker.take_done();
        let fault = worker.fault();
        for (job, result) in done {
            if let Err(error) = self.moved(peer, job, result) {
                return self.gone(peer, error);
            }
        }
        if let Some(error) = fault {
            return self.gone(peer, error);
        }
        self.let_regions_go(peer);
        // Ends and answers may have begun other messages.
        let Ok(worker) = self.books.worker(peer) else { return };
        if has_more || !worker.arm() {
            self.make_worker_ready(peer);
        }
    }

    /// The end of one message.
    fn moved(&mut self, peer: PeerId, job: Job, result: Result<(), Failure>) -> Result<()> {
        let Some(id) = self.books.peers.get(&peer).and_then(|entry| entry.lines.first().copied().flatten()) else {
            return Ok(());
        };
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        if let Job::Serve | Job::Land { .. } = job {
            line.serving -= 1;
        }
        let asked = |line: &mut Line, number: u64| line.asked.get(&number).and_then(|piece| piece.ucx.answer);
        match (job, result) {
            (Job::Read { number }, Err(Failure::Canceled)) => match asked(line, number) {
                Some(refusal) => self.answered(id, number, refusal),
                None => return Err(failed("a message was canceled".into())),
            },
            (_, Err(Failure::Canceled)) => return Err(failed("a message was canceled".into())),
            (_, Err(Failure::Other(why))) => return Err(failed(why)),
            (Job::Read { number }, Ok(())) => self.answered(id, number, None),
            (Job::Write { number }, Ok(())) => match asked(line, number) {
                Some(refusal) => self.answered(id, number, refusal),
                None => {
                    if let Some(piece) = line.asked.get_mut(&number) {
                        piece.ucx.is_moved = true;
                    }
                }
            },
            (Job::Land { number }, Ok(())) => {
                line.push_frame(Kind::Written, 0, number);
                self.make_line_ready(id);
            }
            (Job::Serve, Ok(())) => {}
        }
        Ok(())
    }

    /// Peers over UCX whose messages are in a region, each of which must end before the region does.
    pub(super) fn holders(&self, region: RegionId) -> Vec<PeerId> {
        let all = self.books.peers.iter().filter_map(|(peer, entry)| Some((peer, entry.worker.as_ref()?)));
        all.filter(|(_, worker)| worker.touches(region)).map(|(peer, _)| *peer).collect()
    }

    /// Waits for these peers' messages, for a while.
    pub(super) fn wait_for(&mut self, name: u64, holders: &[PeerId]) {
        for peer in holders {
            self.make_worker_ready(*peer);
        }
        if !holders.is_empty() {
            self.set_timer(Instant::now() + HELD, Timer::Held(name));
        }
    }

    /// Ends the sessions whose messages are still in a region that was deregistered.
    pub(super) fn end_holders(&mut self, name: u64) {
        let Some((region, _)) = self.books.leaving.get(&name) else { return };
        for peer in self.holders(*region) {
            let error = Error::new(ErrorKind::Timeout, "the peer did not end its transfers of memory that is gone");
            self.gone(peer, error.hint("is the peer frozen?"));
        }
    }

    /// Regions that no message of this peer is in any more may go.
    fn let_regions_go(&mut self, peer: PeerId) {
        let leaving: Vec<(u64, RegionId)> = self.books.leaving.iter().map(|(name, (id, _))| (*name, *id)).collect();
        for (name, region) in leaving {
            if !self.holders(region).contains(&peer) {
                self.unmapped(name, peer);
            }
        }
    }

    /// Ends a session's messages. Afterwards nothing touches their memory.
    pub(super) fn destroy(&mut self, peer: PeerId, worker: Worker) {
        let _ = rustix::event::epoll::delete(&self.epoll, worker.event());
        self.workers.retain(|_, it| *it != peer);
        self.moving.retain(|it| *it != peer);
        drop(worker);
    }

    /// Ends operations early, all of one session over UCX and with pieces under way, and the session with them.
    pub(super) fn abandon_with_session(&mut self, peer: PeerId, ops: &[OpId], cause: &Cause) {
        let error = Error::new(ErrorKind::Unavailable, "a transfer over UCX ended early, and its session with it");
        self.gone_with(peer, error.hint("connect again"), ops, Some(cause));
    }
}

fn failed(why: String) -> Error {
    let error = Error::new(ErrorKind::Unavailable, "a transfer through UCX failed").with("reason", why);
    error.hint("is the peer's process still there, and can UCX reach it? see `UCX_NET_DEVICES` and `UCX_TLS`")
}

/// Nobody guesses it.
fn draw_tag() -> Result<u64> {
    let mut tag = [0; 8];
    fill_random(&mut tag)?;
    Ok(u64::from_le_bytes(tag))
}
