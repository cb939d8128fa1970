// Reading recordings.

#include "core/trace/trace.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <streambuf>
#include <string>
#include <utility>
#include <vector>

#include "core/json_line.h"
#include "core/trace/trace_reader.h"
#include "props/oracle/judge.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

// Each case: the replaced text, its replacement, and a part of the reason.
using Cases = std::vector<std::array<std::string, 3>>;

TEST(Trace, AcceptsTheUnchangedRecording) {
  ExpectAccept(Lines({kHeader, kStart, kPut, kGet, kRemove}), Level::kIdentity);
}

// Refuses each header, the valid one with a part replaced.
void ExpectBadHeaders(const Cases& cases) {
  for (const auto& [from, to, reason] : cases) {
    SCOPED_TRACE(to);
    ExpectBadInput(Lines({Replaced(kHeader, from, to), kStart}), 1, reason);
  }
}

TEST(Trace, RefusesBadCachesInHeaders) {
  ExpectBadHeaders({
      {R"("kvtrace":1)", R"("kvtrace":5)", "kvtrace is 5"},
      {R"("kvtrace":1)", R"("kvtrace":"1")", "kvtrace is '1'"},
      {R"("kvtrace":1)", R"("x":1)", "kvtrace is missing"},
      {R"("contiguous")", R"("ring")", "placement is 'ring'"},
      {R"("placement":"contiguous",)", "", "placement is missing"},
      {R"("causal")", R"("casual")", "cache.type is 'casual'"},
      {R"("causal")", "7", "cache.type is 7"},
      {R"("tag_add")", R"("rope")", "cache.rope is missing"},
      {R"("tag_add")", R"("rope","rope":{"pairing":"halves","base":-1})",
       "rope base is -1"},
      {R"("tag_add")", R"("rope","rope":{"pairing":"halves","base":"x"})",
       "cache.rope.base is 'x'"},
      {R"("shift":"tag_add")", R"("shaft":1)", "cache.shift is missing"},
      {R"("causal")", R"("chunked")", "cache.chunk is missing"},
      {R"("causal")", R"("chunked","chunk":0)", "chunk is 0"},
      {R"("causal")", R"("swa","window":-1)", "window is -1"},
      {R"("causal")", R"("swa","window":1.5)", "cache.window is 1.5"},
      {R"("causal")", R"("swa_mem","window":3,"memory":2)",
       "memory is 2, less than the window, which is 3"},
      {R"("causal")", R"("wrapper")", "cache.caches is missing"},
      {R"("causal")", R"("wrapper","caches":[])", "caches is empty"},
      {R"("causal")", R"("wrapper","caches":5)", "caches is 5"},
      {R"("causal")", R"("wrapper","caches":["a"])",
       "cache.caches[0] is 'a', it must be an object"},
      {R"("causal")", R"("wrapper","caches":[{},1])",
       "cache.caches[1] is 1, it must be an object"},
      {R"("causal")", R"("wrapper","caches":[null])",
       "cache.caches[0] is null, it must be an object"},
      {R"("causal")", R"("wrapper","caches":[{"type":"wrapper","caches":[]}])",
       "caches"},
      {R"("causal")", R"("wrapper","caches":[{"type":"x"}])",
       "cache.caches[0].type is 'x'"},
      {R"("cache":{)", R"("cache":[],"x":{)", "cache is a list"},
  });
}

