//! The part of RESP2 that a cache needs: commands are written into a buffer, replies are read as they arrive.
//!
//! Invariant: only valid replies are accepted. A line that is too long, a malformed number or a length above the
//! servers' limit is a [`LostStep`], after which a connection cannot be used. A reply's line is parsed for every
//! value; for the expected length that is about ten bytes, too few to be worth a shortcut.

/// Longest line that a server may send; error texts are a few hundred bytes.
const LONGEST_LINE: usize = 8 << 10;
/// Servers allow values of 512 MiB by default.
const LONGEST_BULK: u64 = 1 << 30;
/// More than `CLUSTER SLOTS` of a thousand nodes needs.
const MOST_ITEMS: i64 = 1 << 20;
const DEEPEST: u32 = 8;

/// The stream violates the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LostStep(pub &'static str);

/// First line of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Head<'a> {
    Simple(&'a [u8]),
    Error(&'a [u8]),
    Integer(i64),
    /// This many bytes and an end of line follow.
    Bulk(u64),
    Null,
    /// This many replies follow.
    Array(i64),
}

/// The line at the start of `bytes` and its length; `None` if more must arrive.
pub fn head(bytes: &[u8]) -> Result<Option<(Head<'_>, usize)>, LostStep> {
    let Some(end) = bytes.iter().take(LONGEST_LINE).position(|byte| *byte == b'\n') else {
        let is_too_long = bytes.len() >= LONGEST_LINE;
        return if is_too_long { Err(LostStep("a reply's line is too long")) } else { Ok(None) };
    };
    let Some((kind, text)) = bytes[..end].strip_suffix(b"\r").and_then(|line| line.split_first()) else {
        return Err(LostStep("a reply's line is not valid"));
    };
    let head = match kind {
        b'+' => Head::Simple(text),
        b'-' => Head::Error(text),
        b':' => Head::Integer(number(text)?),
        b'$' => match number(text)? {
            -1 => Head::Null,
            len @ 0.. if len as u64 <= LONGEST_BULK => Head::Bulk(len as u64),
            _ => return Err(LostStep("a reply's length is not valid")),
        },
        b'*' => match number(text)? {
            -1 => Head::Null,
            items @ 0..=MOST_ITEMS => Head::Array(items),
            _ => return Err(LostStep("a reply's number of items is not valid")),
        },
        _ => return Err(LostStep("a reply begins with an unknown type")),
    };
    Ok(Some((head, end + 1)))
}

fn number(text: &[u8]) -> Result<i64, LostStep> {
    let is_plain = text.iter().enumerate().all(|(at, byte)| byte.is_ascii_digit() || (at == 0 && *byte == b'-'));
    let number = std::str::from_utf8(text).ok().filter(|_| is_plain).and_then(|text| text.parse().ok());
    number.ok_or(LostStep("a reply's number is not valid"))
}

/// A server's error, as a person may read it. A server that does not know a command repeats its arguments: a password,
/// or the name of a block. Control characters would reach a terminal.
pub fn said(error: &[u8]) -> String {
    let text = String::from_utf8_lossy(error);
    let text = text.split(", with args beginning with").next().unwrap_or_default();
    let shown = |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.into() };
    text.chars().map(shown).collect()
}

/// A whole reply, for the few that carry no block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    Text(Vec<u8>),
    Error(String),
    Integer(i64),
    Null,
    Array(Vec<Reply>),
}

