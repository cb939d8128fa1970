#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace serve {
namespace {

constexpr std::size_t kLongest = 1 << 12;  // Bytes of a token.
constexpr std::int32_t kNone = -1;         // A byte without a token.

std::shared_ptr<pcre2_code> Compile(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                   pattern.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, nullptr);
  if (code == nullptr) throw std::runtime_error("wrong pattern: " + pattern);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return {code, pcre2_code_free};
}

// Returns the parts of a text: the odd ones match the pattern, the even ones
// lie between them.
std::vector<std::string_view> Split(const pcre2_code* code,
                                    std::string_view text) {
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
  std::vector<std::string_view> parts;
  std::size_t end = 0;
  while (pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()),
                     text.size(), end, 0, data.get(), nullptr) > 0 &&
         range[1] > range[0]) {
    parts.push_back(text.substr(end, range[0] - end));
    parts.push_back(text.substr(range[0], range[1] - range[0]));
    end = range[1];
  }
  parts.push_back(text.substr(end));
  return parts;
}

std::uint64_t Pair(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(left) << 32 |
         static_cast<std::uint32_t>(right);
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path, int size) try
    : bytes_(static_cast<std::size_t>(size)) {
  const auto json = nlohmann::json::parse(std::ifstream(path)).at("tokenizer");
  json.at("byte_tokens").get_to(byte_tokens_);
  json.at("merges").get_to(merges_);
  json.at("special").get_to(special_);
  pieces_ = Compile(json.at("pieces"));
  specials_ = Compile(json.at("specials"));
  const auto bytes = [this](std::int32_t token) -> std::string& {
    return bytes_.at(static_cast<std::size_t>(token));
  };
  for (std::size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
    const std::int32_t token = byte_tokens_[byte];
    if (token != kNone) bytes(token) = static_cast<char>(byte);
  }
  for (std::size_t rank = 0; rank < merges_.size(); ++rank) {
    const auto [left, right, merged] = merges_[rank];
    ranks_.try_emplace(Pair(left, right), rank);
    bytes(merged) = bytes(left) + bytes(right);
    if (bytes(merged).size() > kLongest) throw std::length_error("long token");
  }
  for (const auto& special : special_) bytes(special.second).clear();
} catch (const std::exception& error) {
  throw std::runtime_error(path + ": " + error.what());
}

Tokens Tokenizer::Encode(std::string_view text, bool special) const {
  Tokens tokens;
  const auto parts = special ? Split(specials_.get(), text) : std::vector{text};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i % 2 == 1) {
      tokens.push_back(special_.at(std::string(parts[i])));
    } else {
      for (const std::string_view piece : Split(pieces_.get(), parts[i])) {
        EncodePiece(piece, tokens);
      }
    }
  }
  return tokens;
}

// Merges the pair of the lowest rank, wherever it is, until there is none.
void Tokenizer::EncodePiece(std::string_view piece, Tokens& out) const {
  Tokens parts;
  for (const char byte : piece) {
    const auto token = byte_tokens_[static_cast<unsigned char>(byte)];
    if (token != kNone) parts.push_back(token);
  }
  for (;;) {
    std::size_t best = merges_.size();
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto rank = ranks_.find(Pair(parts[i], parts[i + 1]));
      if (rank != ranks_.end()) best = std::min(best, rank->second);
    }
    if (best == merges_.size()) break;
    const auto [left, right, merged] = merges_[best];
    std::size_t end = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool pair =
          i + 1 < parts.size() && parts[i] == left && parts[i + 1] == right;
      parts[end++] = pair ? merged : parts[i];
      i += pair;
    }
    parts.resize(end);
  }
  out.insert(out.end(), parts.begin(), parts.end());
}

}  // namespace serve
