// Fragments: which lane holds which elements of a matrix. The tables are those of the PTX ISA (version 8.7), chapter
// "Warp Level Matrix Instructions". In all of them a lane's group is lane / 4 and its number in the group lane % 4.
#include <cstring>

#include "internal.h"
#include "numbers.h"

namespace machine {

namespace {

float value(Operand type, uint32_t word, int half) {
  uint16_t bits = uint16_t(word >> (16 * half));
  return type == Operand::bf16 ? numbers::of_bf16(bits) : numbers::of_f16(bits);
}

/// An E2M1 number: a sign, two bits of exponent, one of mantissa.
double e2m1(uint32_t word, int index) {
  static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  uint32_t code = word >> (4 * index) & 15;
  return code & 8 ? -sizes[code & 7] : sizes[code];
}

/// An unsigned E4M3 number: four bits of exponent (bias 7), three of mantissa. 0x7F is not a number.
double ue4m3(uint32_t byte) {
  if ((byte & 127) == 127) return NAN;
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  return exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
}

/// "Matrix fragments for mma.m16n8k16 with floating point type": the accumulators, which m16n8k64 shares. Element i of
/// a lane is in row group (i < 2) or group + 8, column 2 * (lane % 4) + (i & 1).
template <class A, class B>
void accumulate(const uint32_t (*in)[12], uint32_t (*out)[4], const A& a, const B& b, int depth) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
      float before;
      memcpy(&before, &in[lane][6 + i], 4);
      double sum = before;
      for (int k = 0; k < depth; ++k) sum += double(a[row][k]) * double(b[k][column]);
      float after = float(sum);
      memcpy(&out[lane][i], &after, 4);
    }
}

}  // namespace

/// "Warp-level matrix load instruction: ldmatrix". Lanes 8i to 8i + 7 give the addresses of the rows of matrix i. A lane
/// receives elements 2 * (lane % 4) and the next of row lane / 4 of each matrix, or of its transpose.
void ldmatrix_of_warp(const uint32_t (*addresses)[12], bool transposed, uint32_t (*out)[4]) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t rows[8][8];
    for (int row = 0; row < 8; ++row) {
      uint32_t address = addresses[matrix * 8 + row][0];
      if (address % 16) fail("ldmatrix reads a row at address %u of shared memory, which is no multiple of 16", address);
      memcpy(rows[row], read_shared(address, 0), 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      int row = lane / 4, column = lane % 4 * 2;
      uint16_t low = transposed ? rows[column][row] : rows[row][column];
      uint16_t high = transposed ? rows[column + 1][row] : rows[row][column + 1];
      out[lane][matrix] = low | uint32_t(high) << 16;
    }
  }
}

/// "Matrix transpose instruction: movmatrix". A lane gives elements 2 * (lane % 4) and the next of row lane / 4, and receives
/// those of the transpose.
void movmatrix_of_warp(const uint32_t (*in)[12], uint32_t (*out)[4]) {
  uint16_t rows[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    rows[lane / 4][lane % 4 * 2] = uint16_t(in[lane][0]);
    rows[lane / 4][lane % 4 * 2 + 1] = uint16_t(in[lane][0] >> 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    int row = lane / 4, column = lane % 4 * 2;
    out[lane][0] = rows[column][row] | uint32_t(rows[column + 1][row]) << 16;
  }
}

/// "Matrix fragments for mma.m16n8k16 with floating point type". Element i of A (two in a register) is in row group for
/// i < 2 or 4 <= i < 6, else group + 8; column 2 * (lane % 4) + (i & 1), and 8 more for i >= 4. Element i of B is in row
/// 2 * (lane % 4) + (i & 1), and 8 more for i >= 2; column group.
void mma_m16n8k16_of_warp(Operand type, const uint32_t (*in)[12], uint32_t (*out)[4]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    int group = lane / 4, number = lane % 4;
    for (int i = 0; i < 8; ++i) {
      int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      int column = number * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      a[row][column] = value(type, in[lane][i / 2], i & 1);
    }
    for (int i = 0; i < 4; ++i) {
      int row = number * 2 + (i & 1) + (i >= 2 ? 8 : 0);
      b[row][group] = value(type, in[lane][4 + i / 2], i & 1);
    }
  }
  accumulate(in, out, a, b, 16);
}

/// "Matrix fragments for mma.m16n8k64". Element i of A (eight in a register) is in row group for i < 8 or 16 <= i < 24,
/// else group + 8; column 8 * (lane % 4) + (i & 7), and 32 more for i >= 16. Element i of B is in row 8 * (lane % 4) +
/// (i & 7), and 32 more for i >= 8; column group.
///
/// "Block scaling for mma.sync", scale_vec::4X with selectors 0: byte j of a scale word belongs to the elements 16j to
/// 16j + 15 of the summed dimension. Lanes 0 and 1 of a group hold the scales of the rows group and group + 8 of A; lane
/// 0 of a group holds the scales of column group of B.
void mma_m16n8k64_of_warp(const uint32_t (*in)[12], uint32_t (*out)[4]) {
  double a[16][64], b[64][8];
  for (int lane = 0; lane < 32; ++lane) {
    int group = lane / 4, number = lane % 4;
    for (int i = 0; i < 32; ++i) {
      bool upper = i < 8 || (i >= 16 && i < 24);
      int row = upper ? group : group + 8;
      int column = number * 8 + (i & 7) + (i >= 16 ? 32 : 0);
      uint32_t scales = in[group * 4 + (upper ? 0 : 1)][10];
      a[row][column] = e2m1(in[lane][i / 8], i & 7) * ue4m3(scales >> (8 * (column / 16)));
    }
    for (int i = 0; i < 16; ++i) {
      int row = number * 8 + (i & 7) + (i >= 8 ? 32 : 0);
      uint32_t scales = in[group * 4][11];
      b[row][group] = e2m1(in[lane][4 + i / 8], i & 7) * ue4m3(scales >> (8 * (row / 16)));
    }
  }
  accumulate(in, out, a, b, 64);
}

}  // namespace machine
