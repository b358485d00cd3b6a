// SPDX-License-Identifier: MIT
// Tables and JSON of TensorStats.
#include "model/report/tensor_stats.h"

#include "model/report/table.h"

#include <fmt/format.h>

#include <map>

namespace fp8flow::report {

std::string tensor_stats_table(const TensorStats& stats) {
    Table table({{"tensor", Align::left},
                 {"values"},
                 {"zero bytes"},
                 {"underflow"},
                 {"at maximum"},
                 {"clipped"},
                 {"scale min"},
                 {"scale max"},
                 {"NMSE vs BF16"}});
    auto share = [](int64_t count, int64_t of) {
        return format_percent(of > 0 ? static_cast<double>(count) / static_cast<double>(of) : 0.0, 3);
    };
    for (const TensorStatsRow& row : stats.rows()) {
        table.add_row(
            {row.tensor, format_si(static_cast<double>(row.values)), share(row.zeros, row.values),
             row.has_source ? share(row.underflows, row.values) : "-", share(row.at_maximum, row.values),
             row.has_source ? share(row.saturations, row.values) : "-", format_scientific(row.scale_min),
             format_scientific(row.scale_max), row.has_source ? format_scientific(row.nmse()) : "-"});
    }
    return table.text(2);
}

nlohmann::json tensor_stats_json(const TensorStats& stats, const Provenance& provenance) {
    nlohmann::json rows = nlohmann::json::array();
    for (const TensorStatsRow& row : stats.rows()) {
        rows.push_back({{"tensor", row.tensor},
                        {"first iteration", stats.first_iteration()},
                        {"last iteration", stats.last_iteration()},
                        {"values", row.values},
                        {"zeros", row.zeros},
                        {"at maximum", row.at_maximum},
                        {"scale min", row.scale_min},
                        {"scale max", row.scale_max}});
        if (row.has_source)
            rows.back().update(
                {{"underflows", row.underflows}, {"saturations", row.saturations}, {"nmse", row.nmse()}});
        add_provenance(rows.back(), provenance);
    }
    return rows;
}

std::string transpose_stats_table(const TensorStats& stats) {
    Table table({{"transposed copy", Align::left},
                 {"values not 0"},
                 {"flushed"},
                 {"of the norm^2"},
                 {"NMSE vs rows"},
                 {"most of a norm^2"},
                 {"iteration"},
                 {"weight", Align::left}});
    struct Sum {
        TransposeStatsRow all;
        const TransposeStatsRow* most = nullptr;  // the copy with the largest share of the norm flushed
    };
    std::map<std::string, Sum> by_tensor;
    for (const TransposeStatsRow& row : stats.transposed()) {
        auto& [all, most] = by_tensor[row.tensor];
        all.nonzero += row.nonzero;
        all.flushed += row.flushed;
        all.energy += row.energy;
        all.flushed_energy += row.flushed_energy;
        all.error_energy += row.error_energy;
        if (most == nullptr || row.flushed_energy_share() > most->flushed_energy_share()) most = &row;
    }
    for (const auto& [tensor, sum] : by_tensor)
        table.add_row({tensor, format_si(static_cast<double>(sum.all.nonzero)),
                       format_percent(sum.all.flushed_share(), 4),
                       format_scientific(sum.all.flushed_energy_share()), format_scientific(sum.all.nmse()),
                       format_scientific(sum.most->flushed_energy_share()),
                       fmt::format("{}", sum.most->iteration), sum.most->weight});
    return table.text(2);
}

nlohmann::json transpose_stats_json(const TensorStats& stats, const Provenance& provenance) {
    nlohmann::json iterations = nlohmann::json::array();
    for (const TransposeStatsRow& row : stats.transposed()) {
        if (iterations.empty() || iterations.back()["iteration"] != row.iteration)
            iterations.push_back({{"iteration", row.iteration}, {"transposed", nlohmann::json::array()}});
        iterations.back()["transposed"].push_back({{"weight", row.weight},
                                                   {"tensor", row.tensor},
                                                   {"values", row.values},
                                                   {"nonzero", row.nonzero},
                                                   {"flushed", row.flushed},
                                                   {"flushed share", row.flushed_share()},
                                                   {"flushed norm share", row.flushed_energy_share()},
                                                   {"nmse", row.nmse()}});
    }
    nlohmann::json result = {{"iterations", std::move(iterations)}};
    add_provenance(result, provenance);
    return result;
}

}  // namespace fp8flow::report
