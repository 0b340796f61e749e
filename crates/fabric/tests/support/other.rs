//! The other process of a test: it serves two regions, and is signalled and killed.

#![allow(dead_code, reason = "each test uses a part")]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_fabric::{Address, Descriptor, Event, Memory, OpId, Operation, PeerId, RemoteId, Rights, Segment, Verb};
use rustix::process::{Pid, Signal, kill_process};

use super::{PATIENCE, Side, Transport, end_of, options_of, pattern};

/// Of the memory of the other process.
pub const BYTES: u64 = 8 << 20;
pub const SEED: u64 = 11;
const ROLE: &str = "FOREBAY_FABRIC_TEST_ADDRESS";
/// Set if it encrypts.
const ENCRYPTS: &str = "FOREBAY_FABRIC_TEST_ENCRYPTS";

/// The other process, which disconnects whoever sends it a message; as a test of its own it does nothing.
#[test]
fn the_other_process() {
    let Ok(address) = std::env::var(ROLE) else { return };
    let is_encrypted = std::env::var(ENCRYPTS).is_ok();
    let mut side = Side::new(options_of(if is_encrypted { Transport::Encrypted } else { Transport::Tcp }));
    let address = side.fabric.listen(&Address::parse(&address).unwrap()).unwrap();
    // Behind other memory in one file, so that even on shared memory bytes go through the socket; and a whole file.
    let part = Arc::new(Memory::allocate(2 * BYTES).unwrap());
    part.write(BYTES, &pattern(SEED, BYTES));
    let part = side.fabric.register(&part, BYTES, BYTES, Rights::READ_AND_WRITE).unwrap();
    let (whole, whole_region) = side.memory(BYTES, Rights::READ_AND_WRITE);
    whole.write(0, &pattern(SEED, BYTES));
    println!("listening at {address}");
    let parent = rustix::process::getppid();
    while rustix::process::getppid() == parent {
        side.poll(Duration::from_secs(1));
        for event in std::mem::take(&mut side.events) {
            match event {
                Event::Up { peer } => {
                    for region in [part, whole_region] {
                        let descriptor = side.fabric.export(region).unwrap();
                        side.fabric.send(peer, descriptor.to_bytes().to_vec()).unwrap();
                    }
                }
                Event::Message { peer, .. } => side.fabric.disconnect(peer),
                _ => {}
            }
        }
    }
}

pub struct Other {
    process: Child,
    pub address: Address,
}

impl Other {
    pub fn start(transport: Transport, address: &Address) -> Other {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "support::other::the_other_process", "--nocapture"]).env(ROLE, address.to_string());
        if transport == Transport::Encrypted {
            command.env(ENCRYPTS, "1");
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = std::io::BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(std::io::BufRead::read_line(&mut said, &mut line).unwrap() > 0, "the other process ended");
            if let Some((_, address)) = line.trim_end().split_once("listening at ") {
                break Address::parse(address).unwrap();
            }
        };
        // Whoever writes to a closed pipe is killed.
        std::mem::forget(said);
        Other { process, address }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Stops all its threads. The signal alone does not wait for that: a thread that runs may go on for a while.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let threads = format!("/proc/{}/task", self.process.id());
        let is_stopped = |thread: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        let end = Instant::now() + PATIENCE;
        while !std::fs::read_dir(&threads).unwrap().all(|thread| thread.is_ok_and(is_stopped)) {
            assert!(Instant::now() < end, "the other process does not stop");
            std::thread::yield_now();
        }
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Connects, and imports the memory that is reached through the socket, and the memory that may be mapped.
pub fn meet(side: &mut Side, address: &Address) -> (PeerId, [Descriptor; 2], [RemoteId; 2]) {
    let peer = side.fabric.connect(address).unwrap();
    side.until(|event| matches!(event, Event::Up { peer: it } if *it == peer).then_some(()));
    let descriptors = [(); 2].map(|()| {
        side.until(|event| match event {
            Event::Message { peer: it, bytes } if *it == peer => Some(Descriptor::from_bytes(bytes).unwrap()),
            _ => None,
        })
    });
    let remotes = descriptors.map(|descriptor| side.fabric.import(peer, &descriptor).unwrap());
    (peer, descriptors, remotes)
}

pub fn submit(side: &mut Side, peer: PeerId, verb: Verb, segment: Segment, deadline: Option<Duration>) -> OpId {
    let deadline = deadline.map(|deadline| Instant::now() + deadline);
    side.fabric.submit(Operation { peer, verb, segments: vec![segment], deadline, notice: None }).unwrap()
}

pub fn wait(side: &mut Side, op: OpId) -> forebay_core::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = end_of(side, op) {
            return result;
        }
        assert!(Instant::now() < end, "an operation did not end");
        side.poll(Duration::from_millis(10));
    }
}
