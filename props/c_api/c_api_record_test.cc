// Recording, and checking recordings, through the C interface.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"
#include "props/c_api/c_api_adapters.h"
#include "props/history/generate.h"
#include "props/history/speculate.h"
#include "props/oracle/judge.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A file for one test.
class Scratch {
 public:
  explicit Scratch(const std::string& name) : path_(folder_.File(name)) {}

  const char* path() const { return path_.c_str(); }
  std::string text() const { return ReadFile(path_); }

 private:
  const ScratchFolder folder_{"record"};
  const std::string path_;
};

kvtwin_verdict CheckFile(const char* path, const char* twin = nullptr) {
  kvtwin_verdict verdict{};
  verdict.size = sizeof(verdict);
  EXPECT_EQ(kvtwin_check_file(path, twin, &verdict), KVTWIN_OK)
      << kvtwin_last_error();
  return verdict;
}

// Calls a cache, and records each call with the C function for it.
class RecordedByC : public ForwardingCache {
 public:
  RecordedByC(std::unique_ptr<Cache> cache, const Setup& setup, bool own,
              const char* path, bool& whole)
      : ForwardingCache(std::move(cache)), whole_(whole) {
    std::vector<kvtwin_cache_params> caches;
    const kvtwin_cache_params cache_params =
        CCacheParams({setup.spec, setup.config, setup.init}, caches);
    kvtwin_recorder_params params{};
    EXPECT_EQ(kvtwin_recorder_default_params(&params, sizeof(params)),
              KVTWIN_OK);
    params.cache = &cache_params;
    params.own_placement = own ? 1 : 0;
    params.layers = setup.layers;
    params.kv_heads = setup.rows.kv_heads;
    params.k_head_dim = setup.rows.k_head_dim;
    params.v_head_dim = setup.rows.v_head_dim;
    params.producer = "RecordedByC";
    params.drafts = 1;
    // A recording of a cache that Init refuses could only be bad input.
    const auto twin = MakeCache(setup.spec, "reference");
    const bool exists = twin.ok() && (*twin)->SetConfig(setup.config).ok() &&
                        (*twin)->Init(setup.init).ok();
    EXPECT_EQ(kvtwin_recorder_create(&params, path, &recorder_) == KVTWIN_OK,
              exists)
        << kvtwin_last_error();
  }
  ~RecordedByC() override {
    EXPECT_EQ(kvtwin_recorder_close(recorder_), KVTWIN_OK);
  }

  Status SetLayer(int layer) override {
    layer_ = layer;
    return ForwardingCache::SetLayer(layer);
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = ForwardingCache::StartForward(batch, reserve);
    if (status.ok()) type_ = recorded_type_ = 0;
    if (!status.ok() && status.code() != StatusCode::kCacheFull) return status;
    kvtwin_batch to{};
    to.parents = batch.parents.empty() ? nullptr : batch.parents.data();
    to.size = sizeof(to);
    to.positions = batch.positions.data();
    to.sequences = batch.sequences.data();
    to.tokens = static_cast<std::int32_t>(batch.positions.size());
    to.multimodal = batch.multimodal.data();
    to.multimodal_count = static_cast<std::int32_t>(batch.multimodal.size());
    // An encoder, or a refused batch, has no cells.
    const auto cells = BatchCells();
    const bool all = cells.size() == batch.positions.size();
    Expect(kvtwin_record_start_forward(recorder_, &to, reserve ? 1 : 0,
                                       CStatus(status.code()),
                                       all ? cells.data() : nullptr));
    return status;
  }
  Status SetCausal(std::span<const int> except) override {
    Status status = ForwardingCache::SetCausal(except);
    if (!status.ok()) return status;
    SayType();
    Expect(kvtwin_record_set_causal(recorder_, except.data(), except.size()));
    return status;
  }
  Status SetLayerType(int type) override {
    type_ = type;
    return ForwardingCache::SetLayerType(type);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    SayType();
    const kvtwin_tensor k = CTensor(key);
    const kvtwin_tensor v = CTensor(value);
    Expect(kvtwin_record_put(recorder_, layer_, &k, &v));
    return ForwardingCache::Put(key, value);
  }
  Result<KvView> Get() override {
    Result<KvView> got = ForwardingCache::Get();
    if (!got.ok()) return got;
    kvtwin_view view{};
    view.size = sizeof(view);
    view.key = CTensor(got->key);
    view.value = CTensor(got->value);
    view.mask = CTensor(got->mask);
    view.first_cell = got->first_cell;
    SayType();
    Expect(kvtwin_record_get(recorder_, layer_, &view));
    return got;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = ForwardingCache::CopyPrefix(src, dst, len);
    if (status.ok()) {
      Expect(kvtwin_record_copy_prefix(recorder_, src, dst, len));
    }
    return status;
  }
  Status Commit(int seq, std::span<const int> path) override {
    Status status = ForwardingCache::Commit(seq, path);
    if (!status.ok()) return status;
    Expect(kvtwin_record_commit(recorder_, seq, path.data(), path.size()));
    return status;
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> answer = ForwardingCache::CanResume(seq, pos);
    Expect(kvtwin_record_can_resume(recorder_, seq, pos, *answer ? 1 : 0));
    return answer;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    Status status = ForwardingCache::Remove(seq, begin, end);
    Expect(kvtwin_record_remove(recorder_, seq, begin, end,
                                CStatus(status.code())));
    return status;
  }
  Result<bool> EncoderCached() override {
    const Result<bool> answer = ForwardingCache::EncoderCached();
    if (!answer.ok()) return answer;
    SayType();
    Expect(kvtwin_record_encoder_cached(recorder_, *answer ? 1 : 0));
    return answer;
  }

