#include "props/paged/paged_client.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// Four keys that a pool may confuse if it joins their parts without marking
// where each part ends, skips empty parts, ignores the order or the count of
// extras, or compares a part of the key only.
using Keys = std::array<PrefixKey, 4>;

// Returns keys of the parts t, a and b, joined by `separator` in all places.
Keys JoinedBy(const std::string& separator) {
  return {PrefixKey{"t", {"a", "b"}},
          {"t", {"a" + separator + "b"}},
          {"t" + separator + "a", {"b"}},
          {"t" + separator + "a" + separator + "b", {}}};
}

std::vector<Keys> MakeKeys() {
  const std::string many(40, 'x');
  std::vector<Keys> keys = {
      // The empty key, a salt, the same text as an extra, and an empty extra.
      {PrefixKey{"", {}}, {"s", {}}, {"", {"s"}}, {"", {""}}},
      {PrefixKey{"tenantA", {}},
       {"tenant", {"A"}},
       {"", {"tenantA"}},
       {"", {"tenant", "A"}}},
      {PrefixKey{"t", {"A", "B"}},
       {"t", {"B", "A"}},
       {"t", {"AB"}},
       {"tA", {"B"}}},
      {PrefixKey{"t", {"A"}},
       {"t", {"A", ""}},
       {"t", {"", "A"}},
       {"t", {"A", "A"}}},
      {PrefixKey{"t", {}}, {"t", {""}}, {"t", {"A", "A"}}, {"t", {"B", "B"}}},
      {PrefixKey{"1", {"23"}}, {"12", {"3"}}, {"", {"1", "23"}}, {"123", {}}},
      {PrefixKey{"a", {"b"}}, {"1:a1:b", {}}, {"1a1b", {}}, {"", {"1a1b"}}},
      // Keys with the bytes, and with the text, of tokens that Token returns.
      {PrefixKey{"aaaa", {}}, {"aaaaaaaa", {}}, {"aaaa", {"aaaa"}}, {"", {}}},
      {PrefixKey{"1", {}}, {"11", {}}, {"", {"1"}}, {"", {}}},
      {PrefixKey{many + "1", {}}, {many + "2", {}}, {many, {}}, {many, {"1"}}},
      {PrefixKey{"ab", {}}, {"ba", {}}, {"cd", {}}, {"a", {}}},
      {PrefixKey{"a", {"b", "c"}},
       {"a", {"b", "d"}},
       {"a", {"b"}},
       {"A", {"b"}}},
  };
  // Line ends are left out: a list of strings in a recording cannot have them.
  for (const char* separator : {",", "/", ":", "|", ";", " ", "\t", "-", "_",
                                ".", "+", "&", "=", "\x1f", "\",\"", ", "}) {
    keys.push_back(JoinedBy(separator));
  }
  // Extras in another order, and other counts of them.
  keys.push_back({PrefixKey{"t", {"b", "a"}},
                  {"t", {"a", "b"}},
                  {"t", {"a", "b", "a"}},
                  {"t", {"a", "a", "b"}}});
  keys.push_back({PrefixKey{"", {"b", "a"}},
                  {"", {"a", "b"}},
                  {"", {"b"}},
                  {"", {"b", "b"}}});
  // Several extras with another salt, and another extra after the first.
  keys.push_back({PrefixKey{"s", {"a", "b"}},
                  {"t", {"a", "b"}},
                  {"s", {"a", "c"}},
                  {"s", {"a", "b", "c"}}});
  return keys;
}

const std::vector<Keys>& AllKeys() {
  static const std::vector<Keys> keys = MakeKeys();
  return keys;
}

// Returns one of the two tokens of an alphabet: plain tokens; tokens that join
// to the same text in another order; tokens that are equal in 8 and in 16 bits;
// tokens with the bytes of a key; the largest token.
std::int32_t Token(int alphabet, int bit) {
  constexpr std::array<std::array<std::int32_t, 2>, kPagedAlphabets> kTokens = {
      {{0, 1},
       {1, 11},
       {0, 256},
       {1, 65537},
       {0x61616161, 0x62626262},
       {0, 0x7FFFFFFF}}};
  return kTokens.at(AsSize(Mod(alphabet, kPagedAlphabets))).at(AsSize(bit));
}

void Mix(std::uint64_t number, std::uint64_t& chain) {
  chain = (chain ^ (number + 1)) * 0x100000001B3U;
  chain ^= chain >> 29;
}

