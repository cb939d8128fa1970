// A pool implemented independently, for tests: it can follow the rules of
// core/dialects/pool_rules.h, and can have a fault.

#ifndef KVTWIN_PROPS_TESTING_OTHER_POOL_H_
#define KVTWIN_PROPS_TESTING_OTHER_POOL_H_

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/dialects/pool_rules.h"
#include "core/index.h"
#include "kvtwin/pool_backend.h"

namespace kvtwin::props {

enum class OtherPoolFault {
  kNone,
  kSwapsAcrossKeys,    // Hashes leave out the salt.
  kSwapsByBlock,       // Hashes cover one block's tokens only.
  kSwapForgetsOwner,   // The block swapped in gets no owner.
  kWritesInShared,     // Appends write to shared blocks in place.
  kRecomputesAtStart,  // The last token's row goes to slot 0.
  kFindsOneMore,       // Open's length ends within a block.
  kFreesEarly,         // Blocks are freed one block too early.
  kShowsFreed,         // Views begin with rows of freed blocks.
  kStartsLate,         // Views state a start that is too high.
  kStores64,           // Appends store at most 64 rows.
  kStoresF16,          // Rows lose the digits that f16 does not have.
  kStoresBf16,         // The same of bf16.
  // A prompt finds blocks of another sequence's prompt before their commit:
  kFoundAtFirstLayer,  // once the first layer is appended,
  kFoundAtAppend,      // once all layers are appended,
  kFoundAfterAbort,    // or once the appended rows were dropped.
  kCountsAllAsShared,  // With several sequences, all used blocks are shared.
  kLosesCutBlocks,     // Until their sequence is empty.
};

enum class OtherAttentionFault {
  kNone,
  kSeesLater,        // A row sees the later tokens of its batch.
  kMissesAppended,   // A row sees no other token of its batch.
  kMissesOne,        // No row sees position 20.
  kOneOtherValue,    // Position 30 has V of position 31.
  kOtherBlock,       // The second block has the rows of the first one.
  kMissesBlock,      // No row sees the second of three blocks.
  kRoundsRows,       // K and V are rounded to bf16.
  kRoundsK,          // K are rounded to bf16.
  kRoundsV,          // V are rounded to bf16.
  kMissesLast,       // A row that sees four does not see the last three.
  kLastZeros,        // The last three tokens that a row sees are zeros.
  kMissesFirst,      // A row does not see the first token that it should see.
  kSeesBeforeFirst,  // A row sees the token before the window, if it is there.
  kNoWindow,         // A row sees all tokens that have blocks.
  kSeesStale,        // A row sees the slot after the last token of a block.
  kSwapsSequences,   // Each sequence gets the queries of another.
  kOtherLayer,       // Outputs are those of another layer.
  kOtherHead,        // A query head reads another KV head.
  kNoScale,          // Scores are not scaled.
  kNextValue,        // Each token has the V row of the next one.
  kBaseTwo,          // Weights are powers of 2.
  kPlusOne,          // 1 is added to the sum of the weights.
  kHeadsBelow,       // Query heads from the 5th of a KV head on have no output.
  kNarrowV,          // Elements of V from the 5th on have no output.
  kHeadModulo,       // Query head h reads KV head h modulo their number.
  kHeadsReversed,    // The last head has the output of the first, and so on.
  kNoSoftCap,        // Scores are not capped.
  kCapsUnscaled,     // Scores are capped, and then scaled.
  kNoSinks,          // The sinks are ignored.
  kFirstSink,        // Each head has the sink of the first head.
  kFromLength,       // The positions of rows count from the committed length.
  kWritesQuery,
  kNotANumber,
  kRefuses,
  kWritesBehind,  // Writes a number after the output.
};

// A pool for all three rules: a hash table of blocks, as in Python engines. New
// blocks have the highest free number.
class OtherPool {
 public:
  using Fault = OtherAttentionFault;
  inline static PoolRules rules;  // The rules of the pools that are made next.
  inline static OtherPoolFault fault = OtherPoolFault::kNone;
  inline static Fault attention = Fault::kNone;
  inline static bool weighs = false;  // With a soft cap, and with sinks.

