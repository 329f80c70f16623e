// Attention of one new token of each sequence over its pages of the cache, in at most SPLITS shares of the keys:
//
//   for each token, key head, share { queries and new key = rotate(norm(.)); online softmax over the keys of the share }
//   y = sum of the shares, each times exp(its largest score - the largest of all)
//
// A team of four warps takes a share of the keys and PART of the query heads that read them; a cube has four teams. A warp takes
// 16 keys at once: scores are keys times queries by mma.sync m16n8k16 (the keys are its rows, the heads its columns), and the
// result is values times weights (the values' dimensions are its rows, the summed index is the key). Heads from PART to 7 are
// zeros, and nobody reads what they give. The number of shares depends on the length of the sequence alone. The new key and value
// come from shared memory, as the cache stores them, and the team that has the last share writes them to the cache.
//
// A cache of bytes is turned into 16-bit numbers when it is read (../e4m3.rs).
//
// Both sums may take their terms in any order, as long as both operands use the same one, and so may the rows of the result:
// every lane reads eight neighboring numbers. For scores, lane t of four has the dimensions 32 j + 8 t to 32 j + 8 t + 7 of the keys
// g and g + 8. For the result, lane (g, t) has the dimensions 64 j + 8 g to 64 j + 8 g + 7 of the keys 2 t, 2 t + 1, 8 + 2 t and
// 9 + 2 t; two neighboring dimensions are the rows g and g + 8.

constexpr int KEYS_OF_SPLIT = 64, TEAMS = WARPS / TEAM, GROUP = H / G, KEYS = 16;
static_assert(E % 64 == 0 && PART <= 8, "form.rs takes these sizes only");
// A team's shared memory holds queries, the new key and value, and the results of its warps.
static_assert((PART + 2) * E * 2 + TEAM * PART * (E + 2) * 4 == TEAM_BYTES, "form.rs reserves what a team takes");
// A number of a cache as the text in front of this one defines it: u16 (bf16) or unsigned char (E4M3). Eight neighboring ones are
// loaded at once.
template <class Number> struct Neighbors { typedef uint4 Type; };
template <> struct Neighbors<unsigned char> { typedef uint2 Type; };
typedef Neighbors<CacheNumber>::Type Eight;

// to_cache: a bf16 number as the cache stores it. numbers_of: eight stored numbers as bf16.
template <class Number> __device__ __forceinline__ Number to_cache_as(u16 x);
template <> __device__ __forceinline__ u16 to_cache_as<u16>(u16 x) { return x; }
template <> __device__ __forceinline__ unsigned char to_cache_as<unsigned char>(u16 x) { return e4m3_byte(x); }
__device__ __forceinline__ CacheNumber to_cache(u16 x) { return to_cache_as<CacheNumber>(x); }
__device__ __forceinline__ uint4 numbers_of(uint4 eight) { return eight; }
__device__ __forceinline__ uint4 numbers_of(uint2 eight) {
    return make_uint4(bf16_of_e4m3(eight.x), bf16_of_e4m3(eight.x >> 16), bf16_of_e4m3(eight.y), bf16_of_e4m3(eight.y >> 16));
}

// A score below all others. The difference of two such is 0.
constexpr float LOWEST = -1e30f;

__device__ __forceinline__ int splits_of(int keys) { return min((keys + KEYS_OF_SPLIT - 1) / KEYS_OF_SPLIT, SPLITS); }

// Calls take(c, a, b) for the pairs (c, c + E / 2) of a head, normalized and rotated, as 16-bit numbers.
template <class Take>
__device__ __forceinline__ void normed_and_rotated(const u16* head, const float* w, const float* cosines, const float* sines, Take take) {
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
        if (c < E / 2) take(c, to_bf16(x * cosine[n] - y * sine[n]), to_bf16(y * cosine[n] + x * sine[n]));
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
    CacheNumber* k;      // [E]
    CacheNumber* v;      // [E]
    float* tops;         // [TEAM][PART]
    float* totals;
    float* parts;        // [TEAM][PART][E]
};

__device__ __forceinline__ Joint joint_of(unsigned char* memory) {
    u16* small = reinterpret_cast<u16*>(memory + threadIdx.x / 32 / TEAM * TEAM_BYTES);
    float* large = reinterpret_cast<float*>(small + (PART + 2) * E);
    CacheNumber* fresh = reinterpret_cast<CacheNumber*>(small + PART * E);
    return {small, fresh, fresh + E, large, large + TEAM * PART, large + 2 * TEAM * PART};
}

// No warp of the team goes on before all are here.
__device__ __forceinline__ void team_barrier() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / 32 / TEAM + 1), "r"(TEAM * 32) : "memory");
}

// The online softmax of a lane: the heads 2 (lane % 4) and the next one, and the lane's dimensions of the result.
struct Mix {
    float tops[2], totals[2], sums[E / 16][4];
};

