// SPDX-License-Identifier: MIT
// Compares the memory that a run needs with what is free on the rank that has least.
#include "model/predict/require_fit.h"

#include "kernels/host_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

namespace fp8flow::predict {

namespace {

// Memory that a rank may use: of its GPU, or its share of its host's.
struct FreeMemory {
    double bytes = 0;
    std::string limit;  // "GPU memory", or what bounds a host's
};
// Before a model is made. Loads the GPU's libraries, so that their memory counts as used.
FreeMemory free_memory(const BackendChoice& backend, const Config& config, int64_t ranks_on_host) {
    if (backend.kind == BackendKind::hopper) {
        const auto ops = make_ops(backend, Arithmetic::stated, config.kernels);
        return {f64(ops->device().free_bytes()), "GPU memory"};
    }
    const HostMemory memory = host_memory();
    const int64_t sharing = memory.of_one_process ? 1 : ranks_on_host;
    return {f64(memory.free_bytes) / f64(sharing),
            sharing > 1 ? fmt::format("{}, shared by {} ranks", memory.limit, sharing) : memory.limit};
}

}  // namespace

std::string shortage_text(const Config& config, int64_t ranks, double free, const std::string& limit,
                          int rank, Where where) {
    const Fit fit = fit_of(config, ranks, free, where);
    if (fit.fits()) return "";
    std::string consumers;
    for (const Consumer& consumer : fit.largest)
        consumers += fmt::format("{}{} {:.2f} GiB ({})", consumers.empty() ? "" : ", ",
                                 consumer.item.category, consumer.item.bytes / 0x1p30, consumer.key);
    return fmt::format("a rank needs {:.2f} GiB and rank {} has {:.2f} GiB free within {}; most take: {}; {}",
                       fit.needed / 0x1p30, rank, free / 0x1p30, limit, consumers,
                       fit.settings.empty() ? std::string("no key alone makes it fit on so many ranks")
                                            : fmt::format("it fits with {}", fmt::join(fit.settings, ", ")));
}

void require_fit(report::RunLog& log, const std::vector<Config>& runs, const BackendChoice& backend,
                 ProcessGroup& world, int64_t ranks_on_host, WhereShort what) {
    const int64_t ranks = world.size();
    const Where where = backend.kind == BackendKind::hopper ? Where::gpu : Where::host;
    const auto needed_by = [&](const Config& config) {
        return fit_of(config, ranks, std::numeric_limits<double>::infinity(), where).needed;
    };
    const Config& largest = *std::ranges::max_element(runs, {}, needed_by);
    const FreeMemory mine = free_memory(backend, largest, ranks_on_host);
    std::vector<double> all(to_size(ranks));
    world.all_gather(&mine.bytes, sizeof mine.bytes, all.data());
    const auto least = std::ranges::min_element(all);
    const auto rank = static_cast<int>(least - all.begin());
    std::string limit = mine.limit;
    world.broadcast(limit, rank);
    const std::string text = shortage_text(largest, ranks, *least, limit, rank, where);
    require(text.empty() || what == WhereShort::warn, ExitCode::memory,
            "this run will not fit: {}; --force starts it all the same", text);
    if (!text.empty()) log.line("warning: this run will not fit, and is started with --force: " + text);
}

std::string decide_joined(Config& config, const BackendChoice& backend, ProcessGroup& world) {
    double usable = std::numeric_limits<double>::infinity();
    if (backend.kind == BackendKind::hopper) {
        int64_t least = -machine_facts(backend).gpu_memory_bytes;
        world.all_reduce_max(std::span<int64_t>(&least, 1));
        usable = usable_bytes(f64(-least));
    }
    return decide_joined(config, world.size(), usable);
}

}  // namespace fp8flow::predict
