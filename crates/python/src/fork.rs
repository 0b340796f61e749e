//! What a child that was forked does with the objects that it inherits: nothing.
//!
//! The child has the memory of its parent's threads, but not the threads. A lock that one of them held stays locked for
//! good, joining one is an error, and the descriptors are the parent's connections. So the child neither uses nor drops
//! such a value: its end would wait, fail, or reach the parent.

use std::ops::Deref;

use forebay_core::{Error, ErrorKind, Result};

/// A value of the process that made it.
pub struct Own<T> {
    /// `None` only while it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T> Own<T> {
    pub fn new(value: T) -> Own<T> {
        Own { value: Some(value), process: std::process::id() }
    }

    pub fn is_inherited(&self) -> bool {
        std::process::id() != self.process
    }

    /// The value, for what waits or reaches others. Errors with `Unavailable` in a child that was forked.
    pub fn here(&self) -> Result<&T> {
        match self.is_inherited() {
            true => Err(Error::new(ErrorKind::Unavailable, "this object belongs to the process that forked this one")
                .hint("make another one in this process")),
            false => Ok(self),
        }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is taken only when it is dropped")
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.value.take());
        }
    }
}
