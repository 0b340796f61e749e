//! The daemon's configuration file: which one counts, and its TOML. The daemon reads it, and clients that look for the
//! daemon's sockets.
//!
//! Holds true: nobody waits for a file. Anything but a regular file is refused before it is opened, because a pipe may
//! never have a writer and a device may never end.

use std::path::{Path, PathBuf};
use std::{fs, io};

use forebay_core::{Error, ErrorKind, Result};
use toml::Table;

/// The variable that names the file. If it is set and empty, no file is read.
pub const CONFIG_VARIABLE: &str = "FOREBAY_CONFIG";
/// Read if it is there, and nobody names another.
pub const USUAL_CONFIG: &str = "/etc/forebay.toml";

/// The file that counts if no flag names one. `variable`: the value of [`CONFIG_VARIABLE`]. A `usual` file that is
/// there and cannot be read counts too, such as a link to nothing: somebody meant to configure the daemon.
pub fn config_file(variable: Option<&Path>, usual: Option<&Path>) -> Option<PathBuf> {
    let is_absent = |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let counts = match variable {
        Some(path) => Some(path).filter(|path| !path.as_os_str().is_empty()),
        None => usual.filter(|path| !is_absent(path)),
    };
    counts.map(Path::to_owned)
}

/// The file's keys. Errors are `Io` if it cannot be read, and `Invalid` if it is not TOML.
pub fn read_config(path: &Path) -> Result<Table> {
    let text = read(path).map_err(|error| {
        Error::new(ErrorKind::Io, "cannot read the configuration")
            .with("file", path.display())
            .source(error)
            .hint("name another file with `--config` or `FOREBAY_CONFIG`")
    })?;
    text.parse().map_err(|error: toml::de::Error| {
        Error::invalid("the configuration is not valid TOML")
            .with("file", path.display())
            .source(format!("line {}: {}", line_of(&text, &error), error.message()))
            .hint("docs/config.md has an example; `forebay serve --help` has all keys")
    })
}

fn read(path: &Path) -> io::Result<String> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    fs::read_to_string(path)
}

/// The line of an error. The line itself is not shown: it may hold a password.
fn line_of(text: &str, error: &toml::de::Error) -> usize {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    1 + text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count()
}
