// Runs one launch. The file that the argument names holds words of 64 bits: bytes of shared memory; cubes and units in
// three dimensions each; the number of buffers and the bytes of each; the number of buffer arguments and the buffer of
// each; the number of tensor maps, whose buffers are the first arguments, and for each rows and columns of the matrix, rows
// and columns of a box, and bytes of a number; the number of words of `info`, those before its dynamic part, and the words. The
// bytes of the buffers follow. The program writes the buffers back to the file `<name>.out`, one after another. A second argument is the number of a barrier
// that is left out.
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include "internal.h"

// What the kernel's text defines.
extern "C" int emulated_arguments();
extern "C" void emulated_kernel(void** arguments);

namespace {

// Static, because kernels may read the program's data and no other memory of the host.
void* arguments[1024];
void* pointers[1024];
uint64_t info[1024];
machine::TensorMap maps[32];

void kernel() { emulated_kernel(arguments); }

/// Seconds of the processor that a launch may take: a loop of the kernel may have no end. Real time would end a launch on a
/// machine that has much else to do.
constexpr rlim_t LONGEST = 120;

void too_long(int) { machine::fail("the launch does not end within %u s of processor time", unsigned(LONGEST)); }

void limit_time() {
  rlimit limit{LONGEST, LONGEST + 1};
  signal(SIGXCPU, too_long);
  setrlimit(RLIMIT_CPU, &limit);
}

}  // namespace

int main(int count_of_names, char** names) {
  limit_time();
  if (count_of_names > 2) machine::left_out = atoi(names[2]);
  std::ifstream file(names[1], std::ios::binary);
  auto word = [&] {
    uint64_t value = 0;
    file.read(reinterpret_cast<char*>(&value), 8);
    return value;
  };
  auto index = [&] {
    unsigned x = unsigned(word()), y = unsigned(word()), z = unsigned(word());
    return machine::Index{x, y, z};
  };
  size_t shared = word();
  auto cubes = index(), shape = index();
  machine::units = shape.x * shape.y * shape.z;
  std::vector<size_t> sizes(word());
  for (auto& size : sizes) size = word();
  std::vector<size_t> of_argument(word());
  for (auto& buffer : of_argument) buffer = word();
  size_t count_of_maps = word();
  if (count_of_maps > std::size(maps) || count_of_maps > of_argument.size()) machine::fail("too many tensor maps");
  for (size_t i = 0; i < count_of_maps; ++i)
    for (auto field : {&machine::TensorMap::rows, &machine::TensorMap::cols, &machine::TensorMap::tile_rows,
                       &machine::TensorMap::tile_cols, &machine::TensorMap::size})
      maps[i].*field = word();
  size_t words = word(), fixed = word();
  if (words > std::size(info) || count_of_maps + of_argument.size() + 2 > std::size(arguments))
    machine::fail("too many arguments");
  for (size_t i = 0; i < words; ++i) info[i] = word();
  std::vector<unsigned char*> buffers;
  for (size_t size : sizes) {
    buffers.push_back(static_cast<unsigned char*>(aligned_alloc(512, (size + 1023) / 512 * 512)));
    file.read(reinterpret_cast<char*>(buffers.back()), std::streamsize(size));
    machine::add_buffer(unsigned(buffers.size() - 1), buffers.back(), size);
  }
  if (!file) machine::fail("the file of the launch is too short");

  // The order of CubeCL's CUDA runtime: tensor maps by value, the buffers behind them, other buffers, the dynamic metadata if
  // there is any, then `info` by value.
  size_t count = 0;
  for (size_t i = 0; i < count_of_maps; ++i) {
    maps[i].start = buffers[of_argument[i]];
    arguments[count++] = &maps[i];
  }
  auto pass = [&](void* pointer) { pointers[count] = pointer, arguments[count] = &pointers[count], ++count; };
  for (size_t buffer : of_argument) pass(buffers[buffer]);
  if (fixed < words) pass(info + fixed);
  arguments[count++] = info;
  int taken = emulated_arguments();
  if (taken != int(count) && taken != int(count) - 1)
    machine::fail("the kernel takes %d arguments and the launch has %zu", taken, count);

  machine::run_cubes(cubes, shape, shared, kernel);

  std::ofstream out(std::string(names[1]) + ".out", std::ios::binary);
  for (size_t i = 0; i < sizes.size(); ++i)
    out.write(reinterpret_cast<char*>(buffers[i]), std::streamsize(sizes[i]));
  return out.good() ? 0 : 2;
}
