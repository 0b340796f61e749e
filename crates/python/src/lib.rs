//! `forebay._native`: the client, the scheduler side and the worker side for Python.
//!
//! In path order: [`client`] and [`session`] wrap `forebay_rpc::client`. [`worker`] copies between tensors and the
//! mapped pool. [`store`] accesses shared stores. [`transfer`] moves bytes between processes. [`mask`] renames the
//! blocks of an adapter. [`convert`] converts between Python's values and Rust's, [`error`] the errors. [`fork`] keeps
//! a forked child off what is its parent's.
//!
//! Invariants: the GIL is released before any wait. A panic becomes a Python exception or, on a background thread, a
//! closed object. `unsafe` is in [`buffers`] alone. Nothing here survives a fork: make these objects in the process
//! that uses them. A child that inherits them can end, and drop or close them, at once.
//! `python/forebay/_native.pyi` documents the promise of each call.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod buffers;
mod client;
mod convert;
mod error;
mod fork;
mod lend;
mod mask;
mod session;
mod store;
mod transfer;
mod worker;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _native {
    use super::*;

    #[pymodule_export]
    use super::buffers::TransferMemory;
    #[pymodule_export]
    use super::client::Client;
    #[pymodule_export]
    use super::error::ForebayError;
    #[pymodule_export]
    use super::session::{EngineSession, Ticket};
    #[pymodule_export]
    use super::store::StoreEngine;
    #[pymodule_export]
    use super::transfer::TransferEngine;
    #[pymodule_export]
    use super::worker::WorkerEngine;

    /// The directory of the daemon's sockets, by the one rule for all clients. Looks at the file system.
    #[pyfunction]
    #[pyo3(signature = (named = None))]
    fn find_sockets(named: Option<&str>) -> String {
        forebay_rpc::client::find_sockets(named).to_string_lossy().into_owned()
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // Python's own code raises it too.
        let error = module.getattr("ForebayError")?;
        error.setattr("kind", "invalid")?;
        error.setattr("hint", module.py().None())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
