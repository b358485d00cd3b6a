// SPDX-License-Identifier: MIT
// What is held out is never trained on, and an evaluation reads nothing else: for every kind of data, whose
// two parts share no token (or, of the synthetic chain, no window), seen where the trainer takes its samples
// and in what the model learns.
#include "model/train/trainer.h"

#include "model/data/text.h"
#include "tests/support/training.h"

#include <algorithm>
#include <mutex>
#include <set>

namespace fp8flow {
using namespace data;
namespace {

constexpr int kSequence = 32;

// Passes samples on and records what was requested and what was served.
class RecordingSource final : public TokenSource {
public:
    struct Served {
        Split split;
        std::vector<int32_t> tokens;
    };

    explicit RecordingSource(std::shared_ptr<const TokenSource> source) : source_(std::move(source)) {}
    int64_t vocab_size() const override { return source_->vocab_size(); }
    int64_t seq_length() const override { return source_->seq_length(); }
    int64_t num_tokens(Split split) const override { return source_->num_tokens(split); }
    int64_t samples_per_epoch(Split split) const override { return source_->samples_per_epoch(split); }
    std::string description() const override { return source_->description(); }
    uint64_t fingerprint() const override { return source_->fingerprint(); }
    void sample(Split split, int64_t index, std::span<int32_t> tokens) const override {
        source_->sample(split, index, tokens);
        const std::lock_guard lock(mutex_);
        served_.push_back({split, {tokens.begin(), tokens.end()}});
    }

