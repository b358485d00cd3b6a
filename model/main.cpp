// The program: reads the command line, starts the ranks, reports errors once. The only place that reads the environment (MPI's own
// variables apart). Read next: commands.h.
#include "kernels/comm/mpi_session.h"
#include "kernels/core/error.h"
#include "model/commands.h"
#include "model/config.h"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <thread>

namespace {

using namespace fp8flow;

int exit_code_of(std::exception_ptr error, std::string& message) {
    try {
        std::rethrow_exception(error);
    } catch (const Error& e) {
        message = e.what();
        return static_cast<int>(e.code());
    } catch (const std::bad_alloc&) {
        message = "out of host memory; lower training.micro_batch_size or model.seq_length";
        return static_cast<int>(ExitCode::memory);
    } catch (const std::exception& e) {
        message = e.what();
    }
    return static_cast<int>(ExitCode::internal);
}

// Runs a command on this rank. An error on any rank ends the whole job with one report: ranks speak in turn, the first one to speak
// takes the job down before the next would.
int on_ranks(const RunOptions& options, int (*command)(const RunOptions&, ProcessGroup&)) {
    MpiSession mpi;
    try {
        check_processor();
        // Deadline of the first collectives, before the configuration is known.
        const double deadline =
            load_config(options.config_path, options.overrides, mpi.size()).parallel.peer_deadline_seconds;
        const auto world = make_mpi_group(deadline);
        return command(options, *world);
    } catch (...) {
        std::string message;
        const int code = exit_code_of(std::current_exception(), message);
        // A lost peer is the consequence of another rank's error: let that one speak first.
        const int turn = mpi.rank() + (code == static_cast<int>(ExitCode::peer) ? mpi.size() : 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(std::min(3000, 150 * turn)));
        fmt::print(stderr, "fp8flow: error: {}\n", message);
        std::fflush(stderr);
        mpi.abort(code);
    }
}

int on_this_process(int (*command)(const RunOptions&, int64_t, const std::optional<std::string>&),
                    const RunOptions& options, int64_t gpus, const std::optional<std::string>& json) {
    try {
        return command(options, gpus, json);
    } catch (...) {
        std::string message;
        const int code = exit_code_of(std::current_exception(), message);
        fmt::print(stderr, "fp8flow: error: {}\n", message);
        return code;
    }
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app{"fp8flow: trains a Mixture-of-Experts transformer with a casting-free FP8 flow"};
    app.require_subcommand(0, 1);
    bool help_config = false;
    app.add_flag("--help-config", help_config,
                 "print every configuration key with type, range, default and meaning");

    RunOptions options;
    std::string backend = "auto", out;
    bool tensor_stats = false;
    auto add_common = [&](CLI::App* command) {
        command->add_option("config", options.config_path, "YAML configuration")->required();
        command->add_option("--set", options.overrides, "section.key=value, repeatable")
            ->allow_extra_args(false);
        command->add_option("--out", out, "folder for everything the run writes (output.out)");
    };
    CLI::App* train =
        app.add_subcommand("train", "train; under mpirun with one rank per GPU (or per group of cores)");
    CLI::App* validate =
        app.add_subcommand("validate", "train under every recipe of validate.recipes and compare the losses");
    CLI::App* plan =
        app.add_subcommand("plan", "print parameters, FLOPs, memory and wire bytes without running");
    for (CLI::App* command : {train, validate, plan}) add_common(command);
    for (CLI::App* command : {train, validate})
        command->add_option("--backend", backend, "auto | reference | hopper");
    train->add_flag("--tensor-stats", tensor_stats,
                    "report underflow, saturation, scales and error of every quantised tensor");
    int64_t gpus = 1;
    std::string json;
    plan->add_option("--gpus", gpus, "number of ranks")->check(CLI::PositiveNumber);
    plan->add_option("--json", json, "also write the plan to this file below --out");

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp& e) {
        return app.exit(e);
    } catch (const CLI::ParseError& e) {
        app.exit(e);
        return static_cast<int>(ExitCode::usage);
    }
    if (help_config) {
        fmt::print("{}", fp8flow::help_config());
        return 0;
    }
    if (!out.empty()) options.overrides.push_back("output.out=" + out);
    if (tensor_stats) options.overrides.push_back("output.tensor_stats=true");
    try {
        options.backend = parse_backend(backend);
    } catch (const Error& e) {
        fmt::print(stderr, "fp8flow: error: {}\n", e.what());
        return static_cast<int>(e.code());
    }
    if (*train) return on_ranks(options, run_train);
    if (*validate) return on_ranks(options, run_validate);
    if (*plan)
        return on_this_process(run_plan, options, gpus,
                               json.empty() ? std::nullopt : std::optional<std::string>(json));
    fmt::print("{}", app.help());
    return static_cast<int>(ExitCode::usage);
}
