// A cache with one element a row, for tests that write out each call.

#ifndef KVTWIN_PROPS_TESTING_TEST_CACHE_H_
#define KVTWIN_PROPS_TESTING_TEST_CACHE_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {

// Tiled V requires a cache padding of whole tiles.
inline CacheConfig ConfigOf(VLayout layout) {
  return {.cache_padding = layout == VLayout::kTiled ? kTileCells : 1,
          .v_layout = layout};
}

// A cache of this kind with default options; a wrapper has two causal caches.
inline std::unique_ptr<Cache> MakeOfKind(Kind kind, const std::string& twin) {
  CacheSpec spec;
  spec.kind = kind;
  if (kind == Kind::kWrapper) spec.caches = {CacheSpec(), CacheSpec()};
  return *MakeCache(spec, twin);
}

// Rows are single numbers: V is the tag that was put, K the tag as the shift
// function left it.
class TestCache {
 public:
  TestCache(const CacheSpec& spec, const std::string& twin,
            const CacheConfig& config = {})
      : cache_(*MakeCache(spec, twin)) {
    EXPECT_TRUE(cache_->SetConfig(config).ok());
  }

  Cache& operator*() { return *cache_; }
  Cache* operator->() { return cache_.get(); }

  StatusCode Init(int max_sequences, int capacity, int max_batch) {
    return cache_->Init({DType::kF32, max_sequences, capacity, max_batch})
        .code();
  }

  StatusCode Start(const std::vector<std::int32_t>& positions,
                   const std::vector<int>& sequences,
                   const std::vector<int>& multimodal = {}) {
    return cache_
        ->StartForward({.positions = positions,
                        .sequences = sequences,
                        .multimodal = multimodal},
                       /*reserve=*/false)
        .code();
  }

  StatusCode Put(const std::vector<float>& tags) {
    const auto tokens = std::ssize(tags);
    const TensorView rows =
        DenseView(tags.data(), DType::kF32, {1, 1, tokens, 1});
    return cache_->Put(rows, rows).code();
  }

  // Runs a pass of `seq` from position `first` on, one token for each tag.
  void Append(int seq, std::int32_t first, const std::vector<float>& tags) {
    std::vector<std::int32_t> positions;
    for (std::size_t i = 0; i < tags.size(); ++i) {
      positions.push_back(first + static_cast<std::int32_t>(i));
    }
    ASSERT_EQ(Start(positions, std::vector<int>(tags.size(), seq)),
              StatusCode::kOk);
    ASSERT_EQ(Put(tags), StatusCode::kOk);
  }

  // The rows that a mask row sees, in the order of the cells.
  std::vector<float> SeenV(std::int64_t row) { return Seen(row, false); }
  std::vector<float> SeenK(std::int64_t row) { return Seen(row, true); }

  std::vector<CellEntry> Cells() {
    std::vector<CellEntry> cells;
    cache_->ListCells(cells);
    return cells;
  }

 private:
  std::vector<float> Seen(std::int64_t row, bool key) {
    std::vector<float> seen;
    const Result<KvView> view = cache_->Get();
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    if (!view.ok()) return seen;
    for (std::int64_t column = 0; column < view->mask.shape[0]; ++column) {
      if (!MaskAllows(view->mask, column, row)) continue;
      const TensorView& rows = key ? view->key : view->value;
      seen.push_back(LoadElement(rows.at(0, 0, column), rows.dtype));
    }
    return seen;
  }

  std::unique_ptr<Cache> cache_;
};

// Tests that run for each twin, by name.
class EachTwin : public ::testing::TestWithParam<std::string> {};

inline std::vector<std::string> TwinList() {
  return {TwinNames().begin(), TwinNames().end()};
}

inline std::string TwinTestName(
    const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_TEST_CACHE_H_