  explicit OtherPool(const kvtwin_pool_params& params) : is_(params) {
    blocks_.resize(AsSize(is_.blocks));
    for (Block& block : blocks_) {
      for (const int row : {KeyRow(), ValueRow()}) {
        block.rows.emplace_back(AsSize(is_.layers * is_.block_size * row));
      }
    }
  }

  int Open(const kvtwin_prompt& prompt) {
    const int id = next_++;
    Sequence& opened = sequences_[id];
    opened.appended.resize(AsSize(is_.layers));
    opened.key = std::string(prompt.salt == nullptr ? "" : prompt.salt) + "\n";
    for (std::size_t i = 0; i < prompt.extra_count; ++i) {
      opened.key += std::string(prompt.extra[i]) + "\n";
    }
    const std::vector<int> tokens(prompt.tokens,
                                  prompt.tokens + prompt.token_count);
    const auto all = Size(tokens);
    const int limit = rules.recomputes_last ? all : all - 1;
    for (int whole = limit / size(); whole > 0; --whole) {
      if (whole * size() <= is_.max_seq_len && Take(opened, tokens, whole)) {
        break;
      }
    }
    const int found = Size(opened.table) * size();
    opened.len = found;
    if (found > 0 && found == all) {
      opened.len = all - 1;
      opened.again = true;
    } else if (fault == OtherPoolFault::kFindsOneMore && found + 1 < all &&
               found > 0 && size() > 1) {
      // The length ends within a block.
      opened.len = found - 1;
    }
    opened.plan = tokens;
    opened.tokens.assign(tokens.begin(), tokens.begin() + opened.len);
    opened.known = opened.len;
    return id;
  }

  int Fork(int sequence, int len) {
    const int id = next_++;
    const Sequence& from = sequences_.at(sequence);
    Sequence forked = from;
    forked.again = false;
    forked.appended.assign(forked.appended.size(), 0);
    forked.table.resize(AsSize(BlocksFor(len)));
    forked.lost.clear();
    for (const int block : forked.table) {
      if (block >= 0) ++BlockAt(block).owners;
    }
    Cut(forked, len);
    sequences_[id] = forked;
    return id;
  }

  int Append(int sequence, int layer, const kvtwin_tensor& key,
             const kvtwin_tensor& value) {
    Sequence& to = sequences_.at(sequence);
    const auto count = AsInt(key.shape[2]);
    const int end = to.len + count;
    if (end > is_.max_seq_len) return KVTWIN_CACHE_FULL;
    LeaveWindow(to);
    const int first = to.len / size();
    int needed = 0;
    for (int i = first; i < BlocksFor(end); ++i) {
      if (i >= std::ssize(to.table) || !MayWrite(to, i)) ++needed;
    }
    if (needed > Room()) return KVTWIN_CACHE_FULL;
    for (int i = first; i < BlocksFor(end); ++i) Own(to, i);
    const int stored =
        fault == OtherPoolFault::kStores64 ? std::min(count, 64) : count;
    for (int i = 0; i < stored; ++i) {
      const int position = to.len + i;
      const int block = At(to.table, position / size());
      int offset = position % size();
      if (fault == OtherPoolFault::kRecomputesAtStart && to.again && i == 0)
        offset = 0;
      Store(key, i, Row(block, 0, layer, offset), KeyRow());
      Store(value, i, Row(block, 1, layer, offset), ValueRow());
    }
    At(to.appended, layer) = count;
    const bool first_layer =
        fault == OtherPoolFault::kFoundAtFirstLayer && layer == 0;
    const bool last_layer =
        fault == OtherPoolFault::kFoundAtAppend && layer == is_.layers - 1;
    if (first_layer || last_layer) RegisterPlan(to, end);
    return KVTWIN_OK;
  }

  void Commit(int sequence, const std::int32_t* tokens, int count) {
    Sequence& to = sequences_.at(sequence);
    if (tokens != nullptr && to.known == to.len) to.known += count;
    for (int i = 0; i < count; ++i) {
      to.tokens.push_back(tokens == nullptr ? -1 : tokens[i]);
    }
    if (count > 0) to.again = false;
    const int before = to.len;
    Cut(to, before + count);
    to.appended.assign(to.appended.size(), 0);
    for (int i = before / size(); i < to.known / size(); ++i) Register(to, i);
  }

