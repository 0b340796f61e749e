//! Traces on disk, one JSON object per line, plain or zstd-compressed.
//!
//! There are three forms, distinguished by their fields:
//!
//! - Mooncake: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [..]}`, one id per 512
//!   tokens unless the lengths say otherwise;
//! - Qwen-Bailian: the same with `chat_id`, seconds in `timestamp`, and 16 tokens per block;
//! - our own: a first line `{"forebay_trace": 1, "namespaces": [{"block_tokens": 16, "block_bytes": 2097152}]}`, then
//!   `{"at_us": 0, "namespace": 0, "keys": ["00c0ffee..", ..]}` with salted hashes in hexadecimal; a later line like
//!   the first adds namespaces, with consecutive numbers.
//!
//! For any file content, [`MAX_LINE_BYTES`], [`MAX_ACCESSES`] and [`MAX_DIFFERENT`](crate::trace::MAX_DIFFERENT)
//! bound the memory to about 11 GiB, and errors name the line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use forebay_core::layout::Layout;
use forebay_core::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::trace::{Numbering, Shape, Trace};

/// A request of a million tokens in blocks of 16 has lines of half a megabyte.
pub const MAX_LINE_BYTES: usize = 16 << 20;
/// Each takes 4 bytes here and 4 for the optimum, and twice as much while the list grows.
pub const MAX_ACCESSES: usize = 256 << 20;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// For whoever names another file.
const NO_TRACE: &str = "name a trace of Mooncake or Qwen-Bailian, or one that `forebay trace record` wrote";

/// Facts about a trace that its file does not contain.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints {
    pub block_tokens: Option<u32>,
    pub block_bytes: Option<u64>,
    /// Ids name a block alone, without its predecessors.
    pub is_chaining: bool,
}

/// Reads the trace at `path`. Errors with `Io`, or with `Invalid` and the line.
pub fn read(path: &Path, hints: Hints) -> Result<Trace> {
    let file = |error| {
        let error = Error::new(ErrorKind::Io, "cannot read trace").with("path", path.display()).source(error);
        error.hint("name a file of one JSON object a line, as `forebay trace record` writes it; it may end in `.zst`")
    };
    let mut input = BufReader::with_capacity(1 << 20, File::open(path).map_err(file)?);
    let head = input.fill_buf().map_err(file)?;
    if head.starts_with(&GZIP_MAGIC) {
        let error = Error::invalid("the trace is compressed by gzip").with("path", path.display());
        return Err(error.hint("uncompress it with `gunzip`: a trace is plain, or compressed by zstd"));
    }
    let is_zstd = head.starts_with(&ZSTD_MAGIC);
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let name = name.trim_end_matches(".zst").trim_end_matches(".jsonl");
    let trace = if is_zstd {
        let decoder = ruzstd::decoding::StreamingDecoder::new(input);
        let mut decoder = decoder.map_err(|error| file(std::io::Error::other(error.to_string())))?;
        let trace = read_lines(name, BufReader::with_capacity(1 << 20, Decoded(&mut decoder)), hints);
        let (told, counted) = (decoder.decoder.get_checksum_from_data(), decoder.decoder.get_calculated_checksum());
        if trace.is_ok() && told.is_some() && told != counted {
            let error =
                Error::new(ErrorKind::Corrupt, "the trace's compressed bytes are damaged").with("path", path.display());
            return Err(error.hint("copy it anew"));
        }
        let anew = |error: Error| if error.kind() == ErrorKind::Io { error.hint("copy it anew") } else { error };
        trace.map_err(anew)
    } else {
        read_lines(name, input, hints)
    };
    trace.map_err(|error| error.with("path", path.display()))
}

/// What a decoder gives. Its own words for damage are about its inner parts.
struct Decoded<R>(R);

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer).map_err(|_| std::io::Error::other("its compressed bytes are damaged or cut short"))
    }
}

const HEADER: &str = "a header looks like \
                      `{\"forebay_trace\": 1, \"namespaces\": [{\"block_tokens\": 16, \"block_bytes\": 2097152}]}`";

