#include "props/oracle/put_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "core/dense_tensor.h"
#include "props/compare/visibility.h"

namespace kvtwin::props {
namespace {

std::size_t HashOf(std::span<const std::byte> bytes) {
  return std::hash<std::string_view>()(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// Hashes the first element of each head, which a shift may leave as it is.
std::size_t TagHash(const TensorView& key_row) {
  TensorView tags = key_row;
  tags.shape[0] = 1;
  return HashOf(CopyOf(tags, tags.dtype).bytes);
}

}  // namespace

void PutLog::Add(std::int64_t line, const KvView& rows, std::size_t cache,
                 int layer, std::span<const int> sequences,
                 std::span<const std::int32_t> positions) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const auto column = static_cast<std::int64_t>(i);
    const TensorView key = Slice(rows.key, 2, column);
    puts_.push_back({line, cache, layer, sequences[i], positions[i],
                     HashOf(CopyOf(key, key.dtype).bytes), TagHash(key),
                     HashOf(RowBytes(rows.value, column, VLayout::kPlain))});
  }
}

const PutRow* PutLog::Find(const KvView& view, std::int64_t column,
                           VLayout v_layout, std::size_t cache,
                           int layer) const {
  return Best(view, column, v_layout, cache, layer, /*by_key=*/false).put;
}

const PutRow& PutLog::Latest(const PutRow& put) const {
  const auto same = [&](const PutRow& other) {
    return other.cache == put.cache && other.layer == put.layer &&
           other.sequence == put.sequence && other.position == put.position;
  };
  const auto found = std::ranges::find_if(puts_.rbegin(), puts_.rend(), same);
  return found == puts_.rend() ? put : *found;
}

PutMatch PutLog::Match(const KvView& view, std::int64_t column,
                       VLayout v_layout, std::size_t cache, int layer) const {
  return Best(view, column, v_layout, cache, layer, /*by_key=*/true);
}

PutMatch PutLog::Best(const KvView& view, std::int64_t column, VLayout v_layout,
                      std::size_t cache, int layer, bool by_key) const {
  const std::size_t key = HashOf(RowBytes(view.key, column, VLayout::kPlain));
  const std::size_t tag = TagHash(Slice(view.key, 2, column));
  const bool has_value = view.value.data != nullptr;
  const std::size_t value =
      has_value ? HashOf(RowBytes(view.value, column, v_layout)) : 0;
  // V rows never change. K rows may have been shifted, so they are a hint only.
  PutMatch best;
  int best_score = 0;
  for (const PutRow& put : puts_) {
    const bool same_value = !has_value || put.value_hash == value;
    const bool same_key = put.key_hash == key;
    if (!same_value && !(by_key && same_key)) continue;
    int score = has_value && same_value ? 10 : 0;
    if (same_key) score += 8;
    if (put.tag_hash == tag) score += 4;
    if (put.layer == layer && put.cache == cache && score > 0) ++score;
    if (score < best_score || score == 0) continue;
    best = {&put, same_key || put.tag_hash == tag, same_value};
    best_score = score;
  }
  return best;
}

std::string PutText(const PutMatch& match, std::size_t cache) {
  const PutRow* put = match.put;
  if (put == nullptr) return "a row that was never put";
  const bool whole = match.key && match.value;
  const std::string part = whole ? "" : match.key ? "K " : "V ";
  std::string text = fmt::format(
      "the {}row of token sequence {}, position {} (put on line {})", part,
      put->sequence, put->position, put->line);
  if (put->cache != cache) text += fmt::format(" in cache {}", put->cache);
  if (whole) return text;
  return text + fmt::format(" with another {} row", match.key ? "V" : "K");
}

std::string AppendedText(const PutRow* put, int layer) {
  if (put == nullptr) return "a row that was never appended";
  std::string to;
  if (put->layer != layer) to = fmt::format(" to layer {}", put->layer);
  return fmt::format(
      "the row of sequence {}, position {} (appended{} on line {})",
      put->sequence, put->position, to, put->line);
}

}  // namespace kvtwin::props
