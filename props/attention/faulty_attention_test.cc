// Faults at the level `attention`: each is found, and the report says which
// token explains it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/shift_row.h"
#include "kvtwin/attention.h"
#include "props/attention/attending_twin.h"
#include "props/search/fuzz.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

using Floats = std::span<float>;

// Faults of an attention over right views.
struct AttentionFault {
  // Changes the queries, [k_head_dim, heads, rows], and the outputs.
  std::function<void(Floats queries, const Shape& shape)> query = {};
  std::function<void(Floats out, const Shape& shape)> out = {};
  std::function<void(Setup& setup)> ignores = {};  // Changes the setup.
  bool refuses = false;
  int layer = -1;  // All layers attend over the rows of this one.
};

class FaultyAttention final : public AttendingTwin {
 public:
  FaultyAttention(std::unique_ptr<Cache> cache, const Setup& setup,
                  AttentionFault fault)
      : AttendingTwin(std::move(cache), setup.config.v_layout, setup.soft_cap,
                      setup.sinks, *MakeAttention("reference")),
        fault_(std::move(fault)) {}

  Status Attend(const TensorView& query, Floats out) override {
    if (fault_.refuses) return {StatusCode::kNotSupported, "so it is"};
    DenseTensor changed = CopyOf(query, query.dtype);
    if (fault_.query) {
      fault_.query({reinterpret_cast<float*>(changed.bytes.data()),
                    AsSize(query.elements())},
                   query.shape);
    }
    if (fault_.layer >= 0) (void)SetLayer(fault_.layer).ok();
    Status status = AttendingTwin::Attend(changed.view(), out);
    if (fault_.out) fault_.out(out, query.shape);
    return status;
  }

 private:
  const AttentionFault fault_;
};

// A cache whose views have a fault, with right attention over them; or the
// reverse.
Subject Faulty(const Fault& fault, const AttentionFault& attention) {
  Subject subject = TwinSubject("reference", Level::kAttention);
  subject.name = "faulty";
  subject.make_of = [=](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    auto cache = MakeTampered(setup.spec, fault);
    if (!cache.ok()) return cache;
    Setup changed = setup;
    if (attention.ignores) attention.ignores(changed);
    return std::unique_ptr<Cache>(std::make_unique<FaultyAttention>(
        std::move(*cache), changed, attention));
  };
  return subject;
}

struct AttentionCase {
  std::string name;
  std::string history;  // Without the leading "kvt1 ".
  Fault fault = {};
  AttentionFault attention = {};
  std::string text;  // Part of the failure's text.
  std::string check = "subject: output";
};

void ExpectFound(const std::vector<AttentionCase>& cases) {
  for (const AttentionCase& test : cases) {
    SCOPED_TRACE(test.name);
    const Result<History> history = ParseHistory("kvt1 " + test.history);
    ASSERT_TRUE(history.ok()) << history.status().message();
    const RunResult right = RunHistory(*history, Faulty({}, {}));
    EXPECT_TRUE(right.ran);
    EXPECT_FALSE(right.failure) << right.failure->text;
    EXPECT_GT(right.views, 0);
    const auto wrong =
        RunHistory(*history, Faulty(test.fault, test.attention)).failure;
    ASSERT_TRUE(wrong) << "was not found";
    EXPECT_EQ(wrong->check, test.check) << wrong->text;
    EXPECT_NE(wrong->text.find(test.text), std::string::npos) << wrong->text;
  }
}

constexpr float kHides = -std::numeric_limits<float>::infinity();

// The histories of the search for a shorter one may have fewer rows.
View Says(std::int64_t row, std::int64_t column, float what) {
  return [=](OwnedView& view) {
    const Shape& shape = view.mask.shape;
    if (row >= shape[1] || column >= shape[0]) return;
    const auto at = AsSize(row * view.mask.shape[0] + column);
    StoreElement(what, &view.mask.bytes[4 * at], DType::kF32);
  };
}

// Gives column `to` the rows of column `from`.
void CopyColumn(DenseTensor& rows, std::int64_t from, std::int64_t to) {
  const std::int64_t size = std::ssize(rows.bytes) / rows.shape[2];
  std::copy_n(IteratorAt(rows.bytes, from * size), size,
              IteratorAt(rows.bytes, to * size));
}

const std::string kSix = "layers=2 dims=4,2,3 cells=8 | put 0*6";

