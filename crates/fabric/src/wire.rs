//! What crosses a connection: three records of fixed length, and then frames.
//!
//! A frame is 32 bytes of header, `body` bytes and `payload` bytes; numbers are little-endian.
//! `docs/formats/transfer.md` draws it.
//!
//! Invariants: lengths are compared with their limits before anything is allocated. Nothing here panics, whatever the
//! bytes are. The tag covers the frame's number, header and body; the payload is not covered.

use forebay_core::{Error, ErrorKind, Result};

pub const MAGIC: u64 = u64::from_le_bytes(*b"FOREBAYX");
pub const VERSION: u16 = 1;
pub const HEADER_BYTES: usize = 32;
pub const HELLO_BYTES: usize = 96;
pub const ANSWER_BYTES: usize = 96;
pub const PROOF_BYTES: usize = 32;
pub const SEGMENT_BYTES: usize = 24;
/// Of a message through UCX: what names its landing place.
pub const TAG_BYTES: usize = 8;
/// Of the body of one frame.
pub const MOST_BODY_BYTES: usize = 128 << 10;
/// Of the payload of one frame: a message waits at most for one piece, and a cache of the second level holds it.
pub const PIECE_BYTES: u64 = 1 << 20;
/// In one frame; their list fits a body.
pub const MOST_SEGMENTS: usize = 1024;
/// Of one message.
pub const MOST_MESSAGE_BYTES: usize = 64 << 10;
/// Requests that one side may have under way on one connection.
pub const WINDOW: usize = 64;
/// Messages that one side may have sent and the other has not taken.
pub const MESSAGE_WINDOW: usize = 64;
/// Connections of one peer.
pub const MOST_CONNECTIONS: u16 = 16;

/// What a tag covers of a frame with at most four segments.
const SHORT_BYTES: usize = 128;

/// A key of a connection, for one direction.
pub type Key = [u8; 32];

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// All connections of the session are there.
    Ready = 1,
    /// Body: segments. Answered by `Data` or `Refused` with the same number.
    Read = 2,
    /// Payload: the segments' bytes in order.
    Data = 3,
    /// Body: segments; payload: their bytes. Answered by `Written` or `Refused`.
    Write = 4,
    Written = 5,
    /// `count` is a [`Refusal`]. Instead of `Ready`: of a session.
    Refused = 6,
    /// Body: the message; `count` is 1 if it is a notice.
    Message = 7,
    /// The receiver's program took `count` messages.
    Taken = 8,
    /// Asks for the descriptor of region `op`. Answered by `Mapped`, with the descriptor beside it, or `Refused`.
    Map = 9,
    Mapped = 10,
    /// Region `op` is deregistered: unmap it. Answered by `Unmapped`.
    Revoke = 11,
    Unmapped = 12,
    /// Body: the address of the sender's worker of UCX. Once from each side of a session over UCX; only such sessions
    /// have this and the next three.
    Worker = 13,
    /// As `Read`, for bytes through UCX. Body: the tag of the landing place, then segments.
    Pull = 14,
    /// As `Write`, for bytes through UCX; answered by `Land` first.
    Push = 15,
    /// A landing place for the write `op`. Body: its tag.
    Land = 16,
}

impl Kind {
    fn from_wire(kind: u8) -> Option<Kind> {
        use Kind::{Data, Land, Map, Mapped, Message, Pull, Push, Read, Ready, Refused, Revoke, Taken, Unmapped};
        use Kind::{Worker, Write, Written};
        let sockets = [Ready, Read, Data, Write, Written, Refused, Message, Taken, Map, Mapped, Revoke, Unmapped];
        sockets.into_iter().chain([Worker, Pull, Push, Land]).find(|known| *known as u8 == kind)
    }
}

/// Why a peer refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// No region has this name: never exported, or deregistered.
    Unknown = 1,
    /// Outside of the region.
    Outside = 2,
    /// The region's rights do not include this.
    Forbidden = 3,
    /// The endpoint has no place for another session.
    Full = 4,
    /// The endpoint listens there for another transport.
    Transport = 5,
}

