// One forward pass of two tokens through one layer.

#include <kvtwin/cache.h>

#include <cstdio>
#include <vector>

int main() {
  using namespace kvtwin;
  auto made = MakeCache({.kind = Kind::kCausal});
  if (!made.ok()) return 1;
  Cache& cache = **made;
  if (!cache.Init(DType::kF32, 1, 16, 4).ok()) return 1;

  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences = {0, 0};
  Status status = cache.StartForward({positions, sequences}, false);
  const std::vector<float> rows = {1, 2, 3, 4};  // Two heads of one element.
  const TensorView tokens = DenseView(rows.data(), DType::kF32, {1, 2, 2, 1});
  if (status.ok()) status = cache.Put(tokens, tokens);
  const Result<KvView> view = cache.Get();
  if (!status.ok() || !view.ok()) return 1;
  std::printf("%d tokens, K is %s\n", static_cast<int>(view->mask.shape[1]),
              ShapeText(view->key.shape).c_str());
}
