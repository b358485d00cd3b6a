// SPDX-License-Identifier: MIT
// Tables and JSON of TensorStats.
#include "model/report/tensor_stats.h"

#include "model/report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace fp8flow::report {

namespace {

int64_t whole(double count) { return static_cast<int64_t>(count); }

// The smallest exponent such that half of the values have a scale of this exponent or a smaller one.
int64_t median_exponent(const TensorStatsRow& row) {
    double below = 0;
    size_t i = 0;
    while (i + 1 < row.exponents.size() && 2 * (below += row.exponents[i]) < row.counts.values) ++i;
    return row.first_exponent + static_cast<int64_t>(i);
}

// {"layers.0": NMSE over all iterations, ...}
nlohmann::json nmse_by_layer(const TensorStats& stats, const std::string& tensor) {
    std::map<int64_t, TensorStatsRow> layers;
    for (const TensorStatsRow& row : stats.rows())
        if (row.tensor == tensor && !layers.emplace(row.layer, row).second) layers.at(row.layer).join(row);
    nlohmann::json nmse = nlohmann::json::object();
    for (const auto& [layer, row] : layers) nmse[fmt::format("layers.{}", layer)] = row.nmse();
    return nmse;
}

}  // namespace

std::string tensor_stats_table(const TensorStats& stats) {
    Table table({"tensor"}, {"values", "zero bytes", "underflow", "at maximum", "clipped", "scale min",
                             "scale max", "NMSE vs BF16"});
    auto share = [](double count, double of) { return format_percent(of > 0 ? count / of : 0.0, 3); };
    for (const TensorStatsRow& row : stats.totals()) {
        const op::QuantizationCounts& c = row.counts;
        table.add_row({row.tensor, format_si(c.values), share(c.zeros, c.values), share(c.flushed, c.values),
                       share(c.at_maximum, c.values), share(c.clipped, c.values),
                       format_scientific(c.scale_min), format_scientific(c.scale_max),
                       format_scientific(row.nmse())});
    }
    return table.text(2);
}

nlohmann::json tensor_stats_json(const TensorStats& stats, const Provenance& provenance) {
    nlohmann::json rows = nlohmann::json::array();
    for (const TensorStatsRow& row : stats.totals()) {
        const op::QuantizationCounts& c = row.counts;
        rows.push_back({{"tensor", row.tensor},
                        {"first iteration", stats.rows().front().iteration},
                        {"last iteration", stats.rows().back().iteration},
                        {"values", whole(c.values)},
                        {"zeros", whole(c.zeros)},
                        {"at maximum", whole(c.at_maximum)},
                        {"scale min", c.scale_min},
                        {"scale max", c.scale_max},
                        {"underflows", whole(c.flushed)},
                        {"saturations", whole(c.clipped)},
                        {"nmse", row.nmse()},
                        {"nmse by layer", nmse_by_layer(stats, row.tensor)}});
        add_provenance(rows.back(), provenance);
    }
    return rows;
}

nlohmann::json transpose_stats_json(const TensorStats& stats, const Provenance& provenance) {
    nlohmann::json iterations = nlohmann::json::array();
    for (const TensorStatsRow& row : stats.transposed()) {
        if (iterations.empty() || iterations.back()["iteration"] != row.iteration)
            iterations.push_back({{"iteration", row.iteration}, {"transposed", nlohmann::json::array()}});
        iterations.back()["transposed"].push_back({{"weight", row.weight},
                                                   {"tensor", row.tensor},
                                                   {"values", whole(row.counts.values)},
                                                   {"nonzero", whole(row.counts.nonzero)},
                                                   {"flushed", whole(row.counts.flushed)},
                                                   {"flushed share", row.flushed_share()},
                                                   {"flushed norm share", row.flushed_energy_share()},
                                                   {"nmse", row.nmse()}});
    }
    nlohmann::json result = {{"iterations", std::move(iterations)}};
    add_provenance(result, provenance);
    return result;
}

nlohmann::json tensor_stats_record(const TensorStatsRow& row) {
    nlohmann::json exponents = nlohmann::json::array();
    for (const double values : row.exponents) exponents.push_back(whole(values));
    nlohmann::json record = {{"type", "tensor_stats"},
                             {"iteration", row.iteration},
                             {"layer", row.layer},
                             {"tensor", row.tensor},
                             {"values", whole(row.counts.values)},
                             {"amax", row.counts.amax},
                             {"flushed_share", row.flushed_share()},
                             {"clipped_share", row.clipped_share()},
                             {"nmse", row.nmse()},
                             {"scale_exponent", median_exponent(row)},
                             {"first_exponent", row.first_exponent},
                             {"scale_exponents", std::move(exponents)}};
    if (row.weight.empty()) return record;
    record["weight"] = row.weight;
    for (const auto& [part, prefix] :
         {std::pair{"shared_experts", "shared "}, {"_qkv", "qkv "}, {"_proj", "proj "}})
        if (row.weight.find(part) != std::string::npos) record["tensor"] = prefix + row.tensor;
    return record;
}

void TensorHistory::add(const nlohmann::json& record) {
    nlohmann::json& kept = records_.emplace_back();
    for (const char* key : {"iteration", "layer", "tensor"}) kept[key] = record.at(key);
    for (const char* key : kTensorMeasures) kept[key] = record.at(key);
}

nlohmann::json TensorHistory::heat() const {
    constexpr size_t kMostIterations = 24;
    std::vector<int64_t> all;
    for (const nlohmann::json& record : records_)
        if (all.empty() || all.back() != record["iteration"]) all.push_back(record["iteration"]);
    const size_t count = std::min(all.size(), kMostIterations);
    std::set<int64_t> shown;
    for (size_t i = 1; i <= count; ++i) shown.insert(all[i * all.size() / count - 1]);
    nlohmann::json result = nlohmann::json::array();
    for (const nlohmann::json& record : records_)
        if (shown.contains(record["iteration"].get<int64_t>())) result.push_back(record);
    return result;
}

}  // namespace fp8flow::report
