// SPDX-License-Identifier: MIT
// What `bench` prints and writes.
#include "model/bench/report.h"
#include "model/report/table.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace fp8flow::bench {

using namespace report;

namespace {

std::string rate(const Row& row) {
    const double seconds = row.timing.median;
    if (seconds <= 0) return "-";
    if (row.work.wire_bytes > 0) return fmt::format("{:.1f} GB/s wire", row.work.wire_bytes / seconds * 1e-9);
    if (row.work.unit != Unit::vector) return fmt::format("{:.3g} TFLOP/s", row.work.flops / seconds * 1e-12);
    return fmt::format("{:.1f} GB/s", row.work.bytes / seconds * 1e-9);
}

std::string microseconds(double seconds) {
    const double us = seconds * 1e6;
    return format_fixed(us, us < 10 ? 2 : us < 1000 ? 1 : 0);
}

// min to p90
Spread spread_of(const Timing& timing) { return {timing.median, timing.min, timing.p90, timing.samples}; }

std::string baseline_text(const Row& row) {
    if (row.baseline.empty()) return "-";
    std::string text = row.baseline;
    if (row.baseline_timing) {
        const Spread other = spread_of(*row.baseline_timing), own = spread_of(row.timing);
        text += " " + (!resolved(other, own)       ? std::string(kNotResolved)
                       : other.median > own.median ? ratio_text(other, own, " x slower than ours")
                                                   : ratio_text(own, other, " x faster than ours"));
    }
    return row.baseline_result.empty() ? text : fmt::format("{} ({})", text, row.baseline_result);
}

}  // namespace

nlohmann::json to_json(const Row& row, const Provenance& provenance) {
    const auto us = [](const std::optional<double>& seconds) {
        return seconds ? nlohmann::json(*seconds * 1e6) : nlohmann::json(nullptr);
    };
    const auto text = [](const std::string& words) {
        return words.empty() ? nlohmann::json(nullptr) : nlohmann::json(words);
    };
    nlohmann::json share = nullptr;
    if (row.ceiling_seconds && row.timing.median > 0) share = *row.ceiling_seconds / row.timing.median;
    nlohmann::json json = {
        {"op", row.operation},
        {"shape", row.shape},
        {"us", row.timing.median * 1e6},
        {"us_min", row.timing.min * 1e6},
        {"us_p90", row.timing.p90 * 1e6},
        {"us_sustained", us(row.timing.sustained)},
        {"bytes", row.work.bytes},
        {"wire_bytes", row.work.wire_bytes},
        {"flops", row.work.flops},
        {"ceiling", text(row.ceiling)},
        {"ceiling_us", us(row.ceiling_seconds)},
        {"ceiling_share", share},
        {"launches", row.launches ? nlohmann::json(*row.launches) : nlohmann::json(nullptr)},
        {"tensor_bytes", row.tensor_bytes},
        {"peer", text(row.baseline)},
        {"peer_us", us(row.baseline_timing ? std::optional(row.baseline_timing->median) : std::nullopt)},
        {"peer_result", text(row.baseline_result)},
        {"nmse", nullptr},  // no longer measured; readers of 0.2.0 expect the key
        {"regime", row.regime},
        {"gpus", provenance.gpus},
        {"gpu", provenance.machine.gpu}};
    add_provenance(json, provenance);
    json["date"] = provenance.date.substr(0, 10);
    return json;
}

std::string tables(const std::vector<Row>& rows) {
    std::vector<std::string> operations;
    for (const Row& row : rows)
        if (std::ranges::find(operations, row.operation) == operations.end())
            operations.push_back(row.operation);
    std::string text;
    for (const std::string& operation : operations) {
        Table table({operation}, {"us", "min", "p90", "sustained", "rate", "ceiling", "share", "launches"},
                    {"baseline"});
        for (const Row& row : rows) {
            if (row.operation != operation) continue;
            table.add_row(
                {row.short_shape.empty() ? "-" : row.short_shape, microseconds(row.timing.median),
                 microseconds(row.timing.min), microseconds(row.timing.p90),
                 row.timing.sustained ? microseconds(*row.timing.sustained) : "-", rate(row),
                 row.ceiling.empty() ? "-" : row.ceiling,
                 row.ceiling_seconds ? format_percent(*row.ceiling_seconds / row.timing.median, 1) : "-",
                 row.launches ? std::to_string(*row.launches) : "-", baseline_text(row)});
        }
        text += fmt::format("{}{}", text.empty() ? "" : "\n", table.text());
    }
    if (text.find(kNotResolved) != std::string::npos)
        text += fmt::format("\n{}: {}\n", kNotResolved, kResolvedRule);
    return text;
}

}  // namespace fp8flow::bench
