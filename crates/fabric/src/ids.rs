//! Numbers of what an endpoint has. None is given twice in one process, so no endpoint knows another's.

macro_rules! id {
    ($(#[$about:meta] $name:ident),*) => {$(
        #[$about]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);
    )*};
}

id!(
    /// A registered range of memory.
    RegionId,
    /// A peer's region, imported from its descriptor.
    RemoteId,
    /// A session with another endpoint; a new connection to the same endpoint is another peer.
    PeerId,
    /// An operation.
    OpId
);
