// Byte-level BPE: expressions of PCRE2 split a text into pieces, and merges
// join the bytes of a piece to tokens.

#ifndef SERVE_TOKENIZER_H_
#define SERVE_TOKENIZER_H_

#define PCRE2_CODE_UNIT_WIDTH 8
#include <kvtwin/sessions.h>
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
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
  // Reads the part "tokenizer" of serve.json, for a vocabulary of `vocab`
  // tokens. Throws an std::exception if it is wrong.
  Tokenizer(const nlohmann::json& json, int vocab)
      : bytes_(vocab),
        byte_tokens_(json.at("byte_tokens")),
        merges_(json.at("merges")),
        special_(json.at("special")),
        pieces_(json.at("pieces")),
        specials_(json.at("specials")) {
    for (int byte = 0; byte < 256; ++byte) {
      const int token = byte_tokens_[byte];
      if (token != -1) bytes_.at(token) = static_cast<char>(byte);
    }
    for (int rank = 0; const auto& [left, right, merged] : merges_) {
      ranks_.try_emplace({left, right}, rank++);
      bytes_.at(merged) = bytes_.at(left) + bytes_.at(right);
      longest_ = std::max(longest_, bytes_[merged].size());
      if (longest_ > 1 << 12) throw std::length_error("too long a token");
    }
    for (const auto& [name, token] : special_) {
      bytes_.at(token).clear();
      longest_ = std::max(longest_, name.size());
    }
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
  // Merges the pair of the lowest rank, the first of these, until no pair has a
  // rank.
  void Merge(std::string_view piece, Tokens& out) const {
    std::map<std::size_t, int> parts;  // Tokens by their first bytes.
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const int token = byte_tokens_[static_cast<unsigned char>(piece[i])];
      if (token >= 0) parts[i] = token;
    }
    const int none = static_cast<int>(merges_.size());
    const auto rank_of = [&](auto left) {
      const auto right = std::next(left);
      if (right == parts.end()) return none;
      const auto rank = ranks_.find({left->second, right->second});
      return rank == ranks_.end() ? none : rank->second;
    };
    // The ranks of pairs, and the first bytes of their left parts. A pair may
    // have changed since it was added.
    std::set<std::pair<int, std::size_t>> pairs;
    const auto add = [&](auto at) { pairs.emplace(rank_of(at), at->first); };
    for (auto left = parts.begin(); left != parts.end(); ++left) add(left);
    while (!pairs.empty() && pairs.begin()->first < none) {
      const auto [rank, first] = pairs.extract(pairs.begin()).value();
      const auto left = parts.find(first);
      if (left == parts.end() || rank_of(left) != rank) continue;
      left->second = merges_[rank][2];
      parts.erase(std::next(left));
      add(left);
      if (left != parts.begin()) add(std::prev(left));
    }
    for (const auto& [first, token] : parts) out.push_back({token});
  }

  std::vector<std::string> bytes_;            // By token.
  std::array<int, 256> byte_tokens_;          // By byte; -1: it has none.
  std::vector<std::array<int, 3>> merges_;    // Left, right and merged token.
  std::map<std::pair<int, int>, int> ranks_;  // Indices of merges, by pair.
  std::map<std::string, int> special_;
  Pattern pieces_, specials_;
  std::size_t longest_ = 1;
};

}  // namespace serve

#endif  // SERVE_TOKENIZER_H_
