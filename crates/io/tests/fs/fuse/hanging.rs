//! Directories that hang and come back: a mount whose server is silent, one whose server is frozen, and FIFOs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, mknodat};

use super::Mount;

/// Something to keep a directory on, that hangs and comes back.
pub trait Hanging {
    fn name(&self) -> &'static str;
    fn path(&self) -> &Path;
    fn hang(&mut self);
    fn answer(&mut self);
    /// Whether lookups hang too, and not loads alone.
    fn hangs_whole(&self) -> bool {
        true
    }
}

/// A mount that hangs until this is dropped, and no longer if the test fails.
pub struct Hung<'a>(&'a mut dyn Hanging);

impl Hung<'_> {
    pub fn new(mount: &mut dyn Hanging) -> Hung<'_> {
        mount.hang();
        Hung(mount)
    }
}

impl Drop for Hung<'_> {
    fn drop(&mut self) {
        self.0.answer();
    }
}

/// Its server reads requests and answers none.
struct Silent(Mount);

impl Hanging for Silent {
    fn name(&self) -> &'static str {
        "a silent server"
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn hang(&mut self) {
        self.0.harm("all", "hang");
    }
    fn answer(&mut self) {
        self.0.calm();
    }
}

/// Its server stands still.
struct Frozen(Mount);

impl Hanging for Frozen {
    fn name(&self) -> &'static str {
        "a frozen server"
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn hang(&mut self) {
        self.0.freeze();
    }
    fn answer(&mut self) {
        self.0.thaw();
    }
}

/// FIFOs where its objects were.
struct Pipes {
    home: tempfile::TempDir,
    /// Where the objects are meanwhile.
    kept: tempfile::TempDir,
    hanging: Vec<PathBuf>,
}

impl Hanging for Pipes {
    fn name(&self) -> &'static str {
        "FIFOs"
    }
    fn path(&self) -> &Path {
        self.home.path()
    }
    fn hang(&mut self) {
        self.hanging = objects(self.home.path());
        for path in &self.hanging {
            fs::rename(path, self.kept.path().join(path.file_name().unwrap())).unwrap();
            fifo(path);
        }
    }
    fn answer(&mut self) {
        for path in self.hanging.drain(..) {
            answer(&path);
            fs::rename(self.kept.path().join(path.file_name().unwrap()), &path).unwrap();
        }
    }
    fn hangs_whole(&self) -> bool {
        false
    }
}

/// A mount, or none where this machine has no FUSE, which is said past the harness' capture of output.
pub fn mount() -> Option<Mount> {
    Mount::start(home())
        .inspect_err(|why| {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            let _ = writeln!(std::io::stderr(), "{test}: no FUSE on this machine ({why}); shown without it");
        })
        .ok()
}

pub fn each_kind(claim: impl Fn(&mut dyn Hanging)) {
    let fuse = [mount().map(|mount| Box::new(Silent(mount)) as Box<dyn Hanging>)];
    let frozen = fuse[0].is_some().then(mount).flatten().map(|mount| Box::new(Frozen(mount)) as Box<dyn Hanging>);
    let pipes: Box<dyn Hanging> = Box::new(Pipes { home: home(), kept: home(), hanging: Vec::new() });
    for mut kind in fuse.into_iter().flatten().chain(frozen).chain([pipes]) {
        println!("on {}", kind.name());
        claim(&mut *kind);
    }
}

/// Whoever opens it hangs.
pub fn fifo(path: &Path) {
    mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

/// Lets all who hang at the FIFO go on, and ends the hanging.
pub fn answer(path: &Path) {
    // Fails while nobody hangs there.
    let writer = rustix::fs::open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    fs::remove_file(path).unwrap();
    drop(writer);
}

fn objects(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        for entry in entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')) {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found
}

/// A directory on a real disk.
fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}
