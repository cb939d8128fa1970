// Helpers that the tests of the emulator (emulator/emulator.h) share.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_TEST_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_TEST_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "props/cuda/emulator/emulator.h"

namespace kvtwin::emulator {

#define EXPECT_OK(call) EXPECT_EQ(call, cudaSuccess)

// n numbers in device memory.
template <class T>
class Numbers {
 public:
  explicit Numbers(std::size_t n) : n_(n) {
    EXPECT_OK(cudaMalloc(&data_, n * sizeof(T)));
  }
  explicit Numbers(const std::vector<T>& from) : Numbers(from.size()) {
    EXPECT_OK(
        cudaMemcpy(data_, from.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { cudaFree(data_); }

  T* get() const { return data_; }
  // Waits for stream 0 and for the streams that stream 0 waits for.
  std::vector<T> Read() const {
    std::vector<T> out(n_);
    EXPECT_OK(
        cudaMemcpy(out.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  T* data_ = nullptr;
  std::size_t n_;
};

// A stream that does not wait for stream 0.
class Stream {
 public:
  Stream() {
    EXPECT_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }  // NOLINT

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { EXPECT_OK(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  operator cudaEvent_t() const { return event_; }  // NOLINT

 private:
  cudaEvent_t event_ = nullptr;
};

// Pinned memory.
class Pinned {
 public:
  explicit Pinned(int value) {
    EXPECT_OK(cudaMallocHost(&data_, sizeof(int)));
    *data_ = value;
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { cudaFreeHost(data_); }
  int& operator*() const { return *data_; }
  int* get() const { return data_; }

 private:
  int* data_ = nullptr;
};

class Emulator : public testing::Test {
 protected:
  void SetUp() override {
    Reset();
    SetSeed(0);
    SetProtect(true);
  }
  void TearDown() override {
    Reset();
    SetMemory(std::size_t{8} << 30);
  }
};
using EmulatorDeath = Emulator;

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_TEST_H_
