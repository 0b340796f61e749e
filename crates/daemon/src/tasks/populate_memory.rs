//! Populates the pool's memory, unit by unit, on a thread of its own: the daemon serves from the first unit on. The
//! thread has low priority; a task of the deciding thread tells the core. On a host with several NUMA nodes the thread
//! first says from which node a unit gets its memory ([`crate::nodes`]).
//!
//! Where there is no memory for a unit, the daemon serves with what it has, says so, and tries again for as long as it
//! runs.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Error;
use forebay_numa::{Linux, ROOT};
use tokio::sync::mpsc;

use crate::nodes::Placing;
use crate::state::{Shared, State};
use crate::{turns, vital};

/// Between two attempts at the same unit, each of which reads about ten small files.
const PAUSE: Duration = Duration::from_secs(5);

/// What the thread tells the core.
enum Populated {
    Unit(u32),
    /// The next unit cannot be had for now.
    Not(Error),
    /// All units, with so many bytes on huge pages.
    All(u64),
}

/// Starts the thread. It ends when all units are there, or the daemon is gone.
pub fn start(shared: &Shared) {
    let (pool, wishes) = {
        let state = shared.lock();
        (state.table.pool().clone(), state.wishes.clone())
    };
    let shared = shared.clone();
    let units = pool.geometry().units;
    // Some are on their way to the core at a time.
    let (populated, mut news) = mpsc::channel(4);
    let run = move || {
        vital::lower();
        let mut placing = Placing::find(Path::new(ROOT), Arc::new(Linux)).unwrap_or_else(|error| not_placed(&error));
        for unit in 0..units {
            if let Some(Err(error)) = placing.as_mut().map(|placing| placing.place(&pool, unit, &wishes)) {
                placing = not_placed(&error);
            }
            while let Err(error) = pool.populate_unit(unit) {
                if populated.blocking_send(Populated::Not(error)).is_err() {
                    return;
                }
                std::thread::sleep(PAUSE);
            }
            // Nobody is there any more: the daemon ends.
            if populated.blocking_send(Populated::Unit(unit)).is_err() {
                return;
            }
        }
        let huge_bytes = pool.huge_page_report().map_or(0, |report| report.huge_bytes);
        let _ = populated.blocking_send(Populated::All(huge_bytes));
    };
    std::thread::Builder::new().name("populate".into()).spawn(run).expect("the system starts a thread");
    turns::spawn(async move {
        while let Some(news) = news.recv().await {
            match news {
                Populated::Unit(unit) => shared.event(|state| {
                    state.core.populate(unit);
                    state.populated_units = unit + 1;
                    state.lacks_memory = None;
                }),
                Populated::Not(error) => shared.event(|state| note(state, &error)),
                Populated::All(huge_bytes) => tracing::info!(units, huge_bytes, "the pool is populated"),
            }
        }
    });
}

/// The rest of the pool lies wherever the kernel takes its memory.
fn not_placed(error: &io::Error) -> Option<Placing> {
    let hint = "in a container, allow `mbind` and `get_mempolicy` (`--cap-add SYS_NICE` under Docker's own profile), \
                or start the daemon under `numactl`";
    tracing::warn!(%error, hint, "cannot choose the NUMA nodes of the pool's memory");
    None
}

/// The log tells of it once, not at each attempt.
fn note(state: &mut State, error: &Error) {
    if state.lacks_memory.is_none() {
        let what = "cannot populate more of the pool; serving with the memory that it has, and trying again";
        tracing::error!(%error, hint = hint(error), "{what}");
    }
    state.lacks_memory = Some(told(error));
}

/// For `/readyz`, `forebay top` and `forebay inspect`: as the log says it, since only the error knows what was too
/// narrow.
fn told(error: &Error) -> String {
    format!("{error}; {}", hint(error))
}

fn hint(error: &Error) -> &str {
    error.hint_text().unwrap_or("lower `pool.capacity_bytes`")
}

#[cfg(test)]
mod tests {
    use forebay_core::ErrorKind;

    use super::*;

    #[test]
    fn what_has_no_memory_left_is_named() {
        let error = Error::new(ErrorKind::Full, "cannot allocate 2 MiB for the pool: 0 B is left in the control group");
        assert_eq!(
            told(&error.hint("raise the control group's memory limit")),
            "cannot allocate 2 MiB for the pool: 0 B is left in the control group; \
             raise the control group's memory limit"
        );
    }
}
