//! The plain client against a daemon that fails on purpose (see `fake`).

mod fake;

use std::path::Path;
use std::time::Duration;

use fake::{Fake, PATIENCE};
use forebay_core::ErrorKind;
use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::proto::{Block, CommitOutcome};
use forebay_rpc::{MAX_BLOCKS, pack};

const MIB: u64 = 1 << 20;

fn client(fake: &Fake) -> Client {
    Client::new(fake.directory(), "client-a", PATIENCE)
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

async fn open(client: &mut Client, bytes: u64) -> u32 {
    client.open_namespace([("model".into(), "a".into())], [GroupBytes { group: 3, bytes }]).await.unwrap()
}

fn blocks(count: u8, bytes: u64) -> Vec<Block> {
    (0..count).map(|key| Block { hash: vec![key; 32], data: vec![key; bytes as usize] }).collect()
}

#[test]
fn blocks_come_back_as_they_were_put_in_the_order_asked() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 100).await;
        assert_eq!(client.put(namespace, 3, b"", blocks(2, 100)).await.unwrap(), [CommitOutcome::CommitStored; 2]);
        let hashes = pack([[1; 32].as_slice(), &[9; 32], &[0; 32]]).unwrap();
        let found = client.get(namespace, 3, &hashes).await.unwrap();
        assert_eq!(found, [Some(vec![1; 100]), None, Some(vec![0; 100])]);
        assert_eq!(client.lookup(namespace, 3, &hashes).await.unwrap(), [true; 3], "the fake has every key");
        assert_eq!(fake.memory().released, [101], "a lookup leaves no lease");
    });
}

#[test]
fn what_is_too_much_for_one_message_travels_in_several() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 3 * MIB).await;
        let outcomes = client.put(namespace, 3, &[77; 32], blocks(5, 3 * MIB)).await.unwrap();
        assert_eq!(outcomes.len(), 5);
        let hashes: Vec<[u8; 32]> = (0..5).map(|key| [key; 32]).collect();
        let found = client.get(namespace, 3, &pack(hashes.iter().map(|hash| hash.as_slice())).unwrap()).await.unwrap();
        assert!(found.iter().enumerate().all(|(key, block)| block.as_ref().unwrap()[0] == key as u8));
        let memory = fake.memory();
        assert_eq!(memory.puts.iter().map(|put| put.blocks.len()).collect::<Vec<_>>(), [2, 2, 1]);
        let predecessors: Vec<u8> = memory.puts.iter().map(|put| put.predecessor[0]).collect();
        assert_eq!(predecessors, [77, 1, 3], "each part names the block before it");
        assert_eq!(memory.gets.len(), 3);
    });
}

#[test]
fn a_call_has_no_more_blocks_than_the_daemon_takes() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 1).await;
        let hashes: Vec<[u8; 4]> = (0..MAX_BLOCKS as u32 + 1).map(u32::to_be_bytes).collect();
        let blocks = hashes.iter().map(|hash| Block { hash: hash.to_vec(), data: vec![hash[3]] }).collect();
        assert_eq!(client.put(namespace, 3, b"", blocks).await.unwrap().len(), MAX_BLOCKS + 1);
        let found = client.get(namespace, 3, &pack(hashes.iter().map(|hash| hash.as_slice())).unwrap()).await.unwrap();
        assert!(found.into_iter().zip(&hashes).all(|(block, hash)| block == Some(vec![hash[3]])));
        let memory = fake.memory();
        assert_eq!(memory.puts.iter().map(|put| put.blocks.len()).collect::<Vec<_>>(), [MAX_BLOCKS, 1]);
        let gets: Vec<(usize, u8)> = memory.gets.iter().map(|get| (get.hashes.len() / 4, get.hashes[3])).collect();
        assert_eq!(gets, [(1, MAX_BLOCKS as u8), (MAX_BLOCKS, 0)], "the last part first");
    });
}

#[test]
fn an_older_daemon_is_lent_no_memory_and_gets_the_blocks_in_messages() {
    let fake = Fake::started();
    run(async {
        let lend = Box::new(|_: &Path, _, _| panic!("the welcome of an older daemon has no token"));
        let mut client = client(&fake).lending(16 * MIB, lend);
        let namespace = open(&mut client, MIB).await;
        assert_eq!(client.put(namespace, 3, b"", blocks(8, MIB)).await.unwrap(), [CommitOutcome::CommitStored; 8]);
        let hashes = pack([[1; 32].as_slice()]).unwrap();
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap(), [Some(vec![1; MIB as usize])]);
        assert!(fake.memory().puts.iter().all(|put| put.lent.is_none() && put.blocks[0].data.len() == MIB as usize));
        assert!(client.take_note().expect("a reason").contains("older"));
        assert_eq!(client.take_note(), None, "it is said once");
    });
}

