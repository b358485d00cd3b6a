// SPDX-License-Identifier: MIT
// Runs the built program as a user does: a command line in; exit status, both outputs, wall time and the
// records of its steps out. Every wait has a deadline.
#pragma once

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
    RunningCommand(const std::vector<std::string>& arguments, const std::string& cwd);
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
CommandResult fp8flow_alone(const std::vector<std::string>& arguments, const std::string& cwd = "");
CommandResult fp8flow_on_ranks(int ranks, const std::vector<std::string>& arguments,
                               const std::string& cwd = "");
std::vector<std::string> mpirun_line(int ranks, const std::vector<std::string>& arguments);
// The line with `--set SETTING` for each.
std::vector<std::string> with_settings(std::vector<std::string> line,
                                       const std::vector<std::string>& settings);
// The line, of the program alone or below mpirun, with tests/cli/faults preloaded into the program.
std::vector<std::string> with_faults(std::vector<std::string> line,
                                     const std::vector<std::string>& environment);

// The process ids of the ranks: the processes below mpirun that run our program.
std::vector<int> ranks_below(int mpirun);

std::string config_file(const std::string& name);  // configs/NAME.yaml of the sources
// The lines of `text` that begin with "fp8flow: error:".
std::vector<std::string> error_lines(const std::string& text);
std::vector<std::string> lines_of(const std::string& text);

// The records of out/metrics.jsonl of a type: run, step or evaluation; empty: of every type but run, which
// says who ran it and when. Each is checked for its form: a type, flat names without spaces.
std::vector<nlohmann::json> metrics_of(const std::string& out, const std::string& type = "");
// The iterations of a scalar in all TensorBoard files below `folder`, ascending.
std::vector<int64_t> events_of(const std::string& folder, const std::string& tag);
std::vector<double> losses_of(const std::string& out);

}  // namespace fp8flow
