// The gradients of keys and values (../../attention/backward/mod.rs has the formulas):
//
//   for head of the group { for block of 64 queries {
//       p = exp(scale * k qᵀ - lse)       dv += p dy       dk += (p * (v dyᵀ - delta)) q
//   } }
//
// A cube owns ROWS keys of one key head. Products are transposed, with keys as rows, so that sums over queries stay in one
// warpgroup and p is the left operand of the next product without leaving the registers. The product k qᵀ of the next block
// runs with the last product of a block. The two warpgroups take turns, so that the products of one run under the exponential
// functions of the other.

// A stage holds a block of q and of dy. Elsewhere lie, for each of its queries, lse (for powers of two) and then delta.
constexpr int VALUES = 2 * BLOCK * 4, STAGE = 2 * OWN;

// Turns scores into probabilities. `shifts` is where lse of the block's queries lies.
__device__ __forceinline__ void weigh(float (&p)[BLOCK / 2], unsigned shifts) {
#pragma unroll
    for (int j = 0; j < BLOCK / 8; j++) {
        const float2 shift = load_pair(shifts + (j * 8 + lane_col()) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) p[4 * j + i] = power_of_two(p[4 * j + i] * POWER - (i % 2 ? shift.y : shift.x));
    }
}

// Lets no query weigh a key that is ahead of it or in another document. `query` is the first one of the block, `key` the first
// of the lane's two.
__device__ __forceinline__ void hide(float (&p)[BLOCK / 2], int query, int key, int tokens, const unsigned* starts) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++) {
        const int row = query + i / 4 * 8 + lane_col() + i % 2, own = key + i / 2 % 2 * 8;
        if (own > row || own < (int)starts[min(row, tokens - 1)]) p[i] = 0.0f;
    }
}

// ds = p * (ds - delta). `means` is where delta of the block's queries lies.
__device__ __forceinline__ void score_gradients(float (&ds)[BLOCK / 2], const float (&p)[BLOCK / 2], unsigned means) {
#pragma unroll
    for (int j = 0; j < BLOCK / 8; j++) {
        const float2 mean = load_pair(means + (j * 8 + lane_col()) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 ? mean.y : mean.x));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) hopper_attention_keys(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_mem[];
    const unsigned k = (shared_address(dynamic_shared_mem) + 1023) & ~1023u, v = k + 2 * OWN, stages = v + 2 * OWN;
    const unsigned values = stages + STAGES * STAGE, kv_full = values + STAGES * VALUES, full = kv_full + 8,
                   empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(kv_full, 1);
        for (int s = 0; s < STAGES; s++) {
            // The copies, and the units of the warp that writes lse and delta.
            barrier_init(full + 8 * s, 1 + 32);
            // Each warp has read lse and delta.
            barrier_init(empty + 8 * s, 8);
        }
        barriers_made();
    }
    __syncthreads();
    // The keys that most queries see come first.
    const int tokens = (int)info.queries, first = blockIdx.y * ROWS, kv_head = blockIdx.x;
    const int first_block = first / BLOCK, each = ((int)ends[min(first + ROWS, tokens) - 1] - 1) / BLOCK + 1 - first_block;
    const int steps = each * GROUP, warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (warpgroup == 0) {
        fewer_registers<24>();
        if (warp > 1 || (warp == 0 && threadIdx.x != 0)) return;
        if (warp == 0) {
            barrier_expect(kv_full, 4 * OWN);
            for (int own = 0; own < 2; own++) {
                load_rows<64>(k + own * OWN, &k_map, kv_full, kv_head, first + own * 64);
                load_rows<64>(v + own * OWN, &v_map, kv_full, kv_head, first + own * 64);
            }
        }
        Place at = {0, 0};
        for (int step = 0; step < steps; step++, at.next()) {
            const int head = kv_head * GROUP + step / each, query = (first_block + step % each) * BLOCK;
            const unsigned ready = full + 8 * at.stage, to = stages + at.stage * STAGE;
            barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
            if (warp == 0) {
                barrier_expect(ready, STAGE);
                load_rows<BLOCK>(to, &q_map, ready, head, query);
                load_rows<BLOCK>(to + OWN, &dy_map, ready, head, query);
            } else {
                const unsigned to = values + at.stage * VALUES;
                const int n = threadIdx.x % 32 * 2;
                float own[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = query + n + i;
                    const long long from = (long long)head * tokens + row;
                    // No key has a weight for a row behind the last one.
                    own[i] = row < tokens ? lse[from] * LOG2_E : 1.0e30f;
                    own[2 + i] = row < tokens ? delta[from] : 0.0f;
                }
                store_pair(to + n * 4, own[0], own[1]);
                store_pair(to + BLOCK * 4 + n * 4, own[2], own[3]);
                barrier_arrive(ready);
            }
        }
        return;
    }
    more_registers<240>();
    const int own = first + (warpgroup - 1) * 64, key = own + lane_row();
    const unsigned own_k = k + (warpgroup - 1) * OWN, own_v = v + (warpgroup - 1) * OWN;
    float dk[DIM / 2], dv[DIM / 2], p[BLOCK / 2], ds[BLOCK / 2];
    unsigned p_weights[BLOCK / 4], ds_weights[BLOCK / 4];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) dk[i] = dv[i] = 0.0f;

    Place at = {0, 0};
    barrier_wait(kv_full, 0);
    // The first warpgroup begins.
    if (warpgroup == 2) turn_give(1);
    barrier_wait(full, 0);
    products_begin();
    score(p, own_k, stages);
    products_end_group();
    products_wait<0>();
    for (int step = 0; step < steps; step++) {
        const int query = (first_block + step % each) * BLOCK;
        const unsigned q = stages + at.stage * STAGE, dy = q + OWN, own_values = values + at.stage * VALUES;
        turn_wait(warpgroup);
        products_begin();
        score(ds, own_v, dy);
        products_end_group();
        turn_give(3 - warpgroup);
        weigh(p, own_values);
        if (query < own + 63 || (int)starts[min(query + BLOCK, tokens) - 1] > own) hide(p, query, key, tokens, starts);
        round_weights(p_weights, p);
        products_wait<0>();
        products_begin();
        mix(dv, p_weights, dy);
        products_end_group();
        score_gradients(ds, p, own_values + BLOCK * 4);
        round_weights(ds_weights, ds);
        Place next = at;
        next.next();
        const bool is_last = step + 1 == steps;
        if (!is_last) barrier_wait(full + 8 * next.stage, next.parity);
        products_begin();
        mix(dk, ds_weights, q);
        // After the last block the scores are not read: without a branch the products need not wait for each other.
        score(p, own_k, is_last ? q : stages + next.stage * STAGE);
        products_end_group();
        products_wait<0>();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * at.stage);
        at = next;
    }
    store_rows(dv, 1.0f, 1.0f, own_v, &dv_map, kv_head, own);
    store_rows(dk, SCALE, SCALE, own_k, &dk_map, kv_head, own);
}
