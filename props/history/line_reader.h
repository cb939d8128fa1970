// Reads the lines of histories, of caches and of pools: words, key=value
// settings and numbers. A line that is wrong is refused with the place of its
// first wrong character.

#ifndef KVTWIN_PROPS_HISTORY_LINE_READER_H_
#define KVTWIN_PROPS_HISTORY_LINE_READER_H_

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin::props {

// Thrown with the reason, and the part of the line that is wrong.
struct BadLine {
  std::string_view where;
  std::string why;
};

// Returns `text` for a message: shortened if it is long, and in ASCII.
std::string Quoted(std::string_view text);

// Returns the parts of `text` between any of the separators; leaves out empty
// parts.
std::vector<std::string_view> Split(std::string_view text,
                                    std::string_view separators);
// The separators of words.
inline constexpr std::string_view kBlanks = " \t\r\n";

// Reads `text` from its front. Every function throws BadLine.
class LineReader {
 public:
  explicit LineReader(std::string_view text) : text_(text) {}

  bool Take(std::string_view token);
  bool Sees(std::string_view token) const { return text_.starts_with(token); }
  // Reads a number from -kOpenEnd to kOpenEnd.
  int Number();
  void Expect(std::string_view token);
  bool empty() const { return text_.empty(); }
  void ExpectEnd() const;
  [[noreturn]] void Fail(std::string_view why) const;

 private:
  std::string_view text_;
};

// Reads a whole word as a number that is not negative.
int ReadSize(std::string_view text);

// Reads the name of a dtype, which must be one of `dtypes`, those of `purpose`.
DType ReadDType(std::string_view name, std::span<const DType> dtypes,
                std::string_view purpose);
// Reads the name of a dtype of rows.
DType ReadRowDType(std::string_view name);

// A line in its parts: "kvt1 key=value ... | operation | operation".
struct LineParts {
  std::vector<std::string_view> settings;  // Without the version.
  std::vector<std::string_view> operations;
};
// Splits a line, whose first word must be `version`, as "kvt1".
LineParts SplitLine(std::string_view line, std::string_view version);

// Calls `read` with the key and the value of each setting. A key that comes
// twice is wrong.
void ReadSettings(const std::vector<std::string_view>& settings,
                  const std::function<void(std::string_view key,
                                           std::string_view value)>& read);

// Returns `bad` as the status of the whole `line`, of which bad.where is a
// part: "character 12: ...".
Status StatusOf(const BadLine& bad, std::string_view line);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_LINE_READER_H_
