// SPDX-License-Identifier: MIT
// `fp8flow evaluate`: a model's loss and next-token accuracy on held-out windows, of all data and of each
// entry of data.data_path.
#include "kernels/core/pinned.h"
#include "model/commands/trained_model.h"
#include "model/data/blend.h"
#include "model/report/table.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fp8flow {

using namespace data;
using namespace report;

namespace {

constexpr const char* kFile = "evaluate.json";
constexpr int64_t kMostOfEndless = 1 << 24;  // windows of data that never end

struct Source {
    std::string name;
    std::shared_ptr<const TokenSource> data;
};

struct Result {
    std::string source;
    int64_t windows = 0, tokens = 0;
    double nats = 0, accuracy = 0;  // per token
    std::optional<double> bits_per_byte;
};

// Adds up what the head computes for the first `windows` windows of a source. If a micro-batch is redone, its
// windows begin at zero.
class Tally {
public:
    Tally(const TokenSource& data, int64_t windows, int64_t vocab_size, Device& device, int64_t padded)
        : data_(data),
          vocab_size_(vocab_size),
          sums_(to_size(windows)),
          tokens_(to_size(data.seq_length() + 1)),
          logits_(device, to_size(kHeadChunk * padded) * sizeof(float)),
          losses_(to_size(kHeadChunk)) {}

    void add(int64_t first_sample, const HeadChunk& chunk) {
        const auto copy = [&](float* to, const TensorView& from) {
            chunk.ctx.ops.device().copy_out(to, from.data, to_size(from.bytes()), chunk.ctx.launch.stream);
        };
        copy(logits_.at<float>(0), chunk.logits);
        copy(losses_.data(), chunk.losses);
        const int64_t seq = data_.seq_length(), padded = chunk.logits.cols();
        const int64_t end = chunk.first + chunk.logits.rows();
        for (int64_t begin = chunk.first, next = 0; begin < end; begin = next) {
            next = std::min(end, (begin / seq + 1) * seq);
            const int64_t sample = first_sample + begin / seq;
            if (sample >= std::ssize(sums_)) return;
            data_.sample(Split::held_out, sample, tokens_);
            Sums& sums = sums_[to_size(sample)];
            if (begin % seq == 0) sums = {};
            double loss = 0;
            int64_t right = 0;
#pragma omp parallel for reduction(+ : right)
            for (int64_t t = begin; t < next; ++t) {
                const float* row = logits_.at<float>(0) + (t - chunk.first) * padded;
                const int64_t best = std::max_element(row, row + vocab_size_) - row;
                right += best == tokens_[to_size(t % seq + 1)];
            }
            for (int64_t t = begin; t < next; ++t) loss += losses_[to_size(t - chunk.first)];
            sums.loss += loss;
            sums.right += f64(right);
        }
    }

