// The comparisons of ModelDriver: views by what each row sees, shapes, and
// attention over views or by the cache.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/attention/numeric_view.h"
#include "props/base/check_name.h"
#include "props/base/optional_calls.h"
#include "props/compare/failure.h"
#include "props/compare/model_driver.h"
#include "props/compare/step.h"

namespace kvtwin::props {

using reference::LedgerToken;

void ModelDriver::CheckOutput() {
  auto* attending = dynamic_cast<Attending*>(tested_.get());
  if (attending == nullptr || !fresh() || IsEncoder() ||
      ledger_.active().recurrent()) {
    return;
  }
  const auto before = questions_.find(place());
  const int group = subject_.QueriesPerKvHead(setup_);
  AttentionQuestion question(
      {.ledger = ledger_.active(),
       .layer = layer_,
       .dims = setup_.rows,
       .positions = batch_.positions,
       .sequences = batch_.sequences,
       .soft_cap = static_cast<double>(setup_.soft_cap),
       .sinks = SinksOf(setup_.sinks ? group * setup_.rows.kv_heads : 0)},
      group, AsSize((rows_.empty() ? 0 : rows_.back().first) + layer_),
      before == questions_.end() ? nullptr : &before->second);
  if (question.CountJudged() == 0) return;
  const auto call = [&] {
    return fmt::format("Attend(layer {}, {} queries)", layer_,
                       batch_.positions.size());
  };
  Begin(call);
  std::vector<float> out(question.answer_size(),
                         std::numeric_limits<float>::quiet_NaN());
  const Status found = attending->Attend(question.query(), out);
  if (trace_ != nullptr) {
    trace_->Add(call(), StatusName(found.code()), found.code());
  }
  ++result_.operations;
  CheckResult(OpKind::kGet, "Attend", {}, found);
  DrawCellsNow();
  ++result_.views;
  const auto wrong = question.FindWrong(out, subject_.precision());
  questions_.insert_or_assign(place(), std::move(question));
  if (!wrong) return;
  Failure failure = MakeFailure(
      "subject: output", fmt::format("layer {}: {}{}", layer_, wrong->text,
                                     MovedText(wrong->row)));
  failure.row = wrong->row;
  throw failure;
}

std::string ModelDriver::MovedText(std::int64_t row) const {
  if (row >= std::ssize(batch_.sequences)) return "";
  const auto moved = moved_.find(At(batch_.sequences, row));
  if (moved == moved_.end()) return "";
  return fmt::format(
      "\n  {} was ok, so the cache must have copied the rows that it moved: "
      "another sequence holds their tokens, too (else: shared_cells, S32)",
      moved->second);
}

std::string ModelDriver::PromiseText(std::int64_t row,
                                     const LedgerToken& token) const {
  if (row >= std::ssize(batch_.sequences)) return "";
  const int seq = At(batch_.sequences, row);
  const auto promise = promises_.find(seq);
  if (promise == promises_.end() || !token.HeldBy(seq) ||
      token.position >= promise->second.before ||
      !At(promise->second.caches, type_)) {
    return "";
  }
  return fmt::format(
      "\n  {} was yes, so the cache must have kept position {} of sequence {} "
      "({})",
      promise->second.call, token.position, seq,
      ledger_.active().recurrent() ? "R8" : "S28");
}

void ModelDriver::CheckView() {
  if (subject_.level == Level::kAttention) return CheckOutput();
  const int layer = layer_;
  const std::string call = fmt::format("Get(layer {})", layer);
  Begin(call);
  const Result<KvView> view = tested_->Get();
  AddStep(call, view.status().code());
  CheckResult(OpKind::kGet, call, {}, view.status());
  const bool masked = view->mask.data != nullptr;
  DrawCellsNow();
  CheckShapes(layer, *view);
  if (trace_ != nullptr && trace_->steps.back().drawn && masked) {
    DrawView(*trace_->frame,
             {.ledger = ledger_.active(),
              .layer = layer,
              .actual = *view,
              .expected = {},
              .v_layout = setup_.config.v_layout,
              .fresh = fresh() && subject_.level != Level::kNumeric,
              .positions = batch_.positions,
              .sequences = batch_.sequences},
             trace_->steps.back());
  }
  if (!fresh() && !IsEncoder()) return;
  ++result_.views;
  if (subject_.level == Level::kNumeric && !IsEncoder()) {
    return CheckAttention(layer, *view);
  }
  const auto wrong = FindWrongRow(
      ledger_, layer, *view, setup_.config.v_layout,
      {.former =
           [&](std::int64_t column) { return FormerRowsOf(*view, column); },
       .expected =
           [&](int row, const LedgerToken& token) {
             return PromiseText(row, token);
           }});
  if (!wrong) return;
  std::string text = fmt::format("layer {}: {}", layer, wrong->text);
  const auto row = AsSize(wrong->row);
  if (!IsEncoder() && row < batch_.positions.size()) {
    const BatchToken& at = At(ledger_.active().batch(), wrong->row);
    const bool drafted = std::ranges::any_of(
        ledger_.active().tokens(), [&](const LedgerToken& token) {
          return token.drafted_by == at.sequence && token.draft == at.draft;
        });
    text += fmt::format(
        "\n  row {} {} of sequence {} at position {}", row,
        at.draft < 0
            ? "is the token"
            : fmt::format("{} draft {}", drafted ? "is" : "was", at.draft),
        at.sequence, at.position);
  }
  Failure failure = *wrong;
  failure.text = text + MovedText(wrong->row);
  failure.first_cell = view->first_cell;
  throw failure;
}

FormerRows ModelDriver::FormerRowsOf(const KvView& view,
                                     std::int64_t column) const {
  const bool has_value = view.value.data != nullptr;
  const auto key = RowBytes(view.key, column, VLayout::kPlain);
  const VLayout v_layout = setup_.config.v_layout;
  const auto value = has_value ? RowBytes(view.value, column, v_layout)
                               : std::vector<std::byte>();
  for (auto rows = rows_.rbegin(); rows != rows_.rend(); ++rows) {
    RowBuffer keys;
    RowBuffer values;
    const TensorView key_rows = Fill(*rows, RowRole::kKey, keys);
    const TensorView value_rows = Fill(*rows, RowRole::kValue, values);
    for (std::size_t i = 0; i < rows->batch.positions.size(); ++i) {
      const auto number = static_cast<std::int64_t>(i);
      const KvRows put = ledger_.active().RowsAt(number, key_rows, value_rows);
      if (put.key.bytes != key) continue;
      if (has_value && put.value.bytes != value) continue;
      const bool again = std::any_of(rows_.rbegin(), rows, [&](const auto& of) {
        return of.put && of.pass == rows->pass &&
               (of.layer == kAllLayers || of.layer == layer_);
      });
      return {
          fmt::format("the rows of token {} (sequence {}, position {}), {},",
                      rows->first + number, rows->batch.sequences[i],
                      rows->batch.positions[i],
                      again ? "which were replaced" : "which left before"),
          /*left=*/!again};
    }
  }
  return {};
}

void ModelDriver::CheckShapes(int layer, const KvView& view) {
  if (IsEncoder()) return;
  const auto columns = view.mask.data == nullptr ? 0 : view.mask.shape[0];
  const RowDims& rows = setup_.rows;
  const Shape value = [&]() -> Shape {
    switch (setup_.config.v_layout) {
      case VLayout::kPermuted:
        return {columns, rows.v_head_dim, rows.kv_heads, 1};
      case VLayout::kTiled:
        return {kTileCells, rows.v_head_dim, rows.kv_heads,
                columns / kTileCells};
      default:
        return {rows.v_head_dim, rows.kv_heads, columns, 1};
    }
  }();
  const auto check = [&](std::string_view what, const Shape& actual,
                         const Shape& expected) {
    Check(actual == expected, "subject: view shape", [&] {
      return fmt::format("layer {}: the shape of {} is {}, expected {}", layer,
                         what, ShapeText(actual), ShapeText(expected));
    });
  };
  Check(view.mask.data != nullptr || !fresh(), "subject: view shape", [&] {
    return fmt::format("layer {}: there is no mask, or no column", layer);
  });
  if (view.mask.data == nullptr) return;  // The view is empty, as expected.
  check("K", view.key.shape, {rows.k_head_dim, rows.kv_heads, columns, 1});
  check("V", view.value.shape, value);
  Check(view.mask.shape[1] >= std::ssize(batch_.positions),
        "subject: view shape", [&] {
          return fmt::format(
              "layer {}: the mask has {} rows, the batch {} "
              "tokens",
              layer, view.mask.shape[1], batch_.positions.size());
        });
  if (!subject_.mask_rows_too) return;
  // A backend may have its own padding: then its number of rows does not tell
  // whether it follows the requested padding.
  const std::int64_t padding = setup_.config.mask_batch_padding;
  const std::int64_t batch = std::ssize(batch_.positions);
  const std::int64_t padded = (batch + padding - 1) / padding * padding;
  const std::int64_t actual = view.mask.shape[1];
  const bool pads = subject_.rules.mask_rows == Rules::MaskRows::kPadded;
  Check(pads ? actual % padding == 0 : actual == batch || actual != padded,
        "subject: view shape", [&] {
          return fmt::format("layer {}: the mask has {} rows, expected {}",
                             layer, actual, pads ? padded : batch);
        });
}

void ModelDriver::CheckAttention(int layer, const KvView& view) {
  const RowDims& dims = setup_.rows;
  const std::optional<LedgerView> expected_view = ViewOf(
      ledger_.active(), layer, dims, setup_.init.dtype, setup_.v_dtype());
  if (!expected_view) return;
  for (std::int64_t row = 0; row < view.mask.shape[1]; ++row) {
    for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
      const MaskElement element = MaskElementAt(view.mask, column, row);
      const bool padding = row >= std::ssize(batch_.positions);
      if (element == MaskElement::kHides) continue;
      if (element == MaskElement::kAllows && !padding) continue;
      Failure failure =
          MakeFailure("subject: rows",
                      padding ? "a padding row sees something"
                              : NeitherText(view.mask, column, AsInt(row)));
      failure.row = AsInt(row);
      failure.column = AsInt(column);
      failure.first_cell = view.first_cell;
      throw failure;
    }
  }
  const auto wrong = FindWrongNumbers(
      {.ledger = ledger_.active(),
       .layer = layer,
       .dims = dims,
       .positions = batch_.positions,
       .sequences = batch_.sequences},
      expected_view->view(), view, setup_.config.v_layout, subject_.tolerance);
  if (!wrong) return;
  Failure failure = MakeFailure(
      "subject: attention",
      fmt::format("layer {}: {}{}", layer, wrong->text, MovedText(wrong->row)));
  failure.row = wrong->row;
  failure.first_cell = view.first_cell;
  throw failure;
}

}  // namespace kvtwin::props
