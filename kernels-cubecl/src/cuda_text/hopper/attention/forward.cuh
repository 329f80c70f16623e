// The forward kernel of attention (../../attention/mod.rs has the formula):
//
//   for block of keys { scores = q kᵀ; hide; online softmax; y += p v }      y /= total
//
// A cube owns ROWS queries of one head. While the values of a block are mixed, the tensor cores first make the scores of the next
// block, and then its softmax is computed.

constexpr int BLOCK_BYTES = BLOCK * DIM * 2;
// The score of a key that is hidden: finite, so that differences are numbers.
constexpr float HIDDEN = -1.0e30f;

// The state of the online softmax of a lane's two rows: the largest score so far, before scaling, and the sum of the weights of
// this lane's columns.
struct Rows {
    int position[2], start[2];
    float top[2], total[2];
};

// Hides the scores of keys that are ahead of the query or in another document. The block begins at `key`.
__device__ __forceinline__ void hide(float (&scores)[BLOCK / 2], const Rows& rows, int key) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++) {
        const int half = i / 2 % 2, own = key + i / 4 * 8 + lane_col() + i % 2;
        if (own > rows.position[half] || own < rows.start[half]) scores[i] = HIDDEN;
    }
}

// One step of the online softmax: turns scores into weights. `shrink` is what the sums so far must be multiplied by.
__device__ __forceinline__ void soften(float (&scores)[BLOCK / 2], Rows& rows, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float best = rows.top[half];
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++) best = fmaxf(best, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
        shrink[half] = power_of_two((rows.top[half] - best) * POWER);
        rows.top[half] = best;
        // While all keys of a row are hidden, `best` is HIDDEN. The fused product below would then leave the rounding error of
        // HIDDEN * POWER, which is a large number, as the exponent.
        const float shift = best == HIDDEN ? 0.0f : best * POWER;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCK / 8; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float& weight = scores[4 * j + 2 * half + c];
                weight = power_of_two(fmaf(weight, POWER, -shift));
                sum += weight;
            }
        }
        rows.total[half] = rows.total[half] * shrink[half] + sum;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) hopper_attention_forward(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_mem[];
    const unsigned q = (shared_address(dynamic_shared_mem) + 1023) & ~1023u, k = q + 2 * OWN, v = k + STAGES * BLOCK_BYTES;
    const unsigned q_full = v + STAGES * BLOCK_BYTES, k_full = q_full + 8, k_empty = k_full + 8 * STAGES,
                   v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(k_full + 8 * s, 1);
            barrier_init(k_empty + 8 * s, 2);
            barrier_init(v_full + 8 * s, 1);
            barrier_init(v_empty + 8 * s, 2);
        }
        barriers_made();
    }
    __syncthreads();
    // The longest rows come first.
    const int queries = (int)info.queries, past = (int)info.past, first = ((int)gridDim.y - 1 - (int)blockIdx.y) * ROWS;
    const int head = blockIdx.x, last = min(first + ROWS, queries) - 1;
    const int begin = (int)starts[first] / BLOCK, end = (last + past) / BLOCK + 1;
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        fewer_registers<24>();
        if (threadIdx.x != 0) return;
        barrier_expect(q_full, 2 * OWN);
        for (int own = 0; own < 2; own++) load_rows<64>(q + own * OWN, &q_map, q_full, head, first + own * 64);
        Place at = {0, 0};
        for (int block = begin; block < end; block++) {
            barrier_wait(k_empty + 8 * at.stage, at.parity ^ 1);
            barrier_expect(k_full + 8 * at.stage, BLOCK_BYTES);
            load_rows<BLOCK>(k + at.stage * BLOCK_BYTES, &k_map, k_full + 8 * at.stage, head / GROUP, block * BLOCK);
            barrier_wait(v_empty + 8 * at.stage, at.parity ^ 1);
            barrier_expect(v_full + 8 * at.stage, BLOCK_BYTES);
            load_rows<BLOCK>(v + at.stage * BLOCK_BYTES, &v_map, v_full + 8 * at.stage, head / GROUP, block * BLOCK);
            at.next();
        }
        return;
    }
    more_registers<240>();
    const int own = first + (warpgroup - 1) * 64, row = own + lane_row();
    const unsigned own_q = q + (warpgroup - 1) * OWN;
    const bool first_unit = threadIdx.x % 128 == 0;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows.position[half] = row + 8 * half + past;
        rows.start[half] = (int)starts[min(row + 8 * half, queries - 1)];
        rows.top[half] = HIDDEN;
        rows.total[half] = 0.0f;
    }
    // From this key on the start of no row's document hides anything.
    const int full_from = (int)starts[last];
    float sums[DIM / 2], scores[BLOCK / 2], shrink[2];
    unsigned weights[BLOCK / 4];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) sums[i] = 0.0f;

    Place k_at = {0, 0}, v_at = {0, 0};
    barrier_wait(q_full, 0);
    barrier_wait(k_full, 0);
    products_begin();
    score(scores, own_q, k);
    products_end_group();
    products_wait<0>();
    if (first_unit) barrier_arrive(k_empty);
    const auto soften_block = [&](int block) {
        const int key = block * BLOCK;
        if (key + BLOCK - 1 > own + past || key < full_from) hide(scores, rows, key);
        soften(scores, rows, shrink);
    };
    soften_block(begin);
    round_weights(weights, scores);
    for (int block = begin + 1; block < end; block++) {
        k_at.next();
        barrier_wait(k_full + 8 * k_at.stage, k_at.parity);
        products_begin();
        score(scores, own_q, k + k_at.stage * BLOCK_BYTES);
        products_end_group();
        barrier_wait(v_full + 8 * v_at.stage, v_at.parity);
        mix(sums, weights, v + v_at.stage * BLOCK_BYTES);
        products_end_group();
        products_wait<1>();
        if (first_unit) barrier_arrive(k_empty + 8 * k_at.stage);
        soften_block(block);
        products_wait<0>();
        if (first_unit) barrier_arrive(v_empty + 8 * v_at.stage);
        v_at.next();
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) sums[i] *= shrink[i / 2 % 2];
        round_weights(weights, scores);
    }
    barrier_wait(v_full + 8 * v_at.stage, v_at.parity);
    products_begin();
    mix(sums, weights, v + v_at.stage * BLOCK_BYTES);
    products_end_group();
    products_wait<0>();

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = rows.total[half];
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
        inverse[half] = 1.0f / total;
        const int own_row = row + 8 * half;
        if (lane_col() == 0 && own_row < queries)
            lse[(long long)head * queries + own_row] = rows.top[half] * SCALE + logf(total);
    }
    store_rows(sums, inverse[0], inverse[1], own_q, &y_map, head, own);
}
