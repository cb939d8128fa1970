// Caches and pools in device memory (<kvtwin/cuda.h>): streams, graphs, and
// whether they hold what the reference twin holds. (`fuzz --twin cuda` and the
// laws test everything else.)

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
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
  explicit Rows(int tokens, int head_dim = kHeadDim)
      : tokens_(tokens), head_dim_(head_dim) {
    host_.resize(AsSize(tokens * kHeads * head_dim));
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
    return DenseView(data, DType::kF32, {head_dim_, kHeads, tokens_, 1});
  }

  int tokens_;
  int head_dim_;
  std::vector<float> host_;
  void* device_ = nullptr;
};

// The elements of a view in device memory, read by work on a stream.
DenseTensor Read(const TensorView& view, cudaStream_t stream) {
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

  void Put(const Rows& rows, cudaStream_t stream) {
    ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
    const Status status =
        cuda_->On(stream).Put(rows.OnDevice(), rows.OnDevice());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // Returns a graph of a Put to the current pass, captured on the other stream.
  cudaGraphExec_t PutInAGraph(const Rows& rows) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(other_, cudaStreamCaptureModeGlobal),
              cudaSuccess);
    const Status put = cuda_->On(other_).Put(rows.OnDevice(), rows.OnDevice());
    EXPECT_TRUE(put.ok()) << put.ToString();
    EXPECT_EQ(cudaStreamEndCapture(other_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&made, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return made;
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
      EXPECT_EQ(Read((*got).*tensor, stream), CopyOf(rows, rows.dtype));
    }
  }

  Stream stream_;
  Stream other_;
  std::unique_ptr<CudaCache> cuda_;
  std::unique_ptr<Cache> reference_;
};

TEST_F(CudaCaches, AgreeWithTheReference) {
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

// A sequence's last few changes are recorded. Here the oldest recorded change
// is the only one in its word.
TEST_F(CudaCaches, ReportEveryChange) {
  for (int tokens = 30; tokens < 36; ++tokens) {
    MakeCaches(kCapacity, 64);
    for (const auto& [first, count] : {std::pair(0, 63), {63, tokens}}) {
      std::vector<std::int32_t> positions(AsSize(count));
      std::iota(positions.begin(), positions.end(), first);
      Rows rows(count);
      rows.Fill(static_cast<float>(first), stream_);
      Start(positions, std::vector<int>(positions.size(), 0), stream_);
      Put(rows, stream_);
      ExpectSame(stream_);
    }
  }
}

TEST_F(CudaCaches, ReportChangesInReverse) {
  MakeCaches(kCapacity, 100);
  std::vector<std::int32_t> positions(100);
  std::iota(positions.begin(), positions.end(), 0);
  Rows many(100);
  many.Fill(1, stream_);
  Start(positions, std::vector<int>(100, 0), stream_);
  Put(many, stream_);
  for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
    for (const int begin : {90, 80, 50}) {  // In the second word; in both.
      ASSERT_TRUE(cache->Remove(0, begin, kOpenEnd).ok());
    }
  }
  Rows single(1);
  single.Fill(2, stream_);
  Start({99}, {0}, stream_);  // Sees removed cells, if they were not reported.
  Put(single, stream_);
  ExpectSame(stream_);
}

TEST_F(CudaCaches, AcceptRowsInHostMemory) {
  Rows rows(2);
  rows.Fill(5, stream_);
  Start({0, 1}, {0, 0}, stream_);
  ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
  ASSERT_TRUE(cuda_->On(stream_).Put(rows.OnHost(), rows.OnDevice()).ok());
  ExpectSame(stream_);
}

