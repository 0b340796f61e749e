//! The copy itself: gather fragments into a slice of a slot with its checksum, scatter a slice back.
//!
//! Invariants: all `unsafe` of copies between host memory is in this module and its children. Callers of `gather` and
//! `scatter` pass `Span`s, which cannot reach outside their [`Memory`]. When either returns, its bytes are visible to
//! every thread and process that then learns of it: streaming stores are weakly ordered, so both end with a store
//! fence.
//!
//! Stores stream past the cache wherever the machine can. A KV block is much larger than what is worth caching, and
//! its reader is another core or a device. Streaming saves the read-for-ownership of the destination. With AVX the
//! checksum is folded in the registers that carry the bytes. Elsewhere each piece goes through a buffer in the
//! first-level cache, where it is summed up. Stores are always summed, loads if their job asks for it.

use std::fmt;

use forebay_core::checksum::Checksum;

mod memory;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use memory::Memory;
pub(crate) use memory::Span;

/// The widest instructions a copy may use. A value exists only if this machine has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Level(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with carry-less multiplications of whole registers.
    #[cfg(target_arch = "x86_64")]
    Vpclmul,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Level {
    /// The fastest level of this machine.
    pub fn best() -> Level {
        Level::available()[0]
    }

    /// All levels of this machine, fastest first; the last one is the portable one.
    pub fn available() -> Vec<Level> {
        #[cfg(target_arch = "x86_64")]
        let (has_avx2, has_vpclmul) = (is_x86_feature_detected!("avx2"), is_x86_feature_detected!("vpclmulqdq"));
        let kinds = [
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, is_x86_feature_detected!("avx512f") && has_vpclmul),
            #[cfg(target_arch = "x86_64")]
            (Kind::Vpclmul, has_avx2 && has_vpclmul),
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, has_avx2 && is_x86_feature_detected!("pclmulqdq")),
            (Kind::Portable, true),
        ];
        kinds.into_iter().filter_map(|(kind, is_here)| is_here.then_some(Level(kind))).collect()
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Vpclmul => "vpclmul",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            Kind::Portable => "portable",
        })
    }
}

/// Copies the spans of `from` consecutively to `to`, and returns the checksum of the copied bytes.
pub(crate) fn gather<'a>(level: Level, to: Span<'a>, from: impl Iterator<Item = Span<'a>>) -> u64 {
    let (mut sum, mut rest) = (Checksum::new(), to);
    copy_summed(level, &mut sum, from.map(|from| (rest.take(from.len()), from)));
    assert!(rest.is_empty(), "a slice is {} bytes longer than its fragments", rest.len());
    fence();
    sum.finish()
}

/// Copies `from` to the spans of `to` consecutively.
pub(crate) fn scatter<'a>(level: Level, to: impl Iterator<Item = Span<'a>>, from: Span<'a>) {
    let mut rest = from;
    for to in to {
        let from = rest.take(to.len());
        stream(level, to, from);
    }
    assert!(rest.is_empty(), "a slice is {} bytes longer than its fragments", rest.len());
    fence();
}

/// Like `scatter`, and adds the copied bytes to `sum`: exactly those that arrived, even if `from` changes at the same
/// time.
pub(crate) fn scatter_summed<'a>(level: Level, sum: &mut Checksum, to: impl Iterator<Item = Span<'a>>, from: Span<'a>) {
    let mut rest = from;
    copy_summed(level, sum, to.map(|to| (to, rest.take(to.len()))));
    assert!(rest.is_empty(), "a slice is {} bytes longer than its fragments", rest.len());
    fence();
}

/// Adds the content of `span` to `sum`. If others write it at the same time, the sum is that of a mix.
pub(crate) fn sum_up(level: Level, sum: &mut Checksum, span: Span<'_>) {
    let mut rest = span;
    #[cfg(target_arch = "x86_64")]
    if level.0 != Kind::Portable {
        let body = rest.take(rest.len() / x86::STRIDE_BYTES * x86::STRIDE_BYTES);
        sum_body(level, sum, body);
    }
    if !rest.is_empty() {
        let mut buffer = [0; BOUNCE_BYTES];
        while !rest.is_empty() {
            sum.update(rest.take(rest.len().min(BOUNCE_BYTES)).read(&mut buffer));
        }
    }
    fence();
}

/// Copies each pair's second span to its first, and adds the bytes to `sum` in their order.
fn copy_summed<'a>(level: Level, sum: &mut Checksum, pairs: impl Iterator<Item = (Span<'a>, Span<'a>)>) {
    match level.0 {
        Kind::Portable => copy_in_pieces(level, sum, pairs),
        #[cfg(target_arch = "x86_64")]
        _ => copy_folding(level, sum, pairs),
    }
}

