#include "props/history/line_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "kvtwin/cache.h"

namespace kvtwin::props {

std::string Quoted(std::string_view text) {
  constexpr std::size_t kShown = 40;
  return fmt::format("'{}'", Printable(text, kShown));
}

std::vector<std::string_view> Split(std::string_view text,
                                    std::string_view separators) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find_first_of(separators);
    if (at != 0 && !text.empty()) parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

bool LineReader::Take(std::string_view token) {
  if (!Sees(token)) return false;
  text_.remove_prefix(token.size());
  return true;
}

int LineReader::Number() {
  int value = 0;
  const char* begin = text_.data();
  const auto [end, error] = std::from_chars(begin, begin + text_.size(), value);
  if (error != std::errc() || value < -kOpenEnd) {
    Fail(fmt::format("does not start with a number of at most {}", kOpenEnd));
  }
  text_.remove_prefix(AsSize(end - begin));
  return value;
}

void LineReader::Expect(std::string_view token) {
  if (!Take(token)) Fail(fmt::format("should continue with '{}'", token));
}

void LineReader::ExpectEnd() const {
  if (!text_.empty()) Fail("is left over");
}

void LineReader::Fail(std::string_view why) const {
  throw BadLine{text_, fmt::format("{} {}", Quoted(text_), why)};
}

int ReadSize(std::string_view text) {
  LineReader reader(text);
  const int value = reader.Number();
  reader.ExpectEnd();
  if (value < 0) {
    throw BadLine{text, fmt::format("{} must not be negative", value)};
  }
  return value;
}

DType ReadDType(std::string_view name, std::span<const DType> dtypes,
                std::string_view purpose) {
  const auto dtype = FromName<DType>(kDTypeNames, name);
  if (!dtype) {
    throw BadLine{name, fmt::format("{} is not a dtype", Quoted(name))};
  }
  if (std::ranges::count(dtypes, *dtype) > 0) return *dtype;
  throw BadLine{name,
                fmt::format("{} is not a dtype of {}", Quoted(name), purpose)};
}

DType ReadRowDType(std::string_view name) {
  return ReadDType(name, kRowDTypes, "rows");
}

LineParts SplitLine(std::string_view line, std::string_view version) {
  const auto parts = Split(line, "|");
  const std::string_view setup = parts.empty() ? line : parts[0];
  auto words = Split(setup, kBlanks);
  const std::string_view word = words.empty() ? setup : words[0];
  if (word != version) {
    const auto kind = version.substr(0, version.size() - 1);  // "kvt".
    throw BadLine{
        word, word.starts_with(kind)
                  ? fmt::format("{} is another version, this program reads {}",
                                Quoted(word), version)
                  : fmt::format("a history starts with '{}'", version)};
  }
  words.erase(words.begin());
  return {words,
          parts.empty() ? parts : std::vector(parts.begin() + 1, parts.end())};
}

void ReadSettings(const std::vector<std::string_view>& settings,
                  const std::function<void(std::string_view key,
                                           std::string_view value)>& read) {
  std::set<std::string_view> seen;
  for (const std::string_view word : settings) {
    const std::size_t at = word.find('=');
    if (at == std::string_view::npos) {
      throw BadLine{word, fmt::format("{} is not a setting", Quoted(word))};
    }
    const std::string_view key = word.substr(0, at);
    if (!seen.insert(key).second) {
      throw BadLine{key, fmt::format("{} comes twice", Quoted(key))};
    }
    read(key, word.substr(at + 1));
  }
}

Status StatusOf(const BadLine& bad, std::string_view line) {
  return {StatusCode::kInvalidArgument,
          fmt::format("character {}: {}", bad.where.data() - line.data() + 1,
                      bad.why)};
}

}  // namespace kvtwin::props
