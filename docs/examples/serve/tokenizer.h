// Byte-level BPE: expressions of PCRE2 split a text into pieces, and merges
// join the bytes of a piece to tokens.

#ifndef SERVE_TOKENIZER_H_
#define SERVE_TOKENIZER_H_

#define PCRE2_CODE_UNIT_WIDTH 8
#include <kvtwin/sessions.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <queue>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace serve {

// Tokens, as sessions have them.
using Tokens = std::vector<kvtwin::SessionInput>;

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

class Tokenizer {
 public:
  // Reads serve.json, which convert.py made, for a vocabulary of `vocab`
  // tokens. Throws an std::exception that names the file.
  Tokenizer(const std::string& folder, int vocab) try
      : Tokenizer(nlohmann::json::parse(std::ifstream(folder + "/serve.json"))
                      .at("tokenizer"),
                  vocab) {
  } catch (const std::exception& error) {
    throw std::runtime_error(folder + "/serve.json: " + error.what());
  }

  // Adds the tokens of a text, which is UTF-8, to others. Special tokens, such
  // as "<|im_end|>", are found in it only if `special`.
  void Encode(std::string_view text, bool special, Tokens& tokens) const {
    const auto parts = special ? specials_.Split(text) : std::vector{text};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i % 2 == 1) {
        tokens.push_back({special_.at(std::string(parts[i]))});
      } else {
        for (const auto piece : pieces_.Split(parts[i])) Merge(piece, tokens);
      }
    }
  }

  // Returns the bytes of a token: of some characters, or a part of one. Those
  // of a special token are empty.
  const std::string& Bytes(std::int32_t token) const { return bytes_[token]; }

  // The bytes of a text that one token may stand for, at most.
  std::size_t longest() const { return longest_; }

 private:
  Tokenizer(const nlohmann::json& json, int vocab)
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
      longest_ = std::max(longest_, bytes_[merged].size());
      if (longest_ > 1 << 12) throw std::length_error("too long a token");
    }
    for (const auto& [name, token] : special_) {
      bytes_.at(token).clear();
      longest_ = std::max(longest_, name.size());
    }
  }

  // Merges the pair of the lowest rank, the first of these, until no pair has a
  // rank.
  void Merge(std::string_view piece, Tokens& out) const {
    struct Part {
      int token, next;  // The index of the next part.
      int before;       // And of the one before it.
    };
    std::vector<Part> parts;
    for (const unsigned char byte : piece) {
      const int size = static_cast<int>(parts.size());
      const int token = byte_tokens_[byte];
      if (token >= 0) parts.push_back({token, size + 1, size - 1});
    }
    const int end = static_cast<int>(parts.size());
    const auto find = [&](int left) {
      return left < 0 || parts[left].next == end
                 ? merges_.end()
                 : merges_.find(
                       {parts[left].token, parts[parts[left].next].token});
    };
    // The ranks of pairs, and the indices of their left parts. A pair may have
    // changed since it was added.
    std::priority_queue<std::pair<int, int>, std::vector<std::pair<int, int>>,
                        std::greater<>>
        pairs;
    const auto add = [&](int left) {
      const auto merge = find(left);
      if (merge != merges_.end()) pairs.push({merge->second.first, left});
    };
    for (int i = 0; i < end; ++i) add(i);
    while (!pairs.empty()) {
      const auto [rank, left] = pairs.top();
      pairs.pop();
      const auto merge = find(left);
      if (merge == merges_.end() || merge->second.first != rank) continue;
      Part& part = parts[left];
      part.token = merge->second.second;
      const int merged = std::exchange(part.next, parts[part.next].next);
      parts[merged].token = -1;  // It is in no pair.
      if (part.next < end) parts[part.next].before = left;
      add(left);
      add(part.before);
    }
    for (int i = 0; i < end; i = parts[i].next) out.push_back({parts[i].token});
  }

  std::vector<std::string> bytes_;    // By token.
  std::array<int, 256> byte_tokens_;  // By byte; -1: it has none.
  // Rank and merged token, by left and right token.
  std::map<std::pair<int, int>, std::pair<int, int>> merges_;
  std::map<std::string, int> special_;
  Pattern pieces_, specials_;
  std::size_t longest_ = 1;
};

}  // namespace serve

#endif  // SERVE_TOKENIZER_H_