TEST(Trace, RefusesBadSizesInHeaders) {
  ExpectBadHeaders({
      {R"("dtype":"f32",)", R"("dtype":"bits",)", "init.dtype is 'bits'"},
      {R"("max_sequences":1)", R"("max_sequences":0)", "max_sequences is 0"},
      {R"("capacity":4)", R"("capacity":3000000000)", "capacity is 3000000000"},
      {R"("capacity":4)", R"("capacity":2000000000)", "2000000000"},
      {R"("capacity":4)", R"("capacity":4.5)", "init.capacity is 4.5"},
      {R"("capacity":4)", R"("capacity":8.0)", "init.capacity is 8.0"},
      {R"("capacity":4)", R"("capacity":true)", "init.capacity is true"},
      {R"("capacity":4)", R"("capacity":4,"capacity":5)", "'capacity' comes"},
      {R"("cache_padding":1)", R"("cache_padding":2147483647)", "bytes"},
      {R"("mask_batch_padding":1)", R"("mask_batch_padding":2147483647)",
       "bytes"},
      {R"("cache_padding":1)", R"("cache_padding":-1)", "cache_padding is -1"},
      {R"("layers":1)", R"("layers":2147483647)", "layers 2147483647"},
      {R"("layers":1)", R"("layers":0)", "model.layers is 0"},
      {R"("kv_heads":1)", R"("kv_heads":2147483647)", "bytes"},
      {R"("permuted_v":false)", R"("permuted_v":0)", "permuted_v is 0"},
      {R"("permuted_v":false)", R"("tiled_v":1)", "config.tiled_v is 1"},
      {R"("permuted_v":false)", R"("permuted_v":true,"tiled_v":true)",
       "config.tiled_v is true, and so is permuted_v"},
      {R"("permuted_v":false)", R"("tiled_v":true)",
       "config.cache_padding is 1, tiled V needs a multiple of 32"},
      {R"("dtype":"f32",)", R"("dtype":"bits",)", "init.dtype is 'bits'"},
      {R"("mask_dtype":"f32")", R"("mask_dtype":"bit")",
       "config.mask_dtype is 'bit'"},
      {R"("mask_dtype":"f32")", R"("mask_dtype":3)", "config.mask_dtype is 3"},
      // A row of bits takes at least one word, even for few cells.
      {R"("mask_batch_padding":1,"permuted_v":false,"mask_dtype":"f32")",
       R"("mask_batch_padding":40000000,"permuted_v":false,)"
       R"("mask_dtype":"bits")",
       "bytes"},
      {R"("capacity":4)", R"("capacity":false)", "init.capacity is false"},
      {R"("capacity":4)", R"("capacity":{})", "init.capacity is an object"},
      {"{", "[[", "not JSON"},
      {"}}", "}", "not JSON"},
      {"test", "t\xff", "not UTF-8"},
      {"test", "t\n", "not JSON"},
  });
}

TEST(Trace, RefusesFilesWithoutAHeader) {
  ExpectBadInput("", 1, "the file is empty");
  ExpectBadInput("\n", 1, "an empty line");
  ExpectBadInput(std::string(3, '\0'), 1, "not JSON");
  ExpectBadInput("7\n", 1, "7, expected an object");
  ExpectBadInput(Lines({kStart}), 1, "an op comes before the header");
  ExpectBadInput(Lines({kHeader, kStart, kHeader}), 3, "a second header");
}

// Permuted V that claims to be tiled: it has as many columns, but no tiles.
TEST(Trace, RefusesTilesOfAnotherShape) {
  std::string header =
      Replaced(kHeader, R"("cache_padding":1)", R"("cache_padding":32)");
  header = Replaced(header, R"("permuted_v":false)", R"("tiled_v":true)");
  std::string zeros = "0";
  std::string bits = "0";
  for (int i = 1; i < 64; ++i) {
    zeros += ",0";
    bits += "0";
  }
  const std::string get =
      R"({"op":"get","layer":0,"key":{"shape":[1,1,64],"data":[)" + zeros +
      R"(]},"value":{"shape":[64,1,1],"data":[)" + zeros +
      R"(]},"mask":{"shape":[64,1],"rows":[")" + bits + R"("]}})";
  ExpectBadInput(Lines({header, kStart, kPut, get}), 4,
                 "value has shape [64, 1, 1], tiled V begins with 32");
}