  void Truncate(int sequence, int len) {
    Sequence& of = sequences_.at(sequence);
    if (len < of.len) of.again = false;
    if (fault == OtherPoolFault::kFoundAfterAbort && len == of.len) {
      RegisterPlan(of, of.len + *std::ranges::min_element(of.appended));
    }
    Cut(of, len);
    of.appended.assign(of.appended.size(), 0);
  }

  void Free(int sequence) {
    Cut(sequences_.at(sequence), 0);
    sequences_.erase(sequence);
  }

  int SeqLen(int sequence) const { return sequences_.at(sequence).len; }

  std::vector<kvtwin_paged_view> Views(int sequence, int layer) {
    const Sequence& of = sequences_.at(sequence);
    const int end = of.len + At(of.appended, layer);
    std::vector<kvtwin_paged_view> views;
    int start = of.from;
    if (fault == OtherPoolFault::kShowsFreed && start >= size())
      start -= size();
    while (start < end) {
      const int index = start / size();
      const int stop = std::min(end, (index + 1) * size());
      int block = At(of.table, index);
      if (block < 0) block = 0;  // Only with kShowsFreed.
      kvtwin_paged_view view{};
      view.key = TensorOf(block, 0, layer, start % size(), stop - start);
      view.value = TensorOf(block, 1, layer, start % size(), stop - start);
      const bool late = fault == OtherPoolFault::kStartsLate && of.from > 0;
      view.start = start + (late ? 1 : 0);
      view.length = stop - start;
      view.block = block;
      views.push_back(view);
      start = stop;
    }
    return views;
  }

  // Computes attention in double, row by row.
  int Attend(int layer, const int* sequences, const int* query_rows,
             std::size_t count, const kvtwin_tensor& query,
             const kvtwin_attention_options& options, float* out) {
    if (attention == Fault::kRefuses) return KVTWIN_NOT_SUPPORTED;
    const bool reversed = attention == Fault::kHeadsReversed;
    const auto heads = AsInt(query.shape[1]);
    const auto rows = AsInt(query.shape[2]);
    const auto* queries = static_cast<const float*>(query.data);
    if (attention == Fault::kOtherLayer) layer = (layer + 1) % is_.layers;
    int row = 0;
    for (std::size_t s = 0; s < count; ++s) {
      for (int i = 0; i < query_rows[s]; ++i, ++row) {
        const int asked = attention == Fault::kSwapsSequences
                              ? (row + query_rows[0]) % rows
                              : row;
        for (int h = 0; h < heads; ++h) {
          AttendRow(
              layer, sequences[s],
              attention == Fault::kFromLength
                  ? At(sequences_.at(sequences[s]).appended, layer) - 1 - i
                  : query_rows[s] - 1 - i,
              attention == Fault::kHeadModulo ? h % is_.kv_heads
                                              : h * is_.kv_heads / heads,
              options, SinkOf(options, h),
              queries + (asked * heads + h) * is_.k_head_dim,
              out + (row * heads + (reversed ? heads - 1 - h : h)) *
                        is_.v_head_dim);
        }
      }
    }
    if (attention == Fault::kNotANumber) out[0] = NAN;
    if (attention == Fault::kWritesQuery) const_cast<float*>(queries)[0] = 7;
    const int per_head = heads / is_.kv_heads;
    for (int i = 0; i < rows * heads * is_.v_head_dim; ++i) {
      const bool high = i / is_.v_head_dim % heads % per_head > 3;
      if (attention == Fault::kHeadsBelow && high) out[i] = 0;
      if (attention == Fault::kNarrowV && i % is_.v_head_dim > 3) out[i] = 0;
    }
    if (attention == Fault::kWritesBehind) {
      out[rows * heads * is_.v_head_dim] = 1;
    }
    return KVTWIN_OK;
  }

  std::vector<std::int64_t> Slots(int sequence, int begin, int end) const {
    const Sequence& of = sequences_.at(sequence);
    std::vector<std::int64_t> slots;
    for (int p = begin; p < end; ++p) {
      const int block = At(of.table, p / size());
      slots.push_back(block < 0 ? -1 : block * size() + p % size());
    }
    return slots;
  }

