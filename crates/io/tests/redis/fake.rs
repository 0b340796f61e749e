//! A server in this process that speaks RESP2 and misbehaves: each command is put to a script, which says what to
//! answer and whether to go on.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::thread;

use tempfile::TempDir;

/// What the server holds; a well-behaved server would answer from it.
pub type Store = HashMap<Vec<u8>, Vec<u8>>;

/// What to do about a command.
pub struct Answer {
    pub bytes: Vec<u8>,
    /// Pieces that the answer is sent in.
    pub pieces: usize,
    pub then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    GoOn,
    Close,
    /// Answers nothing any more and keeps the connection.
    Hang,
}

impl Answer {
    pub fn say(bytes: impl Into<Vec<u8>>) -> Answer {
        Answer { bytes: bytes.into(), pieces: 1, then: Then::GoOn }
    }
}

/// Called for each command with what the server holds.
pub type Script = dyn FnMut(&[Vec<u8>], &mut Store) -> Answer + Send;

pub struct Fake {
    url: String,
    _directory: Option<TempDir>,
}

impl Fake {
    /// A server whose connections follow scripts: `script_of` makes one for each.
    pub fn start(script_of: impl Fn(u64) -> Box<Script> + Send + 'static) -> Fake {
        let directory = tempfile::Builder::new().prefix("forebay-fake-").tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        serve_all(script_of, move || {
            let (stream, _) = listener.accept()?;
            Ok((stream.try_clone()?, stream))
        });
        Fake { url: format!("unix://{}", path.display()), _directory: Some(directory) }
    }

    /// The same over TCP, where the tier tells the kernel how much it waits for.
    pub fn start_tcp(script_of: impl Fn(u64) -> Box<Script> + Send + 'static) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        serve_all(script_of, move || {
            let (stream, _) = listener.accept()?;
            stream.set_nodelay(true)?;
            Ok((stream.try_clone()?, stream))
        });
        Fake { url, _directory: None }
    }

    pub fn url(&self) -> String {
        self.url.clone()
    }
}

fn serve_all<S: Read + Write + Send + 'static>(
    script_of: impl Fn(u64) -> Box<Script> + Send + 'static,
    accept: impl Fn() -> std::io::Result<(S, S)> + Send + 'static,
) {
    let store = Arc::new(Mutex::new(Store::new()));
    thread::spawn(move || {
        for number in 0.. {
            let Ok((input, output)) = accept() else { return };
            let (script, store) = (script_of(number), store.clone());
            thread::spawn(move || serve(input, output, script, &store));
        }
    });
}

/// What a server of good manners says.
pub fn well_behaved(command: &[Vec<u8>], store: &mut Store) -> Vec<u8> {
    let key = command.get(1).cloned().unwrap_or_default();
    match command[0].as_slice() {
        b"SET" => {
            store.insert(key, command[2].clone());
            b"+OK\r\n".to_vec()
        }
        b"GET" => store.get(&key).map_or(b"$-1\r\n".to_vec(), |value| bulk(value)),
        b"EXISTS" => {
            let count = command[1..].iter().filter(|key| store.contains_key(*key)).count();
            format!(":{count}\r\n").into_bytes()
        }
        b"UNLINK" => format!(":{}\r\n", i32::from(store.remove(&key).is_some())).into_bytes(),
        b"PING" => b"+PONG\r\n".to_vec(),
        _ => b"-ERR unknown command\r\n".to_vec(),
    }
}

pub fn bulk(value: &[u8]) -> Vec<u8> {
    let mut bytes = format!("${}\r\n", value.len()).into_bytes();
    bytes.extend_from_slice(value);
    bytes.extend_from_slice(b"\r\n");
    bytes
}

fn serve(input: impl Read, mut output: impl Write, mut script: Box<Script>, store: &Mutex<Store>) -> Option<()> {
    let mut input = BufReader::new(input);
    loop {
        let command = read_command(&mut input)?;
        let answer = script(&command, &mut store.lock().unwrap());
        let piece = answer.bytes.len().div_ceil(answer.pieces).max(1);
        for piece in answer.bytes.chunks(piece) {
            output.write_all(piece).ok()?;
        }
        match answer.then {
            Then::GoOn => {}
            Then::Close => return None,
            // Until the other side has had enough.
            Then::Hang => drop(std::io::copy(&mut input, &mut std::io::sink())),
        }
    }
}

fn read_command(input: &mut impl BufRead) -> Option<Vec<Vec<u8>>> {
    let count = number_after(b'*', input)?;
    (0..count).map(|_| argument(input)).collect()
}

fn argument(input: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut bytes = vec![0; number_after(b'$', input)? + 2];
    input.read_exact(&mut bytes).ok()?;
    bytes.truncate(bytes.len() - 2);
    Some(bytes)
}

fn number_after(kind: u8, input: &mut impl BufRead) -> Option<usize> {
    let mut line = Vec::new();
    input.read_until(b'\n', &mut line).ok()?;
    let text = std::str::from_utf8(&line).ok()?.strip_suffix("\r\n")?;
    text.strip_prefix(kind as char)?.parse().ok()
}
