//! The daemon lives as long as all its parts do.
//!
//! Invariant: a panic ends the process. Half an event may be done, so nothing can be decided any more. A daemon that
//! keeps locks and sockets without serving would keep its successor from starting. The pool is whole for the successor.
//! Threads and tasks that must run as long as the daemon return [`Infallible`], so that they end by a panic or not at
//! all.

use std::backtrace::Backtrace;
use std::convert::Infallible;
use std::future::Future;
use std::io::Write;
use std::panic::PanicHookInfo;
use std::time::Duration;

/// How long the last words may take: standard error may be a pipe that nobody reads.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// From now on, a panic of any thread or task of this process ends it with SIGABRT, after the message and a backtrace
/// were written to standard error. For `forebay serve` alone: other users of this code turn panics into errors.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let watch = || {
            std::thread::sleep(LAST_WORDS);
            std::process::abort()
        };
        let _ = std::thread::Builder::new().name("last-words".into()).spawn(watch);
        // A standard error that is gone keeps nobody from ending.
        let _ = tell(panic);
        std::process::abort()
    }));
}

/// The message first: finding the names for a backtrace takes a while.
fn tell(panic: &PanicHookInfo<'_>) -> std::io::Result<()> {
    let thread = std::thread::current();
    let mut stderr = std::io::stderr().lock();
    writeln!(stderr, "the daemon stops: thread `{}` {panic}", thread.name().unwrap_or("without a name"))?;
    writeln!(stderr, "hint: start the daemon again, which keeps its pool; report this with the lines below")?;
    writeln!(stderr, "{}", Backtrace::force_capture())
}

/// Starts a thread that runs as long as the daemon.
pub(crate) fn thread(name: &str, run: impl FnOnce() -> Infallible + Send + 'static) {
    let run = move || match run() {};
    std::thread::Builder::new().name(name.into()).spawn(run).expect("the system starts a thread");
}

/// Starts a task that runs as long as the daemon.
pub(crate) fn task(run: impl Future<Output = Infallible> + Send + 'static) {
    tokio::spawn(run);
}
