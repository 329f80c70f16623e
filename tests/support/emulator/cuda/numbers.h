// The 16-bit numbers of CUDA, and the storage types of its 8-bit and 4-bit ones. Arithmetic rounds each result once, from
// float: that is what the instructions of a GPU do for one operation.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace numbers {

inline uint16_t bf16_of(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7FFF;
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float of_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

inline float of_f16(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                : exponent     ? std::ldexp(float(1024 + mantissa), exponent - 25)
                               : std::ldexp(float(mantissa), -24);
  return bits >> 15 ? -value : value;
}

inline uint16_t f16_of(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return 0x7FFF;
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | 0x7C00;
  int exponent;
  std::frexp(size, &exponent);
  // The spacing of f16 numbers at this size: 2^-24 among subnormal ones.
  int unit = std::max(exponent - 11, -24);
  float steps = std::nearbyint(std::ldexp(size, -unit));
  if (unit == -24) return sign | uint16_t(steps);
  return sign | uint16_t((unit + 25 - 1) * 1024 + int(steps));
}

template <uint16_t (*encode)(float), float (*decode)(uint16_t)>
struct alignas(2) Short {
  uint16_t bits;

  Short() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  Short(T value) : bits(encode(float(value))) {}
  template <uint16_t (*e)(float), float (*d)(uint16_t)>
  explicit Short(Short<e, d> other) : bits(encode(float(other))) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  explicit operator T() const {
    return T(decode(bits));
  }
  operator float() const { return decode(bits); }

  friend Short operator+(Short a, Short b) { return float(a) + float(b); }
  friend Short operator-(Short a, Short b) { return float(a) - float(b); }
  friend Short operator*(Short a, Short b) { return float(a) * float(b); }
  friend Short operator/(Short a, Short b) { return float(a) / float(b); }
  friend Short operator-(Short a) { return -float(a); }
  Short& operator+=(Short b) { return *this = *this + b; }
  Short& operator-=(Short b) { return *this = *this - b; }
  Short& operator*=(Short b) { return *this = *this * b; }
  Short& operator/=(Short b) { return *this = *this / b; }
  friend bool operator==(Short a, Short b) { return float(a) == float(b); }
  friend bool operator!=(Short a, Short b) { return float(a) != float(b); }
  friend bool operator<(Short a, Short b) { return float(a) < float(b); }
  friend bool operator>(Short a, Short b) { return float(a) > float(b); }
  friend bool operator<=(Short a, Short b) { return float(a) <= float(b); }
  friend bool operator>=(Short a, Short b) { return float(a) >= float(b); }
};

template <class T>
struct alignas(4) Pair {
  T x, y;

  Pair() = default;
  Pair(T both) : x(both), y(both) {}
  Pair(T x, T y) : x(x), y(y) {}
  friend Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  friend Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
  friend Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
  friend Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
  friend Pair operator-(Pair a) { return {-a.x, -a.y}; }
};

}  // namespace numbers

using __half = numbers::Short<numbers::f16_of, numbers::of_f16>;
using __nv_bfloat16 = numbers::Short<numbers::bf16_of, numbers::of_bf16>;
using __half2 = numbers::Pair<__half>;
using __nv_bfloat162 = numbers::Pair<__nv_bfloat16>;
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp4_storage_t = unsigned char;
using __nv_fp4x2_storage_t = unsigned char;

template <class T>
concept ShortFloat = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

template <ShortFloat T>
T __hmax(T a, T b) {
  return a > b ? a : b;
}
template <ShortFloat T>
T __hmin(T a, T b) {
  return a < b ? a : b;
}
template <ShortFloat T>
numbers::Pair<T> __hmax2(numbers::Pair<T> a, numbers::Pair<T> b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
template <ShortFloat T>
numbers::Pair<T> __hmin2(numbers::Pair<T> a, numbers::Pair<T> b) {
  return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
