// Questions over other rows of the same tokens, for explanations.

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "core/elements.h"
#include "core/index.h"
#include "props/attention/attention_question.h"

namespace kvtwin::props {

AttentionQuestion AttentionQuestion::WithRowsRoundedTo(DType dtype) const {
  AttentionQuestion rounded = *this;
  std::array<std::byte, sizeof(float)> element;
  for (std::vector<float>* rows : {&rounded.keys_, &rounded.values_}) {
    for (float& number : *rows) {
      StoreElement(number, element.data(), dtype);
      number = LoadElement(element.data(), dtype);
    }
  }
  return rounded;
}

std::optional<AttentionQuestion> AttentionQuestion::WithRowsOfLayer(
    int layer) const {
  AttentionQuestion other = *this;
  other.tokens_.clear();
  other.keys_.clear();
  other.values_.clear();
  add_tokens_of_(layer, other);
  const auto gone =
      std::ranges::find(tokens_, true, &AskedToken::gone) - tokens_.begin();
  const auto place = [](const AskedToken& token) {
    return std::pair(token.position, token.sequence);
  };
  if (!std::ranges::equal(other.tokens_, std::span(tokens_).first(AsSize(gone)),
                          {}, place, place)) {
    return std::nullopt;
  }
  // The rows of layers may differ in size (S20).
  const auto has_size = [&](const std::vector<float>& rows, int head_dim) {
    return std::ssize(rows) == gone * std::int64_t{head_dim} * dims_.kv_heads;
  };
  if (!has_size(other.keys_, dims_.k_head_dim) ||
      !has_size(other.values_, dims_.v_head_dim)) {
    return std::nullopt;
  }
  // Tokens that are gone keep their rows.
  other.tokens_ = tokens_;
  other.keys_.insert(other.keys_.end(),
                     IteratorAt(keys_, std::ssize(other.keys_)), keys_.end());
  other.values_.insert(other.values_.end(),
                       IteratorAt(values_, std::ssize(other.values_)),
                       values_.end());
  return other;
}

AttentionQuestion AttentionQuestion::WithKeysOf(
    const AttentionQuestion& other) const {
  AttentionQuestion question = *this;
  question.keys_ = other.keys_;
  return question;
}

}  // namespace kvtwin::props
