// What the kernels of attention share. A cube has three warpgroups of 128 units. The first one copies (TMA): its units ask for
// the next block as soon as a stage of shared memory is free. The cube owns ROWS rows, and each of the other
// two multiplies for 64 of them.
//
// A block of rows of one head lies in E / 64 boxes, each of which has 128 bytes of every row. TMA and wgmma swap the eight
// chunks of 16 bytes of a row: chunk c of row n is at c ^ n % 8.
//
// text.rs writes the definitions in front of this text: the shape of heads (DIM is E, GROUP is H / G), ROWS, BLOCK, STAGES, SCALE, the
// parameters, and the functions multiply_scores (64 rows, BLOCK columns; both operands lie along) and multiply_mixing (64 rows
// in registers, DIM columns; b lies across).

constexpr int BOXES = DIM / 64;
// Bytes of 64 rows in a box, and of the 64 rows of a warpgroup.
constexpr int BOX = 64 * 128, OWN = BOXES * BOX;
// Scores are scaled for powers of two.
constexpr float LOG2_E = 1.44269504f, POWER = SCALE * LOG2_E;

// A place in a ring of stages.
struct Place {
    int stage, parity;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The first of the two rows whose values a lane holds, in the rows of its warpgroup; the second one is 8 below.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
// The first of the two neighboring columns whose values a lane holds in each eight columns.
__device__ __forceinline__ int lane_col() { return threadIdx.x % 4 * 2; }

// Loads all values of one head of the COUNT rows from `row` on.
template <int COUNT>
__device__ __forceinline__ void load_rows(unsigned to, const CUtensorMap* map, unsigned barrier, int head, int row) {
    for (int box = 0; box < BOXES; box++) load(to + box * COUNT * 128, map, barrier, head * DIM + box * 64, row);
}

// scores = a bᵀ, summed over the values of a head: 64 rows of a, BLOCK rows of b.
__device__ __forceinline__ void score(float (&scores)[BLOCK / 2], unsigned a, unsigned b) {
#pragma unroll
    for (int part = 0; part < DIM / 16; part++) {
        const unsigned long long left = descriptor(a + part / 4 * BOX + part % 4 * 32, 0),
                                 right = descriptor(b + part / 4 * BLOCK * 128 + part % 4 * 32, 0);
        if (part == 0) {
            multiply_scores<0>(scores, left, right);
        } else {
            multiply_scores<1>(scores, left, right);
        }
    }
}

// sums += weights b, summed over BLOCK rows of b.
__device__ __forceinline__ void mix(float (&sums)[DIM / 2], unsigned (&weights)[BLOCK / 4], unsigned b) {
#pragma unroll
    for (int part = 0; part < BLOCK / 16; part++)
        multiply_mixing<1>(sums, weights + 4 * part, descriptor(b + part * 2048, BLOCK * 128));
}

// Rounds scores to the left operand of the next product: the values of a lane lie in it as they lie in the sums.
__device__ __forceinline__ void round_weights(unsigned (&weights)[BLOCK / 4], const float (&scores)[BLOCK / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK / 4; i++) weights[i] = rounded(scores[2 * i], scores[2 * i + 1]);
}

// Stores the 64 rows of a warpgroup, times a factor for each of the two rows of a lane, by way of `to`: 64 rows of shared memory
// that only this warpgroup has read.
__device__ __forceinline__ void store_rows(const float (&sums)[DIM / 2], float first, float second, unsigned to,
                                           const CUtensorMap* map, int head, int row) {
    const int number = threadIdx.x / 128, lane = threadIdx.x % 32, r = threadIdx.x % 128 / 32 * 16 + lane % 16;
    warpgroup_sync(number);
#pragma unroll
    for (int j = 0; j < DIM / 16; j++) {
        const int c = j * 16 + lane / 16 * 8, chunk = c % 64 / 8;
        store_matrices(to + c / 64 * BOX + r * 128 + (chunk ^ r % 8) * 16,
                       rounded(sums[8 * j] * first, sums[8 * j + 1] * first),
                       rounded(sums[8 * j + 2] * second, sums[8 * j + 3] * second),
                       rounded(sums[8 * j + 4] * first, sums[8 * j + 5] * first),
                       rounded(sums[8 * j + 6] * second, sums[8 * j + 7] * second));
    }
    writes_for_copies();
    warpgroup_sync(number);
    if (threadIdx.x % 128 == 0) {
        for (int box = 0; box < BOXES; box++) store(map, to + box * BOX, head * DIM + box * 64, row);
        stores_end_group();
        stores_have_ended();
    }
}
