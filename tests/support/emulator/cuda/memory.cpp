// Memory: bounds, races, asynchronous copies and mbarrier objects. The kernel's text is compiled with the compiler's
// instrumentation for thread sanitizers, which calls a function before every access to memory. The functions are here:
// an access must lie in a buffer of the launch, in the cube's shared memory, or in the unit's own variables.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>

#include "internal.h"

/// Room for the shared memory of a cube: more than any GPU has. Its address in the kernel's text is this array.
alignas(1024) unsigned char dynamic_shared_mem[256 << 10];

extern "C" char __executable_start, _end;

namespace machine {

namespace {

constexpr uint32_t NOBODY = ~0u;

struct Buffer {
  unsigned number;
  unsigned char* start;
  size_t size;
  /// Who wrote a byte: cube and unit, or 0.
  std::vector<uint32_t> writers;
};
std::vector<Buffer> buffers;

struct Read {
  uint32_t unit, time;
};

/// A byte of shared memory: who wrote it last, and who has read it since. A writer from `units` on stands for the copies
/// of a unit.
struct Cell {
  uint32_t writer = NOBODY, time = 0;
  std::vector<Read> reads;
};
std::vector<Cell> cells;
size_t shared_size;

/// An mbarrier object.
struct Barrier {
  unsigned expected, pending, phase;
  /// Bytes that have to arrive before the phase ends.
  int64_t bytes;
  /// What is seen by whoever waits for the phases that are complete, and for the current one.
  Clock complete, current;
  std::deque<Unit*> waiting;
};
std::map<uint32_t, Barrier> barriers;

/// The copies that a unit has started, which arrive on a barrier when they end.
struct Arrival {
  uint32_t barrier;
  unsigned unit;
  uint32_t time;
  std::vector<Copy> copies;
  /// What arrives: one arrival, or else this many bytes.
  unsigned bytes;
};
std::deque<Arrival> arrivals;

const char* name(uint32_t who) {
  return who < units ? "unit" : who < 2 * units ? "a copy of unit" : "a product of warpgroup";
}
uint32_t number(uint32_t who) { return who < units ? who : who < 2 * units ? who - units : who - 2 * units; }

/// Fails unless the running unit sees what was last written to the byte.
void expect_written(const Cell& cell, uint32_t address, const char* verb) {
  if (cell.writer != NOBODY && unit->seen[cell.writer] < cell.time)
    fail("race: %s byte %u of shared memory, which %s %u writes, and no barrier is between them", verb, address,
         name(cell.writer), number(cell.writer));
}

void expect_shared(uint32_t address, size_t size, const char* verb) {
  if (address > shared_size || size > shared_size - address)
    fail("out of bounds: %s %zu bytes at %u of the %zu bytes of shared memory", verb, size, address, shared_size);
}

void read_cells(uint32_t address, size_t size, uint32_t reader, uint32_t time) {
  expect_shared(address, size, "reads");
  for (size_t i = 0; i < size; ++i) {
    Cell& cell = cells[address + i];
    expect_written(cell, address + i, "reads");
    // Reads that this unit sees are before it for everybody: they need not be remembered.
    bool known = false;
    for (size_t r = 0; r < cell.reads.size();) {
      Read& read = cell.reads[r];
      if (read.unit == reader) {
        read.time = time, known = true, ++r;
      } else if (unit->seen[read.unit] >= read.time) {
        read = cell.reads.back(), cell.reads.pop_back();
      } else {
        ++r;
      }
    }
    if (!known) cell.reads.push_back({reader, time});
  }
}

void read_cells(uint32_t address, size_t size) { read_cells(address, size, unit->number, unit->seen[unit->number]); }

void write_cells(uint32_t address, size_t size, uint32_t writer, uint32_t time) {
  expect_shared(address, size, "writes");
  for (size_t i = 0; i < size; ++i) {
    Cell& cell = cells[address + i];
    expect_written(cell, address + i, "writes");
    for (Read& read : cell.reads)
      if (unit->seen[read.unit] < read.time)
        fail("race: writes byte %zu of shared memory, which %s %u reads, and no barrier is between them", address + i,
             name(read.unit), number(read.unit));
    cell.reads.clear();
    cell.writer = writer, cell.time = time;
  }
}

/// A read or a write of global memory.
void access_buffer(Buffer& buffer, const unsigned char* start, size_t size, bool write) {
  size_t at = size_t(start - buffer.start);
  if (size > buffer.size - at)
    fail("out of bounds: %s %zu bytes at %zu of the %zu bytes of buffer %u", write ? "writes" : "reads", size, at,
         buffer.size, buffer.number);
  uint32_t own = cube * units + unit->number + 1;
  for (size_t i = at; i < at + size; ++i) {
    uint32_t other = buffer.writers[i];
    if (other && other != own)
      fail("race: %s byte %zu of buffer %u, which unit %u of cube %u writes", write ? "writes" : "reads", i,
           buffer.number, (other - 1) % units, (other - 1) / units);
    if (write) buffer.writers[i] = own;
  }
}

bool inside(const void* pointer, const void* start, size_t size) {
  return size_t(static_cast<const char*>(pointer) - static_cast<const char*>(start)) < size;
}

void access(const void* pointer, size_t size, bool write, size_t alignment) {
  // What the emulator does between units, and a unit's own variables.
  if (!unit || inside(pointer, unit->stack, STACK)) return;
  if (uintptr_t(pointer) % alignment)
    fail("misaligned: %s %zu bytes at address %p", write ? "writes" : "reads", size, pointer);
  if (inside(pointer, dynamic_shared_mem, sizeof dynamic_shared_mem)) {
    uint32_t address = shared_address(pointer);
    return write ? write_cells(address, size, unit->number, unit->seen[unit->number]) : read_cells(address, size);
  }
  for (Buffer& buffer : buffers)
    if (inside(pointer, buffer.start, buffer.size)) return access_buffer(buffer, static_cast<const unsigned char*>(pointer), size, write);
  // Constants and indices are the program's own data.
  if (!write && inside(pointer, &__executable_start, size_t(&_end - &__executable_start))) return;
  // The buffer that ends, or else begins, nearest to the address.
  const Buffer* nearest = nullptr;
  ptrdiff_t least = 1 << 20, at = 0;
  for (Buffer& buffer : buffers) {
    ptrdiff_t after = static_cast<const unsigned char*>(pointer) - buffer.start;
    ptrdiff_t distance = after < 0 ? -after : after - ptrdiff_t(buffer.size);
    if (distance < least) nearest = &buffer, least = distance, at = after;
  }
  const char* verb = write ? "writes" : "reads";
  if (!nearest) fail("out of bounds: %s %zu bytes at %p, far from every buffer", verb, size, pointer);
  fail("out of bounds: %s %zu bytes at byte %td of the %zu bytes of buffer %u", verb, size, at, nearest->size, nearest->number);
}

Barrier& barrier_at(uint32_t address) {
  auto found = barriers.find(address);
  if (found == barriers.end()) fail("race: uses the barrier at %u of shared memory before it is made", address);
  return found->second;
}

/// Counts arrivals and bytes, and ends the phase with the last one.
void arrive(Barrier& barrier, unsigned count, unsigned bytes = 0) {
  if (barrier.pending < count) fail("%u arrivals on a barrier that expects %u more", count, barrier.pending);
  barrier.pending -= count;
  barrier.bytes -= bytes;
  if (barrier.pending || barrier.bytes) return;
  join(barrier.complete, barrier.current);
  barrier.pending = barrier.expected;
  ++barrier.phase;
  for (Unit* waiting : barrier.waiting) wake(*waiting);
  barrier.waiting.clear();
}

}  // namespace

void add_buffer(unsigned number, void* start, size_t size) {
  buffers.push_back({number, static_cast<unsigned char*>(start), size, std::vector<uint32_t>(size, 0)});
}

void reset_shared(size_t size) {
  if (size > sizeof dynamic_shared_mem) fail("%zu bytes of shared memory are more than the emulator has", size);
  shared_size = size;
  // No number in any format.
  memset(dynamic_shared_mem, 0xFF, sizeof dynamic_shared_mem);
  cells.resize(size);
  for (Cell& cell : cells) cell.writer = NOBODY, cell.time = 0, cell.reads.clear();
}

void reset_barriers() {
  barriers.clear();
  arrivals.clear();
}

struct SharedMemory {
  std::vector<unsigned char> bytes;
  std::vector<Cell> cells;
  std::map<uint32_t, Barrier> barriers;
};

std::shared_ptr<SharedMemory> take_shared() {
  return std::make_shared<SharedMemory>(SharedMemory{
      {dynamic_shared_mem, dynamic_shared_mem + shared_size}, std::move(cells), std::move(barriers)});
}

void put_shared(SharedMemory& memory) {
  memcpy(dynamic_shared_mem, memory.bytes.data(), memory.bytes.size());
  cells = std::move(memory.cells);
  barriers = std::move(memory.barriers);
}

void show_writes() {
  for (Buffer& buffer : buffers) std::fill(buffer.writers.begin(), buffer.writers.end(), 0);
}

void expect_in_buffer(const void* pointer, size_t size) {
  for (Buffer& buffer : buffers)
    if (inside(pointer, buffer.start, buffer.size) && inside(static_cast<const char*>(pointer) + size - 1, buffer.start, buffer.size))
      return;
  fail("out of bounds: %zu bytes at %p are in no buffer", size, pointer);
}

const unsigned char* read_shared(uint32_t address, size_t size) {
  read_cells(address, size);
  return dynamic_shared_mem + address;
}

uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const unsigned char*>(pointer) - dynamic_shared_mem);
}

