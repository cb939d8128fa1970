#include "park.h"

#include <kvtwin/save.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

namespace serve {

using Json = nlohmann::json;
namespace fs = std::filesystem;

int CommonPrefix(std::span<const kvtwin::SessionInput> left,
                 std::span<const kvtwin::SessionInput> right) {
  return static_cast<int>(std::ranges::mismatch(left, right).in1 -
                          left.begin());
}

ParkingLot::ParkingLot(std::string folder, std::string model, std::size_t limit)
    : folder_(std::move(folder)), model_(std::move(model)), limit_(limit) {
  std::error_code error;
  fs::create_directories(folder_, error);
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const std::string path = entry.path().string();
    const auto label = kvtwin::ModelOf(path);
    const Json json = Json::parse(label.ok() ? *label : "", nullptr, false);
    if (!json.is_object()) continue;
    Inputs tokens;
    for (const Json& token : json.value("tokens", Json())) {
      if (token.is_number_integer()) tokens.push_back({.token = token});
    }
    if (Label(tokens) == *label) files_[path] = std::move(tokens);
  }
}

std::string ParkingLot::Label(const Inputs& tokens) const {
  Json list = Json::array();
  for (const auto& input : tokens) list.push_back(input.token);
  return Json({{"model", model_}, {"tokens", list}}).dump();
}

void ParkingLot::Park(const Inputs& tokens, kvtwin::CacheState state) {
  std::vector<std::string> replaced;
  for (const auto& [path, old] : files_) {
    const auto common = static_cast<std::size_t>(CommonPrefix(old, tokens));
    if (common == tokens.size()) return;  // A parked conversation has it all.
    if (common == old.size()) replaced.push_back(path);
  }
  if (replaced.empty() && files_.size() >= limit_) {
    replaced.push_back(files_.begin()->first);
  }
  for (const std::string& path : replaced) files_.erase(path);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string path =
      folder_ + "/" + std::to_string(now.count()) + ".safetensors";
  files_[path] = tokens;
  // The assignment waits for the file before this one.
  writing_ = std::async(
      std::launch::async,
      [path, replaced, label = Label(tokens), state = std::move(state)] {
        const kvtwin::Status status = kvtwin::SaveState(state, path, label);
        if (!status.ok()) {
          std::cerr << "park: " << status.ToString() << "\n";
          return;
        }
        std::error_code error;
        for (const std::string& old : replaced) fs::remove(old, error);
      });
}

std::pair<std::string, int> ParkingLot::Find(const Inputs& prompt) const {
  std::pair<std::string, int> best;
  for (const auto& [path, tokens] : files_) {
    const int common = CommonPrefix(tokens, prompt);
    if (common > best.second) best = {path, common};
  }
  return best;
}

kvtwin::Result<kvtwin::CacheState> ParkingLot::Load(const std::string& path) {
  if (writing_.valid()) writing_.wait();
  auto state = kvtwin::LoadState(path, Label(files_.at(path)));
  if (!state.ok()) files_.erase(path);
  return state;
}

}  // namespace serve
