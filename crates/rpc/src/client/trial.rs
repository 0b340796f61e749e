//! A session for a measurement or a self-test: its blocks stay in the pool, count nowhere, and go with the session.

use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use tonic::Streaming;

use super::connect::Rpc;
use super::plain::lone_session;
use crate::from_status;
use crate::proto::session_event::Event;
use crate::proto::{Group, InspectRequest, OpenNamespaceReply, OpenNamespaceRequest, OpenSessionRequest, SessionEvent};

/// How long the daemon may take to remove what a trial stored: it drops a million blocks in less than a second.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// A trial with one namespace of one group. Its session ends when it is dropped; [`Trial::end`] waits for that.
pub struct Trial {
    /// The connection, for the session's calls.
    pub rpc: Rpc,
    /// For the `session` of a call.
    pub session: u64,
    /// For the `namespace` of a call.
    pub namespace: u32,
    namespace_id: Vec<u8>,
    events: Streaming<SessionEvent>,
}

impl Trial {
    /// Three round trips. `purpose` stands in the daemon's lists while the trial lasts.
    pub async fn open(mut rpc: Rpc, purpose: &str, group: Group) -> Result<Trial> {
        let engine_id = format!("forebay-trial-{}", std::process::id());
        let request = OpenSessionRequest { is_trial: true, ..lone_session(engine_id) };
        let mut events = rpc.open_session(request).await.map_err(from_status)?.into_inner();
        let Some(Event::Welcome(welcome)) = events.message().await.map_err(from_status)?.and_then(|event| event.event)
        else {
            return Err(Error::new(ErrorKind::Io, "the session did not begin with a welcome"));
        };
        let session = welcome.session;
        let fields = [("purpose".to_owned(), purpose.to_owned())].into();
        let request = OpenNamespaceRequest { session, fields, groups: vec![group] };
        let reply = rpc.open_namespace(request).await.map_err(from_status)?.into_inner();
        let OpenNamespaceReply { namespace, namespace_id } = reply;
        Ok(Trial { rpc, session, namespace, namespace_id, events })
    }

    /// Ends the session, and waits until the daemon has removed all of its blocks. Errors with `Timeout` if that takes
    /// longer than 10 s.
    pub async fn end(self) -> Result<()> {
        let Trial { mut rpc, session, namespace_id, events, .. } = self;
        drop(events);
        let start = Instant::now();
        while start.elapsed() < REMOVAL_DEADLINE {
            let held = rpc.inspect(InspectRequest {}).await.map_err(from_status)?.into_inner();
            let is_open = held.sessions.iter().any(|other| other.session == session);
            let is_listed = held.namespaces.iter().any(|namespace| namespace.namespace_id == namespace_id);
            if !is_open && !is_listed {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(Error::new(ErrorKind::Timeout, "the daemon has not removed the blocks of the trial")
            .with("seconds", REMOVAL_DEADLINE.as_secs())
            .hint("`forebay inspect` lists its namespace; report this with the daemon's log"))
    }
}