impl Reply {
    pub fn text(&self) -> Option<&str> {
        match self {
            Reply::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    pub fn integer(&self) -> Option<i64> {
        match self {
            Reply::Integer(number) => Some(*number),
            _ => None,
        }
    }

    pub fn error(&self) -> Option<&str> {
        match self {
            Reply::Error(text) => Some(text),
            _ => None,
        }
    }

    pub fn items(&self) -> Option<&[Reply]> {
        match self {
            Reply::Array(items) => Some(items),
            _ => None,
        }
    }
}

/// The reply at the start of `bytes` and its length; `None` if more must arrive.
pub fn reply(bytes: &[u8]) -> Result<Option<(Reply, usize)>, LostStep> {
    nested(bytes, DEEPEST)
}

fn nested(bytes: &[u8], depth: u32) -> Result<Option<(Reply, usize)>, LostStep> {
    let Some((head, mut end)) = head(bytes)? else { return Ok(None) };
    let reply = match head {
        Head::Simple(text) => Reply::Text(text.to_vec()),
        Head::Error(text) => Reply::Error(said(text)),
        Head::Integer(number) => Reply::Integer(number),
        Head::Null => Reply::Null,
        Head::Bulk(len) => {
            let (begin, len) = (end, len as usize);
            end += len + 2;
            let Some(body) = bytes.get(begin..end) else { return Ok(None) };
            if !body.ends_with(b"\r\n") {
                return Err(LostStep("a value does not end with a line break"));
            }
            Reply::Text(body[..len].to_vec())
        }
        Head::Array(_) if depth == 0 => return Err(LostStep("a reply is nested too deeply")),
        Head::Array(count) => {
            let mut items = Vec::new();
            for _ in 0..count {
                let Some((item, len)) = nested(&bytes[end..], depth - 1)? else { return Ok(None) };
                items.push(item);
                end += len;
            }
            Reply::Array(items)
        }
    };
    Ok(Some((reply, end)))
}

/// Appends a command whose arguments are all short.
pub fn command(out: &mut Vec<u8>, arguments: &[&[u8]]) {
    begin(out, arguments.len());
    arguments.iter().for_each(|argument| bulk(out, argument));
}

/// Appends the beginning of a command with this many arguments.
pub fn begin(out: &mut Vec<u8>, arguments: usize) {
    line(out, b'*', arguments as u64);
}

pub fn bulk(out: &mut Vec<u8>, argument: &[u8]) {
    bulk_head(out, argument.len() as u64);
    out.extend_from_slice(argument);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of an argument of `len` bytes; the argument and an end of line must follow.
pub fn bulk_head(out: &mut Vec<u8>, len: u64) {
    line(out, b'$', len);
}

fn line(out: &mut Vec<u8>, kind: u8, number: u64) {
    out.push(kind);
    decimal(out, number);
    out.extend_from_slice(b"\r\n");
}

/// Appends a decimal number.
pub fn decimal(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(digits(number, &mut [0; 20]));
}

/// A decimal number, in `buffer`.
pub fn digits(mut number: u64, buffer: &mut [u8; 20]) -> &[u8] {
    let mut at = buffer.len();
    loop {
        at -= 1;
        buffer[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &buffer[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_error_is_said_without_arguments_and_control_characters() {
        for (error, said) in [
            ("ERR unknown command 'AUTH', with args beginning with: 's3cret' ", "ERR unknown command 'AUTH'"),
            ("ERR unknown command `AUTH`, with args beginning with: `s3cret`, ", "ERR unknown command `AUTH`"),
            ("ERR \u{1b}[2J\u{7}done", "ERR \\u{1b}[2J\\u{7}done"),
            ("WRONGPASS invalid", "WRONGPASS invalid"),
        ] {
            assert_eq!(super::said(error.as_bytes()), said);
        }
        let reply = reply(b"-ERR unknown command 'AUTH', with args beginning with: 'x'\r\n").unwrap().unwrap().0;
        assert_eq!(reply.error(), Some("ERR unknown command 'AUTH'"));
    }

    #[test]
    fn each_type_is_read() {
        assert_eq!(head(b"+OK\r\n:1"), Ok(Some((Head::Simple(b"OK"), 5))));
        assert_eq!(head(b"-OOM command\r\n"), Ok(Some((Head::Error(b"OOM command"), 14))));
        assert_eq!(head(b":-7\r\n"), Ok(Some((Head::Integer(-7), 5))));
        assert_eq!(head(b"$1048672\r\nxx"), Ok(Some((Head::Bulk(1_048_672), 10))));
        assert_eq!(head(b"$-1\r\n"), Ok(Some((Head::Null, 5))));
        assert_eq!(head(b"*2\r\n"), Ok(Some((Head::Array(2), 4))));
    }

    #[test]
    fn what_is_no_reply_is_lost_step() {
        let long = [b'x'; LONGEST_LINE];
        let bad: [&[u8]; 11] = [
            b"\r\n",
            b"+OK\n",
            b"\n",
            b"!x\r\n",
            b":\r\n",
            b":1x\r\n",
            b"$-2\r\n",
            b"$+5\r\n",
            b"*-2\r\n",
            b"$99999999999\r\n",
            &long,
        ];
        for bytes in bad {
            assert!(head(bytes).is_err(), "{:?}", String::from_utf8_lossy(bytes));
        }
        assert!(reply(&b"*1\r\n".repeat(20)).is_err(), "endless nesting");
        assert!(reply(b"$2\r\nabc\r\n").is_err(), "a value longer than it says");
    }

    #[test]
    fn commands_are_written_as_servers_read_them() {
        let mut out = Vec::new();
        command(&mut out, &[b"SET", b"key", b""]);
        bulk_head(&mut out, u64::MAX);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$0\r\n\r\n$18446744073709551615\r\n");
    }

    fn replies() -> impl Strategy<Value = Reply> {
        let leaf = prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Reply::Text),
            "[A-Z]{2,9} [a-z]{0,20}".prop_map(Reply::Error),
            any::<i64>().prop_map(Reply::Integer),
            Just(Reply::Null),
        ];
        leaf.prop_recursive(4, 30, 5, |inner| proptest::collection::vec(inner, 0..5).prop_map(Reply::Array))
    }

    fn write(reply: &Reply, out: &mut Vec<u8>) {
        match reply {
            Reply::Text(bytes) => bulk(out, bytes),
            Reply::Error(text) => out.extend_from_slice(format!("-{text}\r\n").as_bytes()),
            Reply::Integer(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
            Reply::Null => out.extend_from_slice(b"$-1\r\n"),
            Reply::Array(items) => {
                begin(out, items.len());
                items.iter().for_each(|item| write(item, out));
            }
        }
    }

    proptest! {
        #[test]
        fn a_reply_is_read_when_it_is_whole_and_not_before(expected in replies()) {
            let mut bytes = Vec::new();
            write(&expected, &mut bytes);
            for cut in 0..bytes.len() {
                prop_assert_eq!(reply(&bytes[..cut]), Ok(None));
            }
            let whole = bytes.len();
            bytes.extend_from_slice(b"+next\r\n");
            prop_assert_eq!(reply(&bytes), Ok(Some((expected, whole))));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = reply(&bytes);
            let _ = head(&bytes);
        }
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        /// A reply in bytes, and the head that begins it, as servers and sentinels send them.
        fn sent() -> Vec<Vec<u8>> {
            let map: &[u8] = b"*2\r\n*4\r\n:0\r\n:8000\r\n*3\r\n$8\r\n10.0.0.2\r\n:7000\r\n$2\r\nid\r\n*2\r\n$8\r\n10.0.0.9\r\n:1\r\n\
                *3\r\n:8001\r\n:16383\r\n*2\r\n$0\r\n\r\n:7001\r\n";
            let scan: &[u8] = b"*2\r\n$3\r\n512\r\n*2\r\n$9\r\nforebay:1\r\n$9\r\nforebay:2\r\n";
            let short: [&[u8]; 8] = [
                b"+OK\r\n",
                b"-MOVED 3999 10.0.0.2:6381\r\n",
                b":-9223372036854775808\r\n",
                b"$-1\r\n",
                b"$5\r\nhello\r\n",
                b"*-1\r\n",
                b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*0\r\n",
                b"*2\r\n$3\r\n::1\r\n$4\r\n7000\r\n",
            ];
            short.into_iter().chain([map, scan]).map(<[u8]>::to_vec).collect()
        }

        #[test]
        fn whatever_a_server_sends_is_one_reply_or_none() {
            let words: [&[u8]; 8] =
                [b"\r\n", b"$-1\r\n", b"*-1\r\n", b"*1048576\r\n", b"$1073741824\r\n", b"*0\r\n", b":1\r\n", b"-ERR "];
            Target::new("replies", sent()).words(&words).cases(60_000).run(|bytes| {
                let (first, whole) = (head(bytes), reply(bytes));
                if let Ok(Some((_, len))) = first {
                    assert!(len <= bytes.len(), "a line is longer than what came");
                }
                let (whole, len) = match whole {
                    Ok(Some(found)) => found,
                    Ok(None) => return ("it is not whole", 0),
                    Err(LostStep(why)) => return (why, 0),
                };
                assert_eq!(reply(&bytes[..len]), Ok(Some((whole.clone(), len))), "what follows a reply changes it");
                for cut in [0, len / 2, len - 1] {
                    assert_eq!(reply(&bytes[..cut]), Ok(None), "a part of a reply is one");
                }
                let mut written = Vec::new();
                write(&whole, &mut written);
                // A text that is no UTF-8 gets longer, and may be too long then.
                if written.len() < LONGEST_LINE {
                    assert_eq!(
                        reply(&written),
                        Ok(Some((whole.clone(), written.len()))),
                        "it is read as it was written"
                    );
                }
                ("a reply", shape(&whole))
            });
        }

        /// What tells replies apart.
        fn shape(reply: &Reply) -> u64 {
            match reply {
                Reply::Text(text) => 1 + u64::from(text.len().checked_ilog2().unwrap_or(0)),
                Reply::Error(_) => 20,
                Reply::Integer(number) => 21 + u64::from(*number < 0),
                Reply::Null => 23,
                Reply::Array(items) => {
                    items.iter().fold(24, |sum, item| sum.wrapping_mul(31).wrapping_add(shape(item)))
                }
            }
        }
    }
}
