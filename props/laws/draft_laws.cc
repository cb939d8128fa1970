// The laws of drafts. Their client knows the tokens of each sequence by their
// numbers, which are their V rows, and nothing of cells. It plays the batches
// of any history, each with drafts before it.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/laws/alike.h"
#include "props/laws/session.h"

namespace kvtwin::props {
namespace {

// The numbers of the tokens that each row sees, sorted: of each layer, one row
// after another.
using Sights = std::vector<std::vector<float>>;

class DraftClient {
 public:
  // Null if the subject has no such cache, or it takes no drafts.
  static std::unique_ptr<DraftClient> Make(const History& history,
                                           const Subject& subject);

  int sequences() const { return setup_.init.max_sequences; }
  std::int32_t Length(int seq) { return lengths_[seq]; }
  // The tokens that the next batch of a sequence has room for.
  int Room(int seq) {
    return std::min(setup_.init.max_batch, setup_.init.capacity - Length(seq));
  }

  Sights Append(int seq, const std::vector<float>& tokens) {
    std::vector<std::int32_t> positions;
    for (int i = 0; i < Size(tokens); ++i) {
      positions.push_back(Length(seq) + i);
    }
    lengths_[seq] += Size(tokens);
    return Start(seq, positions, tokens, {});
  }

  // Makes a batch of drafts of a sequence without drafts.
  Sights Draft(int seq, const std::vector<float>& tokens,
               const std::vector<int>& parents) {
    std::vector<std::int32_t> positions;
    for (const int parent : parents) {
      positions.push_back(parent < 0 ? Length(seq) : At(positions, parent) + 1);
    }
    return Start(seq, positions, tokens, parents);
  }

  void Commit(int seq, const std::vector<int>& path) {
    Allow(cache_->Commit(seq, path));
    lengths_[seq] += Size(path);
  }

  void Clear(int seq) {
    if (!can_.Can(KVTWIN_CAN_REMOVE_TAIL)) throw NotJudged();
    Allow(cache_->Remove(seq, 0, kOpenEnd));
    lengths_[seq] = 0;
  }
  void Copy(int src, int dst) {
    if (!can_.Can(KVTWIN_CAN_COPY_PREFIX) || src == dst) return;
    Allow(cache_->CopyPrefix(src, dst, Length(src)));
    lengths_[dst] = Length(src);
  }

 private:
  DraftClient(std::unique_ptr<Cache> cache, const Setup& setup,
              const Abilities& can)
      : cache_(std::move(cache)), setup_(setup), can_(can) {}

  // A call that a right cache takes; a cache without drafts is not judged.
  static void Allow(const Status& status) {
    if (status.ok()) return;
    if (status.code() == StatusCode::kNotSupported) throw NotJudged();
    throw Failure{.text = status.ToString()};
  }
  Sights Start(int seq, const std::vector<std::int32_t>& positions,
               const std::vector<float>& tokens,
               const std::vector<int>& parents);
  void Look(int layer, std::int64_t rows, Sights& sights);

