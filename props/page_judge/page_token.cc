#include "props/page_judge/page_token.h"

#include <regex>

namespace kvtwin::props {
namespace {

using nlohmann::json;

std::string TextOfBytes(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

PageToken PageTokenOf(const reference::LedgerToken& token) {
  return {token.position, token.owners()};
}

PageToken PageTokenOf(const Held& held) {
  return {held.position, {held.sequences.begin(), held.sequences.end()}};
}

PageToken PageTokenOf(const json& token) {
  const auto sequences = token["sequences"].get<std::vector<int>>();
  return {token["position"], {sequences.begin(), sequences.end()}};
}

std::optional<PageToken> PageTokenIn(const std::string& text) {
  static const std::regex kName(
      R"(position (\d+) of sequence ([\d and]+\d|\d))");
  std::smatch match;
  if (!std::regex_search(text, match, kName)) return std::nullopt;
  PageToken token{std::stoll(match[1]), {}};
  static const std::regex kNumber(R"(\d+)");
  const std::string sequences = match[2];
  for (std::sregex_iterator at(sequences.begin(), sequences.end(), kNumber),
       end;
       at != end; ++at) {
    token.sequences.insert(std::stoi(at->str()));
  }
  return token;
}

RowPair RowPairOf(const reference::LedgerToken& token, int layer) {
  const KvRows& rows = token.rows.at(layer);
  return {TextOfBytes(rows.key.bytes), TextOfBytes(rows.value.bytes)};
}

std::string BytesText(const TensorView& row) {
  return TextOfBytes(CopyOf(row, row.dtype).bytes);
}

std::map<std::int64_t, PageToken> ExpectedInCells(const json& step) {
  std::map<std::int64_t, PageToken> expected;
  for (const json& token : step["cells"]) {
    if (token.contains("cell")) expected[token["cell"]] = PageTokenOf(token);
  }
  return expected;
}

bool HasCells(const json& step) {
  return !step["cells"].empty() && step["cells"][0].contains("cell");
}

}  // namespace kvtwin::props
