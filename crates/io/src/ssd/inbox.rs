//! How disks come into a tier that is already in use, each whenever it is there.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use forebay_core::Error;

use super::claim::OpenedDisk;
use crate::uring::Waker;

/// What became of the disk at this place of the configuration.
pub(super) enum News {
    /// No transfer of an earlier daemon is under way there.
    EarlierIoDone,
    /// Why it is not there.
    Missing(Error),
    Opened(Box<OpenedDisk>),
}

/// See the module documentation. Each disk's thread has one.
#[derive(Clone)]
pub struct Inbox {
    pub(super) sender: Sender<(usize, News)>,
    pub(super) waker: Arc<Waker>,
}

impl Inbox {
    /// To open the disk with.
    pub fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// No transfer of an earlier daemon is under way on this disk.
    pub fn earlier_io_done(&self, place: usize) {
        self.send(place, News::EarlierIoDone);
    }

    /// The disk is not there, and why.
    pub fn missing(&self, place: usize, why: Error) {
        self.send(place, News::Missing(why));
    }

    /// The tier uses the disk from its next [`poll`](forebay_core::tier::Tier::poll) on.
    pub fn opened(&self, place: usize, disk: OpenedDisk) {
        self.send(place, News::Opened(Box::new(disk)));
    }

    fn send(&self, place: usize, news: News) {
        // A tier that is gone needs no disk.
        let _ = self.sender.send((place, news));
        self.waker.wake();
    }
}
