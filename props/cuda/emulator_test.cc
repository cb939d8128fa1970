// How the emulator of CUDA (emulator/emulator.h) handles memory, streams,
// graphs and errors: work is done as late as possible.

#include "props/cuda/emulator_test.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "optimized/cuda/runtime.h"
#include "props/cuda/emulator/emulator.h"

namespace kvtwin::emulator {
namespace {

using optimized::cuda::Launch;

__global__ void Set(int* to, int value) { *to = value; }
__global__ void Add(int* to, const int* from) { *to += *from; }
__global__ void Double(int* to) { *to *= 2; }

constexpr auto kDown = cudaMemcpyDeviceToHost;
constexpr auto kUp = cudaMemcpyHostToDevice;

// Memory ----------------------------------------------------------------------

TEST_F(Emulator, MemoryIsGarbageAndAlignedTo256) {
  constexpr std::size_t kSizes[] = {1, 100, 3000};
  for (const std::size_t n : kSizes) {
    const Numbers<std::uint8_t> bytes(n);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.get()) % 256, 0);
    std::size_t zeros = 0;
    for (const std::uint8_t byte : bytes.Read()) zeros += byte == 0 ? 1 : 0;
    EXPECT_LE(zeros, n / 16);
  }
}

TEST_F(Emulator, LimitsMemory) {
  std::size_t left = 0;
  std::size_t total = 0;
  EXPECT_OK(cudaMemGetInfo(&left, &total));
  const std::size_t used = total - left;  // Used by earlier tests.
  SetMemory(used + 1000);
  void* some = nullptr;
  void* more = nullptr;
  ASSERT_EQ(cudaMalloc(&some, 600), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&more, 401), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  EXPECT_OK(cudaMemGetInfo(&left, &total));
  EXPECT_EQ(left, 400);
  EXPECT_EQ(total, used + 1000);
  EXPECT_EQ(cudaFreeHost(some), cudaErrorInvalidValue);
  EXPECT_OK(cudaFree(some));
  EXPECT_EQ(cudaFree(some), cudaErrorInvalidValue);
  EXPECT_OK(cudaFree(nullptr));
  EXPECT_OK(cudaMalloc(&some, 0));
  EXPECT_EQ(some, nullptr);
  EXPECT_OK(cudaMalloc(&some, 1000));
  EXPECT_OK(cudaFree(some));
}

TEST_F(Emulator, TellsHostFromDevicePointers) {
  const Numbers<int> device(100);
  const Pinned pinned(0);
  int own = 0;
  cudaPointerAttributes said = {};
  EXPECT_OK(cudaPointerGetAttributes(&said, device.get() + 99));
  EXPECT_EQ(said.type, cudaMemoryTypeDevice);
  EXPECT_EQ(said.devicePointer, device.get() + 99);
  EXPECT_OK(cudaPointerGetAttributes(&said, device.get() + 100));
  EXPECT_EQ(said.type, cudaMemoryTypeUnregistered);
  EXPECT_OK(cudaPointerGetAttributes(&said, pinned.get()));
  EXPECT_EQ(said.type, cudaMemoryTypeHost);
  EXPECT_OK(cudaPointerGetAttributes(&said, &own));
  EXPECT_EQ(said.type, cudaMemoryTypeUnregistered);
}

TEST_F(EmulatorDeath, ForbiddenAccesses) {
  const Numbers<int> number(1);
  int* const data = number.get();
  EXPECT_DEATH(*data = 1, "the host\n.*byte 0 of 4 bytes of device memory");
  const auto run = [](int* to) {
    cudaFree(nullptr);
    EXPECT_OK(Launch(Set, 1, 1, 0, nullptr, to, 1));
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(run(data + 64), "of .*int.*\n.*byte 256 of 4 bytes");
  EXPECT_DEATH(run(reinterpret_cast<int*>(4096)),
               "of .*int.*\n.*which is not the device's");
  EXPECT_DEATH((run(data + 1), cudaFree(data)),
               "byte 4 of an allocation of 4 was written");
  EXPECT_DEATH((run(data - 1), cudaFree(data)),
               "byte -4 of an allocation of 4 was written");
}

// Streams ---------------------------------------------------------------------

TEST_F(Emulator, DefersWorkUntilTheHostWaits) {
  const Numbers<int> number(std::vector<int>{1});
  const Pinned read(0);
  const Stream stream;
  EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), 7));
  EXPECT_OK(cudaMemcpyAsync(read.get(), number.get(), 4, kDown, stream));
  EXPECT_EQ(*read, 0);
  EXPECT_EQ(number.Read()[0], 1);  // Stream 0 does not wait for this one.
  EXPECT_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(*read, 7);
}