  kvtwin_usage Usage() const {
    kvtwin_usage usage{};
    for (const Block& block : blocks_) {
      if (block.owners > 0) ++usage.used;
      const bool all = fault == OtherPoolFault::kCountsAllAsShared &&
                       std::ssize(sequences_) > 1;
      if (block.owners > (all ? 0 : 1)) ++usage.shared;
      if (block.owners == 0 && !block.hash.empty()) ++usage.cached;
    }
    usage.free = is_.blocks - usage.used - usage.cached;
    return usage;
  }

 private:
  struct Block {
    int owners = 0;
    std::string hash;  // Prompts find the block by it; or empty.
    std::vector<std::vector<float>> rows;  // The rows of K and of V.
  };
  struct Sequence {
    std::string key;
    std::vector<int> table, lost;  // -1: gone. Lost: were in the table.
    std::vector<int> tokens;
    std::vector<int> plan;  // The prompt.
    int len = 0;
    int known = 0;  // Tokens from the start with known ids.
    int from = 0;   // The first position that has rows.
    bool again = false;
    std::vector<int> appended;
  };

  int size() const { return is_.block_size; }
  int BlocksFor(int tokens) const { return (tokens + size() - 1) / size(); }
  int KeyRow() const { return is_.k_head_dim * is_.kv_heads; }
  int ValueRow() const { return is_.v_head_dim * is_.kv_heads; }
  Block& BlockAt(int block) { return At(blocks_, block); }
  float* Row(int block, int part, int layer, int offset) {
    const int row = part == 0 ? KeyRow() : ValueRow();
    return At(BlockAt(block).rows, part).data() +
           (layer * size() + offset) * row;
  }

  // Rounds a number of K or V if the fault does.
  static double Rounded(float number, Fault which) {
    if (attention != Fault::kRoundsRows && attention != which) return number;
    return double{static_cast<float>(Eigen::bfloat16(number))};
  }

  static double SinkOf(const kvtwin_attention_options& options, int head) {
    if (options.sinks == nullptr || attention == Fault::kNoSinks) {
      return -INFINITY;
    }
    return double{options.sinks[attention == Fault::kFirstSink ? 0 : head]};
  }

  // Returns the scaled and capped score.
  double Weighed(double score, const kvtwin_attention_options& options) const {
    const double scale =
        attention == Fault::kNoScale ? 1 : double{options.scale};
    const double cap =
        attention == Fault::kNoSoftCap ? 0 : double{options.soft_cap};
    if (cap == 0) return score * scale;
    if (attention == Fault::kCapsUnscaled) {
      return cap * std::tanh(score / cap) * scale;
    }
    return cap * std::tanh(score * scale / cap);
  }

