// SPDX-License-Identifier: MIT
// Runs the built program as a user does: a command line in; exit status, both outputs, wall time and the
// records of its steps out. Every wait has a deadline.
#pragma once

#include "tests/support/files.h"

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace fp8flow {

struct CommandResult {
    int status = -1;  // exit status; 128 + signal where a signal ended it
    bool timed_out = false;
    std::string out, err;
    double seconds = 0;
};

// A program started in the background, leader of its own process group; killed with its group if still there
// at the end.
class RunningCommand {
public:
    // Runs in the folder `cwd`. The executable is looked for on PATH unless it holds a slash.
    RunningCommand(const Texts& arguments, const std::string& cwd);
    ~RunningCommand();
    RunningCommand(const RunningCommand&) = delete;
    RunningCommand& operator=(const RunningCommand&) = delete;

    int pid() const { return pid_; }
    std::string out_so_far() const;
    std::string err_so_far() const;
    CommandResult wait(double deadline_seconds);

private:
    int pid_ = -1;
    std::string out_path_, err_path_;
    double started_ = 0;
};

// fp8flow with these arguments, started without mpirun; or by mpirun on some ranks, which keeps its own
// remarks to itself.
CommandResult fp8flow_alone(const Texts& arguments, const std::string& cwd = "");
CommandResult fp8flow_on_ranks(int ranks, const Texts& arguments, const std::string& cwd = "");
// A run that must end with status 0; and the errors of one that must end with another.
CommandResult succeeded(CommandResult run);
std::string failure(int status, const CommandResult& run);
std::string failure(ExitCode code, const CommandResult& run);
// Until the condition holds, at most a minute.
void wait_for(const std::function<bool()>& condition);
Texts mpirun_line(int ranks, const Texts& arguments);
// The line with `--set SETTING` for each.
Texts with_settings(Texts line, const Texts& settings);
// COMMAND of configs/test.yaml on the reference backend, into the folder `out`, with these settings.
Texts test_run(const std::string& command, const std::string& out, const Texts& settings = {},
               const Texts& more = {});
// The line, of the program alone or below mpirun, with tests/cli/faults preloaded into the program.
Texts with_faults(Texts line, const Texts& environment);

// The process ids of the ranks: the processes below mpirun that run our program.
std::vector<int> ranks_below(int mpirun);

std::string config_file(const std::string& name);  // configs/NAME.yaml of the sources
nlohmann::json read_json(const std::string& path);
// The lines of `text` that begin with "fp8flow: error:".
Texts error_lines(const std::string& text);
Texts lines_of(const std::string& text);

// The records of out/metrics.jsonl of a type: run, step or evaluation; empty: of every type but run, which
// says who ran it and when. Each is checked for its form: a type, flat names without spaces.
std::vector<nlohmann::json> metrics_of(const std::string& out, const std::string& type = "");
// The iterations of a scalar in all TensorBoard files below `folder`, ascending.
std::vector<int64_t> events_of(const std::string& folder, const std::string& tag);
std::vector<double> losses_of(const std::string& out);

}  // namespace fp8flow