// Each call is on another stream and finds what the call before did.
TEST_F(CudaCaches, OrderTheirStreams) {
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

TEST_F(CudaCaches, ACapturedPutStoresToItsOriginalCells) {
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
      // The sequences are not in the order of the first pass.
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

// A graph contains addresses: the memory it reads does not move when longer
// passes come, or more tokens than a pass may have.
TEST_F(CudaCaches, ACapturedPutSurvivesLongerPasses) {
  constexpr int kMany = 1500;  // Their cells take more than a page.
  MakeCaches(2048, kMany);
  Rows rows(2);
  Rows many(kMany);
  rows.Fill(1, stream_);
  many.Fill(7, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);
  Start({1, 1}, {0, 1}, stream_);
  cudaGraphExec_t graph = PutInAGraph(rows);
  std::vector<std::int32_t> positions(kMany);
  std::iota(positions.begin(), positions.end(), 2);
  Start(positions, std::vector<int>(kMany, 0), stream_);
  Put(many, stream_);
  const Result<CacheState> state = reference_->SnapshotOf(0);
  ASSERT_TRUE(state.ok());
  for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
    ASSERT_TRUE(cache->AddSequence(2, *state).ok());
  }
  Start({kMany + 2, kMany + 2}, {0, 2}, stream_);
  rows.Fill(300, stream_);
  ASSERT_EQ(cudaGraphLaunch(graph, stream_), cudaSuccess);
  ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
  ExpectSame(stream_);
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

// Snapshots only read: the cache's state on the device stays valid, and later
// passes can be captured.
TEST_F(CudaCaches, SnapshotsDoNotChangeTheDevice) {
  Rows rows(2);
  rows.Fill(1, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);
  CacheState state;
  ASSERT_TRUE(cuda_->On(stream_).SnapshotTo(state).ok());
  EXPECT_EQ(state, *reference_->Snapshot());
  EXPECT_EQ(*cuda_->On(stream_).SnapshotOf(1), *reference_->SnapshotOf(1));
  Start({1, 1}, {0, 1}, stream_);
  ASSERT_TRUE(cuda_->On(stream_).SnapshotTo(state).ok());
  cudaGraphExec_t graph = PutInAGraph(rows);
  ASSERT_TRUE(cuda_->On(stream_).SnapshotTo(state).ok());
  rows.Fill(100, stream_);
  ASSERT_EQ(cudaGraphLaunch(graph, stream_), cudaSuccess);
  ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
  ExpectSame(stream_);
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  EXPECT_EQ(*cuda_->On(other_).Snapshot(), *reference_->Snapshot());
}

TEST_F(CudaCaches, RestoreStatesOfTheReference) {
  Rows rows(4);
  rows.Fill(1, stream_);
  Start({0, 1, 2, 0}, {0, 0, 0, 1}, stream_);
  Put(rows, stream_);
  const CacheState before = *reference_->Snapshot();
  for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
    ASSERT_TRUE(cache->Remove(0, 1, kOpenEnd).ok());
    ASSERT_TRUE(cache->Restore(before).ok());
  }
  rows.Fill(50, stream_);
  Start({3, 1, 0, 1}, {0, 1, 2, 2}, stream_);
  Put(rows, stream_);
  ExpectSame(stream_);
}

// The host shifts the rows, which are sent to it in the stored dtype.
TEST_F(CudaCaches, ShiftByACustomFunction) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [](int, std::int32_t offset, int head_dim, int,
                     std::span<float> row) {
    for (int i = 0; i < head_dim; ++i) {  // The second head stays.
      At(row, i) += static_cast<float>(offset);
    }
    return Status();
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kQ8}) {
    const auto cuda = *CudaCache::Make(spec);
    const auto reference = *MakeCache(spec, "reference");
    Rows rows(4, 32);
    rows.Fill(1, stream_);
    // NaNs that a conversion would make quiet.
    const std::vector<std::uint16_t> nans(256, 0x7C01);
    const TensorView key = dtype == DType::kF16
                               ? DenseView(nans.data(), dtype, {32, 2, 4, 1})
                               : rows.OnHost();
    const std::vector<std::int32_t> positions = {0, 1, 2, 3};
    const std::vector<int> sequences = {0, 0, 0, 0};
    for (Cache* cache : {reference.get(), &cuda->On(stream_)}) {
      ASSERT_TRUE(cache->Init({dtype, 1, kCapacity, 4}).ok());
      ASSERT_TRUE(
          cache
              ->StartForward({.positions = positions, .sequences = sequences},
                             /*reserve=*/false)
              .ok());
      ASSERT_TRUE(cache->Put(key, rows.OnHost()).ok());
      ASSERT_TRUE(cache->Remove(0, 1, 2).ok());
    }
    EXPECT_EQ(*cuda->On(stream_).Snapshot(), *reference->Snapshot());
  }
}

