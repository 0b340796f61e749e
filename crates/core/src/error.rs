//! One error type for the whole project: a kind, whether a retry can help, facts as key and value, and a hint.
//!
//! Errors are built where the fact is known, and logged once, where they are handled. `Display` is one line; a command
//! prints the hint below it.

use std::fmt;

/// What went wrong, in the terms a caller can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller's input cannot be right.
    Invalid,
    /// What was asked for is not there.
    NotFound,
    /// A limit is reached; the same call may pass later.
    Full,
    /// A file, device or socket failed.
    Io,
    /// Bytes are not what was written.
    Corrupt,
    /// A deadline passed.
    Timeout,
    /// The other side is not there.
    Unavailable,
    /// This machine or build cannot do it.
    Unsupported,
}

impl ErrorKind {
    /// Whether the same call may succeed later without anybody changing it.
    pub fn is_retryable(self) -> bool {
        matches!(self, ErrorKind::Full | ErrorKind::Io | ErrorKind::Timeout | ErrorKind::Unavailable)
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    facts: Vec<(&'static str, String)>,
    hint: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What a fallible call of this project returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// `message` is lower case and has no full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), facts: Vec::new(), hint: None, source: None }
    }

    /// An error of kind `Invalid`; `message` as for [`Error::new`].
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Invalid, message)
    }

    /// Adds a fact, such as `("path", path.display())`.
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Error {
        self.facts.push((name, value.to_string()));
        self
    }

    /// Says what the reader can do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// Names the error that this one came from; `Display` prints it behind the facts.
    pub fn source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// What a caller can act on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What the reader can do about it, if anything was said.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The error and its hint in one line, where there is no place for a second.
    pub fn told(&self) -> String {
        self.hint.as_ref().map_or_else(|| self.to_string(), |hint| format!("{self}; hint: {hint}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        for (i, (name, value)) in self.facts.iter().enumerate() {
            write!(f, "{}{name}=`{value}`", if i == 0 { " (" } else { ", " })?;
        }
        if !self.facts.is_empty() {
            write!(f, ")")?;
        }
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|s| s as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_reads_as_one_line_and_keeps_its_hint_apart() {
        let error = Error::new(ErrorKind::Io, "cannot read block")
            .with("tier", "ssd")
            .with("offset", 4096)
            .source(std::io::Error::other("bad sector"))
            .hint("replace the disk");
        assert_eq!(error.to_string(), "cannot read block (tier=`ssd`, offset=`4096`): bad sector");
        assert_eq!(error.hint_text(), Some("replace the disk"));
        assert_eq!(error.told(), format!("{error}; hint: replace the disk"));
        assert_eq!(Error::invalid("no").told(), "no");
    }
}
