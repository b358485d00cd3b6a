// SPDX-License-Identifier: MIT
// Runs a fuzz target without libFuzzer: every seed, then mutations of them, the same ones every time. An
// input that ends the process is written to crash.bin.  Usage: TARGET [-runs=N] [-seed=S]
// [-max_len=BYTES] SEEDS...   (files and folders; libFuzzer knows these options too)
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::string;
constexpr double kLongestSeconds = 5;

const Input* running = nullptr;

void leave_input_behind() {
    if (running == nullptr) return;
    if (std::FILE* file = std::fopen("crash.bin", "wb")) {
        std::fwrite(running->data(), 1, running->size(), file);
        std::fclose(file);
        std::fprintf(stderr, "the input of %zu bytes that did this is crash.bin\n", running->size());
    }
}

// Seconds taken. The bytes are in a buffer of exactly their size, so that a read past them is noticed.
double run(const Input& input) {
    running = &input;
    const auto buffer = std::make_unique<uint8_t[]>(input.size());
    std::copy(input.begin(), input.end(), buffer.get());
    const auto start = std::chrono::steady_clock::now();
    LLVMFuzzerTestOneInput(buffer.get(), input.size());
    running = nullptr;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Mutator {
public:
    Mutator(std::vector<Input> seeds, uint64_t seed, size_t max_length)
        : seeds_(std::move(seeds)), random_(seed), max_length_(max_length) {}

    Input next() {
        Input input = seeds_[below(seeds_.size())];
        for (size_t i = 1 + below(6); i > 0; --i) change(input);
        if (input.size() > max_length_) input.resize(max_length_);
        return input;
    }

private:
    size_t below(size_t n) { return n == 0 ? 0 : static_cast<size_t>(random_() % n); }

    void change(Input& input) {
        // what readers of numbers and of brackets trip over
        static const std::vector<Input> words = {"0",
                                                 "-1",
                                                 "1e9",
                                                 "18446744073709551615",
                                                 "9223372036854775807",
                                                 "4294967296",
                                                 "{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 "\"",
                                                 ",",
                                                 ":",
                                                 "null",
                                                 "true",
                                                 "\\u0000",
                                                 "../",
                                                 "\n",
                                                 std::string(1, '\0'),
                                                 "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"};
        const size_t at = below(input.size() + 1), length = std::min(below(16), input.size() - at);
        switch (below(7)) {
            case 0:
                if (at < input.size()) input[at] = static_cast<char>(random_());
                break;
            case 1:
                if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
                break;
            case 2: input.erase(at, length); break;
            case 3: input.insert(at, input.substr(below(input.size() + 1), below(32))); break;
            case 4: input.replace(at, length, words[below(words.size())]); break;
            case 5: input.resize(at); break;
            case 6: {
                const Input& other = seeds_[below(seeds_.size())];
                input = input.substr(0, at) + other.substr(below(other.size() + 1));
                break;
            }
        }
    }

    std::vector<Input> seeds_;
    std::mt19937_64 random_;
    size_t max_length_;
};

Input read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Input> read_seeds(const std::string& path) {
    std::vector<std::filesystem::path> files;
    if (std::filesystem::is_directory(path)) {
        for (const auto& entry : std::filesystem::directory_iterator(path))
            if (entry.is_regular_file()) files.push_back(entry.path());
    } else {
        files.emplace_back(path);
    }
    std::sort(files.begin(), files.end());
    std::vector<Input> seeds;
    for (const auto& file : files) seeds.push_back(read_file(file));
    return seeds;
}

}  // namespace

int main(int argc, char** argv) {
    __sanitizer_set_death_callback(leave_input_behind);
    std::set_terminate([] {
        leave_input_behind();
        std::abort();
    });
    int64_t runs = 10000;
    uint64_t seed = 1;
    size_t max_length = 4096;
    std::vector<Input> seeds;
    for (int i = 1; i < argc; ++i) {
        const std::string text = argv[i];
        const auto value = [&] { return std::stoull(text.substr(text.find('=') + 1)); };
        if (text.starts_with("-runs="))
            runs = static_cast<int64_t>(value());
        else if (text.starts_with("-seed="))
            seed = value();
        else if (text.starts_with("-max_len="))
            max_length = static_cast<size_t>(value());
        else
            for (Input& input : read_seeds(text)) seeds.push_back(std::move(input));
    }
    if (seeds.empty()) {
        std::fprintf(stderr, "no seeds\n");
        return 2;
    }
    double longest = 0, all = 0;
    const auto account = [&](double seconds) {
        longest = std::max(longest, seconds);
        all += seconds;
    };
    for (const Input& input : seeds) account(run(input));
    Mutator mutator(seeds, seed, max_length);
    for (int64_t i = 0; i < runs; ++i) account(run(mutator.next()));
    std::printf("%zu seeds and %lld mutations in %.1f s, the longest %.3f s\n", seeds.size(),
                static_cast<long long>(runs), all, longest);
    return longest > kLongestSeconds ? 1 : 0;
}