/// Reads a trace from plain text.
pub fn read_lines(name: &str, mut input: impl BufRead, hints: Hints) -> Result<Trace> {
    let mut reading =
        Reading { trace: Trace::new(name, Vec::new()), numbering: Numbering::new(hints.is_chaining), hints };
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        if !next_line(&mut input, &mut line).map_err(|error| error.with("line", number))? {
            break;
        }
        if !line.iter().all(u8::is_ascii_whitespace) {
            reading.line(&line).map_err(|error| error.with("line", number))?;
        }
    }
    if reading.trace.is_empty() {
        return Err(Error::invalid("the trace has no requests")
            .hint("record one while engines ask the daemon: `forebay trace record FILE`"));
    }
    if reading.trace.accesses() == 0 {
        return Err(Error::invalid("the trace asks for no blocks")
            .hint("each request must list its blocks, in `keys` or `hash_ids`"));
    }
    Ok(reading.trace)
}

/// False at the end of the input. A last line without a line end is used as it is: if it was cut, it is not valid
/// JSON.
fn next_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool> {
    let limit = MAX_LINE_BYTES as u64 + 1;
    let read = input.by_ref().take(limit).read_until(b'\n', line);
    let read = read.map_err(|error| Error::new(ErrorKind::Io, "cannot read trace").source(error))?;
    if read as u64 == limit {
        return Err(Error::invalid("a line is longer than 16 MiB").hint("is this a trace of one request a line?"));
    }
    Ok(read > 0)
}

struct Reading {
    trace: Trace,
    numbering: Numbering,
    hints: Hints,
}

/// All forms in one struct: each line has the fields of its form.
#[derive(Deserialize)]
struct Line {
    // Mooncake and Bailian.
    timestamp: Option<f64>,
    input_length: Option<u64>,
    hash_ids: Option<Vec<u64>>,
    chat_id: Option<serde_json::Value>,
    // Our own.
    forebay_trace: Option<u32>,
    namespaces: Option<Vec<Described>>,
    at_us: Option<u64>,
    #[serde(default)]
    namespace: u16,
    keys: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Described {
    block_tokens: u32,
    block_bytes: u64,
}

impl Reading {
    fn line(&mut self, line: &[u8]) -> Result<()> {
        let line: Line = serde_json::from_slice(line).map_err(|error| {
            let (what, hint) = match error.is_eof() {
                true => ("a line is cut short", "get the whole file, or take the line out"),
                false => ("a line is not a request", NO_TRACE),
            };
            Error::invalid(what).with("column", error.column()).source(error).hint(hint)
        })?;
        match line {
            Line { forebay_trace: Some(version), namespaces, .. } => self.header(version, namespaces),
            Line { at_us: Some(at_us), keys: Some(keys), namespace, .. } => self.recorded(at_us, namespace, &keys),
            Line { timestamp: Some(at), hash_ids: Some(ids), input_length, chat_id, .. } => {
                self.published(at, input_length, &ids, chat_id.is_some())
            }
            _ => {
                Err(Error::invalid("a line has neither `timestamp` and `hash_ids` nor `at_us` and `keys`")
                    .hint(NO_TRACE))
            }
        }
    }

    fn header(&mut self, version: u32, namespaces: Option<Vec<Described>>) -> Result<()> {
        if version != 1 {
            let error =
                Error::new(ErrorKind::Unsupported, "this trace has a newer format").with("forebay_trace", version);
            return Err(error.hint("use the forebay that recorded it"));
        }
        let namespaces = namespaces.unwrap_or_default();
        if namespaces.is_empty() {
            return Err(Error::invalid("a header names no namespaces").hint(HEADER));
        }
        if namespaces.iter().any(|n| n.block_tokens == 0) {
            return Err(Error::invalid("a block must have at least one token").with("block_tokens", 0).hint(HEADER));
        }
        if let Some(n) = namespaces.iter().find(|n| !(1..=Layout::MAX_BLOCK_BYTES).contains(&n.block_bytes)) {
            let error = Error::invalid("a block must have 1 byte to 512 MiB").with("block_bytes", n.block_bytes);
            return Err(error.hint(HEADER));
        }
        let shape = |n: &Described| Shape { block_tokens: n.block_tokens, block_bytes: Some(n.block_bytes) };
        self.trace.shapes.extend(namespaces.iter().map(shape));
        self.named_alike(namespaces[0].block_bytes)
    }

