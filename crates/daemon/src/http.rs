//! Metrics, health, the frame and the page that shows it, over plain HTTP: `/metrics`, `/livez`, `/readyz`,
//! `/frame.json`, `/`, and nothing else.
//!
//! Invariants: a client takes one of [`MAX_CONNECTIONS`] places for at most [`DEADLINE`], whatever it sends or fails to
//! read, and never touches the data path. Whoever asks for nothing gives its place to the next. Each request gets a new
//! answer, so the answer shows the present state.

mod host;
mod page;
mod places;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::proto::FrameRequest;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, SERVER, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

pub use host::Hosts;
use host::Meant;
use places::Places;

use crate::config::HttpAddress;
use crate::health::{Check, Finding, Health};
use crate::metrics::{self, Snapshot};
use crate::turns;

/// Connections at a time. One collector and a few probes ask at once; the rest is for connections that ask for nothing.
pub const MAX_CONNECTIONS: usize = 128;

/// From accepting a connection to its end, one request and its answer.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// By which a client tells a daemon from whatever else has the port.
const NAME: &str = "forebay";

/// Request line and headers together; a probe sends some hundred bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;

/// How long a failing `accept` (out of descriptors, say) is left alone.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the pages are made of.
pub trait Source: Send + Sync + 'static {
    fn health(&self) -> impl Future<Output = Health> + Send;
    fn snapshot(&self) -> impl Future<Output = Result<Snapshot>> + Send;
    /// As JSON.
    fn frame(&self, request: FrameRequest) -> impl Future<Output = String> + Send;
}

/// Binds the configured address; none if it is `off`.
pub async fn bind(address: HttpAddress) -> Result<Option<TcpListener>> {
    let HttpAddress::At(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Error::new(ErrorKind::Io, "cannot listen for metrics and health")
            .with("http.address", address)
            .source(error)
            .hint("set `http.address` to another address, or to `off`; port 0 takes any free port")
    })?;
    Ok(Some(listener))
}

/// Whether a daemon of Forebay answers there.
pub async fn is_forebay(address: SocketAddr) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        stream
            .write_all(format!("GET /livez HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes())
            .await?;
        let mut answer = String::new();
        stream.take(MAX_HEADER_BYTES as u64).read_to_string(&mut answer).await?;
        let (head, _) = answer.split_once("\r\n\r\n").unwrap_or_default();
        io::Result::Ok(head.lines().any(|line| line.eq_ignore_ascii_case(&format!("server: {NAME}"))))
    };
    timeout(DEADLINE, ask).await.is_ok_and(|answer| answer.unwrap_or(false))
}

/// Serves until the future is dropped.
pub async fn serve(listener: TcpListener, hosts: Hosts, source: Arc<impl Source>) -> Infallible {
    let hosts = Arc::new(hosts);
    let mut places = Places::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        places.make_room().await;
        let (hosts, source, is_answering) = (hosts.clone(), source.clone(), Arc::new(AtomicBool::new(false)));
        let told = is_answering.clone();
        let talk = turns::spawn(async move {
            // Past the deadline the connection is dropped as it is; whom it failed finds out by itself.
            let _ = timeout(DEADLINE, converse(stream, hosts, source, told)).await;
        });
        places.take(talk, is_answering);
        // Those who have asked already are heard before the next comes.
        tokio::task::yield_now().await;
    }
}

/// One request and its answer.
async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    hosts: Arc<Hosts>,
    source: Arc<impl Source>,
    is_answering: Arc<AtomicBool>,
) {
    let service = service_fn(move |request| {
        let (hosts, source, is_answering) = (hosts.clone(), source.clone(), is_answering.clone());
        async move {
            is_answering.store(true, Relaxed);
            let answer = answer(&request, &hosts, &*source).await;
            is_answering.store(false, Relaxed);
            Ok::<_, Infallible>(answer)
        }
    });
    let result = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = result {
        tracing::debug!(%error, "an HTTP connection failed");
    }
}

async fn answer(request: &Request<Incoming>, hosts: &Hosts, source: &impl Source) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET is supported\n".to_string());
    }
    let meant = hosts.meant(request.headers());
    match request.uri().path() {
        "/metrics" => match source.snapshot().await {
            Ok(snapshot) => {
                let text = turns::one_at_a_time(&WRITING, || metrics::render(snapshot)).await;
                response(StatusCode::OK, metrics::CONTENT_TYPE, text)
            }
            Err(error) => response(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n")),
        },
        "/" | "/frame.json" if meant == Meant::Ambiguous => {
            response(StatusCode::BAD_REQUEST, TEXT, SEVERAL_HOSTS.to_string())
        }
        "/" | "/frame.json" if meant == Meant::AnotherHost => {
            response(StatusCode::MISDIRECTED_REQUEST, TEXT, OTHER_HOST.to_string())
        }
        "/" => whole_page(),
        "/frame.json" => match frame_request(request.uri().query().unwrap_or("")) {
            Some(request) => response(StatusCode::OK, JSON, source.frame(request).await),
            None => response(StatusCode::BAD_REQUEST, TEXT, FRAME_USAGE.to_string()),
        },
        "/livez" => verdict("alive", &source.health().await.live()),
        "/readyz" => verdict("ready", &source.health().await.ready()),
        _ => response(
            StatusCode::NOT_FOUND,
            TEXT,
            "the pages are /, /metrics, /livez, /readyz and /frame.json\n".to_string(),
        ),
    }
}

/// A page of metrics that is being written.
static WRITING: Semaphore = Semaphore::const_new(1);

