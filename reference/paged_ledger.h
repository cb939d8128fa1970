// The ledger of a paged pool: a model without blocks, which says which rows a
// sequence has. It does not know which prefixes are still stored: Open is told
// how many tokens the pool found, and the ledger knows their rows.

#ifndef KVTWIN_REFERENCE_PAGED_LEDGER_H_
#define KVTWIN_REFERENCE_PAGED_LEDGER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "core/dense_tensor.h"
#include "core/dialects/pool_rules.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "kvtwin/state.h"

namespace kvtwin::reference {

class PagedLedger {
 public:
  using Rows = std::vector<KvRows>;  // The rows of one token, by layer.

  explicit PagedLedger(const PagedSpec& spec, const PoolRules& rules = {})
      : spec_(Completed(spec)), rules_(rules) {}

  // Whether a pool may find this many tokens of the prompt: whole blocks
  // without its last token; or, if the pool computes the last token again, all
  // tokens of a prompt of whole blocks, or all except the last one.
  bool IsWhole(std::span<const std::int32_t> prompt, int taken) const {
    const std::int64_t all = std::ssize(prompt);
    if (taken % spec_.block_size == 0 && taken < all) return true;
    return rules_.recomputes_last && all % spec_.block_size == 0 &&
           (taken == all || taken == all - 1);
  }

  // Whether these first tokens of the prompt were committed under the key.
  bool WasCommitted(std::span<const std::int32_t> prompt, const PrefixKey& key,
                    int taken) const {
    // If the last token is computed again, it was committed, too.
    const bool whole = taken % spec_.block_size == 0;
    return FindPrefix(Find(starts_, {key.salt, key.extra}), prompt,
                      whole ? taken : taken + 1, key.media) != kUnknown;
  }

  // Whether a new sequence may begin with this many tokens of the prompt.
  bool MayOpen(std::span<const std::int32_t> prompt, const PrefixKey& key,
               int taken) const {
    if (taken == 0) return true;
    return IsWhole(prompt, taken) && taken <= spec_.max_seq_len &&
           WasCommitted(prompt, key, taken);
  }

  // Returns the line, an argument of Commit, where these first tokens of the
  // prompt were first committed with any media: under this key or, without it,
  // under any key.
  std::optional<std::int64_t> FirstCommit(
      std::span<const std::int32_t> prompt, int taken,
      const std::optional<PrefixKey>& key) const {
    if (!IsWhole(prompt, taken) || taken > spec_.max_seq_len) return {};
    std::set<int> prefixes;
    for (const auto& [other, start] : starts_) {
      const bool same = !key || other == std::pair(key->salt, key->extra);
      if (same) prefixes.insert(start);
    }
    // If the last token is computed again, it was committed, too.
    const int count = taken % spec_.block_size == 0 ? taken : taken + 1;
    for (int i = 0; i < count; ++i) {
      std::set<int> longer;
      for (const int prefix : prefixes) {
        const std::int32_t token = At(prompt, i);
        for (auto at = longer_.lower_bound({prefix, token, {}});
             at != longer_.end() && std::get<0>(at->first) == prefix &&
             std::get<1>(at->first) == token;
             ++at) {
          longer.insert(at->second);
        }
      }
      prefixes = std::move(longer);
    }
    std::optional<std::int64_t> first;
    for (const int prefix : prefixes) {
      const std::int64_t line = At(lines_, prefix);
      first = std::min(first.value_or(line), line);
    }
    return first;
  }

