// Declarations that the emulator's files share. All of them are used under one
// lock (see `Do`), unless their comments say otherwise.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_INTERNAL_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_INTERNAL_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "props/cuda/emulator/cuda_runtime.h"
#include "props/cuda/emulator/emulator.h"

namespace kvtwin::emulator {

// A cheap random number generator (xorshift64*).
class Random {
 public:
  void Seed(std::uint64_t seed) {
    state_ = (seed * 2 + 1) * 0x9e3779b97f4a7c15;  // Odd, thus not 0.
    for (int i = 0; i < 8; ++i) Next();
  }
  std::uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1d;
  }
  // A number below n. Requires: n > 0.
  std::size_t Below(std::size_t n) {
    return static_cast<std::size_t>((Next() >> 32) * n >> 32);
  }

 private:
  std::uint64_t state_ = 0x9e3779b97f4a7c15;
};

inline constexpr std::size_t kSharedBytes = 48 << 10;
inline constexpr std::size_t kMaxSharedBytes = 227 << 10;  // Only on request.
inline constexpr int kMaxThreads = 1024;
inline constexpr int kProcessors = 4;
// The byte of memory that was never written; a float of such bytes is NaN.
inline constexpr int kGarbage = 0xff;

// A kernel and its launch.
struct Kernel {
  const void* function;
  std::function<void()> thread;  // Runs the kernel for the current thread.
  const char* type;
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
};
// Fills all __shared__ variables with garbage.
void ForgetShared();
// Runs all blocks of the kernel.
void RunGrid(const Kernel& kernel, Random& random);
// The kernel's name, for messages.
std::string NameOf(const Kernel& kernel);
// The running kernel, or null.
const Kernel* RunningKernel();

// Whether something on a stream is done.
struct Mark {
  bool done = false;
  std::chrono::steady_clock::time_point time;
  cudaStream_t stream = nullptr;
};
using MarkPointer = std::shared_ptr<Mark>;
using Work = std::function<void()>;

// A unit of work on a stream.
struct Operation {
  std::uint64_t number;            // In the order of calls.
  std::function<bool()> step;      // Runs a part; true: it was the last.
  std::vector<MarkPointer> waits;  // Must be done before this.
  MarkPointer mark;
};

// A piece of work in a graph, and the nodes that must be done before it.
struct Node {
  Work work;
  std::vector<std::size_t> after;
};

struct Capture {
  cudaStream_t origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool invalid = false;
  std::vector<Node> nodes;
};
using CapturePointer = std::shared_ptr<Capture>;

}  // namespace kvtwin::emulator

struct CUstream_st {
  bool blocking;  // Waits for stream 0, and stream 0 for it.
  bool destroyed = false;
  std::deque<kvtwin::emulator::Operation> queue;
  kvtwin::emulator::CapturePointer capture;  // Or null.
  std::vector<std::size_t> last;             // The next node comes after these.
};

struct CUevent_st {
  bool timing;
  kvtwin::emulator::MarkPointer mark;        // The last record's, or null.
  kvtwin::emulator::CapturePointer capture;  // If recorded in a capture.
  std::vector<std::size_t> last;
};

struct CUgraph_st {
  std::shared_ptr<const std::vector<kvtwin::emulator::Node>> nodes;
};

struct CUgraphExec_st {
  std::shared_ptr<const std::vector<kvtwin::emulator::Node>> nodes;
  kvtwin::emulator::MarkPointer mark;  // The last launch's, or null.
};

namespace kvtwin::emulator {

// The device's memory, and pinned memory of the host.
class Memory {
 public:
  enum class Kind { kDevice, kPinned };
  struct Piece {
    Kind kind;
    std::size_t bytes;
    std::byte* mapped;  // Includes the guard pages.
    std::size_t mapped_bytes;
    int device;
  };

  Memory();
  cudaError_t Allocate(Kind kind, std::size_t bytes, Random& random,
                       void** out);
  // Frees an allocation. Ends the process if bytes beside it were written.
  void Free(void* begin);
  // The piece that begins at the address, or that holds it; null if none does.
  const Piece* Find(const void* begin) const;
  const Piece* Around(const void* address, std::size_t* offset) const;
  // The piece that holds the address, guards included; `offset`: from its
  // begin.
  const Piece* Near(const void* address, std::ptrdiff_t* offset) const;
  // Whether [address, address + bytes) is within one piece of this kind.
  bool Holds(Kind kind, const void* address, std::size_t bytes) const;

  void SetLimit(std::size_t bytes) { limit_ = bytes; }
  std::size_t limit() const { return limit_; }
  std::size_t used() const { return used_; }
  void SetProtect(bool protect);
  // Begin and end work of the device. Calls may be nested.
  void Open();
  void Close();

 private:
  void Protect(const Piece& piece) const;

  std::map<const std::byte*, Piece> pieces_;
  std::size_t limit_;
  std::size_t used_ = 0;
  bool protect_;
  int open_ = 0;
};

class Streams {
 public:
  explicit Streams(Memory& memory) : memory_(memory) {}

  // The stream of this name, or null. Stream 0 always exists.
  cudaStream_t Find(cudaStream_t name);
  cudaStream_t Create(bool blocking);
  void Destroy(cudaStream_t stream);

  // Puts work on a stream, or in the graph that the stream captures.
  cudaError_t Put(cudaStream_t stream, Work work);
  MarkPointer PutStep(cudaStream_t stream, std::function<bool()> step,
                      std::vector<MarkPointer> waits);

  bool Idle(cudaStream_t stream) const { return stream->queue.empty(); }
  // Makes some progress towards the mark or on the stream.
  void StepFor(const Mark& mark);
  void Step(cudaStream_t stream);
  void Finish(cudaStream_t stream);
  void FinishAll();

  Random& random() { return random_; }
  void SetSeed(std::uint64_t seed);
  // Existing streams that are capturing now.
  std::vector<cudaStream_t> Capturing() const;
  const std::vector<std::unique_ptr<CUstream_st>>& all() const { return all_; }

 private:
  void StepOnce(cudaStream_t stream);
  void DoEarly();

  Memory& memory_;
  std::vector<std::unique_ptr<CUstream_st>> all_;
  std::uint64_t next_number_ = 0;
  Random random_;
  bool lazy_ = true;
};

struct Device {
  Device();
  Memory memory;
  Streams streams;
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> execs;
  std::map<const void*, int> shared_bytes;  // If above kSharedBytes.
  cudaError_t sticky = cudaSuccess;
  bool none = false;
  bool driver_too_old = false;
  int count = 1;
};
Device& TheDevice();
int CurrentDevice();  // The calling thread's.
std::mutex& TheMutex();

// Counts the call. Returns the error that it has to fail with, if any.
cudaError_t Begin(Call call);
// Sets the thread's last error.
cudaError_t Answer(cudaError_t error);
// Called after a kernel has run.
void KernelDone();

// Makes faults print a report from now on.
void ReportFaults();

// Runs the body of an API call under the lock.
template <class Body>
cudaError_t Do(Call call, const Body& body) {
  const std::lock_guard lock(TheMutex());
  cudaError_t error = Begin(call);
  if (error == cudaSuccess) error = body(TheDevice());
  if (TheDevice().sticky != cudaSuccess) error = TheDevice().sticky;
  return Answer(error);
}

// For calls that no capture allows: returns the error, and invalidates the
// captures that the call would be part of.
cudaError_t RefuseInCapture();

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_INTERNAL_H_
