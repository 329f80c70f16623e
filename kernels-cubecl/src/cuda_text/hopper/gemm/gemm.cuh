// y = a b on the tensor cores of Hopper (wgmma), with 16-bit operands and sums in f32:
//
//   for each tile of this cube { sums = 0 or y; for each 64 values of r { wait for a stage; 4 x wgmma }; y = sums * scales;
//                                squares = the sums of y^2 over the upper and the lower 64 rows, if they are wanted }
//
// A cube has three warpgroups of 128 units. The first one copies: one of its units asks the copy engine (TMA) for the next
// parts of a and b as soon as a stage of shared memory is free. The other two multiply: each takes 64 of a tile's 128 rows and
// all of its COLS columns. There are as many cubes as the device has multiprocessors, at most; each walks over the tiles with
// steps of that number, eight tile rows at a time, so that the tiles of b stay in L2. Results go through shared memory and
// leave by TMA while the next tile begins.
//
// Shared memory has rows of 128 bytes in which TMA and wgmma swap the eight chunks of 16 bytes: chunk c of row n is at c ^ n % 8.
//   along  (r is contiguous)       a row of i or j has 64 values of r; 64 rows fill 8,192 bytes
//   across (i or j is contiguous)  a row of r has 64 values of i or j; 64 rows fill 8,192 bytes, and the next 64 values of i or
//                                  j follow behind them
//
// text.rs writes the definitions in front of this text: COLS, A_ACROSS, B_ACROSS, PARTS, SUMMED, SCALED, ACCUMULATE, MEASURED,
// RESULT_F32, the parameters, A_MAP(p), B_MAP(p), OUT_MAP(p), EDGE_MAP(p), FACTOR(p) and SQUARES(p) for product p, and multiply.

constexpr int ROWS = 128, DEPTH = 64, GROUP = 8, BOX = 64 * DEPTH * 2;
constexpr int BOXES = (COLS + 63) / 64;
constexpr int A_BYTES = 2 * BOX, B_BYTES = BOXES * BOX, STAGE = A_BYTES + B_BYTES;
// Bytes that the copies of a stage bring. Boxes of b that lie across are whole ones.
constexpr int EXPECTED = A_BYTES + (B_ACROSS ? B_BYTES : COLS * DEPTH * 2);
constexpr int OUT_BYTES = BOXES * BOX;

struct Tile {
    int part, row, col;
};

__device__ __forceinline__ int tiles_of(const Part& part) {
    return (part.i_len + ROWS - 1) / ROWS * ((part.j_len + COLS - 1) / COLS);
}

// The tile at a place in the walk: GROUP tile rows, column by column.
__device__ __forceinline__ Tile tile_at(int place, const Info& info) {
    int part = 0;
    if (!SUMMED)
        while (part + 1 < PARTS && place >= tiles_of(info.parts[part])) place -= tiles_of(info.parts[part++]);
    const int rows = (info.parts[part].i_len + ROWS - 1) / ROWS, cols = (info.parts[part].j_len + COLS - 1) / COLS;
    const int first = place / (GROUP * cols) * GROUP, height = min(rows - first, GROUP), within = place % (GROUP * cols);
    return {part, (first + within % height) * ROWS, within / height * COLS};
}

// Calls `f(first row, lane's column of block j, index of the first of its two sums)` for the pairs of sums that a lane holds.
template <class F>
__device__ __forceinline__ void for_each_pair(F f) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int j = 0; j < COLS / 8; j++) {
        f(warp * 16 + lane / 4, j * 8 + lane % 4 * 2, 4 * j);
        f(warp * 16 + lane / 4 + 8, j * 8 + lane % 4 * 2, 4 * j + 2);
    }
}

