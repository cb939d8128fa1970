// The subcommand `certify`.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/refusals.h"
#include "props/base/interrupt.h"
#include "props/base/text_file.h"
#include "props/certify/certificate.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"

namespace kvtwin::props {
namespace {

struct CertifyArguments {
  BackendArguments backend;
  CertifyOptions options;
  std::string compare;  // The path of an earlier certificate, or empty.
  std::string junit;    // The path of the JUnit file, or empty.
  bool json = false;
  bool pool = false;  // Certify the pool, even if there is a cache.
};

// No certificate is larger.
constexpr std::int64_t kCertificateBytesMax = std::int64_t{16} << 20;

// Errors: a path that cannot be read, or a file that is not a certificate.
Result<Certificate> ReadOld(const std::string& path) {
  const Result<std::string> text =
      ReadInput(path, kCertificateBytesMax, "a certificate");
  if (!text.ok()) return text.status();
  Result<Certificate> read = ReadCertificate(*text);
  if (!read.ok()) return Invalid("'{}' is {}", path, read.status().message());
  return read;
}

nlohmann::ordered_json JsonOf(const std::vector<Change>& changes) {
  auto list = nlohmann::ordered_json::array();
  for (const Change& change : changes) {
    list.push_back({{"change", change.text}, {"worse", change.worse}});
  }
  return list;
}

// Prints the certificate, and returns the exit code.
int Report(const CertifyArguments& arguments, const Certificate& certificate,
           const std::optional<Certificate>& old) {
  if (certificate.none_made && !Interrupted()) {
    return Complain(
        fmt::format("{} supports none of its histories", certificate.backend));
  }
  std::vector<Change> changes;
  if (old) changes = ChangesSince(*old, certificate);
  if (arguments.json) {
    nlohmann::ordered_json json = ToJson(certificate);
    if (old) json["changes"] = JsonOf(changes);
    PrintJson(json);
  } else {
    fmt::print("{}", CertificateText(certificate));
    if (old && changes.empty()) fmt::print("no change\n");
    for (const Change& change : changes) {
      fmt::print("{:<8} {}\n", change.worse ? "WORSE" : "changed", change.text);
    }
  }
  if (!arguments.junit.empty()) {
    const Status written = WriteFile(arguments.junit, JUnitText(certificate));
    if (!written.ok()) return Complain(written.message());
  }
  if (!old) return certificate.right ? 0 : 1;
  const bool worse =
      std::ranges::any_of(changes, [](const Change& c) { return c.worse; });
  return worse ? 1 : 0;
}

int RunCertify(CertifyArguments& arguments) {
  std::optional<Certificate> old;
  if (!arguments.compare.empty()) {
    const Result<Certificate> read = ReadOld(arguments.compare);
    if (!read.ok()) return Complain(read.status().message());
    old = *read;
  }
  if (!arguments.junit.empty()) {
    const Status writable = CheckWritable(arguments.junit);
    if (!writable.ok()) return Complain("--junit: " + writable.message());
  }
  const auto act = [&](Host& host, const BackendInfo& info,
                       const std::vector<Level>& levels,
                       const std::function<Subject(Level)>& subject_at) {
    CertifyOptions& options = arguments.options;
    const Level level = ClaimedOf(levels, info);
    options.laws.seed = options.fuzz.seed;
    options.judge = [&](const Law& law, const History& history,
                        bool known_to_hang) {
      return host.Judge(law, history, level, known_to_hang);
    };
    return Report(arguments, Certify(info, options, levels, subject_at), old);
  };
  if (!arguments.pool && !IsPool(arguments.backend)) {
    return OnLevels(arguments.backend, act);
  }
  return OnPoolHost(
      arguments.backend, /*groups=*/false,
      [&](const PoolInfo& info, Level /*level*/,
          const PoolSubjectAt& subject_at) {
        const auto rerun_law = [](const PoolLaw& law,
                                  const PagedHistory& history,
                                  const Subject& subject) {
          return LawCommand(law, history, subject);
        };
        return Report(
            arguments,
            CertifyPool(info, arguments.options, subject_at, rerun_law), old);
      });
}

}  // namespace

void AddCertifyCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<CertifyArguments>();
  arguments->options.fuzz.operations = 100'000;
  CLI::App* command = app.add_subcommand(
      "certify",
      "Try everything that a backend claims, and write down what holds "
      "(docs/live.md)");
  AddBackendOptions(*command, arguments->backend);
  command->get_option("--backend")->required();
  AddProfileOption(*command, arguments->backend);
  command
      ->add_option("--ops", arguments->options.fuzz.operations,
                   "operations at each level")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 60))
      ->capture_default_str();
  command
      ->add_option("--runs", arguments->options.laws.count,
                   "histories for each law")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  command
      ->add_option("--seed", arguments->options.fuzz.seed,
                   "the seed of all random numbers")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 53))
      ->capture_default_str();
  command
      ->add_option("--threads", arguments->options.fuzz.threads,
                   "number of threads; does not change the result")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->add_option("--compare", arguments->compare,
                      "an earlier certificate (from --json): name each change, "
                      "and fail only if something is worse");
  command->add_option("--junit", arguments->junit,
                      "write each level and each law as a test case of JUnit "
                      "XML to this file");
  command->add_flag("--pool", arguments->pool,
                    "certify the pool of a library that has a cache, too");
  command->add_flag("--json", arguments->json,
                    "print the certificate as one JSON object");
  command->callback([arguments, &exit_code] {
    CatchInterrupts();
    exit_code = RunCertify(*arguments);
  });
}

}  // namespace kvtwin::props
