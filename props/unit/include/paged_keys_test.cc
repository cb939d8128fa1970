// Prompts find blocks by their own tokens under their own key, and never by
// similar tokens or keys.

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using List = std::vector<std::int32_t>;

constexpr PagedSpec kSpec = {
    .block_size = 2, .blocks = 8, .max_seq_len = 16, .dtype = DType::kF32};

// Returns a pool that has these tokens under a key.
std::unique_ptr<PagedPool> PoolWith(const PrefixKey& key, const List& tokens,
                                    const std::string& twin) {
  auto pool = *MakePagedPool(kSpec, twin);
  const int sequence = *pool->Open({}, key);
  const std::vector<float> rows(tokens.size(), 1);
  const TensorView view =
      DenseView(rows.data(), DType::kF32, {1, 1, std::ssize(tokens), 1});
  EXPECT_TRUE(pool->Append(sequence, 0, view, view).ok());
  EXPECT_TRUE(pool->Commit(sequence, tokens).ok());
  return pool;
}

// Returns how many tokens of the prompt the pool finds.
int Found(PagedPool& pool, const PrefixKey& key, List prompt) {
  prompt.push_back(0);
  const int sequence = *pool.Open(prompt, key);
  const int found = *pool.SeqLen(sequence);
  EXPECT_TRUE(pool.Free(sequence).ok());
  return found;
}

std::vector<PrefixKey> ManyKeys() {
  std::vector<PrefixKey> keys;
  for (int i = 0; i < PagedKeyCount(); ++i) {
    if (std::ranges::count(keys, PagedKey(i)) == 0) keys.push_back(PagedKey(i));
  }
  // Keys with a NUL, which a C string cannot hold.
  const std::string nul(1, '\0');
  for (const std::string& salt : {"a" + nul, "a" + nul + "b", nul, nul + nul}) {
    keys.push_back({salt, {}});
    keys.push_back({"", {salt}});
  }
  // Keys with line ends between parts; with lengths that look like text; and
  // with lengths that overflow one or two bytes.
  for (const char* joined : {"a\nb", "a\r\nb", "a\tb"}) {
    keys.push_back({joined, {}});
  }
  keys.push_back({"a", {"b"}});
  keys.push_back({"9yyyyyyyyy0", {}});
  keys.push_back({"1", {"yyyyyyyyy", ""}});
  for (const std::size_t size : {std::size_t{255}, std::size_t{65534}}) {
    const std::string long_part(size, 'b');
    const char low = static_cast<char>(size % 256);
    const char high = static_cast<char>(size / 256);
    std::string bytes = {low};
    if (size > 255) bytes += high;
    keys.push_back({"a", {long_part}});
    keys.push_back({"a" + bytes + long_part, {}});
    keys.push_back({"a" + std::string{high, low} + long_part, {}});
  }
  // Long parts that differ in the last byte only.
  for (const std::size_t size : {63U, 64U, 255U, 256U, 4096U, 70000U}) {
    for (const char* last : {"c", "d"}) {
      keys.push_back({std::string(size, 'c') + last, {}});
      keys.push_back({"", {std::string(size, 'c') + last}});
    }
  }
  keys.push_back({"a", {nul, "b"}});
  keys.push_back({"a" + nul, {"b"}});
  return keys;
}

class PagedKeys : public EachTwin {};
// The tokens of histories, by alphabet (docs/histories.md): plain; equal when
// joined as text; equal in 8 bits; equal in 16 bits; the bytes of a key; the
// largest.
TEST(PagedClient, DrawsTokensThatCollideWithOneAnother) {
  const std::vector<std::string> pairs = {"[0,1]",
                                          "[1,11]",
                                          "[0,256]",
                                          "[1,65537]",
                                          "[1633771873,1650614882]",
                                          "[0,2147483647]"};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const std::string line =
        "kvp1 block=2 blocks=1 most=2 | open 0 0 0 | append 0 1 " +
        std::to_string(i * 256 + 2) + " | commit 0 1 0";
    std::ostringstream out;
    EXPECT_TRUE(
        WritePagedRecording(*ParsePagedHistory(line), "reference", out).ok());
    EXPECT_NE(out.str().find("\"tokens\":" + pairs[i]), std::string::npos)
        << out.str();
  }
}

INSTANTIATE_TEST_SUITE_P(Twins, PagedKeys, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(PagedKeys, DoNotCollide) {
  const List tokens = {0x61616161, 0x61616161, 0x61616161, 0x61616161};
  const std::vector<PrefixKey> keys = ManyKeys();
  for (const PrefixKey& own : keys) {
    const auto pool = PoolWith(own, tokens, GetParam());
    for (const PrefixKey& other : keys) {
      EXPECT_EQ(Found(*pool, other, tokens), own == other ? 4 : 0)
          << own.salt << " and " << own.extra.size() << ", " << other.salt
          << " and " << other.extra.size();
    }
  }
}

TEST_P(PagedKeys, DoNotCollideWithTokens) {
  // Four bytes of the salt, or of an extra, are the bytes of a token.
  const List tokens = {0x61616161, 0x61616161, 0x62626262, 0x62626262};
  const auto pool = PoolWith({}, tokens, GetParam());
  EXPECT_EQ(Found(*pool, {}, tokens), 4);
  for (const PrefixKey& key : {PrefixKey{"aaaaaaaa", {}},
                               {"", {"aaaaaaaa"}},
                               {"aaaa", {"aaaa"}},
                               {"", {"aaaa", "aaaa"}}}) {
    EXPECT_EQ(Found(*pool, key, {0x62626262, 0x62626262}), 0);
  }
}

TEST_P(PagedKeys, TokensDoNotCollide) {
  const std::vector<List> lists = {
      {1, 11, 1, 11}, {11, 1, 11, 1},       {1, 1, 11, 11},   {111, 1, 1, 1},
      {0, 0, 0, 0},   {256, 0, 0, 0},       {65536, 0, 0, 0}, {0, 65536, 0, 0},
      {0, 31, 0, 0},  {1, 0, 0, 0},         {0, 0, 256, 0},   {0, 1, 0, 1},
      {1, 0, 1, 0},   {0x7FFFFFFF, 0, 0, 0}};
  for (const List& own : lists) {
    const auto pool = PoolWith({}, own, GetParam());
    for (const List& other : lists) {
      int expected = 0;  // Tokens in equal whole blocks.
      if (own[0] == other[0] && own[1] == other[1]) expected = 2;
      if (own == other) expected = 4;
      EXPECT_EQ(Found(*pool, {}, other), expected);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