// "Data Movement and Conversion Instructions: cp.async": the bytes after source_size are zeros.
void copy_async(uint32_t to, const void* from, unsigned size, unsigned source_size) {
  if (source_size > size) fail("a copy of %u bytes from %u", size, source_size);
  if (to % size || (source_size && uintptr_t(from) % size))
    fail("misaligned: copies %u bytes from address %p to %u of shared memory", size, from, to);
  Copy copy = {to, size, {}};
  if (source_size) {
    access(from, source_size, false, 1);
    memcpy(copy.bytes, from, source_size);
  }
  write_cells(to, size, units + unit->number, unit->copies_time);
  unit->copies.push_back(copy);
}

// "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive" without .noinc: the barrier
// expects one arrival more, which is made when the copies have ended.
void copy_async_arrive(uint32_t address) {
  read_cells(address, 8);
  ++barrier_at(address).pending;
  arrivals.push_back({address, unit->number, unit->copies_time++, std::move(unit->copies), 0});
  unit->copies.clear();
}

// "cp.async.commit_group", "cp.async.wait_group": groups end in their order. Whoever waits sees them.
void copies_end_group() {
  unit->groups.push_back({unit->copies_time++, std::move(unit->copies)});
  unit->copies.clear();
}

void copies_wait(unsigned groups) {
  for (; unit->groups.size() > groups; unit->groups.pop_front()) {
    auto& [time, copies] = unit->groups.front();
    for (Copy& copy : copies) memcpy(dynamic_shared_mem + copy.to, copy.bytes, copy.size);
    unit->seen[units + unit->number] = time;
  }
}