impl Refusal {
    pub fn from_wire(code: u16) -> Option<Refusal> {
        [Refusal::Unknown, Refusal::Outside, Refusal::Forbidden, Refusal::Full, Refusal::Transport]
            .into_iter()
            .find(|known| *known as u16 == code)
    }
}

/// A range of a peer's region, by the name that its descriptor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireSegment {
    pub name: u64,
    pub offset: u64,
    pub bytes: u64,
}

/// What stands before each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub count: u16,
    pub body: u32,
    pub payload: u32,
    /// Number of the request, or name of a region.
    pub op: u64,
}

impl Header {
    /// The header's bytes with the tag, for frame number `sequence` of its direction.
    pub fn sealed(&self, key: &Key, sequence: u64, body: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.body.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload.to_le_bytes());
        bytes[8] = self.kind as u8;
        bytes[10..12].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.op.to_le_bytes());
        let tag = tag(key, sequence, &bytes[..24], body);
        bytes[24..32].copy_from_slice(&tag.to_le_bytes());
        bytes
    }

    /// The header in these bytes, if its lengths are within the limits and fit its kind. The tag is not compared yet.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header> {
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let Some(kind) = Kind::from_wire(bytes[8]) else { return Err(broken("a frame of no known kind")) };
        let header = Header {
            kind,
            count: u16::from_le_bytes([bytes[10], bytes[11]]),
            body: number(0),
            payload: number(4),
            op: u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes")),
        };
        let (body, payload, count) = (header.body as usize, u64::from(header.payload), usize::from(header.count));
        let is_list = count > 0 && count <= MOST_SEGMENTS && body == count * SEGMENT_BYTES;
        let is_piece = payload > 0 && payload <= PIECE_BYTES;
        let fits = match kind {
            Kind::Read | Kind::Push => is_list && payload == 0,
            Kind::Pull => {
                count > 0 && count <= MOST_SEGMENTS && body == TAG_BYTES + count * SEGMENT_BYTES && payload == 0
            }
            Kind::Land => body == TAG_BYTES && payload == 0 && count == 0,
            Kind::Worker => body > 0 && body <= MOST_MESSAGE_BYTES && payload == 0 && count == 0,
            Kind::Write => is_list && is_piece,
            Kind::Data => body == 0 && is_piece,
            Kind::Message => body <= MOST_MESSAGE_BYTES && payload == 0 && count <= 1,
            Kind::Refused => body == 0 && payload == 0 && Refusal::from_wire(header.count).is_some(),
            Kind::Taken => body == 0 && payload == 0 && count <= MESSAGE_WINDOW,
            Kind::Ready | Kind::Written | Kind::Map | Kind::Mapped | Kind::Revoke | Kind::Unmapped => {
                body == 0 && payload == 0 && count == 0
            }
        };
        let is_zero = bytes[9] == 0 && bytes[12..16] == [0; 4];
        if fits && is_zero && body <= MOST_BODY_BYTES { Ok(header) } else { Err(broken("a frame with a wrong length")) }
    }

    /// Errors unless who sent it has the key, and it is frame number `sequence`.
    pub fn check(bytes: &[u8; HEADER_BYTES], body: &[u8], key: &Key, sequence: u64) -> Result<()> {
        let said = u64::from_le_bytes(bytes[24..32].try_into().expect("eight bytes"));
        // One comparison of whole words: its time tells nothing.
        match said ^ tag(key, sequence, &bytes[..24], body) {
            0 => Ok(()),
            _ => Err(broken("a frame that was not sent by the peer, or not now")),
        }
    }
}

