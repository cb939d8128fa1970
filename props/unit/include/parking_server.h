// Conversations on disk, for tests: servers that park them, and a folder.

#ifndef KVTWIN_PROPS_UNIT_INCLUDE_PARKING_SERVER_H_
#define KVTWIN_PROPS_UNIT_INCLUDE_PARKING_SERVER_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/index.h"
#include "kvtwin/rows.h"
#include "kvtwin/serving.h"
#include "props/base/scratch_folder.h"

namespace kvtwin::props {

using Prompt = std::vector<SessionInput>;

inline constexpr SessionsSpec kParkingSpec = {
    .slots = 2, .context = 16, .batch = 8};

inline Prompt PromptOf(const std::vector<int>& tokens) {
  Prompt prompt;
  for (const int token : tokens) prompt.push_back({token});
  return prompt;
}

// A cache whose rows are the numbers of their tokens, and its sessions.
class ParkingServer {
 public:
  explicit ParkingServer(const CacheSpec& spec = {}, DType rows = DType::kF32,
                         std::optional<DType> v_rows = {},
                         const SessionsSpec& sizes = kParkingSpec)
      : cache_(*MakeCache(spec)), layer_types_(Size(spec.caches)) {
    EXPECT_TRUE(cache_->SetConfig({.v_dtype = v_rows}).ok());
    EXPECT_TRUE(cache_->Init(InitOf(sizes, rows)).ok());
    sessions_ = *MakeSessions(*cache_, sizes);
  }

  Cache& cache() { return *cache_; }
  Sessions& sessions() { return *sessions_; }

  // Computes a prompt and tokens that are removed again, and returns its slot,
  // which is free then.
  int Compute(const Prompt& prompt, int removed = 0) {
    const int request = *sessions_->Submit(prompt);
    int slot = -1;
    for (bool over = false; !over;) {
      Pass(*sessions_->NextBatch(), over);
      slot = sessions_->Request(request)->slot;
    }
    for (int i = 0; i < removed; ++i) {
      EXPECT_TRUE(sessions_->Sampled(request, 20).ok());
      bool over = false;
      Pass(*sessions_->NextBatch(), over);
    }
    EXPECT_TRUE(sessions_->Finish(request, removed).ok());
    return slot;
  }

  // Returns the tokens whose rows the slot has, by position.
  std::map<int, int> Rows(int slot) {
    std::map<int, int> rows;
    const CacheState state = *cache_->SnapshotOf(slot);
    for (int i = 0; i < Size(state.cells); ++i) {
      rows[At(state.cells, i).position] = static_cast<int>(
          ElementOf<float>(state.layers.at(0).value.view(), 0, 0, i));
    }
    return rows;
  }

 private:
  void Pass(const SessionBatch& batch, bool& over) {
    std::vector<float> rows;
    for (const SessionInput& input : batch.inputs) {
      rows.push_back(static_cast<float>(input.token));
    }
    const TensorView view =
        DenseView(rows.data(), DType::kF32, {1, 1, std::ssize(rows), 1});
    for (int type = 0; type < std::max(layer_types_, 1); ++type) {
      if (layer_types_ > 0) {
        EXPECT_TRUE(cache_->SetLayerType(type).ok());
      }
      EXPECT_TRUE(cache_->SetLayer(0).ok());
      EXPECT_TRUE(cache_->Put(view, view).ok());
    }
    over = !batch.outputs.empty();
  }

  std::unique_ptr<Cache> cache_;
  int layer_types_;  // 0: the cache has no other caches.
  std::unique_ptr<Sessions> sessions_;
};

inline std::map<int, int> RowsOfPrompt(const Prompt& prompt, int length) {
  std::map<int, int> rows;
  for (int i = 0; i < length; ++i) rows[i] = At(prompt, i).token;
  return rows;
}

// Returns what Unpark returned; -1 is an error.
inline int TokensOf(const Result<int>& unparked) {
  return unparked.ok() ? *unparked : -1;
}

class Parked : public testing::Test {
 protected:
  ParkingSpec Spec(int limit = 8) const {
    return {.folder = folder_.File("parked"), .model = "m 1", .limit = limit};
  }
  std::unique_ptr<ParkingLot> Open(int limit = 8) const {
    return *MakeParkingLot(Spec(limit));
  }
  // Parks prompts, one after another.
  void ParkAll(ParkingLot& parking, const std::vector<Prompt>& prompts) {
    for (const Prompt& prompt : prompts) {
      ParkingServer server;
      const int slot = server.Compute(prompt);
      EXPECT_TRUE(parking.Park(server.sessions(), server.cache(), slot).ok());
    }
    EXPECT_TRUE(parking.Wait().ok());
  }
  // Unparks into slot 1 of a new server.
  int Unparked(ParkingLot& parking, const Prompt& prompt, int least = 1) {
    ParkingServer server;
    const Result<int> tokens =
        parking.Unpark(server.sessions(), server.cache(), 1, prompt, least);
    if (!tokens.ok()) {
      error_ = tokens.status().message();
      EXPECT_EQ(server.Rows(1).size(), 0);
      EXPECT_EQ(server.sessions().Slot(1)->record.size(), 0);
      return -1;
    }
    EXPECT_EQ(server.Rows(1), RowsOfPrompt(prompt, *tokens));
    EXPECT_EQ(server.sessions().Slot(1)->reusable, *tokens);
    EXPECT_TRUE(CheckSessions(server.sessions(), server.cache()).ok());
    return *tokens;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> files;
    for (const auto& entry :
         std::filesystem::directory_iterator(Spec().folder)) {
      files.push_back(entry.path());
    }
    std::ranges::sort(files);
    return files;
  }
  // Parks a prompt, and returns its file.
  std::string ParkedFile(const Prompt& prompt) {
    const auto parking = Open();
    ParkAll(*parking, {prompt});
    return Files().back();
  }

  ScratchFolder folder_{"parking"};
  std::string error_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_UNIT_INCLUDE_PARKING_SERVER_H_
