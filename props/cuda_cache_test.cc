// Caches and pools whose memory is a device's, as <kvtwin/cuda.h> gives them:
// streams, graphs, and that what they hold is what the reference twin holds.
// (fuzz --twin cuda and the laws try the rest of what they do.)

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

constexpr int kHeadDim = 8;
constexpr int kHeads = 2;
constexpr int kCapacity = 256;

class Stream {
 public:
  Stream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              cudaSuccess);
  }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT

 private:
  cudaStream_t stream_ = nullptr;
};

// K or V rows of some tokens, in the memory of the host and of the device.
class Rows {
 public:
  explicit Rows(int tokens) : tokens_(tokens) {
    host_.resize(static_cast<std::size_t>(tokens * kHeads * kHeadDim));
    EXPECT_EQ(cudaMalloc(&device_, host_.size() * sizeof(float)), cudaSuccess);
  }
  ~Rows() { (void)cudaFree(device_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

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
    return DenseView(data, DType::kF32, {kHeadDim, kHeads, tokens_, 1});
  }

  int tokens_;
  std::vector<float> host_;
  void* device_ = nullptr;
};

// The elements of a view that is the device's, by work on a stream.
DenseTensor Read(const TensorView& view, cudaStream_t stream) {
  const bool runs = view.stride[0] == 0;
  const std::byte* last =
      view.at(runs ? 0 : view.shape[0] - 1, view.shape[1] - 1,
              view.shape[2] - 1, view.shape[3] - 1);
  std::vector<std::byte> bytes(static_cast<std::size_t>(
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
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
    cuda_ = *CudaCache::Make({});
    reference_ = *MakeCache({}, "reference");
    const CacheConfig config{.cache_padding = 64, .mask_dtype = DType::kF16};
    ASSERT_TRUE(reference_->SetConfig(config).ok());
    ASSERT_TRUE(cuda_->On(stream_).SetConfig(config).ok());
    for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
      const Status status = cache->Init(DType::kF16, 4, kCapacity, 16);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }

  // A pass of both caches, without its rows.
  void Start(const std::vector<std::int32_t>& positions,
             const std::vector<int>& sequences, cudaStream_t stream) {
    const Batch batch{.positions = positions, .sequences = sequences};
    ASSERT_TRUE(reference_->StartForward(batch, false).ok());
    const Status status = cuda_->On(stream).StartForward(batch, false);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  void Put(const Rows& rows, cudaStream_t stream) {
    ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
    const Status status =
        cuda_->On(stream).Put(rows.OnDevice(), rows.OnDevice());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // The views of both, read on this stream.
  void ExpectSame(cudaStream_t stream) {
    const Result<KvView> due = reference_->Get();
    const Result<KvView> got = cuda_->On(stream).Get();
    ASSERT_TRUE(due.ok() && got.ok()) << got.status().ToString();
    EXPECT_EQ(got->device, Device::kCuda);
    EXPECT_EQ(got->stream, stream);
    EXPECT_EQ(got->first_cell, due->first_cell);
    for (const auto tensor : {&KvView::key, &KvView::value, &KvView::mask}) {
      const TensorView& expected = (*due).*tensor;
      EXPECT_EQ(Read((*got).*tensor, stream), CopyOf(expected, expected.dtype));
    }
  }

  Stream stream_;
  Stream other_;
  std::unique_ptr<CudaCache> cuda_;
  std::unique_ptr<Cache> reference_;
};

TEST_F(CudaCaches, HoldWhatTheReferenceHolds) {
  Rows rows(3);
  rows.Fill(1, stream_);
  Start({0, 1, 0}, {0, 0, 1}, stream_);
  Put(rows, stream_);
  ExpectSame(stream_);
  for (const auto& cache : {reference_.get(), &cuda_->On(stream_)}) {
    ASSERT_TRUE(cache->CopyPrefix(0, 2, 1).ok());
    ASSERT_TRUE(cache->Remove(0, 1, kOpenEnd).ok());
  }
  rows.Fill(100, stream_);
  Start({1, 1, 1}, {0, 1, 2}, stream_);
  Put(rows, stream_);
  ExpectSame(stream_);
}

TEST_F(CudaCaches, TakeRowsOfTheHostToo) {
  Rows rows(2);
  rows.Fill(5, stream_);
  Start({0, 1}, {0, 0}, stream_);
  ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
  ASSERT_TRUE(cuda_->On(stream_).Put(rows.OnHost(), rows.OnDevice()).ok());
  ExpectSame(stream_);
}

// Each call on a stream of its own: each finds what the one before did.
TEST_F(CudaCaches, OrderTheStreamsThatTheyAreCalledOn) {
  Rows rows(2);
  for (int step = 0; step < 20; ++step) {
    const std::vector<std::int32_t> positions = {step, step};
    rows.Fill(static_cast<float>(step), step % 3 == 0 ? stream_ : other_);
    EXPECT_EQ(cudaStreamSynchronize(step % 3 == 0 ? stream_ : other_),
              cudaSuccess);
    Start(positions, {0, 1}, stream_);
    Put(rows, other_);
    ExpectSame(step % 2 == 0 ? stream_ : other_);
  }
}

TEST_F(CudaCaches, AGraphOfAPutStoresToTheCellsOfItsTime) {
  Rows rows(2);
  rows.Fill(1, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);  // Makes the layer.
  rows.Fill(50, stream_);
  Start({1, 1}, {0, 1}, stream_);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(other_, cudaStreamCaptureModeGlobal),
            cudaSuccess);
  const Status put = cuda_->On(other_).Put(rows.OnDevice(), rows.OnDevice());
  EXPECT_TRUE(put.ok()) << put.ToString();
  const Result<KvView> view = cuda_->On(other_).Get();
  EXPECT_TRUE(view.ok()) << view.status().ToString();
  ASSERT_EQ(cudaStreamEndCapture(other_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
  for (int step = 1; step < 9; ++step) {
    if (step > 1) {
      // Not in the order in which the first ones came.
      Start({step, step}, {step % 2, 1 - step % 2}, stream_);
      rows.Fill(static_cast<float>(100 * step), stream_);
    }
    ASSERT_EQ(cudaGraphLaunch(made, stream_), cudaSuccess);
    ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
    ExpectSame(stream_);
    EXPECT_EQ(cuda_->On(stream_).Get()->mask.data, view->mask.data);
  }
  EXPECT_EQ(cudaGraphExecDestroy(made), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaCaches, RefuseWhatNoGraphCanRepeat) {
  Rows rows(2);
  rows.Fill(1, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal),
            cudaSuccess);
  Cache& cache = cuda_->On(stream_);
  const std::vector<std::int32_t> positions = {1, 1};
  const std::vector<int> sequences = {0, 1};
  CacheState state;
  const Batch batch{.positions = positions, .sequences = sequences};
  const std::vector<Status> refused = {
      cache.StartForward(batch, false),
      cache.SetCausal({}),
      cache.Put(rows.OnHost(), rows.OnHost()),
      cache.Remove(0, 0, kOpenEnd),
      cache.SnapshotTo(state),
      cache.Restore(state),
  };
  for (const Status& status : refused) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("captured"));
  }
  // A layer that needs memory.
  ASSERT_TRUE(cache.SetLayer(1).ok());
  EXPECT_EQ(cache.Put(rows.OnDevice(), rows.OnDevice()).code(),
            StatusCode::kFailedPrecondition);
  ASSERT_TRUE(cache.SetLayer(0).ok());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ExpectSame(stream_);  // All is as it was.
}

TEST_F(CudaCaches, OfNoSuchDevice) {
  const auto far = CudaCache::Make({}, 1000);
  ASSERT_TRUE(far.ok());
  const Status status = (*far)->On(stream_).Init(DType::kF32, 1, kCapacity, 16);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("device is 1000"));
}

TEST_F(CudaCaches, PoolsHoldWhatTheReferenceHolds) {
  for (const PagedLayout layout :
       {PagedLayout::kTokenMajor, PagedLayout::kHeadMajor}) {
    PagedSpec spec;
    spec.dtype = DType::kF16;
    spec.layers = 2;
    spec.blocks = 8;
    spec.block_size = 4;
    spec.max_seq_len = 32;
    spec.kv_heads = kHeads;
    spec.k_head_dim = spec.v_head_dim = kHeadDim;
    spec.layout = layout;
    auto made = CudaPool::Make(spec);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    auto reference = *MakePagedPool(spec, "reference");
    PagedPool& pool = (*made)->On(stream_);
    EXPECT_TRUE(pool.IsOnGPU());
    Rows rows(6);
    rows.Fill(1, stream_);
    for (PagedPool* each : {&pool, reference.get()}) {
      ASSERT_EQ(*each->Open(), 0);
    }
    ASSERT_TRUE(pool.Append(0, 1, rows.OnDevice(), rows.OnHost()).ok());
    ASSERT_TRUE(reference->Append(0, 1, rows.OnHost(), rows.OnHost()).ok());
    const auto got = *pool.Views(0, 1);
    const auto due = *reference->Views(0, 1);
    ASSERT_EQ(got.size(), due.size());
    const Result<PagedKv> blocks = (*made)->Blocks(1);
    ASSERT_TRUE(blocks.ok());
    EXPECT_FALSE((*made)->Blocks(2).ok());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(Read(got[i].key, stream_), CopyOf(due[i].key, DType::kF16));
      EXPECT_EQ(Read(got[i].value, stream_), CopyOf(due[i].value, DType::kF16));
      EXPECT_EQ(got[i].key.data, blocks->key.at(0, 0, 0, got[i].block));
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
