//! A fabric with a thread of its own, for programs that have no loop: calls from any thread, which wait if they like.
//!
//! Invariants: the thread waits without the lock. Each operation's end goes to exactly one place, which was named when
//! it began: to who waits for it, or to one of the two queues. If the thread ends, all waits end. A forked child has
//! neither the thread nor the right to the sockets: there every call fails before it takes a lock, and ends nothing.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::address::Address;
use crate::fabric::{Event, Fabric, Operation, Options};
use crate::ids::{OpId, PeerId, RegionId, RemoteId};
use crate::line::closed;

/// Where the end of an operation is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// To [`Endpoint::wait`].
    Waited,
    /// To [`Endpoint::finished`] of this queue, 0 or 1, under a name that the caller chose.
    Queue(usize, u64),
}

/// An operation that has ended: its number, the caller's name of it, and its result.
pub type Finished = (OpId, u64, Result<()>);

/// See the module's head.
pub struct Endpoint {
    shared: Arc<Shared>,
    /// The process that made it.
    process: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    fabric: Mutex<Fabric>,
    /// The fabric's own descriptor, to wait for without its lock.
    wake: OwnedFd,
    inbox: Mutex<Inbox>,
    /// Something came into the inbox.
    news: Condvar,
    /// Readable while a queue has something in it.
    queues: [OwnedFd; 2],
    stop: OwnedFd,
    /// What programs have let go of, and what says so to the thread.
    released: Mutex<Vec<Released>>,
    has_released: OwnedFd,
}

/// What a program no longer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Its session ends when what was sent has left; its messages are dropped.
    Peer(PeerId),
    Remote(RemoteId),
}

#[derive(Default)]
struct Inbox {
    reports: HashMap<OpId, Report>,
    waited: HashMap<OpId, Result<()>>,
    queues: [Vec<Finished>; 2],
    peers: HashMap<PeerId, Mailbox>,
    accepted: VecDeque<PeerId>,
    deregistered: HashSet<RegionId>,
    is_over: bool,
}

#[derive(Default)]
struct Mailbox {
    is_up: bool,
    /// Forgotten when the session has ended.
    is_released: bool,
    /// Said once, to who asks first; later ones hear that the peer is gone.
    gone: Option<Option<Error>>,
    messages: VecDeque<Vec<u8>>,
    notices: VecDeque<Vec<u8>>,
}