TEST_F(Emulator, SomeSeedsWorkEarlier) {
  int early = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SetSeed(seed);
    const Numbers<int> number(1);
    const Pinned read(0);
    const Stream stream;
    EXPECT_OK(cudaMemsetAsync(number.get(), 1, 4, stream));
    EXPECT_OK(cudaMemcpyAsync(read.get(), number.get(), 4, kDown, stream));
    early += *read != 0 ? 1 : 0;
    EXPECT_OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(*read, 0x01010101);
  }
  EXPECT_GT(early, 0);
  EXPECT_LT(early, 25);
}

TEST_F(Emulator, PinnedMemoryIsReadWhenTheCopyIsDone) {
  const Numbers<int> number(1);
  const Stream stream;
  const Pinned pinned(1);
  EXPECT_OK(cudaMemcpyAsync(number.get(), pinned.get(), 4, kUp, stream));
  *pinned = 2;
  EXPECT_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(number.Read()[0], 2);
  // Other memory is read and written during the call.
  int own = 3;
  EXPECT_OK(cudaMemcpyAsync(number.get(), &own, 4, kUp, stream));
  own = 4;
  EXPECT_OK(cudaMemcpyAsync(&own, number.get(), 4, kDown, stream));
  EXPECT_EQ(own, 3);
}

TEST_F(Emulator, CopiesThatAreRefused) {
  const Numbers<int> numbers(4);
  const Numbers<int> others(4);
  std::array<int, 8> own = {};
  int* const data = numbers.get();
  EXPECT_EQ(cudaMemcpy(data, own.data(), 20, kUp), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data + 1, own.data(), 16, kUp), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(own.data(), data, 16, kUp), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(own.data(), data, 16, cudaMemcpyHostToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(own.data(), 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy2D(data, 4, own.data(), 8, 8, 2, kUp),
            cudaErrorInvalidPitchValue);
  // Copies rows of one number each, skipping every other number.
  own = {1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_OK(cudaMemcpy2D(data, 4, own.data(), 8, 4, 4, kUp));
  EXPECT_OK(cudaMemcpy(others.get(), data, 16, cudaMemcpyDefault));
  EXPECT_EQ(others.Read(), (std::vector<int>{1, 3, 5, 7}));
}

TEST_F(Emulator, AStreamWaitsForAnEventOfAnother) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SetSeed(seed);
    const Numbers<int> number(std::vector<int>{1});
    const Stream first;
    const Stream second;
    const Event event;
    EXPECT_OK(cudaStreamWaitEvent(second, event));  // Nothing is recorded yet.
    EXPECT_OK(Launch(Set, 1, 1, 0, first, number.get(), 10));
    EXPECT_OK(cudaEventRecord(event, first));
    EXPECT_OK(cudaStreamWaitEvent(second, event));
    EXPECT_OK(Launch(Double, 1, 1, 0, second, number.get()));
    EXPECT_OK(cudaStreamSynchronize(second));
    EXPECT_EQ(number.Read()[0], 20) << seed;
    EXPECT_OK(cudaEventQuery(event));
  }
}

TEST_F(Emulator, StreamsRunInAnyOrderWithoutAnEvent) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SetSeed(seed);
    const Numbers<int> number(std::vector<int>{1});
    const Stream first;
    const Stream second;
    EXPECT_OK(Launch(Set, 1, 1, 0, first, number.get(), 10));
    EXPECT_OK(Launch(Double, 1, 1, 0, second, number.get()));
    EXPECT_OK(cudaDeviceSynchronize());
    wrong += number.Read()[0] == 20 ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, 20);
}

TEST_F(Emulator, BlockingStreamsAndStream0WaitForEachOther) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SetSeed(seed);
    const Numbers<int> number(std::vector<int>{1});
    cudaStream_t stream = nullptr;
    EXPECT_OK(cudaStreamCreate(&stream));
    EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), 10));
    EXPECT_OK(Launch(Double, 1, 1, 0, nullptr, number.get()));
    EXPECT_OK(Launch(Add, 1, 1, 0, stream, number.get(), number.get()));
    EXPECT_OK(cudaStreamSynchronize(stream));
    EXPECT_EQ(number.Read()[0], 40) << seed;
    EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), 3));
    EXPECT_OK(cudaStreamDestroy(stream));  // Work on it is still done.
    EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(number.Read()[0], 3) << seed;
  }
}

