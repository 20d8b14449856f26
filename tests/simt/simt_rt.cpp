// The simulator's run time: fibers, schedulers, barriers, meetings of a warp's lanes, queues of asynchronous
// copies. Blocks run one after the other on one OS thread. Never instrumented by a sanitizer itself; it tells
// the sanitizers which fiber runs and what orders memory:
//
//   __syncthreads, __syncwarp     order the memory accesses of the threads that meet
//   __threadfence                 orders what is before it with what is behind every later __threadfence
//   the launch                    is ordered with what the host does before and after it
//
// Nothing else does (not a shuffle, not a relaxed atomic), and nothing orders two blocks of a launch, so
// ThreadSanitizer reports what CUDA leaves undefined, in whatever order the threads happened to run.
#include "simt_rt.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "block.h"

namespace simt {
namespace {

Options g_options;
uint64_t g_random;
Block* g_block = nullptr;
Fiber* g_fiber = nullptr;
char g_begin, g_end, g_fence;  // addresses stand for what the launch and __threadfence order

uint32_t random_below(uint32_t n) {
  g_random ^= g_random << 13, g_random ^= g_random >> 7, g_random ^= g_random << 17;
  return static_cast<uint32_t>((g_random >> 32) % n);
}

// From the running fiber to the scheduler. `last`: it will not run again.
void leave(bool last) {
  Fiber* me = g_fiber;
  (void)last;
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &me->fake_stack, g_block->main_bottom, g_block->main_size);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(g_block->main_tsan, 1);  // 1: the switch orders nothing
#endif
  transfer(me->machine, g_block->main);
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(me->fake_stack, &g_block->main_bottom, &g_block->main_size);
#endif
}

void enter(Fiber& f) {
  g_fiber = &f;
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(&g_block->main_fake, f.stack, kStack);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(f.tsan, 1);
#endif
  transfer(g_block->main, f.machine);
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(g_block->main_fake, nullptr, nullptr);
#endif
  g_fiber = nullptr;
}

void wake(Fiber& f) {
  f.state = State::kReady;
  g_block->ready.push(f.index);
}

// Threads that have returned are not waited for, as on a GPU since Volta.
void release_barrier() {
  Block& b = *g_block;
  if (b.alive == 0 || b.waiting != b.alive) return;
  b.waiting = 0;
  b.phase ^= 1;
  for (Fiber& f : b.fibers)
    if (f.state == State::kBarrier) wake(f);
}

void entry() {
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &g_block->main_bottom, &g_block->main_size);
#endif
  acquire(&g_begin);
  g_block->body(g_block->capture);
  release(&g_end);
  g_fiber->open.clear();
  g_fiber->groups.clear();
  g_fiber->state = State::kDone;
  --g_block->alive;
  release_barrier();
  leave(true);
  abort();
}

void prepare(Fiber& f) {
#ifdef SIMT_UCONTEXT
  getcontext(&f.machine.uc);
  f.machine.uc.uc_stack.ss_sp = f.stack;
  f.machine.uc.uc_stack.ss_size = kStack;
  f.machine.uc.uc_link = nullptr;
  makecontext(&f.machine.uc, entry, 0);
#else
  // Staggered, so that the fibers' frames do not fall into the same cache sets.
  void** top = reinterpret_cast<void**>(f.stack + kStack - 64 - (f.index & 63) * 832);
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  f.machine.sp = top - 6;
#endif
}

uint32_t choose() {
  Block& b = *g_block;
  if (g_options.schedule == Options::kFifo) return 0;
  if (g_options.schedule == Options::kRandom) return random_below(b.ready.count);
  // Priorities: one warp runs far ahead of the others; now and then another one does.
  if (random_below(256) == 0)
    b.warps[random_below(static_cast<uint32_t>(b.warps.size()))].priority = random_below(~0u);
  const auto priority = [&](uint32_t i) { return b.warps[static_cast<size_t>(b.ready.at(i) >> 5)].priority; };
  uint32_t best = random_below(b.ready.count);
  for (uint32_t i = 0; i < b.ready.count; ++i)
    if (priority(i) > priority(best)) best = i;
  return best;
}

const char* where_all_wait() {
  for (const Fiber& f : g_block->fibers)
    if (f.state == State::kMeeting)
      return "deadlock: lanes wait in a warp collective that others do not reach";
  return "deadlock: threads wait at a barrier that others do not reach";
}

[[noreturn]] void raise(const std::string& what, const Fiber& f) {
  const auto text = [](uint3 v) {
    return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
  };
  throw std::runtime_error("simt: " + what + " [block " + text(f.context.block) + ", thread " +
                           std::to_string(f.index) + "]");
}

