#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <fstream>
#include <new>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "props/oracle/judge.h"
#include "props/report/page.h"
#include "props/report/page_file.h"
#include "props/report/show.h"

namespace kvtwin::python {
namespace {

// Verdict, level, line, reason, twin.
using Answer = std::tuple<std::string, std::string, std::int64_t, std::string,
                          std::string>;

Answer JudgeStream(std::istream& in, const std::vector<std::string>& twins) {
  const nb::gil_scoped_release others;
  const props::Judgement found = props::Judge(in, twins);
  return {std::string(props::VerdictName(found.verdict())),
          std::string(props::LevelName(found.level)), found.line(),
          found.reason(), found.failure ? found.failure->twin : ""};
}

Answer JudgeFile(const FilePath& path, const std::vector<std::string>& twins) {
  std::ifstream in(path.text, std::ios::binary);
  if (!in) {
    return {"bad_input", "none", 0, "cannot be opened", ""};
  }
  return JudgeStream(in, twins);
}

Answer JudgeBytes(const nb::bytes& recording,
                  const std::vector<std::string>& twins) {
  std::istringstream in(std::string(static_cast<const char*>(recording.data()),
                                    recording.size()));
  return JudgeStream(in, twins);
}

// Returns false if the recording has no fault, or cannot be read again.
bool WritePageOf(const FilePath& recording, const FilePath& page,
                 const std::vector<std::string>& twins) {
  const nb::gil_scoped_release others;
  const auto failure = props::ExplainRecording(recording.text, twins);
  if (!failure) return false;
  const Status status = props::WritePage(*failure, page.text);
  if (status.ok()) return true;
  const nb::gil_scoped_acquire own;
  Raise(status);
}

}  // namespace

void BindCheck(nb::module_& m) {
  m.def("judge_file", &JudgeFile, nb::arg("path"), nb::arg("twins"));
  m.def("judge_bytes", &JudgeBytes, nb::arg("recording"), nb::arg("twins"));
  m.def(
      "prepare_page",
      [](const FilePath& page) { Check(props::PreparePage(page.text)); },
      nb::arg("page"));
  m.def("write_page", &WritePageOf, nb::arg("recording"), nb::arg("page"),
        nb::arg("twins"));
}

}  // namespace kvtwin::python
