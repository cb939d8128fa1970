// Compares the bytes of a state with docs/semantics.md (S56), by an independent
// reader and writer: they share nothing with core/save/save.cc but XXH3 itself.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/names.h"
#include "props/testing/test_cache.h"
#include "props/testing/test_states.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

struct DTypeRule {
  DType dtype;
  std::string_view name;        // The dtype in the file.
  std::string_view metadata;    // The dtype of blocks in the metadata.
  std::int64_t elements, size;  // `elements` take `size` bytes.
};
constexpr std::array kRules = {
    DTypeRule{DType::kF32, "F32", "", 1, 4},
    DTypeRule{DType::kF16, "F16", "", 1, 2},
    DTypeRule{DType::kBF16, "BF16", "", 1, 2},
    DTypeRule{DType::kF8, "F8_E4M3", "", 1, 1},
    DTypeRule{DType::kQ8, "U8", "q8_0", 32, 34},
    DTypeRule{DType::kQ4, "U8", "q4_0", 32, 18},
};

const DTypeRule& RuleOf(DType dtype) {
  return *std::ranges::find(kRules, dtype, &DTypeRule::dtype);
}

std::string Raw(const void* data, std::size_t size) {
  return {static_cast<const char*>(data), size};
}

// The writer ------------------------------------------------------------------

struct Named {
  std::string name;
  Json about;
  std::string bytes;
};

Named TensorNamed(const std::string& name, const DenseTensor& tensor) {
  const DTypeRule& rule = RuleOf(tensor.dtype);
  const Shape& shape = tensor.shape;
  const bool blocks = !rule.metadata.empty();
  const std::int64_t last =
      blocks ? shape[0] / rule.elements * rule.size : shape[0];
  return {
      name,
      {{"dtype", rule.name}, {"shape", {shape[3], shape[2], shape[1], last}}},
      Raw(tensor.bytes.data(), tensor.bytes.size())};
}

void AddCache(const CacheState& state, const std::string& path, Json& metadata,
              std::vector<Named>& tensors) {
  metadata[path + "encoder"] = std::to_string(state.cached ? 1 : 0) + " " +
                               std::to_string(state.position) + " " +
                               std::to_string(state.next_position);
  std::string cells;
  for (const CellEntry& entry : state.cells) {
    const std::array<std::int32_t, 3> numbers = {entry.cell, entry.position,
                                                 entry.sequence};
    cells += Raw(numbers.data(), sizeof(numbers));
  }
  tensors.push_back({path + "cells",
                     {{"dtype", "I32"}, {"shape", {state.cells.size(), 3}}},
                     cells});
  for (const auto& [layer, rows] : state.layers) {
    for (const bool key : {true, false}) {
      const DenseTensor& tensor = key ? rows.key : rows.value;
      const std::string name =
          path + "layers." + std::to_string(layer) + (key ? ".key" : ".value");
      tensors.push_back(TensorNamed(name, tensor));
      const std::string_view dtype = RuleOf(tensor.dtype).metadata;
      if (!dtype.empty()) metadata[name] = dtype;
    }
  }
  for (std::size_t i = 0; i < state.caches.size(); ++i) {
    AddCache(state.caches[i], path + "caches." + std::to_string(i) + ".",
             metadata, tensors);
  }
}

std::uint64_t ChecksumOf(const std::vector<std::string>& tensors,
                         const std::string& header) {
  std::string sums;
  for (const std::string& bytes : tensors) {
    const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size());
    sums += Raw(&sum, sizeof(sum));
  }
  return XXH3_64bits_withSeed(header.data(), header.size(),
                              XXH3_64bits(sums.data(), sums.size()));
}

std::string HexOf(std::uint64_t number) {
  std::string digits(16, '0');
  for (std::size_t i = 16; i-- > 0; number /= 16) {
    digits[i] = "0123456789abcdef"[number % 16];
  }
  return digits;
}

std::string Written(const CacheState& state, const std::string& model) {
  Json header;
  header["__metadata__"] = {
      {"kvtwin_state", "2"}, {"model", model}, {"xxh3", std::string(16, '0')}};
  std::vector<Named> tensors;
  AddCache(state, "", header["__metadata__"], tensors);
  std::size_t at = 0;
  std::vector<std::string> bytes;
  for (Named& tensor : tensors) {
    tensor.about["data_offsets"] = {at, at + tensor.bytes.size()};
    at += tensor.bytes.size();
    header[tensor.name] = tensor.about;
    bytes.push_back(tensor.bytes);
  }
  const auto text = [&] {
    std::string dumped = header.dump(-1, ' ', /*ensure_ascii=*/true);
    while (dumped.size() % 8 != 0) dumped += ' ';
    return dumped;
  };
  header["__metadata__"]["xxh3"] = HexOf(ChecksumOf(bytes, text()));
  const std::uint64_t length = text().size();
  std::string all = Raw(&length, sizeof(length)) + text();
  for (const std::string& tensor : bytes) all += tensor;
  return all;
}