TEST_F(Emulator, QueriesSucceedEventually) {
  const Numbers<int> number(1);
  const Stream stream;
  const Event event;
  EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), 10));
  EXPECT_OK(cudaEventRecord(event, stream));
  EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), 20));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  int asked = 0;
  while (cudaEventQuery(event) != cudaSuccess && asked < 10) ++asked;
  while (cudaStreamQuery(stream) != cudaSuccess && asked < 10) ++asked;
  EXPECT_LT(asked, 10);
  EXPECT_EQ(number.Read()[0], 20);
  const Event later;
  EXPECT_OK(cudaEventRecord(later, stream));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, later),
            cudaErrorNotReady);
  EXPECT_OK(cudaEventSynchronize(later));
  EXPECT_OK(cudaEventElapsedTime(&milliseconds, event, later));
  EXPECT_GE(milliseconds, 0);
}

TEST_F(Emulator, HostThreadsHaveTheirOwnStreams) {
  SetSeed(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      const Numbers<int> number(1);
      const Stream stream;
      for (int k = 0; k < 50; ++k) {
        EXPECT_OK(Launch(Set, 1, 1, 0, stream, number.get(), i + k));
        EXPECT_OK(Launch(Double, 1, 1, 0, stream, number.get()));
        EXPECT_OK(cudaStreamSynchronize(stream));
        EXPECT_EQ(number.Read()[0], 2 * (i + k));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Graphs ----------------------------------------------------------------------

constexpr auto kGlobal = cudaStreamCaptureModeGlobal;

TEST_F(Emulator, AGraphReplaysItsCapture) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    SetSeed(seed);
    const Numbers<int> single(std::vector<int>{1});
    const Numbers<int> two(std::vector<int>{2});
    const Stream origin;
    const Stream other;
    const Event begun;
    const Event done;
    EXPECT_OK(cudaStreamBeginCapture(origin, kGlobal));
    EXPECT_OK(Launch(Double, 1, 1, 0, origin, single.get()));
    EXPECT_OK(cudaEventRecord(begun, origin));
    EXPECT_OK(cudaStreamWaitEvent(other, begun));
    EXPECT_OK(Launch(Add, 1, 1, 0, other, two.get(), single.get()));
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_OK(cudaStreamIsCapturing(other, &status));
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    EXPECT_EQ(cudaEventQuery(begun), cudaErrorCapturedEvent);
    EXPECT_OK(cudaEventRecord(done, other));
    EXPECT_OK(cudaStreamWaitEvent(origin, done));
    EXPECT_OK(Launch(Add, 1, 1, 0, origin, single.get(), two.get()));
    cudaGraph_t graph = nullptr;
    EXPECT_OK(cudaStreamEndCapture(origin, &graph));
    cudaGraphExec_t exec = nullptr;
    EXPECT_OK(cudaGraphInstantiate(&exec, graph));
    EXPECT_OK(cudaGraphDestroy(graph));
    EXPECT_OK(cudaDeviceSynchronize());
    EXPECT_EQ(single.Read()[0], 1);

    // Launched on two streams, the runs still come one after the other.
    EXPECT_OK(cudaGraphLaunch(exec, origin));
    EXPECT_OK(cudaGraphLaunch(exec, other));
    EXPECT_OK(cudaGraphExecDestroy(exec));
    EXPECT_OK(cudaStreamSynchronize(other));
    // 1, 2 -> 2, 4 -> 6, 4 -> 12, 16 -> 28, 16.
    EXPECT_EQ(single.Read()[0], 28);
    EXPECT_EQ(two.Read()[0], 16);
  }
}

// Expects that `call` fails with `error` and invalidates the capture.
template <class Does>
void ExpectInvalidates(cudaError_t error, const Does& call) {
  const Stream stream;
  cudaGraph_t graph = nullptr;
  EXPECT_OK(cudaStreamBeginCapture(stream, kGlobal));
  EXPECT_EQ(call(stream), error);
  EXPECT_EQ(Launch(Set, 1, 1, 0, stream, nullptr, 1),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
}

TEST_F(Emulator, RefusesCallsDuringACapture) {
  const Numbers<int> number(1);
  int own = 0;
  int* some = nullptr;
  const Stream other;
  const Event event;
  EXPECT_OK(cudaEventRecord(event, other));
  const auto unsupported = cudaErrorStreamCaptureUnsupported;
  ExpectInvalidates(unsupported,
                    [&](cudaStream_t) { return cudaMalloc(&some, 4); });
  ExpectInvalidates(unsupported,
                    [](cudaStream_t) { return cudaFree(nullptr); });
  ExpectInvalidates(unsupported,
                    [&](cudaStream_t) { return cudaMallocHost(&some, 4); });
  ExpectInvalidates(unsupported, cudaStreamSynchronize);
  ExpectInvalidates(unsupported, cudaStreamQuery);
  ExpectInvalidates(unsupported,
                    [](cudaStream_t) { return cudaDeviceSynchronize(); });
  ExpectInvalidates(unsupported, [&](cudaStream_t stream) {
    return cudaMemcpyAsync(&own, number.get(), 4, kDown, stream);
  });
  ExpectInvalidates(cudaErrorStreamCaptureIsolation, [&](cudaStream_t stream) {
    return cudaStreamWaitEvent(stream, event);
  });
  ExpectInvalidates(cudaErrorStreamCaptureMerge, [&](cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_OK(cudaStreamBeginCapture(other, kGlobal));
    EXPECT_OK(cudaEventRecord(event, other));
    const cudaError_t error = cudaStreamWaitEvent(stream, event);
    EXPECT_EQ(cudaStreamEndCapture(other, &graph),
              cudaErrorStreamCaptureInvalidated);
    return error;
  });
}

TEST_F(Emulator, CaptureModesAllowDifferentCalls) {
  const Stream stream;
  int* some = nullptr;
  cudaGraph_t graph = nullptr;
  EXPECT_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  EXPECT_OK(cudaMalloc(&some, 4));
  EXPECT_OK(cudaStreamEndCapture(stream, &graph));
  EXPECT_OK(cudaGraphDestroy(graph));
  const auto malloc_elsewhere = [&] {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = cudaMalloc(&some, 4); }).join();
    return error;
  };
  EXPECT_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_OK(malloc_elsewhere());
  EXPECT_OK(cudaStreamEndCapture(stream, &graph));
  EXPECT_OK(cudaGraphDestroy(graph));
  EXPECT_OK(cudaStreamBeginCapture(stream, kGlobal));
  EXPECT_EQ(malloc_elsewhere(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
            cudaErrorStreamCaptureInvalidated);
}

TEST_F(Emulator, ACaptureMustBeJoined) {
  const Numbers<int> number(1);
  const Stream origin;
  const Stream other;
  const Event event;
  cudaGraph_t graph = nullptr;
  EXPECT_OK(cudaStreamBeginCapture(origin, kGlobal));
  EXPECT_OK(cudaEventRecord(event, origin));
  EXPECT_OK(cudaStreamWaitEvent(other, event));
  EXPECT_OK(Launch(Set, 1, 1, 0, other, number.get(), 1));
  EXPECT_EQ(cudaStreamEndCapture(origin, &graph),
            cudaErrorStreamCaptureUnjoined);
  EXPECT_OK(cudaStreamSynchronize(other));
  cudaStream_t blocking = nullptr;
  EXPECT_OK(cudaStreamCreate(&blocking));
  EXPECT_OK(cudaStreamBeginCapture(blocking, kGlobal));
  EXPECT_EQ(Launch(Set, 1, 1, 0, nullptr, number.get(), 1),
            cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_OK(cudaStreamDestroy(blocking));
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, kGlobal),
            cudaErrorStreamCaptureUnsupported);
}

