//! What lookups leave to be done after their answers, up to the task that does it.

use forebay_core::key::BlockHash;
use forebay_core::layout::{Attention, GroupLayout, Layout};
use forebay_core::lookup::Answer;
use forebay_core::{Instance, NamespaceId};

use super::fuzz::{Daemon, home};
use crate::tasks::work_off;

const KEYS: u8 = 64;
const HASH_BYTES: usize = 32;

#[test]
fn many_lookups_are_worked_off_without_waiting_for_a_regular_time() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let hashes: Vec<u8> = (0..KEYS).flat_map(|key| [key; HASH_BYTES]).collect();
    let group =
        GroupLayout { attention: Attention::Full, tokens_per_block: 16, rank_bytes: vec![4096], is_replicated: false };
    let namespace = daemon.shared.event(|state| {
        let namespace = state.core.open_namespace(NamespaceId(1), &Layout::new(vec![(0, group)]).unwrap()).unwrap();
        let mut slots = Vec::new();
        state.core.reserve(Instance::DAEMON, namespace, 0, KEYS.into(), true, &mut slots);
        for (hash, slot) in hashes.chunks(HASH_BYTES).zip(slots) {
            state.core.commit(Instance::DAEMON, namespace, 0, BlockHash::new(hash).unwrap(), None, slot, Some(0));
        }
        namespace
    });
    let look_up = || {
        daemon.shared.event(|state| {
            let (mut answer, mut lookup) = (Answer::default(), state.core.begin_lookup(None, namespace));
            state.core.look(&mut lookup, 0, &hashes, HASH_BYTES, &mut answer);
            assert_eq!(answer.slots.len(), usize::from(KEYS));
            _ = state.core.finish_lookup(lookup);
        });
        daemon.shared.lock().core.has_backlog()
    };
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
        let lookups = (1..1000).find(|_| look_up()).expect("so many lookups leave something behind");
        pass_turns().await;
        assert!(!daemon.shared.lock().core.has_backlog(), "{lookups} lookups wait for the next regular time");
        task.abort();
    });
}