  // Requires: MayOpen is true.
  void Open(int sequence, std::span<const std::int32_t> prompt,
            const PrefixKey& key, int taken) {
    KVTWIN_DCHECK(MayOpen(prompt, key, taken));
    Sequence& opened = sequences_[sequence];
    opened.start = AddTo(starts_, {key.salt, key.extra});
    opened.media = key.media;
    opened.low = rules_.FirstSeen(taken);
    int prefix = opened.start;
    const auto all = Size(prompt);
    if (rules_.recomputes_last && all > 0 && taken >= all - 1) {
      const int last = FindPrefix(prefix, prompt, all, key.media);
      if (last != kUnknown) opened.again = {last, all - 1, prompt.back()};
    }
    for (int i = 0; i < taken; ++i) {
      prefix = longer_.at({prefix, At(prompt, i), MediaAt(opened.media, i)});
      opened.tokens.push_back({prefix, OfAllGroups(At(committed_, prefix))});
      held_ += HeldBy(opened.tokens.back());
    }
  }

  void AddMedia(int sequence, const PrefixMedia& media) {
    sequences_.at(sequence).media.push_back(media);
  }

  void Fork(int from, int sequence, int len) {
    const Sequence& source = sequences_.at(from);
    Sequence& forked = sequences_[sequence];
    forked.start = source.start;
    for (const PrefixMedia& media : source.media) {
      if (media.position < len) forked.media.push_back(media);
    }
    forked.low = std::min(std::max(source.low, rules_.FirstSeen(len)), len);
    forked.tokens.assign(source.tokens.begin(), source.tokens.begin() + len);
    for (const Token& token : forked.tokens) held_ += HeldBy(token);
  }

  void Append(int sequence, int layer, const TensorView& key,
              const TensorView& value) {
    Sequence& to = sequences_.at(sequence);
    std::vector<KvRows>& appended = to.appended[layer];
    appended.clear();
    appended.reserve(AsSize(key.shape[2]));
    const PagedSpec& spec = SpecOfLayer(spec_, layer);
    for (std::int64_t i = 0; i < key.shape[2]; ++i) {
      appended.push_back(
          {CopyOf(Slice(key, 2, i), spec.dtype),
           CopyOf(Slice(value, 2, i), spec.v_dtype.value_or(spec.dtype))});
    }
    if (!ComputesAgain(to) || appended.empty()) return;
    auto& again = again_[to.again->prefix][layer];
    again.push_back(appended[0]);
    most_commits_ = std::max(most_commits_, again.size());
  }

  // The token that the sequence computes again next; no value unless its prompt
  // was found up to the last token.
  std::optional<std::int32_t> NextAgain(int sequence) const {
    const Sequence& of = sequences_.at(sequence);
    if (!ComputesAgain(of)) return std::nullopt;
    return of.again->token;
  }

  // `tokens` are the ids of the new tokens; empty if they are unknown.
  void Commit(int sequence, int new_tokens,
              std::span<const std::int32_t> tokens, std::int64_t line = 0) {
    Sequence& to = sequences_.at(sequence);
    const int again = ComputesAgain(to) ? to.again->prefix : kUnknown;
    for (int i = 0; i < new_tokens; ++i) {
      Rows rows;
      rows.reserve(AsSize(spec_.layers));
      for (int layer = 0; layer < spec_.layers; ++layer) {
        rows.push_back(std::move(to.appended.at(layer).at(AsSize(i))));
      }
      int prefix = to.tokens.empty() ? to.start : to.tokens.back().prefix;
      if (tokens.empty()) prefix = i == 0 ? again : kUnknown;
      if (prefix != kUnknown && !tokens.empty()) {
        prefix = AddTo(longer_, {prefix, At(tokens, i),
                                 MediaAt(to.media, Size(to.tokens))});
      }
      to.tokens.push_back(
          {prefix, OfAllGroups({std::make_shared<Rows>(std::move(rows))})});
      held_ += HeldBy(to.tokens.back());
      if (prefix == kUnknown) continue;
      auto& committed = At(committed_, prefix);
      if (committed.empty()) At(lines_, prefix) = line;
      committed.push_back(to.tokens.back().rows[0][0]);
      most_commits_ = std::max(most_commits_, committed.size());
    }
    to.appended.clear();
    to.low = std::max(to.low, rules_.FirstSeen(SeqLen(sequence)));
    if (new_tokens > 0) to.again.reset();
    if (rules_.deduplicates) Deduplicate(to, SeqLen(sequence) - new_tokens);
  }

