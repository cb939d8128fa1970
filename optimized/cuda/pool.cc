// The twin "cuda" of the paged pool: the optimized pool, with device memory.

#include <fmt/format.h>

#include <limits>
#include <memory>
#include <utility>

#include "core/guarded_paged.h"
#include "core/twin.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/memory.h"
#include "optimized/cuda/session.h"
#include "optimized/pool_memory.h"

namespace kvtwin::optimized::cuda {
namespace {

class DevicePool final : public PagedPool {
 public:
  DevicePool(std::shared_ptr<Session> session, std::unique_ptr<PagedPool> pool)
      : session_(std::move(session)), pool_(std::move(pool)) {}

  const PagedSpec& spec() const override { return pool_->spec(); }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return pool_->Open(prompt, key);
  }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    return pool_->Find(prompt, key);
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    return pool_->AddMedia(sequence, media);
  }
  Result<int> Fork(int sequence, int len) override {
    return pool_->Fork(sequence, len);
  }
  Result<int> SeqLen(int sequence) const override {
    return pool_->SeqLen(sequence);
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    return session_->Change(
        "Append", [&] { return pool_->Append(sequence, layer, key, value); });
  }
  Status Commit(int sequence, int new_tokens) override {
    return pool_->Commit(sequence, new_tokens);
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    return pool_->Commit(sequence, tokens);
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return session_->Try([&] { return pool_->Views(sequence, layer); });
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return session_->Try([&] { return pool_->ViewsPacked(sequence, layer); });
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return session_->Try(
        [&] { return pool_->ContiguousKV(sequence, layer, kv_len); });
  }
  Status Truncate(int sequence, int len) override {
    return pool_->Truncate(sequence, len);
  }
  Status Free(int sequence) override { return pool_->Free(sequence); }
  Result<Device> LayerDevice(int layer) const override {
    return pool_->LayerDevice(layer);
  }
  PagedUsage Usage() const override { return pool_->Usage(); }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return pool_->ExportCsr(sequences);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return pool_->ExportTable(sequences);
  }
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override {
    return pool_->ExportLayerTable(sequences, layer);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return pool_->SlotMapping(sequence, begin, end);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return session_->Try([&] { return pool_->Blocks(layer); });
  }

 private:
  std::shared_ptr<Session> session_;
  std::unique_ptr<PagedPool> pool_;
};

// In the head-major layout PutRows numbers the rows of heads, as ints.
Status CheckRoom(const PagedSpec& spec) {
  const std::int64_t tokens = std::int64_t{spec.blocks} * spec.block_size;
  if (spec.layout != PagedLayout::kHeadMajor ||
      tokens <= std::numeric_limits<int>::max() / spec.kv_heads) {
    return {};
  }
  return {StatusCode::kNotSupported,
          fmt::format("head-major rows of {} tokens and {} heads are too many",
                      tokens, spec.kv_heads)};
}

// Makes a pool on the default stream.
Result<std::unique_ptr<PagedPool>> Make(const std::shared_ptr<Session>& session,
                                        const PagedSpec& spec) {
  Status status = CheckRoom(spec);
  if (status.ok()) status = session->Open();
  if (!status.ok()) return status;
  std::unique_ptr<PagedPool> made;
  status = session->Try([&] {
    made = std::make_unique<DevicePool>(
        session,
        MakePool(spec, std::make_unique<DevicePoolMemory>(session->gpu())));
    return Status();
  });
  if (!status.ok()) return status;
  return made;
}

class StreamedPool final : public CudaPool {
 public:
  StreamedPool(std::shared_ptr<Session> session,
               std::unique_ptr<PagedPool> pool)
      : session_(std::move(session)), pool_(std::move(pool)) {}

  PagedPool& On(CudaStream stream) override {
    session_->On(stream);
    return *pool_;
  }

  Result<PagedKv> Blocks(int layer) const override {
    return pool_->Blocks(layer);
  }

 private:
  std::shared_ptr<Session> session_;
  std::unique_ptr<PagedPool> pool_;
};

}  // namespace

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec) {
  return Make(std::make_shared<Session>(/*device=*/0, /*host_views=*/true),
              spec);
}

}  // namespace kvtwin::optimized::cuda

namespace kvtwin {

Result<std::unique_ptr<CudaPool>> CudaPool::Make(const PagedSpec& spec,
                                                 int device) {
  using optimized::cuda::Session;
  Status status = CheckPagedSpec(spec);
  if (status.ok() && (spec.window || spec.states || !spec.groups.empty())) {
    status = Status(StatusCode::kNotSupported,
                    "CudaPool has no windows, states or groups");
  }
  if (!status.ok()) return status;
  auto session = std::make_shared<Session>(device, /*host_views=*/false);
  auto made = optimized::cuda::Make(session, spec);
  if (!made.ok()) return made.status();
  return std::unique_ptr<CudaPool>(
      std::make_unique<optimized::cuda::StreamedPool>(std::move(session),
                                                      std::move(*made)));
}

}  // namespace kvtwin
