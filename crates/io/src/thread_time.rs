//! What a thread has cost so far.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The processor time of this thread since it started.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