  void Truncate(int sequence, int len) {
    Sequence& of = sequences_.at(sequence);
    std::erase_if(of.media, [&](const PrefixMedia& media) {
      return media.position >= len && media.position < std::ssize(of.tokens);
    });
    while (std::ssize(of.tokens) > len) {
      held_ -= HeldBy(of.tokens.back());
      of.tokens.pop_back();
    }
    of.appended.clear();
    of.low = std::min(of.low, len);
    if (of.again && len < of.again->position) of.again.reset();
  }

  void Free(int sequence) {
    Truncate(sequence, 0);
    sequences_.erase(sequence);
  }

  bool Has(int sequence) const { return sequences_.contains(sequence); }
  std::vector<int> Sequences() const {
    std::vector<int> all;
    for (const auto& [sequence, of] : sequences_) all.push_back(sequence);
    return all;
  }
  int SeqLen(int sequence) const {
    return Size(sequences_.at(sequence).tokens);
  }
  // The first position whose rows a group must still have. For a group with
  // states, it is the position of the last state (P12, P13).
  int Low(int sequence, int group = 0) const {
    if (spec_.groups.empty()) return sequences_.at(sequence).low;
    const int len = SeqLen(sequence);
    const PagedSpec& spec = At(spec_.groups, group);
    if (spec.states) return std::max(0, len - 1);
    return spec.window ? std::max(0, len - *spec.window) : 0;
  }
  // The number of rows, including appended ones, of the layer that has the
  // most; of all layers, or of those of a group.
  int End(int sequence, std::optional<int> group = std::nullopt) const {
    std::size_t max = 0;
    for (const auto& [layer, rows] : sequences_.at(sequence).appended) {
      if (group && GroupAt(layer) != *group) continue;
      max = std::max(max, rows.size());
    }
    return SeqLen(sequence) + AsInt(max);
  }

  int RowCount(int sequence, int layer) const {
    const auto& appended = sequences_.at(sequence).appended;
    const auto rows = appended.find(layer);
    return SeqLen(sequence) + (rows == appended.end() ? 0 : Size(rows->second));
  }

  // Returns the rows of a layer from position `first` on, in order: the
  // committed rows, then the appended ones. If a token may have several rows,
  // returns the last of them.
  std::vector<KvRows> RowsOf(int sequence, int layer, int first = 0) const {
    const Sequence& of = sequences_.at(sequence);
    std::vector<KvRows> rows;
    for (int i = first; i < Size(of.tokens); ++i) {
      rows.push_back(At((*OfLayer(At(of.tokens, i), layer).back()), layer));
    }
    const auto appended = of.appended.find(layer);
    if (appended == of.appended.end()) return rows;
    const int skipped = std::max(first - Size(of.tokens), 0);
    rows.insert(rows.end(), IteratorAt(appended->second, skipped),
                appended->second.end());
    return rows;
  }

  // Whether the layer may have this row at `position`. If so, from now on it
  // must have this row there. If `value` is null, only K is compared. Requires:
  // position < RowCount.
  bool See(int sequence, int layer, int position, const TensorView& key,
           const TensorView* value) {
    KVTWIN_DCHECK(position < RowCount(sequence, layer));
    Sequence& of = sequences_.at(sequence);
    const auto at = AsSize(position);
    const auto is_seen = [&](const KvRows& row) {
      return SameRow(row.key, key) &&
             (value == nullptr || SameRow(row.value, *value));
    };
    const auto is_again = [&](int prefix) {
      const auto rows = again_.find(prefix);
      if (rows == again_.end()) return false;
      const auto of_layer = rows->second.find(layer);
      return of_layer != rows->second.end() &&
             std::ranges::any_of(of_layer->second, is_seen);
    };
    if (at >= of.tokens.size()) {
      return is_seen(of.appended.at(layer).at(at - of.tokens.size())) ||
             (at == of.tokens.size() && ComputesAgain(of) &&
              is_again(of.again->prefix));
    }
    Commits left;
    for (const auto& rows : OfLayer(of.tokens[at], layer)) {
      if (is_seen(At((*rows), layer))) {
        left.push_back(rows);
      }
    }
    if (left.empty()) return is_again(of.tokens[at].prefix);
    Narrow(of.tokens[at], GroupAt(layer), std::move(left));
    return true;
  }