  // Writes the output of a query of the token that is `back` tokens before the
  // last one.
  void AttendRow(int layer, int sequence, int back, int kv_head,
                 const kvtwin_attention_options& options, double sink,
                 const float* query, float* out) {
    const Sequence& of = sequences_.at(sequence);
    const int end = of.len + At(of.appended, layer);
    const int position = end - 1 - back;
    int first = std::max(rules.FirstSeen(position), of.from);
    if (attention == Fault::kNoWindow) first = of.from;
    if (attention == Fault::kMissesFirst) ++first;
    if (attention == Fault::kSeesBeforeFirst && first > of.from) --first;
    int last = position;
    if (attention == Fault::kSeesLater) last = end - 1;
    if (attention == Fault::kSeesStale && end % size() != 0) ++last;
    if (attention == Fault::kOtherHead) kv_head = (kv_head + 1) % is_.kv_heads;
    const auto weight_of = [](double exponent) {
      return attention == Fault::kBaseTwo ? std::exp2(exponent)
                                          : std::exp(exponent);
    };
    double sum = weight_of(sink) + (attention == Fault::kPlusOne ? 1 : 0);
    std::vector<double> all(AsSize(is_.v_head_dim), 0);
    for (int at = first; at <= last; ++at) {
      if (attention == Fault::kMissesOne && at == 20) continue;
      const bool of_end = at > position - 3;
      if (attention == Fault::kMissesLast && of_end && position > 2) continue;
      const bool zeros = attention == Fault::kLastZeros && of_end;
      const bool other = at >= of.len && at != position;
      if (attention == Fault::kMissesAppended && other) continue;
      if (attention == Fault::kMissesBlock && at / size() == 1 &&
          position >= 2 * size()) {
        continue;
      }
      const auto row = [&](int part, int place, int dim) {
        const bool other_block =
            attention == Fault::kOtherBlock && place / size() == 1;
        const int block = At(of.table, other_block ? 0 : place / size());
        return Row(block, part, layer, place % size()) + kv_head * dim;
      };
      const float* key = row(0, at, is_.k_head_dim);
      const bool next = attention == Fault::kNextValue && at < last;
      const bool other_v =
          attention == Fault::kOneOtherValue && at == 30 && last > 30;
      const float* value =
          row(1, at + (next || other_v ? 1 : 0), is_.v_head_dim);
      double score = 0;
      for (int i = 0; i < is_.k_head_dim; ++i) {
        score += double{query[i]} * Rounded(key[i], Fault::kRoundsK);
      }
      const double weight = zeros ? 1 : weight_of(Weighed(score, options));
      sum += weight;
      for (int i = 0; i < is_.v_head_dim; ++i) {
        At(all, i) += zeros ? 0 : weight * Rounded(value[i], Fault::kRoundsV);
      }
    }
    for (int i = 0; i < is_.v_head_dim; ++i) {
      out[i] = sum == 0 ? 0 : static_cast<float>(At(all, i) / sum);
    }
  }

  kvtwin_tensor TensorOf(int block, int part, int layer, int offset,
                         int length) {
    const int dim = part == 0 ? is_.k_head_dim : is_.v_head_dim;
    kvtwin_tensor tensor{};
    tensor.dtype = KVTWIN_F32;
    tensor.data = Row(block, part, layer, offset);
    const std::int64_t shape[] = {dim, is_.kv_heads, length, 1};
    std::int64_t stride = sizeof(float);
    for (int i = 0; i < 4; ++i) {
      tensor.shape[i] = shape[i];
      tensor.stride[i] = stride;
      stride *= shape[i];
    }
    return tensor;
  }

  void Store(const kvtwin_tensor& from, int token, float* to, int count) const {
    const auto* data = static_cast<const char*>(from.data);
    const auto dim = AsInt(from.shape[0]);
    for (int i = 0; i < count; ++i) {
      std::memcpy(to + i,
                  data + token * from.stride[2] + i / dim * from.stride[1] +
                      i % dim * from.stride[0],
                  sizeof(float));
      std::uint32_t bits = 0;
      std::memcpy(&bits, to + i, sizeof(bits));
      if (fault == OtherPoolFault::kStoresF16) bits &= 0xFFFFE000;
      if (fault == OtherPoolFault::kStoresBf16) bits &= 0xFFFF0000;
      std::memcpy(to + i, &bits, sizeof(bits));
    }
  }

  // Hashes the key and the tokens up to the end of a block.
  static std::string HashOf(const std::string& key,
                            const std::vector<int>& tokens, int end, int size) {
    std::string hash = fault == OtherPoolFault::kSwapsAcrossKeys ? "" : key;
    const int begin = fault == OtherPoolFault::kSwapsByBlock ? end - size : 0;
    for (int i = begin; i < end; ++i) {
      hash += std::to_string(At(tokens, i)) + " ";
    }
    return hash;
  }

  int Find(const std::string& hash) const {
    const auto at = std::ranges::find(blocks_, hash, &Block::hash);
    return at == blocks_.end() ? -1 : AsInt(at - blocks_.begin());
  }

  // Takes the first `whole` blocks of the tokens, if all that the window needs
  // are found. Returns whether it did.
  bool Take(Sequence& opened, const std::vector<int>& tokens, int whole) {
    const int all = Size(tokens);
    const int len = whole * size() == all ? all - 1 : whole * size();
    // If no rows are needed, the last block tells that the prefix was computed.
    const int needs = std::min(rules.FirstSeen(len) / size(), whole - 1);
    std::vector<int> table(AsSize(whole), -1);
    for (int i = needs; i < whole; ++i) {
      const int block =
          Find(HashOf(opened.key, tokens, (i + 1) * size(), size()));
      if (block < 0) return false;
      At(table, i) = block;
    }
    for (const int block : table) {
      if (block >= 0) ++BlockAt(block).owners;
    }
    opened.table = std::move(table);
    opened.from = needs * size();
    return true;
  }

