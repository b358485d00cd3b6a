// SPDX-License-Identifier: MIT
// TensorBoard's files against bytes that a script in another language computed from the format's description,
// and a whole file read back by a parser of its own.
#include "model/report/tensorboard.h"

#include "tests/support/files.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <vector>

namespace fp8flow {

using namespace report;

namespace {

std::string hex(const std::string& bytes) {
    std::string text;
    for (const char c : bytes) text += fmt::format("{:02x}", static_cast<uint8_t>(c));
    return text;
}

TEST(TensorBoard, BytesOfRecords) {
    EXPECT_EQ(hex(tfrecord(version_event(1700000000.25))),
              "1a00000000000000129bd82d0900001040fc54d94110001a0d627261696e2e4576656e743a3252ef9793");
    EXPECT_EQ(hex(tfrecord(scalar_event(1700000000.25, 300, "lm loss", 2.5f))),
              "1e00000000000000d9dc12320900001040fc54d94110ac022a100a0e0a076c6d206c6f737315000020404c18e906");
}

// The length of a nested message needs two bytes from 128 on.
TEST(TensorBoard, LongTags) {
    const std::string tag(200, 't'), event = scalar_event(0, 1, tag, 1.0f);
    const std::string value = "\x0a\xc8\x01" + tag + std::string("\x15\x00\x00\x80\x3f", 5);
    const std::string summary = "\x0a" + std::string("\xd0\x01") + value;
    EXPECT_EQ(value.size(), 208u);
    EXPECT_EQ(event, std::string("\x09\0\0\0\0\0\0\0\0\x10\x01\x2a", 12) + "\xd3\x01" + summary);
}

struct ReadEvent {
    double wall_time = 0;
    int64_t step = 0;
    std::string version, tag;
    float value = 0;
    bool starts = false;
};

// Reads what this file writes; fails the test for anything else.
class Parser {
public:
    explicit Parser(const std::string& bytes) : bytes_(bytes) {}

    std::vector<ReadEvent> events() {
        std::vector<ReadEvent> events;
        while (at_ < bytes_.size()) {
            const auto length = word<uint64_t>();
            const auto length_crc = word<uint32_t>();
            const std::string event = bytes_.substr(at_, length);
            EXPECT_EQ(event.size(), length);
            at_ += length;
            EXPECT_EQ(length_crc, masked(std::string(reinterpret_cast<const char*>(&length), 8)));
            EXPECT_EQ(word<uint32_t>(), masked(event));
            events.push_back(Parser(event).event());
        }
        return events;
    }

private:
    template <class T> T word() {
        T value{};
        std::memcpy(&value, bytes_.substr(at_, sizeof value).c_str(), sizeof value);
        at_ += sizeof value;
        return value;
    }
    uint64_t varint() {
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const auto byte = word<uint8_t>();
            value |= static_cast<uint64_t>(byte & 0x7F) << shift;
            if (byte < 0x80) return value;
        }
    }
    std::string text() {
        const uint64_t length = varint();
        at_ += length;
        return bytes_.substr(at_ - length, length);
    }
    static uint32_t masked(const std::string& bytes) {
        uint32_t crc = 0xFFFFFFFFu;
        for (const char c : bytes) {
            crc ^= static_cast<uint8_t>(c);
            for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
        }
        crc = ~crc;
        return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
    }
    ReadEvent event() {
        ReadEvent event;
        while (at_ < bytes_.size()) {
            switch (const auto key = word<uint8_t>()) {
                case 0x09: event.wall_time = word<double>(); break;
                case 0x10: event.step = static_cast<int64_t>(varint()); break;
                case 0x1a: event.version = text(); break;
                case 0x3a: event.starts = text() == std::string("\x08\x01"); break;
                case 0x2a: {
                    Parser summary(text());
                    EXPECT_EQ(summary.word<uint8_t>(), 0x0a);
                    Parser value(summary.text());
                    EXPECT_EQ(value.word<uint8_t>(), 0x0a);
                    event.tag = value.text();
                    EXPECT_EQ(value.word<uint8_t>(), 0x15);
                    event.value = value.word<float>();
                    EXPECT_EQ(value.at_, value.bytes_.size());
                    break;
                }
                default: ADD_FAILURE() << "field " << static_cast<int>(key); return event;
            }
        }
        return event;
    }

    std::string bytes_;
    size_t at_ = 0;
};

TEST(TensorBoard, AFileWithMegatronsTags) {
    const TemporaryFolder folder;
    Config config;
    config.training.global_batch_size = 8;
    config.output.moe_per_layer_logging = true;
    std::string path;
    {
        EventFile file(OutputFolder(folder.path("run")).subfolder("tensorboard"), config, 10);
        path = file.path();
        StepResult result{.step = 10,
                          .lm_loss = 2.25,
                          .router_losses = {{"load_balancing_loss", {1.25, 1.75}},
                                            {"global_load_balancing_loss", {1.0, 3.0}}},
                          .grad_norm = 1.5,
                          .learning_rate = 0.125,
                          .seconds = 0.5,
                          .tokens = 1000,
                          .load = {{.layer = 1}, {.layer = 3}}};
        file.step(values_of(config, 1e6, result, 4, 1 << 20));
        file.evaluation(11, 3.0);
    }
    EXPECT_EQ(std::filesystem::path(path).filename().string().substr(0, 20), "events.out.tfevents.");
    const std::vector<ReadEvent> events = Parser(read_whole(path)).events();
    ASSERT_GE(events.size(), 3u);
    EXPECT_EQ(events[0].version, "brain.Event:2");
    EXPECT_TRUE(events[1].starts);  // TensorBoard forgets what earlier files have from here on
    EXPECT_EQ(events[1].step, 11);
    std::map<std::string, std::pair<int64_t, float>> scalars;
    for (size_t i = 2; i < events.size(); ++i) {
        EXPECT_GT(events[i].wall_time, 1.7e9);
        EXPECT_TRUE(scalars.emplace(events[i].tag, std::pair{events[i].step, events[i].value}).second)
            << events[i].tag;
    }
    const std::pair<const char*, std::pair<int64_t, float>> expected[] = {
        {"lm loss", {11, 2.25f}},
        {"learning-rate", {11, 0.125f}},
        {"batch-size", {11, 8.0f}},
        {"grad-norm", {11, 1.5f}},
        {"world-size", {11, 4.0f}},
        {"load_balancing_loss", {11, 1.5f}},
        {"global_load_balancing_loss", {11, 2.0f}},
        {"moe/load_balancing_loss_layer_1", {11, 1.25f}},
        {"moe/load_balancing_loss_layer_3", {11, 1.75f}},
        {"moe/global_load_balancing_loss_layer_3", {11, 3.0f}},
        {"iteration-time", {11, 0.5f}},
        {"mem-max-allocated-bytes", {11, 1048576.0f}},
        {"lm loss validation", {11, 3.0f}},
        {"lm loss validation ppl", {11, std::exp(3.0f)}}};
    for (const auto& [tag, value] : expected) {
        ASSERT_TRUE(scalars.contains(tag)) << tag;
        EXPECT_EQ(scalars[tag].first, value.first) << tag;
        EXPECT_FLOAT_EQ(scalars[tag].second, value.second) << tag;
    }
    EXPECT_TRUE(scalars.contains("throughput"));
    EXPECT_FALSE(scalars.contains("z_loss"));  // not trained with
}

}  // namespace
}  // namespace fp8flow