    /// A size that is given must be one of the trace's own: it would be ignored. `own` is the size that a header names.
    fn named_alike(&self, own: u64) -> Result<()> {
        let is_own = |bytes: u64| self.trace.shapes.iter().any(|shape| shape.block_bytes == Some(bytes));
        match self.hints.block_bytes.filter(|bytes| !is_own(*bytes)) {
            None => Ok(()),
            Some(given) => Err(Error::invalid("the trace names the size of its blocks, and `--block-bytes` another")
                .with("trace", own)
                .with("given", given)
                .hint(format!(
                    "leave `--block-bytes` out; if other traces need it, give one value for each trace, and {own} for \
                     this one"
                ))),
        }
    }

    fn recorded(&mut self, at_us: u64, namespace: u16, keys: &[String]) -> Result<()> {
        if usize::from(namespace) >= self.trace.shapes.len() {
            return Err(Error::invalid("the header names no such namespace")
                .with("namespace", namespace)
                .hint("namespaces are numbered from 0, in the order in which the headers before this line name them"));
        }
        let parse = |key: &String| {
            let is_hex = (1..=32).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = is_hex.then(|| u128::from_str_radix(key, 16).ok()).flatten();
            value.ok_or_else(|| {
                Error::invalid("a key is 1 to 32 hexadecimal digits")
                    .with("key", key)
                    .hint("write each block's hash as hexadecimal digits, in quotes; the first 32 of them are enough")
            })
        };
        let ids = keys.iter().map(parse).collect::<Result<Vec<u128>>>()?;
        self.add(at_us, namespace, &ids)
    }

    fn published(&mut self, at: f64, input_length: Option<u64>, ids: &[u64], is_bailian: bool) -> Result<()> {
        let at_us = at * if is_bailian { 1e6 } else { 1e3 };
        if !(0.0..1e18).contains(&at_us) {
            return Err(Error::invalid("`timestamp` is not a time")
                .with("timestamp", at)
                .hint("give milliseconds, or seconds beside `chat_id`, from 0 on"));
        }
        if self.trace.shapes.is_empty() {
            let block_tokens =
                self.hints.block_tokens.unwrap_or_else(|| tokens_per_block(input_length, ids.len(), is_bailian));
            self.trace.shapes.push(Shape { block_tokens, block_bytes: self.hints.block_bytes });
        }
        let ids: Vec<u128> = ids.iter().map(|id| u128::from(*id)).collect();
        self.add(at_us as u64, 0, &ids)
    }

