// A trial of Hopper's own matrix instructions: C = A * B in three storage orders against cuBLAS, bf16 operands, f32 sums.
// wgmma.py beside this file says how to build and run it.
//
// A cube (thread block) has three warpgroups of 128 units. The first one copies: its first unit asks the copy engine (TMA) for
// the next tiles of A and B as soon as a stage of shared memory is free. The other two multiply: each takes 64 of the 128 rows
// and all columns of the tile. A grid of as many cubes as the card has multiprocessors walks over the tiles, eight tile rows at
// a time, so that the tiles of B stay in L2. Results go through shared memory and leave by TMA, while the next tile begins.
//
//   for each tile of this cube { for each 64 values of k { wait for the stage; 4 x wgmma; give the stage back }; store }
//
// Shared memory holds rows of 128 bytes with the 128-byte swizzle, as TMA writes them and wgmma reads them:
//   K-major operand (k is contiguous): a row of m or n has 64 values of k; 8 rows are an atom of 1,024 bytes.
//   MN-major operand (m or n is contiguous): a row of k has 64 values of m or n; 8 rows are an atom; 64 values of k fill
//   8,192 bytes, and the next 64 values of m or n follow behind them.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <type_traits>
#include <vector>

typedef __nv_bfloat16 bf16;
constexpr int ROWS = 128, DEPTH = 64, GROUP = 8;

#include "wgmma.inc"

// ---- Instructions ----

