#include <algorithm>
#include <charconv>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"
#include "core/save/part_file.h"
#include "core/state_checks.h"
#include "kvtwin/save.h"
#include "kvtwin/serving.h"

namespace kvtwin {
namespace {

namespace fs = std::filesystem;

using Inputs = std::vector<SessionInput>;

// A conversation on disk.
struct Conversation {
  // Returns the number of inputs of a prompt that the cache may be able to load
  // from the file.
  int Usable(std::span<const SessionInput> prompt) const {
    const int common = CommonInputs(inputs, prompt);
    const auto tried = vain_loads.lower_bound(common);
    return tried == vain_loads.end() ? common : std::min(common, tried->second);
  }

  Inputs inputs;
  // Loads that gave too few inputs: the number of inputs after which the cache
  // could resume, by the number of common inputs. Fewer common inputs give no
  // more.
  std::map<int, int> vain_loads = {};
};

// The conversations by the paths of their files.
using Files = std::map<std::string, Conversation>;

// Returns the time that is the name of a file; 0 if its name is another.
std::uint64_t TimeOf(const std::string& path) {
  const std::string name = fs::path(path).stem().string();
  std::uint64_t time = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data(), end, time);
  const bool is_time = error == std::errc() && stop == end;
  return is_time && time <= INT64_MAX ? time : 0;
}

// An input is its token; one that is not plain text, all three numbers.
std::string InputText(const SessionInput& input) {
  std::string text = std::to_string(input.token);
  if (input.multimodal == 0 && input.same_batch == 0) return text;
  return fmt::format("{}:{}:{}", text, input.multimodal, input.same_batch);
}

// Reads what InputText writes. Other texts give some input or none.
std::optional<SessionInput> ReadInput(std::string_view text) {
  SessionInput input;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto read = [&](auto& number) {
    const auto [next, error] = std::from_chars(at, end, number);
    at = next;
    return error == std::errc();
  };
  const auto read_after_colon = [&](auto& number) {
    if (at == end || *at != ':') return false;
    ++at;
    return read(number);
  };
  if (!read(input.token) || input.token < 0) return {};
  if (at == end) return input;
  if (!read_after_colon(input.multimodal) ||
      !read_after_colon(input.same_batch) || at != end) {
    return {};
  }
  return input;
}

// Whether a state, or one of its caches, has a token at this position.
bool Holds(const CacheState& state, std::int32_t position) {
  const auto at = [position](const CellEntry& entry) {
    return entry.position == position;
  };
  return std::ranges::any_of(state.cells, at) ||
         std::ranges::any_of(state.caches, [=](const CacheState& cache) {
           return Holds(cache, position);
         });
}

// Whether a state, or one of its caches, has more tokens than the cache has
// cells. Layer type 0 is active afterwards, as after AddSequence.
bool IsTooLarge(const CacheState& state, Cache& cache) {
  bool too_large = Size(state.cells) > cache.CellCount();
  for (int i = Size(state.caches) - 1; i >= 0; --i) {
    const bool selected = cache.SetLayerType(i).ok();
    too_large |= selected && IsTooLarge(At(state.caches, i), cache);
  }
  return too_large;
}

// Returns an error if a state, or one of its caches, lacks a token after which
// the cache would resume, or has a token twice: the cache itself checks
// neither case.
Status CheckTokens(const CacheState& state, int tokens, Cache& cache,
                   int slot) {
  std::vector<bool> held(AsSize(tokens));
  for (const CellEntry& entry : state.cells) {
    if (entry.position >= tokens) continue;
    if (held[AsSize(entry.position)]) {
      return Invalid("the file has position {} twice", entry.position);
    }
    held[AsSize(entry.position)] = true;
  }
  // With a window of 0, a cache also resumes right after its last evicted
  // token.
  const Result<bool> whole = cache.CanResume(slot, 0);
  if (!whole.ok()) return whole.status();
  const auto first = std::ranges::find(held, true) - held.begin();
  for (int i = 0; i < tokens && !state.cells.empty(); ++i) {
    if (held[AsSize(i)] || (!*whole && i + 1 == first)) continue;
    const Result<bool> resumes = cache.CanResume(slot, i + 1);
    if (!resumes.ok()) return resumes.status();
    if (*resumes) return Invalid("the file lacks position {}", i);
  }
  for (const CacheState& part : state.caches) {
    Status status = CheckTokens(part, tokens, cache, slot);
    if (!status.ok()) return status;
  }
  return {};
}

// Returns the names of the dtypes of K and V rows, or the name of both.
std::string RowsText(DType k, DType v) {
  if (k == v) return std::string(DTypeName(k));
  return fmt::format("{} and {}", DTypeName(k), DTypeName(v));
}

// Returns an error if a state has rows of other dtypes.
Status CheckRows(const CacheState& state, const std::string& rows) {
  for (const auto& [layer, stored] : state.layers) {
    const std::string found = RowsText(stored.key.dtype, stored.value.dtype);
    if (found == rows) continue;
    return Invalid("layer {} has rows of {}, the parking lot is for {}", layer,
                   found, rows);
  }
  for (const CacheState& cache : state.caches) {
    if (Status status = CheckRows(cache, rows); !status.ok()) return status;
  }
  return {};
}

Result<SlotInfo> FreeSlot(const Sessions& sessions, int slot) {
  Result<SlotInfo> info = sessions.Slot(slot);
  if (!info.ok() || info->request < 0) return info;
  return Untimely("slot {} is in use by request {}", slot, info->request);
}

// Calls does() in the background. If no thread can start, the first thread that
// waits for the result calls it.
template <class Does>
auto InBackground(Does does) {
  // Both calls share the function: a std::async that throws may have moved it.
  const auto kept = std::make_shared<Does>(std::move(does));
  const auto call = [kept] { return (*kept)(); };
  try {
    return std::async(std::launch::async, call);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, call);
  }
}

