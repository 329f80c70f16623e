// The PTX instructions that kernels use by inline assembly. An instruction is a function whose name is its mnemonic with
// `_` for every dot, and whose arguments are the operands in the order in which the assembly lists them. An instruction
// that is missing here is a compile error that names it.
#pragma once
#include <cstdint>

#include "machine.h"

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

inline void cp_async_mbarrier_arrive_shared_cta_b64(uint32_t barrier) { machine::copy_async_arrive(barrier); }

}  // namespace ptx