// More bytes than the staging buffer holds, as several rows and as a single
// one, without a wait between passes.
TEST_F(CudaCaches, AcceptLargeHostTensors) {
  for (const int head_dim : {1 << 14, 1 << 16}) {
    const int tokens = head_dim > 1 << 14 ? 2 : 16;
    const auto made = *CudaCache::Make({});
    const auto reference = *MakeCache({}, "reference");
    std::vector<std::int32_t> positions(AsSize(tokens));
    const std::vector<int> sequences(positions.size(), 0);
    for (Cache* cache : {reference.get(), &made->On(stream_)}) {
      ASSERT_TRUE(cache->Init({DType::kF32, 1, 64, tokens}).ok());
    }
    for (int pass = 0; pass < 3; ++pass) {
      std::iota(positions.begin(), positions.end(), pass * tokens);
      Rows keys(tokens, head_dim);
      Rows values(tokens, head_dim);
      keys.Fill(static_cast<float>(pass), stream_);
      values.Fill(static_cast<float>(1000 * pass), stream_);
      for (Cache* cache : {reference.get(), &made->On(stream_)}) {
        ASSERT_TRUE(
            cache
                ->StartForward({.positions = positions, .sequences = sequences},
                               /*reserve=*/false)
                .ok());
        const Status status = cache->Put(keys.OnHost(), values.OnHost());
        ASSERT_TRUE(status.ok()) << status.ToString();
      }
    }
    const KvView expected = *reference->Get();
    const KvView got = *made->On(stream_).Get();
    EXPECT_EQ(Read(got.key, stream_), CopyOf(expected.key, DType::kF32));
    EXPECT_EQ(Read(got.value, stream_), CopyOf(expected.value, DType::kF32));
  }
}

// The other stream would become part of the graph.
TEST_F(CudaCaches, RefuseToWaitForACapturingStream) {
  Rows rows(2);
  rows.Fill(1, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal),
            cudaSuccess);
  const Status status = cuda_->On(other_).Get().status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("captured"));
  cudaStreamCaptureStatus other = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamIsCapturing(other_, &other), cudaSuccess);
  EXPECT_EQ(other, cudaStreamCaptureStatusNone);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ExpectSame(other_);
}

// Arguments of Decode, which tests change before they make the call.
struct DecodeArguments {
  TensorView query;
  KvView view;
  AttentionTable table;
  AttentionOptions options = {};
  AttentionOut out;
  void* scratch = nullptr;

  Status OverView(cudaStream_t stream) const {
    return Decode(query, view, VLayout::kPlain, options, out, scratch, stream);
  }
  Status OverBlocks(cudaStream_t stream) const {
    return Decode(query, PagedKv{view.key, view.value},
                  PagedLayout::kTokenMajor, table, options, out, scratch,
                  stream);
  }
};

// A view of a cache, which is taken as one block of a pool, too.
class CudaDecode : public CudaCaches {
 protected:
  using Change = std::function<void(DecodeArguments&)>;
  using Refused = std::vector<std::pair<Change, std::string>>;

  void SetUp() override {
    CudaCaches::SetUp();
    rows_.Fill(1, stream_);
    Start({0, 0}, {0, 1}, stream_);
    Put(rows_, stream_);
    const KvView view = *cuda_->On(stream_).Get();
    ints_ = static_cast<const std::int32_t*>(rows_.OnDevice().data);
    numbers_ = static_cast<float*>(const_cast<void*>(out_.OnDevice().data));
    arguments_ = {.query = rows_.OnDevice(),
                  .view = view,
                  .table = {.blocks = {ints_, 2},
                            .columns = 1,
                            .lengths = {ints_, 2},
                            .query_rows = {},
                            .block_size = AsInt(view.key.shape[2])},
                  .out = {.out = numbers_},
                  .scratch = const_cast<void*>(scratch_.OnDevice().data)};
  }

  // Makes a call for each change of the arguments, and expects that it is
  // refused with this code and a message that has this text.
  void ExpectOverView(StatusCode code, const Refused& refused) {
    Expect(&DecodeArguments::OverView, code, refused);
  }
  void ExpectOverBlocks(StatusCode code, const Refused& refused) {
    Expect(&DecodeArguments::OverBlocks, code, refused);
  }

  Rows rows_{2};
  Rows out_{2};
  Rows scratch_{1 << 12};
  const std::int32_t* ints_ = nullptr;
  float* numbers_ = nullptr;
  DecodeArguments arguments_;

 private:
  template <class Call>
  void Expect(const Call& call, StatusCode code, const Refused& refused) {
    for (const auto& [change, text] : refused) {
      DecodeArguments changed = arguments_;
      change(changed);
      const Status status = (changed.*call)(stream_);
      EXPECT_EQ(status.code(), code) << text;
      EXPECT_THAT(status.message(), HasSubstr(text));
    }
  }
};

