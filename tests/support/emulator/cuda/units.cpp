// Units of a cube as coroutines on one processor. A unit runs until it waits for others: at a barrier, or where the lanes
// of a warp exchange values. Copies end as late as possible: when every unit waits. Units begin in another order in each
// cube. One cube runs after another; at a barrier of all cubes it rests until the others are there.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "internal.h"

machine::Index threadIdx, blockIdx, blockDim, gridDim;

namespace machine {

Unit* unit;
unsigned units, cube;
int left_out = -1;

namespace {

std::vector<Unit> all;
std::deque<Unit*> ready;
jmp_buf scheduler;
void (*body)();

/// The barrier of the whole cube.
struct {
  unsigned arrived;
  int line;
} cube_barrier;

/// What the lanes of a warp exchange: each lane puts its words and takes its answer.
struct Warp {
  unsigned arrived;
  const char* what;
  int line;
  uint32_t in[32][12];
  uint32_t out[32][4];
};
std::vector<Warp> warps;

unsigned lanes_of(unsigned warp) { return std::min(32u, units - warp * 32); }

void begin() {
  body();
  expect_stores_ended();
  unit->finished = true;
  _longjmp(scheduler, 1);
}

void resume(Unit& next) {
  unit = &next;
  threadIdx = next.position;
  if (_setjmp(scheduler)) return;
  if (next.begun) _longjmp(next.place, 1);
  next.begun = true;
  setcontext(&next.beginning);
}

void prepare(Unit& u, unsigned number, Index shape) {
  u.number = number;
  u.position = {number % shape.x, number / shape.x % shape.y, number / (shape.x * shape.y)};
  u.seen = new_clock();
  u.seen[number] = 1;
  u.copies.clear();
  u.copies_time = 1;
  u.groups.clear();
  u.waits_for = nullptr;
  u.finished = u.begun = false;
  if (!u.stack) {
    void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    mprotect(memory, 4096, PROT_NONE);
    u.stack = static_cast<unsigned char*>(memory);
  }
  getcontext(&u.beginning);
  u.beginning.uc_stack.ss_sp = u.stack;
  u.beginning.uc_stack.ss_size = STACK;
  u.beginning.uc_link = nullptr;
  makecontext(&u.beginning, begin, 0);
}

/// The units in an order that depends on the cube.
void queue_all() {
  ready.clear();
  for (auto& u : all) ready.push_back(&u);
  uint32_t state = cube * 2654435761u + 1;
  for (size_t i = ready.size() - 1; i > 0; --i) {
    state = state * 1664525u + 1013904223u;
    std::swap(ready[i], ready[(state >> 8) % (i + 1)]);
  }
}

/// Orders what these units did before after what any of them does next.
template <class Units>
void synchronize(Units first, Units last) {
  Clock joint = new_clock();
  for (auto u = first; u != last; ++u)
    if (!u->finished) join(joint, u->seen);
  for (auto u = first; u != last; ++u)
    if (!u->finished) u->seen = joint, ++u->seen[u->number];
}

[[noreturn]] void deadlock() {
  unsigned waiting = 0;
  for (auto& u : all) waiting += !u.finished;
  for (auto& u : all)
    if (!u.finished) {
      unit = &u;
      fail("deadlock: %u units wait for each other, this one for %s in line %d", waiting, u.waits_for, u.line);
    }
  abort();
}

/// Runs `answer` once all lanes of the warp are here, and continues each lane.
template <class Answer>
const uint32_t* exchange(const char* what, int line, std::initializer_list<uint32_t> words, Answer answer) {
  unsigned number = unit->number / 32, own = unit->number % 32;
  Warp& warp = warps[number];
  if (warp.arrived == 0) {
    warp.what = what, warp.line = line;
  } else if (strcmp(warp.what, what) || warp.line != line) {
    fail("lanes of a warp are at %s in line %d and at %s in line %d", warp.what, warp.line, what, line);
  }
  std::copy(words.begin(), words.end(), warp.in[own]);
  if (++warp.arrived < lanes_of(number)) {
    wait(what, line);
  } else {
    warp.arrived = 0;
    answer(warp);
    for (unsigned i = 0; i < lanes_of(number); ++i)
      if (i != own) wake(all[number * 32 + i]);
  }
  return warp.out[own];
}

}  // namespace

void fail(const char* format, ...) {
  fprintf(stderr, "cube (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
  if (unit) fprintf(stderr, ", unit (%u, %u, %u)", unit->position.x, unit->position.y, unit->position.z);
  fputs(": ", stderr);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  _exit(3);
}

void wait(const char* what, int line) {
  unit->waits_for = what;
  unit->line = line;
  if (!_setjmp(unit->place)) _longjmp(scheduler, 1);
}

void wake(Unit& other) {
  other.waits_for = nullptr;
  ready.push_back(&other);
}

namespace {

/// The unit of the running cube that waits until the other cubes have run, or null.
Unit* at_grid;

/// The clock. It stands while a cube runs, and goes on by `TURN` whenever all cubes have had their turn.
uint64_t cycles;
constexpr uint64_t TURN = 100'000'000;
/// When a cube last arrived at the barrier of all cubes, and how long the others may wait after that: five times as long as a kernel
/// should.
uint64_t arrived_at;
constexpr uint64_t LONGEST_WAIT = 10'000'000'000;

/// A cube that waits for others.
struct Resting {
  Index position;
  unsigned number;
  std::vector<Unit> units;
  unsigned arrived;
  int line;
  Unit* at_grid;
  std::shared_ptr<SharedMemory> shared;
};

/// Runs the units that are ready until the cube has ended, or rests.
void run_ready() {
  for (;;) {
    while (!ready.empty()) {
      Unit* next = ready.front();
      ready.pop_front();
      resume(*next);
    }
    if (complete_copies()) continue;
    if (std::all_of(all.begin(), all.end(), [](auto& u) { return u.finished; }) || at_grid) break;
    // A barrier of the cube waits for the units that have not finished.
    deadlock();
  }
  unit = nullptr;
}

}  // namespace

void run_cubes(Index cubes, Index shape, size_t shared, void (*kernel)()) {
  gridDim = cubes, blockDim = shape;
  body = kernel;
  units = shape.x * shape.y * shape.z;
  std::vector<Resting> resting, next;
  std::vector<Unit> ended;
  auto rest = [&](std::vector<Resting>& cubes_that_rest) {
    if (!at_grid) {
      ended = std::move(all);
      return;
    }
    cubes_that_rest.push_back({blockIdx, cube, std::move(all), cube_barrier.arrived, cube_barrier.line, at_grid, take_shared()});
    all.clear();
  };
  unsigned number = 0;
  for (unsigned z = 0; z < cubes.z; ++z)
    for (unsigned y = 0; y < cubes.y; ++y)
      for (unsigned x = 0; x < cubes.x; ++x, ++number) {
        cube = number, blockIdx = {x, y, z};
        // The stacks of a cube that has ended serve the next one.
        all = std::move(ended);
        all.resize(units);
        reset_shared(shared);
        for (unsigned i = 0; i < units; ++i) prepare(all[i], i, shape);
        warps.assign((units + 31) / 32, {});
        cube_barrier = {};
        at_grid = nullptr;
        reset_hopper();
        reset_barriers();
        queue_all();
        run_ready();
        rest(resting);
      }
  while (!resting.empty()) {
    if (cycles - arrived_at > LONGEST_WAIT)
      fail("deadlock: %zu of %u cubes wait for all, and nobody arrives", resting.size(), number);
    cycles += TURN;
    // A cube that does not come has released nothing.
    if (resting.size() == number) show_writes();
    for (Resting& own : resting) {
      cube = own.number, blockIdx = own.position;
      all = std::move(own.units);
      put_shared(*own.shared);
      cube_barrier = {own.arrived, own.line};
      at_grid = nullptr;
      wake(*own.at_grid);
      run_ready();
      rest(next);
    }
    resting.swap(next);
    next.clear();
  }
}

uint32_t arrive_at_grid(void* word, uint32_t arrival) {
  expect_in_buffer(word, 4);
  auto place = static_cast<uint32_t*>(word);
  uint32_t before = *place;
  *place += arrival;
  arrived_at = cycles;
  return before;
}

uint32_t read_after_others(const void* word) {
  expect_in_buffer(word, 4);
  if (at_grid) fail("two units of a cube wait for all cubes");
  at_grid = unit;
  wait("all cubes", 0);
  return *static_cast<const uint32_t*>(word);
}

uint64_t clock() { return cycles; }

void trap() {
  auto waited = static_cast<unsigned long long>(cycles - arrived_at);
  fail("trap: the unit ends the launch %llu cycles after the last arrival of a cube", waited);
}

void sync_threads(int number, int line) {
  if (number == left_out) return;
  if (cube_barrier.arrived == 0) {
    cube_barrier.line = line;
  } else if (cube_barrier.line != line) {
    fail("units of a cube are at the barriers of line %d and of line %d", cube_barrier.line, line);
  }
  if (++cube_barrier.arrived < units) return wait("a barrier of the cube", line);
  cube_barrier.arrived = 0;
  synchronize(all.begin(), all.end());
  for (auto& u : all)
    if (&u != unit) wake(u);
}

void sync_warp(int line) {
  unsigned first = unit->number / 32 * 32;
  exchange("a barrier of the warp", line, {}, [&](Warp&) {
    synchronize(all.begin() + first, all.begin() + first + lanes_of(first / 32));
  });
}

unsigned lane() { return unit->number % 32; }

uint32_t shuffle(uint32_t value, unsigned source_lane, int line) {
  return *exchange("a shuffle", line, {value, source_lane}, [](Warp& warp) {
    for (unsigned i = 0; i < 32; ++i) warp.out[i][0] = warp.in[warp.in[i][1]][0];
  });
}

Unit& unit_number(unsigned number) { return all[number]; }

// "Warp-level matrix store instruction: stmatrix". Lanes 8i to 8i + 7 give the addresses of the rows of matrix i; a lane holds
// elements 2 * (lane % 4) and the next of row lane / 4 of each matrix.
void stmatrix(uint32_t address, Words words) {
  if (address % 16) fail("stmatrix writes a row at address %u of shared memory, which is no multiple of 16", address);
  auto row = exchange("stmatrix", 0, {words.r[0], words.r[1], words.r[2], words.r[3]}, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) warp.out[lane][i] = warp.in[lane % 8 * 4 + i][lane / 8];
  });
  write_shared(address, row, 16);
}

