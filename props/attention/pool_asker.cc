#include "props/attention/pool_asker.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/base/forwarding_pool.h"
#include "props/base/hash.h"

namespace kvtwin::props {

namespace {

// One question in this many asks for the last half of the appended tokens.
constexpr std::uint64_t kFewerEvery = 5;

}  // namespace

// As in histories of caches, three pools of ten, chosen by their sizes, have 3
// to 16 query heads for each KV head.
int PoolAsker::Group() const {
  const std::array sizes = {spec_.block_size, spec_.blocks, spec_.layers,
                            spec_.max_seq_len};
  const std::uint64_t drawn = HashBytes(sizes.data(), sizeof(sizes), 0);
  return drawn % 10 < 3 ? 3 + AsInt(drawn / 10 % 14) : 0;
}

std::vector<int> PoolAsker::Layers() const {
  std::vector<int> layers;
  for (int layer = 0; layer < spec_.layers; ++layer) {
    if (!SpecOfLayer(spec_, layer).states) layers.push_back(layer);
  }
  return layers;
}

std::vector<int> PoolAsker::Appended(const reference::PagedLedger& ledger,
                                     int layer) {
  std::vector<int> sequences;
  for (const int sequence : ledger.Sequences()) {
    const bool appended =
        ledger.RowCount(sequence, layer) > ledger.SeqLen(sequence);
    if (appended) sequences.push_back(sequence);
  }
  return sequences;
}

Status PoolAsker::Ask(const reference::PagedLedger& ledger, int layer,
                      const std::vector<int>& sequences, PagedPool& pool) {
  out_.clear();
  layer_ = layer;
  std::uint64_t seed = AsSize(layer);
  for (const int sequence : sequences) {
    seed = 31 * seed + AsSize(ledger.RowCount(sequence, layer));
  }
  std::vector<int> query_rows;
  for (const int sequence : sequences) {
    int rows = ledger.RowCount(sequence, layer) - ledger.SeqLen(sequence);
    if (seed % kFewerEvery == 0) rows = (rows + 1) / 2;
    query_rows.push_back(rows);
  }
  const auto before = questions_.find(layer);
  const PagedSpec& spec = SpecOfLayer(spec_, layer);
  const int group = QueriesPerKvHead(attention_.precision.dtype, spec.kv_heads,
                                     Group(), attention_.query_heads);
  const std::vector<float> sinks =
      SinksOf(attention_.sinks ? group * spec.kv_heads : 0);
  AttentionQuestion question(
      {.ledger = ledger,
       .spec = spec_,
       .layer = layer,
       .sequences = sequences,
       .query_rows = query_rows,
       .soft_cap = static_cast<double>(attention_.soft_cap),
       .sinks = sinks},
      group, seed, before == questions_.end() ? nullptr : &before->second);
  if (question.CountJudged() == 0) return {};
  out_.assign(question.answer_size(), std::numeric_limits<float>::quiet_NaN());
  Status status =
      AttendBy(pool, sequences, query_rows, layer, question.query(),
               {.scale = 1 / std::sqrt(static_cast<float>(spec.k_head_dim)),
                .soft_cap = static_cast<float>(attention_.soft_cap),
                .sinks = sinks},
               out_);
  if (!status.ok()) out_.clear();
  questions_.insert_or_assign(layer, std::move(question));
  return status;
}

std::optional<WrongOutput> PoolAsker::FindWrong() const {
  if (out_.empty()) return std::nullopt;
  return questions_.at(layer_).FindWrong(out_, attention_.precision);
}

}  // namespace kvtwin::props