TEST(FaultyAttention, OneTokenExplainsIt) {
  const std::string two =
      "dims=4,1,3 seqs=2 cap=8 | put 0*3 | put 1*2 | put 0*1";
  ExpectFound({
      {.name = "missing",
       .history = kSix,
       .fault = Shows(Says(5, 2, kHides)),
       .text = "row 5 (sequence 0, position 5)"},
      {.name = "missing, named",
       .history = kSix,
       .fault = Shows(Says(5, 2, kHides)),
       .text = "; as if position 2 were missing"},
      {.name = "one of many tokens",
       .history = "dims=4,2,3 cells=66 | put 0*66",
       .fault = Shows([](OwnedView& view) { CopyColumn(view.value, 64, 65); }),
       .text = "; as if position 65 had V of position 64"},
      {.name = "one of the first of many tokens",
       .history = "dims=4,2,3 cells=66 | put 0*66",
       .fault = Shows([](OwnedView& view) { CopyColumn(view.value, 3, 4); }),
       .text = "; as if position 4 had V of position 3"},
      {.name = "a later token",
       .history = kSix,
       .fault = Shows(Says(3, 5, 0)),
       .text = "; as if position 5 were seen"},
      {.name = "of another sequence",
       .history = two,
       .fault = Shows(Says(0, 4, 0)),
       .text = "; as if position 1 of sequence 1 were seen"},
      {.name = "outside of the window",
       .history = "kind=swa window=2 seqs=1 cap=8 dims=4,1,3 | put 0*6",
       .fault = Shows(Says(5, 2, 0)),
       .text = "; as if position 2 were seen, or the window were 3"},
      {.name = "a window that is too small",
       .history = "kind=swa window=2 seqs=1 cap=8 dims=4,1,3 | put 0*6",
       .fault = Shows(Says(5, 3, kHides)),
       .text = "; as if position 3 were missing, or the window were 1"},
      {.name = "V of another token",
       .history = kSix,
       .fault = Shows([](OwnedView& view) { CopyColumn(view.value, 1, 4); }),
       .text = "; as if position 4 had V of position 1"},
      {.name = "K of another token",
       .history = kSix,
       .fault = Shows([](OwnedView& view) { CopyColumn(view.key, 1, 4); }),
       .text = "; as if position 4 had K of position 1"},
      {.name = "K and V of another token",
       .history = kSix,
       .fault = Shows([](OwnedView& view) {
         CopyColumn(view.key, 1, 4);
         CopyColumn(view.value, 1, 4);
       }),
       .text = "; as if position 4 had K and V of position 1"},
      {.name = "the last layer",
       .history = kSix,
       .fault = Shows(Says(5, 0, kHides), 1),
       .text = "layer 1: the output of row 5"},
      {.name = "in f16",
       .history = "dtype=f16 " + kSix,
       .fault = Shows(Says(5, 2, kHides)),
       .text = "; as if position 2 were missing"},
  });
}

TEST(FaultyAttention, RowsOfAnotherLayerExplainIt) {
  const std::string rows = "layers=3 dims=4,2,3 cells=8 | put 0*4 | put 0*1";
  ExpectFound({
      {.name = "of the first layer",
       .history = rows,
       .attention = {.layer = 0},
       .text = "; as if K and V were those of layer 0"},
      {.name = "of the last layer",
       .history = rows,
       .attention = {.layer = 2},
       .text = "; as if K and V were those of layer 2"},
  });
}

// Moves query head h of two KV heads to the place that the KV head h % 2 reads,
// or back.
void Deal(Floats numbers, const Shape& shape, bool back) {
  const std::vector<float> kept(numbers.begin(), numbers.end());
  const std::int64_t heads = shape[1];
  const std::int64_t dim = std::ssize(numbers) / heads / shape[2];
  for (std::int64_t i = 0; i < heads * shape[2]; ++i) {
    const std::int64_t h = i % heads;
    std::int64_t from = i;
    std::int64_t to = i - h + h % 2 * heads / 2 + h / 2;
    if (back) std::swap(from, to);
    std::copy_n(IteratorAt(kept, from * dim), dim,
                IteratorAt(numbers, to * dim));
  }
}