// The reader ------------------------------------------------------------------

// Reads a whole file; each breach of the rules fails the test.
class Reader {
 public:
  explicit Reader(const std::string& file) {
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof(length));
    EXPECT_EQ(length % 8, 0U);
    header_ = file.substr(8, length);
    data_ = file.substr(8 + length);
    json_ = Json::parse(header_);
  }

  std::string Metadata(const std::string& name) const {
    return json_.at("__metadata__").at(name).get<std::string>();
  }

  // The checksum of the file's tensors and header.
  std::string Checksum() const {
    std::vector<std::string> tensors;
    for (const auto& [name, about] : json_.items()) {
      if (name != "__metadata__") tensors.push_back(Bytes(name));
    }
    std::string bare = header_;
    const std::size_t at = bare.find("\"xxh3\":\"") + 8;
    bare.replace(at, 16, 16, '0');
    return HexOf(ChecksumOf(tensors, bare));
  }

  CacheState State(const std::string& path = "") {
    CacheState state;
    const std::string cells = Bytes(path + "cells");
    EXPECT_EQ(About(path + "cells", "dtype"), "I32");
    const auto count = static_cast<std::int64_t>(cells.size() / 12);
    EXPECT_EQ(About(path + "cells", "shape"), Json({count, 3}));
    for (std::size_t i = 0; i < cells.size(); i += 12) {
      std::array<std::int32_t, 3> numbers;
      std::memcpy(numbers.data(), &cells[i], sizeof(numbers));
      state.cells.push_back({numbers[0], numbers[1], numbers[2]});
    }
    int cached = 0;
    const std::string encoder = Metadata(path + "encoder");
    EXPECT_EQ(std::sscanf(encoder.c_str(), "%d %d %d", &cached,  // NOLINT
                          &state.position, &state.next_position),
              3);
    state.cached = cached == 1;
    for (int layer = 0; layer < 20; ++layer) {
      const std::string name = path + "layers." + std::to_string(layer) + ".";
      if (!json_.contains(name + "key")) continue;
      state.layers[layer] = {Tensor(name + "key"), Tensor(name + "value")};
    }
    for (int i = 0;; ++i) {
      const std::string inner = path + "caches." + std::to_string(i) + ".";
      if (!json_.contains(inner + "cells")) break;
      state.caches.push_back(State(inner));
    }
    return state;
  }

 private:
  const Json& About(const std::string& name, const char* what) const {
    return json_.at(name).at(what);
  }
  std::string Bytes(const std::string& name) const {
    const auto begin = About(name, "data_offsets").at(0).get<std::size_t>();
    const auto end = About(name, "data_offsets").at(1).get<std::size_t>();
    return data_.substr(begin, end - begin);
  }
  DenseTensor Tensor(const std::string& name) {
    const std::string bytes = Bytes(name);
    const Json& metadata = json_.at("__metadata__");
    const std::string blocks =
        metadata.contains(name) ? Metadata(name) : std::string();
    DenseTensor tensor;
    for (const DTypeRule& rule : kRules) {
      if (rule.name != About(name, "dtype") || rule.metadata != blocks)
        continue;
      tensor.dtype = rule.dtype;
      for (std::size_t i = 0; i < 4; ++i) {
        tensor.shape[i] = About(name, "shape").at(3 - i).get<std::int64_t>();
      }
      if (!blocks.empty()) tensor.shape[0] = tensor.shape[0] / rule.size * 32;
    }
    for (const char byte : bytes) {
      tensor.bytes.push_back(static_cast<std::byte>(byte));
    }
    return tensor;
  }

  std::string header_;
  std::string data_;
  Json json_;
};

// States ----------------------------------------------------------------------

