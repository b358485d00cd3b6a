// SPDX-License-Identifier: MIT
// `fp8flow profile`: every recipe through the same steps. Prints the answer; the tables go to profile.log.
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/config/fields.h"
#include "model/predict/require_fit.h"
#include "model/profile/run.h"
#include "model/report/page/page.h"
#include "model/report/progress.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <optional>

namespace fp8flow {

using namespace data;
using namespace validate;
using namespace report;
using namespace profile;

namespace {

constexpr int64_t kProgressLines = 4;  // printed; the log has one per phase

class ProfileRun {
public:
    ProfileRun(const Options& options, ProcessGroup& world)
        : options_(options),
          world_(world),
          asked_(load_config(options.config_path, options.overrides, world.size(), options.hf_config)),
          config_(profiled_config(asked_, options.measured_steps)),
          backend_(choose_backend(options.backend, options.placement, world)),
          joined_(predict::decide_joined(config_, backend_, world)),
          arms_(recipe_arms(config_, config_.profile.profile_recipes, options.ablation, world.size())),
          steps_(profiled_steps(config_.profile) * std::ssize(arms_)),
          eta_(steps_),
          log_(world.rank(), Detail::quiet) {
        profile_.provenance = make_provenance(options.command, backend_, world.size());
        profile_.ablation = options.ablation != Ablation::none;
        profile_.model = run_name(options.config_path, options.hf_config);
        profile_.shape = model_shape(config_);
        for (const Arm& arm : arms_) check_config(arm.config, world.size());
        run_folder_.emplace(run_folder_of(options, config_.output.out), world);
        config_.output.out = run_folder_->name();
        if (!run_folder_->note().empty()) log_.line(run_folder_->note());
        print(fmt::format("{}: {}; {}, expert parallel {}\n{}", profile_.model, profile_.shape,
                          counted(world.size(), "rank"), config_.parallel.expert_model_parallel_size,
                          backend_.note));
        report_start(log_, config_, backend_, world.size());
        warn_of_unread(asked_,
                       {"checkpoint.load", "checkpoint.pretrained_checkpoint", "output.record_routing",
                        "training.on_divergence"},
                       log_);
        if (asked_.profile.routing != ProfileRouting::data && !asked_.data.routing_path.empty())
            log_.line("warning: data.routing_path = {} has no effect: profile.routing is not data",
                      asked_.data.routing_path);
        if (!joined_.empty()) log_.line(joined_);
        predict::require_fit(log_, configs_of(arms_), backend_, world, options.placement.ranks_on_host,
                             options.where_short);
        data_ = open_data(config_);
        run_folder_->keep();
        if (!run_folder_->is_first_rank()) return;
        folder_ = &run_folder_->folder();
        log_.open(*folder_, "profile.log");
        folder_->write_atomic("config.yaml", run_config_yaml(config_, profile_.provenance));
    }

    int run() {
        const ProfileSpec& spec = config_.profile;
        profile_.ranks = world_.size();
        profile_.steps = spec.profile_step_end - spec.profile_step_start;
        profile_.routing = field_named("profile.routing").get(config_);
        log_.line("routing: {}; {} to warm up, {} timed stage by stage, {} timed as a whole, for each recipe",
                  profile_.routing, counted(spec.profile_step_start, "step"), profile_.steps, profile_.steps);
        world_.set_activity("measuring the machine");
        MachineCeilings ceilings(backend_, world_, MachineCeilings::usual_options(backend_));
        profile_.machine = ceilings.rates();
        report_machine();
        for (const Arm& arm : arms_) {
            profile_.arms.push_back(profile_arm(
                arm, world_, backend_, data_, ceilings, [&] { return energy_joules(backend_); },
                [&](const char* phase, int64_t step, int64_t of, double seconds) {
                    eta_.step_done(seconds);
                    progress(arm.name, phase, step, of);
                }));
            log_.line(
                "\n{}: one layer and micro-batch (MoE layer, attention, dense layer), otherwise one step; "
                "times over {} and {}",
                arm.name, counted(profile_.steps, "step"), counted(world_.size(), "rank"));
            const ArmProfile& done = profile_.arms.back();
            if (!done.exchange.empty()) log_.line(done.exchange);
            log_.line(arm_table(done));
        }
        write_traces();
        if (world_.rank() == 0) report();
        world_.barrier();
        return 0;
    }

private:
    void report_machine() {
        const MachineRates& m = profile_.machine;
        log_.line("ceilings of this machine ({}): copies {}B/s, GEMMs {}FLOP/s BF16, {}FLOP/s FP8{}",
                  m.device, format_si(m.bytes_per_second), format_si(m.bf16_flops), format_si(m.fp8_flops),
                  backend_.kind == BackendKind::hopper ? "" : " (small ones: a rough guide)");
        if (m.peer_load > 0)
            log_.line("  between one GPU and all others, all active: loads {}B/s, stores {}B/s",
                      format_si(m.peer_load), format_si(m.peer_store));
        else if (!m.no_peers.empty())
            log_.line("  between ranks: not measured ({}); the wire counts in no ceiling", m.no_peers);
    }

