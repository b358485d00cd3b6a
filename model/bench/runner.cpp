// SPDX-License-Identifier: MIT
// Measuring cases.
#include "model/bench/runner.h"

#include "kernels/core/error.h"
#include "kernels/core/timeline.h"
#include "model/report/table.h"

#include <fmt/ranges.h>

#include <algorithm>

namespace fp8flow::bench {

namespace {

// Reports a failed check of an operation's arguments, without the place in the source and the expression.
[[noreturn]] void refuse(const std::string& operation, const Shape& shape, std::string reason) {
    const std::string mark = "check failed: ";
    reason.erase(0, reason.find(mark) + mark.size());
    size_t colon = reason.find(": ");  // after the expression, unless it belongs to "a ? b : c"
    while (colon != std::string::npos && colon > 0 && reason[colon - 1] == ' ')
        colon = reason.find(": ", colon + 1);
    if (colon != std::string::npos) reason.erase(0, colon + 2);
    fail(ExitCode::usage, "bench {}: this shape is refused: {} ({})", operation, reason, shape.text());
}

Launch launch_of(const Shape& shape) {
    return {.stream = {}, .sm_limit = shape.has("sms") ? static_cast<int>(shape.number("sms")) : 0};
}

}  // namespace

// The tensors of one case: as many sets as a cold cache needs.
struct Runner::Sets {
    explicit Sets(Device& device) : arena(device, "bench") {}
    Arena arena;
    std::vector<std::unique_ptr<Buffers>> buffers;
    std::vector<Call> calls;
    int64_t bytes() const { return buffers.front()->bytes(); }
};

Runner::Runner(const BackendChoice& choice, ProcessGroup& world, const MeasureOptions& options)
    : choice_(choice),
      ops_(make_ops(choice, Arithmetic::stated)),
      world_(world),
      machine_(choice, world, options) {}

Row Runner::measure(const Case& what, const Shape& shape, Subject::Regimes regimes) {
    Row row = timed(what, shape, regimes);
    add_ceiling(row, what);
    return row;
}

void Runner::build(Sets& sets, Machine& machine, const Case& what, const Shape& shape) {
    sets.buffers.push_back(
        std::make_unique<Buffers>(machine.ops.device(), sets.arena,
                                  sets.buffers.empty() ? nullptr : sets.buffers.front().get(), filler_));
    try {
        sets.calls.push_back(what.build(machine, *sets.buffers.back(), shape));
    } catch (const Error& error) {
        if (error.code() != ExitCode::internal ||
            std::string_view(error.what()).find("check failed: ") == std::string_view::npos)
            throw;
        refuse(what.name, shape, error.what());
    }
}

int64_t Runner::capture(const Case& what, const Shape& shape) {
    Ops& ops = *ops_;
    Device& device = ops.device();
    Machine machine{ops, world_, choice_};
    Sets sets(device);
    build(sets, machine, what, shape);
    const auto run = [&] {
        sets.calls.front().run(launch_of(shape));
        device.synchronize();
    };
    // the first call makes what later ones reuse
    const auto launches = count_launches(choice_, sets.calls.front().run);
    run();
    const std::unique_ptr<Timeline> profiler = device.make_timeline();
    profiler->begin_capture();
    profiler->begin_range("bench", (what.name + " " + shape.text()).c_str());
    run();
    profiler->end_range();
    profiler->end_capture();
    return launches ? launches->kernels : 0;
}

std::string Runner::describe(const Case& what, const Shape& shape) {
    const Plugin plugin(choice_.kind == BackendKind::hopper);
    Machine machine{*ops_, world_, choice_, &plugin};
    Sets sets(ops_->device());
    build(sets, machine, what, shape);
    const Plugin::Call& call = sets.calls.front().baseline;
    require(!call.tensors.empty(), ExitCode::usage,
            "--describe: {} {} is several calls or an exchange, which no plugin can have", what.name,
            shape.text());
    report::Table table({what.name, "dtype", "shape", "layout of scales"}, {});
    for (const NamedTensor& tensor : call.tensors)
        table.add_row(
            {tensor.name, name_of(tensor.view.dtype),
             fmt::format("[{}]", fmt::join(tensor.view.dims, tensor.view.dims + tensor.view.rank, ", ")),
             tensor.layout});
    return fmt::format("{}\n{}other arguments: {}\n", shape.text(), table.text(),
                       call.numbers.empty() ? "none" : fmt::format("{}", fmt::join(call.numbers, ", ")));
}

Row Runner::timed(const Case& what, const Shape& shape, Subject::Regimes regimes) {
    Ops& ops = *ops_;
    Machine machine{ops, world_, choice_, plugin_.get()};
    Sets sets(ops.device());
    build(sets, machine, what, shape);
    // at most half of the free memory, since the ceilings need some; on every rank the smallest number
    const int64_t that_fit = 1 + ops.device().free_bytes() / 2 / std::max<int64_t>(sets.bytes(), 1);
    int64_t negative = -std::min(machine_.meter().sets_for(sets.bytes()), that_fit);
    world_.all_reduce_max(std::span<int64_t>(&negative, 1));
    const int64_t num_sets = -negative;
    while (static_cast<int64_t>(sets.calls.size()) < num_sets) build(sets, machine, what, shape);
    ops.device().synchronize();
    Row row{.operation = what.name, .shape = shape.text(), .short_shape = shape.short_text()};
    const Launch launch = launch_of(shape);
    const Plugin::Call& baseline = sets.calls.front().baseline;
    if (baseline.run) row.baseline = plugin_->name();
    const bool has_baseline = baseline.run && check_baseline(row, sets.calls.front(), launch);

    Subject subject{.call = [&](int64_t set) { sets.calls[to_size(set)].run(launch); },
                    .num_sets = num_sets,
                    .cache = machine_.meter().cache_of(sets.bytes(), num_sets),
                    .regimes = regimes};
    if (num_sets == 1) subject.cache = Subject::Cache::cold_by_rotation;  // larger than the cache, or a host
    if (what.runs == Runs::together && world_.size() > 1) subject.together = &machine_.together();
    world_.barrier();
    const auto time = [&] {
        Timing timing = machine_.meter().time(subject);
        for (double* seconds : {&timing.median, &timing.min, &timing.p90}) *seconds = largest(*seconds);
        if (timing.sustained) timing.sustained = largest(*timing.sustained);
        return timing;
    };
    row.timing = time();
    row.work = sets.calls.front().work;
    row.tensor_bytes = sets.bytes();
    // ranks that wait for each other count their calls, and recording a call would break the count
    if (subject.together == nullptr)
        if (const auto launches = count_launches(choice_, sets.calls.front().run))
            row.launches = launches->all();
    if (has_baseline) {
        subject.call = [&](int64_t set) { sets.calls[to_size(set)].baseline.run(launch); };
        subject.regimes = Subject::Regimes::burst;
        world_.barrier();
        row.baseline_timing = time();
    }
    if (machine_.probe().cache_bytes() == 0)
        row.regime = "host";
    else
        row.regime = subject.cache == Subject::Cache::flush ? "burst, cache flushed"
                                                            : fmt::format("burst, {} buffers", num_sets);
    return row;
}

void Runner::add_plugin(const std::string& path) {
    plugin_ = std::make_unique<Plugin>(path, choice_.kind == BackendKind::hopper);
}

// Compares the plugin's result with ours. False if the plugin refuses the call on any rank. Comes before
// other calls, so that the outputs hold no result of ours yet.
bool Runner::check_baseline(Row& row, const Call& call, const Launch& launch) {
    bool refused = false;
    try {
        row.baseline_result = compare_results(
            ops_->device(), call.baseline.tensors, [&] { call.run(launch); },
            [&] { call.baseline.run(launch); });
    } catch (const Error& error) {
        if (error.code() != ExitCode::usage) throw;
        row.baseline_result = std::string("left out: ") + error.what();
        refused = true;
    }
    return largest(refused ? 1 : 0) == 0;
}

std::string Runner::wire_note() const {
    const PeerRates& peers = machine_.peers();
    if (peers.load <= 0) return {};
    return fmt::format(
        "wire, all GPUs at once: loads {:.0f} GB/s, stores {:.0f} GB/s a GPU; the ceiling is the larger",
        peers.load * 1e-9, peers.store * 1e-9);
}

void Runner::add_ceiling(Row& row, const Case& what) {
    const bool sends = what.runs == Runs::together && world_.size() > 1;
    if (sends && machine_.peers().load <= 0) {
        row.ceiling = fmt::format("not measured: {}", machine_.no_peers());
        return;
    }
    const Work& work = row.work;
    const LowerBound bound = machine_.bound_of(work, sends ? work.wire_bytes : 0);
    const double seconds = largest(bound.seconds());
    if (seconds <= 0) return;
    row.ceiling_seconds = seconds;
    if (bound.wire >= std::max(bound.traffic, bound.gemms))
        row.ceiling = fmt::format("{:.1f} GB/s wire", work.wire_bytes / seconds * 1e-9);
    else if (bound.traffic >= bound.gemms)
        row.ceiling = fmt::format("{:.1f} GB/s", work.bytes / seconds * 1e-9);
    else
        row.ceiling = fmt::format("{:.4g} TFLOP/s {}", work.flops / seconds * 1e-12,
                                  work.unit == Unit::fp8_mma ? "FP8" : "BF16");
}

}  // namespace fp8flow::bench
