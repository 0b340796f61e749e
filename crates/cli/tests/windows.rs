//! Prompts of a model with a sliding window, below the pool: what a request has that does not wait for all of it.

#[path = "../../io/tests/fs/fuse/mod.rs"]
mod fuse;
mod support;

use std::time::{Duration, Instant};

use forebay_rpc::proto::*;
use fuse::hanging::mount;
use support::tiers::{lose_pool, written};
use support::*;

const BLOCKS: u64 = 400;
const BLOCK_BYTES: u64 = 512;
const WINDOW: u32 = 2;
/// Keys of the windowed group.
const OF_WINDOW: u64 = 1_000_000;

fn groups(tokens_per_block: u32, window_blocks: u32) -> Vec<Group> {
    let attention = Attention::Windowed.into();
    vec![group(), Group { group: 1, attention, tokens_per_block, window_blocks, ..group() }]
}

/// A daemon whose tier serves, and an engine with both groups.
fn serving(place: &Place, arguments: &[&str]) -> (Daemon, Client, Worker) {
    let daemon = Daemon::start(place, &[&["--pool.capacity_bytes", "16MiB"], arguments].concat());
    let mut client = Client::open(place, "a", 1);
    let of = |group| RankGroup { group, bytes: BLOCK_BYTES, is_replicated: false };
    let request = AttachRequest { groups: vec![of(0), of(1)], ..Worker::request("a", 0, 1, BLOCK_BYTES) };
    let mut worker = Worker::attach(place, request, None);
    worker.acknowledge();
    assert!(matches!(client.event(), session_event::Event::Attached(_)));
    wait_until("the tier serves", || client.inspect().tiers.iter().all(|tier| tier.state == "serving"));
    (daemon, client, worker)
}

/// Stores a prompt in both groups, and waits until all of it is written.
fn store_both(client: &Client, worker: &Worker, namespace: u32) {
    for (group, first) in [(0, 0), (1, OF_WINDOW)] {
        for at in (0..BLOCKS).step_by(50) {
            let request = ReserveRequest { session: client.welcome.session, namespace, group, count: 50 };
            let reply = call!(client, reserve, request).expect("a reserve");
            let seeds = first + at..first + at + 50;
            for ((slot, generation), seed) in reply.slots.iter().zip(&reply.generations).zip(seeds.clone()) {
                let held = Held { slot: *slot, generation: *generation };
                worker.fill(&held, seed);
            }
            let blocks = GroupBlocks {
                group,
                hash_bytes: 32,
                hashes: hashes(seeds).concat(),
                predecessor: if at == 0 { Vec::new() } else { hash(first + at - 1).to_vec() },
                slots: reply.slots,
                generations: reply.generations,
            };
            let request = CommitRequest { session: client.welcome.session, namespace, groups: vec![blocks] };
            call!(client, commit, request).expect("a commit");
            written(client);
        }
    }
}

/// The keys of each group, by the answers up to now.
#[derive(Default)]
struct Heard([Vec<u8>; 2]);

impl Heard {
    fn add(&mut self, reply: LookupReply) {
        for (states, news) in self.0.iter_mut().zip(reply.groups) {
            if states.is_empty() {
                *states = news.states;
                continue;
            }
            let waiting = states.iter_mut().filter(|state| **state == 2);
            waiting.zip(news.states).for_each(|(state, news)| *state = news);
        }
    }

    fn prefix(&self) -> usize {
        self.0[0].iter().take_while(|state| **state == 1).count()
    }

    /// The longest prefix whose window is there.
    fn usable(&self) -> usize {
        let has_window = |end: &usize| self.0[1][end.saturating_sub(WINDOW as usize)..*end].iter().all(|it| *it == 1);
        (1..=self.prefix()).rev().find(has_window).unwrap_or(0)
    }
}

/// A store takes long to say what it has, and what it has comes slowly: a request may stop waiting at any time.
#[test]
fn windows_come_up_with_half_of_the_prefix_however_slow_a_store_answers() {
    let Some(mut mount) = mount() else { return };
    let place = Place::new();
    let path = mount.path().to_str().expect("a path in UTF-8").to_owned();
    let (daemon, client, worker) = serving(&place, &["--tier.fs.directories", &path]);
    let namespace = client.namespace("t", groups(16, WINDOW)).expect("a namespace");
    store_both(&client, &worker, namespace);
    lose_pool(&place, daemon, (client, worker));
    let slow = ["--tier.fs.load_bytes_per_second", "150000", "--tier.fs.load_deadline_ms", "60000"];
    let (_daemon, client, _worker) = serving(&place, &[&["--tier.fs.directories", &path], &slow[..]].concat());
    let namespace = client.namespace("t", groups(16, WINDOW)).expect("a namespace");
    mount.harm("look", "slow 4");
    let keys = |group, first| GroupKeys { group, hash_bytes: 32, hashes: hashes(first..first + BLOCKS).concat() };
    let groups = vec![keys(0, 0), keys(1, OF_WINDOW)];
    let request = LookupRequest { session: client.welcome.session, namespace, groups };
    let mut replies = call!(client, lookup, request).expect("a lookup");
    let (mut heard, begun) = (Heard::default(), Instant::now());
    while heard.prefix() < 150 {
        let news = client.next(&mut replies, DEADLINE).expect("an answer in time").expect("more to come");
        heard.add(news);
        println!("{} {} {:?}", heard.prefix(), heard.usable(), begun.elapsed());
        let (prefix, usable) = (heard.prefix(), heard.usable());
        assert!(usable >= prefix / 3 || prefix < 8, "{usable} of {prefix} after {:?}", begun.elapsed());
    }
    assert!(heard.prefix() < BLOCKS as usize && begun.elapsed() > Duration::ZERO, "all of it came at once");
}

/// Whatever an engine says of its groups: the daemon reckons with it on the thread that decides.
#[test]
fn a_lookup_ends_whatever_the_lengths_of_windows_and_blocks_are() {
    let (place, store) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let path = store.path().to_str().expect("a path in UTF-8");
    let arguments = ["--tier.fs.directories", path, "--tier.fs.load_bytes_per_second", "100000"];
    let (daemon, client, worker) = serving(&place, &arguments);
    let strange = [(0, WINDOW), (1 << 31, 1 << 31), (u32::MAX, u32::MAX), (1, u32::MAX)];
    let open = |client: &Client, at: usize| {
        let (tokens, window) = strange[at];
        client.namespace(&at.to_string(), groups(tokens, window)).expect("a namespace")
    };
    (0..strange.len()).for_each(|at| store_both(&client, &worker, open(&client, at)));
    lose_pool(&place, daemon, (client, worker));
    let (_daemon, client, _worker) = serving(&place, &arguments);
    for at in 0..strange.len() {
        let keys = |group, first| GroupKeys { group, hash_bytes: 32, hashes: hashes(first..first + BLOCKS).concat() };
        let groups = vec![keys(0, 0), keys(1, OF_WINDOW)];
        let request = LookupRequest { session: client.welcome.session, namespace: open(&client, at), groups };
        let mut replies = call!(client, lookup, request).expect("a lookup");
        while client.next(&mut replies, DEADLINE).expect("it ends").is_some() {}
    }
}
