// The sizes at which the code goes another way: what lies on both sides of
// them, and beyond. docs/testing.md lists the constants, and which test crosses
// each.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/mask_elements.h"
#include "kvtwin/save.h"
#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"
#include "optimized/fast_paths.h"
#include "optimized/mask.h"
#include "props/base/scratch_folder.h"
#include "props/paged/paged_fuzz.h"
#include "props/search/fuzz.h"
#include "props/testing/test_cache.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using optimized::FastPaths;

void ExpectAgreement(const std::string& line) {
  SCOPED_TRACE(line);
  const Result<History> history = ParseHistory(line);
  ASSERT_TRUE(history.ok()) << history.status().ToString();
  const Subject subject = TwinSubject("optimized");
  const RunResult result = RunHistory(*history, subject);
  EXPECT_TRUE(result.ran);
  ASSERT_FALSE(result.difference)
      << FailureText(*history, *result.difference, subject);
}

// The code takes its ways for large work always, never, and where they pay.
class OnEachPath : public ::testing::TestWithParam<FastPaths> {
 protected:
  void SetUp() override { optimized::ForceFastPaths(GetParam()); }
  void TearDown() override { optimized::ForceFastPaths(FastPaths::kAuto); }
};
std::string PathName(const ::testing::TestParamInfo<FastPaths>& info) {
  constexpr std::array kNames = {"auto", "on", "off"};
  return kNames.at(static_cast<std::size_t>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Paths, OnEachPath,
                         ::testing::Values(FastPaths::kAuto, FastPaths::kOn,
                                           FastPaths::kOff),
                         PathName);

TEST(Thresholds, OwnersOfAToken) {
  for (const int n : {63, 64, 65, 127, 128, 129, 300}) {
    ExpectAgreement(fmt::format(
        "kvt1 cap=8 shift=add | put 0*2 | copy 0>1-{0}:1 | put {0}*1 | "
        "drop {0}:0-1 | drop {0}:0- | put {0}*1 {1}*1 | copy {0}>0:2 | "
        "drop 0:0-",
        n - 1, n / 2));
  }
  // Owners that come after many others have a token, and must not shift it.
  for (const int n : {63, 64, 65, 128}) {
    ExpectAgreement(fmt::format(
        "kvt1 cap=1 seqs=200 batch=200 shift=add | put 0-{0}*1 | put {1}*2 | "
        "copy {1}>{2}-{3}:2 | drop {1}:0- | drop {2}:0-1 | drop {3}:0- | "
        "drop {2}:0-1",
        n - 1, n, n + 1, n + 3));
  }
}

TEST(Thresholds, SequencesWithTokensOfTheirOwn) {
  for (const int n : {15, 16, 17, 63, 64, 65, 129}) {
    ExpectAgreement(fmt::format(
        "kvt1 seqs=1 cap={2} batch={2} | put 0-{0}*1 except={0} | drop {0}:0- "
        "| put {0}*2 0*1 | drop {1}:0- | copy {0}>{1}:2 | put {1}*1",
        n - 1, n / 2, n + 4));
  }
}

TEST(Thresholds, IndicesOfExceptedTokens) {
  for (const int n : {31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 255, 256}) {
    ExpectAgreement(fmt::format(
        "kvt1 cells={0} dims=1,1,1 | put 0*{0} except={1} | causal {1},{2} | "
        "causal",
        n + 4, n, n - 1));
  }
}

TEST(Thresholds, TokensOfASegment) {
  for (const int n : {499, 500, 501, 999, 1000, 1001}) {
    const std::string line = fmt::format(
        "kvt1 cells=1100 batch=1050 | start 0*{} | start 1*free-3", n);
    const History history = *ParseHistory(line);
    EXPECT_EQ(ToText(history), line);
    std::vector<CellEntry> cells;
    ReferenceAfter(history)->ListCells(cells);
    EXPECT_EQ(std::ssize(cells), std::min(n + 1050, 1097));
  }
  for (const auto& [most, more] : {std::pair("put 0*1048576", "put 0*1048577"),
                                   {"put 0*free-1048576", "put 0*free-1048577"},
                                   {"put 0*free+1048576", "put 0*free+1048577"},
                                   {"put 0-4095*1", "put 0-4096*1"},
                                   {"copy 0>1-4096:1", "copy 0>1-4097:1"}}) {
    const std::string setup = "kvt1 cells=8 | ";
    EXPECT_TRUE(ParseHistory(setup + most).ok()) << most;
    EXPECT_FALSE(ParseHistory(setup + more).ok()) << more;
  }
}

// Masks ----------------------------------------------------------------------

// Two sequences take turns, three cells and one. What the rows show ends at
// cells that are far apart.
void ExpectMasksOf(std::size_t columns, std::size_t rows) {
  constexpr std::size_t kFirst = 100;
  const std::size_t cells = kFirst + columns;
  optimized::CellTable table(cells, 2, 0);
  for (std::size_t cell = 0; cell < cells; ++cell) {
    table.Add(cell % 4 == 3, cell, static_cast<std::int32_t>(cell));
  }
  std::vector<optimized::RowRule> rules;
  const auto last = static_cast<std::int32_t>(cells) - 1;
  for (std::size_t i = 0; i + 1 < rows; ++i) {
    const auto less = static_cast<std::int32_t>(i);
    const std::int32_t low = 150 + less * 7;
    rules.push_back({table.Find(i % 3 == 2),
                     {low, std::max(low, last - less * 1031 % last)}});
  }
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kBits}) {
    optimized::HostMask mask;
    mask.Build(table, rules, rows, {.first = kFirst, .end = cells}, dtype);
    DenseTensor due = HidingMask(dtype, static_cast<std::int64_t>(columns),
                                 static_cast<std::int64_t>(rows));
    for (std::size_t row = 0; row < rules.size(); ++row) {
      for (int cell = rules[row].range.first; cell <= rules[row].range.last;
           ++cell) {
        if (cell < static_cast<int>(kFirst)) continue;
        if ((cell % 4 == 3) != (row % 3 == 2)) continue;
        AllowInMask(due, cell - static_cast<int>(kFirst),
                    static_cast<std::int64_t>(row));
      }
    }
    const TensorView view = mask.view();
    ASSERT_EQ(view.shape, due.shape);
    const auto bytes = static_cast<std::size_t>(due.view().stride[1]);
    for (std::size_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::int64_t>(row);
      ASSERT_EQ(0, std::memcmp(view.at(0, at), due.view().at(0, at), bytes))
          << DTypeName(dtype) << ", row " << row << " of " << columns;
    }
  }
}

