//! The memory that a client lends to the daemon for the payloads of its calls.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::{Error, Result};
use forebay_io::pool::{self, Lent, recv_fds, send_fds};
use forebay_rpc::client::Memory;
use forebay_rpc::proto::{AttachReply, AttachRequest, Lending};
use forebay_rpc::{ATTACH_SOCKET, PROTOCOL_VERSION};
use prost::Message;

use crate::worker::attach::{decode, dial};

/// Makes the memory that is to be lent, and lends it. Waits for at most `time`.
pub fn lend(directory: &Path, lending: Lending, time: Duration) -> Result<Box<dyn Memory>> {
    let deadline = Instant::now() + time;
    // Without memory there is nothing to ask the daemon for.
    let memory = pool::Lending::make(lending.bytes)?;
    let stream = dial(&forebay_rpc::client::socket(directory, ATTACH_SOCKET)?, time)?;
    let request = AttachRequest { protocol: PROTOCOL_VERSION, lending: Some(lending), ..AttachRequest::default() };
    let reply = || {
        let reply: AttachReply = decode(&recv_fds(&stream, deadline)?.0)?;
        match reply.error.is_empty() {
            true => Ok(reply),
            false => Err(Error::invalid(reply.error).hint(reply.hint)),
        }
    };
    send_fds(&stream, &request.encode_to_vec(), &[], deadline)?;
    reply()?;
    send_fds(&stream, &[], &[memory.file()], deadline)?;
    reply()?;
    let memory = memory.seal()?;
    send_fds(&stream, &[], &[], deadline)?;
    Ok(Box::new(Numbered { number: reply()?.lent, memory }))
}

struct Numbered {
    number: u64,
    memory: Lent,
}

impl Memory for Numbered {
    fn number(&self) -> u64 {
        self.number
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.memory.write(offset, bytes);
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.memory.read(offset, bytes);
    }

    fn checksum(&self, offset: u64, len: u64) -> u64 {
        self.memory.checksum(offset, len)
    }
}