void run_block() {
  Block& b = *g_block;
  b.alive = static_cast<int>(b.fibers.size());
  b.waiting = 0;
  b.ready.head = b.ready.count = 0;
  for (Warp& w : b.warps) {
    for (Meeting& m : w.meetings) m.mask = 0;
    w.priority = random_below(~0u);
  }
  for (Fiber& f : b.fibers) {
    f.open.clear();
    f.groups.clear();
    prepare(f);
    wake(f);
  }
  while (b.alive > 0) {
    if (b.ready.count == 0) {
      for (const Fiber& f : b.fibers)
        if (f.state != State::kDone) raise(where_all_wait(), f);
    }
    enter(b.fibers[static_cast<size_t>(b.ready.take(choose()))]);
    if (!b.error.empty()) raise(b.error, b.fibers[static_cast<size_t>(b.culprit)]);
  }
}

// Frees everything on every way out, faults included: fibers that were left in the middle are dropped.
struct Launch {
  Block block;
  char* stacks = nullptr;
  size_t stack_bytes = 0, smem_bytes;
  struct Kept {
    void* memory;
  };
  std::vector<Kept> kept;
  static constexpr size_t kMaxFibers = 4096;
  struct Past {
    void* fiber;
  };
  std::vector<Past> past;  // fibers of earlier blocks

  Launch(dim3 grid, dim3 size, size_t smem, Body body, const void* capture) : smem_bytes(smem) {
    const size_t n = static_cast<size_t>(size.x) * size.y * size.z;
    if (n == 0 || n > 1024 || n % 32)
      throw std::runtime_error("simt: a block of " + std::to_string(n) + " threads; wanted 32, 64 .. 1024");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
      throw std::runtime_error("simt: a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                               " x " + std::to_string(grid.z) + " blocks cannot be launched");
    if (smem > (227u << 10))
      throw std::runtime_error("simt: " + std::to_string(smem) +
                               " bytes of shared memory; no GPU has as many");
    g_block = &block;
    block.body = body;
    block.capture = capture;
    block.fibers.resize(n);
    block.warps.resize(n / 32);
#ifdef SIMT_TSAN
    block.main_tsan = __tsan_get_current_fiber();
#endif
    for (size_t i = 0; i < n; ++i) {
      Fiber& f = block.fibers[i];
      const unsigned u = static_cast<unsigned>(i);
      f.index = static_cast<int>(i);
      f.context = {{u % size.x, u / size.x % size.y, u / (size.x * size.y)}, {}, size, grid};
    }
    stack_bytes = kStack * n;
    map_stacks();
  }

  void map_stacks() {
    void* p = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("simt: no memory for the stacks of a block");
    stacks = static_cast<char*>(p);
    for (Fiber& f : block.fibers) f.stack = stacks + kStack * static_cast<size_t>(f.index);
  }

  // To ThreadSanitizer, freeing is a write that the block's own accesses are not ordered with before the end.
  void drop(void* memory) {
#ifdef SIMT_TSAN
    kept.push_back({memory});
#else
    free(memory);
#endif
  }

#ifdef SIMT_TSAN
  // A destroyed fiber's identity is given to a new one, whose accesses then count as the old one's; and
  // ThreadSanitizer has 8128 identities.
  void destroy_past() {
    for (const Past& p : past) __tsan_destroy_fiber(p.fiber);
    past.clear();
  }
#endif

  void finish() {
    acquire(&g_end);
    for (const Kept& k : kept) free(k.memory);
  }

  ~Launch() {
    drop(block.smem);
    drop(block.order);
#ifdef SIMT_TSAN
    for (Fiber& f : block.fibers)
      if (f.tsan) past.push_back({f.tsan});
    destroy_past();
#endif
#ifdef SIMT_ASAN
    __asan_unpoison_memory_region(stacks, stack_bytes);
#endif
    munmap(stacks, stack_bytes);
    g_block = nullptr;
    g_fiber = nullptr;
  }

  void run(unsigned k, dim3 grid) {
    drop(block.smem);  // exactly as large as asked for, so that AddressSanitizer sees what is behind it
    drop(block.order);
    block.smem = nullptr;
    block.order = static_cast<char*>(malloc(2 + 2 * block.warps.size()));
    if (smem_bytes > 0) {
      void* p = nullptr;
      if (posix_memalign(&p, 128, smem_bytes)) throw std::runtime_error("simt: no memory");
      block.smem = static_cast<unsigned char*>(p);
      for (size_t i = 0; i < smem_bytes; ++i) block.smem[i] = 0xff;  // NaN in every float format
    }
#ifdef SIMT_TSAN
    // New stacks and new fibers for every block: what two blocks do is not ordered.
    munmap(stacks, stack_bytes);
    map_stacks();
    if (past.size() > kMaxFibers) destroy_past();
#endif
    for (Fiber& f : block.fibers) {
      f.context.block = {k % grid.x, k / grid.x % grid.y, k / (grid.x * grid.y)};
#ifdef SIMT_TSAN
      if (f.tsan) past.push_back({f.tsan});
      f.tsan = __tsan_create_fiber(0);
#endif
    }
    release(&g_begin);
    run_block();
  }
};

void do_copy(const Copy& c) {  // memcpy and memset are intercepted by the sanitizers
  memcpy(c.shared, c.global, static_cast<size_t>(c.bytes));
  memset(static_cast<char*>(c.shared) + c.bytes, 0, static_cast<size_t>(16 - c.bytes));
}

}  // namespace