    fn add(&mut self, at_us: u64, namespace: u16, ids: &[u128]) -> Result<()> {
        if self.trace.accesses() + ids.len() > MAX_ACCESSES {
            return Err(Error::invalid("the trace asks for more than 256 Mi blocks").hint("cut it into parts"));
        }
        self.numbering.add(&mut self.trace, at_us, namespace, ids)
    }
}

/// 16 or 512, whichever fits the first request's lengths better.
fn tokens_per_block(input_length: Option<u64>, blocks: usize, is_bailian: bool) -> u32 {
    let tokens = input_length.unwrap_or(0) / blocks.max(1) as u64;
    if is_bailian || (1..=64).contains(&tokens) { 16 } else { 512 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace> {
        read_lines("test", text.as_bytes(), Hints::default())
    }

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_three_forms_read_alike() {
        let mooncake =
            parse("{\"timestamp\": 5, \"input_length\": 1100, \"output_length\": 1, \"hash_ids\": [10, 11, 12]}\n")
                .unwrap();
        let bailian = parse("{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 0.005, \"input_length\": 40, \"output_length\": 3, \"type\": \"text\", \"turn\": 1, \"hash_ids\": [7, 8, 9]}").unwrap();
        let own = parse("{\"forebay_trace\":1,\"namespaces\":[{\"block_tokens\":16,\"block_bytes\":4096}]}\n{\"at_us\":5000,\"namespace\":0,\"keys\":[\"aa\",\"bb\",\"cc\"]}").unwrap();
        for trace in [&mooncake, &bailian, &own] {
            let request = trace.request(0);
            assert_eq!((request.at_us, request.blocks), (5000, &[0, 1, 2][..]));
        }
        assert_eq!([&mooncake, &bailian, &own].map(|t| t.shapes[0].block_tokens), [512, 16, 16]);
    }

    #[test]
    fn a_bad_line_is_named_with_what_is_wrong() {
        let good = "{\"timestamp\": 5, \"hash_ids\": [0, 1]}\n";
        let cases = [
            ("{\"timestamp\": 6, \"hash_ids\": [0, 1", "a line is cut short"),
            ("{\"timestamp\": 6, \"hash_ids\": [\"x\"]}", "a line is not a request"),
            ("{\"timestamp\": 6, \"hash_ids\": [-4]}", "a line is not a request"),
            ("{\"timestamp\": 4, \"hash_ids\": [0, 1]}", "a request is earlier"),
            ("{\"timestamp\": 6, \"hash_ids\": [1, 0]}", "a block id follows two different ones"),
            ("{\"timestamp\": 6, \"hash_ids\": [0, 1, 1]}", "a block id follows two different ones"),
            ("{\"timestamp\": -6, \"hash_ids\": [0]}", "`timestamp` is not a time"),
            ("{\"at_us\": 6, \"namespace\": 3, \"keys\": [\"00\"]}", "no such namespace"),
            ("{\"at_us\": 6, \"keys\": [\"zz\"]}", "hexadecimal"),
            ("[1, 2]", "a line is not a request"),
            ("{}", "neither"),
        ];
        for (bad, message) in cases {
            let error = error(&format!("{good}\n{bad}\n{good}"));
            assert!(error.contains(message) && error.contains("line=`3`"), "{bad}: {error}");
        }
        assert!(error("").contains("no requests"));
        assert!(error("{\"timestamp\": 5, \"hash_ids\": []}").contains("no blocks"));
        for bytes in [0, u64::MAX] {
            let header =
                format!("{{\"forebay_trace\":1,\"namespaces\":[{{\"block_tokens\":16,\"block_bytes\":{bytes}}}]}}");
            assert!(error(&header).contains("1 byte to 512 MiB"));
        }
        let header = |more: &str| format!("{{\"forebay_trace\":1,\"namespaces\":[{more}]}}\n");
        let sizes = [4096, 8192].map(|bytes| format!("{{\"block_tokens\":16,\"block_bytes\":{bytes}}}"));
        let two = header(&sizes.join(",")) + "{\"at_us\": 6, \"namespace\": 1, \"keys\": [\"00\"]}";
        let given = |bytes| read_lines("test", two.as_bytes(), Hints { block_bytes: Some(bytes), ..Hints::default() });
        assert!(given(8192).is_ok(), "one of its own");
        let other = given(65536).unwrap_err();
        assert!(other.to_string().contains("(trace=`4096`, given=`65536`"), "{other}");
        assert!(other.hint_text().is_some_and(|hint| hint.contains("leave `--block-bytes` out")), "{other:?}");
        let own = header("{\"block_tokens\":16,\"block_bytes\":4096}");
        for bad in [
            header(""),
            header("{\"block_tokens\":0,\"block_bytes\":4096}"),
            header("{\"block_tokens\":16,\"block_bytes\":0}"),
            format!("{own}{{\"at_us\": 6, \"namespace\": 3, \"keys\": [\"00\"]}}"),
            format!("{own}{{\"at_us\": 6, \"keys\": [\"zz\"]}}"),
            format!("{own}{{\"at_us\": 6, \"keys\": []}}"),
            "{\"timestamp\": -6, \"hash_ids\": [0]}".to_owned(),
        ] {
            assert!(parse(&bad).unwrap_err().hint_text().is_some(), "{bad} is refused without a hint");
        }
        assert!(error("{\"forebay_trace\":2}").contains("newer format"));
    }

    #[test]
    fn an_endless_line_is_refused_before_it_is_read() {
        struct Endless(u64);
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                self.0 += buffer.len() as u64;
                assert!(self.0 < 2 * MAX_LINE_BYTES as u64, "read on and on");
                buffer.fill(b'1');
                Ok(buffer.len())
            }
        }
        let error = read_lines("endless", BufReader::new(Endless(0)), Hints::default()).unwrap_err();
        assert!(error.to_string().contains("longer than 16 MiB"), "{error}");
    }

