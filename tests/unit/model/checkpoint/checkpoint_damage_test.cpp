// SPDX-License-Identifier: MIT
// Damage on the disk: flipped bits, cut and grown files, swapped and missing ones, links. All refused, by the
// name of the file and of the tensor; a resume takes the checkpoint before and keeps the damaged one aside.
#include "tests/support/checkpoints.h"

#include "model/data/permutation.h"

#include <gtest/gtest.h>

namespace fp8flow::test {

using namespace data;
using namespace checkpoint;

namespace {

namespace fs = std::filesystem;

class CheckpointDamage : public testing::Test {
protected:
    CheckpointDamage()
        : config_(test_config(Recipe::fp8_flow,
                              {"checkpoint.save_interval=1", "parallel.expert_model_parallel_size=2"})) {
        train_with_checkpoints(config_, 2, {folder_.path(), 2});
    }

    static std::string file(const char* name, int64_t step = 2) { return checkpoint_name(step) + "/" + name; }
    void overwrite(const std::string& name, const std::string& bytes) const { folder_.write(name, bytes); }

    // The text of the refusal; empty: the checkpoint passed.
    std::string refusal(int64_t step = 2) const {
        return error_or_none(ExitCode::checkpoint, [&] {
            const CheckpointFolder opened(std::make_shared<Disk>(), folder_.path());
            const CheckpointReader reader(opened, step);
            for (int64_t f = 0; f < static_cast<int64_t>(reader.manifest().files.size()); ++f)
                reader.verify_file(f);
        });
    }