void Mix(std::string_view text, std::uint64_t& chain) {
  Mix(text.size(), chain);
  for (const char c : text) Mix(static_cast<unsigned char>(c), chain);
}

// Returns a hash of the client's key and its first `count` tokens.
std::uint64_t ChainOf(const PagedClient& client, std::size_t count) {
  std::uint64_t chain = 0;
  Mix(client.key.salt, chain);
  Mix(client.key.extra.size(), chain);
  for (const std::string& extra : client.key.extra) Mix(extra, chain);
  std::size_t media = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (; media < client.key.media.size() &&
           AsSize(client.key.media[media].position) <= i;
         ++media) {
      Mix(client.key.media[media].hash, chain);
    }
    const std::size_t own = client.tokens.size();
    const std::int32_t token =
        i < own ? client.tokens[i] : client.pending[i - own];
    Mix(static_cast<std::uint64_t>(token), chain);
  }
  return chain;
}

// Returns how many bits, with the sign, whole numbers have that this dtype
// holds exactly.
int ExactBitsOf(DType dtype) {
  if (dtype == DType::kF32) return 16;
  return dtype == DType::kF16 ? 11 : 8;
}

// Returns how many bits, with the sign, the numbers of rows have, so that a
// pool that stores fewer bits than it declares is found, and a pool that cuts
// bits off where it should round.
int BitsOf(DType stored, const std::optional<PoolAsker>& asker) {
  if (asker) return std::min(ExactBitsOf(stored), ExactBitsOf(asker->dtype()));
  const bool is_half = stored == DType::kF16 || stored == DType::kBF16;
  return ExactBitsOf(is_half ? DType::kF32 : stored);
}

// Returns f32 rows that identify their tokens, with whole numbers, which are
// short in recordings. K of different tokens point in different directions.
DenseTensor RowsOf(const std::vector<std::uint64_t>& chains, int layer,
                   int role, int bits, std::int64_t head_dim,
                   std::int64_t heads) {
  DenseTensor rows =
      FilledTensor(DType::kF32, {head_dim, heads, std::ssize(chains), 1}, 0);
  std::byte* to = rows.bytes.data();
  for (const std::uint64_t chain : chains) {
    for (std::int64_t i = 0; i < head_dim * heads; ++i, to += sizeof(float)) {
      const std::int64_t place = (i * kTracePoolLayersMax + layer) * 2 + role;
      std::uint64_t mixed =
          chain + static_cast<std::uint64_t>(place) * 0x9E3779B97F4A7C15U;
      mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9U;
      mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBU;
      const auto number = static_cast<std::int64_t>(mixed) >> (64 - bits);
      const auto value = static_cast<float>(number);
      std::memcpy(to, &value, sizeof(value));
    }
  }
  return rows;
}

}  // namespace

Failure PoolFailure(std::string text, std::optional<PagedTraceOpKind> call) {
  Failure failure = MakeFailure("subject: pool", std::move(text));
  failure.pool_call = call;
  return failure;
}

void Need(const Status& status, std::string_view call) {
  Expect(status.ok(),
         [&] { return fmt::format("{} is {}", call, status.ToString()); });
}

int PagedKeyCount() {
  return AsInt(AllKeys().size() * std::tuple_size_v<Keys>);
}

const PrefixKey& PagedKey(int number) {
  const auto at = AsSize(Mod(number, PagedKeyCount()));
  constexpr std::size_t kRow = std::tuple_size_v<Keys>;
  return AllKeys()[at / kRow].at(at % kRow);
}

std::string MediaHash(int number) { return fmt::format("image {}", number); }

namespace {

// Returns the prompt of an operation from kOwnPrompt on.
PagedClient PromptOf(const PagedOp& op) {
  PagedClient client;
  for (int digits = op.a; digits > 1; digits /= 2) {
    client.tokens.insert(client.tokens.begin(), digits % 2);
  }
  client.key = PagedKey(op.c % kSeenMedia);
  if (op.b > 0) client.key.media.push_back({op.b - 1, MediaHash(0)});
  return client;
}

}  // namespace

void PagedClient::Commit(std::span<const std::int32_t> committed, bool known) {
  if (!known) {
    for (std::size_t i = 0; i < committed.size(); ++i) {
      unknown.push_back(AsInt(tokens.size() + i));
    }
  }
  tokens.insert(tokens.end(), committed.begin(), committed.end());
  pending.clear();
  if (!rest.empty()) {
    rest.erase(rest.begin(), rest.begin() + std::ssize(committed));
  }
}

