// The blocks of C++ in docs/, as its pages show them: props/repo/blocks_test.py
// compares each block with its lines here.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/serving.h"
#include "kvtwin/sessions.h"
#include "props/base/forwarding_cache.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"

// The pages index vectors by int, as servers do; clang's -Wconversion objects.
#pragma GCC diagnostic ignored "-Wsign-conversion"

namespace kvtwin {
namespace {

constexpr int k_head_dim = 4, layers = 2;  // NOLINT: the names of the pages.

// Stores rows of ones for a batch in each layer.
void PutOnes(Cache& cache, int tokens) {
  const std::vector<float> ones(
      static_cast<std::size_t>(k_head_dim) * static_cast<std::size_t>(tokens),
      1);
  const TensorView rows =
      DenseView(ones.data(), DType::kF32, {k_head_dim, 1, tokens, 1});
  for (int layer = 0; layer < layers; ++layer) {
    ASSERT_TRUE(cache.SetLayer(layer).ok());
    ASSERT_TRUE(cache.Put(rows, rows).ok());
  }
}

// A cache of f32 with one sequence of 16 tokens.
std::unique_ptr<Cache> SmallCache() {
  auto cache = *MakeCache({.kind = Kind::kCausal});
  EXPECT_TRUE(
      cache->Init({.max_sequences = 1, .capacity = 16, .max_batch = 16}).ok());
  return cache;
}

// docs/attention.md
TEST(Documented, AttentionOverACache) {
  const auto cache = SmallCache();
  ASSERT_TRUE(
      cache->StartForward({std::vector{0, 1}, std::vector{0, 0}}, false).ok());
  PutOnes(*cache, 2);
  const int batch_size = 2;
  std::vector<float> out(2 * k_head_dim), ones(2 * k_head_dim, 1);
  const std::vector<TensorView> query(
      layers, DenseView(ones.data(), DType::kF32, {k_head_dim, 1, 2, 1}));

  auto attention = *MakeAttention();
  Status status = attention->Plan(cache->Get()->mask, /*rows=*/batch_size);
  for (int layer = 0; layer < layers && status.ok(); ++layer) {
    if (status = cache->SetLayer(layer); !status.ok()) break;
    // query = [k_head_dim, heads, rows]; out = [v_head_dim, heads, rows]
    status = attention->Attend(
        query[layer], *cache->Get(), VLayout::kPlain,
        {.scale = 1 / std::sqrt(static_cast<float>(k_head_dim))},
        {.out = out.data()});
  }

  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(out, ones);
}

// docs/attention.md
TEST(Documented, AttentionOverAPool) {
  auto pool = *MakePagedPool({.block_size = 2,
                              .blocks = 4,
                              .max_seq_len = 8,
                              .k_head_dim = k_head_dim,
                              .v_head_dim = k_head_dim,
                              .dtype = DType::kF32});
  const int sequence = *pool->Open();
  std::vector<float> out(k_head_dim), ones(3 * k_head_dim, 1);
  const TensorView rows =
      DenseView(ones.data(), DType::kF32, {k_head_dim, 1, 3, 1});
  const int layer = 0;
  ASSERT_TRUE(pool->Append(sequence, layer, rows, rows).ok());
  const auto [columns, blocks, lengths] =
      *pool->ExportLayerTable(std::vector{sequence}, layer);
  const std::vector<std::int32_t> query_rows = {1};
  const TensorView query =
      DenseView(ones.data(), DType::kF32, {k_head_dim, 1, 1, 1});
  const AttentionOptions options = {.scale = 0.5F};
  const PagedSpec& spec = pool->spec();
  auto attention = *MakeAttention();

  // Sequence i has the blocks in row i, columns entries each, and lengths[i]
  // tokens, of which query_rows[i] are new.
  Status status = attention->Plan({.blocks = blocks,
                                   .columns = columns,
                                   .lengths = lengths,
                                   .query_rows = query_rows,
                                   .block_size = spec.block_size});
  if (status.ok()) {
    status = attention->Attend(query, *pool->Blocks(layer), spec.layout,
                               options, {.out = out.data()});
  }

  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(out, std::vector<float>(k_head_dim, 1));
}

// Makes a pool of a prompt of 4 tokens that 3 sequences share. Sequence i has
// i + 1 tokens more, which are not committed.
std::unique_ptr<PagedPool> PoolOfSharedPrompt(std::vector<float>& numbers) {
  const int head_dim = static_cast<int>(numbers.size()) / 7;
  auto pool = *MakePagedPool({.block_size = 2,
                              .blocks = 16,
                              .max_seq_len = 16,
                              .k_head_dim = head_dim,
                              .v_head_dim = head_dim,
                              .dtype = DType::kF32});
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i * i % 17) / 4;
  }
  const auto Append = [&](int sequence, int tokens) {
    const TensorView rows = DenseView(numbers.data() + sequence * head_dim,
                                      DType::kF32, {head_dim, 1, tokens, 1});
    EXPECT_TRUE(pool->Append(sequence, 0, rows, rows).ok());
  };
  EXPECT_EQ(*pool->Open(), 0);
  Append(0, 4);
  EXPECT_TRUE(pool->Commit(0, 4).ok());
  EXPECT_EQ(*pool->Fork(0, 4), 1);
  EXPECT_EQ(*pool->Fork(0, 4), 2);
  for (int sequence = 0; sequence < 3; ++sequence) {
    Append(sequence, sequence + 1);
  }
  return pool;
}

