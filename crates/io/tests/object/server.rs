//! As much of S3 as the tier uses: list, head, get with a range, put, delete, uploads in parts. One thread for each
//! connection, objects in memory, no check of signatures; and faults, each for as many requests as it is told.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::s3::BUCKET;

/// What becomes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Answered with this status and nothing else.
    Status(u16),
    /// Half of the answer's body, then the end of the connection.
    Cut,
    /// A bit in the middle of the answer's body that is not the object's.
    Flip,
    /// No answer; the connection stays open.
    Hang,
}

#[derive(Default)]
pub struct State {
    pub objects: Mutex<BTreeMap<String, Vec<u8>>>,
    uploads: Mutex<HashMap<String, BTreeMap<u32, Vec<u8>>>>,
    /// For requests of this method, so many times.
    pub fault: Mutex<Option<(&'static str, Fault, u32)>>,
    pub parts: AtomicU64,
    next_upload: AtomicU64,
}

pub struct Server {
    pub endpoint: String,
    pub state: Arc<State>,
}

struct Request {
    method: String,
    path: String,
    query: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Server {
    /// Its threads end with the test's process.
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::<State>::default();
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state) = (stream.unwrap(), shared.clone());
                // A connection that breaks is its client's to notice.
                thread::spawn(move || drop(serve(stream, &state)));
            }
        });
        Server { endpoint, state }
    }

    pub fn fail(&self, method: &'static str, fault: Fault, times: u32) {
        *self.state.fault.lock().unwrap() = Some((method, fault, times));
    }

    /// Changes the only object.
    pub fn alter(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut objects = self.state.objects.lock().unwrap();
        assert_eq!(objects.len(), 1);
        change(objects.values_mut().next().unwrap());
    }

    pub fn count(&self) -> usize {
        self.state.objects.lock().unwrap().len()
    }
}

fn serve(stream: TcpStream, state: &State) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = (BufReader::new(stream.try_clone()?), stream);
    while let Some(request) = read(&mut reader)? {
        let fault = drawn(state, &request.method);
        if fault == Some(Fault::Hang) {
            // Until the client goes away.
            let _ = reader.read(&mut [0]);
            return Ok(());
        }
        let mut answer = match fault {
            Some(Fault::Status(status)) => Answer { status, headers: Vec::new(), body: Vec::new() },
            _ => answer(state, &request),
        };
        let middle = answer.body.len() / 2;
        if let (Some(Fault::Flip), Some(byte)) = (fault, answer.body.get_mut(middle)) {
            *byte ^= 1;
        }
        write(&mut writer, &request, &answer, fault == Some(Fault::Cut))?;
        if fault == Some(Fault::Cut) {
            return writer.shutdown(std::net::Shutdown::Both);
        }
    }
    Ok(())
}

fn drawn(state: &State, method: &str) -> Option<Fault> {
    let mut fault = state.fault.lock().unwrap();
    let (of, kind, times) = fault.as_mut()?;
    let is_met = *of == method && *times > 0;
    *times -= u32::from(is_met);
    is_met.then_some(*kind)
}

fn read(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let mut body = vec![0; headers.get("content-length").map_or(0, |length| length.parse().unwrap())];
    reader.read_exact(&mut body)?;
    Ok(Some(Request { method, path, query, headers, body }))
}

fn write(writer: &mut impl Write, request: &Request, answer: &Answer, is_cut: bool) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {} -\r\n", answer.status);
    let has_length = answer.headers.iter().any(|(name, _)| *name == "content-length");
    if !has_length {
        head += &format!("content-length: {}\r\n", answer.body.len());
    }
    answer.headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    writer.write_all((head + "\r\n").as_bytes())?;
    let body: &[u8] = if request.method == "HEAD" { &[] } else { &answer.body };
    writer.write_all(if is_cut { &body[..body.len() / 2] } else { body })
}

