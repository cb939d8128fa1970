// Sessions with one bug each; faulty_sessions.cmake makes them.

#ifndef KVTWIN_PROPS_SESSIONS_FAULTY_SESSIONS_H_
#define KVTWIN_PROPS_SESSIONS_FAULTY_SESSIONS_H_

#include <string>
#include <vector>

#include "props/sessions/session_play.h"

namespace kvtwin::props {

struct FaultySessions {
  std::string name;
  SessionsMaker make;
};
std::vector<FaultySessions> AllFaultySessions();

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_FAULTY_SESSIONS_H_