// Returns the attention of the last token of each sequence, by its formula.
std::vector<float> AttendWhole(const PagedPool& pool, const PagedTable& table,
                               const TensorView& query,
                               const AttentionOptions& options) {
  std::vector<float> out(
      static_cast<std::size_t>(query.shape[0] * query.shape[2]));
  const std::vector<std::int32_t> query_rows(table.seq_lens.size(), 1);
  auto attention = *MakeAttention("reference");
  EXPECT_TRUE(attention
                  ->Plan({.blocks = table.blocks,
                          .columns = table.columns,
                          .lengths = table.seq_lens,
                          .query_rows = query_rows,
                          .block_size = pool.spec().block_size})
                  .ok());
  EXPECT_TRUE(attention
                  ->Attend(query, *pool.Blocks(0), pool.spec().layout, options,
                           {.out = out.data()})
                  .ok());
  return out;
}

// docs/attention.md
TEST(Documented, AttentionOverASharedPrompt) {
  constexpr int v_head_dim = 4, heads = 1, rows = 3, kSequences = 3;
  constexpr int k_head_dim = v_head_dim;
  std::vector<float> numbers(7 * k_head_dim);
  const auto pool = PoolOfSharedPrompt(numbers);
  const std::vector<int> sequences = {0, 1, 2};
  const PagedTable table = *pool->ExportLayerTable(sequences, 0);
  const int block_size = pool->spec().block_size, shared = 4;
  const std::vector<std::int32_t> query_rows(kSequences, 1);
  const std::vector<std::int32_t> all_rows = {kSequences};
  const TensorView query =
      DenseView(numbers.data(), DType::kF32, {k_head_dim, 1, kSequences, 1});
  const PagedKv blocks = *pool->Blocks(0);
  const PagedLayout layout = pool->spec().layout;
  const AttentionOptions options = {.scale = 0.5F};
  std::vector<float> out(kSequences * k_head_dim);
  std::vector<float> out_of_rest = out, sums(kSequences), sums_of_rest = sums;
  auto prompt = *MakeAttention(), rest = *MakeAttention();

  // The first `shared` tokens, whole blocks, are the same for all sequences.
  const int skip = shared / block_size, columns = table.columns - skip;
  std::vector<std::int32_t> blocks_of_rest, lengths_of_rest;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto row = table.blocks.begin() + i * table.columns + skip;
    blocks_of_rest.insert(blocks_of_rest.end(), row, row + columns);
    lengths_of_rest.push_back(table.seq_lens[i] - shared);
  }
  Status status = prompt->Plan({.blocks = std::span(table.blocks).first(skip),
                                .columns = skip,
                                .lengths = {&shared, 1},
                                .query_rows = all_rows,
                                .block_size = block_size,
                                .sees_all = true});
  if (status.ok()) {
    status = rest->Plan({.blocks = blocks_of_rest,
                         .columns = columns,
                         .lengths = lengths_of_rest,
                         .query_rows = query_rows,
                         .block_size = block_size});
  }
  // For each layer:
  if (status.ok()) {
    status = prompt->Attend(query, blocks, layout, options,
                            {out.data(), sums.data()});
  }
  if (status.ok()) {
    status = rest->Attend(query, blocks, layout, options,
                          {out_of_rest.data(), sums_of_rest.data()});
  }
  const AttentionPart parts[] = {{out.data(), sums.data()},
                                 {out_of_rest.data(), sums_of_rest.data()}};
  if (status.ok()) {
    status = MergeAttention(parts, v_head_dim, heads * rows, {out.data()});
  }

  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto expected = AttendWhole(*pool, table, query, options);
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(out[i], expected[i], 1e-5);  // Rounding: 2^-24 each step.
  }
}

