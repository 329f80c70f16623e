// y = x w for a few tokens, whose activations lie in shared memory, by mma.sync m16n8k16:
//
//   for each tile of eight rows of w { for each 256 columns { decode; 16 x mma }; y[token][row] = sum of the warps * scales }
//
// The tokens are the left operand (16 rows, of which TOKENS are filled), eight rows of w the right one. SPLIT warps share the
// columns of a tile: warp s takes the spans of 256 columns s, s + SPLIT, ...; so WARPS / SPLIT tiles are in work at once. A lane
// holds row lane / 4 of the tile and 64 neighboring columns: 32 bytes of codes and four scales. The sum over r may take its terms
// in any order, as long as both operands use the same one: the lane's columns are its summed indices, in the order in which
// code_pair finds them in a word.
//
// Activations lie in shared memory in that order, as the left operand's registers: four columns of tokens g and g + 8 are the four
// words (0, 4 of g), (0, 4 of g + 8), (1, 5 of g), (1, 5 of g + 8), or the same with columns 2, 6 and 3, 7. With at most eight
// tokens, the words of g stand in both places: nobody reads what the second ones give. A lane reads four words with one load and
// moves nothing, because the number of instructions bounds these loops.
//
// Codes come through a ring of DEPTH spans in shared memory, which each warp fills for itself with cp.async, across tiles and
// across the barrier of all cubes. Loops are not unrolled: a launch runs through its instructions a few times only.

constexpr int WARPS = UNITS / 32, WARPS_OF_TOKEN = WARPS / TOKENS;
// Bytes of a row of codes in the ring, whose last 16 keep rows in different banks. The scales of a span stand behind its rows.
constexpr int ROW_BYTES = 144, SCALES_AT = 8 * ROW_BYTES;
static_assert(SCALES_AT + 128 == SLOT, "form.rs reserves what a span takes");

struct Shared {
    unsigned char* x;      // X_ROWS rows of X_STRIDE bytes
    unsigned char* ring;   // [warp][DEPTH][SLOT]
    float* sums;           // [round][warp][part][turn][token][row of the tile]
    float* found;          // 32 numbers of each token
};

// What all products of a launch use.
struct Launch {
    Shared shared;
    int tokens;
    u16* prepared;         // activations that one cube has rounded for all
    u32* barrier;
};

// What a product is, at compile time. Parts are matrices that one unit's sums need together: gate and up.
template <bool CODES_, int COLS_, int PARTS_, int SPLIT_, int TILES_, int SCALES_>
struct Product {
    static constexpr bool CODES = CODES_;
    static constexpr int COLS = COLS_, PARTS = PARTS_, SPLIT = SPLIT_, TILES = TILES_, SCALES = SCALES_;
    // A span of 16-bit values has fewer columns, and as many bytes.
    static constexpr int SPAN = CODES ? 256 : 64, SPANS = COLS / SPAN, GROUPS = WARPS / SPLIT;
    // A cube takes every CUBES-th tile, GROUPS of them at once.
    static constexpr int ROUNDS = ((TILES + CUBES - 1) / CUBES + GROUPS - 1) / GROUPS;
    // Columns whose activations lie in shared memory at once: all, or as many as the warps share evenly.
    static constexpr int PIECE = COLS <= CHUNK ? COLS : CHUNK / EVEN * EVEN;
    static constexpr int PIECES = (COLS + PIECE - 1) / PIECE, PIECE_SPANS = PIECE / SPAN;
    // Sums that a warp keeps of a row and a token: one, or both that take turns, which the next piece carries on.
    static constexpr int TURNS = PIECES == 1 ? 1 : 2, KEPT = PARTS * TURNS * TOKENS * 8;
};

// A row of a matrix: codes and scales, or values of 16 bits.
struct Row {
    const unsigned char* numbers;
    const unsigned char* scales;
};

// ---- The ring ----

__device__ __forceinline__ void copy_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared::cta.global [%0], [%1], %2, %2;"
                 ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(16) : "memory");
}

