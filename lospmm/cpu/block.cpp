// Runs the thread blocks of packed kernels on a CPU. Compiled behind block.h, as they are, and loaded before them.
//
// The threads of a block are fibers: each runs until it waits for others, at a barrier or for its warp, and then the next
// one goes on. B, C and the residual are real memory that ends at a page which nobody may touch. Shared memory is full of
// NaN before a block, and what is copied there asynchronously arrives no earlier than its thread waits for it, so that
// a barrier or a wait that is missing shows in the result. It says nothing of races that this order hides.

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

unsigned char *lospmm_data, *lospmm_shared;
uint3 blockIdx, threadIdx, blockDim, gridDim;

namespace lospmm {

constexpr std::size_t STACK_BYTES = 1 << 17;

// By a table of all: without an instruction for it, which not every CPU has, one takes as long as a dozen products.
float halves[1 << 16];

static void fill_halves() {
  for (unsigned bits = 0; bits < 1 << 16; ++bits) {
    const lospmm_u16 half = static_cast<lospmm_u16>(bits);
    _Float16 value;
    std::memcpy(&value, &half, 2);
    halves[bits] = static_cast<float>(value);
  }
}

struct Copy {
  void *to;
  const void *from;  // null: zeros
  std::size_t bytes;
};

struct Fiber {
  unsigned thread = 0, block = 0;  // of its block, and which of those that run together
  bool ended = false, started = false;
  jmp_buf at;
  ucontext_t first;
  unsigned char *stack = nullptr;
  std::vector<Copy> open;               // the group that is not committed yet
  std::vector<std::vector<Copy>> groups;  // oldest first
};

// What the lanes of a warp hand each other: two steps' worth, since nobody is ahead by more than one.
struct Warp {
  std::uint64_t step = 0;
  unsigned arrived = 0, alive = 0;
  std::uint64_t slots[2][WARP][SLOTS];
};

// A barrier of bulk copies: they are done when a phase is waited for, and all that it expects is on its way, the copies of
// ``copiers`` threads included.
struct Bulk {
  std::uint64_t phase = 0;
  unsigned copiers = 0, arrived = 0;
  std::size_t expected = 0, started = 0;
  bool is_expected = false;  // that may be no bytes
  std::vector<Copy> copies;
  std::vector<std::pair<void *, float4>> sent;
};

// A barrier that arrivals open, again and again.
struct Gate {
  std::uint64_t phase = 0;
  unsigned count = 0, arrived = 0;
};

// What is known by the address of a barrier in shared memory; there are a few.
template <typename T>
struct Found {
  std::vector<std::pair<const void *, T>> all;
  T *find(const void *at) {
    for (auto &one : all)
      if (one.first == at) return &one.second;
    return nullptr;
  }
  void make(const void *at, T value) {
    if (T *const found = find(at))
      *found = std::move(value);
    else
      all.emplace_back(at, std::move(value));
  }
};

// Threads that wait for each other.
struct Barrier {
  std::uint64_t step = 0;
  unsigned arrived = 0, alive = 0;
};

// One of those that run together: a cluster, along y, or just one.
struct Block {
  uint3 index;
  unsigned char *shared;
  Barrier barrier;
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Block> blocks;
static Found<Bulk> bulks;
static Found<Gate> gates;
static Barrier everybody;  // of the blocks that run together
static unsigned cluster_blocks = 1, warps_of_block, running;
static std::uint64_t progress, last_progress;
static unsigned idle_turns;
static jmp_buf scheduler;
static void (*kernel)();

void fault(const char *what) {
  std::fprintf(stderr, "block (%u, %u, %u), thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, what);
  std::_Exit(1);
}

static void yield() {
  Fiber &mine = fibers[running];
  if (_setjmp(mine.at) == 0) _longjmp(scheduler, 1);
}

static void perform(const std::vector<Copy> &copies) {
  for (const Copy &copy : copies) {
    if (copy.from)
      std::memcpy(copy.to, copy.from, copy.bytes);
    else
      std::memset(copy.to, 0, copy.bytes);
  }
}

bool run_together(unsigned blocks) {
  cluster_blocks = blocks;
  return true;
}

static void open_if_all_came(Barrier &barrier) {
  if (barrier.alive && barrier.arrived == barrier.alive) {
    barrier.arrived = 0;
    ++barrier.step;
    ++progress;
  }
}

static void wait_at(Barrier &barrier) {
  const std::uint64_t mine = barrier.step;
  ++barrier.arrived;
  open_if_all_came(barrier);
  while (barrier.step == mine) yield();
}

static Block &own_block() { return blocks[fibers[running].block]; }
static Warp &own_warp() { return warps[fibers[running].block * warps_of_block + threadIdx.x / WARP]; }

const void *of_block(const void *mine, unsigned rank) {
  if (rank >= blocks.size()) fault("shared memory of a block that the cluster does not have");
  if (!blocks[rank].barrier.alive) fault("shared memory of a block that has ended");
  return blocks[rank].shared + (static_cast<const unsigned char *>(mine) - own_block().shared);
}

static void step_if_all_came(Warp &warp) {
  if (warp.alive && warp.arrived == warp.alive) {
    warp.arrived = 0;
    ++warp.step;
    ++progress;
  }
}

Lanes exchange_values(const std::uint64_t *values, unsigned count) {
  Warp &warp = own_warp();
  const std::uint64_t mine = warp.step;
  std::memcpy(warp.slots[mine % 2][threadIdx.x % WARP], values, count * sizeof *values);
  ++warp.arrived;
  step_if_all_came(warp);
  while (warp.step == mine) yield();
  return warp.slots[mine % 2];
}

void wait_for_block() { wait_at(own_block().barrier); }
void wait_for_cluster() { wait_at(everybody); }

void copy(void *shared, const void *global, std::size_t bytes) {
  fibers[running].open.push_back({shared, global, bytes});
}
void wait_for_copies(unsigned pending) {
  Fiber &mine = fibers[running];
  for (; mine.groups.size() > pending; mine.groups.erase(mine.groups.begin())) perform(mine.groups.front());
}

static void end_of_thread() {
  Fiber &mine = fibers[running];
  mine.ended = true;
  ++progress;
  Warp &warp = own_warp();
  --warp.alive;
  step_if_all_came(warp);
  for (Barrier *barrier : {&own_block().barrier, &everybody}) {
    --barrier->alive;
    open_if_all_came(*barrier);
  }
}

static void body() {
  kernel();
  end_of_thread();
  _longjmp(scheduler, 1);
}

static void resume(unsigned at) {
  running = at;
  Fiber &fiber = fibers[at];
  threadIdx = {fiber.thread, 0, 0};
  blockIdx = own_block().index;
  lospmm_shared = own_block().shared;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack;
  fiber.first.uc_stack.ss_size = STACK_BYTES;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, body, 0);
  setcontext(&fiber.first);
}

// ``blocks`` of ``threads`` threads each, with their shared memory, from their first instruction to the end of all.
static void run_blocks(unsigned threads, std::size_t shared_bytes) {
  bulks.all.clear();
  gates.all.clear();
  warps_of_block = (threads + WARP - 1) / WARP;
  fibers.resize(threads * blocks.size());
  warps.assign(warps_of_block * blocks.size(), Warp{});
  everybody = {};
  everybody.alive = static_cast<unsigned>(fibers.size());
  for (Block &block : blocks) {
    std::memset(block.shared, 0xFF, shared_bytes);
    block.barrier = {};
    block.barrier.alive = threads;
  }
  for (unsigned at = 0; at < fibers.size(); ++at) {
    Fiber &fiber = fibers[at];
    fiber.thread = at % threads;
    fiber.block = at / threads;
    fiber.ended = fiber.started = false;
    fiber.open.clear();
    fiber.groups.clear();
    if (!fiber.stack) {
      void *stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (stack == MAP_FAILED) fault("no memory for its stack");
      fiber.stack = static_cast<unsigned char *>(stack);
    }
    ++warps[fiber.block * warps_of_block + fiber.thread / WARP].alive;
  }
  last_progress = progress;
  idle_turns = 0;
  while (everybody.alive) {
    for (unsigned at = 0; at < fibers.size(); ++at)
      if (!fibers[at].ended) resume(at);
    idle_turns = progress == last_progress ? idle_turns + 1 : 0;
    last_progress = progress;
    if (idle_turns > 2) fault("waits for others that never come (a barrier or a warp's operation in some threads only)");
  }
}

static Bulk &bulk_of(const unsigned long long *barrier) {
  Bulk *const found = bulks.find(barrier);
  if (!found) fault("a barrier of bulk copies that nobody made");
  return *found;
}

static Gate &gate_of(const unsigned long long *gate) {
  Gate *const found = gates.find(gate);
  if (!found) fault("a gate that nobody made");
  return *found;
}

using Kernel = void (*)(const void *, void *);
using KernelOfResidual = void (*)(const void *, void *, const void *);

static void *entry;
static const void *arguments[3];

static void call() {
  if (arguments[2])
    reinterpret_cast<KernelOfResidual>(entry)(arguments[0], const_cast<void *>(arguments[1]), arguments[2]);
  else
    reinterpret_cast<Kernel>(entry)(arguments[0], const_cast<void *>(arguments[1]));
}

}  // namespace lospmm

void lospmm_commit() {
  lospmm::Fiber &mine = lospmm::fibers[lospmm::running];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
void lospmm_bulk_make(unsigned long long *barrier, unsigned copiers) {
  lospmm::Bulk made;
  made.copiers = copiers;
  lospmm::bulks.make(barrier, std::move(made));
}
void lospmm_bulk_expect(unsigned long long *barrier, unsigned bytes) {
  lospmm::Bulk &bulk = lospmm::bulk_of(barrier);
  bulk.is_expected = true;
  bulk.expected += bytes;
}
void lospmm_bulk_copy(void *shared, const void *global, unsigned bytes, unsigned long long *barrier) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(shared) % 16 || reinterpret_cast<std::uintptr_t>(global) % 16)
    lospmm::fault("a bulk copy from or to an address, or of a size, that is no multiple of 16 bytes");
  lospmm::Bulk &bulk = lospmm::bulk_of(barrier);
  bulk.copies.push_back({shared, global, bytes});
  bulk.started += bytes;
}
// In 16 bytes, as rows of 128 bytes whose pieces change places by the row.
void lospmm::box_copy(void *shared, const Map &map, int row, int column, unsigned long long *barrier) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 1024) fault("a box that does not begin at a multiple of 1024 bytes");
  Bulk &bulk = bulk_of(barrier);
  for (int line = 0; line < map.box_rows; ++line)
    for (int piece = 0; piece < 8; ++piece) {
      const long long at = row + line, from = column + piece * 8;
      const auto *source = static_cast<const unsigned char *>(map.matrix) + (at * map.columns + from) * 2;
      unsigned char *const to = static_cast<unsigned char *>(shared) + line * 128 + (piece ^ line % 8) * 16;
      bulk.copies.push_back({to, at < map.rows && from < map.columns ? source : nullptr, 16});
      bulk.started += 16;
    }
}
void lospmm_arrive_with_copies(unsigned long long *barrier) {
  lospmm::Bulk &bulk = lospmm::bulk_of(barrier);
  std::vector<lospmm::Copy> &own = lospmm::fibers[lospmm::running].open;
  bulk.copies.insert(bulk.copies.end(), own.begin(), own.end());
  own.clear();
  if (++bulk.arrived > bulk.copiers) lospmm::fault("more threads arrive with copies than their barrier waits for");
}
void lospmm_bulk_wait(unsigned long long *barrier, unsigned parity) {
  for (;;) {
    lospmm::Bulk &bulk = lospmm::bulk_of(barrier);  // found anew each time: another thread may have made more of them
    if ((bulk.phase & 1) != parity) return;
    if (bulk.is_expected && bulk.started > bulk.expected)
      lospmm::fault("more bytes of bulk copies than their barrier expects");
    if (bulk.is_expected && bulk.started == bulk.expected && bulk.arrived == bulk.copiers) {
      lospmm::perform(bulk.copies);
      bulk.copies.clear();
      for (const auto &one : bulk.sent) std::memcpy(one.first, &one.second, sizeof one.second);
      bulk.sent.clear();
      bulk.arrived = 0;
      bulk.expected = bulk.started = 0;
      bulk.is_expected = false;
      ++bulk.phase;
      ++lospmm::progress;
    } else {
      lospmm::yield();
    }
  }
}
void lospmm_cluster_send(float4 *shared, float4 values, unsigned rank, unsigned long long *barrier) {
  const auto there = [&](const void *here) { return const_cast<void *>(lospmm::of_block(here, rank)); };
  lospmm::Bulk &bulk = lospmm::bulk_of(static_cast<unsigned long long *>(there(barrier)));
  bulk.sent.emplace_back(there(shared), values);
  bulk.started += sizeof values;
}
void lospmm_gate_make(unsigned long long *gate, unsigned count) { lospmm::gates.make(gate, {0, count, 0}); }
void lospmm_gate_arrive(unsigned long long *gate) {
  lospmm::Gate &one = lospmm::gate_of(gate);
  if (++one.arrived == one.count) one.arrived = 0, ++one.phase, ++lospmm::progress;
}
void lospmm_gate_wait(unsigned long long *gate, unsigned parity) {
  while ((lospmm::gate_of(gate).phase & 1) == parity) lospmm::yield();
}

