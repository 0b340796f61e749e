//! How a session begins and ends: connections, the handshake, and what happens when one of them is lost.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::net::sockopt;

use super::timers::Timer;
use super::{Books, Cause, Event, Fabric, MOST_PEERS, Op, OpId, Peer, PeerId, Region, fill_random};
use crate::address::{Address, Origin, cannot_connect};
use crate::auth::Secret;
use crate::line::{Line, Phase, Queued};
use crate::wire::{ANSWER_BYTES, Answer, HELLO_BYTES, Hello, Kind, PROOF_BYTES, Refusal, broken};

/// Connections that were accepted and whose other side has not proven who it is. Others wait in the kernel, until one
/// of these has had its part of the time.
const MOST_PENDING: usize = 64;
/// Until a listener tries again that had no descriptors, or too many of these connections.
const RETRY: Duration = Duration::from_millis(20);

impl Fabric {
    pub(super) fn greet(&mut self, addresses: &[Address]) -> Result<PeerId> {
        let is_shm = matches!(addresses, [Address::Shm(_)]);
        let is_ucx = matches!(addresses, [Address::Ucx(_)]);
        if is_ucx {
            self.need_ucx()?;
        }
        // Processes on one host copy memory themselves, and UCX has connections of its own; the socket is for the rest.
        let connections = if is_shm || is_ucx { 1 } else { self.options.connections.max(addresses.len() as u16) };
        let mut session = [0; 16];
        fill_random(&mut session)?;
        let peer = PeerId(self.draw_id());
        let mut lines = Vec::new();
        for (index, address) in (0..connections).zip(addresses.iter().cycle()) {
            let mut nonce = [0; 32];
            fill_random(&mut nonce)?;
            let socket = address.connect()?;
            let id = self.draw_id();
            let is_encrypted = !is_shm && self.keys.is_some();
            let hello = Hello { session, epoch: self.epoch, index, connections, is_encrypted, is_ucx, nonce };
            let mut line = Line::new(socket, is_shm, Phase::Connecting(hello), ANSWER_BYTES);
            self.watch(line.socket(), id, line.events())?;
            line.peer = Some(peer);
            line.is_ucx = address.is_ucx();
            lines.push((id, line));
        }
        let ids = lines.iter().map(|(id, _)| Some(*id)).collect();
        self.lines.extend(lines);
        let addresses = if addresses.len() > 1 { addresses.to_vec() } else { Vec::new() };
        let entry = Peer { lines: ids, session, addresses, is_ours: true, is_shm, is_ucx, ..Peer::default() };
        self.books.peers.insert(peer, entry);
        self.set_timer(Instant::now() + self.options.connect_deadline, Timer::Peer(peer));
        Ok(peer)
    }