    // Everything since the last call.
    std::vector<Served> take() const {
        const std::lock_guard lock(mutex_);
        return std::exchange(served_, {});
    }

private:
    std::shared_ptr<const TokenSource> source_;
    mutable std::mutex mutex_;
    mutable std::vector<Served> served_;
};

// ---- files of both parts: tokens below 64 are trained on, tokens from 128 on are held out, and documents
// end with 256 (text)
constexpr int32_t kTrainEnd = 64, kHeldOutFirst = 128, kHeldOutEnd = 192;

int32_t token_of(Split split, int64_t i) {
    const int32_t step = static_cast<int32_t>(i % 7);
    return split == Split::train ? 32 + step : kHeldOutFirst + step;
}
bool belongs(Split split, int32_t token) {
    if (token == kEndOfDocument) return true;
    return split == Split::train ? token < kTrainEnd : token >= kHeldOutFirst && token < kHeldOutEnd;
}

template <class T> void put(std::string& out, T value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
std::string ids(Split split, int64_t count) {
    std::string out;
    for (int64_t i = 0; i < count; ++i) put(out, static_cast<uint16_t>(token_of(split, i)));
    return out;
}

std::vector<std::string> text(const TemporaryFolder& folder) {
    for (int i = 0; i < 40; ++i) {
        const std::string name = fmt::format("file{}.txt", i);
        const Split split = is_held_out(name, 0.25) ? Split::held_out : Split::train;
        std::string bytes;
        for (int64_t j = 0; j < 300 + i; ++j) bytes += static_cast<char>(token_of(split, j));
        folder.write("corpus/" + name, bytes);
    }
    return {"data.data_kind=text", fmt::format("data.data_path={}", folder.path("corpus")),
            "data.held_out_fraction=0.25"};
}

std::vector<std::string> shards(const TemporaryFolder& folder) {
    for (const Split split : {Split::train, Split::held_out})
        for (int part = 0; part < 2; ++part) {
            constexpr int32_t kCount = 1500;
            std::string bytes;
            for (const int32_t word : {20240520, 1, kCount}) put(bytes, word);
            bytes.resize(1024, '\0');
            folder.write(fmt::format("shards/x_{}_{:06}.bin", split == Split::train ? "train" : "val", part),
                         bytes + ids(split, kCount));
        }
    return {"data.data_kind=shards", fmt::format("data.data_path={}", folder.path("shards"))};
}

// 12 documents of 250 tokens, the last quarter of which is held out.
std::vector<std::string> megatron(const TemporaryFolder& folder) {
    constexpr int64_t kDocuments = 12, kLength = 250, kHeldOut = 3;
    std::string index("MMIDIDX\0\0", 9), bin;
    put(index, uint64_t{1});
    put(index, uint8_t{8});  // uint16
    put(index, kDocuments);
    put(index, kDocuments + 1);
    for (int64_t d = 0; d < kDocuments; ++d) put(index, static_cast<int32_t>(kLength));
    for (int64_t d = 0; d < kDocuments; ++d) put(index, d * kLength * 2);
    for (int64_t d = 0; d <= kDocuments; ++d) put(index, d);
    for (int64_t d = 0; d < kDocuments; ++d)
        bin += ids(d < kDocuments - kHeldOut ? Split::train : Split::held_out, kLength);
    folder.write("megatron/set.idx", index);
    folder.write("megatron/set.bin", bin);
    return {"data.data_kind=megatron", fmt::format("data.data_path={}", folder.path("megatron/set")),
            "data.held_out_fraction=0.25"};
}

std::vector<std::string> synthetic(const TemporaryFolder&) {
    return {"data.data_kind=synthetic", "data.synthetic_vocab_size=64", "data.synthetic_order=1"};
}

struct Kind {
    const char* name;
    std::vector<std::string> (*prepare)(const TemporaryFolder&);
    bool disjoint_tokens;
};
constexpr Kind kKinds[] = {{"text", text, true},
                           {"shards", shards, true},
                           {"megatron", megatron, true},
                           {"synthetic", synthetic, false}};

class HeldOut : public testing::TestWithParam<Kind> {
protected:
    Config config(const Texts& more) const {
        const Texts overrides =
            with(GetParam().prepare(folder_),
                 {"model.vocab_size=257", "model.seq_length=32", "model.moe_layer_freq=[1,1]"});
        return test::test_config(Recipe::bf16, with(overrides, more));
    }
    TemporaryFolder folder_;
};

// Every window of both parts, at the source that a configuration names.
TEST_P(HeldOut, ThePartsOfASourceShareNothing) {
    const auto source = open_data(config({}));
    std::set<std::vector<int32_t>> windows[2];
    for (const Split split : {Split::train, Split::held_out})
        for (int64_t i = 0; i < 3 * std::min<int64_t>(200, source->samples_per_epoch(split)); ++i) {
            std::vector<int32_t> tokens(kSequence + 1, -1);
            source->sample(split, i, tokens);
            windows[static_cast<size_t>(split)].insert(tokens);
            if (!GetParam().disjoint_tokens) continue;
            for (const int32_t token : tokens)
                ASSERT_TRUE(belongs(split, token)) << name_of(split) << " has " << token;
        }
    EXPECT_GT(windows[0].size(), 6u);
    EXPECT_GT(windows[1].size(), 6u);
    for (const auto& window : windows[1]) ASSERT_EQ(windows[0].count(window), 0u);
}

TEST_P(HeldOut, StepsAndEvaluationsReadTheirOwnPart) {
    for (const auto& [ranks, micro_batch] : {std::pair{1, 4}, {2, 2}, {4, 1}}) {
        SCOPED_TRACE(fmt::format("{} ranks", ranks));
        const Config c = config({fmt::format("training.micro_batch_size={}", micro_batch)});
        const auto source = std::make_shared<const RecordingSource>(open_data(c));
        const auto expect_served = [&](ProcessGroup& world, Split split, size_t samples) {
            world.barrier();
            if (world.rank() == 0) {
                const auto served = source->take();
                EXPECT_EQ(served.size(), samples) << name_of(split);
                for (const auto& sample : served) {
                    EXPECT_EQ(name_of(sample.split), std::string(name_of(split)));
                    for (const int32_t token : sample.tokens)
                        EXPECT_TRUE(!GetParam().disjoint_tokens || belongs(split, token)) << token;
                }
            }
            world.barrier();
        };
        run_thread_ranks(ranks, test::kTestDeadline, [&](ProcessGroup& world) {
            test::ReferenceTrainer trainer(c, world, source);
            for (int i = 0; i < 3; ++i) trainer.run_step();
            expect_served(world, Split::train, 3 * 8);
            trainer.evaluate(2);
            expect_served(world, Split::held_out, 2 * 8);
            trainer.step();
            trainer.step();
            trainer.drain();
            expect_served(world, Split::train, 2 * 8);
            trainer.evaluate(1);
            expect_served(world, Split::held_out, 8);
        });
    }
}

// The same samples at every evaluation, and what they are is what the model is asked: a model that has learnt
// the seven tokens it trains on knows nothing of those held out.
TEST_P(HeldOut, TheModelIsAskedWhatItHasNotSeen) {
    if (!GetParam().disjoint_tokens) GTEST_SKIP() << "both parts come from one chain";
    const Config c = config({"training.micro_batch_size=4", "training.train_iters=60", "training.lr=0.01"});
    test::on_trainers(c, 1, [&](test::ReferenceTrainer& trainer, ProcessGroup&) {
        const double before = trainer.evaluate(2);
        double loss = 0;
        for (int i = 0; i < 25; ++i) loss = trainer.run_step().lm_loss;
        const double after = trainer.evaluate(2);
        EXPECT_LT(loss, 1.5);
        EXPECT_GT(after, before);
        EXPECT_GT(after, 5.0);
        EXPECT_EQ(trainer.evaluate(2), after);
    });
}

INSTANTIATE_TEST_SUITE_P(Kinds, HeldOut, testing::ValuesIn(kKinds),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fp8flow
