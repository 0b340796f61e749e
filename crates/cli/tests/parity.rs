//! A trace replayed through a real daemon, request after request with every commit awaited, has exactly the hits that
//! the simulator counts; and what the daemon says about it agrees. So it has above an SSD, if what is written and what
//! comes up is awaited, too: the simulator's disk is done before the next event.

mod command;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_core::tiers::Admission;
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::{AdviseReply, Block, PutRequest};
use forebay_sim::read::{Hints, read};
use forebay_sim::replay::{HASH_BYTES, Setup, Ssd, keys, replay};
use forebay_sim::rounds::{Order, Rounds};
use forebay_sim::{Outcome, Trace};
use support::{DEADLINE, Daemon, Place, runtime, wait_until};

const BLOCK_BYTES: u64 = 4096;
const CAPACITY_BYTES: u64 = 4 << 20;
/// Room for all: what a full disk gives up depends on its segments, which are not the simulator's.
const SSD_BYTES: u64 = 256 << 20;
/// As many as take a few seconds when each write is waited for.
const REQUESTS: usize = 200;

fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../sim/tests/data/{name}.jsonl.zst"));
    read(&path, Hints::default()).expect("the cut is in the repository")
}

fn simulated(trace: &Trace, ssd: Option<Ssd>) -> Outcome {
    let policy = forebay_core::policy::ALL[0].1;
    // A plain client's blocks are stored one at a time.
    let setup = Setup { policy, capacity_bytes: CAPACITY_BYTES, ssd, lookahead: 0, store_batch: 1, salt: 0 };
    replay(trace, setup, |_| {}).expect("the pool holds blocks")
}

