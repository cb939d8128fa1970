// Writing recordings.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

std::string Rewritten(const std::string& text) {
  std::istringstream in(text);
  std::ostringstream out;
  TraceReader reader(in);
  EXPECT_TRUE(reader.ReadHeader());
  const auto rewrite = [&](const auto& header, auto op) {
    EXPECT_TRUE(WriteTraceHeader(header, out).ok());
    while (reader.ReadOp(op)) EXPECT_TRUE(WriteTraceOp(op, out).ok());
  };
  if (reader.paged()) {
    rewrite(*reader.paged(), PagedTraceOp());
  } else {
    rewrite(reader.header(), TraceOp());
  }
  EXPECT_FALSE(reader.error()) << reader.error()->reason;
  return out.str();
}

// Rounds appended rows to the dtypes of their pool, as the reader does.
void RoundRows(const PagedSpec& pool, nlohmann::json& op) {
  const PagedSpec& spec = SpecOfLayer(pool, op.value("layer", 0));
  const auto round = [&](const char* rows, DType dtype) {
    for (nlohmann::json& number : op.at(rows).at("data")) {
      const DenseTensor one =
          FilledTensor(dtype, {1, 1, 1, 1}, number.get<float>());
      float stored = 0;
      std::memcpy(&stored, CopyOf(one.view(), DType::kF32).bytes.data(),
                  sizeof(stored));
      number = stored;
    }
  };
  round("key", spec.dtype);
  round("value", spec.v_dtype.value_or(spec.dtype));
}

// Lines are compared as JSON, so that a lost field shows.
TEST(TraceWriter, WritesWhatItRead) {
  for (const auto& file : Recordings("")) {
    std::istringstream original(ReadFile(file));
    std::istringstream written(Rewritten(original.str()));
    std::istringstream headers(original.str());
    TraceReader reader(headers);
    ASSERT_TRUE(reader.ReadHeader()) << file;
    std::string expected;
    std::string actual;
    while (std::getline(original, expected)) {
      ASSERT_TRUE(std::getline(written, actual)) << file;
      nlohmann::json json = nlohmann::json::parse(expected);
      json.erase("history");  // A key of gen, not of the format.
      if (reader.paged() && json.value("op", "") == "append") {
        RoundRows(reader.paged()->spec, json);
      }
      EXPECT_EQ(json, nlohmann::json::parse(actual));
    }
    EXPECT_FALSE(std::getline(written, actual)) << file;
  }
}

TEST(TraceWriter, WritesFieldsThatNoRecordingHas) {
  const std::string header = Replaced(
      Replaced(kHeader, R"("type":"causal","shift":"tag_add")",
               R"("type":"wrapper","caches":[{"type":"encoder"},)"
               R"({"type":"swa_mem","window":3,"memory":5,"shift":"rope",)"
               R"("rope":{"pairing":"halves","base":500000.5,"scale":0.25,)"
               R"("dims":2}},{"type":"chunked","chunk":7,"shift":"none"}])"),
      R"("test")", R"("\"\\\u00e4\u0001")");
  const std::string text =
      Lines({Replaced(header, "contiguous", "other"),
             R"({"op":"put","layer":0,"key":{"shape":[1,1,1,3],)"
             R"("data":[-0.0,1e-45,3.4028235e+38]},)"
             R"("value":{"shape":[3,1,1],"data":[0.1,16777216,1e10]}})"});
  std::istringstream expected(text);
  std::istringstream actual(Rewritten(text));
  std::string expected_line;
  std::string actual_line;
  while (std::getline(expected, expected_line) &&
         std::getline(actual, actual_line)) {
    const auto expected_json = nlohmann::json::parse(expected_line);
    auto actual_json = nlohmann::json::parse(actual_line);
    if (!expected_json.contains("op")) {
      EXPECT_EQ(expected_json, actual_json);
      continue;
    }
    EXPECT_EQ(Rewritten(text), Rewritten(Rewritten(text)));
    EXPECT_NE(actual_line.find("[-0,"), std::string::npos) << actual_line;
  }
  TraceHeader custom;
  custom.spec.shift.kind = ShiftKind::kCustom;
  std::ostringstream out;
  EXPECT_FALSE(WriteTraceHeader(custom, out).ok());
  TraceHeader inner;
  inner.spec.kind = Kind::kWrapper;
  inner.spec.caches = {CacheSpec(), custom.spec};
  EXPECT_FALSE(WriteTraceHeader(inner, out).ok());
  TraceOp infinite;
  infinite.kind = TraceOpKind::kPut;
  infinite.key = FilledTensor(DType::kF16, {2, 1, 1, 1}, 1e30F);
  infinite.value = infinite.key;
  EXPECT_FALSE(WriteTraceOp(infinite, out).ok());
  EXPECT_EQ(out.str(), "");
}

TEST(TraceWriter, OmitsMissingFields) {
  for (const std::string type : {"swa", "swa_mem"}) {
    const std::string text =
        Lines({Replaced(kHeader, "causal", type),
               R"({"op":"reserved_mask","shape":[4,1]})",
               R"({"op":"get","layer":0,"key":{"shape":[1,1,1],"data":[0]},)"
               R"("mask":null})"});
    const std::string written = Rewritten(text);
    for (const std::string word : {"window", "memory", "first_cell", "value"}) {
      EXPECT_EQ(written.find(word), std::string::npos) << written;
    }
    EXPECT_EQ(Rewritten(written), written);
  }
}

TEST(TraceWriter, KeepsTheSignOfZero) {
  std::istringstream in(
      Lines({kHeader, kStart, Replaced(kPut, "[100,1000", "[-0,0")}));
  TraceReader reader(in);
  ASSERT_TRUE(reader.ReadHeader());
  TraceOp op;
  ASSERT_TRUE(reader.ReadOp(op) && reader.ReadOp(op));
  EXPECT_EQ(op.key.bytes[3], std::byte{0x80});
  EXPECT_EQ(op.key.bytes[7], std::byte{0});
}

}  // namespace
}  // namespace kvtwin::props
