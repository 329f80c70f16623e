// Numbers of 16, 8 and 4 bits, and how activations are rounded to NVFP4 (../codec.rs and ../quantize explain the formulas).
// text.rs writes the definitions in front of this text.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ float of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float of_bf16(u32 bits) { return of_bits(bits << 16); }

// Two numbers of 16 bits, the first one below.
__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ u16 to_bf16(float x) { return (u16)pair_of(x, 0.0f); }
__device__ __forceinline__ float rounded(float x) { return of_bf16(pair_of(x, 0.0f) & 0xFFFFu); }

// Values that other cubes have written are read from L2: a multiprocessor may still have what was there before.
__device__ __forceinline__ float fresh(const u16* x) { return of_bf16(__ldcg(x)); }

__device__ __forceinline__ void values_of(const uint4& words, float (&v)[8]) {
    const u32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = of_bf16(all[i] & 0xFFFFu), v[2 * i + 1] = of_bits(all[i] & 0xFFFF0000u);
}

// a * b for both numbers of a pair. The instruction multiplies subnormal numbers, too.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
    return out;
}

// The scale of a block in both halves of a word, times 2^100.
__device__ __forceinline__ u32 scale_pair(u32 byte) {
    const u32 half_way = 0x76807680u;  // 2^110
    return times(times(byte * 0x00100010u, half_way), half_way);
}

// What codes and scales leave in a sum: 2^-126 and 2^100.
constexpr float UNDO = 67108864.0f;

// The numbers k and k + 4 of a word of eight codes, times 2^-126.
__device__ __forceinline__ u32 code_pair(u32 word, int k) {
    const int at = k % 2 * 4;
    const u32 codes = (k < 2 ? word : word >> 8) & (0x000F000Fu << at);
    return codes * (((1u << 6) | (1u << 12)) >> at) & 0x81C081C0u;
}

// The tensor scale of a row with this largest magnitude: the smallest power of two that is at least amax / 2688. And 1 over it.
__device__ __forceinline__ float2 row_scale(float amax) {
    const u32 exponent = max((__float_as_uint(amax) + 0x0057FFFFu) >> 23, 38u) - 11u;
    return make_float2(of_bits(exponent << 23), of_bits((254u - exponent) << 23));
}

__device__ __forceinline__ float e4m3_rounded(float x) {
    if (x >= 0.015625f) {
        const u32 bits = __float_as_uint(x);
        return of_bits((bits + 0x0007FFFFu + (bits >> 20 & 1u)) & 0xFFF00000u);
    }
    return of_bits(0x46800000u | (__float_as_uint(x + 16384.0f) & 15u)) - 16384.0f;
}

// The E4M3 byte of a bf16 number; magnitudes above 448 become 448, and NaN 0x7F.
__device__ __forceinline__ unsigned char e4m3_byte(u16 bits) {
    const float x = of_bf16(bits), size = e4m3_rounded(fminf(fabsf(x), 448.0f));
    const u32 magnitude = size >= 0.015625f ? (__float_as_uint(size) >> 20) - 960u : (u32)(size * 512.0f);
    return x == x ? magnitude | (bits >> 8 & 0x80u) : 0x7Fu;
}

// The two lower E4M3 bytes of a word as bf16. Exponent and mantissa of a byte, moved to the lowest bits of those of bf16, are 2^-120
// of its value. NaN gets a full exponent.
__device__ __forceinline__ u32 bf16_of_e4m3(u32 word) {
    const u32 apart = (word & 0xFFu) | (word & 0xFF00u) << 8, magnitudes = apart & 0x007F007Fu;
    const u32 nans = ((magnitudes + 0x00010001u) & 0x00800080u) * 0xFFu;
    return times(magnitudes << 4, 0x7B807B80u) | nans | (apart & 0x00800080u) << 8;
}

__device__ __forceinline__ float e2m1_rounded(float x) {
    const float bounded = x == x ? fminf(fmaxf(x, -6.0f), 6.0f) : 6.0f, size = fabsf(bounded);
    const u32 halves = __float_as_uint(size + 4194304.0f), ones = __float_as_uint(size + 8388610.0f) - 0x00800000u,
              twos = __float_as_uint(size + 16777224.0f) - 0x01000000u, code = min(min(halves, ones), twos) - 0x4A800000u;
    const float y = of_bits((code << 22) + 0x3F000000u), value = fminf(y, y * 2.0f - 1.0f);
    return of_bits(__float_as_uint(value) | (__float_as_uint(bounded) & 0x80000000u));
}

// Replaces half of a block of values by those of its codes; amax is the largest magnitude of the block. scale.x is the tensor
// scale, scale.y is 1 over it.
__device__ __forceinline__ void quantize(float (&v)[8], float amax, float2 scale) {
    const float block = e4m3_rounded(fminf(amax * (scale.y * (1.0f / 6.0f)), 448.0f));
    const float encode = fminf(__frcp_rn(block * scale.x), 3.4028235e38f);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = e2m1_rounded(v[i] * encode) * block * scale.x;
}

// ---- Sums and maxima ----

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
    return x;
}

// ---- The barrier of all cubes ----

// No cube goes on before all are here; what they have written is seen by all. The launch has no more cubes than run at the
// same time. The highest bit of the word changes when the last cube arrives. A cube that waits for more than about a second
// (2e9 cycles) ends the launch with an error. Between arrival and wait, a cube may do what does not depend on others.
__device__ __forceinline__ u32 grid_arrive(u32* word) {
    u32 before = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 arrival = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(arrival) : "memory");
    }
    return before;
}

__device__ __forceinline__ void grid_wait(u32* word, u32 before) {
    if (threadIdx.x == 0) {
        asm volatile("{ .reg .pred P; .reg .u32 now; .reg .u64 start, time; "
                     "ld.acquire.gpu.global.u32 now, [%0]; "
                     "mov.u64 start, %%clock64; "
                     "AGAIN: xor.b32 now, now, %1; setp.lt.s32 P, now, 0; @P bra DONE; "
                     "mov.u64 time, %%clock64; sub.u64 time, time, start; setp.gt.u64 P, time, 2000000000; @P trap; "
                     "ld.acquire.gpu.global.u32 now, [%0]; bra AGAIN; DONE: }"
                     ::"l"(word), "r"(before) : "memory");
    }
    __syncthreads();
}
