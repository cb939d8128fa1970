#include "props/paged_client.h"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

namespace kvtwin::props {
namespace {

// A number of the first `count` of a client's tokens.
std::uint64_t ChainOf(const PagedClient& client, std::size_t count) {
  std::uint64_t chain = client.key.salt.size() * 31 + client.key.extra.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t own = client.tokens.size();
    const std::int32_t token =
        i < own ? client.tokens[i] : client.pending[i - own];
    chain = (chain ^ static_cast<std::uint64_t>(token + 1)) * 0x100000001B3U;
    chain ^= chain >> 29;
  }
  return chain;
}

// Rows of f32 that say which tokens they are of. Exact in 16 bits.
DenseTensor RowsOf(const std::vector<std::uint64_t>& chains, int layer,
                   int role, std::int64_t head_dim, std::int64_t heads) {
  DenseTensor rows =
      FilledTensor(DType::kF32, {head_dim, heads, std::ssize(chains), 1}, 0);
  std::byte* to = rows.bytes.data();
  for (const std::uint64_t chain : chains) {
    for (std::int64_t i = 0; i < head_dim * heads; ++i, to += sizeof(float)) {
      const std::uint64_t mixed =
          (chain + static_cast<std::uint64_t>(i * 5 + layer * 2 + role)) *
          0x9E3779B97F4A7C15U;
      const auto value = static_cast<float>(mixed >> 56);
      std::memcpy(to, &value, sizeof(value));
    }
  }
  return rows;
}

}  // namespace

void Need(const Status& status, std::string_view call) {
  if (status.ok()) return;
  throw std::runtime_error(fmt::format("{} is {}", call, status.ToString()));
}

PagedClient DrawPrompt(const PagedOp& op,
                       const std::vector<std::vector<std::int32_t>>& seen) {
  PagedClient client;
  if (op.c % 4 == 1) client.key.salt.push_back('s');
  if (op.c % 8 == 2) client.key.extra = {"x"};
  if (!seen.empty()) {
    client.tokens = seen[static_cast<std::size_t>(
        Mod(op.a, static_cast<int>(seen.size())))];
  }
  for (int i = 0; i < Mod(op.b, 4); ++i) client.tokens.push_back(i % 2);
  return client;
}

std::vector<std::int32_t> DrawTokens(const PagedOp& op, const PagedSpec& spec) {
  const int count = 1 + Mod(op.b, 2 * spec.block_size);
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((op.c >> i % 8) & 1);
  return tokens;
}

PagedRows PendingRows(const PagedClient& client, const PagedSpec& spec,
                      int layer, std::uint64_t salt) {
  std::vector<std::uint64_t> chains;
  for (std::size_t i = 1; i <= client.pending.size(); ++i) {
    chains.push_back(ChainOf(client, client.tokens.size() + i) ^
                     salt * 0x9E3779B97F4A7C15U);
  }
  return {RowsOf(chains, layer, 0, spec.k_head_dim, spec.kv_heads),
          RowsOf(chains, layer, 1, spec.v_head_dim, spec.kv_heads)};
}

PagedRows AsStored(const PagedRows& rows, const PagedSpec& spec) {
  return {CopyOf(rows.key.view(), spec.dtype),
          CopyOf(rows.value.view(), spec.v_dtype.value_or(spec.dtype))};
}

}  // namespace kvtwin::props
