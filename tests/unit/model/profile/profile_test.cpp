// SPDX-License-Identifier: MIT
// From spans to rows, tables, trace and page, on a step made up by hand.
#include "model/profile/profile.h"

#include "tests/support/files.h"
#include "tests/support/report_page.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <sstream>

namespace fp8flow {

using namespace profile;

namespace {

using nlohmann::json;

class CountingTimeline final : public Timeline {
public:
    int64_t mark(Stream) override { return marks_++; }
    double seconds_between(int64_t a, int64_t b) override { return static_cast<double>(b - a); }
    double clock_between(int64_t a, int64_t b) override { return static_cast<double>(b - a); }
    void reset() override { marks_ = 0; }

private:
    int64_t marks_ = 0;
};

// Marks at the times given, in the order in which the host leaves them.
class ScriptedTimeline final : public Timeline {
public:
    explicit ScriptedTimeline(std::vector<double> times) : times_(std::move(times)) {}
    int64_t mark(Stream) override { return marks_++; }
    double seconds_between(int64_t a, int64_t b) override { return at(b) - at(a); }
    double clock_between(int64_t, int64_t) override { return 0; }
    void reset() override { marks_ = 0; }

private:
    double at(int64_t mark) const { return times_.at(static_cast<size_t>(mark)); }
    std::vector<double> times_;
    int64_t marks_ = 0;
};

StageTimer::Scope scope(StageTimer& timer, StageLevel level, const char* name,
                        StreamRole role = StreamRole::main) {
    return {timer, level, name, {.role = role}};
}

// Two layers, forward and backward; each: 7 seconds forward (fc1 3, its cast 1), 3 backward; then the
// optimizer.
void play_step(StageTimer& timer) {
    timer.reset();
    for (const char* direction : {"forward", "backward"}) {
        timer.set_direction(direction);
        for (int layer = 0; layer < 2; ++layer) {
            timer.set_layer(layer);
            auto part = scope(timer, StageLevel::part, kMoeLayer);
            auto fc1 = scope(timer, StageLevel::stage, "fc1");
            timer.op_called(
                {.op = "grouped_gemm", .cost = {.bytes = 10, .flops = 100, .unit = Unit::fp8_mma}});
            timer.op_called({.op = "add", .cost = {.bytes = 6, .flops = 3}});
            if (std::string(direction) == "backward") continue;
            auto cast = scope(timer, StageLevel::stage, "cast");
            timer.op_called({.op = "quantize_rows", .cost = {.bytes = 4}, .cast = true});
            auto dispatch = scope(timer, StageLevel::stage, "dispatch");
            timer.exchange_began({.op = "dispatch", .cost = {.bytes = 20}});
            timer.exchange_ended(8);
        }
    }
    timer.set_direction("update");
    timer.set_layer(-1);
    auto optimizer = scope(timer, StageLevel::part, "optimizer");
    timer.op_called({.op = "adamw", .cost = {.bytes = 1000}});
}

struct Played {
    StageTimer timer;
    RowSamples samples;

