// SPDX-License-Identifier: MIT
// Every call to the file system fails in turn, is cut short, or is the last one before death or a power cut,
// while a checkpoint is written and an older one removed: what can be resumed from afterwards is the older or
// the newer checkpoint, whole, never anything else. And the same for every call of a resume.
#include "tests/support/checkpoints.h"
#include "tests/support/faulty_disk.h"

#include "model/base/crc32c.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <set>

namespace fp8flow::test {

using namespace data;
using namespace checkpoint;

namespace {

namespace fs = std::filesystem;

constexpr uint64_t kRun = 7;

Config small_config(const Texts& keys = {}) {
    return test_config(
        Recipe::bf16,
        with({"model.num_layers=1", "model.moe_layer_freq=1", "model.attention=false", "moe.num_experts=2",
              "moe.moe_shared_expert_intermediate_size=0", "checkpoint.most_recent_k=1",
              "checkpoint.save_interval=1", "training.global_batch_size=4"},
             keys));
}

// Which state a checkpoint holds, as one number over all names and bits. Throws Error unless it is whole.
uint32_t state_in(const CheckpointFolder& folder, int64_t step) {
    const CheckpointReader reader(folder, step);
    for (size_t file = 0; file < reader.manifest().files.size(); ++file)
        reader.verify_file(static_cast<int64_t>(file));
    uint32_t crc = 0;
    for (const auto& [name, place] : reader.tensors()) {
        crc = crc32c(name, crc);
        crc = crc32c(&place.crc, sizeof place.crc, crc);
    }
    return crc;
}

// A trainer one step after a published checkpoint of its first step, for one fault after the other.
class CheckpointFaults : public testing::Test {
protected:
    CheckpointFaults()
        : config_(small_config()),
          data_(open_data(config_)),
          groups_(make_thread_groups(1, kTestDeadline)),
          trainer_(config_, *groups_[0], choose_backend(BackendKind::reference), Arithmetic::stated, data_) {
        fs::create_directory(base_.path("base"));
        trainer_.run_step();
        save(base_.path("base"), std::make_shared<Disk>());
        trainer_.run_step();
        fs::create_directory(base_.path("second"));
        save(base_.path("second"), std::make_shared<Disk>());
        first_ = state_in(CheckpointFolder(std::make_shared<Disk>(), base_.path("base")), 1);
        second_ = state_in(CheckpointFolder(std::make_shared<Disk>(), base_.path("second")), 2);
        EXPECT_NE(first_, second_);
    }

    void save(const std::string& folder, std::shared_ptr<Disk> disk) {
        CheckpointSaver saver(config_, data_->fingerprint(), *groups_[0], folder, kRun, std::move(disk));
        saver.save(trainer_);
        saver.finish();
    }

    // A folder with the first step's checkpoint.
    std::string fresh_folder() {
        const std::string folder = base_.path("try");
        fs::remove_all(folder);
        fs::copy(base_.path("base"), folder, fs::copy_options::recursive);
        return folder;
    }

    enum class Outcome { saved, error, death };
    Outcome try_to_save(const std::string& folder, const std::shared_ptr<FaultyDisk>& disk) {
        try {
            save(folder, disk);
        } catch (const Error& error) {
            EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ExitCode::checkpoint)) << error.what();
            expect_contains(error.what(), folder);
            return Outcome::error;
        } catch (const ProcessDeath&) {
            return Outcome::death;
        }
        return disk->dead() ? Outcome::death : Outcome::saved;
    }

    // The newest checkpoint is a whole one of either step; and the next run can save here.
    void expect_nothing_lost(const std::string& folder, bool must_be_second) {
        const CheckpointFolder opened(std::make_shared<Disk>(), folder);
        const std::vector<int64_t> steps = opened.steps();
        ASSERT_FALSE(steps.empty());
        const int64_t newest = steps.back();
        ASSERT_TRUE(newest == 2 || (newest == 1 && !must_be_second)) << newest;
        EXPECT_EQ(state_in(opened, newest), newest == 2 ? second_ : first_);
        if (newest == 2) fs::remove_all(folder + "/" + checkpoint_name(2));
        save(folder, std::make_shared<Disk>());
        EXPECT_EQ(opened.steps(), std::vector<int64_t>{2});
        EXPECT_EQ(names_in(folder), std::set<std::string>{checkpoint_name(2)});
    }

    TemporaryFolder base_;
    Config config_;
    std::shared_ptr<const TokenSource> data_;
    std::vector<std::unique_ptr<ProcessGroup>> groups_;
    Trainer trainer_;
    uint32_t first_ = 0, second_ = 0;
};