// ``shape`` is the grid, the threads of a block, and the bytes of shared memory; ``columns`` the values of blockIdx.x
// that are run. Each hundredth of them is a dot on stdout.
extern "C" void lospmm_run(void *entry, const std::uint64_t *shape, const std::int64_t *columns, std::uint64_t count,
                           unsigned char *data, const void *b, void *c, const void *residual) {
  lospmm::fill_halves();
  lospmm::entry = entry;
  lospmm::kernel = lospmm::call;
  lospmm::arguments[0] = b;
  lospmm::arguments[1] = c;
  lospmm::arguments[2] = residual;
  lospmm_data = data;
  const std::size_t shared_bytes = static_cast<std::size_t>(shape[4]);
  const unsigned together = lospmm::cluster_blocks;
  lospmm::blocks.resize(together);
  for (lospmm::Block &block : lospmm::blocks)
    block.shared = static_cast<unsigned char *>(std::aligned_alloc(1024, (shared_bytes + 2047) / 1024 * 1024));
  gridDim = {static_cast<unsigned>(shape[0]), static_cast<unsigned>(shape[1]), static_cast<unsigned>(shape[2])};
  blockDim = {static_cast<unsigned>(shape[3]), 1, 1};
  std::uint64_t done = 0, dots = 0;
  const std::uint64_t total = count * gridDim.z * ((gridDim.y + together - 1) / together);
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; y += together)
      for (std::uint64_t at = 0; at < count; ++at) {
        for (unsigned rank = 0; rank < together; ++rank)
          lospmm::blocks[rank].index = {static_cast<unsigned>(columns[at]), y + rank, z};
        lospmm::run_blocks(static_cast<unsigned>(shape[3]), shared_bytes);
        for (++done; dots < 100 * done / total; ++dots) std::putchar('.');
        std::fflush(stdout);
      }
}
