//! A filesystem of a few MiB, which can be filled.

use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// In memory. It is unmounted when this is dropped.
pub struct Volume(tempfile::TempDir);

impl Volume {
    /// None where this process may mount nothing.
    pub fn of_bytes(home: tempfile::TempDir, bytes: u64) -> Option<Volume> {
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        match mount("forebay-test", home.path(), "tmpfs", MountFlags::empty(), Some(options.as_c_str())) {
            Ok(()) => Some(Volume(home)),
            Err(error) => {
                eprintln!("not shown: no filesystem can be mounted here: {error}");
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}
