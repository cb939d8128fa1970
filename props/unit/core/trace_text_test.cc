// The text of a recording: headers whose fields are left out, and answers that
// are nearly right.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "kvtwin/cache.h"

namespace kvtwin::props {
namespace {

// Compares the bound of a header with the memory that a cache needs: cells with
// positions, rows, a mask.
void ExpectBound(const TraceHeader& header, const RowDims& rows) {
  auto cache = *MakeCache(header.spec);
  ASSERT_TRUE(cache->SetConfig(header.config).ok());
  const InitArgs& init = header.init;
  ASSERT_TRUE(cache->Init(init).ok());
  const auto element = static_cast<double>(SizeOf(init.dtype));
  const double row = element * header.layers * rows.kv_heads *
                     (rows.k_head_dim + rows.v_head_dim);
  const auto mask = static_cast<double>(
      DenseBytes(header.config.mask_dtype,
                 {cache->CellCount(), std::max(init.max_batch, 1), 1, 1}));
  const double need = cache->CellCount() * (4 + row) + mask;
  const double bound = CacheBytesBound(header, rows, 0);
  EXPECT_GE(bound, need);
  EXPECT_LE(bound, 2 * need + 200.0 * cache->CellCount());
  EXPECT_GE(CacheBytesBound(header, rows, 80000),
            bound + 10000.0 * cache->CellCount());
}

TEST(TraceText, BoundsTheBytesOfACache) {
  TraceHeader header;
  header.init = {DType::kF16, 10, 4096, 2};
  header.layers = 3;
  const RowDims small{1, 1, 1};
  const RowDims large{900, 7, 300};
  for (const Kind kind : {Kind::kCausal, Kind::kSwa, Kind::kSwaMem}) {
    header.spec.kind = kind;
    if (kind != Kind::kCausal) header.spec.window = 3;
    if (kind == Kind::kSwaMem) header.spec.memory = 20;
    header.init.max_batch = 2;
    ExpectBound(header, small);
    ExpectBound(header, large);
    header.init.max_batch = 1000;  // Masks are the largest part.
    for (const DType dtype :
         {DType::kBF16, DType::kBits, DType::kF16, DType::kF32}) {
      header.config.mask_dtype = dtype;
      ExpectBound(header, small);
    }
  }
  header.spec = {};
  const double single = CacheBytesBound(header, large, 5);
  CacheSpec encoder;
  encoder.kind = Kind::kEncoder;
  const std::vector<CacheSpec> caches = {header.spec, encoder, header.spec};
  header.spec = encoder;
  EXPECT_EQ(CacheBytesBound(header, large, 5), 0);
  header.spec.kind = Kind::kWrapper;
  header.spec.caches = caches;
  EXPECT_EQ(CacheBytesBound(header, large, 5), 2 * single);
}

// A header and operations as text, for tests that change a part of it.
std::string HeaderText(const TraceHeader& header) {
  std::ostringstream out;
  EXPECT_TRUE(WriteTraceHeader(header, out).ok());
  return out.str();
}

TraceHeader AnyHeader() {
  TraceHeader header;
  header.init = {DType::kF32, 1, 4, 2};
  header.layers = 1;
  header.rows = {1, 1, 1};
  return header;
}

std::string Without(std::string text, const std::string& part) {
  const std::size_t at = text.find(part);
  EXPECT_NE(at, text.npos) << part << " in " << text;
  return at == text.npos ? text : text.erase(at, part.size());
}

TraceHeader ReadBack(const std::string& text) {
  std::istringstream in(text);
  TraceReader reader(in);
  EXPECT_TRUE(reader.ReadHeader()) << reader.error()->reason;
  return reader.header();
}

TEST(TraceText, FillsInFieldsThatAHeaderLeavesOut) {
  TraceHeader header = AnyHeader();
  header.spec.shift.kind = ShiftKind::kRope;
  const std::string text = HeaderText(header);
  const Rope rope =
      ReadBack(Without(Without(text, R"(,"dims":0)"), R"(,"scale":1)"))
          .spec.shift.rope;
  EXPECT_EQ(rope.dims, 0);
  EXPECT_EQ(rope.scale, 1);
  header.config = {.cache_padding = 0, .mask_batch_padding = 0};
  const CacheConfig config = ReadBack(HeaderText(header)).config;
  EXPECT_EQ(config.cache_padding, 1);
  EXPECT_EQ(config.mask_batch_padding, 1);
}

TEST(TraceText, WritesWrappersByTheirCaches) {
  TraceHeader header = AnyHeader();
  header.spec.kind = Kind::kWrapper;
  CacheSpec inner;
  inner.placement = Placement::kScatter;
  header.spec.caches = {inner};
  EXPECT_EQ(ReadBack(HeaderText(header)).spec.caches[0].placement,
            Placement::kScatter);
  inner.shift.kind = ShiftKind::kCustom;
  header.spec.caches.push_back(inner);
  std::ostringstream out;
  EXPECT_FALSE(WriteTraceHeader(header, out).ok());
}

TEST(TraceText, WritesOnlyTheFieldsOfItsKind) {
  TraceHeader header = AnyHeader();
  header.spec.window = 3;
  header.spec.memory = 4;
  header.spec.chunk = 5;
  const auto written = [&](Kind kind) {
    header.spec.kind = kind;
    const std::string text = HeaderText(header);
    std::string found;
    for (const std::string key : {"window", "memory", "chunk"}) {
      if (text.find("\"" + key + "\":") != text.npos) found += key + " ";
    }
    return found;
  };
  EXPECT_EQ(written(Kind::kCausal), "");
  EXPECT_EQ(written(Kind::kSwa), "window ");
  EXPECT_EQ(written(Kind::kSwaMem), "window memory ");
  EXPECT_EQ(written(Kind::kChunked), "chunk ");
  EXPECT_EQ(written(Kind::kEncoder), "");
}

TEST(TraceText, RefusesSizesOfZero) {
  for (const std::string key :
       {"max_sequences", "capacity", "max_batch", "layers", "k_head_dim",
        "kv_heads", "v_head_dim"}) {
    std::string text = HeaderText(AnyHeader());
    const std::size_t at = text.find("\"" + key + "\":") + key.size() + 3;
    std::istringstream in(text.replace(at, 1, "0"));
    TraceReader reader(in);
    EXPECT_FALSE(reader.ReadHeader()) << text;
    EXPECT_NE(reader.error()->reason.find(key + " is 0"), std::string::npos);
  }
}

// Returns why the line after the header cannot be read.
std::string WhyNot(const std::string& line) {
  std::istringstream in(HeaderText(AnyHeader()) + line + "\n");
  TraceReader reader(in);
  TraceOp op;
  EXPECT_TRUE(reader.ReadHeader());
  EXPECT_FALSE(reader.ReadOp(op)) << line;
  return reader.error() ? reader.error()->reason : "";
}

TEST(TraceText, NamesTheFirstElementOfAWrongType) {
  const auto start = [](const std::string& positions) {
    return WhyNot(R"({"op":"start_forward","positions":)" + positions +
                  R"(,"sequences":[0],"result":"ok"})");
  };
  EXPECT_EQ(start(R"(["0"])"), "positions[0] is '0', it must be an integer");
  EXPECT_EQ(start(R"([0,null,"1"])"),
            "positions[1] is null, it must be an integer");
  EXPECT_EQ(start(R"([0,1,"2",[]])"),
            "positions[2] is '2', it must be an integer");
  EXPECT_EQ(start(R"("0")"), "positions is '0', it must be a list of integers");
  const auto data = [](const std::string& numbers) {
    return WhyNot(R"({"op":"put","layer":0,"key":{"shape":[1,1,1],"data":)" +
                  numbers + R"(},"value":{"shape":[1,1,1],"data":[1]}})");
  };
  EXPECT_EQ(data("[true]"), "key.data[0] is true, it must be a number");
  EXPECT_EQ(data("[1,[2]]"), "key.data[1] is a list, it must be a number");
}

TEST(TraceText, RefusesNearlyCorrectAnswers) {
  EXPECT_EQ(WhyNot(R"({"op":"reserved_mask","shape":[4,2],"first_cell":-1})"),
            "first_cell is -1, it must be an integer from 0 to 2147483647");
  const std::string get =
      R"({"op":"get","layer":0,"key":{"shape":[1,1,2],"data":[1,2]},)"
      R"("value":{"shape":[1,1,2],"data":[1,2]},"mask":{"shape":[2,1],"rows":)";
  EXPECT_EQ(WhyNot(get + R"(["1/"]}})"),
            "mask.rows[0] has '/' at column 1, it must be 2 times 0 or 1");
  EXPECT_EQ(WhyNot(get + "{}}}"),
            "mask.rows is an object, it must be a list of strings");
  EXPECT_EQ(WhyNot(R"({"op":"put","layer":0,"key":{"shape":[1,1,1],)"
                   R"("data":[1,2]},"value":{"shape":[1,1,1],"data":[1]}})"),
            "key.data has 2 numbers, its shape is [1, 1, 1]");
  EXPECT_EQ(WhyNot(R"({"op":"start_forward","positions":[0],"sequences":[0],)"
                   R"("result":"ok","cells":[]})"),
            "cells has 0 numbers, positions has 1");
  EXPECT_EQ(WhyNot(R"({"op":"start_forward","positions":[0],"sequences":[0],)"
                   R"("result":"ok","cells":[-1]})"),
            "cells[0] is -1, it must not be negative");
  EXPECT_EQ(WhyNot(R"({"op":"can_resume","seq":0,"pos":0,"result":1})"),
            "result is 1, it must be true or false");
}

}  // namespace
}  // namespace kvtwin::props