/// Of frame number `sequence` of its direction.
pub fn tag(key: &Key, sequence: u64, header: &[u8], body: &[u8]) -> u64 {
    let sequence = sequence.to_le_bytes();
    let mut short = [0; SHORT_BYTES];
    let bytes = sequence.len() + header.len() + body.len();
    let hash = match short.get_mut(..bytes) {
        // In one piece: a hasher is 2 KB, and costs more than what it hashes here.
        Some(short) => {
            short[..8].copy_from_slice(&sequence);
            short[8..8 + header.len()].copy_from_slice(header);
            short[8 + header.len()..].copy_from_slice(body);
            blake3::keyed_hash(key, short)
        }
        None => blake3::Hasher::new_keyed(key).update(&sequence).update(header).update(body).finalize(),
    };
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// The list's bytes.
pub fn segments_to_wire(segments: &[WireSegment]) -> Vec<u8> {
    let words = segments.iter().flat_map(|segment| [segment.name, segment.offset, segment.bytes]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// The list in a body, if each of them has bytes and they are at most one piece together, and as many as `payload`
/// says if there is one.
pub fn segments_from_wire(body: &[u8], payload: u32) -> Result<Vec<WireSegment>> {
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let segments: Vec<WireSegment> = body
        .chunks_exact(SEGMENT_BYTES)
        .map(|bytes| WireSegment { name: word(bytes, 0), offset: word(bytes, 8), bytes: word(bytes, 16) })
        .collect();
    let mut total = 0u64;
    for segment in &segments {
        total = total.saturating_add(segment.bytes);
        if segment.bytes == 0 || total > PIECE_BYTES {
            return Err(broken("segments of no bytes, or of too many"));
        }
    }
    match payload == 0 || u64::from(payload) == total {
        true => Ok(segments),
        false => Err(broken("segments of other lengths than the payload's")),
    }
}

/// The tag at the head of a body, and what follows it.
pub fn split_tag(body: &[u8]) -> (u64, &[u8]) {
    let (tag, rest) = body.split_at(TAG_BYTES);
    (u64::from_le_bytes(tag.try_into().expect("eight bytes")), rest)
}

/// The first record, by who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Drawn for each session.
    pub session: [u8; 16],
    /// Of the side that connects.
    pub epoch: u64,
    /// Of this connection within the session.
    pub index: u16,
    pub connections: u16,
    /// TLS follows.
    pub is_encrypted: bool,
    /// The bytes of transfers go through UCX.
    pub is_ucx: bool,
    pub nonce: [u8; 32],
}

impl Hello {
    pub fn to_wire(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.index.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.connections.to_le_bytes());
        bytes[14] = u8::from(self.is_encrypted);
        bytes[15] = u8::from(self.is_ucx);
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.session);
        bytes[40..72].copy_from_slice(&self.nonce);
        bytes
    }

    pub fn from_wire(bytes: &[u8; HELLO_BYTES]) -> Result<Hello> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        check_version(bytes)?;
        let hello = Hello {
            index: half(10),
            connections: half(12),
            is_encrypted: is_encrypted(bytes)?,
            is_ucx: is_ucx(bytes)?,
            epoch: u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes")),
            session: bytes[24..40].try_into().expect("sixteen bytes"),
            nonce: bytes[40..72].try_into().expect("32 bytes"),
        };
        let is_one_of_them = hello.index < hello.connections && hello.connections <= MOST_CONNECTIONS;
        if is_one_of_them { Ok(hello) } else { Err(broken("a connection of a number out of range")) }
    }
}

/// The second record, by who listens: its epoch, its nonce and the proof that it has the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub epoch: u64,
    /// TLS follows.
    pub is_encrypted: bool,
    pub nonce: [u8; 32],
    pub proof: [u8; 32],
}

impl Answer {
    pub fn to_wire(self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[14] = u8::from(self.is_encrypted);
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.nonce);
        bytes[56..88].copy_from_slice(&self.proof);
        bytes
    }

    pub fn from_wire(bytes: &[u8; ANSWER_BYTES]) -> Result<Answer> {
        check_version(bytes)?;
        // The proof covers the record as it is written here. So what is not written is not believed.
        if [&bytes[10..14], &bytes[15..16], &bytes[88..]].concat().iter().any(|byte| *byte != 0) {
            return Err(broken("an answer with more than an answer has"));
        }
        Ok(Answer {
            is_encrypted: is_encrypted(bytes)?,
            epoch: u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes")),
            nonce: bytes[24..56].try_into().expect("32 bytes"),
            proof: bytes[56..88].try_into().expect("32 bytes"),
        })
    }
}

