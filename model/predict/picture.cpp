// SPDX-License-Identifier: MIT
// Bars of the best choices: memory against the GPU's, time of a step by part.
#include "model/predict/picture.h"

#include "model/predict/choose.h"
#include "model/report/run_report.h"
#include "model/report/svg.h"
#include "model/report/table.h"
#include "model/report/titles.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace fp8flow::predict {

namespace {

using namespace report;

std::string subtitle_of(const Gpu& gpu) {
    return fmt::format("predicted for the {}; {}", gpu.sheet.gpu,
                       gpu.calibrated ? "calibrated " + gpu.calibration.date : std::string("uncalibrated"));
}

std::string shape_of(const std::vector<Choice>& choices) {
    return choices.empty() ? ""
                           : model_shape(choices.front().config) + "; " +
                                 plan::assumptions_text(choices.front().config) + "; ";
}

void add_value(BarChart& chart, Bar& bar, const std::string& category, double value) {
    auto found = std::find(chart.categories.begin(), chart.categories.end(), category);
    if (found == chart.categories.end()) {
        chart.categories.push_back(category);
        found = chart.categories.end() - 1;
    }
    const auto index = static_cast<size_t>(found - chart.categories.begin());
    bar.values.resize(std::max(bar.values.size(), index + 1));
    bar.values[index] += value;
}

std::string render(BarChart& chart) {
    for (Bar& bar : chart.bars) bar.values.resize(chart.categories.size());
    return render_svg(chart);
}

}  // namespace

std::string label_of(const Choice& choice) {
    return fmt::format("{} GPUs, {}, EP {}", choice.gpus, recipe_name(choice.config.precision.recipe),
                       choice.config.parallel.expert_model_parallel_size);
}

std::string speed_up_of(const std::vector<Choice>& choices, const Gpu& gpu) {
    const auto& check = gpu.calibration.check;
    std::string text;
    int64_t most = 0;
    for (const Choice& base : choices)
        for (const Choice& other : choices) {
            const Recipe recipe = other.config.precision.recipe;
            if (!base.fastest_that_fits() || !other.fastest_that_fits() || base.gpus != other.gpus ||
                base.gpus < most)
                continue;
            if (base.config.precision.recipe != Recipe::bf16 || recipe == Recipe::bf16) continue;
            most = base.gpus;
            const double ratio = other.time.tokens_per_second() / base.time.tokens_per_second();
            text = fmt::format(", {} on {}: ", recipe_name(recipe), counted(base.gpus, "GPU")) +
                   (gpu.calibrated && check && resolved(ratio - 1, check->mean_step)
                        ? fmt::format("{:.2f} x as fast as bf16", ratio)
                        : std::string("against bf16 within the error of the prediction"));
        }
    return text;
}

std::string kind_of(const Work& work) {
    if (work.part != "moe layer") return work.part;
    if (work.stage.starts_with("fc") || work.stage == "shared expert") return "MoE GEMMs";
    if (work.stage == "dispatch" || work.stage == "combine") return work.stage;
    return "MoE, other";
}

std::string memory_picture(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu) {
    BarChart chart;
    chart.title = model + ": memory of a GPU";
    chart.subtitle = shape_of(choices) + subtitle_of(gpu);
    chart.x_label = "GiB; the first bar is what the GPU has for it";
    chart.unit = " GiB";
    Bar capacity{fmt::format("{}, usable", gpu.sheet.gpu), {}};
    add_value(chart, capacity, "usable", (1 - kOutsideShare) * gpu.sheet.memory_bytes / 0x1p30);
    chart.bars.push_back(capacity);
    for (const Choice& choice : choices) {
        if (!choice.best) continue;
        Bar bar{label_of(choice), {}};
        for (const auto& item : choice.fit.items)
            if (item.bytes > 0) add_value(chart, bar, item.category, item.bytes / 0x1p30);
        chart.bars.push_back(bar);
    }
    return render(chart);
}

std::string time_picture(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu) {
    BarChart chart;
    chart.title = model + ": time of 1000 tokens of a GPU" + speed_up_of(choices, gpu);
    chart.subtitle = shape_of(choices) + subtitle_of(gpu) + "; what a schedule hides is part of the bars";
    chart.x_label = "milliseconds of a step for each 1000 tokens of a GPU";
    chart.unit = " ms";
    for (const Choice& choice : choices) {
        if (!choice.best) continue;
        Bar bar{label_of(choice), {}};
        const double thousands = choice.time.tokens / static_cast<double>(choice.gpus) / 1e3;
        for (const StageTime& stage : choice.time.stages)
            add_value(chart, bar, kind_of(stage.work), stage.seconds * stage.runs * 1e3 / thousands);
        chart.bars.push_back(bar);
    }
    double most = 0;
    for (const Bar& bar : chart.bars)
        most = std::max(most, std::accumulate(bar.values.begin(), bar.values.end(), 0.0));
    chart.decimals = most < 1 ? 3 : most < 100 ? 2 : 1;
    return render(chart);
}

}  // namespace fp8flow::predict