    explicit Played(int steps) {
        timer.enable(std::make_unique<CountingTimeline>(), TimerDetail::stages);
        for (int i = 0; i < steps; ++i) {
            play_step(timer);
            timer.resolve();
            add_step(timer, samples);
        }
        timer.disable();
    }
};

const ProfileRow* find(const std::vector<ProfileRow>& rows, const std::string& stage,
                       const std::string& direction) {
    for (const ProfileRow& row : rows)
        if (row.stage == stage && row.direction == direction) return &row;
    return nullptr;
}

TEST(Profile, RowsCountOneLayerAndEveryMomentOnce) {
    const Played played(1);
    const auto& samples = played.samples;
    double layer = 0;
    for (size_t r = 0; r < samples.rows.size(); ++r)
        if (samples.rows[r].part == kMoeLayer) layer += samples.seconds[0][r];
    const LayerSeconds seconds = layer_seconds(played.timer);
    EXPECT_EQ(seconds.forward, 7);
    EXPECT_EQ(seconds.backward, 3);
    EXPECT_DOUBLE_EQ(seconds.clock, (7 * 7 + 3 * 3) / 10.0);  // by time
    EXPECT_EQ(layer, 10);

    const ProfileRow* fc1 = find(samples.rows, "fc1", "forward");
    ASSERT_NE(fc1, nullptr);
    EXPECT_EQ(fc1->bytes, 16 + 20);  // the exchange lies in fc1 here
    EXPECT_EQ(fc1->flops, 103);
    EXPECT_EQ(fc1->gemm_flops, 100);
    EXPECT_EQ(fc1->wire_bytes, 8);
    EXPECT_EQ(fc1->casts, 0);
    const ProfileRow* cast = find(samples.rows, "cast", "forward");
    ASSERT_NE(cast, nullptr);
    EXPECT_EQ(cast->bytes, 4);
    EXPECT_EQ(cast->casts, 1);
    const ProfileRow* optimizer = find(samples.rows, "optimizer", "update");
    ASSERT_NE(optimizer, nullptr);
    EXPECT_EQ(optimizer->bytes, 1000);  // of a step, not of a layer
    EXPECT_EQ(find(samples.rows, "cast", "backward"), nullptr);
}

TEST(Profile, CeilingsAddUpCallByCall) {
    Played played(2);
    add_ceilings(
        [](const OpCall& call, double wire) { return std::max(call.cost.bytes, call.cost.flops / 2) + wire; },
        played.samples);
    EXPECT_EQ(find(played.samples.rows, "fc1", "forward")->ideal_seconds, 50 + 6 + 20 + 8);
    EXPECT_EQ(find(played.samples.rows, "cast", "forward")->ideal_seconds, 4);
}

// One of two layers, as an exchange between GPUs leaves it: no bytes reported but those of the gradients.
RowSamples untold_exchange() {
    RowSamples samples;
    const auto add = [&](const char* part, const char* op, const char* direction, double runs,
                         double wire_bytes) {
        ProfileRow row;
        row.part = part;
        row.stage = op;
        row.direction = direction;
        row.wire_bytes = wire_bytes / runs;
        row.runs = runs;
        samples.rows.push_back(row);
        for (int call = 0; call < static_cast<int>(runs); ++call)
            samples.calls.push_back(
                {samples.rows.size() - 1, {.op = op, .cost = {.bytes = 1}}, wire_bytes / runs});
    };
    add(kMoeLayer, "gather_routing", "forward", 2, 0);
    add(kMoeLayer, "dispatch", "forward", 2, 0);
    add(kMoeLayer, "grouped_gemm", "forward", 2, 0);
    add(kMoeLayer, "combine", "forward", 2, 0);
    add(kMoeLayer, "dispatch", "backward", 2, 0);
    add(kMoeLayer, "combine", "backward", 2, 0);
    add("gradient reduction", "all_reduce", "update", 1, 5000);
    return samples;
}

TEST(Profile, WireBytesOfAStepAreChargedToTheCallsOfTheExchange) {
    const WireBytes sent{.routing = 8, .dispatch = 300, .combine = 500};
    const WireSplit split{
        .dispatch_forward = 1, .dispatch_backward = 2, .combine_forward = 4, .combine_backward = 1};
    RowSamples samples = untold_exchange();
    charge_wire(sent, split, samples);
    const std::vector<double> of_layer = {4, 50, 0, 200, 100, 50, 5000};
    for (size_t r = 0; r < of_layer.size(); ++r) EXPECT_EQ(samples.rows[r].wire_bytes, of_layer[r]) << r;
    for (const RowSamples::Call& call : samples.calls) EXPECT_EQ(call.wire_bytes, of_layer[call.row]);

    charge_wire(sent, split, samples);  // reported by now
    for (size_t r = 0; r < of_layer.size(); ++r) EXPECT_EQ(samples.rows[r].wire_bytes, of_layer[r]) << r;
}

TEST(Profile, MergedRowsTakeTimesOverStepsAndRanksAndMeanCounts) {
    run_thread_ranks(2, 20, [&](ProcessGroup& world) {
        Played played(3);
        for (auto& step : played.samples.seconds)
            for (double& seconds : step) seconds *= world.rank() + 1;
        for (ProfileRow& row : played.samples.rows) row.bytes *= 2 * world.rank() + 1;
        const std::vector<ProfileRow> rows = merge_rows(played.samples, world);
        EXPECT_EQ(rows.front().part, kMoeLayer);
        const ProfileRow* cast = find(rows, "cast", "forward");
        ASSERT_NE(cast, nullptr);
        const ProfileRow* alone = find(played.samples.rows, "cast", "forward");
        EXPECT_EQ(cast->bytes, 4 * (1 + 3) / 2.0);
        EXPECT_EQ(cast->seconds.max, 2 * cast->seconds.min);
        EXPECT_EQ(cast->seconds.median, 1.5 * cast->seconds.min);
        EXPECT_EQ(alone->casts, cast->casts);
        double share = 0;
        for (const ProfileRow& row : rows)
            if (row.part == kMoeLayer) share += row.share;
        EXPECT_NEAR(share, 1, 1e-12);
    });
}

TEST(Profile, OwnWorkLeavesOutStagesThatCrossRanks) {
    Played played(3);
    RowSamples& samples = played.samples;
    EXPECT_DOUBLE_EQ(rank_seconds(samples).work.median, 10);  // of one layer, both directions
    EXPECT_EQ(rank_seconds(samples).wire, 0);
    for (size_t r = 0; r < samples.rows.size(); ++r) {
        if (samples.rows[r].stage != "cast") continue;
        samples.rows[r].stage = "dispatch";
        for (auto& step : samples.seconds) step[r] += 5;  // waits for another rank
    }
    EXPECT_DOUBLE_EQ(rank_seconds(samples).work.median, 8);  // the cast took 2
    EXPECT_DOUBLE_EQ(rank_seconds(samples).wire, 7);
    EXPECT_FALSE(slowest_of({rank_seconds(samples)}).has_value());
}

// Two micro-batches; the times of marks are of the device, so that streams lie next to each other.
TEST(Profile, WireIsAloneWhereNoLaneComputes) {
    StageTimer timer;
    timer.enable(std::make_unique<ScriptedTimeline>(std::vector<double>{
                     0,  1,  5,  2,  3,  6,  10, 6, 8, 9, 12, 12,  // alone from 1 to 2, 3 to 5, 6 to 9
                     12, 13, 17, 13, 14, 15, 17, 18}),             // from 13 to 14 and 15 to 17
                 TimerDetail::stages);
    const auto play = [&](StageLevel level, const char* name, StreamRole role) {
        scope(timer, level, name, role);
    };
    timer.set_direction("forward");
    {
        auto part = scope(timer, StageLevel::part, kMoeLayer);
        play(StageLevel::stage, "dispatch", StreamRole::main);
        play(StageLevel::stage, "fc1", StreamRole::side);
        play(StageLevel::stage, "combine", StreamRole::main);
        play(StageLevel::part, "gradient reduction", StreamRole::wire);
        play(StageLevel::stage, "fc1 wgrad", StreamRole::side);
    }
    {
        auto part = scope(timer, StageLevel::part, kMoeLayer);
        play(StageLevel::stage, "dispatch", StreamRole::main);
        auto shared =
            scope(timer, StageLevel::stage, "shared expert", StreamRole::side);  // nothing between its stages
        play(StageLevel::stage, "fc1", StreamRole::side);
    }
    timer.resolve();
    RowSamples samples;
    add_step(timer, samples);
    EXPECT_DOUBLE_EQ(samples.wire_alone.at(0), (1 + 2 + 3 + 1 + 2) / 2.0);
    EXPECT_DOUBLE_EQ(rank_seconds(samples).alone, 4.5);
    timer.disable();
}

// Two layers, one dispatch each, with 2 seconds on the wire. Rank 1 comes 3 seconds late to the first, rank 0
// one second late to the second.
TEST(Profile, WaitingIsWhatACallTakesBeyondTheRankThatComesLast) {
    run_thread_ranks(2, 20, [&](ProcessGroup& world) {
        const std::vector<double> first = {0, 0, 5, 5, 5, 6, 8, 8}, second = {0, 3, 5, 5, 5, 5, 8, 8};
        StageTimer timer;
        timer.enable(std::make_unique<ScriptedTimeline>(world.rank() == 0 ? first : second),
                     TimerDetail::stages);
        timer.set_direction("forward");
        for (int layer = 0; layer < 2; ++layer) {
            auto part = scope(timer, StageLevel::part, kMoeLayer);
            auto dispatch = scope(timer, StageLevel::stage, "dispatch");
        }
        timer.resolve();
        RowSamples samples;
        add_step(timer, samples);
        timer.disable();
        add_waiting(world, samples);
        EXPECT_DOUBLE_EQ(rank_seconds(samples).wire, world.rank() == 0 ? 3.5 : 2.5);
        EXPECT_DOUBLE_EQ(rank_seconds(samples).waiting, world.rank() == 0 ? 1.5 : 0.5);
        EXPECT_DOUBLE_EQ(find(merge_rows(samples, world), "dispatch", "forward")->wait_seconds, 1);
    });
}

// Two layers and micro-batches of each part of a layer, one of all else in a step.
std::vector<ProfileRow> whole_model() {
    const auto row = [](const char* part, const char* stage, double seconds, double ideal, double runs) {
        ProfileRow row;
        row.part = part;
        row.stage = stage;
        row.seconds = {seconds, seconds, seconds, 5};
        row.ideal_seconds = ideal;
        row.runs = runs;
        return row;
    };
    return {row(kMoeLayer, "fc1", 4, 3.5, 4),      row(kMoeLayer, "transpose", 1, 0.5, 4),
            row(kMoeLayer, "dispatch", 1, 0.5, 4), row("attention", "core attention", 3, 1, 4),
            row("attention", "qkv", 1, 0.75, 4),   row("attention", "proj", 1, 0.75, 4),
            row("head", "head", 9, 8, 1),          row("optimizer", "optimizer", 20, 17, 1)};
}

TEST(Profile, PartsOfAStepAreSortedByTheirTimeAboveTheCeiling) {
    std::string sorted;
    for (const PartTime& part : parts_above_ceiling(whole_model()))
        sorted += fmt::format("{} {} of {}; ", part.name, part.above_ceiling(), part.seconds);
    EXPECT_EQ(sorted,
              "attention core 8 of 12; MoE experts 4 of 20; optimizer 3 of 20; MoE exchange 2 of 4; "
              "attention projections 2 of 8; head 1 of 9; ");
}

ArmProfile arm_of(const std::string& name) {
    const Played played(1);
    ArmProfile arm;
    arm.name = arm.recipe = name;
    arm.rows = played.samples.rows;
    for (size_t r = 0; r < arm.rows.size(); ++r) {
        const double seconds = played.samples.seconds[0][r];
        arm.rows[r].seconds = {seconds, seconds, seconds, 5};
    }
    arm.whole.layer = {10, 9, 11, 5};
    arm.tokens = 100;
    arm.useful_flops = 5000;
    arm.trace = played.timer.spans();
    return arm;
}

TEST(Profile, TraceEventsNestEvenWhereClocksRound) {
    ArmProfile arm = arm_of("fp8 <flow>");
    for (StageSpan& span : arm.trace)
        if (span.parent >= 0) {  // 3 microseconds outside of what they lie in
            span.begin -= 3e-6;
            span.seconds += 6e-6;
        }
    const json trace = json::parse(chrome_trace({arm, arm}, 5));
    std::vector<double> ends;
    double last = 0;
    int events = 0;
    for (const json& event : trace.at("traceEvents")) {
        EXPECT_EQ(event.at("pid"), 5);
        if (event.at("ph") != "X" || event.at("tid") != kNumStreamRoles + 1) continue;  // the second arm
        const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
        EXPECT_GE(begin, last);
        last = begin;
        while (!ends.empty() && begin >= ends.back()) ends.pop_back();
        if (!ends.empty()) {
            EXPECT_LE(end, ends.back() + 1e-9 * end);
        }
        ends.push_back(end);
        ++events;
    }
    EXPECT_EQ(events, static_cast<int>(arm.trace.size()));
}

// Each stream has a thread of its own, and so has the second of two micro-batches on the main stream. Their
// spans may lie across those of others.
TEST(Profile, TraceHasAThreadForEachStream) {
    ArmProfile arm = arm_of("flow");
    const StageSpan span{.name = "fc1", .direction = "forward", .begin = 1, .seconds = 2};
    arm.trace.assign(4, span);
    arm.trace[1].role = StreamRole::side;
    arm.trace[2].role = StreamRole::wire;
    arm.trace[3].micro_batch = 1;
    const json trace = json::parse(chrome_trace({arm}, 0));
    std::map<int, std::string> names;
    std::set<int> threads;
    for (const json& event : trace.at("traceEvents")) {
        const int thread = event.at("tid");
        if (event.at("name") == "thread_name") names[thread] = event.at("args").at("name");
        if (event.at("ph") != "X") continue;
        threads.insert(thread);
        EXPECT_DOUBLE_EQ(event.at("ts").get<double>(), 1e6);
        EXPECT_DOUBLE_EQ(event.at("dur").get<double>(), 2e6);
    }
    EXPECT_EQ(threads, (std::set<int>{0, 1, 2, 3}));
    EXPECT_EQ(names, (std::map<int, std::string>{{0, "flow"},
                                                 {1, "flow, side stream"},
                                                 {2, "flow, wire stream"},
                                                 {3, "flow, the other micro-batch"}}));
}

TEST(Profile, TablesJsonAndPageHoldTheNumbers) {
    Profile profile;
    profile.arms = {arm_of("bf16"), arm_of("fp8_flow")};
    profile.arms[1].whole.layer = {5, 5, 5, 5};
    profile.arms[1].whole.passes = {6, 6, 6, 5};
    profile.arms[1].num_hosts = 2;
    profile.arms[1].host_stops = 0;
    profile.arms[1].wire = {.routing = 1, .dispatch = 2, .combine = 4, .between_hosts = 3};
    profile.arms[1].wire_seconds = 3;
    profile.arms[1].by_rank = {{.work = {2, 2, 2.5, 5}, .wire = 3, .alone = 1.5, .waiting = 1},
                               {.work = {3, 3, 3.5, 5}, .wire = 2, .alone = 1},
                               {.work = {2, 2, 2, 5}, .wire = 4, .alone = 2, .waiting = 2}};
    profile.arms[1].whole.cycles = {7.5e9, 7.5e9, 7.5e9, 5};
    profile.arms[1].padding_share = 0.125;
    profile.arms[1].memory = {.saved_sums = {.reserved = 21, .used = 22},
                              .workspace = {.reserved = 23, .used = 24},
                              .capacity = {.layer = 25},
                              .most_wanted = {.layer = 26},
                              .activations = 27};
    profile.arms[1].redone = 28;
    for (ArmProfile& arm : profile.arms) {
        arm.step_tokens = 400;
        arm.step_seconds = 2;
        arm.passes_joules_per_step = &arm == &profile.arms[0] ? 200 : 120;
        arm.passes_step_seconds = 0.25;
    }
    profile.ranks = 3;
    profile.machine = {.device = "a <machine>", .bytes_per_second = 1e9, .bf16_flops = 1000};
    profile.routing = "balanced";
    expect_contains(side_by_side_table(profile), "fc1");
    expect_contains(arm_table(profile.arms[0]), "optimizer");
    const json result = profile_json(profile, Config{});
    const std::string table = numbers_table(result);
    for (const char* part : {"speed-up  ", "layer seconds median", "5000.0 ms", "wire bytes between hosts"})
        expect_contains(table, part);
    EXPECT_EQ(result.at("recipes").size(), 2u);
    EXPECT_EQ(result.at("recipes")[1].at("speed-up"), 2.0);
    EXPECT_EQ(result.at("recipes")[0].at("exposed wire seconds"), nullptr);
    const json &one = result.at("recipes")[0], &two = result.at("recipes")[1];
    EXPECT_EQ(two.at("wire bytes").at("between hosts"), 3.0);
    EXPECT_EQ(two.at("wire bytes").at("inside hosts"), 4.0);
    EXPECT_EQ(two.at("slowest rank"), (json{{"rank", 1}, {"over median", 0.5}, {"resolved", true}}));
    EXPECT_EQ(two.at("work seconds by rank"), (json{2.0, 3.0, 2.0}));
    EXPECT_EQ(two.at("wire seconds alone"), 1.5);
    EXPECT_EQ(two.at("wire seconds by rank"), (json{3.0, 2.0, 4.0}));
    EXPECT_EQ(two.at("wait seconds"), 1.0);
    EXPECT_EQ(two.at("wait seconds by rank"), (json{1.0, 0.0, 2.0}));
    EXPECT_EQ(two.at("layer cycles").at("median"), 7.5e9);
    EXPECT_EQ(two.at("padding share"), 0.125);
    int64_t value = 21;
    for (const char* key : {"saved bytes reserved", "saved bytes used", "workspace bytes reserved",
                            "workspace bytes used", "routed rows of a layer reserved",
                            "routed rows of a layer used", "activation bytes", "steps redone"})
        EXPECT_EQ(two.at(key), value++) << key;
    EXPECT_EQ(two.at("parts above ceiling").size(), 2u);
    EXPECT_EQ(two.at("passes joules per token"), 0.3);
    EXPECT_EQ(two.at("passes joules over first"), 0.6);
    EXPECT_EQ(two.at("passes watts per gpu"), 160.0);
    EXPECT_EQ(two.at("step seconds per token of a gpu"), 0.015);
    EXPECT_TRUE(two.at("joules per token").is_null()) << "whole steps were not measured";
    for (const char* text : {"7.500 G", "12.5 %", "300 mJ", "1000.0 ms"})
        EXPECT_NE(table.find(text), std::string::npos) << text << "\n" << table;
    EXPECT_TRUE(one.at("slowest rank").is_null());
    EXPECT_TRUE(one.at("host stops per step").is_null());
    EXPECT_EQ(two.at("host stops per step"), 0);
    EXPECT_FALSE(one.at("wire bytes").contains("between hosts"));
    EXPECT_EQ(result.at("recipes")[0].at("flops per second per gpu"), 500.0);
    const json page = expect_report_page(profile_page(profile, Config{}));
    EXPECT_TRUE(page.at("title").get<std::string>().ends_with("fp8_flow 2.00 x as fast as bf16"));
    EXPECT_EQ(page.at("profile").at("recipes"), result.at("recipes"));
    EXPECT_EQ(two.at("speed-up resolved"), true);
}

// Twelve arms: the answer still fits a screen, and every setting it proposes is one that the run accepts.
TEST(Profile, TheAnswerFitsAScreenAndNamesSettings) {
    Profile profile;
    profile.routing = "balanced";
    profile.ranks = 2;
    profile.provenance.gpus = 2;
    const Config config =
        load_config(FP8FLOW_SOURCE_DIR "/configs/test.yaml", {"parallel.expert_model_parallel_size=2"}, 2);
    std::vector<Config> configs;
    for (int i = 0; i < 12; ++i) {
        profile.arms.push_back(arm_of(i == 1 ? "fp8_flow" : "an arm with a long name " + std::to_string(i)));
        configs.push_back(with_recipe(config, Recipe::fp8_flow));
    }
    ArmProfile& flow = profile.arms[1];
    flow.whole.layer = {5, 4, 12, 5};
    flow.wire_seconds = 2;
    flow.by_rank = {{.wire = 2, .alone = 1}};
    flow.step_seconds = flow.host_seconds = 12;
    flow.host_stops = 4;
    const auto answer = [&] {
        const std::string text = answer_text(profile, configs, "fp8_flow");
        EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 30) << text;
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120u) << line;
        return text;
    };
    flow.padding_share = 0.043;
    flow.whole.clock = {1.5e9, 1.5e9, 1.5e9, 5};
    flow.whole.cycles = {7.5e9, 7.5e9, 7.5e9, 5};
    flow.by_rank[0].waiting = 0.5;
    flow.passes_joules_per_step = 3.05;
    flow.step_tokens = 200;
    for (const ProfileRow& row : whole_model())
        if (row.part != kMoeLayer) flow.rows.push_back(row);
    const std::string text = answer();
    expect_contains(
        text, "\n    MoE experts 20000.0 of 20000.0, attention core 8000.0 of 12000.0, optimizer 4000.0");
    expect_contains(text,
                    "\n  padding: 4.3 % of the GEMMs' rows; plan, dispatch, combine: 2000.0 ms, 500.0 of it "
                    "waiting for other ranks\n");
    for (const char* part : {"M cycles", "7500", "mJ/token", "15.25"}) expect_contains(text, part);
    for (const char* part : {"largest stages of fp8_flow", "not resolved: two medians", "5 more: profile.log",
                             "--set schedule.cuda_graph_impl=full_iteration", "12000.0 ms",
                             "--set schedule.overlap_moe_expert_parallel_comm=true",
                             "takes 1000.0 ms (10 %) per layer with no compute in parallel"})
        expect_contains(text, part);