  // The rows that a layer may have at `position`: several, if a prompt found
  // the token, and the same tokens were committed several times.
  std::vector<KvRows> Candidates(int sequence, int layer, int position) const {
    const Sequence& of = sequences_.at(sequence);
    const auto at = AsSize(position);
    if (at >= of.tokens.size()) {
      return {of.appended.at(layer).at(at - of.tokens.size())};
    }
    std::vector<KvRows> rows;
    for (const auto& row : OfLayer(of.tokens[at], layer)) {
      rows.push_back(At((*row), layer));
    }
    const auto again = again_.find(of.tokens[at].prefix);
    if (again == again_.end() || !again->second.contains(layer)) return rows;
    const auto& computed = again->second.at(layer);
    rows.insert(rows.end(), computed.begin(), computed.end());
    return rows;
  }

  // Whether the layer must have one row, and no other, at `position`.
  bool HasOneRow(int sequence, int layer, int position) const {
    const Sequence& of = sequences_.at(sequence);
    if (position < Low(sequence, GroupAt(layer))) return false;
    if (position == Size(of.tokens) && ComputesAgain(of)) return false;
    if (position >= Size(of.tokens)) return true;
    const Token& token = At(of.tokens, position);
    if (again_.contains(token.prefix)) return false;
    const Commits& rows = OfLayer(token, layer);
    return std::ranges::all_of(rows, [&](const auto& row) {
      return At(*row, layer) == At(*rows.front(), layer);
    });
  }

  // The first position that a token at `position` sees (P12, P19).
  int FirstSeenBy(int layer, int position) const {
    const std::optional<int> window = SpecOfLayer(spec_, layer).window;
    if (!window) return rules_.FirstSeen(position);
    return PoolRules{.window = window}.FirstSeen(position);
  }

  // Whether the two sequences have the same token at `position`: after the same
  // tokens under the same key, or by a fork.
  bool SameToken(int a, int b, int position) const {
    const int again = AgainAt(a, position);
    if (again != kUnknown && again == AgainAt(b, position)) return true;
    if (position >= std::min(SeqLen(a), SeqLen(b))) return false;
    const auto at = AsSize(position);
    return Same(sequences_.at(a).tokens[at], sequences_.at(b).tokens[at]);
  }

