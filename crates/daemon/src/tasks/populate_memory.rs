//! Populates the pool's memory, unit by unit, on a thread of its own: the daemon serves from the first unit on.

use forebay_core::Result;

use crate::state::Shared;

/// Starts the thread. It ends when all units are there, one cannot be had, or the daemon is gone.
pub fn start(shared: &Shared) {
    let (pool, shared) = (shared.lock().table.pool().clone(), shared.clone());
    let run = move || {
        let units = pool.geometry().units;
        let outcome: Result<()> = (0..units).try_for_each(|unit| {
            pool.populate_unit(unit)?;
            shared.event(|state| state.core.populate(unit));
            Ok(())
        });
        match outcome {
            Ok(()) => {
                let huge_bytes = pool.huge_page_report().map_or(0, |report| report.huge_bytes);
                tracing::info!(units, huge_bytes, "the pool is populated");
            }
            Err(error) => {
                let hint = error.hint_text().unwrap_or("lower `pool.capacity_bytes`").to_owned();
                tracing::error!(%error, hint, "cannot populate more of the pool; serving with the memory that it has");
            }
        }
    };
    std::thread::Builder::new().name("populate".into()).spawn(run).expect("the system starts a thread");
}
