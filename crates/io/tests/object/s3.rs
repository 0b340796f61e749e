//! The S3 server of `moto`, which was written by others to answer as Amazon's does. `make servers` gets it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

pub const BUCKET: &str = "forebay";

/// See the module's head.
pub struct Moto {
    child: Child,
    address: String,
}

impl Moto {
    pub fn start() -> Moto {
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

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// It stands still: whatever is asked is not answered.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// `kill -9`, for good.
    pub fn kill(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it is ours to kill");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is ours");
    }

    /// One request in plain words; the answer as it comes.
    pub fn ask(&self, request: &str, body: &[u8]) -> String {
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
