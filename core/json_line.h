// One JSON object from a line that may hold anything: bounded in depth and in
// size, without keys that come twice, and with lists kept flat.

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

#include "kvtwin/tensor.h"

namespace kvtwin {

// What is in no line that means well.
inline constexpr std::size_t kJsonDepthMax = 16;
inline constexpr int kJsonValuesMax = 4096;  // But those of lists.
inline constexpr std::size_t kJsonElementsMax = std::size_t{64} << 20;

// A JSON value. Lists of numbers or strings, which are long, are kept flat.
struct JsonValue {
  enum class Type { kNull, kBool, kInteger, kReal, kString, kList, kObject };
  Type type = Type::kNull;
  bool boolean = false;
  double number = 0;
  // A string; the strings of a list, a line end after each.
  std::string text;
  std::size_t strings = 0;              // Of a list.
  std::vector<double> numbers;          // Of a list.
  std::optional<std::size_t> fraction;  // Index of the first not an integer.
  std::vector<std::string> keys;        // Of an object, with `items`.
  std::vector<JsonValue> items;         // What else a list has.

  bool IsNumbers() const {
    return type == Type::kList && strings == 0 && items.empty();
  }
  bool IsStrings() const {
    return type == Type::kList && numbers.empty() && items.empty();
  }
  const JsonValue* Find(std::string_view key) const {
    const auto at = std::find(keys.begin(), keys.end(), key);
    return at == keys.end()
               ? nullptr
               : &items[static_cast<std::size_t>(at - keys.begin())];
  }
};

// For messages: "7", "'text'", "a list".
std::string Describe(const JsonValue& value);

// Nothing but blanks?
bool IsBlank(std::string_view line);

// The object in `line`. Otherwise what is wrong with it; empty if nothing is.
std::string ParseJsonLine(const std::string& line, JsonValue& object);

// The fields of an object, typed. The first that is not as it must be is
// described in `problem`, and what is returned for it means nothing.
class JsonFields {
 public:
  // `path` goes before the names of keys, "cache.caches[1].".
  JsonFields(const JsonValue& object, std::string path, std::string& problem)
      : object_(object), path_(std::move(path)), problem_(problem) {}

  bool ok() const { return problem_.empty(); }
  // Null if the key is not there; Need then complains.
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
  // Without line ends in them.
  std::vector<std::string> Strings(std::string_view key) const;
  // The extents of a tensor, each at least 1.
  Shape Extents(std::string_view key, std::size_t rank_min,
                std::size_t rank_max) const;
  JsonFields Object(std::string_view key) const;

  // Complain: "key what", "key is value, it must be due".
  void Fail(std::string_view key, std::string_view what) const;
  void Wrong(std::string_view key, const JsonValue& value,
             std::string_view due) const;

 private:
  const JsonValue& object_;
  std::string path_;
  std::string& problem_;
};

// For messages: one line of ASCII, whatever the bytes are.
std::string Printable(std::string_view bytes, std::size_t length_max);

// The JSON string that holds `text`, in quotes; what is not UTF-8 is replaced.
std::string JsonString(const std::string& text);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_JSON_LINE_H_
