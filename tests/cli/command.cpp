// SPDX-License-Identifier: MIT
// Starting, waiting for and ending the program under test; what it prints goes through temporary files.
#include "tests/cli/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fp8flow {

namespace {

constexpr double kDeadline =
    120;  // of a command that a test waits for; generous, because test machines are busy

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string temporary_file() {
    std::string name = (std::filesystem::temp_directory_path() / "fp8flow_out_XXXXXX").string();
    const int file = ::mkstemp(name.data());
    if (file < 0) throw std::runtime_error("mkstemp failed");
    ::close(file);
    return name;
}

CommandResult run(const Texts& arguments, const std::string& cwd) {
    RunningCommand command(arguments, cwd);
    const CommandResult result = command.wait(kDeadline);
    EXPECT_FALSE(result.timed_out) << "no end after " << kDeadline << " s; stdout:\n"
                                   << result.out << "\nstderr:\n"
                                   << result.err;
    return result;
}

}  // namespace

RunningCommand::RunningCommand(const Texts& arguments, const std::string& cwd)
    : out_path_(temporary_file()), err_path_(temporary_file()), started_(now()) {
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ > 0) return;
    ::setpgid(0, 0);
    ::dup2(::open("/dev/null", O_RDONLY), 0);
    ::dup2(::open(out_path_.c_str(), O_WRONLY | O_TRUNC), 1);
    ::dup2(::open(err_path_.c_str(), O_WRONLY | O_TRUNC), 2);
    if (!cwd.empty() && ::chdir(cwd.c_str()) != 0) ::_exit(126);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
}

