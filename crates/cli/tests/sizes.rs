//! Two block sizes that take memory from each other in the shipped daemon: what is in use moves, whole, and outlives a
//! kill.

mod support;

use forebay_rpc::client::{Client, GroupBytes};
use forebay_rpc::pack;
use forebay_rpc::proto::Block;
use support::{DEADLINE, Daemon, Place, runtime};

const SMALL: u64 = 16 << 10;
const LARGE: u64 = 160 << 10;
const ARGUMENTS: [&str; 8] = [
    "--pool.capacity_bytes",
    "16MiB",
    "--pool.unit_bytes",
    "2MiB",
    "--pool.promise_share",
    "0.5",
    "--http.address",
    "127.0.0.1:0",
];

fn block(number: u64, bytes: u64) -> Block {
    Block { hash: number.to_le_bytes().to_vec(), data: vec![number as u8; bytes as usize] }
}

async fn namespace(client: &mut Client, tenant: &str, bytes: u64) -> u32 {
    let fields = [("model".to_string(), "sizes".to_string()), ("tenant".to_string(), tenant.to_string())];
    client.open_namespace(fields, [GroupBytes { group: 0, bytes }]).await.expect("a namespace")
}

/// How many blocks of the prompt are there; each has its bytes.
async fn whole(client: &mut Client, namespace: u32, prompt: &[u64]) -> usize {
    let names: Vec<[u8; 8]> = prompt.iter().map(|number| number.to_le_bytes()).collect();
    let hashes = pack(names.iter().map(|name| name.as_slice())).expect("hashes of one length");
    let found = client.get(namespace, 0, &hashes).await.expect("an answer");
    for (number, data) in prompt.iter().zip(&found) {
        let is_right = data.as_ref().is_none_or(|data| *data == vec![*number as u8; SMALL as usize]);
        assert!(is_right, "block {number} has other bytes");
    }
    found.iter().flatten().count()
}

fn moved(daemon: &Daemon) -> u64 {
    let page = daemon.page("/metrics");
    let line = page.lines().find(|line| line.starts_with("forebay_blocks_moved_total ")).expect("it is counted");
    line.split(' ').nth(1).expect("a number").parse().expect("a number")
}

#[test]
fn a_prompt_in_use_moves_out_of_the_way_of_another_size_and_outlives_a_kill() {
    let place = Place::new();
    let daemon = Daemon::start(&place, &ARGUMENTS);
    let prompt: Vec<u64> = (0..100).collect();
    runtime().block_on(async {
        let mut client = Client::new(place.sockets(), "sizes", DEADLINE);
        let small = namespace(&mut client, "small", SMALL).await;
        let large = namespace(&mut client, "large", LARGE).await;
        // The prompt lies among blocks that come once.
        for number in &prompt {
            let before = number.checked_sub(1).map_or(Vec::new(), |before| before.to_le_bytes().to_vec());
            client.put(small, 0, &before, vec![block(*number, SMALL)]).await.expect("a store");
            for other in 0..8 {
                let others = vec![block(1000 + 8 * number + other, SMALL)];
                client.put(small, 0, &[], others).await.expect("a store");
            }
        }
        // Once, before anything is evicted: until then these blocks are as cold as the others.
        assert_eq!(whole(&mut client, small, &prompt).await, prompt.len(), "before large blocks");
        for number in 0..300 {
            client.put(large, 0, &[], vec![block(10_000 + number, LARGE)]).await.expect("a store");
            assert_eq!(whole(&mut client, small, &prompt).await, prompt.len(), "after {number} large blocks");
        }
    });
    assert!(moved(&daemon) > 0, "nothing moved");
    daemon.kill();

    let _daemon = Daemon::start(&place, &ARGUMENTS);
    runtime().block_on(async {
        let mut client = Client::new(place.sockets(), "sizes", DEADLINE);
        let small = namespace(&mut client, "small", SMALL).await;
        assert_eq!(whole(&mut client, small, &prompt).await, prompt.len(), "after the kill");
    });
    let audit = runtime().block_on(Client::new(place.sockets(), "auditor", DEADLINE).audit()).expect("an audit");
    assert_eq!((audit.corrupt, audit.misnamed, audit.complaint.as_str()), (0, 0, ""));
}
