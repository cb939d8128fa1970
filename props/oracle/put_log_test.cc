// The log that explains whose row a view shows in a rejected recording.

#include "props/oracle/put_log.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/oracle/oracle.h"

namespace kvtwin::props {
namespace {

DenseTensor Tensor(const Shape& shape, const std::vector<float>& numbers) {
  DenseTensor tensor = FilledTensor(DType::kF32, shape, 0);
  std::memcpy(tensor.bytes.data(), numbers.data(), tensor.bytes.size());
  return tensor;
}

// A put of one token with K [tag, rest] and V [value].
TraceOp Put(std::int64_t line, int layer, float tag, float rest, float value) {
  TraceOp op;
  op.kind = TraceOpKind::kPut;
  op.line = line;
  op.layer = layer;
  op.key = Tensor({2, 1, 1, 1}, {tag, rest});
  op.value = Tensor({1, 1, 1, 1}, {value});
  return op;
}

class PutLogTest : public ::testing::Test {
 protected:
  void Add(const TraceOp& op, std::size_t cache, int sequence) {
    const std::array sequences = {sequence};
    const std::array positions = {sequence * 10};
    log_.Add(op.line, Oracle::RecordedView(op), cache, op.layer, sequences,
             positions);
  }
  // Returns the line of the put that is found; 0: none.
  std::int64_t Line(float tag, float rest, const float* value,
                    std::size_t cache = 0, int layer = 0) {
    const DenseTensor key = Tensor({2, 1, 1, 1}, {tag, rest});
    const DenseTensor seen = Tensor({1, 1, 1, 1}, {value ? *value : 0});
    KvView view;
    view.key = key.view();
    if (value != nullptr) view.value = seen.view();
    const PutRow* put = log_.Find(view, 0, VLayout::kPlain, cache, layer);
    return put == nullptr ? 0 : put->line;
  }

  PutLog log_;
};

TEST_F(PutLogTest, FindsTheMostSimilarRow) {
  Add(Put(2, 0, 1, 5, 8), 0, 1);
  Add(Put(3, 0, 1, 6, 8), 0, 2);  // The same tag and V, another K.
  Add(Put(4, 0, 2, 7, 8), 0, 3);
  const float v = 8;
  const float other = 9;
  EXPECT_EQ(Line(1, 5, &v), 2);    // The whole row, though it is not the last.
  EXPECT_EQ(Line(1, 99, &v), 3);   // A shifted row: the last put with its tag.
  EXPECT_EQ(Line(77, 99, &v), 4);  // A row found by V alone.
  EXPECT_EQ(Line(1, 5, &other), 0);  // V rows never change.
  EXPECT_EQ(Line(1, 5, nullptr), 2);
  EXPECT_EQ(Line(77, 99, nullptr), 0);
}

TEST_F(PutLogTest, DistinguishesKAndV) {
  Add(Put(2, 0, 1, 5, 8), 0, 1);
  Add(Put(3, 0, 2, 7, 9), 0, 2);
  const auto match = [&](float tag, float rest, float value) {
    const DenseTensor key = Tensor({2, 1, 1, 1}, {tag, rest});
    const DenseTensor seen = Tensor({1, 1, 1, 1}, {value});
    const KvView view = {key.view(), seen.view(), {}, 0};
    const PutMatch found = log_.Match(view, 0, VLayout::kPlain, 0, 0);
    return std::array{found.put == nullptr ? 0 : AsInt(found.put->line),
                      found.key ? 1 : 0, found.value ? 1 : 0};
  };
  EXPECT_EQ(match(1, 5, 8), (std::array{2, 1, 1}));
  EXPECT_EQ(match(1, 99, 8), (std::array{2, 1, 1}));  // Shifted.
  EXPECT_EQ(match(1, 5, 77), (std::array{2, 1, 0}));
  EXPECT_EQ(match(1, 5, 9), (std::array{2, 1, 0}));  // K of one, V of another.
  EXPECT_EQ(match(77, 99, 9), (std::array{3, 0, 1}));
  EXPECT_EQ(match(1, 99, 77), (std::array{0, 0, 0}));
}

TEST_F(PutLogTest, PrefersThisCacheAndLayer) {
  Add(Put(2, 0, 1, 5, 8), 0, 1);
  Add(Put(3, 1, 1, 5, 8), 0, 2);
  Add(Put(4, 0, 1, 5, 8), 1, 3);
  const float v = 8;
  EXPECT_EQ(Line(1, 5, &v, 0, 0), 2);
  EXPECT_EQ(Line(1, 5, &v, 0, 1), 3);
  EXPECT_EQ(Line(1, 5, &v, 1, 0), 4);
  EXPECT_EQ(Line(1, 5, &v, 7, 0), 4);
}

TEST_F(PutLogTest, NamesTheTokenOfARow) {
  const PutRow put = {.line = 14,
                      .cache = 1,
                      .layer = 0,
                      .sequence = 2,
                      .position = 3,
                      .key_hash = 0,
                      .tag_hash = 0,
                      .value_hash = 0};
  EXPECT_EQ(PutText(PutMatch{&put, true, true}, 1),
            "the row of token sequence 2, position 3 (put on line 14)");
  EXPECT_EQ(PutText(PutMatch{&put, true, true}, 0),
            "the row of token sequence 2, position 3 (put on line 14) in cache "
            "1");
  EXPECT_EQ(PutText(PutMatch{&put, true, false}, 1),
            "the K row of token sequence 2, position 3 (put on line 14) with "
            "another V row");
  EXPECT_EQ(PutText(PutMatch{&put, false, true}, 1),
            "the V row of token sequence 2, position 3 (put on line 14) with "
            "another K row");
  EXPECT_EQ(PutText(PutMatch(), 0), "a row that was never put");
  EXPECT_EQ(AppendedText(&put, 0),
            "the row of sequence 2, position 3 (appended on line 14)");
  EXPECT_EQ(AppendedText(&put, 1),
            "the row of sequence 2, position 3 (appended to layer 0 on line "
            "14)");
  EXPECT_EQ(AppendedText(nullptr, 0), "a row that was never appended");
}

}  // namespace
}  // namespace kvtwin::props
