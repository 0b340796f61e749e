//! What lookups leave to be done after their answers, up to the task that does it, or the call that needs it done.

use forebay_core::key::{BlockHash, NamespaceIndex};
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::Answer;
use forebay_core::{Instance, NamespaceId};
use forebay_rpc::proto::GetRequest;

use super::fuzz::{Daemon, home};
use crate::service::copying;
use crate::tasks::work_off;

const KEYS: u8 = 64;
const HASH_BYTES: usize = 32;

fn hashes() -> Vec<u8> {
    (0..KEYS).flat_map(|key| [key; HASH_BYTES]).collect()
}

/// Stores a block for each hash.
fn store(daemon: &Daemon) -> NamespaceIndex {
    let group =
        GroupLayout { attention: Attention::Full, tokens_per_block: 16, rank_bytes: vec![4096], is_replicated: false };
    daemon.shared.event(|state| {
        let namespace = state.core.open_namespace(NamespaceId(1), &Layout::new(vec![(0, group)]).unwrap()).unwrap();
        let mut slots = Vec::new();
        state.core.reserve(Instance::DAEMON, namespace, 0, KEYS.into(), true, &mut slots);
        for (hash, slot) in hashes().chunks(HASH_BYTES).zip(slots) {
            state.core.commit(Instance::DAEMON, namespace, 0, BlockHash::new(hash).unwrap(), None, slot, Some(0));
        }
        namespace
    })
}

/// Looks all of them up until much waits to be done. How often that was.
fn look_up(daemon: &Daemon, namespace: NamespaceIndex) -> usize {
    let hashes = hashes();
    let is_enough = || {
        daemon.shared.event(|state| {
            let (mut answer, mut lookup) = (Answer::default(), state.core.begin_lookup(None, namespace));
            state.core.look(&mut lookup, 0, &hashes, HASH_BYTES, &mut answer);
            assert_eq!(answer.slots.len(), usize::from(KEYS));
            _ = state.core.finish_lookup(lookup);
        });
        daemon.shared.lock().core.has_backlog()
    };
    (1..1000).find(|_| is_enough()).expect("so many lookups leave something behind")
}

#[test]
fn many_lookups_are_worked_off_without_waiting_for_a_regular_time() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let namespace = store(&daemon);
    let shared = daemon.shared.clone();
    daemon.runtime.block_on(async {
        let task = tokio::spawn(work_off::run(shared));
        // No time passes: its clock stands still as long as somebody has something to do.
        let pass_turns = || async {
            for _ in 0..32 {
                tokio::task::yield_now().await
            }
        };
        pass_turns().await;
        let lookups = look_up(&daemon, namespace);
        pass_turns().await;
        assert!(!daemon.shared.lock().core.has_backlog(), "{lookups} lookups wait for the next regular time");
        task.abort();
    });
}

/// What it brings up may evict, and those go first whose uses are noted last.
#[test]
fn a_get_begins_when_uses_are_noted() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    look_up(&daemon, store(&daemon));
    let place = daemon.clients.enter(0);
    let refused = daemon.runtime.block_on(copying::get(&daemon.shared, &place, GetRequest::default()));
    assert!(refused.is_err(), "it names no session");
    assert!(!daemon.shared.lock().core.has_backlog());
}
