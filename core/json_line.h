// Parses one JSON object from a line of untrusted text: with limits on depth
// and size, without duplicate keys, and with lists stored flat.

#ifndef KVTWIN_CORE_JSON_LINE_H_
#define KVTWIN_CORE_JSON_LINE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Limits that no valid line exceeds.
inline constexpr std::size_t kJsonDepthMax = 16;
inline constexpr int kJsonValuesMax = 4096;  // Without elements of lists.
inline constexpr std::size_t kJsonElementsMax = std::size_t{64} << 20;

// A JSON value. Lists of numbers or strings may be long, and are stored flat.
struct JsonValue {
  enum class Type { kNull, kBool, kInteger, kReal, kString, kList, kObject };
  Type type = Type::kNull;
  bool boolean = false;
  double number = 0;
  // The string, or the strings of a list with a line end after each.
  std::string text;
  std::size_t strings = 0;              // Number of strings in a list.
  std::vector<double> numbers;          // The numbers of a list.
  std::optional<std::size_t> fraction;  // Index of the first non-integer.
  // The places of the first number, string and other value of a list, if any.
  std::size_t first_number = 0;
  std::size_t first_string = 0;
  std::size_t first_item = 0;
  std::vector<std::string> keys;  // Keys of an object, as in `items`.
  std::vector<JsonValue> items;   // Its values; other values of a list.

  bool IsNumbers() const {
    return type == Type::kList && strings == 0 && items.empty();
  }
  bool IsStrings() const {
    return type == Type::kList && numbers.empty() && items.empty();
  }
  const JsonValue* Find(std::string_view key) const {
    const auto at = std::find(keys.begin(), keys.end(), key);
    return at == keys.end() ? nullptr : &At(items, at - keys.begin());
  }
};

// For messages: "7", "'text'", "a list".
std::string Describe(const JsonValue& value);

// Whether the line has only blanks.
bool IsBlank(std::string_view line);

// Parses the object in `line`. Returns what is wrong with the line; empty if it
// is valid.
std::string ParseJsonLine(const std::string& line, JsonValue& object);

// Typed access to the fields of an object. The first wrong field is described
// in `problem`; the value returned for a wrong field is arbitrary.
class JsonFields {
 public:
  // `path` is put before the names of keys in messages: "cache.caches[1].".
  JsonFields(const JsonValue& object, std::string path, std::string& problem)
      : object_(object), path_(std::move(path)), problem_(problem) {}

  bool ok() const { return problem_.empty(); }
  // Returns null if the key is missing; Need also reports that.
  const JsonValue* Find(std::string_view key) const {
    return object_.Find(key);
  }
  const JsonValue* Need(std::string_view key) const;

  static constexpr double kInt32Min = std::numeric_limits<std::int32_t>::min();
  static constexpr double kInt32Max = std::numeric_limits<std::int32_t>::max();
  int Int(std::string_view key, double low = kInt32Min,
          double high = kInt32Max) const;
  std::optional<int> OptionalInt(std::string_view key,
                                 double low = kInt32Min) const;
  double Real(std::string_view key) const;
  bool Bool(std::string_view key) const;
  // The index of the string in `names`.
  std::size_t Name(std::string_view key,
                   std::span<const std::string_view> names) const;
  std::string String(std::string_view key) const;
  std::vector<int> Ints(std::string_view key) const;
  // The strings of a list. Errors: a string with a line end.
  std::vector<std::string> Strings(std::string_view key) const;
  // The extents of a tensor, each at least 1.
  Shape Extents(std::string_view key, std::size_t rank_min,
                std::size_t rank_max) const;
  JsonFields Object(std::string_view key) const;

  // Report a problem: "<key> <what>", "<key> is <value>, it must be
  // <expected>".
  void Fail(std::string_view key, std::string_view what) const;
  void Wrong(std::string_view key, const JsonValue& value,
             std::string_view expected) const;
  // Reports a value that is not a list of such elements: of a list, the first
  // wrong element. Requires: `element` is "an integer", "a number", "a string"
  // or "an object", and a list has another element.
  void WrongList(std::string_view key, const JsonValue& value,
                 std::string_view element) const;

 private:
  const JsonValue& object_;
  std::string path_;
  std::string& problem_;
};

// For messages: returns one line of ASCII, whatever the bytes are.
std::string Printable(std::string_view bytes, std::size_t length_max);

// Returns `text` as a JSON string in quotes; bytes that are not UTF-8 are
// replaced.
std::string JsonString(const std::string& text);
// Whether all bytes of `text` are of characters in UTF-8.
bool IsUtf8(const std::string& text);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_JSON_LINE_H_
