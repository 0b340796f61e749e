//! State that the engine's threads and the background thread share.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, watch};

use super::config::SessionConfig;
use super::holdings::Holdings;
use crate::random_id;

/// See the module documentation.
pub(super) struct Shared {
    pub config: SessionConfig,
    /// Identifies this session to the daemon after a reconnect: no other holdings record what it holds.
    pub owner: [u8; 16],
    holdings: Mutex<Holdings>,
    pub wake_deliver: Notify,
    pub wake_stock: Notify,
    pub wake_name: Notify,
    pub wake_hints: Notify,
    /// The connection was marked as broken.
    pub broken: Notify,
    /// The queue is empty.
    pub drained: Notify,
    closing: watch::Sender<bool>,
}

impl Shared {
    pub fn new(config: SessionConfig) -> Shared {
        Shared {
            holdings: Mutex::new(Holdings::new(config.stock_blocks, Instant::now())),
            config,
            owner: random_id(),
            wake_deliver: Notify::new(),
            wake_stock: Notify::new(),
            wake_name: Notify::new(),
            wake_hints: Notify::new(),
            broken: Notify::new(),
            drained: Notify::new(),
            closing: watch::Sender::new(false),
        }
    }

    /// Held for microseconds, never across a wait. After a panic under it the holdings are in a state between two of
    /// their changes, and the daemon checks all messages; so the poison is ignored.
    pub fn holdings(&self) -> MutexGuard<'_, Holdings> {
        self.holdings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn wake_all(&self) {
        self.wake_name.notify_one();
        self.wake_deliver.notify_one();
        self.wake_stock.notify_one();
        self.wake_hints.notify_one();
    }

    pub fn close(&self) {
        self.closing.send_replace(true);
        self.wake_all();
    }

    /// Gives the connection up.
    pub fn break_off(&self) {
        self.holdings().link.broken();
        self.broken.notify_one();
    }

    pub async fn closing(&self) {
        // The sender is in `self`, so the wait cannot end because it was dropped.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }
}
