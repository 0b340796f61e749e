//! What workers say of their NUMA nodes, up to what the thread that populates the pool reads.

use forebay_rpc::PROTOCOL_VERSION;
use forebay_rpc::proto::{AttachRequest, RankGroup};
use tokio::sync::mpsc;

use super::fuzz::{Daemon, USER, home};
use crate::tasks::attach::{self, Attached};

fn worker(daemon: &Daemon, engine_id: &str, rank: u32, numa_node: Option<u32>) -> Attached {
    let request = AttachRequest {
        protocol: PROTOCOL_VERSION,
        engine_id: engine_id.to_owned(),
        rank,
        ranks: 2,
        groups: vec![RankGroup { group: 0, bytes: 2500, is_replicated: false }],
        incarnation: vec![1; 16],
        numa_node,
        ..AttachRequest::default()
    };
    let welcomed = daemon.shared.event(|state| attach::welcome(state, USER, &request, mpsc::channel(1).0)).unwrap();
    let (instance, connection) = (welcomed.instance, welcomed.connection);
    Attached { shared: daemon.shared.clone(), instance, rank, connection }
}

#[test]
fn a_worker_counts_for_its_node_while_it_is_attached() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let counts = || daemon.shared.lock().wishes.get()[..3].to_vec();
    let _silent = worker(&daemon, "one", 0, None);
    assert_eq!(counts(), [0, 0, 0]);
    let first = worker(&daemon, "one", 1, Some(1));
    let _second = worker(&daemon, "other", 0, Some(1));
    let _far = worker(&daemon, "other", 1, Some(2));
    assert_eq!(counts(), [0, 2, 1]);
    // It comes again from elsewhere, before its old connection has ended.
    let again = worker(&daemon, "one", 1, Some(0));
    assert_eq!(counts(), [1, 1, 1]);
    drop(first);
    assert_eq!(counts(), [1, 1, 1], "the later connection counts");
    drop(again);
    assert_eq!(counts(), [0, 1, 1]);
}
