// SPDX-License-Identifier: MIT
// Enumerates runs, predicts each, and marks the fastest that fits.
#include "model/predict/choose.h"

#include "kernels/core/error.h"
#include "model/config/check.h"

#include <algorithm>

namespace fp8flow::predict {

namespace {

constexpr int64_t kLargestExpertParallel = 64;  // beyond, rows cross more hosts than memory is saved
constexpr int64_t kLargestMicroBatch = 8;

bool states(const Config& config, const char* key) { return config.origin.contains(key); }

// `config` on so many GPUs; absent where it is not legal.
std::optional<Config> run_of(const Config& config, int64_t gpus, Recipe recipe, int64_t expert_parallel,
                             int64_t micro_batch, bool own_batch) {
    Config own = with_recipe(config, recipe);
    own.parallel.expert_model_parallel_size = expert_parallel;
    own.training.micro_batch_size = micro_batch;
    const int64_t wanted = own_batch ? config.training.global_batch_size : kSequences * gpus;
    own.training.global_batch_size = round_up(wanted, micro_batch * gpus);
    return is_legal(own, gpus) ? std::optional(own) : std::nullopt;
}

// First what fits, then what fits with other keys, each by speed; then the rest by memory.
bool better(const Choice& a, const Choice& b) {
    const auto rank = [](const Choice& c) { return c.fit.fits() ? 0 : c.fit.settings.empty() ? 2 : 1; };
    if (rank(a) != rank(b)) return rank(a) < rank(b);
    if (rank(a) == 2) return a.fit.needed < b.fit.needed;
    return a.time.tokens_per_second() > b.time.tokens_per_second();
}

// parallel.hosts divides one machine into hosts: all of its GPUs reach each other at the rate of peer memory.
Gpu with_hosts(const Config& config, int64_t gpus, Gpu gpu) {
    if (config.parallel.hosts == 0) return gpu;
    if (gpus <= gpu.sheet.gpus_per_host && !gpu.sheet.network_given)
        gpu.sheet.network_rate = gpu.sheet.peer_rate;
    gpu.sheet.gpus_per_host = config.parallel.ranks_per_host;
    return gpu;
}

// Between hosts a step time is a range: for a network twice and half as fast, times the smallest and largest
// ratio of measured runs to their prediction.
StepTime time_of(const Config& config, int64_t gpus, Gpu gpu) {
    StepTime time = predict_step(config, gpus, gpu);
    if (gpus <= gpu.sheet.gpus_per_host) return time;
    const HostRuns& measured = gpu.calibration.host_runs;
    time.network = gpu.sheet.network_rate;
    gpu.sheet.network_rate *= 2;
    time.least = predict_step(config, gpus, gpu).step * measured.least;
    gpu.sheet.network_rate /= 4;
    time.most = predict_step(config, gpus, gpu).step * measured.most;
    return time;
}

}  // namespace

Choice predicted(Config config, int64_t gpus, const Gpu& gpu) {
    Choice choice{.config = std::move(config), .gpus = gpus};
    plan::check_countable(choice.config);
    decide_joined(choice.config, gpus, usable_bytes(gpu.sheet));
    const Gpu own = with_hosts(choice.config, gpus, gpu);
    choice.time = time_of(choice.config, gpus, own);
    if (choice.config.parallel.expert_model_parallel_size > own.sheet.gpus_per_host) {
        Config per_host = choice.config;
        per_host.parallel.moe_token_dispatcher_type = TokenDispatcher::hierarchical;
        choice.per_host = time_of(per_host, gpus, own);
    }
    choice.fit = fit_of(choice.config, gpus, gpu.sheet);
    return choice;
}

std::optional<Joining> joining_of(const Config& config, int64_t gpus, const Gpu& gpu) {
    const int64_t now = config.precision.moe_wgrad_micro_batches,
                  joined = now > 1 ? now : useful_joined(config, gpus);
    const auto memory = joined_memory(config, gpus, joined);
    if (!memory) return std::nullopt;
    const auto layer_seconds = [&](int64_t micro_batches) {
        Config own = config;
        own.precision.moe_wgrad_micro_batches = micro_batches;
        return predict_step(own, gpus, gpu).layer;
    };
    const double saved = plan::bytes_of(memory->single, "saved activations") / f64(config.model.num_layers);
    return Joining{.used = now > 1,
                   .micro_batches = joined,
                   .layer_single = layer_seconds(1),
                   .layer_joined = layer_seconds(joined),
                   .bytes_single = saved,
                   .bytes_joined = saved + memory->cost_per_layer()};
}

const char* Choice::basis(const Gpu& gpu) const {
    if (!gpu.calibrated) return "uncalibrated";
    if (time.extrapolated()) return "extrapolation";
    const auto& check = gpu.calibration.check;
    return check && gpus <= check->gpus ? "checked range" : "one host";
}

Search open_search(const Config& config, std::vector<int64_t> gpus, std::vector<Recipe> recipes) {
    Search search{.gpus = std::move(gpus),
                  .recipes = std::move(recipes),
                  .own_batch = states(config, "training.global_batch_size")};
    if (!states(config, "parallel.expert_model_parallel_size"))
        for (int64_t size = 1; size <= kLargestExpertParallel; size *= 2)
            if (config.moe.num_experts % size == 0) search.expert_parallel.push_back(size);
    if (!states(config, "training.micro_batch_size"))
        for (int64_t size = 1; size <= kLargestMicroBatch; size *= 2) search.micro_batches.push_back(size);
    return search;
}

std::vector<Choice> choose(const Config& config, const Search& search, const Gpu& gpu) {
    const auto sizes_or = [](const std::vector<int64_t>& sizes, int64_t otherwise) {
        return sizes.empty() ? std::vector<int64_t>{otherwise} : sizes;
    };
    std::vector<Choice> choices;
    for (const int64_t gpus : search.gpus)
        for (const Recipe recipe : search.recipes) {
            const size_t first = choices.size();
            for (const int64_t ep :
                 sizes_or(search.expert_parallel, config.parallel.expert_model_parallel_size)) {
                std::optional<Choice> best;
                for (const int64_t batch : sizes_or(search.micro_batches, config.training.micro_batch_size)) {
                    auto own = run_of(config, gpus, recipe, ep, batch, search.own_batch);
                    if (!own || !can_predict(*own, gpu)) continue;
                    Choice choice = predicted(std::move(*own), gpus, gpu);
                    if (!best || better(choice, *best)) best = std::move(choice);
                }
                if (best) choices.push_back(std::move(*best));
            }
            const auto found =
                std::min_element(choices.begin() + static_cast<std::ptrdiff_t>(first), choices.end(), better);
            if (found != choices.end()) found->best = true;
        }
    require(!choices.empty(), ExitCode::usage,
            "plan: no recipe and expert-parallel size of those requested is legal on so many GPUs; "
            "plan --gpus N --set parallel.expert_model_parallel_size=EP says why one is not");
    return choices;
}

}  // namespace fp8flow::predict