// Calls does(), and returns its exception, such as bad_alloc, as an error of
// the file.
template <class Does>
auto CatchFor(const std::string& path, const Does& does) -> decltype(does()) {
  try {
    return does();
  } catch (const std::exception& error) {
    return Untimely("'{}': {}", Printable(path, 200), error.what());
  }
}

class Parking : public ParkingLot {
 public:
  explicit Parking(ParkingSpec spec)
      : spec_(std::move(spec)),
        rows_(RowsText(spec_.rows, spec_.v_rows.value_or(spec_.rows))),
        label_(fmt::format("{}\n{}\n", spec_.model, rows_)) {}
  ~Parking() override {
    for (const Writing& write : writes_) write.done.wait();
  }

  // Finds the files of the model.
  Status List() {
    try {
      fs::create_directories(spec_.folder);
      RemoveDeadParts(spec_.folder);
      // These calls throw: with an error code, libstdc++ aborts if memory runs
      // out.
      for (const auto& entry : fs::directory_iterator(spec_.folder)) {
        const std::string path = entry.path();
        const Result<std::string> label = ModelOf(path);
        if (!label.ok()) continue;
        if (auto inputs = InputsOf(*label)) files_[path] = {*std::move(inputs)};
      }
    } catch (const fs::filesystem_error& error) {
      return Untimely("'{}' cannot be made or listed: {}",
                      Printable(spec_.folder, 200), error.code().message());
    }
    return {};
  }