TEST(Trace, RefusesBadPuts) {
  const Cases cases = {
      {R"("layer":0)", R"("layer":1)", "layer is 1"},
      {R"("layer":0)", R"("layer":-1)", "layer is -1"},
      {R"("layer":0)", R"("layer":"0")", "layer is '0'"},
      {R"("layer":0)", R"("lawyer":0)", "layer is missing"},
      {R"("op":"put")", R"("op":"putt")", "op is 'putt'"},
      {R"("op":"put")", R"("pop":"put")", "op is missing"},
      {"[2,1,2]", "[2,1,3]", "key.data has 4 numbers"},
      {"[2,1,2]", "[2,1]", "key.data has 4 numbers"},
      {"[2,1,2]", "[2,-1,-2]", "key.shape[1] is -1"},
      {"[2,1,2]", "[2,0,2]", "key.shape[1] is 0"},
      {"[2,1,2]", "[65536,65536,65536,65536]", "key.data has 4 numbers"},
      {"[2,1,2]", "[2,2147483647,2147483647]", "key.data has 4 numbers"},
      {"[2,1,2]", "[2,1,2,1,1]", "key.shape has 5 dimensions"},
      {"[2,1,2]", "[]", "key.shape has 0 dimensions"},
      {"[2,1,2]", "[2,1,2.5]", "key.shape[2] is 2.5"},
      {"[2,1,2]", "[4,1,1]", "the batch has 2 tokens"},
      {"[2,1,2]", "[1,2,2]", "kv_heads"},
      {R"({"shape":[2,1,2],"data":[100,1000,200,1001]})", "[1,2]",
       "key is a list"},
      {"[100,1000,200,1001]", "100", "key.data is 100"},
      {"[100,1000,200,1001]", "[{}]", "key.data[0] is an object"},
      {R"("data":[100,1)", R"("doota":[100,1)", "key.data is missing"},
      {"100,1000", "\"a\",1000", "key.data[0] is 'a'"},
      {"100,1000", "null,1000", "key.data[0] is null"},
      {"100,1000", "[100],1000", "key.data[0] is a list"},
      {"100,1000", "NaN,1000", "not JSON"},
      {"100,1000", "Infinity,1000", "not JSON"},
      {"100,1000", "1e999,1000", "1e999"},
      {"100,1000", "1e39,1000", "key.data[0] is 1e+39, out of the range"},
      {"100,1000", "-3.5e38,1000", "key.data[0]"},
      {"100,1000", "100,1000,", "not JSON"},
      {R"("value")", R"("volume")", "value is missing"},
  };
  for (const auto& [from, to, reason] : cases) {
    SCOPED_TRACE(to);
    ExpectBadInput(Lines({kHeader, kStart, Replaced(kPut, from, to), kGet}), 3,
                   reason);
  }
  const std::string f16 =
      Replaced(kHeader, R"("dtype":"f32","max)", R"("dtype":"f16","max)");
  ExpectAccept(Lines({f16, kStart, Replaced(kPut, "1000", "65519.99")}),
               Level::kIdentity);
  ExpectBadInput(Lines({f16, kStart, Replaced(kPut, "1000", "65520")}), 3,
                 "key.data[1] is 65520, out of the range of f16");
  const std::string bf16 =
      Replaced(kHeader, R"("dtype":"f32","max)", R"("dtype":"bf16","max)");
  ExpectAccept(Lines({bf16, kStart, Replaced(kPut, "1000", "3.395e38")}),
               Level::kIdentity);
  ExpectBadInput(Lines({bf16, kStart, Replaced(kPut, "1000", "3.397e38")}), 3,
                 "out of the range of bf16");
  // V's numbers are limited by V's own dtype.
  const std::string mixed = Replaced(f16, R"("mask_dtype":"f32")",
                                     R"("mask_dtype":"f32","v_dtype":"bf16")");
  const std::string large =
      Replaced(kPut, R"("data":[100,200]}})", R"("data":[100,70000]}})");
  ExpectAccept(Lines({mixed, kStart, large}), Level::kIdentity);
  ExpectBadInput(Lines({f16, kStart, large}), 3,
                 "value.data[1] is 70000, out of the range of f16");
}

