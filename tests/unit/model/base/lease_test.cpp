// SPDX-License-Identifier: MIT
// The lease of a folder: one owner, of dead processes and of silent machines, and who finds out that it is
// not the owner any more. Another machine is a lease file whose machine is not ours.
#include "model/base/lease.h"

#include "kernels/core/error.h"
#include "model/base/output.h"
#include "model/base/run_folder.h"
#include "tests/support/files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <thread>

namespace fp8flow {
namespace {

using Attempt = Lease::Attempt;
using std::chrono::milliseconds;

constexpr LeaseTimes kShort{.beat = milliseconds(20), .stale = milliseconds(300)};

class LeaseTest : public testing::Test {
protected:
    std::unique_ptr<Lease> lease(const std::string& command = "train") {
        return std::make_unique<Lease>(out_.descriptor(), out_.path(), command, kShort);
    }
    static Attempt take(Lease& lease) {
        for (;;) {
            const Attempt attempt = lease.try_to_take();
            if (attempt != Attempt::watching) return attempt;
            std::this_thread::sleep_for(milliseconds(5));
        }
    }
    std::set<std::string> names() const {
        std::set<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(out_.path()))
            names.insert(entry.path().filename().string());
        return names;
    }
    std::string path() const { return out_.path_of(".lease"); }
    void write_lease_of(const std::string& machine, int64_t process, int64_t start) {
        const nlohmann::json lease = {{"id", "other"},  {"machine", machine},     {"host", "there"},
                                      {"pid", process}, {"process start", start}, {"command", "fp8flow"}};
        std::ofstream(path()) << lease.dump();
    }
    std::string our_machine() {
        const auto ours = lease();
        take(*ours);
        return nlohmann::json::parse(read_whole(path())).at("machine");
    }

    TemporaryFolder folder_;
    OutputFolder out_{folder_.path("run")};
};

TEST_F(LeaseTest, OneOwnerAndNothingLeft) {
    auto first = lease("train one"), second = lease("train two");
    EXPECT_EQ(take(*first), Attempt::taken);
    EXPECT_EQ(names(), (std::set<std::string>{".lease"}));
    EXPECT_EQ(take(*second), Attempt::held);
    expect_contains(second->holder(), "process " + std::to_string(::getpid()) + " on ");
    expect_contains(second->holder(), "(train one)");
    first->check();
    first.reset();
    EXPECT_EQ(take(*second), Attempt::taken);
    second.reset();
    EXPECT_TRUE(names().empty());
}

// The thread that renews a lease, where the system gives no more threads.
TEST_F(LeaseTest, AThreadThatCannotStartIsAnErrorAndTheLeaseIsGivenBack) {
    pthread_attr_t before{}, huge{};
    ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
    ASSERT_EQ(::pthread_getattr_default_np(&huge), 0);
    ASSERT_EQ(::pthread_attr_setstacksize(&huge, size_t{1} << 48), 0);
    ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
    auto ours = lease();
    EXPECT_THROW(take(*ours), std::system_error);
    ASSERT_EQ(::pthread_setattr_default_np(&before), 0);
    ours.reset();
    EXPECT_TRUE(names().empty());
}

TEST_F(LeaseTest, OfADeadProcessIsFreeAtOnce) {
    const pid_t child = ::fork();
    if (child == 0) {
        Lease leaked(out_.descriptor(), out_.path(), "train", kShort);
        ::_exit(leaked.try_to_take() == Attempt::taken ? 0 : 1);
    }
    int state = 0;
    ASSERT_EQ(::waitpid(child, &state, 0), child);
    ASSERT_EQ(state, 0);
    EXPECT_EQ(names(), (std::set<std::string>{".lease"}));
    const auto ours = lease();
    EXPECT_EQ(ours->try_to_take(), Attempt::taken);
    // A process id that is in use again, by another process.
    write_lease_of(our_machine(), ::getpid(), 1);
    EXPECT_EQ(lease()->try_to_take(), Attempt::taken);
}

TEST_F(LeaseTest, OfAnotherMachineGoesStaleUnlessRenewed) {
    write_lease_of("another", ::getpid(), 1);
    {
        std::jthread renewing([&](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                ::utimensat(AT_FDCWD, path().c_str(), nullptr, 0);
                std::this_thread::sleep_for(milliseconds(10));
            }
        });
        EXPECT_EQ(take(*lease()), Attempt::held);
    }
    const auto began = std::chrono::steady_clock::now();
    const auto ours = lease();
    EXPECT_EQ(ours->try_to_take(), Attempt::watching);
    EXPECT_EQ(take(*ours), Attempt::taken);
    EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(200));
}

// Long silent already, it is watched all the same: its machine may have had no network.
TEST_F(LeaseTest, OfAnotherMachineIsWatched) {
    for (const char* text : {"", "no lease", "[]"}) {
        std::ofstream(path()) << text;
        const timespec old[2] = {{.tv_sec = 1000, .tv_nsec = 0}, {.tv_sec = 1000, .tv_nsec = 0}};
        ::utimensat(AT_FDCWD, path().c_str(), old, 0);
        const auto ours = lease();
        EXPECT_EQ(ours->try_to_take(), Attempt::watching) << text;
        EXPECT_EQ(take(*ours), Attempt::taken) << text;
    }
}

TEST_F(LeaseTest, IsRenewed) {
    const auto ours = lease();
    take(*ours);
    const auto before = std::filesystem::last_write_time(path());
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_GT(std::filesystem::last_write_time(path()), before);
}

