// Caches and pools in device memory (<kvtwin/cuda.h>): streams, graphs, and
// whether they hold what the reference twin holds. (`fuzz --twin cuda` and the
// laws test everything else.)

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/runtime.h"
#include "props/cuda/cuda_caches.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

TEST_F(CudaCaches, AgreeWithTheReference) {
  TokenRows rows(3);
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
      TokenRows rows(count);
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
  TokenRows many(100);
  many.Fill(1, stream_);
  Start(positions, std::vector<int>(100, 0), stream_);
  Put(many, stream_);
  for (Cache* cache : {reference_.get(), &cuda_->On(stream_)}) {
    for (const int begin : {90, 80, 50}) {  // In the second word; in both.
      ASSERT_TRUE(cache->Remove(0, begin, kOpenEnd).ok());
    }
  }
  TokenRows single(1);
  single.Fill(2, stream_);
  Start({99}, {0}, stream_);  // Sees removed cells, if they were not reported.
  Put(single, stream_);
  ExpectSame(stream_);
}

TEST_F(CudaCaches, AcceptRowsInHostMemory) {
  TokenRows rows(2);
  rows.Fill(5, stream_);
  Start({0, 1}, {0, 0}, stream_);
  ASSERT_TRUE(reference_->Put(rows.OnHost(), rows.OnHost()).ok());
  ASSERT_TRUE(cuda_->On(stream_).Put(rows.OnHost(), rows.OnDevice()).ok());
  ExpectSame(stream_);
}

// Each call is on another stream and finds what the call before did.
TEST_F(CudaCaches, OrderTheirStreams) {
  TokenRows rows(2);
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
  TokenRows rows(2);
  rows.Fill(1, stream_);
  Start({0, 0}, {0, 1}, stream_);
  Put(rows, stream_);  // Makes the layer.
  rows.Fill(50, stream_);
  Start({1, 1}, {0, 1}, stream_);
  Result<KvView> view = Status();
  const cudaGraphExec_t made =
      PutInAGraph(rows, [&] { view = cuda_->On(other_).Get(); });
  ASSERT_TRUE(view.ok()) << view.status().ToString();
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
}

// A graph contains addresses: the memory it reads does not move when longer
// passes come, or more tokens than a pass may have.
TEST_F(CudaCaches, ACapturedPutSurvivesLongerPasses) {
  constexpr int kMany = 1500;  // Their cells take more than a page.
  MakeCaches(2048, kMany);
  TokenRows rows(2);
  TokenRows many(kMany);
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
  TokenRows rows(2);
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
  TokenRows rows(4);
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
    TokenRows rows(4, 32);
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
      TokenRows keys(tokens, head_dim);
      TokenRows values(tokens, head_dim);
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
    EXPECT_EQ(ReadFromDevice(got.key, stream_),
              CopyOf(expected.key, DType::kF32));
    EXPECT_EQ(ReadFromDevice(got.value, stream_),
              CopyOf(expected.value, DType::kF32));
  }
}

// The other stream would become part of the graph.
TEST_F(CudaCaches, RefuseToWaitForACapturingStream) {
  TokenRows rows(2);
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

TEST_F(CudaCaches, RefuseCallsThatAGraphCannotReplay) {
  TokenRows rows(2);
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
    TokenRows rows(3);
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
        EXPECT_EQ(ReadFromDevice(got.key, stream_),
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

TEST_F(CudaCaches, RefuseRecurrentCaches) {
  const CacheSpec recurrent = {.kind = Kind::kRecurrent};
  const CacheSpec hybrid = {.kind = Kind::kHybrid, .caches = {{}, recurrent}};
  for (const CacheSpec& spec : {recurrent, hybrid}) {
    EXPECT_TRUE(MakeCache(spec, "reference").ok());
    EXPECT_EQ(CudaCache::Make(spec).status().code(), StatusCode::kNotSupported);
  }
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
    TokenRows rows(6, head_dim);
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
      EXPECT_EQ(ReadFromDevice(got[i].key, stream_),
                CopyOf(expected[i].key, DType::kF16));
      EXPECT_EQ(ReadFromDevice(got[i].value, stream_),
                CopyOf(expected[i].value, DType::kF32));
      EXPECT_EQ(got[i].key.data, blocks->key.at(0, 0, 0, got[i].block));
      EXPECT_EQ(got[i].value.data, blocks->value.at(0, 0, 0, got[i].block));
      EXPECT_EQ(blocks->value.dtype, DType::kF32);
    }
  }
}

// The copy that a fork takes of a block was in no view before.
TEST(CudaPools, AllBlocksAreCopiedToTheHost) {
  for (const PagedLayout layout :
       {PagedLayout::kTokenMajor, PagedLayout::kHeadMajor}) {
    const PagedSpec spec = {.block_size = 4,
                            .blocks = 4,
                            .max_seq_len = 8,
                            .kv_heads = 2,
                            .k_head_dim = 8,
                            .v_head_dim = 8,
                            .dtype = DType::kF32,
                            .layout = layout};
    const auto pool = *MakePagedPool(spec, "cuda");
    const auto reference = *MakePagedPool(spec, "reference");
    const DenseTensor rows = FilledTensor(DType::kF32, {8, 2, 3, 1}, 5);
    for (PagedPool* each : {pool.get(), reference.get()}) {
      ASSERT_EQ(*each->Open(), 0);
      ASSERT_TRUE(each->Append(0, 0, rows.view(), rows.view()).ok());
      ASSERT_TRUE(each->Commit(0, 3).ok());
      ASSERT_EQ(*each->Fork(0, 2), 1);
      const TensorView last = Slice(rows.view(), 2, 2);
      ASSERT_TRUE(each->Append(1, 0, last, last).ok());
    }
    const PagedKv blocks = *pool->Blocks(0);
    const PagedKv expected = *reference->Blocks(0);
    EXPECT_EQ(CopyOf(blocks.key, DType::kF32),
              CopyOf(expected.key, DType::kF32));
    EXPECT_EQ(CopyOf(blocks.value, DType::kF32),
              CopyOf(expected.value, DType::kF32));
  }
}

}  // namespace
}  // namespace kvtwin::props
