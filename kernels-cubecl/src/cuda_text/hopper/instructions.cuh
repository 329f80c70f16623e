// Instructions that CUDA C++ has no function for, one function each. Shared memory is addressed by 32 bits. An asm block of
// several statements is named by its first instruction and lists all of its operands in order (tests/support/emulator).

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

// ---- Barriers in shared memory: `arrivals` units, and the bytes that copies bring, end a phase ----

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Arrives, and tells the barrier how many bytes will come in this phase.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1; @P bra DONE; bra AGAIN; DONE: }"
                 ::"r"(barrier), "r"(parity) : "memory");
}

// Makes the initial state of barriers visible to the copy engine.
__device__ __forceinline__ void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- The copy engine (TMA): a box of a matrix between global and shared memory ----

// Loads the box at column x and row y; what is outside the matrix becomes zero. The bytes arrive on the barrier.
__device__ __forceinline__ void load(unsigned to, const CUtensorMap* map, unsigned barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// Stores a box; what is outside the matrix is not written.
__device__ __forceinline__ void store(const CUtensorMap* map, unsigned from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void stores_end_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the stores of this unit have read shared memory.
__device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(0) : "memory");
}

// Waits until the stores of this unit have ended.
__device__ __forceinline__ void stores_have_ended() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory");
}

// Lets the copy engine see what this unit has written to shared memory.
__device__ __forceinline__ void writes_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Warpgroups of 128 units ----

// A barrier of one warpgroup, 1 or 2. Barrier 0 is that of the cube.
__device__ __forceinline__ void warpgroup_sync(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(128) : "memory");
}

// Two warpgroups take turns: each waits for its own turn, which the other one gives.
__device__ __forceinline__ void turn_wait(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup), "n"(256) : "memory");
}

__device__ __forceinline__ void turn_give(int warpgroup) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + warpgroup), "n"(256) : "memory");
}

// Registers of a unit. A multiprocessor has 65,536, and a kernel begins with 168 for each of 384 units.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Products of a warpgroup ----

// Orders earlier accesses to the sums before the products that follow.
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_end_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `GROUPS` groups of products run.
template <int GROUPS>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// The descriptor of an operand in shared memory, whose rows of 128 bytes are swizzled. An operand that lies along has its
// summed values in a row. One that lies across has 64 values of its other index in a row, and the next 64 in another box, that
// many bytes behind.
__device__ __forceinline__ unsigned long long descriptor(unsigned at, unsigned boxes) {
    const unsigned long long distance = boxes ? boxes : 16, eight_rows = 1024;
    return (at & 0x3FFFF) >> 4 | distance >> 4 << 16 | eight_rows >> 4 << 32 | 1ull << 62;
}

// ---- Results ----

// Two numbers of 16 bits, `low` first in memory.
__device__ __forceinline__ unsigned rounded(float low, float high) {
    unsigned word;
    asm("cvt.rn.@RESULT@x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Stores four 8x8 matrices of 16-bit numbers: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_pair(unsigned to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ float2 load_pair(unsigned from) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
    return pair;
}

// ---- Arithmetic ----

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