TEST(Trace, RefusesBadGets) {
  const Cases cases = {
      {R"(["10","11"])", R"(["10"])", "mask.rows has 1 strings"},
      {R"(["10","11"])", R"(["10","1"])",
       "mask.rows[1] has length 1, it must be 2 times 0 or 1"},
      {R"(["10","11"])", R"(["1","111"])",
       "mask.rows[0] has length 1, it must be 2 times 0 or 1"},
      {R"(["10","11"])", R"(["10","1x"])", "mask.rows[1] has 'x' at column 1,"},
      {R"(["10","11"])", R"(["10\n11",""])", "rows has a string with a"},
      {R"(["10","11"])", R"(["1\n","11"])", "mask.rows[0]"},
      {R"(["10","11"])", R"(["10",11])",
       "mask.rows[1] is 11, it must be a string"},
      {R"(["10","11"])", R"([{}])",
       "mask.rows[0] is an object, it must be a string"},
      {R"(["10","11"])", R"("10")", "mask.rows is '10'"},
      {R"({"shape":[2,2],"rows":["10","11"]})",
       R"({"shape":[2147483647,1],"rows":[""]})",
       "rows[0] has length 0, it must be 2147483647"},
      {R"("shape":[2,2])", R"("shape":[2,3])", "mask.rows has 2 strings"},
      {R"("shape":[2,2])", R"("shape":[2])", "mask.shape has 1 dimensions"},
      {R"({"shape":[2,2],"rows":["10","11"]})",
       R"({"shape":[1,2],"rows":["1","1"]})", "mask has 1 columns, key has 2"},
      {R"([1,1,2],"data":[100,200])", R"([1,2,1],"data":[100,200])",
       "value has 1 columns, key has 2"},
      {R"("mask")", R"("musk")", "mask is missing"},
      {R"("first_cell":0)", R"("first_cell":0.5)", "first_cell is 0.5"},
      {R"("first_cell":0)", R"("first_cell":-1)", "first_cell is -1"},
      {R"("layer":0)", R"("layer":1)", "layer is 1"},
  };
  for (const auto& [from, to, reason] : cases) {
    SCOPED_TRACE(to);
    ExpectBadInput(Lines({kHeader, kStart, kPut, Replaced(kGet, from, to)}), 4,
                   reason);
  }
}

// Refuses each call after the header, at either placement.
void ExpectBadCalls(const Cases& cases) {
  for (const auto& [from, to, reason] : cases) {
    SCOPED_TRACE(to);
    for (const char* placement : {"contiguous", "other"}) {
      const std::string header = Replaced(kHeader, "contiguous", placement);
      ExpectBadInput(Lines({header, Replaced(kStart, from, to)}), 2, reason);
    }
  }
}

TEST(Trace, RefusesBadBatches) {
  ExpectBadCalls({
      {kStart,
       R"({"op":"start_forward","positions":[0.5],"sequences":[0],)"
       R"("result":"ok"})",
       "positions[0] is 0.5"},
      {kStart,
       R"({"op":"start_forward","positions":[2147483648],)"
       R"("sequences":[0],"result":"ok"})",
       "positions[0] is 2147483648"},
      {kStart,
       R"({"op":"start_forward","positions":[-2147483649],)"
       R"("sequences":[0],"result":"ok"})",
       "positions[0] is -2147483649"},
      {"[0,1],\"seq", "[\"0\"],\"seq", "positions[0] is '0'"},
      {kStart,
       R"({"op":"start_forward","positions":[-1],"sequences":[0],)"
       R"("result":"ok"})",
       "-1"},
      {kStart,
       R"({"op":"start_forward","positions":[],"sequences":[],)"
       R"("result":"ok"})",
       "the batch is empty"},
      {kStart,
       R"({"op":"start_forward","positions":[0],"sequences":[0,1],)"
       R"("result":"ok"})",
       "sequences has 2 numbers, positions has 1"},
      {kStart,
       R"({"op":"start_forward","positions":[0,1,2],)"
       R"("sequences":[0,0,0],"result":"ok"})",
       "max_batch is 2"},
      {kStart,
       R"({"op":"start_forward","positions":[0],"sequences":[0],)"
       R"("multimodal":[1],"result":"ok"})",
       "multimodal index 1"},
      {kStart, R"({"op":"start_forward","positions":[0],"sequences":[0]})",
       "result is missing"},
      {"\"ok\"", "\"okay\"", "result is 'okay'"},
      {"\"ok\"", "true", "result is true"},
      {"\"ok\"", "\"shared_cells\"", "result is 'shared_cells'"},
      {"\"ok\"", "\"not_supported\"", "result is 'not_supported'"},
      {kStart,
       R"({"op":"remove","seq":0,"begin":0,"end":1,"result":"cache_full"})",
       "result is 'cache_full'"},
  });
}

