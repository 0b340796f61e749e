//! Why clients are refused, in words and numbers, and what each user takes.

use forebay_core::{Error, ErrorKind};

use super::{Limits, User};

/// Which limit a user has reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    Connections,
    Sessions,
    Calls,
    CallBytes,
    CopyBytes,
    WaitingGets,
    LentBytes,
}

/// How often each limit refused something.
#[derive(Clone, Copy, Default, Debug)]
pub struct Refusals {
    own: [u64; Refusal::ALL.len()],
    /// Refused by the instances, which have this limit.
    pub engines: u64,
}

/// What a user has now, and how often it was refused more.
#[derive(Clone, Debug, Default)]
pub struct UserReport {
    pub uid: u32,
    /// With those of workers, without guests.
    pub connections: u64,
    pub sessions: u64,
    pub calls: u64,
    /// Of messages that are received and answers that were not taken, with those of copying calls.
    pub bytes: u64,
    /// Of the memory that its clients lend.
    pub lent_bytes: u64,
    /// By the limit's name.
    pub refused: Vec<(&'static str, u64)>,
}

impl Refusal {
    pub const ALL: [Refusal; 7] = [
        Refusal::Connections,
        Refusal::Sessions,
        Refusal::Calls,
        Refusal::CallBytes,
        Refusal::CopyBytes,
        Refusal::WaitingGets,
        Refusal::LentBytes,
    ];

    /// The limit's key, without its section.
    pub fn limit(self) -> &'static str {
        match self {
            Refusal::Connections => "connections_per_user",
            Refusal::Sessions => "sessions_per_user",
            Refusal::Calls => "calls_per_user",
            Refusal::CallBytes => "call_bytes_per_user",
            Refusal::CopyBytes => "copy_bytes_per_user",
            Refusal::WaitingGets => "waiting_gets_per_user",
            Refusal::LentBytes => "lent_bytes_per_user",
        }
    }

    pub(super) fn error(self, uid: u32, limits: &Limits) -> Error {
        let (message, limit, first) = match self {
            Refusal::Connections => {
                ("too many connections of this user are in use", limits.connections as u64, "close some")
            }
            Refusal::Sessions => ("too many sessions of this user are open", limits.sessions as u64, "close some"),
            Refusal::Calls => {
                ("too many calls of this user are under way", limits.calls as u64, "wait for answers, and read them")
            }
            Refusal::CallBytes => {
                ("too many bytes of this user's calls are under way", limits.call_bytes, "read the answers")
            }
            Refusal::CopyBytes => (
                "too many of this user's `Put` and `Get` calls are waiting",
                limits.copy_bytes,
                "make fewer of them at a time",
            ),
            Refusal::WaitingGets => (
                "too many of this user's `Get` calls are waiting for a tier",
                limits.waiting_gets as u64,
                "see `forebay doctor` for what is wrong with the tier",
            ),
            Refusal::LentBytes => {
                ("this user's clients lend the daemon too much memory", limits.lent_bytes, "close some clients")
            }
        };
        Error::new(ErrorKind::Full, message)
            .with("user", uid)
            .with("limit", limit)
            .hint(format!("{first}, or raise `limits.{}`", self.limit()))
    }
}

impl Refusals {
    pub fn add(&mut self, refusal: Refusal) {
        self.own[refusal as usize] += 1;
    }
}

impl User {
    pub(super) fn report(&self, uid: u32, limits: &Limits) -> UserReport {
        let own = Refusal::ALL.iter().map(|refusal| (refusal.limit(), self.refusals.own[*refusal as usize]));
        let free = self.copies.available_permits() as u64 * 1024;
        UserReport {
            uid,
            connections: self.places() as u64,
            sessions: self.sessions as u64,
            calls: self.calls as u64,
            bytes: self.call_bytes + limits.copy_bytes.saturating_sub(free),
            lent_bytes: self.lent_bytes,
            refused: own.chain([("engines", self.refusals.engines)]).collect(),
        }
    }
}
