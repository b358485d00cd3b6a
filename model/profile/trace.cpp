// SPDX-License-Identifier: MIT
// One trace file per rank, for Perfetto and chrome://tracing.
#include "model/profile/profile.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace fp8flow::profile {

std::string chrome_trace(const std::vector<ArmProfile>& arms, int rank) {
    using nlohmann::json;
    json events = json::array();
    const auto metadata = [&](const char* what, int thread, const std::string& name) {
        events.push_back(
            {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}});
    };
    metadata("process_name", 0, "rank " + std::to_string(rank));
    for (size_t a = 0; a < arms.size(); ++a) {
        // a thread for each stream, and for the second of two micro-batches on the main one
        constexpr int kThreads = kNumStreamRoles + 1;
        const auto thread_of = [](const StageSpan& span) {
            return span.role == StreamRole::main && span.micro_batch > 0 ? kNumStreamRoles
                                                                         : static_cast<int>(span.role);
        };
        constexpr const char* kNames[kThreads] = {"", ", side stream", ", wire stream",
                                                  ", the other micro-batch"};
        const int first = static_cast<int>(a) * kThreads;
        for (int thread = 0; thread < kThreads; ++thread)
            if (std::ranges::any_of(arms[a].trace,
                                    [&](const StageSpan& span) { return thread_of(span) == thread; }))
                metadata("thread_name", first + thread, arms[a].name + kNames[thread]);
        // Events of a thread must nest; device clocks round, so a span is cut to its parent, and begins
        // where its previous sibling ended.
        struct Interval {
            double begin, end;
        };
        std::vector<Interval> placed;
        std::vector<double> free_from;  // by span: end of its last child so far
        double top_of[kThreads] = {};   // end of its last span that lies in none
        for (const StageSpan& span : arms[a].trace) {
            double begin = span.begin * 1e6, end = (span.begin + span.seconds) * 1e6;
            double& top = top_of[thread_of(span)];
            const auto parent = to_size(std::max(span.parent, 0));
            if (span.parent >= 0 && thread_of(arms[a].trace[parent]) == thread_of(span)) {
                begin =
                    std::clamp(begin, std::min(free_from[parent], placed[parent].end), placed[parent].end);
                end = std::clamp(end, begin, placed[parent].end);
                free_from[parent] = end;
            } else {
                begin = std::max(begin, top);
                end = std::max(begin, end);
                top = end;
            }
            placed.push_back({begin, end});
            free_from.push_back(begin);
            json args = {{"direction", span.direction}};
            if (span.layer >= 0) args["layer"] = span.layer;
            if (span.wire_bytes > 0) args["wire bytes"] = span.wire_bytes;
            if (span.peak_bytes > 0) args["memory in use"] = span.peak_bytes;
            events.push_back({{"ph", "X"},
                              {"name", span.name},
                              {"cat", span.direction},
                              {"pid", rank},
                              {"tid", first + thread_of(span)},
                              {"ts", begin},
                              {"dur", end - begin},
                              {"args", args}});
        }
    }
    return json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump(1) + "\n";
}

}  // namespace fp8flow::profile
