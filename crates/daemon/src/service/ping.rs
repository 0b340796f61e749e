//! The empty call: a measurement compares another call with it.

use forebay_core::{Error, Result};
use forebay_rpc::proto::{PingReply, PingRequest};
use tokio_stream::{Once, once};
use tonic::Status;

pub type Replies = Once<Result<PingReply, Status>>;

/// More than the reply to a lookup of 65,536 keys has.
const MAX_REPLY_BYTES: u32 = 1 << 20;

pub fn ping(request: &PingRequest) -> Result<Replies> {
    if request.reply_bytes > MAX_REPLY_BYTES {
        return Err(Error::invalid("the reply to a ping is too long")
            .with("bytes", request.reply_bytes)
            .with("limit", MAX_REPLY_BYTES));
    }
    Ok(once(Ok(PingReply { filler: vec![0; request.reply_bytes as usize] })))
}
