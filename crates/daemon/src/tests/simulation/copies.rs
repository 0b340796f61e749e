//! The copies that the daemon makes for clients: they end by themselves, whatever becomes of the client.

use forebay_core::key::BlockHash;
use forebay_rpc::proto::{Block, CommitOutcome, GetRequest, PutRequest};

use super::engine::Shape;
use super::truth::{Holder, Key, slice, store_of};
use super::world::World;
use crate::service::copying::{self, Looked, Payload, Pinned, Taken, Written};

pub enum Copy {
    Put { request: PutRequest, key: Key, store: u64, taken: Option<(Taken, u64)>, written: Option<Written> },
    Get { request: GetRequest, key: Key, asked: u64, pinned: Option<(Pinned, u64)>, data: Option<Option<Vec<u8>>> },
}

impl World {
    /// The client at `at` asks for a copy, in or out.
    pub fn ask_for_copy(&mut self, at: usize) {
        let (shape, Some((session, namespace))) = (self.engines[at].shape, self.engines[at].ready_session()) else {
            return;
        };
        let key = self.draw_key(shape);
        let hash = key.hash();
        let (now, group) = (self.truth.get().now, key.group.into());
        let copy = if self.dice.is_one_in(2) {
            let store = self.truth.get().begin_store(key);
            let ranks = Shape::of(shape).ranks(key.group);
            let data = ranks.iter().enumerate().flat_map(|(rank, bytes)| slice(key, store, rank, *bytes)).collect();
            let predecessor = key.before().map_or(Vec::new(), Key::hash);
            let blocks = vec![Block { hash, data }];
            let request = PutRequest { session, namespace, group, predecessor, blocks, lent: None };
            Copy::Put { request, key, store, taken: None, written: None }
        } else {
            let hash_bytes = hash.len() as u32;
            let request = GetRequest { session, namespace, group, hash_bytes, hashes: hash, lent: None };
            Copy::Get { request, key, asked: now, pinned: None, data: None }
        };
        let Some(daemon) = &mut self.daemon else { return };
        if daemon.copies.len() < 4 {
            daemon.copies.push(copy);
        }
    }

    /// One of them comes a step nearer to its end.
    pub fn copy(&mut self) {
        let Some(at) = self.daemon.as_ref().and_then(|daemon| self.dice.pick(daemon.copies.len())) else { return };
        let copy = self.daemon.as_mut().expect("it has copies").copies.swap_remove(at);
        let rest = match copy {
            Copy::Put { request, key, store, taken, written } => self.put(request, key, store, taken, written),
            Copy::Get { request, key, asked, pinned, data } => self.get(request, key, asked, pinned, data),
        };
        self.daemon.as_mut().expect("a copy kills nobody").copies.extend(rest);
    }

    fn put(
        &mut self,
        request: PutRequest,
        key: Key,
        store: u64,
        taken: Option<(Taken, u64)>,
        written: Option<Written>,
    ) -> Option<Copy> {
        let bytes = request.blocks[0].data.len() as u64;
        let Some((taken, claim)) = taken else {
            let taken = self.event(|state| copying::take(state, &request, key.group, bytes))?.ok()??;
            let claim = self.truth.get().claim(taken.at, bytes, true, Holder::Daemon, "a put");
            return Some(Copy::Put { request, key, store, taken: Some((taken, claim)), written });
        };
        let Some(written) = written else {
            let written = Some(copying::write(&taken, Payload::Message(&request.blocks[0].data)));
            return Some(Copy::Put { request, key, store, taken: Some((taken, claim)), written });
        };
        self.truth.get().leave(claim, Holder::Daemon);
        self.truth.get().begin_commit(store);
        let named = (key.group, BlockHash::new(&key.hash()).expect("a hash"), key.before_hash());
        let outcome = self.event(|state| copying::keep(state, &request, named, &taken, &written))?;
        let is_stored = matches!(outcome, Ok(CommitOutcome::CommitStored));
        self.truth.get().end_commit(store, Some(is_stored));
        self.truth.get().count(if is_stored { "puts stored" } else { "puts not stored" });
        None
    }

    fn get(
        &mut self,
        request: GetRequest,
        key: Key,
        asked: u64,
        pinned: Option<(Pinned, u64)>,
        data: Option<Option<Vec<u8>>>,
    ) -> Option<Copy> {
        let hash = key.hash();
        let Some((pinned, claim)) = pinned else {
            let is_last = self.dice.is_one_in(8);
            let looked = self.event(|state| copying::look(state, &request, key.group, (&hash, hash.len()), is_last))?;
            return match looked {
                Ok(Looked::Found(pinned)) => {
                    let claim = self.truth.get().claim(pinned.at, pinned.length, false, Holder::Daemon, "a get");
                    Some(Copy::Get { request, key, asked, pinned: Some((pinned, claim)), data })
                }
                Ok(Looked::NotYet) => Some(Copy::Get { request, key, asked, pinned: None, data }),
                Ok(Looked::Absent) | Err(_) => None,
            };
        };
        let Some(data) = data else {
            let data = Some(copying::read(&self.daemon.as_ref()?.shared, &pinned));
            return Some(Copy::Get { request, key, asked, pinned: Some((pinned, claim)), data });
        };
        self.truth.get().leave(claim, Holder::Daemon);
        let is_spoiled = self.truth.get().is_spoiled(pinned.at.0, pinned.length);
        self.event(|state| copying::give_back(state, &pinned, data.as_deref()));
        match data {
            Some(data) => self.check_block(key, &data, asked, "a get"),
            None if !is_spoiled => {
                self.truth.get().violate(format!("a get found {key:?} rotten, and nothing spoiled it"));
            }
            None => {}
        }
        None
    }

    /// All slices of a block that was handed out.
    pub fn check_block(&mut self, key: Key, data: &[u8], asked: u64, by: &'static str) {
        let mut rest = data;
        for (rank, bytes) in Shape::of(key.shape).ranks(key.group).iter().enumerate() {
            let (own, behind) = rest.split_at(*bytes as usize);
            rest = behind;
            match store_of(key, rank, own) {
                Ok(store) => self.truth.get().served(key, store, asked, by),
                Err(what) => self.truth.get().violate(format!("{by}: {what}")),
            }
        }
    }
}
