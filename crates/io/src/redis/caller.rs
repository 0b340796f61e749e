//! A client that waits: commands go out together, and all their replies come back, or an error by a deadline.
//!
//! For work that is nobody's load or store, on a connection of its own. An error is the connection's end, except for
//! what the server itself says, which comes as a [`Reply`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, PAGE_BYTES, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::address::Address;
use super::config::{Access, RedisConfig};
use super::connection::Greeting;
use super::dial::Dial;
use super::outgoing::Outgoing;
use super::resp::{self, Reply};
use super::shared::Inbox;
use super::transport::Transport;
use crate::uring::Region;

const INPUT_BYTES: usize = 64 << 10;
/// Longest replies to what is asked at once; a thousand names are a tenth of a MiB.
const LONGEST_REPLIES: usize = 64 << 20;

/// See the module's head.
pub(super) struct Caller {
    address: Address,
    transport: Transport,
    /// No reply goes to a slot.
    pool: Region,
    input: Vec<u8>,
    timeout: Duration,
}

impl Caller {
    /// Connects, to whatever address of the host answers first, and says the greeting; with its last reply. One that
    /// is refused is an error. Takes `connect_timeout` at most.
    pub fn connect(
        address: &Address,
        access: &Access,
        greeting: &Greeting,
        config: &RedisConfig,
    ) -> Result<(Caller, Reply)> {
        let due = Instant::now() + config.connect_timeout;
        let cannot = |why: String| {
            Error::new(ErrorKind::Unavailable, "cannot connect to the server")
                .with("server", address)
                .source(why)
                .hint("look at the server, and purge again when it answers")
        };
        let inbox = Arc::new(Inbox::new().map_err(|error| cannot(error.to_string()))?);
        let mut dial = Dial::new(address.clone());
        loop {
            let begun = begin(&mut dial, access, config, &inbox, due).and_then(|transport| {
                let pool = Region::anonymous(PAGE_BYTES as usize).map_err(|error| error.to_string())?;
                let timeout = config.operation_timeout;
                let mut caller = Caller { address: address.clone(), transport, pool, input: Vec::new(), timeout };
                caller.connected(due)?;
                Ok((caller.exchange(&greeting.bytes, greeting.commands, due)?, caller))
            });
            match begun {
                Ok((replies, caller)) => {
                    let refusal = replies.iter().find_map(|reply| match reply {
                        Reply::Error(text) => Some(caller.refused("the greeting", text)),
                        _ => None,
                    });
                    let last = replies.into_iter().next_back().unwrap_or(Reply::Null);
                    return refusal.map_or(Ok((caller, last)), Err);
                }
                Err(_) if dial.has_untried() && Instant::now() < due => {}
                Err(why) => return Err(cannot(why)),
            }
        }
    }

    /// Sends commands, so many of them, and waits for their replies, `operation_timeout` at most.
    pub fn ask(&mut self, commands: &[u8], count: usize) -> Result<Vec<Reply>> {
        let due = Instant::now() + self.timeout;
        self.exchange(commands, count, due).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "the server does not answer")
                .with("server", &self.address)
                .source(why)
                .hint("look at the server, and purge again when it answers")
        })
    }

    /// The error that a server's refusal is.
    pub fn refused(&self, what: &str, text: &str) -> Error {
        let code = text.split(' ').next().unwrap_or_default();
        let hint = match code {
            "NOPERM" => {
                "give the user of the urls the rights to SCAN and UNLINK, in a cluster to CLUSTER SLOTS and CLUSTER NODES too"
            }
            "NOAUTH" | "WRONGPASS" => "look at user and password of the urls",
            "READONLY" => "purge again when the server is a master, or name its master",
            "ERR" => {
                "use a server that knows SCAN and UNLINK by these names, in a cluster CLUSTER SLOTS and CLUSTER NODES too"
            }
            _ => "look at the server, and purge again",
        };
        Error::new(super::flight::kind_of(code), format!("the server refuses {what}"))
            .with("server", &self.address)
            .with("reply", text)
            .hint(hint)
    }

    fn connected(&mut self, due: Instant) -> Result<(), String> {
        wait(self.transport.as_fd(), PollFlags::OUT, due)?;
        self.transport.check().map_err(|error| error.to_string())
    }

    fn exchange(&mut self, commands: &[u8], count: usize, due: Instant) -> Result<Vec<Reply>, String> {
        let (mut out, mut replies) = (Outgoing::default(), Vec::with_capacity(count));
        out.push(|bytes| bytes.extend_from_slice(commands));
        loop {
            self.transport.flush().map_err(|error| error.to_string())?;
            out.send(&mut self.transport, &self.pool).map_err(|error| error.to_string())?;
            self.receive()?;
            self.take(&mut replies, count)?;
            if replies.len() == count {
                return Ok(replies);
            }
            let has_more = !out.is_empty() || self.transport.holds_bytes();
            let flags = if has_more { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            wait(self.transport.as_fd(), flags, due)?;
        }
    }

    /// All that is there.
    fn receive(&mut self) -> Result<(), String> {
        loop {
            let before = self.input.len();
            if before >= LONGEST_REPLIES {
                return Err("a reply is too long".to_owned());
            }
            self.input.resize(before + INPUT_BYTES, 0);
            let received = self.transport.receive(&self.pool, None, &mut self.input[before..]);
            self.input.truncate(before + *received.as_ref().unwrap_or(&0));
            match received {
                Ok(0) => return Err("the server has closed the connection".to_owned()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// The replies that are whole.
    fn take(&mut self, replies: &mut Vec<Reply>, count: usize) -> Result<(), String> {
        let mut at = 0;
        while replies.len() < count
            && let Some((reply, len)) = resp::reply(&self.input[at..]).map_err(|lost| lost.0.to_owned())?
        {
            replies.push(reply);
            at += len;
        }
        self.input.drain(..at);
        Ok(())
    }
}

/// A socket that connects, once the host's name has led to an address.
fn begin(
    dial: &mut Dial,
    access: &Access,
    config: &RedisConfig,
    inbox: &Arc<Inbox>,
    due: Instant,
) -> Result<Transport, String> {
    loop {
        if let Some(transport) = dial.begin(config.socket_buffer_bytes, access.tls.as_ref(), inbox)? {
            return Ok(transport);
        }
        wait(inbox.waker_fd(), PollFlags::IN, due)?;
    }
}

fn wait(fd: BorrowedFd<'_>, flags: PollFlags, due: Instant) -> Result<(), String> {
    let left = due.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).map_err(|error| error.to_string())?;
    match rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)) {
        Ok(0) => Err("it took too long".to_owned()),
        // An interrupted wait is one that ended early.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}
