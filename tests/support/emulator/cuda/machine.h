// What the emulated machine does for a kernel. The header files of this folder translate CUDA C++ into these calls; the
// .cpp files implement them. Arguments and results are passed by value, so that a kernel's registers stay local to it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace machine {

struct Index {
  unsigned x, y, z;
};

struct Words {
  uint32_t r[4];
};

struct Sums {
  float r[4];
};

enum class Operand { f16, bf16 };

// Barriers. `line` is the line of the kernel's text: units that wait together must be at the same one. `number` counts
// the barriers of the text: the launch may leave one of them out.
void sync_threads(int number, int line);
void sync_warp(int line);

// The barrier of all cubes: adds to a word of global memory and answers what it held; reads such a word when the other cubes have
// run as far as they can. The clock goes on whenever all cubes have read.
uint32_t arrive_at_grid(void* word, uint32_t arrival);
uint32_t read_after_others(const void* word);
uint64_t clock();
// Ends the launch.
[[noreturn]] void trap();

// Exchange between the lanes of a warp.
uint32_t shuffle(uint32_t value, unsigned source_lane, int line);
uint32_t ballot(bool value, int line);
unsigned lane();

// Fragments.
Words ldmatrix(uint32_t address, bool transposed);
uint32_t movmatrix(uint32_t pair);
Sums mma_m16n8k16(Operand type, Words a, uint32_t b0, uint32_t b1, Sums c);
Sums mma_m16n8k64_nvfp4(Words a, uint32_t b0, uint32_t b1, Sums c, uint32_t scales_a, uint32_t scales_b);

// Shared memory addresses, asynchronous copies and mbarrier objects.
uint32_t shared_address(const void* pointer);
void copy_async(uint32_t to, const void* from, unsigned size, unsigned source_size);
void copy_async_arrive(uint32_t barrier);
// The copies since the last group are one group. A unit waits until at most `groups` of its newest groups have not ended.
void copies_end_group();
void copies_wait(unsigned groups);
void barrier_init(const void* barrier, unsigned count);
unsigned barrier_arrive(const void* barrier, unsigned count);
void barrier_wait_parity(const void* barrier, unsigned parity);

// The same by their shared memory address; `bytes` more have to arrive before the phase ends.
void barrier_init_at(uint32_t barrier, unsigned count);
void barrier_expect(uint32_t barrier, unsigned bytes);
unsigned barrier_arrive_at(uint32_t barrier, unsigned count);
void barrier_wait_at(uint32_t barrier, unsigned parity);

// Hopper: boxes of a matrix to and from shared memory, and products of a warpgroup.
void load_box(uint32_t to, const void* map, uint32_t barrier, int x, int y);
void store_box(const void* map, uint32_t from, int x, int y);
void stores_wait();
void fence_proxy();
// A barrier of `count` units. Those that do not wait for the others only let them see their work.
void sync_named(unsigned number, unsigned count, bool waits);
void stmatrix(uint32_t address, Words words);
void store_floats(uint32_t address, float a, float b);
void load_floats(uint32_t address, float& a, float& b);
// The left operand of a product: a descriptor of shared memory, or else the addresses of a lane's four words.
struct Left {
  uint64_t descriptor;
  const uint32_t* words[4];
};
void product(unsigned cols, Operand type, float* sums, Left a, uint64_t b, bool adds, bool a_across, bool b_across);
void products_end_group();
void products_wait(unsigned groups);

}  // namespace machine
