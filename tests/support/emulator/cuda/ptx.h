// The PTX instructions that kernels use by inline assembly. An instruction is a function whose name is its mnemonic with
// `_` for every dot, and whose arguments are the operands in the order in which the assembly lists them. An instruction
// that is missing here is a compile error that names it.
#pragma once
#include <cmath>
#include <cstdint>

#include "machine.h"
#include "numbers.h"

namespace ptx {

inline void ldmatrix(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address, bool transposed) {
  auto words = machine::ldmatrix(address, transposed);
  r0 = words.r[0], r1 = words.r[1], r2 = words.r[2], r3 = words.r[3];
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_cta_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                                         uint32_t address) {
  ldmatrix(r0, r1, r2, r3, address, false);
}

inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_cta_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                                               uint32_t address) {
  ldmatrix(r0, r1, r2, r3, address, true);
}

inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& out, uint32_t pair) { out = machine::movmatrix(pair); }

inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                              uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                              uint32_t b1, float c0, float c1, float c2, float c3) {
  auto d = machine::mma_m16n8k16(machine::Operand::f16, {a0, a1, a2, a3}, b0, b1, {c0, c1, c2, c3});
  d0 = d.r[0], d1 = d.r[1], d2 = d.r[2], d3 = d.r[3];
}

inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1, float c0, float c1, float c2, float c3) {
  auto d = machine::mma_m16n8k16(machine::Operand::bf16, {a0, a1, a2, a3}, b0, b1, {c0, c1, c2, c3});
  d0 = d.r[0], d1 = d.r[1], d2 = d.r[2], d3 = d.r[3];
}

// The selectors (byte and thread) are 0 for both operands: anything else has no implementation.
inline void mma_sync_aligned_kind_mxf4nvf4_block_scale_scale_vec_4X_m16n8k64_row_col_f32_e2m1_e2m1_f32_ue4m3(
    float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
    uint32_t b1, float c0, float c1, float c2, float c3, uint32_t scales_a, uint16_t byte_a, uint16_t thread_a,
    uint32_t scales_b, uint16_t byte_b, uint16_t thread_b) {
  if (byte_a || thread_a || byte_b || thread_b) __builtin_trap();
  auto d = machine::mma_m16n8k64_nvfp4({a0, a1, a2, a3}, b0, b1, {c0, c1, c2, c3}, scales_a, scales_b);
  d0 = d.r[0], d1 = d.r[1], d2 = d.r[2], d3 = d.r[3];
}

inline void cp_async_cg_shared_cta_global(uint32_t to, uint64_t from, unsigned size, unsigned source_size) {
  machine::copy_async(to, reinterpret_cast<const void*>(from), size, source_size);
}

inline void cp_async_ca_shared_cta_global(uint32_t to, uint64_t from, unsigned size, unsigned source_size) {
  machine::copy_async(to, reinterpret_cast<const void*>(from), size, source_size);
}

inline void cp_async_cg_shared_cta_global(uint32_t to, const void* from, unsigned size, unsigned source_size) {
  machine::copy_async(to, from, size, source_size);
}

inline void cp_async_ca_shared_cta_global(uint32_t to, const void* from, unsigned size, unsigned source_size) {
  machine::copy_async(to, from, size, source_size);
}

inline void cp_async_commit_group() { machine::copies_end_group(); }
inline void cp_async_wait_group(unsigned groups) { machine::copies_wait(groups); }

inline void cp_async_mbarrier_arrive_shared_cta_b64(uint32_t barrier) { machine::copy_async_arrive(barrier); }

inline void cvt_rn_bf16x2_f32(uint32_t& word, float high, float low) {
  word = numbers::bf16_of(low) | uint32_t(numbers::bf16_of(high)) << 16;
}

inline void cvt_rn_f16x2_f32(uint32_t& word, float high, float low) {
  word = numbers::f16_of(low) | uint32_t(numbers::f16_of(high)) << 16;
}

// c is -0: the product alone, rounded once.
inline void fma_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  if (c != 0x80008000u) __builtin_trap();
  auto product = [&](int shift) {
    return uint32_t(numbers::bf16_of(numbers::of_bf16(uint16_t(a >> shift)) * numbers::of_bf16(uint16_t(b >> shift)))) << shift;
  };
  d = product(0) | product(16);
}

inline void prefetch_global_L2(const void*) {}