 private:
  // The generator's rows may hold numbers that JSON cannot.
  void Expect(kvtwin_status status) {
    if (status == KVTWIN_OK) return;
    EXPECT_THAT(kvtwin_last_error(), HasSubstr("which no recording can hold"));
    whole_ = false;
  }
  void SayType() {
    if (type_ == recorded_type_) return;
    recorded_type_ = type_;
    Expect(kvtwin_record_set_layer_type(recorder_, type_));
  }

  bool& whole_;
  kvtwin_recorder* recorder_ = nullptr;
  int layer_ = 0;
  int type_ = 0;
  int recorded_type_ = 0;
};

// Records the calls of a history on a twin. Returns false if some are missing.
bool RecordHistory(History& history, bool own, const char* path) {
  std::erase_if(history.ops, [](const Op& op) {
    return op.kind == OpKind::kMisuse || op.kind == OpKind::kReload ||
           op.kind == OpKind::kPoison || op.kind == OpKind::kAdd;
  });
  // A recording has one placement for all caches.
  for (CacheSpec& part : history.setup.spec.caches) {
    part.placement = history.setup.spec.placement;
  }
  bool whole = true;
  const Subject subject = {
      .name = "recorded",
      .make = [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        auto made = MakeCache(spec);
        if (!made.ok()) return made.status();
        return std::unique_ptr<Cache>(std::make_unique<RecordedByC>(
            std::move(*made), history.setup, own, path, whole));
      },
      .tried_outside_of_life = false};
  const RunResult result = RunHistory(history, subject);
  EXPECT_FALSE(result.failure);
  return whole && result.ran;
}

TEST(CRecorder, TheRecordingOfATwinIsAccepted) {
  const Scratch file("recorded.jsonl");
  int accepted = 0;
  for (std::uint64_t number = 0; number < 3200; ++number) {
    const bool own = number % 2 == 1;
    History history = MakeHistory(11, number, std::nullopt, 12);
    // Blocks that are put as blocks may get another scale (trace_format.md).
    const auto& setup = history.setup;
    if (IsBlockDType(setup.init.dtype) || IsBlockDType(setup.v_dtype())) {
      continue;
    }
    if (!RecordHistory(history, own, file.path())) continue;
    const kvtwin_verdict verdict = CheckFile(file.path());
    ASSERT_EQ(verdict.outcome, KVTWIN_ACCEPTED)
        << ToText(history) << "\n line " << verdict.line << ": "
        << verdict.reason;
    EXPECT_EQ(verdict.level, own ? KVTWIN_VISIBILITY : KVTWIN_IDENTITY);
    EXPECT_EQ(verdict.line, 0);
    const std::string_view reason = verdict.reason;
    EXPECT_TRUE(reason.empty() || reason.starts_with("nothing was judged"))
        << reason;
    ++accepted;
  }
  EXPECT_GT(accepted, 540);
}