  Status Park(const Sessions& sessions, const Cache& cache, int slot) override {
    const Result<SlotInfo> info = FreeSlot(sessions, slot);
    if (!info.ok()) return info.status();
    Inputs inputs(info->record.begin(),
                  IteratorAt(info->record, info->reusable));
    if (!inputs.empty() && inputs.back().token == kUnknownToken) {
      inputs.pop_back();
    }
    if (inputs.empty()) return {};
    Settle(false);  // A file that could not be written is forgotten.
    if (std::ranges::any_of(files_, [&](const auto& file) {
          return file.second.Usable(inputs) == Size(inputs);
        })) {
      return {};
    }
    Result<CacheState> state = cache.SnapshotOf(slot);
    if (!state.ok()) return state.status();
    // The last state of a recurrent cache may be that of a stop string.
    while (!inputs.empty() && !Holds(*state, Size(inputs) - 1)) {
      inputs.pop_back();
    }
    if (inputs.empty()) return {};
    Status status = CheckRows(*state, rows_);
    if (status.ok()) Write(std::move(inputs), *std::move(state));
    return status;
  }

  Fetched Fetch(std::span<const SessionInput> prompt, int least,
                bool replace) override {
    Settle(false);
    const auto [best, common] = Best(prompt);
    if (common == 0 || common < least) return Fetched::kNothing;
    const std::string& path = best->first;
    if (IsWriting(path)) return Fetched::kReading;
    bool reads = read_ && read_->path == path;
    if (!read_ || (replace && !reads && IsReady(read_->state))) {
      read_ = {path, InBackground([path, label = LabelOf(best->second.inputs)] {
                 return LoadState(path, label);
               })};
      reads = true;
    }
    return reads && IsReady(read_->state) ? Fetched::kReady : Fetched::kReading;
  }

  Result<int> Unpark(Sessions& sessions, Cache& cache, int slot,
                     std::span<const SessionInput> prompt, int least) override {
    const Result<SlotInfo> info = FreeSlot(sessions, slot);
    if (!info.ok()) return info.status();
    auto best = files_.end();
    int common = 0;
    std::tie(best, common) = Best(prompt);
    const auto usable = [&] {
      return std::min(common, sessions.spec().context);
    };
    least = std::max(least, 1);
    // A request waits only for a file that it can reuse.
    while (usable() >= least && IsWriting(best->first)) {
      SettleFirst();  // If it fails, the files that it would replace are back.
      std::tie(best, common) = Best(prompt);
    }
    if (usable() < least) return 0;
    prompt = prompt.first(AsSize(usable()));
    const std::string path = best->first;
    const Result<CacheState> state =
        CatchFor(path, [&, &inputs = best->second.inputs] {
          return read_ && read_->path == path
                     ? std::exchange(read_, {})->state.get()
                     : LoadState(path, LabelOf(inputs));
        });
    Result<int> loaded = state.status();
    if (state.ok()) {
      loaded = Load(*state, Size(best->second.inputs), sessions, cache, slot,
                    prompt, least);
    }
    if (loaded.ok() && *loaded >= least) {
      ++loaded_;
      return loaded;
    }
    if (loaded.ok()) {
      best->second.vain_loads[common] = *loaded;
      return 0;
    }
    // A cache that was never used refuses even this, and is empty.
    static_cast<void>(sessions.Adopt(slot, {}));
    static_cast<void>(cache.Remove(slot, 0, kOpenEnd));
    if (loaded.status().code() == StatusCode::kCacheFull) {
      // The next passes may free cells.
      if (IsTooLarge(*state, cache)) best->second.vain_loads[INT_MAX] = 0;
      return 0;
    }
    ++failed_;
    files_.erase(best);
    if (!state.ok()) return state.status();
    return Status(loaded.status().code(),
                  fmt::format("'{}': {}", Printable(path, 200),
                              loaded.status().message()));
  }

  Status Wait(bool all) override {
    Settle(all);
    return std::exchange(error_, {});
  }

  ParkingGauges Gauges() const override {
    return {Size(files_), std::ssize(writes_), written_, loaded_, failed_};
  }

 private:
  // A file that is being written, or waits for those before it.
  struct Writing {
    std::string path;
    Files replaced;
    std::shared_future<Status> done;
  };
  // A file that is being read, or was read and not used.
  struct Reading {
    std::string path;
    std::future<Result<CacheState>> state;
  };

