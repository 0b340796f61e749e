//! `forebay trace record`: lookups as the daemon answers them, into a file that `forebay simulate` replays.
//!
//! Holds true: salted keys, sizes and times, no tokens and no names; the file never grows past its limit, and every
//! line in it is whole. The daemon writes no file: it streams to this command, for as long as it runs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use forebay_core::{Error, ErrorKind};
use forebay_rpc::proto::Recorded;
use serde_json::json;
use tonic::Streaming;

use crate::arguments::{Trace, TraceRecord};
use crate::client;
use crate::failure::Failure;
use crate::output::{print, size};
use crate::serve::runtime;

pub fn run(command: &Trace) -> Result<(), Failure> {
    let Trace::Record(arguments) = command;
    let mut client = client::connect(&arguments.daemon.socket_directory()?);
    let runtime = runtime()?;
    let stream = runtime.block_on(client.record())?;
    let file = File::options().write(true).create_new(true).open(&arguments.file);
    let file = file.map_err(|error| failed(&arguments.file, error).hint("name a file that does not exist yet"))?;
    let mut recorder = Recorder::new(BufWriter::new(file), arguments.max_bytes);
    runtime.block_on(record(arguments, stream, &mut recorder)).map_err(|error| failed(&arguments.file, error))?;
    recorder.out.flush().map_err(|error| failed(&arguments.file, error))?;
    let Recorder { lookups, left_out, written, .. } = recorder;
    print(&format!("{lookups} lookups were recorded, {}\n", size(written)));
    if left_out > 0 {
        print(&format!("{left_out} more came faster than they could be written; a replay will have fewer hits\n"));
    }
    Ok(())
}

/// Until the time is over, the file full, the daemon gone, or somebody interrupts.
async fn record(
    arguments: &TraceRecord,
    mut stream: Streaming<Recorded>,
    recorder: &mut Recorder<impl Write>,
) -> std::io::Result<()> {
    eprintln!("lookups are recorded to `{}`; interrupt the command to end the recording", arguments.file.display());
    let end = tokio::time::sleep(Duration::from_secs(arguments.seconds));
    tokio::pin!(end);
    loop {
        let message = tokio::select! {
            message = stream.message() => message,
            () = &mut end => return Ok(()),
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        let recorded = match message {
            Ok(Some(recorded)) => recorded,
            // What was recorded until the daemon ended is a whole trace.
            Ok(None) | Err(_) => return Ok(()),
        };
        if !recorder.write(&recorded)? {
            return Ok(());
        }
    }
}

fn failed(path: &Path, error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot write the trace").with("path", path.display()).source(error)
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