bool complete_copies() {
  bool any = !arrivals.empty();
  for (; !arrivals.empty(); arrivals.pop_front()) {
    Arrival& arrival = arrivals.front();
    for (Copy& copy : arrival.copies) memcpy(dynamic_shared_mem + copy.to, copy.bytes, copy.size);
    Barrier& barrier = barrier_at(arrival.barrier);
    uint32_t& time = barrier.current[units + arrival.unit];
    time = std::max(time, arrival.time);
    arrive(barrier, arrival.bytes ? 0 : 1, arrival.bytes);
  }
  return any;
}

const unsigned char* read_shared_as(uint32_t reader, uint32_t time, uint32_t address, size_t size) {
  read_cells(address, size, reader, time);
  return dynamic_shared_mem + address;
}

void write_shared(uint32_t address, const void* bytes, size_t size) {
  write_cells(address, size, unit->number, unit->seen[unit->number]);
  memcpy(dynamic_shared_mem + address, bytes, size);
}

void expect_fenced(uint32_t address, size_t size, const std::map<unsigned, uint32_t>& fenced) {
  for (size_t i = 0; i < size; ++i) {
    const Cell& cell = cells[address + i];
    if (cell.writer >= units) continue;
    auto fence = fenced.find(cell.writer);
    if (fence == fenced.end() || fence->second < cell.time)
      fail("race: the copy engine reads byte %zu of shared memory, which unit %u wrote without fence.proxy", address + i,
           cell.writer);
  }
}