    // Shown on the terminal too, unless the user wants it quiet; log_.line is for the log alone.
    void print(std::string_view text) {
        if (options_.detail == Detail::quiet)
            log_.line(text);
        else
            log_.result(text);
    }

    void progress(const std::string& arm, const char* phase, int64_t step, int64_t of) {
        run_folder_->check_if_unsure();
        const bool due = ++steps_done_ * kProgressLines >= (progress_lines_ + 1) * steps_;
        if (step != of && !due) return;
        const std::string text =
            fmt::format(" {:<14} | {:<7} {:>{}}/{} | ETA {}", arm, phase, step, std::to_string(of).size(), of,
                        format_clock(eta_.seconds_left().value_or(0)));
        if (!due) return log_.line(text);
        ++progress_lines_;
        print(text);
    }

    // Rank 0 writes for all: only its host is sure to have the folder.
    void write_traces() {
        run_folder_->check();
        const std::string own = chrome_trace(profile_.arms, world_.rank());
        const auto ranks = to_size(world_.size());
        std::vector<int64_t> sizes(ranks);
        const int64_t size = std::ssize(own);
        world_.all_gather(&size, sizeof size, sizes.data());
        std::vector<ProcessGroup::Part> sent(ranks), received(ranks);
        sent[0] = {0, own.size()};
        size_t end = 0;
        for (size_t r = 0; r < ranks && world_.rank() == 0; ++r) {
            received[r] = {end, to_size(sizes[r])};
            end += received[r].bytes;
        }
        std::string all(end, '\0');
        world_.all_to_all(own.data(), sent, all.data(), received);
        for (size_t r = 0; r < ranks && folder_ != nullptr; ++r)
            folder_->write_atomic(fmt::format("trace.rank{}.json", r),
                                  std::string_view(all).substr(received[r].offset, received[r].bytes));
    }

    void report() {
        const nlohmann::json result = profile_json(profile_, config_);
        folder_->write_json("profile.json", result);
        folder_->write_atomic(kPageFile, profile_page(profile_, config_));
        log_.line("recipes side by side, stage by stage (median); end to end: without the stage timer");
        log_.line(side_by_side_table(profile_));
        log_.line(numbers_table(result));
        if (profile_.ablation) log_.line("  no noise floor: no arm runs twice");
        log_.result("\n" + answer_text(profile_, configs_of(arms_), recipe_name(config_.precision)));
        log_.result(
            "  files  {}/: report.html; every number: profile.log, profile.json; trace.rank*.json "
            "(ui.perfetto.dev)",
            folder_->path());
        const std::string config = config_of_run(options_, config_.output.out);
        log_.result(next_text(
            {{"predict other sizes", command_line("plan", with_plugins({config}, options_.plugins), 1)}}));
    }

    const Options& options_;
    ProcessGroup& world_;
    Config asked_, config_;  // as the files and --set have it; as it is profiled
    BackendChoice backend_;
    std::string joined_;  // what was decided of micro-batches
    std::vector<Arm> arms_;
    int64_t steps_, steps_done_ = 0, progress_lines_ = 0;
    EtaEstimator eta_;
    std::optional<RunFolder> run_folder_;
    const OutputFolder* folder_ = nullptr;  // of the first rank
    std::shared_ptr<const TokenSource> data_;
    RunLog log_;
    Profile profile_;
};

}  // namespace

int run_compare(const std::string& before, const std::string& after, const std::string& command,
                const std::string& out) {
    const auto [text, page] = compare_profiles(before, after, make_provenance(command, {}, 1));
    fmt::print("{}", text);
    if (out.empty()) return 0;
    const OutputFolder folder(out);
    folder.write_atomic("compare.html", page);
    fmt::print("written: {}\n", folder.path_of("compare.html"));
    return 0;
}

int run_profile(const Options& options, ProcessGroup& world) { return ProfileRun(options, world).run(); }

}  // namespace fp8flow