TEST(CRecorder, TheRecordingOfDraftsIsAccepted) {
  const Scratch file("drafts.jsonl");
  int accepted = 0;
  for (std::uint64_t number = 0; number < 800; ++number) {
    const bool own = number % 2 == 1;
    History history = MakeSpeculation(12, number, std::nullopt, 8, 0);
    const auto& setup = history.setup;
    if (IsBlockDType(setup.init.dtype) || IsBlockDType(setup.v_dtype())) {
      continue;
    }
    if (!RecordHistory(history, own, file.path())) continue;
    if (ReadFile(file.path()).find("parents") == std::string::npos) continue;
    const kvtwin_verdict verdict = CheckFile(file.path());
    ASSERT_EQ(verdict.outcome, KVTWIN_ACCEPTED)
        << ToText(history) << "\n line " << verdict.line << ": "
        << verdict.reason;
    EXPECT_EQ(verdict.level, own ? KVTWIN_VISIBILITY : KVTWIN_IDENTITY);
    ++accepted;
  }
  EXPECT_GT(accepted, 40);
}

// Position 0 of sequence 0 is evicted before the batch of four is refused
// (S12), and position 1 is put once more, with position 0 in its window.
TEST(CRecorder, ARefusedBatchMayEvict) {
  const Scratch file("recorded.jsonl");
  for (const char* copied : {"", "copy 0>2:2 | drop 0:0- | copy 2>0:2 | "}) {
    History history = *ParseHistory(fmt::format(
        "kvt1 kind=swa_mem window=1 memory=1 seqs=1 cap=4 batch=4 dims=1,1,1 | "
        "put 1*3 | put 0*2 | put 0*4 | {}drop 1:0- | put 0*1@-1",
        copied));
    ASSERT_TRUE(RecordHistory(history, /*own=*/true, file.path()));
    const kvtwin_verdict verdict = CheckFile(file.path());
    EXPECT_EQ(verdict.outcome, KVTWIN_ACCEPTED) << verdict.reason;
    EXPECT_NE(ReadFile(file.path()).find("cache_full"), std::string::npos);
  }
}

// Records call by call: one sequence of two tokens.
class ByHand : public ::testing::Test {
 protected:
  ByHand() {
    EXPECT_EQ(kvtwin_cache_default_params(&cache_, sizeof(cache_)), KVTWIN_OK);
    cache_.capacity = cache_.max_batch = 4;
    EXPECT_EQ(kvtwin_recorder_default_params(&params_, sizeof(params_)),
              KVTWIN_OK);
    params_.cache = &cache_;
    batch_.size = sizeof(batch_);
    batch_.positions = positions_.data();
    batch_.sequences = sequences_.data();
    batch_.tokens = 2;
    view_.size = sizeof(view_);
    view_.key = view_.value = Rows(shown_);
    view_.mask = {mask_.data(), KVTWIN_F32, {2, 2, 1, 1}, {}};
    view_.columns = 2;
    view_.first_cell = 0;
  }
  ~ByHand() override { kvtwin_recorder_close(recorder_); }

  static kvtwin_tensor Rows(const std::array<float, 2>& rows) {
    return {rows.data(), KVTWIN_F32, {1, 1, 2, 1}, {}};
  }
  kvtwin_status Create() {
    return kvtwin_recorder_create(&params_, file_.path(), &recorder_);
  }
  // Records the calls before the get.
  void Begin() {
    ASSERT_EQ(Create(), KVTWIN_OK) << kvtwin_last_error();
    ASSERT_EQ(kvtwin_record_start_forward(recorder_, &batch_, 0, KVTWIN_OK,
                                          cells_.data()),
              KVTWIN_OK);
    const kvtwin_tensor rows = Rows(put_);
    ASSERT_EQ(kvtwin_record_put(recorder_, 0, &rows, &rows), KVTWIN_OK);
  }
  kvtwin_verdict Verdict() {
    EXPECT_EQ(kvtwin_recorder_close(recorder_), KVTWIN_OK);
    recorder_ = nullptr;
    return CheckFile(file_.path());
  }

