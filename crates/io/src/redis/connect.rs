//! Begins connections to an address without waiting for a name server, and decides when to try again.
//!
//! Invariant: there is one attempt at a time, and at most one thread that asks a name server; that thread ends by
//! itself. Pauses between attempts grow to five seconds and are randomised, so that many daemons do not return at
//! once.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use super::address::Address;
use super::shared::Inbox;
use super::tls::Tls;
use super::transport::Transport;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A name server that takes longer keeps nobody from the address that the name had before.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two questions for a name that has an address.
const ASK_PAUSE: Duration = Duration::from_secs(1);

/// A name server's answer; `None` until it comes.
type Answer = Arc<Mutex<Option<io::Result<Vec<SocketAddr>>>>>;

/// See the module documentation.
pub(super) struct Dialer {
    pub address: Address,
    asked: Option<Answer>,
    /// When the last question was.
    asked_at: Option<Instant>,
    known: Vec<SocketAddr>,
    /// A connection to one of them has ended, or none of them could be reached, so the name may mean another by now.
    is_stale: bool,
    attempts: usize,
}

impl Dialer {
    pub fn new(address: Address) -> Dialer {
        let known = address.literal().into_iter().collect();
        Dialer { address, asked: None, asked_at: None, known, is_stale: false, attempts: 0 }
    }

    /// Begins a connection; `None` while the name server is asked. Its answer triggers the event loop's waker.
    pub fn begin(
        &mut self,
        buffer_bytes: Option<u32>,
        tls: Option<&Tls>,
        inbox: &Arc<Inbox>,
    ) -> Result<Option<Transport>, String> {
        let (host, port) = match self.address.clone() {
            Address::Unix(path) => return Transport::unix(&path).map(Some).map_err(|error| error.to_string()),
            Address::Tcp { host, port } => (host, port),
        };
        if self.known.is_empty() || self.is_stale && self.may_ask() {
            self.ask(&host, port, inbox)?;
        }
        if self.known.is_empty() || self.patience_ends().is_some_and(|end| Instant::now() < end) {
            return Ok(None);
        }
        let at = self.known[self.attempts % self.known.len()];
        self.attempts += 1;
        let transport = Transport::tcp(at, buffer_bytes).map_err(|error| error.to_string())?;
        match tls {
            Some(tls) => transport.with_tls(tls, &host).map(Some),
            None => Ok(Some(transport)),
        }
    }

    /// Whether the last name lookup gave an address that was not tried yet.
    pub fn has_untried(&self) -> bool {
        !self.is_stale && self.attempts < self.known.len()
    }

    /// When to begin again, of a connection that may begin `at`: `None` while only the name server's answer helps.
    pub fn due(&self, at: Instant) -> Option<Instant> {
        match self.is_waiting() {
            false => Some(at),
            true => self.patience_ends().map(|end| at.max(end)),
        }
    }

    /// Until when the answer is waited for, where there is an earlier one to use instead.
    fn patience_ends(&self) -> Option<Instant> {
        let is_waiting = self.is_waiting() && !self.known.is_empty();
        self.asked_at.filter(|_| is_waiting).map(|asked_at| asked_at + PATIENCE)
    }

    /// Whether an answer may be there, or it is time for another question: a server that ends each connection after
    /// some replies costs no question each time.
    fn may_ask(&self) -> bool {
        self.asked.is_some() || self.asked_at.is_none_or(|asked_at| asked_at.elapsed() >= ASK_PAUSE)
    }

    /// Whether a name lookup is pending.
    fn is_waiting(&self) -> bool {
        let is_open = |answer: &Answer| answer.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        self.asked.as_ref().is_some_and(is_open)
    }

    /// Records a failed attempt. Once all addresses were tried, the name is looked up again.
    pub fn failed(&mut self) {
        if self.address.literal().is_none() && self.attempts >= self.known.len() {
            (self.is_stale, self.attempts) = (true, 0);
        }
    }

    /// Records the end of a connection that had served. A failover may have given the name to another server while the
    /// earlier one still accepts connections, so the name is looked up again before the next attempt.
    pub fn served(&mut self) {
        self.is_stale = self.address.literal().is_none();
    }

    fn ask(&mut self, host: &str, port: u16, inbox: &Arc<Inbox>) -> Result<(), String> {
        if let Some(answer) = &self.asked {
            let answer = answer.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(answer) = answer else { return Ok(()) };
            (self.asked, self.is_stale) = (None, false);
            match answer {
                Ok(found) => (self.known, self.attempts) = (found, 0),
                // A name server that is gone takes no server away that was there.
                Err(error) if self.known.is_empty() => return Err(error.to_string()),
                Err(error) => tracing::debug!(host, %error, "cannot look a name up again"),
            }
            return Ok(());
        }
        self.asked_at = Some(Instant::now());
        let answer = Answer::default();
        let (host, inbox, asked) = (host.to_string(), inbox.clone(), answer.clone());
        let ask = move || {
            let resolved = Address::resolve(&host, port);
            *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(resolved);
            inbox.wake();
        };
        let started = thread::Builder::new().name("redis-resolve".to_string()).spawn(ask);
        match started {
            Ok(_) => self.asked = Some(asked),
            // Where a host gives no thread, there may be an earlier address, and there is another time.
            Err(error) if self.known.is_empty() => return Err(error.to_string()),
            Err(_) => {}
        }
        Ok(())
    }
}

/// What a connection was good for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Operations were answered.
    Served,
    /// It was let in, and nothing was asked of it: many servers and proxies close what is idle.
    Idle,
    Failed,
}