TEST_F(CudaDecode, TakesTheseArguments) {
  const Status status = arguments_.OverView(stream_);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(CudaDecode, RefusesWhatOtherTwinsHave) {
  const std::vector<float> sinks(kHeads, 0);
  using Arguments = DecodeArguments;
  const Refused refused = {
      {[](Arguments& a) { a.options.soft_cap = 1; }, "soft_cap"},
      {[&](Arguments& a) { a.options.sinks = sinks; }, "sinks"},
      {[&](Arguments& a) { a.out.log_sum_exp = numbers_; }, "log_sum_exp"},
      {[](Arguments& a) { a.query.dtype = DType::kF16; }, "a query of f16"},
      {[](Arguments& a) { a.query.stride[1] += 4; }, "not dense"}};
  ExpectOverView(StatusCode::kNotSupported, refused);
  ExpectOverBlocks(StatusCode::kNotSupported, refused);
  ExpectOverBlocks(StatusCode::kNotSupported,
                   {{[](Arguments& a) { a.table.window = 5; }, "window"},
                    {[&](Arguments& a) {
                       a.table.query_rows = {ints_, 2};
                     },
                     "query_rows"}});
}

TEST_F(CudaDecode, RefusesInvalidArguments) {
  using Arguments = DecodeArguments;
  const Refused refused = {
      {[](Arguments& a) { a.query.data = nullptr; }, "query is null"},
      {[](Arguments& a) { a.scratch = nullptr; }, "scratch is null"},
      {[](Arguments& a) { a.view.value.data = nullptr; }, "value is null"},
      {[](Arguments& a) { a.view.key.data = nullptr; }, "key is null"},
      {[](Arguments& a) { a.out.out = nullptr; }, "out is null"},
      {[](Arguments& a) { a.view.key.shape[1] = 0; }, "kv_heads is 0"},
      {[](Arguments& a) { a.view.key.shape[0] -= 1; }, "K has a head_dim"},
      {[](Arguments& a) {
         a.query = DenseView(a.query.data, DType::kF32, {kHeadDim, 0, 2, 1});
       },
       "heads is 0"},
      {[](Arguments& a) { a.query.shape[2] = 0; }, "rows is 0"},
      {[](Arguments& a) { a.options.scale = 0; }, "scale is 0"},
      {[](Arguments& a) { a.options.splits = -1; }, "splits is -1"},
      {[](Arguments& a) {
         a.query = DenseView(a.query.data, DType::kF32, {kHeadDim, 3, 2, 1});
       },
       "heads is 3"}};
  ExpectOverView(StatusCode::kInvalidArgument, refused);
  ExpectOverBlocks(StatusCode::kInvalidArgument, refused);
  ExpectOverView(StatusCode::kInvalidArgument,
                 {{[&](Arguments& a) { a.view = *reference_->Get(); }, "host"},
                  {[](Arguments& a) { a.query.shape[2] = 3; }, "rows is 3"}});
}

TEST_F(CudaDecode, RefusesTablesThatDoNotFit) {
  using Arguments = DecodeArguments;
  constexpr std::span<const std::int32_t> kNull(
      static_cast<const std::int32_t*>(nullptr), 2);
  ExpectOverBlocks(
      StatusCode::kInvalidArgument,
      {{[](Arguments& a) { a.table.columns = 0; }, "columns is 0"},
       {[](Arguments& a) { a.table.block_size += 1; }, "block_size is"},
       {[&](Arguments& a) {
          a.table.lengths = {ints_, 1};
        },
        "has 1 entries"},
       {[&](Arguments& a) {
          a.table.blocks = {ints_, 3};
        },
        "has 3 entries"},
       {[&](Arguments& a) { a.table.blocks = kNull; }, "blocks is null"},
       {[&](Arguments& a) { a.table.lengths = kNull; }, "lengths is null"}});
}

TEST_F(CudaCaches, RefuseCallsThatAGraphCannotReplay) {
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
      cache.SnapshotOf(0).status(),
      cache.Restore(state),
      cache.AddSequence(2, state),
  };
  for (const Status& status : refused) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("captured"));
  }
  // A new layer needs memory.
  ASSERT_TRUE(cache.SetLayer(1).ok());
  EXPECT_EQ(cache.Put(rows.OnDevice(), rows.OnDevice()).code(),
            StatusCode::kFailedPrecondition);
  ASSERT_TRUE(cache.SetLayer(0).ok());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ExpectSame(stream_);  // Everything is as it was.
}