fn check_version(bytes: &[u8]) -> Result<()> {
    if bytes[0..8] != MAGIC.to_le_bytes() {
        return Err(broken("no record of a transfer").hint("is the address that of a transfer endpoint?"));
    }
    match u16::from_le_bytes([bytes[8], bytes[9]]) {
        VERSION => Ok(()),
        other => Err(Error::new(ErrorKind::Unsupported, "the peer speaks another version")
            .with("its", other)
            .with("ours", VERSION)
            .hint("use the same release on both sides")),
    }
}

/// Of the first two records. Before there was encryption, it was 0.
fn is_encrypted(bytes: &[u8]) -> Result<bool> {
    match bytes[14] {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(broken("a record of another kind of encryption")),
    }
}

/// Of the first record. Before there was UCX, it was 0.
fn is_ucx(bytes: &[u8]) -> Result<bool> {
    match bytes[15] {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(broken("a record of another kind of transport")),
    }
}

/// A peer that breaks the rules is disconnected.
pub fn broken(what: &'static str) -> Error {
    let hint = "is something else connected to this address, or something between the two that changes bytes?";
    Error::new(ErrorKind::Corrupt, "a peer broke the protocol").with("sent", what).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [7; 32];

    #[test]
    fn a_frame_comes_back_and_only_in_its_turn() {
        let body = segments_to_wire(&[WireSegment { name: 9, offset: 4096, bytes: 64 }]);
        let header = Header { kind: Kind::Read, count: 1, body: body.len() as u32, payload: 0, op: 77 };
        let bytes = header.sealed(&KEY, 5, &body);
        assert_eq!(Header::parse(&bytes).unwrap(), header);
        Header::check(&bytes, &body, &KEY, 5).unwrap();
        assert!(Header::check(&bytes, &body, &KEY, 6).is_err(), "a replay");
        assert!(Header::check(&bytes, &body, &[8; 32], 5).is_err(), "another key");
        for at in 0..bytes.len() + body.len() {
            let (mut bytes, mut body) = (bytes, body.clone());
            match at.checked_sub(bytes.len()) {
                None => bytes[at] ^= 1,
                Some(at) => body[at] ^= 1,
            }
            assert!(Header::check(&bytes, &body, &KEY, 5).is_err(), "byte {at} is not covered");
        }
    }

    #[test]
    fn a_tag_is_the_same_however_it_is_computed() {
        for bytes in [0, 24, SHORT_BYTES - 32, SHORT_BYTES - 31, 5000] {
            let body: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
            let whole = [&7u64.to_le_bytes()[..], &[3; 24], &body].concat();
            let hash = blake3::keyed_hash(&KEY, &whole);
            assert_eq!(tag(&KEY, 7, &[3; 24], &body).to_le_bytes(), hash.as_bytes()[..8], "{bytes}");
        }
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let sealed = |kind, count, body, payload| Header { kind, count, body, payload, op: 1 }.sealed(&KEY, 0, &[]);
        for (kind, count, body, payload) in [
            (Kind::Read, 0, 0, 0),
            (Kind::Read, 2, 24, 0),
            (Kind::Read, 1, 24, 1),
            (Kind::Read, 1025, 24 * 1025, 0),
            (Kind::Read, 1, u32::MAX, 0),
            (Kind::Write, 1, 24, 0),
            (Kind::Write, 1, 24, (1 << 20) + 1),
            (Kind::Data, 0, 0, 0),
            (Kind::Data, 0, 0, u32::MAX),
            (Kind::Message, 0, (64 << 10) + 1, 0),
            (Kind::Message, 2, 1, 0),
            (Kind::Refused, 0, 0, 0),
            (Kind::Refused, 9, 0, 0),
            (Kind::Taken, 65, 0, 0),
            (Kind::Ready, 0, 1, 0),
        ] {
            assert!(Header::parse(&sealed(kind, count, body, payload)).is_err(), "{kind:?} {count} {body} {payload}");
        }
        let list = |bytes| segments_to_wire(&[WireSegment { name: 1, offset: 0, bytes }]);
        assert!(segments_from_wire(&list(0), 0).is_err());
        assert!(segments_from_wire(&list(PIECE_BYTES + 1), 0).is_err());
        assert!(segments_from_wire(&list(u64::MAX), 0).is_err());
        assert!(segments_from_wire(&list(64), 65).is_err());
        assert_eq!(segments_from_wire(&list(64), 64).unwrap().len(), 1);
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        /// A frame whose tag is made right again, as a peer can that knows the secret.
        fn retag(bytes: &mut [u8]) {
            let Some((header, body)) = bytes.split_first_chunk_mut::<HEADER_BYTES>() else { return };
            let tag = tag(&KEY, 5, &header[..24], body);
            header[24..].copy_from_slice(&tag.to_le_bytes());
        }

        #[test]
        fn whatever_a_peer_sends_is_a_frame_as_it_was_sent_or_ends_the_session() {
            let list = segments_to_wire(&[segment(9, 4096, 64), segment(u64::MAX, 0, 1)]);
            let frame = |kind, count, body: &[u8], payload| {
                let header = Header { kind, count, body: body.len() as u32, payload, op: 77 };
                [&header.sealed(&KEY, 5, body)[..], body].concat()
            };
            let inputs = vec![
                frame(Kind::Read, 2, &list, 0),
                frame(Kind::Write, 2, &list, 65),
                frame(Kind::Data, 0, &[], 1 << 20),
                frame(Kind::Message, 1, b"a notice", 0),
                frame(Kind::Refused, 4, &[], 0),
                frame(Kind::Taken, 64, &[], 0),
                frame(Kind::Map, 0, &[], 0),
            ];
            Target::new("frames", inputs).mended(retag).cases(40_000).run(|bytes| {
                let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return (0, false, 0) };
                let Ok(header) = Header::parse(head) else { return (1, false, 0) };
                assert!(header.body as usize <= MOST_BODY_BYTES && u64::from(header.payload) <= PIECE_BYTES);
                let Some(body) = body.get(..header.body as usize) else { return (2, false, 0) };
                let is_sent = Header::check(head, body, &KEY, 5).is_ok();
                assert_eq!(is_sent, header.sealed(&KEY, 5, body) == *head, "the tag is of what was read");
                let segments = segments_from_wire(body, header.payload);
                if let Ok(segments) = &segments {
                    let whole = body.len() - body.len() % SEGMENT_BYTES;
                    assert_eq!(segments_to_wire(segments), body[..whole], "segments are read as they were written");
                    assert!(segments.iter().map(|segment| segment.bytes).sum::<u64>() <= PIECE_BYTES);
                }
                (3 + header.kind as u32, is_sent, segments.map_or(0, |segments| 1 + segments.len()))
            });
        }

        #[test]
        fn whatever_a_stranger_says_first_is_one_greeting_or_none() {
            let (is_encrypted, nonce) = (true, [2; 32]);
            let hello =
                Hello { session: [1; 16], epoch: 5, index: 1, connections: 2, is_encrypted, is_ucx: false, nonce };
            let answer = Answer { epoch: 7, is_encrypted, nonce: [3; 32], proof: [4; 32] };
            let inputs = vec![hello.to_wire().to_vec(), answer.to_wire().to_vec()];
            Target::new("greetings", inputs).cases(40_000).run(|bytes| {
                let Some(bytes) = bytes.first_chunk::<HELLO_BYTES>() else { return (0, 0) };
                let (hello, answer) = (Hello::from_wire(bytes), Answer::from_wire(bytes));
                if let Ok(hello) = hello {
                    assert_eq!(Hello::from_wire(&hello.to_wire()).unwrap(), hello);
                    assert!(hello.index < hello.connections && hello.connections <= MOST_CONNECTIONS);
                }
                if let Ok(answer) = answer {
                    // The proof covers all that came.
                    assert_eq!(answer.to_wire(), *bytes);
                }
                (1 + hello.map_or(0, |hello| hello.connections), u32::from(answer.is_ok()))
            });
        }

        fn segment(name: u64, offset: u64, bytes: u64) -> WireSegment {
            WireSegment { name, offset, bytes }
        }
    }
}
