// The answers of the twin "cuda" when CUDA fails, and the cost of its calls.
// The emulator fails on request, and counts calls.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/cuda.h"
#include "props/cuda/emulator_test.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using emulator::Call;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class CudaFaults : public ::testing::Test {
 protected:
  void TearDown() override {
    emulator::SetNoDevice(false);
    emulator::SetDriverTooOld(false);
    emulator::Reset();
  }

  static Status Init(Cache& cache, int capacity = 16) {
    return cache.Init({DType::kF32, 2, capacity, 4});
  }
};

void ExpectError(const Status& status, const std::string& name) {
  EXPECT_EQ(status.code(), StatusCode::kDeviceError) << status.ToString();
  EXPECT_THAT(status.message(), StartsWith(name + ": "));
}

TEST_F(CudaFaults, WithoutADeviceInitSaysSo) {
  const auto cache = *MakeCache({}, "cuda");
  emulator::SetNoDevice(true);
  ExpectError(Init(*cache), "cudaErrorNoDevice");
  ExpectError(MakePagedPool({}, "cuda").status(), "cudaErrorNoDevice");
  ExpectError(CudaPool::Make({}).status(), "cudaErrorNoDevice");
  emulator::SetNoDevice(false);
  emulator::SetDriverTooOld(true);
  ExpectError(Init(*cache), "cudaErrorInsufficientDriver");
  emulator::SetDriverTooOld(false);
  EXPECT_TRUE(Init(*cache).ok());  // The cache still works.
}

TEST_F(CudaFaults, ALayerThatFailedToAllocateCanBeRetried) {
  // K fails, then V: neither is kept.
  for (const auto& [after, head_dim] :
       {std::pair(0, 1), {1, 1}, {0, 2}, {1, 2}}) {
    TestCache cache({}, "cuda");
    ASSERT_TRUE(Init(*cache).ok());
    ASSERT_EQ(cache.Start({0, 1}, {0, 0}), StatusCode::kOk);
    emulator::FailNext(Call::kMalloc, cudaErrorMemoryAllocation, after);
    const std::vector<float> tags = {1, 2};
    const TensorView rows = DenseView(tags.data(), DType::kF32, {1, 1, 2, 1});
    ExpectError(cache->Put(rows, rows), "cudaErrorMemoryAllocation");
    // The error is reported once.
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    EXPECT_EQ(cache->Get().status().code(), StatusCode::kFailedPrecondition);
    // The next Put may have other dimensions: the layer was never made.
    const std::vector<float> wide = {1, 2, 3, 4};
    const TensorView others =
        DenseView(wide.data(), DType::kF32, {head_dim, 1, 2, 1});
    EXPECT_TRUE(cache->Put(others, others).ok());
    EXPECT_EQ(cache.SeenV(1),
              (std::vector<float>{1, static_cast<float>(1 + head_dim)}));
  }
}

