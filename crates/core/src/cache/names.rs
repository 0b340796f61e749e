//! Short names for namespaces, with their layouts and size classes.
//!
//! A short name is never given to a second namespace. So if a client still uses the name of a closed namespace, it
//! finds nothing, and never another namespace's blocks. A closed namespace keeps only its number.
//!
//! A trial is the namespace of a measurement or a self-test. Its blocks stay in the pool, its lookups count nowhere,
//! and it is removed with the session that opened it.

use std::collections::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{ClassId, NamespaceId, NamespaceIndex};
use crate::layout::Layout;
use crate::slots::{Slots, Space};

pub(crate) struct Namespace {
    pub id: NamespaceId,
    pub layout: Layout,
    pub groups: Vec<GroupState>,
    /// See the module's head.
    pub is_trial: bool,
    /// No id has this name any more: it takes no new blocks.
    is_retired: bool,
}

/// A group of a namespace: its class and how many of its blocks are in the index.
pub(crate) struct GroupState {
    pub group: u16,
    pub class: ClassId,
    pub blocks: u64,
}

#[derive(Default)]
pub(crate) struct Names {
    all: Vec<Namespace>,
    by_id: HashMap<NamespaceId, NamespaceIndex>,
    /// Purged namespaces whose blocks are being dropped in pieces, and the first record that was not examined yet.
    purges: Vec<(NamespaceIndex, u32)>,
}

impl Names {
    /// Bounds the memory that clients can make the daemon use between two restarts: 80 bytes for each closed namespace.
    pub const MAX: usize = 1 << 20;

    pub fn open(
        &mut self,
        id: NamespaceId,
        layout: &Layout,
        is_trial: bool,
        slots: &mut Slots,
    ) -> Result<NamespaceIndex> {
        if let Some(&index) = self.by_id.get(&id) {
            let Namespace { layout: known, is_trial: known_trial, .. } = self.get(index);
            if *known_trial != is_trial {
                return Err(Error::invalid("the namespace is known, and only one of both is a trial")
                    .with("namespace", id)
                    .hint("give the trial other fields"));
            }
            if known != layout {
                return Err(Error::invalid("the namespace is known with other block sizes or tokens per block")
                    .with("namespace", id)
                    .with("known", known)
                    .with("offered", layout)
                    .hint(
                        "a program whose block size changed needs another field in its descriptor, such as another \
                         `revision`; if no program changed, two engines describe different caches by one name: report \
                         this with both configurations",
                    ));
            }
            return Ok(index);
        }
        if self.all.len() >= Names::MAX {
            return Err(Error::new(ErrorKind::Full, "too many namespaces were opened since the daemon started")
                .with("limit", Names::MAX)
                .hint("restart the daemon; the pool stays"));
        }
        let groups = layout.groups().map(|(group, info)| {
            let slot_bytes = info.slot_bytes();
            let class = slots.class(slot_bytes).ok_or_else(|| no_class(slot_bytes, slots.space()))?;
            Ok(GroupState { group, class, blocks: 0 })
        });
        let groups = groups.collect::<Result<Vec<_>>>()?;
        Ok(self.add(Namespace { id, layout: layout.clone(), groups, is_trial, is_retired: false }))
    }

    /// Gives `id` to an empty namespace with a new short name. Returns (old, new).
    pub fn replace(&mut self, id: NamespaceId) -> Option<(NamespaceIndex, NamespaceIndex)> {
        let old = *self.by_id.get(&id)?;
        let Namespace { layout, groups, is_trial, .. } = self.get(old);
        let (layout, is_trial) = (layout.clone(), *is_trial);
        let groups = groups.iter().map(|g| GroupState { group: g.group, class: g.class, blocks: 0 }).collect();
        self.get_mut(old).is_retired = true;
        self.purges.push((old, 0));
        Some((old, self.add(Namespace { id, layout, groups, is_trial, is_retired: false })))
    }

    /// Takes `id` from its namespace, whose blocks are then dropped in pieces.
    pub fn end(&mut self, id: NamespaceId) {
        let Some(old) = self.by_id.remove(&id) else { return };
        self.get_mut(old).is_retired = true;
        self.purges.push((old, 0));
    }

    /// The purge to continue, and the first record that it has not examined yet.
    pub fn next_purge(&self) -> Option<(NamespaceIndex, u32)> {
        self.purges.last().copied()
    }

