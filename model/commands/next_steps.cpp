// SPDX-License-Identifier: MIT
// Shell lines that start this program as it was started.
#include "model/commands/next_steps.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

namespace fp8flow {

std::string shell_word(const std::string& argument) {
    constexpr std::string_view kPlain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
    if (!argument.empty() && argument.find_first_not_of(kPlain) == std::string::npos) return argument;
    std::string text = "'";
    for (const char c : argument) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
}

namespace {

std::string own_program() {
    std::error_code error;
    std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) program = "fp8flow";
    const std::filesystem::path near = program.lexically_proximate(std::filesystem::current_path(error));
    if (!near.empty() && near.begin()->string() != ".." && near.has_parent_path()) program = near;
    return program.string();
}

}  // namespace

std::string command_line(std::string_view command, const std::vector<std::string>& arguments,
                         int64_t world_size) {
    std::string text = world_size == 1
                           ? ""
                           : fmt::format("mpirun -n {} --quiet --oversubscribe --bind-to none {}", world_size,
                                         ::geteuid() == 0 ? "--allow-run-as-root " : "");
    text += shell_word(own_program()) + " " + std::string(command);
    for (const std::string& argument : arguments) text += " " + shell_word(argument);
    return text;
}

std::string next_text(const std::vector<NextStep>& steps) {
    size_t width = 0;
    for (const NextStep& step : steps) width = std::max(width, step.what.size());
    std::string text;
    for (const NextStep& step : steps)
        text += fmt::format("{}  {:<4}  {:<{}}  {}", text.empty() ? "" : "\n", text.empty() ? "next" : "",
                            step.what, width, step.command);
    return text;
}

std::vector<std::string> with_plugins(std::vector<std::string> arguments,
                                      const std::vector<std::string>& plugins) {
    for (const std::string& plugin : plugins) arguments.insert(arguments.end(), {"--plugin", plugin});
    return arguments;
}

std::vector<std::string> with_options(std::vector<std::string> arguments, const Options& options) {
    constexpr const char* kNames[] = {"auto", "reference", "hopper"};
    if (options.backend != BackendKind::automatic)
        arguments.insert(arguments.end(), {"--backend", kNames[to_size(options.backend)]});
    if (options.where_short == predict::WhereShort::warn) arguments.emplace_back("--force");
    return with_plugins(std::move(arguments), options.plugins);
}

std::string config_of_run(const Options& options, const std::string& out) {
    const bool changed = std::ranges::any_of(
        options.overrides, [](const std::string& setting) { return !setting.starts_with("output.out="); });
    const bool is_read = !changed && options.hf_config.empty() && !options.config_path.empty();
    return is_read ? options.config_path : out + "/config.yaml";
}

}  // namespace fp8flow
