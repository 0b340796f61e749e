//! `forebay pool remove`: gives the memory of a pool back that no daemon uses any more.
//!
//! A daemon that was killed leaves its pool, for the next one to find. The pool may lie on a tmpfs that the daemon
//! mounted, so that `rm` finds its directory busy.

use std::fs;
use std::io::ErrorKind as Io;
use std::path::Path;

use forebay_core::{Error, ErrorKind};
use forebay_io::pool;
use serde_json::json;

use crate::arguments::PoolRemove;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::settings::Settings;

pub fn remove(arguments: &PoolRemove) -> Result<(), Failure> {
    let directory = match &arguments.directory {
        Some(directory) => directory.clone(),
        None => Settings::of_file(arguments.config.clone()).load()?.config.pool.directory,
    };
    let shown = directory.display();
    // Whoever named a directory does not ask about the configuration.
    let removed = |directory: &Path| match (pool::remove(directory), &arguments.directory) {
        (Err(error), Some(_)) if error.kind() == ErrorKind::Io => {
            Err(error.hint("name the directory of a pool that this user may write to"))
        }
        (removed, _) => removed,
    };
    // Looking makes a directory that is missing.
    if !directory.is_dir() || !removed(&directory)? {
        return Err(Error::new(ErrorKind::NotFound, format!("there is no pool in `{shown}`"))
            .hint("name the pool's directory; `forebay config` shows `pool.directory`")
            .into());
    }
    let has_directory_gone = remove_directory(&directory)?;
    if arguments.json {
        print_json(&json!({"directory": directory, "is_directory_removed": has_directory_gone}));
    } else if has_directory_gone {
        print(&format!("the pool in `{shown}` is removed\n"));
    } else {
        print(&format!("the pool in `{shown}` is removed; the directory stays, since it holds other files\n"));
    }
    Ok(())
}

/// False if there is something else in it.
fn remove_directory(directory: &Path) -> Result<bool, Error> {
    match fs::remove_dir(directory) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), Io::DirectoryNotEmpty | Io::ResourceBusy) => Ok(false),
        Err(error) => Err(Error::new(ErrorKind::Io, "the pool is removed, but its directory is not")
            .with("path", directory.display())
            .source(error)
            .hint("remove the empty directory as a user who may write to the one above it")),
    }
}
