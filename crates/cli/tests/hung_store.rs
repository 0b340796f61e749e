//! Calls that wait for a shared store that hangs, and the other calls of their user.

#[path = "../../io/tests/redis/servers.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod servers;
mod support;

use std::time::Duration;

use forebay_rpc::proto::*;
use rustix::process::Signal;
use servers::{Kind, Server};
use support::tiers::*;
use support::*;
use tokio::task::JoinSet;
use tonic::Status;

/// Much longer than a hit takes.
const LOAD_DEADLINE_MS: &str = "60000";

fn request(client: &Client, namespace: u32, seed: u64) -> GetRequest {
    let (session, hashes) = (client.welcome.session, hash(seed).to_vec());
    GetRequest { session, namespace, group: 0, hash_bytes: 32, hashes, lent: None }
}

/// `count` calls for blocks of which only the hung store knows whether it has them; then one for a hit and one that
/// stores, on a connection of their own. Returns the ends of `refused` calls, which do not wait.
fn hit_beside(count: u64, refused: usize) -> Vec<Status> {
    let (server, place) = (Server::start(Kind::Valkey), Place::new());
    let url = server.url();
    let patient = ["--tier.redis.load_deadline_ms", LOAD_DEADLINE_MS, "--tier.redis.operation_timeout_ms"];
    let arguments = [&["--tier.redis.urls", &url], &patient[..], &[LOAD_DEADLINE_MS]].concat();
    let (_daemon, client, worker) = serving(&place, &arguments);
    let namespace = client.namespace("t", vec![group()]).expect("a namespace");
    store(&client, &worker, namespace, 0..1);
    server.signal(Signal::STOP);
    let (other, _other_worker) = engine(&place, "b", BYTES);
    let hit = request(&other, other.namespace("t", vec![group()]).expect("a namespace"), 0);
    let ended = client.runtime.block_on(async {
        let mut waiting = JoinSet::new();
        for seed in 1_000..1_000 + count {
            let (mut rpc, request) = (client.rpc.clone(), request(&client, namespace, seed));
            waiting.spawn(async move { rpc.get(request).await });
        }
        let (mut ended, mut rpc) = (Vec::new(), client.rpc.clone());
        let all_there = async {
            loop {
                while let Some(answer) = waiting.try_join_next() {
                    ended.push(answer.expect("no panic").expect_err("the store hangs"));
                }
                let calls = rpc.inspect(InspectRequest {}).await.expect("an answer").into_inner().users[0].calls;
                // This call is one of them.
                if ended.len() == refused && calls as usize > count as usize - refused {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(DEADLINE, all_there).await.expect("the calls wait");
        ended
    });
    let found = call!(other, get, hit).expect("an answer while the others wait");
    assert_eq!(found.blocks.len(), 1);
    let (session, namespace) = (other.welcome.session, other.namespace("t", vec![group()]).expect("a namespace"));
    let block = Block { hash: hash(7).to_vec(), data: pattern(7, BYTES) };
    let request = PutRequest { session, namespace, group: 0, blocks: vec![block], ..PutRequest::default() };
    call!(other, put, request).expect("a put beside calls that wait");
    server.signal(Signal::CONT);
    ended
}

#[test]
fn calls_that_wait_for_a_store_delay_no_hit_of_their_user() {
    assert!(hit_beside(4, 0).is_empty());
}

#[test]
fn calls_that_wait_for_a_store_are_limited_with_a_hint() {
    for error in hit_beside(76, 12).into_iter().map(forebay_rpc::from_status) {
        assert!(error.to_string().contains("`Get` calls are waiting for a tier (user="), "{error}");
        assert!(error.hint_text().expect("a hint").contains("or raise `limits.waiting_gets_per_user`"), "{error}");
    }
}
