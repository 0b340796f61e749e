//! Deadlines, on one timer of the kernel, so that an event loop outside wakes for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind};
use rustix::event::Timespec;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};

use super::{Cause, Fabric, Peer};
use crate::address::Address;
use crate::ids::{OpId, PeerId};

/// What happens at a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    Op(OpId),
    /// A connection that was accepted and is not open yet.
    Line(u64),
    /// A peer that is not up yet.
    Peer(PeerId),
    /// A listener that had no descriptors left.
    Accept(u64),
    /// A session that nobody uses, and whose peer takes nothing.
    Released(PeerId),
    /// A region that was deregistered, with messages of UCX in it.
    Held(u64),
}

pub struct Timers {
    file: OwnedFd,
    /// When it will ring. It may be set too early, never too late: most operations end long before their deadline, and
    /// should cost no system call for it.
    next: Option<Instant>,
}

impl Timers {
    pub fn new() -> rustix::io::Result<Timers> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Timers { file: timerfd_create(TimerfdClockId::Monotonic, flags)?, next: None })
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub fn rang(&mut self) {
        let _ = rustix::io::read(&self.file, &mut [0u8; 8]);
        self.next = None;
    }

    fn set(&mut self, at: Instant, now: Instant) {
        if self.next.is_some_and(|next| next <= at) {
            return;
        }
        // Zero would switch it off.
        let left = at.saturating_duration_since(now).max(Duration::from_nanos(1));
        let it_value = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i32::MAX.into(), tv_nsec: 0 });
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_set = timerfd_settime(&self.file, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value });
        self.next = is_set.is_ok().then_some(at);
    }
}

impl Fabric {
    pub(super) fn set_timer(&mut self, at: Instant, timer: Timer) {
        self.books.timers.insert((at, timer));
        self.timers.set(at, Instant::now());
    }

    /// Those of several addresses over which a peer that is not up has not answered.
    fn silent(&self, peer: PeerId) -> Vec<Address> {
        let Some(Peer { addresses, lines, .. }) = self.books.peers.get(&peer) else { return Vec::new() };
        let is_silent = |line: &u64| self.lines.get(line).is_some_and(|line| !line.is_open());
        let over = |at: usize| lines.iter().skip(at).step_by(addresses.len()).flatten();
        let silent = addresses.iter().enumerate().filter(|(at, _)| over(*at).any(is_silent));
        silent.map(|(_, address)| address.clone()).collect()
    }

    /// Does what is due.
    pub(super) fn ring(&mut self, now: Instant) {
        while let Some(&(at, timer)) = self.books.timers.first() {
            if at > now {
                self.timers.set(at, now);
                return;
            }
            self.books.timers.pop_first();
            match timer {
                Timer::Op(op) => self.abandon(op, &Cause::Late),
                Timer::Line(line) if self.lines.get(&line).is_some_and(|line| !line.is_open()) => {
                    self.lines.remove(&line);
                }
                Timer::Peer(peer) if self.books.peers.get(&peer).is_some_and(|peer| !peer.is_up) => {
                    let error = Error::new(ErrorKind::Timeout, "the peer did not answer in time");
                    let error = self.silent(peer).iter().fold(error, |error, address| error.with("over", address));
                    self.gone(peer, error.hint("does the peer's endpoint run, and is it no other service?"));
                }
                Timer::Accept(listener) => self.accept(listener),
                Timer::Released(peer) => {
                    self.released.remove(&peer);
                    self.disconnect(peer);
                }
                Timer::Held(name) => self.end_holders(name),
                Timer::Line(_) | Timer::Peer(_) => {}
            }
        }
    }
}