__device__ __forceinline__ void copies_end_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most this many of the newest groups are still on their way.
template <int GROUPS>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

template <class P>
__device__ __forceinline__ int tile_of(int round) {
    return (round * P::GROUPS + threadIdx.x / 32 / P::SPLIT) * CUBES + blockIdx.x;
}

// The spans of a piece that this warp takes of each tile.
template <class P>
__device__ __forceinline__ int steps_of(int piece) {
    const int spans = min(P::PIECE_SPANS, P::SPANS - piece * P::PIECE_SPANS) - (int)(threadIdx.x / 32) % P::SPLIT;
    return max(spans + P::SPLIT - 1, 0) / P::SPLIT;
}

// What a warp asks for next: spans of a tile of a part, then the next part, round and piece; and the slot that takes it.
struct Ahead {
    const unsigned char* numbers;  // null behind the last tile
    const unsigned char* scales;
    int left, part, round, piece;
    unsigned char* slot;
};

__device__ __forceinline__ unsigned char* first_slot(const Shared& shared) { return shared.ring + threadIdx.x / 32 * DEPTH * SLOT; }

__device__ __forceinline__ unsigned char* next_slot(unsigned char* slot, const Shared& shared) {
    slot += SLOT;
    return slot == first_slot(shared) + DEPTH * SLOT ? first_slot(shared) : slot;
}

// Finds this lane's first bytes of the tile that `ahead` names.
template <class P, class Rows>
__device__ __forceinline__ void begin_tile(Ahead& ahead, const Rows& rows) {
    const int lane = threadIdx.x % 32, tile = tile_of<P>(ahead.round);
    const int span = ahead.piece * P::PIECE_SPANS + threadIdx.x / 32 % P::SPLIT;
    ahead.left = ahead.piece < P::PIECES ? steps_of<P>(ahead.piece) : 0;
    ahead.numbers = nullptr;
    if (tile >= P::TILES || ahead.left == 0) return;
    const Row row = rows(tile, ahead.part, lane / 4);
    ahead.numbers = row.numbers + span * 128 + lane % 4 * 16;
    ahead.scales = row.scales + span * 16;
}

// Asks for a span. Nothing waits for it here.
template <class P, class Rows>
__device__ __forceinline__ void request(Ahead& ahead, const Rows& rows, const Shared& shared) {
    const int lane = threadIdx.x % 32;
    if (ahead.left > 0) {
        if (ahead.numbers) {
            unsigned char* to = ahead.slot + lane / 4 * ROW_BYTES + lane % 4 * 16;
            copy_16(to, ahead.numbers);
            copy_16(to + 64, ahead.numbers + 64);
            if (P::CODES && lane % 4 == 0) copy_16(ahead.slot + SCALES_AT + lane * 4, ahead.scales);
            ahead.numbers += P::SPLIT * 128;
            ahead.scales += P::SPLIT * 16;
        }
        if (--ahead.left == 0) {
            if (++ahead.part == P::PARTS) {
                ahead.part = 0;
                if (++ahead.round == P::ROUNDS) ahead.round = 0, ++ahead.piece;
            }
            begin_tile<P>(ahead, rows);
        }
    }
    copies_end_group();
    ahead.slot = next_slot(ahead.slot, shared);
}

// Fills the ring but for one slot.
template <class P, class Rows>
__device__ __forceinline__ Ahead request_first(const Rows& rows, const Shared& shared) {
    Ahead ahead = {nullptr, nullptr, 0, 0, 0, 0, first_slot(shared)};
    begin_tile<P>(ahead, rows);
#pragma unroll 1
    for (int n = 0; n < DEPTH - 1; n++) request<P>(ahead, rows, shared);
    return ahead;
}

// ---- Products ----

