// What the files of the machine know of each other: units, what each unit has seen of the others, and failures.
//
// Races are found by vector clocks. A unit counts the times at which it lets others see its work (a barrier, an arrival).
// `seen[v]` is the latest such time of unit `v` that this unit knows of. An access is ordered after another unit's access
// if `seen` has reached the time at which that access was made. The copies that unit `v` starts asynchronously have a
// clock of their own, `seen[units + v]`: whoever waits for a barrier on which the copies have arrived sees them.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
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

struct Unit {
  unsigned number;
  Index position;
  Clock seen;
  /// Copies since the unit's last cp.async.mbarrier.arrive, and their time.
  std::vector<Copy> copies;
  uint32_t copies_time;
  /// What the unit waits for, or null.
  const char* waits_for;
  int line;
  bool finished;
  // Its thread of execution.
  jmp_buf place;
  ucontext_t beginning;
  unsigned char* stack;
  bool begun;
};

constexpr size_t STACK = 512 << 10;

extern Unit* unit;        // the running unit
extern unsigned units;    // of a cube
extern unsigned cube;     // number of the running cube
extern int left_out;      // number of the barrier that is left out, or -1

/// Prints where and what, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// Lets other units run until `wake` is called for this one.
void wait(const char* what, int line);
void wake(Unit& other);

// units.cpp
void run_cube(Index position, Index cubes, Index shape, void (*kernel)());

// memory.cpp
void add_buffer(unsigned number, void* start, size_t size);
void reset_shared(size_t size);
void reset_barriers();
/// Lets asynchronous copies end. False if there are none.
bool complete_copies();
const unsigned char* read_shared(uint32_t address, size_t size);

}  // namespace machine
