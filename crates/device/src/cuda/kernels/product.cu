// The product of two square matrices: work for the multiprocessors and the memory of a device, beside which copies are
// measured. `tools/ptx.py` makes `product.ptx` of it; a change here is none before that has run.
//
// Whoever launches it answers for this: `size` is a multiple of 4, there is a block for each row, and the matrices lie
// at multiples of 16. It is plain: no tensor core, and nothing shared between threads.
typedef unsigned long long u64;

extern "C" __global__ void __launch_bounds__(256)
    forebay_product(const float* left, const float* right, float* out, u64 size) {
    const u64 row = blockIdx.x * size;
    for (u64 column = threadIdx.x; column < size; column += blockDim.x) {
        const float4* along = (const float4*)(left + row);
        const float* down = right + column;
        float sum = 0;
        u64 at = 0;
#pragma unroll 1
        do {
            const float4 four = *along++;
            sum = __fmaf_rn(four.x, down[0], sum);
            sum = __fmaf_rn(four.y, down[size], sum);
            sum = __fmaf_rn(four.z, down[2 * size], sum);
            sum = __fmaf_rn(four.w, down[3 * size], sum);
            down += 4 * size;
            at += 4;
        } while (at < size);
        out[row + column] = sum;
    }
}
