// SPDX-License-Identifier: MIT
// `fp8flow generate`: tokens after a prompt. Each is one forward pass over the whole window, which rank 0
// holds; other ranks take part with their experts and without tokens.
#include "model/commands/trained_model.h"

#include "model/base/output.h"
#include "model/data/text.h"

#include <algorithm>

namespace fp8flow {

using namespace data;

namespace {

// The window as data: the tokens so far, then zeros, which causal attention hides from them.
class Prompt final : public TokenSource {
public:
    Prompt(std::vector<int32_t> tokens, int64_t vocab_size, int64_t seq_length)
        : tokens_(std::move(tokens)), vocab_size_(vocab_size), seq_length_(seq_length) {}

    void add(int32_t token) { tokens_.push_back(token); }
    int64_t size() const { return std::ssize(tokens_); }

    int64_t vocab_size() const override { return vocab_size_; }
    int64_t seq_length() const override { return seq_length_; }
    int64_t num_tokens(Split) const override { return kUnlimited; }
    int64_t samples_per_epoch(Split) const override { return kUnlimited; }
    std::string description() const override { return fmt::format("{} tokens", tokens_.size()); }
    uint64_t fingerprint() const override { return 0; }
    void sample(Split, int64_t, std::span<int32_t> tokens) const override {
        std::ranges::fill(tokens, 0);
        std::ranges::copy(tokens_, tokens.begin());
    }

private:
    std::vector<int32_t> tokens_;
    int64_t vocab_size_, seq_length_;
};

std::vector<int32_t> prompt_of(const GenerateOptions& options, const Config& config) {
    const int64_t vocab = config.model.vocab_size;
    require(
        options.prompt.empty() || vocab == kByteVocabulary, ExitCode::usage,
        "--prompt is read byte by byte, for models of {} tokens, and this one has {}: encode the text with "
        "scripts/tokens.py and name its --tokens",
        kByteVocabulary, vocab);
    std::vector<int32_t> tokens(options.tokens.begin(), options.tokens.end());
    for (const char c : options.prompt) tokens.push_back(static_cast<uint8_t>(c));
    require(!tokens.empty(), ExitCode::usage, "generate: want --prompt TEXT or --tokens 1,2,3");
    for (const int32_t token : tokens)
        require(token < vocab, ExitCode::usage, "--tokens: got {}, want ids below model.vocab_size = {}",
                token, vocab);
    return tokens;
}

// Serial, with one window on rank 0. If the recipe can, the order of sums is the one that does not depend on
// the number of ranks.
void adapt(Config& config, int64_t tokens) {
    constexpr int64_t kMultiple = 128;
    config.model.seq_length = round_up(tokens, kMultiple);
    config.training.micro_batch_size = config.training.global_batch_size = 1;
    if (config.precision.recipe != Recipe::fp8_tensorwise)
        config.moe.moe_combine_order = CombineOrder::invariant;
}

// The token after the last one, on all ranks.
int32_t next_token(Trainer& trainer, const Prompt& prompt, const Sampling& sampling, ProcessGroup& world) {
    std::vector<float> logits(to_size(prompt.vocab_size()));
    trainer.evaluate(1, [&](int64_t, const HeadChunk& chunk) {
        const int64_t row = prompt.size() - 1 - chunk.first;
        if (row < 0 || row >= chunk.logits.rows()) return;
        chunk.ctx.ops.device().copy_out(logits.data(), chunk.logits.slice(row, 1).data,
                                        logits.size() * sizeof(float), chunk.ctx.launch.stream);
    });
    int32_t token = world.rank() == 0 ? sample_token(logits, sampling, prompt.size()) : 0;
    world.broadcast(&token, sizeof token, 0);
    return token;
}

// Bytes that would steer a terminal are left out.
std::string text_of(int32_t token) {
    const bool shown = (token >= ' ' && token != 127 && token < 256) || token == '\n' || token == '\t';
    return shown ? std::string(1, static_cast<char>(token)) : std::string();
}

}  // namespace

int run_generate(const Options& all, ProcessGroup& world) {
    const GenerateOptions& options = all.generate;
    TrainedModel model(all, world);
    const std::vector<int32_t> tokens = prompt_of(options, model.config());
    const int64_t trained_length = model.config().model.seq_length;
    const int64_t most = std::ssize(tokens) + options.max_tokens;
    adapt(model.config(), most);
    check_config(model.config());
    const auto prompt =
        std::make_shared<Prompt>(tokens, model.config().model.vocab_size, model.config().model.seq_length);
    report::RunLog log(world.rank(), report::Detail::quiet);
    if (most > trained_length && world.rank() == 0)
        print_err(
            fmt::format("warning: up to {} tokens, and the model was trained on {} (model.seq_length)\n",
                        most, trained_length));
    model.load(prompt, log);
    const bool speaks = world.rank() == 0, bytes = options.tokens.empty();
    std::vector<int64_t> stops = options.stop_tokens;
    if (bytes) stops.push_back(kEndOfDocument);
    if (speaks && bytes) fmt::print("{}", options.prompt);
    for (int64_t i = 0; i < options.max_tokens; ++i) {
        const int32_t token = next_token(model.trainer(), *prompt, options.sampling, world);
        if (std::ranges::find(stops, token) != stops.end()) break;
        prompt->add(token);
        if (speaks) fmt::print("{}", bytes ? text_of(token) : fmt::format("{}{}", i > 0 ? "," : "", token));
        if (speaks) std::fflush(stdout);
    }
    if (speaks) fmt::print("\n");
    return 0;
}

}  // namespace fp8flow
