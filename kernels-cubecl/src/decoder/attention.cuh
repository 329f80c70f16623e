// Attention of one new token of each sequence over its cache, in at most SPLITS shares of the keys:
//
//   for each token, key head, share { queries and new key = rotate(norm(.)); online softmax over the keys of the share }
//   y = sum of the shares, each times exp(its largest score - the largest of all)
//
// A team of four warps takes a share of the keys and PART of the query heads that read them; a cube has four teams. A key is
// taken by E / 8 lanes, each with eight of its values; a warp takes 32 * 8 / E keys at once. The number of shares depends on the
// length of the sequence alone. The new key and value come from shared memory, and the team that has the last share writes them
// to the cache.

constexpr int KEYS_OF_SPLIT = 64, TEAMS = WARPS / TEAM, GROUP = H / G, LANES = E / 8, KEYS = 32 / LANES;
// A team's shared memory holds queries, the new key and value, and the results of its warps.
static_assert((PART + 2) * E * 2 + TEAM * PART * (E + 2) * 4 == TEAM_BYTES, "form.rs reserves what a team takes");
// Scores below all others. A difference of two of them is 0.
constexpr float LOWEST = -1e30f;

__device__ __forceinline__ int splits_of(int keys) { return min((keys + KEYS_OF_SPLIT - 1) / KEYS_OF_SPLIT, SPLITS); }

// Calls f(c, a, b) for the pairs (c, c + E / 2) of a head, normalized and rotated, as 16-bit numbers.
template <class F>
__device__ __forceinline__ void normed_and_rotated(const u16* head, const float* w, const float* cosines, const float* sines, F f) {
    constexpr int PAIRS = (E / 2 + 31) / 32;
    const int lane = threadIdx.x % 32;
    // Everything is asked for before anything is used.
    float a[PAIRS], b[PAIRS], wa[PAIRS], wb[PAIRS], cosine[PAIRS], sine[PAIRS], squares = 0.0f;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int c = min(n * 32 + lane, E / 2 - 1);
        a[n] = fresh(head + c), b[n] = fresh(head + c + E / 2);
        wa[n] = w[c], wb[n] = w[c + E / 2], cosine[n] = cosines[c], sine[n] = sines[c];
    }
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        if (n * 32 + lane < E / 2) squares += a[n] * a[n] + b[n] * b[n];
    const float inverse = rsqrtf(warp_sum(squares) / E + EPS);
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
        const int c = n * 32 + lane;
        const float x = rounded(rounded(a[n] * inverse) * rounded(wa[n])), y = rounded(rounded(b[n] * inverse) * rounded(wb[n]));
        if (c < E / 2) f(c, to_bf16(x * cosine[n] - y * sine[n]), to_bf16(y * cosine[n] + x * sine[n]));
    }
}

struct Attention {
    const u16* qkv;      // [tokens, (H + 2 G) E]
    const float* q_norm;
    const float* k_norm;
    const float* cosines;
    const float* sines;
    const u32* lines;    // of each token in the tables
    u16* mixed;          // [tokens, H E]: the result
    float* tops;         // [tokens, H, SPLITS]: largest score of a share, sum of its weights, and its part of the result
    float* totals;
    float* parts;        // [tokens, H, SPLITS, E]
};

// The shared memory of a team.
struct Joint {
    u16* q;              // [PART][E]
    u16* k;              // [E]
    u16* v;              // [E]
    float* tops;         // [TEAM][PART]
    float* totals;
    float* parts;        // [TEAM][PART][E]
};

__device__ __forceinline__ Joint joint_of(unsigned char* memory) {
    u16* small = reinterpret_cast<u16*>(memory + threadIdx.x / 32 / TEAM * TEAM_BYTES);
    float* large = reinterpret_cast<float*>(small + (PART + 2) * E);
    return {small, small + PART * E, small + (PART + 1) * E, large, large + TEAM * PART, large + 2 * TEAM * PART};
}

// No warp of the team goes on before all are here.
__device__ __forceinline__ void team_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / 32 / TEAM + 1), "r"(TEAM * 32) : "memory");
}

// The online softmax of a lane: PART heads, eight values of each.
struct Mix {
    float top[PART], total[PART], sums[PART][8];
};

