#include "core/json_line.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/assert.h"
#include "core/index.h"

namespace kvtwin {
namespace {

// Builds a JsonValue from the parser's events, and stops at the first event
// that a line of a recording cannot have.
class ValueBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonValue& value() { return root_; }
  const std::string& problem() const { return problem_; }

  bool null() override { return Add(JsonValue()); }
  bool boolean(bool value) override {
    JsonValue added;
    added.type = JsonValue::Type::kBool;
    added.boolean = value;
    return Add(std::move(added));
  }
  bool number_integer(number_integer_t value) override {
    // The parser drops the sign of -0, which is the only 0 that comes here.
    return AddNumber(value == 0 ? -0.0 : static_cast<double>(value), true);
  }
  bool number_unsigned(number_unsigned_t value) override {
    return AddNumber(static_cast<double>(value), true);
  }
  bool number_float(number_float_t value, const string_t&) override {
    return AddNumber(value, false);
  }
  bool string(string_t& value) override {
    if (JsonValue* list = OpenList()) {
      if (list->strings == 0) list->first_string = ElementsOf(*list);
      list->text += value;
      list->text += '\n';
      ++list->strings;
      return true;
    }
    JsonValue added;
    added.type = JsonValue::Type::kString;
    added.text = std::move(value);
    return Add(std::move(added));
  }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override {
    return Open(JsonValue::Type::kObject);
  }
  bool key(string_t& key) override {
    JsonValue& object = *open_.back();
    if (object.Find(key) != nullptr) {
      return Fail(fmt::format("the key '{}' comes twice", Printable(key, 40)));
    }
    object.keys.push_back(std::move(key));
    return true;
  }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t) override {
    return Open(JsonValue::Type::kList);
  }
  bool end_array() override { return Close(); }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::json::exception& error) override {
    std::string_view what = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 7: ..."
    what.remove_prefix(std::min(what.find("] ") + 2, what.size()));
    if (what.starts_with("parse error at line 1, ")) what.remove_prefix(23);
    return Fail(fmt::format(
        "{}: {}", what.find("UTF-8") == what.npos ? "not JSON" : "not UTF-8",
        Printable(what, 200)));
  }

 private:
  static std::size_t ElementsOf(const JsonValue& list) {
    return list.numbers.size() + list.strings + list.items.size();
  }
  JsonValue* OpenList() {
    const bool in_list =
        !open_.empty() && open_.back()->type == JsonValue::Type::kList;
    return in_list ? open_.back() : nullptr;
  }
  bool AddNumber(double number, bool whole) {
    if (JsonValue* list = OpenList()) {
      if (list->numbers.size() == kJsonElementsMax) {
        return Fail(
            fmt::format("a list has more than {} numbers", kJsonElementsMax));
      }
      if (!whole && !list->fraction) list->fraction = list->numbers.size();
      if (list->numbers.empty()) list->first_number = ElementsOf(*list);
      list->numbers.push_back(number);
      return true;
    }
    JsonValue added;
    added.type = whole ? JsonValue::Type::kInteger : JsonValue::Type::kReal;
    added.number = number;
    return Add(std::move(added));
  }
  bool Add(JsonValue value) {
    if (++count_ > kJsonValuesMax) {
      return Fail(fmt::format("more than {} values", kJsonValuesMax));
    }
    if (open_.empty()) {
      root_ = std::move(value);
    } else {
      JsonValue& parent = *open_.back();
      if (parent.items.empty()) parent.first_item = ElementsOf(parent);
      parent.items.push_back(std::move(value));
    }
    return true;
  }
  bool Open(JsonValue::Type type) {
    if (open_.size() == kJsonDepthMax) {
      return Fail(fmt::format("nested more than {} deep", kJsonDepthMax));
    }
    JsonValue opened;
    opened.type = type;
    if (!Add(std::move(opened))) return false;
    // The pointer stays valid: nothing is added to its parent's `items` before
    // the container is closed.
    open_.push_back(open_.empty() ? &root_ : &open_.back()->items.back());
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }
  bool Fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  JsonValue root_;
  std::vector<JsonValue*> open_;  // The containers that are not yet closed.
  int count_ = 0;
  std::string problem_;
};

}  // namespace

std::string Describe(const JsonValue& value) {
  switch (value.type) {
    case JsonValue::Type::kNull:
      return "null";
    case JsonValue::Type::kBool:
      return value.boolean ? "true" : "false";
    case JsonValue::Type::kInteger:
      return fmt::format("{:.0f}", value.number);
    case JsonValue::Type::kReal:
      return fmt::format("{:#}", value.number);  // 8.0 is not 8.
    case JsonValue::Type::kString:
      return fmt::format("'{}'", Printable(value.text, 40));
    case JsonValue::Type::kList:
      return "a list";
    default:
      return "an object";
  }
}

std::string Printable(std::string_view bytes, std::size_t length_max) {
  std::string text;
  for (const char byte : bytes.substr(0, length_max)) {
    if (byte >= ' ' && byte <= '~') {
      text += byte;
    } else {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
  }
  return bytes.size() > length_max ? text + "..." : text;
}

bool IsBlank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == line.npos;
}

std::string ParseJsonLine(const std::string& line, JsonValue& object) {
  if (IsBlank(line)) return "an empty line";
  // The parser would take a NUL for the end of the line.
  if (const std::size_t nul = line.find('\0'); nul != line.npos) {
    return fmt::format("not JSON: a NUL at column {}", nul + 1);
  }
  ValueBuilder builder;
  if (!nlohmann::json::sax_parse(line, &builder)) return builder.problem();
  if (builder.value().type != JsonValue::Type::kObject) {
    return fmt::format("{}, expected an object", Describe(builder.value()));
  }
  object = std::move(builder.value());
  return "";
}