Context& context() {
  return g_fiber->context;
}
unsigned char* dynamic_smem() {
  return g_block->smem;
}
int lane() {
  return g_fiber->index & 31;
}
void configure(const Options& options) {
  g_options = options;
}

void fault(const char* what) {
  g_block->error = what;
  g_block->culprit = g_fiber->index;
  leave(false);
  abort();
}

void barrier(const char* file, int line) {
  Block& b = *g_block;
  if (b.waiting > 0 && (b.line != line || strcmp(b.file, file) != 0)) {
    const std::string text = "threads of a block meet at different barriers: " + std::string(b.file) + ":" +
                             std::to_string(b.line) + " and " + file + ":" + std::to_string(line);
    fault(text.c_str());
  }
  b.file = file, b.line = line;
  char* order = b.order + b.phase;
  release(order);
  g_fiber->state = State::kBarrier;
  ++b.waiting;
  release_barrier();
  leave(false);
  acquire(order);
}

void fence() {
  acquire(&g_fence);
  release(&g_fence);
}

void collective(Collective op, uint32_t mask, void* arg, Exchange fn) {
  Warp& w = g_block->warps[static_cast<size_t>(g_fiber->index >> 5)];
  const int base = g_fiber->index & ~31, me = lane();
  if (!(mask >> me & 1)) fault("a lane calls a warp collective whose mask lacks it");
  Meeting *found = nullptr, *free_slot = nullptr;
  for (Meeting& m : w.meetings) {
    if (m.mask == 0) free_slot = &m;
    if (!(m.mask & mask)) continue;
    if (m.mask != mask || m.op != op) fault("lanes of a warp meet in different collectives");
    found = &m;
  }
  if (!found) {
    found = free_slot;  // there is one: masks of meetings in progress are disjoint
    found->mask = mask, found->arrived = 0, found->op = op, found->phase = w.phase;
  }
  Meeting& m = *found;
  char* order = g_block->order + 2 + 2 * (g_fiber->index >> 5) + m.phase;
  if (op == Collective::kSyncWarp) release(order);
  m.args[me] = arg;
  m.arrived |= 1u << me;
  if (m.arrived == mask) {
    fn(m.args, mask);
    m.mask = 0;
    w.phase ^= 1;
    for (int i = 0; i < 32; ++i)
      if ((mask >> i & 1) && i != me) wake(g_block->fibers[static_cast<size_t>(base + i)]);
  } else {
    g_fiber->state = State::kMeeting;
    leave(false);
  }
  if (op == Collective::kSyncWarp) acquire(order);
}

void copy_async(void* shared, const void* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(shared) & 15) fault("cp.async: shared address is not a multiple of 16");
  if (bytes > 0 && reinterpret_cast<uintptr_t>(global) & 15)
    fault("cp.async: global address is not a multiple of 16");
  const Copy c{shared, global, bytes};
  if (g_options.eager)
    do_copy(c);
  else
    g_fiber->open.push_back(c);
}

void commit_async() {
  g_fiber->groups.push_back({std::move(g_fiber->open)});
  g_fiber->open.clear();
}

void wait_async(int groups) {
  std::vector<Group>& all = g_fiber->groups;
  const int done = static_cast<int>(all.size()) - groups;
  if (done <= 0) return;
  for (int i = 0; i < done; ++i)
    for (const Copy& c : all[static_cast<size_t>(i)].copies) do_copy(c);
  all.erase(all.begin(), all.begin() + done);
}

void launch(dim3 grid, dim3 block, size_t smem, Body body, const void* capture) {
  g_random = 0x9e3779b97f4a7c15ull * (g_options.seed + 1) | 1;
  Launch run(grid, block, smem, body, capture);
  const unsigned blocks = grid.x * grid.y * grid.z;
  std::vector<unsigned> order(blocks);
  for (unsigned k = 0; k < blocks; ++k) order[k] = k;
  if (g_options.schedule != Options::kFifo)  // blocks come in no particular order
    for (unsigned k = blocks; k > 1; --k) std::swap(order[k - 1], order[random_below(k)]);
  for (unsigned k : order) run.run(k, grid);
  run.finish();
}

}  // namespace simt