// Takes in a key and its value. Lanes of a key past the last one take part in the shuffles.
__device__ __forceinline__ void take_in(Mix& mix, const uint4 (&q)[PART], uint4 key, uint4 value, bool valid) {
    float k[8], v[8];
    values_of(key, k);
    values_of(value, v);
#pragma unroll
    for (int h = 0; h < PART; h++) {
        float own[8], score = 0.0f;
        values_of(q[h], own);
#pragma unroll
        for (int i = 0; i < 8; i++) score += own[i] * k[i];
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, lanes);
        score = valid ? score * SCORE_SCALE : LOWEST;
        const float top = fmaxf(mix.top[h], score), before = exp2f(mix.top[h] - top);
        const float weight = valid ? exp2f(score - top) : 0.0f;
        mix.top[h] = top;
        mix.total[h] = mix.total[h] * before + weight;
#pragma unroll
        for (int i = 0; i < 8; i++) mix.sums[h][i] = mix.sums[h][i] * before + weight * v[i];
    }
}

// Joins the keys of a warp.
__device__ __forceinline__ void join_lanes(Mix& mix) {
#pragma unroll
    for (int lanes = LANES; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int h = 0; h < PART; h++) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, mix.top[h], lanes), top = fmaxf(mix.top[h], other);
            const float own = exp2f(mix.top[h] - top), its = exp2f(other - top);
            mix.top[h] = top;
            mix.total[h] = mix.total[h] * own + __shfl_xor_sync(0xFFFFFFFFu, mix.total[h], lanes) * its;
#pragma unroll
            for (int i = 0; i < 8; i++)
                mix.sums[h][i] = mix.sums[h][i] * own + __shfl_xor_sync(0xFFFFFFFFu, mix.sums[h][i], lanes) * its;
        }
    }
}

// One share of the keys of a token for PART heads, from `head` on.
__device__ __forceinline__ void share(const Attention& a, const Joint& joint, u16* keys, u16* values, int token, int past, int head,
                                      int split, int splits) {
    const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32, key_head = head / GROUP, count = past + 1;
    const int each = (count + splits - 1) / splits, first = split * each, end = min(first + each, count);
    const u16* row = a.qkv + token * (H + 2 * G) * E;
    const float* cosines = a.cosines + a.lines[token] * (E / 2);
    const float* sines = a.sines + a.lines[token] * (E / 2);
    const bool writes = end == count && head % GROUP == 0;
    const long long place = ((long long)past * G + key_head) * E;
    team_barrier();
    for (int job = warp; job < PART + 2; job += TEAM) {
        if (job < PART) {
            normed_and_rotated(row + (head + job) * E, a.q_norm, cosines, sines, [&](int c, u16 x, u16 y) {
                joint.q[job * E + c] = x, joint.q[job * E + c + E / 2] = y;
            });
        } else if (job == PART) {
            normed_and_rotated(row + (H + key_head) * E, a.k_norm, cosines, sines, [&](int c, u16 x, u16 y) {
                joint.k[c] = x, joint.k[c + E / 2] = y;
                if (writes) keys[place + c] = x, keys[place + c + E / 2] = y;
            });
        } else {
            for (int c = lane; c < E; c += 32) {
                const u16 x = __ldcg(row + (H + G + key_head) * E + c);
                joint.v[c] = x;
                if (writes) values[place + c] = x;
            }
        }
    }
    team_barrier();
    const int own = lane % LANES * 8;
    uint4 q[PART];
    Mix mix;
#pragma unroll
    for (int h = 0; h < PART; h++) {
        q[h] = *reinterpret_cast<const uint4*>(joint.q + h * E + own);
        mix.top[h] = LOWEST, mix.total[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) mix.sums[h][i] = 0.0f;
    }
#pragma unroll 2
    for (int base = first + warp * KEYS; base < end; base += TEAM * KEYS) {
        const int key = min(base + lane / LANES, end - 1);
        const long long at = ((long long)key * G + key_head) * E + own;
        const u16* k = key == past ? joint.k + own : keys + at;
        const u16* v = key == past ? joint.v + own : values + at;
        take_in(mix, q, *reinterpret_cast<const uint4*>(k), *reinterpret_cast<const uint4*>(v), base + lane / LANES < end);
    }
    join_lanes(mix);
    if (lane < LANES) {
#pragma unroll
        for (int h = 0; h < PART; h++) {
            if (lane == 0) joint.tops[warp * PART + h] = mix.top[h], joint.totals[warp * PART + h] = mix.total[h];
            for (int i = 0; i < 8; i++) joint.parts[(warp * PART + h) * E + own + i] = mix.sums[h][i];
        }
    }
    team_barrier();
    for (int n = threadIdx.x % (TEAM * 32); n < PART * E; n += TEAM * 32) {
        const int h = n / E, e = n % E, place = (token * H + head + h) * SPLITS + split;
        float top = LOWEST, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < TEAM; w++) top = fmaxf(top, joint.tops[w * PART + h]);
#pragma unroll
        for (int w = 0; w < TEAM; w++) {
            const float weight = exp2f(joint.tops[w * PART + h] - top);
            total += joint.totals[w * PART + h] * weight;
            sum += joint.parts[(w * PART + h) * E + e] * weight;
        }
        if (splits == 1) {
            a.mixed[(token * H + head + h) * E + e] = to_bf16(sum / total);
        } else {
            if (e == 0) a.tops[place] = top, a.totals[place] = total;
            a.parts[place * E + e] = sum;
        }
    }
}