uint32_t ballot(bool value, int line) {
  return *exchange("a vote", line, {value}, [](Warp& warp) {
    uint32_t all = 0;
    for (unsigned i = 0; i < 32; ++i) all |= warp.in[i][0] << i;
    for (unsigned i = 0; i < 32; ++i) warp.out[i][0] = all;
  });
}

// The fragments of a warp: fragments.cpp says what becomes of the words of its lanes.
void ldmatrix_of_warp(const uint32_t (*addresses)[12], bool transposed, uint32_t (*out)[4]);
void movmatrix_of_warp(const uint32_t (*in)[12], uint32_t (*out)[4]);
void mma_m16n8k16_of_warp(Operand type, const uint32_t (*in)[12], uint32_t (*out)[4]);
void mma_m16n8k64_of_warp(const uint32_t (*in)[12], uint32_t (*out)[4]);

Words ldmatrix(uint32_t address, bool transposed) {
  // A lane gives the address of a row: this lane reads it.
  read_shared(address, 16);
  auto out = exchange(transposed ? "ldmatrix.trans" : "ldmatrix", 0, {address},
                      [&](Warp& warp) { ldmatrix_of_warp(warp.in, transposed, warp.out); });
  return {out[0], out[1], out[2], out[3]};
}

uint32_t movmatrix(uint32_t pair) {
  return *exchange("movmatrix", 0, {pair}, [](Warp& warp) { movmatrix_of_warp(warp.in, warp.out); });
}

static uint32_t bits(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  return word;
}

static Sums sums(const uint32_t* words) {
  Sums all;
  memcpy(all.r, words, sizeof all.r);
  return all;
}

Sums mma_m16n8k16(Operand type, Words a, uint32_t b0, uint32_t b1, Sums c) {
  return sums(exchange("mma.m16n8k16", int(type),
                       {a.r[0], a.r[1], a.r[2], a.r[3], b0, b1, bits(c.r[0]), bits(c.r[1]), bits(c.r[2]), bits(c.r[3])},
                       [&](Warp& warp) { mma_m16n8k16_of_warp(type, warp.in, warp.out); }));
}

Sums mma_m16n8k64_nvfp4(Words a, uint32_t b0, uint32_t b1, Sums c, uint32_t scales_a, uint32_t scales_b) {
  return sums(exchange("mma.m16n8k64", 0,
                       {a.r[0], a.r[1], a.r[2], a.r[3], b0, b1, bits(c.r[0]), bits(c.r[1]), bits(c.r[2]), bits(c.r[3]),
                        scales_a, scales_b},
                       [](Warp& warp) { mma_m16n8k64_of_warp(warp.in, warp.out); }));
}

}  // namespace machine
