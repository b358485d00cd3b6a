// SPDX-License-Identifier: MIT
// The output folder: what it refuses, atomic replacement, growing files, and that nothing outside is touched.
#include "model/base/output.h"

#include "model/checkpoint/disk.h"

#include "tests/support/files.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

std::string error_of_out(const std::string& path) {
    return error_of(ExitCode::output, [&] { OutputFolder folder(path); });
}

TEST(OutputFolder, RefusesLinksAndFiles) {
    const TemporaryFolder folder;
    std::filesystem::create_directories(folder.path("real"));
    std::filesystem::create_directory_symlink(folder.path("real"), folder.path("link"));
    folder.write("file", "x");
    expect_contains(error_of_out(""), "--out is empty");
    expect_contains(error_of_out(folder.path("link")), "symbolic link");
    expect_contains(error_of_out(folder.path("link/")), "symbolic link");
    expect_contains(error_of_out(folder.path("file")), folder.path("file"));
    expect_contains(error_of_out(folder.path("file/run")), "cannot create");
    // A link among the parents that leads to a harmless place is fine; path() is the real one.
    EXPECT_EQ(OutputFolder(folder.path("link/run")).path(), folder.path("real/run"));
}

TEST(OutputFolder, RefusesWhereItCannotWrite) {
    if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
    const TemporaryFolder folder;
    std::filesystem::create_directories(folder.path("locked"));
    ::chmod(folder.path("locked").c_str(), 0500);
    expect_contains(error_of_out(folder.path("locked/run")), "cannot create: Permission denied");
    ::chmod(folder.path("locked").c_str(), 0700);
}

TEST(OutputFolder, CreatesParentsAndLeavesNoProbeBehind) {
    const TemporaryFolder folder;
    const OutputFolder out(folder.path("a/b/c/"));
    EXPECT_EQ(out.path(), folder.path("a/b/c"));
    EXPECT_EQ(out.path_of("x.json"), folder.path("a/b/c/x.json"));
    EXPECT_TRUE(names_in(folder.path("a/b/c")).empty());
    const OutputFolder again(folder.path("a/b/c"));  // an existing folder is taken as it is
    const OutputFolder sub = again.subfolder("trace");
    sub.write_atomic("t.json", "1");
    EXPECT_EQ(read_whole(folder.path("a/b/c/trace/t.json")), "1");
    std::filesystem::create_directory_symlink("/tmp", folder.path("a/b/c/away"));
    error_of(ExitCode::output, [&] { again.subfolder("away"); });
}

TEST(OutputFolder, ReplacesAtomically) {
    const TemporaryFolder folder;
    const OutputFolder out(folder.path("run"));
    out.write_atomic("config.yaml", "old");
    out.write_atomic("config.yaml", std::string(1 << 20, 'n'));
    EXPECT_EQ(read_whole(folder.path("run/config.yaml")), std::string(1 << 20, 'n'));
    EXPECT_EQ(names_in(folder.path("run")), (std::set<std::string>{"config.yaml"}));
    // A reader that has the old file open keeps the old text: the file was replaced, not rewritten.
    std::ifstream reader(folder.path("run/config.yaml"));
    out.write_atomic("config.yaml", "newest");
    EXPECT_EQ(reader.get(), 'n');
    // What a dead process of our id left does not stop us.
    folder.write("run/.config.yaml.tmp." + std::to_string(::getpid()), "torn");
    out.write_atomic("config.yaml", "last");
    EXPECT_EQ(read_whole(folder.path("run/config.yaml")), "last");
    EXPECT_EQ(names_in(folder.path("run")), (std::set<std::string>{"config.yaml"}));
}

// One policy for everything that a run makes: what the umask leaves.
TEST(OutputFolder, TheUmaskDecidesPermissions) {
    const TemporaryFolder folder;
    const mode_t before = ::umask(0);
    for (const mode_t mask : {mode_t{0002}, mode_t{0077}}) {
        SCOPED_TRACE(mask);
        ::umask(mask);
        const std::string run = fmt::format("run{}", mask);
        const OutputFolder out(folder.path(run));
        out.write_atomic("whole.json", "{}");
        out.open_lines("lines.jsonl", LineFile::Start::append);
        out.subfolder("hf").write_atomic("model.safetensors", "x");
        checkpoint::Disk disk;
        ASSERT_EQ(disk.make_folder(out.descriptor(), "checkpoints"), 0);
        const int file = disk.create_file(out.descriptor(), "rank_0000.safetensors");
        ASSERT_GE(file, 0);
        disk.close(file);
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path(run)))
            EXPECT_EQ(static_cast<mode_t>(entry.status().permissions()),
                      (entry.is_directory() ? 0777u : 0666u) & ~mask)
                << entry.path();
        EXPECT_EQ(static_cast<mode_t>(std::filesystem::status(folder.path(run)).permissions()),
                  0777u & ~mask);
    }
    ::umask(before);
}

TEST(OutputFolder, RemovesWhatDeadWritersLeft) {
    const TemporaryFolder folder;
    for (const char* kept : {".lease", ".config.yaml.tmp.", ".config.yaml.tmp.12x", "a.tmp.12", ".hidden"})
        folder.write(std::string("run/") + kept, "mine");
    folder.write("run/.config.yaml.tmp.12", "torn");
    folder.write("run/.model-00001-of-00002.safetensors.tmp.4194304", "torn");
    std::filesystem::create_directory(folder.path("run/.folder.tmp.1"));
    const OutputFolder out(folder.path("run"));
    out.remove_leftovers();
    EXPECT_EQ(names_in(folder.path("run")),
              (std::set<std::string>{".lease", ".config.yaml.tmp.", ".config.yaml.tmp.12x", "a.tmp.12",
                                     ".hidden", ".folder.tmp.1"}));
}