    /// Whether a purge of this namespace is under way.
    pub fn is_purging(&self, id: NamespaceId) -> bool {
        self.purges.iter().any(|(namespace, _)| self.get(*namespace).id == id)
    }

    /// The purge has examined all records before `cursor`; all records, if it is `None`.
    pub fn advance_purge(&mut self, cursor: Option<u32>) {
        let Some((namespace, at)) = self.purges.last_mut() else { return };
        match cursor {
            Some(cursor) => *at = cursor,
            None => {
                let namespace = *namespace;
                self.purges.pop();
                self.clear(namespace);
            }
        }
    }

    /// Forgets an empty namespace. False if it holds blocks or is unknown.
    pub fn close(&mut self, id: NamespaceId) -> bool {
        let Some(&index) = self.by_id.get(&id) else { return false };
        if self.get(index).groups.iter().any(|group| group.blocks > 0) {
            return false;
        }
        self.by_id.remove(&id);
        self.get_mut(index).is_retired = true;
        self.clear(index);
        true
    }

    /// Forgets a short name that no id has any more and that holds no block.
    fn clear(&mut self, index: NamespaceIndex) {
        let namespace = self.get_mut(index);
        assert!(namespace.groups.iter().all(|group| group.blocks == 0), "{index:?} is cleared while it holds blocks");
        namespace.layout = Layout::default();
        namespace.groups = Vec::new();
    }

    /// The short name that an id has at present.
    pub fn current_index(&self, id: NamespaceId) -> Option<NamespaceIndex> {
        self.by_id.get(&id).copied()
    }

    pub fn get(&self, index: NamespaceIndex) -> &Namespace {
        &self.all[index.0 as usize]
    }

    fn get_mut(&mut self, index: NamespaceIndex) -> &mut Namespace {
        &mut self.all[index.0 as usize]
    }

    /// One more block of this group is in the index.
    pub fn enter(&mut self, namespace: NamespaceIndex, group: u16) {
        self.get_mut(namespace).group_mut(group).blocks += 1;
    }

    /// One block less.
    pub fn leave(&mut self, namespace: NamespaceIndex, group: u16) {
        self.get_mut(namespace).group_mut(group).blocks -= 1;
    }

    /// Whether two short names mean one namespace, before and after a purge.
    pub fn is_same(&self, one: NamespaceIndex, other: NamespaceIndex) -> bool {
        self.get(one).id == self.get(other).id
    }

    /// The namespaces that have an id at present, and trials that have ended and are not removed yet.
    pub fn current(&self) -> impl Iterator<Item = &Namespace> {
        let is_current = |(i, ns): &(usize, &Namespace)| {
            self.by_id.get(&ns.id) == Some(&NamespaceIndex(*i as u32)) || ns.is_trial && !ns.groups.is_empty()
        };
        self.all.iter().enumerate().filter(is_current).map(|(_, namespace)| namespace)
    }

    /// Whether a namespace has blocks of this class, or may get some.
    pub fn is_used(&self, class: ClassId) -> bool {
        self.all.iter().any(|namespace| namespace.groups.iter().any(|group| group.class == class))
    }

    fn add(&mut self, namespace: Namespace) -> NamespaceIndex {
        let index = NamespaceIndex(self.all.len() as u32);
        self.by_id.insert(namespace.id, index);
        self.all.push(namespace);
        index
    }
}

impl Namespace {
    /// The class of new blocks of `group`.
    pub fn class(&self, group: u16) -> Option<ClassId> {
        self.state(group).filter(|_| !self.is_retired).map(|at| self.groups[at].class)
    }

    fn group_mut(&mut self, group: u16) -> &mut GroupState {
        let at = self.state(group).expect("a stored block's group is in its namespace");
        &mut self.groups[at]
    }

    fn state(&self, group: u16) -> Option<usize> {
        self.groups.iter().position(|state| state.group == group)
    }
}

fn no_class(slot_bytes: u64, space: &Space) -> Error {
    if slot_bytes > space.max_slot_bytes() {
        return Error::new(ErrorKind::Full, "the pool is too small for blocks of this size")
            .with("slot_bytes", slot_bytes)
            .with("largest_bytes", space.max_slot_bytes())
            .hint("make the pool larger, or the engine's blocks smaller");
    }
    Error::new(ErrorKind::Full, "the pool holds too many sizes of blocks")
        .with("limit", Space::MAX_CLASSES)
        .hint("restart the daemon with a fresh pool")
}
