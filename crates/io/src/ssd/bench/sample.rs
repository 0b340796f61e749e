//! One run as tier and baseline report it, and the clock for both.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// One run of the tier or of the baseline.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Bytes of blocks over the time of the run, in units of 10⁹ bytes.
    pub gb_per_s: f64,
    /// CPU time of all threads of the process, with the kernel's work for them.
    pub cpu_ms_per_gb: f64,
}

impl Sample {
    pub(super) fn new(bytes: u64, took: Duration, cpu: Duration) -> Sample {
        let gb = bytes as f64 / 1e9;
        Sample { gb_per_s: gb / took.as_secs_f64(), cpu_ms_per_gb: cpu.as_secs_f64() * 1e3 / gb }
    }
}

/// CPU time of this thread, or of all threads of this process, with the kernel's work for them.
pub(super) fn cpu_time(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
