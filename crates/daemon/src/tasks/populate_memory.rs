//! Populates the pool's memory, unit by unit, on a thread of its own: the daemon serves from the first unit on. The
//! thread has low priority; a task of the deciding thread tells the core.

use forebay_core::Result;
use tokio::sync::mpsc;

use crate::state::Shared;
use crate::{turns, vital};

/// What the thread tells the core.
enum Populated {
    Unit(u32),
    /// All that can be had, and the huge pages of it.
    All(Result<u64>),
}

/// Starts the thread. It ends when all units are there, one cannot be had, or the daemon is gone.
pub fn start(shared: &Shared) {
    let (pool, shared) = (shared.lock().table.pool().clone(), shared.clone());
    let units = pool.geometry().units;
    // Some are on their way to the core at a time.
    let (populated, mut news) = mpsc::channel(4);
    let run = move || {
        vital::lower();
        let outcome = (0..units).try_for_each(|unit| {
            pool.populate_unit(unit)?;
            // Nobody is there any more: the daemon ends.
            let _ = populated.blocking_send(Populated::Unit(unit));
            Ok(())
        });
        let outcome = outcome.map(|()| pool.huge_page_report().map_or(0, |report| report.huge_bytes));
        let _ = populated.blocking_send(Populated::All(outcome));
    };
    std::thread::Builder::new().name("populate".into()).spawn(run).expect("the system starts a thread");
    turns::spawn(async move {
        while let Some(news) = news.recv().await {
            match news {
                Populated::Unit(unit) => shared.event(|state| state.core.populate(unit)),
                Populated::All(Ok(huge_bytes)) => tracing::info!(units, huge_bytes, "the pool is populated"),
                Populated::All(Err(error)) => {
                    let hint = error.hint_text().unwrap_or("lower `pool.capacity_bytes`").to_owned();
                    let what = "cannot populate more of the pool; serving with the memory that it has";
                    tracing::error!(%error, hint, "{what}");
                }
            }
        }
    });
}
