// A byte-level BPE tokenizer.

#ifndef SERVE_TOKENIZER_H_
#define SERVE_TOKENIZER_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

struct pcre2_real_code_8;

namespace serve {

using Tokens = std::vector<std::int32_t>;

class Tokenizer {
 public:
  // Reads the file serve.json of convert.py, for a model of `size` tokens.
  // Throws an std::exception that names the file.
  Tokenizer(const std::string& path, int size);

  // Returns the tokens of a text, which is UTF-8. Special tokens, such as
  // "<|im_end|>", are found in it only if `special`.
  Tokens Encode(std::string_view text, bool special) const;

  // Returns the bytes of a token: of some characters, or a part of one. Those
  // of a special token are empty.
  const std::string& Bytes(std::int32_t token) const {
    return bytes_[static_cast<std::size_t>(token)];
  }

 private:
  void EncodePiece(std::string_view piece, Tokens& out) const;

  std::vector<std::string> bytes_;                   // By token.
  std::array<std::int32_t, 256> byte_tokens_;        // By byte.
  std::vector<std::array<std::int32_t, 3>> merges_;  // Left, right, merged.
  std::unordered_map<std::uint64_t, std::size_t> ranks_;  // By left and right.
  std::map<std::string, std::int32_t> special_;
  std::shared_ptr<pcre2_real_code_8> pieces_, specials_;
};

}  // namespace serve

#endif  // SERVE_TOKENIZER_H_
