// The ids of tokens, as far as they are known: the prompts of sequences, and
// the rows that were computed for their prefixes (F1 to F5 of
// docs/semantics.md).

#ifndef KVTWIN_REFERENCE_PREFIX_BOOK_H_
#define KVTWIN_REFERENCE_PREFIX_BOOK_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/guarded_cache.h"
#include "core/index.h"

namespace kvtwin::reference {

class PrefixBook {
 public:
  // Gives `seq` a prompt (F1).
  void Begin(int seq, std::span<const std::int32_t> ids) {
    std::vector<int>& prompt = prompts_[seq];
    prompt.clear();
    int prefix = 0;
    for (const std::int32_t id : ids) {
      prefix =
          numbers_.try_emplace({prefix, id}, Size(numbers_) + 1).first->second;
      prompt.push_back(prefix);
    }
    found_.erase(seq);
  }
  bool empty() const { return prompts_.empty(); }
  std::int64_t prefixes() const { return std::ssize(numbers_); }

  // The number of the prefix that ends with this position of `seq`: equal
  // prefixes have equal numbers. 0: the ids are unknown.
  int PrefixAt(int seq, std::int64_t position) const {
    const auto prompt = prompts_.find(seq);
    if (prompt == prompts_.end()) return 0;
    if (position >= std::ssize(prompt->second)) return 0;
    return At(prompt->second, position);
  }

  // Forgets the ids of `seq` from `position` on (F2).
  void Cut(int seq, std::int64_t position) {
    const auto prompt = prompts_.find(seq);
    if (prompt == prompts_.end() || position >= std::ssize(prompt->second)) {
      return;
    }
    prompt->second.resize(AsSize(position));
    if (position == 0) End(seq);
  }
  void End(int seq) {
    prompts_.erase(seq);
    found_.erase(seq);
  }
  // Gives `dst` the ids of the first `length` tokens of `src` (F2).
  void Copy(int src, int dst, std::int64_t length) {
    const auto prompt = prompts_.find(src);
    if (prompt == prompts_.end()) return End(dst);
    const std::vector<int> ids = prompt->second;
    const std::int32_t found = FoundLength(src);
    prompts_[dst] = ids;
    found_[dst] = found;
    Cut(dst, length);
  }

  // The length with which the prompt of `seq` began, 0 without one.
  std::int32_t FoundLength(int seq) const {
    const auto found = found_.find(seq);
    return found == found_.end() ? 0 : found->second;
  }
  void Found(int seq, std::int32_t length) { found_[seq] = length; }

  // Declares how many layers a cache has at least; Put may show more.
  void Need(std::size_t cache, std::size_t layers) { least_[cache] = layers; }
  void Put(std::size_t cache, int layer, int prefix, KvRows rows) {
    layers_[cache].insert(layer);
    rows_[{cache, prefix}].insert_or_assign(layer, std::move(rows));
  }
  // The rows of the last token of a prefix, by layer; null unless they were put
  // into all layers of the cache (F3). A cache may have no layers.
  const std::map<int, KvRows>* Computed(std::size_t cache, int prefix) const {
    static const std::map<int, KvRows> none;
    const auto put = layers_.find(cache);
    const auto least = least_.find(cache);
    const std::size_t layers =
        std::max(put == layers_.end() ? 0 : put->second.size(),
                 least == least_.end() ? 0 : least->second);
    if (layers == 0) return &none;
    const auto rows = rows_.find({cache, prefix});
    if (rows == rows_.end()) return nullptr;
    return rows->second.size() == layers ? &rows->second : nullptr;
  }
  // Whether the last token of a prefix was put into some layer of the cache.
  bool IsBegun(std::size_t cache, int prefix) const {
    return rows_.contains({cache, prefix});
  }

 private:
  // The number of a prefix, by the prefix before its last id; from 1 on.
  std::map<std::pair<int, std::int32_t>, int> numbers_;
  // By sequence: the prefix that ends with each token of the prompt.
  std::map<int, std::vector<int>> prompts_;
  std::map<int, std::int32_t> found_;
  std::map<std::size_t, std::set<int>> layers_;  // With a Put.
  std::map<std::size_t, std::size_t> least_;
  std::map<std::pair<std::size_t, int>, std::map<int, KvRows>> rows_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_PREFIX_BOOK_H_
