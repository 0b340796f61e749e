//! `forebay trace record`: lookups as the daemon answers them, into a file that `forebay simulate` replays.
//!
//! Holds true: salted keys, sizes and times, no tokens and no names; the file never grows past its limit, and every
//! line in it is whole. The daemon writes no file: it streams to this command, for as long as it runs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::Path;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::Client;
use forebay_rpc::proto::Recorded;
use serde_json::json;
use tokio::time::MissedTickBehavior;
use tonic::Streaming;

use crate::arguments::{Trace, TraceRecord};
use crate::client;
use crate::ending::Ending;
use crate::failure::Failure;
use crate::output::{note, print, size};
use crate::serve::runtime;

/// Written to the file at once.
const WAITING_BYTES: usize = 8 << 10;
/// A line is in the file at most this long after the lookup came: a killed command loses no more.
const WAITING_TIME: Duration = Duration::from_millis(250);

pub fn run(command: &Trace) -> Result<(), Failure> {
    let Trace::Record(arguments) = command;
    let sockets = arguments.daemon.socket_directory()?;
    let mut client = client::connect(&sockets);
    let runtime = runtime()?;
    let stream = runtime.block_on(client.record())?;
    let file = File::options().write(true).create_new(true).open(&arguments.file);
    let file = file.map_err(|error| {
        failed(&arguments.file, error).hint("name a file that does not exist yet, in a directory that exists")
    })?;
    let mut recorder = Recorder::new(Lines::new(file), arguments.max_bytes.0);
    let ended = runtime.block_on(async {
        let ending = Ending::listen()?;
        client::attended(&sockets, record(arguments, client, stream, ending, &mut recorder), client::is_alive).await
    });
    // However the recording ended, what was recorded is a whole trace.
    let written = |written: io::Result<()>| {
        let hint = "make room, or lower `--max-bytes`; the lines that are in the file are whole";
        written.map_err(|error| failed(&arguments.file, error).hint(hint))
    };
    let silent = match ended {
        Ok(recorded) => written(recorded).map(|()| None)?,
        Err(error) => Some(error),
    };
    written(recorder.out.flush())?;
    let Recorder { lookups, left_out, written, .. } = recorder;
    print(&format!("{lookups} lookups were recorded, {}\n", size(written)));
    if left_out > 0 {
        print(&format!("{left_out} more came faster than they could be written; a replay will have fewer hits\n"));
    }
    silent.map_or(Ok(()), |error| Err(error.into()))
}

/// Until the time is over, the file full, the daemon gone, or a signal comes. Within: whether the file took the lines.
async fn record(
    arguments: &TraceRecord,
    mut client: Client,
    mut stream: Streaming<Recorded>,
    mut ending: Ending,
    recorder: &mut Recorder<impl Write>,
) -> Result<io::Result<()>> {
    let (file, seconds) = (arguments.file.display(), arguments.seconds);
    note(&format!("lookups are recorded to `{file}` for {seconds} s; interrupt the command to end the recording"));
    let end = tokio::time::sleep(Duration::from_secs(seconds));
    tokio::pin!(end);
    let mut flush = tokio::time::interval(WAITING_TIME);
    flush.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            // What has come is recorded before a signal ends it.
            biased;
            message = stream.message() => message,
            _ = flush.tick() => match recorder.out.flush() {
                Ok(()) => continue,
                Err(error) => return Ok(Err(error)),
            },
            // No lookups, and a daemon that does not answer, are two things.
            () = &mut end => return client.health().await.map(|_| Ok(())),
            () = ending.come() => return Ok(Ok(())),
        };
        let recorded = match message {
            Ok(Some(recorded)) => recorded,
            // What was recorded until the daemon ended is a whole trace, and shorter than was asked for.
            Ok(None) | Err(_) => return Err(gone()),
        };
        match recorder.write(&recorded) {
            Ok(true) => {}
            Ok(false) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error)),
        }
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Unavailable, "the daemon has ended, and the recording with it")
        .hint("the lines that are in the file are whole; start the command again, with another file, for more")
}

fn failed(path: &Path, error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot write the trace").with("path", path.display()).source(error)
}

