// CUDA C++ for the host compiler: keywords, indices, barriers, warp functions and the fast mathematical functions.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "machine.h"
#include "numbers.h"
#include "ptx.h"

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))

extern machine::Index threadIdx, blockIdx, blockDim, gridDim;
constexpr unsigned warpSize = 32;

// CUDA's vectors of integers.
struct uint3 {
  unsigned x, y, z;
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

// CUDA's vectors that kernels load at once.
struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// Loads that differ in which caches they use.
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
T __ldcg(const T* pointer) {
  return *pointer;
}
// Barriers order what is written here.
inline void __threadfence() {}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
// A word of four of the eight bytes of b:a, chosen by the hexadecimal digits of `places`.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned places) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}

// Barriers and exchange within a warp: all lanes take part.
#define __syncwarp() machine::sync_warp(__LINE__)
#define __shfl_sync(mask, value, lane) emulated_shuffle(value, unsigned(lane) % 32, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) emulated_shuffle(value, machine::lane() ^ unsigned(lanes), __LINE__)
#define __shfl_down_sync(mask, value, lanes) \
  emulated_shuffle(value, std::min(machine::lane() + unsigned(lanes), 31u), __LINE__)
#define __shfl_up_sync(mask, value, lanes) \
  emulated_shuffle(value, machine::lane() < unsigned(lanes) ? machine::lane() : machine::lane() - unsigned(lanes), __LINE__)
#define __any_sync(mask, value) (machine::ballot(value, __LINE__) != 0)
#define __all_sync(mask, value) (machine::ballot(!(value), __LINE__) == 0)
#define __ballot_sync(mask, value) machine::ballot(value, __LINE__)

template <class T>
T emulated_shuffle(T value, unsigned lane, int line) {
  static_assert(sizeof(T) == 4);
  return std::bit_cast<T>(machine::shuffle(std::bit_cast<uint32_t>(value), lane, line));
}

inline size_t __cvta_generic_to_shared(const void* pointer) { return machine::shared_address(pointer); }

// Barrier objects of the CUDA C++ library.
namespace cuda {

enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };

template <thread_scope scope>
struct barrier {
  using arrival_token = unsigned;
  uint64_t word;

  arrival_token arrive(unsigned count = 1) { return machine::barrier_arrive(this, count); }
  void wait(arrival_token token) const { machine::barrier_wait_parity(this, token & 1); }
  void wait_parity(bool parity) const { machine::barrier_wait_parity(this, parity); }
  void arrive_and_wait() { wait(arrive()); }
  friend void init(barrier* b, unsigned count) { machine::barrier_init(b, count); }
};

namespace device {
template <thread_scope scope>
unsigned long long* barrier_native_handle(barrier<scope>& b) {
  return reinterpret_cast<unsigned long long*>(&b);
}
}  // namespace device

}  // namespace cuda

namespace cooperative_groups {
struct thread_block {};
inline thread_block this_thread_block() { return {}; }
}  // namespace cooperative_groups

// Functions that the device has and the host has not. Their fast forms are as exact here as the others.
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// Without it, C's `abs` would take floats as integers.
using std::abs;
using std::max;
using std::min;
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && !std::is_same_v<A, B>)
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return std::max(T(a), T(b));
}
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B> && !std::is_same_v<A, B>)
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return std::min(T(a), T(b));
}

// Calls a kernel as a CUDA launch does: an argument is given by its address. Answers how many arguments it takes.
template <class... Arguments>
constexpr int emulated_arity(void (*)(Arguments...)) {
  return sizeof...(Arguments);
}
template <class... Arguments>
void emulated_call(void (*kernel)(Arguments...), void** arguments) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_cv_t<Arguments>*>(arguments[i])...);
  }(std::index_sequence_for<Arguments...>{});
}