    // Over all ranks.
    Result result(const std::string& source, ProcessGroup& world) const {
        std::array<double, 2> all{};
        for (const Sums& sums : sums_) {
            all[0] += sums.loss;
            all[1] += sums.right;
        }
        world.all_reduce_sum(std::span<double>(all));
        Result result{.source = source, .windows = std::ssize(sums_)};
        result.tokens = result.windows * data_.seq_length();
        result.nats = all[0] / f64(result.tokens);
        result.accuracy = all[1] / f64(result.tokens);
        if (const auto bytes = data_.bytes_per_token())
            result.bits_per_byte = result.nats / std::numbers::ln2 / *bytes;
        return result;
    }

private:
    struct Sums {
        double loss = 0, right = 0;
    };
    const TokenSource& data_;
    int64_t vocab_size_;
    std::vector<Sums> sums_;  // of this rank's windows
    std::vector<int32_t> tokens_;
    PinnedBuffer logits_;
    std::vector<float> losses_;
};

// All data, then each entry of data.data_path. The entries are left out if their held-out parts together are
// not that of all data: text of one file is divided in another way than text of many files.
std::vector<Source> sources_of(const Config& config, RunLog& log) {
    std::vector<Source> sources = {{"all", open_data(config)}};
    const std::vector<std::string> paths = paths_of(config.data.data_path);
    if (paths.size() < 2) return sources;
    int64_t held_out = 0;
    try {
        for (const std::string& path : paths) {
            Config one = config;
            one.data.data_path = {path};
            sources.push_back({path, open_data(one)});
            held_out += sources.back().data->num_tokens(Split::held_out);
        }
    } catch (const Error& error) {
        if (error.code() != ExitCode::data) throw;
        held_out = -1;  // an entry without a held-out part
    }
    if (held_out == sources[0].data->num_tokens(Split::held_out)) return sources;
    log.line(
        "note: entries of data.data_path alone have other held-out parts, so all are evaluated together");
    sources.resize(1);
    return sources;
}

std::string table_of(const std::vector<Result>& results) {
    Table table({"source"}, {"windows", "tokens", "loss, nats", "perplexity", "bits per byte", "accuracy"});
    for (const Result& r : results)
        table.add_row({r.source, format_count(r.windows), format_count(r.tokens), format_fixed(r.nats, 5),
                       format_fixed(std::exp(r.nats), 3),
                       r.bits_per_byte ? format_fixed(*r.bits_per_byte, 4) : "unknown",
                       format_percent(r.accuracy)});
    return table.text(2);
}

nlohmann::ordered_json json_of(const std::vector<Result>& results) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Result& r : results)
        rows.push_back(
            {{"source", r.source},
             {"windows", r.windows},
             {"tokens", r.tokens},
             {"loss", r.nats},
             {"perplexity", std::exp(r.nats)},
             {"bits_per_byte", r.bits_per_byte ? nlohmann::ordered_json(*r.bits_per_byte) : nullptr},
             {"next_token_accuracy", r.accuracy}});
    return rows;
}

Result evaluate(TrainedModel& model, const Source& source, int64_t windows, ProcessGroup& world) {
    const Config& config = model.config();
    const int64_t batch = config.training.global_batch_size;
    const int64_t all = source.data->samples_per_epoch(Split::held_out);
    require(all < kUnlimited || windows <= kMostOfEndless, ExitCode::usage,
            "--windows: got {}, want at most {}: synthetic data have no end", windows, kMostOfEndless);
    windows = std::min(windows, all);
    Tally tally(*source.data, windows, config.model.vocab_size, model.trainer().ops().device(),
                config.model.padded_vocab_size);
    model.trainer().evaluate_on(source.data);
    model.trainer().evaluate((windows + batch - 1) / batch,
                             [&](int64_t first, const HeadChunk& chunk) { tally.add(first, chunk); });
    return tally.result(source.name, world);
}

}  // namespace

int run_evaluate(const Options& options, ProcessGroup& world) {
    TrainedModel model(options, world);
    Config& config = model.config();
    const TrainingSpec& asked = model.asked().training;
    const int64_t windows =
        options.windows > 0 ? options.windows : asked.eval_iters * asked.global_batch_size;
    require(windows > 0, ExitCode::usage, "training.eval_iters is 0: say how many windows with --windows");
    config.training.eval_iters = 1;
    RunFolder folder(run_folder_of(options, config.output.out), world);
    RunLog log(world.rank(), options.detail);
    if (!folder.note().empty()) log.line(folder.note());
    log.line(model.backend().note);
    const std::vector<Source> sources = sources_of(config, log);
    log.line("data: " + sources[0].data->description());
    model.load(sources[0].data, log);
    std::vector<Result> results;
    results.reserve(sources.size());
    for (const Source& source : sources) results.push_back(evaluate(model, source, windows, world));
    folder.keep();
    if (!folder.is_first_rank()) return 0;
    log.result("weights {}, recipe {}\n{}", model.weights(), recipe_name(config.precision),
               table_of(results));
    if (!results[0].bits_per_byte) log.line("bits per byte: the bytes of these tokens are not known");
    nlohmann::ordered_json report = {{"weights", model.weights()},
                                     {"recipe", recipe_name(config.precision)},
                                     {"sources", json_of(results)}};
    add_provenance(report, make_provenance(options.command, model.backend(), world.size()));
    folder.folder().write_atomic(kFile, report.dump(2) + "\n");
    log.result("written: " + folder.folder().path_of(kFile));
    return 0;
}

}  // namespace fp8flow
