#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <fstream>
#include <istream>
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

// A file that ends if an interrupt, such as Ctrl-C, came before a read.
class WatchedFile : public std::filebuf {
 public:
  bool interrupted() const { return interrupted_; }

 protected:
  std::streamsize xsgetn(char* into, std::streamsize count) override {
    {
      const nb::gil_scoped_acquire own;
      interrupted_ = interrupted_ || PyErr_CheckSignals() != 0;
    }
    return interrupted_ ? 0 : std::filebuf::xsgetn(into, count);
  }

 private:
  bool interrupted_ = false;
};

Answer JudgeFile(const FilePath& path, const std::vector<std::string>& twins) {
  WatchedFile file;
  {
    const nb::gil_scoped_release others;  // A pipe waits for its writer.
    file.open(path.text, std::ios::in | std::ios::binary);
  }
  if (!file.is_open()) return {"bad_input", "none", 0, "cannot be opened", ""};
  std::istream in(&file);
  Answer answer = JudgeStream(in, twins);
  if (file.interrupted()) throw nb::python_error();
  return answer;
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