// Asks for a line of memory ahead of its use.
__device__ __forceinline__ void prefetch(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Asks for the keys and values of the first share that this team takes, and for what the norms of heads read.
template <class Cache>
__device__ __forceinline__ void prefetch_share(const Attention& a, const Cache& cache, int tokens) {
    constexpr int HEADS = H / PART;
    const int unit = threadIdx.x % (TEAM * 32);
    int item = blockIdx.x + threadIdx.x / 32 / TEAM * CUBES, token = 0, splits = 0;
    for (; token < tokens; token++, item -= splits * HEADS) {
        splits = splits_of(cache.past(token) + 1);
        if (item < splits * HEADS) break;
    }
    if (token == tokens) return;
    const int past = cache.past(token), each = (past + splits) / splits, first = item / HEADS * each;
    const int key_head = item % HEADS * PART / GROUP;
    for (int key = first + unit; key < min(first + each, past); key += TEAM * 32) {
        const long long at = ((long long)key * G + key_head) * E;
        for (int e = 0; e < E; e += 64) prefetch(cache.keys(token) + at + e), prefetch(cache.values(token) + at + e);
    }
    if (unit < E / 32) prefetch(a.q_norm + unit * 32), prefetch(a.k_norm + unit * 32);
    if (unit < (E + 63) / 64) {
        const int at = a.lines[token] * (E / 2) + unit * 32;
        prefetch(a.cosines + at), prefetch(a.sines + at);
    }
}

// All shares that this team takes.
template <class Cache>
__device__ __forceinline__ void attend(const Attention& a, const Joint& joint, const Cache& cache, int tokens) {
    constexpr int HEADS = H / PART;
    // The shares of one token after another, without those that a short sequence does not have.
    int left = blockIdx.x + threadIdx.x / 32 / TEAM * CUBES;
    for (int token = 0; token < tokens; token++) {
        const int past = cache.past(token), splits = splits_of(past + 1);
        for (; left < splits * HEADS; left += CUBES * TEAMS)
            share(a, joint, cache.keys(token), cache.values(token), token, past, left % HEADS * PART, left / HEADS, splits);
        left -= splits * HEADS;
    }
}

// The sum of the shares, where there are several. A warp takes up to 32 values of a head.
template <class Cache>
__device__ __forceinline__ void join_shares(const Attention& a, const Cache& cache, int tokens) {
    constexpr int WIDTH = E < 32 ? E : 32, PIECES = E / WIDTH;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = blockIdx.x + threadIdx.x / 32 * CUBES; item < tokens * H * PIECES; item += CUBES * WARPS) {
        const int n = item / PIECES, e = item % PIECES * WIDTH + lane % WIDTH, splits = splits_of(cache.past(n / H) + 1);
        if (splits == 1) continue;
        // A lane has the weights of two shares.
        float tops[2], weights[2], total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int s = lane + 32 * i;
            tops[i] = s < splits ? __ldcg(a.tops + n * SPLITS + s) : LOWEST;
            weights[i] = s < splits ? __ldcg(a.totals + n * SPLITS + s) : 0.0f;
        }
        const float top = warp_max(fmaxf(tops[0], tops[1]));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float weight = exp2f(tops[i] - top);
            total += weights[i] * weight;
            weights[i] = weight;
        }
        total = warp_sum(total);
#pragma unroll 16
        for (int s = 0; s < splits; s++)
            sum += __ldcg(a.parts + (n * SPLITS + s) * E + e) * __shfl_sync(0xFFFFFFFFu, s < 32 ? weights[0] : weights[1], s % 32);
        if (lane < WIDTH) a.mixed[n * E + e] = to_bf16(sum / total);
    }
}