// The transpose of a matrix of 8x8 16-bit numbers, of which lane (g, t) holds the columns 2 t and 2 t + 1 of row g.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// The words of a uint4 by number.
__device__ __forceinline__ u32 word_of(const uint4& words, int n) { return n == 0 ? words.x : n == 1 ? words.y : n == 2 ? words.z : words.w; }

// The lower halves of two words, and the upper ones.
__device__ __forceinline__ u32 lower(u32 a, u32 b) { return (a & 0xFFFFu) | b << 16; }
__device__ __forceinline__ u32 upper(u32 a, u32 b) { return a >> 16 | (b & 0xFFFF0000u); }

// Takes in 16 keys, of which the first `valid` count, and their values: key n lies at key_of(n), its value at value_of(n).
template <class Place>
__device__ __forceinline__ void take_in(Mix& mix, const uint4 (&q)[E / 32], int valid, Place key_of, Place value_of) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const CacheNumber *low = key_of(g) + t * 8, *high = key_of(g + 8) + t * 8;
    Eight all_k[E / 32][2], all_v[E / 64][4];
#pragma unroll
    for (int j = 0; j < E / 32; j++) {
        all_k[j][0] = *reinterpret_cast<const Eight*>(low + j * 32);
        all_k[j][1] = *reinterpret_cast<const Eight*>(high + j * 32);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const CacheNumber* own = value_of(n / 2 * 8 + 2 * t + n % 2) + g * 8;
#pragma unroll
        for (int j = 0; j < E / 64; j++) all_v[j][n] = *reinterpret_cast<const Eight*>(own + j * 64);
    }
    // Two sums that take turns: a product waits for the one before into the same sum.
    float turns[2][4] = {};
#pragma unroll
    for (int j = 0; j < E / 32; j++) {
        const uint4 low = numbers_of(all_k[j][0]), high = numbers_of(all_k[j][1]);
        multiply_add(turns[0], low.x, high.x, low.y, high.y, q[j].x, q[j].y);
        multiply_add(turns[1], low.z, high.z, low.w, high.w, q[j].z, q[j].w);
    }
    float weights[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float first = g < valid ? (turns[0][h] + turns[1][h]) * SCORE_SCALE : LOWEST;
        const float second = g + 8 < valid ? (turns[0][2 + h] + turns[1][2 + h]) * SCORE_SCALE : LOWEST;
        float top = fmaxf(first, second);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, lanes));
        top = fmaxf(mix.tops[h], top);
        const float before = exp2f(mix.tops[h] - top);
        // One key at least counts, so that the weight of a LOWEST score is 0.
        weights[h] = exp2f(first - top), weights[2 + h] = exp2f(second - top);
        mix.tops[h] = top;
        mix.totals[h] = mix.totals[h] * before + weights[h] + weights[2 + h];
#pragma unroll
        for (int i = 0; i < E / 16; i++) mix.sums[i][h] *= before, mix.sums[i][2 + h] *= before;
    }
    // Two 16-bit numbers hold a weight: one would add an error as large as that of rounding the result.
    u32 large[2], small[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float a = weights[2 * half], b = weights[2 * half + 1];
        // Rows are keys; as the right operand, columns are heads.
        large[half] = transposed(pair_of(a, b));
        small[half] = transposed(pair_of(a - rounded(a), b - rounded(b)));
    }
#pragma unroll
    for (int j = 0; j < E / 64; j++) {
        uint4 v[4];
#pragma unroll
        for (int n = 0; n < 4; n++) v[n] = numbers_of(all_v[j][n]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 a = word_of(v[0], i), b = word_of(v[1], i), c = word_of(v[2], i), d = word_of(v[3], i);
            float(&sums)[4] = mix.sums[j * 4 + i];
            multiply_add(sums, lower(a, b), upper(a, b), lower(c, d), upper(c, d), large[0], large[1]);
            multiply_add(sums, lower(a, b), upper(a, b), lower(c, d), upper(c, d), small[0], small[1]);
        }
    }
}

