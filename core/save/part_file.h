// A file that gets its name only when it is complete and on disk.

#ifndef KVTWIN_CORE_SAVE_PART_FILE_H_
#define KVTWIN_CORE_SAVE_PART_FILE_H_

#include <sys/stat.h>

#include <string>

#include "core/assert.h"
#include "core/save/file.h"
#include "kvtwin/status.h"

namespace kvtwin {

// Until then it is a part file: it lies in the same folder, has an
// unpredictable name, and is locked by this object. Other processes may save to
// the same path at the same time, on this machine or in another container: each
// has its own part file, and the last one to rename it wins.
//
// The destructor removes the part file. The part file of a saver that died
// stays, without a lock, until the next saver to that path removes it. (An
// O_TMPFILE has no name and would disappear by itself, but linkat cannot give
// it the name of an existing file, and rename needs a name. And not every file
// system supports it.)
class PartFile {
 public:
  explicit PartFile(std::string path) : path_(std::move(path)) {}
  ~PartFile() { Remove(); }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  // Removes the part files of dead savers, then makes the part file. Errors:
  // failed_precondition if the path exists and is not a regular file, or with
  // the system's error.
  Status Make();
  // Requires: Make was ok.
  const File& file() const {
    KVTWIN_ASSERT(!part_.empty());
    return file_;
  }
  // Syncs the file, renames it and syncs the folder. The file gets the mode of
  // the file that it replaces, and its owner if this process may change owners.
  // Errors: failed_precondition with the system's error. The path is then
  // unchanged, unless only the folder could not be synced.
  Status Rename();

 private:
  Status OpenFolder();
  Status MakeLocked(const std::string& prefix);
  void KeepModeAndOwner() const;
  bool SyncFolder() const;
  void Remove();

  std::string path_;
  std::string name_;  // In the folder.
  std::string part_;  // In the folder; empty if there is none.
  File folder_;
  File file_;
  bool replaces_ = false;  // The path exists; `before_` is its state.
  struct stat before_ = {};
};

// Removes the part files of dead savers to any path in the folder, unless it
// cannot be listed.
void RemoveDeadParts(const std::string& folder);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_SAVE_PART_FILE_H_
