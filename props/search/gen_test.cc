// Tests streams of calls for caches that are not driven live.

#include "props/search/gen.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "kvtwin/cache.h"
#include "props/history/generate.h"
#include "props/history/history.h"
#include "props/oracle/judge.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

// Makes one call of a line that Generate wrote.
StatusCode Make(Cache& cache, const nlohmann::json& op) {
  const std::string name = op["op"];
  const auto tensor = [&](const char* key) {
    DenseTensor rows = FilledTensor(
        DType::kF32,
        {op[key]["shape"][0], op[key]["shape"][1], op[key]["shape"][2], 1}, 0);
    const std::vector<float> data = op[key]["data"];
    EXPECT_EQ(data.size() * sizeof(float), rows.bytes.size());
    std::memcpy(rows.bytes.data(), data.data(), rows.bytes.size());
    return rows;
  };
  if (op.contains("layer")) {
    EXPECT_TRUE(cache.SetLayer(op["layer"]).ok());
  }
  if (name == "start_forward") {
    const std::vector<std::int32_t> positions = op["positions"];
    const std::vector<int> sequences = op["sequences"];
    const std::vector<int> images = op.value("multimodal", std::vector<int>());
    return cache
        .StartForward({positions, sequences, images}, op.contains("reserve"))
        .code();
  }
  if (name == "set_causal") {
    return cache.SetCausal(op["except"].get<std::vector<int>>()).code();
  }
  if (name == "set_layer_type") return cache.SetLayerType(op["type"]).code();
  if (name == "put") {
    return cache.Put(tensor("key").view(), tensor("value").view()).code();
  }
  if (name == "get") return cache.Get().status().code();
  if (name == "remove") {
    return cache.Remove(op["seq"], op["begin"], op["end"]).code();
  }
  if (name == "copy_prefix") {
    return cache.CopyPrefix(op["src"], op["dst"], op["len"]).code();
  }
  if (name == "can_resume") {
    return cache.CanResume(op["seq"], op["pos"]).status().code();
  }
  if (name == "encoder_cached") return cache.EncoderCached().status().code();
  EXPECT_EQ(name, "reserved_mask");
  return StatusCode::kOk;
}

TEST(Gen, MakesNoCallThatIsMisuse) {
  std::stringstream lines;
  ASSERT_TRUE(
      Generate({.seed = 4, .kind = {}, .operations = 0, .histories = 200},
               lines)
          .ok());
  std::unique_ptr<Cache> cache;
  int calls = 0;
  int headers = 0;
  std::set<std::string> kinds;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("kvtrace")) {
      std::istringstream in(line);
      TraceReader reader(in);
      ASSERT_TRUE(reader.ReadHeader()) << reader.error()->reason;
      const TraceHeader& header = reader.header();
      cache = *MakeCache(header.spec);
      ASSERT_TRUE(cache->SetConfig(header.config).ok());
      const InitArgs& init = header.init;
      ASSERT_TRUE(cache->Init(init).ok());
      kinds.insert(json["cache"]["type"]);
      ++headers;
      EXPECT_TRUE(ParseHistory(std::string(json["history"])).ok());
      continue;
    }
    for (const char* answer : {"result", "cells", "first_cell", "mask"}) {
      EXPECT_FALSE(json.contains(answer)) << line;
    }
    ASSERT_NE(cache, nullptr) << line;
    const StatusCode code = Make(*cache, json);
    if (json["op"] == "start_forward" && code == StatusCode::kCacheFull) {
      continue;
    }
    const bool outcome =
        json["op"] == "remove" &&
        (code == StatusCode::kSharedCells || code == StatusCode::kNotSupported);
    EXPECT_TRUE(code == StatusCode::kOk || outcome) << line;
    ++calls;
  }
  EXPECT_EQ(headers, 200);
  EXPECT_EQ(kinds.size(), 6U);
  EXPECT_GT(calls, 5000);
}

// With the shift `add`, a row that moved to another position is not the row of
// the token that was there: the first element minus another is the number.
TEST(Gen, ShiftedRowsAreThoseOfTheirToken) {
  for (const std::string shift : {"add", "identity", "tag_add"}) {
    const auto history =
        ParseHistory("kvt1 shift=" + shift + " | put 0*2 | put 0*2");
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    std::stringstream lines;
    ASSERT_TRUE(WriteCalls(*history, lines).ok());
    std::int64_t number = 0;
    for (std::string line; std::getline(lines, line);) {
      const auto op = nlohmann::json::parse(line);
      if (op.value("op", "") != "put") continue;
      const std::vector<float> key = op["key"]["data"];
      ASSERT_EQ(key.size(), 4U) << line;
      for (const std::size_t at : {0U, 2U}) {
        const float position = static_cast<float>(number++);
        EXPECT_EQ(key[at + 1], position) << line;
        const float first = key[at] - (shift == "add" ? position : 0.0F);
        EXPECT_EQ(first, static_cast<float>(number)) << line;
      }
    }
    EXPECT_EQ(number, 4);
  }
}

