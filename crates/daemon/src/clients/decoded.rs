//! How much memory a message will take once it is decoded, found while it arrives.
//!
//! Empty entries of a list take two bytes on the wire and up to fifty in memory, so a limit on a message's length alone
//! lets a client take many times as much. Whatever this cannot follow it refuses, so nothing passes that the decoder
//! would read in another way.

use forebay_core::{Error, Result};
use forebay_rpc::lists::{Entries, Lists};

/// A message may take so many times its length. Usual ones take up to 1.3 times as much, queue hints of one key 3
/// times, and a `Put` of blocks of one byte under short hashes 6 times.
const MOST_TIMES: u64 = 6;

/// The message so far.
pub struct Decoded {
    /// The messages that the next byte is in, the outermost first.
    levels: Vec<Level>,
    step: Step,
    /// Of the number that is being read.
    value: u64,
    shift: u32,
    /// Bytes seen.
    at: u64,
    /// Of its lists, once decoded.
    bytes: u64,
    most: u64,
}

struct Level {
    lists: &'static Lists,
    end: u64,
}

#[derive(Clone, Copy)]
enum Step {
    /// A field's number and kind.
    Key,
    /// A number; whether it is a list's.
    Number(bool),
    /// The length of a field that has one.
    Length(Option<Entries>),
    /// So many bytes mean nothing here.
    Pass(u64),
    /// So many bytes are numbers of a list.
    Numbers(u64),
}

impl Decoded {
    /// Of a message of `length` bytes, which has these lists, after `prefix` other bytes.
    pub fn new(lists: &'static Lists, prefix: usize, length: u64) -> Decoded {
        Decoded {
            levels: vec![Level { lists, end: prefix as u64 + length }],
            step: Step::Pass(prefix as u64),
            value: 0,
            shift: 0,
            at: 0,
            bytes: 0,
            most: length * MOST_TIMES,
        }
    }

    /// The next bytes of the message. An error if it would take too much memory, or cannot be read.
    pub fn see(&mut self, mut bytes: &[u8]) -> Result<()> {
        while let Some((first, rest)) = bytes.split_first() {
            bytes = match self.step {
                Step::Pass(count) => {
                    let (passed, rest) = bytes.split_at(bytes.len().min(count as usize));
                    self.at += passed.len() as u64;
                    self.step = of_length(Step::Pass, count - passed.len() as u64);
                    rest
                }
                Step::Numbers(count) => {
                    let (numbers, rest) = bytes.split_at(bytes.len().min(count as usize));
                    self.at += numbers.len() as u64;
                    self.add(8 * numbers.iter().filter(|byte| **byte < 0x80).count() as u64)?;
                    self.step = of_length(Step::Numbers, count - numbers.len() as u64);
                    rest
                }
                Step::Key | Step::Number(_) | Step::Length(_) => {
                    self.at += 1;
                    self.number(*first)?;
                    rest
                }
            };
            self.leave();
        }
        Ok(())
    }

    /// One more byte of a number.
    fn number(&mut self, byte: u8) -> Result<()> {
        self.value |= u64::from(byte & 0x7f).checked_shl(self.shift).unwrap_or_default();
        self.shift += 7;
        if byte >= 0x80 {
            return if self.shift < 70 { Ok(()) } else { Err(unreadable()) };
        }
        let value = std::mem::take(&mut self.value);
        self.shift = 0;
        self.step = match self.step {
            Step::Number(is_listed) => {
                self.add(if is_listed { 8 } else { 0 })?;
                Step::Key
            }
            Step::Length(entries) => self.enter(entries, value)?,
            _ => self.field(value)?,
        };
        self.within(self.at)
    }

    fn field(&self, key: u64) -> Result<Step> {
        let entries = self.level().lists.field(key >> 3);
        match key & 7 {
            0 => Ok(Step::Number(matches!(entries, Some(Entries::Numbers)))),
            1 => self.pass(8),
            2 => Ok(Step::Length(entries)),
            5 => self.pass(4),
            // Groups, which proto3 does not have.
            _ => Err(unreadable()),
        }
    }

