//! The wire: generated messages, conversions to the core's types, the clients, and the constants that both sides
//! share.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod client;
mod frame;
mod hashes;
pub mod lists;
mod random_id;
pub mod status;
mod words;

pub use frame::{DAY_STEPS, HOUR_STEPS};
pub use hashes::{Hashes, pack};
pub use random_id::random_id;
pub use status::{from_status, is_transport, to_status};
pub use words::{to_words, words};

/// Messages and stubs generated from `proto/forebay/v1/forebay.proto`.
pub mod proto {
    #![allow(clippy::all, missing_docs)]
    tonic::include_proto!("forebay.v1");
}

/// How long a purge waits for the daemon's own disks while they neither remove a block nor read on, and at most, unless
/// the request gives more time: a disk removes thousands of blocks a second, and one that is sick is not waited for.
/// Clients wait longer.
pub const PURGE_OF_DISKS: std::time::Duration = std::time::Duration::from_secs(10);

/// Incremented with every change that an older side would misread; both sides must use the same version.
pub const PROTOCOL_VERSION: u32 = 3;

/// Largest message that either side accepts. A lookup of 8,192 keys is 256 KiB; `Put` and `Get` carry blocks.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Most blocks of one `Put` or `Get`: what the daemon keeps for a block besides its bytes is then some MiB.
pub const MAX_BLOCKS: usize = 16_384;

/// HTTP/2 flow-control windows: of a connection on both sides, and of a stream on the client's side, where an answer of
/// the largest size never waits for a window update.
pub const WINDOW_BYTES: u32 = 32 << 20;

/// The window of a stream on the daemon's side: so much of a message may come before the daemon has admitted it. A
/// lookup of 16,000 keys fits.
pub const STREAM_WINDOW_BYTES: u32 = 512 << 10;

/// Largest HTTP/2 frame that either side accepts: a lookup of 8,192 keys fits. A frame is kept until it is whole,
/// before anything of it is admitted. So each connection may take as much.
pub const FRAME_BYTES: u32 = 320 << 10;

/// Largest frame on `attach.sock`.
pub const MAX_ATTACH_BYTES: usize = 64 << 10;
/// Slots that a worker may suspect in one message: comparing one takes the daemon's deciding thread about 0.3 µs.
pub const MAX_SUSPECTS: usize = 256;

/// File name of the socket for gRPC, inside the daemon's socket directory.
pub const RPC_SOCKET: &str = "forebay.sock";
/// File name, in the same directory, of the socket on which workers attach to the pool.
pub const ATTACH_SOCKET: &str = "attach.sock";
