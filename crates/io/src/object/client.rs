//! The thread that has all requests: a small runtime, asked through one channel, answering through a list.
//!
//! Invariants: each job is answered once, at its deadline at the latest; so many run at a time as configured, stores in
//! half of them at most, so that loads always have a way.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::ErrorKind;
use forebay_core::tier::{OpId, OpKind, Operation, Outcome};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc};

use super::moves::Place;
use crate::ticket::Ticket;
use crate::uring::Waker;

pub(super) struct Job {
    pub op: Operation,
    pub ticket: Arc<Ticket>,
    /// When it was asked for.
    pub asked: Instant,
}

pub(super) struct Done {
    pub id: OpId,
    pub outcome: Outcome,
    /// A store of what was there already.
    pub was_there: bool,
}

/// See the module's head.
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
    /// `runtime` has one thread: the one that is started here.
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
            // Looking up a name may hang; nobody waits for it.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("forebay-object".to_owned()).spawn(run)?;
        Ok(Client { jobs: Some(sender), answers, thread: Some(thread) })
    }

    /// The queue is bounded by whoever calls.
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

    /// Blocks until something is done.
    pub fn wait(&self, timeout: Duration) {
        let waiting = |done: &mut Vec<Done>| done.is_empty();
        let _ = self.answers.has_done.wait_timeout_while(lock(&self.answers.done), timeout, waiting);
    }

    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Requests end where they wait; a copy that runs ends before that.
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
            // Nobody waits for a store: its time begins with its turn.
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
        match job.ticket.is_given_up() {
            true => (Outcome::Failed(ErrorKind::Timeout), false),
            false => self.place.perform(&job.op, &job.ticket).await,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