  std::unique_ptr<Cache> cache_;
  const Setup setup_;
  const Abilities can_;
  std::map<int, std::int32_t> lengths_;
};

std::unique_ptr<DraftClient> DraftClient::Make(const History& history,
                                               const Subject& subject) {
  Setup setup = history.setup;
  std::erase_if(setup.spec.caches, [](const CacheSpec& part) {
    return part.kind == Kind::kEncoder;
  });
  const bool none = IsWrapper(setup.spec.kind) && setup.spec.caches.empty();
  if (setup.spec.kind == Kind::kEncoder || none) return nullptr;
  setup.layers = std::max(setup.layers, Size(setup.spec.caches));
  setup.init.dtype = DType::kF32;
  setup.config = CacheConfig();
  setup.first_id = 0;
  setup.id_step = 1;
  for (int* size : {&setup.init.max_sequences, &setup.init.capacity,
                    &setup.init.max_batch}) {
    *size = std::clamp(*size, 1, 16);
  }
  if (!subject.is_twin() && !subject.abilities.Fits(setup)) return nullptr;
  Result<std::unique_ptr<Cache>> cache = subject.Make(setup);
  if (!cache.ok() || !(*cache)->SetConfig(setup.config).ok() ||
      !(*cache)->Init(setup.init).ok()) {
    return nullptr;
  }
  return std::unique_ptr<DraftClient>(
      new DraftClient(std::move(*cache), setup, subject.abilities));
}

Sights DraftClient::Start(int seq, const std::vector<std::int32_t>& positions,
                          const std::vector<float>& tokens,
                          const std::vector<int>& parents) {
  const std::vector<int> sequences(positions.size(), seq);
  Allow(cache_->StartForward({positions, sequences, {}, parents}, false));
  const auto rows = std::ssize(tokens);
  const int types = std::max(Size(setup_.spec.caches), 1);
  Sights sights;
  for (int layer = 0; layer < setup_.layers; ++layer) {
    if (types > 1) Allow(cache_->SetLayerType(layer % types));
    Allow(cache_->SetLayer(layer));
    const auto tensor = [&](int dim) {
      DenseTensor made =
          FilledTensor(DType::kF32, {dim, setup_.rows.kv_heads, rows, 1}, 0);
      const std::size_t row = made.bytes.size() / tokens.size();
      for (std::size_t at = 0; at < made.bytes.size(); at += sizeof(float)) {
        StoreElement(tokens[at / row], &made.bytes[at], DType::kF32);
      }
      return made;
    };
    const DenseTensor key = tensor(setup_.rows.k_head_dim);
    const DenseTensor value = tensor(setup_.rows.v_head_dim);
    Allow(cache_->Put(key.view(), value.view()));
    Look(layer, rows, sights);
  }
  return sights;
}

void DraftClient::Look(int layer, std::int64_t rows, Sights& sights) {
  const Result<KvView> view = cache_->Get();
  Allow(view.status());
  if (view->mask.shape[1] < rows) {
    throw Failure{
        .text = fmt::format("layer {}: the mask has {} rows for {} tokens",
                            layer, view->mask.shape[1], rows)};
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<float>& seen = sights.emplace_back();
    for (std::int64_t column = 0; column < view->mask.shape[0]; ++column) {
      if (!MaskAllows(view->mask, column, row)) continue;
      seen.push_back(
          static_cast<float>(LoadFrom(view->value, 0, 0, column, 0)));
    }
    std::ranges::sort(seen);
  }
}

// Drafts, and the batch of ordinary tokens that a history has there.
struct Round {
  int seq = 0;
  std::vector<int> parents = {};
  std::vector<float> drafts = {};
  std::vector<int> path = {};  // Drafts, each one following the one before it.
  std::vector<float> tokens = {};
};

std::vector<int> PathTo(const std::vector<int>& parents, int draft) {
  std::vector<int> path;
  for (; draft >= 0; draft = At(parents, draft)) path.push_back(draft);
  std::ranges::reverse(path);
  return path;
}

std::vector<float> Numbers(const std::vector<float>& drafts,
                           const std::vector<int>& path) {
  std::vector<float> numbers;
  for (const int draft : path) numbers.push_back(At(drafts, draft));
  return numbers;
}

// Calls `play` with the rounds of a history, and makes its other calls on all
// clients. The clients have the same lengths, and drafts are always committed.
template <class Play>
LawResult PlayRounds(const History& history, const Subject& subject,
                     const std::vector<DraftClient*>& clients,
                     const Play& play) {
  LawResult result;
  float number = 0;
  int salt = 0;
  const bool trees = subject.abilities.Can(KVTWIN_CAN_DRAFT_TREES);
  const auto some = [&](int count) {
    std::vector<float> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(++number);
    return numbers;
  };
  DraftClient& first = *clients.front();
  for (const Op& op : history.ops) {
    if (op.kind == OpKind::kCopy) {
      for (DraftClient* client : clients) {
        client->Copy(op.seq % first.sequences(), op.dst % first.sequences());
      }
    }
    if (op.kind != OpKind::kPut) continue;
    for (const Segment& segment : op.segments) {
      Round round{.seq = segment.seq % first.sequences()};
      if (first.Room(round.seq) < 1) {
        for (DraftClient* client : clients) client->Clear(round.seq);
      }
      const int count = std::clamp(segment.count, 1, first.Room(round.seq));
      for (int i = 0; i < count; ++i) {
        // A tree of any shape.
        const int parent = trees ? (i * 5 + ++salt * 3) % (i + 1) - 1 : i - 1;
        round.parents.push_back(parent);
      }
      round.drafts = some(count);
      round.path = PathTo(round.parents, ++salt % count);
      round.tokens = some(count);
      if (auto wrong = play(round)) {
        return Violation(
            fmt::format("sequence {}, drafts with parents [{}]: {}", round.seq,
                        fmt::join(round.parents, " "), *wrong));
      }
      ++result.judged;
    }
  }
  return result;
}

std::optional<std::string> Unlike(const Sights& left, const Sights& right,
                                  std::string_view what) {
  if (left == right) return std::nullopt;
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    if (left[i] == right[i]) continue;
    return fmt::format("row {} sees the tokens [{}], {} [{}]", i,
                       fmt::join(left[i], " "), what, fmt::join(right[i], " "));
  }
  return "there are more rows";
}

// Plays the rounds of a history to two clients.
using JudgeRound = std::function<std::optional<std::string>(
    DraftClient& left, DraftClient& right, const Round& round)>;
LawResult PlayPair(const History& history, const Subject& subject,
                   const JudgeRound& judge) {
  const auto left = DraftClient::Make(history, subject);
  const auto right = DraftClient::Make(history, subject);
  if (left == nullptr || right == nullptr) return {};
  return PlayRounds(
      history, subject, {left.get(), right.get()},
      [&](const Round& round) { return judge(*left, *right, round); });
}

LawResult RejectIsNever(const History& history, const Subject& subject) {
  return PlayPair(
      history, subject,
      [](DraftClient& left, DraftClient& right, const Round& round) {
        left.Draft(round.seq, round.drafts, round.parents);
        left.Commit(round.seq, {});
        return Unlike(left.Append(round.seq, round.tokens),
                      right.Append(round.seq, round.tokens),
                      "without the rejected drafts");
      });
}

LawResult PathIsTokens(const History& history, const Subject& subject) {
  return PlayPair(history, subject,
                  [](DraftClient& left, DraftClient& right,
                     const Round& round) -> std::optional<std::string> {
                    left.Draft(round.seq, round.drafts, round.parents);
                    left.Commit(round.seq, round.path);
                    right.Append(round.seq, Numbers(round.drafts, round.path));
                    std::vector<float> tokens = round.tokens;
                    const int room = left.Room(round.seq);
                    if (room < Size(tokens))
                      tokens.resize(AsSize(std::max(room, 0)));
                    if (tokens.empty()) return std::nullopt;
                    return Unlike(left.Append(round.seq, tokens),
                                  right.Append(round.seq, tokens),
                                  "after ordinary tokens in place of the path");
                  });
}

LawResult TreeIsChains(const History& history, const Subject& subject) {
  return PlayPair(
      history, subject,
      [](DraftClient& left, DraftClient& right,
         const Round& round) -> std::optional<std::string> {
        const Sights tree = left.Draft(round.seq, round.drafts, round.parents);
        const std::size_t layers = tree.size() / round.drafts.size();
        for (int i = 0; i < Size(round.drafts); ++i) {
          const std::vector<int> path = PathTo(round.parents, i);
          std::vector<int> chain;
          for (int j = 0; j < Size(path); ++j) chain.push_back(j - 1);
          const Sights alone =
              right.Draft(round.seq, Numbers(round.drafts, path), chain);
          right.Commit(round.seq, {});
          for (std::size_t layer = 0; layer < layers; ++layer) {
            const auto row = layer * round.drafts.size() + AsSize(i);
            if (auto wrong =
                    Unlike({tree[row]}, {alone[(layer + 1) * path.size() - 1]},
                           "in a chain of its own")) {
              return fmt::format("draft {}: {}", i, *wrong);
            }
          }
        }
        left.Commit(round.seq, {});
        return Unlike(left.Append(round.seq, round.tokens),
                      right.Append(round.seq, round.tokens), "after chains");
      });
}

LawResult DraftsAreHidden(const History& history, const Subject& subject) {
  const auto client = DraftClient::Make(history, subject);
  if (client == nullptr) return {};
  const auto sees = [](const Sights& sights, std::size_t row, float number) {
    return std::ranges::count(sights[row], number) > 0;
  };
  return PlayRounds(
      history, subject, {client.get()},
      [&](const Round& round) -> std::optional<std::string> {
        const int count = Size(round.drafts);
        const Sights tree =
            client->Draft(round.seq, round.drafts, round.parents);
        for (std::size_t row = 0; row < tree.size(); ++row) {
          const int draft = AsInt(row) % count;
          const std::vector<int> path = PathTo(round.parents, draft);
          for (int other = 0; other < count; ++other) {
            if (std::ranges::count(path, other) > 0) continue;
            if (!sees(tree, row, At(round.drafts, other))) continue;
            return fmt::format("draft {} sees draft {}", draft, other);
          }
        }
        client->Commit(round.seq, round.path);
        if (client->Room(round.seq) < 1) return std::nullopt;
        const Sights next = client->Append(round.seq, {round.tokens.front()});
        for (std::size_t row = 0; row < next.size(); ++row) {
          for (int draft = 0; draft < count; ++draft) {
            if (std::ranges::count(round.path, draft) > 0) continue;
            if (!sees(next, row, At(round.drafts, draft))) continue;
            return fmt::format("the next token sees draft {}, rejected", draft);
          }
        }
        return std::nullopt;
      });
}

}  // namespace

std::vector<Law> DraftLaws() {
  return {
      {"reject_is_never",
       "A sequence whose drafts were all rejected shows the same as one that "
       "never had drafts.",
       "D3, D5", RejectIsNever, kNeedsDrafts},
      {"path_is_tokens",
       "A committed path of drafts shows the same as ordinary tokens in its "
       "place.",
       "D1, D5", PathIsTokens, kNeedsDrafts},
      {"tree_is_chains",
       "Each draft of a tree sees what it sees in a chain of its own.",
       "D2, D3", TreeIsChains, kNeedsDrafts | kNeedsTrees},
      {"drafts_are_hidden",
       "No draft sees a draft that it does not follow, and no token sees a "
       "rejected draft.",
       "D2, D5", DraftsAreHidden, kNeedsDrafts},
  };
}

}  // namespace kvtwin::props