TEST_P(OnEachPath, ColumnsOfAMask) {
  for (const int n : {1024, 8192, 32768, 65536, 131072}) {
    for (const int columns : {n - 1, n, n + 1}) {
      ExpectMasksOf(static_cast<std::size_t>(columns), 3);
    }
  }
}

TEST_P(OnEachPath, RowsOfAMask) {
  for (const std::size_t rows : {7U, 8U, 9U, 10U, 65U, 257U}) {
    ExpectMasksOf(2100, rows);
  }
  // 16 MiB of f32.
  for (const std::size_t rows : {63U, 64U, 65U}) ExpectMasksOf(65536, rows);
}

// Cells ----------------------------------------------------------------------

// Nearly all cells are used, by two sequences, and few are free: 5 in a row at
// the end, and each 700th.
CacheState Crowded(int cells) {
  CacheState state;
  for (int cell = 0; cell + 5 < cells; ++cell) {
    if (cell % 700 != 699) state.cells.push_back({cell, cell, cell / 96 % 2});
  }
  return state;
}

void ExpectSamePass(Cache& a, Cache& b) {
  std::vector<CellEntry> a_cells;
  std::vector<CellEntry> b_cells;
  a.ListCells(a_cells);
  b.ListCells(b_cells);
  ASSERT_EQ(a_cells, b_cells);
  const float one = 1;
  const auto tokens = std::ssize(a.BatchCells());
  TensorView rows = DenseView(&one, DType::kF32, {1, 1, tokens, 1});
  rows.stride = {0, 0, 0, 0};
  ASSERT_TRUE(a.Put(rows, rows).ok() && b.Put(rows, rows).ok());
  const KvView due = *a.Get();
  const KvView found = *b.Get();
  ASSERT_EQ(found.first_cell, due.first_cell);
  ASSERT_EQ(found.mask.shape, due.mask.shape);
  const auto bytes = static_cast<std::size_t>(due.mask.shape[0]) * 4;
  for (std::int64_t row = 0; row < due.mask.shape[1]; ++row) {
    ASSERT_EQ(0, std::memcmp(due.mask.at(0, row), found.mask.at(0, row), bytes))
        << "row " << row;
  }
}

