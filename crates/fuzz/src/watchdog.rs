//! Ends the program if a case does not end: a parser that hangs cannot be interrupted otherwise.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A case takes milliseconds. So long only one that does not end, also on a machine that does other things.
const LONGEST_CASE: Duration = Duration::from_secs(120);

/// Watches the cases of one target until it is dropped.
pub struct Watchdog(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    is_over: bool,
    /// The case that runs: when it began, and its input.
    case: Option<Instant>,
    input: Vec<u8>,
}

impl Watchdog {
    pub fn start(name: &'static str) -> Watchdog {
        let state = Mutex::new(State { is_over: false, case: None, input: Vec::new() });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let watched = shared.clone();
        std::thread::spawn(move || watched.watch(name));
        Watchdog(shared)
    }

    pub fn begin(&self, input: &[u8]) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.case = Some(Instant::now());
        state.input.clear();
        state.input.extend_from_slice(input);
    }

    pub fn end(&self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).case = None;
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn watch(&self, name: &'static str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.is_over {
            if state.case.is_some_and(|begun| begun.elapsed() > LONGEST_CASE) {
                let path = crate::keep(name, &state.input);
                say(&format!(
                    "fuzz {name}: a case does not end\nagain: FUZZ_INPUT={} and this test alone",
                    path.display()
                ));
                std::process::abort();
            }
            let waited = self.changed.wait_timeout(state, Duration::from_secs(1));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Past what the test's own output goes to: it is lost if the program aborts.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
