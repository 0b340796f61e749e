//! Single threads of a daemon, stopped in the middle of what they do while its other threads go on.

use std::fs;
use std::io;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use std::path::Path;

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

    /// Where the first mapping of this file begins in the daemon's memory.
    #[cfg(target_arch = "x86_64")]
    pub fn mapped_at(&self, path: &Path) -> u64 {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).expect("the daemon runs");
        let path = path.display().to_string();
        let line = maps.lines().find(|line| line.ends_with(&path)).expect("the file is mapped");
        let start = line.split('-').next().expect("an address");
        u64::from_str_radix(start, 16).expect("an address")
    }

    /// Makes ready to stop these threads: from here on that takes microseconds.
    pub fn grip(&self, threads: &[i32]) -> Grip {
        let is_held = |thread: &i32| {
            // SAFETY: asks the kernel about a thread of a child of this process; no memory is touched.
            unsafe { libc::ptrace(libc::PTRACE_SEIZE, *thread, 0usize, 0usize) == 0 }
        };
        let threads = threads.iter().copied().filter(is_held).collect();
        Grip { threads, is_stopped: false, is_watching: false, _here: PhantomData }
    }
}

/// Threads that this test may stop. They run again when it is dropped, which must be before the daemon is.
pub struct Grip {
    threads: Vec<i32>,
    is_stopped: bool,
    is_watching: bool,
    /// The kernel knows the thread that asked, not its process.
    _here: PhantomData<*const ()>,
}

impl Grip {
    /// Makes the processor stop each of them at its next access to the eight bytes at `address` of the daemon's memory.
    /// [`Grip::wait`] says when that was.
    #[cfg(target_arch = "x86_64")]
    pub fn watch(&mut self, address: u64) {
        assert!(address.is_multiple_of(8), "what is watched is aligned");
        self.stop();
        for thread in &self.threads {
            set_debug_register(*thread, ADDRESS, address);
            set_debug_register(*thread, CONTROL, READ_OR_WRITE_OF_EIGHT_BYTES);
            go_on(*thread, 0);
        }
        (self.is_stopped, self.is_watching) = (false, true);
    }

    /// Returns `true` when one of them has touched what is watched. It alone stays stopped: the others are let go, or
    /// what the daemon gives one of them to do meanwhile would wait. Returns `false`, with all let go, once `is_over`
    /// says so.
    #[cfg(target_arch = "x86_64")]
    pub fn wait(&mut self, is_over: impl Fn() -> bool) -> bool {
        let trapped = loop {
            let trapped = self.threads.iter().position(|thread| has_trapped(*thread));
            if trapped.is_some() || is_over() {
                break trapped;
            }
            std::thread::yield_now();
        };
        let trapped = trapped.map(|at| self.threads.swap_remove(at));
        self.let_go();
        if let Some(thread) = trapped {
            set_debug_register(thread, CONTROL, 0);
            self.threads.push(thread);
        }
        trapped.is_some()
    }

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
        // The kernel keeps a thread's debug registers when its tracer leaves, and the next trap would end the daemon.
        #[cfg(target_arch = "x86_64")]
        if std::mem::take(&mut self.is_watching) {
            self.threads.iter().for_each(|thread| set_debug_register(*thread, CONTROL, 0));
        }
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

/// Debug registers of the processor (Intel SDM, volume 3, 19.2): one address, and what is watched there.
#[cfg(target_arch = "x86_64")]
const ADDRESS: usize = 0;
#[cfg(target_arch = "x86_64")]
const CONTROL: usize = 7;
#[cfg(target_arch = "x86_64")]
const READ_OR_WRITE_OF_EIGHT_BYTES: u64 = 1 | 0b11 << 16 | 0b10 << 18;

#[cfg(target_arch = "x86_64")]
fn set_debug_register(thread: i32, register: usize, value: u64) {
    let offset = std::mem::offset_of!(libc::user, u_debugreg) + register * size_of::<u64>();
    // SAFETY: the kernel checks the value, and writes to the registers of a thread of a child alone.
    let done = unsafe { libc::ptrace(libc::PTRACE_POKEUSER, thread, offset, value) };
    let error = io::Error::last_os_error();
    // A daemon that was killed meanwhile has no such thread.
    assert!(done == 0 || error.raw_os_error() == Some(libc::ESRCH), "the debug registers: {error}");
}

#[cfg(target_arch = "x86_64")]
fn go_on(thread: i32, signal: i32) {
    // SAFETY: as for `grip`.
    unsafe { libc::ptrace(libc::PTRACE_CONT, thread, 0usize, signal as usize) };
}

/// Whether the processor has stopped it. Any other signal is passed on.
#[cfg(target_arch = "x86_64")]
fn has_trapped(thread: i32) -> bool {
    let mut status = 0;
    // SAFETY: the status is a number of this frame.
    let is_stopped = unsafe {
        libc::waitpid(thread, &mut status, libc::__WALL | libc::WNOHANG) == thread && libc::WIFSTOPPED(status)
    };
    let signal = libc::WSTOPSIG(status);
    if is_stopped && signal != libc::SIGTRAP {
        go_on(thread, signal);
    }
    is_stopped && signal == libc::SIGTRAP
}