// The caches of a wrapper are on the stream that the wrapper is called on.
TEST_F(CudaCaches, EncodersAgreeWithTheReference) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {CacheSpec(), CacheSpec()};
  spec.caches[0].kind = Kind::kEncoder;
  for (const VLayout layout : {VLayout::kPlain, VLayout::kPermuted}) {
    cuda_ = *CudaCache::Make(spec);
    reference_ = *MakeCache(spec, "reference");
    Rows rows(3);
    rows.Fill(1, stream_);
    const std::vector<std::int32_t> positions = {0, 1, 2};
    const std::vector<int> sequences = {0, 0, 0};
    const std::vector<int> multimodal = {1};
    CacheState states[2];
    for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
      const bool device = cache != reference_.get();
      ASSERT_TRUE(cache->SetConfig({.v_layout = layout}).ok());
      ASSERT_TRUE(cache->Init({DType::kF32, 1, kCapacity, 16}).ok());
      ASSERT_TRUE(cache
                      ->StartForward({.positions = positions,
                                      .sequences = sequences,
                                      .multimodal = multimodal},
                                     /*reserve=*/false)
                      .ok());
      for (const int type : {0, 1}) {
        ASSERT_TRUE(cache->SetLayerType(type).ok());
        const TensorView view = device ? rows.OnDevice() : rows.OnHost();
        ASSERT_TRUE(cache->UnderlyingCache()->Put(view, view).ok());
        const KvView expected = *reference_->Get();
        const KvView got = *cache->UnderlyingCache()->Get();
        if (!device) continue;
        EXPECT_EQ(got.device, Device::kCuda);
        EXPECT_EQ(got.stream, stream_);
        EXPECT_EQ(Read(got.key, stream_),
                  CopyOf(expected.key, expected.key.dtype));
      }
      ASSERT_TRUE(cache->SnapshotTo(states[device ? 1 : 0]).ok());
    }
    EXPECT_EQ(states[0], states[1]);
    EXPECT_TRUE(*cuda_->On(stream_).UnderlyingCache()->CanResume(0, 3));
  }
}

TEST_F(CudaCaches, RefuseAMissingDevice) {
  const auto far = CudaCache::Make({}, 1000);
  ASSERT_TRUE(far.ok());
  const Status status =
      (*far)->On(stream_).Init({DType::kF32, 1, kCapacity, 16});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("device is 1000"));
}

TEST_F(CudaCaches, PoolsAgreeWithTheReference) {
  // If rows are wide, the host sends a part of them at a time.
  for (const auto& [layout, head_dim] :
       {std::pair(PagedLayout::kTokenMajor, kHeadDim),
        {PagedLayout::kHeadMajor, kHeadDim},
        {PagedLayout::kTokenMajor, 1 << 14},
        {PagedLayout::kHeadMajor, 1 << 14}}) {
    PagedSpec spec;
    spec.dtype = DType::kF16;
    spec.v_dtype = DType::kF32;
    spec.layers = 2;
    spec.blocks = 8;
    spec.block_size = 4;
    spec.max_seq_len = 32;
    spec.kv_heads = kHeads;
    spec.k_head_dim = spec.v_head_dim = head_dim;
    spec.layout = layout;
    auto made = CudaPool::Make(spec);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    auto reference = *MakePagedPool(spec, "reference");
    PagedPool& pool = (*made)->On(stream_);
    EXPECT_TRUE(pool.IsOnGPU());
    Rows rows(6, head_dim);
    rows.Fill(1, stream_);
    for (PagedPool* each : {&pool, reference.get()}) {
      ASSERT_EQ(*each->Open(), 0);
    }
    ASSERT_TRUE(pool.Append(0, 1, rows.OnDevice(), rows.OnHost()).ok());
    ASSERT_TRUE(reference->Append(0, 1, rows.OnHost(), rows.OnHost()).ok());
    const auto got = *pool.Views(0, 1);
    const auto expected = *reference->Views(0, 1);
    ASSERT_EQ(got.size(), expected.size());
    const Result<PagedKv> blocks = (*made)->Blocks(1);
    ASSERT_TRUE(blocks.ok());
    EXPECT_FALSE((*made)->Blocks(2).ok());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(Read(got[i].key, stream_),
                CopyOf(expected[i].key, DType::kF16));
      EXPECT_EQ(Read(got[i].value, stream_),
                CopyOf(expected[i].value, DType::kF32));
      EXPECT_EQ(got[i].key.data, blocks->key.at(0, 0, 0, got[i].block));
      EXPECT_EQ(got[i].value.data, blocks->value.at(0, 0, 0, got[i].block));
      EXPECT_EQ(blocks->value.dtype, DType::kF32);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
