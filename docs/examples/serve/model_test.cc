// Answers lines of JSON about a model, for test_serve.py:
//   {"text": "...", "special": true}           -> tokens, and their bytes in
//   hex
//   {"tokens": [...], "chunks": [3, 1, ...]}   -> the logits after each token
// serve_model_test FOLDER WEIGHTS ROWS: WEIGHTS and ROWS are dtypes. WEIGHTS is
// bf16 or f32.

#include "model.h"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tokenizer.h"

namespace {

using namespace serve;

Json Encode(const Tokenizer& tokenizer, const Json& line) {
  const std::string text = line["text"];
  Tokens tokens;
  tokenizer.Encode(text, line["special"], tokens);
  std::string hex;
  std::vector<std::int32_t> numbers;
  for (const auto& input : tokens) {
    numbers.push_back(input.token);
    for (const char byte : tokenizer.Bytes(input.token)) {
      const char* digits = "0123456789abcdef";
      hex += digits[static_cast<unsigned char>(byte) >> 4];
      hex += digits[byte & 15];
    }
  }
  return {{"tokens", numbers}, {"bytes", hex}};
}

Json Logits(Llama& model, kvtwin::DType rows, const Json& line) {
  Tokens tokens;
  for (const std::int32_t token : line["tokens"]) tokens.push_back({token});
  const int size = static_cast<int>(tokens.size());
  const auto cache = model.MakeCache(
      {.dtype = rows, .max_sequences = 1, .capacity = size, .max_batch = size});
  Json logits = Json::array();
  std::int32_t done = 0;
  for (const int chunk : line["chunks"]) {
    std::vector<std::int32_t> positions(static_cast<std::size_t>(chunk));
    std::vector<int> outputs(positions.size());
    std::iota(positions.begin(), positions.end(), done);
    std::iota(outputs.begin(), outputs.end(), 0);
    const std::vector<int> sequences(positions.size(), 0);
    Check(cache->StartForward({positions, sequences}, false));
    const Eigen::ArrayXXf numbers = model.Forward(
        *cache, {.inputs = std::span(tokens).subspan(
                     static_cast<std::size_t>(done), positions.size()),
                 .positions = positions,
                 .sequences = sequences,
                 .requests = {},
                 .outputs = outputs});
    for (const auto& column : numbers.colwise()) {
      logits.push_back(std::vector<float>(column.begin(), column.end()));
    }
    done += chunk;
  }
  return {{"logits", logits}};
}

}  // namespace

int main(int, char** argv) try {
  const std::string folder = argv[1];
  const Json json = Json::parse(std::ifstream(folder + "/serve.json"));
  Llama model(json.at("model"), folder + "/model.safetensors",
              std::string(argv[2]) == "bf16");
  const Tokenizer tokenizer(json.at("tokenizer"), model.config.vocab);
  for (std::string text; std::getline(std::cin, text);) {
    const Json line = Json::parse(text);
    std::cout << (line.contains("text")
                      ? Encode(tokenizer, line)
                      : Logits(model, *kvtwin::DTypeFromName(argv[3]), line))
              << std::endl;
  }
} catch (const std::exception& error) {
  std::cerr << argv[1] << ": " << error.what() << "\n";
  return 1;
}
