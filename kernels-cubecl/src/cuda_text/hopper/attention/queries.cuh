// The gradient of queries (../../attention/backward/mod.rs has the formulas):
//
//   for block of keys { p = exp(scale * q kᵀ - lse); ds = p * (dy vᵀ - delta); dq += ds k }
//
// A cube owns ROWS queries of one head.

constexpr int BLOCK_BYTES = BLOCK * DIM * 2, STAGE = 2 * BLOCK_BYTES;

extern "C" __global__ void __launch_bounds__(384, 1) hopper_attention_queries(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_mem[];
    const unsigned q = (shared_address(dynamic_shared_mem) + 1023) & ~1023u, dy = q + 2 * OWN, stages = dy + 2 * OWN;
    const unsigned q_full = stages + STAGES * STAGE, full = q_full + 8, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 2);
        }
        barriers_made();
    }
    __syncthreads();
    // The longest rows come first.
    const int tokens = (int)info.queries, first = ((int)gridDim.y - 1 - (int)blockIdx.y) * ROWS;
    const int head = blockIdx.x, last = min(first + ROWS, tokens) - 1;
    const int begin = (int)starts[first] / BLOCK, end = last / BLOCK + 1;
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        fewer_registers<24>();
        if (threadIdx.x != 0) return;
        barrier_expect(q_full, 4 * OWN);
        for (int own = 0; own < 2; own++) {
            load_rows<64>(q + own * OWN, &q_map, q_full, head, first + own * 64);
            load_rows<64>(dy + own * OWN, &dy_map, q_full, head, first + own * 64);
        }
        Place at = {0, 0};
        for (int block = begin; block < end; block++, at.next()) {
            const unsigned ready = full + 8 * at.stage, to = stages + at.stage * STAGE;
            barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
            barrier_expect(ready, STAGE);
            load_rows<BLOCK>(to, &k_map, ready, head / GROUP, block * BLOCK);
            load_rows<BLOCK>(to + BLOCK_BYTES, &v_map, ready, head / GROUP, block * BLOCK);
        }
        return;
    }
    more_registers<240>();
    const int own = first + (warpgroup - 1) * 64, row = own + lane_row();
    const unsigned own_q = q + (warpgroup - 1) * OWN, own_dy = dy + (warpgroup - 1) * OWN;
    const bool first_unit = threadIdx.x % 128 == 0;
    // From this key on the start of no row's document hides anything.
    const int full_from = (int)starts[last];
    int start[2];
    float shift[2], mean[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own_row = min(row + 8 * half, tokens - 1);
        const long long at = (long long)head * tokens + own_row;
        start[half] = (int)starts[own_row];
        shift[half] = lse[at] * LOG2_E;
        mean[half] = delta[at];
    }
    float dq[DIM / 2], p[BLOCK / 2], ds[BLOCK / 2];
    unsigned weights[BLOCK / 4];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) dq[i] = 0.0f;

    Place at = {0, 0};
    barrier_wait(q_full, 0);
    for (int block = begin; block < end; block++) {
        const unsigned k = stages + at.stage * STAGE, v = k + BLOCK_BYTES;
        const int key = block * BLOCK;
        barrier_wait(full + 8 * at.stage, at.parity);
        products_begin();
        score(p, own_q, k);
        products_end_group();
        score(ds, own_dy, v);
        products_end_group();
        products_wait<1>();
        const bool partly = key + BLOCK - 1 > own || key < full_from;
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) p[i] = power_of_two(p[i] * POWER - shift[i / 2 % 2]);
        if (partly) {
#pragma unroll
            for (int i = 0; i < BLOCK / 2; i++) {
                const int half = i / 2 % 2, other = key + i / 4 * 8 + lane_col() + i % 2;
                if (other > row + 8 * half || other < start[half]) p[i] = 0.0f;
            }
        }
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) ds[i] = p[i] * (ds[i] - mean[i / 2 % 2]);
        round_weights(weights, ds);
        products_begin();
        mix(dq, weights, k);
        products_end_group();
        products_wait<0>();
        if (first_unit) barrier_arrive(empty + 8 * at.stage);
        at.next();
    }
    store_rows(dq, SCALE, SCALE, own_q, &dq_map, head, own);
}