using Logits = int;
constexpr int kEndOfText = 0;

// A model whose third token ends the text.
struct CountingModel {
  Logits Run(Cache& cache, const SessionBatch& batch) {
    PutOnes(cache, static_cast<int>(batch.inputs.size()));
    return ++passes % 3;
  }
  int passes = 0;
};

int Sample(Logits logits, int /*output*/) { return logits; }

// docs/serving.md
TEST(Documented, Serving) {
  const auto made = *MakeCache({.kind = Kind::kCausal});
  Cache& cache = *made;
  CountingModel model;
  const std::vector<SessionInput> prompt = {{.token = 5}, {.token = 7}};
  std::vector<int> sent, closed;
  const auto Send = [&](int /*request*/, int token) { sent.push_back(token); };
  const auto Close = [&](int request) { closed.push_back(request); };

  const SessionsSpec spec = {.slots = 16, .context = 8192, .batch = 512};
  Status status = cache.Init(InitOf(spec, DType::kF16));
  auto sessions = *MakeSessions(cache, spec);

  const auto submitted = sessions->Submit(prompt, {.keep = 4, .limit = 500});
  while (status.ok() && submitted.ok()) {
    const SessionBatch batch = *sessions->NextBatch();  // Calls StartForward.
    if (batch.inputs.empty()) break;
    const Logits logits = model.Run(cache, batch);  // Put, Get and attention.
    for (const int output : batch.outputs) {
      const int request = batch.requests[output];
      const int token = Sample(logits, output);
      if (token == kEndOfText) {
        status = sessions->Finish(request);
      } else {
        Send(request, token);
        const Ending ending = *sessions->Sampled(request, token);
        if (ending != Ending::kNone) Close(request);
      }
    }
  }

  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(sent, (std::vector{1, 2}));
  EXPECT_TRUE(closed.empty());
  EXPECT_TRUE(sessions->Requests().empty());
}

// A model of three tokens, which are drawn in turn: b, c, and the end of text.
struct TurningModel {
  std::span<const float> Run(Cache& cache, const SessionBatch& batch) {
    PutOnes(cache, static_cast<int>(batch.inputs.size()));
    logits.assign(3, 0);
    logits[++passes % 3] = 100;
    return logits;
  }
  int passes = 0;
  std::vector<float> logits;
};

struct LetterTokenizer {
  std::string Bytes(int token) const {
    return {static_cast<char>(first + token)};
  }
  char first = 'a';
};

// docs/serving.md
TEST(Documented, AService) {
  const auto made = *MakeCache({.kind = Kind::kCausal});
  Cache& cache = *made;
  TurningModel model;
  const LetterTokenizer tokenizer;
  const std::vector<SessionInput> prompt = {{.token = 5}, {.token = 7}};
  std::string sent;
  const auto Send = [&](const std::string& text) { sent += text; };
  const auto Refuse = [](const Status& error) { FAIL() << error.ToString(); };

  const SessionsSpec sizes = {.slots = 16, .context = 8192, .batch = 512};
  Status status = cache.Init(InitOf(sizes, DType::kF16));
  const auto service = *MakeService(
      cache, {.sessions = sizes},
      {.forward = [&](Cache& cells,
                      const auto& batch) { return model.Run(cells, batch); },
       .bytes = [&](int token) { return tokenizer.Bytes(token); },
       .end = kEndOfText});

  const auto answer = service->Ask({.prompt = prompt,
                                    .limit = 500,
                                    .stops = {"\n\n"},
                                    .sample = Sampler(0.7, 0.9, /*seed=*/1)});
  if (!answer.ok()) return Refuse(answer.status());
  AnswerPart part;
  while (part.finish == Finish::kNone) {
    part = (*answer)->Next(/*whole=*/false, std::chrono::seconds(1));
    Send(part.text);
  }
  status = part.status;

  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(part.finish, Finish::kStop);
  EXPECT_EQ(sent, "bc");
}

