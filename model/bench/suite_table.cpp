// SPDX-License-Identifier: MIT
// The table of a whole suite, for people: every row with its target, its peer and its launches, and a
// summary.
#include "model/bench/report.h"
#include "model/report/table.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

namespace fp8flow::bench {

using namespace report;

namespace {

std::string verdict(const Row& row) {
    if (!row.meets_target) return "-";
    return *row.meets_target ? "met" : "missed: " + row.missed;
}

std::string peer(const Row& row) {
    if (row.peer.empty()) return "-";
    std::string where = row.peer_comparable ? "" : row.peer_gpu.empty() ? "another GPU" : row.peer_gpu;
    for (const std::string& part : {where, row.peer_source})
        if (!part.empty()) where = where.empty() || where == part ? part : where + "; " + part;
    return row.peer + (where.empty() ? "" : " (" + where + ")");
}

std::string all_rows(const std::vector<Row>& rows) {
    Table table({{"operation", Align::left},
                 {"shape", Align::left},
                 {"us"},
                 {"GB/s"},
                 {"share"},
                 {"target", Align::left},
                 {"verdict", Align::left},
                 {"launches"},
                 {"peer us"},
                 {"ratio"},
                 {"peer", Align::left}});
    std::vector<const Row*> ordered;  // by operation, in order of first appearance
    for (const Row& first : rows) {
        const auto same = [&](const Row* row) { return row->operation == first.operation; };
        if (std::any_of(ordered.begin(), ordered.end(), same)) continue;
        for (const Row& row : rows)
            if (same(&row)) ordered.push_back(&row);
    }
    std::string operation;
    for (const Row* next : ordered) {
        const Row& row = *next;
        if (!operation.empty() && row.operation != operation) table.add_rule();
        operation = row.operation;
        const double seconds = row.timing.median;
        const bool wire = row.work.wire_bytes > 0;
        table.add_row({row.operation, row.short_shape.empty() ? "-" : row.short_shape, microseconds(seconds),
                       format_fixed((wire ? row.work.wire_bytes : row.work.bytes()) / seconds * 1e-9, 0) +
                           (wire ? " wire" : ""),
                       row.ceiling_seconds ? format_percent(*row.ceiling_seconds / seconds, 1) : "-",
                       row.target && !row.target->text().empty() ? row.target->text() : "-", verdict(row),
                       row.launches ? std::to_string(*row.launches) : "-",
                       row.peer_seconds ? microseconds(*row.peer_seconds) : "-",
                       row.peer_seconds ? ratio_text(spread_of_peer(row), spread_of(row.timing)) : "-",
                       peer(row)});
    }
    return table.text();
}

// What fusing saves, in time and in memory.
std::string fused_rows(const std::vector<Row>& rows) {
    Table table({{"in one pass", Align::left},
                 {"shape", Align::left},
                 {"us"},
                 {"two passes, us"},
                 {"gain"},
                 {"tensors"},
                 {"of two passes"}});
    bool any = false;
    for (const Row& row : rows) {
        const Row* baseline = baseline_of(row, rows);
        if (baseline == nullptr) continue;
        any = true;
        table.add_row({row.operation, row.short_shape, microseconds(row.timing.median),
                       microseconds(baseline->timing.median),
                       ratio_text(spread_of(baseline->timing), spread_of(row.timing)),
                       format_bytes(static_cast<double>(row.tensor_bytes)),
                       format_bytes(static_cast<double>(baseline->tensor_bytes))});
    }
    return any ? "\n" + table.text() : "";
}

std::string summary(const std::vector<Row>& rows) {
    int64_t judged = 0, met = 0, against_peers = 0, not_slower = 0;
    std::map<std::string, int64_t> missed;
    for (const Row& row : rows) {
        if (row.peer_comparable && row.peer_seconds) {
            ++against_peers;
            const Spread peer = spread_of_peer(row), own = spread_of(row.timing);
            not_slower += peer.median >= own.median || !resolved(peer, own) ? 1 : 0;
        }
        if (!row.meets_target) continue;
        ++judged;
        met += *row.meets_target ? 1 : 0;
        for (const char* what : {"share", "time", "launches", "peer"})
            if (row.missed.find(what) != std::string::npos) ++missed[what];
    }
    std::string text =
        fmt::format("\n{} rows, {} with a target: {} met, {} missed", rows.size(), judged, met, judged - met);
    std::string reasons;
    for (const auto& [what, count] : missed)
        reasons += fmt::format("{}{} {}", reasons.empty() ? "" : ", ", what, count);
    if (!reasons.empty()) text += " (" + reasons + ")";
    if (against_peers > 0)
        text += fmt::format("; {} of {} as fast as the fastest peer on such a GPU, or faster", not_slower,
                            against_peers);
    return text + fmt::format("\n{}: {}\n", kNotResolved, kResolvedRule);
}

}  // namespace

std::string suite_table(const std::vector<Row>& rows) {
    return all_rows(rows) + fused_rows(rows) + summary(rows);
}

}  // namespace fp8flow::bench