// What was reported as saved survives a power cut, whether or not older ones are removed after it.
TEST_F(CheckpointFaults, SavedMeansOnTheDisk) {
    for (const int64_t keep : {0, 1}) {
        config_.checkpoint.most_recent_k = keep;
        const std::string folder = fresh_folder();
        const auto disk = std::make_shared<FaultyDisk>();
        ASSERT_EQ(try_to_save(folder, disk), Outcome::saved);
        disk->cut_power();
        const CheckpointFolder opened(std::make_shared<Disk>(), folder);
        EXPECT_EQ(opened.steps().back(), 2);
        EXPECT_EQ(state_in(opened, 2), second_);
    }
}

TEST_F(CheckpointFaults, EveryCallOfASave) {
    const auto counted = std::make_shared<FaultyDisk>();
    ASSERT_EQ(try_to_save(fresh_folder(), counted), Outcome::saved);
    const int64_t calls = counted->calls();
    EXPECT_GE(calls, 40);
    RecordProperty("calls", static_cast<int>(calls));
    int errors = 0, deaths = 0;
    for (const Fault fault : {Fault::no_space, Fault::io_error, Fault::cut_short, Fault::death}) {
        for (int64_t call = 0; call < calls; ++call) {
            for (const bool power_cut : {false, true}) {
                if (power_cut && fault != Fault::death) continue;
                SCOPED_TRACE(fmt::format("{} at call {} of {}{}", name_of(fault), call, calls,
                                         power_cut ? ", then a power cut" : ""));
                const std::string folder = fresh_folder();
                const auto disk = std::make_shared<FaultyDisk>(fault, call);
                const Outcome outcome = try_to_save(folder, disk);
                if (power_cut) disk->cut_power();
                errors += outcome == Outcome::error;
                deaths += outcome == Outcome::death;
                if (fault == Fault::cut_short) {
                    EXPECT_EQ(outcome, Outcome::saved);
                }
                expect_nothing_lost(folder, outcome == Outcome::saved);
            }
        }
    }
    EXPECT_EQ(deaths, 2 * calls);
    EXPECT_GT(errors, calls / 2);  // what is left: failures of clean-up and of removing an older one
}

// What is in an older checkpoint, or in its place, neither ends the run nor the next one, and stays.
TEST_F(CheckpointFaults, PruningNeverEndsARun) {
    const std::string outside = base_.write("outside/file", "somebody's");
    const struct {
        const char* what;
        std::function<void(const fs::path& checkpoint)> plant;
        const char* stays;  // below the folder
    } cases[] = {{"file", [](const fs::path& at) { std::ofstream(at / "notes.txt") << "mine"; }, "notes.txt"},
                 {"folder", [](const fs::path& at) { fs::create_directory(at / "notes"); }, "notes"},
                 {"link", [&](const fs::path& at) { fs::create_symlink(outside, at / "notes"); }, "notes"},
                 {"folder named as a file",
                  [](const fs::path& at) { fs::create_directory(at / "rank_0009.safetensors"); },
                  "rank_0009.safetensors"}};
    for (const auto& planted : cases) {
        SCOPED_TRACE(planted.what);
        const std::string folder = fresh_folder();
        planted.plant(folder + "/" + checkpoint_name(1));
        for (int again = 0; again < 2; ++again) {
            CheckpointSaver saver(config_, data_->fingerprint(), *groups_[0], folder, kRun);
            if (again == 0) saver.save(trainer_);
            saver.finish();
            const std::vector<std::string> problems = saver.take_problems();
            ASSERT_EQ(problems.size(), 1u);  // once when it is removed, once at the next start
            expect_contains(problems[0], checkpoint_name(1) + ".tmp");
            EXPECT_EQ(state_in(saver.folder(), 2), second_);
        }
        EXPECT_TRUE(
            fs::exists(fs::symlink_status(folder + "/" + checkpoint_name(1) + ".tmp/" + planted.stays)));
        // A run that comes to that step again is not in its way.
        CheckpointFolder opened(std::make_shared<Disk>(), folder);
        opened.begin(1);
        EXPECT_TRUE(
            fs::exists(fs::symlink_status(folder + "/" + checkpoint_name(1) + ".refused/" + planted.stays)));
    }
    // A link or a file in the place of an older checkpoint belongs to no run.
    for (const bool link : {true, false}) {
        const std::string folder = fresh_folder(), older = folder + "/" + checkpoint_name(0);
        if (link)
            fs::create_directory_symlink(base_.path("second/" + checkpoint_name(2)), older);
        else
            std::ofstream(older) << "mine";
        save(folder, std::make_shared<Disk>());
        EXPECT_EQ(CheckpointFolder(std::make_shared<Disk>(), folder).steps(), (std::vector<int64_t>{0, 2}));
        EXPECT_EQ(state_in(CheckpointFolder(std::make_shared<Disk>(), base_.path("second")), 2), second_);
    }
    EXPECT_EQ(read_whole(outside), "somebody's");
}