    fn enter(&mut self, entries: Option<Entries>, length: u64) -> Result<Step> {
        match entries {
            None => self.pass(length),
            Some(Entries::Numbers) => self.pass(length).map(|_| of_length(Step::Numbers, length)),
            Some(Entries::Lengths { bytes, of }) => {
                self.pass(length)?;
                self.add(bytes as u64)?;
                self.levels.push(Level { lists: of, end: self.at + length });
                Ok(Step::Key)
            }
        }
    }

    fn pass(&self, length: u64) -> Result<Step> {
        self.within(self.at.saturating_add(length))?;
        Ok(of_length(Step::Pass, length))
    }

    fn within(&self, end: u64) -> Result<()> {
        if end <= self.level().end { Ok(()) } else { Err(unreadable()) }
    }

    fn add(&mut self, bytes: u64) -> Result<()> {
        self.bytes += bytes;
        if self.bytes <= self.most {
            return Ok(());
        }
        Err(Error::invalid("the message's lists would take too much memory")
            .with("limit", self.most)
            .hint("leave out empty entries, and send the rest in several calls"))
    }

    /// Leaves the messages that end here; never the outermost.
    fn leave(&mut self) {
        while matches!(self.step, Step::Key) && self.shift == 0 && self.levels.len() > 1 && self.level().end == self.at
        {
            self.levels.pop();
        }
    }

    fn level(&self) -> &Level {
        self.levels.last().expect("the outermost is never left")
    }
}

fn of_length(step: fn(u64) -> Step, length: u64) -> Step {
    if length == 0 { Step::Key } else { step(length) }
}

fn unreadable() -> Error {
    Error::invalid("the message cannot be read")
}

#[cfg(test)]
mod tests {
    use forebay_fuzz::Target;
    use forebay_rpc::lists;
    use forebay_rpc::proto::*;
    use prost::Message;

    use super::*;

    const PREFIX: usize = 5;

    /// Sees the message in pieces of some bytes.
    fn see(path: &str, message: &[u8], piece: usize) -> Result<()> {
        let mut decoded = Decoded::new(lists::of(path), PREFIX, message.len() as u64);
        [&[0; PREFIX], message].concat().chunks(piece).try_for_each(|piece| decoded.see(piece))
    }

    fn held(count: usize) -> Vec<Held> {
        (0..count as u32).map(|n| Held { slot: n * 1000, generation: n + 1 }).collect()
    }

    fn keys(group: u32, count: usize) -> GroupKeys {
        GroupKeys { group, hash_bytes: 32, hashes: vec![0x12; 32 * count] }
    }

    /// What clients send, small and large.
    fn usual() -> Vec<(&'static str, Vec<u8>)> {
        let groups = |count| (0..4).map(|group| keys(group, count)).collect::<Vec<_>>();
        let blocks = |count: usize| GroupBlocks {
            group: 1,
            hash_bytes: 32,
            hashes: vec![0x34; 32 * count],
            predecessor: vec![1; 32],
            slots: vec![77_777; count],
            generations: vec![3; count],
        };
        let hint = |request| QueueHint { request, groups: vec![keys(0, 1)] };
        let put = |bytes| Block { hash: vec![9; 32], data: vec![0x81; bytes] };
        let session = OpenSessionRequest { leases: held(30_000), reservations: held(500), ..Default::default() };
        let fields = (0..20).map(|n| (format!("a field called {n}"), "and what it says".to_owned())).collect();
        let group = |group| Group { group, tokens_per_block: 16, rank_bytes: vec![65_536; 8], ..Default::default() };
        vec![
            ("OpenSession", session.encode_to_vec()),
            (
                "OpenNamespace",
                OpenNamespaceRequest { session: 1, fields, groups: (0..9).map(group).collect() }.encode_to_vec(),
            ),
            ("Lookup", LookupRequest { session: 1, namespace: 2, groups: groups(5000) }.encode_to_vec()),
            ("Lookup", LookupRequest { session: 1, namespace: 2, groups: groups(1) }.encode_to_vec()),
            ("Hint", HintRequest { hints: (0..9000).map(hint).collect(), ..Default::default() }.encode_to_vec()),
            (
                "Release",
                ReleaseRequest { leases: (1 << 20..1 << 20 | 5000).collect(), ..Default::default() }.encode_to_vec(),
            ),
            ("Commit", CommitRequest { session: 7, namespace: 1, groups: vec![blocks(4000); 3] }.encode_to_vec()),
            ("Abort", AbortRequest { session: 7, slots: held(10_000), are_unused: true }.encode_to_vec()),
            ("Put", PutRequest { blocks: vec![put(70_000), put(70_000)], ..Default::default() }.encode_to_vec()),
            (
                "Put",
                PutRequest { blocks: vec![Block { hash: vec![9; 3], data: vec![1] }; 50_000], ..Default::default() }
                    .encode_to_vec(),
            ),
            ("Get", GetRequest { hashes: vec![5; 64_000], ..Default::default() }.encode_to_vec()),
        ]
    }