/// Adds whole strides to `sum`.
#[cfg(target_arch = "x86_64")]
fn sum_body(level: Level, sum: &mut Checksum, body: Span<'_>) {
    if body.is_empty() {
        return;
    }
    let (from, len, lanes) = (body.as_ptr(), body.len(), sum.lanes());
    // SAFETY: the level guarantees that the machine has the instructions; the span lies in its memory, and the caller
    // cut it to whole strides.
    unsafe {
        match level.0 {
            Kind::Avx512 => x86::sum_512(from, len, lanes),
            Kind::Vpclmul => x86::sum_256(from, len, lanes),
            Kind::Avx2 => x86::sum_2_by_128(from, len, lanes),
            Kind::Portable => unreachable!("it has no strides"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn copy_folding<'a>(level: Level, sum: &mut Checksum, pairs: impl Iterator<Item = (Span<'a>, Span<'a>)>) {
    let mut pairs = pairs.peekable();
    while let Some((mut to, mut from)) = pairs.next() {
        let next = pairs.peek().map_or(from.end(), |(_, from)| *from);
        let (head, body) = stream_parts(to);
        copy_edge(sum, to.take(head), from.take(head));
        copy_body(level, sum, to.take(body), from.take(body), next);
        copy_edge(sum, to, from);
    }
}

/// Copies and sums fewer bytes than the kernel takes, or bytes before the destination's first cache line.
#[cfg(target_arch = "x86_64")]
fn copy_edge(sum: &mut Checksum, to: Span<'_>, from: Span<'_>) {
    if !from.is_empty() {
        let mut buffer = [0; x86::STRIDE_BYTES];
        let bytes = from.read(&mut buffer);
        sum.update(bytes);
        to.write(bytes);
    }
}

/// Copies and sums whole strides to whole cache lines; `next` is the likely source of the next copy.
#[cfg(target_arch = "x86_64")]
fn copy_body(level: Level, sum: &mut Checksum, to: Span<'_>, from: Span<'_>, next: Span<'_>) {
    assert_eq!(to.len(), from.len(), "both spans of a copy are of one length");
    if from.is_empty() {
        return;
    }
    let (to, from, len, next, lanes) = (to.as_mut_ptr(), from.as_ptr(), from.len(), next.as_ptr(), sum.lanes());
    // SAFETY: the level guarantees that the machine has the instructions; both spans lie in their memory and are
    // equally long; the caller cut them to whole strides with `to` on a cache line.
    unsafe {
        match level.0 {
            Kind::Avx512 => x86::copy_512(to, from, len, next, lanes),
            Kind::Vpclmul => x86::copy_256(to, from, len, next, lanes),
            Kind::Avx2 => x86::copy_2_by_128(to, from, len, next, lanes),
            Kind::Portable => unreachable!("it has no strides"),
        }
    }
}

/// A third of the first-level cache, so that a piece is still there when it is summed and copied.
const BOUNCE_BYTES: usize = 16 << 10;

/// Copies through a buffer: the summed bytes are those that arrive, even if somebody writes the source at the same
/// time.
fn copy_in_pieces<'a>(level: Level, sum: &mut Checksum, pairs: impl Iterator<Item = (Span<'a>, Span<'a>)>) {
    let mut buffer = [0; BOUNCE_BYTES];
    for (mut to, mut from) in pairs {
        while !from.is_empty() {
            let piece = from.take(from.len().min(BOUNCE_BYTES)).read(&mut buffer);
            sum.update(piece);
            stream(level, to.take(piece.len()), Span::over(piece));
        }
    }
}

/// Copies `from` to `to`, past the cache where `level` can.
fn stream(level: Level, to: Span<'_>, from: Span<'_>) {
    match level.0 {
        Kind::Portable => to.copy_from(from),
        #[cfg(target_arch = "x86_64")]
        kind => {
            let (mut to, mut from) = (to, from);
            let (head, body) = stream_parts(to);
            to.take(head).copy_from(from.take(head));
            let (to_body, from_body) = (to.take(body), from.take(body));
            assert_eq!(to_body.len(), from_body.len());
            // SAFETY: a `Level` of this kind exists only where the machine has its instructions; both spans lie
            // in their memory and are `body` bytes long, a multiple of 256 that begins on a cache line of `to`.
            unsafe {
                match kind {
                    Kind::Avx512 => x86::stream_avx512(to_body.as_mut_ptr(), from_body.as_ptr(), body),
                    _ => x86::stream_avx2(to_body.as_mut_ptr(), from_body.as_ptr(), body),
                }
            }
            to.copy_from(from);
        }
    }
}

/// Bytes of `to` before its first cache line, and bytes after that in whole strides of the streaming kernels.
#[cfg(target_arch = "x86_64")]
fn stream_parts(to: Span<'_>) -> (usize, usize) {
    let head = to.as_mut_ptr().align_offset(x86::LINE_BYTES).min(to.len());
    (head, (to.len() - head) / x86::STRIDE_BYTES * x86::STRIDE_BYTES)
}

/// Orders the streaming stores before this thread's next publication. Also orders the copied reads before the next
/// read of the slot's generation, by this thread or one that learns of the copy.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86::store_fence();
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
}

#[cfg(test)]
mod tests {
    use forebay_core::checksum::checksum;

    use super::*;

    const LEN: u64 = 4096;

    /// A source with distinct bytes, and a zeroed destination.
    fn memories() -> (Memory, Memory) {
        let from = Memory::anonymous(LEN as usize).unwrap();
        from.write(0, &(0..LEN as u32).map(|i| (i * i / 7 + 1) as u8).collect::<Vec<_>>());
        (from, Memory::anonymous(LEN as usize).unwrap())
    }

    /// Every offset of both ends within a cache line, and lengths around the strides of the kernels.
    fn cases() -> impl Iterator<Item = (u64, u64, u64)> {
        let lengths = [0, 1, 7, 8, 63, 64, 255, 256, 257, 300, 512, 575, 1000, 1024];
        let ends = (0..64).map(|to| (to, to * 37 % 64));
        ends.flat_map(move |(to, from)| lengths.map(|len| (to, from, len)))
    }

    #[test]
    fn every_level_gathers_the_bytes_and_their_checksum_at_any_alignment_and_length() {
        for level in Level::available() {
            let (from, to) = memories();
            for (to_at, from_at, len) in cases() {
                // Two fragments, so that a fold may continue across a border.
                let fragments = [from.span(from_at, len), from.span(2048 + to_at, len)];
                let expected = fragments.map(|fragment| fragment.bytes().to_vec()).concat();
                let sum = gather(level, to.span(to_at, 2 * len), fragments.into_iter());
                let case = format!("level {level}, to {to_at}, from {from_at}, length {len}");
                assert!(to.span(to_at, 2 * len).bytes() == expected, "bytes differ: {case}");
                assert_eq!(sum, checksum(&expected), "{case}");
                assert!(to.span(0, to_at).bytes().iter().all(|byte| *byte == 0), "wrote before its start: {case}");
                let end = to_at + 2 * len;
                assert!(to.span(end, LEN - end).bytes().iter().all(|byte| *byte == 0), "wrote past its end: {case}");
                to.write(0, &[0; LEN as usize]);
            }
        }
    }

    #[test]
    fn every_level_scatters_the_bytes_at_any_alignment_and_length() {
        for level in Level::available() {
            let (from, to) = memories();
            for (to_at, from_at, len) in cases() {
                let fragments = [to.span(to_at, len), to.span(2048 + from_at, len)];
                let slice = from.span(from_at, 2 * len);
                let mut expected = vec![0; LEN as usize];
                let (first, second) = slice.bytes().split_at(len as usize);
                expected[to_at as usize..][..first.len()].copy_from_slice(first);
                expected[2048 + from_at as usize..][..second.len()].copy_from_slice(second);
                let case = format!("level {level}, to {to_at}, from {from_at}, length {len}");
                scatter(level, fragments.into_iter(), slice);
                assert!(to.span(0, LEN).bytes() == expected, "bytes differ: {case}");
                to.write(0, &[0; LEN as usize]);
                let mut sum = Checksum::new();
                sum_up(level, &mut sum, from.span(to_at, len));
                scatter_summed(level, &mut sum, fragments.into_iter(), slice);
                sum_up(level, &mut sum, from.span(len, from_at));
                assert!(to.span(0, LEN).bytes() == expected, "bytes differ, summed: {case}");
                let summed = [from.span(to_at, len), slice, from.span(len, from_at)];
                let summed = summed.map(|span| span.bytes().to_vec()).concat();
                assert_eq!(sum.finish(), checksum(&summed), "{case}");
                to.write(0, &[0; LEN as usize]);
            }
        }
    }

    #[test]
    fn the_last_level_is_the_portable_one() {
        assert_eq!(Level::available().last().map(Level::to_string).as_deref(), Some("portable"));
    }
}