    pub(super) fn accept(&mut self, listener: u64) {
        while let Some(entry) = self.listeners.get(&listener) {
            let pending = self.lines.iter().filter(|(_, line)| line.peer.is_none());
            let (count, oldest) = pending.fold((0, u64::MAX), |(count, oldest), (id, _)| (count + 1, oldest.min(*id)));
            if count >= MOST_PENDING {
                let line = &self.lines[&oldest];
                // One that has said something waits for us.
                let has_said = rustix::io::ioctl_fionread(line.socket()).is_ok_and(|bytes| bytes > 0);
                if has_said || line.since.elapsed() < self.grace {
                    return self.set_timer(Instant::now() + RETRY, Timer::Accept(listener));
                }
                self.lines.remove(&oldest);
            }
            let (is_shm, is_ucx) = (matches!(entry.address, Address::Shm(_)), entry.address.is_ucx());
            let socket = match entry.accept() {
                Ok(Some(socket)) => socket,
                // Of another user, or lost before it was accepted.
                Ok(None) => continue,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return,
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        return self.set_timer(Instant::now() + RETRY, Timer::Accept(listener));
                    }
                    _ => continue,
                },
            };
            let id = self.draw_id();
            let mut line = Line::new(socket, is_shm, Phase::Accepted, HELLO_BYTES);
            if self.watch(line.socket(), id, line.events()).is_ok() {
                line.is_ucx = is_ucx;
                self.lines.insert(id, line);
                self.set_timer(Instant::now() + self.handshake, Timer::Line(id));
            }
        }
    }

    /// The kernel has connected, or failed to.
    pub(super) fn connected(&mut self, id: u64) -> Result<()> {
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        let Phase::Connecting(hello) = line.phase else { return Ok(()) };
        match sockopt::socket_error(line.socket()) {
            Ok(Ok(())) => {}
            Ok(Err(errno)) | Err(errno) => return Err(cannot_connect().source(errno)),
        }
        line.phase = Phase::Asked(hello);
        line.push(Queued::Record(hello.to_wire().to_vec()));
        Ok(())
    }

    /// The next record of the handshake.
    pub(super) fn record(&mut self, id: u64, bytes: &[u8]) -> Result<()> {
        let secret = self.options.secret.clone().unwrap_or_else(Secret::none);
        let Some(line) = self.lines.get_mut(&id) else { return Ok(()) };
        match line.phase {
            Phase::Asked(hello) => {
                let wire = hello.to_wire();
                let answer = Answer::from_wire(bytes.try_into().expect("a record of this length was asked for"))?;
                secret.check_answer(&wire, answer)?;
                check_encryption(hello.is_encrypted, answer.is_encrypted)?;
                let peer = line.peer.and_then(|peer| self.books.peers.get_mut(&peer));
                let peer = peer.ok_or_else(|| broken("an answer without a question"))?;
                if peer.epoch != 0 && peer.epoch != answer.epoch {
                    return Err(match peer.addresses.is_empty() {
                        true => broken("two endpoints at one address"),
                        false => Error::invalid("the addresses are of different endpoints")
                            .hint("give addresses at which one endpoint listens"),
                    });
                }
                peer.epoch = answer.epoch;
                line.push(Queued::Record(secret.proof_of_caller(&wire, answer).to_vec()));
                match self.keys.as_ref().filter(|_| hello.is_encrypted) {
                    Some(keys) => line.secure(keys.connect()?, Phase::Securing(hello, answer)),
                    None => {
                        let (connects, listens) = secret.keys(&wire, answer);
                        line.open(connects, listens);
                    }
                }
                if peer.is_ucx {
                    let peer = line.peer.expect("found above");
                    self.begin_worker(peer)?;
                }
            }
            Phase::Accepted => {
                let wire = bytes.try_into().expect("a record of this length was asked for");
                let hello = Hello::from_wire(wire)?;
                let mut nonce = [0; 32];
                fill_random(&mut nonce)?;
                let is_encrypted = !line.is_shm && self.keys.is_some();
                let answer = Answer { epoch: self.epoch, is_encrypted, nonce, proof: [0; 32] };
                let answer = secret.answer(wire, answer);
                line.push(Queued::Record(answer.to_wire().to_vec()));
                line.phase = Phase::Answered(hello, answer);
                line.incoming = crate::line::Incoming::Record(PROOF_BYTES);
            }
            Phase::Answered(hello, answer) => {
                let wire = hello.to_wire();
                let proof = bytes.try_into().expect("a record of this length was asked for");
                secret.check_caller(&wire, answer, proof)?;
                check_encryption(answer.is_encrypted, hello.is_encrypted)?;
                if let Some(keys) = self.keys.as_ref().filter(|_| hello.is_encrypted) {
                    line.secure(keys.listen()?, Phase::Proven(hello, answer));
                    return Ok(());
                }
                let (connects, listens) = secret.keys(&wire, answer);
                line.open(listens, connects);
                self.join(id, hello)?;
            }
            Phase::Secured(hello, answer) => {
                let wire = hello.to_wire();
                let proof = bytes.try_into().expect("a record of this length was asked for");
                let within = secret.within(&line.channel().ok_or_else(no_channel)?);
                within.check_answer(&wire, Answer { proof, ..answer }).map_err(|_| no_channel())?;
                let (connects, listens) = within.keys(&wire, answer);
                line.open(connects, listens);
                // The session may be up already, by another connection.
                if let Some(peer) = line.peer {
                    self.pump(peer);
                }
            }
            Phase::Proven(hello, answer) => {
                let wire = hello.to_wire();
                let proof = bytes.try_into().expect("a record of this length was asked for");
                let within = secret.within(&line.channel().ok_or_else(no_channel)?);
                within.check_caller(&wire, answer, proof).map_err(|_| no_channel())?;
                line.push(Queued::Record(within.answer(&wire, answer).proof.to_vec()));
                let (connects, listens) = within.keys(&wire, answer);
                line.open(listens, connects);
                self.join(id, hello)?;
            }
            Phase::Securing(..) => return Err(no_channel()),
            Phase::Connecting(_) | Phase::Open => unreachable!("no record is read in these phases"),
        }
        Ok(())
    }

    /// Once TLS of our connection stands: shows that the secret is known at this end of this channel.
    pub(super) fn prove_channel(&mut self, id: u64) {
        let Some(line) = self.lines.get_mut(&id) else { return };
        let Phase::Securing(hello, answer) = line.phase else { return };
        let (Some(channel), Some(secret)) = (line.channel(), &self.options.secret) else { return };
        let proof = secret.within(&channel).proof_of_caller(&hello.to_wire(), answer);
        line.push(Queued::Record(proof.to_vec()));
        line.phase = Phase::Secured(hello, answer);
    }

    /// A connection of a session that the other side began. With the last of them the session is up.
    fn join(&mut self, id: u64, hello: Hello) -> Result<()> {
        let peer = match self.books.sessions.get(&hello.session) {
            Some(peer) => *peer,
            None => {
                let line = self.lines.get_mut(&id).expect("its record was read");
                let origin = Origin::of(line.socket(), line.is_shm, self.options.secret.is_some());
                let refusal = match () {
                    () if line.is_ucx != hello.is_ucx => Some(Refusal::Transport),
                    () if !self.books.has_place(origin) => Some(Refusal::Full),
                    () => None,
                };
                if let Some(refusal) = refusal {
                    line.push_frame(Kind::Refused, refusal as u16, 0);
                    self.flush(id);
                    return Err(Cause::Refused(refusal).error());
                }
                let peer = PeerId(self.draw_id());
                let lines = vec![None; usize::from(hello.connections)];
                let entry =
                    Peer { lines, origin: Some(origin), epoch: hello.epoch, session: hello.session, ..Peer::default() };
                self.books.peers.insert(peer, entry);
                self.books.sessions.insert(hello.session, peer);
                self.set_timer(Instant::now() + self.handshake, Timer::Peer(peer));
                peer
            }
        };
        let line = self.lines.get_mut(&id).expect("its record was read");
        let entry = self.books.peers.get_mut(&peer).expect("sessions are peers");
        let is_its_own = entry.epoch == hello.epoch && entry.lines.len() == usize::from(hello.connections);
        match entry.lines.get_mut(usize::from(hello.index)) {
            Some(place @ None) if is_its_own => *place = Some(id),
            _ => return Err(broken("a connection that the session has")),
        }
        line.peer = Some(peer);
        (entry.is_shm, entry.is_ucx) = (line.is_shm, line.is_ucx);
        if entry.lines.iter().all(Option::is_some) {
            entry.is_up = true;
            self.books.push_frame(&mut self.lines, peer, Kind::Ready, 0, 0);
            self.make_ready(peer);
            let is_ucx = hello.is_ucx;
            self.event(Event::Up { peer });
            if is_ucx {
                self.begin_worker(peer)?;
            }
        }
        Ok(())
    }

    /// Ends the session with all that hangs on it, in this order: operations, mappings, connections.
    pub(super) fn gone(&mut self, peer: PeerId, reason: Error) {
        self.gone_with(peer, reason, &[], None);
    }

    /// As `gone`, where these operations end for another cause.
    pub(super) fn gone_with(&mut self, peer: PeerId, reason: Error, others: &[OpId], other: Option<&Cause>) {
        let Some(mut entry) = self.books.peers.remove(&peer) else { return };
        self.books.sessions.remove(&entry.session);
        self.books.untaken_bytes -= entry.lengths.iter().sum::<usize>();
        let is_its = |(id, op): (&OpId, &Op)| (op.operation.peer == peer).then_some(*id);
        let mut ops: Vec<OpId> = self.books.ops.iter().filter_map(is_its).collect();
        ops.sort();
        let cause = Cause::PeerGone(reason.to_string());
        let error = |op: &OpId| other.filter(|_| others.contains(op)).unwrap_or(&cause).error();
        if let Some(worker) = entry.worker.take() {
            self.destroy(peer, worker);
        }
        ops.iter().for_each(|op| self.end(*op, Err(error(op))));
        self.books.copies.retain(|op| self.books.ops.contains_key(op));
        self.books.remotes.retain(|_, remote| remote.peer != peer);
        for line in entry.lines.into_iter().flatten() {
            self.lines.remove(&line);
        }
        for region in self.books.regions.values_mut() {
            region.mapped_by.remove(&peer);
        }
        let leaving: Vec<u64> = self.books.leaving.keys().copied().collect();
        for name in leaving {
            self.unmapped(name, peer);
        }
        self.event(Event::Gone { peer, reason });
    }

    /// The peer no longer maps the region of this name.
    pub(super) fn unmapped(&mut self, name: u64, peer: PeerId) {
        if let Some((region, entry)) = self.books.leaving.get_mut(&name) {
            entry.mapped_by.remove(&peer);
            if entry.mapped_by.is_empty() {
                let region = *region;
                self.books.leaving.remove(&name);
                self.event(Event::Deregistered { region });
            }
        }
    }

    /// A connection ended or its other side broke the rules.
    pub(super) fn lost(&mut self, id: u64, error: Error) {
        let line = self.lines.get(&id);
        let error = match line.map(|line| &line.phase) {
            Some(Phase::Securing(..) | Phase::Secured(..)) => error.hint(MIDDLE_HINT),
            _ => error,
        };
        match line.and_then(|line| line.peer) {
            Some(peer) => {
                let entry = self.books.peers.get(&peer);
                let address = entry.and_then(|peer| peer.address_of(id));
                let error = address.into_iter().fold(error, |error, address| error.with("over", address));
                // The side that notices first says why only to its own program.
                let worker = entry.and_then(|entry| entry.worker.as_ref());
                let is_early = worker.is_some_and(|worker| !worker.is_connected());
                let error = match is_early && error.kind() == ErrorKind::Unavailable {
                    true => {
                        error.hint("did UCX find a way there? see the peer's error, `UCX_TLS` and `UCX_NET_DEVICES`")
                    }
                    false => error,
                };
                self.gone(peer, error);
            }
            // Nobody was told of it.
            None => drop(self.lines.remove(&id)),
        }
    }
}

