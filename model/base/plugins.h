// SPDX-License-Identifier: MIT
// Shared libraries of the user (--plugin): kernels for bench (fp8flow/plugin.h), recipes for all other
// commands (fp8flow/recipe.h). A library stays loaded.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace fp8flow {

// What the library exports under `name`. Throws Error(usage) where it cannot be loaded or has no such symbol;
// `header` and `hint` say what to do then.
void* plugin_symbol(const std::string& path, const char* name, std::string_view header,
                    std::string_view hint);

// Registers the flows of the library. Returns their names, each with a fingerprint of the library. Throws
// Error(usage) also where it was built with other headers.
std::map<std::string, std::string> load_recipes(const std::string& path);

}  // namespace fp8flow
