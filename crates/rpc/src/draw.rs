//! Numbers that nobody else draws.

/// 16 random bytes, never all zero: what tells a start of an engine, or a session, from all others. The kernel
/// draws them, so that a forked process does not repeat its parent's.
pub fn draw() -> [u8; 16] {
    let mut bytes = [0; 16];
    while bytes == [0; 16] {
        // Only an interrupted wait for the first randomness after boot is an error, and it is tried again.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    }
    bytes
}
