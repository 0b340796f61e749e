//! How long the deciding thread was kept from its next decision, and how long it had no core.
//!
//! A turn is what it does without looking at other tasks: one step of one task. All tasks on this thread are started
//! here, so no turn is missed; waiting for a lock is part of a turn. What other threads do with the state locked is
//! recorded as well, since the deciding thread may wait for it.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use forebay_core::histogram::Histogram;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Of the deciding thread, and of those that lock its state.
#[derive(Clone, Default)]
pub struct Turns(Arc<Inner>);

#[derive(Default)]
struct Inner {
    histogram: Mutex<Histogram>,
    /// The kernel's number of the deciding thread.
    thread: OnceLock<i32>,
}

/// A thread's time in the kernel's queue for a core, since the thread started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueTime {
    /// For which it could run and another process had the core.
    pub waited: Duration,
    /// How often it got a core.
    pub runs: u64,
}

impl QueueTime {
    /// From a line of `/proc/PID/task/TID/schedstat`: nanoseconds on a core, nanoseconds in the queue, runs.
    fn parse(line: &str) -> Option<QueueTime> {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().ok());
        let waited = Duration::from_nanos(numbers.nth(1)??);
        Some(QueueTime { waited, runs: numbers.next()?? })
    }
}

thread_local! {
    /// Set on the deciding thread.
    static OWN: RefCell<Option<Turns>> = const { RefCell::new(None) };
}

impl Turns {
    /// This thread decides from now on.
    pub fn begin(&self) {
        OWN.set(Some(self.clone()));
        self.0.thread.get_or_init(|| rustix::thread::gettid().as_raw_nonzero().get());
    }

    /// Of the deciding thread; zero before it has begun, and where the kernel does not count.
    pub fn queue_time(&self) -> QueueTime {
        let Some(thread) = self.0.thread.get() else { return QueueTime::default() };
        let line = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat"));
        line.ok().and_then(|line| QueueTime::parse(&line)).unwrap_or_default()
    }

    pub fn record(&self, took: Duration) {
        self.0.histogram.lock().unwrap_or_else(PoisonError::into_inner).record(took.as_micros() as u64);
    }

    pub fn histogram(&self) -> Histogram {
        self.0.histogram.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Whether this is the deciding thread.
pub fn is_deciding() -> bool {
    OWN.with_borrow(Option::is_some)
}

/// As `tokio::spawn`.
pub fn spawn<F: Future<Output: Send> + Send + 'static>(task: F) -> JoinHandle<F::Output> {
    tokio::spawn(timed(task))
}

/// A task whose turns are recorded if the deciding thread runs it.
pub fn timed<F: Future>(task: F) -> impl Future<Output = F::Output> {
    Timed(Box::pin(task))
}

/// Runs slow work on another thread, when no other work has its place. It keeps the place until it ends, also if its
/// caller has gone: so callers who come and go leave no queue of work behind.
pub async fn one_at_a_time<T: Send + 'static>(
    place: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let taken = place.acquire().await.expect("the semaphore is never closed");
    let run = move || {
        let _taken = taken;
        work()
    };
    tokio::task::spawn_blocking(run).await.expect("the work does not panic")
}

struct Timed<F>(Pin<Box<F>>);

impl<F: Future> Future for Timed<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let start = Instant::now();
        let polled = self.0.as_mut().poll(context);
        OWN.with_borrow(|own| own.iter().for_each(|turns| turns.record(start.elapsed())));
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_on_the_deciding_thread_is_recorded_and_no_other() {
        let turns = Turns::default();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let task = || async {
            tokio::task::yield_now().await;
            std::thread::sleep(Duration::from_millis(3));
        };
        runtime.block_on(async { spawn(task()).await.unwrap() });
        assert_eq!(turns.histogram().count(), 0, "this thread does not decide yet");
        assert_eq!(turns.queue_time(), QueueTime::default(), "nor does it wait for a core");
        turns.begin();
        assert_ne!(turns.queue_time().runs, 0);
        runtime.block_on(async { spawn(task()).await.unwrap() });
        let (count, seconds) = (turns.histogram().count(), turns.histogram().sum_seconds());
        assert!(count == 2 && seconds >= 0.003, "{count} turns of {seconds} s");
        OWN.set(None);
    }

    #[test]
    fn what_the_kernel_counts_of_a_thread_is_time_on_a_core_time_in_the_queue_and_runs() {
        let waited = Duration::from_nanos(456);
        assert_eq!(QueueTime::parse("123 456 7\n"), Some(QueueTime { waited, runs: 7 }));
        for unknown in ["", "123 456", "123 x 7"] {
            assert_eq!(QueueTime::parse(unknown), None, "{unknown:?}");
        }
    }
}
