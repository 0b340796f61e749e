//! Random numbers that identify one start of an engine or one session.

/// 16 random bytes, never all zero, which distinguish a start of an engine, or a session, from all others. They come
/// from the kernel, so that a forked process does not repeat its parent's.
pub fn random_id() -> [u8; 16] {
    let mut bytes = [0; 16];
    while bytes == [0; 16] {
        // The only possible error is an interrupted wait for the first entropy after boot, and it is tried again.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    }
    bytes
}