TEST(Trace, RefusesOtherBadCalls) {
  ExpectBadCalls({
      {"[0,1]}", "[0]}", "cells has 1 numbers, positions has 2"},
      {"[0,1]}", "[]}", "cells has 0 numbers, positions has 2"},
      {"[0,1]}", "[0,-1]}", "cells[1] is -1"},
      {"[0,1]}", "[0,0.5]}", "cells[1] is 0.5"},
      {kStart, kPut, "failed_precondition"},
      {kStart, kGet, "failed_precondition"},
      {kStart, R"({"op":"set_causal","except":[]})", "failed_precondition"},
      {kStart, R"({"op":"set_layer_type","type":0})", "not_supported"},
      {kStart, R"({"op":"encoder_cached","result":false})", "not_supported"},
      {kStart, R"({"op":"reserved_mask","shape":[4,1],"first_cell":0})",
       "no start_forward with reserve"},
      {kStart, R"({"op":"remove","seq":0,"begin":2,"end":1,"result":"ok"})",
       "begin is 2"},
      {kStart, R"({"op":"remove","seq":-1,"begin":0,"end":1,"result":"ok"})",
       "seq is -1"},
      {kStart, R"({"op":"copy_prefix","src":0,"dst":1,"len":-1})", "len is -1"},
      {kStart, R"({"op":"can_resume","seq":0,"pos":-1,"result":true})",
       "pos is -1"},
      {kStart, R"({"op":"can_resume","seq":0,"pos":1,"result":"ok"})",
       "result is 'ok'"},
      {kStart, "\n{}", "an empty line"},
      {kStart, "null", "null, expected an object"},
  });
  ExpectBadInput(Lines({kHeader, kStart, kGet}), 3, "nothing was ever put");
  ExpectBadInput(
      Lines({kHeader, kStart, R"({"op":"set_causal","except":[2]})"}), 3,
      "except index 2");
}

TEST(Trace, RefusesCachesThatAreTooLarge) {
  const std::string deep = std::string(100000, '[');
  ExpectBadInput(deep, 1, "nested more than 16 deep");
  ExpectBadInput(Lines({kHeader, R"({"op":)" + deep}), 2, "16 deep");
  std::string objects = "{\"x\":[{}";
  for (int i = 0; i < 5000; ++i) objects += ",{}";
  ExpectBadInput(Lines({kHeader, objects + "]}"}), 2, "more than 4096 values");
  // Each line alone is small; products are large: cells times rows, or
  // sequences.
  const auto with_cells = [](double bytes_a_cell) {
    return Replaced(kHeader, R"("capacity":4)",
                    fmt::format(R"("capacity":{:.0f})",
                                kTraceCacheBytesMax / bytes_a_cell));
  };
  const std::string large = with_cells(1000);
  std::string row = "1";
  for (int i = 1; i < 4000; ++i) row += ",1";
  ExpectBadInput(
      Lines({large,
             R"({"op":"start_forward","positions":[0],"sequences":[0],)"
             R"("result":"ok"})",
             R"({"op":"put","layer":0,"key":{"shape":[4000,1,1],"data":[)" +
                 row + R"(]},"value":{"shape":[1,1,1],"data":[1]}})"}),
      3, "the cache would now need");
  std::vector<std::string> copies = {with_cells(250)};
  for (int seq = 1; seq < 2000; ++seq) {
    copies.push_back(
        fmt::format(R"({{"op":"copy_prefix","src":0,"dst":{},"len":1}})", seq));
  }
  std::istringstream in(Lines(copies));
  const Judgement judgement = Judge(in, {});
  EXPECT_EQ(VerdictName(judgement.verdict()), "bad_input");
  EXPECT_GT(judgement.line(), 1000);
}