  int Room() const {
    return AsInt(std::ranges::count(blocks_, 0, &Block::owners));
  }

  // Takes a block without an owner: first a block that no prefix finds.
  int New() {
    int found = -1;
    for (int i = 0; i < std::ssize(blocks_); ++i) {
      if (BlockAt(i).owners > 0) continue;
      if (found < 0 || BlockAt(i).hash.empty() || !BlockAt(found).hash.empty())
        found = i;
    }
    BlockAt(found).owners = 1;
    BlockAt(found).hash.clear();
    return found;
  }

  bool InPlace(const Sequence& of, int index) const {
    return of.again && index == of.len / size();
  }
  bool MayWrite(const Sequence& of, int index) {
    const int block = At(of.table, index);
    if (block < 0) return false;
    return InPlace(of, index) || fault == OtherPoolFault::kWritesInShared ||
           BlockAt(block).owners == 1;
  }

  // Makes block `index` one that the sequence may write to.
  void Own(Sequence& of, int index) {
    if (index >= std::ssize(of.table)) {
      of.table.push_back(New());
      return;
    }
    int& block = At(of.table, index);
    if (MayWrite(of, index)) {
      if (!InPlace(of, index)) BlockAt(block).hash.clear();
      return;
    }
    const int copy = New();
    if (block >= 0) {
      BlockAt(copy).rows = BlockAt(block).rows;
      --BlockAt(block).owners;
    }
    block = copy;
  }

  void LeaveWindow(Sequence& of) {
    int gone = rules.FirstSeen(of.len) / size();
    if (fault == OtherPoolFault::kFreesEarly && rules.window) {
      gone = std::min(gone + 1, of.len / size());
    }
    for (int i = 0; i < gone; ++i) {
      int& block = At(of.table, i);
      if (block >= 0) --BlockAt(block).owners;
      block = -1;
    }
    of.from = std::max(of.from, gone * size());
  }

  void Cut(Sequence& of, int len) {
    for (; std::ssize(of.table) > BlocksFor(len); of.table.pop_back()) {
      of.lost.push_back(of.table.back());
    }
    const bool loses = fault == OtherPoolFault::kLosesCutBlocks && len > 0;
    for (; !loses && !of.lost.empty(); of.lost.pop_back()) {
      if (of.lost.back() >= 0) --BlockAt(of.lost.back()).owners;
    }
    of.len = len;
    of.tokens.resize(AsSize(len));
    of.known = std::min(of.known, len);
    of.from = std::min(of.from, len);
  }

  // A fault: lets prompts find the blocks up to `end`, as if the rows in them
  // were those of the prompt.
  void RegisterPlan(Sequence& of, int end) {
    for (int i = of.len / size(); (i + 1) * size() <= end; ++i) {
      if (std::ssize(of.plan) < (i + 1) * size() || At(of.table, i) < 0) return;
      const std::string hash =
          HashOf(of.key, of.plan, (i + 1) * size(), size());
      if (Find(hash) < 0) BlockAt(At(of.table, i)).hash = hash;
    }
  }

  void Register(Sequence& of, int index) {
    int& block = At(of.table, index);
    if (block < 0 || index * size() < of.from) return;
    const std::string hash =
        HashOf(of.key, of.tokens, (index + 1) * size(), size());
    const int other = Find(hash);
    if (other == block) return;
    if (other < 0) {
      BlockAt(block).hash = hash;
    } else if (rules.deduplicates) {
      --BlockAt(block).owners;
      if (fault != OtherPoolFault::kSwapForgetsOwner) ++BlockAt(other).owners;
      block = other;
    }
  }

