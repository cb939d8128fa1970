#include "core/draft_book.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>

#include "core/guarded_cache.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

std::string DraftText(int number) {
  return number < 0 ? "the committed tokens" : fmt::format("draft {}", number);
}

// Checks the parents by themselves (D1).
Status CheckParents(const Batch& batch) {
  const std::size_t tokens = batch.positions.size();
  if (batch.parents.empty()) return {};
  if (batch.parents.size() != tokens) {
    return Invalid("the batch has {} positions and {} parents", tokens,
                   batch.parents.size());
  }
  std::set<int> drafted;
  for (std::size_t i = 0; i < tokens; ++i) {
    if (batch.parents[i] < kNotADraft) {
      return Invalid("the parent of token {} is {}, it must be at least {}", i,
                     batch.parents[i], kNotADraft);
    }
    if (batch.parents[i] != kNotADraft) drafted.insert(batch.sequences[i]);
  }
  for (std::size_t i = 0; i < tokens; ++i) {
    if (batch.parents[i] != kNotADraft) continue;
    if (!drafted.contains(batch.sequences[i])) continue;
    return Invalid(
        "token {} of the batch is not a draft, others of sequence {} "
        "are",
        i, batch.sequences[i]);
  }
  return {};
}

}  // namespace

bool HasDrafts(const Batch& batch) {
  return std::ranges::any_of(batch.parents,
                             [](int parent) { return parent != kNotADraft; });
}

bool DraftBook::IsDraft(int seq, std::int32_t position) const {
  const auto found = by_sequence_.find(seq);
  return found != by_sequence_.end() &&
         position >= found->second.front().position;
}

Status DraftBook::CheckBatch(
    const Batch& batch,
    const std::function<std::int64_t(int)>& last_position) const {
  if (Status status = CheckParents(batch); !status.ok()) return status;
  std::map<int, std::vector<Draft>> added;
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const int seq = batch.sequences[i];
    const int parent = ParentOf(batch, i);
    const auto found = by_sequence_.find(seq);
    const int stored = found == by_sequence_.end() ? 0 : Size(found->second);
    if (parent == kNotADraft) {
      if (stored == 0) continue;
      return Untimely("sequence {} has {} drafts: commit first", seq, stored);
    }
    std::vector<Draft>& here = added[seq];
    const int drafts = stored + Size(here);
    if (parent >= drafts) {
      return Invalid(
          "token {} of the batch follows draft {}, sequence {} has "
          "{} drafts before it",
          i, parent, seq, drafts);
    }
    const auto at = [&](int number) {
      return std::int64_t{number < stored ? At(found->second, number).position
                                          : At(here, number - stored).position};
    };
    // Without committed tokens, the first draft chooses the position.
    const std::int64_t last = drafts > 0 ? at(0) - 1 : last_position(seq);
    const std::int64_t before = parent >= 0 ? at(parent) : last;
    const bool free = parent < 0 && before < 0 && drafts == 0;
    if (!free && batch.positions[i] != before + 1) {
      return Invalid(
          "token {} of the batch is at position {} and follows {} of "
          "sequence {}: its position must be {}",
          i, batch.positions[i], DraftText(parent), seq, before + 1);
    }
    here.push_back({batch.positions[i], parent});
  }
  return {};
}

Status DraftBook::CheckPath(int seq, std::span<const int> path) const {
  const auto found = by_sequence_.find(seq);
  const int drafts = found == by_sequence_.end() ? 0 : Size(found->second);
  int before = kCommitted;
  for (const int number : path) {
    if (number < 0 || number >= drafts) {
      return Invalid("the path has draft {}, sequence {} has {} drafts", number,
                     seq, drafts);
    }
    const int parent = At(found->second, number).parent;
    if (parent != before) {
      return Invalid(
          "the path has draft {} of sequence {} after {}, it follows "
          "{}",
          number, seq, DraftText(before), DraftText(parent));
    }
    before = number;
  }
  return {};
}

void DraftBook::Add(const Batch& batch, std::vector<BatchToken>& tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (batch.parents[i] == kNotADraft) continue;
    std::vector<Draft>& drafts = by_sequence_[tokens[i].sequence];
    tokens[i].draft = Size(drafts);
    tokens[i].parent = batch.parents[i];
    drafts.push_back({tokens[i].position, tokens[i].parent});
  }
}

void DraftBook::TakeBack(const std::vector<BatchToken>& tokens) {
  for (const BatchToken& token : tokens) {
    if (token.draft < 0) continue;
    const auto found = by_sequence_.find(token.sequence);
    if (found == by_sequence_.end()) continue;
    found->second.pop_back();
    if (found->second.empty()) by_sequence_.erase(found);
  }
}

}  // namespace kvtwin
