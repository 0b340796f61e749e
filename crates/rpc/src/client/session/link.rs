//! The state of the connection: from no daemon to a session that is ready.
//!
//! Invariants: the state is derived from the facts below, never stored. A namespace's name in the session is valid
//! only for its epoch. `set_namespace` begins a new epoch, and after the daemon lost a rank the name is requested
//! again.

use std::sync::Arc;

use forebay_core::Error;

use super::config::Namespace;

/// The result of `EngineSession::state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// There is no daemon, or it does not answer, or it is shutting down.
    Connecting,
    /// The daemon waits for ranks.
    Attaching,
    /// The namespace is missing or in progress.
    Naming,
    /// Lookups are sent to the daemon, and the stock is filled.
    Ready,
    /// The daemon refused for good. The refused request is repeated from time to time, in case another daemon takes
    /// its place.
    Refused,
    /// The engine closed the session, or its thread has ended. Final.
    Closed,
}

impl SessionState {
    /// The name in small letters, for logs and the Python side.
    pub fn as_str(self) -> &'static str {
        match self {
            SessionState::Connecting => "connecting",
            SessionState::Attaching => "attaching",
            SessionState::Naming => "naming",
            SessionState::Ready => "ready",
            SessionState::Refused => "refused",
            SessionState::Closed => "closed",
        }
    }
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Link {
    is_closed: bool,
    is_connected: bool,
    is_draining: bool,
    is_attached: bool,
    is_breaker_open: bool,
    /// The connection must be given up.
    is_broken: bool,
    failures: u32,
    pool: Vec<u8>,
    epoch: u64,
    wanted: Option<Arc<Namespace>>,
    /// Epoch and the daemon's name.
    named: Option<(u64, u32)>,
    refusal: Option<Refusal>,
    /// The last error.
    trouble: Option<String>,
}

struct Refusal {
    why: String,
    /// Epoch of the refused namespace; `None` if the session was refused.
    epoch: Option<u64>,
}

impl Link {
    pub fn state(&self) -> SessionState {
        if self.is_closed {
            SessionState::Closed
        } else if self.refusal.is_some() {
            SessionState::Refused
        } else if !self.is_connected || self.is_draining || self.is_breaker_open {
            SessionState::Connecting
        } else if !self.is_attached {
            SessionState::Attaching
        } else if self.handle(self.epoch).is_none() {
            SessionState::Naming
        } else {
            SessionState::Ready
        }
    }

    pub fn reason(&self) -> Option<String> {
        let trouble = |otherwise: &str| Some(self.trouble.clone().unwrap_or_else(|| otherwise.to_string()));
        match self.state() {
            SessionState::Ready => None,
            SessionState::Closed => Some("the session is closed".to_string()),
            SessionState::Refused => self.refusal.as_ref().map(|refusal| refusal.why.clone()),
            SessionState::Connecting if self.is_draining => Some("the daemon is shutting down".to_string()),
            SessionState::Connecting => trouble("not connected yet"),
            SessionState::Attaching => Some("not all ranks are attached to the pool".to_string()),
            SessionState::Naming => trouble("the namespace is not declared yet"),
        }
    }

