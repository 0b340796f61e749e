//! The HTTP pages against clients that are slow, greedy or speak nonsense.
//!
//! Raw sockets on the client's side, so that every byte and every pause is ours. Nothing sleeps: where time
//! must pass, tokio's clock is paused and moved, or the test reads until the server closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_daemon::config::HttpAddress;
use forebay_daemon::health::Health;
use forebay_daemon::http::{self, DEADLINE, Hosts, MAX_CONNECTIONS, Source};
use forebay_daemon::metrics::Snapshot;
use forebay_rpc::proto::FrameRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Daemon {
    is_draining: AtomicBool,
    is_core_stuck: AtomicBool,
    never_answers: AtomicBool,
}

impl Source for Daemon {
    async fn health(&self) -> Health {
        let core_silence = Duration::from_secs(if self.is_core_stuck.load(Ordering::Relaxed) { 60 } else { 0 });
        Health {
            core_silence,
            is_recovered: true,
            populated_bytes: 8 << 20,
            needed_bytes: 2 << 20,
            capacity_bytes: 8 << 20,
            lacks_memory: None,
            own_files: Default::default(),
            is_draining: self.is_draining.load(Ordering::Relaxed),
            tiers: Vec::new(),
        }
    }

    async fn frame(&self, request: FrameRequest) -> String {
        format!("{request:?}")
    }

    async fn snapshot(&self) -> Result<Snapshot> {
        if self.never_answers.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        if self.is_core_stuck.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Timeout, "the core does not answer"));
        }
        Ok(Snapshot { start_time_seconds: 1234, ..Snapshot::default() })
    }
}

struct Server {
    address: std::net::SocketAddr,
    daemon: Arc<Daemon>,
}

async fn server() -> Server {
    let listener =
        http::bind(HttpAddress::At(([127, 0, 0, 1], 0).into())).await.unwrap().expect("an address was given");
    let (address, daemon) = (listener.local_addr().unwrap(), Arc::new(Daemon::default()));
    tokio::spawn(http::serve(listener, Hosts::new(&["ops.example".to_owned()]).unwrap(), daemon.clone()));
    Server { address, daemon }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends `bytes` and reads until the server closes.
    async fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        // The server may close before it read all of it.
        let _ = stream.write_all(bytes).await;
        read_to_end(&mut stream).await
    }

    async fn get(&self, path: &str) -> String {
        self.get_from("127.0.0.1:9477", path).await
    }

    async fn get_from(&self, host: &str, path: &str) -> String {
        self.exchange(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await
    }
}

/// What came before the server closed, or reset, the connection.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(count) = timeout(PATIENCE, stream.read(&mut piece)).await.expect("the server closes the connection") {
        if count == 0 {
            break;
        }
        answer.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("none")
}

