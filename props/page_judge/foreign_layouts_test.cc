#include "props/page_judge/foreign_layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/mask_elements.h"
#include "props/base/scratch_folder.h"
#include "props/report/show.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

// A foreign cache that records itself. The last view has the fault.
class ForeignCache {
 public:
  ForeignCache(const ForeignLayout& layout, PlantedFault planted,
               const std::string& path)
      : layout_(layout), planted_(planted), out_(path) {
    TraceHeader header;
    header.producer = layout.name;
    header.visibility_only = true;
    header.spec.shift.kind = ShiftKind::kIdentity;
    if (layout.window) {
      header.spec.kind = Kind::kSwa;
      header.spec.window = *layout.window;
    }
    if (layout.wrapper) {
      CacheSpec inner = header.spec;
      header.spec = CacheSpec();
      header.spec.kind = Kind::kWrapper;
      inner.kind = Kind::kSwa;
      inner.window = 1;
      header.spec.caches = {inner, inner};
      header.spec.caches[1].kind = Kind::kCausal;
      header.spec.caches[1].window.reset();
    }
    header.init = {DType::kF32, 2, 16, 8};
    header.layers = 2;
    header.rows = {2, 1, 1};
    EXPECT_TRUE(WriteTraceHeader(header, out_).ok());
  }

  void Run() {
    Forward({{0, 0}, {0, 1}, {0, 2}}, false);
    if (layout_.shares) {
      TraceOp op;
      op.kind = TraceOpKind::kCopyPrefix;
      op.src = 0;
      op.dst = 1;
      op.len = 2;
      Write(op);
      for (ForeignToken& token : tokens_) {
        if (token.position < 2) token.sequences.insert(1);
      }
    } else {
      Forward({{1, 0}, {1, 1}}, false);
    }
    Forward({{1, 2}, {0, 3}, {1, 3}}, false);
    TraceOp op;
    op.kind = TraceOpKind::kCanResume;
    op.pos = 3;
    op.answer = false;  // Always allowed.
    Write(op);
    Forward({{0, 4}, {1, 4}}, true);
  }

 private:
  void Write(const TraceOp& op) { ASSERT_TRUE(WriteTraceOp(op, out_).ok()); }

  void Forward(const std::vector<std::pair<int, int>>& batch, bool last) {
    TraceOp start;
    start.kind = TraceOpKind::kStartForward;
    const std::size_t before = tokens_.size();
    for (const auto& [sequence, position] : batch) {
      start.sequences.push_back(sequence);
      start.positions.push_back(position);
      tokens_.push_back({position, {sequence}, next_});
      next_ += 10;
    }
    Write(start);
    for (int layer = 0; layer < 2; ++layer) {
      if (layout_.wrapper) {
        TraceOp type;
        type.kind = TraceOpKind::kSetLayerType;
        type.type = layer;
        Write(type);
      }
      std::vector<ForeignColumn> put;
      for (std::size_t i = before; i < tokens_.size(); ++i) {
        put.push_back({.token = AsInt(i)});
      }
      TraceOp op;
      op.kind = TraceOpKind::kPut;
      op.layer = layer;
      op.key = Rows(put, layer, true);
      op.value = Rows(put, layer, false);
      Write(op);
      Get(batch, layer, last && layer == 1);
    }
  }

  void Get(const std::vector<std::pair<int, int>>& batch, int layer,
           bool last) {
    std::optional<int> window = layout_.window;
    if (layout_.wrapper && layer == 0) window = 1;
    std::vector<ForeignColumn> columns = layout_.columns(tokens_);
    for (ForeignColumn& column : columns) {
      for (const auto& [sequence, position] : batch) {
        const bool other = column.sequence >= 0 && column.sequence != sequence;
        if (column.token < 0 || other) {
          column.seen.push_back(false);
          continue;
        }
        const ForeignToken& token = At(tokens_, column.token);
        column.seen.push_back(
            token.sequences.contains(sequence) && token.position <= position &&
            (!window || token.position >= position - *window));
      }
    }
    if (last) Plant(columns);
    TraceOp op;
    op.kind = TraceOpKind::kGet;
    op.layer = layer;
    op.first_cell = layout_.first_cell;
    op.key = Rows(columns, layer, true);
    op.value = Rows(columns, layer, false);
    auto rows = Size(batch);
    while (rows % layout_.row_padding != 0) ++rows;
    op.mask = HidingMask(DType::kF32, std::ssize(columns), rows);
    for (std::size_t i = 0; i < columns.size(); ++i) {
      for (std::size_t row = 0; row < batch.size(); ++row) {
        if (!columns[i].seen[row]) continue;
        AllowInMask(*op.mask, static_cast<std::int64_t>(i),
                    static_cast<std::int64_t>(row));
      }
    }
    Write(op);
  }