  // Returns whether get() waits for no thread. It makes a deferred call itself.
  static bool IsReady(const auto& future) {
    return future.wait_for(std::chrono::seconds(0)) !=
           std::future_status::timeout;
  }

  bool IsWriting(const std::string& path) const {
    return std::ranges::any_of(
        writes_, [&](const Writing& write) { return write.path == path; });
  }

  // Returns the file with the longest prefix that may be usable, and its
  // length.
  std::pair<Files::iterator, int> Best(std::span<const SessionInput> prompt) {
    std::pair<Files::iterator, int> best = {files_.end(), 0};
    for (auto file = files_.begin(); file != files_.end(); ++file) {
      const int usable = file->second.Usable(prompt);
      if (usable > best.second) best = {file, usable};
    }
    return best;
  }

  std::string LabelOf(std::span<const SessionInput> inputs) const {
    std::string label = label_;
    for (const SessionInput& input : inputs) {
      label += InputText(input) + " ";
    }
    return label;
  }

  // Returns the inputs of a label of this model.
  std::optional<Inputs> InputsOf(std::string_view label) const {
    if (!label.starts_with(label_)) return {};
    std::string_view rest = label.substr(label_.size());
    Inputs inputs;
    while (!rest.empty()) {
      const std::size_t blank = rest.find(' ');
      const auto input = ReadInput(rest.substr(0, blank));
      if (!input || blank == std::string_view::npos) return {};
      inputs.push_back(*input);
      rest.remove_prefix(blank + 1);
    }
    if (LabelOf(inputs) != label) return {};
    return inputs;
  }

  // Returns a path that sorts after all others, even if the clock stands still
  // or was set back.
  std::string NewPath() const {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    auto time = static_cast<std::uint64_t>(now.count());
    for (const auto& [path, file] : files_) {
      time = std::max(time, TimeOf(path));
    }
    // The path equals the one that List finds, so that paths sort by name even
    // if the folder ends with a slash.
    const auto path = [&] {
      return (fs::path(spec_.folder) / fmt::format("{:020}.safetensors", time))
          .string();
    };
    std::error_code error;
    while (files_.contains(path()) || fs::exists(path(), error)) ++time;
    return path();
  }

  void Write(Inputs inputs, CacheState state) {
    std::string label = LabelOf(inputs);
    std::list<Writing> writes(1);
    Writing& write = writes.front();
    for (const auto& [path, old] : files_) {
      if (CommonInputs(old.inputs, inputs) == Size(old.inputs)) {
        write.replaced[path] = old;
      }
    }
    for (const auto& [path, old] : files_) {
      if (Size(files_) - Size(write.replaced) < spec_.limit) break;
      write.replaced[path] = old;
    }
    std::vector<fs::path> replaced;
    for (const auto& [path, old] : write.replaced) {
      replaced.emplace_back(path);
    }
    write.path = NewPath();
    Files added;
    added[write.path] = {std::move(inputs)};
    std::shared_future<Status> before;
    if (!writes_.empty()) before = writes_.back().done;
    auto save = [before, path = write.path, label = std::move(label),
                 state = std::move(state),
                 replaced = std::move(replaced)]() mutable {
      // The file before, and the rows, are freed here, not with the future.
      if (before.valid()) std::exchange(before, {}).wait();
      Status status = SaveState(std::exchange(state, {}), path, label);
      // After a file is written, nothing throws.
      std::error_code ignored;
      for (const fs::path& old : replaced) {
        if (status.ok()) fs::remove(old, ignored);
      }
      return status;
    };
    write.done = InBackground(std::move(save));
    // No statement below throws: either all members change or none.
    for (const auto& [path, old] : write.replaced) files_.erase(path);
    files_.merge(added);
    writes_.splice(writes_.end(), writes);
  }