__device__ __forceinline__ void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The place of eight activations, of which each has two words for two tokens: in a span, lane n / 8 takes eight n. And back.
__device__ __forceinline__ int place_of_eight(int eight) { return eight / 32 * 32 + eight % 8 * 4 + eight % 32 / 8; }
__device__ __forceinline__ int eight_of_place(int place) { return place / 32 * 32 + place % 4 * 8 + place % 32 / 4; }

// What a lane has summed: two sums that take turns, because a product waits for the one before into the same sum.
struct Sums {
    float turns[2][4];
};

// The activations of this lane's tokens, from which places are counted.
__device__ __forceinline__ const uint4* own_activations(const Shared& shared) {
    const int token = min((int)threadIdx.x % 32 / 4, X_ROWS - 1);
    return reinterpret_cast<const uint4*>(shared.x + token * X_STRIDE);
}

// Adds the products of eight columns. b holds their pairs.
__device__ __forceinline__ void eight_columns(Sums& sums, const uint4* x, int place, const u32 (&b)[4]) {
    const uint4 a = x[2 * place], c = x[2 * place + 1];
    multiply_add(sums.turns[0], a.x, a.y, a.z, a.w, b[0], b[1]);
    multiply_add(sums.turns[1], c.x, c.y, c.z, c.w, b[2], b[3]);
}

// Adds the products of a span of codes. `at` is its place among the spans whose activations lie in shared memory.
__device__ __forceinline__ void multiply_codes(Sums& sums, const uint4* x, int at, const unsigned char* slot) {
    const int lane = threadIdx.x % 32;
    const uint4* row = reinterpret_cast<const uint4*>(slot + lane / 4 * ROW_BYTES + lane % 4 * 32);
    const uint4 low = row[0], high = row[1];
    const u32 scales = *reinterpret_cast<const u32*>(slot + SCALES_AT + lane * 4);
    const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int block = 0; block < 4; block++) {
        const u32 scale = scale_pair(scales >> 8 * block & 0xFFu);
#pragma unroll
        for (int n = 2 * block; n < 2 * block + 2; n++) {
            u32 b[4];
#pragma unroll
            for (int k = 0; k < 4; k++) b[k] = times(code_pair(words[n], k), scale);
            eight_columns(sums, x, at * 32 + n * 4 + lane % 4, b);
        }
    }
}

// The same with 16-bit values, which are put in the order of codes.
__device__ __forceinline__ void multiply_values(Sums& sums, const uint4* x, int at, const unsigned char* slot) {
    const int lane = threadIdx.x % 32;
    const uint4* row = reinterpret_cast<const uint4*>(slot + lane / 4 * ROW_BYTES + lane % 4 * 32);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint4 w = row[n];
        const u32 b[4] = {__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632), __byte_perm(w.y, w.w, 0x5410),
                          __byte_perm(w.y, w.w, 0x7632)};
        eight_columns(sums, x, place_of_eight(at * 8 + lane % 4 * 2 + n), b);
    }
}

// The sums that a warp keeps: [part][turn][token][row of the tile].
template <class P>
__device__ __forceinline__ float* sums_of(const Shared& shared, int round, int warp) {
    return shared.sums + ((P::PIECES == 1 ? round % 2 : round) * WARPS + warp) * P::KEPT;
}

// The first sum of a part that this lane keeps: of token lane / 4, in the first turn.
template <class P>
__device__ __forceinline__ float* own_sums(const Shared& shared, int round, int part) {
    const int lane = threadIdx.x % 32;
    return sums_of<P>(shared, round, threadIdx.x / 32) + part * P::TURNS * TOKENS * 8 + lane / 4 * 8 + lane % 4 * 2;
}

// Keeps the sums of a part: for join(), or for the next piece.
template <class P>
__device__ __forceinline__ void keep(const Sums& sums, const Shared& shared, int round, int part) {
    const int token = threadIdx.x % 32 / 4;
    float* own = own_sums<P>(shared, round, part);
    const auto one = [&](int at, int n) {
        const float first = sums.turns[0][n], second = sums.turns[1][n];
        own[at] = P::TURNS == 1 ? first + second : first;
        if (P::TURNS == 2) own[at + TOKENS * 8] = second;
    };
    if (token < TOKENS) one(0, 0), one(1, 1);
    if (token + 8 < TOKENS) one(64, 2), one(65, 3);
}