RunningCommand::~RunningCommand() {
    if (pid_ > 0) {
        ::kill(-pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    ::unlink(out_path_.c_str());
    ::unlink(err_path_.c_str());
}

std::string RunningCommand::out_so_far() const { return read_whole(out_path_); }

std::string RunningCommand::err_so_far() const { return read_whole(err_path_); }

CommandResult RunningCommand::wait(double deadline_seconds) {
    CommandResult result;
    const double deadline = now() + deadline_seconds;
    int state = 0;
    while (::waitpid(pid_, &state, WNOHANG) == 0) {
        if (now() > deadline) {
            result.timed_out = true;
            ::kill(-pid_, SIGKILL);
            ::waitpid(pid_, &state, 0);
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    pid_ = -1;
    result.seconds = now() - started_;
    result.status = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
    result.out = read_whole(out_path_);
    result.err = read_whole(err_path_);
    return result;
}

CommandResult fp8flow_alone(const Texts& arguments, const std::string& cwd) {
    return run(with({FP8FLOW_EXECUTABLE}, arguments), cwd);
}

CommandResult succeeded(CommandResult run) {
    EXPECT_EQ(run.status, 0) << run.out << run.err;
    return run;
}

std::string failure(int status, const CommandResult& run) {
    EXPECT_EQ(run.status, status) << run.out << run.err;
    return run.err;
}

std::string failure(ExitCode code, const CommandResult& run) { return failure(static_cast<int>(code), run); }

void wait_for(const std::function<bool()>& condition) {
    for (int i = 0; i < 6000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_TRUE(condition());
}

Texts mpirun_line(int ranks, const Texts& arguments) {
    return with({FP8FLOW_MPIEXEC, "-n", std::to_string(ranks), "--quiet", "--oversubscribe", "--bind-to",
                 "none", FP8FLOW_EXECUTABLE},
                arguments);
}

Texts with_settings(Texts line, const Texts& settings) {
    for (const std::string& setting : settings) line.insert(line.end(), {"--set", setting});
    return line;
}

Texts test_run(const std::string& command, const std::string& out, const Texts& settings, const Texts& more) {
    return with(
        with_settings({command, config_file("test"), "--backend", "reference", "--out", out}, settings),
        more);
}

Texts with_faults(Texts line, const Texts& environment) {
    const Texts words =
        with(with({"env"}, environment), {"LD_PRELOAD=" FP8FLOW_BINARY_DIR "/tests/libfp8flow_faults.so",
                                          "ASAN_OPTIONS=verify_asan_link_order=0:detect_leaks=0"});
    line.insert(std::find(line.begin(), line.end(), std::string(FP8FLOW_EXECUTABLE)), words.begin(),
                words.end());
    return line;
}

CommandResult fp8flow_on_ranks(int ranks, const Texts& arguments, const std::string& cwd) {
    return run(mpirun_line(ranks, arguments), cwd);
}

std::vector<int> ranks_below(int mpirun) {
    std::vector<int> ranks;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
        const std::string name = entry.path().filename().string();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string stat = read_whole(entry.path() / "stat");
        const size_t end = stat.rfind(") ");  // "pid (name) state parent ..."
        if (end == std::string::npos || stat.find("(fp8flow)") == std::string::npos) continue;
        if (std::stoi(stat.substr(end + 4)) == mpirun) ranks.push_back(std::stoi(name));
    }
    return ranks;
}

std::string config_file(const std::string& name) {
    return std::string(FP8FLOW_SOURCE_DIR "/configs/") + name + ".yaml";
}

nlohmann::json read_json(const std::string& path) { return nlohmann::json::parse(read_whole(path)); }

Texts lines_of(const std::string& text) {
    std::istringstream stream(text);
    Texts lines;
    for (std::string line; std::getline(stream, line);) {
        if (!line.empty() && line.back() == '\r') line.pop_back();
        lines.push_back(line);
    }
    return lines;
}

std::vector<nlohmann::json> metrics_of(const std::string& out, const std::string& type) {
    std::vector<nlohmann::json> records;
    for (const std::string& line : lines_of(read_whole(out + "/metrics.jsonl"))) {
        auto record = nlohmann::json::parse(line);
        const std::string own = record.value("type", "none");
        EXPECT_TRUE(own == "run" || own == "step" || own == "evaluation") << line;
        EXPECT_TRUE(record.contains("iteration")) << line;
        for (const auto& [name, value] : record.items()) {
            EXPECT_EQ(name.find_first_of(" /-.,"), std::string::npos) << name;
            EXPECT_FALSE(value.is_object()) << name;
        }
        if (type.empty() ? own != "run" : own == type) records.push_back(std::move(record));
    }
    return records;
}

std::vector<int64_t> events_of(const std::string& folder, const std::string& tag) {
    std::vector<int64_t> steps;
    std::set<std::string> files;  // in the order in which they were begun
    for (const auto& entry : std::filesystem::directory_iterator(folder)) files.insert(entry.path());
    for (const std::string& file : files) {
        const std::string bytes = read_whole(file);
        const std::string name = std::string(1, static_cast<char>(tag.size())) + tag + '\x15';
        for (size_t at = 0; at + 16 <= bytes.size();) {
            uint64_t length = 0, step = 0;
            std::memcpy(&length, bytes.data() + at, sizeof length);
            const std::string event = bytes.substr(at + 12, length);
            size_t digit = 10;  // after the time and the key of the step
            for (int shift = 0;; shift += 7) {
                const auto byte = static_cast<uint8_t>(event.at(digit++));
                step |= static_cast<uint64_t>(byte & 0x7F) << shift;
                if (byte < 0x80) break;
            }
            const auto own = static_cast<int64_t>(step);
            // a start: TensorBoard forgets what earlier files have from there on
            if (event.substr(digit) == "\x3a\x02\x08\x01")
                std::erase_if(steps, [&](int64_t earlier) { return earlier >= own; });
            if (event.find(name) != std::string::npos) steps.push_back(own);
            at += 16 + length;
        }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

std::vector<double> losses_of(const std::string& out) {
    std::vector<double> losses;
    for (const nlohmann::json& record : metrics_of(out, "step")) losses.push_back(record.at("lm_loss"));
    return losses;
}

Texts error_lines(const std::string& text) {
    Texts errors;
    for (const std::string& line : lines_of(text))
        if (line.rfind("fp8flow: error:", 0) == 0) errors.push_back(line);
    return errors;
}

}  // namespace fp8flow
