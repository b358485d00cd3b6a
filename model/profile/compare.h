// SPDX-License-Identifier: MIT
// Two files that `profile` wrote, stage by stage: what `profile --compare OLD NEW` prints.
#pragma once

#include <string>

namespace fp8flow::profile {

// The recipes that both files have, by name, and where each file has one alone, those two. Throws Error(data)
// where a file is none of profile's, or where they share no recipe.
std::string compare_profiles(const std::string& old_path, const std::string& new_path);

}  // namespace fp8flow::profile
