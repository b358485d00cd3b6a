// SPDX-License-Identifier: MIT
// Turns the spans of a step into rows: assigns time and calls to stages.
#include "model/profile/profile.h"

#include "kernels/core/error.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <numeric>
#include <string_view>
#include <utility>

namespace fp8flow::profile {

namespace {

// Layers and micro-batches that a part ran for in a step.
double runs_of(const std::vector<StageSpan>& spans, std::string_view part) {
    if (part != kMoeLayer && part != "dense layer" && part != "attention") return 1;
    const auto runs = std::ranges::count_if(spans, [&](const StageSpan& span) {
        return span.level == StageLevel::part && span.name == part &&
               std::string_view(span.direction) == "forward";
    });
    return std::max(1.0, f64(runs));
}

bool crosses_ranks(std::string_view part, std::string_view stage) {
    return part == kMoeLayer && (stage == "plan" || stage == "dispatch" || stage == "combine");
}

// Seconds of a step in which a MoE layer's plan, dispatch or combine is under way and nothing that computes:
// no other stage without stages in it, on the main stream or a side stream. Reductions of gradients, on
// the wire stream, compute nothing.
double wire_alone(const std::vector<StageSpan>& spans) {
    std::vector<bool> innermost(spans.size(), true);
    for (const StageSpan& span : spans)
        if (span.parent >= 0) innermost[to_size(span.parent)] = false;
    struct Edge {
        double at = 0;
        int wire = 0, work = 0;  // under way from here on: one more or one less
    };
    std::vector<Edge> edges;
    for (size_t i = 0; i < spans.size(); ++i) {
        const StageSpan& span = spans[i];
        const StageName name = stage_of(spans, static_cast<int>(i));
        const bool wire = crosses_ranks(name.part, name.stage);
        if (!wire && (!innermost[i] || span.role == StreamRole::wire)) continue;
        const Edge begins{.at = span.begin, .wire = wire ? 1 : 0, .work = wire ? 0 : 1};
        edges.push_back(begins);
        edges.push_back({.at = span.begin + span.seconds, .wire = -begins.wire, .work = -begins.work});
    }
    std::ranges::sort(edges, {}, &Edge::at);
    double seconds = 0;
    Edge now;
    for (const Edge& edge : edges) {
        if (now.wire > 0 && now.work == 0) seconds += edge.at - now.at;
        now = {.at = edge.at, .wire = now.wire + edge.wire, .work = now.work + edge.work};
    }
    return seconds;
}

}  // namespace

void add_step(const StageTimer& timer, RowSamples& samples) {
    const std::vector<StageSpan>& spans = timer.spans();
    std::vector<ProfileRow>& rows = samples.rows;
    const auto row_of = [&](int span) {
        const StageName name = stage_of(spans, span);
        const char* direction = spans[to_size(span)].direction;
        const auto found = std::ranges::find_if(rows, [&](const ProfileRow& row) {
            return row.part == name.part && row.stage == name.stage && row.direction == direction;
        });
        if (found != rows.end()) return to_size(found - rows.begin());
        FP8FLOW_CHECK(samples.seconds.empty(), "stage {} {} appears in a later step only", direction,
                      name.stage);
        rows.push_back({.part = name.part, .stage = name.stage, .direction = direction});
        return rows.size() - 1;
    };
    std::vector<size_t> row_by_span;
    for (size_t i = 0; i < spans.size(); ++i) row_by_span.push_back(row_of(static_cast<int>(i)));
    for (ProfileRow& row : rows) {
        row.runs = runs_of(spans, row.part);
        row.bytes = row.flops = row.gemm_flops = row.casts = row.wire_bytes = row.peak_bytes = 0;
    }
    std::vector<double> seconds(rows.size(), 0.0), wire_left;  // by span: bytes not charged to a call yet
    for (size_t i = 0; i < spans.size(); ++i) {
        const size_t r = row_by_span[i];
        seconds[r] += spans[i].own_seconds / rows[r].runs;
        rows[r].wire_bytes += spans[i].wire_bytes / rows[r].runs;
        rows[r].peak_bytes = std::max(rows[r].peak_bytes, f64(spans[i].peak_bytes));
        wire_left.push_back(spans[i].wire_bytes);
    }
    std::vector<double> exchange_seconds;
    samples.exchange_rows.clear();
    for (size_t i = 0; i < spans.size(); ++i) {
        const ProfileRow& row = rows[row_by_span[i]];
        if (!crosses_ranks(row.part, row.stage)) continue;
        samples.exchange_rows.push_back(row_by_span[i]);
        exchange_seconds.push_back(spans[i].own_seconds);
    }
    samples.exchange_seconds.push_back(std::move(exchange_seconds));
    samples.calls.clear();
    for (const StageTimer::Call& call : timer.calls()) {
        const auto span = to_size(call.span);
        const size_t r = row_by_span[span];
        const OpCost& cost = call.call.cost;
        rows[r].bytes += cost.bytes / rows[r].runs;
        rows[r].flops += cost.flops / rows[r].runs;
        if (cost.unit != Unit::vector) rows[r].gemm_flops += cost.flops / rows[r].runs;
        if (call.call.cast) rows[r].casts += 1 / rows[r].runs;
        samples.calls.push_back({r, call.call, std::exchange(wire_left[span], 0.0)});
    }
    samples.seconds.push_back(std::move(seconds));
    samples.wire_alone.push_back(wire_alone(spans) / runs_of(spans, kMoeLayer));
}

void add_waiting(ProcessGroup& expert_parallel, RowSamples& samples) {
    std::vector<std::vector<double>> by_row(samples.rows.size());  // [row][step]
    samples.waiting.clear();
    for (const std::vector<double>& own : samples.exchange_seconds) {
        std::vector<float> fastest;  // negative, for the reduction
        fastest.reserve(own.size());
        for (const double seconds : own) fastest.push_back(static_cast<float>(-seconds));
        expert_parallel.all_reduce_max(fastest);
        for (std::vector<double>& steps : by_row) steps.push_back(0);
        samples.waiting.push_back(0);
        for (size_t call = 0; call < own.size(); ++call) {
            const size_t r = samples.exchange_rows[call];
            const float excess = static_cast<float>(own[call]) + fastest[call];
            const double waited = f64(excess) / samples.rows[r].runs;
            by_row[r].back() += waited;
            samples.waiting.back() += waited;
        }
    }
    for (size_t r = 0; r < by_row.size(); ++r)
        samples.rows[r].wait_seconds = spread_of(std::move(by_row[r])).median;
}

double wire_seconds(const std::vector<ProfileRow>& rows) {
    double seconds = 0;
    for (const ProfileRow& row : rows)
        if (crosses_ranks(row.part, row.stage)) seconds += row.seconds.median;
    return seconds;
}

RankSeconds rank_seconds(const RowSamples& samples) {
    std::vector<double> work, wire;
    for (const std::vector<double>& step : samples.seconds) {
        work.push_back(0);
        wire.push_back(0);
        for (size_t r = 0; r < step.size(); ++r)
            if (samples.rows[r].part == kMoeLayer)
                (crosses_ranks(kMoeLayer, samples.rows[r].stage) ? wire : work).back() += step[r];
    }
    return {.work = spread_of(work),
            .wire = spread_of(wire).median,
            .alone = spread_of(samples.wire_alone).median,
            .waiting = spread_of(samples.waiting).median};
}

std::optional<SlowestRank> slowest_of(const std::vector<RankSeconds>& ranks) {
    if (ranks.size() < 2) return std::nullopt;
    std::vector<size_t> order(ranks.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order,
                             [&](size_t a, size_t b) { return ranks[a].work.median > ranks[b].work.median; });
    const Spread &slowest = ranks[order.front()].work, &middle = ranks[order[order.size() / 2]].work;
    std::vector<double> work;
    work.reserve(ranks.size());
    for (const RankSeconds& rank : ranks) work.push_back(rank.work.median);
    const double median = spread_of(work).median;
    return SlowestRank{.rank = static_cast<int>(order.front()),
                       .over_median = median > 0 ? slowest.median / median - 1 : 0,
                       .resolved = report::resolved(slowest, middle)};
}

void charge_wire(const WireBytes& sent, const WireSplit& split, RowSamples& samples) {
    struct Leg {
        double total;
        std::initializer_list<std::string_view> ops;
        double forward, backward;
    };
    const auto weight = [&](const Leg& leg, const RowSamples::Call& call) {
        if (std::ranges::find(leg.ops, call.call.op) == leg.ops.end()) return 0.0;
        return samples.rows[call.row].direction == "forward" ? leg.forward : leg.backward;
    };
    // not gradient reductions: their bytes are always reported
    for (const Leg& leg :
         {Leg{sent.routing, {"gather_routing"}, 1, 1},
          Leg{sent.dispatch, {"dispatch", "dispatch_rows"}, split.dispatch_forward, split.dispatch_backward},
          Leg{sent.combine, {"combine"}, split.combine_forward, split.combine_backward}}) {
        double weights = 0, reported = 0;
        for (const RowSamples::Call& call : samples.calls) {
            weights += weight(leg, call);
            if (weight(leg, call) > 0) reported += call.wire_bytes;
        }
        if (reported > 0 || weights <= 0) continue;
        for (RowSamples::Call& call : samples.calls) {
            const double bytes = leg.total * weight(leg, call) / weights;
            call.wire_bytes += bytes;
            samples.rows[call.row].wire_bytes += bytes / samples.rows[call.row].runs;
        }
    }
}

void add_ceilings(const IdealSeconds& ideal, RowSamples& samples) {
    for (const RowSamples::Call& call : samples.calls) {
        ProfileRow& row = samples.rows[call.row];
        row.ideal_seconds += ideal(call.call, call.wire_bytes) / row.runs;
    }
}

std::vector<ProfileRow> merge_rows(const RowSamples& samples, ProcessGroup& world) {
    const auto counts = std::array{
        &ProfileRow::bytes,      &ProfileRow::flops,         &ProfileRow::gemm_flops,  &ProfileRow::casts,
        &ProfileRow::wire_bytes, &ProfileRow::ideal_seconds, &ProfileRow::wait_seconds};
    std::vector<double> mine;
    for (const std::vector<double>& step : samples.seconds) mine.insert(mine.end(), step.begin(), step.end());
    for (const ProfileRow& row : samples.rows) {
        for (const auto count : counts) mine.push_back(row.*count);
        mine.push_back(row.peak_bytes);
    }
    const auto ranks = to_size(world.size());
    std::vector<double> all(mine.size() * ranks);
    world.all_gather(mine.data(), mine.size() * sizeof(double), all.data());

    std::vector<ProfileRow> rows = samples.rows;
    const size_t num_rows = rows.size(), first_count = samples.seconds.size() * num_rows;
    for (size_t r = 0; r < num_rows; ++r) {
        std::vector<double> seconds;
        for (const auto count : counts) rows[r].*count = 0;
        for (size_t rank = 0; rank < ranks; ++rank) {
            const double* theirs = all.data() + rank * mine.size();
            for (size_t step = 0; step < samples.seconds.size(); ++step)
                seconds.push_back(theirs[step * num_rows + r]);
            const double* numbers = theirs + first_count + r * (counts.size() + 1);
            for (size_t i = 0; i < counts.size(); ++i) rows[r].*counts[i] += numbers[i] / f64(ranks);
            rows[r].peak_bytes = std::max(rows[r].peak_bytes, numbers[counts.size()]);
        }
        rows[r].seconds = spread_of(std::move(seconds));
        rows[r].seconds.samples = static_cast<int64_t>(samples.seconds.size());  // ranks share their steps
    }
    // parts of layers first, then in order of appearance
    std::vector<std::string> parts = {kMoeLayer, "attention", "dense layer"};
    for (const ProfileRow& row : rows)
        if (std::ranges::find(parts, row.part) == parts.end()) parts.push_back(row.part);
    const auto place = [&](const ProfileRow& row) { return std::ranges::find(parts, row.part); };
    std::ranges::stable_sort(rows, [&](const auto& a, const auto& b) { return place(a) < place(b); });
    for (ProfileRow& row : rows) {
        double part = 0;
        for (const ProfileRow& other : rows) part += other.part == row.part ? other.seconds.median : 0;
        row.share = part > 0 ? row.seconds.median / part : 0;
    }
    return rows;
}

namespace {

// The part of a step that one would improve as a whole.
std::string part_to_improve(const ProfileRow& row) {
    if (row.part == kMoeLayer) {
        if (crosses_ranks(row.part, row.stage)) return "MoE exchange";
        if (row.stage == "norm" || row.stage == "route") return "router and norm";
        return row.stage == "shared expert" ? row.stage : "MoE experts";
    }
    if (row.part != "attention") return row.part;
    if (row.stage == "qkv" || row.stage == "proj") return "attention projections";
    return row.stage == "core attention" ? "attention core" : "attention norm";
}

}  // namespace

std::vector<PartTime> parts_above_ceiling(const std::vector<ProfileRow>& rows) {
    std::vector<PartTime> parts;
    for (const ProfileRow& row : rows) {
        const std::string name = part_to_improve(row);
        auto part = std::ranges::find(parts, name, &PartTime::name);
        if (part == parts.end()) part = parts.insert(part, {.name = name});
        part->seconds += row.seconds.median * row.runs;
        part->ideal_seconds += row.ideal_seconds * row.runs;
    }
    std::ranges::stable_sort(
        parts, [](const PartTime& a, const PartTime& b) { return a.above_ceiling() > b.above_ceiling(); });
    return parts;
}

const ProfileRow* find_stage(const std::vector<ProfileRow>& rows, std::string_view stage,
                             std::string_view direction) {
    const auto found = std::ranges::find_if(rows, [&](const ProfileRow& row) {
        return row.part == kMoeLayer && row.stage == stage && row.direction == direction;
    });
    return found == rows.end() ? nullptr : &*found;
}

LayerSeconds layer_seconds(const StageTimer& timer) {
    LayerSeconds layer;
    const double runs = runs_of(timer.spans(), kMoeLayer);
    for (const StageSpan& span : timer.spans()) {
        if (span.level != StageLevel::part || std::string_view(span.name) != kMoeLayer) continue;
        (std::string_view(span.direction) == "forward" ? layer.forward : layer.backward) +=
            span.seconds / runs;
        layer.clock += span.clock * span.seconds / runs;
    }
    const double seconds = layer.forward + layer.backward;
    if (seconds > 0) layer.clock /= seconds;
    const auto update = std::ranges::find_if(
        timer.spans(), [](const StageSpan& span) { return std::string_view(span.direction) == "update"; });
    if (update != timer.spans().end()) layer.passes = (update->begin - timer.spans().front().begin) / runs;
    return layer;
}

}  // namespace fp8flow::profile