  // A sequence, and how many of its first tokens the sequence before it has.
  struct Ordered {
    int sequence = 0;
    int common = 0;
  };
  // Returns the sequences ordered by their committed tokens: no sequence has
  // more first tokens in common with another one than with a neighbor, and a
  // sequence comes after those that have only its first tokens.
  std::vector<Ordered> InOrder() const {
    std::vector<Ordered> order;
    for (const auto& [sequence, of] : sequences_) order.push_back({sequence});
    const auto tokens_of = [&](const Ordered& ordered) -> const auto& {
      return sequences_.at(ordered.sequence).tokens;
    };
    std::ranges::sort(order, [&](const Ordered& a, const Ordered& b) {
      const auto& ours = tokens_of(a);
      const auto& theirs = tokens_of(b);
      const auto at = AsSize(Common(ours, theirs));
      if (at == theirs.size() || at == ours.size()) {
        return ours.size() < theirs.size();
      }
      return std::tie(ours[at].prefix, ours[at].rows) <
             std::tie(theirs[at].prefix, theirs[at].rows);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
      order[i].common = Common(tokens_of(order[i - 1]), tokens_of(order[i]));
    }
    return order;
  }

  // Whether the two sequences may have the same rows of a group at `position`.
  // If so, they must keep the same rows there. Requires: SameToken is true.
  bool ShareRows(int a, int b, int position, int group = 0) {
    KVTWIN_DCHECK(SameToken(a, b, position));
    const auto at = AsSize(position);
    if (again_.contains(AgainAt(a, position))) return true;
    Token& token = sequences_.at(a).tokens[at];
    Token& other = sequences_.at(b).tokens[at];
    const Commits& ours = At(token.rows, group);
    const Commits& theirs = At(other.rows, group);
    if (ours == theirs) return true;
    Commits both;
    for (const auto& rows : ours) {
      const auto same = [&](const auto& others) {
        return rows == others || SameIn(group, *rows, *others);
      };
      if (std::ranges::any_of(theirs, same)) both.push_back(rows);
    }
    if (both.empty()) return false;
    Narrow(token, group, both);
    Narrow(other, group, std::move(both));
    return true;
  }

  // Whether a sequence was ever opened under this key. Keys are never dropped.
  bool KnowsKey(const PrefixKey& key) const {
    return starts_.contains({key.salt, key.extra});
  }

  // The number of tokens of all sequences, plus the rows that they may have.
  std::size_t Held() const { return held_; }
  // The largest number of commits of the same tokens.
  std::size_t MostCommits() const { return most_commits_; }

 private:
  // A prefix is a number: it stands for tokens from the start of a sequence,
  // under a key. kUnknown: some of the tokens are unknown.
  static constexpr int kUnknown = -1;

  using Commits = std::vector<std::shared_ptr<const Rows>>;
  struct Token {
    int prefix = kUnknown;  // The tokens up to and including this one.
    // By group, the rows that the token may have: several, if a prompt found it
    // and the same tokens were committed several times.
    std::vector<Commits> rows;
  };
  // The last token of a prompt, which was found and is computed again.
  struct Again {
    int prefix = kUnknown;
    int position = 0;
    std::int32_t token = 0;
  };
  struct Sequence {
    int start = kUnknown;  // The prefix before the first token.
    int low = 0;           // Rows of earlier positions may be gone.
    std::vector<PrefixMedia> media;
    std::optional<Again> again;
    std::vector<Token> tokens;
    std::map<int, std::vector<KvRows>> appended;  // By layer.
  };

  static bool Same(const Token& a, const Token& b) {
    return a.prefix == b.prefix && (a.prefix != kUnknown || a.rows == b.rows);
  }
  // Returns how many first tokens are the same. If tokens are the same, all
  // tokens before them are the same, too.
  static int Common(std::span<const Token> a, std::span<const Token> b) {
    std::size_t same = 0;
    std::size_t end = std::min(a.size(), b.size());
    while (same < end) {
      const std::size_t middle = same + (end - same) / 2;
      if (Same(a[middle], b[middle])) {
        same = middle + 1;
      } else {
        end = middle;
      }
    }
    return AsInt(same);
  }
  int FindPrefix(int start, std::span<const std::int32_t> tokens, int count,
                 std::span<const PrefixMedia> media) const {
    int prefix = start;
    for (int i = 0; i < count && prefix != kUnknown; ++i) {
      prefix = Find(longer_, {prefix, At(tokens, i), MediaAt(media, i)});
    }
    return prefix;
  }
  // The hashes of the media at a position.
  static std::vector<std::string> MediaAt(std::span<const PrefixMedia> media,
                                          int position) {
    std::vector<std::string> hashes;
    for (const PrefixMedia& one : media) {
      if (one.position == position) hashes.push_back(one.hash);
    }
    return hashes;
  }
  std::vector<Commits> OfAllGroups(const Commits& commits) const {
    const std::size_t groups = std::max<std::size_t>(1, spec_.groups.size());
    return std::vector<Commits>(groups, commits);
  }
  int GroupAt(int layer) const { return GroupOf(spec_, layer); }
  const Commits& OfLayer(const Token& token, int layer) const {
    return At(token.rows, GroupAt(layer));
  }
  // Whether two commits have the same rows in the layers of a group.
  bool SameIn(int group, const Rows& a, const Rows& b) const {
    for (int layer = 0; layer < spec_.layers; ++layer) {
      if (GroupAt(layer) == group && At(a, layer) != At(b, layer)) return false;
    }
    return true;
  }
  static bool ComputesAgain(const Sequence& of) {
    return of.again && std::ssize(of.tokens) == of.again->position;
  }
  // The prefix of the token at a position, also if it is being computed again.
  int AgainAt(int sequence, int position) const {
    const Sequence& of = sequences_.at(sequence);
    if (position < std::ssize(of.tokens)) {
      return At(of.tokens, position).prefix;
    }
    const bool next = position == std::ssize(of.tokens) && ComputesAgain(of);
    return next ? of.again->prefix : kUnknown;
  }
  // Lets each token of a whole block have any rows that it has in a whole block
  // of the same tokens. Blocks that end after position `before` are new.
  void Deduplicate(Sequence& of, int before) {
    const auto size = AsSize(spec_.block_size);
    for (std::size_t end = size; end <= of.tokens.size(); end += size) {
      const int prefix = of.tokens[end - 1].prefix;
      if (prefix == kUnknown) continue;
      auto& block = whole_[prefix];
      block.resize(size);
      for (std::size_t i = 0; i < size; ++i) {
        Token& token = of.tokens[end - size + i];
        if (AsInt(end) > before) {
          for (const auto& rows : token.rows[0]) {
            if (std::ranges::count(block[i], rows) == 0) {
              block[i].push_back(rows);
            }
          }
        }
        if (block[i].size() != token.rows[0].size()) {
          Narrow(token, 0, block[i]);
        }
      }
    }
  }
  static std::size_t HeldBy(const Token& token) {
    std::size_t held = 1;
    for (const Commits& rows : token.rows) held += rows.size();
    return held;
  }
  void Narrow(Token& token, int group, Commits rows) {
    held_ -= HeldBy(token);
    At(token.rows, group) = std::move(rows);
    held_ += HeldBy(token);
  }
  template <class Map>
  static int Find(const Map& map, const typename Map::key_type& key) {
    const auto found = map.find(key);
    return found == map.end() ? kUnknown : found->second;
  }
  template <class Map>
  int AddTo(Map& map, const typename Map::key_type& key) {
    const auto [at, added] = map.try_emplace(key, Size(committed_));
    if (added) {
      committed_.emplace_back();
      lines_.push_back(0);
    }
    return at->second;
  }
  static bool SameRow(const DenseTensor& row, const TensorView& shown) {
    const TensorView expected = row.view();
    const bool dense = shown.stride[0] == expected.stride[0] &&
                       shown.stride[1] == expected.stride[1];
    if (dense && shown.dtype == expected.dtype &&
        shown.shape == expected.shape) {
      return std::memcmp(expected.data, shown.data, row.bytes.size()) == 0;
    }
    return CopyOf(row.view(), shown.dtype).bytes ==
           CopyOf(shown, shown.dtype).bytes;
  }

  PagedSpec spec_;
  PoolRules rules_;
  std::map<int, Sequence> sequences_;
  std::map<std::pair<std::string, std::vector<std::string>>, int> starts_;
  // A prefix, a token more, and the media at its position.
  std::map<std::tuple<int, std::int32_t, std::vector<std::string>>, int>
      longer_;
  // By prefix: the rows of its last token, for each commit of it.
  std::vector<Commits> committed_;
  std::vector<std::int64_t> lines_;  // By prefix: the line of its first commit.
  // By the prefix of the last token of a block: the rows that the tokens of the
  // block may have, if commits swap blocks.
  std::map<int, std::vector<Commits>> whole_;
  // By the prefix of a token that is computed again, and by layer: its rows.
  std::map<int, std::map<int, std::vector<KvRows>>> again_;
  std::size_t held_ = 0;
  std::size_t most_commits_ = 0;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_PAGED_LEDGER_H_
