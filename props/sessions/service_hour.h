// The recorded hour of a chat service: the lengths of its requests, and which
// of their blocks are equal. docs/performance.md says where the file is from.

#ifndef KVTWIN_PROPS_SESSIONS_SERVICE_HOUR_H_
#define KVTWIN_PROPS_SESSIONS_SERVICE_HOUR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kvtwin/sessions.h"

namespace kvtwin::props {

inline constexpr int kBlockTokens = 512;
// Tokens of answers are none of any prompt: the file does not record them.
inline constexpr std::int32_t kFirstAnswer = 1 << 30;

struct ServiceRequest {
  int input_length = 0;
  int output_length = 0;
  std::vector<int> blocks;  // Equal numbers are equal blocks of kBlockTokens.
};

// Reads one request per line, as in mooncake_conversation.jsonl; keeps those
// that need at most `context` tokens with their answer. Returns an empty list
// if the file does not exist. Errors: a line that is not a request.
Result<std::vector<ServiceRequest>> ReadServiceHour(const std::string& path,
                                                    int context);

// Returns the prompt of a request, with one in `divisor` of its tokens.
// Requires: kBlockTokens is a multiple of the divisor.
std::vector<SessionInput> PromptOf(const ServiceRequest& request,
                                   int divisor = 1);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_SERVICE_HOUR_H_
