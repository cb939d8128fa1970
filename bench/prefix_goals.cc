// Looks up prompts in a pool with three groups: full attention, a window, and
// states. The limits are a fixed time and a comparison of the prompt's tokens
// with three copies of them.

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"
#include "kvtwin/paged.h"

namespace kvtwin::bench {
namespace {

constexpr int kBlock = 16;
constexpr int kShared = 1024;  // Tokens that all prompts begin with.
constexpr int kTried = 16;     // Prompts that are looked up in turn.

// The pool has the tokens of many prompts, which no sequence holds any more.
class Prefixes {
 public:
  Prefixes(int blocks, int length)
      : length_(length), rows_(AsSize(length), 1), pool_(Make(blocks)) {
    const int prompts = blocks / (length / kBlock);
    for (int i = 0; i < prompts; ++i) {
      const std::vector<std::int32_t> prompt = Prompt(i);
      const int sequence = *pool_->Open(prompt);
      const int found = *pool_->SeqLen(sequence);
      const TensorView rows =
          DenseView(rows_.data(), DType::kF32, {1, 1, length - found, 1});
      for (int layer = 0; layer < 3; ++layer) {
        Must(pool_->Append(sequence, layer, rows, rows).status());
      }
      Must(pool_->Commit(sequence, std::span(prompt).subspan(
                                       AsSize(found), AsSize(length - found))));
      Must(pool_->Free(sequence));
      // The latest kTried prompts.
      if (i >= prompts - kTried) prompts_.push_back(prompt);
    }
    for (auto& copies : copies_) copies = prompts_;
  }

  void Check(const std::string& name) const {
    for (const auto& prompt : prompts_) {
      if (*pool_->Find(prompt) != length_) Wrong(name, "a prompt is not found");
    }
    const PagedUsage usage = pool_->Group(0)->Usage();
    if (usage.used != 0 || usage.cached < pool_->Group(0)->spec().blocks / 2) {
      Wrong(name, "the blocks are not cached");
    }
  }

  // Both are prompts. (More would take longer than a busy machine leaves a
  // program alone.)
  double TimeFind() {
    const auto& first = Next();
    const auto& second = Next();
    return Time([&] {
             KeepAlive(*pool_->Find(first));
             KeepAlive(*pool_->Find(second));
           }) /
           2;
  }
  // The next two begin with nothing in the processor's caches but the prompt.
  double TimeColdFind() {
    const std::vector<std::int32_t> prompt = Cold();
    return Time([&] { KeepAlive(*pool_->Find(prompt)); });
  }
  double TimeColdCompare() {
    const std::vector<std::int32_t> prompt = Cold();
    return Time([&] {
      for (const auto& copies : copies_) {
        KeepAlive(std::memcmp(prompt.data(), copies[next_].data(),
                              prompt.size() * sizeof(prompt[0])));
      }
    });
  }

 private:
  static std::unique_ptr<PagedPool> Make(int blocks) {
    PagedSpec all = {
        .block_size = kBlock, .blocks = blocks, .dtype = DType::kF8};
    PagedSpec window = all;
    window.window = 1024;
    PagedSpec states = all;
    states.block_size = 256;
    states.blocks = blocks / (states.block_size / kBlock);
    states.states = true;
    return Must(MakePagedPool(
        {.max_seq_len = 1 << 20, .groups = {all, window, states}}));
  }

  const std::vector<std::int32_t>& Next() {
    next_ = (next_ + 1) % prompts_.size();
    return prompts_[next_];
  }
  // Returns a new copy of the next prompt, after a walk through other memory.
  std::vector<std::int32_t> Cold() {
    for (std::size_t i = 0; i < other_.size(); i += 64) ++other_[i];
    KeepAlive(other_.data());
    return Next();
  }

  // With one token more than is stored.
  std::vector<std::int32_t> Prompt(int number) const {
    std::vector<std::int32_t> prompt;
    std::uint64_t state = AsSize(number) + 1;
    for (int i = 0; i <= length_; ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      prompt.push_back(i < kShared ? i
                                   : static_cast<std::int32_t>(state >> 40));
    }
    return prompt;
  }

  int length_;
  std::vector<float> rows_;
  std::unique_ptr<PagedPool> pool_;
  using Prompts = std::vector<std::vector<std::int32_t>>;
  Prompts prompts_;
  std::array<Prompts, 3> copies_;  // One for each group.
  std::size_t next_ = 0;
  std::vector<char> other_ = std::vector<char>(std::size_t{96} << 20);
};

}  // namespace

void PrefixGoals(Goals& goals) {
  const int blocks = goals.Cells(1 << 20);
  const int length = goals.Cells(1 << 15);
  const std::string name =
      fmt::format("find {} tokens in 3 groups of {} blocks", SizeName(length),
                  SizeName(blocks));
  const std::string in_turn = name + " / 50 us";
  const std::string cold = name + ", cold / compare";
  if (!goals.Wanted(in_turn) && !goals.Wanted(cold)) return;
  Prefixes prefixes(blocks, length);
  prefixes.Check(name);
  goals.Judge(in_turn, 1, [&] { return prefixes.TimeFind(); },
              {[] { return 50e3; }});
  goals.Judge(cold, 4, [&] { return prefixes.TimeColdFind(); },
              {[&] { return prefixes.TimeColdCompare(); }});
}

}  // namespace kvtwin::bench