const JSON: &str = "application/json";
const OTHER_HOST: &str =
    "the request names another host: ask by address or `localhost`, or add the name to `http.hosts`\n";
const SEVERAL_HOSTS: &str = "the request names more than one host: it must have one field `Host`\n";
const FRAME_USAGE: &str = "the parameters of /frame.json are `boot`, a word, and `hour_last` and `day_last`, numbers\n";

/// `None` if the query has something else than the fields of a request, which need no escapes.
fn frame_request(query: &str) -> Option<FrameRequest> {
    let mut request = FrameRequest::default();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=')?;
        match name {
            "boot" => request.boot = value.to_owned(),
            "hour_last" => request.hour_last = value.parse().ok()?,
            "day_last" => request.day_last = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(request)
}

const TEXT: &str = "text/plain; charset=utf-8";

/// A line for the verdict and one for each check, so that a person reading a failed probe sees why.
fn verdict(claim: &str, checks: &[Check]) -> Response<Full<Bytes>> {
    let holds = checks.iter().all(|check| check.finding != Finding::Fails);
    let not = if holds { "" } else { "not " };
    let mut body = format!("{not}{claim}\n");
    for check in checks {
        body += &format!("{:4} {}: {}\n", check.finding.name(), check.name, check.why);
    }
    response(if holds { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, TEXT, body)
}

fn whole_page() -> Response<Full<Bytes>> {
    Response::builder()
        .header(CONTENT_TYPE, "text/html; charset=utf-8")
        .header(CACHE_CONTROL, "no-store")
        .header(SERVER, NAME)
        .header(CONTENT_SECURITY_POLICY, page::POLICY.clone())
        .header(X_FRAME_OPTIONS, "DENY")
        .header(X_CONTENT_TYPE_OPTIONS, "nosniff")
        .header(REFERRER_POLICY, "no-referrer")
        .body(Full::new(Bytes::from_static(page::PAGE.as_bytes())))
        .expect("status and headers are constants")
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    Response::builder()
        .status(status)
        .header(CONTENT_TYPE, kind)
        .header(CACHE_CONTROL, "no-store")
        .header(SERVER, NAME)
        .body(Full::new(Bytes::from(body)))
        .expect("status and headers are constants")
}

#[cfg(test)]
mod fuzz {
    use std::fmt::Write;

    use forebay_fuzz::Target;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    struct Still;

    impl Source for Still {
        async fn health(&self) -> Health {
            Health {
                core_silence: Duration::ZERO,
                is_recovered: true,
                populated_bytes: 8 << 20,
                needed_bytes: 2 << 20,
                capacity_bytes: 8 << 20,
                lacks_memory: None,
                own_files: Default::default(),
                is_draining: false,
                tiers: Vec::new(),
            }
        }

        async fn frame(&self, request: FrameRequest) -> String {
            format!("{request:?}")
        }

        async fn snapshot(&self) -> Result<Snapshot> {
            Ok(Snapshot::default())
        }
    }

    #[test]
    fn whatever_a_query_says_it_is_one_request_for_a_frame_or_none() {
        let inputs = ["boot=ab&hour_last=7&day_last=18446744073709551615", "", "&boot="].map(|query| query.into());
        let words: [&[u8]; 6] = [b"&", b"=", b"boot=", b"hour_last=", b"%41", b"+"];
        Target::new("queries", inputs.to_vec()).words(&words).cases(30_000).run(|bytes| {
            let query = String::from_utf8_lossy(bytes);
            let request = frame_request(&query)?;
            let FrameRequest { boot, hour_last, day_last } = &request;
            let mut again = String::new();
            write!(again, "boot={boot}&hour_last={hour_last}&day_last={day_last}").expect("a text has room");
            assert_eq!(frame_request(&again).as_ref(), Some(&request), "it is read as it was meant");
            Some((boot.is_empty(), *hour_last == 0, *day_last == 0))
        });
    }

    /// As over TCP, less the socket: hyper's reading of a request's head, with this server's limits.
    #[test]
    fn whatever_a_request_says_it_is_answered_or_the_connection_ends() {
        let requests = [
            "GET /frame.json?boot=ab&hour_last=7 HTTP/1.1\r\nHost: 127.0.0.1:9477\r\nAccept: */*\r\n\r\n",
            "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
            "POST /metrics HTTP/1.1\r\nHost: ops.example\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            "GET http://[::1]:1/readyz HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
        ];
        let words: [&[u8]; 8] = [b"\r\n", b"\r\n\r\n", b": ", b"Host: ", b" HTTP/1.1", b"Upgrade: h2c", b"\0", b"?"];
        let inputs = requests.map(|request| request.into()).to_vec();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let hosts = Arc::new(Hosts::new(&["ops.example".to_owned()]).unwrap());
        let target = Target::new("requests", inputs).words(&words).cases(4000).allocates(64, 2 << 20);
        target.run(|bytes| {
            runtime.block_on(async {
                let (mut client, server) = tokio::io::duplex(1 << 20);
                let told = Arc::new(AtomicBool::new(false));
                let talk = timeout(DEADLINE, converse(server, hosts.clone(), Arc::new(Still), told));
                let ask = async {
                    let _ = client.write_all(bytes).await;
                    let _ = client.shutdown().await;
                    let mut answer = Vec::new();
                    let _ = client.read_to_end(&mut answer).await;
                    answer
                };
                let (ended, answer) = tokio::join!(talk, ask);
                assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{}", answer.escape_ascii());
                (ended.is_ok(), answer.get(9..12).map(<[u8]>::to_vec))
            })
        });
    }
}