TEST(Trace, RefusesThirdPartyCachesThatAreTooLarge) {
  // The sizes of a server: none of kvtwin's caches is made.
  const std::string server =
      Replaced(Replaced(Replaced(kHeader, "contiguous", "other"),
                        R"("capacity":4)", R"("capacity":131072)"),
               R"("max_batch":2)", R"("max_batch":100000)");
  ExpectAccept(
      Lines({Replaced(server, R"("layers":1)", R"("layers":2147483647)"),
             kStart, kPut, kGet}),
      Level::kVisibility);
  ExpectAccept(Lines({Replaced(server, R"("cache_padding":1)",
                               R"("cache_padding":1000000000)")}),
               Level::kVisibility);
  // Each line has few bytes, but they are multiplied by those of other lines.
  std::string zeros = "0";
  for (int i = 1; i < 20000; ++i) zeros += ",0";
  std::vector<std::string> lines = {
      server, fmt::format(R"({{"op":"start_forward","positions":[{0}],)"
                          R"("sequences":[{0}],"result":"ok"}})",
                          zeros)};
  for (int seq = 1; seq < 1000; ++seq) {
    lines.push_back(
        fmt::format(R"({{"op":"copy_prefix","src":0,"dst":{},"len":1}})", seq));
  }
  const Judgement judgement = JudgeText(Lines(lines));
  EXPECT_EQ(VerdictName(judgement.verdict()), "bad_input");
  EXPECT_GT(judgement.line(), 50);
  // An owner of a token takes at least 40 bytes.
  EXPECT_LT(judgement.line(), kTraceTokenBytesMax / (20000 * 40));
}

// A recording's masks are text, whatever their dtype is: the shape of a bits
// mask counts elements, not words.
TEST(Trace, ReadsMasksOfEveryDType) {
  for (const char* dtype : {"f32", "f16", "bf16", "bits"}) {
    const std::string header =
        Replaced(kHeader, R"("mask_dtype":"f32")",
                 fmt::format(R"("mask_dtype":"{}")", dtype));
    SCOPED_TRACE(header);
    ExpectAccept(Lines({header, kStart, kPut, kGet}), Level::kIdentity);
    ExpectReject(
        Lines({header, kStart, kPut, Replaced(kGet, R"("10")", R"("11")")}), 4,
        Level::kNone);
    for (const auto& [from, to, reason] :
         Cases{{R"(["10","11"])", R"(["10","1"])", "must be 2 times 0 or 1"},
               {R"("shape":[2,2],"rows":["10","11"])",
                R"("shape":[1,2],"rows":["1","3"])", "must be 1 times 0 or 1"},
               {R"("shape":[2,2],"rows":["10","11"])",
                R"("shape":[64,2],"rows":["10","11"])", "must be 64 times"},
               {R"("shape":[2,2])", R"("shape":[2,9223372036854775807])",
                "mask.shape[1]"}}) {
      ExpectBadInput(Lines({header, kStart, kPut, Replaced(kGet, from, to)}), 4,
                     reason);
    }
  }
}