  Scratch file_{"by_hand.jsonl"};
  kvtwin_cache_params cache_{};
  kvtwin_recorder_params params_{};
  kvtwin_recorder* recorder_ = nullptr;
  std::array<std::int32_t, 2> positions_ = {0, 1};
  std::array<std::int32_t, 2> sequences_ = {0, 0};
  std::array<std::int32_t, 2> cells_ = {0, 1};
  std::array<float, 2> put_ = {1, 2};
  std::array<float, 2> shown_ = {1, 2};
  std::array<float, 4> mask_ = {0, -INFINITY, 0, 0};
  kvtwin_batch batch_{};
  kvtwin_view view_{};
};

TEST_F(ByHand, ARightRecordingIsAcceptedAndAWrongOneIsNot) {
  Begin();
  ASSERT_EQ(kvtwin_record_get(recorder_, 0, &view_), KVTWIN_OK);
  const kvtwin_verdict right = Verdict();
  EXPECT_EQ(right.outcome, KVTWIN_ACCEPTED);
  EXPECT_EQ(right.level, KVTWIN_VISIBILITY);
  Begin();
  shown_[1] = 1;  // The row of the other token.
  ASSERT_EQ(kvtwin_record_get(recorder_, 0, &view_), KVTWIN_OK);
  const kvtwin_verdict wrong = Verdict();
  EXPECT_EQ(wrong.outcome, KVTWIN_REJECTED);
  EXPECT_EQ(wrong.level, -1);
  EXPECT_EQ(wrong.line, 4);
  EXPECT_THAT(wrong.reason, StartsWith("get: "));
  // The verdict is the same from memory, and with one twin.
  const std::string reason = wrong.reason;
  const std::string text = file_.text();
  kvtwin_verdict again{};
  again.size = sizeof(again);
  for (const char* twin : {"reference", "optimized"}) {
    ASSERT_EQ(kvtwin_check_memory(text.data(), text.size(), twin, &again),
              KVTWIN_OK);
    EXPECT_EQ(again.outcome, KVTWIN_REJECTED);
    EXPECT_EQ(again.line, 4);
    EXPECT_EQ(again.reason, reason);
  }
  EXPECT_EQ(kvtwin_check_memory(text.data(), text.size(), "third", &again),
            KVTWIN_INVALID_ARGUMENT);
  again.size = 8;
  EXPECT_EQ(kvtwin_check_memory(text.data(), text.size(), nullptr, &again),
            KVTWIN_INVALID_ARGUMENT);
}

TEST_F(ByHand, DraftsNeedAHeaderThatSaysSo) {
  const std::array<std::int32_t, 2> parents = {KVTWIN_COMMITTED, 0};
  batch_.parents = parents.data();
  ASSERT_EQ(Create(), KVTWIN_OK);
  EXPECT_EQ(
      kvtwin_record_start_forward(recorder_, &batch_, 0, KVTWIN_OK, nullptr),
      KVTWIN_FAILED_PRECONDITION);
  EXPECT_EQ(kvtwin_record_commit(recorder_, 0, nullptr, 0),
            KVTWIN_FAILED_PRECONDITION);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("params.drafts = 0"));
  EXPECT_EQ(kvtwin_recorder_close(recorder_), KVTWIN_OK);
  params_.drafts = 1;
  Begin();
  ASSERT_EQ(kvtwin_record_get(recorder_, 0, &view_), KVTWIN_OK);
  // `attend` needs a flag of its own.
  const kvtwin_tensor rows = Rows(put_);
  EXPECT_EQ(kvtwin_record_attend(recorder_, 0, &rows, &rows),
            KVTWIN_FAILED_PRECONDITION);
  const std::array<std::int32_t, 1> path = {0};
  ASSERT_EQ(kvtwin_record_commit(recorder_, 0, path.data(), 1), KVTWIN_OK);
  EXPECT_EQ(Verdict().outcome, KVTWIN_ACCEPTED);
}