// One share of the keys of a token for PART heads, from `head` on.
template <class Caches>
__device__ __forceinline__ void share(const Attention& a, const Joint& joint, const Caches& caches, int token, int head,
                                      int split, int splits) {
    const int warp = threadIdx.x / 32 % TEAM, lane = threadIdx.x % 32, key_head = head / GROUP;
    const int past = caches.past(token), count = past + 1;
    const int each = (count + splits - 1) / splits, first = split * each, end = min(first + each, count);
    const u16* row = a.qkv + token * (H + 2 * G) * E;
    const float* cosines = a.cosines + a.lines[token] * (E / 2);
    const float* sines = a.sines + a.lines[token] * (E / 2);
    const bool writes = end == count && head % GROUP == 0;
    const long long place = caches.place(token, past) + key_head * E;
    team_barrier();
    for (int job = warp; job < PART + 2; job += TEAM) {
        if (job < PART) {
            normed_and_rotated(row + (head + job) * E, a.q_norm, cosines, sines, [&](int c, u16 x, u16 y) {
                joint.q[job * E + c] = x, joint.q[job * E + c + E / 2] = y;
            });
        } else if (job == PART) {
            normed_and_rotated(row + (H + key_head) * E, a.k_norm, cosines, sines, [&](int c, u16 x, u16 y) {
                const CacheNumber a = to_cache(x), b = to_cache(y);
                joint.k[c] = a, joint.k[c + E / 2] = b;
                if (writes) caches.keys[place + c] = a, caches.keys[place + c + E / 2] = b;
            });
        } else {
            for (int c = lane; c < E; c += 32) {
                const CacheNumber x = to_cache(__ldcg(row + (H + G + key_head) * E + c));
                joint.v[c] = x;
                if (writes) caches.values[place + c] = x;
            }
        }
    }
    team_barrier();
    const int g = lane / 4, t = lane % 4;
    uint4 q[E / 32];
#pragma unroll
    for (int j = 0; j < E / 32; j++)
        q[j] = g < PART ? *reinterpret_cast<const uint4*>(joint.q + g * E + j * 32 + t * 8) : make_uint4(0, 0, 0, 0);
    Mix mix = {{LOWEST, LOWEST}, {}, {}};
#pragma unroll 1
    for (int base = first + warp * KEYS; base < end; base += TEAM * KEYS) {
        // The rows behind the last key are those of the last key: they are read, and do not count.
        const auto place_of = [&](const CacheNumber* cache, const CacheNumber* fresh) {
            return [=](int n) {
                const int key = min(base + n, end - 1);
                return key == past ? fresh : cache + caches.place(token, key) + key_head * E;
            };
        };
        take_in(mix, q, end - base, place_of(caches.keys, joint.k), place_of(caches.values, joint.v));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) mix.totals[h] += __shfl_xor_sync(0xFFFFFFFFu, mix.totals[h], lanes);
        const int head = warp * PART + 2 * t + h;
        if (2 * t + h >= PART) continue;
        if (g == 0) joint.tops[head] = mix.tops[h], joint.totals[head] = mix.totals[h];
#pragma unroll
        for (int i = 0; i < E / 16; i++) {
            float* two = joint.parts + head * E + i / 4 * 64 + g * 8 + i % 4 * 2;
            two[0] = mix.sums[i][h], two[1] = mix.sums[i][2 + h];
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

// Asks for the first keys and values of the first share that this team takes, and for what the norms of heads read. More than the
// first KEYS_OF_SPLIT keys of every share would not stay in L2.
template <class Caches>
__device__ __forceinline__ void prefetch_share(const Attention& a, const Caches& caches, int tokens) {
    constexpr int HEADS = H / PART;
    const int unit = threadIdx.x % (TEAM * 32);
    int item = blockIdx.x + threadIdx.x / 32 / TEAM * CUBES, token = 0, splits = 0;
    for (; token < tokens; token++, item -= splits * HEADS) {
        splits = splits_of(caches.past(token) + 1);
        if (item < splits * HEADS) break;
    }
    if (token == tokens) return;
    const int past = caches.past(token), each = (past + splits) / splits, first = item / HEADS * each;
    const int key_head = item % HEADS * PART / GROUP;
    for (int key = first + unit; key < min(first + min(each, KEYS_OF_SPLIT), past); key += TEAM * 32) {
        const long long at = caches.place(token, key) + key_head * E;
        for (int e = 0; e < E; e += 128 / (int)sizeof(CacheNumber)) prefetch(caches.keys + at + e), prefetch(caches.values + at + e);
    }
    if (unit < E / 32) prefetch(a.q_norm + unit * 32), prefetch(a.k_norm + unit * 32);
    if (unit < (E + 63) / 64) {
        const int at = a.lines[token] * (E / 2) + unit * 32;
        prefetch(a.cosines + at), prefetch(a.sines + at);
    }
}

// All shares that this team takes.
template <class Caches>
__device__ __forceinline__ void attend(const Attention& a, const Joint& joint, const Caches& caches, int tokens) {
    constexpr int HEADS = H / PART;
    // The shares of one token after another, without those that a short sequence does not have.
    int left = blockIdx.x + threadIdx.x / 32 / TEAM * CUBES;
    for (int token = 0; token < tokens; token++) {
        const int splits = splits_of(caches.past(token) + 1);
        for (; left < splits * HEADS; left += CUBES * TEAMS)
            share(a, joint, caches, token, left % HEADS * PART, left / HEADS, splits);
        left -= splits * HEADS;
    }
}

// The sum of the shares, where there are several. A warp takes 32 values of a head.
template <class Caches>
__device__ __forceinline__ void join_shares(const Attention& a, const Caches& caches, int tokens) {
    constexpr int PIECES = E / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = blockIdx.x + threadIdx.x / 32 * CUBES; item < tokens * H * PIECES; item += CUBES * WARPS) {
        const int n = item / PIECES, e = item % PIECES * 32 + lane, splits = splits_of(caches.past(n / H) + 1);
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
        a.mixed[n * E + e] = to_bf16(sum / total);
    }
}
