// SPDX-License-Identifier: MIT
// The program: reads the command line, starts the ranks, reports errors once. It and launcher.cpp are all
// that reads the environment, apart from the libraries (MPI, CUDA, OpenMP) themselves. Read next:
// command_line.h, commands.h.
#include "kernels/core/error.h"
#include "kernels/host_memory.h"
#include "model/commands/command_line.h"
#include "model/config/hf_families.h"
#include "model/job/host_cores.h"
#include "model/job/launcher.h"
#include "model/job/mpi_session.h"
#include "model/job/stop_signals.h"
#include "model/job/watchdog.h"
#include "model/safetensors/input.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <omp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

namespace {

using namespace fp8flow;

// Returns 0 where there is nothing to report.
int exit_code_of(std::exception_ptr error, std::string& message) {
    try {
        std::rethrow_exception(error);
    } catch (const Error& e) {
        message = e.what();
        return static_cast<int>(e.code());
    } catch (const std::bad_alloc&) {
        message = out_of_host_memory(0);
        return static_cast<int>(ExitCode::memory);
    } catch (const std::system_error& e) {
        message = e.what();
        if (std::ferror(stdout) != 0) {
            message = fmt::format("standard output cannot be written: {}", e.code().message());
            // A reader that has gone (`| head`) has read enough.
            return e.code().value() == EPIPE ? 0 : static_cast<int>(ExitCode::output);
        }
        // a folder or a thread that found no memory
        if (e.code() == std::errc::not_enough_memory ||
            e.code() == std::errc::resource_unavailable_try_again) {
            message += ": " + out_of_host_memory(0);
            return static_cast<int>(ExitCode::memory);
        }
    } catch (const std::exception& e) {
        message = e.what();
    } catch (...) {  // of a plugin
        message = "an exception of unknown type";
    }
    return static_cast<int>(ExitCode::internal);
}

// The environment variables of this process; read once.
const JobStart& job_start() {
    static const JobStart read = read_job_start();
    return read;
}

// "fp8flow: error: " and the message; several problems are listed on the lines below it.
void print_error(const std::string& message) {
    constexpr size_t kLongestLine = 4096;
    const auto lines = 1 + std::ranges::count(message, '\n');
    std::string text = lines > 1 ? fmt::format("{} problems\n  ", lines) : "";
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = message.find('\n', begin);
        text += printable(std::string_view(message).substr(begin, end - begin), kLongestLine);
        if (end != std::string::npos) text += "\n  ";
    }
    print_err("fp8flow: error: " + text + "\n");
}

// Ends the job with one report: ranks wait for their turn, and the first one reports and aborts the others.
[[noreturn]] void report_and_abort(MpiSession& mpi, std::exception_ptr error) {
    constexpr std::chrono::milliseconds kTurn{150}, kLongestTurn{3000}, kForTheEnd{10000};
    std::string message;
    const int code = exit_code_of(error, message);
    note_failure();
    // A lost peer is the consequence of another rank's error: that rank reports first.
    const int turn = mpi.rank() + (code == static_cast<int>(ExitCode::peer) ? mpi.size() : 0);
    std::this_thread::sleep_for(std::min(kLongestTurn, kTurn * turn));
    if (!claim_report())
        std::this_thread::sleep_for(kForTheEnd);
    else if (code != 0)
        print_error(message);
    mpi.abort(code);
}

// The launcher's process is the parent of the ranks of a host.
Watchdog::Job watched_job() {
    std::string name = fmt::format("{} since {}", ::getppid(), process_start(::getppid()));
    for (const char* part : {"PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"})
        if (const char* value = std::getenv(part)) name += fmt::format(" {}", value);
    const Placement& place = job_start().placement;
    return {.name = name,
            .rank = static_cast<int>(job_start().rank),
            .rank_on_host = static_cast<int>(place.rank_on_host),
            .ranks_on_host = static_cast<int>(place.ranks_on_host),
            .size = static_cast<int>(place.num_ranks)};
}

// If a standard descriptor is closed, the next file that is opened would get its number, and the output.
void keep_descriptors() {
    int descriptor = 0;
    while (descriptor >= 0 && descriptor <= STDERR_FILENO) descriptor = ::open("/dev/null", O_RDONLY);
    if (descriptor >= 0) ::close(descriptor);
}

// OpenMP's threads spin after every loop by default, which takes the cores from other ranks and programs. The
// OpenMP library reads its environment before main, so the program starts itself once more, before MPI and
// before any thread; ignored signals, open files and the process stay. A choice of the user's stays too.
void wait_passively(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
    ::setenv("OMP_WAIT_POLICY", "passive", 1);
    constexpr const char* kSelf = "/proc/self/exe";
    char path[PATH_MAX + 1] = {};
    struct stat self {
    }, named{};
    // Under its own name, for tools that look for it, unless another file has that name by now.
    if (::readlink(kSelf, path, PATH_MAX) < 0 || ::stat(kSelf, &self) != 0 || ::stat(path, &named) != 0 ||
        self.st_dev != named.st_dev || self.st_ino != named.st_ino)
        return;
    ::execv(path, argv);
}