// Errors ----------------------------------------------------------------------

TEST_F(Emulator, CallsFailOnRequest) {
  const Numbers<int> number(std::vector<int>{1});
  FailNext(Call::kLaunch, cudaErrorLaunchOutOfResources, /*after=*/1);
  EXPECT_OK(Launch(Double, 1, 1, 0, nullptr, number.get()));
  EXPECT_EQ(Launch(Double, 1, 1, 0, nullptr, number.get()),
            cudaErrorLaunchOutOfResources);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorLaunchOutOfResources);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchOutOfResources);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_OK(Launch(Double, 1, 1, 0, nullptr, number.get()));
  EXPECT_EQ(number.Read()[0], 4);
  EXPECT_EQ(Count(Call::kLaunch), 3);
  EXPECT_EQ(Count(Call::kKernel), 2);
  EXPECT_EQ(Count(Call::kCopy), 2);
  EXPECT_EQ(Count(Call::kSynchronize), 0);
}

TEST_F(Emulator, AFailedKernelIsReportedLaterAndForever) {
  const Numbers<int> number(1);
  FailNext(Call::kKernel, cudaErrorIllegalAddress);
  EXPECT_OK(Launch(Set, 1, 1, 0, nullptr, number.get(), 1));
  EXPECT_OK(cudaPeekAtLastError());
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorIllegalAddress);
  void* some = nullptr;
  EXPECT_EQ(cudaMalloc(&some, 4), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(std::string(cudaGetErrorName(cudaGetLastError())),
            "cudaErrorIllegalAddress");
  Reset();
}

TEST_F(Emulator, WithoutADevice) {
  int count = -1;
  void* some = nullptr;
  SetNoDevice(true);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaMalloc(&some, 4), cudaErrorNoDevice);
  SetDriverTooOld(true);
  EXPECT_EQ(cudaMalloc(&some, 4), cudaErrorInsufficientDriver);
  Reset();
  EXPECT_OK(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 1);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
}

}  // namespace
}  // namespace kvtwin::emulator
