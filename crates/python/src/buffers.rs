//! Memory that Rust cannot check: the engine's tensors, known by their addresses, the mapped pool, Python's buffers,
//! and memory of ours that Python sees as a buffer.
//!
//! This is the only `unsafe` of the crate.

use std::sync::{Arc, Mutex, PoisonError};

use forebay_core::Error;
use forebay_device::Memory;
use forebay_io::pool::Mapping;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{Py_buffer, PyBuffer_FillInfo, PyBytes_AsString, PyBytes_FromStringAndSize};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::Raised;

/// The `bytes` bytes at `address`. Python guarantees that they are a tensor's.
pub fn tensor(address: usize, bytes: usize) -> forebay_core::Result<Memory> {
    let base = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the caller of `WorkerEngine` guarantees, as the stub says, that the tensors are host memory of these
    // sizes that outlives the engine. The connector's contract with vLLM keeps others from touching a block while it
    // is copied: blocks of a job are neither freed nor written before the job is reported.
    unsafe { Memory::new(base, bytes, ()) }
}

/// The pool's slots. The mapping lives as long as the engine uses them.
pub fn pool(mapping: Arc<Mapping>) -> forebay_core::Result<Memory> {
    let (base, bytes) = (mapping.data_ptr(), mapping.len());
    // SAFETY: `mapping` owns the range and is kept as its owner. Leases and reservations decide who may touch a slot
    // when; the guard rejects a job whose slot changed hands.
    unsafe { Memory::new(base, bytes, mapping) }
}

/// The `bytes` bytes at `address`, which peers may reach.
pub fn reachable(address: usize, bytes: u64, may_write: bool) -> forebay_core::Result<forebay_fabric::Memory> {
    if address.checked_add(bytes as usize).is_none() {
        return Err(Error::invalid("memory behind the end of the address space")
            .with("address", address)
            .with("bytes", bytes)
            .hint("give the address of the first byte, and the number of bytes from there"));
    }
    let base = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the caller of `Endpoint.register_address` guarantees, as the stub says, that these bytes are there until
    // the memory is deregistered, and expects them to change.
    Ok(unsafe { forebay_fabric::Memory::borrowed(base, bytes, may_write, Box::new(())) })
}

/// Memory that peers on this host can map, and that Python sees as a buffer.
#[pyclass(frozen, module = "forebay._native")]
pub struct TransferMemory(pub Arc<forebay_fabric::Memory>);

#[pymethods]
impl TransferMemory {
    #[new]
    fn new(nbytes: u64) -> Result<TransferMemory, Raised> {
        Ok(TransferMemory(Arc::new(forebay_fabric::Memory::allocate(nbytes)?)))
    }

    /// # Safety
    ///
    /// Python calls it, with a view of its own.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut Py_buffer, flags: std::ffi::c_int) -> PyResult<()> {
        let memory = slf.get().0.clone();
        let (base, bytes) = (memory.at(0, memory.len()).cast(), memory.len() as isize);
        // SAFETY: the view is Python's, and counts as a reference to `slf`, which keeps the pages in place.
        let filled = unsafe { PyBuffer_FillInfo(view, slf.as_ptr(), base, bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// A buffer of Python's that stays in place until this is dropped.
pub struct Pinned(PyBuffer<u8>);

impl Pinned {
    /// Of anything with the buffer protocol, whatever its elements are, and of torch's tensors in host memory. Errors
    /// if the object has no contiguous bytes.
    pub fn to_read(object: &Bound<'_, PyAny>) -> PyResult<Pinned> {
        let py = object.py();
        let elements = match torch(py)? {
            Some(torch) if object.is_instance(&torch.getattr("Tensor")?)? => bytes_of_tensor(&torch, object)?,
            _ => object.clone(),
        };
        let view = py.import("builtins")?.getattr("memoryview")?.call1((elements,))?;
        if !view.getattr("c_contiguous")?.extract::<bool>()? {
            return Err(scattered());
        }
        if has_objects(&view.getattr("format")?.extract::<String>()?) {
            return Err(PyBufferError::new_err("an array of Python's objects has addresses, not bytes to copy"));
        }
        Ok(Pinned(PyBuffer::get(&view.call_method1("cast", ("B",))?)?))
    }

    /// Also errors if its bytes cannot be changed.
    pub fn to_write(object: &Bound<'_, PyAny>) -> PyResult<Pinned> {
        let pinned = Pinned::to_read(object)?;
        if pinned.0.readonly() {
            return Err(PyBufferError::new_err("a block cannot be loaded into a read-only buffer"));
        }
        Ok(pinned)
    }

    pub fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// The bytes as memory that peers may reach, while the export lasts.
    pub fn into_memory(self) -> forebay_fabric::Memory {
        let (base, bytes, may_write) = (self.0.buf_ptr().cast(), self.len() as u64, !self.0.readonly());
        // SAFETY: the export keeps address and length while `self` lives, and says whether they may be written. As the
        // stub says, the caller of `Endpoint.register` expects the bytes to change.
        unsafe { forebay_fabric::Memory::borrowed(base, bytes, may_write, Box::new(self)) }
    }

    /// Calls `read` without the GIL, which must not be held while megabytes are copied.
    pub fn read<T>(&self, read: impl FnOnce(&[u8]) -> T) -> T {
        // SAFETY: the export keeps address and length while `self` lives. As the stub says, the caller of
        // `Store.dump` guarantees that nobody changes the bytes until the batch is over.
        read(unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.len()) })
    }

    pub fn write<T>(&self, write: impl FnOnce(&mut [u8]) -> T) -> T {
        // SAFETY: as above, for `Store.load`; the export is writable.
        write(unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.len()) })
    }
}

