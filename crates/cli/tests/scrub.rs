//! The scrub of the shipped daemon: what changes in the living pool is found though nobody loads it, what a tier has
//! comes up again, and nothing else is dropped, whatever goes on beside it.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;

use forebay_rpc::proto::*;
use support::tiers::{BYTES, is_served, store};
use support::*;

/// The scrub does not rest.
const POOL: &[&str] =
    &["--pool.capacity_bytes", "16MiB", "--pool.scrub_walk_seconds", "0", "--http.address", "127.0.0.1:0"];
const BLOCKS: u64 = 20;
/// Where the published generations begin, in their file.
const GENERATIONS_AT: u64 = 4096;

/// Of all samples of one metric, those with this in their labels.
fn metric(daemon: &Daemon, name: &str, label: &str) -> u64 {
    let page = daemon.page("/metrics");
    let is_meant = |line: &&str| line.starts_with(name) && line.contains(label);
    page.lines().filter(is_meant).map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Blocks that were found not to be what was stored.
fn found(daemon: &Daemon, by: &str) -> u64 {
    metric(daemon, "forebay_corrupt_blocks_total", by)
}

/// Writes block `seed` into its slot again, with one bit that is another; the slot is nobody's to write to.
fn flip(client: &Client, worker: &Worker, namespace: u32, seed: u64) {
    let reply = client.lookup_settled(namespace, &hashes(0..BLOCKS));
    let (slot, generation) = (reply.groups[0].slots()[seed as usize], reply.groups[0].generations()[seed as usize]);
    let mut rotten = pattern(seed, BYTES);
    rotten[BYTES as usize / 2] ^= 4;
    client.release(reply.lease);
    worker.write(&Held { slot, generation }, &rotten);
}

#[test]
fn a_byte_that_flips_where_nobody_loads_is_found_and_the_next_store_is_taken() {
    let place = Place::new();
    let daemon = Daemon::start(&place, POOL);
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..BLOCKS);
    wait_until("all was read once", || metric(&daemon, "forebay_scrubs_total", "") > 1);
    assert_eq!(found(&daemon, ""), 0);
    flip(&client, &worker, namespace, 13);
    wait_until("the scrub finds it", || found(&daemon, "scrub") == 1);
    assert_eq!(
        client.lookup(namespace, &hashes(0..BLOCKS)).groups[0].states,
        vec![1; 13],
        "the rotten block is a miss"
    );
    let slots = client.reserve(namespace, 1);
    worker.fill(&slots[0], 13);
    assert_eq!(client.commit(namespace, &[hash(13)], &slots), [CommitOutcome::CommitStored]);
    is_served(&client, &worker, namespace, 0..BLOCKS);
    assert_eq!((found(&daemon, ""), daemon.says("found_by=\"scrub\"", 1)), (1, 1), "{}", daemon.log());
}

#[test]
fn a_damaged_generation_of_a_whole_block_costs_no_block() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[POOL, &["--pool.huge_pages", "off"]].concat());
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..BLOCKS);
    let reply = client.lookup_settled(namespace, &hashes(0..BLOCKS));
    client.release(reply.lease);
    let published = fs::File::options().write(true).open(place.pool().join("generation")).unwrap();
    for (slot, generation) in reply.groups[0].slots().iter().zip(&reply.groups[0].generations()) {
        published.write_all_at(&(generation ^ 4).to_le_bytes(), GENERATIONS_AT + u64::from(*slot) * 4).unwrap();
    }
    let before = metric(&daemon, "forebay_scrubs_total", "");
    wait_until("all was read since", || metric(&daemon, "forebay_scrubs_total", "") > before + 1);
    is_served(&client, &worker, namespace, 0..BLOCKS);
    let times = BLOCKS as usize;
    assert_eq!((found(&daemon, ""), daemon.says("was damaged; it is repaired", times)), (0, times));
}

#[test]
fn a_scrub_that_is_switched_off_finds_nothing() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &[POOL, &["--pool.scrub_bytes_per_second", "0"]].concat());
    let (client, worker) = engine(&place, "a", BYTES);
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..BLOCKS);
    flip(&client, &worker, namespace, 13);
    assert!(daemon.threads("scrub").is_empty());
    assert_eq!(call!(client, audit, AuditRequest {}).unwrap().corrupt, 1);
    assert_eq!((found(&daemon, "scrub"), found(&daemon, "audit")), (0, 1));
    assert_eq!(metric(&daemon, "forebay_scrubbed_bytes_total", ""), 0);
}