const JsonValue* JsonFields::Need(std::string_view key) const {
  const JsonValue* value = Find(key);
  if (value == nullptr) Fail(key, "is missing");
  return value;
}

int JsonFields::Int(std::string_view key, double low, double high) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return 0;
  const bool fits = value->type == JsonValue::Type::kInteger &&
                    value->number >= low && value->number <= high;
  if (fits) return static_cast<int>(value->number);
  Wrong(key, *value,
        fmt::format("an integer from {:.0f} to {:.0f}", low, high));
  return 0;
}

std::optional<int> JsonFields::OptionalInt(std::string_view key,
                                           double low) const {
  if (Find(key) == nullptr) return std::nullopt;
  return Int(key, low);
}

double JsonFields::Real(std::string_view key) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return 0;
  if (value->type != JsonValue::Type::kInteger &&
      value->type != JsonValue::Type::kReal) {
    Wrong(key, *value, "a number");
  }
  return value->number;
}

bool JsonFields::Bool(std::string_view key) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return false;
  if (value->type != JsonValue::Type::kBool) {
    Wrong(key, *value, "true or false");
  }
  return value->boolean;
}

std::size_t JsonFields::Name(std::string_view key,
                             std::span<const std::string_view> names) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return 0;
  const auto at = std::find(names.begin(), names.end(), value->text);
  if (value->type == JsonValue::Type::kString && at != names.end()) {
    return AsSize(at - names.begin());
  }
  Wrong(key, *value, fmt::format("one of {}", fmt::join(names, ", ")));
  return 0;
}

std::vector<int> JsonFields::Ints(std::string_view key) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return {};
  if (!value->IsNumbers()) {
    WrongList(key, *value, "an integer");
    return {};
  }
  std::vector<int> ints;
  for (std::size_t i = 0; i < value->numbers.size(); ++i) {
    const double number = value->numbers[i];
    if (value->fraction == i || number < kInt32Min || number > kInt32Max) {
      Fail(fmt::format("{}[{}]", key, i),
           fmt::format("is {}, it must be an integer of 32 bits",
                       value->fraction == i ? fmt::format("{:#}", number)
                                            : fmt::format("{}", number)));
      return {};
    }
    ints.push_back(static_cast<int>(number));
  }
  return ints;
}

std::string JsonFields::String(std::string_view key) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return "";
  if (value->type != JsonValue::Type::kString) Wrong(key, *value, "a string");
  return value->text;
}

std::vector<std::string> JsonFields::Strings(std::string_view key) const {
  const JsonValue* value = Need(key);
  if (value == nullptr) return {};
  if (!value->IsStrings()) {
    WrongList(key, *value, "a string");
    return {};
  }
  std::vector<std::string> strings;
  for (std::string_view text = value->text; !text.empty();) {
    const std::size_t end = text.find('\n');
    strings.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  if (strings.size() != value->strings) {
    Fail(key, "has a string with a line end in it");
  }
  return strings;
}

Shape JsonFields::Extents(std::string_view key, std::size_t rank_min,
                          std::size_t rank_max) const {
  const std::vector<int> extents = Ints(key);
  Shape shape = {1, 1, 1, 1};
  if (!ok()) return shape;
  if (extents.size() < rank_min || extents.size() > rank_max) {
    Fail(key, fmt::format("has {} dimensions, it must have {} to {}",
                          extents.size(), rank_min, rank_max));
    return shape;
  }
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (extents[i] < 1) {
      Fail(fmt::format("{}[{}]", key, i),
           fmt::format("is {}, it must be at least 1", extents[i]));
      return {1, 1, 1, 1};
    }
    shape[i] = extents[i];
  }
  return shape;
}

JsonFields JsonFields::Object(std::string_view key) const {
  static const JsonValue kNone;
  const JsonValue* value = Need(key);
  if (value != nullptr && value->type != JsonValue::Type::kObject) {
    Wrong(key, *value, "an object");
  }
  return {value == nullptr ? kNone : *value, fmt::format("{}{}.", path_, key),
          problem_};
}

void JsonFields::Fail(std::string_view key, std::string_view what) const {
  if (problem_.empty()) problem_ = fmt::format("{}{} {}", path_, key, what);
}

void JsonFields::Wrong(std::string_view key, const JsonValue& value,
                       std::string_view expected) const {
  Fail(key, fmt::format("is {}, it must be {}", Describe(value), expected));
}

void JsonFields::WrongList(std::string_view key, const JsonValue& value,
                           std::string_view element) const {
  const std::string_view noun = element.substr(element.find(' ') + 1);
  if (value.type != JsonValue::Type::kList) {
    return Wrong(key, value, fmt::format("a list of {}s", noun));
  }
  std::map<std::size_t, JsonValue> others;  // By place.
  if (!value.numbers.empty() && noun != "integer" && noun != "number") {
    JsonValue& other = others[value.first_number];
    other.type = value.fraction == 0 ? JsonValue::Type::kReal
                                     : JsonValue::Type::kInteger;
    other.number = value.numbers[0];
  }
  if (value.strings > 0 && noun != "string") {
    JsonValue& other = others[value.first_string];
    other.type = JsonValue::Type::kString;
    other.text = value.text.substr(0, value.text.find('\n'));
  }
  if (!value.items.empty() && noun != "object") {
    others[value.first_item] = value.items[0];
  }
  KVTWIN_DCHECK(!others.empty());
  const auto& [place, other] = *others.begin();
  Wrong(fmt::format("{}[{}]", key, place), other, element);
}

std::string JsonString(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true,
                                   nlohmann::json::error_handler_t::replace);
}

bool IsUtf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace kvtwin