// Only this level sees these faults: the views are right.
TEST(FaultyAttention, OfTheAttentionAlone) {
  const auto rows_swapped = [](Floats out, const Shape& shape) {
    const auto row = std::ssize(out) / shape[2];
    std::copy_n(IteratorAt(out, row), row, out.begin());
  };
  ExpectFound({
      {.name = "the scale",
       .history = kSix,
       .attention = {.query =
                         [](Floats queries, const Shape& shape) {
                           for (float& query : queries) {
                             query *= std::sqrt(static_cast<float>(shape[0]));
                           }
                         }},
       .text = "; as if the scale were 1"},
      {.name = "zeros",
       .history = kSix,
       .attention = {.out = [](Floats out,
                               const Shape&) { std::ranges::fill(out, 0.0F); }},
       .text = "it were zeros"},
      {.name = "the output of another row",
       .history = kSix,
       .attention = {.out = rows_swapped},
       .text = "as if it were the output of row 1"},
      {.name = "KV heads in turn",
       .history = kSix,
       .attention = {
           .query =
               [](Floats queries, const Shape& shape) {
                 Deal(queries, shape, /*back=*/false);
               },
           .out = [](Floats out,
                     const Shape& shape) { Deal(out, shape, /*back=*/true); }},
       .text = "; as if head h read KV head h % kv_heads"},
      {.name = "a NaN",
       .history = kSix,
       .attention = {.out =
                         [](Floats out, const Shape&) {
                           out.back() = std::numeric_limits<float>::quiet_NaN();
                         }},
       .text = "it is not a number"},
      {.name = "nothing explains it",
       .history = kSix,
       .attention = {.out = [](Floats out,
                               const Shape&) { out.back() += 0.5F; }},
       .text = "no fault of one token explains it"},
      {.name = "a few roundings too many",
       .history = kSix,
       .attention = {.out =
                         [](Floats out, const Shape&) {
                           for (float& number : out) number *= 1.0001F;
                         }},
       .text = "no fault of one token explains it"},
      {.name = "a refusal",
       .history = kSix,
       .attention = {.refuses = true},
       .text = "Attend is not_supported",
       .check = "subject: result"},
  });
}

const std::string kRotates =
    "dims=4,2,3 seqs=1 cap=8 shift=rope | put 0*3 | drop 0:0-1 | put 0*1";

// Each of these changes nothing without a soft cap, sinks or a shift.
TEST(FaultyAttention, SoftCapSinksAndShift) {
  // Shifts column 1 of the second view, at position 0 or 1, back or once more.
  const auto moves = [](std::int32_t positions) {
    return Shows([=](OwnedView& view) {
      if (view.mask.shape[1] != 1) return;
      Shift rope;
      rope.kind = ShiftKind::kRope;
      auto* key = reinterpret_cast<float*>(view.key.bytes.data());
      ASSERT_TRUE(
          ShiftRow(rope, 0, positions, 4, 2, std::span(key, 16).last(8)).ok());
    });
  };
  ExpectFound({
      {.name = "no soft cap",
       .history = "softcap=4 " + kSix,
       .attention = {.ignores =
                         [](props::Setup& setup) { setup.soft_cap = 0; }},
       .text = "; as if the soft cap were absent"},
      {.name = "no sinks",
       .history = "sinks=1 " + kSix,
       .attention = {.ignores =
                         [](props::Setup& setup) { setup.sinks = false; }},
       .text = "; as if the sinks were absent"},
      {.name = "no rotation",
       .history = kRotates,
       .fault = moves(1),
       .text = "; as if K of position 0 were rotated for position 1"},
      {.name = "rotated twice",
       .history = kRotates,
       .fault = moves(-1),
       .text = "; as if K of position 0 were rotated for position -1"},
  });
}

TEST(FaultyAttention, TheSearchDrawsSoftCapsAndSinks) {
  const auto found = [](std::function<void(props::Setup&)> ignores) {
    FuzzOptions options;
    options.operations = 20'000;
    const FuzzResult result =
        Fuzz(options, Faulty({}, {.ignores = std::move(ignores)}));
    return result.failure ? result.failure->history + result.failure->text : "";
  };
  const std::string cap = found([](auto& setup) { setup.soft_cap = 0; });
  EXPECT_NE(cap.find("softcap=4"), cap.npos) << cap;
  EXPECT_NE(cap.find("as if the soft cap were absent"), cap.npos) << cap;
  const std::string sinks = found([](auto& setup) { setup.sinks = false; });
  EXPECT_NE(sinks.find("sinks=1"), sinks.npos) << sinks;
  EXPECT_NE(sinks.find("as if the sinks were absent"), sinks.npos) << sinks;
}