void ExpectSameIn(int cells, Placement placement) {
  SCOPED_TRACE(cells);
  CacheSpec spec;
  spec.placement = placement;
  spec.shift.kind = ShiftKind::kIdentity;
  std::array<std::unique_ptr<Cache>, 2> twins = {*MakeCache(spec, "reference"),
                                                 *MakeCache(spec, "optimized")};
  const auto both = [&](const auto& call) {
    const auto first = call(*twins[0]);
    ASSERT_EQ(first.code(), call(*twins[1]).code());
  };
  const CacheState state = Crowded(cells);
  both([&](Cache& c) { return c.Init(DType::kF32, 1, cells, 8); });
  both([&](Cache& c) { return c.Restore(state); });
  const auto pass = [&](std::vector<int> sequences) {
    std::vector<std::int32_t> positions(sequences.size(), cells);
    both([&](Cache& c) {
      return c.StartForward({positions, sequences}, false);
    });
    ASSERT_NO_FATAL_FAILURE(ExpectSamePass(*twins[0], *twins[1]));
  };
  ASSERT_NO_FATAL_FAILURE(pass({0, 1, 0, 1, 0}));  // At the end.
  both([&](Cache& c) { return c.Remove(0, cells / 2, cells / 2 + 97); });
  both([&](Cache& c) { return c.CopyPrefix(1, 2, cells / 2); });
  ASSERT_NO_FATAL_FAILURE(pass({0, 2, 2}));
  // The free cells lie apart: the last tokens move.
  both([&](Cache& c) { return c.Remove(2, cells / 3, cells / 3 + 4); });
  ASSERT_NO_FATAL_FAILURE(pass({1, 1, 1, 1, 1, 1, 1, 0}));
  both([&](Cache& c) { return c.Remove(1, 0, kOpenEnd); });
  ASSERT_NO_FATAL_FAILURE(pass({3, 0}));
}