// The sums with which a piece begins: those that the pieces before have left. So a sum takes its terms in one order, whether
// the activations come in pieces or not.
template <class P>
__device__ __forceinline__ Sums sums_so_far(const Shared& shared, int piece, int round, int part) {
    Sums sums = {};
    if (piece == 0) return sums;
    const int token = threadIdx.x % 32 / 4;
    const float* own = own_sums<P>(shared, round, part);
    const auto one = [&](int at, int n) { sums.turns[0][n] = own[at], sums.turns[1][n] = own[at + TOKENS * 8]; };
    if (token < TOKENS) one(0, 0), one(1, 1);
    if (token + 8 < TOKENS) one(64, 2), one(65, 3);
    return sums;
}

// Adds up the sums of the warps that share a tile, and stores them.
template <class P, class Store>
__device__ __forceinline__ void join(const Shared& shared, int round, int tokens, const Store& store) {
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x; n < P::GROUPS * TOKENS * 8; n += UNITS) {
        const int group = n / (TOKENS * 8), tile = (round * P::GROUPS + group) * CUBES + blockIdx.x;
        const int token = n / 8 % TOKENS, row = n % 8;
        if (tile >= P::TILES || token >= tokens) continue;
        float total[P::PARTS];
#pragma unroll
        for (int part = 0; part < P::PARTS; part++) {
            total[part] = 0.0f;
#pragma unroll 4
            for (int s = 0; s < P::SPLIT; s++) {
                const float* sums = sums_of<P>(shared, round, group * P::SPLIT + s) + part * P::TURNS * TOKENS * 8;
                const int at = token * 8 + row;
                total[part] += P::TURNS == 1 ? sums[at] : sums[at] + sums[at + TOKENS * 8];
            }
            total[part] *= P::CODES ? UNDO : 1.0f;
        }
        store(token, tile, row, total);
    }
}

// ---- Activations ----

// Who rounds the activations of a token: the units of a cube, or their share of it, and where they lie.
template <int UNITS_>
struct Crew {
    static constexpr int UNITS = UNITS_, WARPS = UNITS / 32;
    int token, place;
    uint4* row;

    __device__ __forceinline__ Crew(const Shared& shared)
        : token(threadIdx.x / UNITS), place(threadIdx.x % UNITS), row(reinterpret_cast<uint4*>(shared.x + token * X_STRIDE)) {}
};

// A store of its own, because the emulator does not see the store of what a function has just returned.
__device__ __forceinline__ void store(uint4* at, const uint4& v) { *at = v; }

// Eight activations of one token, in the order of codes. Neighboring units take neighboring places: these are in different banks,
// and whole warps have places, because columns come in multiples of 256.
__device__ __forceinline__ uint4 get(const uint4* row, int place) {
    const uint4 low = row[2 * place], high = row[2 * place + 1];
    return make_uint4(low.x, low.z, high.x, high.z);
}

__device__ __forceinline__ void put(uint4* row, int place, uint4 v) {
    store(row + 2 * place, make_uint4(v.x, v.x, v.y, v.y));
    store(row + 2 * place + 1, make_uint4(v.z, v.z, v.w, v.w));
}

// Eight neighboring numbers in the order of codes.
__device__ __forceinline__ uint4 in_code_order(uint4 w) {
    return make_uint4(__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632), __byte_perm(w.y, w.w, 0x5410),
                      __byte_perm(w.y, w.w, 0x7632));
}

// And back.
__device__ __forceinline__ uint4 in_order(uint4 v) {
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                      __byte_perm(v.z, v.w, 0x7632));
}

