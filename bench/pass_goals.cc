// The goal of the metadata of a pass: the time of sessions, cache and plan for
// a pass of 16 slots, by the time of the attention of all layers of
// SmolLM2-135M (9 query heads on 3 KV heads of 64 elements, 30 layers).

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"
#include "kvtwin/attention.h"
#include "kvtwin/sessions.h"

namespace kvtwin::bench {
namespace {

constexpr int kSmolLayers = 30;
constexpr int kSmolHeads = 9;
constexpr int kSmolKvHeads = 3;
constexpr int kSmolHeadDim = 64;
constexpr int kPassSlots = 16;

// A server that decodes, all slots full but for `kSpare` tokens. It has the
// rows of one layer, which attention reads once for each layer: they are larger
// than the processor's caches.
class Decoding {
 public:
  Decoding(int context, DType dtype)
      : spec_({.slots = kPassSlots, .context = context, .batch = 512}),
        cache_(Must(MakeCache({}))),
        sessions_(Must(MakeSessions(*cache_, spec_))),
        attention_(Must(MakeAttention())),
        out_(AsSize(kSmolHeadDim * kSmolHeads * kPassSlots)) {
    Must(cache_->SetConfig({.mask_dtype = DType::kBits}));
    Must(cache_->Init(InitOf(spec_, dtype)));
    for (int slot = 0; slot < kPassSlots; ++slot) {
      std::vector<SessionInput> prompt(AsSize(context - kSpare));
      for (SessionInput& input : prompt) input.token = slot;
      (void)Must(sessions_->Submit(prompt));
    }
    // Slots whose prompt is computed wait for the others.
    while (Size(unsampled_) < kPassSlots) {
      Plan();
      PutRows();
    }
    query_ = Numbers(kSmolHeads * kPassSlots);
    Pass();
  }

  // The sampled tokens, the batch, its cells, the mask and the plan.
  double TimeMetadata() {
    const double time = Time([&] { Pass(); });
    PutRows();
    return time;
  }

  double TimeAttention() {
    const TensorView query = DenseView(
        query_.data(), DType::kF32, {kSmolHeadDim, kSmolHeads, kPassSlots, 1});
    return Time([&] {
      for (int layer = 0; layer < kSmolLayers; ++layer) {
        Must(attention_->Attend(query, view_, VLayout::kPlain,
                                {.scale = 1 / std::sqrt(float{kSmolHeadDim})},
                                {.out = out_.data()}));
      }
    });
  }

  // Each row sees its own tokens, and as many cells.
  void Check(const std::string& name) const {
    Must(CheckSessions(*sessions_, *cache_));
    for (int row = 0; row < kPassSlots; ++row) {
      std::int32_t seen = 0;
      for (std::int64_t cell = 0; cell < view_.mask.shape[0]; ++cell) {
        seen += Visible(view_.mask, row, cell) ? 1 : 0;
      }
      if (seen != At(batch_.positions, row) + 1) {
        Wrong(name, fmt::format("row {} sees {} cells", row, seen));
      }
    }
  }

 private:
  // Tokens of an answer that are still to come: more than passes of a run.
  static constexpr int kSpare = 128;

  std::vector<float> Numbers(std::int64_t rows) {
    std::vector<float> numbers(AsSize(rows * kSmolHeadDim));
    std::uniform_real_distribution<float> any(-1, 1);
    for (float& number : numbers) number = any(random_);
    return numbers;
  }

  void PutRows() {
    const std::int64_t tokens = std::ssize(batch_.inputs);
    const std::vector<float> numbers = Numbers(kSmolKvHeads * tokens);
    const TensorView rows = DenseView(numbers.data(), DType::kF32,
                                      {kSmolHeadDim, kSmolKvHeads, tokens, 1});
    Must(cache_->Put(rows, rows));
  }

  void Plan() {
    batch_ = Must(sessions_->NextBatch());
    for (const int output : batch_.outputs) {
      unsampled_.push_back(At(batch_.requests, output));
    }
  }

  void Pass() {
    for (const int request : std::exchange(unsampled_, {})) {
      (void)Must(sessions_->Sampled(request, 1));
    }
    Plan();
    view_ = Must(cache_->Get());
    Must(attention_->Plan(view_.mask, Size(batch_.inputs)));
  }

  SessionsSpec spec_;
  std::mt19937 random_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Sessions> sessions_;
  std::unique_ptr<Attention> attention_;
  SessionBatch batch_;
  std::vector<int> unsampled_;  // Requests.
  KvView view_;
  std::vector<float> query_;
  std::vector<float> out_;
};

}  // namespace

void PassGoals(Goals& goals) {
  for (const int context : {goals.Cells(1 << 12), goals.Cells(1 << 13)}) {
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      for (const int threads : ThreadCounts()) {
        const std::string name = fmt::format(
            "metadata of a pass, 16 slots of {} {} / attention of 30 layers, "
            "{}",
            SizeName(context), DTypeName(dtype), ThreadsName(threads));
        if (!goals.Wanted(name)) continue;
        UseThreads(threads);
        Decoding server(context, dtype);
        server.Check(name);
        goals.Judge(
            name, 0.01, [&] { return server.TimeMetadata(); },
            {[&] { return server.TimeAttention(); }}, 7);
      }
    }
  }
}

}  // namespace kvtwin::bench