// The outputs of a softmax without its maximum, and of a kernel that forgets
// the query after a tile of 64.
TEST(FaultyAttention, TheSearchDrawsLargeScoresAndLongBatches) {
  const auto found = [](const AttentionFault& fault) {
    FuzzOptions options;
    options.seed = 3;
    options.operations = 3'000;
    const FuzzResult result = Fuzz(options, Faulty({}, fault));
    return result.failure ? result.failure->text : "";
  };
  const auto overflows = std::make_shared<bool>();
  const std::string large =
      found({.query =
                 [=](Floats queries, const Shape&) {
                   *overflows = std::ranges::any_of(queries, [](float query) {
                     return std::abs(query) > 40;
                   });
                 },
             .out =
                 [=](Floats out, const Shape&) {
                   if (*overflows) {
                     out.back() = std::numeric_limits<float>::infinity();
                   }
                 }});
  EXPECT_NE(large.find("is inf"), large.npos) << large;
  const std::string tile = found({.out = [](Floats out, const Shape& shape) {
    if (shape[2] > 64) out.back() = 0;
  }});
  EXPECT_NE(tile.find("the output of row "), tile.npos) << tile;
}

// Finds kernels that take a KV head by bits of the query head, or that have
// registers for eight heads.
TEST(FaultyAttention, TheSearchDrawsTheGroupsOfModels) {
  const auto found = [](const std::function<bool(std::int64_t heads)>& wrong) {
    FuzzOptions options;
    options.operations = 10'000;
    const AttentionFault fault = {.out = [=](Floats out, const Shape& shape) {
      if (wrong(shape[1])) out.back() += 1;
    }};
    return Fuzz(options, Faulty({}, fault)).failure.has_value();
  };
  EXPECT_TRUE(found([](auto heads) { return heads == 5 || heads == 7; }));
  EXPECT_TRUE(found([](auto heads) { return heads > 8; }));
  EXPECT_FALSE(found([](auto heads) { return heads > 3 * 16; }));
}

// A shift by this number of positions makes K of f16 infinite.
TEST(FaultyAttention, InfiniteRowsAreNotJudged) {
  const std::string shifted =
      "kvt1 shift=add cells=2 dtype=f16 | put 0*1@+1073741824 | drop 0:~1-0 | ";
  for (const std::string last : {"put 0*1", "put 1*1"}) {
    const Result<History> history = ParseHistory(shifted + last);
    ASSERT_TRUE(history.ok());
    for (const auto& subject :
         {Faulty({}, {}), TwinSubject("optimized", Level::kAttention)}) {
      const RunResult result = RunHistory(*history, subject);
      EXPECT_FALSE(result.failure) << result.failure->text;
      EXPECT_EQ(result.views, last == "put 0*1" ? 1 : 2);
    }
  }
}

// A row that sees nothing must have zeros.
TEST(FaultyAttention, AfterTheTokensAreGone) {
  ExpectFound({{.name = "not zeros",
                .history = "cells=2 | put 0*1 | drop 0:0- | causal",
                .attention = {.out =
                                  [n = 0](Floats out, const Shape&) mutable {
                                    if (++n > 1) out.front() = 1;
                                  }},
                .text = "expected 0"}});
}

TEST(FaultyAttention, IsShrunkAndExplained) {
  const Fault fault = Shows([](OwnedView& view) {
    // The first column of four or more is hidden from the last row.
    const std::int64_t columns = view.mask.shape[0];
    if (columns < 4 || view.mask.dtype != DType::kF32) return;
    Says(view.mask.shape[1] - 1, 0, kHides)(view);
  });
  FuzzOptions options;
  options.operations = 20'000;
  const FuzzResult result = Fuzz(options, Faulty(fault, {}));
  ASSERT_TRUE(result.failure);
  EXPECT_EQ(result.failure->check, "subject: output");
  EXPECT_EQ(result.failure->level, Level::kAttention);
  EXPECT_EQ(result.failure->rules, "S2, S16, S17, S58");
  EXPECT_LE(result.failure->operations, 2) << result.failure->history;
  EXPECT_NE(result.failure->text.find("as if position 0 were missing"),
            std::string::npos)
      << result.failure->text;
}

}  // namespace
}  // namespace kvtwin::props
