// States and folders for tests of saving.

#ifndef KVTWIN_PROPS_TESTING_TEST_STATES_H_
#define KVTWIN_PROPS_TESTING_TEST_STATES_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "core/dense_tensor.h"
#include "kvtwin/save.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"

namespace kvtwin::props {

// A test with its own folder.
class WithFolder : public ::testing::Test {
 protected:
  std::string Path() const { return (folder_ / "state").string(); }
  // The names of all files in the folder.
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  const ScratchFolder scratch_{"state"};
  const std::filesystem::path folder_ = scratch_.path();
};

inline CacheState SomeState(int tokens, float number,
                            DType dtype = DType::kF16) {
  CacheState state;
  for (int i = 0; i < tokens; ++i) state.cells.push_back({2 * i, i, i % 3});
  for (const int layer : {0, 7}) {
    const std::int64_t dim = IsBlockDType(dtype) ? kBlockElements : 1;
    state.layers[layer] = {
        FilledTensor(dtype, {4 * dim, 2, tokens, 1}, number),
        FilledTensor(dtype, {3 * dim, 2, tokens, 1}, -number)};
  }
  return state;
}

inline CacheState OfAWrapper() {
  CacheState state;
  state.caches = {SomeState(3, 1), CacheState(), SomeState(1, 2)};
  state.caches[1].cached = true;
  state.caches[1].position = 5;
  state.caches[1].next_position = 6;
  state.caches[1].layers[1] = {FilledTensor(DType::kF16, {2, 3, 1, 2}, 4),
                               FilledTensor(DType::kF32, {1, 1, 1, 1}, 5)};
  return state;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_TEST_STATES_H_