// The largest that a line may ask for is taken, and one more is refused.
TEST(Thresholds, SizesOfALine) {
  const auto refusal = [](const std::string& line) {
    const bool paged = line.starts_with("kvp1");
    return paged ? ParsePagedHistory(line).status().message()
                 : ParseHistory(line).status().message();
  };
  const auto times = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  struct Case {
    std::string begin;
    int most;
    std::string end;
    std::string why;
  };
  for (const auto& [begin, most, end, why] : std::vector<Case>{
           {"kvt1 seqs=1 cap=", (1 << 20) - 2, " batch=1 | put 0*1",
            "more than 1048576 cells or mask rows"},
           // The mask has 16,380 * 4,097 elements.
           {"kvt1 seqs=1 cap=", 12'283, " batch=4096 | put 0*1",
            "a cache of this size is too large for a test"},
           // The rows of all layers have 64 * 1,024 * (512 + 512) elements.
           {"kvt1 seqs=1 batch=1 layers=64 dims=512,1,512 cap=", 1022,
            " | put 0*1", "a cache of this size is too large for a test"},
           {"kvt1 layers=", 64, " | put 0*1", "there can be 1 to 64"},
           {"kvp1 block=", 1 << 14, " | open 0 0 0", "must be from 1 to 16384"},
           {"kvp1 block=16384 kdim=1 vdim=1 layers=1 heads=1 blocks=", 64,
            " | open 0 0 0", "a pool that is too large"}}) {
    EXPECT_EQ(refusal(begin + std::to_string(most) + end), "");
    EXPECT_NE(refusal(begin + std::to_string(most + 1) + end).find(why),
              std::string::npos)
        << refusal(begin + std::to_string(most + 1) + end);
  }
  const std::string caches = "kvt1 kind=wrapper caches=causal";
  EXPECT_EQ(refusal(caches + times(15, "/causal") + " | put 0*1"), "");
  EXPECT_NE(refusal(caches + times(16, "/causal") + " | put 0*1")
                .find("more than 16 caches"),
            std::string::npos);
  EXPECT_EQ(refusal("kvp1" + times(100'000, " | open 0 0 0")), "");
  EXPECT_NE(refusal("kvp1" + times(100'001, " | open 0 0 0"))
                .find("more than 100000 times"),
            std::string::npos);
}

// A level more at 64, 4,096 and 262,144 cells, and a lone cell in it.
TEST(Thresholds, LevelsOfASetOfCells) {
  for (const std::size_t n : {64U, 4096U, 262144U, 16777216U}) {
    optimized::BitTree set(n + 1);
    for (const std::size_t cell : {n, n - 1, std::size_t{0}}) {
      set.Set(cell);
      EXPECT_EQ(set.First(), cell);
      EXPECT_EQ(set.Last(), cell);
      EXPECT_EQ(set.Next(cell), cell);
      EXPECT_EQ(set.Next(cell + 1), optimized::kNone);
      EXPECT_EQ(set.NextWord(0), cell / 64);
      EXPECT_EQ(set.empty(), false);
      set.Clear(cell);
      EXPECT_EQ(set.First(), optimized::kNone);
      EXPECT_EQ(set.Last(), optimized::kNone);
      EXPECT_EQ(set.empty(), true);
    }
  }
}

TEST(Thresholds, CellsOfACache) {
  for (const int cells : {2047, 2048, 2049, 4095, 4096, 4097, 65535, 65536,
                          65537, 131072 + 1, 262144 + 1}) {
    for (const Placement placement :
         {Placement::kContiguous, Placement::kScatter}) {
      ASSERT_NO_FATAL_FAILURE(ExpectSameIn(cells, placement));
    }
  }
}

// Between two passes of a sequence, more words change than are kept in mind;
// and its window moves by more cells.
TEST_P(OnEachPath, ChangesBetweenPasses) {
  for (const int words : {31, 32, 33, 34}) {
    ExpectAgreement(
        fmt::format("kvt1 shift=add seqs=1 cap=2600 batch=1200 dims=1,1,1 | "
                    "start 0*1200 | start 0*1150 | put 0*1 | drop 0:64-{} | "
                    "put 0*1 | put 0*1",
                    64 + words * 64));
    ExpectAgreement(
        fmt::format("kvt1 kind=swa_mem window=200 memory=900 seqs=1 cap=1000 "
                    "batch=300 dims=1,1,1 | start 0*300 | put 0*1 | put 0*1@+{}"
                    " | put 0*1@-{}",
                    words, words));
    // The words that sequence 0 leaves to 1, the one that a token of it comes
    // to, and nothing else: the first of them counts as well.
    const int tokens = (words - 1) * 64;
    ExpectAgreement(
        fmt::format("kvt1 seqs=2 cap=1200 batch=2200 dims=1,1,1 | start 0*{} | "
                    "copy 0>1:{} | put 0*1 | drop 0:64- | put 0*1",
                    tokens, tokens));
    // As many words lose all their cells, of one sequence, and one gets a
    // cell; and as many cells leave a window. Another sequence has cells on
    // both sides, so that the view still has these.
    ExpectAgreement(
        fmt::format("kvt1 shift=add seqs=1 cap=2600 batch=2400 dims=1,1,1 | "
                    "start 0*2300 | copy 0>1:2300 | put 0*1 1*1 | drop 0:{}- | "
                    "put 0*1 1*1",
                    64 * (36 - words + 1)));
    ExpectAgreement(
        fmt::format("kvt1 kind=swa_mem window=200 memory=900 seqs=2 cap=1000 "
                    "batch=300 dims=1,1,1 | start 1*300 | start 0*300 | "
                    "put 0*1 1*1 | put 0*1@+{0} 1*1 | put 0*1@-{0} 1*1",
                    words));
  }
}

// Rows -----------------------------------------------------------------------

TEST_P(OnEachPath, ElementsOfARow) {
  for (const int n : {8, 16, 64, 128, 256, 512, 2048}) {
    for (const int width : {n - 1, n, n + 1}) {
      for (const std::string_view how :
           {"strided=1 dtype=f16 shift=rope", "permuted=1 shift=rope_halves",
            "permuted=1 dtype=f8_e4m3 shift=tag_add",
            "permuted=1 dtype=bf16 shift=add",
            "tiled=1 pad=32 strided=1 shift=add",
            "dtype=f8_e4m3 strided=1 shift=identity"}) {
        ExpectAgreement(
            fmt::format("kvt1 seqs=1 cap=40 batch=40 dims={0},1,{0} {1} | "
                        "put 0*3 1*2 0*1 2*33 | drop 1:0- | drop 0:0-1 | "
                        "put 3*4 | put 2*1",
                        width, how));
      }
    }
  }
  for (const int width : {32, 64, 96, 2016, 2048, 2080}) {
    for (const std::string_view how : {"q8_0 shift=rope", "q4_0 shift=add"}) {
      ExpectAgreement(
          fmt::format("kvt1 cells=4 dims={0},2,{0} dtype={1} | "
                      "put 0*3 | drop 0:0-1 | put 0*1",
                      width, how));
    }
  }
}

// Columns of 4096 bytes begin on lines.
TEST_P(OnEachPath, CellsOfPermutedRows) {
  for (const auto& [dtype, n] :
       {std::pair("f32", 1024), {"f16", 2048}, {"f8_e4m3", 4096}}) {
    for (const int cells : {n - 1, n, n + 1}) {
      ExpectAgreement(fmt::format(
          "kvt1 seqs=1 cap={} batch=8 permuted=1 dims=1,2,3 dtype={} | "
          "put 0*5 1*2 | put 1*1 reserve | drop 0:0-2 | put 1*6",
          cells, dtype));
    }
  }
}

// Bytes ----------------------------------------------------------------------

TEST(Thresholds, BytesOfABuffer) {
  for (const std::size_t n : {std::size_t{2} << 20, std::size_t{8} << 20}) {
    for (const std::size_t bytes : {n - 1, n, n + 1}) {
      optimized::AlignedBuffer buffer(bytes);
      ASSERT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0U);
      EXPECT_EQ(buffer.data()[0], std::byte{0});
      EXPECT_EQ(buffer.data()[bytes - 1], std::byte{0});
      std::memset(buffer.data(), 1, bytes);
      EXPECT_EQ(buffer.data()[bytes - 1], std::byte{1});
    }
  }
}

// K of a mebibyte, and next to it. Each part has a checksum.
TEST(Thresholds, BytesOfAState) {
  const ScratchFolder folder("thresholds");
  const std::string path = folder.File("state");
  for (const int tokens : {127, 128, 129, 255, 256, 257, 513}) {
    CacheState state;
    DenseTensor key = FilledTensor(DType::kF32, {1024, 1, tokens, 1}, 1);
    for (std::size_t i = 0; i < key.bytes.size(); i += 1 << 12) {
      key.bytes[i] = static_cast<std::byte>(i >> 12);
    }
    for (int i = 0; i < tokens; ++i) state.cells.push_back({i, i, 0});
    state.layers[0] = {key, FilledTensor(DType::kF32, {1024, 1, tokens, 1}, 2)};
    ASSERT_TRUE(SaveState(state, path).ok());
    const Result<CacheState> loaded = LoadState(path);
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_TRUE(*loaded == state);
    std::vector<std::byte> bytes = StateToBytes(state);
    EXPECT_TRUE(*StateFromBytes(bytes) == state);
    for (const std::size_t from_end : {1U, 1U << 12, 1U << 19}) {
      std::byte& one = bytes[bytes.size() - from_end];
      one ^= std::byte{1};
      EXPECT_FALSE(StateFromBytes(bytes).ok()) << tokens << " " << from_end;
      one ^= std::byte{1};
    }
  }
  // A checksum has every byte of a tensor of many parts.
  constexpr std::size_t kPart = std::size_t{1} << 20;
  const DenseTensor many = FilledTensor(DType::kF32, {1 << 18, 1, 21, 1}, 1);
  CacheState state;
  for (int i = 0; i < 21; ++i) state.cells.push_back({i, i, 0});
  state.layers[0] = {many, FilledTensor(DType::kF32, {1, 1, 21, 1}, 2)};
  std::vector<std::byte> bytes = StateToBytes(state);
  ASSERT_TRUE(*StateFromBytes(bytes) == state);
  const std::size_t end = bytes.size() - 21 * sizeof(float);  // Of K.
  for (std::size_t from_end = 1; from_end < many.bytes.size();
       from_end += kPart / 2) {
    std::byte& one = bytes[end - from_end];
    one ^= std::byte{1};
    EXPECT_FALSE(StateFromBytes(bytes).ok()) << from_end;
    one ^= std::byte{1};
  }
  std::filesystem::remove(path);
}

// Files are read 65,536 bytes at a time.
TEST(Thresholds, BytesOfALine) {
  const std::string rest = fmt::format("{}\n{}\n{}\n", kStart, kPut, kGet);
  const std::string header = kHeader;
  for (const std::size_t n : {std::size_t{1} << 16, std::size_t{1} << 17}) {
    for (const std::size_t bytes : {n - 2, n - 1, n, n + 1}) {
      std::string line = header;
      line.insert(1, bytes - line.size(), ' ');
      std::istringstream in(line + "\n" + rest);
      const Judgement found = Judge(in, kTwins);
      EXPECT_EQ(found.verdict, Verdict::kAccept) << bytes << found.reason;
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
