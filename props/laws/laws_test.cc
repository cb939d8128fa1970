// The laws hold for each twin, can be broken, and are listed in docs/laws.md.

#include <fmt/format.h>

#include <fstream>
#include <map>

#include "props/arbitrary.h"
#include "props/forwarding_cache.h"
#include "props/laws/laws.h"
#include "reference/attention.h"

namespace kvtwin::props {
namespace {

struct Case {
  const Law* law;
  std::string_view twin;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Law& law : Laws()) {
    for (const std::string_view twin : TwinNames()) {
      cases.push_back({&law, twin});
    }
  }
  return cases;
}

class LawProps : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    All, LawProps, ::testing::ValuesIn(Cases()),
    [](const ::testing::TestParamInfo<Case>& info) {
      return fmt::format("{}_{}", info.param.law->name, info.param.twin);
    });

TEST_P(LawProps, Holds) {
  const auto& [law, twin] = GetParam();
  const Subject subject = TwinSubject(twin);
  std::int64_t judged = 0;
  EXPECT_TRUE(rc::check(std::string(law->statement), [&] {
    const History history = *ArbitraryHistory(std::nullopt, 20);
    const LawResult result = Judge(*law, history, subject);
    judged += result.judged;
    if (result.wrong.empty()) return;
    RC_FAIL(result.wrong + "\n  rerun   " +
            LawCommand(*law, ShrinkUnderLaw(*law, history, subject), subject));
  }));
  // A law that never speaks is no law.
  EXPECT_GT(judged, 20);
}

TEST(Laws, AreListedInTheDocs) {
  std::ifstream in(KVTWIN_DOCS "/laws.md");
  std::vector<std::string> listed;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("- **")) listed.push_back(line);
  }
  std::vector<std::string> due;
  for (const Law& law : Laws()) {
    due.push_back(fmt::format("- **{}** {}", law.name, law.statement));
  }
  EXPECT_EQ(listed, due);
}

// The optimized twin, wrong in one way.
class Broken : public ForwardingCache {
 public:
  explicit Broken(const CacheSpec& spec)
      : ForwardingCache(std::move(*MakeCache(spec, "optimized"))) {}
};

// Takes a token of another sequence with what it copies over.
class CopyTakesAnother : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = cache_->CopyPrefix(src, dst, len);
    if (status.ok() && src > 0 && src != dst) {
      return cache_->Remove(src, len, kOpenEnd);
    }
    return status;
  }
};

class CopyStopsShort : public Broken {
 public:
  using Broken::Broken;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, len > 1 ? len - 1 : len);
  }
};

class ReserveStores : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    return cache_->StartForward(batch, reserve && batch.positions.size() < 2);
  }
};

class FullTooEarly : public Broken {
 public:
  using Broken::Broken;
  Status StartForward(const Batch& batch, bool reserve) override {
    std::vector<CellEntry> cells;
    ListCells(cells);
    if (!reserve && CellCount() > 1 && std::ssize(cells) + 1 == CellCount()) {
      return {StatusCode::kCacheFull, "one cell is not enough"};
    }
    return cache_->StartForward(batch, reserve);
  }
};

class ResumesAnywhere : public Broken {
 public:
  using Broken::Broken;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() ? Result<bool>(true) : can;
  }
};

class KeepsExceptions : public Broken {
 public:
  using Broken::Broken;
  Status SetCausal(std::span<const int> except) override {
    if (except.empty()) return {};
    return cache_->SetCausal(except);
  }
};

class EmptyRemoveShifts : public Broken {
 public:
  using Broken::Broken;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool shifts = begin == end && end > 0 && end < kOpenEnd;
    return cache_->Remove(seq, shifts ? begin - 1 : begin, end);
  }
};

class ForgetsOnClose : public Broken {
 public:
  using Broken::Broken;
  void Close() override {}
};

template <class Backend>
void Breaks(const std::vector<std::string_view>& laws) {
  const Subject subject = {
      .name = "broken",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        Result<std::unique_ptr<Cache>> cache = MakeCache(spec, "optimized");
        if (!cache.ok()) return cache.status();
        return std::unique_ptr<Cache>(std::make_unique<Backend>(spec));
      },
      .can_be_poisoned = true};
  for (const std::string_view name : laws) {
    const Law* law = FindLaw(name);
    ASSERT_NE(law, nullptr) << name;
    const LawRun run = RunLaw(*law, subject, /*seed=*/1, /*histories=*/300);
    ASSERT_TRUE(run.failure.has_value()) << name;
    EXPECT_LE(run.failure->shrunk.ops.size(), 4U)
        << ToText(run.failure->shrunk);
    EXPECT_FALSE(run.failure->wrong.empty());
  }
}

TEST(Laws, AreBrokenByABrokenCache) {
  Breaks<CopyTakesAnother>({"frame"});
  Breaks<CopyStopsShort>({"copy_shows", "remove_open", "replay"});
  Breaks<ReserveStores>({"reserve"});
  Breaks<FullTooEarly>({"fullness", "legal_client", "capacity_returns"});
  Breaks<ResumesAnywhere>({"resume_is_honest"});
  Breaks<KeepsExceptions>({"causal_last"});
  Breaks<EmptyRemoveShifts>({"offset_zero"});
  Breaks<ForgetsOnClose>({"close_is_final"});
}

// Two cells, one head: by hand.
TEST(Attention, IsAWeightedMean) {
  const std::vector<float> keys = {0, std::log(3.0F), 7};
  const std::vector<float> values = {4, 8, std::nanf("")};
  const std::vector<float> mask = {0, 0, -INFINITY, -INFINITY, -INFINITY,
                                   -INFINITY};
  const KvView view{DenseView(keys.data(), DType::kF32, {1, 1, 3, 1}),
                    DenseView(values.data(), DType::kF32, {1, 1, 3, 1}),
                    DenseView(mask.data(), DType::kF32, {3, 2, 1, 1}), 0};
  const Eigen::MatrixXd queries = Eigen::MatrixXd::Constant(1, 2, 2.0);
  // Weights 1/4 and 3/4.
  const Eigen::MatrixXd seen =
      reference::Attend(view, false, 0, queries, 0.5);
  EXPECT_NEAR(seen(0, 0), 7, 1e-6);
  EXPECT_EQ(seen(0, 1), seen(0, 0));
  EXPECT_EQ(reference::Attend(view, false, 1, queries, 0.5).norm(), 0);
}

}  // namespace
}  // namespace kvtwin::props