#[tokio::test]
async fn each_page_is_served_and_nothing_else_is() {
    let server = server().await;
    let metrics = server.get("/metrics").await;
    assert!(metrics.contains("content-type: application/openmetrics-text; version=1.0.0"), "{metrics}");
    assert!(metrics.contains("forebay_start_time_seconds 1234\n") && metrics.ends_with("# EOF\n"), "{metrics}");
    assert!(server.get("/livez").await.ends_with("\r\n\r\nalive\nok   core: ticked 0 ms ago\n"));
    assert_eq!(status(&server.get("/readyz").await), "200");
    let frame = server.get("/frame.json?boot=ab&hour_last=7").await;
    assert!(frame.contains("content-type: application/json") && frame.contains("hour_last: 7, day_last: 0"), "{frame}");
    for query in ["?hour_last=-1", "?x=1", "?boot"] {
        assert_eq!(status(&server.get(&format!("/frame.json{query}")).await), "400", "{query}");
    }
    for path in ["//", "/index.html", "/metrics/", "/metrics2", "/../etc/passwd", "/debug", "*"] {
        assert_eq!(status(&server.get(path).await), "404", "{path}");
    }
    assert_eq!(status(&server.get("/metrics?x=1").await), "200");
    assert_eq!(status(&server.exchange(b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n").await), "405");
    let head = server.exchange(b"HEAD /metrics HTTP/1.1\r\n\r\n").await;
    assert!(status(&head) == "200" && head.ends_with("\r\n\r\n"), "{head}");
}

#[tokio::test]
async fn the_page_runs_its_own_script_alone_and_stands_in_no_frame() {
    let page = server().await.get("/").await;
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert_eq!(status(&page), "200");
    for part in [
        "content-type: text/html; charset=utf-8",
        "content-security-policy: default-src 'none'; connect-src 'self'; img-src data:; style-src 'sha256-",
        "x-frame-options: DENY",
        "cache-control: no-store",
    ] {
        assert!(head.contains(part), "{part} is not in {head}");
    }
    assert!(!head.contains("unsafe") && !head.contains("access-control"), "{head}");
    assert!(body.starts_with("<!doctype html>") && body.ends_with("</html>\n"));
    assert!(body.contains("Copyright (c) 2022 Leon Sorokin"), "the licence goes with every copy");
}

/// The name of another site, which leads to the daemon's address, is how a page of that site would read it.
#[tokio::test]
async fn another_hosts_name_gets_neither_page_nor_frame_and_probes_go_by_any_name() {
    let server = server().await;
    for path in ["/", "/frame.json"] {
        for host in ["evil.example", "localhost.evil.example:9477", ""] {
            let answer = server.get_from(host, path).await;
            assert!(status(&answer) == "421" && answer.contains("`http.hosts`"), "{host}{path}: {answer}");
        }
        for host in ["localhost:9477", "[::1]:9477", "10.0.0.7", "ops.example"] {
            assert_eq!(status(&server.get_from(host, path).await), "200", "{host}{path}");
        }
        let without = format!("GET {path} HTTP/1.1\r\n\r\n");
        assert_eq!(status(&server.exchange(without.as_bytes()).await), "421");
        let two = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n");
        assert_eq!(status(&server.exchange(two.as_bytes()).await), "400");
    }
    for path in ["/metrics", "/livez", "/readyz"] {
        assert_eq!(status(&server.get_from("gpu-07.example", path).await), "200", "{path}");
    }
}

#[tokio::test]
async fn a_draining_daemon_is_alive_but_not_ready() {
    let server = server().await;
    server.daemon.is_draining.store(true, Ordering::Relaxed);
    let ready = server.get("/readyz").await;
    assert_eq!(status(&ready), "503");
    assert!(ready.contains("not ready\n") && ready.contains("fail drain: draining"), "{ready}");
    assert_eq!(status(&server.get("/livez").await), "200");
}

#[tokio::test]
async fn a_stuck_core_is_neither_alive_nor_measured() {
    let server = server().await;
    server.daemon.is_core_stuck.store(true, Ordering::Relaxed);
    assert_eq!(status(&server.get("/livez").await), "503");
    assert_eq!(status(&server.get("/readyz").await), "503");
    let metrics = server.get("/metrics").await;
    assert!(status(&metrics) == "503" && metrics.ends_with("the core does not answer\n"), "{metrics}");
}

#[tokio::test]
async fn nonsense_and_oversized_requests_are_refused_and_the_next_client_is_served() {
    let server = server().await;
    assert_eq!(status(&server.exchange(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n").await), "400");
    assert_eq!(status(&server.exchange(b"GET /metrics\r\n\r\n").await), "400");
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    assert_eq!(status(&server.exchange(long.as_bytes()).await), "431");
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(1000));
    assert_eq!(status(&server.exchange(many.as_bytes()).await), "431");
    assert_eq!(status(&server.get("/livez").await), "200");
}

#[tokio::test]
async fn one_connection_is_one_request() {
    let server = server().await;
    let twice = b"GET /livez HTTP/1.1\r\n\r\nGET /livez HTTP/1.1\r\n\r\n";
    assert_eq!(server.exchange(twice).await.matches("HTTP/1.1 200").count(), 1);
}

/// Moves the paused clock past the deadline while the server's tasks run.
async fn pass_the_deadline() {
    tokio::time::advance(DEADLINE + Duration::from_secs(1)).await;
}

/// Connections that send nothing, half a request, or never read their answer.
async fn stuck_clients(server: &Server) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    for kind in 0..MAX_CONNECTIONS {
        let mut client = server.connect().await;
        if kind % 2 == 0 {
            client.write_all(b"GET /metr").await.unwrap();
        }
        clients.push(client);
    }
    clients
}

#[tokio::test]
async fn slow_clients_hold_their_places_only_until_the_deadline() {
    let server = server().await;
    let mut clients = stuck_clients(&server).await;
    // All places are taken: the next one gets that of the oldest.
    assert_eq!(status(&server.get("/livez").await), "200");
    assert_eq!(read_to_end(&mut clients[0]).await, "", "it was closed without an answer");
    tokio::time::pause();
    pass_the_deadline().await;
    tokio::time::resume();
    for client in &mut clients {
        assert_eq!(read_to_end(client).await, "", "a slow client was closed without an answer");
    }
    assert_eq!(status(&server.get("/livez").await), "200");
}

#[tokio::test]
async fn a_scrape_that_the_core_never_answers_ends_at_the_deadline() {
    let server = server().await;
    server.daemon.never_answers.store(true, Ordering::Relaxed);
    let mut client = server.connect().await;
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
    // Once another client was served, the first one's request has been read too.
    assert_eq!(status(&server.get("/livez").await), "200");
    tokio::time::pause();
    pass_the_deadline().await;
    tokio::time::resume();
    assert_eq!(read_to_end(&mut client).await, "");
}

#[tokio::test]
async fn a_taken_address_is_an_error_with_a_hint_and_off_is_none() {
    let server = server().await;
    let error = http::bind(HttpAddress::At(server.address)).await.unwrap_err();
    assert!(error.to_string().contains(&server.address.to_string()), "{error}");
    assert!(error.hint_text().is_some());
    assert!(http::bind(HttpAddress::Off).await.unwrap().is_none());
}