    pub fn pool(&self) -> &[u8] {
        &self.pool
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn wanted(&self) -> Option<&Arc<Namespace>> {
        self.wanted.as_ref()
    }

    pub fn is_breaker_open(&self) -> bool {
        self.is_breaker_open
    }

    pub fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// The daemon's name of the namespace of `epoch`, if that epoch is current and the namespace was declared.
    pub fn handle(&self, epoch: u64) -> Option<u32> {
        let (named, handle) = self.named?;
        (named == epoch && epoch == self.epoch).then_some(handle)
    }

    /// The namespace to declare now.
    pub fn to_name(&self) -> Option<(u64, Arc<Namespace>)> {
        let is_refused = self.refusal.as_ref().is_some_and(|refusal| refusal.epoch == Some(self.epoch));
        let is_due = self.is_connected && self.is_attached && !is_refused && self.handle(self.epoch).is_none();
        if is_due { self.wanted.clone().map(|wanted| (self.epoch, wanted)) } else { None }
    }

    /// Begins a new epoch.
    pub fn want(&mut self, namespace: Namespace) {
        self.epoch += 1;
        self.wanted = Some(Arc::new(namespace));
        if self.refusal.as_ref().is_some_and(|refusal| refusal.epoch.is_some()) {
            self.refusal = None;
        }
    }

    pub fn welcomed(&mut self, pool: Vec<u8>) {
        self.is_connected = true;
        self.is_breaker_open = false;
        self.failures = 0;
        self.pool = pool;
        self.refusal = None;
        self.trouble = None;
    }

    pub fn attached(&mut self) {
        self.is_attached = true;
        self.named = None;
    }

    pub fn detached(&mut self) {
        self.is_attached = false;
    }

    pub fn draining(&mut self) {
        self.is_draining = true;
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    pub fn named(&mut self, epoch: u64, handle: u32) {
        self.named = Some((epoch, handle));
        self.trouble = None;
    }

    /// The daemon refuses the namespace of `epoch`, or, if `None`, the session.
    pub fn refused(&mut self, epoch: Option<u64>, error: &Error) {
        self.refusal = Some(Refusal { why: error.told(), epoch });
    }

    pub fn troubled(&mut self, error: &Error) {
        self.trouble = Some(error.told());
    }

    pub fn disconnected(&mut self) {
        let refusal = self.refusal.take().filter(|refusal| refusal.epoch.is_none());
        *self = Link {
            is_closed: self.is_closed,
            is_breaker_open: self.is_breaker_open,
            pool: std::mem::take(&mut self.pool),
            epoch: self.epoch,
            wanted: self.wanted.take(),
            trouble: self.trouble.take(),
            refusal,
            ..Link::default()
        };
    }

    pub fn closed(&mut self) {
        self.is_closed = true;
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Counts a failure; true if it opened the breaker, which gives the connection up.
    pub fn failed(&mut self, limit: u32) -> bool {
        self.failures += 1;
        let opens = self.failures >= limit && !self.is_breaker_open;
        self.is_breaker_open |= opens;
        self.is_broken |= opens;
        opens
    }

    pub fn broken(&mut self) {
        self.is_broken = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace() -> Namespace {
        Namespace { fields: Default::default(), groups: Vec::new() }
    }

    fn ready() -> Link {
        let mut link = Link::default();
        link.want(namespace());
        link.welcomed(vec![1; 16]);
        link.attached();
        link.named(1, 9);
        link
    }

    #[test]
    fn a_session_becomes_ready_step_by_step() {
        let mut link = Link::default();
        assert_eq!(link.state(), SessionState::Connecting);
        link.welcomed(vec![1; 16]);
        assert_eq!(link.state(), SessionState::Attaching);
        link.attached();
        assert_eq!(link.state(), SessionState::Naming);
        assert!(link.to_name().is_none(), "there is nothing to declare yet");
        link.want(namespace());
        let (epoch, _) = link.to_name().unwrap();
        link.named(epoch, 9);
        assert_eq!((link.state(), link.reason()), (SessionState::Ready, None));
    }

    #[test]
    fn a_name_of_an_earlier_epoch_is_of_no_use() {
        let mut link = ready();
        assert_eq!(link.handle(1), Some(9));
        link.want(namespace());
        assert_eq!((link.handle(1), link.handle(2)), (None, None));
        assert_eq!(link.state(), SessionState::Naming);
    }

    #[test]
    fn a_rank_that_comes_back_makes_the_namespace_be_declared_again() {
        let mut link = ready();
        link.detached();
        assert_eq!(link.state(), SessionState::Attaching);
        link.attached();
        assert!(link.to_name().is_some());
    }

    #[test]
    fn a_refused_namespace_is_not_asked_for_again_until_it_changes_or_the_daemon_does() {
        for heal in [(|link| link.want(namespace())) as fn(&mut Link), |link| link.disconnected()] {
            let mut link = ready();
            link.want(namespace());
            link.refused(Some(2), &Error::invalid("other sizes").hint("use another pool"));
            assert_eq!(link.state(), SessionState::Refused);
            assert_eq!(link.reason().unwrap(), "other sizes; hint: use another pool");
            assert!(link.to_name().is_none());
            heal(&mut link);
            assert_ne!(link.state(), SessionState::Refused);
        }
    }

    #[test]
    fn the_breaker_opens_once_and_closes_with_a_welcome() {
        let mut link = ready();
        assert!(!link.failed(3) && !link.failed(3));
        link.succeeded();
        assert!(!link.failed(3) && !link.failed(3) && link.failed(3) && !link.failed(3));
        assert_eq!((link.state(), link.is_broken()), (SessionState::Connecting, true));
        link.disconnected();
        assert!(link.is_breaker_open() && !link.is_broken());
        link.welcomed(vec![1; 16]);
        assert!(!link.is_breaker_open());
    }
}
