//! The tier alone, and behind a daemon that learned of it from its one line in `ALL`.

use std::path::Path;
use std::time::Instant;

use forebay_core::{BlockHash, Generation};
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::{Block, CommitOutcome, InspectReply};
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::*;
use crate::config::{Config, Sources, load, page};

/// No single step takes longer on any machine that is alive.
const DEADLINE: Duration = Duration::from_secs(20);
const BLOCK_BYTES: usize = 1 << 20;
/// More than the pool of 16 MiB holds.
const BLOCKS: u8 = 40;

struct Bed(Memory);

impl conformance::Bed for Bed {
    fn tier(&mut self) -> &mut dyn Tier {
        &mut self.0
    }

    fn pool(&self) -> Region {
        self.0.pool.clone()
    }

    fn reopen(&mut self) {
        unreachable!("only durable tiers are opened again");
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let (bytes, _) = self.0.blocks.get_mut(key).expect("the block was stored");
        bytes[length_bytes as usize / 2] ^= 1;
        true
    }
}

fn memory(capacity_bytes: u64) -> Memory {
    Memory::new(Region::anonymous((SLOTS * SLOT_BYTES) as usize).expect("memory"), capacity_bytes)
}

#[test]
fn it_is_a_tier_like_any_other() {
    conformance::check(&mut Bed(memory(1 << 30)));
}

/// A daemon in this process. It ends when it is dropped.
struct Daemon {
    client: Client,
    runtime: tokio::runtime::Runtime,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    place: tempfile::TempDir,
}

impl Daemon {
    fn start(capacity: &str) -> Daemon {
        let place = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let config = config(place.path(), capacity);
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                tokio::select! {
                    ended = crate::serve(config, "") => panic!("the daemon ended: {ended:?}"),
                    _ = stopped => {}
                }
            });
        });
        let client = Client::new(place.path().join("s"), "test", DEADLINE);
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let mut daemon = Daemon { client, runtime, stop: Some(stop), thread: Some(thread), place };
        daemon.wait_until("the pool and the tier serve", |reply| {
            reply.populated_bytes == reply.capacity_bytes && reply.tiers[0].state == "serving"
        });
        daemon
    }

    /// Calls fail until the daemon listens.
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&InspectReply) -> bool) {
        let start = Instant::now();
        loop {
            let reply = self.runtime.block_on(self.client.inspect());
            if reply.is_ok_and(|reply| is_so(&reply)) {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "not in time: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        let _ = forebay_io::pool::remove(&self.place.path().join("pool"));
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()), "the daemon panicked");
    }
}

fn config(place: &Path, capacity: &str) -> Config {
    let at = |name: &str| place.join(name).to_str().expect("a path in UTF-8").to_owned();
    let flags = [
        ("socket.directory", at("s")),
        ("pool.directory", at("pool")),
        ("pool.capacity_bytes", "16MiB".to_owned()),
        ("http.address", "off".to_owned()),
        ("tier.memory.capacity_bytes", capacity.to_owned()),
    ];
    let flags = flags.map(|(key, value)| (key.to_owned(), value)).to_vec();
    load(&Sources { flags, ..Sources::default() }).expect("a configuration").config
}

/// Stores blocks one by one, each when the one before is on the tier.
fn store(daemon: &mut Daemon) -> u32 {
    let Daemon { client, runtime, .. } = daemon;
    let group = GroupBytes { group: 0, bytes: BLOCK_BYTES as u64 };
    let namespace =
        runtime.block_on(client.open_namespace([("model".into(), "m".into())], [group])).expect("a namespace");
    for number in 0..BLOCKS {
        let block = Block { hash: vec![number; 32], data: vec![number; BLOCK_BYTES] };
        let outcome = daemon.runtime.block_on(daemon.client.put(namespace, 0, &[], vec![block])).expect("an answer");
        assert_eq!(outcome, [CommitOutcome::CommitStored]);
        daemon.wait_until("the block is written", |reply| reply.tiers[0].stored_blocks == u64::from(number) + 1);
    }
    namespace
}

fn get(daemon: &mut Daemon, namespace: u32, number: u8) -> Option<Vec<u8>> {
    let hashes = pack([&[number; 32][..]]).expect("a hash");
    daemon.runtime.block_on(daemon.client.get(namespace, 0, &hashes)).expect("an answer").remove(0)
}

#[test]
fn a_daemon_stores_to_it_and_loads_from_it() {
    let mut daemon = Daemon::start("64MiB");
    let namespace = store(&mut daemon);
    for number in 0..BLOCKS {
        assert_eq!(get(&mut daemon, namespace, number), Some(vec![number; BLOCK_BYTES]), "block {number}");
    }
    daemon.wait_until("blocks came from it", |reply| reply.tiers[0].promoted_blocks >= u64::from(BLOCKS) - 16);
}

#[test]
fn what_it_evicts_is_a_miss() {
    let mut daemon = Daemon::start("8MiB");
    let namespace = store(&mut daemon);
    daemon.wait_until("it holds what fits", |reply| reply.tiers[0].blocks == 8);
    let found = (0..BLOCKS).filter(|number| get(&mut daemon, namespace, *number).is_some()).count();
    assert!((1..=16 + 8).contains(&found), "pool and tier hold no more than they can, and {found} came back");
}

#[test]
fn it_refuses_what_it_can_never_hold() {
    let mut memory = memory(4096);
    let key = BlockKey { namespace: NamespaceId(1), group: 0, hash: BlockHash::new(&[1; 8]).unwrap() };
    let slot = Some((SlotId(0), Generation(1)));
    let op = Operation { id: OpId(1), kind: OpKind::Store, key, slot, length_bytes: 4097, checksum: 0, lineage: None };
    assert_eq!(memory.run(&op), Outcome::Failed(ErrorKind::Full));
}

#[test]
fn configuration_page_and_doctor_follow_from_its_entry() {
    assert!(page().contains("## tier.memory\n\nBlocks in a map, for tests.\n\n### `tier.memory.capacity_bytes`"));
    let config = config(Path::new("/nowhere"), "64MiB");
    let tiers: Vec<_> =
        config.configured_tiers().map(|tier| (tier.name(), tier.examine().remove(0).unwrap())).collect();
    assert_eq!(tiers, [("memory", "64MiB for blocks".to_owned())]);
    let zero = ("tier.memory.load_deadline_ms".to_owned(), "0".to_owned());
    let refused = load(&Sources { flags: vec![zero], ..Sources::default() }).unwrap_err();
    assert_eq!(refused.hint_text(), Some("it must be from 1 to 86400000"));
}