impl Peer {
    /// That one of several addresses over which this line goes.
    pub(super) fn address_of(&self, line: u64) -> Option<&Address> {
        let index = self.lines.iter().position(|it| *it == Some(line))?;
        self.addresses.iter().cycle().nth(index)
    }
}

/// Errors unless both sides encrypt, or neither.
fn check_encryption(ours: bool, theirs: bool) -> Result<()> {
    let what = match (ours, theirs) {
        (true, false) => "this side encrypts, and the peer does not",
        (false, true) => "the peer encrypts, and this side does not",
        _ => return Ok(()),
    };
    Err(Error::invalid(what).hint("make both endpoints with `encrypt`, or neither; `ucx://` has no encryption"))
}

/// Both sides know the secret, and each has another channel or none.
fn no_channel() -> Error {
    broken("no proof for this channel").hint(MIDDLE_HINT)
}

/// Who does not get the proof that it waits for closes the connection, and says nothing to whom it may be.
const MIDDLE_HINT: &str =
    "has the peer's process ended? if not, something between the two ends encryption: use a way without it";

impl Books {
    /// Whether this origin may begin another session. None but this process's own user has more than are left for
    /// others, so there is a place for who has none.
    pub(super) fn has_place(&self, origin: Origin) -> bool {
        let left = MOST_PEERS.saturating_sub(self.peers.len());
        let has = self.peers.values().filter(|peer| peer.origin == Some(origin)).count();
        left > 0 && (has < left || origin == Origin::User(rustix::process::geteuid().as_raw()))
    }

    /// The file of a region's whole memory, with no more rights than the region has. Without one, as where no
    /// descriptor is left, the bytes go through the socket.
    pub(super) fn file_of(&self, region: &Region) -> Option<std::os::fd::OwnedFd> {
        let file = region.memory.file()?;
        if region.start != 0 || region.bytes != region.memory.len() {
            return None;
        }
        if region.rights.write {
            return file.try_clone_to_owned().ok();
        }
        // Who has a descriptor to read could open the file again to write; not once it is sealed.
        let is_it = |other: &&Region| std::sync::Arc::ptr_eq(&other.memory, &region.memory);
        if !self.regions.values().filter(is_it).any(|other| other.rights.write) {
            rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE).ok()?;
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.as_fd()));
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
    }
}