__device__ __forceinline__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// The descriptor of an operand in shared memory: address, stride along m or n, stride between atoms, 128-byte swizzle.
template <bool MN_MAJOR> __device__ __forceinline__ uint64_t descriptor(uint32_t at) {
    const uint64_t leading = MN_MAJOR ? 8192 : 16, stride = 1024;
    return (uint64_t)((at & 0x3FFFF) >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile("{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1; @P bra DONE; bra AGAIN; DONE: }"
                 ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, uint32_t from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void warpgroup_sync(int consumer) {
    asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
}

// ---- Shared memory ----

template <int WIDTH> constexpr int whole_boxes() { return (WIDTH + 63) / 64 * 64; }
template <int WIDTH> constexpr int b_bytes() { return whole_boxes<WIDTH>() * DEPTH * 2; }
template <int WIDTH> constexpr int out_bytes() { return ROWS * whole_boxes<WIDTH>() * 2; }
template <int WIDTH> constexpr int stages() {
    return (232448 - 1024 - 256 - out_bytes<WIDTH>()) / (ROWS * DEPTH * 2 + b_bytes<WIDTH>());
}
template <int WIDTH> constexpr int shared_bytes() {
    return 1024 + out_bytes<WIDTH>() + stages<WIDTH>() * (ROWS * DEPTH * 2 + b_bytes<WIDTH>());
}

// The tile at a place in the walk: GROUP tile rows, column by column.
__device__ __forceinline__ int2 tile_at(int place, int tile_rows, int tile_cols) {
    const int group = place / (GROUP * tile_cols), first = group * GROUP, rows = min(GROUP, tile_rows - first);
    const int within = place % (GROUP * tile_cols);
    return make_int2(first + within % rows, within / rows);
}

// ---- Results ----

// 64 rows of bf16, in pieces of 64 columns.
template <int WIDTH>
__device__ __forceinline__ void store_bf16(float (&d)[WIDTH / 2], uint32_t to, int consumer, int row0, int col0,
                                           const CUtensorMap* whole, const CUtensorMap* half) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane % 16;
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    warpgroup_sync(consumer);
#pragma unroll
    for (int j = 0; j < WIDTH / 16; j++) {
        __nv_bfloat162 v[4];
        for (int i = 0; i < 4; i++) v[i] = __floats2bfloat162_rn(d[8 * j + 2 * i], d[8 * j + 2 * i + 1]);
        const int col = j * 16 + lane / 16 * 8, chunk = col % 64 / 8;
        const uint32_t at = to + col / 64 * 8192 + row * 128 + (chunk ^ row % 8) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(*(uint32_t*)&v[0]),
                     "r"(*(uint32_t*)&v[1]), "r"(*(uint32_t*)&v[2]), "r"(*(uint32_t*)&v[3]) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(consumer);
    if (threadIdx.x % 128 == 0) {
        for (int p = 0; p < WIDTH / 64; p++) store(whole, to + p * 8192, col0 + p * 64, row0);
        if (WIDTH % 64) store(half, to + WIDTH / 64 * 8192, col0 + WIDTH / 64 * 64, row0);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
}

// 64 rows of f32, in pieces of 32 columns, half of the columns at a time.
template <int WIDTH>
__device__ __forceinline__ void store_f32(float (&d)[WIDTH / 2], uint32_t to, int consumer, int row0, int col0,
                                          const CUtensorMap* map) {
    constexpr int HALF = (WIDTH / 32 + 1) / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4;
#pragma unroll
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        warpgroup_sync(consumer);
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            if (j / 4 / HALF != round) continue;
            const int chunk = j % 4 * 2 + lane % 4 / 2;
            const uint32_t piece = to + (j / 4 - round * HALF) * 8192 + (chunk ^ row % 8) * 16 + lane % 2 * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(piece + row * 128), "f"(d[4 * j]), "f"(d[4 * j + 1]) : "memory");
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(piece + (row + 8) * 128), "f"(d[4 * j + 2]), "f"(d[4 * j + 3])
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warpgroup_sync(consumer);
        if (threadIdx.x % 128 == 0) {
            const int first = round * HALF, end = round == 0 ? HALF : WIDTH / 32;
            for (int p = first; p < end; p++) store(map, to + (p - first) * 8192, col0 + p * 32, row0);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

// ---- The kernel ----

template <int WIDTH, bool A_MN, bool B_MN, typename OUT>
__global__ void __launch_bounds__(384, 1)
gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap out,
     const __grid_constant__ CUtensorMap out_half, int m, int n, int k) {
    constexpr int STAGES = stages<WIDTH>(), A_BYTES = ROWS * DEPTH * 2, B_BYTES = b_bytes<WIDTH>();
    constexpr int EXPECTED = A_BYTES + (B_MN ? B_BYTES : WIDTH * DEPTH * 2);
    extern __shared__ __align__(1024) uint8_t raw[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    const uint32_t tiles = (address(raw) + 1023) & ~1023u, results = tiles + STAGES * (A_BYTES + B_BYTES);
    const uint32_t full = address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const int tile_rows = (m + ROWS - 1) / ROWS, tile_cols = (n + WIDTH - 1) / WIDTH, steps = (k + DEPTH - 1) / DEPTH;
    int stage = 0, parity = 0;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int place = blockIdx.x; place < tile_rows * tile_cols; place += gridDim.x) {
            const int2 tile = tile_at(place, tile_rows, tile_cols);
            for (int step = 0; step < steps; step++) {
                const uint32_t ready = full + 8 * stage;
                barrier_wait(empty + 8 * stage, parity ^ 1);
                barrier_expect(ready, EXPECTED);
                const uint32_t to_a = tiles + stage * (A_BYTES + B_BYTES), to_b = to_a + A_BYTES;
                if (A_MN) {
                    for (int i = 0; i < ROWS / 64; i++) load(to_a + i * 8192, &a, ready, tile.x * ROWS + i * 64, step * DEPTH);
                } else {
                    load(to_a, &a, ready, step * DEPTH, tile.x * ROWS);
                }
                if (B_MN) {
                    for (int i = 0; i < whole_boxes<WIDTH>() / 64; i++)
                        load(to_b + i * 8192, &b, ready, tile.y * WIDTH + i * 64, step * DEPTH);
                } else {
                    load(to_b, &b, ready, step * DEPTH, tile.y * WIDTH);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = threadIdx.x / 128 - 1;
    for (int place = blockIdx.x; place < tile_rows * tile_cols; place += gridDim.x) {
        const int2 tile = tile_at(place, tile_rows, tile_cols);
        float d[WIDTH / 2];
        int before = -1;
        for (int step = 0; step < steps; step++) {
            barrier_wait(full + 8 * stage, parity);
            const uint32_t at = tiles + stage * (A_BYTES + B_BYTES);
            const uint64_t left = descriptor<A_MN>(at + consumer * 8192), right = descriptor<B_MN>(at + A_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int q = 0; q < DEPTH / 16; q++)
                Mma<WIDTH, A_MN, B_MN>::add(d, left + (A_MN ? 128 : 2) * q, right + (B_MN ? 128 : 2) * q, (step | q) != 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // One group may still run: the stage of the group before it is free.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * before);
        const uint32_t to = results + consumer * out_bytes<WIDTH>() / 2;
        const int row = tile.x * ROWS + consumer * 64, col = tile.y * WIDTH;
        if constexpr (std::is_same<OUT, bf16>::value) store_bf16<WIDTH>(d, to, consumer, row, col, &out, &out_half);
        else store_f32<WIDTH>(d, to, consumer, row, col, &out);
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- Trial ----

#define CHECK(call)                                                                                                      \
    do {                                                                                                                 \
        const int error = (int)(call);                                                                                   \
        if (error) printf("error %d at line %d\n", error, __LINE__), exit(1);                                            \
    } while (0)

static CUtensorMap map_of(void* p, int rows, int cols, int box_rows, int box_cols, bool f32 = false) {
    CUtensorMap map;
    const cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)cols * (f32 ? 4 : 2)};
    const cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, ones[2] = {1, 1};
    const auto type = f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    CHECK(cuTensorMapEncodeTiled(&map, type, 2, p, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

__global__ void fill(bf16* p, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + seed;
        x = (x ^ x >> 16) * 0x85ebca6b;
        x = (x ^ x >> 13) * 0xc2b2ae35;
        p[i] = __float2bfloat16(((int)((x ^ x >> 16) & 0xffff) - 32768) / 32768.0f);
    }
}

// Milliseconds of a launch: the best of five means of twenty.
template <class F> float timed(F launch) {
    cudaEvent_t start, end;
    cudaEventCreate(&start), cudaEventCreate(&end);
    for (int i = 0; i < 5; i++) launch();
    float best = 1e9;
    for (int round = 0; round < 5; round++) {
        cudaEventRecord(start);
        for (int i = 0; i < 20; i++) launch();
        cudaEventRecord(end), cudaEventSynchronize(end);
        float ms;
        cudaEventElapsedTime(&ms, start, end);
        best = fminf(best, ms / 20);
    }
    return best;
}

template <int WIDTH, bool A_MN, bool B_MN, typename OUT> float run(bf16* a, bf16* b, OUT* c, int m, int n, int k) {
    constexpr bool F32 = std::is_same<OUT, float>::value;
    const auto kernel = gemm<WIDTH, A_MN, B_MN, OUT>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<WIDTH>()));
    const CUtensorMap left = A_MN ? map_of(a, k, m, DEPTH, 64) : map_of(a, m, k, ROWS, DEPTH);
    const CUtensorMap right = B_MN ? map_of(b, k, n, DEPTH, 64) : map_of(b, n, k, WIDTH, DEPTH);
    const CUtensorMap out = map_of(c, m, n, 64, F32 ? 32 : 64, F32), half = map_of(c, m, n, 64, 32, F32);
    const int tiles = (m + ROWS - 1) / ROWS * ((n + WIDTH - 1) / WIDTH), grid = tiles < 132 ? tiles : 132;
    const float ms = timed([&] { kernel<<<grid, 384, shared_bytes<WIDTH>()>>>(left, right, out, half, m, n, k); });
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return ms;
}

template <bool A_MN, bool B_MN, typename OUT> void trial(cublasHandle_t cublas, const char* order, int m, int n, int k) {
    bf16 *a, *b;
    OUT *c, *expected;
    const size_t bytes = (size_t)m * n * sizeof(OUT);
    CHECK(cudaMalloc(&a, (size_t)m * k * 2));
    CHECK(cudaMalloc(&b, (size_t)n * k * 2));
    CHECK(cudaMalloc(&c, bytes));
    CHECK(cudaMalloc(&expected, bytes));
    fill<<<1024, 256>>>(a, (size_t)m * k, 1), fill<<<1024, 256>>>(b, (size_t)n * k, 7);
    const float one = 1, zero = 0;
    const auto type = std::is_same<OUT, bf16>::value ? CUDA_R_16BF : CUDA_R_32F;
    const float theirs = timed([&] {
        cublasGemmEx(cublas, B_MN ? CUBLAS_OP_N : CUBLAS_OP_T, A_MN ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_16BF,
                     B_MN ? n : k, a, CUDA_R_16BF, A_MN ? m : k, &zero, expected, type, n, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT);
    });
    std::vector<OUT> ours((size_t)m * n), right((size_t)m * n);
    cudaMemcpy(right.data(), expected, bytes, cudaMemcpyDeviceToHost);
    const double tera = 2.0 * m * n * k / 1e9;
    double best = 1e9, worst = 0;
    printf("%s %5d x %5d x %5d  cublas %4.0f", order, m, n, k, tera / theirs);
    const auto with = [&](int width, auto launch) {
        cudaMemset(c, 0xff, bytes);
        const float ms = launch();
        best = fmin(best, ms);
        cudaMemcpy(ours.data(), c, bytes, cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < ours.size(); i++) {
            const double error = fabs((double)(float)ours[i] - (double)(float)right[i]);
            if (!(error <= worst)) worst = error;
        }
        printf("  %d: %4.0f", width, tera / ms);
    };
    with(256, [&] { return run<256, A_MN, B_MN, OUT>(a, b, c, m, n, k); });
    with(192, [&] { return run<192, A_MN, B_MN, OUT>(a, b, c, m, n, k); });
    with(160, [&] { return run<160, A_MN, B_MN, OUT>(a, b, c, m, n, k); });
    with(128, [&] { return run<128, A_MN, B_MN, OUT>(a, b, c, m, n, k); });
    printf("  share of cublas %.2f, largest difference %.3g\n", theirs / best, worst);
    cudaFree(a), cudaFree(b), cudaFree(c), cudaFree(expected);
}

int main(int arguments, char**) {
    cublasHandle_t cublas;
    cublasCreate(&cublas);
    if (arguments > 1) { // small and ragged, for compute-sanitizer
        trial<false, false, bf16>(cublas, "NT", 200, 520, 264);
        trial<false, true, bf16>(cublas, "NN", 200, 520, 264);
        trial<true, true, float>(cublas, "TN", 200, 520, 264);
        return 0;
    }
    const int forward[][3] = {{4096, 4096, 4096}, {2048, 4096, 2560}, {2048, 2560, 4096}, {2048, 19456, 2560}, {2048, 2560, 9728},
                              {2048, 6144, 2560}, {4096, 19456, 2560}, {8192, 8192, 8192}, {1000, 2560, 2560}, {77, 4096, 2560}};
    for (auto& s : forward) trial<false, false, bf16>(cublas, "NT", s[0], s[1], s[2]);
    for (auto& s : forward) trial<false, true, bf16>(cublas, "NN", s[0], s[1], s[2]);
    const int weights[][3] = {{4096, 2560, 2048}, {2560, 4096, 2048}, {19456, 2560, 2048}, {2560, 9728, 2048}, {6144, 2560, 2048},
                              {4096, 2560, 1000}};
    for (auto& s : weights) trial<true, true, float>(cublas, "TN", s[0], s[1], s[2]);
}
