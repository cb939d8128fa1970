#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/save.h"
#include "props/fuzzers/fuzzers.h"

namespace kvtwin::props {
namespace {

CacheState DrawState(const Pick& pick) {
  CacheState state;
  const int tokens = pick(0, 3);
  for (int i = 0; i < tokens; ++i) state.cells.push_back({i, pick(0, 9), 0});
  for (int layer = pick(0, 2); layer > 0; --layer) {
    const auto draw = [&] {
      const DType dtype = kRowDTypes.at(AsSize(pick(0, 5)));
      const auto dim = IsBlockDType(dtype) ? kBlockElements : pick(1, 2);
      return FilledTensor(dtype, {dim, 1, tokens, 1},
                          static_cast<float>(pick(0, 9)));
    };
    const DenseTensor key = draw();
    state.layers[pick(0, 40)] = {key, draw()};
  }
  CacheState wrapper;
  for (int parts = pick(0, 9) - 7; parts > 0; --parts) {
    wrapper.caches.push_back(state);
  }
  return wrapper.caches.empty() ? state : wrapper;
}

std::string Judge(const std::vector<std::byte>& given) {
  const Result<CacheState> read = StateFromBytes(given);
  if (!read.ok()) {
    return read.status().message().empty() ? "refused without a reason" : "";
  }
  for (const int sequence : {0, 1}) {
    const CacheState state = SequenceOf(*read, sequence);
    const std::vector<int> cells(std::max<std::size_t>(1, state.caches.size()),
                                 kOpenEnd);
    (void)WithSequence(*read, kOpenEnd, state, cells);
  }
  return StateToBytes(*read) == given ? "" : "is not written as it was read";
}

}  // namespace

std::string FuzzState(Bytes bytes) {
  const auto raw = std::as_bytes(bytes);
  std::string wrong = Judge({raw.begin(), raw.end()});
  if (!wrong.empty()) return wrong;
  const Pick pick = PickFrom(bytes);
  const CacheState state = DrawState(pick);
  std::vector<std::byte> given = StateToBytes(state);
  const Result<CacheState> whole = StateFromBytes(given);
  if (!whole.ok() || *whole != state) return "does not read back";
  const std::vector<std::byte> before = given;
  for (int left = pick(0, 4); left > 0; --left) {
    const auto at = static_cast<std::ptrdiff_t>(pick(0, Size(given) - 1));
    const auto byte = static_cast<std::byte>(pick(0, 255));
    switch (pick(0, 3)) {
      case 0:
        given.insert(given.begin() + at, byte);
        break;
      case 1:
        if (given.size() > 1) given.erase(given.begin() + at);
        break;
      case 2:
        given.resize(AsSize(at) + 1);
        break;
      default:
        At(given, at) = byte;
    }
  }
  if (given != before && StateFromBytes(given).ok()) {
    return "what was damaged is taken";
  }
  wrong = Judge(given);
  if (!wrong.empty()) return wrong;
  // The file is whole, but perhaps no cache has the state.
  CacheState odd = state;
  const auto cells = AsSize(pick(0, 4));
  odd.cells.resize(cells, {pick(-1, 4), pick(-1, 9), pick(-1, 1)});
  return Judge(StateToBytes(odd));
}

}  // namespace kvtwin::props
