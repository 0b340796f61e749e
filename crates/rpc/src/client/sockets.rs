//! Where the daemon's sockets are, for every client that is not told: one rule for commands, programs and engines.
//!
//! Whether the daemon found there may be believed is for [`trust`](super::trust), before anything is said to it.

use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::RPC_SOCKET;

/// The second is the daemon's own name for it: whoever sets it for `forebay serve` means clients too.
const VARIABLES: [&str; 2] = ["FOREBAY_SOCKET", "FOREBAY_SOCKET_DIRECTORY"];
/// Of a daemon that root started.
const HOST: &str = "/run/forebay";

/// `named`, else what a variable names: the directory, or the path of `forebay.sock` in it. Else the first of the usual
/// directories that is there, root's and this user's before others; else the one that this user's daemon would make.
pub fn find_sockets(named: Option<&str>) -> PathBuf {
    named.map(directory_of).or_else(sockets_of_variables).unwrap_or_else(usual_sockets)
}

/// What `FOREBAY_SOCKET` or `FOREBAY_SOCKET_DIRECTORY` names.
pub fn sockets_of_variables() -> Option<PathBuf> {
    let values = VARIABLES.iter().filter_map(|variable| env::var(variable).ok());
    values.filter(|value| !value.is_empty()).map(|value| directory_of(&value)).next()
}

fn usual_sockets() -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    let runtime = env::var("XDG_RUNTIME_DIR").ok().filter(|runtime| !runtime.is_empty());
    let runtime = runtime.unwrap_or_else(|| format!("/run/user/{user}"));
    usual_of(Path::new(HOST), &Path::new(&runtime).join("forebay"), user)
}

fn usual_of(host: &Path, own: &Path, user: u32) -> PathBuf {
    let is_strange = |path: &&Path| path.metadata().is_ok_and(|found| found.uid() != 0 && found.uid() != user);
    let there = [host, own].into_iter().filter(|path| path.is_dir()).min_by_key(is_strange);
    there.unwrap_or(if user == 0 { host } else { own }).to_path_buf()
}

fn directory_of(named: &str) -> PathBuf {
    let path = match (named.strip_prefix("~/"), env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => PathBuf::from(named),
    };
    match path.parent() {
        Some(above) if path.file_name().is_some_and(|name| name == RPC_SOCKET) => above.to_path_buf(),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_directory_that_is_there_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let [host, own] = ["host", "own"].map(|name| folder.path().join(name));
        let user = rustix::process::getuid().as_raw();
        assert_eq!(usual_of(&host, &own, 0), host);
        assert_eq!(usual_of(&host, &own, 1234), own);
        std::fs::create_dir(&own).unwrap();
        assert_eq!(usual_of(&host, &own, user), own);
        std::fs::create_dir(&host).unwrap();
        assert_eq!(usual_of(&host, &own, user), host);
    }

    #[test]
    fn a_socket_stands_for_its_directory() {
        assert_eq!(find_sockets(Some("/run/ours/forebay.sock")).as_os_str(), "/run/ours");
        assert_eq!(find_sockets(Some("/run/ours")), Path::new("/run/ours"));
        assert_eq!(find_sockets(Some("~/run/forebay.sock")), Path::new(&env::var("HOME").unwrap()).join("run"));
    }
}