// Calls f(v, place) for the eights that this unit has put into shared memory, and puts back what it makes of v.
template <class C, class F>
__device__ __forceinline__ void for_own_eights(const C& crew, int count, F f) {
#pragma unroll 1
    for (int place = crew.place; place < count; place += C::UNITS) {
        float p[8];
        values_of(get(crew.row, place), p);
        float v[8] = {p[0], p[2], p[4], p[6], p[1], p[3], p[5], p[7]};
        f(v, place);
        put(crew.row, place, make_uint4(pair_of(v[0], v[4]), pair_of(v[1], v[5]), pair_of(v[2], v[6]), pair_of(v[3], v[7])));
    }
}

__device__ __forceinline__ float largest(const float (&v)[8]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
    return most;
}

// The largest of a token's numbers that its units give; every unit of the cube takes part, and gets that of its token.
template <class C>
__device__ __forceinline__ float token_max(const C& crew, float x, const Shared& shared) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) shared.found[threadIdx.x / 32] = x;
    __syncthreads();
    float most = 0.0f;
#pragma unroll 4
    for (int w = 0; w < C::WARPS; w++) most = fmaxf(most, shared.found[crew.token * C::WARPS + w]);
    __syncthreads();
    return most;
}

// Normalizes the activations in shared memory: round(round(x / rms) * round(w)). Squares are added by 32 neighboring places
// first: the order does not depend on the number of tokens. Returns the largest magnitude of this unit's results.
template <class C>
__device__ __forceinline__ float normalize(const C& crew, const float* w, const Shared& shared) {
    constexpr int EIGHTS = D / 8, FULL = EIGHTS / 32;
#pragma unroll 1
    for (int part = crew.place / 32; part < FULL; part += C::WARPS) {
        float squares = 0.0f, v[8];
        values_of(get(crew.row, part * 32 + threadIdx.x % 32), v);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += v[i] * v[i];
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) shared.found[crew.token * 32 + part] = squares;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < FULL; part++) sum += shared.found[crew.token * 32 + part];
    const float inverse = rsqrtf(sum / D + EPS);
    float amax = 0.0f;
    for_own_eights(crew, EIGHTS, [&](float (&v)[8], int place) {
        const float4* weights = reinterpret_cast<const float4*>(w) + 2 * eight_of_place(place);
        const float4 low = __ldg(weights), high = __ldg(weights + 1);
        const float own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = rounded(rounded(v[i] * inverse) * rounded(own[i]));
        amax = fmaxf(amax, largest(v));
    });
    __syncthreads();
    return amax;
}

// Puts a token's activations x into shared memory, normalized if there are weights of a norm, and rounded as the product wants.
template <class P, class C>
__device__ __forceinline__ void round_row(const C& crew, const u16* x, bool live, const float* norm, const Shared& shared,
                                          float2 given) {
    float amax = 0.0f;
#pragma unroll 2
    for (int place = crew.place; place < P::COLS / 8; place += C::UNITS) {
        uint4 w = {};
        if (live) w = __ldcg(reinterpret_cast<const uint4*>(x) + eight_of_place(place));
        put(crew.row, place, in_code_order(w));
        float v[8];
        values_of(w, v);
        amax = fmaxf(amax, largest(v));
    }
    if (norm) amax = normalize(crew, norm, shared);
    if (P::SCALES == 0) return;
    const float2 scale = P::SCALES == 1 ? row_scale(token_max(crew, amax, shared)) : given;
    // The two eights of a block are four places apart.
    for_own_eights(crew, P::COLS / 8, [&](float (&v)[8], int) {
        const float own = largest(v);
        quantize(v, fmaxf(own, __shfl_xor_sync(0xFFFFFFFFu, own, 4)), scale);
    });
}