// docs/speculation.md
TEST(Documented, Drafts) {
  const auto made = SmallCache();
  Cache& cache = *made;
  ASSERT_TRUE(
      cache.StartForward({std::vector{0, 1}, std::vector{0, 0}}, false).ok());
  PutOnes(cache, 2);

  const std::vector<std::int32_t> positions = {2, 2, 3, 3, 4};
  const std::vector<int> sequences = {0, 0, 0, 0, 0};
  const std::vector<int> parents = {kCommitted, kCommitted, 0, 0, 2};
  Status status = cache.StartForward(
      {.positions = positions, .sequences = sequences, .parents = parents},
      false);
  // ... SetLayer, Put and Get of every layer, and the model's outputs.
  const std::vector<int> accepted = {0, 2};
  if (status.ok()) status = cache.Commit(0, accepted);

  EXPECT_TRUE(status.ok()) << status.ToString();
  std::vector<CellEntry> cells;
  cache.ListCells(cells);
  EXPECT_EQ(cells.size(), 4U);
}

// docs/hybrid.md
TEST(Documented, Hybrids) {
  const CacheSpec recurrent = {
      .kind = Kind::kRecurrent, .checkpoint_every = 4, .checkpoints = 2};
  const CacheSpec with_drafts = {.kind = Kind::kRecurrent,
                                 .checkpoint_every = 4,
                                 .checkpoints = 2,
                                 .drafts = 8};
  const CacheSpec with_pins = {.kind = Kind::kRecurrent, .pins = 2};
  const CacheSpec causal = {.kind = Kind::kCausal};
  const CacheSpec windowed = {.kind = Kind::kSwa, .window = 2};
  const CacheSpec hybrid = {.kind = Kind::kHybrid,
                            .caches = {causal, recurrent, windowed}};
  const PagedSpec groups = {
      .max_seq_len = 4096,
      .groups = {{.block_size = 2, .blocks = 9},
                 {.block_size = 2, .blocks = 6, .window = 3},
                 {.block_size = 4, .blocks = 4, .states = true}}};
  const PrefixKey key = {.salt = "tenant",
                         .extra = {"adapter 7", "version 2"},
                         .media = {{5, "hash of the image"}}};
  EXPECT_TRUE(MakeCache(recurrent).ok());
  EXPECT_TRUE(MakeCache(with_drafts).ok());
  EXPECT_TRUE(MakeCache(with_pins).ok());
  EXPECT_TRUE(MakeCache(hybrid).ok());
  const auto pool = MakePagedPool(groups);
  ASSERT_TRUE(pool.ok());
  EXPECT_TRUE((*pool)->Open(std::vector{1, 2, 3}, key).ok());
}

// A cache of another project.
class MyCache : public props::ForwardingCache {
 public:
  explicit MyCache(const CacheSpec& spec) : ForwardingCache(*MakeCache(spec)) {}
};

// docs/adapter.md
int TestMyCache() {
  const props::Subject mine = {
      .name = "mine",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        if (spec.kind == Kind::kEncoder || spec.kind == Kind::kWrapper) {
          return Status(StatusCode::kNotSupported, "no such kind here");
        }
        return std::unique_ptr<Cache>(std::make_unique<MyCache>(spec));
      }};
  props::FuzzOptions options;
  options.operations = 20000;
  const props::FuzzResult result = props::Fuzz(options, mine);
  if (!result.failure) return 0;
  std::puts(props::FailureText(*result.failure).c_str());
  return 1;
}

TEST(Documented, FuzzInCpp) { EXPECT_EQ(TestMyCache(), 0); }

}  // namespace
}  // namespace kvtwin