TEST_F(ByHand, PromptsAndPinsNeedAHeaderThatSaysSo) {
  const std::array<std::int32_t, 2> tokens = {7, 8};
  const auto find = [&](std::int32_t length) {
    return kvtwin_record_find_prefix(recorder_, 1, tokens.data(), 2, length);
  };
  Begin();
  EXPECT_EQ(find(0), KVTWIN_FAILED_PRECONDITION);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("without params.prompts"));
  EXPECT_EQ(kvtwin_record_checkpoint(recorder_, 0), KVTWIN_FAILED_PRECONDITION);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("no room for pins"));
  EXPECT_EQ(kvtwin_recorder_close(recorder_), KVTWIN_OK);
  params_.prompts = 1;
  Begin();
  EXPECT_EQ(find(2), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(),
              HasSubstr("length is 2, the prompt has 2 tokens"));
  EXPECT_EQ(find(0), KVTWIN_OK);
  EXPECT_EQ(Verdict().outcome, KVTWIN_ACCEPTED);
  Begin();
  EXPECT_EQ(find(1), KVTWIN_OK);  // Nothing of it was computed.
  EXPECT_EQ(Verdict().outcome, KVTWIN_REJECTED);
}

TEST_F(ByHand, CellsMustFollowThePlacement) {
  params_.own_placement = 0;
  Begin();
  ASSERT_EQ(kvtwin_record_get(recorder_, 0, &view_), KVTWIN_OK);
  EXPECT_EQ(Verdict().level, KVTWIN_IDENTITY);
  cells_ = {1, 0};
  Begin();
  const kvtwin_verdict elsewhere = Verdict();
  EXPECT_EQ(elsewhere.outcome, KVTWIN_REJECTED);
  EXPECT_EQ(elsewhere.line, 2);
}

TEST_F(ByHand, InvalidCallsAreRefusedAndNotWritten) {
  Begin();
  const std::string before = file_.text();
  const auto refused = [&](kvtwin_status status, const std::string& why) {
    EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), HasSubstr(why));
    EXPECT_EQ(file_.text(), before);
  };
  refused(kvtwin_record_start_forward(recorder_, &batch_, 0,
                                      KVTWIN_INVALID_ARGUMENT, nullptr),
          "misuse is left out");
  refused(kvtwin_record_remove(recorder_, 0, 0, 1, KVTWIN_CACHE_FULL),
          "no remove");
  refused(kvtwin_record_remove(recorder_, 0, 0, 1, KVTWIN_INTERNAL),
          "internal");
  put_[1] = INFINITY;
  kvtwin_tensor rows = Rows(put_);
  refused(kvtwin_record_put(recorder_, 0, &rows, &rows), "key: element 1");
  rows.shape[1] = 0;
  refused(kvtwin_record_put(recorder_, 0, &rows, &rows),
          "key has shape [1, 0, 2], every extent must be at least 1");
  rows.dtype = KVTWIN_BITS;
  refused(kvtwin_record_put(recorder_, 0, &rows, &rows), "rows are of numbers");
  refused(kvtwin_record_put(recorder_, 0, nullptr, nullptr), "key has no data");
  mask_[1] = -1e9F;
  refused(kvtwin_record_get(recorder_, 0, &view_), "column 1 of row 0");
  mask_[1] = -INFINITY;
  view_.mask.dtype = KVTWIN_Q8_0;
  refused(kvtwin_record_get(recorder_, 0, &view_), "no dtype of masks");
  view_.mask.dtype = KVTWIN_F32;
  view_.mask.shape[1] = -1;
  refused(kvtwin_record_get(recorder_, 0, &view_), "[columns, rows]");
  view_.size = 1;
  refused(kvtwin_record_get(recorder_, 0, &view_), "view.size is 1");
}

