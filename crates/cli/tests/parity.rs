//! A trace replayed through a real daemon, request after request with every commit awaited, has exactly the hits that
//! the simulator counts; and what the daemon says about it agrees.

mod command;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::{AdviseReply, Block};
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{Setup, keys, replay};
use forebay_sim::{Outcome, Trace};
use support::{DEADLINE, Daemon, Place, runtime, wait_until};

const BLOCK_BYTES: u64 = 4096;
const CAPACITY_BYTES: u64 = 4 << 20;

fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../sim/tests/data/{name}.jsonl.zst"));
    read(&path, Hints::default()).expect("the cut is in the repository")
}

fn simulated(trace: &Trace) -> Outcome {
    let policy = forebay_core::policy::ALL[0].1;
    // A plain client's blocks are stored one at a time.
    let setup = Setup { policy, capacity_bytes: CAPACITY_BYTES, ssd: None, lookahead: 0, store_batch: 1, salt: 0 };
    replay(trace, setup, |_| {}).expect("the pool holds blocks")
}

fn start(place: &Place) -> Daemon {
    let capacity = CAPACITY_BYTES.to_string();
    let arguments = ["--pool.capacity_bytes", &capacity, "--pool.unit_bytes", "2097152", "--pool.promise_share", "1.0"];
    Daemon::start(place, &arguments)
}

/// Prefix hits of each request.
async fn ask(client: &mut Client, trace: &Trace) -> u64 {
    let group = GroupBytes { group: 0, bytes: BLOCK_BYTES };
    let fields = [("model".to_string(), "parity".to_string())];
    let namespace = client.open_namespace(fields, [group]).await.expect("a namespace");
    let mut hits = 0;
    for (_, keys) in keys(trace, 0) {
        let hashes = pack(keys.iter().map(|key| key.as_slice())).expect("hashes of one length");
        let found = client.lookup(namespace, 0, &hashes).await.expect("a lookup");
        let ready = found.iter().take_while(|is_ready| **is_ready).count();
        hits += ready as u64;
        let predecessor = ready.checked_sub(1).map_or(Vec::new(), |last| keys[last].to_vec());
        let data = vec![7; BLOCK_BYTES as usize];
        let blocks = keys[ready..].iter().map(|key| Block { hash: key.to_vec(), data: data.clone() }).collect();
        client.put(namespace, 0, &predecessor, blocks).await.expect("a store");
    }
    hits
}

fn advice(place: &Place) -> AdviseReply {
    let mut client = Client::new(place.sockets(), "adviser", DEADLINE);
    runtime().block_on(client.advise()).expect("advice")
}

#[test]
fn a_trace_has_the_same_hits_through_the_daemon_as_in_the_simulator() {
    for name in ["conv", "agents"] {
        let trace = trace(name);
        let place = Place::new();
        let _daemon = start(&place);
        wait_populated(&place);
        let mut client = Client::new(place.sockets(), "parity", DEADLINE);
        let hits = runtime().block_on(ask(&mut client, &trace));
        let Outcome { prefix_hits, evicted, .. } = simulated(&trace);
        assert!(evicted > 0, "{name} fits, and shows nothing");
        assert_eq!(hits, prefix_hits, "{name}");
        agrees(&place, &trace, hits);
        let shown =
            command::run(&["advise", "--json", "--socket.directory", &place.sockets().to_string_lossy()]).json();
        assert_eq!(
            (shown["hits"].as_u64(), shown["alarms"].as_array().map(Vec::len)),
            (Some(hits), Some(0)),
            "{shown}"
        );
    }
}

/// The advice tells these hits, misses that add up, and bounds that are bounds.
fn agrees(place: &Place, trace: &Trace, hits: u64) {
    let asked = trace.accesses() as u64;
    wait_until("all lookups are looked at", || advice(place).windows[2].keys == asked);
    let advice = advice(place);
    assert_eq!((advice.keys, advice.hits, advice.left_out), (asked, hits, 0));
    assert_eq!(advice.hits + advice.misses.iter().map(|miss| miss.count).sum::<u64>(), asked);
    let different = advice.windows[2].different_keys;
    let exact = trace.unique() as f64;
    assert!((different - exact).abs() <= 0.01 * exact, "{different} different keys, exactly {exact}");
    assert!(advice.sampled_hits <= advice.sampled_optimum_hits, "{advice:?}");
    assert!(advice.sampled_optimum_hits <= advice.sampled_again, "{advice:?}");
    assert!(advice.curve.is_sorted_by(|a, b| a.hit_ratio <= b.hit_ratio), "{advice:?}");
    assert_eq!(advice.curve[1].capacity_bytes, advice.capacity_bytes);
}

fn wait_populated(place: &Place) {
    let mut client = Client::new(place.sockets(), "waiter", DEADLINE);
    let runtime = runtime();
    wait_until("the pool is populated", || {
        let pool = runtime.block_on(client.inspect()).expect("an inspection");
        pool.populated_bytes == pool.capacity_bytes
    });
}

#[test]
fn what_was_recorded_replays_to_the_same_blocks() {
    let trace = trace("agents");
    let place = Place::new();
    let _daemon = start(&place);
    wait_populated(&place);
    let file = place.sockets().join("recorded.jsonl");
    let recorder = command::forebay(&["trace", "record", "--seconds", "600", "--socket.directory"])
        .args([place.sockets().as_os_str(), file.as_os_str()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the recorder starts");
    let mut recorder = Killed(recorder);
    // It says so once the daemon has accepted.
    wait_for_line(&mut recorder.0);
    let mut client = Client::new(place.sockets(), "recorded", DEADLINE);
    runtime().block_on(ask(&mut client, &trace));
    let other = place.sockets().join("other.jsonl");
    let [sockets, path] = [place.sockets(), other.clone()].map(|path| path.to_string_lossy().into_owned());
    let busy = command::run(&["trace", "record", "--socket.directory", &sockets, &path]);
    assert!(busy.code == 1 && busy.err.contains("recorded already") && !other.exists(), "{}", busy.err);
    wait_until("all lookups are looked at", || advice(&place).windows[2].keys == trace.accesses() as u64);
    interrupt(&mut recorder.0);
    let again = read(&file, Hints::default()).expect("it reads back");
    assert_eq!((again.len(), again.accesses(), again.unique()), (trace.len(), trace.accesses(), trace.unique()));
    let blocks = |trace: &Trace| trace.requests().flat_map(|request| request.blocks.to_vec()).collect::<Vec<_>>();
    assert_eq!(blocks(&again), blocks(&trace));
    assert_eq!(again.shapes[0].block_bytes, Some(BLOCK_BYTES));
    let text = std::fs::read_to_string(&file).expect("it is there");
    let (_, first) = keys(&trace, 0).next().expect("there are requests");
    let name: String = first[0].iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!text.contains(&name[..16]), "an engine's hash stands in the file");
}

struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for_line(child: &mut std::process::Child) {
    use std::io::{BufRead, BufReader};
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().expect("a pipe")).read_line(&mut line).expect("it speaks");
    assert!(line.starts_with("recording to"), "{line}");
}

/// As ctrl-c does; it writes what it has and ends.
fn interrupt(child: &mut std::process::Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(status.success());
    let start = Instant::now();
    while child.try_wait().expect("it is ours").is_none() {
        assert!(start.elapsed() < DEADLINE, "the recorder does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
