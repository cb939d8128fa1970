#include "props/sessions/service_hour.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "core/index.h"
#include "core/json_line.h"

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
    ++number;
    JsonValue object;
    std::string problem = ParseJsonLine(line, object);
    ServiceRequest request;
    if (problem.empty()) {
      const JsonFields fields(object, "", problem);
      request = {.input_length = fields.Int("input_length"),
                 .output_length = fields.Int("output_length"),
                 .blocks = fields.Ints("hash_ids")};
    }
    if (problem.empty() && !IsWhole(request)) {
      problem = "not a request with its blocks";
    }
    if (!problem.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}:{}: {}", path, number, problem));
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
