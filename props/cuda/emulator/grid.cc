// Runs a grid: its blocks one after the other, the threads of a block taking
// turns, both in a random order. A thread runs until it ends or has to wait for
// others; only waiting threads keep a stack.

#include <cxxabi.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "props/cuda/emulator/emulated_intrinsics.h"
#include "props/cuda/emulator/fibers.h"
#include "props/cuda/emulator/internal.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace kvtwin::emulator {
namespace {

constexpr std::size_t kNone = ~std::size_t{0};
constexpr std::size_t kCopyBytes = 16;

enum class State { kReady, kAtBarrier, kMeeting, kEnded };

struct Thread {
  State state = State::kReady;
  Fiber* fiber = nullptr;  // Null until the thread begins.
  // The meeting in which the thread waits.
  const char* where = nullptr;
  unsigned mask = 0;
  Combine combine = nullptr;
  Lane lane = {};
};

// A thread's copies to shared memory that are not finished yet.
struct Copies {
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    int group;
  };
  std::vector<Copy> copies;
  int groups = 0;  // Committed groups.
};

class Grid {
 public:
  void Run(const Kernel& kernel, Random& random);

  // The next functions are called by the running thread.
  void Barrier();
  void Meet(const char* name, unsigned mask, Lane lane, Combine combine);
  void CopyLater(void* shared, const void* global, std::size_t bytes);
  void CommitCopies() { ++copies_[current_].groups; }
  void FinishCopies(int but_groups);
  std::size_t current() const { return current_; }
  const Kernel* kernel() const { return kernel_; }
  std::byte* shared() { return shared_.data(); }
  [[noreturn]] void Misuse(const char* name, const char* what);

  // The code of a fiber.
  void RunThreads(Fiber& own);

 private:
  void RunBlock();
  bool Release();
  void Pick();
  void Enter(std::size_t thread);
  void SwitchToNext(Fiber& from);
  void Wait();
  [[noreturn]] void ReportDeadlock();

  const Kernel* kernel_ = nullptr;
  Random* random_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Copies> copies_;
  std::vector<std::size_t> ready_;  // New or ready threads.
  std::size_t ended_ = 0;
  std::size_t at_barrier_ = 0;
  bool one_runs_ahead_ = false;
  std::size_t current_ = kNone;
  std::size_t next_ = kNone;
  Fiber caller_;
  std::vector<Fiber*> idle_;
  alignas(1024) std::array<std::byte, kMaxSharedBytes> shared_;
};

Grid& TheGrid() {
  static Grid& grid = *new Grid;  // Its fibers' stacks outlive all statics.
  return grid;
}

void Grid::Run(const Kernel& kernel, Random& random) {
  kernel_ = &kernel;
  random_ = &random;
  gridDim = kernel.grid;
  blockDim = kernel.block;
  const std::size_t blocks = std::size_t{gridDim.x} * gridDim.y * gridDim.z;
  threads_.resize(std::size_t{blockDim.x} * blockDim.y * blockDim.z);
  copies_.resize(threads_.size());
  // Visits all blocks in an order with almost no pattern: i * step + first
  // modulo the number of blocks, with a step that is prime to it.
  std::size_t step = random.Below(blocks) | 1;
  while (std::gcd(step, blocks) != 1) ++step;
  std::size_t block = random.Below(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    blockIdx = {static_cast<unsigned>(block % gridDim.x),
                static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    // This fills the shared variables of all kernels, so it is not cheap.
    if (i == 0 || random.Below(8) == 0) ForgetShared();
    RunBlock();
    block = (block + step) % blocks;
  }
  kernel_ = nullptr;
}

void Grid::RunBlock() {
  std::memset(shared_.data(), kGarbage, kernel_->shared_bytes);
  ready_.resize(threads_.size());
  std::iota(ready_.begin(), ready_.end(), std::size_t{0});
  std::fill(threads_.begin(), threads_.end(), Thread{});
  ended_ = 0;
  at_barrier_ = 0;
  one_runs_ahead_ = (random_->Next() >> 63) != 0;
  Pick();
  SwitchToNext(caller_);
  if (ended_ != threads_.size()) ReportDeadlock();
}

// Releases the threads at a barrier if all threads have arrived.
bool Grid::Release() {
  if (at_barrier_ == 0 || at_barrier_ + ended_ != threads_.size()) return false;
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    if (threads_[i].state != State::kAtBarrier) continue;
    threads_[i].state = State::kReady;
    ready_.push_back(i);
  }
  at_barrier_ = 0;
  return true;
}

