// A temporary folder that no other test or process uses.

#ifndef KVTWIN_PROPS_BASE_SCRATCH_FOLDER_H_
#define KVTWIN_PROPS_BASE_SCRATCH_FOLDER_H_

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace kvtwin::props {

// The name is "kvtwin-", then `what` the folder is for, then characters that
// make it unique, also among processes. The destructor removes the folder.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& what) {
    std::string name =
        std::filesystem::temp_directory_path() / ("kvtwin-" + what + "-XXXXXX");
    if (mkdtemp(name.data()) == nullptr) {
      throw std::filesystem::filesystem_error(
          "no folder can be made", name,
          std::error_code(errno, std::generic_category()));
    }
    path_ = name;
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  // The path of a file in the folder.
  std::string File(const std::string& name) const {
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_SCRATCH_FOLDER_H_