    for (Config& one : configs) one.schedule.overlap_moe_expert_parallel_comm = true;
    flow.whole.layer = {5, 4, 6, 5};
    const std::string other = answer();
    EXPECT_EQ(other.find("schedule.overlap_moe"), std::string::npos) << "it is on already\n" << other;

    profile.provenance.gpus = 0;
    flow.whole.layer.samples = 2;
    const std::string few = answer();
    expect_contains(few, "--steps 10");
    EXPECT_EQ(few.find("cuda_graph"), std::string::npos);
}

// A median of 80 % spread, and a difference below nothing: neither is printed, drawn or put on the page.
TEST(Profile, WhatIsWithinTheSpreadIsNotResolved) {
    Profile profile;
    profile.arms = {arm_of("bf16"), arm_of("fp8_flow")};
    ArmProfile& flow = profile.arms[1];
    flow.whole.layer = {4, 3, 10, 5};  // 2.50 x, and 7 wide
    flow.whole.passes = {5, 4, 6, 5};
    flow.by_rank = {{.work = {2, 1, 3, 5}}, {.work = {3, 2, 4, 5}}, {.work = {2, 1, 3, 5}}};
    const std::string page = profile_page(profile, Config{});
    const json result = profile_json(profile, Config{}), &two = result.at("recipes")[1];
    for (const std::string& shown : {numbers_table(result), page}) {
        expect_contains(shown, "not resolved");
        for (const char* noise : {"2.50x", "2.50 x", "-60.0 %", "+50.0 %"})
            EXPECT_EQ(shown.find(noise), std::string::npos) << noise << "\n" << shown;
    }
    expect_contains(page, "none faster than bf16 beyond the spread");
    EXPECT_EQ(two.at("speed-up"), 2.5) << "the numbers stay in the file";
    EXPECT_EQ(two.at("speed-up resolved"), false);
    EXPECT_EQ(two.at("slowest rank").at("resolved"), false);
    flow.whole.layer = {4, 4, 4, 2};
    expect_contains(numbers_table(profile_json(profile, Config{})), "not resolved");  // two steps: no spread
}

}  // namespace
}  // namespace fp8flow
