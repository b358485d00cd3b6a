// SPDX-License-Identifier: MIT
// Keys that choose between an old rule and that of Megatron-LM, which is the default. Files and checkpoints
// without such a key come from versions with the old rule: a file gets a warning, a resumed run keeps the
// rule that it started with.
#pragma once

#include "model/config/config.h"

#include <string>
#include <vector>

namespace fp8flow {

// A warning for each such key that matters to this configuration and is not set.
std::vector<std::string> warnings_of_changed_rules(const Config& config);

// The rules of the run that is resumed, given its configuration as saved, for keys that `config` does not
// set. Returns "section.key: value" of those that changed.
std::vector<std::string> keep_old_rules(Config& saved, Config& config);

}  // namespace fp8flow