/// When to try again.
pub(super) struct Backoff {
    pub at: Instant,
    /// Consecutive failures.
    pub failures: u32,
}

impl Backoff {
    pub fn new(now: Instant) -> Backoff {
        Backoff { at: now, failures: 0 }
    }

    /// After a connection that had served, the next attempt may follow at once. After one that was idle there is a
    /// short pause: its server may close each at once.
    pub fn ended(&mut self, now: Instant, was: Use, random: &mut u64) {
        (self.failures, self.at) = match was {
            Use::Served => (0, now),
            Use::Idle => (0, now + pause(1, random)),
            Use::Failed => (self.failures + 1, now + pause(self.failures + 1, random)),
        };
    }
}

/// A random part, between half and all, of a pause that doubles with each failure.
fn pause(failures: u32, random: &mut u64) -> Duration {
    let whole = FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(10)).min(LONGEST_PAUSE);
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    whole.mul_f64(0.5 + (*random >> 40) as f64 / f64::from(1 << 25))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_are_spread() {
        let mut random = 1;
        for failures in 1..40 {
            let whole = FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(10)).min(LONGEST_PAUSE);
            let pauses: Vec<_> = (0..100).map(|_| pause(failures, &mut random)).collect();
            assert!(pauses.iter().all(|pause| (whole / 2..=whole).contains(pause)), "{failures}: {pauses:?}");
            assert!(pauses.iter().max().unwrap() > &(pauses.iter().min().unwrap().mul_f64(1.5)), "they are spread");
        }
    }

    /// Begins until the name server has answered.
    fn begun(dialer: &mut Dialer) {
        let inbox = Arc::new(Inbox::new().unwrap());
        let due = Instant::now() + Duration::from_secs(60);
        while dialer.begin(None, None, &inbox).unwrap().is_none() {
            assert!(Instant::now() < due, "a name lookup ends");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_name_is_looked_up_again_when_a_connection_that_has_served_ends() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let former: SocketAddr = ([127, 0, 0, 9], port).into();
        let mut dialer = Dialer::new(Address::Tcp { host: "localhost".to_string(), port });
        dialer.known = vec![former];
        begun(&mut dialer);
        assert_eq!(dialer.known, [former], "it serves there");
        dialer.served();
        begun(&mut dialer);
        assert!(!dialer.known.is_empty() && !dialer.known.contains(&former), "{:?}", dialer.known);
    }

    #[test]
    fn a_name_server_that_is_gone_takes_no_known_address_away() {
        let known: SocketAddr = ([127, 0, 0, 9], 1).into();
        for ended in [Dialer::served, Dialer::failed] {
            let mut dialer = Dialer::new(Address::Tcp { host: "no name at all".to_string(), port: 1 });
            (dialer.known, dialer.attempts) = (vec![known], 1);
            ended(&mut dialer);
            assert!(!dialer.has_untried(), "the name is asked for first");
            begun(&mut dialer);
            assert_eq!(dialer.known, [known]);
        }
    }

    #[test]
    fn a_name_server_that_hangs_is_waited_for_only_a_moment_where_an_address_is_known() {
        let inbox = Arc::new(Inbox::new().unwrap());
        let mut dialer = Dialer::new(Address::Tcp { host: "never answered".to_string(), port: 1 });
        dialer.known = vec![([127, 0, 0, 9], 1).into()];
        dialer.served();
        let now = Instant::now();
        (dialer.asked, dialer.asked_at) = (Some(Answer::default()), Some(now));
        assert!(dialer.begin(None, None, &inbox).unwrap().is_none());
        assert_eq!(dialer.due(now), Some(now + PATIENCE));
        dialer.asked_at = now.checked_sub(PATIENCE);
        assert!(dialer.begin(None, None, &inbox).unwrap().is_some());
    }

    #[test]
    fn a_server_that_ends_each_connection_costs_a_question_a_second() {
        let inbox = Arc::new(Inbox::new().unwrap());
        let mut dialer = Dialer::new(Address::Tcp { host: "never answered".to_string(), port: 1 });
        (dialer.known, dialer.asked_at) = (vec![([127, 0, 0, 9], 1).into()], Some(Instant::now()));
        for _ in 0..10 {
            dialer.served();
            assert!(dialer.begin(None, None, &inbox).unwrap().is_some());
        }
        assert!(dialer.asked.is_none());
        dialer.asked_at = Instant::now().checked_sub(ASK_PAUSE);
        // The answer may be there at once.
        let _ = dialer.begin(None, None, &inbox).unwrap();
        assert!(dialer.asked.is_some());
    }

    #[test]
    fn a_connection_that_has_served_is_replaced_at_once() {
        let (now, mut random) = (Instant::now(), 7);
        let mut backoff = Backoff::new(now);
        backoff.ended(now, Use::Failed, &mut random);
        assert!(backoff.at > now);
        backoff.ended(now, Use::Served, &mut random);
        assert_eq!((backoff.at, backoff.failures), (now, 0));
    }

    #[test]
    fn a_connection_that_was_idle_ends_the_failures_before_it_and_is_replaced_soon() {
        let (now, mut random) = (Instant::now(), 7);
        let mut backoff = Backoff::new(now);
        (0..20).for_each(|_| backoff.ended(now, Use::Failed, &mut random));
        backoff.ended(now, Use::Idle, &mut random);
        assert_eq!(backoff.failures, 0);
        assert!(backoff.at > now && backoff.at <= now + FIRST_PAUSE);
    }
}
