#include "props/sessions/service_hour.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {

namespace {

// Whether all blocks of the prompt are there, with tokens below kFirstAnswer.
bool IsWhole(const ServiceRequest& request) {
  constexpr int kBlocks = kFirstAnswer / kBlockTokens;
  return request.input_length >= 1 && request.output_length >= 1 &&
         std::cmp_less_equal(request.input_length,
                             request.blocks.size() * kBlockTokens) &&
         std::ranges::all_of(request.blocks, [](int block) {
           return block >= 0 && block < kBlocks;
         });
}

}  // namespace

Result<std::vector<ServiceRequest>> ReadServiceHour(const std::string& path,
                                                    int context) {
  std::vector<ServiceRequest> requests;
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ServiceRequest request;
    ++number;
    try {
      const auto json = nlohmann::json::parse(line);
      json.at("input_length").get_to(request.input_length);
      json.at("output_length").get_to(request.output_length);
      json.at("hash_ids").get_to(request.blocks);
    } catch (const nlohmann::json::exception&) {
      request = {};
    }
    if (!IsWhole(request)) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("{}:{}: not a request with its blocks", path, number));
    }
    if (std::int64_t{request.input_length} + request.output_length <= context) {
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

std::vector<SessionInput> PromptOf(const ServiceRequest& request, int divisor) {
  const int block = kBlockTokens / divisor;
  const int length = std::max(request.input_length / divisor, 1);
  std::vector<SessionInput> prompt(AsSize(length));
  for (int i = 0; i < length; ++i) {
    At(prompt, i).token = At(request.blocks, i / block) * block + i % block;
  }
  return prompt;
}

}  // namespace kvtwin::props