TEST_F(CudaFaults, AFailedFirstPutFixesNoDimensions) {
  TestCache cache({}, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  ASSERT_EQ(cache.Start({0, 1}, {0, 0}), StatusCode::kOk);
  emulator::FailNext(Call::kLaunch, cudaErrorLaunchOutOfResources);
  const std::vector<float> tags = {1, 2, 3, 4};
  ExpectError(cache->Put(DenseView(tags.data(), DType::kF32, {1, 1, 2, 1}),
                         DenseView(tags.data(), DType::kF32, {1, 1, 2, 1})),
              "cudaErrorLaunchOutOfResources");
  const TensorView others = DenseView(tags.data(), DType::kF32, {2, 1, 2, 1});
  EXPECT_TRUE(cache->Put(others, others).ok());
  EXPECT_EQ(cache->Get()->value.shape[0], 2);
  EXPECT_EQ(cache.SeenV(1), (std::vector<float>{1, 3}));
}

// A reserving pass that fails did not begin either; nor did one of a wrapper,
// which has two of them.
TEST_F(CudaFaults, AReservingPassWithoutMemoryDoesNotBegin) {
  for (const Kind kind : {Kind::kCausal, Kind::kWrapper}) {
    CacheSpec spec;
    spec.kind = kind;
    if (kind == Kind::kWrapper) spec.caches = {CacheSpec(), CacheSpec()};
    for (int after = 0; after < 12; ++after) {
      emulator::Reset();
      TestCache cache(spec, "cuda");
      ASSERT_TRUE(Init(*cache).ok());
      emulator::FailNext(Call::kMalloc, cudaErrorMemoryAllocation, after);
      const std::vector<std::int32_t> positions = {0, 1, 2};
      const std::vector<int> sequences = {0, 0, 0};
      const Status status = cache->StartForward(
          {.positions = positions, .sequences = sequences}, /*reserve=*/true);
      if (!status.ok()) {
        ExpectError(status, "cudaErrorMemoryAllocation");
      } else {
        EXPECT_GE(after, kind == Kind::kWrapper ? 8 : 4);
        emulator::Reset();
      }
      EXPECT_EQ(cache->BatchCells().empty(), !status.ok());
      cache.Append(0, 0, {1, 2});
      EXPECT_EQ(cache.SeenV(1), (std::vector<float>{1, 2}));
    }
  }
}

TEST_F(CudaFaults, CallsLeaveTheCurrentDeviceAsItWas) {
  emulator::SetDevices(2);
  const auto cuda = *CudaCache::Make({}, 1);
  emulator::Stream stream;
  const std::vector<std::int32_t> positions = {0};
  const std::vector<int> sequences = {0};
  const std::vector<float> tag = {1};
  const TensorView row = DenseView(tag.data(), DType::kF32, {1, 1, 1, 1});
  Cache& cache = cuda->On(stream);
  const auto current = [] {
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    return device;
  };
  ASSERT_TRUE(Init(cache).ok());
  EXPECT_EQ(current(), 0);
  ASSERT_TRUE(
      cache
          .StartForward({.positions = positions, .sequences = sequences},
                        /*reserve=*/false)
          .ok());
  EXPECT_EQ(current(), 0);
  ASSERT_TRUE(cache.Put(row, row).ok());
  EXPECT_EQ(current(), 0);
  const KvView view = *cache.Get();
  for (const void* data : {view.key.data, view.mask.data}) {
    cudaPointerAttributes attributes;
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, data), cudaSuccess);
    EXPECT_EQ(attributes.device, 1);
  }
  EXPECT_EQ(CudaPool::Make({}, 2).status().code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(CudaPool::Make({}, 1).ok());
  EXPECT_EQ(current(), 0);
  cache.Close();
  EXPECT_EQ(current(), 0);
}