// Rounds each token's activations in one cube, for all cubes, where every cube for itself would take longer.
template <class P>
__device__ __forceinline__ void prepare(const u16* x, const float* norm, u16* prepared, const Shared& shared, int tokens, float2 given) {
    for (int token = blockIdx.x; token < tokens; token += CUBES) {
        const Crew<UNITS> crew(shared);
        round_row<P>(crew, x + token * P::COLS, true, norm, shared, given);
        for (int place = crew.place; place < P::COLS / 8; place += UNITS)
            store(reinterpret_cast<uint4*>(prepared + token * P::COLS) + eight_of_place(place), in_order(get(crew.row, place)));
        __syncthreads();
    }
}

// Puts the columns from `first` on of prepared activations into shared memory: a piece, of two tokens a row.
template <class P>
__device__ __forceinline__ void load_piece(const u16* x, const Shared& shared, int tokens, int first) {
    constexpr int EIGHTS = P::PIECE / 8;
#pragma unroll 2
    for (int n = threadIdx.x; n < X_ROWS * EIGHTS; n += UNITS) {
        const int row = n / EIGHTS, place = n % EIGHTS, col = first + eight_of_place(place) * 8;
        if (col >= P::COLS) continue;
        const auto eight = [&](int token) {
            return token < tokens ? in_code_order(__ldcg(reinterpret_cast<const uint4*>(x + token * P::COLS + col))) : make_uint4(0, 0, 0, 0);
        };
        const uint4 a = eight(row), b = TOKENS > 8 ? eight(row + 8) : a;
        uint4* at = reinterpret_cast<uint4*>(shared.x + row * X_STRIDE) + 2 * place;
        store(at, make_uint4(a.x, b.x, a.y, b.y));
        store(at + 1, make_uint4(a.z, b.z, a.w, b.w));
    }
}

// The whole product of the activations x, which are normalized if there are weights of a norm, and rounded. `ahead` is what
// request_first() gave.
template <class P, class Rows, class Store>
__device__ __forceinline__ void product(Ahead& ahead, const u16* x, const float* norm, const Rows& rows, const Launch& launch,
                                        float2 given, const Store& store) {
    const Shared& shared = launch.shared;
    const int tokens = launch.tokens;
    if constexpr (PREPARED) {
        prepare<P>(x, norm, launch.prepared, shared, tokens, given);
        grid_wait(launch.barrier, grid_arrive(launch.barrier));
    }
    unsigned char* slot = first_slot(shared);
    const uint4* own_x = own_activations(shared);
#pragma unroll 1
    for (int piece = 0; piece < P::PIECES; piece++) {
        if (piece > 0) __syncthreads();
        if constexpr (PREPARED) {
            load_piece<P>(launch.prepared, shared, tokens, piece * P::PIECE);
        } else {
            const Crew<WARPS_OF_TOKEN * 32> crew(shared);
            round_row<P>(crew, x + crew.token * P::COLS, crew.token < tokens, norm, shared, given);
        }
        __syncthreads();
        const int steps = steps_of<P>(piece), own = threadIdx.x / 32 % P::SPLIT;
#pragma unroll 1
        for (int round = 0; round < P::ROUNDS; round++) {
            const bool inside = tile_of<P>(round) < P::TILES;
#pragma unroll 1
            for (int part = 0; part < P::PARTS; part++) {
                Sums sums = {};
                if constexpr (P::PIECES > 1) sums = sums_so_far<P>(shared, piece, round, part);
#pragma unroll 1
                for (int step = 0; step < steps; step++) {
                    copies_wait<DEPTH - 2>();
                    __syncwarp();
                    request<P>(ahead, rows, shared);
                    const int at = own + step * P::SPLIT;
                    if (inside && P::CODES) multiply_codes(sums, own_x, at, slot);
                    if (inside && !P::CODES) multiply_values(sums, own_x, at, slot);
                    slot = next_slot(slot, shared);
                }
                keep<P>(sums, shared, round, part);
            }
            if (P::PIECES == 1) join<P>(shared, round, tokens, store);
        }
    }
#pragma unroll 1
    for (int round = 0; P::PIECES > 1 && round < P::ROUNDS; round++) join<P>(shared, round, tokens, store);
    copies_wait<0>();
    __syncwarp();
}
