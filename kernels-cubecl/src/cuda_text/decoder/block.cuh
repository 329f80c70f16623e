// A transformer block for one new token of each of a few sequences, in one launch:
//
//   q, k, v = w norm(x)   |  y = attention over the caches  |  h = x + w_o y  |  a = silu(w_gate norm(h)) * w_up norm(h)  |  h + w_down a
//
// There is one cube per multiprocessor. At each | all cubes wait for each other. The codes of the next weight do not depend on
// other cubes, so the first of them are requested before the wait.

using Qkv = Product<QKV_CODES, D, 1, QKV_SPLIT, (H + 2 * G) * E / 8, QKV_SCALES>;
using Out = Product<O_CODES, H * E, 1, O_SPLIT, D / 8, O_SCALES>;
using GateUp = Product<GATE_UP_CODES, D, 2, GATE_UP_SPLIT, F / 8, GATE_UP_SCALES>;
using Down = Product<DOWN_CODES, F, 1, DOWN_SPLIT, D / 8, DOWN_SCALES>;

// Row `row` of a matrix with P's columns.
template <class P>
__device__ __forceinline__ Row row_of(const void* numbers, const void* scales, int row) {
    const long long r = row;
    return {static_cast<const unsigned char*>(numbers) + r * (P::CODES ? P::COLS / 2 : P::COLS * 2),
            static_cast<const unsigned char*>(scales) + (P::CODES ? r * (P::COLS / 16) : 0)};
}

// The keys and values of all sequences: rows of G E numbers in pages of PAGE rows.
struct Caches {
    CacheNumber* keys;
    CacheNumber* values;
    const u32* pages;    // [tokens, info->pages_of_each]: the page of each PAGE tokens of a sequence
    const Info* info;

    __device__ __forceinline__ int past(int token) const { return info->past[token]; }

    // Where the keys and values of token n of a sequence begin.
    __device__ __forceinline__ long long place(int token, int n) const {
        const long long page = pages[token * (int)info->pages_of_each + n / PAGE];
        return (page * PAGE + n % PAGE) * (G * E);
    }
};

// Stores what a product gives, times the tensor scale of its weight, plus the residual: both [tokens, D].
struct Added {
    const u16* residual;
    u16* out;
    const float* scale;

    __device__ __forceinline__ void operator()(int token, int tile, int row, const float (&sums)[1]) const {
        const int at = token * D + tile * 8 + row;
        out[at] = to_bf16(fresh(residual + at) + rounded(sums[0] * *scale));
    }
};

__device__ __forceinline__ float2 given_scale(const Info& info, int product) {
    return make_float2(of_bits(info.scales[product][0]), of_bits(info.scales[product][1]));
}

extern "C" __global__ void __launch_bounds__(UNITS, 1) decoder_block(PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_mem[];
    unsigned char* ring = dynamic_shared_mem + SHARED_SUMS + SHARED_FOUND;
    const Shared shared = {ring + WARPS * DEPTH * SLOT, ring, reinterpret_cast<float*>(dynamic_shared_mem),
                           reinterpret_cast<float*>(dynamic_shared_mem + SHARED_SUMS)};
    const int tokens = info.tokens;
    const Launch launch = {shared, tokens, prepared, barrier};
    // The weights of norms are asked for, and the tensor scales of the weights are loaded, before they are needed, when a unit would
    // wait for memory.
    for (int line = threadIdx.x; line < D / 32; line += UNITS) prefetch(input_norm + line * 32), prefetch(post_norm + line * 32);
    float* scales = shared.found + 16 * 32;
    if (threadIdx.x == 0) {
        const float all[7] = {Q_SCALE, K_SCALE, V_SCALE, O_SCALE, GATE_SCALE, UP_SCALE, DOWN_SCALE};
        for (int n = 0; n < 7; n++) scales[n] = all[n];
    }

    // Queries, keys and values.
    const auto qkv_rows = [&](int tile, int, int row) {
        const int at = tile * 8;
        if (at < H * E) return row_of<Qkv>(Q_NUMBERS, Q_BLOCK_SCALES, at + row);
        if (at < (H + G) * E) return row_of<Qkv>(K_NUMBERS, K_BLOCK_SCALES, at - H * E + row);
        return row_of<Qkv>(V_NUMBERS, V_BLOCK_SCALES, at - (H + G) * E + row);
    };
    Ahead qkv_ahead = request_first<Qkv>(qkv_rows, shared);
    product<Qkv>(qkv_ahead, x, input_norm, qkv_rows, launch, given_scale(info, 0),
            [&](int token, int tile, int row, const float (&sums)[1]) {
                const int at = tile * 8;
                const float scale = scales[at < H * E ? 0 : at < (H + G) * E ? 1 : 2];
                qkv[token * (H + 2 * G) * E + at + row] = to_bf16(sums[0] * scale);
            });
    const Attention attention = {qkv, q_norm, k_norm, cosines, sines, lines, mixed, shares, shares + TOKENS * H * SPLITS,
                                 shares + 2 * TOKENS * H * SPLITS};
    const Caches caches = {keys, values, pages, &info};
    u32 arrived = grid_arrive(barrier);
    prefetch_share(attention, caches, tokens);
    grid_wait(barrier, arrived);

    // Attention. Its shared memory is that of activations.
    const Joint joint = joint_of(shared.x);
    attend(attention, joint, caches, tokens);
    bool several = false;
    for (int token = 0; token < tokens; token++) several |= splits_of(caches.past(token) + 1) > 1;
    arrived = grid_arrive(barrier);
    const auto o_rows = [&](int tile, int, int row) { return row_of<Out>(O_NUMBERS, O_BLOCK_SCALES, tile * 8 + row); };
    Ahead o_ahead = request_first<Out>(o_rows, shared);
    grid_wait(barrier, arrived);
    if (several) {
        join_shares(attention, caches, tokens);
        grid_wait(barrier, grid_arrive(barrier));
    }

    // h = x + w_o y
    product<Out>(o_ahead, mixed, nullptr, o_rows, launch, given_scale(info, 1), Added{x, h, scales + 3});
    const auto gate_up_rows = [&](int tile, int part, int row) {
        return part == 0 ? row_of<GateUp>(GATE_NUMBERS, GATE_BLOCK_SCALES, tile * 8 + row)
                         : row_of<GateUp>(UP_NUMBERS, UP_BLOCK_SCALES, tile * 8 + row);
    };
    arrived = grid_arrive(barrier);
    Ahead gate_up_ahead = request_first<GateUp>(gate_up_rows, shared);
    grid_wait(barrier, arrived);

    // a = silu(gate) * up
    product<GateUp>(gate_up_ahead, h, post_norm, gate_up_rows, launch, given_scale(info, 2),
            [&](int token, int tile, int row, const float (&sums)[2]) {
                const float gate = rounded(sums[0] * scales[4]), up = rounded(sums[1] * scales[5]);
                gated[token * F + tile * 8 + row] = to_bf16(gate * (1.0f / (1.0f + __expf(-gate))) * up);
            });
    const auto down_rows = [&](int tile, int, int row) { return row_of<Down>(DOWN_NUMBERS, DOWN_BLOCK_SCALES, tile * 8 + row); };
    arrived = grid_arrive(barrier);
    Ahead down_ahead = request_first<Down>(down_rows, shared);
    grid_wait(barrier, arrived);

    // y = h + w_down a
    product<Down>(down_ahead, gated, nullptr, down_rows, launch, given_scale(info, 3), Added{h, y, scales + 6});
}