#[test]
fn what_also_lies_on_a_disk_comes_up_from_there() {
    let place = Place::new();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let disk = directory.path().join("ssd");
    let disk = ["--tier.ssd.disks", disk.to_str().expect("a path in UTF-8"), "--tier.ssd.capacity_bytes", "64MiB"];
    let daemon = Daemon::start(&place, &[POOL, &disk, &["--tier.ssd.admission", "all"]].concat());
    let (client, worker) = engine(&place, "a", BYTES);
    wait_until("the tier serves", || support::tiers::tier(&client, "ssd").state == "serving");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    store(&client, &worker, namespace, 0..BLOCKS);
    wait_until("all lie on the disk", || support::tiers::tier(&client, "ssd").blocks == BLOCKS);
    flip(&client, &worker, namespace, 13);
    wait_until("the scrub finds it", || found(&daemon, "scrub") == 1);
    is_served(&client, &worker, namespace, 0..BLOCKS);
    assert_eq!(support::tiers::tier(&client, "ssd").promoted_blocks, 1);
}

/// The scrub reads as fast as it can, so that each block is being read most of the time.
#[test]
fn nothing_is_dropped_by_mistake_while_slots_change_hands_and_an_audit_reads_too() {
    const SMALL: u64 = 16 << 10;
    const LARGE: u64 = 160 << 10;
    let place = Place::new();
    let more = ["--pool.unit_bytes", "2MiB", "--pool.scrub_bytes_per_second", "1TiB"];
    let daemon = Daemon::start(&place, &[POOL, &more].concat());
    let client = Client::open(&place, "client", 0);
    let open = |tenant: &str, bytes| client.namespace(tenant, vec![Group { rank_bytes: vec![bytes], ..group() }]);
    let (small, large) = (open("small", SMALL).unwrap(), open("large", LARGE).unwrap());
    let put = |namespace: u32, seeds: std::ops::Range<u64>, bytes: u64| {
        let blocks = seeds.map(|seed| Block { hash: hash(seed).to_vec(), data: pattern(seed, bytes) }).collect();
        let (session, predecessor) = (client.welcome.session, Vec::new());
        let request = PutRequest { session, namespace, group: 0, predecessor, blocks, lent: None };
        call!(client, put, request).expect("a put");
    };
    let check = |namespace: u32, seeds: std::ops::Range<u64>, bytes: u64| {
        let hashes = hashes(seeds.clone()).concat();
        let request =
            GetRequest { session: client.welcome.session, namespace, group: 0, hash_bytes: 32, hashes, lent: None };
        let reply = call!(client, get, request).expect("a get");
        let seed_of = |block: &Block| seeds.clone().find(|seed| block.hash == hash(*seed)).expect("it was asked for");
        let is_right = |block: &Block| block.data == pattern(seed_of(block), bytes);
        assert!(reply.blocks.iter().all(is_right), "a block has other bytes");
        reply.blocks.len()
    };
    // Of each size, since one that begins finds little room at first.
    let mut whole = [0, 0];
    for round in 0..40 {
        // Each size has its turn, so extents go from one to the other.
        let (namespace, bytes, blocks) = if round / 10 % 2 == 0 { (small, SMALL, 200) } else { (large, LARGE, 20) };
        let seeds = round * 1000..round * 1000 + blocks;
        put(namespace, seeds.clone(), bytes);
        whole[usize::from(namespace == large)] += check(namespace, seeds, bytes);
        if round % 10 == 5 {
            let audit = call!(client, audit, AuditRequest {}).unwrap();
            assert_eq!((audit.corrupt, audit.misnamed, audit.complaint.as_str()), (0, 0, ""));
        }
    }
    assert!(whole.iter().all(|blocks| *blocks > 100), "{whole:?}");
    assert!(metric(&daemon, "forebay_evicted_blocks_total", "") > 100);
    assert!(metric(&daemon, "forebay_extents_moved_total", "") > 0);
    let before = metric(&daemon, "forebay_scrubs_total", "");
    wait_until("the scrub goes on", || metric(&daemon, "forebay_scrubs_total", "") > before + 1);
    assert_eq!(found(&daemon, ""), 0, "{}", daemon.log());
}

/// Threads whose work has ended with the daemon's state end with the process.
#[test]
fn a_daemon_without_a_scrub_ends_without_a_panic() {
    for _ in 0..3 {
        let place = Place::new();
        let off = ["--pool.capacity_bytes", "16MiB", "--pool.scrub_bytes_per_second", "0"];
        let daemon = Daemon::start(&place, &off);
        daemon.terminate();
        let (is_well, log) = daemon.finish();
        assert!(is_well && log.contains("drained") && !log.contains("panicked"), "{log}");
    }
}
