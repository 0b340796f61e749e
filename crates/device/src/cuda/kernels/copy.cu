// Copies pieces between the device and pinned memory of the host, in words of 16 bytes. `tools/ptx.py` makes `copy.ptx`
// of it; a change here is none before that has run.
//
// Whoever launches it answers for this: addresses are multiples of 16, and pieces overlap nothing. The table lies in
// pinned memory of the host, so each thread asks for its next piece before it copies the present one.
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) Piece {
    u64 to, from;
    u64 words, unused;
};

// Neither side is read twice, so nothing of it is kept in a cache that the model uses.
__device__ __forceinline__ uint4 load(u64 address) {
    uint4 word;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(address)
                 : "memory");
    return word;
}

__device__ __forceinline__ void store(u64 address, uint4 word) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(512) forebay_copy(const Piece* pieces, u64 count) {
    u64 at = blockIdx.x;
    if (at >= count) return;
    Piece next = pieces[at];
    for (;;) {
        const Piece piece = next;
        at += gridDim.x;
        const bool is_last = at >= count;
        if (!is_last) next = pieces[at];
        const u32 words = piece.words, step = blockDim.x;
        u32 word = threadIdx.x;
        // Four words in flight for each thread: the way to the host takes more than a microsecond.
        for (; word + 3 * step < words; word += 4 * step) {
            const u64 from = piece.from + 16ull * word, to = piece.to + 16ull * word, apart = 16ull * step;
            const uint4 first = load(from), second = load(from + apart);
            const uint4 third = load(from + 2 * apart), fourth = load(from + 3 * apart);
            store(to, first);
            store(to + apart, second);
            store(to + 2 * apart, third);
            store(to + 3 * apart, fourth);
        }
        for (; word < words; word += step) store(piece.to + 16ull * word, load(piece.from + 16ull * word));
        if (is_last) return;
    }
}
