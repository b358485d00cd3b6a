// SPDX-License-Identifier: MIT
// The lock of a folder: one owner, which the kernel forgets when it dies; taking over; file systems without
// locks. Here flock fails with `flock_error` where that is not 0.
#include "model/job/folder_lock.h"

#include "model/base/output.h"
#include "model/base/run_folder.h"
#include "tests/support/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

static std::atomic<int> flock_error{0};
extern "C" int flock(int file, int operation) noexcept {
    if (flock_error == 0) return static_cast<int>(::syscall(SYS_flock, file, operation));
    errno = flock_error;
    return -1;
}

namespace fp8flow {
namespace {

using Attempt = FolderLock::Attempt;
using Holder = FolderLock::Holder;
using std::chrono::milliseconds;

class FolderLockTest : public testing::Test {
protected:
    ~FolderLockTest() override { flock_error = 0; }
    std::unique_ptr<FolderLock> lock(const std::string& command = "train", Holder holder = Holder::keeps) {
        return std::make_unique<FolderLock>(out_.descriptor(), out_.path(), command, holder);
    }
    std::string path() const { return out_.path_of(".lock"); }

    TemporaryFolder folder_;
    OutputFolder out_{folder_.path("run")};
};

TEST_F(FolderLockTest, OneOwnerAndAnEmptyFileStays) {
    auto first = lock("train one"), second = lock("train two");
    EXPECT_EQ(first->try_to_take(), Attempt::taken);
    EXPECT_EQ(second->try_to_take(), Attempt::held);
    expect_contains(second->holder(), "process " + std::to_string(::getpid()) + " on ");
    expect_contains(second->holder(), "(train one)");
    first->check();
    struct stat before {
    }, after{};
    ASSERT_EQ(::stat(path().c_str(), &before), 0);
    first.reset();
    EXPECT_EQ(read_whole(path()), "");
    EXPECT_EQ(second->try_to_take(), Attempt::taken);
    ASSERT_EQ(::stat(path().c_str(), &after), 0);
    EXPECT_EQ(after.st_ino, before.st_ino);
    second.reset();
    EXPECT_EQ(names_in(out_.path()), (std::set<std::string>{".lock"}));
}

// Killed, with the file dated in the future, as by a machine with another clock.
TEST_F(FolderLockTest, OfADeadProcessIsFreeAtOnce) {
    const pid_t child = ::fork();
    if (child == 0) {
        FolderLock leaked(out_.descriptor(), out_.path(), "train");
        ::_exit(leaked.try_to_take() == Attempt::taken ? 0 : 1);
    }
    int state = 0;
    ASSERT_EQ(::waitpid(child, &state, 0), child);
    ASSERT_EQ(state, 0);
    EXPECT_NE(read_whole(path()), "");
    const timespec future{.tv_sec = ::time(nullptr) + 86400, .tv_nsec = 0}, times[2] = {future, future};
    ASSERT_EQ(::utimensat(AT_FDCWD, path().c_str(), times, 0), 0);
    EXPECT_EQ(lock()->try_to_take(), Attempt::taken);
}

TEST_F(FolderLockTest, ATakeoverEndsTheEarlierOwner) {
    auto first = lock("train one"), second = lock("train two", Holder::is_replaced), third = lock();
    ASSERT_EQ(first->try_to_take(), Attempt::taken);
    EXPECT_EQ(second->try_to_take(), Attempt::taken);
    expect_contains(error_of(ExitCode::output, [&] { first->check(); }), "(train two) has taken it");
    first.reset();  // leaves it to the other
    second->check();
    EXPECT_EQ(third->try_to_take(), Attempt::held);
    expect_contains(third->holder(), "(train two)");
    EXPECT_EQ(names_in(out_.path()), (std::set<std::string>{".lock"}));
    std::filesystem::remove(path());
    expect_contains(error_of(ExitCode::output, [&] { second->check(); }), "its .lock was emptied or removed");
}

TEST_F(FolderLockTest, WithoutLocksNothingIsTakenUnlessTakenOver) {
    std::ofstream(path()) << R"({"id":"1","host":"there","pid":7,"command":"train one"})";
    const std::string before = read_whole(path());
    for (const int error : {ENOLCK, EOPNOTSUPP, ENOSYS}) {
        flock_error = error;
        const std::string message = error_of(ExitCode::output, [&] { lock()->try_to_take(); });
        expect_contains(message, "has no locks");
        expect_contains(message, "process 7 on there (train one)");
        expect_contains(message, "--take-over");
        EXPECT_EQ(read_whole(path()), before);
    }
    auto first = lock("train two", Holder::is_replaced), second = lock("train three", Holder::is_replaced);
    EXPECT_EQ(first->try_to_take(), Attempt::taken);
    first->check();
    EXPECT_EQ(second->try_to_take(), Attempt::taken);
    error_of(ExitCode::output, [&] { first->check(); });
    first.reset();
    second->check();
    EXPECT_EQ(names_in(out_.path()), (std::set<std::string>{".lock"}));
}

TEST_F(FolderLockTest, AFolderThatIsGone) {
    const auto ours = lock();
    std::filesystem::remove_all(out_.path());
    EXPECT_EQ(ours->try_to_take(), Attempt::gone);
}

// Threads stand in for processes. An owner that removes its folder's file on the way does not make a second
// one.
TEST_F(FolderLockTest, ManyTryAndOneGetsIt) {
    for (int round = 0; round < 50; ++round) {
        std::vector<std::unique_ptr<FolderLock>> locks;
        for (int i = 0; i < 8; ++i) locks.push_back(lock());
        auto before = lock();
        ASSERT_EQ(before->try_to_take(), Attempt::taken);
        std::atomic<int> owners{0};
        {
            std::vector<std::jthread> threads;
            for (size_t i = 0; i < locks.size(); ++i)
                threads.emplace_back([&, i] {
                    while (owners == 0)
                        if (locks[i]->try_to_take() == Attempt::taken) ++owners;
                });
            before->remove_file();
            before.reset();
        }
        ASSERT_EQ(owners, 1) << round;
    }
}

// In a folder that another process holds, a run waits for a bounded time.
class RunFolderWait : public testing::Test {
protected:
    RunFolder::Request request(milliseconds wait) {
        return {.path = folder_.path("run"), .taken = RunFolder::Taken::enter, .wait = wait};
    }
    void expect_error(ExitCode code, milliseconds wait, const std::string& text) {
        run_thread_ranks(1, 60, [&](ProcessGroup& world) {
            expect_contains(error_of(code, [&] { RunFolder run(request(wait), world); }), text);
        });
    }
    TemporaryFolder folder_;
};

TEST_F(RunFolderWait, IsBoundedAndNamesTheHolder) {
    OutputFolder out(folder_.path("run"));
    FolderLock other(out.descriptor(), out.path(), "train other");
    ASSERT_EQ(other.try_to_take(), Attempt::taken);
    const auto began = std::chrono::steady_clock::now();
    expect_error(ExitCode::output, milliseconds(300), "(train other) is running in it");
    EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(300));
}

TEST(RunFolder, RanksAgreeAndAFailedStartLeavesNothing) {
    const TemporaryFolder folder;
    const auto request = [&](RunFolder::Taken taken) {
        return RunFolder::Request{.path = folder.path("a/b/"), .taken = taken};
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
}

TEST(RunFolder, WhatAKilledStartLeavesIsFree) {
    const TemporaryFolder folder;
    std::filesystem::create_directories(folder.path("run/checkpoints"));
    folder.write("run/.lock", "{}");
    folder.write("run/checkpoints/.lock", "{}");
    const auto name = [&] {
        std::string name;
        run_thread_ranks(1, 10, [&](ProcessGroup& world) {
            name = RunFolder({.path = folder.path("run")}, world).name();
        });
        return name;
    };
    EXPECT_EQ(name(), folder.path("run"));
    folder.write("run/checkpoints/step_00000001/manifest.json", "");
    EXPECT_EQ(name(), folder.path("run-2"));
}

}  // namespace
}  // namespace fp8flow
