//! Single threads of a daemon, stopped in the middle of what they do while its other threads go on.

use std::fs;
use std::io;
use std::marker::PhantomData;

use super::Daemon;

impl Daemon {
    /// Ids of its threads of this name.
    pub fn threads(&self, name: &str) -> Vec<i32> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("the daemon runs");
        let ids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        let is_named = |id: &i32| {
            let path = format!("/proc/{}/task/{id}/comm", self.pid());
            fs::read_to_string(path).is_ok_and(|own| own.trim_end() == name)
        };
        ids.filter(is_named).collect()
    }

    /// Whether a thread waits for something, or is gone.
    pub fn is_asleep(&self, thread: i32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/task/{thread}/stat", self.pid()));
        stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
    }

    /// Makes ready to stop these threads: from here on that takes microseconds.
    pub fn grip(&self, threads: &[i32]) -> Grip {
        let is_held = |thread: &i32| {
            // SAFETY: asks the kernel about a thread of a child of this process; no memory is touched.
            unsafe { libc::ptrace(libc::PTRACE_SEIZE, *thread, 0usize, 0usize) == 0 }
        };
        Grip { threads: threads.iter().copied().filter(is_held).collect(), is_stopped: false, _here: PhantomData }
    }
}

/// Threads that this test may stop. They run again when it is dropped, which must be before the daemon is.
pub struct Grip {
    threads: Vec<i32>,
    is_stopped: bool,
    /// The kernel knows the thread that asked, not its process.
    _here: PhantomData<*const ()>,
}

impl Grip {
    /// Returns when none of them runs any more.
    pub fn stop(&mut self) {
        if std::mem::replace(&mut self.is_stopped, true) {
            return;
        }
        self.threads.retain(|thread| {
            // SAFETY: as for `grip`; the status is a number of this frame.
            unsafe {
                let asked = libc::ptrace(libc::PTRACE_INTERRUPT, *thread, 0usize, 0usize);
                let mut status = 0;
                asked == 0 && libc::waitpid(*thread, &mut status, libc::__WALL) == *thread && libc::WIFSTOPPED(status)
            }
        });
    }

    /// Lets them go on.
    pub fn release(mut self) {
        self.let_go();
    }

    fn let_go(&mut self) {
        self.stop();
        for thread in self.threads.drain(..) {
            // SAFETY: as for `grip`.
            let done = unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0usize, 0usize) };
            // A daemon that was killed meanwhile has no such thread.
            assert!(done == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH));
        }
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        self.let_go();
    }
}