TEST(OutputFolder, WritesNothingOutside) {
    const TemporaryFolder folder;
    folder.write("outside.txt", "precious");
    const OutputFolder out(folder.path("run"));
    for (const std::string name :
         {"../outside.txt", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a b", "new\nline"}) {
        expect_contains(error_or_none(ExitCode::output, [&] { out.write_atomic(name, "bad"); }),
                        "is no plain file name");
        EXPECT_THROW(out.open_lines(name, LineFile::Start::append), Error);
        EXPECT_THROW(out.subfolder(name), Error);
    }
    // Links below the folder are replaced (whole files) or refused (growing ones), never followed.
    std::filesystem::create_symlink(folder.path("outside.txt"), folder.path("run/link"));
    error_of(ExitCode::output, [&] { out.open_lines("link", LineFile::Start::truncate); });
    out.write_atomic("link", "mine");
    EXPECT_EQ(read_whole(folder.path("run/link")), "mine");
    EXPECT_EQ(read_whole(folder.path("outside.txt")), "precious");
    // A pipe does not block us, a folder of that name is an error.
    ASSERT_EQ(::mkfifo(folder.path("run/pipe").c_str(), 0600), 0);
    error_of(ExitCode::output, [&] { out.open_lines("pipe", LineFile::Start::append); });
    std::filesystem::create_directories(folder.path("run/folder"));
    error_of(ExitCode::output, [&] { out.write_atomic("folder", "x"); });
    EXPECT_EQ(names_in(folder.path("run")), (std::set<std::string>{"folder", "link", "pipe"}));
    // The folder stays the one that was opened, even if the path now leads elsewhere.
    std::filesystem::rename(folder.path("run"), folder.path("moved"));
    std::filesystem::create_directories(folder.path("run"));
    out.write_atomic("late.txt", "x");
    EXPECT_TRUE(names_in(folder.path("run")).empty());
    EXPECT_EQ(names_in(folder.path("moved")).count("late.txt"), 1u);
}

TEST(OutputFolder, AFailedWriteKeepsTheOldFileAndSaysWhy) {
    const TemporaryFolder folder;
    const OutputFolder out(folder.path("run"));
    out.write_atomic("metrics.json", "old");
    // A limit of file size stands in for a full disk: the write is cut short and then fails.
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    rlimit old_limit{};
    ::getrlimit(RLIMIT_FSIZE, &old_limit);
    rlimit limit = old_limit;
    limit.rlim_cur = 1000;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error =
        error_of(ExitCode::output, [&] { out.write_atomic("metrics.json", std::string(5000, 'x')); });
    ::setrlimit(RLIMIT_FSIZE, &old_limit);
    std::signal(SIGXFSZ, old_handler);
    expect_contains(error, folder.path("run/metrics.json") + ": cannot write 5000 bytes: File too large");
    EXPECT_EQ(read_whole(folder.path("run/metrics.json")), "old");
    EXPECT_EQ(names_in(folder.path("run")), (std::set<std::string>{"metrics.json"}));
}

TEST(LineFile, GrowsByWholeLinesThatAreThereAtOnce) {
    const TemporaryFolder folder;
    const OutputFolder out(folder.path("run"));
    LineFile lines = out.open_lines("metrics.jsonl", LineFile::Start::truncate);
    lines.write_json({{"step", 1}, {"loss", 2.5}});
    EXPECT_EQ(read_whole(folder.path("run/metrics.jsonl")), "{\"loss\":2.5,\"step\":1}\n");
    lines.write_json({{"loss", std::numeric_limits<double>::quiet_NaN()}, {"name", "bad \xff byte"}});
    LineFile moved = std::move(lines);
    moved.write_line("third");
    const std::string text = read_whole(folder.path("run/metrics.jsonl"));
    expect_contains(text, "\"loss\":null");
    expect_contains(text, "third\n");
}

TEST(LineFile, AppendKeepsWholeLinesAndTruncateBeginsAnew) {
    const TemporaryFolder folder;
    const OutputFolder out(folder.path("run"));
    const std::string long_line(10000, 'y');  // longer than a block of the search for the last line end
    const std::vector<std::pair<std::string, std::string>> cases = {{"", ""},
                                                                    {"one\n", "one\n"},
                                                                    {"one\ntwo\n", "one\ntwo\n"},
                                                                    {"one\ntorn", "one\n"},
                                                                    {"torn", ""},
                                                                    {"one\n" + long_line, "one\n"},
                                                                    {long_line, ""},
                                                                    {long_line + "\n", long_line + "\n"}};
    for (const auto& [before, kept] : cases) {
        folder.write("run/log.jsonl", before);
        out.open_lines("log.jsonl", LineFile::Start::append).write_line("next");
        EXPECT_EQ(read_whole(folder.path("run/log.jsonl")), kept + "next\n");
    }
    out.open_lines("log.jsonl", LineFile::Start::truncate).write_line("new");
    EXPECT_EQ(read_whole(folder.path("run/log.jsonl")), "new\n");
}

}  // namespace
}  // namespace fp8flow
