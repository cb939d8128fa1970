// The setup of a history in words.

#ifndef KVTWIN_PROPS_HISTORY_SETUP_TEXT_H_
#define KVTWIN_PROPS_HISTORY_SETUP_TEXT_H_

#include <string>

#include "core/dialects/rules.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Returns "swa: window 2, memory 3 (S3: window + 1, since there are several
// sequences); 2 sequences of at most 8 tokens, batches of at most 8; f32".
std::string SetupText(const Setup& setup, const Rules& rules);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_SETUP_TEXT_H_