fn answer(state: &State, request: &Request) -> Answer {
    let about = |bytes: &[u8]| {
        let (etag, time) = (format!("\"{}\"", bytes.len()), "Sat, 21 Nov 2026 10:00:00 GMT".to_owned());
        vec![("etag", etag), ("last-modified", time)]
    };
    let plain = |status, body: String| Answer { status, headers: Vec::new(), body: body.into_bytes() };
    let missing = |code| plain(404, format!("<Error><Code>{code}</Code><Message>no</Message></Error>"));
    let mut parts = request.path.trim_start_matches('/').splitn(2, '/');
    let (bucket, key) = (parts.next().unwrap(), parts.next().unwrap_or("").to_owned());
    if bucket != BUCKET {
        return missing("NoSuchBucket");
    }
    let query: HashMap<&str, &str> =
        request.query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
    let upload = query.get("uploadId").map(|id| (*id).to_owned());
    let mut objects = state.objects.lock().unwrap();
    match (&request.method[..], upload) {
        ("GET", _) if key.is_empty() => plain(200, listed(&objects, query.get("prefix").copied().unwrap_or(""))),
        ("GET" | "HEAD", _) => {
            let Some(bytes) = objects.get(&key) else { return missing("NoSuchKey") };
            let mut headers = about(bytes);
            let range = request.headers.get("range").map(|range| range.strip_prefix("bytes=").unwrap());
            let Some((from, to)) = range.and_then(|range| range.split_once('-')) else {
                headers.push(("content-length", bytes.len().to_string()));
                return Answer { status: 200, headers, body: bytes.clone() };
            };
            let from: usize = from.parse().unwrap();
            let to = to.parse::<usize>().unwrap().min(bytes.len().saturating_sub(1));
            if from >= bytes.len() {
                return plain(416, "<Error><Code>InvalidRange</Code></Error>".to_owned());
            }
            headers.push(("content-range", format!("bytes {from}-{to}/{}", bytes.len())));
            Answer { status: 206, headers, body: bytes[from..=to].to_vec() }
        }
        ("PUT", Some(id)) => {
            let number: u32 = query["partNumber"].parse().unwrap();
            state.parts.fetch_add(1, Relaxed);
            // A part may come when its upload was given up.
            let mut uploads = state.uploads.lock().unwrap();
            let Some(parts) = uploads.get_mut(&id) else { return missing("NoSuchUpload") };
            parts.insert(number, request.body.clone());
            Answer { status: 200, headers: about(&request.body), body: Vec::new() }
        }
        ("PUT", None) => {
            let headers = about(&request.body);
            objects.insert(key, request.body.clone());
            Answer { status: 200, headers, body: Vec::new() }
        }
        ("POST", None) => {
            let id = state.next_upload.fetch_add(1, Relaxed).to_string();
            state.uploads.lock().unwrap().insert(id.clone(), BTreeMap::new());
            let names = format!("<Bucket>{BUCKET}</Bucket><Key>{key}</Key><UploadId>{id}</UploadId>");
            plain(200, format!("<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>"))
        }
        ("POST", Some(id)) => {
            let parts = state.uploads.lock().unwrap().remove(&id).unwrap();
            objects.insert(key, parts.into_values().flatten().collect());
            plain(200, "<CompleteMultipartUploadResult><ETag>\"1\"</ETag></CompleteMultipartUploadResult>".to_owned())
        }
        ("DELETE", Some(id)) => {
            state.uploads.lock().unwrap().remove(&id);
            plain(204, String::new())
        }
        ("DELETE", None) => {
            objects.remove(&key);
            plain(204, String::new())
        }
        (method, _) => panic!("{method} {} is not served", request.path),
    }
}

/// All objects whose names begin so, in one answer. A slash may come encoded.
fn listed(objects: &BTreeMap<String, Vec<u8>>, prefix: &str) -> String {
    let prefix = prefix.replace("%2F", "/");
    let about = |(key, bytes): (&String, &Vec<u8>)| {
        let (time, size) = ("2026-11-21T10:00:00.000Z", bytes.len());
        format!(
            "<Contents><Key>{key}</Key><LastModified>{time}</LastModified><ETag>\"1\"</ETag><Size>{size}</Size></Contents>"
        )
    };
    let all: String = objects.iter().filter(|(key, _)| key.starts_with(&prefix)).map(about).collect();
    format!("<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{all}</ListBucketResult>")
}
