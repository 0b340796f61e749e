//! The thread that makes all requests: a small runtime that takes jobs from one channel and answers through a list.
//!
//! Invariants: each job is answered once, at its deadline at the latest. The configured number of requests run at a
//! time. At most half of them are stores, so that loads always make progress.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc};

use super::moves::Place;
use crate::cancel::SlotGuard;
use crate::uring::Waker;

pub(super) struct Job {
    pub op: Operation,
    pub guard: Arc<SlotGuard>,
    /// When the operation was requested.
    pub asked: Instant,
}

pub(super) struct Done {
    pub id: OpId,
    pub outcome: Outcome,
    /// A store whose block was already there.
    pub was_there: bool,
}

/// See the module documentation.
pub(super) struct Client {
    jobs: Option<mpsc::UnboundedSender<Job>>,
    answers: Arc<Answers>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Answers {
    done: Mutex<Vec<Done>>,
    has_done: Condvar,
}

struct Desk {
    place: Place,
    timeout: Duration,
    requests: Semaphore,
    stores: Semaphore,
    answers: Arc<Answers>,
    waker: Arc<Waker>,
}

impl Client {
    /// `runtime` has one thread, which is started here.
    pub fn start(
        runtime: Runtime,
        place: Place,
        requests: usize,
        timeout: Duration,
        waker: Arc<Waker>,
    ) -> io::Result<Client> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let answers = Arc::<Answers>::default();
        let (all, stores) = (Semaphore::new(requests), Semaphore::new((requests / 2).max(1)));
        let desk = Arc::new(Desk { place, timeout, requests: all, stores, answers: answers.clone(), waker });
        let run = move || {
            runtime.block_on(serve(receiver, desk));
            // A name lookup may hang; shutdown does not wait for it.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("forebay-object".to_owned()).spawn(run)?;
        Ok(Client { jobs: Some(sender), answers, thread: Some(thread) })
    }

    /// The caller bounds the queue.
    pub fn push(&self, job: Job) {
        let Some(jobs) = &self.jobs else { return };
        if let Err(mpsc::error::SendError(job)) = jobs.send(job) {
            let outcome = Outcome::Failed(ErrorKind::Unavailable);
            lock(&self.answers.done).push(Done { id: job.op.id, outcome, was_there: false });
        }
    }

    pub fn poll(&self, done: &mut Vec<Done>) {
        done.append(&mut lock(&self.answers.done));
    }

    /// Blocks until some job is done.
    pub fn wait(&self, timeout: Duration) {
        let waiting = |done: &mut Vec<Done>| done.is_empty();
        let _ = self.answers.has_done.wait_timeout_while(lock(&self.answers.done), timeout, waiting);
    }

    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Waiting requests end at once; a running copy ends first.
impl Drop for Client {
    fn drop(&mut self) {
        self.jobs = None;
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

async fn serve(mut jobs: mpsc::UnboundedReceiver<Job>, desk: Arc<Desk>) {
    let mut tasks = tokio::task::JoinSet::new();
    while let Some(job) = jobs.recv().await {
        let desk = desk.clone();
        tasks.spawn(async move { desk.answer(job).await });
        while tasks.try_join_next().is_some() {}
    }
}

impl Desk {
    async fn answer(&self, job: Job) {
        let late = || (Outcome::Failed(ErrorKind::Timeout), false);
        let (outcome, was_there) = match job.op.kind {
            // Nobody waits for a store: its deadline runs from its start.
            OpKind::Store => {
                let _turn = (self.stores.acquire().await, self.requests.acquire().await);
                tokio::time::timeout(self.timeout, self.perform(&job)).await.unwrap_or_else(|_| late())
            }
            _ => {
                let asked = async {
                    let _turn = self.requests.acquire().await;
                    self.perform(&job).await
                };
                let deadline = tokio::time::Instant::from_std(job.asked + self.timeout);
                tokio::time::timeout_at(deadline, asked).await.unwrap_or_else(|_| late())
            }
        };
        let mut done = lock(&self.answers.done);
        let was_empty = done.is_empty();
        done.push(Done { id: job.op.id, outcome, was_there });
        drop(done);
        self.answers.has_done.notify_all();
        if was_empty {
            self.waker.wake();
        }
    }

    async fn perform(&self, job: &Job) -> (Outcome, bool) {
        match job.guard.is_given_up() {
            true => (Outcome::Failed(ErrorKind::Timeout), false),
            false => self.place.perform(&job.op, &job.guard).await,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
