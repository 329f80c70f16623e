// The PTX instructions that kernels use by inline assembly. An instruction is a function whose name is its mnemonic with
// `_` for every dot, and whose arguments are the operands in the order in which the assembly lists them. An instruction
// that is missing here is a compile error that names it.
#pragma once
#include <cstdarg>
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

// The barrier of all cubes: an arrival adds to the word, and a block of statements waits for its highest bit to change.
inline void atom_add_acq_rel_gpu_global_u32(uint32_t& before, void* word, uint32_t arrival) {
  before = machine::arrive_at_grid(word, arrival);
}
inline void ld_acquire_gpu_global_u32(void* word, uint32_t before) { machine::wait_for_grid(word, before); }

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

inline void bar_sync(unsigned number, unsigned count) { machine::sync_named(number, count); }
// Registers are not counted.
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}

inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  machine::stmatrix(address, {a, b, c, d});
}
inline void st_shared_v2_f32(uint32_t address, float a, float b) { machine::store_floats(address, a, b); }

// Sums may be read and written by the products that run, from the first product of a group to the wait for it.
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { machine::products_end_group(); }
inline void wgmma_wait_group_sync_aligned(unsigned groups) { machine::products_wait(groups); }

// The sums of a lane are an array: its first element stands for all. Then come two descriptors and five literals.
inline void wgmma(unsigned cols, machine::Operand type, float* sums, ...) {
  va_list rest;
  va_start(rest, sums);
  for (unsigned i = 1; i < cols / 2; ++i) va_arg(rest, double);
  uint64_t a = va_arg(rest, unsigned long long), b = va_arg(rest, unsigned long long);
  int add = va_arg(rest, int), sign_a = va_arg(rest, int), sign_b = va_arg(rest, int);
  int a_across = va_arg(rest, int), b_across = va_arg(rest, int);
  va_end(rest);
  if (add != 1 || sign_a != 1 || sign_b != 1) __builtin_trap();
  machine::product(cols, type, sums, a, b, a_across, b_across);
}
#define wgmma_mma_async_sync_aligned_m64n128k16_f32_bf16_bf16(sums, ...) wgmma(128, machine::Operand::bf16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n160k16_f32_bf16_bf16(sums, ...) wgmma(160, machine::Operand::bf16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n192k16_f32_bf16_bf16(sums, ...) wgmma(192, machine::Operand::bf16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n256k16_f32_bf16_bf16(sums, ...) wgmma(256, machine::Operand::bf16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n128k16_f32_f16_f16(sums, ...) wgmma(128, machine::Operand::f16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n160k16_f32_f16_f16(sums, ...) wgmma(160, machine::Operand::f16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n192k16_f32_f16_f16(sums, ...) wgmma(192, machine::Operand::f16, &(sums), __VA_ARGS__)
#define wgmma_mma_async_sync_aligned_m64n256k16_f32_f16_f16(sums, ...) wgmma(256, machine::Operand::f16, &(sums), __VA_ARGS__)

}  // namespace ptx