std::vector<CacheState> States() {
  std::vector<CacheState> states = {CacheState(), OfAWrapper()};
  for (const DType dtype : kRowDTypes) {
    for (const int tokens : {0, 1, 3, 40}) {
      states.push_back(SomeState(tokens, 2.5F, dtype));
    }
    states.push_back(SomeState(2, 1, dtype));
    states.back().layers[7].value = FilledTensor(DType::kQ4, {64, 2, 2, 1}, 3);
    states.back().layers[11] = states.back().layers[7];
  }
  // The bytes of rows are random, and large numbers occur.
  std::mt19937 random(1);
  for (CacheState& state : states) {
    for (auto& [layer, rows] : state.layers) {
      for (DenseTensor* tensor : {&rows.key, &rows.value}) {
        for (std::byte& byte : tensor->bytes) {
          byte = static_cast<std::byte>(random());
        }
      }
    }
    if (state.cells.empty()) continue;
    state.cells.back() = {2147483646, 2147483647, 2147483647};
  }
  CacheState wrapper;
  for (int i = 0; i < 12; ++i) wrapper.caches.push_back(states[4]);
  states.push_back(wrapper);
  CacheState encoder;
  encoder.cached = true;
  encoder.position = 3;
  encoder.next_position = 2147483647;
  encoder.layers[0] = {FilledTensor(DType::kF32, {3, 5, 7, 2}, 1),
                       FilledTensor(DType::kQ8, {32, 1, 1, 4}, 2)};
  states.push_back(encoder);
  return states;
}

std::string Text(const std::vector<std::byte>& bytes) {
  return Raw(bytes.data(), bytes.size());
}

class StateRules : public WithFolder {};

TEST_F(StateRules, ASafetensorsReaderReadsSavedStates) {
  for (const CacheState& state : States()) {
    ASSERT_TRUE(SaveState(state, Path(), "some model").ok());
    Reader reader(ReadFile(Path()));
    EXPECT_EQ(reader.Metadata("kvtwin_state"), "2");
    EXPECT_EQ(reader.Metadata("model"), "some model");
    EXPECT_EQ(reader.Metadata("xxh3"), reader.Checksum());
    ASSERT_TRUE(reader.State() == state);
    ASSERT_EQ(ReadFile(Path()), Text(StateToBytes(state, "some model")));
  }
}

TEST_F(StateRules, LoadsStatesOfASafetensorsWriter) {
  for (const CacheState& state : States()) {
    for (const std::string& model :
         {std::string(), std::string("a \"model\"\n, 7B \\ \xc3\xa9")}) {
      const std::string file = Written(state, model);
      ASSERT_EQ(file.size(), StateToBytes(state, model).size());
      std::ofstream(Path(), std::ios::binary) << file;
      const Result<CacheState> loaded = LoadState(Path(), model);
      ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
      ASSERT_TRUE(*loaded == state);
    }
  }
}

// Tensors of about 1 MiB and more, where several threads take turns.
TEST_F(StateRules, LargeTensorsAreWrittenAlike) {
  for (const int tokens : {32767, 32768, 32769, 70000}) {
    CacheState state = SomeState(tokens, 2, DType::kF32);
    std::mt19937 random(1);
    for (auto& [layer, rows] : state.layers) {
      for (std::size_t i = 0; i < rows.key.bytes.size(); i += 4096) {
        rows.key.bytes[i] = static_cast<std::byte>(random());
      }
    }
    const std::string expected = Written(state, "");
    ASSERT_TRUE(expected == Text(StateToBytes(state)));
    ASSERT_TRUE(SaveState(state, Path()).ok());
    ASSERT_TRUE(expected == ReadFile(Path()));
    ASSERT_TRUE(*LoadState(Path()) == state);
  }
}

// The file alone tells which tokens a cache holds.
TEST_F(StateRules, TheTokensOfACacheAreInItsFile) {
  for (const std::string& twin : TwinList()) {
    CacheSpec spec;
    spec.shift.kind = ShiftKind::kAdd;
    TestCache cache(spec, twin, {.cache_padding = 2});
    ASSERT_EQ(cache.Init(2, 8, 8), StatusCode::kOk);
    cache.Append(0, 0, {10, 11, 12});
    cache.Append(3, 5, {20, 21});
    ASSERT_TRUE(cache->CopyPrefix(0, 4, 1).ok());
    ASSERT_TRUE(cache->Remove(3, 5, 6).ok());
    ASSERT_TRUE(cache->Remove(0, 1, 2).ok());
    ASSERT_TRUE(SaveState(*cache->Snapshot(), Path()).ok());
    const CacheState state = Reader(ReadFile(Path())).State();
    EXPECT_EQ(state.cells, (std::vector<CellEntry>{
                               {0, 0, 0}, {0, 0, 4}, {2, 1, 0}, {4, 5, 3}}));
    std::array<float, 3> keys;
    std::array<float, 3> values;
    const KvRows& rows = state.layers.at(0);
    ASSERT_EQ(rows.key.shape, (Shape{1, 1, 3, 1}));
    std::memcpy(keys.data(), rows.key.bytes.data(), sizeof(keys));
    std::memcpy(values.data(), rows.value.bytes.data(), sizeof(values));
    EXPECT_EQ(keys, (std::array<float, 3>{10, 11, 20}));
    EXPECT_EQ(values, (std::array<float, 3>{10, 12, 21}));
  }
}

}  // namespace
}  // namespace kvtwin::props
