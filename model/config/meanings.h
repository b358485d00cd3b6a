// SPDX-License-Identifier: MIT
// Keys that came because a rule was changed to Megatron-LM's. Their default is the new rule. Files and
// checkpoints without such a key come from versions that had the old one: a file gets a warning, a resumed
// run goes on with the rule it was begun with.
#pragma once

#include "model/config/config.h"

#include <string>
#include <vector>

namespace fp8flow {

// A warning for each such key that matters to this configuration and is not set.
std::vector<std::string> warnings_of_meanings(const Config& config);

// The rules of the run that is resumed, given its configuration as saved, for keys that `config` does not
// set. Returns "section.key: value" of those that changed.
std::vector<std::string> keep_meanings(Config& saved, Config& config);

}  // namespace fp8flow
