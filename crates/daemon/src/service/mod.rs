//! The control plane: each call in the order in which data passes, from the socket to the core and back.
//!
//! Calls of one connection may run at the same time; each locks the state for one event at a time. A call that takes
//! slots in several steps keeps them in a guard, so that a call that is cancelled half-way gives them back.

mod advise;
mod audit;
pub mod copying;
pub mod frame;
mod health;
pub mod hint;
pub mod lookup;
mod ping;
pub mod purge;
mod report;
pub mod session;
pub mod store;

use std::pin::Pin;
use std::sync::Arc;

use forebay_core::key::BlockHash;
use forebay_core::{Error, Result};
use forebay_rpc::proto::forebay_server::Forebay;
use forebay_rpc::proto::*;
use forebay_rpc::to_status;
use tokio::sync::Semaphore;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

pub use report::pages;
pub use session::{check_protocol, tell_attached};

use crate::clients::{Clients, Place};
use crate::metrics::RpcErrors;
use crate::state::Shared;

pub struct Service {
    shared: Shared,
    clients: Arc<Clients>,
    lookups: Arc<Semaphore>,
    audits: Arc<Semaphore>,
}

impl Service {
    pub fn new(shared: Shared, clients: Arc<Clients>) -> Service {
        let lookups = shared.lock().config.limits.lookups_in_flight as usize;
        let (lookups, audits) = (Arc::new(Semaphore::new(lookups)), Arc::new(Semaphore::new(1)));
        Service { shared, clients, lookups, audits }
    }

    /// Counts a failed call and turns its error into a status.
    fn answer<T>(&self, method: &'static str, result: Result<T>) -> Result<Response<T>, Status> {
        result.map(Response::new).map_err(|error| {
            let status = to_status(&error);
            tracing::debug!(method, %error, "call failed");
            let code = code_name(status.code());
            let errors = &mut self.shared.lock().rpc.errors;
            match errors.iter_mut().find(|e| e.method == method && e.code == code) {
                Some(known) => known.count += 1,
                None => errors.push(RpcErrors { method, code, count: 1 }),
            }
            status
        })
    }
}

#[tonic::async_trait]
impl Forebay for Service {
    type OpenSessionStream = Pin<Box<dyn Stream<Item = Result<SessionEvent, Status>> + Send>>;

    async fn open_session(
        &self,
        request: Request<OpenSessionRequest>,
    ) -> Result<Response<Self::OpenSessionStream>, Status> {
        let place = place(&request);
        self.answer("open_session", session::open(&self.shared, &place, request.into_inner()).await)
    }

    async fn open_namespace(
        &self,
        request: Request<OpenNamespaceRequest>,
    ) -> Result<Response<OpenNamespaceReply>, Status> {
        let uid = place(&request).uid();
        self.answer("open_namespace", session::open_namespace(&self.shared, uid, request.into_inner()))
    }

    type LookupStream = lookup::Replies;

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<Self::LookupStream>, Status> {
        self.answer("lookup", lookup::lookup(&self.shared, &self.lookups, request.into_inner()).await)
    }

    async fn hint(&self, request: Request<HintRequest>) -> Result<Response<Done>, Status> {
        self.answer("hint", hint::hint(&self.shared, request.into_inner()).await)
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<Done>, Status> {
        self.answer("release", lookup::release(&self.shared, request.into_inner()).await)
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Result<Response<ReserveReply>, Status> {
        self.answer("reserve", store::reserve(&self.shared, request.into_inner()).await)
    }

    async fn commit(&self, request: Request<CommitRequest>) -> Result<Response<CommitReply>, Status> {
        self.answer("commit", store::commit(&self.shared, request.into_inner()).await)
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<Done>, Status> {
        self.answer("abort", store::abort(&self.shared, request.into_inner()).await)
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let place = place(&request);
        self.answer("put", copying::put(&self.shared, &place, request.into_inner()).await)
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let place = place(&request);
        let got = copying::get(&self.shared, &place, request.into_inner()).await;
        let mut response = self.answer("get", got)?.map(|(reply, room)| (reply, Arc::new(room)));
        let room = response.get_ref().1.clone();
        response.extensions_mut().insert(room);
        Ok(response.map(|(reply, _)| reply))
    }

    async fn inspect(&self, _: Request<InspectRequest>) -> Result<Response<InspectReply>, Status> {
        self.answer("inspect", report::inspect(&self.shared, &self.clients).await)
    }

    async fn health(&self, _: Request<HealthRequest>) -> Result<Response<HealthReply>, Status> {
        self.answer("health", Ok(health::health(&self.shared)))
    }

    async fn audit(&self, _: Request<AuditRequest>) -> Result<Response<AuditReply>, Status> {
        self.answer("audit", audit::audit(&self.shared, &self.audits).await)
    }

    async fn advise(&self, _: Request<AdviseRequest>) -> Result<Response<AdviseReply>, Status> {
        self.answer("advise", advise::advise(&self.shared).await)
    }

    async fn frame(&self, request: Request<FrameRequest>) -> Result<Response<FrameReply>, Status> {
        self.answer("frame", Ok(frame::frame(&self.shared, request.into_inner()).await))
    }

    type RecordStream = advise::Recordings;

    async fn record(&self, request: Request<RecordRequest>) -> Result<Response<Self::RecordStream>, Status> {
        self.answer("record", advise::record(&self.shared, &place(&request)).await)
    }

    type PingStream = ping::Replies;

    async fn ping(&self, request: Request<PingRequest>) -> Result<Response<Self::PingStream>, Status> {
        self.answer("ping", ping::ping(&request.into_inner()))
    }

    async fn purge(&self, request: Request<PurgeRequest>) -> Result<Response<PurgeReply>, Status> {
        self.answer("purge", purge::purge(&self.shared, request.into_inner()).await)
    }
}

/// The place of the connection on which a call came.
fn place<T>(request: &Request<T>) -> Arc<Place> {
    request.extensions().get::<Arc<Place>>().expect("each connection puts it there").clone()
}

/// Checks packed hashes and returns their length, 1 where there are none.
fn check_hashes(hashes: &[u8], hash_bytes: u32) -> Result<usize> {
    let length = hash_bytes as usize;
    if hashes.is_empty() {
        return Ok(1);
    }
    if length == 0 || length > BlockHash::MAX_LEN || !hashes.len().is_multiple_of(length) {
        return Err(Error::invalid("the length of packed hashes is not a multiple of `hash_bytes`")
            .with("bytes", hashes.len())
            .with("hash_bytes", hash_bytes)
            .hint("send hashes of `hash_bytes` bytes each, 1 to 32, one after another"));
    }
    Ok(length)
}

/// A group's number as the core has it.
fn group_index(group: u32) -> Result<u16> {
    u16::try_from(group).map_err(|_| Error::invalid("a group's number must fit in 16 bits").with("group", group))
}

fn code_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::InvalidArgument => "invalid_argument",
        tonic::Code::NotFound => "not_found",
        tonic::Code::ResourceExhausted => "resource_exhausted",
        tonic::Code::Internal => "internal",
        tonic::Code::DataLoss => "data_loss",
        tonic::Code::DeadlineExceeded => "deadline_exceeded",
        tonic::Code::Unavailable => "unavailable",
        tonic::Code::FailedPrecondition => "failed_precondition",
        _ => "other",
    }
}