  void Plant(std::vector<ForeignColumn>& columns) const {
    const auto find = [&](bool seen, std::size_t row) {
      return std::ranges::find_if(columns, [&](const ForeignColumn& column) {
        return column.token >= 0 && column.seen[row] == seen;
      });
    };
    const auto at = find(true, 1);
    switch (planted_) {
      case PlantedFault::kNone:
        return;
      case PlantedFault::kKey:
        at->key = 0.5;
        return;
      case PlantedFault::kValue:
        at->value = 0.5;
        return;
      case PlantedFault::kTooMany:
        find(false, 0)->seen[0] = true;
        return;
      case PlantedFault::kMisses:
        at->seen[1] = false;
        return;
      case PlantedFault::kNowhere: {
        const int token = at->token;
        std::erase_if(columns, [&](const ForeignColumn& column) {
          return column.token == token;
        });
        return;
      }
      case PlantedFault::kSwap: {  // Two seen columns swap their V.
        const auto other = std::find_if(
            std::next(at), columns.end(),
            [](auto& column) { return column.token >= 0 && column.seen[1]; });
        const auto number = [&](const ForeignColumn& column) {
          return At(tokens_, column.token).number;
        };
        at->value = number(*other) - number(*at);
        other->value = -at->value;
        return;
      }
    }
  }

  DenseTensor Rows(const std::vector<ForeignColumn>& columns, int layer,
                   bool key) const {
    const auto count = std::ssize(columns);
    DenseTensor rows = FilledTensor(DType::kF32, {key ? 2 : 1, 1, count, 1}, 0);
    auto* numbers = reinterpret_cast<float*>(rows.bytes.data());
    for (const ForeignColumn& column : columns) {
      ForeignToken token{.position = 77, .sequences = {}, .number = 7777};
      if (column.token >= 0) {
        token = At(tokens_, column.token);
      }
      const float tag = token.number + static_cast<float>(layer);
      *numbers++ = tag + (key ? column.key : column.value);
      if (key) *numbers++ = 1000 + static_cast<float>(token.position);
    }
    return rows;
  }

  const ForeignLayout& layout_;
  PlantedFault planted_;
  std::ofstream out_;
  std::vector<ForeignToken> tokens_;
  float next_ = 100;
};

std::vector<ForeignColumn> InOrder(const std::vector<ForeignToken>& tokens) {
  std::vector<ForeignColumn> columns;
  for (int i = 0; i < std::ssize(tokens); ++i) columns.push_back({.token = i});
  return columns;
}

std::vector<ForeignColumn> BySequence(const std::vector<ForeignToken>& tokens) {
  std::vector<ForeignColumn> columns;
  for (int sequence = 0; sequence < 2; ++sequence) {
    for (int i = 0; i < std::ssize(tokens); ++i) {
      if (!At(tokens, i).sequences.contains(sequence)) {
        continue;
      }
      columns.push_back({.token = i, .sequence = sequence});
    }
  }
  return columns;
}

}  // namespace

std::vector<ForeignLayout> ForeignLayouts() {
  const auto rotated = [](const std::vector<ForeignToken>& tokens) {
    std::vector<ForeignColumn> columns = InOrder(tokens);
    std::rotate(columns.begin(), columns.begin() + std::ssize(columns) / 2,
                columns.end());
    return columns;
  };
  const auto reversed = [](const std::vector<ForeignToken>& tokens) {
    std::vector<ForeignColumn> columns = InOrder(tokens);
    std::ranges::reverse(columns);
    return columns;
  };
  const auto blocks = [](const std::vector<ForeignToken>& tokens) {
    std::vector<ForeignColumn> columns = InOrder(tokens);
    while (columns.size() % 4 != 0) columns.emplace_back();
    std::vector<ForeignColumn> shuffled;
    for (std::size_t block = columns.size() / 4; block-- > 0;) {
      const auto at = IteratorAt(columns, 4 * block);
      shuffled.insert(shuffled.end(), at, at + 4);
    }
    return shuffled;
  };
  const auto gaps = [](const std::vector<ForeignToken>& tokens) {
    std::vector<ForeignColumn> columns;
    for (const ForeignColumn& column : InOrder(tokens)) {
      columns.emplace_back();
      columns.push_back(column);
    }
    return columns;
  };
  const auto padded = [](const std::vector<ForeignToken>& tokens) {
    std::vector<ForeignColumn> columns = InOrder(tokens);
    while (columns.size() % 8 != 0) columns.emplace_back();
    return columns;
  };
  return {
      {.name = "a tensor for each sequence", .columns = BySequence},
      {.name = "a ring", .columns = rotated},
      {.name = "paged blocks", .columns = blocks},
      {.name = "reversed columns", .columns = reversed},
      {.name = "free cells between", .columns = gaps},
      {.name = "padded views", .columns = padded, .row_padding = 4},
      {.name = "columns of each sequence",
       .columns = BySequence,
       .shares = false},
      {.name = "a window", .columns = InOrder, .window = 2, .first_cell = 5},
      {.name = "a wrapper's second cache", .columns = InOrder, .wrapper = true},
  };
}

void RecordForeign(const ForeignLayout& layout, PlantedFault planted,
                   const std::string& path) {
  ForeignCache(layout, planted, path).Run();
}

namespace {

TEST(ForeignLayouts, AreRightUnlessTheyHaveAFault) {
  const ScratchFolder folder("layouts");
  const std::string path = folder.File("foreign.jsonl");
  for (const ForeignLayout& layout : ForeignLayouts()) {
    RecordForeign(layout, PlantedFault::kNone, path);
    EXPECT_FALSE(ExplainRecording(path, kTwins)) << layout.name;
    for (const PlantedFault planted : kPlantedFaults) {
      RecordForeign(layout, planted, path);
      EXPECT_TRUE(ExplainRecording(path, kTwins))
          << layout.name << ", fault " << AsInt(planted);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
