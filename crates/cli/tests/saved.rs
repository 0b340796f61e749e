//! What engines say that loads have saved, as an operator sees it; and loads by `Get` in the estimates of the hit rate.

mod command;
mod support;

use forebay_rpc::client::{self, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::{AdviseReply, Block, ReleaseRequest};
use support::*;

const BYTES: u64 = 4096;
const POOL: &[&str] = &["--pool.capacity_bytes", "64MiB", "--http.address", "127.0.0.1:0"];

fn release(client: &Client, saved_tokens: u64, saved_prefill_us: u64) {
    let session = client.welcome.session;
    let request = ReleaseRequest { session, saved_tokens, saved_prefill_us, ..Default::default() };
    call!(client, release, request).expect("a release");
}

/// Of all engines, as `inspect`, `advise` and the page of metrics say.
fn told(place: &Place, daemon: &Daemon) -> [(u64, f64); 3] {
    let sockets = place.sockets();
    let asked = ["inspect", "advise"].map(|name| {
        let answer = command::run(&[name, "--json", "--socket.directory", &sockets.to_string_lossy()]).json();
        let number = |key: &str| answer[key].as_u64().expect("a number");
        (number("saved_tokens"), number("saved_prefill_us") as f64 / 1e6)
    });
    let page = daemon.page("/metrics");
    let sample = |name: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix(name)).expect("it is told");
        line.trim().parse::<f64>().expect("a number")
    };
    let metrics = (sample("forebay_saved_tokens_total ") as u64, sample("forebay_saved_prefill_seconds_total "));
    [asked[0], asked[1], metrics]
}

#[test]
fn what_engines_say_they_saved_is_told_for_each_and_for_all() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL).listening(&place);
    let (first, _worker) = engine(&place, "first", BYTES);
    let (second, worker) = engine(&place, "second", BYTES);
    assert_eq!(told(&place, &daemon), [(0, 0.0); 3]);
    release(&first, 1000, 0); // its speed was not measured yet
    release(&first, 200, 2_500_000);
    release(&second, 30, 1_000_000);
    assert_eq!(told(&place, &daemon), [(1230, 3.5); 3]);
    let sessions = first.inspect().sessions;
    let of = |id: &str| sessions.iter().find(|session| session.engine_id == id).expect("it is listed");
    assert_eq!((of("first").saved_tokens, of("first").saved_prefill_us), (1200, 2_500_000));
    assert_eq!((of("second").saved_tokens, of("second").saved_prefill_us), (30, 1_000_000));
    let sockets = place.sockets();
    let text = command::run(&["inspect", "--socket.directory", &sockets.to_string_lossy()]).out;
    assert!(text.contains("saved       1230 tokens, at least 3.5 s of prefill"), "{text}");
    drop((second, worker));
    wait_until("the second engine is gone", || first.inspect().sessions.len() == 1);
    assert_eq!(told(&place, &daemon), [(1230, 3.5); 3], "what was saved stays saved");
}

#[test]
fn no_sum_of_savings_ends_the_daemon() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL).listening(&place);
    let (client, _worker) = engine(&place, "engine", BYTES);
    release(&client, u64::MAX, u64::MAX);
    release(&client, u64::MAX, 1);
    assert_eq!(told(&place, &daemon)[0].0, u64::MAX);
}

#[test]
fn what_get_loads_is_in_the_sample_as_what_lookups_ask() {
    let place = Place::new();
    // So small that all its keys are in the sample.
    let _daemon = Daemon::start(&place, &["--pool.capacity_bytes", "4MiB", "--pool.unit_bytes", "2MiB"]);
    let mut client = client::Client::new(place.sockets(), "plain", DEADLINE);
    let runtime = runtime();
    let group = GroupBytes { group: 0, bytes: BYTES };
    let fields = [("model".to_string(), "plain".to_string())];
    let namespace = runtime.block_on(client.open_namespace(fields, [group])).expect("a namespace");
    let names = hashes(0..4);
    let blocks = names.iter().map(|hash| Block { hash: hash.to_vec(), data: vec![7; BYTES as usize] }).collect();
    runtime.block_on(client.put(namespace, 0, &[], blocks)).expect("a store");
    // The second key of the second load is not there: what lies behind it is no hit of a prefix.
    let absent = hash(9);
    let asked: [Vec<&[u8]>; 2] =
        [names.iter().map(|hash| hash.as_slice()).collect(), vec![&names[0], &absent, &names[2]]];
    for keys in asked {
        let found = runtime.block_on(client.get(namespace, 0, &pack(keys).expect("one length"))).expect("a load");
        assert!(found[0].is_some());
    }
    let mut advice = || -> AdviseReply { runtime.block_on(client.advise()).expect("advice") };
    wait_until("both loads are looked at", || advice().windows[2].keys == 7);
    let advice = advice();
    // Four were stored before anybody asked, and two of them were asked for again.
    assert_eq!((advice.sampled_keys, advice.sampled_again, advice.sampled_hits), (7, 6, 5), "{advice:?}");
}