void access_global(const void* pointer, size_t size, bool write) { access(pointer, size, write, 1); }

void copies_bring_bytes(uint32_t barrier, std::vector<Copy> copies) {
  unsigned bytes = 0;
  for (Copy& copy : copies) {
    write_cells(copy.to, copy.size, units + unit->number, unit->copies_time);
    bytes += copy.size;
  }
  arrivals.push_back({barrier, unit->number, unit->copies_time++, std::move(copies), bytes});
}

void barrier_init_at(uint32_t address, unsigned count) {
  write_cells(address, 8, unit->number, unit->seen[unit->number]);
  barriers[address] = {count, count, 0, 0, new_clock(), new_clock(), {}};
}

unsigned barrier_arrive_at(uint32_t address, unsigned count) {
  read_cells(address, 8);
  Barrier& barrier = barrier_at(address);
  unsigned phase = barrier.phase;
  join(barrier.current, unit->seen);
  ++unit->seen[unit->number];
  arrive(barrier, count);
  return phase;
}

void barrier_expect(uint32_t address, unsigned bytes) {
  barrier_at(address).bytes += bytes;
  barrier_arrive_at(address, 1);
}

void barrier_wait_at(uint32_t address, unsigned parity) {
  read_cells(address, 8);
  Barrier& barrier = barrier_at(address);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(unit);
    wait("a phase of a barrier in shared memory", 0);
  }
  join(unit->seen, barrier.complete);
}

void barrier_init(const void* barrier, unsigned count) { barrier_init_at(shared_address(barrier), count); }
unsigned barrier_arrive(const void* barrier, unsigned count) { return barrier_arrive_at(shared_address(barrier), count); }
void barrier_wait_parity(const void* barrier, unsigned parity) { barrier_wait_at(shared_address(barrier), parity); }

}  // namespace machine

// The calls that `-fsanitize=thread` adds.
#define ACCESS(size)                                                                                       \
  extern "C" void __tsan_read##size(void* p) { machine::access(p, size, false, size); }                    \
  extern "C" void __tsan_write##size(void* p) { machine::access(p, size, true, size); }                    \
  extern "C" void __tsan_unaligned_read##size(void* p) { machine::access(p, size, false, 1); }             \
  extern "C" void __tsan_unaligned_write##size(void* p) { machine::access(p, size, true, 1); }             \
  extern "C" void __tsan_volatile_read##size(void* p) { machine::access(p, size, false, size); }           \
  extern "C" void __tsan_volatile_write##size(void* p) { machine::access(p, size, true, size); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __tsan_read_range(void* p, size_t size) { machine::access(p, size, false, 1); }
extern "C" void __tsan_write_range(void* p, size_t size) { machine::access(p, size, true, 1); }
// Clang copies structures by these. Those of up to 16 bytes are vectors, which a GPU takes from aligned addresses only.
static size_t alignment(size_t size) { return size <= 16 && std::has_single_bit(size) ? size : 1; }
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t size) {
  machine::access(from, size, false, alignment(size));
  machine::access(to, size, true, alignment(size));
  return std::memcpy(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int byte, size_t size) {
  machine::access(to, size, true, alignment(size));
  return std::memset(to, byte, size);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
