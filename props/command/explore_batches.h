// Expands batches of states for another program, such as kvtwin.campaign
// (docs/campaign.md has the requests).

#ifndef KVTWIN_PROPS_COMMAND_EXPLORE_BATCHES_H_
#define KVTWIN_PROPS_COMMAND_EXPLORE_BATCHES_H_

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "props/search/explore.h"

namespace kvtwin::props {

// Answers requests from the standard input on the standard output, until its
// end. `failure_json` returns a failure, shrunk and explained. Returns the exit
// code: 2 if a request is malformed.
int AnswerBatches(
    const ExploreSize& size, const std::vector<ExploreCase>& cases,
    const Subject& subject, const ExpandFn& expand,
    const std::function<nlohmann::ordered_json(const ExploreResult&)>&
        failure_json);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_EXPLORE_BATCHES_H_