// An element that is repeated takes no memory, its copies would.
TEST_F(ByHand, ShapesThatNoLineHoldsAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  Begin();
  const std::string before = file_.text();
  const auto refused = [&](kvtwin_status status, const std::string& name) {
    EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), StartsWith(name + " has shape ["));
    EXPECT_EQ(file_.text(), before);
  };
  kvtwin_tensor rows = Rows(put_);
  rows.stride[3] = sizeof(float);
  for (const std::array<std::int64_t, 3>& shape :
       {std::array<std::int64_t, 3>{kHuge, kHuge, 1},
        {kHuge * kHuge / 4, 4, 4},
        {kHuge * kHuge, 1, 1},
        {1, 1, kHuge},
        {1 << 13, 1 << 13, 2}}) {
    std::ranges::copy(shape, rows.shape);
    refused(kvtwin_record_put(recorder_, 0, &rows, &rows), "key");
    const kvtwin_tensor row = Rows(put_);
    refused(kvtwin_record_put(recorder_, 0, &row, &rows), "value");
    view_.value = rows;
    refused(kvtwin_record_get(recorder_, 0, &view_), "view.value");
  }
  view_.value = view_.key;
  view_.mask.stride[3] = sizeof(float);
  for (const std::array<std::int64_t, 2>& shape :
       {std::array<std::int64_t, 2>{1, kHuge * kHuge}, {kHuge, kHuge}}) {
    std::ranges::copy(shape, view_.mask.shape);
    refused(kvtwin_record_get(recorder_, 0, &view_), "view.mask");
  }
}

TEST_F(ByHand, ARefusedRecorderLeavesTheFileAlone) {
  std::ofstream(file_.path()) << "mine";
  params_.cache = nullptr;
  EXPECT_EQ(Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "params.cache is NULL");
  params_.cache = &cache_;
  params_.layers = 0;
  EXPECT_EQ(Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), StartsWith("layers is 0"));
  params_.layers = 1;
  cache_.kind = KVTWIN_WRAPPER;
  EXPECT_EQ(Create(), KVTWIN_INVALID_ARGUMENT);
  cache_.kind = KVTWIN_CAUSAL;
  cache_.shift.kind = KVTWIN_SHIFT_CUSTOM;
  cache_.shift.fn = [](void*, std::int32_t, std::int32_t, std::int32_t,
                       std::int32_t, float*) { return 0; };
  EXPECT_EQ(Create(), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("shift is custom"));
  EXPECT_EQ(file_.text(), "mine");
  cache_.shift.kind = KVTWIN_SHIFT_NONE;
  EXPECT_EQ(kvtwin_recorder_create(&params_, "no/such/file", &recorder_),
            KVTWIN_FAILED_PRECONDITION);
  EXPECT_EQ(recorder_, nullptr);
}

// The outputs of two heads, for K and V rows 1 and 2.
TEST_F(ByHand, OutputsOfAttentionAreJudged) {
  params_.attends = 1;
  params_.soft_cap = 3;
  const std::array<float, 2> sinks = {0.5F, -1};
  params_.sinks = sinks.data();
  params_.sink_count = 2;
  const std::array<float, 4> queries = {1, -2, 0.5F, 3};
  std::array<float, 4> outputs{};
  for (std::size_t i = 0; i < 4; ++i) {
    double sum = std::exp(sinks.at(i % 2));
    double weighted = 0;
    for (std::size_t cell = 0; cell <= i / 2; ++cell) {
      const double score = queries.at(i) * put_.at(cell);
      const double weight = std::exp(3 * std::tanh(score / 3));
      sum += weight;
      weighted += weight * put_.at(cell);
    }
    outputs.at(i) = static_cast<float>(weighted / sum);
  }
  const kvtwin_tensor query = {queries.data(), KVTWIN_F32, {1, 2, 2, 1}, {}};
  const kvtwin_tensor out = {outputs.data(), KVTWIN_F32, {1, 2, 2, 1}, {}};
  for (const bool right : {true, false}) {
    Begin();
    if (!right) outputs[3] *= 1.001F;
    ASSERT_EQ(kvtwin_record_attend(recorder_, 0, &query, &out), KVTWIN_OK)
        << kvtwin_last_error();
    const kvtwin_verdict verdict = Verdict();
    EXPECT_EQ(verdict.outcome, right ? KVTWIN_ACCEPTED : KVTWIN_REJECTED);
    EXPECT_EQ(verdict.line, right ? 0 : 4);
    if (right) {
      EXPECT_EQ(verdict.level, KVTWIN_ATTENTION);
    } else {
      EXPECT_THAT(verdict.reason, StartsWith("attend: the output of row 1"));
    }
  }
}

