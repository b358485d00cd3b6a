// SPDX-License-Identifier: MIT
// The table of launchers and their variables.
#include "model/job/launcher.h"

#include "kernels/core/error.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace fp8flow {

namespace {

constexpr int64_t kMostRanks = 1 << 20;  // a larger number is no size

struct Launcher {
    const char *size, *rank, *size_on_host, *rank_on_host;  // empty: it has none
};
// The innermost launcher first: mpirun starts its daemons with srun, and they pass its variables on.
// Launchers without a size are last.
constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
    {"JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_RANK"},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS",
     "MPI_LOCALRANKID"},  // MPICH, Intel MPI, Flux, srun --mpi=pmi2
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"},
    {"SLURM_NTASKS", "SLURM_PROCID", "", "SLURM_LOCALID"},
    {"WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"},  // torchrun
    {"", "PMIX_RANK", "", ""},
    {"", "PALS_RANKID", "", ""},
    {"", "ALPS_APP_PE", "", ""},
};

// The number at the begin of a variable, if there is one.
std::optional<int64_t> number_in(const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr) return std::nullopt;
    const std::string_view text = value;
    int64_t number = 0;
    const bool read = std::from_chars(text.data(), text.data() + text.size(), number).ec == std::errc();
    return read && number >= 0 ? std::optional(number) : std::nullopt;
}

// Of this node in "8(x2),4".
std::optional<int64_t> tasks_of_node(std::string_view list, int64_t node) {
    while (!list.empty()) {
        int64_t tasks = 0, nodes = 1;
        const std::string_view part = list.substr(0, list.find(','));
        const char* const end = part.data() + part.size();
        const auto [rest, error] = std::from_chars(part.data(), end, tasks);
        if (error != std::errc()) return std::nullopt;
        if (end - rest > 2) std::from_chars(rest + 2, end, nodes);
        if ((node -= nodes) < 0) return tasks;
        list.remove_prefix(std::min(list.size(), part.size() + 1));
    }
    return std::nullopt;
}

// A shell in an allocation also has Slurm's variables, but is no rank: steps with these numbers and above are
// a batch script or a shell, and so is the first task of a step with a terminal.
bool is_rank_of_step(const Launcher& launcher, int64_t rank) {
    constexpr int64_t kFirstOfShells = 0xfffffff0;
    if (rank > 0) return true;
    if (std::getenv("SLURM_PTY_PORT") != nullptr) return false;
    return launcher.size == std::string_view("SLURM_STEP_NUM_TASKS") ||
           number_in("SLURM_STEP_ID").value_or(kFirstOfShells) < kFirstOfShells;
}

std::optional<JobStart> read(const Launcher& launcher) {
    const std::optional<int64_t> size = number_in(launcher.size), rank = number_in(launcher.rank);
    const bool has_size = launcher.size[0] != 0;
    if (!rank || (has_size && (!size || *size < 1 || *size > kMostRanks))) return std::nullopt;
    // Pods may have the first two of torchrun's variables without torchrun.
    if (launcher.size == std::string_view("WORLD_SIZE") && !number_in(launcher.rank_on_host))
        return std::nullopt;
    if (launcher.rank == std::string_view("SLURM_PROCID") && !is_rank_of_step(launcher, *rank))
        return std::nullopt;
    JobStart start;
    start.launched = true;
    start.rank = *rank;
    start.evidence = fmt::format("{}={}", has_size ? launcher.size : launcher.rank, has_size ? *size : *rank);
    if (!has_size) return start;
    std::optional<int64_t> here = number_in(launcher.size_on_host);
    if (here && launcher.size_on_host == std::string_view("SLURM_STEP_TASKS_PER_NODE"))
        here = tasks_of_node(std::getenv(launcher.size_on_host), number_in("SLURM_NODEID").value_or(0));
    start.placement = {.num_ranks = *size,
                       .ranks_on_host = std::clamp<int64_t>(here.value_or(1), 1, *size),
                       .rank_on_host = std::min(number_in(launcher.rank_on_host).value_or(0), *size - 1)};
    return start;
}

}  // namespace

JobStart read_job_start() {
    for (const Launcher& launcher : kLaunchers)
        if (const std::optional<JobStart> start = read(launcher)) return *start;
    return {};
}

void require_same_size(const JobStart& start, int mpi_size) {
    const int64_t started = std::max(start.placement.num_ranks, start.rank + 1);
    require(
        mpi_size > 1 || started == 1, ExitCode::usage,
        "{}: the launcher started {}{} tasks, MPI sees 1; start them with the mpirun of the Open MPI that "
        "this "
        "program was built with, or with srun --mpi=pmix, or unset the variable if this process runs alone",
        start.evidence, start.placement.num_ranks > 1 ? "" : "at least ", started);
}

}  // namespace fp8flow
