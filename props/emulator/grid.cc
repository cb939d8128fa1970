// Runs a grid: its blocks one after the other, the threads of a block by turns,
// both in an order that is drawn. A thread runs until it ends or has to wait
// for others; only what waits keeps a stack.

#include <cxxabi.h>
#include <dlfcn.h>

#include <array>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "props/emulator/emulated_intrinsics.h"
#include "props/emulator/internal.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace kvtwin::emulator {
namespace {

using boost::context::fiber;

constexpr std::size_t kStackBytes = 128 << 10;
constexpr int kNone = -1;

constexpr std::size_t kCopyBytes = 16;

enum class State { kNew, kReady, kAtBarrier, kMeeting, kEnded };

// A stack, and what runs on it.
class Worker;

struct Thread {
  State state = State::kNew;
  Worker* worker = nullptr;  // Of one that waits.
  // The meeting that it waits in.
  const char* where = nullptr;
  unsigned mask = 0;
  Combine combine = nullptr;
  Lane lane = {};
};

// Copies to shared memory that a thread has under way.
struct Copies {
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    int group;
  };
  std::vector<Copy> copies;
  int groups = 0;  // That were committed.
};

class Grid {
 public:
  void Run(const Kernel& kernel, Random& random);

  // For the thread that runs.
  void Barrier();
  void Meet(const char* name, unsigned mask, Lane lane, Combine combine);
  void CopyLater(void* shared, const void* global, std::size_t bytes);
  void CommitCopies() { ++copies_[Current()].groups; }
  void FinishCopies(int but_groups);
  int current() const { return current_; }
  const Kernel* kernel() const { return kernel_; }
  std::byte* shared() { return shared_.data(); }
  [[noreturn]] void Misuse(const char* name, const char* what);

  // For the worker that runs.
  void RunThread();
  bool NextIsNew();

 private:
  void RunBlock();
  void Resume();
  void Pick();
  void Enter(int thread);
  void Wait();
  std::size_t Current() const { return static_cast<std::size_t>(current_); }
  [[noreturn]] void ReportDeadlock();

  const Kernel* kernel_ = nullptr;
  Random* random_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Copies> copies_;
  std::vector<int> ready_;  // New or ready threads.
  int ended_ = 0;
  int at_barrier_ = 0;
  bool one_runs_ahead_ = false;
  int current_ = kNone;
  int next_ = kNone;
  std::vector<Worker*> idle_;
  alignas(1024) std::array<std::byte, kMostSharedBytes> shared_;
};

Grid& TheGrid() {
  static Grid& grid = *new Grid;  // Its workers' stacks outlive all.
  return grid;
}

class Worker {
 public:
  Worker()
      : self_(std::allocator_arg,
              boost::context::protected_fixedsize_stack(kStackBytes),
              [this](fiber&& scheduler) {
                scheduler_ = std::move(scheduler);
                Loop();
                return std::move(scheduler_);
              }) {}

  // Of the scheduler: returns when the worker waits or has nothing to do.
  void Resume() { self_ = std::move(self_).resume(); }
  // Of the worker.
  void Yield() { scheduler_ = std::move(scheduler_).resume(); }

 private:
  [[noreturn]] void Loop() {
    for (;;) {
      do {
        TheGrid().RunThread();
      } while (TheGrid().NextIsNew());
      Yield();
    }
  }

  fiber self_;
  fiber scheduler_;
};