    #[test]
    fn a_damaged_archive_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conv.jsonl.zst");
        let whole = std::fs::read(&path).unwrap();
        let damaged = tempfile::NamedTempFile::new().unwrap();
        // One bit, anywhere after the header; and a missing end.
        let mut cases: Vec<Vec<u8>> = (18..whole.len())
            .step_by(whole.len() / 40)
            .map(|at| {
                let mut bytes = whole.clone();
                bytes[at] ^= 1;
                bytes
            })
            .collect();
        cases.push(whole[..whole.len() / 2].to_vec());
        for (nth, bytes) in cases.iter().enumerate() {
            std::fs::write(damaged.path(), bytes).unwrap();
            assert!(read(damaged.path(), Hints::default()).is_err(), "case {nth} was read");
        }
        std::fs::write(damaged.path(), &whole).unwrap();
        assert!(read(damaged.path(), Hints::default()).is_ok());
    }

    #[test]
    fn ids_of_single_blocks_are_chained_on_demand() {
        let text = "{\"timestamp\": 1, \"hash_ids\": [5, 6, 5]}\n{\"timestamp\": 2, \"hash_ids\": [6, 5]}\n";
        let trace = read_lines("chain", text.as_bytes(), Hints { is_chaining: true, ..Hints::default() }).unwrap();
        assert_eq!(trace.unique(), 5);
        assert!(parse(text).is_err());
    }

    mod fuzz {
        use forebay_fuzz::Target;
        use ruzstd::encoding::{CompressionLevel, compress_to_vec};

        use super::*;

        fn texts() -> Vec<Vec<u8>> {
            let mooncake =
                "{\"timestamp\": 5, \"input_length\": 1100, \"output_length\": 1, \"hash_ids\": [10, 11, 12]}\n";
            let bailian = "{\"chat_id\": 1, \"timestamp\": 0.005, \"input_length\": 40, \"type\": \"text\", \"hash_ids\": [7, 8]}\n";
            let own = "{\"forebay_trace\":1,\"namespaces\":[{\"block_tokens\":16,\"block_bytes\":4096}]}\n\
                {\"at_us\":5000,\"namespace\":0,\"keys\":[\"aa\",\"bb\"]}\n{\"at_us\":5001,\"namespace\":0,\"keys\":[\"aa\",\"cc\"]}\n";
            [mooncake, bailian, own].map(|text| text.repeat(2).into_bytes()).to_vec()
        }

        /// What tells traces apart; what is read can be asked for every request.
        fn kind(read: Result<Trace>) -> Result<(usize, u64), String> {
            let trace = read.map_err(|error| error.to_string().split('`').next().unwrap_or("").to_owned())?;
            for request in (0..trace.len()).map(|number| trace.request(number)) {
                assert!(request.blocks.iter().all(|block| u64::from(*block) < trace.accesses() as u64));
            }
            Ok((trace.len().min(8), trace.shapes.len() as u64))
        }

        #[test]
        fn whatever_lines_a_trace_has_they_are_read_or_named() {
            let words: [&[u8]; 8] =
                [b"\n", b"null", b"[[[[[[", b"\"hash_ids\": []", b"1e999", b"-0", b"\\u0000", b"{}"];
            let target = Target::new("traces", texts()).words(&words).cases(20_000).allocates(200, 4 << 20);
            target.run(|bytes| kind(read_lines("fuzz", bytes, Hints::default())));
        }

        #[test]
        fn whatever_an_archive_holds_it_is_read_or_refused() {
            let archives: Vec<Vec<u8>> =
                texts().iter().map(|text| compress_to_vec(&text[..], CompressionLevel::Fastest)).collect();
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("trace.jsonl.zst");
            // The window of a decoder is what its header says, up to a limit of the decoder's.
            let target = Target::new("archives", archives).cases(1500).allocates(4000, 256 << 20);
            target.run(|bytes| {
                std::fs::write(&path, bytes).unwrap();
                kind(read(&path, Hints::default()))
            });
        }
    }
}
