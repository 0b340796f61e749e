//! A directory that is configured and cannot be used, or not any more: it is tried again until it comes, beside serving
//! without it.
//!
//! Invariants: one thread for each such directory, which ends when the directory is taken up, or at the next try after
//! the tier was closed. Nobody waits for that thread, since a mount may never answer. An open directory is handed over
//! from hand to hand, or closed.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};

use super::aside;
use super::report::RootReport;
use super::root::Root;
use crate::purge::Place;
use crate::uring::Waker;

/// Between two tries.
const PAUSE: Duration = Duration::from_secs(2);

/// See the module documentation.
pub(super) struct Missing {
    pub path: PathBuf,
    why: Arc<Mutex<Error>>,
    opened: Receiver<Root>,
    /// Its drop ends the thread.
    close: Sender<Infallible>,
    thread: JoinHandle<()>,
}

impl Missing {
    /// `open` blocks as long as the mount does, and starts the threads of a directory that wake `waker`.
    pub fn start(
        path: PathBuf,
        why: Error,
        waker: Arc<Waker>,
        open: impl Fn() -> Result<Root> + Send + 'static,
    ) -> io::Result<Missing> {
        let (sender, opened) = sync_channel(0);
        let (close, closed) = channel();
        let why = Arc::new(Mutex::new(why));
        let (told, named) = (why.clone(), path.clone());
        let run = move || {
            while closed.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                match open() {
                    // It may be refused, and come again as another one.
                    Ok(root) => {
                        if let Err(SendError(mut root)) = sender.send(root) {
                            root.close();
                        }
                    }
                    Err(error) => {
                        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                        if told.to_string() != error.to_string() {
                            tracing::warn!(path = %named.display(), %error, hint = error.hint_text(),
                                "a shared directory stays out of use");
                        }
                        *told = error;
                    }
                }
            }
        };
        let thread = aside::spawn("forebay-fs-open", Some(waker), run)?;
        Ok(Missing { path, why, opened, close, thread })
    }

    /// Ends the thread. Waits for it, unless its mount hangs.
    pub fn end(self, deadline: Instant) {
        let Missing { opened, close, thread, .. } = self;
        drop((opened, close));
        aside::have_ended(&mut vec![thread], deadline);
    }

    /// The directory, once it is open.
    pub fn opened(&self) -> Option<Root> {
        self.opened.try_recv().ok()
    }

    /// The directory stays missing for this reason, until it can be used.
    pub fn refuse(&self, why: Error) {
        let mut told = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        if told.to_string() != why.to_string() {
            tracing::error!(error = %why, hint = why.hint_text(), "a shared directory is not used");
        }
        *told = why;
    }

    pub fn report(&self) -> RootReport {
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        RootReport::of_missing(self.path.clone(), &why)
    }

    /// Its blocks cannot be purged.
    pub fn place(&self) -> Place {
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).to_string();
        let refuse = move || {
            let error = Error::new(ErrorKind::Unavailable, "the directory is not open").source(why);
            error.hint("check the mount, and purge again when `forebay inspect` shows the directory as serving")
        };
        let name = self.path.display().to_string();
        Place { name, patience: PAUSE, empty: Box::new(move |_| Err(refuse())), is_mount: true }
    }
}
