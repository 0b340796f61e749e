//! The daemon lives as long as all its parts do.
//!
//! Invariant: a panic ends the process. Half an event may be done, so nothing can be decided any more. A daemon that
//! keeps locks and sockets without serving would keep its successor from starting. The pool is whole for the successor.
//! Threads and tasks that must run as long as the daemon return [`Infallible`], so that they end by a panic or not at
//! all.

use std::backtrace::Backtrace;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use forebay_core::{Error, ErrorKind};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::turns;

/// How long the last words may take: standard error may be a pipe that nobody reads.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// From now on, a panic of any thread or task of this process ends it with SIGABRT, after the message and a backtrace
/// were written to standard error. For `forebay serve` alone: other users of this code turn panics into errors.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        // A core dump waits for all threads before it closes a file. A thread that a hung disk holds would keep the
        // sockets and locks from the next daemon.
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
        let watch = || {
            thread::sleep(LAST_WORDS);
            std::process::abort()
        };
        let _ = thread::Builder::new().name("last-words".into()).spawn(watch);
        // A standard error that is gone keeps nobody from ending.
        let _ = tell(panic);
        std::process::abort()
    }));
}

/// The message first: finding the names for a backtrace takes a while.
fn tell(panic: &PanicHookInfo<'_>) -> io::Result<()> {
    let (thread, mut stderr) = (thread::current(), io::stderr().lock());
    let name = thread.name().unwrap_or("without a name");
    let hint = "start the daemon again, which keeps its pool; report this with the lines below";
    write_whole(&mut stderr, format!("the daemon stops: thread `{name}` {panic}\nhint: {hint}\n").as_bytes())?;
    write_whole(&mut stderr, format!("{}\n", Backtrace::force_capture()).as_bytes())
}

/// Writes all of `text`. Waits where `to` is a pipe that does not block: whoever made it so may share it with other
/// processes.
pub fn write_whole(to: &mut (impl Write + AsFd), mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match to.write(text) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => text = &text[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for_room(to)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for_room(to: &impl AsFd) -> io::Result<()> {
    match rustix::event::poll(&mut [PollFd::new(to, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// For a thread whose work has no other end any more: the daemon is ending, and has dropped its state.
pub(crate) fn end_with_process() -> ! {
    loop {
        thread::park();
    }
}

/// How much less of a busy core such a thread gets: a tenth of what an engine's gets.
const LOW: i32 = 10;

/// This thread has time for what nobody waits for. It must not take a lock that the deciding thread takes: the deciding
/// thread would wait for as long as engines keep this one from its core.
pub(crate) fn lower() {
    // Refused, it takes as much as others do.
    if let Err(error) = rustix::process::setpriority_process(None, LOW) {
        tracing::debug!(%error, "cannot lower a thread's priority");
    }
}

/// Starts a thread that runs as long as the daemon, with low priority: see [`lower`].
pub(crate) fn low_thread(name: &str, run: impl FnOnce() -> Infallible + Send + 'static) {
    thread(name, || {
        lower();
        run()
    });
}

/// Starts a thread that runs as long as the daemon.
pub(crate) fn thread(name: &str, run: impl FnOnce() -> Infallible + Send + 'static) {
    let run = move || match run() {};
    thread::Builder::new().name(name.into()).spawn(run).expect("the system starts a thread");
}

/// Threads that a daemon without tiers has when it serves, and some for copies. It takes those of its tiers as well.
const LEAST_THREADS: usize = 16;

/// Errors with `Full` and a hint unless the system starts as many threads as a daemon cannot do without. Later, a
/// thread that cannot be started ends the daemon.
pub fn check_threads() -> forebay_core::Result<()> {
    let are_all_there = AtomicBool::new(false);
    thread::scope(|scope| {
        let wait = || {
            while !are_all_there.load(Relaxed) {
                thread::park();
            }
        };
        let mut threads = Vec::new();
        let failed = loop {
            if threads.len() == LEAST_THREADS {
                break None;
            }
            match thread::Builder::new().spawn_scoped(scope, wait) {
                Ok(thread) => threads.push(thread),
                Err(error) => break Some(error),
            }
        };
        are_all_there.store(true, Relaxed);
        threads.iter().for_each(|thread| thread.thread().unpark());
        let Some(error) = failed else { return Ok(()) };
        let what = format!("cannot start the daemon's threads: {} of {LEAST_THREADS} started", threads.len());
        Err(Error::new(ErrorKind::Full, what).source(error).hint(
            "raise the limit of tasks: `TasksMax=` of a service, `--pids-limit` of a container, `pids.max` of a \
             control group, or `ulimit -u` of the user; or that of address space, `ulimit -v`",
        ))
    })
}

/// A runtime on the thread that builds it, for the daemon. It has a thread for blocking work from the beginning, and
/// keeps it: one that cannot be started when there is work would end the daemon.
pub fn current_thread_runtime() -> io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().thread_keep_alive(AS_LONG_AS_THE_DAEMON).build()?;
    runtime.spawn_blocking(|| ());
    Ok(runtime)
}

/// A century.
const AS_LONG_AS_THE_DAEMON: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// A thread of its own for tasks that may take long; it runs as long as the daemon.
pub(crate) fn runtime(name: &str) -> tokio::runtime::Handle {
    let runtime = current_thread_runtime().expect("the system gives a runtime what it needs");
    let handle = runtime.handle().clone();
    thread(name, move || runtime.block_on(std::future::pending()));
    handle
}

/// Starts a task that runs as long as the daemon.
pub(crate) fn task(run: impl Future<Output = Infallible> + Send + 'static) {
    turns::spawn(run);
}
