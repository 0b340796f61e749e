//! Memory that sessions' clients have lent: who may name it, and until when.
//!
//! Invariants: it counts towards its user's limit until it is unmapped. A copy that has begun keeps it mapped, whatever
//! becomes of the session.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::pool::Lent;
use forebay_rpc::random_id;
use tokio::runtime::Handle;

use crate::clients::LentBytes;

/// What a session's client has lent.
pub struct Loan {
    number: u64,
    memory: Arc<Borrowed>,
    /// When a call last named it.
    used: Instant,
}

impl Loan {
    pub fn new(lent: Lent, counted: LentBytes) -> Loan {
        let memory = Arc::new(Borrowed { lent: Some(lent), counted: Some(counted) });
        // Drawn, so that no other client can name the memory, of the same user neither.
        let number = u128::from_le_bytes(random_id()) as u64;
        Loan { number: number.max(1), memory, used: Instant::now() }
    }

    /// For the client.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// For a call of this user that names memory. `None` if it is other memory, or was lent by another user's client.
    pub fn named(&mut self, number: u64, uid: u32) -> Option<Arc<Borrowed>> {
        let is_its = self.number == number && self.memory.is_of(uid);
        is_its.then(|| {
            self.used = Instant::now();
            self.memory.clone()
        })
    }

    /// No call has named it for so long. Copies that are under way keep it mapped.
    pub fn is_idle(&self, time: Duration) -> bool {
        self.used.elapsed() >= time
    }
}

/// Memory of a session, until the last copy that uses it has ended.
pub struct Borrowed {
    lent: Option<Lent>,
    /// Dropped once it is unmapped.
    counted: Option<LentBytes>,
}

impl Borrowed {
    /// Whether a client of this user lent it.
    fn is_of(&self, uid: u32) -> bool {
        self.counted.as_ref().is_some_and(|counted| counted.uid() == uid)
    }
}

impl Deref for Borrowed {
    type Target = Lent;

    fn deref(&self) -> &Lent {
        self.lent.as_ref().expect("it is taken only when it is dropped")
    }
}

impl Drop for Borrowed {
    /// Unmapping takes milliseconds, and a session ends on the thread that decides.
    fn drop(&mut self) {
        let (lent, counted) = (self.lent.take(), self.counted.take());
        let unmap = move || {
            drop(lent);
            drop(counted);
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(unmap)),
            Err(_) => unmap(),
        }
    }
}