// The barrier of all cubes: an arrival adds to a word, and a block of statements reads it again and again until its highest bit has
// changed, or ends the launch.
inline void atom_add_acq_rel_gpu_global_u32(uint32_t& before, void* word, uint32_t arrival) {
  before = machine::arrive_at_grid(word, arrival);
}
inline void ld_acquire_gpu_global_u32(uint32_t& now, const void* word) { now = machine::read_after_others(word); }
inline void mov_u64(uint64_t& to, uint64_t from) { to = from; }
inline void sub_u64(uint64_t& d, uint64_t a, uint64_t b) { d = a - b; }
inline void xor_b32(uint32_t& d, uint32_t a, uint32_t b) { d = a ^ b; }
inline void setp_lt_s32(bool& p, int32_t a, int32_t b) { p = a < b; }
inline void setp_gt_u64(bool& p, uint64_t a, uint64_t b) { p = a > b; }
inline void trap() { machine::trap(); }

// Hopper (sm_90a).

inline void mbarrier_init_shared_cta_b64(uint32_t barrier, unsigned count) { machine::barrier_init_at(barrier, count); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t barrier, unsigned bytes) { machine::barrier_expect(barrier, bytes); }
inline void mbarrier_arrive_shared_cta_b64(uint32_t barrier) { machine::barrier_arrive_at(barrier, 1); }
inline void mbarrier_try_wait_parity_shared_cta_b64(uint32_t barrier, unsigned parity) {
  machine::barrier_wait_at(barrier, parity);
}
// Barriers are made before the barrier of the cube that follows.
inline void fence_mbarrier_init_release_cluster() {}

inline void cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(uint32_t to, const void* map, int x, int y,
                                                                                          uint32_t barrier) {
  machine::load_box(to, map, barrier, x, y);
}
inline void cp_async_bulk_tensor_2d_global_shared_cta_tile_bulk_group(const void* map, int x, int y, uint32_t from) {
  machine::store_box(map, from, x, y);
}
inline void cp_async_bulk_commit_group() {}
// All groups: the literal is 0. A store has read its source when it has ended.
inline void cp_async_bulk_wait_group_read(int) { machine::stores_wait(); }
inline void cp_async_bulk_wait_group(int) { machine::stores_wait(); }
inline void fence_proxy_async_shared_cta() { machine::fence_proxy(); }

inline void bar_sync(unsigned number, unsigned count) { machine::sync_named(number, count, true); }
inline void bar_arrive(unsigned number, unsigned count) { machine::sync_named(number, count, false); }
// Registers are not counted.
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}

inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::stmatrix(address, {a, b, c, d});
}
inline void st_shared_v2_f32(uint32_t address, float a, float b) { machine::store_floats(address, a, b); }
inline void ld_shared_v2_f32(float& a, float& b, uint32_t address) { machine::load_floats(address, a, b); }

inline void ex2_approx_ftz_f32(float& y, float x) { y = std::exp2(x); }

// Sums may be read and written by the products that run, from the first product of a group to the wait for it.
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { machine::products_end_group(); }
inline void wgmma_wait_group_sync_aligned(unsigned groups) { machine::products_wait(groups); }

// The sums of a lane are an array: its first element stands for all. Then come the left operand, which is a descriptor or four
// words in registers, the descriptor of the right one, whether the product adds to the sums, two signs, and for each operand in
// shared memory whether it lies across.
struct Argument {
  uint64_t value = 0;
  const uint32_t* word = nullptr;

  Argument(const float&) {}
  Argument(const uint32_t& word) : word(&word) {}
  Argument(unsigned long long descriptor) : value(descriptor) {}
  Argument(int literal) : value(literal) {}
};

template <class... Rest>
void wgmma(unsigned cols, machine::Operand type, float& sums, const Rest&... rest) {
  Argument all[] = {Argument(rest)...};
  const Argument* operands = all + cols / 2 - 1;
  bool is_in_registers = sizeof...(rest) - (cols / 2 - 1) == 9;
  machine::Left left = {operands[0].value, {}};
  if (is_in_registers) left = {0, {operands[0].word, operands[1].word, operands[2].word, operands[3].word}};
  operands += is_in_registers ? 4 : 1;
  uint64_t right = operands[0].value, add = operands[1].value;
  if (add > 1 || operands[2].value != 1 || operands[3].value != 1) __builtin_trap();
  machine::product(cols, type, &sums, left, right, add, !is_in_registers && operands[4].value,
                   operands[is_in_registers ? 4 : 5].value);
}
#define WGMMA(cols)                                                                              \
  template <class... Rest>                                                                       \
  void wgmma_mma_async_sync_aligned_m64n##cols##k16_f32_bf16_bf16(float& sums, Rest&&... rest) { \
    wgmma(cols, machine::Operand::bf16, sums, rest...);                                          \
  }                                                                                              \
  template <class... Rest>                                                                       \
  void wgmma_mma_async_sync_aligned_m64n##cols##k16_f32_f16_f16(float& sums, Rest&&... rest) {   \
    wgmma(cols, machine::Operand::f16, sums, rest...);                                           \
  }
WGMMA(64)
WGMMA(128)
WGMMA(160)
WGMMA(192)
WGMMA(256)

}  // namespace ptx