  // Takes note of the files that are written, and with `all` waits for those
  // that are not.
  void Settle(bool all) {
    while (!writes_.empty() && (all || IsReady(writes_.front().done))) {
      SettleFirst();
    }
  }

  void SettleFirst() {
    Writing write = std::move(writes_.front());
    writes_.pop_front();
    if (IsWritten(write)) {
      ++written_;
      return;
    }
    // The list of files is mended before anything can throw. The file is
    // removed, too, as it may be incomplete.
    std::remove(write.path.c_str());
    ++failed_;
    files_.erase(write.path);
    for (Writing& later : writes_) later.replaced.erase(write.path);
    files_.merge(write.replaced);
    error_ = CatchFor(write.path, [&] { return write.done.get(); });
  }

  // Waits for the file, whose writer may have thrown an exception.
  static bool IsWritten(const Writing& write) try {
    return write.done.get().ok();
  } catch (...) {
    return false;
  }

  // Returns the greatest number of the inputs after which the cache can resume
  // and no group is divided.
  static Result<int> Resumed(std::span<const SessionInput> inputs, Cache& cache,
                             int slot) {
    int length = Size(inputs);
    for (;;) {
      const Result<std::int32_t> resume = cache.ResumeBefore(slot, length);
      if (!resume.ok()) return resume.status();
      const int whole = DividedGroup(inputs, *resume).first;
      if (whole == length) return length;
      length = whole;
    }
  }

  // Loads a state of `tokens` tokens into a slot, up to the last of the inputs
  // that the cache can resume after, and returns their number. If that is less
  // than `least`, the slot is emptied.
  static Result<int> Load(const CacheState& state, int tokens,
                          Sessions& sessions, Cache& cache, int slot,
                          std::span<const SessionInput> inputs, int least) {
    if (!Holds(state, tokens - 1)) {
      return Invalid("the label has {} tokens, the file not the last of them",
                     tokens);
    }
    Status status = sessions.Adopt(slot, {});
    if (status.ok()) status = cache.Remove(slot, 0, kOpenEnd);
    if (status.ok()) status = cache.AddSequence(slot, state);
    // A label may name more tokens than its file has.
    if (status.ok()) status = CheckTokens(state, tokens, cache, slot);
    if (!status.ok()) return status;
    const Result<int> resumed = Resumed(inputs, cache, slot);
    if (!resumed.ok()) return resumed;
    const int length = *resumed < least ? 0 : *resumed;
    status = cache.Remove(slot, length, kOpenEnd);
    if (status.ok()) {
      status = sessions.Adopt(slot, inputs.first(AsSize(length)));
    }
    if (!status.ok()) return status;
    return *resumed;
  }

  const ParkingSpec spec_;
  const std::string rows_;
  const std::string label_;  // How the labels of all files begin.
  // By path. Names begin with the time, so that the oldest file comes first.
  Files files_;
  std::list<Writing> writes_;
  std::optional<Reading> read_;
  Status error_;  // The error of the last file that could not be written.
  std::int64_t written_ = 0, loaded_ = 0, failed_ = 0;
};

}  // namespace

Result<std::unique_ptr<ParkingLot>> MakeParkingLot(const ParkingSpec& spec) {
  if (spec.folder.empty()) return Invalid("the folder has no name");
  Status status = CheckPath(spec.folder);
  if (status.ok()) status = CheckRowDType("rows", spec.rows);
  if (status.ok() && spec.v_rows) {
    status = CheckRowDType("v_rows", *spec.v_rows);
  }
  if (status.ok()) status = AtLeastOne("limit", spec.limit);
  if (status.ok()) status = CheckModel(spec.model);
  if (!status.ok()) return status;
  auto parking = std::make_unique<Parking>(spec);
  status = parking->List();
  if (!status.ok()) return status;
  return std::unique_ptr<ParkingLot>(std::move(parking));
}

}  // namespace kvtwin
