// The goals of saving states to files, beside writing and reading a file of as
// many bytes. Files are in the current folder: its file system is the limit.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"
#include "kvtwin/save.h"

namespace kvtwin::bench {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

// A cache of this many tokens, 4 layers, f16 rows of 8 heads of 128.
class Saver {
 public:
  explicit Saver(int tokens) : file_(fmt::format("kvtwin-{}", ::getpid())) {
    CacheSetup setup;
    setup.dtype = DType::kF16;
    setup.capacity = tokens;
    cache_ = Make(setup, "optimized");
    other_ = Make(setup, "optimized");
    const int batch = setup.max_batch;
    for (int first = 0; first < tokens; first += batch) Fill(first, batch);
    Must(cache_->SnapshotTo(state_));
    bytes_ = StateToBytes(state_);
    memory_ = WrittenBuffer(bytes_.size());
  }
  ~Saver() {
    for (const std::string& path : {StatePath(), PlainPath()}) {
      ::unlink(path.c_str());
    }
  }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Nanoseconds from the cache to the disk.
  double TimeSave() {
    return Time([&] {
      Must(cache_->SnapshotTo(state_));
      Must(SaveState(state_, StatePath()));
    });
  }

  // Nanoseconds from the disk into another cache.
  double TimeLoad() {
    DropFromPageCache(StatePath());
    return Time([&] { Must(other_->Restore(Must(LoadState(StatePath())))); });
  }

  // Nanoseconds of writing, or reading, a plain file of as many bytes.
  double TimeWrite() {
    return Time([&] {
      const int file = Open(PlainPath(), O_WRONLY | O_CREAT | O_TRUNC);
      for (std::size_t at = 0; at < bytes_.size(); at += kChunk) {
        const std::size_t size = std::min(kChunk, bytes_.size() - at);
        if (::write(file, &bytes_[at], size) != static_cast<ssize_t>(size)) {
          Wrong(PlainPath(), "cannot be written");
        }
      }
      if (::fsync(file) != 0) Wrong(PlainPath(), "cannot be synced");
      ::close(file);
    });
  }
  double TimeRead() {
    DropFromPageCache(PlainPath());
    return Time([&] {
      const int file = Open(PlainPath(), O_RDONLY);
      std::size_t all = 0;
      ssize_t some = 1;
      while (some > 0) {
        some = ::read(file, memory_.data() + all,
                      std::min(kChunk, memory_.bytes() - all));
        all += AsSize(std::max<ssize_t>(some, 0));
      }
      if (all != bytes_.size()) Wrong(PlainPath(), "cannot be read");
      ::close(file);
    });
  }

  // Checks that the loaded state is the saved one.
  void Check(const std::string& name) {
    TimeWrite();
    TimeSave();
    TimeLoad();
    if (Must(other_->Snapshot()) != state_) Wrong(name, "another state");
  }

 private:
  static constexpr int kLayers = 4;
  static constexpr std::int64_t kHeads = 8;
  static constexpr std::int64_t kHeadDim = 128;

  std::string StatePath() const { return file_ + ".state"; }
  std::string PlainPath() const { return file_ + ".plain"; }

  static int Open(const std::string& path, int flags) {
    const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    if (file < 0) Wrong(path, "cannot be opened");
    return file;
  }

  // Makes the next read come from the disk, to which the file was synced.
  static void DropFromPageCache(const std::string& path) {
    const int file = Open(path, O_RDONLY);
    if (::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) != 0) {
      Wrong(path, "cannot be forgotten");
    }
    ::close(file);
  }

  void Fill(int first, int batch) {
    Tokens tokens;
    for (int i = 0; i < batch; ++i) tokens.Add(first + i, 0);
    Must(cache_->StartForward(tokens, /*reserve=*/false));
    std::vector<float> rows(AsSize(batch * kHeads * kHeadDim));
    for (int layer = 0; layer < kLayers; ++layer) {
      for (float& element : rows) {
        random_ = random_ * 1664525 + 1013904223;
        element = static_cast<float>(random_ >> 16) / 1000;
      }
      const TensorView view =
          DenseView(rows.data(), DType::kF32, {kHeadDim, kHeads, batch, 1});
      Must(cache_->SetLayer(layer));
      Must(cache_->Put(view, view));
    }
  }

  std::string file_;
  std::uint32_t random_ = 1;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Cache> other_;
  CacheState state_;
  std::vector<std::byte> bytes_;
  Buffer memory_;  // As large as bytes_.
};

}  // namespace

void SaveGoals(Goals& goals) {
  const int tokens = goals.Cells(1 << 15);
  const std::string save =
      fmt::format("save {} tokens / write of a file", SizeName(tokens));
  const std::string load =
      fmt::format("load {} tokens / read of a file", SizeName(tokens));
  if (!goals.Wanted(save) && !goals.Wanted(load)) return;
  UseThreads(ThreadCounts().back());
  Saver saver(tokens);
  saver.Check(save);
  goals.Judge(
      save, 1 / 0.7, [&] { return saver.TimeSave(); },
      {[&] { return saver.TimeWrite(); }}, 7);
  goals.Judge(
      load, 1 / 0.7, [&] { return saver.TimeLoad(); },
      {[&] { return saver.TimeRead(); }}, 7);
}

}  // namespace kvtwin::bench