fn start(place: &Place, more: &[&str]) -> Daemon {
    let capacity = CAPACITY_BYTES.to_string();
    let arguments = ["--pool.capacity_bytes", &capacity, "--pool.unit_bytes", "2097152", "--pool.promise_share", "1.0"];
    Daemon::start(place, &[&arguments, more].concat())
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
    let rounds = [Order::Same, Order::Shuffled].map(|order| Rounds::new(order, 8).trace());
    for trace in ["conv", "agents"].map(trace).into_iter().chain(rounds) {
        let name = &trace.name;
        let place = Place::new();
        let _daemon = start(&place, &[]);
        let mut client = Client::new(place.sockets(), "parity", DEADLINE);
        let hits = runtime().block_on(ask(&mut client, &trace));
        let Outcome { prefix_hits, evicted, .. } = simulated(&trace, None);
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

#[test]
fn advice_is_drawn_once_there_is_enough_traffic_to_estimate_from() {
    let trace = trace("agents");
    let place = Place::new();
    let _daemon = start(&place, &[]);
    let sockets = place.sockets().to_string_lossy().into_owned();
    let directory = tempfile::tempdir().expect("a directory");
    let plot = directory.path().join("sizes.svg");
    let draw =
        || command::run(&["advise", "--socket.directory", &sockets, "--plot", plot.to_str().expect("a path in UTF-8")]);
    let refused = draw();
    assert!(refused.code == 1 && refused.out.contains("no engine has looked up a block yet"), "{refused:?}");
    assert!(
        refused.err.contains("too little traffic") && refused.err.contains("hint:") && !plot.exists(),
        "{refused:?}"
    );
    let mut client = Client::new(place.sockets(), "parity", DEADLINE);
    wait_until("there is enough traffic", || {
        runtime().block_on(ask(&mut client, &trace));
        advice(&place).keys >= 10_000
    });
    wait_until("sizes are estimated", || draw().code == 0);
    let picture = std::fs::read_to_string(&plot).expect("a plot");
    for told in [">memory</text>", ">disk, with the present memory</text>", ">here: ", ">+"] {
        assert!(picture.contains(told), "{told} is not in {picture}");
    }
}

/// An engine that waits for all that it causes.
struct Patient {
    client: support::Client,
    namespace: u32,
    /// Who does not map the pool brings nothing up.
    _worker: support::Worker,
}

impl Patient {
    fn open(place: &Place) -> Patient {
        let (client, _worker) = support::engine(place, "patient", BLOCK_BYTES);
        let namespace = client.namespace("parity", vec![support::group()]).expect("a namespace");
        Patient { client, namespace, _worker }
    }

    /// Until the disk has written and brought up all that it was asked for.
    fn wait(&self) {
        wait_until("the disk is done", || {
            let tiers = self.client.inspect().tiers;
            tiers.iter().all(|tier| tier.waiting_blocks + tier.storing_blocks + tier.loading_blocks == 0)
        });
    }

    /// Prefix hits, once nothing more comes up.
    fn look(&self, keys: &[[u8; HASH_BYTES]]) -> usize {
        let mut replies = self.client.replies(self.namespace, keys);
        let mut all = self.client.next(&mut replies, DEADLINE).expect("a reply in time").expect("a first one");
        loop {
            self.wait();
            // Two looks of the daemon, and more, at a disk that has nothing to do.
            match self.client.next(&mut replies, Duration::from_millis(100)) {
                Ok(Some(news)) => support::add(&mut all, news),
                Ok(None) | Err(_) => break,
            }
        }
        self.client.release(all.lease);
        all.groups[0].states.iter().take_while(|state| **state == 1).count()
    }

    fn store(&self, before: Option<&[u8; HASH_BYTES]>, key: &[u8; HASH_BYTES]) {
        let request = PutRequest {
            session: self.client.welcome.session,
            namespace: self.namespace,
            group: 0,
            predecessor: before.map_or(Vec::new(), |before| before.to_vec()),
            blocks: vec![Block { hash: key.to_vec(), data: vec![7; BLOCK_BYTES as usize] }],
            lent: None,
        };
        call!(self.client, put, request).expect("a store");
        self.wait();
    }
}

#[test]
fn a_trace_has_the_same_hits_above_an_ssd_as_in_the_simulator() {
    let whole = trace("synth");
    let mut synth = Trace::new(&whole.name, whole.shapes.clone());
    whole.requests().take(REQUESTS).for_each(|request| synth.push(request.at_us, request.namespace, request.blocks));
    // A fifth more than the pool holds.
    let rounds = Rounds { documents: 30, ..Rounds::new(Order::Same, 4) }.trace();
    same_above_an_ssd(&synth, Admission::SecondSighting, "second_sighting");
    same_above_an_ssd(&rounds, Admission::All, "all");
}

fn same_above_an_ssd(trace: &Trace, admission: Admission, name: &str) {
    let expected = simulated(trace, Some(Ssd { capacity_bytes: SSD_BYTES, admission }));
    assert!(expected.evicted > 0 && expected.prefix_hits > expected.pool_hits, "{expected:?} shows nothing");
    let (place, disk) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let file = disk.path().join("ssd");
    let (file, bytes) = (file.to_string_lossy(), SSD_BYTES.to_string());
    let more = ["--tier.ssd.disks", &file, "--tier.ssd.capacity_bytes", &bytes, "--tier.ssd.admission", name];
    // On a busy machine nothing is late.
    let _daemon = start(&place, &[&more[..], &["--tier.ssd.load_deadline_ms", "60000"]].concat());
    let engine = Patient::open(&place);
    wait_until("the tier serves", || engine.client.inspect().tiers.iter().all(|tier| tier.state == "serving"));
    let mut hits = 0;
    for (_, keys) in keys(trace, 0) {
        let ready = engine.look(&keys);
        hits += ready as u64;
        for at in ready..keys.len() {
            engine.store(at.checked_sub(1).map(|before| &keys[before]), &keys[at]);
        }
    }
    let tier = &engine.client.inspect().tiers[0];
    println!(
        "{hits} hits, {} of them not in the pool; {} blocks written",
        expected.prefix_hits - expected.pool_hits,
        tier.stored_blocks
    );
    let Outcome { prefix_hits, ssd_written_blocks, ssd_loaded_blocks, .. } = expected;
    assert_eq!((hits, tier.stored_blocks, tier.promoted_blocks), (prefix_hits, ssd_written_blocks, ssd_loaded_blocks));
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
    assert_eq!(advice.curve[1].capacity_bytes, advice.capacity_bytes);
    // Of the last turnovers, and so no figure to compare with all hits; each capacity by itself, to within two points.
    assert_eq!(advice.curve.len(), 7);
    assert!(advice.curve.is_sorted_by(|a, b| a.hit_ratio <= b.hit_ratio + 0.02), "{advice:?}");
    assert!(advice.curve[0].hit_ratio <= advice.curve[6].hit_ratio && advice.curve[6].hit_ratio <= 1.0, "{advice:?}");
}

#[test]
fn what_was_recorded_replays_to_the_same_blocks() {
    let trace = trace("agents");
    let place = Place::new();
    let _daemon = start(&place, &[]);
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
    assert!(busy.code == 1 && busy.err.contains("already running") && !other.exists(), "{}", busy.err);
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
    assert!(line.starts_with("lookups are recorded to"), "{line}");
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
