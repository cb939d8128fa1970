// Byte-level BPE: expressions of PCRE2 split a text into pieces, and merges
// join the bytes of a piece to tokens.

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "model.h"

namespace serve {
namespace {

constexpr std::size_t kLongest = 1 << 12;  // Bytes of a token.

// A regular expression.
class Pattern {
 public:
  explicit Pattern(const std::string& text) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                      PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr),
        pcre2_code_free);
    if (code_ == nullptr) throw std::runtime_error("wrong pattern: " + text);
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
  }

  // Returns the parts of a text: the odd ones match the pattern, the even ones
  // lie between them.
  std::vector<std::string_view> Split(std::string_view text) const {
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    std::vector<std::string_view> parts;
    std::size_t end = 0;
    // The first match checks that all of the text is UTF-8.
    while (pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                       text.size(), end, end > 0 ? PCRE2_NO_UTF_CHECK : 0,
                       data.get(), nullptr) > 0 &&
           range[1] > range[0]) {
      parts.push_back(text.substr(end, range[0] - end));
      parts.push_back(text.substr(range[0], range[1] - range[0]));
      end = range[1];
    }
    parts.push_back(text.substr(end));
    return parts;
  }

 private:
  std::shared_ptr<pcre2_code> code_;
};

using Pair = std::pair<int, int>;

class Bpe : public Tokenizer {
 public:
  Bpe(const nlohmann::json& json, int vocab)
      : bytes_(vocab),
        byte_tokens_(json.at("byte_tokens")),
        special_(json.at("special")),
        pieces_(json.at("pieces")),
        specials_(json.at("specials")) {
    for (int byte = 0; byte < 256; ++byte) {
      const int token = byte_tokens_[byte];
      if (token != -1) bytes_.at(token) = static_cast<char>(byte);
    }
    const std::vector<std::array<int, 3>> merges = json.at("merges");
    for (const auto& [left, right, merged] : merges) {
      const int rank = static_cast<int>(merges_.size());
      merges_.try_emplace({left, right}, rank, merged);
      bytes_.at(merged) = bytes_.at(left) + bytes_.at(right);
      if (bytes_[merged].size() > kLongest)
        throw std::length_error("too long a token");
    }
    for (const auto& [name, token] : special_) bytes_.at(token).clear();
  }

  void Encode(std::string_view text, bool special,
              Tokens& tokens) const override {
    const auto parts = special ? specials_.Split(text) : std::vector{text};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i % 2 == 1) {
        tokens.push_back({special_.at(std::string(parts[i]))});
      } else {
        for (const auto piece : pieces_.Split(parts[i])) Merge(piece, tokens);
      }
    }
  }

  const std::string& Bytes(std::int32_t token) const override {
    return bytes_[token];
  }

 private:
  // Merges the pair of the lowest rank, wherever it is, until no pair has a
  // rank.
  void Merge(std::string_view piece, Tokens& out) const {
    std::vector<int> parts;
    for (const unsigned char byte : piece) {
      if (byte_tokens_[byte] >= 0) parts.push_back(byte_tokens_[byte]);
    }
    for (;;) {
      const std::pair<const Pair, Pair>* best = nullptr;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto found = merges_.find({parts[i], parts[i + 1]});
        if (found != merges_.end() &&
            (best == nullptr || found->second < best->second)) {
          best = &*found;
        }
      }
      if (best == nullptr) break;
      std::size_t end = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const bool pair =
            i + 1 < parts.size() && Pair(parts[i], parts[i + 1]) == best->first;
        parts[end++] = pair ? best->second.second : parts[i];
        i += pair;
      }
      parts.resize(end);
    }
    for (const int token : parts) out.push_back({token});
  }

  std::vector<std::string> bytes_;    // By token.
  std::array<int, 256> byte_tokens_;  // By byte; -1: it has none.
  // Rank and merged token, by left and right token.
  std::map<Pair, Pair> merges_;
  std::map<std::string, int> special_;
  Pattern pieces_, specials_;
};

}  // namespace

std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& folder, int vocab) {
  const std::string path = folder + "/serve.json";
  try {
    const auto json = nlohmann::json::parse(std::ifstream(path));
    return std::make_unique<Bpe>(json.at("tokenizer"), vocab);
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace serve
