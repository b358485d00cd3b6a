// SPDX-License-Identifier: MIT
// Two results of `profile`, stage by stage: what `profile --compare OLD NEW` prints and draws.
#pragma once

#include "model/base/provenance.h"

#include <string>

namespace fp8flow::profile {

struct ComparedProfiles {
    std::string text, page;  // page: HTML
};
// Of two files or run folders: the recipes that both have, by name, and where each has one alone, those two.
// Throws Error(data) where one is none of profile's, or where they share no recipe.
ComparedProfiles compare_profiles(const std::string& old_path, const std::string& new_path,
                                  const Provenance& provenance);

}  // namespace fp8flow::profile