TEST(Gen, IsTheSameForTheSameSeed) {
  const auto text = [](std::uint64_t seed) {
    std::ostringstream out;
    EXPECT_TRUE(
        Generate({.seed = seed, .kind = {}, .operations = 500, .histories = 0},
                 out)
            .ok());
    return out.str();
  };
  EXPECT_EQ(text(1), text(1));
  EXPECT_NE(text(1), text(2));
}

// docs/adapter.md says so to programs that can only append.
TEST(Gen, ContinuesSequencesIfTheClientIsLegal) {
  std::stringstream lines;
  ASSERT_TRUE(
      Generate({.seed = 1, .kind = Kind::kCausal, .histories = 60}, lines)
          .ok());
  std::map<int, int> next;  // By sequence.
  int legal = 0;
  bool is_legal = false;
  for (std::string line; std::getline(lines, line);) {
    const auto op = nlohmann::json::parse(line);
    const std::string name = op.value("op", "");
    if (op.contains("history")) {
      is_legal = line.find(" legal=1") != std::string::npos;
      legal += is_legal ? 1 : 0;
      next.clear();
    } else if (name == "start_forward" && !op.contains("reserve")) {
      for (std::size_t i = 0; i < op["positions"].size(); ++i) {
        int& length = next[op["sequences"][i]];
        if (is_legal) {
          ASSERT_EQ(op["positions"][i], length) << line;
        }
        ++length;
      }
    } else if (name == "copy_prefix") {
      next[op["dst"]] = std::min(op["len"].get<int>(), next[op["src"]]);
    } else if (name == "remove") {
      int& length = next[op["seq"]];
      const int begin = std::min(op["begin"].get<int>(), length);
      length -= std::max(std::min(op["end"].get<int>(), length) - begin, 0);
    }
  }
  EXPECT_GT(legal, 9);
}

TEST(Gen, LeavesOutWhatAPoolWithGroupsLacks) {
  const auto text = [](const PoolLimits& limits) {
    std::ostringstream out;
    EXPECT_TRUE(
        Generate(
            {.kind = {}, .groups = true, .limits = limits, .histories = 40},
            out)
            .ok());
    return out.str();
  };
  const std::string all = text({});
  const std::string few = text({.media = true, .dtype = DType::kF16});
  for (const char* word : {R"("media")", R"("states":true)", R"("q8_0")"}) {
    EXPECT_NE(all.find(word), std::string::npos) << word;
  }
  for (const char* word : {R"("media")", R"("q8_0")", R"("f32")"}) {
    EXPECT_EQ(few.find(word), std::string::npos) << word;
  }
  EXPECT_NE(few.find(R"("states":true)"), std::string::npos);
  std::istringstream recordings(few);
  for (const auto& [verdict, line] : JudgeSeveral(recordings)) {
    EXPECT_EQ(VerdictName(verdict), "accept") << line;
  }
}

TEST(Stream, MayHoldSeveralRecordings) {
  const std::string header =
      R"({"kvtrace":1,"placement":"other","cache":{"type":"causal","shift":)"
      R"("none"},"config":{},"init":{"dtype":"f32","max_sequences":1,)"
      R"("capacity":2,"max_batch":2},"model":{"layers":1,"k_head_dim":1,)"
      R"("kv_heads":1,"v_head_dim":1}})"
      "\n";
  const std::string start =
      R"({"op":"start_forward","positions":[0],"sequences":[0],"result":"ok"})"
      "\n";
  const std::string resume = R"({"op":"encoder_cached","result":true})"
                             "\n";
  const std::string hidden =
      R"({"op":"put","layer":0,"key":{"shape":[1,1,1],"data":[1]},"value":)"
      R"({"shape":[1,1,1],"data":[1]}})"
      "\n"
      R"({"op":"get","layer":0,"key":{"shape":[1,1,1],"data":[1]},"value":)"
      R"({"shape":[1,1,1],"data":[1]},"mask":{"shape":[1,1],"rows":["0"]}})"
      "\n";
  std::istringstream in(start + header + start + header + resume + start +
                        header + start + hidden + start + "\n\n" + header +
                        start + "\n\n" + header + "{\n" + header + "\n" +
                        start);
  EXPECT_EQ(JudgeSeveral(in), (Verdicts{{Verdict::kBadInput, 1},
                                        {Verdict::kAccept, 0},
                                        {Verdict::kBadInput, 5},
                                        {Verdict::kReject, 10},
                                        {Verdict::kAccept, 0},
                                        {Verdict::kBadInput, 19},
                                        {Verdict::kBadInput, 21}}));
}

}  // namespace
}  // namespace kvtwin::props