// Draws the next thread to run: kNone if no thread can run.
void Grid::Pick() {
  next_ = kNone;
  if (ready_.empty() && !Release()) return;
  // Either all threads advance evenly, or the ready ones run far ahead of
  // others.
  const bool last = one_runs_ahead_ && threads_[ready_.back()].fiber != nullptr;
  const std::size_t i =
      last ? ready_.size() - 1 : random_->Below(ready_.size());
  next_ = ready_[i];
  ready_[i] = ready_.back();
  ready_.pop_back();
}

void Grid::Enter(std::size_t thread) {
  current_ = thread;
  const auto i = static_cast<unsigned>(thread);
  threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y,
               i / blockDim.x / blockDim.y};
}

// Continues with the drawn thread; with the caller if there is none.
void Grid::SwitchToNext(Fiber& from) {
  if (next_ == kNone) return Fiber::Switch(from, caller_);
  Thread& thread = threads_[next_];
  Enter(next_);
  if (thread.fiber == nullptr) {
    if (idle_.empty()) {
      idle_.push_back(new Fiber([](Fiber& own) { TheGrid().RunThreads(own); }));
    }
    thread.fiber = idle_.back();
    idle_.pop_back();
  }
  if (thread.fiber != &from) Fiber::Switch(from, *thread.fiber);
}

// Runs new threads, one after the other, for as long as new ones are drawn.
void Grid::RunThreads(Fiber& own) {
  for (;;) {
    kernel_->thread();
    FinishCopies(-1);  // Including copies without a group.
    copies_[current_].groups = 0;
    threads_[current_].state = State::kEnded;
    ++ended_;
    Pick();
    if (next_ != kNone && threads_[next_].fiber == nullptr) {
      threads_[next_].fiber = &own;
      Enter(next_);
    } else {
      idle_.push_back(&own);
      SwitchToNext(own);
    }
  }
}

void Grid::Wait() {
  Fiber& own = *threads_[current_].fiber;
  Pick();
  SwitchToNext(own);
}

void Grid::Barrier() {
  if (threads_.size() == 1) return;
  threads_[current_].state = State::kAtBarrier;
  ++at_barrier_;
  Wait();
}

void Grid::Meet(const char* name, unsigned mask, Lane lane, Combine combine) {
  const std::size_t warp = current_ / 32 * 32;
  const std::size_t own = current_ % 32;
  if ((mask >> own & 1) == 0) Misuse(name, "its own lane is not in the mask");
  Thread& thread = threads_[current_];
  thread.state = State::kMeeting;
  thread.where = name;
  thread.mask = mask;
  thread.combine = combine;
  thread.lane = lane;

  std::array<Lane, 32> lanes;
  for (std::size_t i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const std::size_t other = warp + i;
    if (other >= threads_.size() || threads_[other].state != State::kMeeting ||
        threads_[other].mask != mask || threads_[other].combine != combine) {
      Wait();
      return;
    }
    lanes[i] = threads_[other].lane;
  }
  combine(mask, lanes.data());
  for (std::size_t i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    threads_[warp + i].state = State::kReady;
    if (i != own) ready_.push_back(warp + i);
  }
}

void Grid::CopyLater(void* shared, const void* global, std::size_t bytes) {
  if ((reinterpret_cast<std::uintptr_t>(shared) |
       reinterpret_cast<std::uintptr_t>(global)) %
          kCopyBytes !=
      0) {
    Misuse("CopyAsync16", "an address is not a multiple of 16");
  }
  if (bytes > kCopyBytes) Misuse("CopyAsync16Zero", "more than 16 bytes");
  Copies& own = copies_[current_];
  own.copies.push_back({shared, global, bytes, own.groups});
  std::memset(shared, kGarbage, kCopyBytes);
}

