// A cache in device memory beside the reference twin, and rows for both.

#ifndef KVTWIN_PROPS_CUDA_CUDA_CACHES_H_
#define KVTWIN_PROPS_CUDA_CUDA_CACHES_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::props {

inline constexpr int kHeadDim = 8;
inline constexpr int kHeads = 2;
inline constexpr int kCapacity = 256;

class OwnedStream {
 public:
  OwnedStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              cudaSuccess);
  }
  ~OwnedStream() { (void)cudaStreamDestroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT

 private:
  cudaStream_t stream_ = nullptr;
};

// K or V rows of some tokens, in the memory of the host and of the device.
class TokenRows {
 public:
  explicit TokenRows(int tokens, int head_dim = kHeadDim)
      : tokens_(tokens), head_dim_(head_dim) {
    host_.resize(AsSize(tokens * kHeads * head_dim));
    EXPECT_EQ(cudaMalloc(&device_, host_.size() * sizeof(float)), cudaSuccess);
  }
  ~TokenRows() { (void)cudaFree(device_); }
  TokenRows(const TokenRows&) = delete;
  TokenRows& operator=(const TokenRows&) = delete;

  void Fill(float first, cudaStream_t stream) {
    std::iota(host_.begin(), host_.end(), first);
    EXPECT_EQ(
        cudaMemcpyAsync(device_, host_.data(), host_.size() * sizeof(float),
                        cudaMemcpyHostToDevice, stream),
        cudaSuccess);
  }

  TensorView OnHost() const { return View(host_.data()); }
  TensorView OnDevice() const { return View(device_); }

 private:
  TensorView View(const void* data) const {
    return DenseView(data, DType::kF32, {head_dim_, kHeads, tokens_, 1});
  }

  int tokens_;
  int head_dim_;
  std::vector<float> host_;
  void* device_ = nullptr;
};

// The elements of a view in device memory, read by work on a stream.
inline DenseTensor ReadFromDevice(const TensorView& view, cudaStream_t stream) {
  const bool runs = view.stride[0] == 0;
  const std::byte* last =
      view.at(runs ? 0 : view.shape[0] - 1, view.shape[1] - 1,
              view.shape[2] - 1, view.shape[3] - 1);
  std::vector<std::byte> bytes(AsSize(
      last - view.at(0) + RunBytes(view.dtype, runs ? view.shape[0] : 1)));
  EXPECT_EQ(cudaMemcpyAsync(bytes.data(), view.data, bytes.size(),
                            cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  TensorView read = view;
  read.data = bytes.data();
  return CopyOf(read, read.dtype);
}

class CudaCaches : public ::testing::Test {
 protected:
  void SetUp() override { MakeCaches(kCapacity, 16); }

  void MakeCaches(int capacity, int max_batch) {
    cuda_ = *CudaCache::Make({});
    reference_ = *MakeCache({}, "reference");
    const CacheConfig config{.cache_padding = 64, .mask_dtype = DType::kF16};
    ASSERT_TRUE(reference_->SetConfig(config).ok());
    ASSERT_TRUE(cuda_->On(stream_).SetConfig(config).ok());
    for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
      const Status status = cache->Init({DType::kF16, 4, capacity, max_batch});
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }

  // Starts a pass in both caches, without Put.
  void Start(const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences, cudaStream_t stream) {
    const Batch batch{.positions = positions, .sequences = sequences};
    ASSERT_TRUE(reference_->StartForward(batch, false).ok());
    const Status status = cuda_->On(stream).StartForward(batch, false);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  void Put(const TokenRows& rows, cudaStream_t stream) {
    ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
    const Status status =
        cuda_->On(stream).Put(rows.OnDevice(), rows.OnDevice());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // Returns a graph of a Put to the current pass, and of `then`, captured on
  // the other stream.
  template <class Then>
  cudaGraphExec_t PutInAGraph(const TokenRows& rows, const Then& then) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(other_, cudaStreamCaptureModeGlobal),
              cudaSuccess);
    const Status put = cuda_->On(other_).Put(rows.OnDevice(), rows.OnDevice());
    EXPECT_TRUE(put.ok()) << put.ToString();
    then();
    EXPECT_EQ(cudaStreamEndCapture(other_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return made;
  }
  cudaGraphExec_t PutInAGraph(const TokenRows& rows) {
    return PutInAGraph(rows, [] {});
  }

  // Compares the views of both caches, read on this stream.
  void ExpectSame(cudaStream_t stream) {
    const Result<KvView> expected = reference_->Get();
    const Result<KvView> got = cuda_->On(stream).Get();
    ASSERT_TRUE(expected.ok() && got.ok()) << got.status().ToString();
    EXPECT_EQ(got->device, Device::kCuda);
    EXPECT_EQ(got->stream, stream);
    EXPECT_EQ(got->first_cell, expected->first_cell);
    for (const auto tensor : {&KvView::key, &KvView::value, &KvView::mask}) {
      const TensorView& rows = (*expected).*tensor;
      EXPECT_EQ(ReadFromDevice((*got).*tensor, stream),
                CopyOf(rows, rows.dtype));
    }
  }

  OwnedStream stream_;
  OwnedStream other_;
  std::unique_ptr<CudaCache> cuda_;
  std::unique_ptr<Cache> reference_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_CUDA_CUDA_CACHES_H_
