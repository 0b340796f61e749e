//! The baseline: plain blocking sockets, as somebody would write them in an afternoon.
//!
//! A request is 16 bytes: offset, and length with the highest bit set for a write, whose bytes follow. The answer to a
//! read is the bytes, to a write eight bytes. One connection and one thread for each direction; requests are pipelined.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::Verb;

use super::shape::Shape;

const WRITE: u64 = 1 << 63;
/// Until the measuring side has connected.
const PATIENCE: Duration = Duration::from_secs(30);

/// Serves the two connections of one measurement, on threads of their own. Returns the port.
pub fn serve(address: IpAddr, bytes: u64) -> Result<u16> {
    let listener = TcpListener::bind((address, 0)).map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(2).flatten() {
            std::thread::spawn(move || answer(&stream, bytes));
        }
    });
    Ok(port)
}

/// Until the other side closes.
fn answer(mut stream: &TcpStream, bytes: u64) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // Not before it is used: the other connection may be the only one that is.
    let mut memory = Vec::new();
    let mut request = [0; 16];
    loop {
        stream.read_exact(&mut request)?;
        let offset = u64::from_le_bytes(request[..8].try_into().expect("eight bytes"));
        let length = u64::from_le_bytes(request[8..].try_into().expect("eight bytes"));
        let end = offset.saturating_add(length & !WRITE);
        if end > bytes {
            return Ok(());
        }
        memory.resize(bytes as usize, 1);
        let slot = &mut memory[offset as usize..end as usize];
        if length & WRITE == 0 {
            stream.write_all(slot)?;
        } else {
            stream.read_exact(slot)?;
            stream.write_all(&[0; 8])?;
        }
    }
}

/// The connections and the memory of the measuring side, one for each direction.
pub struct Plain {
    bytes: u64,
    reads: (TcpStream, Vec<u8>),
    writes: (TcpStream, Vec<u8>),
}

impl Plain {
    pub fn connect(address: SocketAddr, bytes: u64) -> Result<Plain> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            Ok((stream, Vec::new()))
        };
        Ok(Plain { bytes, reads: connect()?, writes: connect()? })
    }

    /// Seconds, and the latency of each request.
    pub fn run(&mut self, shape: Shape) -> Result<(f64, Vec<f64>)> {
        for verb in shape.direction.verbs() {
            let (_, memory) = if *verb == Verb::Read { &mut self.reads } else { &mut self.writes };
            memory.resize(self.bytes as usize, 1);
        }
        let start = Instant::now();
        let sides = [(Verb::Read, &mut self.reads), (Verb::Write, &mut self.writes)];
        let latencies: Vec<io::Result<Vec<f64>>> = std::thread::scope(|scope| {
            let mut last = None;
            let mut threads = Vec::new();
            for (verb, side) in sides {
                if !shape.direction.verbs().contains(&verb) {
                    continue;
                }
                // A single direction runs on this thread, as the fabric's does.
                if let Some((verb, side)) = last.replace((verb, side)) {
                    threads.push(scope.spawn(move || requests(side, verb, shape)));
                }
            }
            let mut all: Vec<_> = last.into_iter().map(|(verb, side)| requests(side, verb, shape)).collect();
            all.extend(threads.into_iter().map(|thread| thread.join().expect("no panic in a baseline")));
            all
        });
        let seconds = start.elapsed().as_secs_f64();
        let latencies: io::Result<Vec<Vec<f64>>> = latencies.into_iter().collect();
        Ok((seconds, latencies.map_err(failed)?.concat()))
    }
}

fn requests((stream, memory): &mut (TcpStream, Vec<u8>), verb: Verb, shape: Shape) -> io::Result<Vec<f64>> {
    let bytes = shape.op_bytes();
    let slot = |number: u64| number % shape.depth * bytes;
    let ask = |mut stream: &TcpStream, memory: &[u8], number: u64| {
        let length = if verb == Verb::Write { bytes | WRITE } else { bytes };
        // Before the call: on a busy machine the other side may answer before it returns.
        let begun = Instant::now();
        stream.write_all(&[slot(number).to_le_bytes(), length.to_le_bytes()].concat())?;
        if verb == Verb::Write {
            stream.write_all(&memory[slot(number) as usize..(slot(number) + bytes) as usize])?;
        }
        Ok::<_, io::Error>(begun)
    };
    let mut began = std::collections::VecDeque::new();
    let mut latencies_us = Vec::with_capacity(shape.operations as usize);
    for number in 0..shape.operations.min(shape.depth) {
        began.push_back(ask(stream, memory, number)?);
    }
    for number in 0..shape.operations {
        match verb {
            Verb::Read => stream.read_exact(&mut memory[slot(number) as usize..(slot(number) + bytes) as usize])?,
            Verb::Write => stream.read_exact(&mut [0; 8])?,
        }
        let began_at = began.pop_front().expect("one for each answer");
        latencies_us.push(began_at.elapsed().as_secs_f64() * 1e6);
        if number + shape.depth < shape.operations {
            began.push_back(ask(stream, memory, number + shape.depth)?);
        }
    }
    Ok(latencies_us)
}

fn failed(error: io::Error) -> Error {
    Error::new(ErrorKind::Io, "the plain sockets of the baseline failed").source(error)
}