TEST_F(CudaFaults, APassWithoutMemoryForItsMaskDoesNotBegin) {
  TestCache cache({}, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  cache.Append(0, 0, {1});
  const std::vector<CellEntry> before = cache.Cells();
  // The allocation of the larger mask fails. (The cells may need none.)
  emulator::FailNext(Call::kMalloc, cudaErrorMemoryAllocation, 1);
  Status status;
  for (int tokens = 2; status.ok(); ++tokens) {
    ASSERT_LT(tokens, 16);
    std::vector<std::int32_t> positions;
    for (int i = 0; i < tokens; ++i) positions.push_back(1 + i);
    const std::vector<int> sequences(positions.size(), 0);
    status = cache->StartForward(
        {.positions = positions, .sequences = sequences}, false);
    if (!status.ok()) break;
    ASSERT_TRUE(cache->Remove(0, 1, kOpenEnd).ok());
  }
  ExpectError(status, "cudaErrorMemoryAllocation");
  EXPECT_EQ(cache.Cells(), before);
  EXPECT_TRUE(cache->BatchCells().empty());
  cache.Append(0, 1, {2, 3});
  EXPECT_EQ(cache.SeenV(1), (std::vector<float>{1, 2, 3}));
}

// Updates that a failed pass did not bring to the device come with the next
// one.
TEST_F(CudaFaults, AFailedPassIsReportedCompletely) {
  std::vector<float> tags(100);  // Their cells take two words.
  std::iota(tags.begin(), tags.end(), 1.0F);
  for (const Call call : {Call::kLaunch, Call::kCopy}) {
    for (const int after : {0, 1}) {
      TestCache cache({}, "cuda");
      ASSERT_EQ(cache.Init(2, 128, 100), StatusCode::kOk);
      cache.Append(0, 0, tags);
      ASSERT_TRUE(cache->CopyPrefix(0, 1, 64).ok());
      emulator::FailNext(call, cudaErrorLaunchOutOfResources, after);
      EXPECT_EQ(cache.Start({64}, {1}), StatusCode::kDeviceError);
      cache.Append(1, 64, {1000});
      std::vector<float> expected(tags.begin(), tags.begin() + 64);
      expected.push_back(1000);
      EXPECT_EQ(cache.SeenV(0), expected);
    }
  }
}

TEST_F(CudaFaults, AFailedKernelIsFinalAndReportedByEachCall) {
  TestCache cache({}, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  cache.Append(0, 0, {1, 2});
  emulator::FailNext(Call::kKernel, cudaErrorIllegalAddress);
  // The failure is not visible yet.
  EXPECT_EQ(cache.Start({2}, {0}), StatusCode::kOk);
  const std::vector<float> tag = {3};
  const TensorView row = DenseView(tag.data(), DType::kF32, {1, 1, 1, 1});
  (void)cache->Put(row, row);
  ExpectError(cache->Get().status(), "cudaErrorIllegalAddress");
  ExpectError(cache->Put(row, row), "cudaErrorIllegalAddress");
  EXPECT_EQ(cache.Start({3}, {0}), StatusCode::kDeviceError);
  cache->Close();
}

TEST_F(CudaFaults, AClosedCacheHasNoMemory) {
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  };
  TestCache cache({}, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  const std::size_t before = free_bytes();  // Includes the staging buffer.
  cache.Append(0, 0, {1, 2});
  ASSERT_TRUE(cache->Snapshot().ok());
  EXPECT_LT(free_bytes(), before - 256);
  cache->Close();
  // Only the staging buffer and the cells of a pass are still allocated.
  EXPECT_EQ(free_bytes(), before - 4 * sizeof(int));
}

TEST_F(CudaFaults, AnInterruptedRemoveEndsTheCache) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kAdd;
  TestCache cache(spec, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  cache.Append(0, 0, {1, 2, 3});
  ASSERT_TRUE(cache->Get().ok());
  emulator::FailNext(Call::kLaunch, cudaErrorLaunchOutOfResources);
  const Status status = cache->Remove(0, 0, 1);
  ExpectError(status, "cudaErrorLaunchOutOfResources");
  EXPECT_THAT(status.message(), HasSubstr("Remove was not finished"));
  // CUDA no longer reports the error; the cache still does.
  ExpectError(cache->Get().status(), "cudaErrorLaunchOutOfResources");
  EXPECT_EQ(cache.Start({0}, {1}), StatusCode::kDeviceError);
  cache->Close();
}

// Exceptions do not escape from a wrapper's caches either.
TEST_F(CudaFaults, EachCacheOfAWrapperReportsFailures) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {CacheSpec(), CacheSpec()};
  TestCache cache(spec, "cuda");
  ASSERT_TRUE(Init(*cache).ok());
  ASSERT_EQ(cache.Start({0}, {0}), StatusCode::kOk);
  const std::vector<float> tag = {1};
  const TensorView row = DenseView(tag.data(), DType::kF32, {1, 1, 1, 1});
  std::vector<Cache*> caches;
  for (const int type : {0, 1}) {
    ASSERT_TRUE(cache->SetLayerType(type).ok());
    caches.push_back(cache->UnderlyingCache());
    emulator::FailNext(Call::kMalloc, cudaErrorMemoryAllocation);
    ExpectError(caches.back()->Put(row, row), "cudaErrorMemoryAllocation");
    EXPECT_TRUE(caches.back()->Put(row, row).ok());
    EXPECT_EQ(caches.back()->UnderlyingCache(), caches.back());
  }
  EXPECT_NE(caches[0], caches[1]);
}

TEST_F(CudaFaults, RefuseMoreRowsOfHeadsThanAnIntCanCount) {
  PagedSpec spec;
  spec.layers = 1;
  spec.blocks = 1 << 20;
  spec.block_size = 1 << 10;
  spec.max_seq_len = 8;
  spec.kv_heads = 4;
  spec.k_head_dim = spec.v_head_dim = 1;
  spec.layout = PagedLayout::kHeadMajor;
  EXPECT_EQ(CudaPool::Make(spec).status().code(), StatusCode::kNotSupported);
}

TEST_F(CudaFaults, AnInterruptedAppendEndsThePool) {
  PagedSpec spec;
  spec.layers = 1;
  spec.blocks = 4;
  spec.block_size = 2;
  spec.max_seq_len = 8;
  spec.kv_heads = spec.k_head_dim = spec.v_head_dim = 1;
  const auto pool = *MakePagedPool(spec, "cuda");
  ASSERT_TRUE(pool->Open().ok());
  const std::vector<float> tags = {1, 2, 3};
  const TensorView rows = DenseView(tags.data(), DType::kF32, {1, 1, 3, 1});
  ASSERT_TRUE(pool->Append(0, 0, rows, rows).ok());
  emulator::FailNext(Call::kLaunch, cudaErrorLaunchOutOfResources, 1);
  const Status status = pool->Append(0, 0, rows, rows).status();
  ExpectError(status, "cudaErrorLaunchOutOfResources");
  EXPECT_THAT(status.message(), HasSubstr("Append was not finished"));
  ExpectError(pool->Views(0, 0).status(), "cudaErrorLaunchOutOfResources");
}

// Any call to CUDA may fail: the cache then answers with an error, and every ok
// answer is correct.
TEST_F(CudaFaults, AtAnyCallOnlyChangeTheAnswer) {
  for (int after = 0; after < 60; ++after) {
    for (const Call call :
         {Call::kMalloc, Call::kMallocHost, Call::kLaunch, Call::kCopy,
          Call::kEvent, Call::kStream, Call::kSynchronize, Call::kQuery}) {
      emulator::Reset();
      CacheSpec spec;
      spec.shift.kind = ShiftKind::kAdd;
      TestCache cache(spec, "cuda");
      emulator::FailNext(call, cudaErrorMemoryAllocation, after);
      bool failed = !Init(*cache, 6).ok();
      std::vector<float> expected;
      for (int i = 0; i < 6 && !failed; ++i) {
        const auto tag = static_cast<float>(i + 1);
        failed = cache.Start({i}, {0}) != StatusCode::kOk ||
                 cache.Put({tag}) != StatusCode::kOk;
        expected.push_back(tag);
        const Result<KvView> view = cache->Get();
        failed = failed || !view.ok();
        if (failed) break;
        for (std::int64_t c = 0; c < view->mask.shape[0]; ++c) {
          if (!MaskAllows(view->mask, c, 0)) continue;
          EXPECT_EQ(LoadElement(view->value.at(0, 0, c), DType::kF32),
                    At(expected, c));
        }
      }
      (void)cache->Remove(0, 1, 2);
      const Result<CacheState> part = cache->SnapshotOf(0);
      if (part.ok()) (void)cache->AddSequence(1, *part);
      const Result<CacheState> state = cache->Snapshot();
      if (state.ok()) (void)cache->Restore(*state);
      cache->Close();
      EXPECT_EQ(cache->Get().ok(), false);
    }
  }
}

// The decode path of a server, on one stream: after the first passes, it
// allocates nothing and waits for nothing.
TEST_F(CudaFaults, ADecodePassNeitherAllocatesNorWaits) {
  constexpr int kSequences = 8;
  const auto cuda = *CudaCache::Make({});
  emulator::Stream stream;
  ASSERT_TRUE(
      cuda->On(stream).Init({DType::kF32, kSequences, 512, kSequences}).ok());
  emulator::Numbers<float> rows(kSequences);
  const TensorView view =
      DenseView(rows.get(), DType::kF32, {1, 1, kSequences, 1});
  std::vector<int> sequences;
  for (int i = 0; i < kSequences; ++i) sequences.push_back(i);
  const auto pass = [&](int position) {
    const std::vector<std::int32_t> positions(kSequences, position);
    Cache& cache = cuda->On(stream);
    ASSERT_TRUE(
        cache
            .StartForward({.positions = positions, .sequences = sequences},
                          /*reserve=*/false)
            .ok());
    ASSERT_TRUE(cache.Put(view, view).ok());
    ASSERT_TRUE(cache.Get().ok());
  };
  // The mask's memory grows with the view, so a longer pass comes first.
  for (int position = 0; position < 300; ++position) pass(position);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_TRUE(cuda->On(stream).Get().ok());
  for (int i = 0; i < kSequences; ++i) {
    ASSERT_TRUE(cuda->On(stream).Remove(i, 100, kOpenEnd).ok());
  }
  emulator::Reset();
  for (int position = 100; position < 150; ++position) pass(position);
  EXPECT_EQ(emulator::Count(Call::kMalloc), 0);
  EXPECT_EQ(emulator::Count(Call::kMallocHost), 0);
  EXPECT_EQ(emulator::Count(Call::kFree), 0);
  EXPECT_EQ(emulator::Count(Call::kSynchronize), 0);
  // The host sends each pass in one copy.
  EXPECT_EQ(emulator::Count(Call::kCopy), 50);
  EXPECT_EQ(emulator::Count(Call::kLaunch), 50 * 4);  // Two for K and V.
}

}  // namespace
}  // namespace kvtwin::props
