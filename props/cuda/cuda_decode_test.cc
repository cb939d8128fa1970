// Which arguments Decode of <kvtwin/cuda.h> refuses. (cuda_attention_test.cc
// has its results.)

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/runtime.h"
#include "props/cuda/cuda_caches.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

// Arguments of Decode, which tests change before they make the call.
struct DecodeArguments {
  TensorView query;
  KvView view;
  AttentionTable table;
  AttentionOptions options = {};
  AttentionOut out;
  void* scratch = nullptr;

  Status OverView(cudaStream_t stream) const {
    return Decode(query, view, VLayout::kPlain, options, out, scratch, stream);
  }
  Status OverBlocks(cudaStream_t stream) const {
    return Decode(query, PagedKv{view.key, view.value},
                  PagedLayout::kTokenMajor, table, options, out, scratch,
                  stream);
  }
};

// A view of a cache, which is taken as one block of a pool, too.
class CudaDecode : public CudaCaches {
 protected:
  using Change = std::function<void(DecodeArguments&)>;
  using Refused = std::vector<std::pair<Change, std::string>>;

  void SetUp() override {
    CudaCaches::SetUp();
    rows_.Fill(1, stream_);
    Start({0, 0}, {0, 1}, stream_);
    Put(rows_, stream_);
    const KvView view = *cuda_->On(stream_).Get();
    ints_ = static_cast<const std::int32_t*>(rows_.OnDevice().data);
    numbers_ = static_cast<float*>(const_cast<void*>(out_.OnDevice().data));
    arguments_ = {.query = rows_.OnDevice(),
                  .view = view,
                  .table = {.blocks = {ints_, 2},
                            .columns = 1,
                            .lengths = {ints_, 2},
                            .query_rows = {},
                            .block_size = AsInt(view.key.shape[2])},
                  .out = {.out = numbers_},
                  .scratch = const_cast<void*>(scratch_.OnDevice().data)};
  }

  // Makes a call for each change of the arguments, and expects that it is
  // refused with this code and a message that has this text.
  void ExpectOverView(StatusCode code, const Refused& refused) {
    Expect(&DecodeArguments::OverView, code, refused);
  }
  void ExpectOverBlocks(StatusCode code, const Refused& refused) {
    Expect(&DecodeArguments::OverBlocks, code, refused);
  }

  TokenRows rows_{2};
  TokenRows out_{2};
  TokenRows scratch_{1 << 12};
  const std::int32_t* ints_ = nullptr;
  float* numbers_ = nullptr;
  DecodeArguments arguments_;

 private:
  template <class Call>
  void Expect(const Call& call, StatusCode code, const Refused& refused) {
    for (const auto& [change, text] : refused) {
      DecodeArguments changed = arguments_;
      change(changed);
      const Status status = (changed.*call)(stream_);
      EXPECT_EQ(status.code(), code) << text;
      EXPECT_THAT(status.message(), HasSubstr(text));
    }
  }
};

TEST_F(CudaDecode, TakesTheseArguments) {
  const Status status = arguments_.OverView(stream_);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(CudaDecode, RefusesWhatOtherTwinsHave) {
  const std::vector<float> sinks(kHeads, 0);
  using Arguments = DecodeArguments;
  const Refused refused = {
      {[](Arguments& a) { a.options.soft_cap = 1; }, "soft_cap"},
      {[&](Arguments& a) { a.options.sinks = sinks; }, "sinks"},
      {[&](Arguments& a) { a.out.log_sum_exp = numbers_; }, "log_sum_exp"},
      {[](Arguments& a) { a.query.dtype = DType::kF16; }, "a query of f16"},
      {[](Arguments& a) { a.query.stride[1] += 4; }, "not dense"}};
  ExpectOverView(StatusCode::kNotSupported, refused);
  ExpectOverBlocks(StatusCode::kNotSupported, refused);
  ExpectOverBlocks(StatusCode::kNotSupported,
                   {{[](Arguments& a) { a.table.window = 5; }, "window"},
                    {[](Arguments& a) { a.table.sees_all = true; }, "sees_all"},
                    {[&](Arguments& a) {
                       a.table.query_rows = {ints_, 2};
                     },
                     "query_rows"}});
}

TEST_F(CudaDecode, RefusesInvalidArguments) {
  using Arguments = DecodeArguments;
  const Refused refused = {
      {[](Arguments& a) { a.query.data = nullptr; }, "query is null"},
      {[](Arguments& a) { a.scratch = nullptr; }, "scratch is null"},
      {[](Arguments& a) { a.view.value.data = nullptr; }, "value is null"},
      {[](Arguments& a) { a.view.key.data = nullptr; }, "key is null"},
      {[](Arguments& a) { a.out.out = nullptr; }, "out is null"},
      {[](Arguments& a) { a.view.key.shape[1] = 0; }, "kv_heads is 0"},
      {[](Arguments& a) { a.view.key.shape[0] -= 1; }, "K has a head_dim"},
      {[](Arguments& a) {
         a.query = DenseView(a.query.data, DType::kF32, {kHeadDim, 0, 2, 1});
       },
       "heads is 0"},
      {[](Arguments& a) { a.query.shape[2] = 0; }, "rows is 0"},
      {[](Arguments& a) { a.options.scale = 0; }, "scale is 0"},
      {[](Arguments& a) { a.options.splits = -1; }, "splits is -1"},
      {[](Arguments& a) {
         a.query = DenseView(a.query.data, DType::kF32, {kHeadDim, 3, 2, 1});
       },
       "heads is 3"}};
  ExpectOverView(StatusCode::kInvalidArgument, refused);
  ExpectOverBlocks(StatusCode::kInvalidArgument, refused);
  ExpectOverView(StatusCode::kInvalidArgument,
                 {{[&](Arguments& a) { a.view = *reference_->Get(); }, "host"},
                  {[](Arguments& a) { a.query.shape[2] = 3; }, "rows is 3"}});
}

TEST_F(CudaDecode, RefusesTablesThatDoNotFit) {
  using Arguments = DecodeArguments;
  constexpr std::span<const std::int32_t> kNull(
      static_cast<const std::int32_t*>(nullptr), 2);
  ExpectOverBlocks(
      StatusCode::kInvalidArgument,
      {{[](Arguments& a) { a.table.columns = 0; }, "columns is 0"},
       {[](Arguments& a) { a.table.block_size += 1; }, "block_size is"},
       {[&](Arguments& a) {
          a.table.lengths = {ints_, 1};
        },
        "has 1 entries"},
       {[&](Arguments& a) {
          a.table.blocks = {ints_, 3};
        },
        "has 3 entries"},
       {[&](Arguments& a) { a.table.blocks = kNull; }, "blocks is null"},
       {[&](Arguments& a) { a.table.lengths = kNull; }, "lengths is null"}});
}

}  // namespace
}  // namespace kvtwin::props
