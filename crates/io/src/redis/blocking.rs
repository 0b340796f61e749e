//! A blocking client: it sends commands together, and returns all their replies, or an error by a deadline.
//!
//! For work other than loads and stores, on a connection of its own. An error ends the connection. A server's error
//! reply is not such an error: it comes as a [`Reply`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, PAGE_BYTES, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::address::Address;
use super::config::{Access, RedisConfig};
use super::connect::Dialer;
use super::connection::{self, Greeting};
use super::resp::{self, Reply};
use super::send_buffer::SendBuffer;
use super::shared::Inbox;
use super::transport::Transport;
use crate::uring::Region;

const INPUT_BYTES: usize = 64 << 10;
/// Longest replies to one request; a thousand names take a tenth of a MiB.
const LONGEST_REPLIES: usize = 64 << 20;

/// See the module documentation.
pub(super) struct BlockingClient {
    address: Address,
    transport: Transport,
    /// Required by the parser; no reply goes to a slot.
    pool: Region,
    input: Vec<u8>,
    timeout: Duration,
}

impl BlockingClient {
    /// Connects to the first address of the host that answers, sends the greeting and returns its last reply. A
    /// refusal is an error. Takes `connect_timeout` at most, of which half may go to files that do not answer.
    pub fn connect(
        address: &Address,
        access: &Access,
        greet: impl Fn() -> Greeting,
        config: &RedisConfig,
    ) -> Result<(BlockingClient, Reply)> {
        let due = Instant::now() + config.connect_timeout;
        access.renew(due - config.connect_timeout / 2);
        let greeting = greet();
        let hint = match access.tls {
            Some(_) => "check the server, and whether it speaks TLS on this port, and try again when it answers",
            None => "check the server, and try again when it answers",
        };
        let cannot = |why: String| {
            Error::new(ErrorKind::Unavailable, "cannot connect to the server")
                .with("server", address)
                .source(why)
                .hint(hint)
        };
        let inbox = Arc::new(Inbox::new().map_err(|error| cannot(error.to_string()))?);
        let mut dialer = Dialer::new(address.clone());
        loop {
            let begun = begin(&mut dialer, access, config, &inbox, due).and_then(|transport| {
                let pool = Region::anonymous(PAGE_BYTES as usize).map_err(|error| error.to_string())?;
                let timeout = config.operation_timeout;
                let mut client =
                    BlockingClient { address: address.clone(), transport, pool, input: Vec::new(), timeout };
                client.connected(due)?;
                Ok((client.exchange(&greeting.bytes, greeting.commands, due)?, client))
            });
            match begun {
                Ok((replies, client)) => {
                    let refusal = replies.iter().find_map(|reply| match reply {
                        Reply::Error(text) => Some(client.refused("the greeting", text)),
                        _ => None,
                    });
                    let last = replies.into_iter().next_back().unwrap_or(Reply::Null);
                    return refusal.map_or(Ok((client, last)), Err);
                }
                Err(_) if dialer.has_untried() && Instant::now() < due => {}
                Err(why) => return Err(cannot(why)),
            }
        }
    }

    /// Sends `count` commands and waits for their replies, for `operation_timeout` at most.
    pub fn ask(&mut self, commands: &[u8], count: usize) -> Result<Vec<Reply>> {
        let due = Instant::now() + self.timeout;
        self.exchange(commands, count, due).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "the server does not answer")
                .with("server", &self.address)
                .source(why)
                .hint("check the server, and try again when it answers")
        })
    }

    /// Turns a server's refusal into an error.
    pub fn refused(&self, what: &str, text: &str) -> Error {
        let code = text.split(' ').next().unwrap_or_default();
        let hint = match code {
            "NOPERM" => {
                "give the urls' user the rights to SCAN and UNLINK, and in a cluster to CLUSTER SLOTS, CLUSTER INFO \
                 and CLUSTER NODES"
            }
            _ if text.contains("DB index") => {
                "name a database that the server has at the end of the urls, such as `/0`"
            }
            _ if text.contains("cluster support disabled") => {
                "set `tier.redis.mode` to `single`, or name a cluster's nodes"
            }
            _ if text.contains("without any password") => {
                "take the password out of the configuration: the server has none"
            }
            "NOAUTH" | "WRONGPASS" => {
                "check the user in the urls, and the password there or in `tier.redis.password_file`; for sentinels, \
                 `tier.redis.sentinel_user` and the password beside it"
            }
            "READONLY" => "try again when the server is a master, or set the url to its master",
            "ERR" => {
                "use a server that knows the commands SCAN and UNLINK, and in a cluster CLUSTER SLOTS, CLUSTER INFO \
                 and CLUSTER NODES"
            }
            _ => "check the server, and try again",
        };
        Error::new(super::in_flight::kind_of(code), format!("the server refused {what}"))
            .with("server", &self.address)
            .with("reply", text)
            .hint(hint)
    }

    fn connected(&mut self, due: Instant) -> Result<(), String> {
        wait(self.transport.as_fd(), PollFlags::OUT, due)?;
        let checked = self.transport.check();
        checked.map_err(|error| self.last_words().unwrap_or_else(|| error.to_string()))
    }

    /// What it said before it ended the connection.
    fn last_words(&mut self) -> Option<String> {
        // The end of the connection is known already.
        let _ = self.receive();
        let (reply, _) = resp::reply(&self.input).ok().flatten()?;
        reply.error().map(connection::refused)
    }

    fn exchange(&mut self, commands: &[u8], count: usize, due: Instant) -> Result<Vec<Reply>, String> {
        let (mut out, mut replies) = (SendBuffer::default(), Vec::with_capacity(count));
        out.push(|bytes| bytes.extend_from_slice(commands));
        loop {
            let sent = self.transport.flush().and_then(|()| out.send(&mut self.transport, &self.pool));
            let received = self.receive();
            self.take(&mut replies, count)?;
            if replies.len() == count {
                return Ok(replies);
            }
            let ended = received.and(sent.map_err(|error| error.to_string()));
            // A server that ends the connection may say why.
            match (ended, replies.iter().find_map(Reply::error)) {
                (Ok(()), _) => {}
                (Err(_), Some(said)) => return Err(connection::refused(said)),
                (Err(why), None) => return Err(why),
            }
            let has_more = !out.is_empty() || self.transport.holds_bytes();
            let flags = if has_more { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            wait(self.transport.as_fd(), flags, due)?;
        }
    }

    /// Reads everything that has arrived.
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

    /// Takes the replies that are complete.
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

/// Begins a connection once the host's name has an address.
fn begin(
    dialer: &mut Dialer,
    access: &Access,
    config: &RedisConfig,
    inbox: &Arc<Inbox>,
    due: Instant,
) -> Result<Transport, String> {
    loop {
        if let Some(transport) = dialer.begin(config.socket_buffer_bytes, access.tls.as_ref(), inbox)? {
            return Ok(transport);
        }
        wait(inbox.waker_fd(), PollFlags::IN, due)?;
    }
}

fn wait(fd: BorrowedFd<'_>, flags: PollFlags, due: Instant) -> Result<(), String> {
    let left = due.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).map_err(|error| error.to_string())?;
    match rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)) {
        Ok(0) => Err("it did not answer in time".to_owned()),
        // An interrupted wait only ended early.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}