TEST_F(LeaseTest, WhoLostItFindsOutAndLeavesTheOtherAlone) {
    auto ours = lease();
    take(*ours);
    write_lease_of("another", 7, 1);
    const std::string other = read_whole(path());
    const auto time = std::filesystem::last_write_time(path());
    expect_contains(error_of(ExitCode::output, [&] { ours->check(); }),
                    "this run has lost its folder: process 7 on there (fp8flow) has taken it");
    std::this_thread::sleep_for(milliseconds(100));
    error_of(ExitCode::output, [&] { ours->check_if_unsure(); });
    EXPECT_EQ(std::filesystem::last_write_time(path()), time);
    ours.reset();
    EXPECT_EQ(read_whole(path()), other);
    EXPECT_EQ(names(), (std::set<std::string>{".lease"}));
}

// One that died while it replaced a lease does not keep the folder.
TEST_F(LeaseTest, OfADeadProcessThatReplacedAnother) {
    const std::string machine = our_machine();
    write_lease_of(machine, ::getpid(), 1);
    std::filesystem::copy_file(path(), out_.path_of(".lease.replacing"));
    const auto ours = lease();
    EXPECT_EQ(ours->try_to_take(), Attempt::watching);
    EXPECT_EQ(ours->try_to_take(), Attempt::taken);
    EXPECT_EQ(names(), (std::set<std::string>{".lease"}));
}

TEST_F(LeaseTest, AFolderThatIsGone) {
    const auto ours = lease();
    std::filesystem::remove_all(out_.path());
    EXPECT_EQ(ours->try_to_take(), Attempt::gone);
}

// Threads stand in for processes; a lease whose process is gone starts each round.
TEST_F(LeaseTest, ManyFindAStaleOneAndOneGetsIt) {
    const std::string machine = our_machine();
    for (int round = 0; round < 50; ++round) {
        write_lease_of(machine, ::getpid(), 1);
        std::vector<std::unique_ptr<Lease>> leases;
        for (int i = 0; i < 8; ++i) leases.push_back(lease());
        std::vector<Attempt> attempts(leases.size());
        {
            std::vector<std::jthread> threads;
            for (size_t i = 0; i < leases.size(); ++i)
                threads.emplace_back([&, i] { attempts[i] = leases[i]->try_to_take(); });
        }
        ASSERT_EQ(std::count(attempts.begin(), attempts.end(), Attempt::taken), 1) << round;
        ASSERT_EQ(std::count(attempts.begin(), attempts.end(), Attempt::gone), 0) << round;
        for (size_t i = 0; i < leases.size(); ++i)
            if (attempts[i] == Attempt::taken) leases[i]->check();
    }
    EXPECT_TRUE(names().empty());
}

TEST(RunFolder, RanksAgreeAndAFailedStartLeavesNothing) {
    const TemporaryFolder folder;
    const auto request = [&](RunFolder::Taken taken) {
        return RunFolder::Request{.path = folder.path("a/b/"), .taken = taken, .times = kShort};
    };
    const auto start = [&](RunFolder::Taken taken, bool keep) {
        std::vector<std::string> names(3);
        run_thread_ranks(3, 10, [&](ProcessGroup& world) {
            RunFolder run(request(taken), world);
            names[static_cast<size_t>(world.rank())] = run.name();
            if (world.rank() == 0) run.folder().write_atomic("x", "1");
            if (world.rank() == 0 && !keep) std::filesystem::remove(run.folder().path_of("x"));
            if (keep) run.keep();
        });
        EXPECT_EQ(names[1], names[0]);
        EXPECT_EQ(names[2], names[0]);
        return names[0];
    };
    EXPECT_EQ(start(RunFolder::Taken::next, false), folder.path("a/b"));
    EXPECT_FALSE(std::filesystem::exists(folder.path("a")));
    EXPECT_EQ(start(RunFolder::Taken::next, true), folder.path("a/b"));
    EXPECT_EQ(start(RunFolder::Taken::next, true), folder.path("a/b-2"));
    EXPECT_EQ(start(RunFolder::Taken::next, false), folder.path("a/b-3"));
    EXPECT_EQ(start(RunFolder::Taken::enter, true), folder.path("a/b"));
    EXPECT_FALSE(std::filesystem::exists(folder.path("a/b-3")));
    // Shared folders are refused, not numbered.
    run_thread_ranks(1, 10, [&](ProcessGroup& world) {
        expect_contains(
            error_of(ExitCode::output, [&] { RunFolder run({.path = "/tmp", .times = kShort}, world); }),
            "more than one run's files");
    });
    EXPECT_FALSE(std::filesystem::exists("/tmp-2"));
}

TEST(RunFolder, WhatAKilledStartLeavesIsFree) {
    const TemporaryFolder folder;
    std::filesystem::create_directories(folder.path("run/checkpoints"));
    folder.write("run/.lease", "");
    folder.write("run/checkpoints/.lease", "");
    const auto name = [&] {
        std::string name;
        run_thread_ranks(1, 10, [&](ProcessGroup& world) {
            name = RunFolder({.path = folder.path("run"), .times = kShort}, world).name();
        });
        return name;
    };
    EXPECT_EQ(name(), folder.path("run-2"));  // whose lease it is, is not known yet
    std::filesystem::remove(folder.path("run/.lease"));
    EXPECT_EQ(name(), folder.path("run"));
    folder.write("run/checkpoints/step_00000001/manifest.json", "");
    EXPECT_EQ(name(), folder.path("run-2"));
}

}  // namespace
}  // namespace fp8flow
