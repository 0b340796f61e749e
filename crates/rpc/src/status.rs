//! Errors on the wire: `forebay_core::Error` to a gRPC status and back.
//!
//! Invariant: the kind, the one-line message and the hint survive the round trip. The hint is binary metadata, since
//! it may contain any character.

use forebay_core::{Error, ErrorKind};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

const HINT: &str = "forebay-hint-bin";

const CODES: [(ErrorKind, Code); 8] = [
    (ErrorKind::Invalid, Code::InvalidArgument),
    (ErrorKind::NotFound, Code::NotFound),
    (ErrorKind::Full, Code::ResourceExhausted),
    (ErrorKind::Io, Code::Internal),
    (ErrorKind::Corrupt, Code::DataLoss),
    (ErrorKind::Timeout, Code::DeadlineExceeded),
    (ErrorKind::Unavailable, Code::Unavailable),
    (ErrorKind::Unsupported, Code::FailedPrecondition),
];

/// The daemon's status for a failed call.
pub fn to_status(error: &Error) -> Status {
    let mut metadata = MetadataMap::new();
    if let Some(hint) = error.hint_text() {
        metadata.insert_bin(HINT, MetadataValue::from_bytes(hint.as_bytes()));
    }
    let code = CODES.iter().find(|(kind, _)| *kind == error.kind()).map_or(Code::Unknown, |(_, code)| *code);
    Status::with_metadata(code, error.to_string(), metadata)
}

/// The client's error for a failed call.
pub fn from_status(status: Status) -> Error {
    if is_transport(&status) {
        return Error::new(ErrorKind::Unavailable, "the connection to the daemon failed")
            .source(root_cause(&status))
            .hint("check the daemon and its log: it may have ended, or not name this user in `socket.allow_uids`");
    }
    let kind = match status.code() {
        Code::Cancelled => ErrorKind::Unavailable,
        Code::Unimplemented | Code::OutOfRange => ErrorKind::Unsupported,
        code => CODES.iter().find(|(_, other)| *other == code).map_or(ErrorKind::Io, |(kind, _)| *kind),
    };
    let error = Error::new(kind, status.message());
    let hint = status.metadata().get_bin(HINT).and_then(|value| value.to_bytes().ok());
    match hint {
        Some(hint) => error.hint(String::from_utf8_lossy(&hint)),
        None => error,
    }
}

/// The words of the first error of a chain. Those around it name the layers that it came through, and print it as Rust
/// code does.
pub(crate) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error.source();
    while let Some(deeper) = cause.and_then(std::error::Error::source) {
        cause = Some(deeper);
    }
    cause.map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether the call failed in transport rather than by the daemon's decision.
pub fn is_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_message_and_hint_survive_the_wire() {
        for (kind, _) in CODES {
            let error = Error::new(kind, "cannot do it").with("group", 3).hint("set `pool.bytes` ≥ 1 GiB");
            let back = from_status(to_status(&error));
            assert_eq!(back.kind(), kind);
            assert_eq!(back.to_string(), "cannot do it (group=`3`)");
            assert_eq!(back.hint_text(), Some("set `pool.bytes` ≥ 1 GiB"));
        }
    }

    #[test]
    fn an_error_without_a_hint_comes_back_without_one() {
        assert_eq!(from_status(to_status(&Error::invalid("no"))).hint_text(), None);
    }
}
