// SPDX-License-Identifier: MIT
// `fp8flow bench`: single operations at given shapes, compared with the ceilings of the machine.
#include "kernels/core/timeline.h"
#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/bench/report.h"
#include "model/bench/suite.h"
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/report/page/page.h"
#include "model/report/progress.h"
#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/safetensors/header.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <regex>

namespace fp8flow {

using namespace report;

namespace {

using namespace bench;

struct Item {
    const Case* what;
    Shape shape;
    Subject::Regimes regimes = Subject::Regimes::all;
};

// Keeps the items with a match in operation and shape, as progress prints them.
void keep_matching(std::vector<Item>& items, const std::string& pattern) {
    std::regex wanted;
    try {
        // __polynomial: libstdc++'s matcher without backtracking
        wanted = std::regex(pattern, std::regex::ECMAScript | std::regex_constants::__polynomial);
    } catch (const std::regex_error& error) {
        fail(ExitCode::usage, "--match: got '{}', want a regular expression ({})", printable(pattern),
             error.what());
    }
    const auto text = [](const Item& item) { return item.what->name + " " + item.shape.text(); };
    const std::string first = text(items.front());
    std::erase_if(items, [&](const Item& item) { return !std::regex_search(text(item), wanted); });
    require(!items.empty(), ExitCode::usage, "--match: no selected row matches '{}'; the first reads '{}'",
            printable(pattern), first);
}

// A suite, cut down to the operations that are named; or the named operations at each given shape, or at
// their default.
std::vector<Item> items_of(const BenchOptions& options, Size size) {
    std::vector<Item> items;
    for (const std::string& name : options.operations) find_case(name);
    if (!options.suite.empty()) {
        require(options.shapes.empty(), ExitCode::usage, "--shape and --suite exclude each other");
        for (const SuiteEntry& entry : suite(options.suite)) {
            const auto& named = options.operations;
            if (!named.empty() && std::ranges::find(named, entry.operation) == named.end()) continue;
            const Case& what = find_case(entry.operation);
            items.push_back({&what, Shape(what.name, what.keys, entry.size, entry.shape), entry.regimes});
        }
        require(!items.empty(), ExitCode::usage,
                "suite {} has none of the named operations; see fp8flow bench --list", options.suite);
        return items;
    }
    require(!options.operations.empty(), ExitCode::usage,
            "bench: name an operation or a --suite; see fp8flow bench --list");
    for (const std::string& name : options.operations) {
        const Case& what = find_case(name);
        if (options.shapes.empty()) items.push_back({&what, Shape(what.name, what.keys, size, "")});
        for (const std::string& shape : options.shapes)
            items.push_back({&what, Shape(what.name, what.keys, size, shape)});
    }
    return items;
}

MeasureOptions measure_options(const BenchOptions& options, const BackendChoice& choice) {
    MeasureOptions measure = MachineCeilings::usual_options(choice);
    const bool hopper = choice.kind == BackendKind::hopper;
    // almost 400 measurements in about three minutes
    if (options.suite == "gemm" && hopper) {
        measure.samples = 15;
        measure.idle_seconds = 0.15;
        measure.sustained_seconds = 0.25;
    }
    // about 400 rows in about two minutes: memory traffic neither needs rest nor gets slower under load
    if (options.suite == "upstream" && hopper) {
        measure.samples = 15;
        measure.calls_per_short_sample = 5;
        measure.idle_seconds = 0.0;
        measure.sustained_seconds = 0.0;
    }
    // calls that wait for the wire, far from the power limit: no need to rest
    if (options.suite == "exchange" && hopper) measure.idle_seconds = 0.02;
    if (options.samples > 0) measure.samples = options.samples;
    if (options.idle_seconds) measure.idle_seconds = *options.idle_seconds;
    if (options.sustained_seconds) measure.sustained_seconds = *options.sustained_seconds;
    return measure;
}

void write_rows(const OutputFolder& folder, const std::vector<Row>& rows, const Provenance& provenance) {
    nlohmann::json written = nlohmann::json::array();
    for (const Row& row : rows) written.push_back(to_json(row, provenance));
    folder.write_json("bench.json", written, 1);
    Page page("Operations and their share of the ceiling",
              provenance.machine.gpu.empty() ? "reference backend" : provenance.machine.gpu, provenance);
    page.set("bench", std::move(written));
    folder.write_atomic(kPageFile, page.html());
}

}  // namespace

void print_bench_list() {
    fmt::print("operations (keys of --shape with their defaults on a GPU / on the CPU):\n");
    for (const Case& what : all_cases()) {
        fmt::print("\n{}  {}{}\n", what.name, what.meaning,
                   what.runs == Runs::together ? " (mpirun -n N)" : "");
        Table table({"key", "default", "small", "meaning"}, {});
        for (const Key& key : what.keys) table.add_row({key.name, key.layer, key.small, key.meaning});
        if (!what.keys.empty()) fmt::print("{}", table.text(2));
    }
    fmt::print("\nsuites:\n");
    Table suites({"name"}, {"cases"}, {"what"});
    for (const auto& [name, meaning] : suite_names())
        suites.add_row({name, std::to_string(suite(name).size()), meaning});
    fmt::print("{}", suites.text(2));
}

int run_bench(const Options& all, ProcessGroup& world) {
    const BenchOptions& options = all.bench;
    require(!options.capture || world.size() == 1, ExitCode::usage,
            "--capture: got {} ranks, want one: a profiler repeats kernels, and those of an exchange wait "
            "for each other",
            world.size());
    const BackendChoice choice = choose_backend(all.backend, all.placement, world);
    std::vector<Item> items =
        items_of(options, choice.kind == BackendKind::hopper ? Size::layer : Size::small);
    if (!options.match.empty()) keep_matching(items, options.match);
    const bool prints = world.rank() == 0;
    std::optional<RunFolder> run_folder;
    if (!options.out.empty()) run_folder.emplace(run_folder_of(all, options.out), world);
    const OutputFolder* folder = prints && run_folder ? &run_folder->folder() : nullptr;
    if (prints && run_folder && !run_folder->note().empty()) fmt::print("{}\n", run_folder->note());
    Runner runner(choice, world, measure_options(options, choice));
    if (!options.plugin.empty()) {
        runner.add_plugin(options.plugin);
        require(std::ranges::any_of(items,
                                    [&](const Item& item) { return runner.plugin()->has(item.what->name); }),
                ExitCode::usage, "--plugin {}: none of the selected operations; it has {}",
                printable(options.plugin), fmt::join(runner.plugin()->operations(), ", "));
    }

    const Provenance provenance = make_provenance(all.command, choice, world.size());
    if (prints) fmt::print("{}\ndevice: {}\n", choice.note, runner.device_name());
    if (options.describe) {
        for (const Item& item : items) {
            const std::string text = runner.describe(*item.what, item.shape);
            if (prints) fmt::print("\n{}", text);
        }
        return 0;
    }
    if (options.capture) {
        for (const Item& item : items)
            fmt::print("captured {} kernels of {} {}\n", runner.capture(*item.what, item.shape),
                       item.what->name, item.shape.text());
        return 0;
    }
    std::vector<Row> rows;
    EtaEstimator eta(std::ssize(items));
    for (size_t i = 0; i < items.size(); ++i) {
        const double start = clock_seconds();
        if (prints && items.size() > 1 && all.detail != Detail::quiet) {
            const auto left = eta.seconds_left();
            print_err(fmt::format("[{}/{}{}] {} {}\n", i + 1, items.size(),
                                  left ? ", " + format_clock(*left) + " left" : "", items[i].what->name,
                                  items[i].shape.short_text()));
        }
        rows.push_back(runner.measure(*items[i].what, items[i].shape, items[i].regimes));
        // after each row, so that an interrupted suite leaves its results
        if (folder != nullptr) {
            run_folder->check_if_unsure();
            run_folder->keep();
            write_rows(*folder, rows, provenance);
        }
        eta.step_done(clock_seconds() - start);
    }
    std::string table = tables(rows);
    if (const std::string note = runner.wire_note(); !note.empty()) table += "\n" + note + "\n";
    if (prints) fmt::print("\n{}", table);
    if (folder != nullptr) {
        folder->write_atomic("bench.txt", table);
        fmt::print("\n  files  {}/: report.html, bench.json, bench.txt\n", folder->path());
    } else if (prints) {
        fmt::print("\n  next  --out runs/bench keeps the rows as JSON; other operations and their keys: {}\n",
                   command_line("bench", {"--list"}, 1));
    }
    world.barrier();
    return 0;
}

}  // namespace fp8flow
