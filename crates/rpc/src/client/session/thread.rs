//! The background thread: it connects, serves, and tries again for as long as the session lives.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use tokio::sync::mpsc::Receiver;

use super::calls::{self, Open};
use super::shared::Shared;
use super::ticket::Lookup;
use crate::PROTOCOL_VERSION;
use crate::client::{Backoff, connect};
use crate::from_status;
use crate::proto::{OpenSessionRequest, SessionEvent, session_event::Event};

/// If a daemon drops sessions sooner than this, reconnects are delayed.
const STEADY: Duration = Duration::from_secs(2);

/// Starts the thread; the channel it returns ends when the thread does.
pub(super) fn start(shared: Arc<Shared>, lookups: Receiver<Lookup>) -> Result<mpsc::Receiver<()>> {
    let cannot = |error: std::io::Error| Error::new(ErrorKind::Io, "cannot start the session's thread").source(error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
    let (ending, ended) = mpsc::sync_channel::<()>(0);
    let body = move || {
        let _closed = Closed { shared: shared.clone(), _ending: ending };
        runtime.block_on(run(&shared, lookups));
    };
    std::thread::Builder::new().name("forebay-session".to_string()).spawn(body).map_err(cannot)?;
    Ok(ended)
}

/// Marks the session closed when the thread ends in any way, a panic included.
struct Closed {
    shared: Arc<Shared>,
    _ending: mpsc::SyncSender<()>,
}

impl Drop for Closed {
    fn drop(&mut self) {
        let mut holdings = self.shared.holdings();
        holdings.disconnected();
        holdings.link.closed();
    }
}

async fn run(shared: &Arc<Shared>, mut lookups: Receiver<Lookup>) {
    let mut backoff = Backoff::new();
    loop {
        let begun = Instant::now();
        let outcome = tokio::select! {
            outcome = connect_and_serve(shared, &mut lookups) => outcome,
            () = closed_unconnected(shared) => Ok(()),
        };
        let Err(error) = outcome else { return };
        note(shared, &error);
        while lookups.try_recv().is_ok() {}
        if begun.elapsed() > STEADY {
            backoff.reset();
        }
        if tokio::time::timeout(backoff.pause(), shared.closing()).await.is_ok() {
            return;
        }
    }
}

/// `Ok` if the engine closed the session.
async fn connect_and_serve(shared: &Arc<Shared>, lookups: &mut Receiver<Lookup>) -> Result<()> {
    let deadline = shared.config.deadline;
    let late = || Error::new(ErrorKind::Timeout, "the daemon did not open a session in time");
    let open = tokio::time::timeout(deadline, open(shared)).await.unwrap_or_else(|_| Err(late()));
    let open = open.inspect_err(|error| {
        if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) {
            shared.holdings().session_refused(error);
        }
    })?;
    tracing::debug!(session = open.session, "session opened");
    calls::serve(shared, open, lookups).await
}

async fn open(shared: &Shared) -> Result<Open> {
    let config = &shared.config;
    let mut rpc = connect(&config.socket_directory, config.deadline).await?;
    let declaration = shared.holdings().declare();
    let request = OpenSessionRequest {
        protocol: PROTOCOL_VERSION,
        engine_id: config.engine_id.clone(),
        ranks: config.ranks,
        leases: declaration.leases,
        reservations: declaration.reservations,
        incarnation: config.incarnation.to_vec(),
        owner: shared.owner.to_vec(),
        is_trial: false,
    };
    let mut events = rpc.open_session(request).await.map_err(from_status)?.into_inner();
    match events.message().await.map_err(from_status)? {
        Some(SessionEvent { event: Some(Event::Welcome(welcome)) }) => {
            let session = welcome.session;
            shared.holdings().welcomed(welcome);
            Ok(Open { rpc, session, events })
        }
        _ => Err(Error::new(ErrorKind::Unavailable, "the session did not begin with a welcome")),
    }
}

fn note(shared: &Shared, error: &Error) {
    tracing::debug!(%error, "no session");
    let mut holdings = shared.holdings();
    holdings.disconnected();
    holdings.link.troubled(error);
}

/// The engine closes while there is no session to drain.
async fn closed_unconnected(shared: &Shared) {
    shared.closing().await;
    if shared.holdings().link.is_connected() {
        std::future::pending::<()>().await;
    }
}
