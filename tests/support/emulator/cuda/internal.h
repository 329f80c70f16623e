// What the files of the machine know of each other: units, what each unit has seen of the others, and failures.
//
// Races are found by vector clocks. A unit counts the times at which it lets others see its work (a barrier, an arrival).
// `seen[v]` is the latest such time of unit `v` that this unit knows of. An access is ordered after another unit's access
// if `seen` has reached the time at which that access was made. The copies that unit `v` starts asynchronously have a
// clock of their own, `seen[units + v]`: whoever waits for a barrier on which the copies have arrived sees them. So have the
// products of warpgroup `w`, `seen[2 * units + w]`: whoever waits for them sees that they have read their operands.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "machine.h"

namespace machine {

using Clock = std::vector<uint32_t>;

inline void join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = from[i] > into[i] ? from[i] : into[i];
}

/// A copy to shared memory that has started. The bytes are those of its source, followed by zeros.
struct Copy {
  uint32_t to;
  uint32_t size;
  unsigned char bytes[16];
};

/// What a kernel gets as a tensor map: a row-major matrix, and the box that a copy moves. Boxes have the 128-byte swizzle.
struct alignas(64) TensorMap {
  unsigned char* start;
  uint64_t rows, cols, tile_rows, tile_cols, size;
  uint64_t unused[10];
};

struct Unit {
  unsigned number;
  Index position;
  Clock seen;
  /// Copies since the unit's last cp.async.mbarrier.arrive, and their time.
  std::vector<Copy> copies;
  uint32_t copies_time;
  /// Groups of copies that have not ended, the oldest first, with their times.
  std::deque<std::pair<uint32_t, std::vector<Copy>>> groups;
  /// What the unit waits for, or null.
  const char* waits_for;
  int line;
  bool finished;
  // The unit's thread of execution.
  jmp_buf place;
  ucontext_t beginning;
  unsigned char* stack;
  bool begun;
};

constexpr size_t STACK = 512 << 10;

extern Unit* unit;        // the running unit
extern unsigned units;    // of a cube
extern unsigned cube;     // number of the running cube

inline unsigned warpgroups() { return (units + 127) / 128; }
inline Clock new_clock() { return Clock(2 * units + warpgroups(), 0); }
extern int left_out;      // number of the barrier that is left out, or -1

/// Prints where and what, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// Lets other units run until `wake` is called for this one.
void wait(const char* what, int line);
void wake(Unit& other);

// units.cpp
void run_cubes(Index cubes, Index shape, size_t shared, void (*kernel)());

// memory.cpp
void add_buffer(unsigned number, void* start, size_t size);
void reset_shared(size_t size);
void reset_barriers();
/// The shared memory of a cube that waits for other cubes, while these have their turn.
struct SharedMemory;
std::shared_ptr<SharedMemory> take_shared();
void put_shared(SharedMemory& memory);
/// Lets every cube see what was written to global memory until now.
void show_writes();
/// Fails unless a buffer holds these bytes.
void expect_in_buffer(const void* pointer, size_t size);
/// Lets asynchronous copies end. False if there are none.
bool complete_copies();
/// Bytes of shared memory that the running unit reads, or its copies or products do, whose clock is `reader`.
const unsigned char* read_shared(uint32_t address, size_t size);
const unsigned char* read_shared_as(uint32_t reader, uint32_t time, uint32_t address, size_t size);
void write_shared(uint32_t address, const void* bytes, size_t size);
/// Fails if a unit has written these bytes of shared memory since its time in `fenced`: the copy engine would not see them.
void expect_fenced(uint32_t address, size_t size, const std::map<unsigned, uint32_t>& fenced);
/// A read or write of global memory by the running unit.
void access_global(const void* pointer, size_t size, bool write);
/// Starts copies whose bytes arrive on a barrier when they end.
void copies_bring_bytes(uint32_t barrier, std::vector<Copy> copies);

// units.cpp
Unit& unit_number(unsigned number);

// hopper.cpp
void reset_hopper();
/// Fails if the running unit ends while its stores may still read shared memory.
void expect_stores_ended();

}  // namespace machine