// A header with the required fields only, and a pass without cells.
TEST(Trace, FillsInOmittedFields) {
  const std::string bare = Replaced(kHeader, R"(,"mask_dtype":"f32")", "");
  ExpectAccept(Lines({bare, kStart, kPut, kGet}), Level::kIdentity);
  const std::string encoder = Replaced(
      Replaced(kHeader, R"("causal","shift":"tag_add")", R"("encoder")"),
      R"("capacity":4)", R"("capacity":1)");
  const std::string none =
      Replaced(kStart, R"("cells":[0,1])", R"("cells":[])");
  ExpectAccept(Lines({encoder, none}), Level::kIdentity);
  const std::string wrapper =
      Replaced(kHeader, R"({"type":"causal","shift":"tag_add"})",
               R"({"type":"wrapper","caches":[{"type":"encoder"},)"
               R"({"type":"causal","shift":"none"}]})");
  ExpectAccept(Lines({wrapper, none}), Level::kIdentity);
  const std::string full =
      R"({"op":"start_forward","positions":[2,3],"sequences":[0,0],)"
      R"("result":"cache_full","cells":[]})";
  ExpectAccept(Lines({Replaced(kHeader, R"("capacity":4)", R"("capacity":3)"),
                      kStart, full}),
               Level::kIdentity);
  ExpectBadInput(Lines({kHeader, Replaced(full, "[]", "[1]")}), 2,
                 "cells has 1 numbers");
  const std::string reserving =
      R"({"op":"start_forward","positions":[0],"sequences":[0],)"
      R"("reserve":true,"result":"ok","cells":[]})";
  ExpectAccept(Lines({kHeader, reserving}), Level::kIdentity);
}

// A stream that breaks, or never ends.
class OddStream : public std::streambuf {
 public:
  OddStream(std::string text, bool endless)
      : text_(std::move(text)), endless_(endless) {
    setg(text_.data(), text_.data(), text_.data() + text_.size());
  }

 private:
  int_type underflow() override {
    if (!endless_) throw std::runtime_error("the disk is gone");
    setg(text_.data(), text_.data(), text_.data() + text_.size());
    return traits_type::to_int_type(text_[0]);
  }

  std::string text_;
  bool endless_;
};

TEST(Trace, ReportsABrokenStream) {
  TraceOp op;
  for (const std::string& text :
       {std::string(), Lines({kHeader}),
        Lines({kHeader, ""}) + std::string(1 << 17, ' ')}) {
    OddStream odd(text, /*endless=*/false);
    std::istream in(&odd);
    TraceReader reader(in);
    if (reader.ReadHeader()) {
      EXPECT_FALSE(reader.ReadOp(op));
    }
    ASSERT_TRUE(reader.error().has_value());
    EXPECT_EQ(reader.error()->reason, "cannot be read");
    EXPECT_FALSE(reader.ReadOp(op));  // The reader does not try again.
  }
}

TEST(Trace, GivesUpOnAnEndlessLine) {
  OddStream odd(std::string(1 << 16, ' '), /*endless=*/true);
  std::istream in(&odd);
  TraceReader reader(in);
  EXPECT_FALSE(reader.ReadHeader());
  EXPECT_EQ(reader.error()->reason, "the line is longer than 268435456 bytes");
}

// A stream of text, then this many blanks, then text.
class LongLine : public std::streambuf {
 public:
  LongLine(std::string before, std::size_t blanks, std::string after)
      : parts_{std::move(before), std::move(after)}, blanks_(blanks) {}

 private:
  int_type underflow() override {
    if (at_ == 0) return Give(parts_[0], 1);
    if (blanks_ > 0) {
      const std::string blanks(std::min<std::size_t>(blanks_, 1 << 20), ' ');
      blanks_ -= blanks.size();
      return Give(blanks, 1);
    }
    return at_ == 1 ? Give(parts_[1], 2) : traits_type::eof();
  }
  int_type Give(const std::string& text, int at) {
    at_ = at;
    text_ = text;
    setg(text_.data(), text_.data(), text_.data() + text_.size());
    return traits_type::to_int_type(text_[0]);
  }

  std::array<std::string, 2> parts_;
  std::size_t blanks_;
  std::string text_;
  int at_ = 0;
};

TEST(Trace, ATooLongLineEndsOnlyItsRecording) {
  const std::string start = Lines({kStart});
  LongLine lines(Lines({kHeader}) + R"({"op":)", kTraceLineBytesMax + 7,
                 "\n" + start + Lines({kHeader, kStart, kPut, kGet}));
  std::istream in(&lines);
  EXPECT_EQ(JudgeSeveral(in),
            (Verdicts{{Verdict::kBadInput, 2}, {Verdict::kAccept, 0}}));
  // Past twice that length, the reader does not look for a line end.
  LongLine longer(Lines({kHeader}), 2 * kTraceLineBytesMax + (1 << 20),
                  "\n" + Lines({kHeader}));
  std::istream more(&longer);
  TraceReader stops(more, /*several=*/true);
  EXPECT_EQ(VerdictName(Judge(stops, {}).verdict()), "bad_input");
  EXPECT_FALSE(stops.SkipToHeader());
}