  kvtwin_pool_params is_;
  int next_ = 7;
  std::vector<Block> blocks_;
  std::map<int, Sequence> sequences_;
};

// The table
// ---------------------------------------------------------------------------

inline OtherPool& Of(void* pool) { return *static_cast<OtherPool*>(pool); }

template <class T>
int Give(const std::vector<T>& list, T* to, std::size_t room,
         std::size_t* count) {
  *count = list.size();
  std::copy_n(list.begin(), std::min(room, list.size()), to);
  return KVTWIN_OK;
}

inline void AddOptional(kvtwin_pool_backend_v1& t) {
  t.fork = [](void* pool, int32_t sequence, int32_t len, int32_t* id) {
    *id = Of(pool).Fork(sequence, len);
    return AsInt(KVTWIN_OK);
  };
  t.truncate = [](void* pool, int32_t sequence, int32_t len) {
    Of(pool).Truncate(sequence, len);
    return AsInt(KVTWIN_OK);
  };
  t.usage = [](void* pool, kvtwin_usage* usage) {
    *usage = Of(pool).Usage();
    return AsInt(KVTWIN_OK);
  };
  t.slots = [](void* pool, int32_t sequence, int32_t begin, int32_t end,
               int64_t* slots, std::size_t room, std::size_t* count) {
    return Give(Of(pool).Slots(sequence, begin, end), slots, room, count);
  };
  t.attend = [](void* pool, int32_t layer, const int32_t* sequences,
                const int32_t* query_rows, std::size_t count,
                const kvtwin_tensor* query,
                const kvtwin_attention_options* options, float* out) {
    return Of(pool).Attend(layer, sequences, query_rows, count, *query,
                           *options, out);
  };
}

inline const kvtwin_pool_backend_v1& OtherPoolTable() {
  static const kvtwin_pool_backend_v1 table = [] {
    kvtwin_pool_backend_v1 t{};
    t.size = sizeof(t);
    t.describe = [](kvtwin_pool_description_v1* out) -> int {
      const PoolRules& rules = OtherPool::rules;
      out->name = "other";
      if (rules.deduplicates) out->can |= KVTWIN_POOL_DEDUPLICATES;
      if (rules.no_reserve) out->can |= KVTWIN_POOL_NO_RESERVE;
      if (rules.recomputes_last) out->can |= KVTWIN_POOL_RECOMPUTES_LAST;
      if (rules.window) out->can |= KVTWIN_POOL_HAS_WINDOW;
      if (OtherPool::weighs)
        out->can |= KVTWIN_POOL_HAS_SOFT_CAP | KVTWIN_POOL_HAS_SINKS;
      out->window = rules.window.value_or(0);
      return KVTWIN_OK;
    };
    t.init = [](const kvtwin_pool_params* params, void** pool) -> int {
      *pool = new OtherPool(*params);
      return KVTWIN_OK;
    };
    t.close = [](void* pool) { delete &Of(pool); };
    t.open = [](void* pool, const kvtwin_prompt* prompt, int32_t* id) {
      *id = Of(pool).Open(*prompt);
      return AsInt(KVTWIN_OK);
    };
    t.seq_len = [](void* pool, int32_t sequence, int32_t* len) {
      *len = Of(pool).SeqLen(sequence);
      return AsInt(KVTWIN_OK);
    };
    t.append = [](void* pool, int32_t sequence, int32_t layer,
                  const kvtwin_tensor* key, const kvtwin_tensor* value) {
      return Of(pool).Append(sequence, layer, *key, *value);
    };
    t.commit = [](void* pool, int32_t sequence, const int32_t* tokens,
                  std::size_t count) {
      const std::int32_t none = 0;  // An empty list may be null.
      Of(pool).Commit(sequence, count == 0 ? &none : tokens, AsInt(count));
      return AsInt(KVTWIN_OK);
    };
    t.commit_unknown = [](void* pool, int32_t sequence, int32_t count) {
      Of(pool).Commit(sequence, nullptr, count);
      return AsInt(KVTWIN_OK);
    };
    t.views = [](void* pool, int32_t sequence, int32_t layer,
                 kvtwin_paged_view* views, std::size_t room,
                 std::size_t* count) {
      return Give(Of(pool).Views(sequence, layer), views, room, count);
    };
    t.free = [](void* pool, int32_t sequence) {
      Of(pool).Free(sequence);
      return AsInt(KVTWIN_OK);
    };
    AddOptional(t);
    return t;
  }();
  return table;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_OTHER_POOL_H_
