//! Workers whose memory a GPU may write for a while after they are gone.

use std::process::{Child, Command};
use std::time::Instant;

use forebay_core::Instance;
use forebay_io::pool::Process;
use forebay_rpc::PROTOCOL_VERSION;
use forebay_rpc::proto::{AttachRequest, RankGroup};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::mpsc;

use super::fuzz::{Daemon, USER, home};
use crate::tasks::attach::{self, Attached};

/// A process that goes on after its mapping and its connection have ended.
struct Worker {
    child: Child,
    attached: Option<Attached>,
    instance: Instance,
}

impl Worker {
    fn start(daemon: &Daemon) -> Worker {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let request = AttachRequest {
            protocol: PROTOCOL_VERSION,
            engine_id: "gpu".to_owned(),
            ranks: 1,
            groups: vec![RankGroup { group: 0, bytes: 2500, is_replicated: false }],
            incarnation: vec![1; 16],
            ..AttachRequest::default()
        };
        let welcomed = daemon.shared.event(|state| attach::welcome(state, USER, &request, mpsc::channel(1).0)).unwrap();
        let (instance, connection) = (welcomed.instance, welcomed.connection);
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let process = Some(Process::from(pidfd));
        let attached = Attached { shared: daemon.shared.clone(), instance, rank: 0, connection, process };
        Worker { child, attached: Some(attached), instance }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn is_there(daemon: &Daemon, instance: Instance) -> bool {
    daemon.shared.event(|state| {
        state.settle_instance(instance);
        state.instances.get(instance).is_some()
    })
}

#[test]
fn the_slots_of_a_worker_with_a_gpu_are_kept_until_its_process_has_ended() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let mut worker = Worker::start(&daemon);
    attach::note_registered(worker.attached.as_ref().unwrap(), 0).unwrap();
    drop(worker.attached.take());
    assert!(is_there(&daemon, worker.instance), "its lock is gone, and the GPU may still write");
    worker.kill();
    assert!(!is_there(&daemon, worker.instance));
}

#[test]
fn a_worker_with_a_gpu_that_gives_up_its_connection_and_lives_is_waited_for_until_a_deadline() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let mut worker = Worker::start(&daemon);
    attach::note_registered(worker.attached.as_ref().unwrap(), 4096).unwrap();
    drop(worker.attached.take());
    assert!(is_there(&daemon, worker.instance));
    daemon.shared.event(|state| {
        let member = state.instances.get(worker.instance).unwrap();
        let (_, until) = member.leaving.get_mut(&0).unwrap();
        assert!(*until <= Instant::now() + attach::LEAVING);
        *until = Instant::now();
    });
    assert!(!is_there(&daemon, worker.instance));
}

#[test]
fn a_worker_without_a_gpu_is_gone_with_its_lock() {
    let directory = home();
    let daemon = Daemon::start(&directory.path().join("pool")).unwrap();
    let mut worker = Worker::start(&daemon);
    drop(worker.attached.take());
    assert!(!is_there(&daemon, worker.instance));
}
