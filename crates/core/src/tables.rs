//! Open addressing in many small tables, for the pool's index and for the locations of blocks on tiers.
//!
//! Invariants: a table is at most 3/4 full, because beyond that the probe for an absent key gets long; a probe never
//! leaves its table; a removal shifts later entries back, so that every probe still finds them. Small tables keep the
//! cost of one growth far below 200 µs.

use crate::key::Fingerprint;
use std::hint::black_box;

/// As many tables as a power of two of this, at most: 24 bytes each, and as much again for the first entries of each.
pub(crate) const TABLE_BITS: u32 = 12;
const FIRST_ENTRIES: usize = 4;

/// What a table holds; an empty place is the default.
pub(crate) trait Entry: Copy + Default {
    /// Whether tables grow by a quarter, and are 3/5 full then. Others double. Dense ones are up to a fifth slower.
    const IS_DENSE: bool;

    fn is_empty(&self) -> bool;
    /// Where the probe for it begins: in dense tables as a part of 2^32, in others its lower bits count.
    fn home(&self) -> u32;
    /// The same, of an entry under this key. The key's lowest bits, at most [`TABLE_BITS`], name its table.
    fn home_of(key: Fingerprint) -> u32;
}

/// See the module's head.
pub(crate) struct Tables<E> {
    /// None before the first entry.
    tables: Vec<Table<E>>,
    bits: u32,
    count: u64,
}

struct Table<E> {
    entries: Box<[E]>,
    used: usize,
}

impl<E> Default for Tables<E> {
    fn default() -> Tables<E> {
        Tables::new(TABLE_BITS)
    }
}

impl<E> Tables<E> {
    /// With as many tables as a power of two of `bits`. Panics beyond [`TABLE_BITS`].
    pub fn new(bits: u32) -> Tables<E> {
        assert!(bits <= TABLE_BITS, "2^{bits} tables, of at most 2^{TABLE_BITS}");
        Tables { tables: Vec::new(), bits, count: 0 }
    }
}

impl<E: Entry> Tables<E> {
    pub fn len(&self) -> u64 {
        self.count
    }

    /// The entry under `key` for which `is_it` says yes.
    pub fn find(&self, key: Fingerprint, is_it: impl FnMut(&E) -> bool) -> Option<&E> {
        let table = self.tables.get(self.table_of(key))?;
        Some(&table.entries[table.find(E::home_of(key), is_it)?])
    }

    pub fn find_mut(&mut self, key: Fingerprint, is_it: impl FnMut(&E) -> bool) -> Option<&mut E> {
        let at_table = self.table_of(key);
        let table = self.tables.get_mut(at_table)?;
        let at = table.find(E::home_of(key), is_it)?;
        Some(&mut table.entries[at])
    }

    /// `entry`, which is under `key`, must not be there.
    pub fn insert(&mut self, key: Fingerprint, entry: E) {
        if self.tables.is_empty() {
            self.tables = (0..1 << self.bits).map(|_| Table { entries: Box::default(), used: 0 }).collect();
        }
        let at_table = self.table_of(key);
        let table = &mut self.tables[at_table];
        if (table.used + 1) * 4 > table.entries.len() * 3 {
            table.grow();
        }
        table.put(entry);
        table.used += 1;
        self.count += 1;
    }

    /// False if there was no such entry.
    pub fn remove(&mut self, key: Fingerprint, is_it: impl FnMut(&E) -> bool) -> bool {
        let at_table = self.table_of(key);
        let Some(table) = self.tables.get_mut(at_table) else { return false };
        let Some(at) = table.find(E::home_of(key), is_it) else { return false };
        table.close_gap(at);
        table.used -= 1;
        self.count -= 1;
        true
    }

    /// The entry where a probe for `key` begins.
    pub fn at_home(&self, key: Fingerprint) -> E {
        let Some(table) = self.tables.get(self.table_of(key)) else { return E::default() };
        table.entries.get(table.place(E::home_of(key))).copied().unwrap_or_default()
    }

    /// Brings the entries of `keys` into the processor's cache, all at once instead of one after another.
    pub fn touch_lines(&self, keys: impl Iterator<Item = Fingerprint>) {
        black_box(keys.fold(0, |sum, key| sum ^ self.at_home(key).home()));
    }

    pub fn heap_bytes(&self) -> usize {
        self.tables.iter().map(|table| size_of_val(&*table.entries) + size_of::<Table<E>>()).sum()
    }

    fn table_of(&self, key: Fingerprint) -> usize {
        // None is there before the first entry; then any number is as good.
        key.0 as usize & self.tables.len().wrapping_sub(1)
    }
}

impl<E: Entry> Table<E> {
    /// The place for a home.
    #[inline]
    fn place(&self, home: u32) -> usize {
        let len = self.entries.len();
        if E::IS_DENSE { ((u64::from(home) * len as u64) >> 32) as usize } else { home as usize & len.wrapping_sub(1) }
    }

    #[inline]
    fn after(&self, place: usize) -> usize {
        let (next, len) = (place + 1, self.entries.len());
        match E::IS_DENSE {
            true if next == len => 0,
            true => next,
            false => next & (len - 1),
        }
    }

    fn find(&self, home: u32, mut is_it: impl FnMut(&E) -> bool) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.place(home);
        loop {
            let entry = &self.entries[at];
            if entry.is_empty() {
                return None;
            }
            if is_it(entry) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    fn put(&mut self, entry: E) {
        let mut at = self.place(entry.home());
        while !self.entries[at].is_empty() {
            at = self.after(at);
        }
        self.entries[at] = entry;
    }

    fn grow(&mut self) {
        let len = self.entries.len();
        let len = len + (if E::IS_DENSE { len / 4 } else { len }).max(FIRST_ENTRIES);
        let old = std::mem::replace(&mut self.entries, vec![E::default(); len].into_boxed_slice());
        old.iter().filter(|entry| !entry.is_empty()).for_each(|entry| self.put(*entry));
    }

    /// Empties position `gap`.
    fn close_gap(&mut self, mut gap: usize) {
        let len = self.entries.len();
        let distance = |from: usize, to: usize| match E::IS_DENSE {
            true if to < from => to + len - from,
            true => to - from,
            false => to.wrapping_sub(from) & (len - 1),
        };
        let mut at = gap;
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry.is_empty() {
                self.entries[gap] = E::default();
                return;
            }
            if distance(self.place(entry.home()), at) >= distance(gap, at) {
                self.entries[gap] = entry;
                gap = at;
            }
        }
    }
}
