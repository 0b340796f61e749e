//! The S3 server of `moto`, which was written by others to answer as Amazon's does: what the tier asks of a store is
//! understood there as well. It answers some hundred requests a second, too few for the suite's tens of thousands.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpKind, Outcome};
use forebay_io::object::ObjectConfig;

use crate::bed::*;
use crate::server::BUCKET;

struct Moto {
    child: Child,
    address: String,
}

impl Moto {
    fn start() -> Moto {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let binary = root.join(".cache/s3/bin/moto_server");
        assert!(binary.exists(), "there is no {}\nhint: run `make servers`", binary.display());
        let mut command = Command::new(binary);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let address = lines.by_ref().find_map(|line| Some(line.split_once("http://")?.1.trim().to_owned()));
        let moto = Moto { child, address: address.expect("the server says where it listens") };
        // Its log is read on, or it would stop writing.
        std::thread::spawn(move || lines.for_each(drop));
        assert!(moto.ask(&format!("PUT /{BUCKET}"), b"").contains("200"), "the bucket is made");
        moto
    }

    /// One request in plain words; the answer as it comes.
    fn ask(&self, request: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        // Signed by nobody, which it does not mind; but it wants to see whose request it is.
        let signed =
            "AWS4-HMAC-SHA256 Credential=id/20261121/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
        let head = format!(
            "{request} HTTP/1.1\r\nhost: {}\r\nauthorization: {signed}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }
}

/// No server outlives a test that failed.
impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait().map(drop));
    }
}

#[test]
fn blocks_are_stored_found_loaded_and_removed() {
    let moto = Moto::start();
    let endpoint = format!("http://{}", moto.address);
    let mut host = Host::open(&ObjectConfig { part_bytes: 5 << 20, ..config(&endpoint) });
    let blocks = [(0, 1), (1, 4096), (2, 100_003), (3, (12 << 20) + 1)];
    for (number, length_bytes) in blocks {
        assert_eq!(host.one(OpKind::Find, number, 0), Outcome::Absent);
        assert_eq!(host.one(LOAD, number, length_bytes), Outcome::Absent);
        host.is_stored(number, length_bytes);
        host.is_stored(number, length_bytes);
        assert!(matches!(host.one(OpKind::Find, number, 0), Outcome::Found(_)));
        host.verify(number, length_bytes);
    }
    let counters = host.tier.report().counters;
    assert_eq!((counters.stored_blocks, counters.repeated_stores), (4, 4));
    assert_eq!(host.one(LOAD, 1, 4000), Outcome::Failed(ErrorKind::Invalid), "another length");
    drop(host);
    let mut host = Host::open(&config(&endpoint));
    for (number, length_bytes) in blocks {
        host.verify(number, length_bytes);
        assert_eq!(host.one(REMOVE, number, 0), Outcome::Removed);
        assert_eq!(host.one(REMOVE, number, 0), Outcome::Absent);
        assert_eq!(host.one(LOAD, number, length_bytes), Outcome::Absent);
    }
}

#[test]
fn what_another_program_wrote_under_a_blocks_name_is_never_data() {
    let moto = Moto::start();
    let endpoint = format!("http://{}", moto.address);
    let mut host = Host::open(&config(&endpoint));
    let name = format!("{:032x}/0001-{:016x}", 9, 2);
    for body in [&b""[..], b"something else", &[0; 4096 + 96]] {
        let answer = moto.ask(&format!("PUT /{BUCKET}/team/cache/{name}"), body);
        assert!(answer.contains("200"), "{answer}");
        host.fill(2, 0x77);
        let outcome = host.one(LOAD, 2, 4096);
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        assert!(host.is_filled(2, 0x77));
    }
    // The last one has the block's length, and was taken away when it was loaded.
    host.is_stored(2, 4096);
    host.verify(2, 4096);
}