impl Endpoint {
    pub fn new(options: Options) -> Result<Endpoint> {
        let failed = |error: std::io::Error| {
            let error = Error::new(ErrorKind::Io, "cannot make a transfer endpoint").source(error);
            error.hint("are there descriptors and threads left (`ulimit -n`, `ulimit -u`)?")
        };
        let fabric = Fabric::new(options)?;
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| failed(errno.into()));
        let shared = Arc::new(Shared {
            wake: fabric.wake_fd().try_clone_to_owned().map_err(failed)?,
            fabric: Mutex::new(fabric),
            inbox: Mutex::new(Inbox::default()),
            news: Condvar::new(),
            queues: [new()?, new()?],
            stop: new()?,
            released: Mutex::new(Vec::new()),
            has_released: new()?,
        });
        let ours = shared.clone();
        let builder = std::thread::Builder::new().name("forebay-fabric".into());
        let thread = builder.spawn(move || run(&ours)).map_err(failed)?;
        Ok(Endpoint { shared, process: std::process::id(), thread: Mutex::new(Some(thread)) })
    }

    /// Calls the fabric. Its events go where they always go.
    pub fn with<T>(&self, call: impl FnOnce(&mut Fabric) -> Result<T>) -> Result<T> {
        if self.is_over() {
            return Err(self.ended());
        }
        let mut fabric = self.shared.fabric.lock().map_err(|_| over())?;
        let result = call(&mut fabric);
        let dropped = fabric.take_dropped();
        // Whose memory it was may call this endpoint when it is given back.
        drop(fabric);
        drop(dropped);
        result
    }

    /// Begins an operation.
    pub fn submit(&self, operation: Operation, report: Report) -> Result<OpId> {
        self.with(|fabric| {
            let op = fabric.submit(operation)?;
            // Under the fabric's lock, so that its end is not seen before this.
            self.shared.inbox().reports.insert(op, report);
            Ok(op)
        })
    }

    /// The end of an operation that reports to who waits; `None` if it has not come after `timeout`.
    pub fn wait(&self, op: OpId, timeout: Option<Duration>) -> Option<Result<()>> {
        self.until(timeout, |inbox| inbox.waited.remove(&op)).or_else(|| self.is_over().then(|| Err(self.ended())))
    }

    /// Ends an operation. When this returns, nothing touches its local memory any more. Its end is reported as others
    /// are.
    pub fn give_up(&self, op: OpId) {
        // A closed endpoint has ended all of them.
        let _ = self.with(|fabric| {
            fabric.give_up(op);
            Ok(())
        });
    }

    /// Operations of this queue that have ended, after at most `timeout`. Errors in a child that was forked; otherwise
    /// what has ended is there after `close` too.
    pub fn finished(&self, queue: usize, timeout: Option<Duration>) -> Result<Vec<Finished>> {
        let take = |inbox: &mut Inbox| {
            let finished = std::mem::take(&mut inbox.queues[queue]);
            (!finished.is_empty()).then_some(finished)
        };
        if self.is_forked() {
            return Err(self.ended());
        }
        let finished = self.until(timeout, take).unwrap_or_default();
        let inbox = self.shared.inbox();
        if inbox.queues[queue].is_empty() {
            let _ = rustix::io::read(&self.shared.queues[queue], &mut [0u8; 8]);
        }
        Ok(finished)
    }

    /// Whether the endpoint has ended: then `finished` has what will ever have ended.
    pub fn is_closed(&self) -> bool {
        self.is_over()
    }

    /// Readable while `finished` of this queue has something to say. Errors in a child that was forked.
    pub fn queue_fd(&self, queue: usize) -> Result<BorrowedFd<'_>> {
        if self.is_forked() { Err(self.ended()) } else { Ok(self.shared.queues[queue].as_fd()) }
    }

    /// Begins to connect; [`Endpoint::connected`] says how it ends.
    pub fn connect(&self, address: &Address) -> Result<PeerId> {
        self.connect_over(std::slice::from_ref(address))
    }

    /// As `connect`, over several TCP addresses of one endpoint in turn.
    pub fn connect_over(&self, addresses: &[Address]) -> Result<PeerId> {
        self.with(|fabric| {
            let peer = fabric.connect_over(addresses)?;
            self.shared.inbox().peers.insert(peer, Mailbox::default());
            Ok(peer)
        })
    }

    /// Whether the peer has proven who it is; `None` if that is open after `timeout`. An end comes within the deadline
    /// of connecting. After an error the peer is forgotten.
    pub fn connected(&self, peer: PeerId, timeout: Duration) -> Option<Result<()>> {
        let answer = self.until(Some(timeout), |inbox| match inbox.peers.get_mut(&peer) {
            Some(Mailbox { gone: Some(reason), .. }) => Some(Err(reason.take().unwrap_or_else(closed))),
            Some(Mailbox { is_up: true, .. }) => Some(Ok(())),
            Some(_) => None,
            None => Some(Err(closed())),
        });
        let answer = answer.or_else(|| self.is_over().then(|| Err(self.ended())));
        if matches!(answer, Some(Err(_))) && !self.is_forked() {
            self.shared.inbox().peers.remove(&peer);
        }
        answer
    }

    /// The next peer that has connected to this endpoint; `None` if none has after `timeout`.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Option<PeerId>> {
        match self.until(timeout, |inbox| inbox.accepted.pop_front()) {
            None if self.is_over() => Err(self.ended()),
            accepted => Ok(accepted),
        }
    }

    /// The peer's next message, or notice; `None` if none has come after `timeout`. Errors if none will.
    pub fn receive(&self, peer: PeerId, is_notice: bool, timeout: Option<Duration>) -> Result<Option<Vec<u8>>> {
        let next = self.until(timeout, |inbox| {
            let Some(mailbox) = inbox.peers.get_mut(&peer) else { return Some(Err(closed())) };
            let queue = if is_notice { &mut mailbox.notices } else { &mut mailbox.messages };
            match (queue.pop_front(), &mut mailbox.gone) {
                (Some(bytes), _) => Some(Ok(bytes)),
                (None, Some(reason)) => Some(Err(reason.take().unwrap_or_else(closed))),
                (None, None) => None,
            }
        });
        let Some(bytes) = next else { return if self.is_over() { Err(self.ended()) } else { Ok(None) } };
        let bytes = bytes?;
        // A peer that is gone needs no answer.
        let _ = self.with(|fabric| {
            fabric.taken(peer);
            Ok(())
        });
        Ok(Some(bytes))
    }

    fn is_over(&self) -> bool {
        self.is_forked() || self.shared.inbox().is_over
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Why no call succeeds any more.
    fn ended(&self) -> Error {
        match self.is_forked() {
            true => Error::new(ErrorKind::Unavailable, "the endpoint belongs to the process that forked this one")
                .hint("make an endpoint in this process"),
            false => over(),
        }
    }

    /// Whether the peer's session stands.
    pub fn is_up(&self, peer: PeerId) -> bool {
        !self.is_forked()
            && self.shared.inbox().peers.get(&peer).is_some_and(|mailbox| mailbox.is_up && mailbox.gone.is_none())
    }

    /// Ends the session, and forgets the messages that were not received.
    pub fn disconnect(&self, peer: PeerId) -> Result<()> {
        self.with(|fabric| {
            fabric.disconnect(peer);
            Ok(())
        })?;
        self.until(Some(Duration::from_secs(5)), |inbox| {
            inbox.peers.get(&peer).is_none_or(|it| it.gone.is_some()).then_some(())
        });
        self.shared.inbox().peers.remove(&peer);
        Ok(())
    }

    /// Deregisters; [`Endpoint::deregistered`] says when no peer maps the region any more. Until that was said this may
    /// be called again, by who gave up waiting for it.
    pub fn deregister(&self, region: RegionId) -> Result<()> {
        self.with(|fabric| match self.shared.inbox().deregistered.contains(&region) {
            true => Ok(()),
            false => fabric.deregister(region),
        })
    }

    /// Whether no peer maps a region that is being deregistered, after at most `timeout`.
    pub fn deregistered(&self, region: RegionId, timeout: Duration) -> Option<()> {
        self.until(Some(timeout), |inbox| inbox.deregistered.remove(&region).then_some(()))
    }

    /// Lets go of something, soon. Never waits, so that a collector of garbage may call it amid anything; does nothing
    /// in a child that was forked.
    pub fn release(&self, released: Released) {
        if !self.is_forked() {
            self.shared.released().push(released);
            let _ = rustix::io::write(&self.shared.has_released, &1u64.to_ne_bytes());
        }
    }

    /// Ends all sessions; operations and waits end with errors. Idempotent; does nothing in a child that was forked.
    pub fn close(&self) {
        if self.is_forked() {
            return;
        }
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// What `look` finds in the inbox, now or when something has come, within `timeout`.
    fn until<T>(&self, timeout: Option<Duration>, mut look: impl FnMut(&mut Inbox) -> Option<T>) -> Option<T> {
        if self.is_forked() {
            return None;
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut inbox = self.shared.inbox();
        loop {
            if let Some(found) = look(&mut inbox) {
                return Some(found);
            }
            if inbox.is_over {
                return None;
            }
            inbox = match deadline {
                None => self.shared.news.wait(inbox).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    let waited = self.shared.news.wait_timeout(inbox, left);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.is_forked() {
            // The thread is the parent's. The C library may have given its number to a thread of this process, which
            // dropping the handle would detach.
            let thread = self.thread.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            std::mem::forget(thread.take());
            return;
        }
        self.close();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Whole after a panic: each change is one call of a collection.
        self.inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn released(&self) -> MutexGuard<'_, Vec<Released>> {
        self.released.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn let_go(&self, fabric: &mut Fabric) {
        let _ = rustix::io::read(&self.has_released, &mut [0u8; 8]);
        let released = std::mem::take(&mut *self.released());
        for released in released {
            match released {
                Released::Remote(remote) => fabric.forget(remote),
                Released::Peer(peer) => {
                    let mut inbox = self.inbox();
                    match inbox.peers.get_mut(&peer) {
                        Some(mailbox) if mailbox.gone.is_none() => mailbox.is_released = true,
                        _ => drop(inbox.peers.remove(&peer)),
                    }
                    drop(inbox);
                    fabric.release(peer);
                }
            }
        }
    }

    fn take(&self, events: &mut Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let mut inbox = self.inbox();
        for event in events.drain(..) {
            match event {
                Event::Done { op, result } => match inbox.reports.remove(&op) {
                    Some(Report::Queue(queue, name)) => {
                        inbox.queues[queue].push((op, name, result));
                        let _ = rustix::io::write(&self.queues[queue], &1u64.to_ne_bytes());
                    }
                    _ => drop(inbox.waited.insert(op, result)),
                },
                Event::Up { peer } => {
                    let is_theirs = !inbox.peers.contains_key(&peer);
                    inbox.peers.entry(peer).or_default().is_up = true;
                    if is_theirs {
                        inbox.accepted.push_back(peer);
                    }
                }
                Event::Gone { peer, reason } => {
                    // One that was accepted and that nobody has asked for is forgotten.
                    let before = inbox.accepted.len();
                    inbox.accepted.retain(|accepted| *accepted != peer);
                    let is_released = inbox.peers.get(&peer).is_some_and(|mailbox| mailbox.is_released);
                    if inbox.accepted.len() < before || is_released {
                        inbox.peers.remove(&peer);
                    } else if let Some(mailbox) = inbox.peers.get_mut(&peer) {
                        if reason.kind() == ErrorKind::Full {
                            // They were too many.
                            mailbox.messages.clear();
                            mailbox.notices.clear();
                        }
                        mailbox.gone = Some(Some(reason));
                    }
                }
                Event::Message { peer, bytes } => {
                    if let Some(mailbox) = inbox.peers.get_mut(&peer) {
                        mailbox.messages.push_back(bytes);
                    }
                }
                Event::Notice { peer, bytes } => {
                    if let Some(mailbox) = inbox.peers.get_mut(&peer) {
                        mailbox.notices.push_back(bytes);
                    }
                }
                Event::Deregistered { region } => drop(inbox.deregistered.insert(region)),
            }
        }
        self.news.notify_all();
    }
}

/// Ends all waits, however the thread ends.
struct Over<'a>(&'a Shared);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.inbox().is_over = true;
        self.0.news.notify_all();
        for queue in &self.0.queues {
            let _ = rustix::io::write(queue, &1u64.to_ne_bytes());
        }
    }
}

fn run(shared: &Shared) {
    // Given back at the very end: then no call of its owners waits for this thread.
    let mut kept = Vec::new();
    let _over = Over(shared);
    let mut events = Vec::new();
    loop {
        let mut waits = [&shared.wake, &shared.stop, &shared.has_released].map(|it| PollFd::new(it, PollFlags::IN));
        match poll(&mut waits, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        let [is_over, has_released] = [1, 2].map(|at: usize| !waits[at].revents().is_empty());
        let Ok(mut fabric) = shared.fabric.lock() else { return };
        if has_released {
            shared.let_go(&mut fabric);
        }
        let is_over = is_over || fabric.poll(Some(Duration::ZERO), &mut events).is_err();
        if is_over {
            fabric.close(&mut events);
            kept.extend(fabric.take_dropped());
        }
        // Under the fabric's lock, so that what the fabric has forgotten is in the inbox.
        shared.take(&mut events);
        drop(fabric);
        if is_over {
            return;
        }
    }
}

fn over() -> Error {
    Error::new(ErrorKind::Unavailable, "the endpoint is closed").hint("make another one")
}
