//! A daemon's share of a store that others use too.

mod command;
mod support;

use forebay_rpc::proto::*;
use support::*;

const BYTES: u64 = 20_000;
const BLOCKS: u64 = 50;

#[test]
fn a_share_that_is_spent_holds_back_writes_and_nothing_else() {
    let (place, store) = (Place::new(), tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory"));
    let directory = store.path().to_str().expect("a path in UTF-8");
    let mut arguments = vec!["--pool.capacity_bytes", "16MiB", "--tier.fs.directories", directory];
    // The first block may overdraw it; then it takes hours until there is something again.
    arguments.extend(["--tier.fs.store_bytes_per_second", "1", "--drain.deadline_seconds", "1"]);
    let _daemon = Daemon::start(&place, &arguments);
    let (client, worker) = engine(&place, "a", BYTES);
    let tier = || client.inspect().tiers.first().cloned().expect("a tier is configured");
    wait_until("the tier serves", || tier().state == "serving");
    let namespace = client.namespace("t", vec![group()]).unwrap();
    let slots = client.reserve(namespace, BLOCKS as u32);
    slots.iter().zip(0..).for_each(|(held, seed)| worker.fill(held, seed));
    let outcomes = client.commit(namespace, &hashes(0..BLOCKS), &slots);
    assert_eq!(outcomes, [CommitOutcome::CommitStored; BLOCKS as usize]);
    wait_until("the first block is written", || tier().stored_blocks == 1);
    let reply = client.lookup_settled(namespace, &hashes(0..BLOCKS));
    assert_eq!(reply.groups[0].states, [1; BLOCKS as usize]);
    client.release(reply.lease);
    let tier = tier();
    assert_eq!(tier.stored_blocks, 1);
    assert_eq!(tier.waiting_blocks + tier.storing_blocks, BLOCKS - 1, "{tier:?}");
}
