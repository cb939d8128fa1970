// What a paged pool must do, without blocks: which rows does a sequence have?
// It cannot say which prefixes are still there: Open is told how many tokens
// were taken over, and knows what their rows are.

#ifndef KVTWIN_REFERENCE_PAGED_LEDGER_H_
#define KVTWIN_REFERENCE_PAGED_LEDGER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/paged.h"
#include "kvtwin/state.h"

namespace kvtwin::reference {

class PagedLedger {
 public:
  using Rows = std::vector<KvRows>;  // Of one token, by layer.

  explicit PagedLedger(const PagedSpec& spec) : spec_(spec) {}

  // Whether so many tokens of the prompt may be taken over: whole blocks that
  // were committed, and not its last token.
  bool MayOpen(std::span<const std::int32_t> prompt, const PrefixKey& key,
               int taken) const {
    if (taken == 0) return true;
    return taken % spec_.block_size == 0 && taken < std::ssize(prompt) &&
           taken <= spec_.max_seq_len &&
           committed_.contains(NameOf(key, Front(prompt, taken)));
  }

  // Requires: MayOpen.
  void Open(int sequence, std::span<const std::int32_t> prompt,
            const PrefixKey& key, int taken) {
    Sequence& opened = sequences_[sequence];
    opened.key = key;
    for (int i = 1; i <= taken; ++i) {
      opened.known.push_back(prompt[static_cast<std::size_t>(i - 1)]);
      opened.tokens.push_back(committed_.at(NameOf(key, opened.known)));
    }
  }

  void Fork(int from, int sequence, int len) {
    sequences_[sequence] = sequences_.at(from);
    Truncate(sequence, len);
  }

  void Append(int sequence, int layer, const TensorView& key,
              const TensorView& value) {
    std::vector<KvRows>& appended = sequences_.at(sequence).appended[layer];
    appended.clear();
    for (std::int64_t i = 0; i < key.shape[2]; ++i) {
      appended.push_back(
          {CopyOf(Slice(key, 2, i), spec_.dtype),
           CopyOf(Slice(value, 2, i), spec_.v_dtype.value_or(spec_.dtype))});
    }
  }

  // `tokens`: the last of these that are known, none or all.
  void Commit(int sequence, int new_tokens,
              std::span<const std::int32_t> tokens) {
    Sequence& to = sequences_.at(sequence);
    for (int i = 0; i < new_tokens; ++i) {
      Rows rows;
      for (int layer = 0; layer < spec_.layers; ++layer) {
        rows.push_back(to.appended.at(layer).at(static_cast<std::size_t>(i)));
      }
      to.tokens.push_back(std::move(rows));
      if (tokens.empty() || to.known.size() + 1 != to.tokens.size()) continue;
      to.known.push_back(tokens[static_cast<std::size_t>(i)]);
      committed_[NameOf(to.key, to.known)] = to.tokens.back();
    }
    to.appended.clear();
  }

  void Truncate(int sequence, int len) {
    Sequence& of = sequences_.at(sequence);
    of.tokens.resize(static_cast<std::size_t>(len));
    of.known.resize(std::min(of.known.size(), of.tokens.size()));
    of.appended.clear();
  }

  void Free(int sequence) { sequences_.erase(sequence); }

  int SeqLen(int sequence) const {
    return static_cast<int>(sequences_.at(sequence).tokens.size());
  }

  // The rows of a layer, in order: what is committed, then what was appended.
  std::vector<KvRows> RowsOf(int sequence, int layer) const {
    const Sequence& of = sequences_.at(sequence);
    std::vector<KvRows> rows;
    for (const Rows& token : of.tokens) {
      rows.push_back(token[static_cast<std::size_t>(layer)]);
    }
    const auto appended = of.appended.find(layer);
    if (appended == of.appended.end()) return rows;
    rows.insert(rows.end(), appended->second.begin(), appended->second.end());
    return rows;
  }

 private:
  using Name = std::tuple<std::string, std::vector<std::string>,
                          std::vector<std::int32_t>>;

  struct Sequence {
    PrefixKey key;
    std::vector<std::int32_t> known;  // Tokens from its start.
    std::vector<Rows> tokens;
    std::map<int, std::vector<KvRows>> appended;  // By layer.
  };

  static std::vector<std::int32_t> Front(std::span<const std::int32_t> prompt,
                                         int count) {
    return {prompt.begin(), prompt.begin() + count};
  }
  static Name NameOf(const PrefixKey& key, std::vector<std::int32_t> tokens) {
    return {key.salt, key.extra, std::move(tokens)};
  }

  PagedSpec spec_;
  std::map<int, Sequence> sequences_;
  // The rows of the last token of each prefix that was ever committed. Those
  // of the same tokens are taken to be the same.
  std::map<Name, Rows> committed_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_PAGED_LEDGER_H_
