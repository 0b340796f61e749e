//! The fence between a payload and the record that vouches for it.

#![allow(unsafe_code)]

/// Orders all stores of this thread before its later ones, streaming stores included. On x86 streaming stores ignore
/// the normal store order, and an ordinary release fence does not order them.
pub(super) fn fence_streaming_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE, and the instruction touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
