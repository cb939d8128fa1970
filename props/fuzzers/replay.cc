// Runs inputs that a fuzzer found earlier, without a fuzzer, and packs them.
//
// A corpus is one file: each line is an input, as a JSON string whose
// characters U+0000 to U+00FF are the bytes.

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "props/fuzzers/fuzzers.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  if (!in.is_open() || in.bad()) {
    throw std::runtime_error(fmt::format("{} cannot be read", path.string()));
  }
  return bytes;
}

std::string LineOf(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const auto code = static_cast<unsigned char>(byte);
    if (code < 0x80) {
      text += byte;
    } else {
      text += static_cast<char>(0xC0 | code >> 6);
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
  return nlohmann::json(text).dump(-1, ' ', true);
}

std::string BytesOf(const std::string& line) {
  const auto text = nlohmann::json::parse(line).get<std::string>();
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto code = static_cast<unsigned char>(text[i]);
    if (code < 0x80) {
      bytes += text[i];
    } else if (code > 0xC3) {
      throw std::runtime_error("a character is above U+00FF");
    } else {  // The parser has checked that another byte follows.
      bytes += static_cast<char>((code & 0x03) << 6 | (text[++i] & 0x3F));
    }
  }
  return bytes;
}

// Returns each input of a corpus; any other file is a single input.
std::vector<std::string> InputsOf(const fs::path& path) {
  const std::string content = ReadFile(path);
  if (path.extension() != ".corpus") return {content};
  std::vector<std::string> inputs;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    try {
      inputs.push_back(BytesOf(line));
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("{}:{}: {}", path.string(),
                                           inputs.size() + 1, error.what()));
    }
  }
  return inputs;
}

int Replay(const Fuzzer& fuzzer, const std::vector<std::string>& paths) {
  int exit_code = 0;
  std::size_t count = 0;
  for (const std::string& path : paths) {
    const std::vector<std::string> inputs = InputsOf(path);
    count += inputs.size();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      // The line is printed first, so that it shows which input crashed.
      fmt::print(stderr, "{}:{}\n", path, i + 1);
      const auto* data = reinterpret_cast<const std::uint8_t*>(&inputs[i][0]);
      const std::string wrong = fuzzer.run({data, inputs[i].size()});
      if (wrong.empty()) continue;
      fmt::print("{}:{}: {}\n", path, i + 1, wrong);
      exit_code = 1;
    }
  }
  fmt::print("{}: {} inputs\n", fuzzer.name, count);
  return exit_code;
}

void Pack(const std::string& folder, const std::string& corpus) {
  std::vector<std::string> lines;
  for (const auto& entry : fs::directory_iterator(folder)) {
    lines.push_back(LineOf(ReadFile(entry.path())));
  }
  // The lines are sorted so that equal inputs give equal files.
  std::sort(lines.begin(), lines.end());
  std::ofstream out(corpus, std::ios::binary);
  for (const std::string& line : lines) out << line << '\n';
  if (!out.flush()) {
    throw std::runtime_error(fmt::format("{} cannot be written", corpus));
  }
}

void Unpack(const std::string& corpus, const std::string& folder) {
  fs::create_directories(folder);
  const std::vector<std::string> inputs = InputsOf(corpus);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::ofstream out(fs::path(folder) / fmt::format("{:04}", i + 1),
                      std::ios::binary);
    if (!(out << inputs[i]).flush()) {
      throw std::runtime_error(fmt::format("{} cannot be written", folder));
    }
  }
}

constexpr const char* kUsage =
    "usage: kvtwin_replay FUZZER PATH...: run a corpus (*.corpus), or one "
    "input\n"
    "       kvtwin_replay pack FOLDER CORPUS: make a corpus of the files\n"
    "       kvtwin_replay unpack CORPUS FOLDER: make files of the corpus\n"
    "FUZZER is history, line, pool, recording, snapshot or state\n";

int Main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string name = words.empty() ? "" : words[0];
  for (const Fuzzer& fuzzer : kFuzzers) {
    if (name != fuzzer.name || words.size() < 2) continue;
    return Replay(fuzzer, {words.begin() + 1, words.end()});
  }
  if (name == "pack" && words.size() == 3) {
    Pack(words[1], words[2]);
  } else if (name == "unpack" && words.size() == 3) {
    Unpack(words[1], words[2]);
  } else {
    fmt::print(stderr, "{}", kUsage);
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace kvtwin::props

int main(int argc, char** argv) {
  try {
    return kvtwin::props::Main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvtwin_replay: {}\n", error.what());
    return 2;
  }
}