    TemporaryFolder folder_;
    Config config_;
};

TEST_F(CheckpointDamage, EveryFlippedBitIsFoundAndNamed) {
    ASSERT_EQ(refusal(), "");
    for (const char* name : {"rank_0000.safetensors", "rank_0001.safetensors", kManifestName}) {
        const std::string path = folder_.path(file(name)), good = read_whole(path);
        const auto bits = static_cast<int64_t>(good.size()) * 8;
        const int64_t header =
            name == std::string(kManifestName) ? 0 : 8 + *reinterpret_cast<const int64_t*>(good.data());
        int in_tensors = 0;
        for (uint64_t i = 0; i < 400; ++i) {
            // Half of them in the header, which is a small part of the file.
            const auto draw = static_cast<int64_t>(mix64(i) >> 1);
            const int64_t bit = header > 0 && i % 2 == 0 ? draw % (header * 8) : draw % bits;
            std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
            const auto flip = [&] {
                stream.seekg(bit / 8);
                const char byte = static_cast<char>(stream.get() ^ (1 << bit % 8));
                stream.seekp(bit / 8);
                stream.put(byte).flush();
            };
            flip();
            const std::string text = refusal();
            expect_contains(text, file(name));
            if (header > 0 && bit / 8 >= header) {
                ++in_tensors;
                expect_contains(text, "tensor ");
                expect_contains(text, "the checksum does not fit");
            }
            flip();
        }
        if (header > 0) {
            EXPECT_GE(in_tensors, 150);
        }
        ASSERT_EQ(read_whole(path), good);
    }
    EXPECT_EQ(refusal(), "");
}

TEST_F(CheckpointDamage, CutAndGrownFiles) {
    for (const char* name : {"rank_0000.safetensors", "rank_0001.safetensors", kManifestName}) {
        const std::string path = folder_.path(file(name)), good = read_whole(path);
        for (uint64_t i = 0; i < 100; ++i) {
            fs::resize_file(path, i == 0 ? 0 : i == 1 ? good.size() - 1 : mix64(i) % good.size());
            expect_contains(refusal(), file(name));
            overwrite(file(name), good);
        }
        overwrite(file(name), good + '\0');
        expect_contains(refusal(), file(name));
        overwrite(file(name), good);
    }
    fs::resize_file(folder_.path(file("rank_0001.safetensors")), 1000);
    expect_contains(refusal(), "rank_0001.safetensors: truncated: 1000 bytes");
}

TEST_F(CheckpointDamage, FilesOfOtherCheckpoints) {
    const auto swap = [&](const std::string& a, const std::string& b) {
        const std::string of_a = read_whole(folder_.path(a)), of_b = read_whole(folder_.path(b));
        overwrite(a, of_b);
        overwrite(b, of_a);
    };
    const std::string first = file("rank_0000.safetensors", 1), second = file("rank_0000.safetensors");
    swap(first, second);  // another step's, of the same size
    expect_contains(
        refusal(),
        "rank_0000.safetensors: the checksum of the header does not fit: damaged, or of another checkpoint");
    swap(first, second);
    swap(file(kManifestName, 1), file(kManifestName));
    expect_contains(refusal(), "the manifest is that of step 1");
    swap(file(kManifestName, 1), file(kManifestName));
    swap(file("rank_0001.safetensors"), second);  // another rank's
    EXPECT_NE(refusal(), "");
    swap(file("rank_0001.safetensors"), second);
    ASSERT_EQ(refusal(), "");
    fs::remove(folder_.path(second));
    expect_contains(refusal(), "rank_0000.safetensors: No such file");
    for (const std::string& named : {"../" + first, std::string("nowhere")}) {
        fs::create_symlink(named, folder_.path(second));
        expect_contains(refusal(), "rank_0000.safetensors: a symbolic link, which is not followed");
        fs::remove(folder_.path(second));
    }
    fs::create_directory(folder_.path(second));
    expect_contains(refusal(), "rank_0000.safetensors: Is a directory");
    fs::remove(folder_.path(file(kManifestName)));
    expect_contains(refusal(), "manifest.json: No such file");
    fs::remove_all(folder_.path(checkpoint_name(2)));
    fs::create_directory_symlink("nowhere", folder_.path(checkpoint_name(2)));
    expect_contains(refusal(), checkpoint_name(2) + ": a symbolic link, which is not followed");
}

TEST_F(CheckpointDamage, ResumeTakesTheOneBeforeAndKeepsTheDamagedOneAside) {
    Config config = config_;
    config.checkpoint.load = "auto";
    const auto damage = [&](int64_t step) {
        const std::string name = file("rank_0001.safetensors", step);
        std::string bytes = read_whole(folder_.path(name));
        bytes[bytes.size() - 5] ^= 1;
        overwrite(name, bytes);
    };
    Config plain = config_;
    plain.checkpoint.save_interval = 0;
    const TrainingRun straight = train_with_checkpoints(plain, 2, {folder_.path(), 4});
    damage(2);
    std::optional<Resumed> resumed;
    on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
        const auto mine = resume(trainer, config, *open_data(config), world, folder_.path());
        if (world.rank() == 1) resumed = mine;
    });
    ASSERT_TRUE(resumed.has_value());
    EXPECT_EQ(resumed->step, 1);
    ASSERT_EQ(resumed->refused.size(), 1u);
    expect_contains(resumed->refused[0], "rank_0001.safetensors: tensor ");
    EXPECT_TRUE(fs::exists(folder_.path("step_00000002.refused")));
    EXPECT_FALSE(fs::exists(folder_.path("step_00000002")));
    // On with it, through the step whose checkpoint was damaged.
    const TrainingRun rest = train_with_checkpoints(config, 2, {folder_.path(), 4});
    ASSERT_EQ(rest.steps.size(), 3u);
    for (size_t i = 0; i < rest.steps.size(); ++i)
        EXPECT_EQ(rest.steps[i].lm_loss, straight.steps[i + 1].lm_loss);
    expect_same_bits(rest.state, straight.state);
    // Nothing whole is left: an error, not a new beginning.
    for (const int64_t step : {3, 4}) damage(step);
    for (const int ranks : {2, 1}) {  // one rank verifies both files
        config.parallel.expert_model_parallel_size = ranks;
        const std::string text = error_or_none(ExitCode::checkpoint, [&] {
            train_with_checkpoints(config, ranks, {folder_.path(), 5});
        });
        expect_contains(text, "none of 2 checkpoints is whole");
        expect_contains(text, "step_00000004/rank_0001.safetensors: tensor ");
    }
}

}  // namespace
}  // namespace fp8flow::test
