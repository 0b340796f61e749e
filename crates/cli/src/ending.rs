//! The signals that end a command, the same for all commands: those that end a process and that it can hear.
//!
//! Whoever makes something that must not stay listens before it makes it. Not among them: SIGKILL, which nobody hears,
//! and the signals of a process's own faults.

use std::future::poll_fn;
use std::task::Poll;

use forebay_core::{Error, ErrorKind, Result};
use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};

const NAMED: [Number; 14] = [
    Number::HUP,
    Number::INT,
    Number::QUIT,
    Number::TERM,
    Number::USR1,
    Number::USR2,
    Number::ALARM,
    Number::VTALARM,
    Number::PROF,
    Number::IO,
    Number::POWER,
    Number::STKFLT,
    Number::XCPU,
    Number::XFSZ,
];
/// Those that have a number only.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// All of them, but for the hang-up that `nohup` has the command ignore.
pub fn signals() -> Result<Vec<Signal>> {
    let is_wanted = |number: &i32| *number != Number::HUP.as_raw() || !is_hang_up_ignored();
    let numbers = NAMED.map(Number::as_raw).into_iter().chain(REAL_TIME).filter(is_wanted);
    let heard: std::io::Result<Vec<_>> = numbers.map(|number| signal(SignalKind::from_raw(number))).collect();
    heard.map_err(|error| Error::new(ErrorKind::Io, "cannot handle signals").source(error))
}

fn is_hang_up_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
    ignored >> (Number::HUP.as_raw() - 1) & 1 == 1
}

/// The wait for one.
pub struct Ending(Vec<Signal>);

impl Ending {
    /// Needs a runtime.
    pub fn listen() -> Result<Ending> {
        signals().map(Ending)
    }

    /// Comes with the first.
    pub async fn come(&mut self) {
        poll_fn(|context| {
            let has_come = self.0.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if has_come { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