#[test]
fn it_outlives_a_restart_of_the_daemon() {
    let mut fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 10).await;
        client.put(namespace, 3, b"", blocks(1, 10)).await.unwrap();
        fake.kill();
        let hashes = pack([[0; 32].as_slice()]).unwrap();
        let error = client.get(namespace, 3, &hashes).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.hint_text().is_some());
        fake.start();
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap(), [Some(vec![0; 10])]);
        fake.kill();
        fake.start();
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap().len(), 1, "a dead connection is found out");
        assert_eq!(client.inspect().await.unwrap().pool_id, [1; 16]);
    });
}

#[test]
fn a_daemon_that_does_not_answer_is_a_timeout_and_the_next_call_starts_afresh() {
    let fake = Fake::started();
    run(async {
        let mut client = Client::new(fake.directory(), "client-a", Duration::from_millis(200));
        fake.hold(&["inspect"]);
        assert_eq!(client.inspect().await.unwrap_err().kind(), ErrorKind::Timeout);
        fake.resume();
        assert!(client.inspect().await.is_ok());
    });
}

#[test]
fn mistakes_are_told_apart_from_faults() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 10).await;
        assert_eq!(open(&mut client, 10).await, namespace, "the same descriptor is the same namespace");
        let hashes = pack([[0; 32].as_slice()]).unwrap();
        assert_eq!(client.get(namespace, 4, &hashes).await.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(client.get(namespace + 1, 3, &hashes).await.unwrap_err().kind(), ErrorKind::Invalid);
        let mut two = blocks(2, 10);
        two[1].hash.pop();
        assert_eq!(client.put(namespace, 3, b"", two).await.unwrap_err().kind(), ErrorKind::Invalid);
        assert!(fake.memory().puts.is_empty(), "its blocks have hashes of two lengths");
        let huge = client.open_namespace([("model".into(), "b".into())], [GroupBytes { group: 0, bytes: 16 * MIB }]);
        assert_eq!(huge.await.unwrap_err().kind(), ErrorKind::Unsupported);
        fake.memory().refuse_namespace = Some(ErrorKind::Invalid);
        let refused = client.open_namespace([("model".into(), "c".into())], [GroupBytes { group: 0, bytes: 16 }]);
        assert_eq!(refused.await.unwrap_err().to_string(), "the test says no");
    });
}

#[test]
fn a_namespace_that_the_session_has_forgotten_is_opened_again_once_for_each_call() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        fake.memory().kept_namespaces = Some(2);
        let mut names = Vec::new();
        for model in ["a", "b", "c"] {
            let group = [GroupBytes { group: 3, bytes: 3 * MIB }];
            names.push(client.open_namespace([("model".into(), model.into())], group).await.unwrap());
        }
        // Each is the one that was forgotten last. The second part of a call finds what the first has opened.
        let hashes = pack([[0; 32].as_slice(), &[1; 32], &[2; 32]]).unwrap();
        for namespace in &names {
            client.put(*namespace, 3, b"", blocks(3, 3 * MIB)).await.unwrap();
        }
        for namespace in &names {
            assert_eq!(client.get(*namespace, 3, &hashes).await.unwrap().iter().flatten().count(), 3);
        }
        for namespace in &names {
            assert_eq!(client.lookup(*namespace, 3, &hashes).await.unwrap(), [true; 3]);
        }
        let memory = fake.memory();
        let opened: Vec<String> = memory.namespaces.iter().map(|request| request.fields["model"].clone()).collect();
        assert_eq!(opened.concat(), "abc".repeat(4));
        assert_eq!(memory.opened.len(), 1, "in one session");
        // Call by call under the name that was given last.
        assert_eq!(memory.puts.iter().map(|put| put.namespace).collect::<Vec<_>>(), [4, 4, 5, 5, 6, 6]);
        assert_eq!(memory.gets.iter().map(|get| get.namespace).collect::<Vec<_>>(), [7, 7, 8, 8, 9, 9]);
    });
}

#[test]
fn a_daemon_that_forgets_every_namespace_at_once_is_asked_twice_and_no_more() {
    let fake = Fake::started();
    run(async {
        let mut client = client(&fake);
        let namespace = open(&mut client, 10).await;
        fake.memory().kept_namespaces = Some(0);
        let hashes = pack([[0; 32].as_slice()]).unwrap();
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(fake.memory().namespaces.len(), 2);
        // The namespace may be refused meanwhile; then that is what the caller is told.
        fake.memory().refuse_namespace = Some(ErrorKind::Full);
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap_err().kind(), ErrorKind::Full);
        (fake.memory().kept_namespaces, fake.memory().refuse_namespace) = (None, None);
        assert_eq!(client.get(namespace, 3, &hashes).await.unwrap(), [None]);
    });
}
