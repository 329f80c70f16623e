// What Hopper adds: copies of boxes by the copy engine, products of a warpgroup that read shared memory themselves, and
// barriers of some units. Copies and products end as late as the kernel allows: a load when every unit waits, a store or a
// product when a unit waits for it.
#include <cstring>
#include <deque>
#include <map>

#include "internal.h"
#include "numbers.h"

namespace machine {

namespace {

struct Store {
  const TensorMap* map;
  uint32_t from;
  int x, y;
};

/// One lane's part of a product: where its sums are.
struct Product {
  unsigned cols;
  Operand type;
  Left a;
  uint64_t b;
  bool adds, a_across, b_across;
  float* sums;
};

/// What a unit has begun and not waited for.
struct Begun {
  std::vector<Store> stores;
  std::vector<Product> products;
  std::deque<std::vector<Product>> groups;
};
std::map<unsigned, Begun> begun;

/// The units of a warpgroup that wait for its products, and the time of its products.
struct Warpgroup {
  std::vector<Unit*> waiting;
  uint32_t time = 1;
};
std::vector<Warpgroup> groups_of_warps;

/// A barrier of some units: how many have arrived, which of them wait, and what all of them have seen.
struct NamedBarrier {
  unsigned arrived = 0;
  std::vector<Unit*> waiting;
  Clock seen = new_clock();
};
std::map<unsigned, NamedBarrier> named_barriers;
/// The time of a unit's last proxy fence.
std::map<unsigned, uint32_t> fenced;

/// The 128-byte swizzle: eight chunks of 16 bytes in a row of 128, by the row's number among eight.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/// Calls `f(address in shared memory, place in the matrix or null)` for each 16 bytes of a box.
template <class F>
void for_each_chunk(const TensorMap& map, uint32_t shared, int x, int y, F f) {
  uint64_t row_bytes = map.tile_cols * map.size;
  if (row_bytes > 128 || row_bytes % 16 || shared % 1024) fail("a box with rows of %zu bytes at %u", size_t(row_bytes), shared);
  for (uint64_t row = 0; row < map.tile_rows; ++row)
    for (uint64_t byte = 0; byte < row_bytes; byte += 16) {
      int64_t i = y + int64_t(row), j = x + int64_t(byte / map.size);
      bool is_inside = i >= 0 && j >= 0 && uint64_t(i) < map.rows && uint64_t(j) < map.cols;
      // A row takes 128 bytes of shared memory, whatever the box has of it.
      f(swizzled(shared + uint32_t(row * 128 + byte)), is_inside ? map.start + (i * map.cols + j) * map.size : nullptr);
    }
}

/// The bit pattern of a field of a descriptor, in bytes.
uint32_t field(uint64_t descriptor, int first) { return uint32_t(descriptor >> first & 0x3FFF) << 4; }

/// "Asynchronous warpgroup-level matrix operations: shared memory matrix layout", with the 128-byte swizzle. `outer` is a row
/// of a or a column of b, `k` one of the 16 summed values.
uint32_t address_of(uint64_t descriptor, bool across, unsigned outer, unsigned k) {
  uint32_t start = field(descriptor, 0), leading = field(descriptor, 16), stride = field(descriptor, 32);
  if (descriptor >> 62 != 1) fail("a descriptor without the 128-byte swizzle");
  uint32_t at = across ? outer / 64 * leading + k / 8 * stride + k % 8 * 128 + outer % 64 * 2
                       : outer / 8 * stride + outer % 8 * 128 + k * 2;
  return swizzled(start + at);
}

float value_of(uint16_t bits, Operand type) { return type == Operand::bf16 ? numbers::of_bf16(bits) : numbers::of_f16(bits); }

/// 16 summed values of each of `count` rows of a or columns of b.
std::vector<float> operand(const Product& product, uint64_t descriptor, bool across, unsigned count, unsigned warpgroup) {
  std::vector<float> values(count * 16);
  for (unsigned outer = 0; outer < count; ++outer)
    for (unsigned k = 0; k < 16; ++k) {
      uint16_t bits;
      auto bytes = read_shared_as(2 * units + warpgroup, groups_of_warps[warpgroup].time, address_of(descriptor, across, outer, k), 2);
      memcpy(&bits, bytes, 2);
      values[outer * 16 + k] = value_of(bits, product.type);
    }
  return values;
}

/// 64 rows of a that the lanes hold in registers as they are now: a lane's words have rows 16 * warp + lane / 4 and 8 more, each
/// in two neighboring summed values, and then the same rows 8 summed values later.
std::vector<float> operand_in_registers(const std::vector<Product>& of_lanes) {
  std::vector<float> values(64 * 16);
  for (unsigned lane = 0; lane < 128; ++lane)
    for (unsigned word = 0; word < 4; ++word)
      for (unsigned half = 0; half < 2; ++half) {
        unsigned row = lane / 32 * 16 + lane % 32 / 4 + word % 2 * 8, k = lane % 4 * 2 + word / 2 * 8 + half;
        values[row * 16 + k] = value_of(uint16_t(*of_lanes[lane].a.words[word] >> 16 * half), of_lanes[lane].type);
      }
  return values;
}

/// Makes one product of a warpgroup. "Matrix fragments for wgmma.mma_async.m64nNk16": sums 4j to 4j + 3 of a lane are in rows
/// 16 * warp + lane / 4 (the first two) and 8 more, columns 8j + 2 * (lane % 4) and the next.
void make(const std::vector<Product>& of_lanes, unsigned warpgroup) {
  const Product& first = of_lanes[0];
  for (const Product& other : of_lanes)
    if (other.a.descriptor != first.a.descriptor || other.b != first.b || other.cols != first.cols)
      fail("units of a warpgroup begin different products");
  auto a = first.a.words[0] ? operand_in_registers(of_lanes) : operand(first, first.a.descriptor, first.a_across, 64, warpgroup);
  auto b = operand(first, first.b, first.b_across, first.cols, warpgroup);
  for (unsigned lane = 0; lane < 128; ++lane)
    for (unsigned i = 0; i < first.cols / 2; ++i) {
      unsigned row = lane / 32 * 16 + lane % 32 / 4 + (i & 2 ? 8 : 0), col = i / 4 * 8 + lane % 4 * 2 + (i & 1);
      double sum = first.adds ? of_lanes[lane].sums[i] : 0.0f;
      for (unsigned k = 0; k < 16; ++k) sum += double(a[row * 16 + k]) * double(b[col * 16 + k]);
      of_lanes[lane].sums[i] = float(sum);
    }
}

}  // namespace

void reset_hopper() {
  begun.clear();
  groups_of_warps.assign(warpgroups(), {});
  named_barriers.clear();
  fenced.clear();
}

void load_box(uint32_t to, const void* pointer, uint32_t barrier, int x, int y) {
  auto& map = *static_cast<const TensorMap*>(pointer);
  std::vector<Copy> copies;
  for_each_chunk(map, to, x, y, [&](uint32_t address, const unsigned char* from) {
    Copy copy = {address, 16, {}};
    if (from) {
      access_global(from, 16, false);
      memcpy(copy.bytes, from, 16);
    }
    copies.push_back(copy);
  });
  copies_bring_bytes(barrier, std::move(copies));
}

void store_box(const void* pointer, uint32_t from, int x, int y) {
  begun[unit->number].stores.push_back({static_cast<const TensorMap*>(pointer), from, x, y});
}

void stores_wait() {
  auto& stores = begun[unit->number].stores;
  uint32_t reader = units + unit->number;
  for (const Store& store : stores)
    for_each_chunk(*store.map, store.from, store.x, store.y, [&](uint32_t address, unsigned char* to) {
      expect_fenced(address, 16, fenced);
      auto bytes = read_shared_as(reader, unit->copies_time, address, 16);
      if (!to) return;
      access_global(to, 16, true);
      memcpy(to, bytes, 16);
    });
  if (stores.empty()) return;
  stores.clear();
  unit->seen[reader] = unit->copies_time++;
}

void expect_stores_ended() {
  if (!begun[unit->number].stores.empty()) fail("the unit ends and does not wait for its stores");
}

void fence_proxy() { fenced[unit->number] = unit->seen[unit->number]; }

void sync_named(unsigned number, unsigned count, bool waits) {
  NamedBarrier& barrier = named_barriers[number];
  join(barrier.seen, unit->seen);
  ++unit->seen[unit->number];
  if (waits) barrier.waiting.push_back(unit);
  if (++barrier.arrived < count) {
    if (waits) wait("a named barrier", int(number));
    return;
  }
  NamedBarrier complete = std::move(barrier);
  barrier = {};
  for (Unit* other : complete.waiting) {
    join(other->seen, complete.seen);
    if (other != unit) wake(*other);
  }
}

void store_floats(uint32_t address, float a, float b) {
  float both[2] = {a, b};
  if (address % 8) fail("misaligned: writes two floats at %u of shared memory", address);
  write_shared(address, both, 8);
}

void load_floats(uint32_t address, float& a, float& b) {
  if (address % 8) fail("misaligned: reads two floats at %u of shared memory", address);
  float both[2];
  memcpy(both, read_shared(address, 8), 8);
  a = both[0], b = both[1];
}

void product(unsigned cols, Operand type, float* sums, Left a, uint64_t b, bool adds, bool a_across, bool b_across) {
  begun[unit->number].products.push_back({cols, type, a, b, adds, a_across, b_across, sums});
}

void products_end_group() {
  auto& own = begun[unit->number];
  own.groups.push_back(std::move(own.products));
  own.products.clear();
}

void products_wait(unsigned groups) {
  unsigned number = unit->number / 128;
  Warpgroup& warpgroup = groups_of_warps[number];
  warpgroup.waiting.push_back(unit);
  if (warpgroup.waiting.size() < 128) {
    wait("the products of a warpgroup", 0);
  } else {
    for (; begun[unit->number].groups.size() > groups; ++warpgroup.time) {
      for (size_t i = 0; i < begun[unit->number].groups.front().size(); ++i) {
        std::vector<Product> of_lanes;
        for (unsigned lane = 0; lane < 128; ++lane) {
          auto& group = begun[number * 128 + lane].groups.front();
          if (i >= group.size()) fail("units of a warpgroup begin different products");
          of_lanes.push_back(group[i]);
        }
        make(of_lanes, number);
      }
      for (unsigned lane = 0; lane < 128; ++lane) begun[number * 128 + lane].groups.pop_front();
    }
    for (Unit* other : warpgroup.waiting)
      if (other != unit) wake(*other);
    warpgroup.waiting.clear();
  }
  unit->seen[2 * units + number] = groups_of_warps[number].time - 1;
}

}  // namespace machine