/// New `bytes`, which nobody else has before they are filled. Their pages are not there either: filling makes them,
/// without the GIL.
pub struct NewBytes {
    object: Py<PyBytes>,
    address: usize,
    len: usize,
    is_filled: Mutex<bool>,
}

impl NewBytes {
    pub fn new(py: Python<'_>, len: usize) -> PyResult<NewBytes> {
        assert!(len > 0, "all empty `bytes` are one object");
        // SAFETY: without bytes to copy, Python makes a new object and leaves its bytes to the caller. It is checked
        // for an error.
        let object =
            unsafe { Bound::from_owned_ptr_or_err(py, PyBytes_FromStringAndSize(std::ptr::null(), len as isize))? };
        let object = object.cast_into::<PyBytes>()?;
        // SAFETY: it is `bytes`.
        let address = unsafe { PyBytes_AsString(object.as_ptr()) }.expose_provenance();
        Ok(NewBytes { object: object.unbind(), address, len, is_filled: Mutex::new(false) })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Calls `write` with all of the bytes, without the GIL.
    pub fn fill(&self, write: impl FnOnce(&mut [u8])) {
        let mut is_filled = self.is_filled.lock().unwrap_or_else(PoisonError::into_inner);
        let base = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: `object` keeps the bytes in place, and no other code has it before `filled` takes it from here. The
        // lock is held, so no other slice of them exists. C allocated them, so each has some value.
        write(unsafe { std::slice::from_raw_parts_mut(base, self.len) });
        *is_filled = true;
    }

    /// The object, if it was filled.
    pub fn filled(self, py: Python<'_>) -> Option<Bound<'_, PyBytes>> {
        let is_filled = self.is_filled.into_inner().unwrap_or(false);
        is_filled.then(|| self.object.into_bound(py))
    }
}

fn scattered() -> PyErr {
    PyBufferError::new_err("the bytes of a buffer must lie one after another; copy it: `numpy.ascontiguousarray`")
}

/// Whether a format of the buffer protocol has elements that are objects. The names of fields stand between colons.
fn has_objects(format: &str) -> bool {
    format.split(':').step_by(2).any(|types| types.contains('O'))
}

/// Torch, if the program has imported it: without it there are no tensors.
fn torch(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    py.import("sys")?.getattr("modules")?.cast::<PyDict>()?.get_item("torch")
}

/// The bytes of a tensor as an array: torch has no buffer protocol, and arrays have no bfloat16.
fn bytes_of_tensor<'py>(torch: &Bound<'py, PyAny>, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
    if device != "cpu" {
        let error = Error::invalid("a tensor is not in host memory").with("device", device);
        return Err(Raised::from(error.hint("copy it: `tensor.cpu()`")).into());
    }
    if !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
        return Err(scattered());
    }
    let flat = tensor.call_method0("detach")?.call_method1("reshape", (-1,))?;
    flat.call_method1("view", (torch.getattr("uint8")?,))?.call_method0("numpy")
}
