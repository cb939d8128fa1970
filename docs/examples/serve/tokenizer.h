// A byte-level BPE tokenizer, with the pre-tokenizer of SmolLM2: that of GPT-2,
// with each digit by itself.

#ifndef SERVE_TOKENIZER_H_
#define SERVE_TOKENIZER_H_

#include <kvtwin/status.h>

#include <cstdint>
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
  // Reads tokenizer.json, as the Python package `tokenizers` writes it. Errors:
  // invalid_argument, with the name of the file.
  static kvtwin::Result<Tokenizer> Load(const std::string& path);

  // Returns the tokens of a text, which is UTF-8. Special tokens, such as
  // "<|im_end|>", are found in it only if `special`.
  Tokens Encode(std::string_view text, bool special) const;

  // Returns the bytes of a token: of some characters, or a part of one. Those
  // of a special token are empty.
  const std::string& Bytes(std::int32_t token) const {
    return bytes_[static_cast<std::size_t>(token)];
  }
  // Returns the number of a special token, -1 if there is none.
  std::int32_t Special(const std::string& text) const;
  int size() const { return static_cast<int>(bytes_.size()); }

 private:
  struct Merge {
    int rank = 0;
    std::int32_t token = 0;
  };

  void EncodePiece(std::string_view piece, Tokens& out) const;

  std::vector<std::string> bytes_;  // By token.
  std::vector<std::int32_t> byte_tokens_;
  std::unordered_map<std::string, std::int32_t> special_;
  std::unordered_map<std::uint64_t, Merge> merges_;  // By the pair of tokens.
  std::shared_ptr<pcre2_real_code_8> pieces_, specials_;
};

}  // namespace serve

#endif  // SERVE_TOKENIZER_H_
