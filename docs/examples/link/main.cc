// Two chats share a prompt of three tokens. Each adds one token of its own, and
// the mask says which cells these two tokens may attend to.

#include <kvtwin/cache.h>
#include <kvtwin/rows.h>

#include <cstdint>
#include <cstdio>
#include <vector>

using namespace kvtwin;

constexpr int kLayers = 2, kHeadDim = 64, kKvHeads = 4;

// One forward pass. A model computes the rows of each layer from the tokens.
Status Forward(Cache& cache, const std::vector<std::int32_t>& positions,
               const std::vector<int>& sequences) {
  const auto tokens = static_cast<std::int64_t>(positions.size());
  const std::vector<float> numbers(kHeadDim * kKvHeads * positions.size(), 1);
  const TensorView rows =
      DenseView(numbers.data(), DType::kF32, {kHeadDim, kKvHeads, tokens, 1});
  Status status = cache.StartForward({positions, sequences}, false);
  for (int layer = 0; layer < kLayers && status.ok(); ++layer) {
    status = cache.SetLayer(layer);
    if (status.ok()) status = cache.Put(/*key=*/rows, /*value=*/rows);
  }
  return status;
}

int main() {
  auto made = MakeCache({.kind = Kind::kCausal});
  if (!made.ok()) return 1;
  Cache& cache = **made;
  Status status = cache.Init({.dtype = DType::kF16,
                              .max_sequences = 2,
                              .capacity = 1024,
                              .max_batch = 512});
  // The prompt is sequence 0; sequence 1 shares its cells.
  if (status.ok()) status = Forward(cache, {0, 1, 2}, {0, 0, 0});
  if (status.ok()) status = cache.CopyPrefix(/*src=*/0, /*dst=*/1, /*len=*/3);
  if (status.ok()) status = Forward(cache, {3, 3}, {0, 1});
  const Result<KvView> view = cache.Get();  // K, V and mask of the last layer.
  if (!status.ok() || !view.ok()) return 1;

  for (int row = 0; row < 2; ++row) {
    std::printf("sequence %d attends to cells", row);
    for (std::int64_t i = 0; i < view->mask.shape[0]; ++i) {
      if (MayAttend(view->mask, i, row)) {
        std::printf(" %d", view->first_cell + static_cast<int>(i));
      }
    }
    std::printf("\n");
  }
}