    fn path(method: &str) -> String {
        format!("/forebay.v1.Forebay/{method}")
    }

    #[test]
    fn usual_messages_pass_however_they_are_cut() {
        for (method, message) in usual() {
            for piece in [1, 2, 3, 7, 64, 1021, usize::MAX] {
                see(&path(method), &message, piece).unwrap_or_else(|error| panic!("{method}, by {piece}: {error}"));
            }
        }
    }

    #[test]
    fn lists_of_empty_entries_and_of_short_numbers_are_refused() {
        // A field's number with its kind, and what repeats behind it.
        for (method, field, entry) in [
            ("Commit", 3, &[0][..]),
            ("Lookup", 3, &[0]),
            ("Hint", 4, &[0]),
            ("Hint", 4, &[2, 0x12, 0]),
            ("OpenNamespace", 2, &[0]),
            ("OpenNamespace", 3, &[0]),
            ("OpenNamespace", 3, &[4, 0x2a, 2, 1, 1]),
            ("Release", 2, &[10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
            ("Put", 5, &[0]),
        ] {
            let message = [&[field << 3 | 2], entry].concat().repeat(10_000);
            for piece in [1, 5, usize::MAX] {
                let refused = see(&path(method), &message, piece).unwrap_err();
                assert!(refused.to_string().contains("too much memory"), "{method}: {refused}");
            }
        }
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        let unreadable: [&[u8]; 7] = [
            // A group, a message longer than the one around it, a number without an end.
            &[0x1b, 0x1a, 0, 0x1c],
            &[0x1a, 2, 0x1a, 5, 0, 0, 0],
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            // Numbers, texts and lengths that go on beyond their message.
            &[0x1a, 2, 0x08, 0x80, 0, 0, 0],
            &[0x1a, 1, 0x1a, 1, 0],
            &[0x1a, 2, 0x0d, 0, 0, 0, 0],
            &[0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0],
        ];
        for message in unreadable {
            // Behind a field that means nothing, of 200 bytes.
            let message = [&[0x7a, 0xc8, 1], &[0; 200][..], message].concat();
            let refused = see(&path("Commit"), &message, 1).unwrap_err();
            assert!(refused.to_string().contains("cannot be read"), "{message:?}: {refused}");
        }
    }

    #[test]
    fn what_passes_is_decoded_in_a_few_times_its_length() {
        // A vector that grows has up to three times its bytes for a moment.
        const TIMES: usize = 1 + 3 * MOST_TIMES as usize;
        fn run<M: Message + Default>(method: &'static str) {
            let inputs = usual().into_iter().filter(|(of, _)| *of == method).map(|(_, message)| {
                let short = message.len().min(20_000);
                message[..short].to_vec()
            });
            let path = path(method);
            Target::new(method, inputs.collect()).cases(2000).allocates(TIMES, 16 << 10).run(|message| {
                let seen = see(&path, message, 1000).map_err(|error| error.to_string());
                seen.map(|()| M::decode(message).is_ok())
            });
        }
        run::<OpenSessionRequest>("OpenSession");
        run::<OpenNamespaceRequest>("OpenNamespace");
        run::<LookupRequest>("Lookup");
        run::<HintRequest>("Hint");
        run::<ReleaseRequest>("Release");
        run::<CommitRequest>("Commit");
        run::<AbortRequest>("Abort");
        run::<PutRequest>("Put");
    }
}
