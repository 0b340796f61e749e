//! `ForebayError`: a Rust error in Python, with `kind` and `hint`.

use forebay_core::{Error, ErrorKind};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

pyo3::create_exception!(
    forebay,
    ForebayError,
    PyException,
    "An error with a kind, facts and often a hint. `str()` is one line and ends with the hint."
);

/// An error that becomes a Python exception, so that `?` works on Rust's results.
pub struct Raised(Error);

impl From<Error> for Raised {
    fn from(error: Error) -> Raised {
        Raised(error)
    }
}

impl From<Raised> for PyErr {
    fn from(Raised(error): Raised) -> PyErr {
        Python::attach(|py| {
            let raised = ForebayError::new_err(error.told());
            let value = raised.value(py);
            let attributes =
                value.setattr("kind", kind_name(error.kind())).and_then(|()| value.setattr("hint", error.hint_text()));
            attributes.err().unwrap_or(raised)
        })
    }
}

/// The kind with this name.
pub fn kind_named(name: &str) -> Option<ErrorKind> {
    use ErrorKind::{Corrupt, Full, Invalid, Io, NotFound, Timeout, Unavailable, Unsupported};
    let all = [Invalid, NotFound, Full, Io, Corrupt, Timeout, Unavailable, Unsupported];
    all.into_iter().find(|kind| kind_name(*kind) == name)
}

pub fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Full => "full",
        ErrorKind::Io => "io",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Unsupported => "unsupported",
    }
}