void PagedClient::Truncate(int len) {
  const int all = Size(tokens);
  if (len < all) dropped.clear();
  std::erase_if(key.media, [&](const PrefixMedia& media) {
    const bool drops = media.position >= len && media.position < all;
    if (drops) dropped.push_back(media);
    return drops;
  });
  if (len < all) rest.clear();
  Shorten(len);
}

void PagedClient::Fork(int len) {
  std::erase_if(key.media, [&](const PrefixMedia& media) {
    return media.position >= len;
  });
  rest.clear();
  Shorten(len);
}

void PagedClient::Shorten(int len) {
  tokens.resize(AsSize(len));
  pending.clear();
  std::erase_if(unknown, [&](int position) { return position >= len; });
}

void Remember(const PagedClient& client, std::span<const std::int32_t> more,
              std::vector<PagedClient>& seen) {
  const auto remember = [&](PagedClient to_remember) {
    if (seen.size() == kSeenClientsMost) seen.erase(seen.begin());
    std::vector<std::int32_t>& tokens = to_remember.tokens;
    tokens.insert(tokens.end(), more.begin(), more.end());
    seen.push_back(std::move(to_remember));
  };
  remember(client);
  if (client.unknown.empty()) return;
  PagedClient mistaken = client;
  for (const int position : client.unknown) At(mistaken.tokens, position) = 0;
  remember(mistaken);
}

PagedClient DrawPrompt(const PagedOp& op, const std::vector<PagedClient>& seen,
                       const std::vector<PrefixMedia>& freed) {
  if (op.kind == PagedOpKind::kOpen && op.c >= kOwnPrompt) return PromptOf(op);
  PagedClient client;
  // Without any sequence, an operation of another kind opens one, without a
  // key.
  if (op.kind == PagedOpKind::kOpen) client.key = PagedKey(op.c % kSeenMedia);
  const PagedClient* like =
      seen.empty() ? nullptr : &At(seen, Mod(op.a, Size(seen)));
  if (like != nullptr) {
    client.tokens = like->tokens;
    if (op.c >= kSeenMedia) client.key = like->key;
  }
  for (int i = 0; i < Mod(op.b, 4); ++i) client.tokens.push_back(i % 2);
  std::vector<PrefixMedia>& media = client.key.media;
  switch (op.c / kSeenMedia) {
    case 2:  // Another image in the last place.
      if (media.empty()) media.push_back({Mod(op.b, 4), {}});
      media.back().hash = MediaHash(op.b);
      break;
    case 3:  // The last image, a token later.
      if (!media.empty()) ++media.back().position;
      break;
    case 4:  // An image less, or the images that a truncation dropped as well.
      if (!media.empty() && Mod(op.b, 2) == 0) {
        media.pop_back();
      } else if (like != nullptr) {
        for (const PrefixMedia& dropped : like->dropped) client.Add(dropped);
      }
      break;
    default:
      break;
  }
  if (media.empty()) client.dropped = freed;
  return client;
}

std::vector<std::int32_t> DrawTokens(const PagedOp& op, const PagedSpec& spec) {
  const int count = AppendedTokens(op, spec);
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(Token(op.c / 256, (op.c >> i % 8) & 1));
  }
  return tokens;
}

PagedRows PendingRows(const PagedClient& client, const PagedSpec& spec,
                      int layer, const std::optional<PoolAsker>& asker,
                      std::uint64_t salt) {
  std::vector<std::uint64_t> chains;
  for (std::size_t i = 1; i <= client.pending.size(); ++i) {
    chains.push_back(ChainOf(client, client.tokens.size() + i) ^
                     salt * 0x9E3779B97F4A7C15U);
  }
  return {
      RowsOf(chains, layer, 0, BitsOf(spec.dtype, asker), spec.k_head_dim,
             spec.kv_heads),
      RowsOf(chains, layer, 1, BitsOf(spec.v_dtype.value_or(spec.dtype), asker),
             spec.v_head_dim, spec.kv_heads)};
}

PagedRows AsStored(const PagedRows& rows, const PagedSpec& spec) {
  return {CopyOf(rows.key.view(), spec.dtype),
          CopyOf(rows.value.view(), spec.v_dtype.value_or(spec.dtype))};
}

}  // namespace kvtwin::props