TEST_F(ByHand, OutputsOfAttentionThatNoRecordingCanHold) {
  const kvtwin_tensor rows = Rows(put_);
  Begin();
  EXPECT_EQ(kvtwin_record_attend(recorder_, 0, &rows, &rows),
            KVTWIN_FAILED_PRECONDITION);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("params.attends = 0"));
  EXPECT_EQ(kvtwin_recorder_close(recorder_), KVTWIN_OK);
  params_.attends = 1;
  Begin();
  const std::string before = file_.text();
  kvtwin_tensor fewer = rows;
  fewer.shape[2] = 1;
  EXPECT_EQ(kvtwin_record_attend(recorder_, 0, &rows, &fewer),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("heads and rows differ"));
  EXPECT_EQ(kvtwin_record_attend(recorder_, 0, nullptr, &rows),
            KVTWIN_INVALID_ARGUMENT);
  EXPECT_STREQ(kvtwin_last_error(), "query has no data");
  EXPECT_EQ(file_.text(), before);
  kvtwin_recorder* other = nullptr;
  const auto refused = [&](const std::string& why) {
    EXPECT_EQ(kvtwin_recorder_create(&params_, "no/such/file", &other),
              KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), StartsWith(why));
  };
  params_.soft_cap = -1;
  refused("soft_cap is -1");
  params_.soft_cap = 0;
  params_.attend_tolerance = NAN;
  refused("attend_tolerance is nan");
  params_.attend_tolerance = 0;
  params_.attend_dtype = KVTWIN_Q8_0;
  refused("attend_dtype is 4");
  params_.attend_dtype = KVTWIN_F32;
  const float sink = -INFINITY;
  params_.sinks = &sink;
  params_.sink_count = 1;
  refused("sinks has -inf");
  params_.sink_count = -1;
  refused("sinks has -1 entries");
}

TEST_F(ByHand, AFullDiskIsReported) {
  ASSERT_EQ(kvtwin_recorder_create(&params_, "/dev/full", &recorder_),
            KVTWIN_FAILED_PRECONDITION);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("No space left"));
}

TEST(CCheck, ReportsFilesThatAreNotRecordings) {
  for (const char* path : {"no/such/file.jsonl", "/"}) {
    const kvtwin_verdict verdict = CheckFile(path);
    EXPECT_EQ(verdict.outcome, KVTWIN_NOT_A_RECORDING);
    EXPECT_STRNE(verdict.reason, "");
  }
  kvtwin_verdict verdict{};
  verdict.size = sizeof(verdict);
  ASSERT_EQ(kvtwin_check_memory(nullptr, 0, nullptr, &verdict), KVTWIN_OK);
  EXPECT_EQ(verdict.outcome, KVTWIN_NOT_A_RECORDING);
  EXPECT_STREQ(verdict.reason, "the file is empty");
  ASSERT_EQ(kvtwin_check_memory("{}\n", 3, nullptr, &verdict), KVTWIN_OK);
  EXPECT_EQ(verdict.outcome, KVTWIN_NOT_A_RECORDING);
  EXPECT_EQ(verdict.line, 1);
}

// Every eighth recording has the same verdict from C and C++.
TEST(CCheck, HasTheVerdictsOfCpp) {
  const std::vector<std::string> twins(TwinNames().begin(), TwinNames().end());
  int files = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(KVTWIN_RECORDINGS)) {
    if (entry.path().extension() != ".jsonl" || ++files % 8 != 0) continue;
    std::ifstream in(entry.path());
    const Judgement expected = Judge(in, twins);
    const kvtwin_verdict actual = CheckFile(entry.path().c_str());
    EXPECT_EQ(AsInt(actual.outcome), AsInt(expected.verdict())) << entry.path();
    EXPECT_EQ(actual.line, expected.line()) << entry.path();
    EXPECT_EQ(actual.reason, expected.reason()) << entry.path();
  }
  EXPECT_GT(files, 8);
}

}  // namespace
}  // namespace kvtwin::props
