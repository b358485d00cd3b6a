// SPDX-License-Identifier: MIT
// The commands that a run prints as next steps, ready to be typed.
#pragma once

#include "model/commands/commands.h"

#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

// An argument as a shell takes it.
std::string shell_word(const std::string& argument);
// A shell line that starts `command` as this run was started.
std::string command_line(std::string_view command, const std::vector<std::string>& arguments,
                         int64_t world_size);
// A command to run next, and its purpose.
struct NextStep {
    std::string what, command;
};
std::string next_text(const std::vector<NextStep>& steps);
// `arguments` of another command on the same configuration, with the plugins that it needs.
std::vector<std::string> with_plugins(std::vector<std::string> arguments,
                                      const std::vector<std::string>& plugins);
// The same for a command that runs on ranks, with --backend and --force.
std::vector<std::string> with_options(std::vector<std::string> arguments, const Options& options);
// The configuration file for a command after this run: the one that the run read, or, if options other than
// --out changed it, config.yaml below `out`.
std::string config_of_run(const Options& options, const std::string& out);

}  // namespace fp8flow
