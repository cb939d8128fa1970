#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "safetensors.h"

namespace serve {
namespace {

using kvtwin::Result;
using Json = nlohmann::json;

// The expression of GPT-2, but a digit stands alone, and blanks before a digit
// stay together. White space is spelled out: \s of PCRE2 differs from that of
// Unicode.
constexpr std::string_view kPieces =
    R"((?x) \p{N} | '(?:s|t|re|ve|m|ll|d) | \x20?\p{L}+ | \x20?[^_\p{L}\p{N}]+
       | [_]+(?![^_\p{N}]) | [_]+)";
constexpr std::string_view kWhite =
    R"(\t-\r\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029})"
    R"(\x{202f}\x{205f}\x{3000})";

std::string Replace(std::string text, std::string_view from,
                    std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != text.npos;
       at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::shared_ptr<pcre2_code> Compile(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                   pattern.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, nullptr);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return {code, pcre2_code_free};
}

// Calls between(text) and match(text) for all of the text, in order.
template <class Between, class Match>
void Split(const pcre2_code* code, std::string_view text,
           const Between& between, const Match& match) {
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
  std::size_t end = 0;
  while (pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()),
                     text.size(), end, 0, data.get(), nullptr) > 0) {
    between(text.substr(end, range[0] - end));
    match(text.substr(range[0], range[1] - range[0]));
    end = range[1];
  }
  between(text.substr(end));
}

// Appends a code point up to 0x7ff.
void AppendUtf8(int point, std::string& out) {
  if (point >= 0x80) out += static_cast<char>(0xc0 | point >> 6);
  out += static_cast<char>(point < 0x80 ? point : 0x80 | (point & 0x3f));
}

// Returns the byte that each character of a vocabulary stands for.
std::unordered_map<std::string, char> ByteOfCharacter() {
  std::unordered_map<std::string, char> bytes;
  int others = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    std::string character;
    AppendUtf8(printable ? byte : 256 + others++, character);
    bytes[character] = static_cast<char>(byte);
  }
  return bytes;
}

std::uint64_t Pair(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(left) << 32 |
         static_cast<std::uint32_t>(right);
}

}  // namespace

Result<Tokenizer> Tokenizer::Load(const std::string& path) try {
  const Result<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  const Json json = Json::parse(*text);
  const Json& vocabulary = json.at("model").at("vocab");
  Tokenizer result;
  result.bytes_.resize(vocabulary.size());
  const auto bytes = ByteOfCharacter();
  for (const auto& [token, number] : vocabulary.items()) {
    std::string& out = result.bytes_.at(number.get<std::size_t>());
    for (std::size_t at = 0; at < token.size();) {
      const std::size_t size = static_cast<signed char>(token[at]) < 0 ? 2 : 1;
      const auto byte = bytes.find(token.substr(at, size));
      if (byte != bytes.end()) out += byte->second;
      at += size;
    }
  }
  result.byte_tokens_.resize(256, 0);
  for (const auto& [character, byte] : bytes) {
    result.byte_tokens_[static_cast<unsigned char>(byte)] =
        vocabulary.value(character, 0);
  }
  int rank = 0;
  for (const Json& merge : json.at("model").at("merges")) {
    std::string left, right;
    if (merge.is_array()) {
      left = merge.at(0);
      right = merge.at(1);
    } else {
      const std::string both = merge;
      left = both.substr(0, both.find(' '));
      right = both.substr(both.find(' ') + 1);
    }
    const std::int32_t pair[] = {vocabulary.at(left), vocabulary.at(right)};
    result.merges_.try_emplace(Pair(pair[0], pair[1]), rank++,
                               vocabulary.at(left + right));
  }
  std::vector<std::string> names;
  for (const Json& token : json.at("added_tokens")) {
    names.push_back(token.at("content"));
    result.special_[names.back()] = token.at("id");
    result.bytes_.at(token.at("id").get<std::size_t>()).clear();
  }
  // The longest of two that begin at one place wins.
  std::sort(names.rbegin(), names.rend());
  std::string pattern = "(?!)";
  for (const std::string& name : names) pattern += "|\\Q" + name + "\\E";
  result.specials_ = Compile(pattern);
  result.pieces_ = Compile(Replace(std::string(kPieces), "_", kWhite));
  return result;
} catch (const Json::exception& error) {
  return Invalid(path + ": " + error.what());
} catch (const std::out_of_range&) {
  return Invalid(path + ": a token has a number outside of the vocabulary");
}

Tokens Tokenizer::Encode(std::string_view text, bool special) const {
  Tokens tokens;
  const auto piece = [&](std::string_view part) { EncodePiece(part, tokens); };
  const auto plain = [&](std::string_view part) {
    Split(pieces_.get(), part, piece, piece);
  };
  if (!special) {
    plain(text);
  } else {
    Split(specials_.get(), text, plain, [&](std::string_view name) {
      tokens.push_back(special_.at(std::string(name)));
    });
  }
  return tokens;
}

std::int32_t Tokenizer::Special(const std::string& text) const {
  const auto found = special_.find(text);
  return found == special_.end() ? -1 : found->second;
}

// Merges the pair of the lowest rank, wherever it is, until there is none.
void Tokenizer::EncodePiece(std::string_view piece, Tokens& out) const {
  Tokens parts;
  for (const char byte : piece) {
    parts.push_back(byte_tokens_[static_cast<unsigned char>(byte)]);
  }
  while (parts.size() > 1) {
    auto best = merges_.end();
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto merge = merges_.find(Pair(parts[i], parts[i + 1]));
      if (merge != merges_.end() &&
          (best == merges_.end() || merge->second.rank < best->second.rank)) {
        best = merge;
      }
    }
    if (best == merges_.end()) break;
    Tokens merged;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool is_pair =
          i + 1 < parts.size() && Pair(parts[i], parts[i + 1]) == best->first;
      merged.push_back(is_pair ? best->second.token : parts[i]);
      i += is_pair;
    }
    parts = std::move(merged);
  }
  out.insert(out.end(), parts.begin(), parts.end());
}

}  // namespace serve
