//! Threads that a hung mount may hold.
//!
//! Invariant: they keep no descriptor of the process but the tier's waker. Nothing of the tier is open between two
//! jobs, so no descriptor goes from thread to thread.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::descriptors;
use crate::uring::Waker;

/// Starts one. `waker`: of the tier that it serves, or whose threads it starts.
pub(super) fn spawn(
    name: &str,
    waker: Option<Arc<Waker>>,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let work = move || {
        descriptors::own_but(waker.as_deref());
        run();
    };
    thread::Builder::new().name(name.to_owned()).spawn(work)
}

/// Waits until they have ended, and have dropped what they were given: dropped by the last of them, memory would keep
/// its descriptors in the process. False if one hangs.
pub(super) fn have_ended(threads: &mut Vec<JoinHandle<()>>, deadline: Instant) -> bool {
    while threads.iter().any(|thread| !thread.is_finished()) {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    threads.drain(..).for_each(|thread| drop(thread.join()));
    true
}
