// SPDX-License-Identifier: MIT
// dlopen, and what to do where it refuses.
#include "model/base/plugins.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "layers/flows/flow.h"
#include "model/safetensors/input.h"

#include <dlfcn.h>
#include <fp8flow/recipe.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace fp8flow {

namespace {

// dlopen looks for a name without a slash in the system's folders.
std::string file_of(const std::string& path) {
    return path.find('/') == std::string::npos ? "./" + path : path;
}

}  // namespace

void* plugin_symbol(const std::string& path, const char* name, std::string_view header,
                    std::string_view hint) {
    const std::string file = file_of(path);
    std::error_code error;
    const auto status = std::filesystem::status(file, error);
    // A pipe would wait for a writer.
    require(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status), ExitCode::usage,
            "--plugin {}: not a regular file; {}", printable(path), hint);
    void* const library = ::dlopen(file.c_str(), RTLD_NOW);
    require(library != nullptr, ExitCode::usage, "--plugin {}: {}; {}", printable(path),
            library == nullptr ? printable(::dlerror()) : "", hint);
    void* const symbol = ::dlsym(library, name);
    require(symbol != nullptr, ExitCode::usage, "--plugin {}: exports no {} (see include/{}); {}",
            printable(path), name, header, hint);
    return symbol;
}

std::map<std::string, std::string> load_recipes(const std::string& path) {
    const auto* const plugin = static_cast<const RecipePlugin*>(
        plugin_symbol(path, "fp8flow_recipes", "fp8flow/recipe.h", "step by step: docs/usage/new_recipe.md"));
    require(
        plugin->headers == kRecipeHeaders, ExitCode::usage,
        "--plugin {}: built with the headers of another fp8flow; build it again with those of this program",
        printable(path));
    const std::vector<std::string> before = registered_flows();
    plugin->register_flows();
    const InputFile file(file_of(path), ExitCode::usage, "--plugin " + path);
    const std::string library = checksum_text(fnv1a64(file.text(int64_t{1} << 30)));
    std::map<std::string, std::string> flows;
    for (const std::string& flow : registered_flows())
        if (std::ranges::count(before, flow) == 0) flows[flow] = library;
    return flows;
}

}  // namespace fp8flow
