//! The purges that have not ended, as the pool records them.
//!
//! Invariant: a purge of blocks in the pool or on this host's disks is in the record before the first block goes and
//! until the last one is gone. So a daemon that starts goes on with it, before it serves anything of the namespace.

use std::collections::BTreeMap;

use forebay_core::{Error, ErrorKind, NamespaceId, Result};
use forebay_io::pool::{PURGES, Pool, PurgeRecord, PurgeTarget};

/// See the module's head.
pub struct Purges {
    /// Where each is in the pool's file.
    numbers: BTreeMap<PurgeRecord, u32>,
    vacant: Vec<u32>,
}

impl Default for Purges {
    fn default() -> Purges {
        Purges { numbers: BTreeMap::new(), vacant: (0..PURGES).rev().collect() }
    }
}

impl Purges {
    /// Found in the pool.
    pub fn restore(&mut self, found: &[(u32, PurgeRecord)]) {
        self.numbers = found.iter().map(|(number, record)| (*record, *number)).collect();
        let used: Vec<u32> = found.iter().map(|(number, _)| *number).collect();
        self.vacant.retain(|number| used.binary_search(number).is_err());
    }

    /// The purge is about to begin, unless it is under way. Errors with `Full` if too many are.
    pub fn begin(&mut self, pool: &Pool, namespace: NamespaceId, target: PurgeTarget) -> Result<()> {
        let record = PurgeRecord { namespace, target };
        if self.numbers.contains_key(&record) {
            return Ok(());
        }
        let Some(number) = self.vacant.last().copied() else {
            return Err(Error::new(ErrorKind::Full, "too many purges have not ended")
                .with("limit", PURGES)
                .hint("check the disks of this host: `forebay inspect` says which of them is missing or sick"));
        };
        pool.set_purge(number, &record)?;
        self.vacant.pop();
        self.numbers.insert(record, number);
        Ok(())
    }

    /// All is gone from there.
    pub fn end(&mut self, pool: &Pool, namespace: NamespaceId, target: PurgeTarget) {
        let Some(number) = self.numbers.remove(&PurgeRecord { namespace, target }) else { return };
        match pool.clear_purge(number) {
            Ok(()) => self.vacant.push(number),
            // The next start purges once more.
            Err(error) => tracing::warn!(%namespace, %error, "cannot clear the record of a purge"),
        }
    }

    /// Namespaces that are not purged from there yet.
    pub fn of(&self, target: PurgeTarget) -> Vec<NamespaceId> {
        self.numbers.keys().filter(|record| record.target == target).map(|record| record.namespace).collect()
    }
}
