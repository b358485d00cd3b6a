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
    if (row.work.unit != Unit::none) return fmt::format("{:.3g} TFLOP/s", row.work.flops / seconds * 1e-12);
    return fmt::format("{:.1f} GB/s", row.work.bytes() / seconds * 1e-9);
}

std::string peer_of(const Row& row) {
    if (row.peer.empty()) return "-";
    const std::string& result = row.peer_result;
    if (!row.peer_seconds) return row.peer + (result.empty() ? "" : ": " + result);
    return fmt::format("{} {}{}", ratio_text(spread_of_peer(row), spread_of(row.timing)), row.peer,
                       result.empty() ? "" : " (" + result + ")");
}
// One mean, taken to scatter as much as the burst.
}  // namespace

std::string microseconds(double seconds) {
    const double us = seconds * 1e6;
    return format_fixed(us, us < 10 ? 2 : us < 1000 ? 1 : 0);
}

Spread spread_of(const Timing& timing) { return {timing.median, timing.min, timing.p90, timing.samples}; }

Spread spread_of_peer(const Row& row) {
    if (row.peer_timing) return spread_of(*row.peer_timing);
    return {*row.peer_seconds, *row.peer_seconds, *row.peer_seconds, row.timing.samples};
}

std::string day_of(const Provenance& provenance) { return provenance.date.substr(0, 10); }

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
        {"bytes", row.work.bytes()},
        {"wire_bytes", row.work.wire_bytes},
        {"flops", row.work.flops},
        {"ceiling", row.ceiling.empty() ? nlohmann::json(nullptr) : nlohmann::json(row.ceiling)},
        {"ceiling_us", us(row.ceiling_seconds)},
        {"ceiling_share", share},
        {"launches", row.launches ? nlohmann::json(*row.launches) : nlohmann::json(nullptr)},
        {"tensor_bytes", row.tensor_bytes},
        {"bar", text(row.target ? row.target->text() : "")},
        {"holds_bar", row.meets_target ? nlohmann::json(*row.meets_target) : nlohmann::json(nullptr)},
        {"missed", text(row.missed)},
        {"peer", text(row.peer)},
        {"peer_us", us(row.peer_seconds)},
        {"peer_gpu", text(row.peer_gpu)},
        {"peer_source", text(row.peer_source)},
        {"peer_result", text(row.peer_result)},
        {"nmse", row.nmse ? nlohmann::json(*row.nmse) : nlohmann::json(nullptr)},
        {"regime", row.regime},
        {"gpus", provenance.gpus},
        {"gpu", provenance.machine.gpu}};
    add_provenance(json, provenance);
    json["date"] = day_of(provenance);
    return json;
}

namespace {

// Of rows_table: what a spreadsheet or a plot needs.
constexpr const char* kColumns[] = {
    "op",    "shape",   "us",          "us_min",        "us_p90",   "us_sustained", "bytes", "wire_bytes",
    "flops", "ceiling", "ceiling_us",  "ceiling_share", "launches", "tensor_bytes", "bar",   "holds_bar",
    "peer",  "peer_us", "peer_result", "nmse",          "gpus",     "gpu",          "date"};

std::string cell_of(const nlohmann::json& value) {
    if (value.is_null()) return {};
    return value.is_string() ? value.get<std::string>() : value.dump();
}
std::string csv_cell(std::string text) {
    if (text.find_first_of(",\"\n") == std::string::npos) return text;
    for (size_t at = text.find('"'); at != std::string::npos; at = text.find('"', at + 2))
        text.insert(at, 1, '"');
    return '"' + text + '"';
}

}  // namespace

std::string rows_csv(const nlohmann::json& rows) {
    std::string csv;
    for (const char* column : kColumns) csv += (csv.empty() ? "" : ",") + std::string(column);
    csv += '\n';
    for (const nlohmann::json& row : rows) {
        std::string line;
        for (const char* column : kColumns)
            line += (column == kColumns[0] ? "" : ",") + csv_cell(cell_of(row.at(column)));
        csv += line + '\n';
    }
    return csv;
}

std::string rows_markdown(const std::vector<Row>& rows) {
    Table table({{"operation", Align::left},
                 {"shape", Align::left},
                 {"us"},
                 {"sustained"},
                 {"rate"},
                 {"ceiling"},
                 {"share"},
                 {"peer", Align::left}});
    for (const Row& row : rows)
        table.add_row(
            {row.operation, row.short_shape.empty() ? "-" : row.short_shape, microseconds(row.timing.median),
             row.timing.sustained ? microseconds(*row.timing.sustained) : "-", rate(row),
             row.ceiling.empty() ? "-" : row.ceiling,
             row.ceiling_seconds ? format_percent(*row.ceiling_seconds / row.timing.median, 1) : "-",
             peer_of(row)});
    return table.markdown();
}

std::string tables(const std::vector<Row>& rows) {
    std::vector<std::string> operations;
    for (const Row& row : rows)
        if (std::find(operations.begin(), operations.end(), row.operation) == operations.end())
            operations.push_back(row.operation);
    std::string text;
    for (const std::string& operation : operations) {
        Table table({{operation, Align::left},
                     {"us"},
                     {"min"},
                     {"p90"},
                     {"sustained"},
                     {"rate"},
                     {"ceiling"},
                     {"share"},
                     {"peer"}});
        for (const Row& row : rows) {
            if (row.operation != operation) continue;
            table.add_row(
                {row.short_shape.empty() ? "-" : row.short_shape, microseconds(row.timing.median),
                 microseconds(row.timing.min), microseconds(row.timing.p90),
                 row.timing.sustained ? microseconds(*row.timing.sustained) : "-", rate(row),
                 row.ceiling.empty() ? "-" : row.ceiling,
                 row.ceiling_seconds ? format_percent(*row.ceiling_seconds / row.timing.median, 1) : "-",
                 peer_of(row)});
        }
        text += fmt::format("{}{}", text.empty() ? "" : "\n", table.text());
    }
    return text;
}

}  // namespace fp8flow::bench