#if RESULT_F32
// Stores 64 rows of f32, in pieces of 32 columns, half of the columns at a time.
__device__ __forceinline__ void store_sums(float (&sums)[COLS / 2], unsigned to, int consumer, int row, int col,
                                           const CUtensorMap* map, const CUtensorMap*) {
    constexpr int HALF = (COLS / 32 + 1) / 2;
    const bool first_unit = threadIdx.x % 128 == 0;
#pragma unroll
    for (int round = 0; round < 2; round++) {
        if (first_unit) stores_have_read();
        warpgroup_sync(consumer + 1);
        for_each_pair([&](int r, int c, int at) {
            if (c / 32 / HALF != round) return;
            const int chunk = c % 32 / 4;
            store_pair(to + (c / 32 - round * HALF) * BOX + r * 128 + (chunk ^ r % 8) * 16 + c % 4 * 4, sums[at], sums[at + 1]);
        });
        writes_for_copies();
        warpgroup_sync(consumer + 1);
        if (first_unit) {
            const int end = round == 0 ? HALF : COLS / 32;
            for (int p = round * HALF; p < end; p++) store(map, to + (p - round * HALF) * BOX, col + p * 32, row);
            stores_end_group();
        }
    }
}
#else
// Stores 64 rows of 16-bit numbers, in pieces of 64 columns; a last piece of 32 has a map of its own.
__device__ __forceinline__ void store_sums(float (&sums)[COLS / 2], unsigned to, int consumer, int row, int col,
                                           const CUtensorMap* map, const CUtensorMap* edge) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, r = warp * 16 + lane % 16;
    const bool first_unit = threadIdx.x % 128 == 0;
    if (first_unit) stores_have_read();
    warpgroup_sync(consumer + 1);
#pragma unroll
    for (int j = 0; j < COLS / 16; j++) {
        const int c = j * 16 + lane / 16 * 8, chunk = c % 64 / 8;
        store_matrices(to + c / 64 * BOX + r * 128 + (chunk ^ r % 8) * 16,
                       rounded(sums[8 * j], sums[8 * j + 1]), rounded(sums[8 * j + 2], sums[8 * j + 3]),
                       rounded(sums[8 * j + 4], sums[8 * j + 5]), rounded(sums[8 * j + 6], sums[8 * j + 7]));
    }
    writes_for_copies();
    warpgroup_sync(consumer + 1);
    if (first_unit) {
        for (int p = 0; p < COLS / 64; p++) store(map, to + p * BOX, col + p * 64, row);
        if (COLS % 64) store(edge, to + COLS / 64 * BOX, col + COLS / 64 * 64, row);
        stores_end_group();
    }
}
#endif

// Writes the sum of the squares of a warpgroup's results. `room` holds four numbers. What lies outside the matrix is zero, or not a
// number where its row or column has a result that is not finite.
__device__ __forceinline__ void store_squares(const float (&sums)[COLS / 2], float* room, int consumer, float* to) {
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < COLS / 2; n++) squares += sums[n] * sums[n];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32 % 4] = squares;
    warpgroup_sync(consumer + 1);
    if (threadIdx.x % 128 == 0) *to = room[0] + room[1] + room[2] + room[3];
}