void Grid::FinishCopies(int but_groups) {
  Copies& own = copies_[current_];
  std::erase_if(own.copies, [&](const Copies::Copy& copy) {
    if (copy.group >= own.groups - but_groups) return false;
    std::memset(copy.to, 0, kCopyBytes);
    std::memcpy(copy.to, copy.from, copy.bytes);
    return true;
  });
}

void Grid::ReportDeadlock() {
  std::fprintf(stderr, "emulator: deadlock in %s, block (%u, %u, %u):\n",
               NameOf(*kernel_).c_str(), blockIdx.x, blockIdx.y, blockIdx.z);
  int lines = 0;
  for (std::size_t i = 0; i < threads_.size() && lines < 40; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::kEnded) continue;
    ++lines;
    if (thread.state == State::kAtBarrier) {
      std::fprintf(stderr, "  thread %zu waits at __syncthreads\n", i);
    } else {
      std::fprintf(stderr, "  thread %zu (lane %zu) waits at %s, mask %08x\n",
                   i, i % 32, thread.where, thread.mask);
    }
  }
  std::fprintf(stderr, "  %zu of %zu threads ended\n", ended_, threads_.size());
  std::abort();
}

void Grid::Misuse(const char* name, const char* what) {
  std::fprintf(stderr,
               "emulator: %s: %s\n  in %s, block (%u, %u, %u), thread "
               "(%u, %u, %u)\n",
               name, what, NameOf(*kernel_).c_str(), blockIdx.x, blockIdx.y,
               blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  std::abort();
}

}  // namespace

void RunGrid(const Kernel& kernel, Random& random) {
  ReportFaults();
  TheGrid().Run(kernel, random);
}

const Kernel* RunningKernel() { return TheGrid().kernel(); }

std::string NameOf(const Kernel& kernel) {
  Dl_info info = {};
  if (dladdr(kernel.function, &info) != 0 && info.dli_sname != nullptr) {
    int status = 0;
    char* name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string text = name != nullptr ? name : info.dli_sname;
    std::free(name);
    return text;
  }
  // The kernel is not exported: use its offset (for addr2line) and parameters.
  char place[64];
  std::snprintf(place, sizeof(place), "+0x%zx, ",
                reinterpret_cast<std::size_t>(kernel.function) -
                    reinterpret_cast<std::size_t>(info.dli_fbase));
  return std::string("a kernel at ") +
         (info.dli_fname != nullptr ? info.dli_fname : "?") + place +
         kernel.type;
}

void Barrier() { TheGrid().Barrier(); }

void Meet(const char* name, unsigned mask, const void* in, void* out,
          Combine combine) {
  TheGrid().Meet(name, mask, {in, out}, combine);
}

int LaneIndex() { return static_cast<int>(TheGrid().current() % 32); }

void Misuse(const char* name, const char* what) {
  TheGrid().Misuse(name, what);
}

unsigned Ballot(const char* name, unsigned mask, bool predicate) {
  unsigned out = 0;
  Meet(name, mask, &predicate, &out, [](unsigned among, const Lane* lanes) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
      if ((among >> i & 1) == 0) continue;
      if (*static_cast<const bool*>(lanes[i].in)) bits |= 1U << i;
    }
    for (int i = 0; i < 32; ++i) {
      if ((among >> i & 1) == 0) continue;
      *static_cast<unsigned*>(lanes[i].out) = bits;
    }
  });
  return out;
}

void CopyAsync16Zero(void* shared, const void* global, int bytes) {
  TheGrid().CopyLater(shared, global, static_cast<std::size_t>(bytes));
}

void CopyAsyncCommit() { TheGrid().CommitCopies(); }

void FinishCopies(int but_groups) { TheGrid().FinishCopies(but_groups); }

std::byte* DynamicSharedMemory() { return TheGrid().shared(); }

}  // namespace kvtwin::emulator