// The ranks of a host share the cores that affinity and CPU quota leave, unless the user or mpirun's binding
// has decided already.
void choose_threads(int64_t ranks) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr || std::getenv("OMPI_MCA_orte_bound_at_launch") != nullptr)
        return;
    omp_set_num_threads(std::max(1, usable_cores(omp_get_num_procs()) / static_cast<int>(ranks)));
}

// Longest wait for another rank, in seconds, by the configuration of a command that reads one.
double peer_deadline(const CommandLine& line, int64_t ranks) {
    const Options& options = line.options;
    const bool runs = *line.train || *line.validate || *line.profile;
    if (!options.joined.empty() || !(runs || *line.evaluate || *line.generate))
        return 300;  // a rank may read weights or draw random data for minutes while others wait
    return load_config(options.config_path, options.overrides, runs ? std::optional(ranks) : std::nullopt,
                       options.hf_config)
        .parallel.peer_deadline_seconds;
}

// Runs `command` on every rank.
int on_ranks(const CommandLine& line, int (*command)(const Options&, ProcessGroup&)) {
    // Before the first NCCL call: communicators need no multicast memory, which some machines refuse. A value
    // that the user has set stays.
    ::setenv("NCCL_NVLS_ENABLE", "0", 0);
    MpiSession mpi;
    try {
        require_same_size(job_start(), mpi.size());
        check_processor();
        choose_threads(line.options.placement.ranks_on_host);
        const double deadline = peer_deadline(line, mpi.size());
        Watchdog::set_deadline(deadline, "parallel.peer_deadline_seconds");
        const auto world = make_mpi_group(deadline);
        return command(line.options, *world);
    } catch (...) {
        report_and_abort(mpi, std::current_exception());
    }
}

// For what needs no ranks. Returns the exit code.
int report_here(std::exception_ptr error) {
    std::string message;
    const int code = exit_code_of(error, message);
    if (code != 0) print_error(message);
    return code;
}

// For errors in the command line, which every rank of a job finds.
int report_usage(std::exception_ptr error) {
    if (!job_start().launched) return report_here(error);
    MpiSession mpi;
    report_and_abort(mpi, error);
}

// What a run does with a signal; others end at once.
OnStopSignal on_stop_signal(const CommandLine& line) {
    return (*line.train && line.options.dump_samples == 0) || *line.validate ? OnStopSignal::note
                                                                             : OnStopSignal::end;
}

int run(const CommandLine& line) {
    const Options& options = line.options;
    if (line.help_config) {
        fmt::print("{}", help_config());
        return 0;
    }
    if (*line.families) {
        fmt::print("{}", families_page(line.families_markdown));
        return 0;
    }
    if (*line.bench && line.list) {
        print_bench_list();
        return 0;
    }
    if (*line.train) return on_ranks(line, options.dump_samples > 0 ? run_dump_samples : run_train);
    if (*line.validate) return on_ranks(line, options.joined.empty() ? run_validate : run_join);
    if (*line.profile && !line.compared.empty())
        return run_compare(line.compared[0], line.compared[1], options.command, line.out);
    if (*line.profile) return on_ranks(line, run_profile);
    if (*line.evaluate) return on_ranks(line, run_evaluate);
    if (*line.generate) return on_ranks(line, run_generate);
    if (*line.replay) return on_ranks(line, run_replay);
    if (*line.bench) return on_ranks(line, run_bench);
    if (*line.plan) return run_plan(options);
    if (*line.doctor) return run_doctor(line.out.empty() ? "runs" : line.out);
    fmt::print("{}", line.app.help());
    return static_cast<int>(ExitCode::usage);
}

// Returns the exit code. Throws what has not been reported.
int run(int argc, char** argv) {
    CommandLine line;
    line.app.set_version_flag("--version", "fp8flow " FP8FLOW_VERSION);
    const Watchdog watchdog(watched_job(), line.start_deadline);
    try {
        line.parse(argc, argv, job_start());
        Watchdog::set_deadline(line.start_deadline, "--start-deadline");
    } catch (const CLI::Success& asked) {  // --help, --version
        std::ostringstream text;
        const int code = line.app.exit(asked, text, text);
        fmt::print("{}", text.str());
        return code;
    } catch (const CLI::ParseError& wrong) {
        const std::string command = line.meant_by(argc > 1 ? argv[1] : "");
        return report_usage(std::make_exception_ptr(Error(
            ExitCode::usage, command.empty()
                                 ? fmt::format("{}; see fp8flow --help", wrong.what())
                                 : fmt::format("unknown command '{}'; did you mean '{}'? See fp8flow --help",
                                               printable(argv[1]), command))));
    } catch (const Error&) {
        return report_usage(std::current_exception());
    }
    decide_on_stop_signals(on_stop_signal(line));
    return run(line);
}

}  // namespace

int main(int argc, char** argv) {
    hold_stop_signals();
    keep_descriptors();
    wait_passively(argv);
    std::signal(SIGXFSZ, SIG_IGN);  // past a file size limit, write() then says so (EFBIG)
    std::signal(SIGPIPE, SIG_IGN);  // as where the reader of a pipe has gone (EPIPE)
    try {
        const int code = run(argc, argv);
        // If it has failed before, the command has reported it.
        if (std::ferror(stdout) == 0 && std::fflush(stdout) != 0)
            throw std::system_error(errno, std::generic_category());
        return code;
    } catch (...) {
        return report_here(std::current_exception());
    }
}