// With one rank more, whose disk fails: the first rank publishes nothing, and both get the reason.
TEST_F(CheckpointFaults, EveryCallOfTheOtherRank) {
    const Config config =
        small_config({"parallel.expert_model_parallel_size=2", "training.micro_batch_size=1"});
    const uint64_t fingerprint = open_data(config)->fingerprint();
    const auto run = [&](const std::string& folder, const std::shared_ptr<FaultyDisk>& second) {
        on_trainers(config, 2, [&](ReferenceTrainer& trainer, ProcessGroup& world) {
            trainer.run_step();
            CheckpointSaver saver(
                config, fingerprint, world, folder, kRun,
                world.rank() == 0 ? std::make_shared<Disk>() : std::shared_ptr<Disk>(second));
            saver.save(trainer);
            saver.finish();
        });
    };
    TemporaryFolder counting;
    const auto counted = std::make_shared<FaultyDisk>();
    run(counting.path(), counted);
    for (int64_t call = 0; call < counted->calls(); ++call) {
        SCOPED_TRACE(call);
        TemporaryFolder folder;
        try {
            run(folder.path(), std::make_shared<FaultyDisk>(Fault::io_error, call));
        } catch (const Error& error) {
            EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ExitCode::checkpoint)) << error.what();
            expect_contains(error.what(), "Input/output error");
            EXPECT_FALSE(fs::exists(folder.path(checkpoint_name(1))));
            continue;
        }
        EXPECT_NO_THROW(state_in(CheckpointFolder(std::make_shared<Disk>(), folder.path()), 1));
    }
}

// Two checkpoints to choose from: a resume gives one of them, whole, or an error.
TEST_F(CheckpointFaults, EveryCallOfAResume) {
    const std::string folder = base_.path("resume");
    const auto prepare = [&] {
        fs::remove_all(folder);
        fs::copy(base_.path("base"), folder, fs::copy_options::recursive);
        fs::copy(base_.path("second"), folder, fs::copy_options::recursive);
    };
    Config config = config_;
    config.checkpoint.load = "auto";
    const auto try_to_resume = [&](const std::shared_ptr<FaultyDisk>& disk) -> std::optional<int64_t> {
        try {
            const auto resumed = resume(trainer_, config, *data_, *groups_[0], folder, disk);
            EXPECT_TRUE(resumed.has_value());
            return resumed->step;
        } catch (const Error& error) {
            EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ExitCode::checkpoint)) << error.what();
        } catch (const ProcessDeath&) {
        }
        return std::nullopt;
    };
    prepare();
    const auto counted = std::make_shared<FaultyDisk>();
    ASSERT_EQ(try_to_resume(counted), 2);
    std::set<int64_t> results;
    for (const Fault fault : {Fault::io_error, Fault::cut_short, Fault::death}) {
        for (int64_t call = 0; call < counted->calls(); ++call) {
            SCOPED_TRACE(fmt::format("{} at call {}", name_of(fault), call));
            prepare();
            const auto step = try_to_resume(std::make_shared<FaultyDisk>(fault, call));
            results.insert(step.value_or(0));
            if (step) {
                EXPECT_EQ(trainer_.steps_done(), *step);
                const std::string saved = base_.path("resaved");
                fs::remove_all(saved);
                fs::create_directory(saved);
                save(saved, std::make_shared<Disk>());
                EXPECT_EQ(state_in(CheckpointFolder(std::make_shared<Disk>(), saved), *step),
                          *step == 2 ? second_ : first_);
            }
            // A later resume with a disk that works finds a whole one.
            const auto later = try_to_resume(std::make_shared<FaultyDisk>());
            EXPECT_GE(later.value_or(0), 1);
        }
    }
    EXPECT_EQ(results, (std::set<int64_t>{0, 1, 2}));
    // What this user may not read is whole for all that anybody knows: no older one in its place.
    for (int64_t call = 0; call < counted->calls(); ++call) {
        SCOPED_TRACE(call);
        prepare();
        EXPECT_NE(try_to_resume(std::make_shared<FaultyDisk>(Fault::no_access, call)), 1);
        EXPECT_EQ(CheckpointFolder(std::make_shared<Disk>(), folder).steps(), (std::vector<int64_t>{1, 2}));
    }
}

}  // namespace
}  // namespace fp8flow::test