TEST(Trace, ATooLongHeaderIsItsOwnRecording) {
  LongLine lines(Lines({kHeader, kStart}) + R"({"kvtrace":)",
                 kTraceLineBytesMax, "1}\n" + Lines({kHeader, kStart}));
  std::istream in(&lines);
  TraceReader reader(in, /*several=*/true);
  EXPECT_EQ(VerdictName(Judge(reader, {"reference"}).verdict()), "accept");
  ASSERT_TRUE(reader.SkipToHeader());
  const Judgement judgement = Judge(reader, {"reference"});
  EXPECT_EQ(judgement.line(), 3);
  EXPECT_EQ(judgement.reason(), "the line is longer than 268435456 bytes");
  ASSERT_TRUE(reader.SkipToHeader());
  EXPECT_EQ(VerdictName(Judge(reader, {"reference"}).verdict()), "accept");
  EXPECT_FALSE(reader.SkipToHeader());
}

TEST(Trace, RefusesANul) {
  const std::string nul(1, '\0');
  for (const std::string& text :
       {Lines({kHeader, kStart + nul + "{"}), Lines({kHeader, nul + kStart}),
        Lines({kHeader, kStart}) + nul + "\n"}) {
    ExpectBadInput(text, 2 + (text.ends_with(nul + "\n") ? 1 : 0),
                   "not JSON: a NUL at column");
  }
}

// The two limits are tested separately.
TEST(Trace, AcceptsTheStatedNumberAndDepthOfValues) {
  const auto problem = [](const std::string& list) {
    JsonValue object;
    return ParseJsonLine(R"({"op":)" + list + "}", object);
  };
  // The lists are nested in the object.
  for (std::size_t lists : {kJsonDepthMax - 1, kJsonDepthMax}) {
    EXPECT_EQ(problem(std::string(lists, '[') + std::string(lists, ']')),
              lists < kJsonDepthMax ? "" : "nested more than 16 deep");
  }
  std::string objects = "[{}";
  for (int values = 3; values < kJsonValuesMax; ++values) objects += ",{}";
  EXPECT_EQ(problem(objects + "]"), "");
  EXPECT_EQ(problem(objects + ",{}]"), "more than 4096 values");
}

TEST(Trace, GivesUpOnATooLongList) {
  std::string line = R"({"op":[)";
  line.reserve(2 * kJsonElementsMax + 100);
  for (std::size_t i = 0; i < kJsonElementsMax; ++i) line += "0,";
  line += "0]}";
  JsonValue object;
  EXPECT_EQ(ParseJsonLine(line, object),
            "a list has more than 67108864 numbers");
}

TEST(Trace, IgnoresEmptyLinesAtTheEnd) {
  ExpectAccept(Lines({kHeader, kStart, "", " \r", ""}), Level::kIdentity);
  ExpectAccept(Lines({kHeader, "", ""}), Level::kIdentity);
  ExpectBadInput(Lines({kHeader, kStart, "", "", kPut}), 3, "an empty line");
}

// A recording is read 65,536 bytes at a time.
TEST(Trace, ReadsLinesAsLongAsItsChunks) {
  const std::string rest = fmt::format("{}\n{}\n{}\n", kStart, kPut, kGet);
  const std::string header = kHeader;
  for (const std::size_t n : {std::size_t{1} << 16, std::size_t{1} << 17}) {
    for (const std::size_t bytes : {n - 2, n - 1, n, n + 1}) {
      std::string line = header;
      line.insert(1, bytes - line.size(), ' ');
      std::istringstream in(line + "\n" + rest);
      const Judgement found = Judge(in, kTwins);
      EXPECT_EQ(found.verdict(), Verdict::kAccept) << bytes << found.reason();
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