/// A file of lines. If the file takes only a part of what is written, it is cut behind its last whole line.
struct Lines {
    file: File,
    /// Whole lines that are not in the file yet.
    waiting: Vec<u8>,
    in_file_bytes: u64,
}

impl Lines {
    fn new(file: File) -> Lines {
        Lines { file, waiting: Vec::new(), in_file_bytes: 0 }
    }
}

impl Write for Lines {
    /// Takes whole lines.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.waiting.extend_from_slice(lines);
        if self.waiting.len() >= WAITING_BYTES {
            self.flush()?;
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let lines = std::mem::take(&mut self.waiting);
        let outcome = self.file.write_all(&lines);
        let mut taken = lines.len();
        if outcome.is_err() {
            taken = (self.file.stream_position()? - self.in_file_bytes) as usize;
            taken = lines[..taken].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            self.file.set_len(self.in_file_bytes + taken as u64)?;
        }
        self.in_file_bytes += taken as u64;
        outcome
    }
}

struct Recorder<W> {
    out: W,
    max_bytes: u64,
    written: u64,
    lookups: u64,
    left_out: u64,
    /// The daemon's numbers of namespaces, and ours.
    namespaces: HashMap<u64, u16>,
    last_us: u64,
}

impl<W: Write> Recorder<W> {
    fn new(out: W, max_bytes: u64) -> Recorder<W> {
        Recorder { out, max_bytes, written: 0, lookups: 0, left_out: 0, namespaces: HashMap::new(), last_us: 0 }
    }

    /// False once the file is full.
    fn write(&mut self, recorded: &Recorded) -> std::io::Result<bool> {
        self.left_out += recorded.left_out;
        let mut lines = String::new();
        let next = self.namespaces.len() as u16;
        let namespace = match self.namespaces.entry(recorded.namespace) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(vacant) => {
                let shape = json!({"block_tokens": recorded.block_tokens, "block_bytes": recorded.block_bytes});
                lines += &format!("{}\n", json!({"forebay_trace": 1, "namespaces": [shape]}));
                *vacant.insert(next)
            }
        };
        // Groups of one lookup, and lookups of several clients, may end in another order than they began.
        self.last_us = self.last_us.max(recorded.at_us);
        let keys: Vec<String> = recorded.keys.iter().map(|key| format!("{key:016x}")).collect();
        lines += &format!("{}\n", json!({"at_us": self.last_us, "namespace": namespace, "keys": keys}));
        if self.written + lines.len() as u64 > self.max_bytes {
            return Ok(false);
        }
        self.out.write_all(lines.as_bytes())?;
        self.written += lines.len() as u64;
        self.lookups += 1;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_sim::read::{Hints, read_lines};

    fn recorded(at_us: u64, namespace: u64, keys: &[u64]) -> Recorded {
        Recorded { at_us, namespace, block_tokens: 16, block_bytes: 4096, keys: keys.to_vec(), left_out: 0 }
    }

    #[test]
    fn what_is_recorded_reads_back() {
        let mut recorder = Recorder::new(Vec::new(), 1 << 20);
        for recorded in [recorded(5, 7, &[1, 2]), recorded(3, 9 << 16, &[1]), recorded(8, 7, &[1, 2, u64::MAX])] {
            assert!(recorder.write(&recorded).unwrap());
        }
        let trace = read_lines("recorded", recorder.out.as_slice(), Hints::default()).unwrap();
        let requests: Vec<_> = trace.requests().map(|r| (r.at_us, r.namespace, r.blocks.to_vec())).collect();
        assert_eq!(requests, [(5, 0, vec![0, 1]), (5, 1, vec![2]), (8, 0, vec![0, 1, 3])]);
        assert_eq!(trace.shapes.len(), 2);
    }

    #[test]
    fn the_file_never_grows_past_its_limit_and_ends_with_a_whole_line() {
        let mut recorder = Recorder::new(Vec::new(), 1000);
        let count = (0..100).take_while(|n| recorder.write(&recorded(*n, 1, &[*n])).unwrap()).count();
        assert!((10..30).contains(&count) && recorder.out.len() <= 1000, "{count} lines");
        let trace = read_lines("recorded", recorder.out.as_slice(), Hints::default()).unwrap();
        assert_eq!(trace.len(), count);
    }
}