void Grid::Run(const Kernel& kernel, Random& random) {
  kernel_ = &kernel;
  random_ = &random;
  gridDim = kernel.grid;
  blockDim = kernel.block;
  const std::size_t blocks = std::size_t{gridDim.x} * gridDim.y * gridDim.z;
  threads_.resize(std::size_t{blockDim.x} * blockDim.y * blockDim.z);
  copies_.resize(threads_.size());
  // All of them, in an order with about no pattern: i * step + first modulo
  // the count, the step prime to it.
  std::size_t step = random.Below(blocks) | 1;
  while (std::gcd(step, blocks) != 1) ++step;
  std::size_t block = random.Below(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    blockIdx = {static_cast<unsigned>(block % gridDim.x),
                static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    RunBlock();
    block = (block + step) % blocks;
  }
  kernel_ = nullptr;
}

void Grid::RunBlock() {
  std::memset(shared_.data(), kGarbage, kernel_->shared_bytes);
  ready_.resize(threads_.size());
  std::iota(ready_.begin(), ready_.end(), 0);
  std::fill(threads_.begin(), threads_.end(), Thread{});
  ended_ = 0;
  at_barrier_ = 0;
  one_runs_ahead_ = (random_->Next() >> 63) != 0;
  for (Pick(); next_ != kNone;) Resume();
  if (ended_ != static_cast<int>(threads_.size())) ReportDeadlock();
}

// Draws what runs next.
void Grid::Pick() {
  next_ = kNone;
  if (ready_.empty() && at_barrier_ > 0 &&
      at_barrier_ + ended_ == static_cast<int>(threads_.size())) {
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      if (threads_[i].state != State::kAtBarrier) continue;
      threads_[i].state = State::kReady;
      ready_.push_back(static_cast<int>(i));
    }
    at_barrier_ = 0;
  }
  if (ready_.empty()) return;
  // Either all get on about evenly, or those who can go far ahead of others.
  const bool last =
      one_runs_ahead_ && threads_[ready_.back()].state == State::kReady;
  const std::size_t i =
      last ? ready_.size() - 1 : random_->Below(ready_.size());
  next_ = ready_[i];
  ready_[i] = ready_.back();
  ready_.pop_back();
}

// Runs the next thread, and all new ones that come after it.
void Grid::Resume() {
  current_ = std::exchange(next_, kNone);
  Worker* worker = threads_[current_].worker;
  if (worker == nullptr) {
    if (idle_.empty()) idle_.push_back(new Worker);
    worker = idle_.back();
    idle_.pop_back();
    threads_[current_].worker = worker;
  }
  Enter(current_);
  worker->Resume();
  if (threads_[current_].state == State::kEnded) idle_.push_back(worker);
}

void Grid::Enter(int thread) {
  const auto i = static_cast<unsigned>(thread);
  threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y,
               i / blockDim.x / blockDim.y};
}

void Grid::RunThread() {
  kernel_->thread();
  FinishCopies(-1);  // Those that no group has, too.
  copies_[Current()].groups = 0;
  threads_[current_].state = State::kEnded;
  ++ended_;
}

bool Grid::NextIsNew() {
  Worker* const worker = threads_[current_].worker;
  Pick();
  if (next_ == kNone || threads_[next_].state != State::kNew) return false;
  current_ = std::exchange(next_, kNone);
  threads_[current_].worker = worker;
  Enter(current_);
  return true;
}

void Grid::Wait() {
  Worker* const worker = threads_[current_].worker;
  Pick();
  worker->Yield();
}

void Grid::Barrier() {
  if (threads_.size() == 1) return;
  threads_[current_].state = State::kAtBarrier;
  ++at_barrier_;
  Wait();
}

void Grid::Meet(const char* name, unsigned mask, Lane lane, Combine combine) {
  const int warp = current_ / 32 * 32;
  const int own = current_ % 32;
  if ((mask >> own & 1) == 0) Misuse(name, "its own lane is not in the mask");
  Thread& thread = threads_[current_];
  thread.state = State::kMeeting;
  thread.where = name;
  thread.mask = mask;
  thread.combine = combine;
  thread.lane = lane;

  std::array<Lane, 32> lanes;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const std::size_t other = static_cast<std::size_t>(warp + i);
    if (other >= threads_.size() || threads_[other].state != State::kMeeting ||
        threads_[other].mask != mask || threads_[other].combine != combine) {
      Wait();
      return;
    }
    lanes[i] = threads_[other].lane;
  }
  combine(mask, lanes.data());
  for (int i = 0; i < 32; ++i) {
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
    Misuse("CopyAsync16", "an address is no multiple of 16");
  }
  if (bytes > kCopyBytes) Misuse("CopyAsync16Zero", "more than 16 bytes");
  Copies& own = copies_[Current()];
  own.copies.push_back({shared, global, bytes, own.groups});
  std::memset(shared, kGarbage, kCopyBytes);
}

void Grid::FinishCopies(int but_groups) {
  Copies& own = copies_[Current()];
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
  std::fprintf(stderr, "  %d of %zu threads ended\n", ended_, threads_.size());
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
  // Not exported: its place, for addr2line, and its parameters.
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

int LaneIndex() { return TheGrid().current() % 32; }

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