extern "C" __global__ void __launch_bounds__(384, 1) hopper_gemm(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_mem[];
    const unsigned stages = (shared_address(dynamic_shared_mem) + 1023) & ~1023u, results = stages + STAGES * STAGE;
    const unsigned full = results + OUT_BYTES * 2, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 2);
        }
        barriers_made();
    }
    __syncthreads();
    int tiles = tiles_of(info.parts[0]);
    if (!SUMMED)
        for (int p = 1; p < PARTS; p++) tiles += tiles_of(info.parts[p]);
    int stage = 0, parity = 0;
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        fewer_registers<40>();
        if (threadIdx.x != 0) return;
        for (int place = blockIdx.x; place < tiles; place += gridDim.x) {
            const Tile tile = tile_at(place, info);
            for (int p = SUMMED ? 0 : tile.part; p < (SUMMED ? PARTS : tile.part + 1); p++) {
                // The sums could not be rescaled by a factor of 0: such a product is left out.
                if (SUMMED && SCALED && FACTOR(p) == 0.0f) continue;
                for (int r = 0; r < info.parts[p].r_len; r += DEPTH) {
                    const unsigned ready = full + 8 * stage, a = stages + stage * STAGE, b = a + A_BYTES;
                    barrier_wait(empty + 8 * stage, parity ^ 1);
                    barrier_expect(ready, EXPECTED);
                    if (A_ACROSS) {
                        for (int n = 0; n < ROWS / 64; n++) load(a + n * BOX, A_MAP(p), ready, tile.row + n * 64, r);
                    } else {
                        load(a, A_MAP(p), ready, r, tile.row);
                    }
                    if (B_ACROSS) {
                        for (int n = 0; n < BOXES; n++) load(b + n * BOX, B_MAP(p), ready, tile.col + n * 64, r);
                    } else {
                        load(b, B_MAP(p), ready, r, tile.col);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        return;
    }
    more_registers<232>();
    const int consumer = warpgroup - 1;
    const bool first_unit = threadIdx.x % 128 == 0;
    for (int place = blockIdx.x; place < tiles; place += gridDim.x) {
        const Tile tile = tile_at(place, info);
        float sums[COLS / 2];
        for_each_pair([&](int r, int c, int at) {
            sums[at] = sums[at + 1] = 0.0f;
#if ACCUMULATE
            const int row = tile.row + consumer * 64 + r, col = tile.col + c, cols = info.parts[0].j_len;
            if (row < info.parts[0].i_len && col < cols) {
                sums[at] = out_values[(long long)row * cols + col];
                sums[at + 1] = out_values[(long long)row * cols + col + 1];
            }
#endif
        });
        float factor = SCALED && !SUMMED ? FACTOR(tile.part) : 1.0f;
        for (int p = SUMMED ? 0 : tile.part; p < (SUMMED ? PARTS : tile.part + 1); p++) {
            if (SUMMED && SCALED) {
                const float own = FACTOR(p);
                if (own == 0.0f) continue;
                const float ratio = factor / own;
                for_each_pair([&](int, int, int at) { sums[at] *= ratio, sums[at + 1] *= ratio; });
                factor = own;
            }
            int before = -1;
            for (int r = 0; r < info.parts[p].r_len; r += DEPTH) {
                barrier_wait(full + 8 * stage, parity);
                const unsigned at = stages + stage * STAGE;
                const unsigned long long a = descriptor(at + consumer * BOX, A_ACROSS ? BOX : 0),
                                         b = descriptor(at + A_BYTES, B_ACROSS ? BOX : 0);
                products_begin();
#pragma unroll
                // 16 values of r are 32 bytes of a row, or 16 rows; a descriptor counts 16 bytes.
                for (int q = 0; q < DEPTH / 16; q++) multiply<1>(sums, a + (A_ACROSS ? 128 : 2) * q, b + (B_ACROSS ? 128 : 2) * q);
                products_end_group();
                // One group may still run: the stage of the group before it is free.
                products_wait<1>();
                if (before >= 0 && first_unit) barrier_arrive(empty + 8 * before);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            products_wait<0>();
            if (before >= 0 && first_unit) barrier_arrive(empty + 8 * before);
        }
        if (SCALED) for_each_pair([&](int, int, int at) { sums[at] *= factor, sums[at + 1] *= factor; });
#if MEASURED
        // Stores synchronize the warpgroup before it comes here again, so that `room` has been read by then.
        float* room = (float*)(dynamic_shared_mem + (empty + 8 * STAGES - shared_address(dynamic_shared_mem))) + 4 * consumer;
        const long long tile_cols = (info.parts[tile.part].j_len + COLS - 1) / COLS;
        store_squares(sums, room, consumer, SQUARES(tile.part) + (tile.row / ROWS * tile_cols + tile.col / COLS) * 2 + consumer);
#endif
        store_sums(sums, results + consumer * OUT_BYTES, consumer, tile.row + consumer * 64, tile.col, OUT_MAP(tile.part),
                   EDGE_MAP(tile.part));
    }
    if (first_unit) stores_have_ended();
}
