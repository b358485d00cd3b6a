// SPDX-License-Identifier: MIT
// What `profile` measures: for each recipe the stages of the token's journey with time, bytes, FLOPs and
// share of the measured ceiling, and the whole layer without the stage timer. Read next:
// commands/profile.cpp.
#pragma once

#include "kernels/comm/process_group.h"
#include "kernels/core/stage_timer.h"
#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/measure/machine.h"
#include "model/report/run_report.h"
#include "model/report/table.h"
#include "model/train/trainer.h"

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::profile {

inline constexpr const char* kMoeLayer = "moe layer";

using report::Spread;
using report::spread_of;

// One stage in one direction. Of a layer's parts (MoE layer, dense layer, attention): one layer and
// micro-batch; of all others: one step. Times over steps and ranks; counts are means over ranks.
struct ProfileRow {
    std::string part, stage, direction;
    Spread seconds;
    double bytes = 0, flops = 0;  // the least it must move and compute
    double gemm_flops = 0;        // of them, GEMMs
    double ideal_seconds = 0;     // its calls one by one at the measured ceilings; 0: no ceiling
    double casts = 0, wire_bytes = 0, peak_bytes = 0;
    double wait_seconds = 0;  // of its time: for other ranks (add_waiting)
    double runs = 1;          // of its part in a step
    double share = 0;         // of its part's time, both directions
};

// Measurements of one rank: rows in order of first appearance, the same on every rank, with the counts of the
// last step; and their times.
struct RowSamples {
    struct Call {
        size_t row = 0;
        OpCall call;
        double wire_bytes = 0;
    };
    std::vector<ProfileRow> rows;
    std::vector<std::vector<double>> seconds;  // [step][row]
    std::vector<double> wire_alone;            // [step], RankSeconds::alone
    std::vector<Call> calls;                   // of the last step
    // Each plan, dispatch and combine by itself, in the order of the program, the same on every rank.
    std::vector<size_t> exchange_rows;                  // [call], its row
    std::vector<std::vector<double>> exchange_seconds;  // [step][call]
    std::vector<double> waiting;                        // [step], RankSeconds::waiting
};
// The MoE layer's row; null: it has none.
const ProfileRow* find_stage(const std::vector<ProfileRow>& rows, std::string_view stage,
                             std::string_view direction);
// Adds one resolved step.
void add_step(const StageTimer& timer, RowSamples& samples);
// Separates waiting from wire time. The rank that comes last to a call waits for no other, so the shortest
// time of the call over the ranks that share the experts is its wire time, and what a rank takes longer is
// waiting. Collective.
void add_waiting(ProcessGroup& expert_parallel, RowSamples& samples);
// Bytes that the device counted for a whole step (`sent`), charged to the calls of the exchange by leg, and
// within a leg as `split` says. Does nothing where the exchange reported its bytes call by call.
struct WireSplit {
    double dispatch_forward = 1, dispatch_backward = 1, combine_forward = 1, combine_backward = 1;
};
void charge_wire(const WireBytes& sent, const WireSplit& split, RowSamples& samples);
// Fills ideal_seconds: `ideal` gives the seconds of one call at the measured ceilings.
using IdealSeconds = std::function<double(const OpCall& call, double wire_bytes)>;
void add_ceilings(const IdealSeconds& ideal, RowSamples& samples);
// Merges the rows of all ranks: times over steps and ranks, mean counts, highest memory; shares of each part.
// Collective.
std::vector<ProfileRow> merge_rows(const RowSamples& samples, ProcessGroup& world);
// Plan, dispatch and combine of one MoE layer, both directions.
double wire_seconds(const std::vector<ProfileRow>& rows);
// Seconds of one MoE layer and micro-batch of a resolved step, and the device's clock meanwhile in Hz (0: not
// known). passes: time from the start of the step to the optimizer, divided by the number of MoE layer calls.
// So it counts parallel work once.
struct LayerSeconds {
    double forward = 0, backward = 0, clock = 0, passes = 0;
};
LayerSeconds layer_seconds(const StageTimer& timer);

// One MoE layer and micro-batch as a whole, without marks between stages; of each step the slowest rank.
struct LayerTimes {
    Spread layer, forward, backward, passes;
    Spread clock;   // Hz, meanwhile; of each step the lowest rank; 0: not known
    Spread cycles;  // layer x clock, step by step
    std::vector<double> layer_by_step, clock_by_step;
};

// All ranks that share the experts wait for a slow rank in the stages that cross ranks. The time of its own
// work, in which no rank waits, shows which rank it is. Of one MoE layer and micro-batch, both directions;
// over the steps timed by stage.
struct RankSeconds {
    Spread work;                 // all stages but plan, dispatch and combine
    double wire = 0, alone = 0;  // medians of those, and of them while no stage computes on any stream
    double waiting = 0;          // median of the part of `wire` that waits for other ranks
};
RankSeconds rank_seconds(const RowSamples& samples);
// The rank with most work, and by which share that is more than the median's; absent: one rank.
struct SlowestRank {
    int rank = 0;
    double over_median = 0;
    bool resolved = false;  // beyond the spread of its steps and of the median rank's
};
std::optional<SlowestRank> slowest_of(const std::vector<RankSeconds>& ranks);

struct ArmProfile {
    std::string name, recipe;
    std::string exchange;  // Trainer::exchange_note
    std::vector<ProfileRow> rows;
    LayerTimes whole;
    // The whole step, nothing timed inside it: from end to end, and what the host needs to launch it.
    // Host clock, this rank's; medians, and every step.
    double step_seconds = 0, host_seconds = 0;
    std::vector<double> seconds_by_step;
    // How often the host waited for the device while it launched such a step: the most of all steps and
    // ranks; absent: the host is the device.
    std::optional<int64_t> host_stops;
    int num_hosts = 1;  // of the job
    // Of all ranks' devices, per step; absent: not measured, or a device does not count. Of whole steps, and
    // of the passes: steps that end after the backward pass, back to back.
    std::optional<double> joules_per_step, passes_joules_per_step;
    double passes_step_seconds = 0;  // of such a step, host clock
    double padding_share = 0;        // Trainer::padding_share
    double step_tokens = 0;          // of a step, all ranks
    double tokens = 0;               // of one rank and micro-batch
    double useful_flops = 0;  // of one layer and rank: FLOPs of the model, pads and recomputation left out
    double expert_load = 1, rank_load = 1;  // most rows over the mean, first MoE layer
    WireBytes wire;                         // that rank 0 sent in one step
    double wire_seconds = 0;                // plan, dispatch and combine of one layer, hidden or not
    std::vector<RankSeconds> by_rank;       // of one layer
    double casts = 0;                       // of one layer
    report::MemoryUse memory;               // of rank 0
    int64_t redone = 0;                     // steps of the warm-up and of those timed by stage
    std::vector<StageSpan> trace;           // this rank's last step

    double tokens_per_second() const { return per_second(tokens); }
    double flops_per_second() const { return per_second(useful_flops); }
    double per_second(double what) const { return whole.layer.median > 0 ? what / whole.layer.median : 0; }
    // Of wire_seconds, mean over ranks: while no stage that computes is under way; waiting for other ranks.
    double wire_alone_seconds() const { return of_wire(&RankSeconds::alone); }
    double waiting_seconds() const { return of_wire(&RankSeconds::waiting); }
    std::optional<double> passes_joules_per_token() const {
        return passes_joules_per_step ? std::optional(*passes_joules_per_step / step_tokens) : std::nullopt;
    }
    // The mean of one device while it runs the passes.
    double passes_watts(int64_t ranks) const {
        const double seconds = passes_step_seconds * f64(ranks);
        return seconds > 0 ? passes_joules_per_step.value_or(0) / seconds : 0;
    }
    double step_seconds_per_token(int64_t ranks) const {
        return step_tokens > 0 ? step_seconds * f64(ranks) / step_tokens : 0;
    }

private:
    double of_wire(double RankSeconds::*part) const {
        double parts = 0, wire = 0;
        for (const RankSeconds& rank : by_rank) {
            parts += rank.*part;
            wire += rank.wire;
        }
        return wire > 0 ? wire_seconds * parts / wire : 0;
    }
};

// A part of a step as one would improve it: the attention core, the experts, the head, ...
struct PartTime {
    std::string name;
    double seconds = 0, ideal_seconds = 0;  // of a step
    double above_ceiling() const { return seconds - ideal_seconds; }
};
// All parts, the furthest above its ceiling first. A part without a ceiling counts with its whole time.
std::vector<PartTime> parts_above_ceiling(const std::vector<ProfileRow>& rows);

struct Profile {
    std::vector<ArmProfile> arms;  // speed-ups are over the first
    MachineRates machine;
    int64_t ranks = 1, steps = 0;
    std::string routing;
    std::string model, shape;  // report::run_name, report::model_shape
    Provenance provenance;
    bool ablation = false;  // arms are the flow with one optimisation off
};

// What `profile` prints at its end, at most 30 lines of 120 columns: layer times and speed-ups, the largest
// stages of the arm with this recipe, what to change next. configs: by arm.
std::string answer_text(const Profile& profile, const std::vector<Config>& configs, std::string_view recipe);
// What its log has as well.
std::string arm_table(const ArmProfile& arm);                   // every stage of one recipe
std::string side_by_side_table(const Profile& profile);         // milliseconds by stage, recipes as columns
std::string numbers_table(const nlohmann::json& profile_json);  // of a recipe, recipes as columns
std::string ceiling_text(const ProfileRow& row);                // "45 %", or "-"
std::string slowest_text(const SlowestRank& slowest);           // "3, +4.2 %"
std::string cycles_text(const Spread& cycles);                  // millions, or "-"
std::string energy_text(const ArmProfile& arm);                 // of the passes, mJ per token, or "-"
nlohmann::json profile_json(const Profile& profile, const Config& config);
std::string profile_page(const Profile& profile, const Config& config);  // report.html
// "1.42x", the time of the first arm's layer over that of this one; "1.00x" for the first; or "not resolved"
std::string speed_up_text(const Profile& profile, const ArmProfile& arm, std::string_view unit = "x");
// Two results of `profile`, stage by stage (`profile --compare OLD NEW`), of two files or run folders: the
// recipes that both have, by name, and where each has one alone, those two. Throws Error(data) where one is
// none of profile's, or where they share no recipe.
struct ComparedProfiles {
    std::string text, page;  // page: HTML
};
ComparedProfiles compare_profiles(const std::string& old_path, const std::string& new_path,
                                  const Provenance& provenance);
// Complete events in Chrome's trace format, for Perfetto: one process per rank, one thread per recipe.
std::string chrome_trace(const std::vector<ArmProfile>& arms, int rank);

}  // namespace fp8flow::profile
